//! Several devices with the same content as one that heals.
//!
//! Every change goes to every replica; a read goes to one, and what is damaged there comes from another and is written anew.
//! A replica that fails is left behind, which the labels of the others say before anything that it misses is answered, so that
//! no stale content is ever read; when it comes back it gets only the regions that it has missed.
//!
//! - [`label`], [`lineage`], [`judge`], [`regions`]: what is noted on replicas, what it means, and the pieces it speaks of; pure.
//! - `mirror`, `change`, `read`, `verify`: requests. `claims`: which of them wait for each other.
//! - `notes`: what is known of the replicas and how it gets to be durable. `rebuild`, `worker`: making replicas alike again.
//! - `create`, `open`, `members`: making a mirror, putting its replicas together, and giving and taking replicas while it is in use.
//!
//! Invariants: see `notes`. Overlapping changes never are under way at once, so replicas carry them out in the same order.

pub mod assemble;
mod create;
mod io;
pub mod label;
pub mod lineage;
mod members;
mod mirror;
mod open;
mod paging;
mod range_lock;
mod reattach;
pub mod regions;
mod replica;
mod resync;
pub mod sets;
mod stale;
mod test_hooks;
mod verify;
mod write_intent;

pub use create::{CreateOptions, create, create_with_hooks, mark_written_alone, mark_written_alone_with_hooks};
pub use members::ReplicaError;
pub use mirror::{Mirror, MirrorInfo, MirrorState, ReplicaInfo};
pub use open::{MirrorError, OpenMirror, OpenOptions, open, open_with_hooks};
pub use replica::{Reopen, ReplicaSource};
pub use resync::Worker;
pub use test_hooks::{Mutation, TestHooks};

#[cfg(test)]
mod tests;
