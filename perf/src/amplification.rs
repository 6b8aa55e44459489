//! Bytes written to the medium per byte of application data, for random writes of 4 KiB.
//!
//! Thresholds: at most 1.10 for volumes up to 64 GiB and 1.20 above, and 1.15 for one writer that flushes after each
//! write. The medium is in memory, counts every byte and drops the data; it counts from the opening of a new volume to
//! its close. So log, tables, superblocks and the checkpoints at the close are included. Only bytes matter here, so the
//! clock is not used, and the count is the same in every run except for the order of wake-ups.
//!
//! "half" is the second half of the writes alone, without the writes of the close. It excludes tables that are made
//! once, and the last checkpoint, which is written however few entries there are. It is accurate to one checkpoint.

use std::rc::Rc;

use sealblock_block::Gate;
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_media_memory::MemoryMedium;
use sealblock_media_volume::{CreateOptions, OpenOptions, create, format::Layout, open};
use sealblock_runtime_reactor::{JoinHandle, spawn};
use sealblock_units::BlockSize;

use crate::counted::{Counted, Counts, Part};
use crate::load::{self, Load, Until};
use crate::medium::AnyMedium;
use crate::setup::{PerfVolume, Turn, TurnClock};

/// The thresholds: for volumes up to [`LARGE_BYTES`], for larger ones, and for any with one flushing writer.
const THRESHOLDS: [f64; 3] = [1.10, 1.20, 1.15];
const LARGE_BYTES: u64 = 64 << 30;
/// Sector size of the counted media.
pub const SECTOR_BYTES: u32 = 512;

/// A new open volume of a given size.
pub struct Setup {
    /// The volume.
    pub gate: Rc<Gate<Rc<PerfVolume>>>,
    /// Its worker.
    pub worker: JoinHandle<()>,
    /// The counters of its medium.
    pub counts: Counts,
}

/// Makes and opens it.
pub async fn set_up(cache_bytes: Option<u64>, bytes: u64) -> anyhow::Result<Setup> {
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

/// Bytes written for each byte of data.
#[derive(Clone, Copy, Debug)]
pub struct Amplified {
    /// Written to the log.
    pub log: f64,
    /// Written to map pages.
    pub tables: f64,
    /// Total written.
    pub whole: f64,
    /// Total written in the second half of the writes.
    pub steady: f64,
    /// Read.
    pub read: f64,
}

/// Counts the bytes that a new volume of this size writes during a number of 4 KiB writes, with `depth` in flight and a
/// flush at intervals.
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

/// The threshold for a volume of this size with this queue depth.
pub fn threshold(bytes: u64, depth: u64) -> f64 {
    THRESHOLDS[if depth == 1 { 2 } else { usize::from(bytes > LARGE_BYTES) }]
}
