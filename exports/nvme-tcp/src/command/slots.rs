//! Slots in which commands wait for their devices; their futures are reused.
//!
//! The future of a slot ([`ReusedFuture`]) executes one command after the other. If a device completes at once, the
//! first poll returns the result; otherwise the slot stays busy, and the connection's task polls it again after its
//! waker was used.
//!
//! Invariants: a slot is free, or busy with one command. A busy slot is dropped only with the reactor, because a
//! request that a device has started must complete. After some time, commands allocate no memory here.
//!
//! Shape: each slot has one waker for its lifetime, which marks the slot in a bitmap and wakes the connection's task,
//! so that the completion of one of many commands costs only one poll. No slot is borrowed while it is polled.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};

use sealblock_block::ReusedFuture;
use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme_tcp::target::Token;

use crate::command::io::{IoRequest, RemainingWork};
use crate::command::reply::Reply;
use crate::model::command_error::CommandError;

/// The result of a command.
pub(crate) struct CommandResult {
    pub(crate) token: Token,
    pub(crate) command: Command,
    /// Bytes that it transfers to the host on success.
    pub(crate) read_bytes: u64,
    pub(crate) outcome: Result<Reply, CommandError>,
}

struct Slot {
    index: usize,
    future: ReusedFuture<(IoRequest, RemainingWork), Result<Reply, CommandError>>,
    waker: Waker,
    busy: Option<(Token, Command, u64)>,
}

impl Slot {
    fn new(index: usize, ready: &Arc<ReadySlots>) -> Box<Slot> {
        let future = ReusedFuture::new(async |(request, work): (IoRequest, RemainingWork)| request.execute(work).await);
        let waker = Arc::new(SlotWaker { index, ready: Arc::clone(ready) }).into();
        Box::new(Slot { index, future, waker, busy: None })
    }

    /// Polls the command; returns its result if it completed.
    fn poll(&mut self) -> Option<CommandResult> {
        let Poll::Ready(outcome) = self.future.poll(&mut Context::from_waker(&self.waker)) else { return None };
        let (token, command, read_bytes) = self.busy.take()?;
        Some(CommandResult { token, command, read_bytes, outcome })
    }
}

/// The slots whose wakers were used.
struct ReadySlots {
    words: Box<[AtomicU64]>,
    any: AtomicBool,
    /// The connection's task; set at its first poll.
    task: OnceLock<Waker>,
}

struct SlotWaker {
    index: usize,
    ready: Arc<ReadySlots>,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.words[self.index / 64].fetch_or(1 << (self.index % 64), Ordering::Release);
        self.ready.any.store(true, Ordering::Release);
        if let Some(task) = self.ready.task.get() {
            task.wake_by_ref();
        }
    }
}

/// All slots are busy.
pub(crate) struct NoSlot;

/// The slots of a connection.
pub(crate) struct CommandSlots {
    /// `None` while the slot is being polled.
    all: RefCell<Vec<Option<Box<Slot>>>>,
    free: RefCell<Vec<usize>>,
    ready: Arc<ReadySlots>,
    /// The slots that remain to be polled in this pass.
    pass: Box<[Cell<u64>]>,
    limit: usize,
    busy: Cell<usize>,
}

impl CommandSlots {
    /// At most `limit` slots, created when needed.
    pub(crate) fn new(limit: usize) -> CommandSlots {
        let words = std::iter::repeat_with(AtomicU64::default).take(limit.div_ceil(64)).collect();
        let ready = Arc::new(ReadySlots { words, any: AtomicBool::new(false), task: OnceLock::new() });
        let pass = std::iter::repeat_with(Cell::default).take(limit.div_ceil(64)).collect();
        CommandSlots { all: RefCell::default(), free: RefCell::default(), ready, pass, limit, busy: Cell::new(0) }
    }

    /// Sets the task that polls the slots; always the same.
    pub(crate) fn set_task(&self, task: &Waker) {
        self.ready.task.get_or_init(|| task.clone());
    }

    /// The waker of that task; a no-op waker before its first poll.
    pub(crate) fn task(&self) -> &Waker {
        self.ready.task.get().unwrap_or(Waker::noop())
    }

    /// Number of commands in flight.
    pub(crate) fn busy(&self) -> usize {
        self.busy.get()
    }

    /// Starts a command, and returns its result if it completes at once.
    ///
    /// # Errors
    /// [`NoSlot`] when all slots are busy.
    pub(crate) fn start(
        &self,
        (token, command): (Token, Command),
        request: IoRequest,
        work: RemainingWork,
    ) -> Result<Option<CommandResult>, NoSlot> {
        let Some(mut slot) = self.take_free() else { return Err(NoSlot) };
        slot.busy = Some((token, command, request.read_bytes()));
        slot.future.begin((request, work));
        self.busy.set(self.busy.get() + 1);
        Ok(self.resume(slot))
    }

    /// Begins a pass over the slots whose wakers have been used so far. A command that lets others run first uses its
    /// waker while it is polled; it is polled again only in the next pass, which is in another poll of the task.
    pub(crate) fn begin_pass(&self) {
        // A waker that sets a bit after this also sets `any`, and wakes the task.
        if self.ready.any.swap(false, Ordering::AcqRel) {
            for (pass, word) in self.pass.iter().zip(&self.ready.words) {
                pass.set(pass.get() | word.swap(0, Ordering::AcqRel));
            }
        }
    }

    /// Polls one slot of the pass, and returns its result if it completed. `None` when no slot is left.
    pub(crate) fn next(&self) -> Option<Option<CommandResult>> {
        let (index, pass) = self.pass.iter().enumerate().find(|(_, pass)| pass.get() != 0)?;
        let bit = pass.get().trailing_zeros() as usize;
        pass.set(pass.get() & !(1 << bit));
        let slot = self.all.borrow_mut().get_mut(index * 64 + bit).and_then(Option::take);
        Some(slot.and_then(|slot| self.poll_busy(slot)))
    }

    /// Ignores a waker of a slot that is free by now, and polls a busy slot.
    fn poll_busy(&self, slot: Box<Slot>) -> Option<CommandResult> {
        if slot.busy.is_some() {
            return self.resume(slot);
        }
        self.put_back(slot);
        None
    }

    fn resume(&self, mut slot: Box<Slot>) -> Option<CommandResult> {
        let result = slot.poll();
        if result.is_some() {
            self.busy.set(self.busy.get() - 1);
            self.free.borrow_mut().push(slot.index);
        }
        self.put_back(slot);
        result
    }

    fn put_back(&self, slot: Box<Slot>) {
        let index = slot.index;
        self.all.borrow_mut()[index] = Some(slot);
    }

    fn take_free(&self) -> Option<Box<Slot>> {
        if let Some(index) = self.free.borrow_mut().pop() {
            return self.all.borrow_mut()[index].take();
        }
        let mut all = self.all.borrow_mut();
        let index = all.len();
        if index == self.limit {
            return None;
        }
        all.push(None);
        Some(Slot::new(index, &self.ready))
    }
}
