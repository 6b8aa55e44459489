//! The io_uring backend.
//!
//! Invariants: an entry that a disk works on reaches the kernel only while fewer than the limit are there; one that waits for
//! a peer always does, because idle peers would use up any limit, and the kernel keeps completions that find no room in the
//! queue (`IORING_FEAT_NODROP`). Entries of one sort reach it in the order of their start. A ring is dropped only when nothing is in flight, because the kernel goes on writing to buffers otherwise.
//!
//! Shape: entries are put into the submission queue as operations start and handed over once per turn, together with the
//! wait for completions, so that a turn costs one system call. A read of the reactor's event descriptor is always in
//! flight; it is what other threads end the wait with.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue, types};
use sealblock_runtime_memory::{ArenaId, Registration};

use crate::descriptor::{Descriptor, FreedSlots, Slot};
use crate::driver::{Finished, Wait};
use crate::op_table::{Key, WAITS_BIT};
use crate::remote::ReactorShared;
use crate::spin::Spin;

/// Entries of the submission queue: how many operations one system call can hand over.
pub(crate) const SUBMISSION_ENTRIES: u32 = 256;
/// The `user_data` of the read of the event descriptor; no operation's key has this generation and index.
const EVENT: u64 = u64::MAX;
/// The `user_data` of requests to cancel something.
const CANCEL: u64 = u64::MAX - 1;
/// `IORING_ENTER_GETEVENTS`
const ENTER_GETEVENTS: u32 = 1 << 0;
/// `IORING_ENTER_EXT_ARG`
const ENTER_EXT_ARG: u32 = 1 << 3;

/// How an entry names a file.
pub(crate) enum Target {
    Fixed(u32),
    Plain(i32),
}

/// What is registered with the ring.
pub(crate) struct Tables {
    pub(crate) arena: Option<ArenaId>,
    pub(crate) given_up: Arc<FreedSlots>,
    pub(crate) free_slots: Vec<u32>,
}

impl Tables {
    pub(crate) fn target(&self, descriptor: &Descriptor) -> Target {
        match descriptor.slot() {
            Some(slot) if Arc::ptr_eq(&slot.given_up, &self.given_up) => Target::Fixed(slot.index),
            _ => Target::Plain(descriptor.raw()),
        }
    }

    /// The buffer index, if the arena is registered with this very ring.
    pub(crate) fn buffer(&self, registration: Registration) -> Option<u16> {
        (self.arena == Some(registration.arena)).then_some(registration.index)
    }
}

pub(crate) struct Ring {
    uring: IoUring,
    pub(crate) tables: Tables,
    /// Entries that count against the limit and wait to be submitted.
    backlog: VecDeque<squeue::Entry>,
    /// The others, which wait only for room in the submission queue.
    urgent: VecDeque<squeue::Entry>,
    /// Counted operations in the kernel, or in the submission queue.
    in_kernel: usize,
    /// The same for those that wait for a peer.
    waiting: usize,
    limit: usize,
    spin: Spin,
    remote: Arc<ReactorShared>,
    /// Where the read of the event descriptor puts the count; on the heap, so that it stays where it is.
    event_count: Box<u64>,
    event_armed: bool,
}

impl Ring {
    pub(crate) fn new(uring: IoUring, tables: Tables, limit: usize, spin: Spin, remote: Arc<ReactorShared>) -> Ring {
        Ring {
            uring,
            tables,
            backlog: VecDeque::new(),
            urgent: VecDeque::new(),
            in_kernel: 0,
            waiting: 0,
            limit,
            spin,
            remote,
            event_count: Box::new(0),
            event_armed: false,
        }
    }

    /// Accepts an entry for the next turn; `waits` tells that it waits for a peer.
    ///
    /// # Safety
    /// What the entry names stays valid until a completion with its key was reported.
    pub(crate) unsafe fn push(&mut self, key: Key, entry: squeue::Entry, waits: bool) {
        if waits {
            self.waiting += 1;
            return self.push_urgent(entry.user_data(key.raw() | WAITS_BIT));
        }
        let entry = entry.user_data(key.raw());
        if !self.backlog.is_empty() || self.in_kernel >= self.limit {
            self.backlog.push_back(entry);
            return;
        }
        // SAFETY: the caller's promise.
        match unsafe { self.uring.submission().push(&entry) } {
            Ok(()) => self.in_kernel += 1,
            Err(_full) => self.backlog.push_back(entry),
        }
    }

    fn push_urgent(&mut self, entry: squeue::Entry) {
        // SAFETY: `push` was promised that what an entry names stays valid; a request to cancel names no memory.
        if !self.urgent.is_empty() || unsafe { self.uring.submission().push(&entry) }.is_err() {
            self.urgent.push_back(entry);
        }
    }

    /// Whether operations are in flight that wait for no peer.
    pub(crate) fn awaits_disk(&self) -> bool {
        self.in_kernel > 0 || !self.backlog.is_empty()
    }

    /// Asks the kernel to end an operation that waits for a peer. It comes behind the operation itself, and finds nothing
    /// when that has ended meanwhile.
    pub(crate) fn cancel(&mut self, key: Key) {
        self.push_urgent(opcode::AsyncCancel::new(key.raw() | WAITS_BIT).build().user_data(CANCEL));
    }

    /// Submits what waits, waits as asked, and appends what is finished. `is_abandoned` tells which waiting entries
    /// nobody wants any more; they are answered without being submitted.
    pub(crate) fn turn(
        &mut self,
        wait: Wait,
        is_abandoned: impl Fn(Key) -> bool,
        finished: &mut Vec<Finished>,
    ) -> io::Result<()> {
        self.forget_files();
        self.arm_event();
        self.feed(&is_abandoned, finished);
        while !self.urgent.is_empty() || (!self.backlog.is_empty() && self.in_kernel < self.limit) {
            self.enter(0, None)?;
            self.reap(finished);
            self.feed(&is_abandoned, finished);
        }
        let idle = self.in_kernel + self.waiting == 0 && self.uring.submission().is_empty();
        if !finished.is_empty() || (wait == Wait::No && !idle) {
            if self.needs_enter() {
                self.enter(0, None)?;
            }
        } else if wait != Wait::No {
            self.wait(wait, finished)?;
        }
        self.reap(finished);
        Ok(())
    }

    fn wait(&mut self, wait: Wait, finished: &mut Vec<Finished>) -> io::Result<()> {
        if let Some(end) = self.spin.begin(self.in_kernel + self.waiting > 0 || self.remote.is_shared(), wait) {
            loop {
                // The kernel says in shared memory when it has something, so that spinning makes no system calls.
                if self.needs_enter() {
                    self.enter(0, None)?;
                }
                self.reap(finished);
                if !finished.is_empty() || !self.event_armed || self.remote.has_notice() {
                    self.spin.paid();
                    return Ok(());
                }
                std::hint::spin_loop();
                if Instant::now() >= end {
                    break;
                }
            }
        }
        let timeout = match wait {
            Wait::Until(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            Wait::No | Wait::Forever => None,
        };
        let want = u32::from(self.remote.fall_asleep());
        let entered = self.enter(want, timeout);
        self.remote.wake_up();
        self.spin.slept();
        entered
    }

    /// Whether a system call would do anything now: entries are to be handed over, or the kernel has work to do on this
    /// thread or completions that found no room. Other completions are there without one.
    fn needs_enter(&mut self) -> bool {
        let submission = self.uring.submission();
        !submission.is_empty() || submission.taskrun() || submission.cq_overflow()
    }

    /// Moves entries that wait into the submission queue, as far as room and limit allow.
    fn feed(&mut self, is_abandoned: impl Fn(Key) -> bool, finished: &mut Vec<Finished>) {
        while let Some(entry) = self.urgent.front() {
            // SAFETY: as in `push_urgent`.
            if unsafe { self.uring.submission().push(entry) }.is_err() {
                return;
            }
            self.urgent.pop_front();
        }
        while self.in_kernel < self.limit {
            let Some(entry) = self.backlog.front() else { return };
            let key = Key::from_raw(entry.get_user_data());
            if is_abandoned(key) {
                finished.push(Finished { key, result: -libc::ECANCELED, returned: None });
                self.backlog.pop_front();
                continue;
            }
            // SAFETY: `push` was promised that what the entry names stays valid.
            if unsafe { self.uring.submission().push(entry) }.is_err() {
                return;
            }
            self.in_kernel += 1;
            self.backlog.pop_front();
        }
    }

    fn arm_event(&mut self) {
        if self.event_armed {
            return;
        }
        let fd = types::Fd(self.remote.event_fd());
        let count: *mut u64 = &mut *self.event_count;
        let entry = opcode::Read::new(fd, count.cast(), 8).build().user_data(EVENT);
        // SAFETY: the count lives on the heap, and the ring with it is dropped only after `close`, which ends this read.
        self.event_armed = unsafe { self.uring.submission().push(&entry) }.is_ok();
    }

    fn enter(&mut self, want: u32, timeout: Option<Duration>) -> io::Result<()> {
        let queued = self.uring.submission().len() as u32;
        let timespec = timeout.map(Timespec::from);
        let arguments = match &timespec {
            Some(timespec) => SubmitArgs::new().timespec(timespec),
            None => SubmitArgs::new(),
        };
        let flags = ENTER_GETEVENTS | ENTER_EXT_ARG;
        // SAFETY: the entries in the queue were promised to stay valid, and `EXT_ARG` takes exactly this structure.
        let entered = unsafe { self.uring.submitter().enter(queued, want, flags, Some(&arguments)) };
        match entered {
            Ok(_) => Ok(()),
            // Time is up, a signal came, or completions have to be taken first: the caller takes them in any case.
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(error),
            },
        }
    }

    fn reap(&mut self, finished: &mut Vec<Finished>) {
        for completion in self.uring.completion() {
            match completion.user_data() {
                EVENT => self.event_armed = false,
                CANCEL => {}
                raw => {
                    match raw & WAITS_BIT {
                        0 => self.in_kernel -= 1,
                        _ => self.waiting -= 1,
                    }
                    finished.push(Finished { key: Key::from_raw(raw), result: completion.result(), returned: None });
                }
            }
        }
    }

    /// Takes a slot of the ring's table for a file; `None` when there is no table or no room.
    pub(crate) fn fix(&mut self, fd: i32) -> Option<Slot> {
        self.forget_files();
        let index = self.tables.free_slots.pop()?;
        if self.uring.submitter().register_files_update(index, &[fd]).is_err() {
            self.tables.free_slots.push(index);
            return None;
        }
        Some(Slot { index, given_up: Arc::clone(&self.tables.given_up) })
    }

    /// Clears the slots of files that were closed, so that the kernel lets go of them.
    pub(crate) fn forget_files(&mut self) {
        for slot in self.tables.given_up.take() {
            // A slot that cannot be cleared is not used again: better one slot less than the wrong file.
            if self.uring.submitter().register_files_update(slot, &[-1]).is_ok() {
                self.tables.free_slots.push(slot);
            }
        }
    }

    /// Asks the kernel to end early what it can: operations that wait for something, not those a disk works on. Linux before
    /// 5.19 does not, so there the futures must be dropped first, which cancels them one by one.
    pub(crate) fn cancel_all(&mut self) {
        let entry = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build().user_data(CANCEL);
        self.push_urgent(entry);
    }

    /// Ends the read of the event descriptor. All operations have ended before.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        while self.event_armed {
            self.remote.kick();
            self.enter(1, None)?;
            self.reap(&mut Vec::new());
        }
        Ok(())
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("fd", &self.uring.as_raw_fd()).field("in_kernel", &self.in_kernel).finish()
    }
}
