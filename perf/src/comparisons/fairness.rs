//! The latency of one client while others flood the same protected volume, which is in a file.
//!
//! Threshold: because of the others' requests, no request waits longer than 20 times its latency without them, or 100
//! ms. A neighbour reads, writes or flushes one small block after another, first alone and then during each flood.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use fastrand::Rng;
use sealblock_block::{Device, Durability, Expectations, Request};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_reactor::{Config, Reactor, sleep, spawn};
use sealblock_units::Extent;

use super::options::FileOptions;
use crate::load;
use crate::setup::{self, Prepared, Protection};

/// The limit for a wait, whatever the latency without floods is.
const MAX_DELAY: Duration = Duration::from_millis(100);
/// The limit for a wait, as a multiple of the latency without floods.
const MAX_RATIO: u32 = 20;
/// Blocks of a request of a flood: 1 MiB.
const FLOOD_BLOCKS: u64 = 256;
/// The pause of the neighbour between two requests.
const REST: Duration = Duration::from_millis(1);
/// How long a flood runs before the neighbour is measured.
const RAMP: Duration = Duration::from_millis(300);

/// The requests of a flood.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flood {
    Nothing,
    /// Write Zeroes that may unmap, and writes of the same blocks in between, so that there are data to zero.
    Zero,
    /// Write Zeroes that keep the space.
    ZeroKept,
    /// Discards, and writes of the same blocks in between.
    Discard,
    Write,
    Read,
    Verify,
    Flush,
}

const FLOODS: [(Flood, u64, &str); 8] = [
    (Flood::Nothing, 0, "quiet"),
    (Flood::Zero, 64, "64 Write Zeroes of 1 MiB"),
    (Flood::ZeroKept, 64, "64 Write Zeroes of 1 MiB, space kept"),
    (Flood::Discard, 64, "64 deallocations of 1 MiB"),
    (Flood::Write, 64, "64 writes of 1 MiB"),
    (Flood::Read, 64, "64 reads of 1 MiB"),
    (Flood::Verify, 16, "16 verifies of 1 MiB"),
    (Flood::Flush, 16, "16 writers that flush"),
];

/// The request of the neighbour.
#[derive(Clone, Copy, Debug)]
enum Neighbour {
    Read,
    Write,
    Flush,
}

const NEIGHBOURS: [(Neighbour, &str); 3] =
    [(Neighbour::Read, "read 4 KiB"), (Neighbour::Write, "write 4 KiB"), (Neighbour::Flush, "write 4 KiB and flush")];

/// Measures everything and prints it.
pub fn run(options: &FileOptions) -> anyhow::Result<()> {
    println!("{} of 4096-byte blocks; the median and the worst wait of a neighbour", options.size);
    for &guard in &options.guards {
        println!("| beside, {} | {} |", guard.name(), NEIGHBOURS.map(|(_, name)| name).join(" | "));
        println!("| --- | --- | --- | --- |");
        let reactor = Reactor::new(Config::default())?;
        reactor.block_on(all(options, guard))?;
    }
    Ok(())
}

async fn all(options: &FileOptions, guard: Protection) -> anyhow::Result<()> {
    let mut quiet = [Duration::ZERO; NEIGHBOURS.len()];
    for (flood, depth, name) in FLOODS {
        if flood != Flood::Nothing && !name.contains(&options.only) {
            continue;
        }
        let mut cells = Vec::new();
        for (index, (neighbour, _)) in NEIGHBOURS.into_iter().enumerate() {
            // Each cell has a new volume, so that one flood does not affect the next.
            let waits = one(options, guard, flood, depth, neighbour).await?;
            let (median, worst) = (waits[waits.len() / 2], waits[waits.len() - 1]);
            if flood == Flood::Nothing {
                quiet[index] = median;
            }
            let threshold = MAX_DELAY.max(quiet[index] * MAX_RATIO);
            let verdict = if worst <= threshold { "" } else { " **missed**" };
            cells.push(format!("{:.2} / {:.1} ms{verdict}", ms(median), ms(worst)));
        }
        println!("| {name} | {} |", cells.join(" | "));
    }
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The neighbour's waits in ascending order.
async fn one(
    options: &FileOptions,
    guard: Protection,
    flood: Flood,
    depth: u64,
    neighbour: Neighbour,
) -> anyhow::Result<Vec<Duration>> {
    let scratch = setup::new_path(&options.dir, "fairness")?;
    setup::new_volume(&scratch.0, options.blocks(), guard, Prepared::Reserved).await?;
    let volume = setup::open_volume(&scratch.0, setup::Turn::endless()).await?;
    let gate = volume.device();
    load::drive(Rc::clone(&gate), setup::FILL, load::Until::Asked(options.blocks() / setup::FILL.blocks), 1).await?;
    let over = Rc::new(Cell::new(false));
    let flooders: Vec<_> =
        (0..depth).map(|number| spawn(flooder(Rc::clone(&gate), flood, number, Rc::clone(&over)))).collect();
    if depth > 0 {
        sleep(RAMP).await;
    }
    let waits = neighbour_waits(&*gate, neighbour, Duration::from_secs_f64(options.seconds)).await?;
    over.set(true);
    for flooder in flooders {
        flooder.await.context("a flooder was aborted")??;
    }
    drop(gate);
    volume.close().await?;
    Ok(waits)
}

async fn neighbour_waits<D: Device>(device: &D, neighbour: Neighbour, time: Duration) -> anyhow::Result<Vec<Duration>> {
    let blocks = device.geometry().capacity_blocks;
    let (mut waits, mut rng, begun) = (Vec::new(), Rng::with_seed(7), Instant::now());
    while begun.elapsed() < time || waits.is_empty() {
        let extent = Extent::from_raw(rng.u64(..blocks), 1)?;
        let asked = Instant::now();
        match neighbour {
            Neighbour::Read => _ = device.execute(read(device, extent)).await?,
            Neighbour::Write => _ = device.execute(write(device, extent)).await?,
            Neighbour::Flush => {
                device.execute(write(device, extent)).await?;
                device.execute(Request::flush()).await?;
            }
        }
        waits.push(asked.elapsed());
        sleep(REST).await;
    }
    waits.sort_unstable();
    Ok(waits)
}

/// Sends requests until the flood ends.
async fn flooder<D: Device>(device: Rc<D>, flood: Flood, number: u64, over: Rc<Cell<bool>>) -> anyhow::Result<()> {
    let blocks = device.geometry().capacity_blocks;
    let mut rng = Rng::with_seed(number);
    let durability = Durability::Volatile;
    while !over.get() {
        let place = rng.u64(..blocks / FLOOD_BLOCKS) * FLOOD_BLOCKS;
        let extent = Extent::from_raw(place, FLOOD_BLOCKS)?;
        for operation in operations(&*device, flood, extent, durability) {
            device.execute(operation).await?;
        }
    }
    Ok(())
}

fn operations<D: Device>(device: &D, flood: Flood, extent: Extent, durability: Durability) -> Vec<Request> {
    let zeroes = |may_unmap| Request::write_zeroes(extent, may_unmap, durability);
    match flood {
        Flood::Nothing => Vec::new(),
        Flood::Zero => vec![zeroes(true), write(device, extent)],
        Flood::ZeroKept => vec![zeroes(false)],
        Flood::Discard => vec![Request::discard([extent]), write(device, extent)],
        Flood::Write => vec![write(device, extent)],
        Flood::Read => vec![read(device, extent)],
        Flood::Verify => vec![Request::verify(extent, Expectations::NONE)],
        Flood::Flush => {
            vec![write(device, Extent::from_raw(extent.start().get(), 1).unwrap_or(extent)), Request::flush()]
        }
    }
}

fn read<D: Device>(_: &D, extent: Extent) -> Request {
    Request::read(extent, Expectations::NONE)
}

fn write<D: Device>(device: &D, extent: Extent) -> Request {
    thread_local! {
        static PAYLOAD: sealblock_runtime_memory::Slice = load::payload();
    }
    let geometry = device.geometry();
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
    let data = PAYLOAD.with(|payload| payload.slice(..extent.bytes(geometry.block_size) as usize));
    let data = Sealed::seal(data, geometry.block_size, geometry.protection, &tags);
    Request::write(extent, data, Durability::Volatile)
}
