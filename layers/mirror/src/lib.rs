//! A mirror: two to eight replicas with the same content, presented as one device.
//!
//! Every change goes to every replica. A read goes to one; blocks that are bad there are read from another replica
//! and rewritten. Before a change that a failed replica misses completes, the labels of the other replicas mark the
//! failed one out of sync, so stale content is never read. A replica that is back gets only the regions that it
//! lacks.
//!
//! - [`label`], [`lineage`], [`assemble`], [`regions`], [`sets`]: what labels hold, what they mean together, and sets
//!   of regions; pure.
//! - `mirror`, `io`, `verify`, `range_lock`: requests, and which of them wait for each other.
//! - `write_intent`, `paging`: the state of the replicas, and how it becomes durable before it counts.
//! - `reattach`, `resync`, `stale`: failed replicas, resync and reconciliation, blocks with only an older copy left.
//! - `create`, `open`, `members`: making a mirror, opening it, and adding, replacing and removing replicas in use.
//!
//! Invariants: see `write_intent`. Overlapping changes never are in flight together, so replicas execute them in the
//! same order.

pub mod assemble;
mod codec;
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
