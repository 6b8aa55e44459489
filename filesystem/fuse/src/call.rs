//! Requests from the kernel on their way to the core of the filesystem, and a limit for their number.
//!
//! Invariants: a call carries its reply, which sends EIO if it is dropped before it is answered, so no program waits
//! forever. A call also carries a permit, which is taken before the call is sent and returned when it has been answered
//! or dropped, so the number of waiting calls never exceeds the limit. A thread without a permit waits, and meanwhile
//! requests wait in the kernel's queue.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use fuser::{
    ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyXattr,
};

use crate::changes::OpenMode;
use crate::interface::Seek;

mod changes;

pub use changes::{ChangeRequest, NewName, OwnedContent};

/// A request, with its reply. Inode numbers are the filesystem's.
#[derive(Debug)]
pub enum FsRequest {
    Lookup {
        parent: u64,
        name: Vec<u8>,
        reply: ReplyEntry,
    },
    Attributes {
        ino: u64,
        reply: ReplyAttr,
    },
    /// Only a mount that can be changed asks.
    OpenDirectory {
        ino: u64,
        reply: ReplyOpen,
    },
    ReleaseDirectory {
        handle: u64,
        reply: ReplyEmpty,
    },
    /// `handle` is that of `OpenDirectory`.
    ReadDirectory {
        ino: u64,
        handle: u64,
        cookie: u64,
        reply: ReplyDirectory,
    },
    /// Like `ReadDirectory`, with the attributes of each entry.
    ReadDirectoryPlus {
        ino: u64,
        handle: u64,
        cookie: u64,
        reply: ReplyDirectoryPlus,
    },
    Open {
        ino: u64,
        mode: OpenMode,
        /// The kernel does not use its page cache for this handle.
        bypasses_cache: bool,
        reply: ReplyOpen,
    },
    Release {
        ino: u64,
        handle: u64,
        /// It was opened for writing.
        writes: bool,
        reply: ReplyEmpty,
    },
    Read {
        ino: u64,
        handle: u64,
        offset: u64,
        size_bytes: u32,
        reply: ReplyData,
    },
    Seek {
        ino: u64,
        offset: u64,
        what: Seek,
        reply: ReplyLseek,
    },
    ReadLink {
        ino: u64,
        reply: ReplyData,
    },
    Xattr {
        ino: u64,
        name: Vec<u8>,
        size_bytes: u32,
        reply: ReplyXattr,
    },
    Xattrs {
        ino: u64,
        size_bytes: u32,
        reply: ReplyXattr,
    },
    Statistics {
        reply: ReplyStatfs,
    },
    Change(ChangeRequest),
}

/// So many lookups of an inode are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forget {
    /// The filesystem's number.
    pub ino: u64,
    /// How many.
    pub lookups: u64,
}

/// A request in flight.
#[derive(Debug)]
pub struct Call {
    /// The request.
    pub request: FsRequest,
    /// Returned when the call has been answered or dropped.
    pub permit: Permit,
}

/// A limited number of permits for threads that may sleep.
#[derive(Debug)]
pub struct Permits {
    state: Mutex<PermitState>,
    returned: Condvar,
}

#[derive(Debug)]
struct PermitState {
    available: usize,
    is_closed: bool,
}

/// A permit for one call.
#[derive(Debug)]
pub struct Permit(Arc<Permits>);

impl Permits {
    /// A number of permits, at least one.
    pub fn new(limit: usize) -> Arc<Permits> {
        let state = Mutex::new(PermitState { available: limit.max(1), is_closed: false });
        Arc::new(Permits { state, returned: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, PermitState> {
        // Only numbers change under the lock, so a panic leaves no inconsistent state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a permit; `None` once closed.
    pub fn take(self: &Arc<Self>) -> Option<Permit> {
        let mut state = self.lock();
        while state.available == 0 && !state.is_closed {
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.is_closed {
            return None;
        }
        state.available -= 1;
        Some(Permit(Arc::clone(self)))
    }

    /// Gives no further permit, and ends the waiting.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.returned.notify_all();
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.lock().available += 1;
        self.0.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_call_without_a_permit_waits_for_one() {
        let permits = Permits::new(2);
        let (first, second) = (permits.take().unwrap(), permits.take().unwrap());
        let (send, receive) = mpsc::channel();
        let waiting = {
            let permits = Arc::clone(&permits);
            thread::spawn(move || send.send(permits.take().is_some()))
        };
        assert!(receive.recv_timeout(Duration::from_millis(50)).is_err(), "both are taken");
        drop(first);
        assert_eq!(receive.recv(), Ok(true));
        waiting.join().unwrap().unwrap();
        drop(second);
        assert_eq!(permits.lock().available, 2, "all are returned");
    }

    #[test]
    fn closing_ends_the_waiting() {
        let permits = Permits::new(0);
        let held = permits.take().unwrap();
        let waiting = {
            let permits = Arc::clone(&permits);
            thread::spawn(move || permits.take().is_some())
        };
        permits.close();
        assert!(!waiting.join().unwrap());
        drop(held);
        assert!(permits.take().is_none(), "also when one is there");
    }
}
