//! Operations, independent of the backend: one trait, [`IoOp`], implemented in `file_ops.rs`, `tagged_ops.rs`,
//! `socket_ops.rs` and `device_ops.rs`.

use std::any::Any;
use std::cell::Cell;
use std::io;
use std::os::fd::RawFd;

use io_uring::squeue;

use crate::descriptor::Tables;

/// The number of operations that one poll of a task executes inline; more go to the backend, so that other tasks get
/// their turn.
const CALLS_PER_POLL: u32 = 8;

/// Operations that the current poll of a task may still execute inline.
#[derive(Default)]
pub(crate) struct Calls(Cell<u32>);

impl Calls {
    /// Resets the number for the next poll.
    pub(crate) fn renew(&self) {
        self.0.set(CALLS_PER_POLL);
    }

    /// Takes one, if there is one left.
    pub(crate) fn take(&self) -> bool {
        let left = self.0.get().checked_sub(1);
        self.0.set(left.unwrap_or(0));
        left.is_some()
    }
}

/// Maximum bytes that Linux moves in one read or write (`MAX_RW_COUNT`).
pub(crate) const TRANSFER_LIMIT_BYTES: usize = 0x7fff_f000;

/// Creates an entry for a descriptor that is either a slot of the ring's table or a number.
macro_rules! entry_for {
    ($target:expr, |$fd:ident| $entry:expr) => {
        match $target {
            $crate::descriptor::Target::Fixed(slot) => {
                let $fd = io_uring::types::Fixed(slot);
                Some($entry)
            }
            $crate::descriptor::Target::Plain(number) => {
                let $fd = io_uring::types::Fd(number);
                Some($entry)
            }
        }
    };
}
pub(crate) use entry_for;

/// The count that a system call returned, or its error.
pub(crate) fn counted(result: rustix::io::Result<usize>) -> io::Result<u32> {
    Ok(u32::try_from(result?).unwrap_or(u32::MAX))
}

/// The readiness that an operation waits for; it depends on a peer and may never occur.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) fd: RawFd,
    pub(crate) direction: Direction,
}

/// The direction of a socket's readiness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Readable,
    Writable,
}

/// One kind of operation.
///
/// # Safety
/// All memory and descriptors named by [`IoOp::entry`] stay valid, at the same address, while the value lives, even
/// when the value itself moves, and also when it is leaked.
pub(crate) unsafe trait IoOp: Sized + Send + Unpin + 'static {
    /// The output of the operation's future.
    type Output;

    /// The submission for a ring; `None` exactly if the operation [`IoOp::blocks`].
    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry>;

    /// Executes the operation as a system call. It may block, unless the operation waits for a peer: then it returns
    /// `EAGAIN`.
    fn call(&mut self) -> io::Result<u32>;

    /// Converts the result of either to the output.
    fn finish(self, result: io::Result<u32>) -> Self::Output;

    /// True if no ring executes the operation: on every backend it goes to a separate thread, where it may block for
    /// long.
    fn blocks(&self) -> bool {
        false
    }

    /// The readiness of a peer that the operation waits for, if any. Such an operation is cancelled when its future is
    /// dropped, does not count against the limit of operations in flight, and never goes to a thread.
    fn waits(&self) -> Option<Interest> {
        None
    }

    /// True if [`IoOp::call`] is tried when the operation starts. Only for operations that wait for a peer.
    fn is_prompt(&self) -> bool {
        false
    }

    /// True if a prompt operation busy polls before it waits.
    fn busy_polls(&self) -> bool {
        false
    }

    /// Undoes the result of an operation whose future was dropped.
    fn discard(self, result: io::Result<u32>) {
        drop((self, result));
    }
}

/// An operation that moves to a thread and back.
pub(crate) trait ErasedOp: Send {
    /// Executes the operation; a negative result is an error number, as in a completion of a ring.
    fn run(&mut self) -> i32;
    /// Undoes the result of an operation whose future was dropped.
    fn discard(self: Box<Self>, result: i32);
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<K: IoOp> ErasedOp for K {
    fn run(&mut self) -> i32 {
        match self.call() {
            Ok(count) => i32::try_from(count).unwrap_or(i32::MAX),
            Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    fn discard(self: Box<Self>, result: i32) {
        IoOp::discard(*self, decoded(result));
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

pub(crate) fn decoded(result: i32) -> io::Result<u32> {
    u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

/// Undoes the result of an operation whose future was dropped, wherever the operation was kept.
pub(crate) fn discard(result: i32, kept: [Option<Box<dyn ErasedOp>>; 2]) {
    kept.into_iter().flatten().for_each(|op| op.discard(result));
}
