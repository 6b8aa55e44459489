//! The reactor: the tasks, timers and operations of one thread.
//!
//! A turn polls ready tasks, reads the inbox, fires timers, and then makes one call into the backend, which submits started
//! operations, sleeps if no task is ready, and returns completions.
//!
//! Invariants: no field of `Core` is borrowed while foreign code runs (a poll, a drop, a wake); a reactor ends only after every
//! operation that it started has completed.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use sealblock_runtime_memory::Pool;

use crate::busy_poll::BusyPolling;
use crate::config::Backend;
use crate::config::{Attempt, Config, StartError};
use crate::cross_core::CoreLocals;
use crate::cross_core::ReactorShared;
use crate::gather::Gathers;
use crate::op_table::{CompletionAction, Key, OpTable};
use crate::operation::{self, Calls, Interest, IoOp};
use crate::ring::{Driver, Finished, Wait};
use crate::sync::Waiters;
use crate::task::Tasks;
use crate::timer::Timers;
use crate::waker::{self, CoreId, ROOT, TaskId};

/// How many tasks are polled before the backend gets its turn even though more are ready.
const POLLS_PER_TURN: usize = 256;

thread_local! {
    /// The reactor that runs on this thread just now.
    static CURRENT: RefCell<Option<Rc<Core>>> = const { RefCell::new(None) };
}

pub(crate) fn current() -> Rc<Core> {
    try_current().expect("this needs a reactor: call it from within Reactor::block_on or a task")
}

pub(crate) fn try_current() -> Option<Rc<Core>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Wakes a task of the reactor that runs on this thread; false when the task belongs to another.
pub(crate) fn wake_here(core: CoreId, task: TaskId) -> bool {
    let woken = CURRENT.try_with(|current| match &*current.borrow() {
        Some(current) if current.id == core => {
            current.wake(task);
            true
        }
        _ => false,
    });
    woken.unwrap_or(false)
}

pub(crate) struct Core {
    id: CoreId,
    pub(crate) tasks: RefCell<Tasks>,
    pub(crate) ready: RefCell<VecDeque<TaskId>>,
    root_woken: Cell<bool>,
    pub(crate) timers: RefCell<Timers>,
    pub(crate) op_table: RefCell<OpTable>,
    /// `None` once the reactor has ended.
    pub(crate) driver: RefCell<Option<Driver>>,
    /// Kept between turns for its capacity.
    finished: RefCell<Vec<Finished>>,
    closed: Cell<bool>,
    pub(crate) calls: Calls,
    pub(crate) busy_polling: BusyPolling,
    stop_by: Cell<Option<Instant>>,
    pub(crate) shutdown_waiters: RefCell<Waiters>,
    drained_waiter: RefCell<Option<Waker>>,
    pub(crate) shared: Arc<ReactorShared>,
    pub(crate) gathers: Gathers,
    pub(crate) core_locals: RefCell<CoreLocals>,
    pool: Pool,
    backend: Backend,
}

impl Core {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    fn wake(&self, task: TaskId) {
        if task == ROOT {
            self.root_woken.set(true);
        } else if self.tasks.borrow_mut().enqueue(task) {
            self.ready.borrow_mut().push_back(task);
        }
    }

    /// Starts an operation. Returns it for the future to keep, unless a thread took it.
    pub(crate) fn start<K: IoOp>(&self, mut kind: K, waker: Waker) -> (Key, Option<K>) {
        let key = self.op_table.borrow_mut().insert(waker);
        let mut driver = self.driver.borrow_mut();
        match driver.as_mut().expect("nothing starts on a reactor that has ended") {
            Driver::Ring(ring) => {
                let entry = kind.entry(&ring.tables);
                // SAFETY: the future keeps the operation, or leaves it to the table, until the completion is there; and a
                // `IoOp` promises that what its entry names stays valid and in place as long as it lives, or is leaked.
                unsafe { ring.push(key, entry, kind.waits().is_some()) };
                (key, Some(kind))
            }
            Driver::Threads(threads) => {
                threads.push(key, kind.waits(), Box::new(kind));
                (key, None)
            }
        }
    }

    /// Cancels an operation that waits for a peer.
    pub(crate) fn cancel(&self, key: Key, interest: Interest) {
        match self.driver.borrow_mut().as_mut() {
            Some(Driver::Ring(ring)) => ring.cancel(key),
            Some(Driver::Threads(threads)) => threads.sockets.cancel(key, interest),
            None => {}
        }
    }

    /// True if operations are in flight that wait for a disk.
    pub(crate) fn awaits_disk(&self) -> bool {
        self.driver.borrow().as_ref().is_some_and(Driver::awaits_disk)
    }

    fn run_ready(&self) {
        for _ in 0..POLLS_PER_TURN {
            let Some(task) = self.ready.borrow_mut().pop_front() else { return };
            let Some(mut body) = self.tasks.borrow_mut().begin(task) else { continue };
            let waker = waker::waker(self.id, task);
            self.calls.renew();
            let finished = body.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
            let ended = self.tasks.borrow_mut().end(task, body, finished);
            if ended.is_some() {
                drop(ended);
                self.task_ended();
            }
        }
    }

    pub(crate) fn task_ended(&self) {
        if self.tasks.borrow().live() == 0
            && let Some(waker) = self.drained_waiter.take()
        {
            waker.wake();
        }
    }

    fn read_inbox(&self) {
        if !self.shared.take_notice() {
            return;
        }
        let mut inbox = self.shared.inbox();
        let woken = std::mem::take(&mut inbox.woken);
        let messages = std::mem::take(&mut inbox.messages);
        let stop_by = inbox.stop_by;
        drop(inbox);
        for task in woken {
            self.wake(task);
        }
        for message in messages {
            message();
        }
        if stop_by.is_some() && self.stop_by.replace(stop_by).is_none() {
            let waiting = self.shutdown_waiters.borrow_mut().take_all();
            waiting.for_each(Waker::wake);
        }
    }

    fn fire_timers(&self) {
        if self.timers.borrow().next_deadline().is_none() {
            return;
        }
        let now = Instant::now();
        loop {
            let due = self.timers.borrow_mut().pop_due(now);
            let Some(waker) = due else { return };
            waker.wake();
        }
    }

    fn wait(&self) -> Wait {
        if self.root_woken.get() || !self.ready.borrow().is_empty() {
            return Wait::No;
        }
        self.timers.borrow().next_deadline().map_or(Wait::Forever, Wait::Until)
    }

    /// Calls the backend and passes its completions on.
    fn turn(&self, wait: Wait) -> io::Result<()> {
        let mut finished = self.finished.take();
        let turned = {
            let op_table = self.op_table.borrow();
            let mut driver = self.driver.borrow_mut();
            let driver = driver.as_mut().expect("a reactor that has ended is not driven");
            driver.turn(wait, |key| self.is_closed() || op_table.is_abandoned(key), &mut finished)
        };
        for Finished { key, result, returned } in finished.drain(..) {
            let aftermath = self.op_table.borrow_mut().complete(key, result, returned);
            match aftermath {
                CompletionAction::Wake(waker) => waker.wake(),
                CompletionAction::Discard(result, kept, returned) => operation::discard(result, [kept, returned]),
            }
        }
        self.finished.replace(finished);
        turned
    }

    /// Drops every task, then waits until nothing is in flight. Returns the first panic of a drop: unwinding earlier would free
    /// buffers that the kernel may still write to.
    fn end(&self) -> Option<Panic> {
        let mut panic = None;
        self.closed.set(true);
        loop {
            let body = self.tasks.borrow_mut().evict();
            if body.is_none() {
                break;
            }
            contain(&mut panic, || drop(body));
        }
        self.ready.take();
        let core_locals = self.core_locals.take();
        contain(&mut panic, || drop(core_locals));
        contain(&mut panic, || drop(self.shared.close()));
        if let Some(driver) = self.driver.borrow_mut().as_mut() {
            driver.cancel_all();
        }
        while self.op_table.borrow().in_flight() > 0 {
            // A waker that panics loses the completions after its own.
            if !matches!(contain(&mut panic, || self.turn(Wait::Forever)), Some(Ok(()))) {
                self.leak();
                return panic;
            }
        }
        let driver = self.driver.take();
        if let Some(Driver::Ring(mut ring)) = driver
            && ring.close().is_err()
        {
            std::mem::forget(ring);
        }
        self.pool.set_registration(None);
        panic
    }

    /// Leaks everything that was lent to a failed ring: the kernel no longer reports what it still uses.
    fn leak(&self) {
        tracing::error!("the ring failed with operations in flight; their memory is leaked");
        std::mem::forget(self.driver.take());
        std::mem::forget(self.op_table.take());
    }

    /// The deadline of the tasks, once the shutdown of the core was requested.
    pub(crate) fn stop_by(&self) -> Option<Instant> {
        self.stop_by.get()
    }

    /// Waits until there are no tasks. One caller at a time: the thread of a core.
    pub(crate) async fn drained(&self) {
        std::future::poll_fn(|cx| {
            if self.tasks.borrow().live() == 0 {
                return Poll::Ready(());
            }
            let previous = self.drained_waiter.replace(Some(cx.waker().clone()));
            drop(previous);
            Poll::Pending
        })
        .await
    }
}

/// The payload of a panic.
type Panic = Box<dyn Any + Send>;

/// Runs code that may panic; keeps the first panic for later.
fn contain<T>(panic: &mut Option<Panic>, foreign: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(foreign)) {
        Ok(value) => Some(value),
        Err(found) => {
            panic.get_or_insert(found);
            None
        }
    }
}

/// Marks a reactor as the one that runs on this thread.
struct Entered;

impl Entered {
    fn new(core: &Rc<Core>) -> Entered {
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

/// Runs futures on the thread that made it. See the crate's documentation.
pub struct Reactor {
    core: Rc<Core>,
}

impl Reactor {
    /// Starts a reactor on this thread.
    ///
    /// # Errors
    /// When the environment names an unknown backend, when io_uring is required and refused, or when the system has no
    /// descriptors or threads to give. With [`crate::BackendChoice::Auto`] a refused ring is no error; see [`Backend`].
    pub fn new(config: Config) -> Result<Reactor, StartError> {
        let shared =
            ReactorShared::new().map_err(|source| StartError::System { what: Attempt::CreateEvent, source })?;
        let shared = Arc::new(shared);
        let pool = Pool::new(config.pool_arena_bytes, config.pool_limit_bytes);
        let (driver, backend) = Driver::start(&config, &pool, &shared)?;
        let core = Core {
            id: waker::register(&shared),
            tasks: RefCell::default(),
            ready: RefCell::default(),
            root_woken: Cell::new(false),
            timers: RefCell::default(),
            op_table: RefCell::default(),
            driver: RefCell::new(Some(driver)),
            finished: RefCell::default(),
            closed: Cell::new(false),
            calls: Calls::default(),
            busy_polling: BusyPolling::new(config.spin_us),
            stop_by: Cell::new(None),
            shutdown_waiters: RefCell::new(Waiters::new()),
            drained_waiter: RefCell::default(),
            shared,
            gathers: Gathers::default(),
            core_locals: RefCell::default(),
            pool,
            backend,
        };
        Ok(Reactor { core: Rc::new(core) })
    }

    /// Runs `future` to its end, and tasks meanwhile. Remaining tasks continue in the next call.
    ///
    /// # Panics
    /// When `future` panics, when called from within a reactor, and when the kernel fails the ring itself.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let _entered = Entered::new(&self.core);
        let core = &*self.core;
        let mut future = pin!(future);
        let waker = waker::waker(core.id, ROOT);
        core.root_woken.set(true);
        loop {
            core.calls.renew();
            if core.root_woken.take()
                && let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker))
            {
                return output;
            }
            core.run_ready();
            core.read_inbox();
            core.fire_timers();
            if let Err(error) = core.turn(core.wait()) {
                panic!("the kernel fails the reactor: {error}");
            }
        }
    }

    /// What the reactor runs on.
    pub fn backend(&self) -> &Backend {
        &self.core.backend
    }

    /// The reactor's pool of buffers, whose arena its ring has registered if it could.
    pub fn pool(&self) -> &Pool {
        &self.core.pool
    }

    pub(crate) fn core(&self) -> &Rc<Core> {
        &self.core
    }
}

impl Drop for Reactor {
    /// Drops all tasks and waits for the operations in flight, since the kernel may still write to their buffers. A panic
    /// of a drop resumes after that.
    fn drop(&mut self) {
        // A reactor dropped inside another one's task runs its last turns without being the current one.
        let entered = try_current().is_none().then(|| Entered::new(&self.core));
        let panic = self.core.end();
        drop(entered);
        waker::unregister(self.core.id);
        if let Some(panic) = panic
            && !std::thread::panicking()
        {
            resume_unwind(panic);
        }
    }
}

impl std::fmt::Debug for Reactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reactor").field("backend", &self.core.backend).finish()
    }
}

/// What the current reactor runs on.
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
