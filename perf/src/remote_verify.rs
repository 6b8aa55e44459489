//! Verify at the target that holds the data, against Verify of the same namespace by reading it.
//!
//! Claims: at least 6 times as fast on a null or memory device, and at least 1000 times fewer bytes moved. Both ways
//! check the same tags of the same blocks, 8 requests at a time, without digests; the reader checks them here. Bytes moved are
//! payload, and for each command the 96 bytes of its capsules.

use std::rc::Rc;

use anyhow::Context;
use sealblock_block::{Abilities, Ability, Device, Expectations, Gate, Request};
use sealblock_media_nvme_tcp::NvmeTcpDevice;
use sealblock_runtime_reactor::{Config, Reactor};

use crate::devices::Lacking;
use crate::load::{Stopwatch, in_pieces};
use crate::options::{Protection, RemoteOptions};
use crate::remote::{self, NQN, Served, Store, View};
use crate::report::Spread;
use crate::setup::{self, Prepared, Scratch};

/// How many times faster, and how many times fewer bytes.
const FASTER: f64 = 6.0;
const FEWER: f64 = 1000.0;
/// Requests in flight.
pub const DEPTH: usize = 8;
/// Blocks of 4 KiB that one request is about, if the device takes as many.
pub const OFFLOADED_BLOCKS: u64 = 4096;
/// Blocks of 4 KiB that one request is about, where they are read.
pub const READ_BLOCKS: u64 = 256;
/// A command's capsule of 72 bytes and its response of 24.
const CAPSULES_BYTES: u64 = 96;

/// A device that does not verify, so that its gate reads.
pub type Reading = Gate<Lacking<NvmeTcpDevice>>;

/// The same device, read by this host instead of verified by itself.
pub fn by_reading(device: NvmeTcpDevice) -> Reading {
    let left = |abilities| Abilities { verify: Ability::Absent, ..abilities };
    Gate::new("emulated", Lacking { inner: device, left })
}

/// One Verify of everything.
pub struct Pass {
    /// How long it took.
    pub seconds: f64,
    /// Bytes of payload and capsules that crossed.
    pub bytes_moved: u64,
    /// Bytes of payload that crossed.
    pub payload_bytes: u64,
}

/// Measures everything and prints it.
pub fn run(options: RemoteOptions) -> anyhow::Result<()> {
    for device in &options.devices {
        for &guard in &options.guards {
            let (store, _scratch) = store(&options, device, guard)?;
            let served = Served { store, protection: guard, blocks: options.blocks() };
            let (_target, serving) = remote::start(&options, options.spin_us, &[served])?;
            let (_cores, host) = remote::core(options.host_cpu, options.spin_us)?;
            let (rounds, address) = (options.rounds, serving.address);
            let bench = remote::wait(host.call(move || bench(rounds, address)))?;
            let rounds = bench.context("the host's core is gone")??;
            let what = format!("{device}, guard {}, {}", guard.name(), options.size);
            // A volume is as fast as its file; nothing is claimed of that here.
            let threshold = (device != "volume").then_some(FASTER);
            print(&what, options.blocks() << 12, &rounds, threshold);
        }
    }
    Ok(())
}

fn store(options: &RemoteOptions, device: &str, guard: Protection) -> anyhow::Result<(Store, Option<Scratch>)> {
    if device != "volume" {
        return Ok((remote::store(device)?, None));
    }
    let (name, blocks) = (format!("remote verify {}", guard.name()), options.blocks());
    let filled = setup::filled_volume(&options.dir, &name, blocks, guard, Prepared::Reserved);
    let (scratch, _) = Reactor::new(Config::default())?.block_on(filled)?;
    Ok((Store::CachedVolume(scratch.0.clone()), Some(scratch)))
}

async fn bench(rounds: u32, address: std::net::SocketAddr) -> anyhow::Result<Vec<(Pass, Pass)>> {
    let device = remote::connect(address, NQN, Some(remote::nsid(0, View::Tagged)), false).await?;
    let offloaded = Rc::new(Gate::new("offloaded", device.clone()));
    let emulated = Rc::new(by_reading(device.clone()));
    let mut measured = Vec::new();
    // The first round brings a volume's file into memory.
    for round in 0..=rounds {
        let one = pass(&*offloaded, &device, OFFLOADED_BLOCKS, DEPTH).await?;
        let other = pass(&*emulated, &device, READ_BLOCKS, DEPTH).await?;
        if round > 0 {
            measured.push((one, other));
        }
    }
    device.close().await;
    Ok(measured)
}

/// Verifies all of a device, `piece` blocks and so many requests at a time. `device` is what the gate stands before.
pub async fn pass<D: Device>(gate: &D, device: &NvmeTcpDevice, piece: u64, in_flight: usize) -> anyhow::Result<Pass> {
    let geometry = gate.geometry();
    geometry.protection.context("there are tags to verify")?;
    let capacity = geometry.capacity_blocks;
    let before = device.counters();
    let watch = Stopwatch::start();
    in_pieces(capacity, piece, in_flight, async |extent| {
        gate.execute(Request::verify(extent, Expectations::NONE)).await?;
        Ok(())
    })
    .await?;
    let seconds = watch.stop(1, 0).seconds;
    let after = device.counters();
    let payload_bytes = after.received_bytes - before.received_bytes + after.sent_bytes - before.sent_bytes;
    let bytes_moved = payload_bytes + (after.commands - before.commands) * CAPSULES_BYTES;
    Ok(Pass { seconds, bytes_moved, payload_bytes })
}

fn print(what: &str, bytes: u64, rounds: &[(Pass, Pass)], threshold: Option<f64>) {
    let speed = |pass: &Pass| bytes as f64 / pass.seconds / 1e9;
    let offloaded = Spread::of(rounds.iter().map(|round| speed(&round.0))).median;
    let emulated = Spread::of(rounds.iter().map(|round| speed(&round.1))).median;
    let faster = Spread::of(rounds.iter().map(|round| round.1.seconds / round.0.seconds));
    let fewer = Spread::of(rounds.iter().map(|round| round.1.bytes_moved as f64 / round.0.bytes_moved as f64)).median;
    let payload = rounds.iter().map(|round| round.0.payload_bytes).max().unwrap_or(0);
    println!("{what}");
    println!(
        "  at the target {offloaded:6.2} GB/s, by reading {emulated:6.2} GB/s: {:6.1} times as fast [{:.1} .. {:.1}]{}",
        faster.median,
        faster.least,
        faster.most,
        threshold.map_or(String::new(), |threshold| times(faster.median, threshold))
    );
    println!("  {fewer:.0} times fewer bytes moved ({payload} bytes of payload){}", times(fewer, FEWER));
}

fn times(ratio: f64, threshold: f64) -> String {
    match ratio >= threshold {
        true => format!("  threshold {threshold:.0}: kept"),
        false => format!("  threshold {threshold:.0}: MISSED by {:.1}", threshold - ratio),
    }
}
