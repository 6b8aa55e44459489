//! An NVMe/TCP target for one reactor.
//!
//! A [`Target`] owns [`Subsystem`]s and serves the connections that listeners of its reactor accept. A connection is one
//! queue: its bytes go through the core of `protocols/nvme-tcp`, its commands to a controller (admin queue) or to a
//! namespace's device (I/O queue).
//!
//! Invariants:
//! - Every command is answered once, or its connection ends; only Asynchronous Event Requests are kept.
//! - No borrow of shared state is held while a task waits, and no peer's input makes anything here panic.
//! - What a peer can make the target hold is bounded by [`Limits`].
//! - A status is chosen in one place (`refusal.rs`), without a case for "everything else".
//!
//! Shape: everything belongs to one thread, so state is in cells. A connection is one task: what was received together is
//! carried out at once and answered together. A command whose device makes it wait keeps a slot of its own (`slots.rs`), so a
//! slow command delays no other.

mod admin;
mod bell;
mod budget;
mod connect;
mod connection;
mod controller;
mod discovery;
mod features;
mod identify;
mod io;
mod limits;
mod logs;
mod namespace;
mod properties;
mod queue;
mod refusal;
mod slots;
mod subsystem;
mod target;

pub use limits::Limits;
pub use namespace::{Namespace, Shows};
pub use subsystem::{Hosts, SetupError, Subsystem};
pub use target::Target;
