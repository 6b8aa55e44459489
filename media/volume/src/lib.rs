//! Protected volumes: crash-consistent protection information on media without metadata.
//!
//! A block is never overwritten in place. A write goes to a free physical block of its block group. Its map entry, with
//! the physical block and the block's protection information tuple, stays in memory until a commit writes all collected
//! map entries to the log in one piece and makes them durable together with their data. So a flush costs one small
//! write for any number of blocks, a torn or lost write leaves the old block unchanged, and no repair has to guess: a
//! map entry that was not durable at a crash counts only if the data in its physical block match its checksum.
//!
//! The modules, each a file and the folder beside it:
//!
//! - [`mod@format`]: the bytes, pure.
//! - `medium`: serialized syncs; the window of a shard; the identity of the medium, the three superblocks, the reserved
//!   area; recognition of volumes.
//! - `space`: free physical blocks, the writers that wait for them, and idle work.
//! - `map`: the block map and its pages; map entries that are durable but not in it yet (`patches`), or not durable
//!   (`memtable`).
//! - `log`: the state of the log; notes, by which completed changes outlive the process; waiters for commits.
//! - `volume`: the state of an open volume.
//! - `requests`: the volume as a device; executed in the caller's task.
//! - `background`: the worker: commits, checkpoints, and moving blocks together.
//! - `life`: creating, opening, recovery after a crash, resizing.
//! - [`rescue`]: a volume without any superblock, for reading; nothing else uses it.
//! - [`shards`]: several volumes in windows of one medium, which together are one.
//! - `corrupt`: damage on purpose, for tests.
//!
//! Invariants: the block map and its patches have only durable map entries; a physical block is reused only when the
//! map entry that freed it is durable and no read uses it; log space is reused only when the superblock that frees it
//! is durable.

mod background;
mod corrupt;
pub mod format;
mod life;
mod log;
mod map;
mod medium;
mod options;
mod requests;
pub mod rescue;
pub mod shards;
mod space;
mod volume;

pub use background::Worker;
pub use corrupt::{CorruptionError, CorruptionKind};
pub use format::WhyLost;
pub use life::resize::{ResizeError, ResizeOptions, Resized, resize};
pub use life::{CreateOptions, OpenVolume, create, open, probe};
pub use medium::identity::{Candidate, IdentityError, Sighting, Standing, Unit, Verdict, decide};
pub use medium::lost_copies::LostCopies;
pub use medium::recognise::{Recognised, Trace, recognise};
pub use medium::superblocks::SuperblockCopy;
pub use medium::window::VolumeMedium;
pub use options::{Mutation, OpenOptions, VolumeError};
pub use space::idle::IdleWorkCounts;
pub use volume::{AnsweredChanges, Volume, VolumeInfo};

/// The volume on a medium in memory, without crashes. The simulator tests crashes.
#[cfg(test)]
mod tests {
    mod after_close;
    mod allocation;
    mod beside;
    mod block_map;
    mod closing;
    mod corrupt;
    mod fairness;
    mod foreign;
    mod log;
    mod lost_log;
    mod neighbours;
    mod notes;
    mod recognition;
    mod recovery;
    mod remains;
    mod requests;
    mod resize;
    mod rolled_back;
    mod runs;
    mod sealing;
    pub(crate) mod setup;
    mod unmapping;
}
