//! Creating a volume and opening it.

pub(crate) mod noted;
pub(crate) mod recovery;
pub(crate) mod resize;

use std::cell::Cell;
use std::rc::Rc;

use sealblock_block::{Clock, Condition, Error, Freshness, Geometry, Limits, Medium, RangeLock, WhyOlder};
use sealblock_integrity::PiFormat;
use sealblock_runtime_memory::Buffer;
use sealblock_units::{BlockCount, BlockSize};

use crate::background::Worker;
use crate::format::{Answered, HighWaterMark, Layout, MapEntryRun, Seed, Superblock, TAIL_BYTES};
use crate::life::noted::NotedChanges;
use crate::life::recovery::Recovered;
use crate::log::Log;
use crate::log::notes::Notes;
use crate::log::work_queue::{Checkpoints, CommitQueue};
use crate::map::BlockMap;
use crate::map::block_groups::BlockGroups;
use crate::map::map_entries::MapEntries;
use crate::map::memtable::Memtable;
use crate::medium::high_water::{self, HighWater};
use crate::medium::identity::{IdentityError, Standing};
use crate::medium::lost_copies::{LostCopies, MIN_AGREEING};
use crate::medium::reserved::ReservedAreas;
use crate::medium::superblocks::{self, COPIES, SuperblockCopy, SuperblockProbe};
use crate::medium::{SerializedSync, padded};
use crate::options::{Mutation, OpenOptions, VolumeError};
use crate::space::BlockAllocator;
use crate::space::idle::IdleWork;
use crate::space::turns::InFlightBudget;
use crate::volume::{AnsweredChanges, Volume, VolumeInfo, VolumeState, max_transfer_blocks};

/// The maximum number of blocks of a Verify, in transfers.
const VERIFY_TRANSFERS: u32 = 16;

/// A volume and the worker that must run beside it.
pub struct OpenVolume<M, C> {
    /// The volume.
    pub volume: Rc<Volume<M, C>>,
    /// Its background work; spawn [`Worker::run`].
    pub worker: Worker<M, C>,
    /// What was found.
    pub description: VolumeInfo,
}

/// Reads the superblock of a volume that is not in shards.
///
/// # Errors
/// When there is no volume, or none that can be used.
pub async fn probe<M: Medium>(medium: &M) -> Result<Superblock, VolumeError> {
    Ok(superblocks::read(medium).await?.superblock)
}

/// Opens a volume that is not in shards, or one shard by itself. After a crash, it recovers what is in the log and in
/// notes.
///
/// # Errors
/// See [`VolumeError`]. A volume that cannot be opened is unchanged.
pub async fn open<M: Medium, C: Clock>(
    medium: M,
    clock: C,
    options: &OpenOptions,
) -> Result<OpenVolume<M, C>, VolumeError> {
    let SuperblockProbe { superblock, copies, are_all_usable, standing } =
        superblocks::read_as(&medium, options.identity).await?;
    let layout = superblock.layout;
    // A volume with smaller sectors than the medium's can be read, but not written: a write would include the
    // neighbouring sectors.
    let unit_bytes = if options.read_only { medium.read_unit_bytes() } else { medium.sector_bytes() };
    if unit_bytes > layout.sector_bytes() {
        return Err(VolumeError::Sector { volume_bytes: layout.sector_bytes(), medium_bytes: medium.sector_bytes() });
    }
    if medium.len_bytes() < layout.used_bytes() && !(options.truncated && options.read_only) {
        return Err(VolumeError::Truncated { medium_bytes: medium.len_bytes(), needed_bytes: layout.medium_bytes() });
    }
    if medium.is_read_only() && !options.read_only {
        return Err(VolumeError::ReadOnly);
    }
    if standing != Standing::Certain && !options.read_only {
        return Err(IdentityError::Unproven(superblock.uuid).into());
    }
    if !options.read_only {
        // An earlier process may have died after writes that are visible and not durable; recovery must not base
        // decisions on data that a power cut may undo.
        medium.sync().await?;
    }
    let groups = BlockGroups::read(&medium, &superblock).await?;
    let mut recovered = recovery::replay(&medium, &superblock, groups.initialized_count() > 0, options).await?;
    let mark = high_water::read(&medium, &superblock).await;
    compare_times(&mut recovered, (&superblock, &copies), &mark, options)?;
    if standing != Standing::Certain {
        groups.assume_initialized();
    }
    let lost = groups.lost_copies();
    recovered.foreign.iter().for_each(|(salt, found)| lost.add_foreign("the log", *salt, found.records));
    if let (Some(sequence), false) = (recovered.first_lost, options.accept_older) {
        return Err(VolumeError::LogDamaged { sequence, sectors: recovered.lost });
    }
    if recovered.is_rolled_back && !options.accept_older {
        let (write_seq, newest, newest_log_end) = (superblock.write_seq, mark.superblocks, mark.log_end);
        return Err(VolumeError::RolledBack { write_seq, newest, log_end: recovered.end, newest_log_end });
    }
    let is_kept = options.read_only || recovered.is_older();
    if !is_kept {
        groups.repair(&medium).await?;
        wipe_foreign(&medium, &layout, &recovered).await?;
    }
    let noted = noted::read(&medium, &superblock, &recovered, options).await?;
    let entries = recovered.entries.in_order();
    let taken = entries.iter().map(|run| u64::from(run.blocks)).sum();
    let description = describe(&superblock, &recovered, taken, copies, lost);
    let (superblock, answered) = with_lost(superblock, &noted, options);
    let description = VolumeInfo { standing, answered, is_read_only: options.read_only, ..description };
    let is_answered_known = superblock.is_clean || !options.keeps_answered || superblock.answered == Answered::Durable;
    let is_log_empty = are_all_usable && recovered.next == superblock.log_tail && is_answered_known;
    let volume = Rc::new(assemble(medium, clock, superblock, options, &recovered, groups, mark));
    if is_kept {
        volume.memtable.recover(newest_of(&noted.entries.in_order(), &entries));
    } else if !is_log_empty {
        // What recovery decided must be durable before anything builds on it: a second crash must decide the same.
        let recovered = take_over(&volume, &entries, &noted, options.keeps_answered).await;
        recovered.map_err(|error| VolumeError::Recovery(error.to_string()))?;
    }
    Ok(OpenVolume { worker: Worker { volume: volume.clone() }, volume, description })
}

/// Compares the time of the log with that of the superblocks and of the mark. Where one of them was put back, the volume
/// is treated as rolled back, or not opened if older content is not accepted.
fn compare_times(
    recovered: &mut Recovered,
    (superblock, copies): (&Superblock, &[SuperblockCopy; COPIES]),
    mark: &HighWaterMark,
    options: &OpenOptions,
) -> Result<(), VolumeError> {
    if high_water::is_behind(superblock, copies, recovered.end, mark) {
        recovered.roll_back(&superblock.layout, mark);
    } else if recovered.contradicts_close && !high_water::may_lack_newest(superblock, copies) {
        // A superblock with `clean` = 0 is durable before the log gets its first map entry. So these were written after
        // the superblocks that are here, or are those of another state of the volume.
        if !options.accept_older {
            let (log_tail, log_end) = (superblock.log_tail, recovered.end);
            return Err(VolumeError::LogAfterClose { log_tail, log_end });
        }
        recovered.ignore_log();
        recovered.roll_back(&superblock.layout, mark);
    } else if superblock.is_put_back {
        if !options.accept_older {
            return Err(VolumeError::NewerPages);
        }
        recovered.roll_back(&superblock.layout, mark);
    }
    Ok(())
}

/// The superblock with the loss that this open found, which is written with the next superblock; and the state of
/// completed changes to report, found by this open or by an earlier one that did not report it.
fn with_lost(superblock: Superblock, noted: &NotedChanges, options: &OpenOptions) -> (Superblock, AnsweredChanges) {
    let found = match noted.answered {
        // Without the guarantee there is no report, and the next open will find the same.
        AnsweredChanges::MayBeLost(why) if options.keeps_answered => Some(why),
        _ => superblock.unreported_loss,
    };
    let said = superblock.unreported_loss.map_or_else(|| noted.answered.clone(), AnsweredChanges::MayBeLost);
    let answered = found.map_or(said, AnsweredChanges::MayBeLost);
    let is_forgotten = options.mutation.is(Mutation::ForgetLost);
    (Superblock { unreported_loss: found.filter(|_| !is_forgotten), ..superblock }, answered)
}

/// The newest map entry of each block: those of notes, then those of the log, which are older.
fn newest_of(noted: &[MapEntryRun], logged: &[MapEntryRun]) -> MapEntries {
    let mut newest = MapEntries::default();
    noted.iter().chain(logged).for_each(|run| drop(newest.insert_older(*run)));
    newest
}

/// Makes the content of the log and of notes durable: first the log, which is emptied, and then the notes, which go
/// through the log like other map entries.
async fn take_over<M: Medium, C: Clock>(
    volume: &Volume<M, C>,
    logged: &[MapEntryRun],
    noted: &NotedChanges,
    keeps_answered: bool,
) -> Result<(), Error> {
    let answered = |answered| volume.superblock.set(Superblock { answered, ..volume.superblock.get() });
    let all = if keeps_answered { Answered::Durable } else { Answered::Volatile };
    if let Some(place) = noted.place {
        answered(Answered::Noted(place));
        volume.checkpoint_recovered(logged).await?;
        let entries = noted.entries.in_order();
        volume.commit_noted(&entries).await?;
        answered(all);
        return volume.checkpoint_recovered(&entries).await;
    }
    answered(all);
    volume.checkpoint_recovered(logged).await
}

/// Zeroes sectors of another volume in the log. The former copies are lost either way, and these would be reported as
/// damage until the log has wrapped around.
async fn wipe_foreign<M: Medium>(medium: &M, layout: &Layout, recovered: &Recovered) -> Result<(), VolumeError> {
    let foreign = recovered.foreign.values().filter(|found| found.records >= MIN_AGREEING);
    let offsets: Vec<u64> = foreign.flat_map(|found| found.offsets.iter().copied()).collect();
    for offset in &offsets {
        medium.write(*offset, padded(medium, &[], layout.sector_bytes() as usize)).await?;
    }
    if !offsets.is_empty() {
        medium.sync().await?;
    }
    Ok(())
}

/// What was found when a volume was opened; `taken` blocks have map entries that recovery took from the log.
pub(crate) fn describe(
    superblock: &Superblock,
    recovered: &Recovered,
    taken: u64,
    copies: [SuperblockCopy; COPIES],
    lost_copies: LostCopies,
) -> VolumeInfo {
    VolumeInfo {
        uuid: superblock.uuid,
        write_seq: superblock.write_seq,
        is_clean: superblock.is_clean && !recovered.is_used && taken + recovered.discarded + recovered.lost == 0,
        layout: superblock.layout,
        container: None,
        recovered: taken,
        dropped: recovered.discarded,
        unreadable: recovered.unreadable.clone(),
        log_lost: recovered.lost,
        lost_copies,
        is_read_only: true,
        standing: Standing::Unopposed,
        answered: AnsweredChanges::AllDurable,
        superblocks: copies.to_vec(),
    }
}

/// The geometry of the device, with limits that the volume can always meet.
fn geometry(superblock: &Superblock, most_open: usize) -> Geometry {
    let layout = &superblock.layout;
    let transfer = max_transfer_blocks(layout);
    let count = |blocks: u32| BlockCount::new(blocks).unwrap_or(BlockCount::ONE);
    let limits = Limits {
        max_transfer_blocks: transfer,
        max_verify_blocks: count(transfer.get().saturating_mul(VERIFY_TRANSFERS)),
        max_zero_blocks: count((most_open / 2) as u32),
    };
    Geometry {
        block_size: layout.block_size(),
        capacity_blocks: layout.capacity_blocks(),
        protection: superblock.protection,
        limits,
    }
}

/// Creates a volume in memory from what was found on the medium.
pub(crate) fn assemble<M: Medium, C: Clock>(
    medium: M,
    clock: C,
    superblock: Superblock,
    options: &OpenOptions,
    recovered: &Recovered,
    groups: BlockGroups,
    mark: HighWaterMark,
) -> Volume<M, C> {
    let layout = superblock.layout;
    let wanted = Rc::new(Condition::default());
    let commits = CommitQueue::new(&layout, wanted.clone());
    let geometry = geometry(&superblock, commits.max_uncommitted);
    let reserved = ReservedAreas::new(&superblock, &mark, groups.lost_copies());
    let log_freshness = match recovered {
        Recovered { lost: 0, is_rolled_back: false, .. } => Freshness::Current,
        Recovered { lost: 0, is_rolled_back: true, .. } => Freshness::MayBeOlder(WhyOlder::RolledBack),
        _ => Freshness::MayBeOlder(WhyOlder::LogLost),
    };
    Volume {
        medium: SerializedSync::new(medium),
        clock,
        geometry,
        layout,
        seed: superblock.seed(),
        is_read_only: options.read_only,
        seal_in_flight_bytes: options.seal_in_flight_bytes,
        mutation: options.mutation,
        block_map: BlockMap::new(&superblock, groups, (recovered.end, recovered.next), options),
        allocator: BlockAllocator::new(wanted, superblock.keeps_space),
        turns: InFlightBudget::default(),
        upkeep: IdleWork::new(options),
        memtable: Memtable::default(),
        notes: Notes::new(options),
        log: Log::new(&superblock, recovered.next, options.mutation),
        log_freshness: Cell::new(log_freshness),
        keeps_lost_log: Cell::new(recovered.is_older() && !options.read_only),
        commits,
        marked: Cell::default(),
        checkpoints: Checkpoints::default(),
        reserved,
        high_water: HighWater::new(&superblock, mark),
        superblock: Cell::new(superblock),
        loading_groups: RangeLock::default(),
        new_groups: Cell::new(0),
        state: Cell::new(VolumeState::Open),
        keeps_free_space: Cell::new(false),
        changes: Cell::new(0),
        changed: Condition::default(),
    }
}

/// Bytes of one write of zeroes.
const CHUNK_BYTES: u64 = 1 << 20;

/// The properties of a new volume.
#[derive(Clone, Copy, Debug)]
pub struct CreateOptions {
    /// Size of a block.
    pub block_size: BlockSize,
    /// Number of blocks.
    pub capacity_blocks: u64,
    /// Format of the protection information, if any.
    pub protection: Option<PiFormat>,
    /// Identity; two volumes must not share one, because it salts their checksums.
    pub uuid: [u8; 16],
    /// Allocate the space of the whole volume now, and keep it.
    pub preallocate: bool,
}

/// Creates an empty volume on a medium, which may contain anything. The medium must have [`Layout::medium_bytes`].
///
/// # Errors
/// When the layout is impossible, or the medium is too short, lacks the space, cannot reserve it, or fails. An earlier
/// volume on it may be destroyed by then.
pub async fn create<M: Medium>(medium: &M, options: &CreateOptions) -> Result<(), VolumeError> {
    let layout = Layout::new(options.block_size, medium.sector_bytes(), options.capacity_blocks)?;
    if medium.len_bytes() < layout.medium_bytes() {
        return Err(VolumeError::Truncated { medium_bytes: medium.len_bytes(), needed_bytes: layout.medium_bytes() });
    }
    // The old superblocks are destroyed first: a half-made volume must not look like the previous one.
    superblocks::wipe(medium, &layout, layout.third_offset()).await?;
    medium.sync().await?;
    if options.preallocate {
        medium.reserve(0, layout.medium_bytes()).await?;
    }
    // The log is written, not only reserved: flushes must not wait for a file system to convert extents, nor fail
    // because it is full. The reserved areas are written too: remains of an earlier volume there would count as
    // witnesses for it.
    write_zeroes(medium, 0, layout.log_offset() + layout.log_bytes()).await?;
    write_zeroes(medium, layout.tail_offset(), TAIL_BYTES).await?;
    // Only the group map tells which blocks were never written; the content of the block map's area does not matter.
    BlockGroups::uninitialized(layout, Seed::of(&options.uuid)).create(medium).await?;
    medium.sync().await?;
    let new = Superblock::new(options.uuid, layout, options.protection);
    for write_seq in [0, 1] {
        let superblock = Superblock { write_seq, keeps_space: options.preallocate, areas_were_zeroed: true, ..new };
        superblocks::write(medium, &superblock).await?;
    }
    medium.sync().await?;
    Ok(())
}

pub(crate) async fn write_zeroes<M: Medium>(medium: &M, offset: u64, length: u64) -> Result<(), VolumeError> {
    let zeroes = Buffer::zeroed(CHUNK_BYTES.min(length) as usize).freeze();
    let mut at = 0;
    while at < length {
        let chunk = CHUNK_BYTES.min(length - at);
        medium.write(offset + at, zeroes.slice(..chunk as usize)).await?;
        at += chunk;
    }
    Ok(())
}
