//! The backend that uses plain system calls: for files on a few threads of the reactor's own, for sockets on its own thread.
//!
//! Invariant: a thread owns an operation from the moment it is queued until it is returned with its result, so a future
//! that is dropped meanwhile frees nothing that a call still uses.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::busy_poll::{Spin, Wait};
use crate::inbox::ReactorShared;
use crate::op_table::{Finished, Key};
use crate::operation::{ErasedOp, Interest};
use crate::sockets::Sockets;
use crate::sync::lock;

struct QueuedOp {
    key: Key,
    op: Box<dyn ErasedOp>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<QueuedOp>,
    closing: bool,
}

struct ThreadsState {
    queue: Mutex<Queue>,
    ready: Condvar,
    done: Mutex<Vec<Finished>>,
    reactor: Arc<ReactorShared>,
}

pub(crate) struct Threads {
    state: Arc<ThreadsState>,
    threads: Vec<thread::JoinHandle<()>>,
    taken: Vec<Finished>,
    /// Operations on threads, and those that have finished there.
    in_flight: usize,
    pub(crate) sockets: Sockets,
    spin: Spin,
}

impl Threads {
    pub(crate) fn start(count: u32, reactor: &Arc<ReactorShared>, sockets: Sockets, spin: Spin) -> io::Result<Threads> {
        let state = Arc::new(ThreadsState {
            queue: Mutex::default(),
            ready: Condvar::new(),
            done: Mutex::default(),
            reactor: Arc::clone(reactor),
        });
        let mut threads = Threads { state, threads: Vec::new(), taken: Vec::new(), in_flight: 0, sockets, spin };
        for number in 0..count.max(1) {
            let state = Arc::clone(&threads.state);
            let builder = thread::Builder::new().name(format!("file-{number}"));
            threads.threads.push(builder.spawn(move || state.work())?);
        }
        Ok(threads)
    }

    /// Starts an operation; one that waits for a peer is tried at once.
    pub(crate) fn push(&mut self, key: Key, waits: Option<Interest>, op: Box<dyn ErasedOp>) {
        if let Some(interest) = waits {
            return self.sockets.push(key, op, interest);
        }
        self.in_flight += 1;
        lock(&self.state.queue).jobs.push_back(QueuedOp { key, op });
        self.state.ready.notify_one();
    }

    pub(crate) fn turn(&mut self, wait: Wait, finished: &mut Vec<Finished>) -> io::Result<()> {
        if wait != Wait::No && !self.has_finished() {
            self.sleep(wait)?;
        } else if self.sockets.is_waiting() {
            self.sockets.wait(Some(Duration::ZERO))?;
        }
        std::mem::swap(&mut *lock(&self.state.done), &mut self.taken);
        self.in_flight -= self.taken.len();
        finished.append(&mut self.taken);
        self.sockets.report(finished);
        Ok(())
    }

    fn has_finished(&self) -> bool {
        self.sockets.is_done() || (self.in_flight > 0 && !lock(&self.state.done).is_empty())
    }

    /// Waits until an operation has finished, the event descriptor is written, or the timeout has passed.
    fn sleep(&mut self, wait: Wait) -> io::Result<()> {
        if let Some(end) =
            self.spin.begin(self.sockets.is_waiting() || self.in_flight > 0 || self.state.reactor.is_shared(), wait)
        {
            while Instant::now() < end {
                if self.sockets.wait(Some(Duration::ZERO))? || self.has_finished() || self.state.reactor.has_notice() {
                    self.spin.hit();
                    return Ok(());
                }
            }
        }
        let timeout = match wait {
            Wait::Until(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            Wait::No | Wait::Forever => None,
        };
        let timeout = if self.state.reactor.fall_asleep() { timeout } else { Some(Duration::ZERO) };
        let waited = self.sockets.wait(timeout);
        self.state.reactor.wake_up();
        self.spin.slept();
        waited.map(|_| ())
    }
}

impl ThreadsState {
    fn work(&self) {
        while let Some(QueuedOp { key, op: mut work }) = self.next() {
            let result = work.run();
            let mut done = lock(&self.done);
            done.push(Finished { key, result, returned: Some(work) });
            let first = done.len() == 1;
            drop(done);
            // The reactor takes later ones together with the first.
            if first {
                self.reactor.kick();
            }
        }
    }

    fn next(&self) -> Option<QueuedOp> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if queue.closing {
                return None;
            }
            queue = self.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        lock(&self.state.queue).closing = true;
        self.state.ready.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked returns nothing more; the panic hook has printed the panic.
            let _ = thread.join();
        }
    }
}
