//! The open volume: its parts, its close, and which changes may begin.

use std::cell::Cell;

use sealblock_block::{
    Clock, Condition, Error, ErrorKind, Freshness, Geometry, Medium, MediumError, MediumErrorKind, RangeLock,
    ReservedArea, WhyOlder,
};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockCount, Lba};

use crate::format::{
    BlockGroup, Container, HighWaterMark, Layout, MAP_ENTRY_BYTES, MapEntry, MapEntryKind, Seed, Superblock, WhyLost,
};
use crate::log::Log;
use crate::log::notes::Notes;
use crate::log::work_queue::{Checkpoints, CommitQueue};
use crate::map::BlockMap;
use crate::map::map_page::MapLookup;
use crate::map::memtable::Memtable;
use crate::medium::SerializedSync;
use crate::medium::high_water::HighWater;
use crate::medium::identity::Standing;
use crate::medium::lost_copies::LostCopies;
use crate::medium::reserved::ReservedAreas;
use crate::medium::superblocks::SuperblockCopy;
use crate::options::Mutation;
use crate::space::BlockAllocator;
use crate::space::free_map::{FreeMap, Loader};
use crate::space::idle::IdleWork;
use crate::space::turns::InFlightBudget;

/// A protected volume on a medium. See [`crate::open`].
///
/// Requests execute in the task that polls them; commits and checkpoints in the [`crate::Worker`] that comes
/// with the volume and must be run beside it.
pub struct Volume<M, C> {
    pub(crate) medium: SerializedSync<M>,
    pub(crate) clock: C,
    pub(crate) geometry: Geometry,
    pub(crate) layout: Layout,
    pub(crate) seed: Seed,
    pub(crate) is_read_only: bool,
    pub(crate) seal_in_flight_bytes: u64,
    pub(crate) mutation: Mutation,
    pub(crate) block_map: BlockMap,
    pub(crate) allocator: BlockAllocator,
    pub(crate) turns: InFlightBudget,
    pub(crate) upkeep: IdleWork,
    pub(crate) memtable: Memtable,
    pub(crate) notes: Notes,
    pub(crate) log: Log,
    /// Whether the log that was found ends with the newest writes.
    pub(crate) log_freshness: Cell<Freshness>,
    /// The log or the superblocks were lost, or restored from an earlier state, before this open. The medium stays as
    /// it was found until a block changes.
    pub(crate) keeps_lost_log: Cell<bool>,
    pub(crate) commits: CommitQueue,
    /// Blocks that requests have deallocated or made unreadable since they last let other requests run.
    pub(crate) marked: Cell<u64>,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) reserved: ReservedAreas,
    pub(crate) high_water: HighWater,
    pub(crate) superblock: Cell<Superblock>,
    /// Block groups that are being loaded, so that each is loaded once.
    pub(crate) loading_groups: RangeLock,
    /// Block groups without map pages that were loaded for writes since the last checkpoint began.
    pub(crate) new_groups: Cell<u64>,
    pub(crate) state: Cell<VolumeState>,
    /// The close does not deallocate free physical blocks on the medium.
    pub(crate) keeps_free_space: Cell<bool>,
    /// Changes in flight: [`ChangeGuard`]s.
    pub(crate) changes: Cell<usize>,
    pub(crate) changed: Condition,
}

/// What the volume is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum VolumeState {
    Open,
    /// Closing: no change may begin. Once the last one has ended, the worker commits everything and ends.
    Closing,
    /// Closed cleanly.
    Closed,
    /// A write to the log or a sync failed. The content of the medium is unknown, so nothing more is written.
    Failed,
}

/// What was found when a volume was opened.
#[derive(Clone, Debug)]
pub struct VolumeInfo {
    /// The volume's identity.
    pub uuid: [u8; 16],
    /// The write sequence number of the superblock that this open found. Each open that changes the volume raises it.
    pub write_seq: u64,
    /// True if it was closed cleanly before this open.
    pub is_clean: bool,
    /// The layout; in a volume in shards, that of each shard.
    pub layout: Layout,
    /// The container, if the volume is in shards.
    pub container: Option<Container>,
    /// Blocks whose map entries recovery took from the log after a crash.
    pub recovered: u64,
    /// Map entries in the log that recovery dropped, because their data had not reached the medium.
    pub dropped: u64,
    /// Blocks whose map entries recovery kept although their physical blocks cannot be read. The blocks are unreadable
    /// until they are written. At most as many as one commit has map entries.
    pub unreadable: Vec<Lba>,
    /// Log sectors of which every copy is lost. Each had up to 15 or 127 map entries, of blocks or runs of blocks that
    /// are unknown and that read as they were before. If nothing of a log in use is left, this is the size of the log.
    pub log_lost: u64,
    /// Other copies of metadata that are lost: those that this open found, and those found since. If the volume is open
    /// for writing, its next checkpoint rewrites them, except those of the reserved area, which their owner's next
    /// write replaces. A scrub state of which no copy is left is only flagged.
    pub lost_copies: LostCopies,
    /// True if it is not open for writing, so that nothing that is lost is written again.
    pub is_read_only: bool,
    /// How the owner of the medium was determined.
    pub standing: Standing,
    /// What is known of changes that had completed, but were not durable, when the volume was last used.
    pub answered: AnsweredChanges,
    /// The copies of the superblock, as they were found: three, and in a volume in shards also three of each shard. A
    /// volume open for writing has rewritten lost ones.
    pub superblocks: Vec<SuperblockCopy>,
}

/// The fate of changes that had completed, but had not been flushed, when the last use of the volume ended without a
/// clean close.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AnsweredChanges {
    /// None is lost: the volume was closed cleanly, or all are durable.
    AllDurable,
    /// None is lost: only the process died, and the notes of all changes, this many, exist.
    Noted(u64),
    /// Some may be lost, as this open or an earlier one found, and their senders do not know it yet: see
    /// [`Volume::forget_lost`].
    MayBeLost(WhyLost),
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// The underlying medium.
    pub fn medium(&self) -> &M {
        self.medium.get()
    }

    /// The superblock that is on the medium now.
    pub fn superblock(&self) -> Superblock {
        self.superblock.get()
    }

    /// Makes everything durable, runs a checkpoint, marks the volume clean and ends the worker. New changes are refused
    /// from now on. Those in flight are refused or become durable before the close ends, and flushes complete.
    ///
    /// # Errors
    /// When the medium fails or has failed before: then the volume is not marked clean. What was flushed is safe
    /// nevertheless.
    pub async fn close(&self) -> Result<(), Error> {
        self.close_as(true).await
    }

    /// The same for a volume that is reopened at once, while requests wait. Free physical blocks are not deallocated on
    /// the medium, because that takes longer the more of them there are. See [`Volume::give_space_back`].
    ///
    /// # Errors
    /// As [`Volume::close`].
    pub async fn close_for_a_moment(&self) -> Result<(), Error> {
        self.close_as(false).await
    }

    async fn close_as(&self, gives_space_back: bool) -> Result<(), Error> {
        if self.is_read_only || self.state.get() == VolumeState::Closed {
            return Ok(());
        }
        if self.state.get() == VolumeState::Open {
            self.mend_reserved().await;
        }
        if self.state.get() == VolumeState::Open {
            self.state.set(VolumeState::Closing);
            self.keeps_free_space.set(!gives_space_back);
            self.commits.wanted.notify();
            // Writers that wait for space are refused.
            self.allocator.freed.notify();
        }
        self.changed.wait_until(|| matches!(self.state.get(), VolumeState::Closed | VolumeState::Failed)).await;
        match self.state.get() {
            VolumeState::Closed => Ok(()),
            _ => Err(self.failed()),
        }
    }

    /// Why completed changes may be lost, if that has not been reported yet.
    pub fn may_be_lost(&self) -> Option<WhyLost> {
        self.superblock.get().unreported_loss
    }

    /// Records that the senders of the changes that may be lost know it, or need not: later opens do not report it any
    /// more. Does nothing if nothing is lost, if the volume is read-only, or while it keeps the state that was found
    /// until a block changes.
    ///
    /// # Errors
    /// When the medium fails. Then later opens may report it again.
    pub async fn forget_lost(&self) -> Result<(), Error> {
        if self.may_be_lost().is_none() || self.is_read_only || self.keeps_lost_log.get() {
            return Ok(());
        }
        let _change = self.begin_change()?;
        self.change_superblock(|before| Superblock { unreported_loss: None, ..before }).await
    }

    /// Replaces the content of a reserved area. It is durable on return.
    pub(crate) async fn write_reserved(&self, area: ReservedArea, bytes: &Slice) -> Result<(), Error> {
        self.reserved.write(&self.medium, area, bytes, || self.sync_or_fail()).await?;
        // Only the scrub state: writes of a mirror wait for its label, which every superblock counts anyway.
        if area == ReservedArea::ScrubState {
            let durable = HighWaterMark { scrub_states: self.reserved.writes(area), ..HighWaterMark::default() };
            self.high_water.raise(&self.medium, durable).await;
        }
        Ok(())
    }

    /// Rewrites what has a lost copy; false if that fails.
    pub(crate) async fn mend_reserved(&self) -> bool {
        let mended = self.reserved.mend(&self.medium, async || self.sync_or_fail().await).await;
        if let Err(error) = &mended {
            tracing::warn!(%error, "a lost copy of the reserved area cannot be rewritten");
        }
        mended.is_ok()
    }

    /// Raises the high-water mark to the end of the log.
    pub(crate) async fn raise_log_end(&self) {
        let durable = HighWaterMark { log_end: self.log.next.get(), ..HighWaterMark::default() };
        self.high_water.raise(&self.medium, durable).await;
    }

    /// Refuses changes if the volume does not accept any.
    pub(crate) fn check_writable(&self) -> Result<(), Error> {
        match self.state.get() {
            _ if self.is_read_only => Err(ErrorKind::ReadOnly.into()),
            VolumeState::Open => Ok(()),
            VolumeState::Closing | VolumeState::Closed => {
                Err(ErrorKind::Unreachable { reason: "the volume is closed".to_owned() }.into())
            }
            VolumeState::Failed => Err(self.failed()),
        }
    }

    /// Begins a change, unless the volume is closing, failed or read-only. The guard ends it when dropped.
    pub(crate) fn begin_change(&self) -> Result<ChangeGuard<'_>, Error> {
        self.check_writable()?;
        self.changes.set(self.changes.get() + 1);
        Ok(ChangeGuard { changes: &self.changes, state: &self.state, ended: &self.commits.wanted })
    }

    /// The same for a change of blocks, which a volume that was put back to an earlier state does not accept.
    pub(crate) async fn begin_block_change(&self) -> Result<ChangeGuard<'_>, Error> {
        let change = self.begin_change()?;
        self.refuse_if_put_back().await?;
        Ok(change)
    }

    /// Refuses a change of blocks if pages of the block map were found that are newer than the log and the superblocks.
    /// The next superblock records it, so that later opens are refused and their reads report it, whatever they read.
    pub(crate) async fn refuse_if_put_back(&self) -> Result<(), Error> {
        if !self.block_map.has_newer_pages() {
            return Ok(());
        }
        if !self.superblock.get().is_put_back && !self.has_failed() {
            Box::pin(self.change_superblock(|before| before)).await?;
        }
        Err(ErrorKind::MayBeOlder(WhyOlder::RolledBack).into())
    }

    /// True if nothing is left to do before the close: from here on nothing changes, and flushes complete at once.
    pub(crate) fn is_quiesced(&self) -> bool {
        let is_idle = self.changes.get() == 0 && !self.commits.is_due() && !self.allocator.has_work();
        self.state.get() == VolumeState::Closing && is_idle && self.memtable.is_empty()
    }

    pub(crate) fn failed(&self) -> Error {
        let reason = match &*self.commits.failure.borrow() {
            Some(why) => format!("volume failed, writes disabled: its log could not be written: {why}"),
            None => "volume failed, writes disabled".to_owned(),
        };
        ErrorKind::Media { reason }.into()
    }

    /// Disables all further writes.
    pub(crate) fn fail(&self, why: &MediumError) -> Error {
        self.state.set(VolumeState::Failed);
        *self.commits.failure.borrow_mut() = Some(why.to_string());
        self.medium.give_up(&why.to_string());
        tracing::error!(%why, "volume failed, writes disabled");
        self.commits.wanted.notify();
        self.checkpoints.wake();
        self.notes.wake();
        self.failed()
    }

    /// Syncs the medium. If that fails, the volume fails, because it is unknown which writes are lost.
    pub(crate) async fn sync_or_fail(&self) -> Result<(), Error> {
        self.medium.sync().await.map_err(|error| self.fail(&error))
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.state.get() == VolumeState::Failed
    }

    pub(crate) fn block_group(&self, number: u64) -> BlockGroup {
        self.layout.block_group(number).expect("block groups come from blocks of the volume")
    }

    /// The offset of a physical block of a block group on the medium.
    pub(crate) fn pbn_offset(&self, group: u64, pbn: u32) -> u64 {
        self.block_group(group).data_offset + (u64::from(pbn) << self.geometry.block_size.shift())
    }

    /// Loads the map of free physical blocks of a block group by reading its map entries.
    pub(crate) async fn load_group(&self, number: u64) -> Result<(), Error> {
        if self.allocator.is_loaded(number) {
            return Ok(());
        }
        let _alone = self.loading_groups.lock(number..=number).await;
        if self.allocator.is_loaded(number) {
            return Ok(());
        }
        let group = self.block_group(number);
        // A block group is loaded when it is first written. The space of its map pages is reserved now, because a lack
        // of space does no harm yet.
        match self.medium.reserve(group.pages_offset, group.data_offset - group.pages_offset).await {
            Err(error) if error.kind != MediumErrorKind::Unsupported => return Err(error.into()),
            _ => {}
        }
        let map = FreeMap::new(group.blocks as u32, group.physical_blocks, self.geometry.block_size.bytes() as u32);
        let (mut loader, mut index) = (Loader::new(map), 0);
        // It is unknown which physical blocks a lost sector names, so they may be reused: the sector must not become
        // valid again.
        let see = |lookup: MapLookup| {
            mapped_pbn(&lookup).into_iter().for_each(|pbn| loader.mark_used(index, pbn));
            index += 1;
        };
        self.block_map.scan(&self.medium, number, !self.is_read_only, see).await?;
        self.allocator.load(number, loader.finish());
        if !self.block_map.groups.is_initialized(number) {
            self.new_groups.set(self.new_groups.get() + 1);
        }
        Ok(())
    }

    /// Whether the blocks have their newest content.
    pub(crate) fn freshness(&self) -> Freshness {
        let tables = match self.block_map.has_newer_pages() {
            false => Freshness::Current,
            true => Freshness::MayBeOlder(WhyOlder::RolledBack),
        };
        self.log_freshness.get().and(tables)
    }

    /// The index of a block in its block group.
    pub(crate) fn index_in_group(&self, lba: Lba) -> u32 {
        self.layout.index_in_group(lba) as u32
    }
}

/// The physical block that must stay in use because of an entry of the block map. A damaged map entry may still name
/// the right physical block, and keeping it in use costs little.
fn mapped_pbn(lookup: &MapLookup) -> Option<u32> {
    let entry = match lookup {
        MapLookup::Mapped(entry) | MapLookup::Stale { entry, .. } => *entry,
        MapLookup::Damaged(raw) if *raw != [0; MAP_ENTRY_BYTES] => MapEntry::decode_unchecked(raw),
        MapLookup::Damaged(_) | MapLookup::Unwritten | MapLookup::Unreadable => return None,
    };
    (entry.kind == MapEntryKind::Stored).then_some(entry.pbn)
}

/// A change in flight. It ends when this is dropped: its map entries are in the memtable, or it was refused or
/// cancelled.
pub(crate) struct ChangeGuard<'a> {
    changes: &'a Cell<usize>,
    state: &'a Cell<VolumeState>,
    ended: &'a Condition,
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.changes.set(self.changes.get() - 1);
        if self.changes.get() == 0 && self.state.get() == VolumeState::Closing {
            self.ended.notify();
        }
    }
}

/// The maximum number of blocks of a transfer. The spare physical blocks of a block group are enough for several of
/// these, or for every block of the block group.
pub(crate) fn max_transfer_blocks(layout: &Layout) -> BlockCount {
    const TRANSFER_BYTES: u32 = 1 << 20;
    BlockCount::new(TRANSFER_BYTES >> layout.block_size().shift()).unwrap_or(BlockCount::ONE)
}
