//! One reactor per core over io_uring, with a plain-syscall fallback.
//!
//! A [`Reactor`] runs `!Send` futures on the thread that created it. Inside, [`spawn`] starts tasks, [`sleep`] and
//! [`timeout`] measure time, and a [`File`] or a [`net::Stream`] moves [`sealblock_runtime_memory`] buffers. [`Cores`]
//! runs one reactor per thread and lets other threads call into them. If the kernel refuses io_uring, system calls
//! execute the same operations, for files on a few threads; [`Backend`] says which one is used, and why.
//!
//! Invariants:
//! - A buffer lent to the kernel is freed or reused only after the operation has completed, even if its future was
//!   dropped.
//! - A turn of the reactor makes at most one system call, unless more operations start than the ring has room for.
//! - Every queue has a limit or a producer with a limit; see [`Config`].
//!
//! Shape: one thread owns everything that it uses, so nothing on the path of a request is locked or counted atomically
//! except buffers and descriptors, which may change threads. `inbox.rs` has what other threads may access.

#![allow(unsafe_code)]

mod budget;
mod busy_poll;
mod call;
mod config;
mod core;
mod cores;
mod cross_core;
mod descriptor;
mod device_ops;
mod driver;
mod executor;
mod file;
mod file_ops;
mod gather;
mod handoff;
mod inbox;
mod long_step;
mod long_steps;
pub mod net;
mod op;
mod op_table;
mod operation;
mod ring;
mod scheduler;
mod scsi_ops;
mod shutdown;
mod socket_ops;
mod sockets;
mod standard_streams;
mod submitted;
mod sync;
mod syscalls;
mod tagged_ops;
mod task;
mod timer;
mod uring_command;
mod workers;

/// The primitives of `handoff.rs`; `tests/handoff.rs` replaces them with those of a model checker.
mod primitives {
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
    pub(crate) use std::sync::{Mutex, MutexGuard};
}

pub use budget::{Budget, Share};
pub use call::CoreHandle;
pub use config::{
    Attempt, Backend, BackendChoice, Config, Features, RUNTIME_VARIABLE, StartError, TaskrunMode, UringUnavailable,
};
pub use core::{backend, pool};
pub use cores::{Cores, Placement, Stopped};
pub use cross_core::{CoreAddress, CoreGone, CoreLocal};
pub use device_ops::{NvmeCommand, NvmeQueue, Transfer};
pub use executor::Reactor;
pub use file::{File, Options};
pub use handoff::Mailbox;
pub use long_step::long_step;
pub use scsi_ops::{ScsiCommand, ScsiReply, SenseBuffer};
pub use shutdown::{
    ShutdownRequested, ShutdownSignal, Signal, hangup_is_shutdown, shutdown_requested, shutdown_signal,
};
pub use standard_streams::{StandardStream, was_closed_at_start};
pub use submitted::submitted;
pub use sync::Notify;
pub use tagged_ops::DeviceChecks;
pub use task::{Aborted, JoinHandle, spawn};
pub use timer::{Elapsed, Sleep, now, sleep, sleep_until, timeout, yield_now};
pub use uring_command::COMMAND_BYTES;
