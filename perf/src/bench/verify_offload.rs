//! The claim `verify-offload`: Verify at the target that holds the data, compared with Verify of the same blocks by
//! reading them.
//!
//! Host and target are ours, over NVMe/TCP on loopback, each on one core. Both ways check the guard and the reference
//! tag of every block of one namespace, at the target or at the host. Eight readers and one reader read in requests of
//! 1 MiB each; Verify uses commands of up to 16 MiB, eight and one at a time. Each way of reading is a baseline, so
//! each has two turns in a round.
//!
//! CPU time is that of the host's thread and of the target's thread. An idle end polls for 50 us before it sleeps, as
//! in `sealblock serve`; this is included. Bytes moved are the payload plus 96 bytes of capsules for each command.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use sealblock_block::{
    Abilities, Ability, Device, Expectations, Gate, Geometry, Outcome as BlockOutcome, Request, RequestKind,
};
use sealblock_media_nvme_tcp::NvmeTcpDevice;
use sealblock_runtime_reactor::{Config, CoreHandle, Reactor};
use sealblock_units::ByteCount;

use super::machine::memory_bytes;
use super::outcome::{
    Axis, Cell, Claim, Defaults, Drawing, Outcome, Plot, Progress, Published, Scale, Series, Table, ThresholdLine,
};
use super::verdict::{Round, Threshold, Verdict};
use crate::cpu::{core_cpu, thread_cpu, two_cpus};
use crate::load::{Stopwatch, in_pieces};
use crate::remote::{self, NQN, SPIN_US, Served, Store, View};
use crate::report::Spread;
use crate::setup::{self, Prepared, Protection, Scratch, Turn};

/// The claimed speed-up, on media that cost the target almost nothing or only a read of memory.
const FASTER: f64 = 6.0;
/// The claimed reduction of bytes.
const FEWER: f64 = 1000.0;
/// Requests in flight.
const DEPTH: usize = 8;
/// Blocks of 4 KiB of one request, if the device supports that many.
const OFFLOADED_BLOCKS: u64 = 4096;
/// Blocks of 4 KiB of one read.
const READ_BLOCKS: u64 = 256;
/// A command's capsule of 72 bytes and its response of 24.
const CAPSULES_BYTES: u64 = 96;
const GIB: f64 = (1_u64 << 30) as f64;

/// The claim.
pub const CLAIM: Claim = Claim {
    name: "verify-offload",
    sentence: "Verify at the device that holds the data is at least 6 times as fast as reading the blocks over the network.",
    published: &[Published {
        figure: "500 GB over nvme-loop on null_blk: 2m04s with Verify, 12m19s by reading, 5.97 times",
        source: "cover letter of the patches that proposed REQ_OP_VERIFY for the Linux block layer in 2021",
    }],
    defaults: Defaults { size: ByteCount::new(256 << 20), seconds: 0.3, rounds: 5 },
    makes_files: true,
    measure,
};

/// The target's storage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Medium {
    Null,
    Memory,
    MemoryVolume,
    FileVolume,
}

impl Medium {
    const ALL: [Medium; 4] = [Medium::Null, Medium::Memory, Medium::MemoryVolume, Medium::FileVolume];

    const fn name(self) -> &'static str {
        match self {
            Medium::Null => "null",
            Medium::Memory => "memory",
            Medium::MemoryVolume => "volume in memory",
            Medium::FileVolume => "volume in a file",
        }
    }

    /// True if the claim covers it. A volume is not covered, because it is only as fast as its medium.
    const fn has_threshold(self) -> bool {
        matches!(self, Medium::Null | Medium::Memory)
    }
}

/// A way to verify all blocks.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    is_offloaded: bool,
    in_flight: usize,
}

const fn way(name: &'static str, is_offloaded: bool, in_flight: usize) -> Way {
    Way { name, is_offloaded, in_flight }
}

const WAYS: [Way; 6] = [
    way("reading, 8 readers", false, DEPTH),
    way("reading, 8 readers, again", false, DEPTH),
    way("reading, 1 reader", false, 1),
    way("reading, 1 reader, again", false, 1),
    way("Verify, 8 at a time", true, DEPTH),
    way("Verify, 1 at a time", true, 1),
];
/// Each baseline, its second turn, and the way that is compared with it.
const COMPARED: [(usize, usize, usize, &str); 2] =
    [(0, 1, 4, "Verify, 8 at a time, against 8 readers"), (2, 3, 5, "Verify, 1 at a time, against 1 reader")];

/// The result of a turn, for each GiB of data.
#[derive(Clone, Copy)]
struct Turned {
    seconds: f64,
    host_cpu: f64,
    target_cpu: f64,
    moved_bytes: f64,
}

/// A device with fewer abilities, so that its gate must emulate them.
struct Lacking<D> {
    /// The device.
    inner: D,
    /// The remaining abilities.
    left: fn(Abilities) -> Abilities,
}

impl<D: Device> Device for Lacking<D> {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn abilities(&self) -> Abilities {
        (self.left)(self.inner.abilities())
    }

    async fn execute(&self, request: Request) -> BlockOutcome {
        self.inner.execute(request).await
    }
}

/// A device that does not verify, so that its gate reads the data.
type Reading = Gate<Lacking<NvmeTcpDevice>>;

/// The same device; this host reads, instead of the target verifying.
fn by_reading(device: NvmeTcpDevice) -> Reading {
    let left = |abilities: Abilities| abilities.with([RequestKind::Verify], Ability::Absent);
    Gate::new("emulated", Lacking { inner: device, left })
}

/// One Verify of all blocks.
struct Pass {
    /// Its duration.
    seconds: f64,
    /// Transferred bytes of payload and capsules.
    bytes_moved: u64,
}

/// Verifies a whole device, `piece` blocks at a time with this number of requests in flight. `device` is the device
/// behind the gate.
async fn pass<D: Device>(gate: &D, device: &NvmeTcpDevice, piece: u64, in_flight: usize) -> anyhow::Result<Pass> {
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
    Ok(Pass { seconds, bytes_moved })
}

fn measure(scale: &Scale, progress: &Progress) -> anyhow::Result<Outcome> {
    let mut outcome = Outcome::default();
    let room = memory_bytes().unwrap_or(u64::MAX) / 2;
    ensure!(
        scale.size.get() <= room,
        "a device of {} in memory is more than half of this machine's memory",
        scale.size
    );
    let (host_cpu, target_cpu) = two_cpus();
    if host_cpu == target_cpu {
        outcome.notes.push("Host and target share one CPU: this process may use no other.".to_owned());
    }
    let mut media = Vec::new();
    for medium in Medium::ALL {
        if medium == Medium::FileVolume && !setup::has_direct_io(&scale.dir)? {
            let dir = scale.dir.display();
            outcome
                .notes
                .push(format!("No volume in a file: {dir} has no direct I/O, and the page cache is no medium."));
            continue;
        }
        let (store, _scratch) = store(medium, scale)?;
        let served = Served { store, protection: Protection::CRC32C, blocks: scale.blocks() };
        let (_target, serving) = remote::start_on(target_cpu, SPIN_US, &[served])?;
        let (_cores, host) = remote::core(host_cpu, SPIN_US)?;
        let (scale, progress) = (scale.clone(), progress.clone());
        let turns = host.call(move || rounds(medium, scale, progress, serving));
        let turns = remote::wait(turns)?.context("the host's core is gone")??;
        outcome.tables.push(table(medium, &turns));
        outcome.verdicts.extend(verdicts(medium, &turns));
        media.push((medium, turns));
    }
    outcome.plots = plots(&media);
    Ok(outcome)
}

fn store(medium: Medium, scale: &Scale) -> anyhow::Result<(Store, Option<Scratch>)> {
    Ok(match medium {
        Medium::Null => (Store::Null, None),
        Medium::Memory => (Store::Memory, None),
        Medium::MemoryVolume => (Store::MemoryVolume, None),
        Medium::FileVolume => {
            let scratch = filled_volume(&scale.dir, scale.blocks())?;
            (Store::Volume(scratch.0.clone(), Turn::endless()), Some(scratch))
        }
    })
}

fn filled_volume(dir: &Path, blocks: u64) -> anyhow::Result<Scratch> {
    let filled = setup::filled_volume(dir, "verify offload", blocks, Protection::CRC32C, Prepared::Reserved);
    Ok(Reactor::new(Config::default())?.block_on(filled)?.0)
}

/// Both ways for one namespace.
struct Host {
    device: NvmeTcpDevice,
    offloaded: Gate<NvmeTcpDevice>,
    reading: Reading,
    target: CoreHandle,
}

async fn rounds(
    medium: Medium,
    scale: Scale,
    progress: Progress,
    serving: remote::Serving,
) -> anyhow::Result<Vec<Vec<Turned>>> {
    let device = remote::connect(serving.address, NQN, Some(remote::nsid(0, View::Tagged)), false).await?;
    let host = Host {
        offloaded: Gate::new("offloaded", device.clone()),
        reading: by_reading(device.clone()),
        target: serving.core,
        device,
    };
    // Loads tables of volumes and the code of both ways.
    for way in [WAYS[0], WAYS[4]] {
        host.turn(way, 0.0).await?;
    }
    let turn = async |way: usize, _| host.turn(WAYS[way], scale.seconds).await;
    let turns = progress.rounds(medium.name(), scale.rounds, WAYS.len(), turn).await;
    host.device.close().await;
    turns
}

impl Host {
    /// Passes over all blocks, for at least this many seconds and at least once.
    async fn turn(&self, way: Way, seconds: f64) -> anyhow::Result<Turned> {
        let target_before = core_cpu(&self.target).await?;
        let (host_before, watch) = (thread_cpu(), Instant::now());
        let (mut passes, mut taken, mut moved) = (0_u64, 0.0, 0);
        while passes == 0 || watch.elapsed().as_secs_f64() < seconds {
            let pass = match way.is_offloaded {
                true => pass(&self.offloaded, &self.device, OFFLOADED_BLOCKS, way.in_flight).await?,
                false => pass(&self.reading, &self.device, READ_BLOCKS, way.in_flight).await?,
            };
            passes += 1;
            taken += pass.seconds;
            moved += pass.bytes_moved;
        }
        let host_cpu = thread_cpu() - host_before;
        let target_cpu = core_cpu(&self.target).await? - target_before;
        let gib = (passes * self.device_bytes()) as f64 / GIB;
        Ok(Turned {
            seconds: taken / gib,
            host_cpu: host_cpu / gib,
            target_cpu: target_cpu / gib,
            moved_bytes: moved as f64 / gib,
        })
    }

    fn device_bytes(&self) -> u64 {
        use sealblock_block::Device;
        self.device.geometry().capacity_bytes()
    }
}

fn spread(turns: &[Vec<Turned>], way: usize, of: impl Fn(&Turned) -> f64) -> Spread {
    Spread::of(turns.iter().map(|round| of(&round[way])))
}

fn table(medium: Medium, turns: &[Vec<Turned>]) -> Table {
    let title = format!("Verify of 1 GiB over NVMe/TCP: {}, guard crc32c", medium.name());
    let columns = [
        ("time", "ms"),
        ("CPU of the host", "ms"),
        ("CPU of the target", "ms"),
        ("payload and capsules moved", "bytes"),
        ("times as fast as 8 readers", ""),
    ];
    let mut table = Table::new(title, "way", &columns);
    for (index, way) in WAYS.iter().enumerate() {
        let milliseconds = |of: fn(&Turned) -> f64| Cell::measured(spread(turns, index, |turn| of(turn) * 1e3));
        let faster = Spread::of(turns.iter().map(|round| round[0].seconds / round[index].seconds));
        let cells = vec![
            milliseconds(|turn| turn.seconds),
            milliseconds(|turn| turn.host_cpu),
            milliseconds(|turn| turn.target_cpu),
            Cell::counted(spread(turns, index, |turn| turn.moved_bytes).median),
            if index == 0 { Cell::words("baseline") } else { Cell::measured(faster) },
        ];
        table.push(way.name, cells);
    }
    table
}

fn verdicts(medium: Medium, turns: &[Vec<Turned>]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    if medium.has_threshold() {
        for (baseline, again, claimed, what) in COMPARED {
            let speed = |round: &[Turned], way: usize| 1.0 / round[way].seconds;
            let ratios =
                turns.iter().map(|round| Round::of(speed(round, baseline), speed(round, again), speed(round, claimed)));
            let what = format!("{}: {what}, times as fast", medium.name());
            verdicts.push(Verdict::timed(what, Threshold::AtLeast(FASTER), &ratios.collect::<Vec<_>>()));
        }
    }
    // Every round sends the same commands, so this is a count.
    let moved = |way: usize| spread(turns, way, |turn| turn.moved_bytes);
    let what = format!("{}: bytes moved by 8 readers, times those of Verify", medium.name());
    verdicts.push(Verdict::counted(what, Threshold::AtLeast(FEWER), moved(0).least / moved(4).most));
    verdicts
}

fn plots(media: &[(Medium, Vec<Vec<Turned>>)]) -> Vec<Plot> {
    let claimed = |(medium, turns): &(Medium, Vec<Vec<Turned>>)| {
        medium.has_threshold().then(|| spread(turns, 0, |turn| turn.seconds * 1e3 / FASTER).median)
    };
    let threshold = ThresholdLine {
        name: format!("claim: {FASTER} times as fast as {}", WAYS[0].name),
        values: media.iter().map(claimed).collect(),
    };
    let draw = |name: &str, title: &str, y: &str, threshold: Option<ThresholdLine>, of: fn(&Turned) -> f64| {
        let groups = media.iter().map(|(medium, _)| medium.name().to_owned()).collect();
        let milliseconds = |turn: &Turned| of(turn) * 1e3;
        let series = [0, 2, 4, 5].map(|way| {
            Series::measured(WAYS[way].name, media.iter().map(|(_, turns)| spread(turns, way, milliseconds)))
        });
        Plot {
            name: name.to_owned(),
            title: title.to_owned(),
            x: Axis::linear("what the target keeps blocks in", ""),
            y: Axis::logarithmic(y, "ms"),
            drawing: Drawing::Bars { groups, series: series.into(), threshold },
        }
    };
    vec![
        draw("verify-offload-time", "Time to verify 1 GiB over NVMe/TCP", "time", Some(threshold), |turn| turn.seconds),
        draw("verify-offload-cpu", "CPU time to verify 1 GiB, host and target together", "CPU time", None, |turn| {
            turn.host_cpu + turn.target_cpu
        }),
    ]
}
