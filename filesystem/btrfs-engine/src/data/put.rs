//! Whole sectors are written: to new extents, or in place, with their checksums, before a change makes them visible.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::rc::Rc;

use sealblock_btrfs_format::items::file_extent::Compression;
use sealblock_btrfs_format::key::objectid;
use sealblock_runtime_memory::Slice;

use super::compress::{Segment, segments};
use super::files::{FileLock, InPlaceWrite};
use super::info::{FileInfo, ITEMS_OF_A_STEP};
use super::io::{Content, Reserved, Sent, sums_in_flight, write_all};
use crate::engine::{Engine, EngineError};
use crate::file_map::{DiskExtent, ExtentPart, FileEdit, FileMapError, Mark, Order};
use crate::reserve::TreeCost;
use crate::view::Items;
use sealblock_btrfs_format::compress::encode::Method;

/// Bytes of the items for one extent: the file's, and what is cut of its neighbours.
const ITEM_BYTES: u64 = 3 * 78;

/// What whole sectors of the file are to have.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub start: u64,
    pub content: Content,
}

impl Piece {
    pub fn new(start: u64, data: Slice) -> Piece {
        Piece { start, content: data.into() }
    }

    pub fn end(&self) -> u64 {
        self.start + self.content.bytes()
    }
}

/// Sectors of a file that are written where they are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct InPlaceRun {
    /// The bytes of the file.
    pub bytes: Range<u64>,
    /// The logical address of the first one.
    pub logical: u64,
    /// True if they were allocated and never written.
    pub is_prealloc: bool,
    /// The transaction that the file's item has.
    pub generation: u64,
}

/// What is to be written.
pub(super) struct Put {
    /// By rising places, and not overlapping. Only the last one may be written in part.
    pub pieces: Vec<Piece>,
    /// What of that is written in place.
    pub in_place: Vec<InPlaceRun>,
    /// To be held as long as something is written in place.
    pub in_place_write: Option<Rc<InPlaceWrite>>,
    /// How it is compressed.
    pub method: Option<Method>,
}

impl Put {
    /// To be written to new space, as it is.
    pub fn plain(pieces: Vec<Piece>) -> Put {
        Put { pieces, in_place: Vec::new(), in_place_write: None, method: None }
    }
}

/// An extent that was written, or a part of one.
struct Extent {
    start: u64,
    plain_bytes: u64,
    logical: u64,
    stored: Content,
    compression: Compression,
    place: ExtentPlace,
    /// The transaction that the file's item gets, or has: that in which the space was allocated, unless the item is older.
    /// Others can have had the space only before it.
    generation: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ExtentPlace {
    New,
    Preallocated,
    InPlace,
}

/// What was written, and is not visible yet.
pub(super) struct Written<'e> {
    reserved: Reserved<'e>,
    extents: Vec<Extent>,
    sums: Vec<(u64, Vec<u8>)>,
    /// The byte of the file behind the last one that was written.
    pub end: u64,
}

impl Written<'_> {
    /// Plans the changes of the file's items.
    pub fn plan<T: Items>(&self, edit: &mut FileEdit<'_, T>) -> Result<(), FileMapError> {
        for extent in &self.extents {
            let bytes = extent.start..extent.start + extent.plain_bytes;
            match extent.place {
                ExtentPlace::New => {
                    edit.drop_range(bytes, Order::FromStart, NonZeroUsize::MAX)?;
                    edit.insert(extent.part())?;
                }
                ExtentPlace::Preallocated => {
                    edit.mark_written(bytes, Mark::Keep, NonZeroUsize::MAX)?;
                }
                ExtentPlace::InPlace => {}
            }
        }
        Ok(())
    }

    /// The addresses and bytes of new extents.
    pub fn new_extents(&self) -> Vec<(u64, u64)> {
        let new = self.extents.iter().filter(|extent| extent.place == ExtentPlace::New);
        new.map(|extent| (extent.logical, extent.stored.bytes())).collect()
    }

    /// The checksums by addresses.
    pub fn sums(&self) -> &[(u64, Vec<u8>)] {
        &self.sums
    }

    /// True if it changes nothing but data that are where they were.
    pub fn is_in_place(&self) -> bool {
        self.extents.iter().all(|extent| extent.place == ExtentPlace::InPlace)
    }

    /// True if some data were written over old ones.
    pub fn has_in_place(&self) -> bool {
        self.extents.iter().any(|extent| extent.place == ExtentPlace::InPlace)
    }

    /// It is visible.
    pub fn keep(self) {
        self.reserved.keep();
    }
}

impl Extent {
    fn part(&self) -> ExtentPart {
        let (bytenr, bytes, generation) = (self.logical, self.stored.bytes(), self.generation);
        let extent = DiskExtent { bytenr, bytes, plain_bytes: self.plain_bytes, compression: self.compression };
        let (start, bytes) = (self.start, self.plain_bytes);
        ExtentPart { start, bytes, generation, is_prealloc: false, extent, offset: 0 }
    }
}

impl Engine {
    /// Writes whole sectors of a locked file, with their checksums. If space is scattered, it is as much as makes a
    /// step.
    ///
    /// # Errors
    /// If there is no space, or no copy of a sector can be written.
    pub(super) async fn put(&self, lock: &Rc<FileLock>, info: &FileInfo, put: Put) -> Result<Written<'_>, EngineError> {
        let mut reserved = Reserved::new(self);
        let (mut extents, end) = self.place_pieces(info, &put, &mut reserved).await?;
        // What is written where the file has it stays locked until the devices have answered.
        let has_old_space = extents.iter().any(|extent| extent.place != ExtentPlace::New);
        let held = (has_old_space.then(|| Rc::clone(lock)), put.in_place_write);
        let storage = self.storage();
        let tag_of = |extent: &Extent| (!info.file.has_sums).then_some(extent.generation);
        let sent = |extent: &Extent| Sent {
            logical: extent.logical,
            content: extent.stored.clone(),
            generation: tag_of(extent),
        };
        let data: Vec<Sent> = extents.iter().map(sent).collect();
        let is_in_place = extents.iter().any(|extent| extent.place == ExtentPlace::InPlace);
        reserved.send(write_all(storage.clone(), data.clone(), held), is_in_place);
        let geometry = *storage.geometry();
        let summed = if info.file.has_sums { &data[..] } else { &[] };
        let kind = (geometry.checksum, geometry.sector_bytes as usize);
        let (sums, outcome) = sums_in_flight(&mut reserved, summed, kind).await;
        self.judge_write(&storage, outcome, info.file.has_sums)?;
        extents.sort_by_key(|extent| extent.start);
        Ok(Written { reserved, extents, sums, end })
    }

    /// Finds a place for each piece. Returns how far it came in the last one.
    async fn place_pieces(
        &self,
        info: &FileInfo,
        put: &Put,
        reserved: &mut Reserved<'_>,
    ) -> Result<(Vec<Extent>, u64), EngineError> {
        let (mut extents, mut end) = (Vec::new(), 0);
        for (index, piece) in put.pieces.iter().enumerate() {
            let is_last = index + 1 == put.pieces.len();
            end = piece.start;
            for (range, run) in cut(piece, &put.in_place) {
                let data = piece.content.part(range.start - piece.start..range.end - piece.start);
                if let Some(run) = run {
                    extents.push(in_place(&range, run, data));
                    end = range.end;
                    continue;
                }
                for segment in segments(range.start, &data, info.file.sector_bytes, put.method) {
                    let is_full = |extents: &Vec<Extent>| is_last && extents.len() >= ITEMS_OF_A_STEP.get();
                    end = self.place_segment(info, segment, reserved, &mut extents, is_full).await?;
                    if is_full(&extents) {
                        return Ok((extents, end));
                    }
                }
            }
        }
        Ok((extents, end))
    }

    /// Allocates the space of a segment, in as few parts as there are. Returns how far it came.
    async fn place_segment(
        &self,
        info: &FileInfo,
        segment: Segment,
        reserved: &mut Reserved<'_>,
        extents: &mut Vec<Extent>,
        is_full: impl Fn(&Vec<Extent>) -> bool,
    ) -> Result<u64, EngineError> {
        let Segment { start, mut plain, mut stored, mut compression } = segment;
        let plain_bytes = plain.bytes();
        let (mut at, mut left) = (start, stored.bytes());
        while left > 0 && !is_full(extents) {
            let space = self.allocate(left, self.cost_of(info, left)).await?;
            let bytes = space.end - space.start;
            reserved.push(space.clone());
            if compression != Compression::None && bytes < left {
                // Its stream is in one piece. The space is kept for a part of the data as they are.
                (stored, compression) = (plain.clone(), Compression::None);
                left = plain_bytes;
            }
            let (taken, logical, place) = (bytes.min(left), space.start, ExtentPlace::New);
            let part = stored.part(0..taken);
            stored = stored.part(taken..stored.bytes());
            let plain_bytes = if compression == Compression::None { taken } else { plain_bytes };
            plain = plain.part(plain_bytes..plain.bytes());
            let generation = self.transaction().borrow().generation();
            extents.push(Extent { start: at, plain_bytes, logical, stored: part, compression, place, generation });
            (at, left) = (at + plain_bytes, left - taken);
        }
        Ok(at)
    }

    /// What an extent and its checksums may cost.
    fn cost_of(&self, info: &FileInfo, bytes: u64) -> TreeCost {
        if !info.file.has_sums {
            return TreeCost { tree: info.file.root, changes: 6, bytes: ITEM_BYTES };
        }
        let geometry = *self.transaction().borrow().geometry();
        let sums = bytes / u64::from(geometry.sector_bytes) * geometry.checksum.bytes() as u64;
        TreeCost { tree: objectid::CSUM_TREE, changes: 6, bytes: ITEM_BYTES + sums }
    }
}

/// The parts of a piece, with the run in which each is written in place.
fn cut<'r>(piece: &Piece, runs: &'r [InPlaceRun]) -> Vec<(Range<u64>, Option<&'r InPlaceRun>)> {
    let (mut parts, mut at, end) = (Vec::new(), piece.start, piece.end());
    for run in runs.iter().filter(|run| run.bytes.end > piece.start && run.bytes.start < end) {
        let (from, to) = (run.bytes.start.max(at), run.bytes.end.min(end));
        if at < from {
            parts.push((at..from, None));
        }
        parts.push((from..to, Some(run)));
        at = to;
    }
    if at < end {
        parts.push((at..end, None));
    }
    parts
}

fn in_place(range: &Range<u64>, run: &InPlaceRun, stored: Content) -> Extent {
    let place = if run.is_prealloc { ExtentPlace::Preallocated } else { ExtentPlace::InPlace };
    let logical = run.logical + (range.start - run.bytes.start);
    let (start, plain_bytes, generation) = (range.start, range.end - range.start, run.generation);
    Extent { start, plain_bytes, logical, stored, compression: Compression::None, place, generation }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_cut_at_what_is_written_in_place() {
        let piece = Piece { start: 100, content: Content::Zeroes(50) };
        let run =
            |bytes: Range<u64>| InPlaceRun { logical: 1000 + bytes.start, bytes, is_prealloc: true, generation: 7 };
        let runs = [run(50..110), run(120..130), run(145..200)];
        let cut = cut(&piece, &runs);
        let parts: Vec<(Range<u64>, Option<u64>)> =
            cut.into_iter().map(|(range, run)| (range, run.map(|run| run.bytes.start))).collect();
        let expected =
            [(100..110, Some(50)), (110..120, None), (120..130, Some(120)), (130..145, None), (145..150, Some(145))];
        assert_eq!(parts, expected);
        assert_eq!(in_place(&(146..150), &runs[2], Content::Zeroes(4)).logical, 1146);
    }
}
