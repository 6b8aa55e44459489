//! Several devices with the same content as one that heals.
//!
//! Every change goes to every leg; a read goes to one, and what is damaged there comes from another and is written anew.
//! A leg that fails is left behind, which the labels of the others say before anything that it misses is answered, so that
//! no stale content is ever read; when it comes back it gets only the regions that it has missed.
//!
//! - [`label`], [`lineage`], [`judge`], [`regions`]: what is noted on legs, what it means, and the pieces it speaks of; pure.
//! - `mirror`, `change`, `read`, `verify`: requests. `claims`: which of them wait for each other.
//! - `notes`: what is known of the legs and how it gets to be durable. `rebuild`, `worker`: making legs alike again.
//! - `create`, `open`, `members`: making a mirror, putting its legs together, and giving and taking legs while it is in use.
//!
//! Invariants: see `notes`. Overlapping changes never are under way at once, so legs carry them out in the same order.

mod change;
mod claims;
mod create;
mod drill;
pub mod judge;
pub mod label;
mod leg;
pub mod lineage;
mod members;
mod mirror;
mod notes;
mod open;
mod paging;
mod presence;
mod read;
mod rebuild;
pub mod regions;
pub mod sets;
mod stale;
mod verify;
mod worker;

pub use create::{CreateOptions, create, create_drill, mark_written_alone, mark_written_alone_drill};
pub use drill::{Drill, Mutation};
pub use leg::{LegSource, Reopen};
pub use members::MemberError;
pub use mirror::{Description, LegDescription, Mirror, State};
pub use open::{MirrorError, OpenOptions, Opened, open, open_drill};
pub use worker::Worker;

#[cfg(test)]
mod tests;
