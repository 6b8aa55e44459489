//! The claim `write-amplification`: bytes on the medium for each byte of random writes of 4 KiB.
//!
//! The writes of volumes are counted from open to close, on a medium in memory that counts every byte: log, map pages,
//! superblocks and data. The count is the same on every machine. The writes of other systems are calculated from their
//! published formats; the notes have every assumption. dm-integrity is calculated by its modes ([`DmIntegrity`]), and a
//! filesystem with and without a checksum tree from the published totals.

use anyhow::ensure;
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::ByteCount;

use super::outcome::{
    Axis, Cell, Claim, Defaults, Drawing, Outcome, Plot, Progress, Published, Scale, Series, Table, ThresholdLine,
};
use super::verdict::{Threshold, Verdict};
use crate::amplification::{Amplified, count, threshold};
use crate::report::number;

/// Published: 120 G of random writes, and the additional writes with a checksum tree and without.
const WRITTEN_G: f64 = 120.0;
const EXTRA_WITH_TREE_G: f64 = 66.0;
const EXTRA_OFFLOADED_G: f64 = 9.0;
/// The fraction of the largest volume that each load writes; at the default size this is 2 GiB.
const PART_WRITTEN: u64 = 8;

/// The smallest volume of which a sixteenth is still enough to count.
const MIN_SIZE: ByteCount = ByteCount::new(256 << 20);

/// The claim.
pub const CLAIM: Claim = Claim {
    name: "write-amplification",
    sentence: "Integrity kept by the device writes at most 1.10 bytes for each byte of random writes, far less than a checksum tree or a journal.",
    published: &[
        Published {
            figure: "120 G of random writes: 66 G more with a checksum tree, 9 G more with the checksums offloaded",
            source: "patches for checksum offload in Btrfs",
        },
        Published {
            figure: "large linear writes, raw 245 MB/s: 120 MB/s with a journal, 238 MB/s with a bitmap",
            source: "commit that added the bitmap mode to dm-integrity",
        },
    ],
    defaults: Defaults { size: ByteCount::new(16 << 30), seconds: 0.0, rounds: 1 },
    makes_files: false,
    measure,
};

/// A load, and the amplification for each size of volume.
struct Line {
    name: &'static str,
    depth: u64,
    values: Vec<Amplified>,
}

/// A load: its name, requests in flight, and the number of writes between flushes.
const LOADS: [(&str, u64, u64); 4] = [
    ("volume, 32 writers, no flush", 32, 0),
    ("volume, 32 writers, a flush every 1024 writes", 32, 1024),
    ("volume, 32 writers, a flush every 32 writes", 32, 32),
    ("volume, one writer that flushes each write", 1, 1),
];

fn measure(scale: &Scale, progress: &Progress) -> anyhow::Result<Outcome> {
    ensure!(
        scale.size >= MIN_SIZE,
        "volumes of less than 256 MiB have too few blocks to count anything; use --size 256MiB or more"
    );
    let reactor = Reactor::new(Config::default())?;
    let writes = scale.blocks() / PART_WRITTEN;
    let sizes = [16, 4, 1].map(|part| scale.size.get() / part);
    let mut lines = Vec::new();
    for (name, depth, flush_every) in LOADS {
        let mut values = Vec::new();
        for (index, bytes) in (1..).zip(sizes) {
            progress.step(name, index, sizes.len() as u32)?;
            values.push(reactor.block_on(count(None, bytes, writes, (depth, flush_every, true)))?);
        }
        lines.push(Line { name, depth, values });
    }
    Ok(outcome(&sizes, writes, &lines))
}

/// How dm-integrity writes the data and the tag of a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Data and tags are written to a journal first.
    Journal,
    /// Data and tags are written in place; a bitmap marks where they may not match after a crash.
    Bitmap,
    /// Data and tags are written in place, and may not match after a crash.
    Direct,
    /// Tags are in the metadata of a device with that format.
    Inline,
}

/// The writes of dm-integrity for random writes of whole blocks.
struct DmIntegrity {
    block_bytes: f64,
    tag_bytes: f64,
    /// Bytes of data over which writes are spread.
    volume_bytes: f64,
    /// Writes between two write-outs of tags.
    batch: f64,
}

impl DmIntegrity {
    /// Each sector of the journal has 8 bytes of its own, covering data and entries.
    const SECTOR_BYTES: f64 = 512.0;
    const SECTOR_ROOM_BYTES: f64 = 504.0;
    /// A section of the journal begins with this number of sectors of entries.
    const ENTRY_SECTORS: f64 = 8.0;
    /// The size of an entry is a multiple of this.
    const ENTRY_UNIT_BYTES: f64 = 8.0;
    /// Tags are in buffers; of each, the part from the first to the last new tag is written, in units.
    const UNIT_BYTES: f64 = 4096.0;
    const BUFFER_UNITS: i32 = 16;
    /// The data that one bit of the bitmap covers, and the smallest write of the bitmap: one page, once per batch to
    /// set bits and once to clear them.
    const BITMAP_BIT_BYTES: f64 = 32768.0 * 512.0;
    const PAGE_BITS: f64 = 4096.0 * 8.0;

    /// Blocks of 4 KiB with CRC-32C, spread over this many bytes.
    fn new(volume_bytes: u64) -> DmIntegrity {
        DmIntegrity { block_bytes: 4096.0, tag_bytes: 4.0, volume_bytes: volume_bytes as f64, batch: 8192.0 }
    }

    /// Bytes written for each byte of data.
    fn amplification(&self, mode: Mode) -> f64 {
        match mode {
            Mode::Journal => 1.0 + self.tags() + self.journal(),
            Mode::Bitmap => 1.0 + self.tags() + self.bitmap(),
            Mode::Direct => 1.0 + self.tags(),
            Mode::Inline => 1.0,
        }
    }

    /// Bytes of the journal: the block, and its share of the entries of its section. The entry of a block has the
    /// address, the tag, and the last 8 bytes of each sector of the block, because the journal has other content in
    /// their places.
    fn journal(&self) -> f64 {
        let sectors = self.block_bytes / Self::SECTOR_BYTES;
        let entry = 8.0 + 8.0 * sectors + self.tag_bytes;
        let entry = (entry / Self::ENTRY_UNIT_BYTES).ceil() * Self::ENTRY_UNIT_BYTES;
        let entries = (Self::SECTOR_ROOM_BYTES / entry).floor() * Self::ENTRY_SECTORS;
        let section = Self::ENTRY_SECTORS + entries * sectors;
        section * Self::SECTOR_BYTES / (entries * self.block_bytes)
    }

    /// Bytes of tags: for each buffer, the units from the first to the last with a new tag, averaged over all
    /// distributions of a batch of random writes.
    fn tags(&self) -> f64 {
        let tags = self.volume_bytes / self.block_bytes;
        let unit_tags = Self::UNIT_BYTES / self.tag_bytes;
        let units = (tags / unit_tags).max(1.0);
        // The probability that a unit stays unchanged, which is independent of the others if there are many writes and
        // units.
        let untouched = (-self.batch / units).exp();
        let touched = 1.0 - untouched;
        let mut written = 0.0;
        let buffer_units = Self::BUFFER_UNITS.min(units.ceil() as i32);
        for length in 1..=buffer_units {
            let places = f64::from(buffer_units - length + 1);
            let ends = if length == 1 { touched } else { touched * touched };
            let outside = untouched.powi(buffer_units - length);
            written += f64::from(length) * places * ends * outside;
        }
        let buffers = units / f64::from(buffer_units);
        written * Self::UNIT_BYTES * buffers / (self.batch * self.block_bytes)
    }

    fn bitmap(&self) -> f64 {
        let pages = (self.volume_bytes / Self::BITMAP_BIT_BYTES / Self::PAGE_BITS).ceil();
        2.0 * pages * 4096.0 / (self.batch * self.block_bytes)
    }
}

/// A calculated system: its name, and its amplification on a volume of this size.
type Calculated = (&'static str, fn(u64) -> f64);

fn calculated() -> [Calculated; 6] {
    [
        ("dm-integrity, journal (calculated)", |bytes| DmIntegrity::new(bytes).amplification(Mode::Journal)),
        ("dm-integrity, bitmap (calculated)", |bytes| DmIntegrity::new(bytes).amplification(Mode::Bitmap)),
        ("dm-integrity, direct (calculated)", |bytes| DmIntegrity::new(bytes).amplification(Mode::Direct)),
        ("dm-integrity, inline (calculated)", |bytes| DmIntegrity::new(bytes).amplification(Mode::Inline)),
        ("filesystem with a checksum tree (published)", |_| 1.0 + EXTRA_WITH_TREE_G / WRITTEN_G),
        ("filesystem, checksums offloaded (published)", |_| 1.0 + EXTRA_OFFLOADED_G / WRITTEN_G),
    ]
}

/// A picture and its name.
const DRAWN: [(&str, &str); 6] = [
    (LOADS[0].0, "volume"),
    (LOADS[3].0, "volume, flushing"),
    ("dm-integrity, journal (calculated)", "dm-integrity, journal"),
    ("dm-integrity, bitmap (calculated)", "bitmap"),
    ("filesystem with a checksum tree (published)", "checksum tree"),
    ("filesystem, checksums offloaded (published)", "offloaded"),
];

fn outcome(sizes: &[u64], writes: u64, lines: &[Line]) -> Outcome {
    let names: Vec<String> = sizes.iter().map(|bytes| format!("volume of {}", ByteCount::new(*bytes))).collect();
    let columns: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "")).collect();
    let title = "Bytes written to the medium for each byte of random writes of 4 KiB";
    let mut table = Table::new(title, "what writes", &columns);
    let mut series = Vec::new();
    let measured = lines.iter().map(|line| (line.name, line.values.iter().map(|value| value.whole).collect()));
    let others = calculated().map(|(name, of)| (name, sizes.iter().map(|bytes| of(*bytes)).collect::<Vec<f64>>()));
    for (name, values) in measured.chain(others) {
        table.push(name, values.iter().map(|value| Cell::counted(*value)).collect());
        if let Some((_, short)) = DRAWN.iter().find(|(drawn, _)| *drawn == name) {
            series.push(Series::counted(*short, values));
        }
    }
    let mut tables = vec![table];
    tables.extend(sizes.last().map(|largest| parts(*largest, lines)));
    let plot = Plot {
        name: "write-amplification".to_owned(),
        title: title.to_owned(),
        x: Axis::linear("bytes over which writes are spread", ""),
        y: Axis::linear("bytes written for each byte of data", ""),
        drawing: Drawing::Bars { groups: names, series, threshold: Some(threshold_line(sizes, lines)) },
    };
    Outcome { verdicts: verdicts(sizes, lines), tables, plots: vec![plot], notes: notes(writes) }
}

/// The claim about random writes with many in flight.
fn threshold_line(sizes: &[u64], lines: &[Line]) -> ThresholdLine {
    let depth = lines.iter().map(|line| line.depth).max().unwrap_or(1);
    let values = sizes.iter().map(|bytes| Some(threshold(*bytes, depth))).collect();
    ThresholdLine { name: format!("claim for volumes, QD {depth}: at most this"), values }
}

/// What the bytes of the largest volume were written to.
fn parts(bytes: u64, lines: &[Line]) -> Table {
    let columns =
        [("data", ""), ("log", ""), ("map pages", ""), ("in all", ""), ("second half of the writes", ""), ("read", "")];
    let title = format!("Parts of the bytes written by a volume of {}", ByteCount::new(bytes));
    let mut table = Table::new(title, "what writes", &columns);
    for line in lines {
        let Some(value) = line.values.last() else { continue };
        let figures = [1.0, value.log, value.tables, value.whole, value.steady, value.read];
        table.push(line.name, figures.map(Cell::counted).to_vec());
    }
    table
}

fn verdicts(sizes: &[u64], lines: &[Line]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for line in lines {
        for (bytes, value) in sizes.iter().zip(&line.values) {
            let what = format!("{}, {}: bytes for each byte", line.name, ByteCount::new(*bytes));
            verdicts.push(Verdict::counted(what, Threshold::AtMost(threshold(*bytes, line.depth)), value.whole));
        }
    }
    verdicts
}

fn notes(writes: u64) -> Vec<String> {
    let counted = format!(
        "Counted from the opening of a new volume through its close, so map pages that are made once are in, and weigh the more, the fewer writes there are \
         for the size: {} here. Neither time nor rounds change a count.",
        number(writes as f64)
    );
    let calculated = "dm-integrity is calculated and was not run: blocks of 4096 bytes, tags of 4 bytes, the default buffers of 64 KiB for tags, of which the kernel \
                      writes the part from the first to the last new tag in units of 4096 bytes; tags are written out every 8192 writes, which is half of a journal \
                      of 64 MiB; sections of the journal are full; a bit of the bitmap for 16 MiB. Inline mode needs a device with metadata.";
    let published = "The filesystem is calculated from the published totals: 1 + 66/120 and 1 + 9/120. They have all metadata of the filesystem in them, and not \
                     what a device writes that keeps the checksums: what a volume writes comes on top of the second figure.";
    vec![counted, calculated.to_owned(), published.to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::verdict::Ruling;

    fn is_near(value: f64, expected: f64) -> bool {
        (value / expected - 1.0).abs() < 1e-3
    }

    #[test]
    fn a_journal_of_whole_sections_is_counted_by_hand() {
        // An entry of 80 bytes, 6 in a sector, 48 in a section of 392 sectors.
        let large = DmIntegrity::new(1 << 34);
        assert!(is_near(large.journal(), 392.0 * 512.0 / (48.0 * 4096.0)), "{}", large.journal());
        // An entry of 24 bytes, 21 in a sector, 168 in a section of 176 sectors.
        let small = DmIntegrity { block_bytes: 512.0, ..large };
        assert!(is_near(small.journal(), 176.0 / 168.0), "{}", small.journal());
    }

    #[test]
    fn tags_are_between_all_of_a_buffer_and_a_unit_each() {
        // Few blocks, so every unit has new tags: all 16 units of the buffer, for 64 MiB of data.
        let dense = DmIntegrity { batch: 1e6, ..DmIntegrity::new(1 << 26) };
        assert!(is_near(dense.tags(), 65536.0 / (1e6 * 4096.0)), "{}", dense.tags());
        // So many blocks that hardly any buffer has two new tags: one unit for each block.
        let sparse = DmIntegrity::new(1 << 50);
        assert!((sparse.tags() - 1.0).abs() < 0.01, "{}", sparse.tags());
        let between = DmIntegrity::new(1 << 34).tags();
        assert!(between > 4.0 / 4096.0 && between < 1.0, "{between}");
    }

    #[test]
    fn modes_are_in_the_order_of_what_they_write() {
        let of = |mode| DmIntegrity::new(1 << 34).amplification(mode);
        assert!(of(Mode::Inline) < of(Mode::Direct) && of(Mode::Direct) < of(Mode::Bitmap));
        assert!(of(Mode::Bitmap) < of(Mode::Journal) && of(Mode::Journal) > 2.0);
    }

    #[test]
    fn published_totals_are_parts_of_what_was_written() {
        let published: Vec<f64> = calculated()[4..].iter().map(|(_, of)| of(0)).collect();
        assert!(is_near(published[0], 1.55) && is_near(published[1], 1.075), "{published:?}");
    }

    #[test]
    fn a_tiny_run_counts_more_than_the_data() {
        let progress =
            Progress::new("write-amplification", std::sync::Arc::new(|_| std::ops::ControlFlow::Continue(())));
        let scale = Scale { size: MIN_SIZE, seconds: 0.0, rounds: 1, dir: std::env::temp_dir() };
        let outcome = measure(&scale, &progress).unwrap();
        for cell in outcome.tables[0].rows[..LOADS.len()].iter().flat_map(|row| &row.cells) {
            assert!((1.0..2.0).contains(&cell.median.unwrap()), "{:?}", outcome.tables[0]);
        }
        let small = Scale { size: ByteCount::new(1 << 20), ..scale };
        let refused = measure(&small, &progress).unwrap_err().to_string();
        assert!(refused.contains("use --size 256MiB"), "{refused}");
    }

    #[test]
    fn what_is_drawn_is_there() {
        let names = || LOADS.iter().map(|load| load.0).chain(calculated().map(|(name, _)| name));
        assert!(DRAWN.iter().all(|(drawn, _)| names().any(|name| name == *drawn)));
    }

    #[test]
    fn every_load_and_size_has_its_bar() {
        let value = Amplified { log: 0.02, tables: 0.05, whole: 1.12, steady: 1.1, read: 0.0 };
        let line = |depth| Line { name: "volume", depth, values: vec![value; 2] };
        let outcome = outcome(&[1 << 30, 1 << 37], 1 << 19, &[line(32), line(1)]);
        let rulings: Vec<Ruling> = outcome.verdicts.iter().map(|verdict| verdict.ruling).collect();
        // 1.10 up to 64 GiB, 1.20 above, 1.15 for one writer that flushes.
        assert_eq!(rulings, [Ruling::DoesNotHold, Ruling::Holds, Ruling::Holds, Ruling::Holds]);
        assert_eq!((outcome.tables[0].rows.len(), outcome.tables[1].rows.len()), (8, 2));
    }
}
