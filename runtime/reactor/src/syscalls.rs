//! The backend that uses plain system calls: for files on a few threads of the reactor's own, for sockets on its own
//! thread.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::busy_poll::{Spin, Wait};
use crate::inbox::ReactorShared;
use crate::op_table::{Finished, Key};
use crate::operation::{ErasedOp, Interest};
use crate::sockets::Sockets;
use crate::workers::Workers;

pub(crate) struct Threads {
    workers: Workers,
    reactor: Arc<ReactorShared>,
    pub(crate) sockets: Sockets,
    spin: Spin,
}

impl Threads {
    pub(crate) fn start(count: u32, reactor: &Arc<ReactorShared>, sockets: Sockets, spin: Spin) -> io::Result<Threads> {
        let mut workers = Workers::new("file", count, reactor);
        workers.start_all()?;
        Ok(Threads { workers, reactor: Arc::clone(reactor), sockets, spin })
    }

    /// Starts an operation; one that waits for a peer is attempted at once.
    pub(crate) fn push(&mut self, key: Key, waits: Option<Interest>, op: Box<dyn ErasedOp>) {
        match waits {
            Some(interest) => self.sockets.push(key, op, interest),
            None => self.workers.push(key, op),
        }
    }

    pub(crate) fn turn(&mut self, wait: Wait, finished: &mut Vec<Finished>) -> io::Result<()> {
        if wait != Wait::No && finished.is_empty() && !self.has_finished() {
            self.sleep(wait)?;
        } else if self.sockets.is_waiting() {
            self.sockets.wait(Some(Duration::ZERO))?;
        }
        self.workers.collect(finished);
        self.sockets.report(finished);
        Ok(())
    }

    fn has_finished(&self) -> bool {
        self.sockets.is_done() || self.workers.has_finished()
    }

    /// Waits until an operation has finished, the event descriptor is written, or the timeout has passed.
    fn sleep(&mut self, wait: Wait) -> io::Result<()> {
        if let Some(end) =
            self.spin.begin(self.sockets.is_waiting() || self.workers.is_busy() || self.reactor.is_shared(), wait)
        {
            while Instant::now() < end {
                if self.sockets.wait(Some(Duration::ZERO))? || self.has_finished() || self.reactor.has_notice() {
                    self.spin.hit();
                    return Ok(());
                }
            }
        }
        let timeout = match wait {
            Wait::Until(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            Wait::No | Wait::Forever => None,
        };
        let timeout = if self.reactor.fall_asleep() { timeout } else { Some(Duration::ZERO) };
        let waited = self.sockets.wait(timeout);
        self.reactor.wake_up();
        self.spin.slept();
        waited.map(|_| ())
    }
}
