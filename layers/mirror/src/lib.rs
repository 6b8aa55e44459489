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

pub mod assemble;
mod change;
mod claims;
mod create;
pub mod label;
pub mod lineage;
mod members;
mod mirror;
mod open;
mod paging;
mod presence;
mod read;
pub mod regions;
mod replica;
mod resync;
pub mod sets;
mod stale;
mod test_hooks;
mod verify;
mod worker;
mod write_intent;

pub use create::{CreateOptions, create, create_drill, mark_written_alone, mark_written_alone_drill};
pub use members::ReplicaError;
pub use mirror::{Description, LegDescription, Mirror, State};
pub use open::{MirrorError, OpenOptions, Opened, open, open_drill};
pub use replica::{Reopen, ReplicaSource};
pub use test_hooks::{Mutation, TestHooks};
pub use worker::Worker;

#[cfg(test)]
mod tests;
