//! Finding the data and the tags of a block.

use std::ops::Deref;

use sealblock_block::{BadBlock, BadBlockCause, Clock, Error, Medium};
use sealblock_integrity::{Field, GuardKind, PiFormat, ProtectionType, Tuple, guard};
use sealblock_units::{Extent, Lba};
use smallvec::SmallVec;

use crate::format::{MAP_ENTRY_BYTES, MapEntry, MapEntryKind};
use crate::map::map_page::{MapLookup, MapPage};
use crate::map::patches;
use crate::space::ReadGuard;
use crate::volume::Volume;

/// The number of reference tags that are tried if a map entry's checksum does not match: below the block's address, and
/// around the stored tag.
const MAX_TAGS_TRIED: u64 = u16::MAX as u64;

/// The location of one block's data.
#[derive(Clone, Copy)]
pub(crate) enum BlockLocation {
    /// The block reads as zeroes and has no tags.
    Zeroes,
    /// The data are in the physical block that this map entry names, with its tuple.
    Stored(MapEntry),
    /// The block is known to be bad without a check of its data.
    Bad(BadBlock),
    /// The map entry is invalid; the data may show which field is wrong.
    Damaged([u8; MAP_ENTRY_BYTES]),
}

/// The blocks of a request; usually one.
pub(crate) type LocatedBlocks = SmallVec<[BlockLocation; 1]>;

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Looks up all blocks of an extent at one moment, after reading the pages that are needed. The physical blocks
    /// that it finds stay in use until the guard is dropped.
    pub(crate) async fn locate(&self, extent: Extent) -> Result<(LocatedBlocks, ReadGuard<'_>), Error> {
        // Pages that are held stay in memory while further ones are read.
        let mut held = Vec::new();
        loop {
            // Nothing is awaited between the look-up and the guard on the physical blocks.
            if let Some(located) = self.locate_cached(extent) {
                return Ok((located, self.allocator.read()));
            }
            for (page, _) in self.layout.page_pieces(extent) {
                // Boxed, because it is rare: a future is moved several times before its first poll, with room for
                // everything that it may await.
                held.push(Box::pin(self.block_map.page(&self.medium, page)).await?);
            }
        }
    }

    /// Drops those map pages of these blocks that could be read only in part, so that they are read again.
    pub(crate) fn retry_map_pages(&self, extent: Extent) {
        self.layout.page_pieces(extent).for_each(|(page, _)| self.block_map.retry(page));
    }

    /// The same from memory alone; `None` if a page is not in memory.
    pub(crate) fn locate_cached(&self, extent: Extent) -> Option<LocatedBlocks> {
        let mut located = LocatedBlocks::with_capacity(extent.len() as usize);
        for (number, piece) in self.layout.page_pieces(extent) {
            let page = self.block_map.cached(number);
            let is_patched = piece.len() == 1 || self.block_map.patches.has_page(number);
            let first = self.block_map.locate(piece.start()).1;
            for (index, lba) in (first..).zip(piece.iter()) {
                if let Some(entry) = self.memtable.get(lba) {
                    located.push(self.location_of(entry));
                    continue;
                }
                let patch = if is_patched { self.block_map.patches.get(number, index) } else { None };
                let lookup = match patch {
                    Some(bytes) => patches::lookup_of(bytes, self.seed),
                    None => page.as_ref()?.lookup(index, lba, self.seed),
                };
                located.push(self.location_of_lookup(lba, lookup));
            }
        }
        Some(located)
    }

    /// The map entry of a block in the block map and its patches; `None` if its page is not in memory.
    pub(crate) fn lookup_cached(&self, lba: Lba) -> Option<MapLookup> {
        self.lookup_with(lba, |number| self.block_map.cached(number))
    }

    /// The same with a function that returns the block's page by its number. It is called only if there is no patch.
    pub(crate) fn lookup_with<P: Deref<Target = MapPage>>(
        &self,
        lba: Lba,
        page: impl FnOnce(u64) -> Option<P>,
    ) -> Option<MapLookup> {
        let (number, index) = self.block_map.locate(lba);
        match self.block_map.patches.get(number, index) {
            Some(bytes) => Some(patches::lookup_of(bytes, self.seed)),
            None => Some(page(number)?.lookup(index, lba, self.seed)),
        }
    }

    /// The same for each block of an extent in one page, in order, given that page.
    pub(crate) fn lookup_each(&self, number: u64, page: &MapPage, extent: Extent, mut see: impl FnMut(Lba, MapLookup)) {
        let first = self.block_map.locate(extent.start()).1 as u16;
        self.block_map.patches.each(number, first..first + extent.len() as u16, |index, patched| {
            let lba = Lba::new(extent.start().get() + u64::from(index - first));
            see(lba, patched.unwrap_or_else(|| page.lookup(usize::from(index), lba, self.seed)));
        });
    }

    fn location_of(&self, entry: MapEntry) -> BlockLocation {
        match entry.kind {
            MapEntryKind::Deallocated => BlockLocation::Zeroes,
            MapEntryKind::Uncorrectable => BlockLocation::Bad(BadBlock::media(entry.lba)),
            MapEntryKind::Stored => BlockLocation::Stored(entry),
        }
    }

    fn location_of_lookup(&self, lba: Lba, lookup: MapLookup) -> BlockLocation {
        match lookup {
            MapLookup::Unwritten => BlockLocation::Zeroes,
            MapLookup::Mapped(entry) if !self.layout.holds(&entry) => BlockLocation::Bad(BadBlock::media(lba)),
            MapLookup::Mapped(entry) => self.location_of(entry),
            MapLookup::Stale { entry, expected } => {
                BlockLocation::Bad(bad_tag(lba, Field::StorageTag, u64::from(expected), u64::from(entry.generation)))
            }
            MapLookup::Unreadable => BlockLocation::Bad(BadBlock::media(lba)),
            MapLookup::Damaged(raw) => match MapEntry::decode(&raw, self.seed) {
                // Valid, but of another block: a misdirected write.
                Ok(other) => BlockLocation::Bad(bad_tag(lba, Field::RefTag, lba.get(), other.lba.get())),
                Err(_) => BlockLocation::Damaged(raw),
            },
        }
    }

    /// Determines the fault of a block whose map entry is invalid, from the data of the physical block that the map
    /// entry names.
    ///
    /// The map entry's checksum shows that something is wrong; data, address and checksum show what. The guard is
    /// compared with the data. Other tags are searched for a value that makes the checksum match: among 2^16 values of
    /// an undamaged tag, one does so by chance once in 2^16 damaged map entries.
    pub(crate) fn diagnose(&self, lba: Lba, raw: &[u8; MAP_ENTRY_BYTES], data: Option<&[u8]>) -> BadBlock {
        let entry = MapEntry::decode_unchecked(raw);
        let (Some(format), Some(data)) = (self.geometry.protection, data) else { return BadBlock::media(lba) };
        if entry.lba != lba {
            return BadBlock::media(lba);
        }
        let tuple = Tuple::read(format, entry.tags(format));
        let due = guard::compute(format.guard(), data);
        if tuple.guard != due {
            return bad_tag(lba, Field::Guard, due, tuple.guard);
        }
        let mut references = likely_references(format, lba, tuple.ref_tag);
        if let Some(due) = references.find(|&ref_tag| self.matches(raw, format, &Tuple { ref_tag, ..tuple })) {
            return bad_tag(lba, Field::RefTag, due, tuple.ref_tag);
        }
        let mut app_tags = 0..=u16::MAX;
        match app_tags.find(|&app_tag| self.matches(raw, format, &Tuple { app_tag, ..tuple })) {
            Some(due) => bad_tag(lba, Field::AppTag, u64::from(due), u64::from(tuple.app_tag)),
            None => BadBlock::media(lba),
        }
    }

    /// True if the map entry would be valid with this tuple.
    fn matches(&self, raw: &[u8; MAP_ENTRY_BYTES], format: PiFormat, tuple: &Tuple) -> bool {
        let mut bytes = *raw;
        tuple.write(format, &mut bytes[..format.tuple_bytes()]);
        MapEntry::decode(&bytes, self.seed).is_ok()
    }
}

/// Candidates for the reference tag of a block. In Type 1 it is the address. In Types 2 and 3 it is the writer's
/// choice: often the address of the block, or of the first one of its write; otherwise one near the stored value, or
/// one that differs from it in a bit.
fn likely_references(format: PiFormat, lba: Lba, stored: u64) -> impl Iterator<Item = u64> {
    let (mask, is_chosen) = (format.reference_tag_mask(), format.protection() != ProtectionType::Type1);
    let before = if is_chosen { lba.get().min(MAX_TAGS_TRIED) } else { 0 };
    let near = 0..if is_chosen { MAX_TAGS_TRIED / 2 } else { 0 };
    let bits = if is_chosen { 0..u64::BITS } else { 0..0 };
    (0..=before)
        .map(move |back| lba.get() - back)
        .chain(bits.map(move |bit| stored ^ 1 << bit))
        .chain(near.flat_map(move |by| [stored.wrapping_sub(by + 1), stored.wrapping_add(by + 1)]))
        .map(move |tag| tag & mask)
}

/// The fault of a tag.
pub(crate) fn bad_tag(lba: Lba, field: Field, expected: u64, actual: u64) -> BadBlock {
    BadBlock::new(lba, BadBlockCause::Tag(field), Some(expected), Some(actual))
}

/// True if these data match the map entry, as far as its checks show.
///
/// This decides after a crash whether a write had reached the medium, so it takes the strongest check that the map
/// entry has: the CRC-32C beside a 16-bit guard, or the guard itself.
pub(crate) fn data_match(entry: &MapEntry, format: Option<PiFormat>, data: &[u8]) -> bool {
    match format.filter(|format| !has_data_crc(Some(*format))) {
        Some(format) => {
            entry.guard_unverified
                || Tuple::read(format, entry.tags(format)).guard == guard::compute(format.guard(), data)
        }
        None => entry.data_crc() == guard::crc32c(data),
    }
}

/// True if map entries of this format have a CRC-32C of the data besides the tuple: if the guard is short or missing.
pub(crate) fn has_data_crc(format: Option<PiFormat>) -> bool {
    format.is_none_or(|format| matches!(format.guard(), GuardKind::Crc16 | GuardKind::IpChecksum))
}

/// The volume's own check of a stored block; true if there is a seal to check its data against. That is the guard.
/// Without a tuple, or if the host wrote a guard that does not match, it is the CRC-32C beside it, for which long
/// guards leave no room.
///
/// # Errors
/// The bad block.
pub(crate) fn check_block(entry: &MapEntry, format: Option<PiFormat>, data: &[u8]) -> Result<bool, BadBlock> {
    let proven = format.filter(|_| !entry.guard_unverified);
    let has_seal = proven.is_some() || has_data_crc(format);
    let (actual, expected) = match proven {
        Some(format) => (Tuple::read(format, entry.tags(format)).guard, guard::compute(format.guard(), data)),
        None if has_seal => (u64::from(entry.data_crc()), u64::from(guard::crc32c(data))),
        None => (0, 0),
    };
    if actual != expected {
        return Err(bad_tag(entry.lba, Field::Guard, expected, actual));
    }
    let addressed = format.filter(|format| format.protection() == ProtectionType::Type1);
    let tuple = addressed.map(|format| (format, Tuple::read(format, entry.tags(format))));
    match tuple.filter(|(format, tuple)| !tuple.is_escaped(*format)) {
        Some((format, tuple)) if tuple.ref_tag != format.reference_tag(entry.lba.get(), 0) => {
            let expected = format.reference_tag(entry.lba.get(), 0);
            Err(bad_tag(entry.lba, Field::RefTag, expected, tuple.ref_tag))
        }
        _ => Ok(has_seal),
    }
}
