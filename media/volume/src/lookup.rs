//! Where a block's data are now, and what its tags are.

use std::ops::Deref;

use sealblock_block::{BadBlock, BadBlockCause, Clock, Error, Medium};
use sealblock_integrity::{Field, GuardKind, PiFormat, ProtectionType, Tuple, guard};
use sealblock_units::{Extent, Lba};
use smallvec::SmallVec;

use crate::block_allocator::Reading;
use crate::format::{MAP_ENTRY_BYTES, MapEntry, MapEntryKind, Seed};
use crate::map_page::{MapLookup, MapPage};
use crate::volume::Volume;

/// Reference tags tried, back from the block's address and around the stored one, when a record's checksum is off.
const TAGS_TRIED: u64 = u16::MAX as u64;

/// What is known of one block.
#[derive(Clone, Copy)]
pub(crate) enum BlockLocation {
    /// Reads as zeroes and carries no tags.
    Zeroes,
    /// The data are in this slot, with this tuple.
    Stored { slot: u32, tuple: [u8; 16] },
    /// The block is known to be bad without looking at its data.
    Bad(BadBlock),
    /// The record does not check; what is wrong may show against the data.
    Damaged([u8; MAP_ENTRY_BYTES]),
}

/// Blocks of one request; one is the usual number.
pub(crate) type LocatedBlocks = SmallVec<[BlockLocation; 1]>;

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Looks up every block of an extent, all at one moment; pages that it takes are read before. The slots that it found stay
    /// in use until the guard is dropped.
    pub(crate) async fn locate(&self, extent: Extent) -> Result<(LocatedBlocks, Reading<'_>), Error> {
        // Pages that are held are not dropped while further ones are read.
        let mut held = Vec::new();
        loop {
            // Nothing is awaited between the look-up and the guard on the slots.
            if let Some(located) = self.locate_cached(extent) {
                return Ok((located, self.slots.read()));
            }
            for (page, _) in self.layout.page_pieces(extent) {
                held.push(self.block_map.page(&self.medium, page).await?);
            }
        }
    }

    /// Has the medium asked once more for what it did not give of the tables of these blocks.
    pub(crate) fn retry_tables(&self, extent: Extent) {
        self.layout.page_pieces(extent).for_each(|(page, _)| self.block_map.retry(page));
    }

    /// The same from memory alone; nothing when a page is not there.
    pub(crate) fn locate_cached(&self, extent: Extent) -> Option<LocatedBlocks> {
        let mut located = LocatedBlocks::with_capacity(extent.len() as usize);
        for (number, piece) in self.layout.page_pieces(extent) {
            let page = self.block_map.cached(number);
            let is_patched = piece.len() == 1 || self.block_map.patches.has_page(number);
            let first = self.block_map.locate(piece.start()).1;
            for (index, lba) in (first..).zip(piece.iter()) {
                if let Some(record) = self.memtable.get(lba) {
                    located.push(self.of_record(record));
                    continue;
                }
                let patch = if is_patched { self.block_map.patches.get(number, index) } else { None };
                let entry = match patch {
                    Some(bytes) => of_patch(bytes, self.seed),
                    None => page.as_ref()?.lookup(index, lba, self.seed),
                };
                located.push(self.of_entry(lba, entry));
            }
        }
        Some(located)
    }

    /// What the tables have of a block, or will have; nothing when its page is not in memory.
    pub(crate) fn entry_now(&self, lba: Lba) -> Option<MapLookup> {
        self.entry_with(lba, |number| self.block_map.cached(number))
    }

    /// The same, with the block's page, which is asked for by its number where there is no patch.
    pub(crate) fn entry_with<P: Deref<Target = MapPage>>(
        &self,
        lba: Lba,
        page: impl FnOnce(u64) -> Option<P>,
    ) -> Option<MapLookup> {
        let (number, index) = self.block_map.locate(lba);
        match self.block_map.patches.get(number, index) {
            Some(bytes) => Some(of_patch(bytes, self.seed)),
            None => Some(page(number)?.lookup(index, lba, self.seed)),
        }
    }

    fn of_record(&self, record: MapEntry) -> BlockLocation {
        match record.kind {
            MapEntryKind::Deallocated => BlockLocation::Zeroes,
            MapEntryKind::Uncorrectable => BlockLocation::Bad(BadBlock::media(record.lba)),
            MapEntryKind::Stored => BlockLocation::Stored { slot: record.pbn, tuple: record.tuple },
        }
    }

    fn of_entry(&self, lba: Lba, entry: MapLookup) -> BlockLocation {
        match entry {
            MapLookup::Unwritten => BlockLocation::Zeroes,
            MapLookup::Mapped(record) if !self.plausible(&record) => BlockLocation::Bad(BadBlock::media(lba)),
            MapLookup::Mapped(record) => self.of_record(record),
            MapLookup::Stale { entry: record, expected } => {
                BlockLocation::Bad(tag_fault(lba, Field::StorageTag, u64::from(expected), u64::from(record.generation)))
            }
            MapLookup::Unreadable => BlockLocation::Bad(BadBlock::media(lba)),
            MapLookup::Damaged(raw) => match MapEntry::decode(&raw, self.seed) {
                // Whole and good, and of another block: it was written to the wrong place.
                Ok(other) => BlockLocation::Bad(tag_fault(lba, Field::RefTag, lba.get(), other.lba.get())),
                Err(_) => BlockLocation::Damaged(raw),
            },
        }
    }

    /// Says what is wrong with a block whose record does not check, given the data of the slot the record names.
    ///
    /// The record's own checksum tells that something is wrong; the data, the address, and the checksum again tell what. The
    /// guard is compared with the data. Other tags are searched for a value that makes the checksum right: among 2^16
    /// values of a tag that is not at fault, one does so by chance once in 2^16 damaged records.
    pub(crate) fn diagnose(&self, lba: Lba, raw: &[u8; MAP_ENTRY_BYTES], data: Option<&[u8]>) -> BadBlock {
        let record = MapEntry::decode_unchecked(raw);
        let (Some(format), Some(data)) = (self.geometry.protection, data) else { return BadBlock::media(lba) };
        if record.lba != lba {
            return BadBlock::media(lba);
        }
        let tuple = Tuple::read(format, record.tags(format));
        let due = guard::compute(format.guard(), data);
        if tuple.guard != due {
            return tag_fault(lba, Field::Guard, due, tuple.guard);
        }
        let mut references = likely_references(format, lba, tuple.ref_tag);
        if let Some(due) = references.find(|&ref_tag| self.holds(raw, format, &Tuple { ref_tag, ..tuple })) {
            return tag_fault(lba, Field::RefTag, due, tuple.ref_tag);
        }
        let mut app_tags = 0..=u16::MAX;
        match app_tags.find(|&app_tag| self.holds(raw, format, &Tuple { app_tag, ..tuple })) {
            Some(due) => tag_fault(lba, Field::AppTag, u64::from(due), u64::from(tuple.app_tag)),
            None => BadBlock::media(lba),
        }
    }

    /// Whether the record would check with this tuple.
    fn holds(&self, raw: &[u8; MAP_ENTRY_BYTES], format: PiFormat, tuple: &Tuple) -> bool {
        let mut bytes = *raw;
        tuple.write(format, &mut bytes[..format.tuple_bytes()]);
        MapEntry::decode(&bytes, self.seed).is_ok()
    }
}

/// What a record says that the tables do not have yet.
fn of_patch(bytes: [u8; MAP_ENTRY_BYTES], seed: Seed) -> MapLookup {
    MapEntry::decode(&bytes, seed).map_or(MapLookup::Damaged(bytes), MapLookup::Mapped)
}

/// What the reference tag of a block may have been. In Type 1 it is the address. In Types 2 and 3 it is the writer's choice:
/// often the address of the block, or of the first one of its write; else one that is not far from what is stored, or
/// differs from it in a bit.
fn likely_references(format: PiFormat, lba: Lba, stored: u64) -> impl Iterator<Item = u64> {
    let (mask, is_chosen) = (format.reference_tag_mask(), format.protection() != ProtectionType::Type1);
    let before = if is_chosen { lba.get().min(TAGS_TRIED) } else { 0 };
    let near = 0..if is_chosen { TAGS_TRIED / 2 } else { 0 };
    let bits = if is_chosen { 0..u64::BITS } else { 0..0 };
    (0..=before)
        .map(move |back| lba.get() - back)
        .chain(bits.map(move |bit| stored ^ 1 << bit))
        .chain(near.flat_map(move |by| [stored.wrapping_sub(by + 1), stored.wrapping_add(by + 1)]))
        .map(move |tag| tag & mask)
}

/// The fault of a tag.
pub(crate) fn tag_fault(lba: Lba, field: Field, expected: u64, actual: u64) -> BadBlock {
    BadBlock::new(lba, BadBlockCause::Tag(field), Some(expected), Some(actual))
}

/// Whether these data are the ones that a record was made for, as well as its checks can tell.
///
/// This decides after a crash whether a write had reached the medium, so it takes the strongest check that the record
/// has: the CRC-32C beside a 16-bit guard, or the guard itself.
pub(crate) fn data_match(record: &MapEntry, format: Option<PiFormat>, data: &[u8]) -> bool {
    match format {
        Some(format) if matches!(format.guard(), GuardKind::Crc32c | GuardKind::Crc64) => {
            record.guard_unverified
                || Tuple::read(format, record.tags(format)).guard == guard::compute(format.guard(), data)
        }
        _ => record.data_crc() == guard::crc32c(data),
    }
}
