//! The io_uring backend and its setup.
//!
//! Invariants: entries that wait for a disk are in the kernel only up to the limit. Entries that wait for a peer always
//! go to the kernel, because idle peers would use up any limit; the kernel keeps completions that find no room in the
//! queue (`IORING_FEAT_NODROP`). Entries of one kind reach it in the order of their start. A ring is dropped only while
//! nothing is in flight, because the kernel would otherwise write to freed buffers.
//!
//! Shape: entries go into the submission queue as operations start and are submitted once per turn, together with the
//! wait for completions. If a turn starts several for disks, these are submitted a few at a time: otherwise a disk is
//! idle until all of them are queued. A read of the reactor's event descriptor is always in flight; other threads end
//! the wait with it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::process::{Resource, getrlimit};
use sealblock_runtime_memory::Pool;

use crate::busy_poll::{COLLECTING, Collecting, Spin, Wait};
use crate::config::{Config, Features, TaskrunMode, UringUnavailable};
use crate::descriptor::{FileSlot, Tables};
use crate::inbox::ReactorShared;
use crate::op_table::{CHANGES_BIT, Finished, Key, WAITS_BIT};

/// Entries of the submission queue: the number of operations that one system call can submit.
const SUBMISSION_ENTRIES: u32 = 256;
/// The number of disk operations that are submitted before a turn ends: at first, and the maximum after it doubled with
/// each submission.
const EARLY_OPERATIONS: (usize, usize) = (2, 16);
/// The maximum number of completed changes for which a reactor waits after a wake-up.
const MAX_COLLECTED: usize = 64;
/// The `user_data` of the read of the event descriptor; no operation's key has this generation and index.
const EVENT: u64 = u64::MAX;
/// The `user_data` of cancellations.
const CANCEL: u64 = u64::MAX - 1;
/// `IORING_ENTER_GETEVENTS`
const ENTER_GETEVENTS: u32 = 1 << 0;
/// `IORING_ENTER_EXT_ARG`
const ENTER_EXT_ARG: u32 = 1 << 3;

pub(crate) struct Ring {
    uring: IoUring,
    pub(crate) tables: Tables,
    /// Entries that count against the limit and wait to be submitted.
    backlog: VecDeque<squeue::Entry>,
    /// Entries that do not count against the limit and wait for room in the submission queue.
    urgent: VecDeque<squeue::Entry>,
    /// Counted operations in the kernel, or in the submission queue.
    in_kernel: usize,
    /// Of these, the ones that change a file.
    changes: usize,
    /// Of these, the ones that no system call has submitted.
    queued: usize,
    /// This many of those are submitted before the turn ends.
    early: usize,
    /// Operations in the kernel, or in the submission queue, that wait for a peer.
    waiting: usize,
    limit: usize,
    spin: Spin,
    collecting: Collecting,
    shared: Arc<ReactorShared>,
    /// The destination of the read of the event descriptor, on the heap so that it does not move.
    event_count: Box<u64>,
    event_armed: bool,
}

impl Ring {
    /// Sets up a ring, and returns what the kernel granted.
    pub(crate) fn start(
        config: &Config,
        pool: &Pool,
        shared: &Arc<ReactorShared>,
    ) -> Result<(Ring, Features), UringUnavailable> {
        if let Some(errno) = config.refuse_uring {
            return Err(UringUnavailable::Errno(errno));
        }
        let limit = config.operations_in_flight_limit.max(1);
        let (uring, taskrun) = build(limit, config.best_taskrun)?;
        check(&uring)?;
        let fixed_files = register_files(&uring, config.fixed_files_limit);
        let fixed_buffers = register_arena(&uring, pool);
        let slots = if fixed_files.is_ok() { config.fixed_files_limit } else { 0 };
        let tables = Tables {
            arena: fixed_buffers.is_ok().then(|| pool.arena().id),
            freed_slots: Arc::default(),
            free_slots: (0..slots).rev().collect(),
        };
        let spin = Spin::new(config.spin_us);
        let ring = Ring::new(uring, tables, limit as usize, spin, Arc::clone(shared));
        Ok((ring, Features { taskrun, fixed_files, fixed_buffers }))
    }

    fn new(uring: IoUring, tables: Tables, limit: usize, spin: Spin, shared: Arc<ReactorShared>) -> Ring {
        Ring {
            uring,
            tables,
            backlog: VecDeque::new(),
            urgent: VecDeque::new(),
            in_kernel: 0,
            changes: 0,
            queued: 0,
            early: EARLY_OPERATIONS.0,
            waiting: 0,
            limit,
            spin,
            collecting: Collecting::default(),
            shared,
            event_count: Box::new(0),
            event_armed: false,
        }
    }

    /// Queues an entry for the next turn; `waits` is true if it waits for a peer.
    ///
    /// # Safety
    /// The memory and descriptors of the entry stay valid until a completion with its key was reported.
    pub(crate) unsafe fn push(&mut self, key: Key, entry: squeue::Entry, waits: bool) {
        if waits {
            self.waiting += 1;
            return self.push_urgent(entry.user_data(key.raw() | WAITS_BIT));
        }
        let is_read = [opcode::Read::CODE, opcode::ReadFixed::CODE].contains(&(entry.get_opcode() as u8));
        let entry = entry.user_data(key.raw() | if is_read { 0 } else { CHANGES_BIT });
        // SAFETY: the caller's promise.
        if !self.backlog.is_empty() || self.in_kernel >= self.limit || !unsafe { self.try_queue(&entry) } {
            self.backlog.push_back(entry);
        }
        self.submit_early();
    }

    /// Puts a counted entry into the submission queue, if there is room.
    ///
    /// # Safety
    /// As for [`Ring::push`].
    unsafe fn try_queue(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the caller's promise.
        let queued = unsafe { self.uring.submission().push(entry) }.is_ok();
        if queued {
            self.in_kernel += 1;
            self.queued += 1;
            self.changes += usize::from(entry.get_user_data() & CHANGES_BIT != 0);
        }
        queued
    }

    /// Submits the queued disk operations if there are enough of them for a system call: a disk that waits for a whole
    /// batch would be idle meanwhile. The more operations the turn has submitted, the longer the disk is busy.
    fn submit_early(&mut self) {
        if self.queued < self.early {
            return;
        }
        self.early = (self.early * 2).min(EARLY_OPERATIONS.1);
        self.queued = 0;
        let queued = self.uring.submission().len() as u32;
        // SAFETY: the entries in the queue were promised to stay valid. What the kernel did not take, the next turn
        // submits again.
        let _ = unsafe { self.uring.submitter().enter::<()>(queued, 0, 0, None) };
    }

    fn push_urgent(&mut self, entry: squeue::Entry) {
        // SAFETY: `push` was promised that what an entry names stays valid; a cancellation names no memory.
        if !self.urgent.is_empty() || unsafe { self.uring.submission().push(&entry) }.is_err() {
            self.urgent.push_back(entry);
        }
    }

    /// True if operations that wait for a disk are in flight.
    pub(crate) fn awaits_disk(&self) -> bool {
        self.in_kernel > 0 || !self.backlog.is_empty()
    }

    /// Cancels an operation that waits for a peer. The cancellation is submitted after the operation and has no effect
    /// if the operation has completed.
    pub(crate) fn cancel(&mut self, key: Key) {
        self.push_urgent(opcode::AsyncCancel::new(key.raw() | WAITS_BIT).build().user_data(CANCEL));
    }

    /// Submits queued entries, waits, and appends completions. Queued entries for which `is_abandoned` is true complete
    /// without being submitted.
    pub(crate) fn turn(
        &mut self,
        wait: Wait,
        is_abandoned: impl Fn(Key) -> bool,
        finished: &mut Vec<Finished>,
    ) -> io::Result<()> {
        self.early = EARLY_OPERATIONS.0;
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
        if let Some(end) = self.spin.begin(self.in_kernel + self.waiting > 0 || self.shared.is_shared(), wait) {
            loop {
                // The kernel flags its work in shared memory, so spinning makes no system calls.
                if self.needs_enter() {
                    self.enter(0, None)?;
                }
                self.reap(finished);
                if !finished.is_empty() || !self.event_armed || self.shared.has_notice() {
                    self.spin.hit();
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
        let want = u32::from(self.shared.fall_asleep());
        let entered = self.enter(want, timeout);
        self.shared.wake_up();
        self.spin.slept();
        entered?;
        self.collect(finished)
    }

    /// After a sleep that the completion of a change ended: takes completions, and sleeps again for those of other
    /// changes.
    fn collect(&mut self, finished: &mut Vec<Finished>) -> io::Result<()> {
        let before = self.changes;
        self.reap(finished);
        let left = self.changes;
        if left == 0 || left == before || !self.collecting.is_due() {
            return Ok(());
        }
        let began = Instant::now();
        self.enter(left.min(MAX_COLLECTED) as u32, Some(COLLECTING))?;
        self.reap(finished);
        self.collecting.collected(left - self.changes, began.elapsed());
        Ok(())
    }

    /// True if a system call is needed: entries must be submitted, or the kernel has work to do on this thread, or
    /// completions found no room. Other completions arrive without one.
    fn needs_enter(&mut self) -> bool {
        let submission = self.uring.submission();
        !submission.is_empty() || submission.taskrun() || submission.cq_overflow()
    }

    /// Moves queued entries into the submission queue, as far as room and limit allow.
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
            let entry = entry.clone();
            // SAFETY: `push` was promised that what the entry names stays valid.
            if !unsafe { self.try_queue(&entry) } {
                return;
            }
            self.backlog.pop_front();
        }
    }

    fn arm_event(&mut self) {
        if self.event_armed {
            return;
        }
        let fd = types::Fd(self.shared.event_fd().as_raw_fd());
        let count: *mut u64 = &mut *self.event_count;
        let entry = opcode::Read::new(fd, count.cast(), 8).build().user_data(EVENT);
        // SAFETY: the count lives on the heap, and the ring with it is dropped only after `close`, which ends this
        // read.
        self.event_armed = unsafe { self.uring.submission().push(&entry) }.is_ok();
    }

    fn enter(&mut self, want: u32, timeout: Option<Duration>) -> io::Result<()> {
        self.queued = 0;
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
            // A timeout, a signal, or completions that must be taken first: the caller takes completions in any case.
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
                        0 => {
                            self.in_kernel -= 1;
                            self.changes -= usize::from(raw & CHANGES_BIT != 0);
                        }
                        _ => self.waiting -= 1,
                    }
                    finished.push(Finished { key: Key::from_raw(raw), result: completion.result(), returned: None });
                }
            }
        }
    }

    /// Puts a file into a slot of the ring's table; `None` without a table or room.
    pub(crate) fn fix(&mut self, fd: BorrowedFd<'_>) -> Option<FileSlot> {
        self.forget_files();
        let index = self.tables.free_slots.pop()?;
        if self.uring.submitter().register_files_update(index, &[fd.as_raw_fd()]).is_err() {
            self.tables.free_slots.push(index);
            return None;
        }
        Some(FileSlot { index, freed_slots: Arc::clone(&self.tables.freed_slots) })
    }

    /// Clears the slots of closed files, so that the kernel releases the files.
    pub(crate) fn forget_files(&mut self) {
        for slot in self.tables.freed_slots.take() {
            // A slot that cannot be cleared is not used again: it may still name the old file.
            if self.uring.submitter().register_files_update(slot, &[-1]).is_ok() {
                self.tables.free_slots.push(slot);
            }
        }
    }

    /// Cancels what the kernel can cancel: operations that wait, but not those that a disk executes. Linux before 5.19
    /// cannot do this, so the futures must be dropped first, which cancels them one by one.
    pub(crate) fn cancel_all(&mut self) {
        let entry = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build().user_data(CANCEL);
        self.push_urgent(entry);
    }

    /// Ends the read of the event descriptor. All operations must have completed.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        while self.event_armed {
            self.shared.kick();
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

/// Maximum bytes of one registered buffer.
const REGISTERED_LIMIT_BYTES: usize = 1 << 30;
/// Completions beyond those of counted operations: for sockets that become ready together, cancellations, and the read
/// of the event descriptor. Further ones go to a list in the kernel, which is slower.
const COMPLETION_MARGIN: u32 = 1024;

/// Tries the best mode first; a kernel that does not know a flag returns `EINVAL`.
fn build(limit: u32, best: TaskrunMode) -> Result<(IoUring, TaskrunMode), UringUnavailable> {
    let mut unavailable = UringUnavailable::Errno(libc::EINVAL);
    let modes = [TaskrunMode::Deferred, TaskrunMode::Cooperative, TaskrunMode::Plain];
    for taskrun in modes.into_iter().skip_while(|&mode| mode != best) {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp().setup_cqsize(limit.max(SUBMISSION_ENTRIES) + COMPLETION_MARGIN);
        match taskrun {
            TaskrunMode::Deferred => {
                builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all()
            }
            TaskrunMode::Cooperative => builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all(),
            TaskrunMode::Plain => &mut builder,
        };
        match builder.build(SUBMISSION_ENTRIES) {
            Ok(uring) => return Ok((uring, taskrun)),
            Err(error) => unavailable = UringUnavailable::Errno(error.raw_os_error().unwrap_or(libc::EIO)),
        }
        if unavailable != UringUnavailable::Errno(libc::EINVAL) {
            break;
        }
    }
    Err(unavailable)
}

/// Rejects kernels whose rings lack what every reactor needs.
fn check(uring: &IoUring) -> Result<(), UringUnavailable> {
    if !uring.params().is_feature_ext_arg() {
        return Err(UringUnavailable::Lacks("io_uring waits with a timeout (Linux 5.11)"));
    }
    if !uring.params().is_feature_nodrop() {
        return Err(UringUnavailable::Lacks("io_uring completions that are never dropped (Linux 5.5)"));
    }
    let mut probe = Probe::new();
    uring.submitter().register_probe(&mut probe).map_err(|_| UringUnavailable::Lacks("the io_uring probe"))?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
        opcode::Accept::CODE,
        opcode::Connect::CODE,
        opcode::Recv::CODE,
        opcode::Send::CODE,
        opcode::SendMsg::CODE,
        opcode::AsyncCancel::CODE,
    ];
    if needed.iter().any(|&code| !probe.is_supported(code)) {
        return Err(UringUnavailable::Lacks("a file or socket operation of io_uring"));
    }
    Ok(())
}

fn register_files(uring: &IoUring, limit: u32) -> Result<(), UringUnavailable> {
    if limit == 0 {
        return Err(UringUnavailable::TurnedOff);
    }
    let registered = uring.submitter().register_files_sparse(limit);
    registered.map_err(|error| UringUnavailable::Errno(error.raw_os_error().unwrap_or(libc::EIO)))
}

fn register_arena(uring: &IoUring, pool: &Pool) -> Result<(), UringUnavailable> {
    let arena = pool.arena();
    if arena.len_bytes == 0 {
        return Err(UringUnavailable::TurnedOff);
    }
    if arena.len_bytes > REGISTERED_LIMIT_BYTES {
        return Err(UringUnavailable::ArenaTooLarge);
    }
    // Registering brings all pages of the arena into memory. With huge pages, a transfer is one piece to the disk,
    // rather than one for each page. A kernel without them uses small ones.
    // SAFETY: advice on a range that is mapped for as long as the pool lives; it changes no contents.
    unsafe { libc::madvise(arena.base.cast(), arena.len_bytes, libc::MADV_HUGEPAGE) };
    let vectors = [libc::iovec { iov_base: arena.base.cast(), iov_len: arena.len_bytes }];
    // SAFETY: the arena is mapped for as long as the pool or any buffer of it lives; the reactor holds the pool, and an
    // operation its buffer. The kernel holds the pages themselves, so even an early unmapping would free nothing in
    // use.
    let registered = unsafe { uring.submitter().register_buffers(&vectors) };
    match registered {
        Ok(()) => {
            pool.set_registration(Some(0));
            Ok(())
        }
        Err(error) => Err(match error.raw_os_error() {
            Some(libc::ENOMEM) => {
                UringUnavailable::LockedMemory { limit_bytes: getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX) }
            }
            errno => UringUnavailable::Errno(errno.unwrap_or(libc::EIO)),
        }),
    }
}
