//! The state of one reactor, and the wakers of its tasks.
//!
//! Invariant: no field of [`Core`] is borrowed while foreign code runs (a poll, a drop, a wake).
//!
//! Shape: a waker is one word: the core, the task's slot, and the slot's generation. It must be `Send`, although tasks
//! are not. On the core's own thread it reaches the ready queue directly; from other threads it goes through the
//! directory to the core's inbox. A waker that outlives its task, or its reactor, finds another generation or no task.
//! Then it does nothing, or wakes a task without need, which every future must tolerate anyway. So a generation that
//! wraps around is harmless.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{RawWaker, RawWakerVTable, Waker};
use std::time::Instant;

use sealblock_runtime_memory::Pool;
use slab::Slab;

use crate::busy_poll::BusyPolling;
use crate::config::Backend;
use crate::descriptor::FdRegistration;
use crate::driver::{Driver, Engine};
use crate::gather::Gathers;
use crate::inbox::{CoreId, Message, ReactorShared, wake_elsewhere};
use crate::long_steps::LongSteps;
use crate::op_table::{Finished, Key, OpTable};
use crate::operation::{Calls, Interest, IoOp};
use crate::scheduler::{TaskId, Tasks, Timers};
use crate::sync::Waiters;

const _: () = assert!(usize::BITS == 64, "a waker packs three numbers into one 64-bit word");

thread_local! {
    /// The reactor that currently runs on this thread.
    static CURRENT: RefCell<Option<Rc<Core>>> = const { RefCell::new(None) };
}

pub(crate) fn current() -> Rc<Core> {
    try_current().expect("this needs a reactor: call it from within Reactor::block_on or a task")
}

pub(crate) fn try_current() -> Option<Rc<Core>> {
    CURRENT.with_borrow(Clone::clone)
}

/// The waker of a task. It costs nothing to create, clone or drop: it is one word.
pub(crate) fn waker(core: CoreId, task: TaskId) -> Waker {
    let word = u64::from(core.0) << TaskId::BITS | task.to_bits();
    // SAFETY: the functions of the table never follow the pointer; they take it for the number it is.
    unsafe { Waker::from_raw(raw(std::ptr::without_provenance(word as usize))) }
}

fn raw(word: *const ()) -> RawWaker {
    static TABLE: RawWakerVTable = RawWakerVTable::new(raw, wake, wake, |_| {});
    RawWaker::new(word, &TABLE)
}

fn wake(word: *const ()) {
    let word = word.addr() as u64;
    let (core, task) = (CoreId((word >> TaskId::BITS) as u16), TaskId::from_bits(word));
    let is_here = CURRENT.try_with(|current| match &*current.borrow() {
        Some(current) if current.id == core => {
            current.wake(task);
            true
        }
        _ => false,
    });
    if is_here != Ok(true) {
        wake_elsewhere(core, task);
    }
}

pub(crate) struct Core {
    pub(crate) id: CoreId,
    pub(crate) tasks: RefCell<Tasks>,
    pub(crate) ready: RefCell<VecDeque<TaskId>>,
    pub(crate) root_woken: Cell<bool>,
    pub(crate) timers: RefCell<Timers>,
    /// The number of turns so far, and the tasks that wait for the end of the next one.
    pub(crate) turns: Cell<u64>,
    pub(crate) after_turn: RefCell<Vec<Waker>>,
    pub(crate) long_steps: LongSteps,
    pub(crate) op_table: RefCell<OpTable>,
    /// `None` once the reactor has ended.
    pub(crate) driver: RefCell<Option<Driver>>,
    /// Kept between turns for its capacity.
    pub(crate) finished: RefCell<Vec<Finished>>,
    pub(crate) closed: Cell<bool>,
    pub(crate) calls: Calls,
    pub(crate) busy_polling: BusyPolling,
    /// The deadline of the tasks, once the shutdown of the core was requested.
    pub(crate) stop_by: Cell<Option<Instant>>,
    pub(crate) shutdown_waiters: RefCell<Waiters>,
    pub(crate) drained_waiter: RefCell<Option<Waker>>,
    pub(crate) shared: Arc<ReactorShared>,
    /// Empty lists, kept for their capacity, which the next reading of the inbox leaves there.
    pub(crate) received: RefCell<(Vec<TaskId>, Vec<Message>)>,
    pub(crate) gathers: Gathers,
    /// Values that stay on this reactor, by number.
    pub(crate) locals: RefCell<Slab<Rc<dyn Any>>>,
    pub(crate) pool: Pool,
    pub(crate) backend: Backend,
}

impl Core {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    pub(crate) fn wake(&self, task: TaskId) {
        if task == TaskId::ROOT {
            self.root_woken.set(true);
        } else if self.tasks.borrow_mut().enqueue(task) {
            self.ready.borrow_mut().push_back(task);
        }
    }

    /// Starts an operation. Returns it to be kept by the future, unless a thread took it.
    pub(crate) fn start<K: IoOp>(&self, kind: K, waker: Waker) -> (Key, Option<K>) {
        let key = self.op_table.borrow_mut().insert(waker);
        let mut driver = self.driver.borrow_mut();
        (key, driver.as_mut().expect("nothing starts on a reactor that has ended").submit(key, kind))
    }

    /// Cancels an operation that waits for a peer.
    pub(crate) fn cancel(&self, key: Key, interest: Interest) {
        if let Some(driver) = self.driver.borrow_mut().as_mut() {
            driver.cancel(key, interest);
        }
    }

    /// Registers a descriptor with this reactor, if it has room.
    pub(crate) fn fix(&self, fd: BorrowedFd<'_>) -> FdRegistration {
        self.driver.borrow_mut().as_mut().map_or(FdRegistration::Plain, |driver| driver.fix(fd))
    }

    /// Registers a socket with this reactor, and makes it blocking or non-blocking as the backend needs.
    pub(crate) fn adopt(&self, fd: BorrowedFd<'_>) -> io::Result<FdRegistration> {
        self.driver.borrow_mut().as_mut().map_or(Ok(FdRegistration::Plain), |driver| driver.adopt(fd))
    }

    /// Makes the ring clear closed files now rather than in its next turn, so that file locks and connections end
    /// before the caller continues. If the ring is in use, its next turn clears them.
    pub(crate) fn forget_files(&self) {
        if let Ok(mut driver) = self.driver.try_borrow_mut()
            && let Some(Engine::Ring(ring)) = driver.as_mut().map(|driver| &mut driver.engine)
        {
            ring.forget_files();
        }
    }

    /// True if operations that wait for a disk are in flight.
    pub(crate) fn awaits_disk(&self) -> bool {
        self.driver.borrow().as_ref().is_some_and(Driver::awaits_disk)
    }

    pub(crate) fn task_ended(&self) {
        if self.tasks.borrow().live() == 0
            && let Some(waker) = self.drained_waiter.take()
        {
            waker.wake();
        }
    }
}

/// Marks a reactor as the one that runs on this thread.
pub(crate) struct Entered;

impl Entered {
    pub(crate) fn new(core: &Rc<Core>) -> Entered {
        CURRENT.with_borrow_mut(|current| {
            assert!(current.is_none(), "a reactor cannot run inside another on one thread");
            *current = Some(Rc::clone(core));
        });
        Entered
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let core = CURRENT.take();
        drop(core);
    }
}

/// The backend of the current reactor.
///
/// # Panics
/// Outside a reactor.
pub fn backend() -> Backend {
    current().backend.clone()
}

/// The current reactor's pool of buffers.
///
/// # Panics
/// Outside a reactor.
pub fn pool() -> Pool {
    current().pool.clone()
}
