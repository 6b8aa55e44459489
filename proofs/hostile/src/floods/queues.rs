//! The queues of a flood over any protocol, and the threads that keep them busy.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Result;
use sealblock_exports_nvme_tcp::Limits;

/// The number of connections of a flood.
pub const QUEUES: usize = 8;

/// Memory beyond the limits: allocator overhead, tables of devices, and completions queued in the kernel.
pub(super) const OVERHEAD_BYTES: u64 = 40 << 20;

/// The intensity of a flood.
#[derive(Clone, Debug)]
pub struct Effort {
    /// The limits of the server.
    pub limits: Limits,
    /// Commands outstanding on each queue; fewer if the queue holds fewer.
    pub outstanding: u16,
    /// How long the queues receive completions and send new commands.
    pub time: Duration,
}

/// The control and the counters of a flood's threads.
#[derive(Clone, Default)]
pub(super) struct Busy {
    pub(super) is_stopping: Arc<AtomicBool>,
    pub(super) completed: Arc<AtomicU64>,
    pub(super) failed: Arc<AtomicU64>,
}

/// The lowest priority, as in `nice(1)`.
const LAST: i32 = 19;

/// Gives this thread only the time that no other thread needs: a flood stands for hosts that have CPUs of their own, so
/// it must not take the server's.
fn yield_to_others() -> Result<()> {
    // On Linux, a priority set by a thread's identifier is that of this thread alone.
    Ok(rustix::process::setpriority_process(Some(rustix::thread::gettid()), LAST)?)
}

/// The queues of a flood, and the threads that keep them busy.
#[derive(Default)]
pub struct Queues {
    kept: Vec<Box<dyn Any>>,
    threads: Vec<JoinHandle<Result<()>>>,
    busy: Busy,
    cuts: Vec<Box<dyn FnOnce()>>,
}

impl Queues {
    /// Keeps a value, such as an admin queue, alive until the queues are cut off.
    pub(super) fn keep(&mut self, kept: impl Any) {
        self.kept.push(Box::new(kept));
    }

    /// Adds a queue: how to cut it off, and the thread that keeps it busy.
    pub(super) fn add(
        &mut self,
        cut: impl FnOnce() + 'static,
        work: impl FnOnce(&Busy) -> Result<()> + Send + 'static,
    ) {
        let busy = self.busy.clone();
        self.cuts.push(Box::new(cut));
        self.threads.push(thread::spawn(move || {
            yield_to_others()?;
            work(&busy)
        }));
    }

    /// Commands that completed so far.
    pub fn completed(&self) -> u64 {
        self.busy.completed.load(Ordering::Relaxed)
    }

    /// The status of a failed command; 0 if none failed.
    pub fn failure(&self) -> u64 {
        self.busy.failed.load(Ordering::Relaxed)
    }

    /// Stops receiving, and leaves outstanding commands as they are.
    pub fn fall_silent(&self) {
        self.busy.is_stopping.store(true, Ordering::Relaxed);
    }

    /// Cuts off all queues.
    pub fn cut(self) {
        self.fall_silent();
        self.cuts.into_iter().for_each(|cut| cut());
        for thread in self.threads {
            // The thread of a connection that was cut off returns an error.
            let _ = thread.join();
        }
    }
}
