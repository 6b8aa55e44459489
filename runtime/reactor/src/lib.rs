//! One reactor per core over io_uring, with a plain-syscall fallback.
//!
//! A [`Reactor`] runs `!Send` futures on the thread that made it. Inside, [`spawn`] starts tasks, [`sleep`] and [`timeout`]
//! measure time, and a [`File`] or a [`net::Stream`] moves [`sealblock_runtime_memory`] buffers. [`Cores`] runs one reactor per
//! thread and lets other threads call into them. Where the kernel refuses io_uring the same operations are carried out by
//! system calls, for files on a few threads; a [`Backend`] says which, and why.
//!
//! Invariants:
//! - A buffer lent to the kernel is freed or reused only after the operation has ended, whatever happens to its future.
//! - A turn of the reactor makes one system call at most, unless more operations start than the ring has room for.
//! - Every queue has a limit or is fed by something that has one; see [`Config`].
//!
//! Shape: one thread owns everything it touches, so nothing on the way of a request is locked or counted atomically except
//! buffers and descriptors, which may travel. What other threads may touch is `remote.rs`, `call.rs`, `post.rs` and `homed.rs`.

#![allow(unsafe_code)]

mod backend;
mod budget;
mod busy_poll;
mod call;
mod config;
mod core_local;
mod cores;
mod descriptor;
mod driver;
mod executor;
mod file;
mod gather;
mod late;
pub mod net;
mod notify;
mod op_table;
mod operation;
mod operations;
mod post;
mod remote;
mod ring;
mod setup;
mod signal;
mod sleep_handshake;
mod sockets;
mod spin;
mod stopping;
/// What [`sleep_handshake`] is made of; a model checker puts its own in their place.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
}
mod syscalls;
mod task;
mod timer;
mod waiters;
mod waker;

pub use backend::{Backend, Features, TaskrunMode, UringUnavailable};
pub use budget::{Budget, Share};
pub use call::{CoreGone, CoreHandle};
pub use config::{Attempt, BackendChoice, Config, RUNTIME_VARIABLE, StartError};
pub use core_local::CoreLocal;
pub use cores::{Cores, Placement, Stopped};
pub use executor::{Reactor, backend, pool};
pub use file::{File, Options};
pub use notify::Notify;
pub use post::CoreAddress;
pub use signal::{ShutdownSignal, Signal, shutdown_signal};
pub use stopping::{Stopping, stopping};
pub use task::{Aborted, JoinHandle, spawn};
pub use timer::{Elapsed, Sleep, now, sleep, sleep_until, timeout, yield_now};
