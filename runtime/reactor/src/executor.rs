//! The reactor: one thread's tasks, timers and operations, turned round and round.
//!
//! A turn polls what is ready, looks at the inbox, fires timers, and then makes one call into the backend, which submits
//! what was started, sleeps when nothing is ready, and brings back what is finished.
//!
//! Invariants: no field of `Core` is borrowed while foreign code runs (a poll, a drop, a wake); a reactor ends only after
//! every operation it started has ended.

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

use crate::backend::Backend;
use crate::busy_poll::BusyPolling;
use crate::config::{Attempt, Config, StartError};
use crate::core_local::CoreLocals;
use crate::driver::{Driver, Finished, Wait};
use crate::gather::Gathers;
use crate::op_table::{Aftermath, Key, OpTable};
use crate::operation::{self, Calls, Interest, IoOp};
use crate::remote::ReactorShared;
use crate::task::Tasks;
use crate::timer::Timers;
use crate::waiters::Waiters;
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
    pub(crate) pending: RefCell<OpTable>,
    /// `None` once the reactor has ended.
    pub(crate) driver: RefCell<Option<Driver>>,
    /// Kept between turns for its capacity.
    finished: RefCell<Vec<Finished>>,
    closed: Cell<bool>,
    pub(crate) calls: Calls,
    pub(crate) lingering: BusyPolling,
    stop_by: Cell<Option<Instant>>,
    pub(crate) stop_waiters: RefCell<Waiters>,
    drained_waiter: RefCell<Option<Waker>>,
    pub(crate) remote: Arc<ReactorShared>,
    pub(crate) gathers: Gathers,
    pub(crate) homed: RefCell<CoreLocals>,
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

    /// Starts an operation. It is returned when the future is to keep it, that is, unless a thread took it.
    pub(crate) fn start<K: IoOp>(&self, mut kind: K, waker: Waker) -> (Key, Option<K>) {
        let key = self.pending.borrow_mut().insert(waker);
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

    /// Asks for the early end of an operation that waits for a peer.
    pub(crate) fn cancel(&self, key: Key, interest: Interest) {
        match self.driver.borrow_mut().as_mut() {
            Some(Driver::Ring(ring)) => ring.cancel(key),
            Some(Driver::Threads(threads)) => threads.sockets.cancel(key, interest),
            None => {}
        }
    }

    /// Whether operations are in flight that wait for no peer.
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
        if !self.remote.take_notice() {
            return;
        }
        let mut inbox = self.remote.inbox();
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
            let waiting = self.stop_waiters.borrow_mut().take_all();
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

    /// Gives the backend its turn and passes on what is finished.
    fn drive(&self, wait: Wait) -> io::Result<()> {
        let mut finished = self.finished.take();
        let turned = {
            let pending = self.pending.borrow();
            let mut driver = self.driver.borrow_mut();
            let driver = driver.as_mut().expect("a reactor that has ended is not driven");
            driver.turn(wait, |key| self.is_closed() || pending.is_abandoned(key), &mut finished)
        };
        for Finished { key, result, returned } in finished.drain(..) {
            let aftermath = self.pending.borrow_mut().complete(key, result, returned);
            match aftermath {
                Aftermath::Wake(waker) => waker.wake(),
                Aftermath::Discard(result, kept, returned) => operation::discard(result, [kept, returned]),
            }
        }
        self.finished.replace(finished);
        turned
    }

    /// Drops every task, then waits until nothing is in flight. Gives the first panic of what was dropped: unwinding before the
    /// end would free buffers that the kernel may still write to.
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
        let residents = self.homed.take();
        contain(&mut panic, || drop(residents));
        contain(&mut panic, || drop(self.remote.close()));
        if let Some(driver) = self.driver.borrow_mut().as_mut() {
            driver.cancel_all();
        }
        while self.pending.borrow().unanswered() > 0 {
            // A waker that panics takes completions along that were not looked at.
            if !matches!(contain(&mut panic, || self.drive(Wait::Forever)), Some(Ok(()))) {
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

    /// The kernel does not say any more what it still uses, so nothing that was lent to it may ever be freed.
    fn leak(&self) {
        tracing::error!("the ring failed with operations in flight; their memory is given up");
        std::mem::forget(self.driver.take());
        std::mem::forget(self.pending.take());
    }

    /// Until when tasks may go on, once the core was asked to stop.
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

/// What a panic was about.
type Panic = Box<dyn Any + Send>;

/// Runs what may panic; keeps the first panic for later.
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
        let remote =
            ReactorShared::new().map_err(|source| StartError::System { what: Attempt::CreateEvent, source })?;
        let remote = Arc::new(remote);
        let pool = Pool::new(config.pool_arena_bytes, config.pool_limit_bytes);
        let (driver, backend) = Driver::start(&config, &pool, &remote)?;
        let core = Core {
            id: waker::register(&remote),
            tasks: RefCell::default(),
            ready: RefCell::default(),
            root_woken: Cell::new(false),
            timers: RefCell::default(),
            pending: RefCell::default(),
            driver: RefCell::new(Some(driver)),
            finished: RefCell::default(),
            closed: Cell::new(false),
            calls: Calls::default(),
            lingering: BusyPolling::new(config.spin_us),
            stop_by: Cell::new(None),
            stop_waiters: RefCell::new(Waiters::new()),
            drained_waiter: RefCell::default(),
            remote,
            gathers: Gathers::default(),
            homed: RefCell::default(),
            pool,
            backend,
        };
        Ok(Reactor { core: Rc::new(core) })
    }

    /// Runs `future` to its end, and tasks meanwhile. Tasks that are left stay and go on in the next call.
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
            if let Err(error) = core.drive(core.wait()) {
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
    /// Drops all tasks and waits for the operations in flight, since the kernel may still write to their buffers. A panic of what a
    /// task drops goes on behind that.
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
