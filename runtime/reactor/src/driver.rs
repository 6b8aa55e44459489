//! Execution of operations: on a ring, or on threads and epoll if the kernel or the configuration refuses a ring; and
//! on threads for operations that no ring executes.

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
use crate::workers::Workers;

pub(crate) struct Driver {
    pub(crate) engine: Engine,
    /// For operations that block, with any engine.
    blocking: Workers,
}

pub(crate) enum Engine {
    Ring(Box<Ring>),
    Threads(Box<Threads>),
}

impl Driver {
    pub(crate) fn start(
        config: &Config,
        pool: &Pool,
        shared: &Arc<ReactorShared>,
    ) -> Result<(Driver, Backend), StartError> {
        let (engine, backend) = Engine::start(config, pool, shared)?;
        let blocking = Workers::new("device", config.blocking_threads_limit, shared);
        Ok((Driver { engine, blocking }, backend))
    }

    pub(crate) fn turn(
        &mut self,
        wait: Wait,
        is_abandoned: impl Fn(Key) -> bool,
        finished: &mut Vec<Finished>,
    ) -> io::Result<()> {
        // A thread that finishes after this line writes the event, which ends the wait below.
        self.blocking.collect(finished);
        match &mut self.engine {
            Engine::Ring(ring) => ring.turn(wait, is_abandoned, finished)?,
            Engine::Threads(threads) => threads.turn(wait, finished)?,
        }
        self.blocking.collect(finished);
        Ok(())
    }

    /// True if operations are in flight that wait for a disk. Operations on threads do not count.
    pub(crate) fn awaits_disk(&self) -> bool {
        matches!(&self.engine, Engine::Ring(ring) if ring.awaits_disk())
    }

    /// Registers a descriptor in the ring's table, if there is a ring with room.
    pub(crate) fn fix(&mut self, fd: BorrowedFd<'_>) -> FdRegistration {
        match &mut self.engine {
            Engine::Ring(ring) => ring.fix(fd).map_or(FdRegistration::Plain, FdRegistration::Fixed),
            Engine::Threads(_) => FdRegistration::Plain,
        }
    }

    /// Registers a socket: a ring blocks on it, epoll needs it non-blocking.
    pub(crate) fn adopt(&mut self, fd: BorrowedFd<'_>) -> io::Result<FdRegistration> {
        ioctl_fionbio(fd, matches!(self.engine, Engine::Threads(_)))?;
        match &mut self.engine {
            Engine::Ring(_) => Ok(self.fix(fd)),
            Engine::Threads(threads) => threads.sockets.watch(fd).map(FdRegistration::Watched),
        }
    }

    /// Starts an operation. Returns it to be kept by the future, unless a thread took it.
    pub(crate) fn submit<K: IoOp>(&mut self, key: Key, mut kind: K) -> Option<K> {
        let entries = match &mut self.engine {
            Engine::Ring(ring) => kind.entry(&ring.tables).map(|entry| (ring, entry)),
            Engine::Threads(threads) if !kind.blocks() => {
                threads.push(key, kind.waits(), Box::new(kind));
                return None;
            }
            Engine::Threads(_) => None,
        };
        let Some((ring, entry)) = entries else {
            self.blocking.push(key, Box::new(kind));
            return None;
        };
        // SAFETY: the future keeps the operation, or leaves it to the table, until the completion has arrived; and an
        // `IoOp` guarantees that whatever its entry names stays valid and in place as long as it lives, or is leaked.
        unsafe { ring.push(key, entry, kind.waits().is_some()) };
        Some(kind)
    }

    /// Cancels an operation that waits for a peer.
    pub(crate) fn cancel(&mut self, key: Key, interest: Interest) {
        match &mut self.engine {
            Engine::Ring(ring) => ring.cancel(key),
            Engine::Threads(threads) => threads.sockets.cancel(key, interest),
        }
    }

    /// Cancels operations that wait for a peer, and others if the backend supports it.
    pub(crate) fn cancel_all(&mut self) {
        match &mut self.engine {
            Engine::Ring(ring) => ring.cancel_all(),
            Engine::Threads(threads) => threads.sockets.cancel_all(),
        }
    }
}

impl Engine {
    fn start(config: &Config, pool: &Pool, shared: &Arc<ReactorShared>) -> Result<(Engine, Backend), StartError> {
        let choice = config.choice()?;
        let reason = match choice {
            BackendChoice::Syscalls => None,
            BackendChoice::Auto | BackendChoice::Uring => match Ring::start(config, pool, shared) {
                Ok((ring, features)) => return Ok((Engine::Ring(Box::new(ring)), Backend::Uring(features))),
                Err(unavailable) if choice == BackendChoice::Uring => return Err(StartError::Uring(unavailable)),
                Err(unavailable) => Some(unavailable),
            },
        };
        let threads = config.syscall_threads.max(1);
        let sockets =
            Sockets::start(shared).map_err(|source| StartError::System { what: Attempt::CreateEvent, source })?;
        let driver = Threads::start(threads, shared, sockets, Spin::new(config.spin_us))
            .map_err(|source| StartError::System { what: Attempt::StartThread, source })?;
        Ok((Engine::Threads(Box::new(driver)), Backend::Syscalls { threads, reason }))
    }
}
