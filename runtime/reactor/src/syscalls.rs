//! The backend that uses plain system calls, on a few threads of the reactor's own.
//!
//! Invariant: a thread owns an operation from the moment it is queued until it is returned with its result, so a future
//! that is dropped meanwhile frees nothing that a call still uses.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use crate::driver::{Finished, Wait};
use crate::operation::{Key, Work};
use crate::remote::Remote;

struct Job {
    key: Key,
    work: Box<dyn Work>,
}

struct Done {
    key: Key,
    result: i32,
    work: Box<dyn Work>,
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
    remote: Arc<Remote>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each critical section is one push, pop or swap, so a panic leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
    taken: Vec<Done>,
}

impl Threads {
    pub(crate) fn start(count: u32, remote: &Arc<Remote>) -> io::Result<Threads> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            ready: Condvar::new(),
            done: Mutex::default(),
            remote: Arc::clone(remote),
        });
        let mut threads = Threads { shared, threads: Vec::new(), taken: Vec::new() };
        for number in 0..count.max(1) {
            let shared = Arc::clone(&threads.shared);
            let builder = thread::Builder::new().name(format!("file-{number}"));
            threads.threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(threads)
    }

    pub(crate) fn push(&mut self, key: Key, work: Box<dyn Work>) {
        lock(&self.shared.queue).jobs.push_back(Job { key, work });
        self.shared.ready.notify_one();
    }

    pub(crate) fn turn(&mut self, wait: Wait, finished: &mut Vec<Finished>) -> io::Result<()> {
        if wait != Wait::No && lock(&self.shared.done).is_empty() {
            self.sleep(wait)?;
        }
        std::mem::swap(&mut *lock(&self.shared.done), &mut self.taken);
        for Done { key, result, work } in self.taken.drain(..) {
            finished.push(Finished { key, result, returned: Some(work.into_any()) });
        }
        Ok(())
    }

    /// Sleeps until the event descriptor is written or time is up.
    fn sleep(&self, wait: Wait) -> io::Result<()> {
        let mut poll = libc::pollfd { fd: self.shared.remote.event_fd(), events: libc::POLLIN, revents: 0 };
        let timeout = match wait {
            Wait::Until(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                let seconds = libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX);
                Some(libc::timespec { tv_sec: seconds, tv_nsec: left.subsec_nanos().into() })
            }
            Wait::No | Wait::Forever => None,
        };
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: one structure to poll, a timeout that is null or lives in this frame, and no signal mask.
        let ready = unsafe { libc::ppoll(&mut poll, 1, timeout, std::ptr::null()) };
        if ready > 0 {
            self.shared.remote.clear_event();
        } else if ready < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        Ok(())
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
