//! Protected volumes: crash-consistent protection information on media without metadata.
//!
//! A block is never overwritten in place. A write goes to a free physical block of its block group; its map entry, which holds
//! the physical block and the block's protection information tuple, stays in memory until a commit writes all map entries that
//! have gathered to the log in one piece and makes them durable together with their data. So a flush costs one small write
//! however many blocks were written, a torn or lost write leaves the old block as it was, and no state in between has to be
//! repaired by guessing: a map entry that was not durable at a crash counts only if the data in its physical block have its
//! checksum.
//!
//! A room is a file and the folder beside it:
//!
//! - [`mod@format`]: the bytes, pure.
//! - `medium`: syncs one at a time; whose the medium is, the three superblocks, the reserved area; whether a volume is there at all.
//! - `space`: which physical blocks are free, who waits for them, and what an idle volume does for them.
//! - `map`: the block map and its pages; map entries that are durable and not there yet (`patches`), or not durable (`memtable`).
//! - `log`: where the log stands; notes, by which what was answered outlives the process; who waits for a commit.
//! - `volume`: the state of an open volume.
//! - `requests`: the volume as a device; executed in the caller's task.
//! - `background`: the worker: commits, checkpoints, and moving blocks together.
//! - `life`: creating, opening, recovery after a crash, another size.
//! - [`rescue`]: a volume without any superblock, for reading; nothing else uses it.
//! - `corrupt`: damage on purpose, for tests.
//!
//! Invariants: the block map and its patches hold only durable map entries; a physical block is used again only when the map
//! entry that gave it up is durable and no read is looking at it; log space is used again only when the superblock that frees
//! it is durable.

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
pub use options::{Mutation, OpenOptions, VolumeError};
pub use space::idle::UpkeepCounts;
pub use volume::{AnsweredChanges, Volume, VolumeInfo};

/// The volume on a medium in memory. Crashes are the simulator's business; here is what holds without them.
#[cfg(test)]
mod tests {
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
    mod runs;
    mod sealing;
    pub(crate) mod setup;
    mod unmapping;
}
