//! An NVMe/TCP target that spreads its connections over several cores.
//!
//! A [`Target`] owns [`Subsystem`]s and serves the connections that its listeners accept, each on one core. A
//! connection is one queue: `protocols/nvme-tcp` turns its bytes into commands, and a controller (admin queue) or the
//! device of a namespace (I/O queue) executes them.
//!
//! Invariants:
//! - Every command is completed exactly once, or its connection ends; only Asynchronous Event Requests may stay
//!   outstanding.
//! - No task holds a borrow of shared state while it waits, and no input from a host makes this crate panic.
//! - [`Limits`] bounds what a host can make the target hold.
//! - One place chooses the status of a failed command (`model/command_error.rs`), without a case for "everything else".
//!
//! Shape: a connection belongs to one core, so its state is in cells. It is one task, which executes together what was
//! received together, and sends the completions together. A command that waits for its device has its own slot
//! (`command/slots.rs`), so a slow command does not delay others. Queues of one controller may be on several cores.
//! They share flags that commands read, and locks that only admin commands and queues that connect or disconnect take.
//! A device is on one core or on all, a queue goes to where its devices are when it connects
//! (`connection/placement.rs`), and attaches to each of them once (`command/queue_context.rs`).

mod command;
mod connection;
mod model;
mod reconfigure;
mod target;

pub use model::checksums::ChecksumStats;
pub use model::damage::DamageHandle;
pub use model::damage_list::MAX_BAD_BLOCKS;
pub use model::limits::Limits;
pub use model::namespace::{DeviceIdentities, MAX_NSID, Namespace, NamespaceState, PiVisibility, SetupError};
pub use model::subsystem::{Hosts, Subsystem};
pub use target::{ConnectedHost, Target};
