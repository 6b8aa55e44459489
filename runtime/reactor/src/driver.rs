//! What both backends have in common, as the executor sees it.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use sealblock_runtime_memory::Pool;

use crate::backend::Backend;
use crate::config::{Attempt, BackendChoice, Config, StartError};
use crate::op_table::Key;
use crate::operation::ErasedOp;
use crate::remote::ReactorShared;
use crate::ring::Ring;
use crate::setup;
use crate::sockets::Sockets;
use crate::spin::Spin;
use crate::syscalls::Threads;

/// How long a turn may sleep when nothing is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    Until(Instant),
    Forever,
}

/// A completion: the operation's key, its count or negative error number, and the operation if its future does not hold it.
pub(crate) struct Finished {
    pub(crate) key: Key,
    pub(crate) result: i32,
    pub(crate) returned: Option<Box<dyn ErasedOp>>,
}

pub(crate) enum Driver {
    Ring(Box<Ring>),
    Threads(Box<Threads>),
}

impl Driver {
    pub(crate) fn start(
        config: &Config,
        pool: &Pool,
        remote: &Arc<ReactorShared>,
    ) -> Result<(Driver, Backend), StartError> {
        let choice = config.choice()?;
        let reason = match choice {
            BackendChoice::Syscalls => None,
            BackendChoice::Auto | BackendChoice::Uring => match setup::ring(config, pool, remote) {
                Ok((ring, features)) => return Ok((Driver::Ring(Box::new(ring)), Backend::Uring(features))),
                Err(refusal) if choice == BackendChoice::Uring => return Err(StartError::Uring(refusal)),
                Err(refusal) => Some(refusal),
            },
        };
        let threads = config.syscall_threads.max(1);
        let sockets =
            Sockets::start(remote).map_err(|source| StartError::System { what: Attempt::CreateEvent, source })?;
        let driver = Threads::start(threads, remote, sockets, Spin::new(config.spin_us))
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

    /// Whether operations are in flight that wait for no peer, as far as the backend knows: what threads do is not counted.
    pub(crate) fn awaits_disk(&self) -> bool {
        matches!(self, Driver::Ring(ring) if ring.awaits_disk())
    }

    /// Ends early what waits for a peer, and what else the backend can.
    pub(crate) fn cancel_all(&mut self) {
        match self {
            Driver::Ring(ring) => ring.cancel_all(),
            Driver::Threads(threads) => threads.sockets.cancel_all(),
        }
    }
}
