//! What both backends have in common, as the executor sees it.

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use sealblock_runtime_memory::Pool;

use crate::backend::Backend;
use crate::config::{Attempt, Choice, Config, StartError};
use crate::operation::Key;
use crate::remote::Remote;
use crate::ring::Ring;
use crate::setup;
use crate::syscalls::Threads;

/// How long a turn may sleep when nothing is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    Until(Instant),
    Forever,
}

/// A completion: the operation's key, its count or negative error number, and the operation if a thread had it.
pub(crate) struct Finished {
    pub(crate) key: Key,
    pub(crate) result: i32,
    pub(crate) returned: Option<Box<dyn Any>>,
}

pub(crate) enum Driver {
    Ring(Box<Ring>),
    Threads(Threads),
}

impl Driver {
    pub(crate) fn start(config: &Config, pool: &Pool, remote: &Arc<Remote>) -> Result<(Driver, Backend), StartError> {
        let choice = config.choice()?;
        let reason = match choice {
            Choice::Syscalls => None,
            Choice::Auto | Choice::Uring => match setup::ring(config, pool, remote) {
                Ok((ring, features)) => return Ok((Driver::Ring(Box::new(ring)), Backend::Uring(features))),
                Err(refusal) if choice == Choice::Uring => return Err(StartError::Uring(refusal)),
                Err(refusal) => Some(refusal),
            },
        };
        let threads = config.syscall_threads.max(1);
        let driver = Threads::start(threads, remote)
            .map_err(|source| StartError::System { what: Attempt::StartThread, source })?;
        Ok((Driver::Threads(driver), Backend::Syscalls { threads, reason }))
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
}
