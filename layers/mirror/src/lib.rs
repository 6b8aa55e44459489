//! A mirror: two to eight replicas with the same content, presented as one device.
//!
//! Every change goes to every replica. A read goes to one; blocks that are bad there are read from another replica and
//! rewritten. Before a change that a failed replica misses completes, the labels of the other replicas mark the failed
//! one out of sync, so stale content is never read. A replica that returns gets only the regions that it lacks.
//!
//! The modules, each a file and the folder beside it; each uses only those before it:
//!
//! - [`label`]: sets of regions, names, the content of labels, and their assembly (`assemble`); pure.
//! - `mirror`: the state of the mirror: its devices (`replica`, which alone waits for a device), ordering of requests,
//!   the content of labels (`write_intent`) and how it becomes durable (`labels`), the label of a device (`probe`).
//! - `requests`: the mirror as a device, and what must be durable before a change completes.
//! - `background`: resync, returning devices, sweeping of labels; the worker.
//! - `life`: opening and creating a mirror; adding, replacing and removing replicas in use.
//!
//! Invariants: see `mirror/write_intent.rs`. Overlapping changes never are in flight together, so replicas execute them in the
//! same order.

mod background;
mod channel;
mod error;
pub mod label;
mod life;
mod mirror;
mod requests;

pub use background::Worker;
pub use channel::{Elsewhere, MirrorChannel};
pub use error::{MirrorError, ReplicaError};
pub use label::assemble::Answered;
pub use life::create::{CreateOptions, create, create_with_hooks, mark_written_alone, mark_written_alone_with_hooks};
pub use life::{OpenMirror, OpenOptions, open, open_beside_lost, open_with_hooks};
pub use mirror::replica::{Loss, LossMonitor, Reopen, ReplicaSource};
pub use mirror::{Mirror, MirrorInfo, MirrorState, Mutation, ReplicaInfo, TestHooks};

#[cfg(test)]
mod tests;
