//! Noting changes: how map entries are written to the place of notes, and from there into the memtable. See `notes`.

use std::ops::Range;

use sealblock_block::{Clock, Error, Medium, MediumError, NoteKeeping, yield_once};
use sealblock_runtime_memory::Buffer;

use crate::format::{Answered, MapEntryKind, MapEntryRun, NOTE_PAGE_BYTES, NotesPlace};
use crate::log::notes::{Half, Leader, Pending, Way};
use crate::options::Mutation;
use crate::space::free_map::Run;
use crate::volume::Volume;

/// The place of notes takes at most this fraction of the spare physical blocks of its block group.
const SPARE_PART: u64 = 4;
/// Bytes of zeroes written at a time.
const ZEROES_BYTES: u64 = 1 << 20;

/// Map entries of a change that is not in the memtable yet, by their numbers in the order of [`Volume::enter`]. When this is dropped
/// with the change, those that are still pending never get there: what was dropped does not take effect later, when other changes of
/// these blocks may have completed.
#[must_use = "dropping it gives the map entries up"]
pub(crate) struct Entering<'a, M: Medium, C> {
    volume: &'a Volume<M, C>,
    numbers: Range<u64>,
}

impl<M: Medium, C> Drop for Entering<'_, M, C> {
    fn drop(&mut self) {
        let (notes, done) = (&self.volume.notes, self.volume.notes.done.get());
        if self.volume.mutation.is(Mutation::NoteDropped) {
            return;
        }
        let mut freed = Vec::new();
        for number in self.numbers.start.max(done)..self.numbers.end {
            let mut pending = notes.pending.borrow_mut();
            let Some(pending) = pending.get_mut((number - done) as usize) else { break };
            pending.is_dropped = true;
            if pending.entries.first.kind == MapEntryKind::Stored {
                freed.push((pending.group, pending.entries.first.pbn));
            }
        }
        // Their data are written: only a change that has written its data enters map entries.
        freed.into_iter().for_each(|(group, pbn)| self.volume.allocator.release(group, &[(pbn, 1)]));
    }
}

impl<M: Medium, C: Clock> Entering<'_, M, C> {
    /// Waits until these map entries, and all that were given to [`Volume::enter`] before them, are noted and in the
    /// memtable.
    ///
    /// # Errors
    /// When the volume has failed, or can neither note changes nor make them durable.
    pub(crate) async fn noted(self) -> Result<(), Error> {
        let (volume, notes, end) = (self.volume, &self.volume.notes, self.numbers.end);
        if volume.mutation.is(Mutation::NoteLate) && end < notes.done.get() + 8 {
            // An injected fault: changes complete before they are noted.
            std::mem::forget(self);
            return Ok(());
        }
        while notes.done.get() < end {
            if notes.is_led.replace(true) {
                notes.changed.wait_until(|| notes.done.get() >= end || !notes.is_led.get()).await;
                continue;
            }
            let _leader = Leader(notes);
            if volume.changes.get() > 1 {
                yield_once().await;
            }
            volume.note_all().await?;
        }
        Ok(())
    }
}

/// The result of a step of the leader.
enum Step {
    /// Nothing is pending.
    Done,
    /// The half is full.
    Full,
    Failed(MediumError),
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Submits the map entries of a change whose data are written. [`Entering::noted`] puts them into the memtable,
    /// unless they need no notes and are there at once.
    pub(crate) fn enter(&self, entries: impl Iterator<Item = Pending>) -> Entering<'_, M, C> {
        let asked = &self.notes.asked;
        let first = asked.get();
        for pending in entries {
            if self.notes.way.get() == Way::Noted {
                asked.set(asked.get() + 1);
                self.notes.pending.borrow_mut().push_back(pending);
            } else {
                self.put(pending);
                self.commits.schedule();
            }
        }
        Entering { volume: self, numbers: first..asked.get() }
    }

    /// Puts map entries into the memtable.
    fn put(&self, Pending { group, entries, moved_from, .. }: Pending) {
        match (moved_from, entries.first.kind) {
            (Some(from), _) if !self.is_still_at(&entries, from) => {
                self.allocator.release(group, &[(entries.first.pbn, 1)]);
            }
            (_, MapEntryKind::Stored) => {
                self.replace(group, entries.first);
                if moved_from.is_some() {
                    self.upkeep.count(|counts| counts.blocks_moved += 1);
                }
            }
            (_, MapEntryKind::Deallocated | MapEntryKind::Uncorrectable) => self.replace_run(group, entries),
        }
    }

    /// True if a moved block was not changed meanwhile.
    fn is_still_at(&self, entry: &MapEntryRun, from: u32) -> bool {
        let now = self.stored_entry_now(entry.first.lba).flatten();
        now.is_some_and(|now| now.pbn == from) || self.mutation.is(Mutation::MoveOverNewer)
    }

    /// Notes everything that is pending and puts it into the memtable. Waits for a commit if the half is full.
    async fn note_all(&self) -> Result<(), Error> {
        loop {
            // The notes of a failed volume may never become durable, so their changes do not complete.
            if self.has_failed() {
                return Err(self.failed());
            }
            let halves = self.notes.halves.get();
            match self.note_pending() {
                Step::Done => return Ok(()),
                Step::Full => {
                    self.commits.request_space();
                    let is_over = || self.notes.halves.get() != halves || self.has_failed();
                    self.notes.changed.wait_until(is_over).await;
                    if self.has_failed() {
                        return Err(self.failed());
                    }
                }
                Step::Failed(error) => {
                    tracing::warn!(%error, "cannot note changes; they are made durable before they are answered from now on");
                    // Boxed, so that the usual write does not allocate for a rare case.
                    Box::pin(self.give_notes_up()).await?;
                }
            }
        }
    }

    /// Notes pending map entries, as many as fit, and puts them into the memtable.
    fn note_pending(&self) -> Step {
        loop {
            let front =
                self.notes.pending.borrow().front().map(|front| (front.entries, front.moved_from, front.is_dropped));
            let Some((entries, moved_from, is_dropped)) = front else { return Step::Done };
            if is_dropped {
                self.notes.pending.borrow_mut().pop_front();
                self.notes.finish(1);
                continue;
            }
            // A moved block is compared only when the memtable has everything that was pending before it.
            if moved_from.is_some_and(|from| !self.is_still_at(&entries, from)) {
                let lost = self.notes.pending.borrow_mut().pop_front();
                lost.into_iter().for_each(|lost| self.put(lost));
                self.commits.schedule();
                self.notes.finish(1);
                continue;
            }
            let count = match self.note_some() {
                Ok(0) => return Step::Full,
                Ok(count) => count,
                Err(error) => return Step::Failed(error),
            };
            self.notes.pending.borrow_mut().drain(..count).for_each(|noted| self.put(noted));
            self.commits.schedule();
            self.notes.finish(count);
        }
    }

    /// Notes pending map entries up to the next moved or dropped block, as far as there is room; returns their number.
    fn note_some(&self) -> Result<usize, MediumError> {
        let (pending, mut half) = (self.notes.pending.borrow(), self.notes.half.borrow_mut());
        let half = half.as_mut().expect("there is a half while changes are noted");
        let is_other = |pending: &Pending| pending.moved_from.is_some() || pending.is_dropped;
        let until_other = pending.iter().skip(1).position(is_other).map_or(pending.len(), |at| at + 1);
        let count = until_other.min(half.room());
        if count > 0 {
            let (offset, pages) = half.add(pending.iter().take(count), self.seed);
            self.medium.note(offset, &half.pages[pages]).inspect_err(|_| half.take_back(count))?;
        }
        Ok(count)
    }

    /// Continues without notes. First all noted changes are made durable; then the memtable may get changes that are
    /// not noted. From then on nothing is noted, even if writing the superblock fails: one copy of it may then be
    /// without notes on the medium, and if recovery uses a copy that still names the notes, it reports a possible loss.
    async fn give_notes_up(&self) -> Result<(), Error> {
        self.flush().await?;
        self.notes.way.set(Way::Durable);
        let pending = self.notes.pending.take();
        let count = pending.len();
        pending.into_iter().filter(|pending| !pending.is_dropped).for_each(|pending| self.put(pending));
        self.commits.schedule();
        self.notes.finish(count);
        match self.mark_answered(Answered::Durable).await {
            Err(error) if !self.has_failed() => {
                tracing::warn!(%error, "the superblock cannot say yet that changes are durable before they are answered");
                Ok(())
            }
            marked => marked,
        }
    }

    /// Determines, before the first change, how changes are preserved; a block group whose map of free physical blocks
    /// is loaded may provide the place of notes.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) async fn prepare_notes(&self, group: u64) -> Result<(), Error> {
        if self.notes.way.get() != Way::Unknown {
            return Ok(());
        }
        let _alone = self.notes.placing.lock().await;
        if self.notes.way.get() != Way::Unknown {
            return Ok(());
        }
        let (way, answered) = match self.medium.note_keeping() {
            NoteKeeping::Needless => (Way::Memory, Answered::Volatile),
            NoteKeeping::None => (Way::Durable, Answered::Durable),
            NoteKeeping::UntilReboot(boot) => match self.make_place(self.group_for_notes(group).await?, boot).await {
                Some(place) => (Way::Noted, Answered::Noted(place)),
                None => (Way::Durable, Answered::Durable),
            },
        };
        if way != Way::Memory {
            self.mark_answered(answered).await?;
        }
        if let Answered::Noted(place) = answered {
            let (base, pages) = (self.log.position(), Vec::new());
            *self.notes.half.borrow_mut() = Some(Half { place, number: 0, base, pages, len: 0, first: 0 });
        }
        self.notes.way.set(way);
        Ok(())
    }

    /// The block group for the place of notes: this one, which is being written, or the first one if this one is far
    /// in, because a sync that skips notes supports only offsets of 32 bits.
    async fn group_for_notes(&self, group: u64) -> Result<u64, Error> {
        if self.block_group(group).end_offset <= u64::from(u32::MAX) {
            return Ok(group);
        }
        self.load_group(0).await?;
        Ok(0)
    }

    /// The place of notes, in a block group if it is not taken yet; `None` if there is none.
    async fn make_place(&self, group: u64, boot: [u8; 16]) -> Option<NotesPlace> {
        let (group, taken) = match self.notes.taken.get() {
            // A change took it, and was dropped or failed before the superblock named it.
            Some(taken) => taken,
            None => self.take_place(group).await?,
        };
        let half_bytes = (taken.1 / 2) << self.geometry.block_size.shift();
        let run = self.superblock.get().write_seq + 1;
        Some(NotesPlace { offset: self.pbn_offset(group, taken.0), half_bytes, run, boot, counted: None })
    }

    /// Takes free physical blocks of a block group for notes and fills them with zeroes, so that they have space and no
    /// notes of an earlier open.
    async fn take_place(&self, group: u64) -> Option<(u64, Run)> {
        let shift = self.geometry.block_size.shift();
        let page_blocks = (NOTE_PAGE_BYTES >> shift).max(1) as u32;
        let most = self.notes.half_bytes_max.min(NotesPlace::half_bytes_max(&self.layout));
        let half_bytes = u64::from(most).min(self.spare_bytes_for_notes(group)) as u32;
        let half_blocks = (half_bytes >> shift) / page_blocks * page_blocks;
        let taken = (half_blocks > 0)
            .then(|| self.allocator.take_by(group, |map| map.take_from_end(2 * half_blocks, page_blocks)))
            .flatten();
        let Some(taken) = taken else {
            tracing::debug!(group, "no room for notes; changes are made durable before they are answered");
            return None;
        };
        let run = taken.runs()[0];
        if let Err(error) = self.fill_place(self.pbn_offset(group, run.0), u64::from(run.1) << shift).await {
            tracing::debug!(%error, "no notes; changes are made durable before they are answered");
            return None;
        }
        self.notes.taken.set(Some((group, run)));
        taken.commit();
        Some((group, run))
    }

    /// Bytes of a half that the block group's spare physical blocks have room for beside a long write.
    fn spare_bytes_for_notes(&self, group: u64) -> u64 {
        let (spare, blocks) = (self.layout.spare_blocks(group), self.block_group(group).blocks);
        let longest = u64::from(self.geometry.limits.max_transfer_blocks.get()).min(blocks);
        let left = spare.saturating_sub(longest).min(spare / SPARE_PART);
        (left << self.geometry.block_size.shift()) / 2
    }

    async fn fill_place(&self, offset: u64, bytes: u64) -> Result<(), MediumError> {
        let mut at = 0;
        while at < bytes {
            let length = (bytes - at).min(ZEROES_BYTES);
            self.medium.write(offset + at, Buffer::zeroed(length as usize).freeze()).await?;
            at += length;
        }
        // Tests whether notes work at all.
        self.medium.note(offset, &[0; NOTE_PAGE_BYTES])
    }

    /// Frees the place of notes. Requires that nothing changes any more, and everything is durable.
    pub(crate) fn drop_notes(&self) {
        if let Some((group, run)) = self.notes.taken.take() {
            self.allocator.release(group, &[run]);
        }
    }
}
