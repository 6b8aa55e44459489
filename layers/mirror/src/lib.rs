//! A mirror: two to eight replicas with the same content, presented as one device.
//!
//! Every change goes to every replica. A read goes to one; blocks that are bad there are read from another replica
//! and rewritten. Before a change that a failed replica misses completes, the labels of the other replicas mark the
//! failed one out of sync, so stale content is never read. A replica that is back gets only the regions that it
//! lacks.
//!
//! A room is a file and the folder beside it; each uses those before it:
//!
//! - [`label`]: sets of regions, names, what labels hold, and what they mean together (`assemble`); pure.
//! - `mirror`: the state of it all: devices of the mirror (`replica`, which alone waits for a device), which requests wait for each
//!   other, what labels record (`write_intent`) and how that becomes durable (`labels`), which label a device has (`probe`).
//! - `requests`: the mirror as a device, and what must be durable before a change counts.
//! - `background`: resync, devices that are back, labels that are swept; the worker.
//! - `life`: opening a mirror, making one; adding, replacing and removing replicas in use.
//!
//! Invariants: see `mirror/write_intent.rs`. Overlapping changes never are in flight together, so replicas execute them in the
//! same order.

mod background;
mod error;
pub mod label;
mod life;
mod mirror;
mod requests;

pub use background::Worker;
pub use error::{MirrorError, ReplicaError};
pub use label::assemble::Answered;
pub use life::create::{CreateOptions, create, create_with_hooks, mark_written_alone, mark_written_alone_with_hooks};
pub use life::{OpenMirror, OpenOptions, open, open_beside_lost, open_with_hooks};
pub use mirror::replica::{Reopen, ReplicaSource};
pub use mirror::{Mirror, MirrorInfo, MirrorState, Mutation, ReplicaInfo, TestHooks};

#[cfg(test)]
mod tests;
