//! An NVMe/TCP target, spread over the cores it is given.
//!
//! A [`Target`] owns [`Subsystem`]s and serves the connections that its listeners accept, each on one core. A connection is one
//! queue: its bytes go through the core of `protocols/nvme-tcp`, its commands to a controller (admin queue) or to a
//! namespace's device (I/O queue).
//!
//! Invariants:
//! - Every command is answered once, or its connection ends; only Asynchronous Event Requests are kept.
//! - No borrow of shared state is held while a task waits, and no peer's input makes anything here panic.
//! - What a peer can make the target hold is bounded by [`Limits`].
//! - A status is chosen in one place (`refusal.rs`), without a case for "everything else".
//!
//! Shape: a connection belongs to one core, so its state is in cells, and it is one task: what was received together is
//! carried out at once and answered together. A command whose device makes it wait keeps a slot of its own (`slots.rs`), so
//! a slow command delays no other. What queues of one controller share may be on other cores: flags that commands read, and
//! locks that only admin commands and coming and going take. A device stays on the core that opened it, and each queue
//! attaches to it once (`member.rs`).

mod admin;
mod async_events;
mod check;
mod command_error;
mod commands;
mod connect;
mod connected_hosts;
mod connection;
mod controller;
mod damage;
mod damage_list;
mod discovery;
mod dispatch;
mod events;
mod features;
mod handover;
mod identify;
mod io;
mod kept;
mod limits;
mod log_rate_limit;
mod logs;
mod member;
mod namespace;
mod parts;
mod properties;
mod reconfigure;
mod registry;
mod shutdown;
mod signal;
mod slots;
mod state;
mod subsystem;
mod sums;
mod target;

pub use connected_hosts::ConnectedHost;
pub use damage::{DamageHandle, DamageRun, DamageSummary};
pub use damage_list::MAX_BAD_BLOCKS;
pub use limits::Limits;
pub use namespace::{Namespace, PiVisibility};
pub use state::NamespaceState;
pub use subsystem::{Hosts, MAX_NSID, SetupError, Subsystem};
pub use sums::ChecksumStats;
pub use target::Target;
