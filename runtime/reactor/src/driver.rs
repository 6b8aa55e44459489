//! What executes operations: a ring, or threads and epoll where the kernel or the configuration refuses one.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::ioctl_fionbio;
use sealblock_runtime_memory::Pool;

use crate::busy_poll::{Spin, Wait};
use crate::config::{Attempt, Backend, BackendChoice, Config, StartError};
use crate::descriptor::FdRegistration;
use crate::inbox::ReactorShared;
use crate::op_table::{Finished, Key};
use crate::operation::{Interest, IoOp};
use crate::ring::Ring;
use crate::sockets::Sockets;
use crate::syscalls::Threads;

pub(crate) enum Driver {
    Ring(Box<Ring>),
    Threads(Box<Threads>),
}

impl Driver {
    pub(crate) fn start(
        config: &Config,
        pool: &Pool,
        shared: &Arc<ReactorShared>,
    ) -> Result<(Driver, Backend), StartError> {
        let choice = config.choice()?;
        let reason = match choice {
            BackendChoice::Syscalls => None,
            BackendChoice::Auto | BackendChoice::Uring => match Ring::start(config, pool, shared) {
                Ok((ring, features)) => return Ok((Driver::Ring(Box::new(ring)), Backend::Uring(features))),
                Err(unavailable) if choice == BackendChoice::Uring => return Err(StartError::Uring(unavailable)),
                Err(unavailable) => Some(unavailable),
            },
        };
        let threads = config.syscall_threads.max(1);
        let sockets =
            Sockets::start(shared).map_err(|source| StartError::System { what: Attempt::CreateEvent, source })?;
        let driver = Threads::start(threads, shared, sockets, Spin::new(config.spin_us))
            .map_err(|source| StartError::System { what: Attempt::StartThread, source })?;
        Ok((Driver::Threads(Box::new(driver)), Backend::Syscalls { threads, reason }))
    }

    pub(crate) fn turn(
        &mut self,
        wait: Wait,
        is_abandoned: impl Fn(Key) -> bool,
        finished: &mut Vec<Finished>,
    ) -> io::Result<()> {
        match self {
            Driver::Ring(ring) => ring.turn(wait, is_abandoned, finished),
            Driver::Threads(threads) => threads.turn(wait, finished),
        }
    }

    /// True if operations are in flight that wait for a disk. Operations on threads do not count.
    pub(crate) fn awaits_disk(&self) -> bool {
        matches!(self, Driver::Ring(ring) if ring.awaits_disk())
    }

    /// Registers a descriptor in the ring's table, if there is a ring with room.
    pub(crate) fn fix(&mut self, fd: BorrowedFd<'_>) -> FdRegistration {
        match self {
            Driver::Ring(ring) => ring.fix(fd).map_or(FdRegistration::Plain, FdRegistration::Fixed),
            Driver::Threads(_) => FdRegistration::Plain,
        }
    }

    /// Registers a socket: a ring blocks on it, epoll needs it non-blocking.
    pub(crate) fn adopt(&mut self, fd: BorrowedFd<'_>) -> io::Result<FdRegistration> {
        ioctl_fionbio(fd, matches!(self, Driver::Threads(_)))?;
        match self {
            Driver::Ring(_) => Ok(self.fix(fd)),
            Driver::Threads(threads) => threads.sockets.watch(fd).map(FdRegistration::Watched),
        }
    }

    /// Starts an operation. Returns it for the future to keep, unless a thread took it.
    pub(crate) fn submit<K: IoOp>(&mut self, key: Key, mut kind: K) -> Option<K> {
        match self {
            Driver::Ring(ring) => {
                let entry = kind.entry(&ring.tables);
                // SAFETY: the future keeps the operation, or leaves it to the table, until the completion is there; and a
                // `IoOp` promises that what its entry names stays valid and in place as long as it lives, or is leaked.
                unsafe { ring.push(key, entry, kind.waits().is_some()) };
                Some(kind)
            }
            Driver::Threads(threads) => {
                threads.push(key, kind.waits(), Box::new(kind));
                None
            }
        }
    }

    /// Cancels an operation that waits for a peer.
    pub(crate) fn cancel(&mut self, key: Key, interest: Interest) {
        match self {
            Driver::Ring(ring) => ring.cancel(key),
            Driver::Threads(threads) => threads.sockets.cancel(key, interest),
        }
    }

    /// Cancels operations that wait for a peer, and others if the backend can.
    pub(crate) fn cancel_all(&mut self) {
        match self {
            Driver::Ring(ring) => ring.cancel_all(),
            Driver::Threads(threads) => threads.sockets.cancel_all(),
        }
    }
}
