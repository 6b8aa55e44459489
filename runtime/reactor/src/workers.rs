//! Threads that execute operations as system calls: all operations on files if there is no ring, and on every backend
//! commands to devices, which no ring executes.
//!
//! Invariant: a thread owns an operation from the moment it is queued until it is returned with its result, so a future
//! that is dropped meanwhile frees nothing that a call still uses.
//!
//! Shape: threads are started when there is work and none of them is idle, up to a limit. So a reactor that sends no
//! commands to devices has no threads for them.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use crate::inbox::ReactorShared;
use crate::op_table::{Finished, Key};
use crate::operation::ErasedOp;
use crate::sync::lock;

struct QueuedOp {
    key: Key,
    op: Box<dyn ErasedOp>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<QueuedOp>,
    /// Threads that wait for a job.
    idle: usize,
    closing: bool,
}

struct WorkersState {
    queue: Mutex<Queue>,
    ready: Condvar,
    done: Mutex<Vec<Finished>>,
    reactor: Arc<ReactorShared>,
}

/// See the module's header.
pub(crate) struct Workers {
    state: Arc<WorkersState>,
    threads: Vec<thread::JoinHandle<()>>,
    limit: usize,
    name: &'static str,
    taken: Vec<Finished>,
    /// Operations on threads, including those that have finished there.
    in_flight: usize,
}

impl Workers {
    /// At most `limit` threads. None of them is started yet.
    pub(crate) fn new(name: &'static str, limit: u32, reactor: &Arc<ReactorShared>) -> Workers {
        let state = Arc::new(WorkersState {
            queue: Mutex::default(),
            ready: Condvar::new(),
            done: Mutex::default(),
            reactor: Arc::clone(reactor),
        });
        let limit = limit.max(1) as usize;
        Workers { state, threads: Vec::new(), limit, name, taken: Vec::new(), in_flight: 0 }
    }

    /// Starts all threads now.
    pub(crate) fn start_all(&mut self) -> io::Result<()> {
        while self.threads.len() < self.limit {
            self.start_one()?;
        }
        Ok(())
    }

    fn start_one(&mut self) -> io::Result<()> {
        let state = Arc::clone(&self.state);
        let builder = thread::Builder::new().name(format!("{}-{}", self.name, self.threads.len()));
        self.threads.push(builder.spawn(move || state.work())?);
        Ok(())
    }

    /// Queues an operation. If the system provides no thread at all, the operation ends with its error.
    pub(crate) fn push(&mut self, key: Key, op: Box<dyn ErasedOp>) {
        self.in_flight += 1;
        let mut queue = lock(&self.state.queue);
        queue.jobs.push_back(QueuedOp { key, op });
        let is_short = queue.jobs.len() > queue.idle && self.threads.len() < self.limit;
        drop(queue);
        self.state.ready.notify_one();
        if is_short
            && let Err(error) = self.start_one()
            && self.threads.is_empty()
        {
            let result = -error.raw_os_error().unwrap_or(libc::ENOMEM);
            let refused = lock(&self.state.queue).jobs.pop_back();
            let refused = refused.map(|QueuedOp { key, op }| Finished { key, result, returned: Some(op) });
            lock(&self.state.done).extend(refused);
        }
    }

    /// Appends finished operations.
    pub(crate) fn collect(&mut self, finished: &mut Vec<Finished>) {
        if self.in_flight == 0 {
            return;
        }
        std::mem::swap(&mut *lock(&self.state.done), &mut self.taken);
        self.in_flight -= self.taken.len();
        finished.append(&mut self.taken);
    }

    /// True if operations are on threads, or have finished there and were not collected.
    pub(crate) fn is_busy(&self) -> bool {
        self.in_flight > 0
    }

    /// True if an operation has finished and was not collected.
    pub(crate) fn has_finished(&self) -> bool {
        self.in_flight > 0 && !lock(&self.state.done).is_empty()
    }
}

impl WorkersState {
    fn work(&self) {
        while let Some(QueuedOp { key, mut op }) = self.next() {
            let result = op.run();
            let mut done = lock(&self.done);
            done.push(Finished { key, result, returned: Some(op) });
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
            queue.idle += 1;
            queue = self.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        lock(&self.state.queue).closing = true;
        self.state.ready.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked returns nothing more; the panic hook has printed the panic.
            let _ = thread.join();
        }
    }
}
