//! Detects which of many connections were closed by their peers, before their tasks have read that far.
//!
//! A task sees the end of its connection only after all bytes before it. Here the kernel reports an end as soon as it
//! has arrived, for all connections at once and on any core.
//!
//! Invariant: a connection that was added and whose end has arrived is reported by every later [`Hangups::arrived`],
//! until its [`HangupWatch`] is dropped.
//!
//! Shape: a separate `epoll(7)` set that is queried without waiting, so it works the same with a ring. It takes no
//! events from tasks that wait.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use super::Stream;
use crate::descriptor::Descriptor;

/// For a query that does not wait.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The connections that are watched for their ends. Clones are the same set, on any core.
#[derive(Clone)]
pub struct Hangups(Arc<OwnedFd>);

/// Watches one connection until it is dropped; keeps its socket open until then.
pub struct HangupWatch {
    set: Hangups,
    descriptor: Arc<Descriptor>,
}

impl Hangups {
    /// An empty set.
    ///
    /// # Errors
    /// Those of `epoll_create1(2)`, such as `EMFILE`.
    pub fn new() -> io::Result<Hangups> {
        Ok(Hangups(Arc::new(epoll::create(CreateFlags::CLOEXEC)?)))
    }

    /// Adds a connection, under a number that the caller chooses.
    ///
    /// # Errors
    /// Those of `epoll_ctl(2)`, such as `ENOSPC`, and `EEXIST` for a connection that is in the set.
    pub fn watch(&self, stream: &Stream, number: u64) -> io::Result<HangupWatch> {
        let descriptor = Arc::clone(stream.descriptor());
        // A reset and an end of both directions are always reported.
        epoll::add(&self.0, descriptor.as_fd(), EventData::new_u64(number), EventFlags::RDHUP)?;
        Ok(HangupWatch { set: self.clone(), descriptor })
    }

    /// True if the end of any connection has arrived. One system call, no allocation.
    pub fn any(&self) -> bool {
        let mut one = [const { MaybeUninit::uninit() }; 1];
        // After an error, such as an interruption, `arrived` queries again.
        !matches!(epoll::wait(&self.0, &mut one, Some(&AT_ONCE)), Ok((told, _)) if told.is_empty())
    }

    /// The numbers of the connections whose ends have arrived, among at most `limit` of them.
    pub fn arrived(&self, limit: usize) -> Vec<u64> {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(limit.max(1));
        while epoll::wait(&self.0, spare_capacity(&mut events), Some(&AT_ONCE)) == Err(Errno::INTR) {}
        events.iter().map(|event| event.data.u64()).collect()
    }
}

impl Drop for HangupWatch {
    fn drop(&mut self) {
        // The descriptor is open and in the set, so this cannot fail.
        let _ = epoll::delete(&self.set.0, self.descriptor.as_fd());
    }
}
