//! How a volume is opened, why that can fail, and faults that tests inject to show that each rule is needed.

use std::time::Duration;

use sealblock_block::MediumError;

use crate::format::{ContainerError, LayoutError, NotesPlace, SuperblockError};
use crate::medium::identity::IdentityError;

/// Memory for map pages by default, enough for 30 GiB of 4 KiB blocks. It is allocated as needed.
const CACHE_BYTES: usize = 256 << 20;
/// A volume is idle after this time without requests by default.
const IDLE_AFTER: Duration = Duration::from_millis(100);

/// Writes of at least this many bytes are sealed while they are in flight by default. For shorter ones the extra turn
/// of the reactor would cost more than the pass over the data.
const SEAL_IN_FLIGHT_BYTES: u64 = 64 << 10;

/// How a volume is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Write nothing: recovery after a crash is done in memory only.
    pub read_only: bool,
    /// Also open a volume whose log is lost, or that was restored from an earlier state, so that blocks may be older
    /// than their last writes. If it is opened for writing, the medium stays unchanged until a block changes; then the
    /// log is discarded. So the caller must first record that the content is not current, as a mirror does.
    pub accept_older: bool,
    /// Open a volume whose medium was truncated, for reading only: what was after the end of the medium cannot be read.
    pub truncated: bool,
    /// The identity of the volume to open, for reading only, if it is unclear which volume owns the medium.
    pub identity: Option<[u8; 16]>,
    /// Memory for map pages, in bytes. Map entries that are not in the block map yet may need more for a while.
    pub cache_bytes: usize,
    /// While the volume is idle, move blocks that small overwrites have scattered next to their neighbours.
    pub relocate: bool,
    /// The volume is idle after this time without requests. After 100 times as long the space of free physical blocks
    /// is deallocated on the medium.
    pub idle_after: Duration,
    /// Completed changes survive the death of this process even without a flush.
    pub keeps_answered: bool,
    /// The maximum number of bytes of each half of the place of notes, in whole pages of 4096.
    pub notes_half_bytes: u32,
    /// Writes of at least this many bytes are sealed while they are in flight, shorter ones before they start.
    pub seal_in_flight_bytes: u64,
    /// An injected fault, to show that tests notice it.
    pub mutation: Mutation,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            read_only: false,
            accept_older: false,
            truncated: false,
            identity: None,
            cache_bytes: CACHE_BYTES,
            relocate: true,
            idle_after: IDLE_AFTER,
            keeps_answered: true,
            notes_half_bytes: NotesPlace::HALF_BYTES_MAX,
            seal_in_flight_bytes: SEAL_IN_FLIGHT_BYTES,
            mutation: Mutation::None,
        }
    }
}

/// Why a volume cannot be created or opened.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// No superblock can be used.
    #[error("{0}")]
    Superblock(#[from] SuperblockError),
    /// It is unclear which volume owns the medium.
    #[error("{0}")]
    Identity(#[from] IdentityError),
    /// The requested layout is impossible.
    #[error("{0}")]
    Layout(#[from] LayoutError),
    /// The medium failed.
    #[error("the medium failed: {0}")]
    Medium(#[from] MediumError),
    /// The medium ends before the volume does.
    #[error(
        "the medium has {medium_bytes} bytes and the volume needs {needed_bytes}: it was cut off or copied in part"
    )]
    Truncated {
        /// Length of the medium.
        medium_bytes: u64,
        /// Length the volume needs.
        needed_bytes: u64,
    },
    /// The volume has smaller sectors than the medium.
    #[error(
        "the volume was made for sectors of {volume_bytes} bytes and the medium has sectors of {medium_bytes}: it can be read there, and not be written"
    )]
    Sector {
        /// The volume's sector.
        volume_bytes: u32,
        /// The medium's sector.
        medium_bytes: u32,
    },
    /// The medium is read-only, and the volume was to be opened for writing.
    #[error("the medium is read-only")]
    ReadOnly,
    /// Every copy of log sectors that were durable is lost, which takes two faults. It is unknown which blocks they
    /// described, so the volume opens only if older content is accepted.
    #[error(
        "{sectors} sectors of the log are lost in every copy, from number {sequence} on: blocks written shortly before the last crash may read as older content, and which ones is not known"
    )]
    LogDamaged {
        /// Sequence number of the first lost sector.
        sequence: u64,
        /// How many are lost.
        sectors: u64,
    },
    /// The superblocks or the log were restored from an earlier state. Blocks written since may read as older content,
    /// so the volume opens only if that is accepted.
    #[error(
        "its superblocks or its log were put back to an earlier state: superblock {write_seq} and log sector {log_end} where superblock {newest} and log sector {newest_log_end} had been written; blocks written since may read as older content, and which ones is not known"
    )]
    RolledBack {
        /// The write sequence number of the newest superblock found.
        write_seq: u64,
        /// That of the newest one that ever existed.
        newest: u64,
        /// The log sector at which the log ends.
        log_end: u64,
        /// The log sector at which it ended before.
        newest_log_end: u64,
    },
    /// The superblocks say that the volume was closed with an empty log, and the log has map entries. So superblocks and
    /// log are from different times, and the volume opens only if older content is accepted, as it was closed then.
    #[error(
        "its log and its superblocks are from different times, so one of them was put back to an earlier state: by its superblocks the log ended before sector {log_tail} when it was closed, and it has changes that end before sector {log_end}; blocks written since that close may read as older content, and which ones is not known"
    )]
    LogAfterClose {
        /// The sector before which the log of the closed volume ends.
        log_tail: u64,
        /// The sector before which the log that was found ends.
        log_end: u64,
    },
    /// When the volume was used before, a page of its block map was newer than its log and its superblocks, and nobody
    /// has accepted that since.
    #[error(
        "its superblocks and its log were put back to an earlier state: when it was used last, its block map was newer than both; blocks written before may read as older content, and which ones is not known"
    )]
    NewerPages,
    /// The superblock of a volume in shards cannot be used, or none with these properties is possible.
    #[error("{0}")]
    Container(#[from] ContainerError),
    /// Superblocks of two volumes in shards are on the medium, and neither has its first shard there.
    #[error("the superblocks of two volumes in shards are on the medium, and the first shard belongs to neither")]
    TwoContainers,
    /// One shard of a volume in shards cannot be used.
    #[error("shard {shard}: {error}")]
    Shard {
        /// The number of the shard, from 0.
        shard: u32,
        /// Why.
        error: Box<VolumeError>,
    },
    /// Another volume, or another shard, is in the window of a shard.
    #[error("volume {found} is in its place, and {due} belongs there")]
    ForeignShard {
        /// The identity of what is there, as text.
        found: String,
        /// The identity of the shard, as text.
        due: String,
    },
    /// A shard has another layout or protection than its volume.
    #[error("its layout or its protection is not that of the volume")]
    OtherShard,
    /// What recovery found could not be made durable.
    #[error("recovery could not be finished: {0}")]
    Recovery(String),
}

impl VolumeError {
    pub(crate) fn of_shard(shard: u32, error: VolumeError) -> VolumeError {
        VolumeError::Shard { shard, error: Box::new(error) }
    }
}

/// A defect injected on purpose: each breaks one rule of crash consistency. It takes effect only in a build with the
/// feature `mutations`, which proofs enable; the product has none of these places.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mutation {
    /// No fault.
    #[default]
    None,
    /// Commits do not wait for the medium.
    SkipSync,
    /// Flushes complete when the data are durable and the tags are not.
    LateTags,
    /// Physical blocks are reused before the map entry that frees them is durable.
    ReuseEarly,
    /// A write that is sealed in flight is put into the memtable and completes before its data have arrived.
    EntryInFlight,
    /// Recovery uses map entries without a check of their data.
    TrustLog,
    /// The group map says that a block group is initialized before its generations are durable.
    MapFirst,
    /// Only the first of the two copies of generations is read.
    OneCopy,
    /// Checkpoints free log space before the block map is durable.
    UnsyncedTables,
    /// Map entries with only one place in the log are not repeated by the next commit.
    RepeatNothing,
    /// A commit joins a sector of the log that a checkpoint counts as wholly in the block map.
    JoinTaken,
    /// A commit that joins a sector of the log overwrites the only place that has the previous commit.
    JoinInPlace,
    /// Of two copies of a log sector, recovery uses the one with fewer entries.
    ShorterCopy,
    /// Recovery treats repeated map entries as newer than those of the sector that repeats them.
    RepeatAsNew,
    /// Recovery reads only one of the log's two regions.
    OneRegion,
    /// Small commits get no second copy if no other one follows.
    SkipSecondCopy,
    /// A run of blocks is written to the log one block short.
    ShortRun,
    /// Recovery lets runs of blocks win over later map entries of single ones.
    RunsFirst,
    /// A checkpoint lets the log begin after entries that were committed while it was in flight.
    TailEarly,
    /// A block that was moved replaces one that was written meanwhile.
    MoveOverNewer,
    /// Blocks are moved without a check, and sealed again.
    MoveUnchecked,
    /// Together with free physical blocks, those after them are deallocated on the medium.
    PunchBeyond,
    /// Changes complete before they are noted.
    NoteLate,
    /// Blocks are noted before their data have arrived.
    NoteEarly,
    /// What a dropped change has not noted is noted with a later change.
    NoteDropped,
    /// Notes record a base that is older by one commit.
    BaseBehind,
    /// The half with the notes of a commit in flight is overwritten.
    HalfEarly,
    /// Recovery uses notes without comparing them with the log, the data and each other.
    TrustNotes,
    /// Only the open that finds that changes may be lost reports it, and no later one.
    ForgetLost,
    /// Resizing: the superblock has the new size before the medium.
    NameEarly,
    /// Resizing: the medium is truncated before the superblock with the new size is durable.
    CutEarly,
    /// Resizing: copies of the reserved area are written into block groups that a superblock still has.
    TailEarlier,
    /// Resizing: blocks with data are cut off.
    CutMapped,
    /// The log is marked as in use and anchored before it has a sector.
    NoAnchor,
    /// The log gets map entries while the superblocks of a closed volume still say that it is empty.
    KeepClean,
    /// Resizing: added block groups keep the bits in the group map of earlier ones.
    KeepBits,
}

impl Mutation {
    /// The fault that takes effect: none, a constant, without the feature.
    pub(crate) fn injected(self) -> Mutation {
        if cfg!(any(test, feature = "mutations")) { self } else { Mutation::None }
    }

    /// True if `fault` takes effect.
    pub(crate) fn is(self, fault: Mutation) -> bool {
        self.injected() == fault
    }
}
