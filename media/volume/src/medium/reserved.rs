//! The reserved area: small durable areas besides the blocks, for the layers above: a group label and the state of
//! scrubs.
//!
//! Each area has two places, which are written in turn, so one of them is always intact. Each place has two copies, one
//! after a superblock and one in the tail, so that the loss of either end of the volume does no harm. Bitmap pages are
//! stored after the group map and written in place; their reader must detect torn ones.

use std::cell::{Cell, RefCell};

use sealblock_block::{AsyncMutex, Condition, Error, ErrorKind, Medium, ReservedArea};
use sealblock_runtime_memory::Slice;

use crate::format::{BITMAP_PAGE_BYTES, HighWaterMark, Layout, RESERVED_HEAD_BYTES, ReservedCopy, Seed, Superblock};
use crate::medium::lost_copies::LostCopies;
use crate::medium::padded;

/// The areas of a volume.
pub(crate) struct ReservedAreas {
    layout: Layout,
    seed: Seed,
    /// They were zeroed when the volume was created.
    were_zeroed: bool,
    /// The number of durable writes of each area before this open, at least.
    written_before: [u64; ReservedArea::ALL.len()],
    lost_copies: LostCopies,
    /// Held during a read or write of an area, and a write of a bitmap page.
    turns: AsyncMutex,
    write_seqs: [Cell<Option<u64>>; ReservedArea::ALL.len()],
    /// Copies of the newest content that were found lost and have not been rewritten.
    lost: [Cell<Lost>; ReservedArea::ALL.len()],
    found_lost: Condition,
    /// The content of the areas that have been read or written.
    held: RefCell<[Option<Slice>; ReservedArea::ALL.len()]>,
}

/// Lost copies of the newest content of an area.
#[derive(Clone, Copy, Default)]
struct Lost {
    copies: u64,
    /// Nothing durable shows that their write was complete.
    is_maybe_cut_off: bool,
}

/// An area, for messages.
fn name(area: ReservedArea) -> &'static str {
    match area {
        ReservedArea::GroupLabel => "the label of a group",
        ReservedArea::ScrubState => "the scrub state",
        ReservedArea::Bitmap { .. } => "a bitmap",
    }
}

impl ReservedAreas {
    /// The areas of a volume with this superblock and high-water mark; copies found lost are counted.
    pub fn new(superblock: &Superblock, mark: &HighWaterMark, lost_copies: LostCopies) -> ReservedAreas {
        ReservedAreas {
            layout: superblock.layout,
            seed: superblock.seed(),
            were_zeroed: superblock.areas_were_zeroed,
            written_before: [superblock.labels_written.max(mark.labels), mark.scrub_states],
            lost_copies,
            turns: AsyncMutex::default(),
            write_seqs: Default::default(),
            lost: Default::default(),
            found_lost: Condition::default(),
            held: RefCell::default(),
        }
    }

    /// The content of an area; empty if it was never written.
    ///
    /// # Errors
    /// When a label was written and no copy of it is left: a member of a group must not look like a device that never
    /// was one.
    pub async fn read<M: Medium>(&self, medium: &M, area: ReservedArea) -> Result<Slice, Error> {
        if let ReservedArea::Bitmap { page } = area {
            let (read, bytes) = medium.read(self.bitmap_page(page)?, medium.buffer(BITMAP_PAGE_BYTES as usize)).await;
            read?;
            return Ok(bytes.freeze());
        }
        let _alone = self.turns.lock().await;
        self.load(medium, area).await
    }

    async fn load<M: Medium>(&self, medium: &M, area: ReservedArea) -> Result<Slice, Error> {
        if let Some(held) = &self.held.borrow()[area.index()] {
            return Ok(held.clone());
        }
        let (mut write_seqs, mut failed, mut salts, mut traces) = ([None; 4], [0; 2], [None; 4], 0);
        let mut newest: Option<ReservedCopy> = None;
        for (at, offset) in [0, 1].into_iter().flat_map(|turn| self.layout.reserved_offsets(area, turn)).enumerate() {
            let room = medium.buffer(area.max_bytes() + RESERVED_HEAD_BYTES);
            let (read, bytes) = medium.read(offset, room).await;
            // A single unreadable copy counts as a damaged one. If both copies of a place are unreadable, they may be
            // the newest, so the read fails.
            failed[at / 2] += usize::from(read.is_err());
            if let (Err(error), 2) = (&read, failed[at / 2]) {
                let reason = format!("cannot read either copy of the reserved area: {error}");
                return Err(ErrorKind::Media { reason }.into());
            }
            // The place of even numbers is first written by the second write, when the first one is durable. So after a
            // crash its copies are never the only ones with content.
            traces += usize::from(at < 2 && read.is_ok() && bytes.iter().any(|byte| *byte != 0));
            salts[at] = ReservedCopy::trace_salt(&bytes, area, at as u64 / 2).filter(|_| read.is_ok());
            let found = read.ok().and_then(|()| ReservedCopy::decode(&bytes, area, self.seed));
            // A copy in the place of the other parity was misdirected or forged.
            let Some(found) = found.filter(|found| found.write_seq % 2 == at as u64 / 2) else { continue };
            write_seqs[at] = Some(found.write_seq);
            if newest.as_ref().is_none_or(|newest| newest.write_seq < found.write_seq) {
                newest = Some(found);
            }
        }
        if let Some(newest) = &newest {
            // An intact older copy was not reached by the last write. A crash can cause that; it is no loss.
            let twins = &write_seqs[(newest.write_seq % 2 * 2) as usize..][..2];
            let lost = twins.iter().filter(|write_seq| write_seq.is_none()).count() as u64;
            // Both copies are written before a sync, and what is counted as durable came after it. Behind that a crash can have torn one.
            let is_maybe_cut_off = newest.write_seq > self.written_before[area.index()];
            self.set_lost(area, Lost { copies: lost, is_maybe_cut_off });
            // Only the place of the newest content counts: an earlier volume may have left records in places that were
            // never written.
            let salts = &salts[(newest.write_seq % 2 * 2) as usize..][..2];
            let foreign = twins.iter().zip(salts).filter(|(write_seq, _)| write_seq.is_none());
            foreign
                .filter_map(|(_, salt)| *salt)
                .for_each(|salt| self.lost_copies.add_foreign("the reserved areas", salt, 1));
        }
        let write_seq = newest.as_ref().map_or(0, |newest| newest.write_seq);
        let due = self.written_before[area.index()];
        // The next number follows the highest one that was ever used.
        self.write_seqs[area.index()].set(Some(write_seq.max(due)));
        // If the areas were not zeroed, records of an earlier volume may be there.
        let is_lost = traces == 2 && self.were_zeroed && area == ReservedArea::GroupLabel;
        let reason = match (area, &newest) {
            (ReservedArea::ScrubState, _) if write_seq < due => return Ok(self.forget_scrub_state()),
            (_, Some(_)) if write_seq < due => "the label of a group was put back to an earlier state",
            (_, None) if due > 0 || is_lost => {
                "every copy of the label of a group is lost, damaged or another volume's"
            }
            _ => return Ok(self.hold(area, newest)),
        };
        Err(ErrorKind::Media { reason: reason.to_owned() }.into())
    }

    /// A scrub state that was restored from an earlier state or is lost counts as none, and nothing from an earlier
    /// scrub is used.
    fn forget_scrub_state(&self) -> Slice {
        tracing::warn!(
            "the state of the scrub and the list of bad blocks were put back to an earlier state, or are lost: the scrub starts over, and bad blocks that were known are not known any more"
        );
        let area = ReservedArea::ScrubState;
        // An empty area may not be written in its place: it would say that no block was ever known to be bad.
        self.set_lost(area, Lost::default());
        self.lost_copies.set_scrub_state_lost(true);
        self.hold(area, None)
    }

    /// Counts what is lost of an area, in place of what was lost of it before.
    fn set_lost(&self, area: ReservedArea, lost: Lost) {
        let before = self.lost[area.index()].replace(lost);
        self.lost_copies.remove_of_area(before.copies, before.is_maybe_cut_off);
        self.lost_copies.add_of_area(lost.copies, lost.is_maybe_cut_off);
        self.found_lost.notify();
    }

    /// Waits until a copy is lost that has not been rewritten.
    pub async fn wait_for_lost(&self) {
        self.found_lost.wait_until(|| self.lost.iter().any(|lost| lost.get().copies > 0)).await;
    }

    /// Caches the content of an area.
    fn hold(&self, area: ReservedArea, newest: Option<ReservedCopy>) -> Slice {
        let held = Slice::copy_from(newest.as_ref().map_or(&[][..], |newest| &newest.bytes));
        self.held.borrow_mut()[area.index()] = Some(held.clone());
        held
    }

    /// The number of durable writes of an area.
    pub fn writes(&self, area: ReservedArea) -> u64 {
        let known = self.write_seqs[area.index()].get().unwrap_or(0);
        known.max(self.written_before[area.index()])
    }

    /// The offset of a bitmap page.
    fn bitmap_page(&self, page: u32) -> Result<u64, Error> {
        let limit = u64::from(self.layout.bitmap_pages());
        if u64::from(page) >= limit {
            return Err(ErrorKind::Limit { what: "bitmap page", limit, actual: u64::from(page) }.into());
        }
        Ok(self.layout.bitmap_offset() + u64::from(page) * BITMAP_PAGE_BYTES)
    }

    /// Replaces the content of an area. It is durable on return, after `sync` of the medium, which covers other writes,
    /// too.
    pub async fn write<M: Medium>(
        &self,
        medium: &M,
        area: ReservedArea,
        bytes: &Slice,
        sync: impl AsyncFnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        if let ReservedArea::Bitmap { page } = area {
            let bytes = padded(medium, bytes, BITMAP_PAGE_BYTES as usize);
            {
                let _in_order = self.turns.lock().await;
                // As below: a dropped write may still be in flight, and could overwrite this one.
                medium.drain().await;
                medium.write(self.bitmap_page(page)?, bytes).await?;
            }
            return sync().await;
        }
        let _alone = self.turns.lock().await;
        self.write_alone(medium, area, bytes, sync).await
    }

    /// The same for an area with copies, while `turns` is held.
    async fn write_alone<M: Medium>(
        &self,
        medium: &M,
        area: ReservedArea,
        bytes: &Slice,
        sync: impl AsyncFnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        // A dropped write may still be in flight, and could overwrite the same copy.
        medium.drain().await;
        if self.write_seqs[area.index()].get().is_none() {
            let loaded = self.load(medium, area).await;
            // A label of which nothing is left may be replaced, but an unreadable one may still exist.
            if self.write_seqs[area.index()].get().is_none() {
                loaded?;
            }
        }
        let write_seq = self.write_seqs[area.index()].get().unwrap_or(0) + 1;
        let copy = ReservedCopy { write_seq, bytes: bytes.to_vec() };
        let encoded = copy.encode(area, self.seed);
        let sector = self.layout.sector_bytes() as usize;
        let bytes_written = padded(medium, &encoded, encoded.len().next_multiple_of(sector));
        let [start, tail] = self.layout.reserved_offsets(area, write_seq);
        medium.write(start, bytes_written.clone()).await?;
        let second = medium.write(tail, bytes_written).await;
        if let Err(error) = &second {
            tracing::warn!(%error, "cannot write the second copy of the reserved area");
        }
        sync().await?;
        // Both copies are new, in the other place. So the lost copies of the former content do not matter any more.
        self.set_lost(area, Lost { copies: u64::from(second.is_err()), is_maybe_cut_off: false });
        if area == ReservedArea::ScrubState {
            self.lost_copies.set_scrub_state_lost(false);
        }
        self.write_seqs[area.index()].set(Some(write_seq));
        self.held.borrow_mut()[area.index()] = Some(Slice::copy_from(bytes));
        Ok(())
    }

    /// Rewrites the areas of which a copy was found lost.
    pub async fn mend<M: Medium>(&self, medium: &M, sync: impl AsyncFn() -> Result<(), Error>) -> Result<(), Error> {
        for area in ReservedArea::ALL {
            // The content may not change between here and its rewrite, which would undo the change.
            let _alone = self.turns.lock().await;
            let held = self.held.borrow()[area.index()].clone();
            let lost = self.lost[area.index()].get().copies;
            if let Some(held) = held.filter(|_| lost > 0) {
                self.write_alone(medium, area, &held, &sync).await?;
                tracing::warn!("lost copies of {} were rewritten", name(area));
            }
        }
        Ok(())
    }
}
