//! How a volume is opened, why it cannot be, and the rules that tests disable to show that they are needed.

use std::time::Duration;

use sealblock_block::MediumError;

use crate::format::{LayoutError, NotesPlace, SuperblockError};
use crate::medium::identity::IdentityError;

/// Memory for map pages unless told otherwise: the block map of 30 GiB of 4 KiB blocks. Taken as it is needed.
const CACHE_BYTES: usize = 256 << 20;
/// A volume that was left alone for this time is idle unless told otherwise.
const IDLE_AFTER: Duration = Duration::from_millis(100);

/// Writes of at least this many bytes are sealed while they are in flight by default. For shorter ones the extra turn
/// of the reactor would cost more than the pass over the data.
const SEAL_IN_FLIGHT_BYTES: u64 = 64 << 10;

/// How a volume is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Write nothing: what a crash left is taken over in memory only.
    pub read_only: bool,
    /// Open a volume whose log is lost, too, of which blocks may be older than what was written. One that is opened for writing
    /// keeps its state on the medium until a block changes, and gives its log up with that: so whoever opens it records first that
    /// nothing on it counts, as a mirror does.
    pub accept_older: bool,
    /// Open a volume whose medium ends before it does, for reading only: what lay behind the end cannot be read.
    pub truncated: bool,
    /// The volume that the medium is taken for, for reading only, where nothing tells whose it is.
    pub identity: Option<[u8; 16]>,
    /// Memory for map pages, in bytes. Pages that differ from the medium may need more for a while.
    pub cache_bytes: usize,
    /// While the volume is idle, blocks that small overwrites have scattered are moved to lie beside their neighbours.
    pub relocate: bool,
    /// The volume is idle after this time without a request. After 100 times as long the space of free physical blocks
    /// goes back to the medium.
    pub idle_after: Duration,
    /// What is answered survives the death of this process, though it be not flushed.
    pub keeps_answered: bool,
    /// Bytes at most of each half of the place where that is noted, in whole pages of 4096.
    pub notes_half_bytes: u32,
    /// Writes of at least as many bytes are sealed while they are in flight, and shorter ones before they are started.
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

/// Why a volume cannot be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// Neither superblock can be used.
    #[error("{0}")]
    Superblock(#[from] SuperblockError),
    /// Whose volume it is cannot be told.
    #[error("{0}")]
    Identity(#[from] IdentityError),
    /// The shape asked for is impossible.
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
    /// The volume was made for smaller sectors than the medium has.
    #[error(
        "the volume was made for sectors of {volume_bytes} bytes and the medium has sectors of {medium_bytes}: it can be read there, and not be written"
    )]
    Sector {
        /// The volume's sector.
        volume_bytes: u32,
        /// The medium's sector.
        medium_bytes: u32,
    },
    /// The medium takes no writes, and the volume was to be opened for writing.
    #[error("the medium is read-only")]
    ReadOnly,
    /// Every copy of log sectors that were once durable is lost, which takes two faults: which blocks they were about is not
    /// known, so the volume is not opened unless older content is accepted.
    #[error(
        "{sectors} sectors of the log are lost in every copy, from number {sequence} on: blocks written shortly before the last crash may read as older content, and which ones is not known"
    )]
    LogDamaged {
        /// Sequence number of the first lost sector.
        sequence: u64,
        /// How many are lost.
        sectors: u64,
    },
    /// The superblocks, or the log, or both are those of an earlier time: blocks that were written since may read as older content,
    /// so the volume is not opened unless that is accepted.
    #[error(
        "its superblocks or its log were put back to an earlier state: superblock {write_seq} and log sector {log_end} where superblock {newest} and log sector {newest_log_end} had been written; blocks written since may read as older content, and which ones is not known"
    )]
    RolledBack {
        /// The write sequence number of the newest superblock found.
        write_seq: u64,
        /// That of one that was there before.
        newest: u64,
        /// The sector of the log with which it ends.
        log_end: u64,
        /// The one with which it ended before.
        newest_log_end: u64,
    },
    /// What a crash left could not be made durable.
    #[error("recovery could not be finished: {0}")]
    Recovery(String),
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
    /// Physical blocks are used again before the map entry that gives them up is durable.
    ReuseEarly,
    /// A write that is sealed in flight is entered and completed before its data have arrived.
    EntryInFlight,
    /// Recovery takes map entries over without looking at their data.
    TrustLog,
    /// The group map says that a block group is initialized before its generations are durable.
    MapFirst,
    /// Of the two copies of generations only the first is read.
    OneCopy,
    /// Checkpoints free log space before the block map is durable.
    UnsyncedTables,
    /// Map entries with only one place in the log are not repeated by the next commit.
    RepeatNothing,
    /// A commit joins a sector of the log that a checkpoint counts as wholly in the block map.
    JoinTaken,
    /// A commit that joins a sector of the log writes over the only place that has the commit before.
    JoinInPlace,
    /// Of two copies of a log sector recovery takes the one that has less.
    ShorterCopy,
    /// Recovery takes repeated map entries for newer ones than those of the sector that repeats them.
    RepeatAsNew,
    /// Recovery reads only one of the log's two regions.
    OneRegion,
    /// Small commits get no second copy if no other one follows.
    SkipSecondCopy,
    /// A run of blocks is written to the log one block short.
    ShortRun,
    /// Recovery lets runs of blocks win over later map entries of single ones.
    RunsFirst,
    /// A checkpoint lets the log begin behind what was committed while it was in flight.
    TailEarly,
    /// A block that is moved takes the place of one written meanwhile.
    MoveOverNewer,
    /// Blocks are moved without being checked, and sealed anew.
    MoveUnchecked,
    /// With free physical blocks, those behind them are given back to the medium.
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
    /// Recovery takes notes over without comparing them with the log, the data and each other.
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
