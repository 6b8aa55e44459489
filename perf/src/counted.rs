//! A medium that counts written bytes for each part of the volume.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use sealblock_block::{Medium, MediumError};
use sealblock_media_volume::format::Layout;
use sealblock_runtime_memory::{Buffer, Slice};

use crate::medium::AnyMedium;

/// Parts of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// Superblocks.
    Superblock,
    /// The log.
    Log,
    /// Records and generations.
    Tables,
    /// Data.
    Slots,
}

/// The counters. Clones are the same counters.
#[derive(Clone, Default)]
pub struct Counts(Rc<Counters>);

#[derive(Default)]
struct Counters {
    written_bytes: [Cell<u64>; 4],
    read_bytes: Cell<u64>,
    sync_seconds: RefCell<Vec<f64>>,
    data_write_seconds: Cell<f64>,
}

impl Counts {
    /// Bytes written to a part.
    pub fn written(&self, part: Part) -> u64 {
        self.0.written_bytes[part as usize].get()
    }

    /// Bytes written in all.
    pub fn written_in_all(&self) -> u64 {
        self.0.written_bytes.iter().map(Cell::get).sum()
    }

    /// Bytes read.
    pub fn read(&self) -> u64 {
        self.0.read_bytes.get()
    }

    /// The total seconds of data writes at the medium since the last call.
    pub fn take_data_write_seconds(&self) -> f64 {
        self.0.data_write_seconds.take()
    }

    /// Milliseconds of each sync since the last call.
    pub fn take_sync_ms(&self) -> Vec<f64> {
        self.0.sync_seconds.take().into_iter().map(|seconds| seconds * 1e3).collect()
    }
}

/// A medium with counters. With `drop_data`, data are not stored, so that large volumes fit in memory; then loads that
/// read them cannot be measured.
pub struct Counted {
    medium: AnyMedium,
    /// The layout of its volume; without it nothing is counted.
    layout: Option<Layout>,
    drop_data: bool,
    counts: Counts,
}

impl Counted {
    /// Counts the I/O of `medium`, which has a volume with this layout.
    pub fn new(medium: AnyMedium, layout: Layout, drop_data: bool) -> Counted {
        Counted { medium, layout: Some(layout), drop_data, counts: Counts::default() }
    }

    /// The medium, without counting.
    pub fn not(medium: AnyMedium) -> Counted {
        Counted { medium, layout: None, drop_data: false, counts: Counts::default() }
    }

    /// The counters.
    pub fn counts(&self) -> Counts {
        self.counts.clone()
    }

    fn part(layout: &Layout, offset_bytes: u64) -> Part {
        if offset_bytes < layout.log_offset() {
            return Part::Superblock;
        }
        let Some(within) = offset_bytes.checked_sub(layout.groups_offset()) else { return Part::Log };
        match layout.block_group(within / layout.group_stride()) {
            Some(group) if offset_bytes >= group.data_offset => Part::Slots,
            _ => Part::Tables,
        }
    }
}

impl Medium for Counted {
    fn len_bytes(&self) -> u64 {
        self.medium.len_bytes()
    }

    sealblock_block::medium_properties!(self => &self.medium);

    async fn read(&self, offset_bytes: u64, into: Buffer) -> (Result<(), MediumError>, Buffer) {
        let read = &self.counts.0.read_bytes;
        read.set(read.get() + into.len() as u64);
        self.medium.read(offset_bytes, into).await
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        let Some(layout) = &self.layout else { return self.medium.write(offset_bytes, from).await };
        let part = Counted::part(layout, offset_bytes);
        let written = &self.counts.0.written_bytes[part as usize];
        written.set(written.get() + from.len() as u64);
        if self.drop_data && part == Part::Slots {
            return Ok(());
        }
        let start = Instant::now();
        let result = self.medium.write(offset_bytes, from).await;
        if part == Part::Slots {
            let seconds = &self.counts.0.data_write_seconds;
            seconds.set(seconds.get() + start.elapsed().as_secs_f64());
        }
        result
    }

    fn note(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediumError> {
        self.medium.note(offset_bytes, bytes)
    }

    async fn sync(&self) -> Result<(), MediumError> {
        if self.layout.is_none() {
            return self.medium.sync().await;
        }
        let start = Instant::now();
        let result = self.medium.sync().await;
        self.counts.0.sync_seconds.borrow_mut().push(start.elapsed().as_secs_f64());
        result
    }

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.medium.punch(offset_bytes, length_bytes).await
    }

    async fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.medium.discard(offset_bytes, length_bytes).await
    }

    async fn reserve(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.medium.reserve(offset_bytes, length_bytes).await
    }

    fn is_hole(&self, offset_bytes: u64, length_bytes: u64) -> bool {
        self.medium.is_hole(offset_bytes, length_bytes)
    }

    fn status_at(&self, offset_bytes: u64, length_bytes: u64) -> (u64, bool) {
        self.medium.status_at(offset_bytes, length_bytes)
    }

    async fn set_len(&self, length_bytes: u64) -> Result<(), MediumError> {
        self.medium.set_len(length_bytes).await
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.medium.zero(offset_bytes, length_bytes).await
    }
}
