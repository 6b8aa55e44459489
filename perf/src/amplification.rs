//! Bytes written to the medium per byte of application data, for random writes of 4 KiB.
//!
//! Claim: at most 1.10 up to 64 GiB and 1.20 above, and 1.15 for one writer that flushes after each write. Counted on a medium
//! in memory that counts every byte and forgets the data, from the opening of a new volume through its close, so log, tables,
//! superblocks and the checkpoints that close it are all in. Only bytes matter here, so time stands for nothing, and the count
//! is the same on every run but for the order of wake-ups.
//!
//! "half" is the second half of the writes by itself, without what closing writes: tables that are made once, and the last
//! checkpoint, which is of however little has been gathered, are no part of it. It is right to a checkpoint more or less.

use std::rc::Rc;

use sealblock_block::{Device, Durability, Gate, Request};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_media_memory::MemoryMedium;
use sealblock_media_volume::{CreateOptions, OpenOptions, create, format::Layout, open};
use sealblock_runtime_reactor::{Config, JoinHandle, Reactor, spawn};
use sealblock_units::{BlockSize, ByteCount, Extent};

use crate::counted::{Counted, Counts, Part};
use crate::load::{self, Load, Until};
use crate::medium::AnyMedium;
use crate::options::AmplificationOptions;
use crate::setup::{PerfVolume, Turn, TurnClock};

/// What volumes up to [`LARGE_BYTES`] have to keep, larger ones, and any with one flushing writer.
const THRESHOLDS: [f64; 3] = [1.10, 1.20, 1.15];
const LARGE_BYTES: u64 = 64 << 30;
/// Sectors of the media on which this is counted.
const SECTOR_BYTES: u32 = 512;
/// Queue depth, writes between flushes, random addresses.
const LOADS: [(u64, u64, bool); 6] =
    [(32, 0, true), (32, 1024, true), (32, 32, true), (32, 1, true), (1, 1, true), (32, 1024, false)];

/// Blocks of a long write, and bytes that are zeroed at most.
const LONG_BLOCKS: u64 = 256;
const MAX_ZEROED_BYTES: u64 = 1 << 30;

/// Counts everything and prints it.
pub fn run(options: &AmplificationOptions) -> anyhow::Result<()> {
    let reactor = Reactor::new(Config::default())?;
    println!(
        "{} writes of 4 KiB a line, sectors of {SECTOR_BYTES} bytes; bytes written per byte of data",
        options.writes
    );
    println!(
        "{:>9} {:>4} {:>11} {:>7} {:>7} {:>7} {:>7} {:>8}",
        "volume", "QD", "flush every", "log", "tables", "in all", "half", "read"
    );
    for size in &options.sizes {
        for (number, load) in (1..).zip(LOADS) {
            if options.loads.is_empty() || options.loads.contains(&number) {
                reactor.block_on(one(options, size.get(), load))?;
            }
        }
        if options.loads.is_empty() {
            reactor.block_on(zeroes(options, size.get()))?;
        }
    }
    Ok(())
}

/// A new volume of so many bytes, open.
struct Setup {
    gate: Rc<Gate<Rc<PerfVolume>>>,
    worker: JoinHandle<()>,
    counts: Counts,
}

async fn set_up(cache_bytes: Option<u64>, bytes: u64) -> anyhow::Result<Setup> {
    let size = BlockSize::B4096;
    let layout = Layout::new(size, SECTOR_BYTES, bytes >> size.shift())?;
    let medium = AnyMedium::Memory(MemoryMedium::new(layout.medium_bytes(), SECTOR_BYTES));
    let protection = Some(PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1));
    let (capacity_blocks, uuid) = (layout.capacity_blocks(), [1; 16]);
    let shape = CreateOptions { block_size: size, capacity_blocks, protection, uuid, preallocate: false };
    create(&medium, &shape).await?;
    let counted = Counted::new(medium, layout, true);
    let counts = counted.counts();
    let defaults = OpenOptions::default();
    let cache_bytes = cache_bytes.map_or(defaults.cache_bytes, |bytes| bytes as usize);
    let open_options = OpenOptions { cache_bytes, ..defaults };
    let opened = open(counted, TurnClock::new(Turn::endless()), &open_options).await?;
    let worker = spawn(opened.worker.run());
    Ok(Setup { gate: Rc::new(Gate::new("volume", opened.volume)), worker, counts })
}

/// Bytes for each byte of data.
#[derive(Clone, Copy, Debug)]
pub struct Amplified {
    /// Written to the log.
    pub log: f64,
    /// Written to map pages.
    pub tables: f64,
    /// Written in all.
    pub whole: f64,
    /// Written in all in the second half of the writes.
    pub steady: f64,
    /// Read.
    pub read: f64,
}

/// Counts what a new volume of so many bytes writes for so many writes of 4 KiB, with so many in flight and a flush now and then.
pub async fn count(
    cache_bytes: Option<u64>,
    bytes: u64,
    writes: u64,
    (depth, flush_every, random): (u64, u64, bool),
) -> anyhow::Result<Amplified> {
    let Setup { gate, worker, counts } = set_up(cache_bytes, bytes).await?;
    let load = Load { name: "", write: true, blocks: 1, random, depth, flush_every };
    let first = load::drive(Rc::clone(&gate), load, Until::Asked(writes / 2), 1).await?;
    let half = counts.written_in_all();
    let second = load::drive(Rc::clone(&gate), load, Until::Asked(writes - writes / 2), 2).await?;
    let steady = (counts.written_in_all() - half) as f64 / second.bytes as f64;
    gate.device().close().await?;
    worker.await?;
    let per_byte = |written: u64| written as f64 / (first.bytes + second.bytes) as f64;
    Ok(Amplified {
        log: per_byte(counts.written(Part::Log)),
        tables: per_byte(counts.written(Part::Tables)),
        whole: per_byte(counts.written_in_all()),
        steady,
        read: per_byte(counts.read()),
    })
}

/// What a volume of so many bytes has to keep with so many writes in flight.
pub fn threshold(bytes: u64, depth: u64) -> f64 {
    THRESHOLDS[if depth == 1 { 2 } else { usize::from(bytes > LARGE_BYTES) }]
}

async fn one(options: &AmplificationOptions, bytes: u64, load: (u64, u64, bool)) -> anyhow::Result<()> {
    let Amplified { log, tables, whole, steady, read } =
        count(options.cache.map(ByteCount::get), bytes, options.writes, load).await?;
    let (depth, flush_every, random) = load;
    let threshold = threshold(bytes, depth);
    println!(
        "{:>6} MiB {depth:>4} {:>11} {log:7.4} {tables:7.4} {whole:7.4} {steady:7.4} {read:8.4}  {}{}",
        bytes >> 20,
        if flush_every == 0 { "never".to_owned() } else { flush_every.to_string() },
        if whole <= threshold {
            format!("{threshold:.2} kept")
        } else {
            format!("{threshold:.2} MISSED by {:.3}", whole - threshold)
        },
        if random { "" } else { " (sequential)" },
    );
    Ok(())
}

/// What Write Zeroes with deallocation costs, over blocks all of which were written.
async fn zeroes(options: &AmplificationOptions, bytes: u64) -> anyhow::Result<()> {
    let Setup { gate, worker, counts } = set_up(options.cache.map(ByteCount::get), bytes).await?;
    let blocks = (bytes.min(MAX_ZEROED_BYTES)) >> BlockSize::B4096.shift();
    let fill = Load { name: "", write: true, blocks: LONG_BLOCKS, random: false, depth: 8, flush_every: 0 };
    load::drive(Rc::clone(&gate), fill, Until::Asked(blocks / LONG_BLOCKS), 1).await?;
    gate.execute(Request::flush()).await?;
    let (log, tables) = (counts.written(Part::Log), counts.written(Part::Tables));
    let extent = Extent::from_raw(0, blocks)?;
    gate.execute(Request::write_zeroes(extent, true, Durability::ForceUnitAccess)).await?;
    let log = counts.written(Part::Log) - log;
    gate.device().close().await?;
    worker.await?;
    println!(
        "{:>6} MiB  {} MiB of Write Zeroes: {:.1} KiB of log, {:.1} MiB of tables (those of what was written before too)",
        bytes >> 20,
        blocks >> 8,
        log as f64 / 1024.0,
        (counts.written(Part::Tables) - tables) as f64 / f64::from(1 << 20),
    );
    Ok(())
}
