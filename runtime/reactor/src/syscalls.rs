//! The backend that uses plain system calls: for files on a few threads of the reactor's own, for sockets on its own thread.
//!
//! Invariant: a thread owns an operation from the moment it is queued until it is returned with its result, so a future
//! that is dropped meanwhile frees nothing that a call still uses.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::driver::{Finished, Wait};
use crate::op_table::Key;
use crate::operation::{ErasedOp, Interest};
use crate::remote::ReactorShared;
use crate::sockets::Sockets;
use crate::spin::Spin;

struct Job {
    key: Key,
    work: Box<dyn ErasedOp>,
}

struct Done {
    key: Key,
    result: i32,
    work: Box<dyn ErasedOp>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closing: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    ready: Condvar,
    done: Mutex<Vec<Done>>,
    remote: Arc<ReactorShared>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each critical section is one push, pop or swap, so a panic leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
    taken: Vec<Done>,
    /// Operations that threads have, or have done.
    out: usize,
    pub(crate) sockets: Sockets,
    spin: Spin,
}

impl Threads {
    pub(crate) fn start(count: u32, remote: &Arc<ReactorShared>, sockets: Sockets, spin: Spin) -> io::Result<Threads> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            ready: Condvar::new(),
            done: Mutex::default(),
            remote: Arc::clone(remote),
        });
        let mut threads = Threads { shared, threads: Vec::new(), taken: Vec::new(), out: 0, sockets, spin };
        for number in 0..count.max(1) {
            let shared = Arc::clone(&threads.shared);
            let builder = thread::Builder::new().name(format!("file-{number}"));
            threads.threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(threads)
    }

    /// Starts an operation; one that waits for a peer is tried at once.
    pub(crate) fn push(&mut self, key: Key, waits: Option<Interest>, work: Box<dyn ErasedOp>) {
        if let Some(interest) = waits {
            return self.sockets.push(key, work, interest);
        }
        self.out += 1;
        lock(&self.shared.queue).jobs.push_back(Job { key, work });
        self.shared.ready.notify_one();
    }

    pub(crate) fn turn(&mut self, wait: Wait, finished: &mut Vec<Finished>) -> io::Result<()> {
        if wait != Wait::No && !self.has_news() {
            self.sleep(wait)?;
        } else if self.sockets.is_waiting() {
            self.sockets.wait(Some(Duration::ZERO))?;
        }
        std::mem::swap(&mut *lock(&self.shared.done), &mut self.taken);
        self.out -= self.taken.len();
        for Done { key, result, work } in self.taken.drain(..) {
            finished.push(Finished { key, result, returned: Some(work) });
        }
        self.sockets.report(finished);
        Ok(())
    }

    fn has_news(&self) -> bool {
        self.sockets.is_done() || (self.out > 0 && !lock(&self.shared.done).is_empty())
    }

    /// Waits until there is something to report, the event descriptor is written, or time is up.
    fn sleep(&mut self, wait: Wait) -> io::Result<()> {
        if let Some(end) =
            self.spin.begin(self.sockets.is_waiting() || self.out > 0 || self.shared.remote.is_shared(), wait)
        {
            while Instant::now() < end {
                if self.sockets.wait(Some(Duration::ZERO))? || self.has_news() || self.shared.remote.has_notice() {
                    self.spin.paid();
                    return Ok(());
                }
            }
        }
        let timeout = match wait {
            Wait::Until(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            Wait::No | Wait::Forever => None,
        };
        let timeout = if self.shared.remote.fall_asleep() { timeout } else { Some(Duration::ZERO) };
        let waited = self.sockets.wait(timeout);
        self.shared.remote.wake_up();
        self.spin.slept();
        waited.map(|_| ())
    }
}

impl Shared {
    fn work(&self) {
        while let Some(Job { key, mut work }) = self.next() {
            let result = work.run();
            let mut done = lock(&self.done);
            done.push(Done { key, result, work });
            let first = done.len() == 1;
            drop(done);
            // Later ones are taken together with the first.
            if first {
                self.remote.kick();
            }
        }
    }

    fn next(&self) -> Option<Job> {
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
        lock(&self.shared.queue).closing = true;
        self.shared.ready.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing more to give back; the panic hook has told about it.
            let _ = thread.join();
        }
    }
}
