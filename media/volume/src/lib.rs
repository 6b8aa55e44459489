//! Protected volumes: crash-consistent protection information on media without metadata.
//!
//! A block is never overwritten in place. A write goes to a free slot of its zone; its record, which holds the slot and
//! the block's protection information tuple, stays in memory until a commit writes all records that have gathered to the
//! log in one piece and makes them durable together with their data. So a flush costs one small write however many
//! blocks were written, a torn or lost write leaves the old block as it was, and no state in between has to be repaired
//! by guessing: a record that was not durable at a crash counts only if the data in its slot have its checksum.
//!
//! - [`mod@format`]: the bytes, pure.
//! - `slots`: which slots are free. `table`: records on the medium. `overlay`: records not there yet.
//! - `superblocks`: the three copies. `recognise`: whether a volume, or what is left of one, is there at all.
//! - `read`, `write`, `unmap`: requests. `commit`, `checkpoint`: the background worker. `recovery`: after a crash.
//! - `damage`: making damage on purpose.
//!
//! Invariants: a page of the table holds only durable records; a slot is used again only when the record that gave it up
//! is durable and nobody reads it; log space is used again only when the superblock that gives it up is durable.

mod allocation;
mod annex;
mod checkpoint;
mod commit;
mod create;
mod damage;
mod digest;
mod error;
pub mod format;
mod lookup;
mod open;
mod overlay;
mod read;
mod recognise;
mod recovery;
mod slots;
mod superblocks;
mod table;
mod unmap;
mod volume;
mod worker;
mod write;

pub use create::{CreateOptions, create};
pub use damage::{DamageError, DamageKind};
pub use error::VolumeError;
pub use open::{Mutation, OpenOptions, Opened, open, probe};
pub use recognise::{Recognised, Trace, recognise};
pub use superblocks::SuperblockCopy;
pub use volume::{Description, Volume};
pub use worker::Worker;

#[cfg(test)]
mod tests;
