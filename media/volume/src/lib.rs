//! Protected volumes: crash-consistent protection information on media without metadata.
//!
//! A block is never overwritten in place. A write goes to a free physical block of its block group; its map entry, which holds
//! the physical block and the block's protection information tuple, stays in memory until a commit writes all map entries that
//! have gathered to the log in one piece and makes them durable together with their data. So a flush costs one small write
//! however many blocks were written, a torn or lost write leaves the old block as it was, and no state in between has to be
//! repaired by guessing: a map entry that was not durable at a crash counts only if the data in its physical block have its
//! checksum.
//!
//! - [`mod@format`]: the bytes, pure.
//! - `block_allocator`: which physical blocks are free. `block_groups`, `block_map`, `map_page`: map entries on the medium. `lost_copies`: what of it was found lost. `patches`: durable and not there yet.
//!   `memtable`: not durable yet.
//! - `identity`: whose the medium is. `superblocks`: the three copies. `recognise`: whether a volume, or what is left of one, is there at all.
//! - `profile`, `remains`: a volume without any of them, for reading.
//! - `read`, `write`: requests. `commit`, `checkpoint`: the background worker. `recovery`: after a crash.
//! - `notes`, `noting`, `noted`: what was answered outlives the process.
//! - `corrupt`: damage on purpose, for tests.
//!
//! Invariants: the block map and its patches hold only durable map entries; a physical block is used again only when the map
//! entry that gave it up is durable and no read is looking at it; log space is used again only when the superblock that frees
//! it is durable.

mod bits;
mod block_allocator;
mod block_groups;
mod block_map;
mod checkpoint;
mod commit;
mod corrupt;
pub mod format;
mod free_map;
mod gather;
mod identity;
mod idle;
mod log;
mod lookup;
mod lost_copies;
mod map_entries;
mod map_page;
mod medium;
mod memtable;
mod noted;
mod notes;
mod noting;
mod open;
mod options;
mod patches;
mod profile;
mod read;
mod recognise;
mod recovery;
mod relocate;
mod remains;
mod reserved;
mod resize;
mod superblocks;
mod turns;
mod upkeep;
mod volume;
mod work_queue;
mod worker;
mod write;

pub use corrupt::{CorruptionError, CorruptionKind};
pub use format::WhyLost;
pub use identity::{Candidate, IdentityError, Sighting, Standing, Unit, Verdict, decide};
pub use idle::UpkeepCounts;
pub use lost_copies::LostCopies;
pub use open::{CreateOptions, OpenVolume, create, open, probe};
pub use options::{Mutation, OpenOptions, VolumeError};
pub use profile::{Hints, ProfileError, VolumeProfile};
pub use recognise::{Recognised, Trace, recognise};
pub use remains::{Remains, RemainsError, open_remains};
pub use resize::{ResizeError, ResizeOptions, Resized, resize};
pub use superblocks::SuperblockCopy;
pub use volume::{AnsweredChanges, Volume, VolumeInfo};
pub use worker::Worker;

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
