//! The reactor: the tasks, timers and operations of one thread.
//!
//! A turn polls ready tasks, reads the inbox, fires timers, and then makes one call into the backend, which submits
//! started operations, sleeps if no task is ready, and returns completions.
//!
//! Invariant: a reactor ends only after every operation that it started has completed.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use sealblock_runtime_memory::Pool;

use crate::busy_poll::{BusyPolling, Wait};
use crate::config::{Attempt, Backend, Config, StartError};
use crate::core::{Core, Entered, try_current, waker};
use crate::driver::{Driver, Engine};
use crate::gather::Gathers;
use crate::inbox::Registration;
use crate::long_steps::LongSteps;
use crate::op_table::CompletionAction;
use crate::operation::{self, Calls};
use crate::scheduler::TaskId;
use crate::sync::Waiters;

/// The number of tasks that are polled before the backend gets its turn even though more are ready.
const POLLS_PER_TURN: usize = 256;
/// The time for which tasks are polled before the backend gets its turn, checked after [`POLLS_WITHOUT_CLOCK`] polls: a
/// task that computes in steps does each step in a separate poll, and completions of others must not wait for many of
/// these. The usual few polls do not read the clock.
const MAX_POLLING: Duration = Duration::from_millis(1);
const POLLS_WITHOUT_CLOCK: usize = 8;

impl Core {
    fn run_ready(&self) {
        let mut begun = None;
        for polls in 0..POLLS_PER_TURN {
            let Some(task) = self.ready.borrow_mut().pop_front() else { return };
            if polls >= POLLS_WITHOUT_CLOCK && begun.get_or_insert_with(Instant::now).elapsed() > MAX_POLLING {
                self.ready.borrow_mut().push_front(task);
                return;
            }
            let Some(mut body) = self.tasks.borrow_mut().begin(task) else { continue };
            let waker = waker(self.id, task);
            self.calls.renew();
            let finished = body.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
            let ended = self.tasks.borrow_mut().end(task, body, finished);
            if ended.is_some() {
                drop(ended);
                self.task_ended();
            }
        }
    }

    fn read_inbox(&self) {
        if !self.shared.take_notice() {
            return;
        }
        // Exchanged and not taken, so that the senders' next wakes allocate nothing.
        let (mut woken, mut messages) = self.received.take();
        let mut inbox = self.shared.inbox();
        std::mem::swap(&mut inbox.woken, &mut woken);
        std::mem::swap(&mut inbox.messages, &mut messages);
        let stop_by = inbox.stop_by;
        drop(inbox);
        woken.drain(..).for_each(|task| self.wake(task));
        messages.drain(..).for_each(|message| message());
        self.received.replace((woken, messages));
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
        let is_due = self.long_steps.is_due(self.turns.get()) || !self.after_turn.borrow().is_empty();
        if self.root_woken.get() || is_due || !self.ready.borrow().is_empty() {
            return Wait::No;
        }
        self.timers.borrow().next_deadline().map_or(Wait::Forever, Wait::Until)
    }

    /// Calls the backend and delivers its completions.
    fn turn(&self, wait: Wait) -> io::Result<()> {
        let mut finished = self.finished.take();
        let turned = {
            let op_table = self.op_table.borrow();
            let mut driver = self.driver.borrow_mut();
            let driver = driver.as_mut().expect("a reactor that has ended is not driven");
            driver.turn(wait, |key| self.is_closed() || op_table.is_abandoned(key), &mut finished)
        };
        for completion in finished.drain(..) {
            let action = self.op_table.borrow_mut().complete(completion);
            match action {
                CompletionAction::Wake(waker) => waker.wake(),
                CompletionAction::Discard(result, kept, returned) => operation::discard(result, [kept, returned]),
            }
        }
        self.finished.replace(finished);
        self.turns.set(self.turns.get() + 1);
        let waiting = self.after_turn.take();
        waiting.into_iter().for_each(Waker::wake);
        self.long_steps.wake_first();
        turned
    }

    /// Drops every task, then waits until nothing is in flight. Returns the first panic of a drop: unwinding earlier
    /// would free buffers that the kernel may still write to.
    fn end(&self) -> Option<Panic> {
        let mut panic = None;
        self.closed.set(true);
        loop {
            let bodies = self.tasks.borrow_mut().evict();
            if bodies.is_empty() {
                break;
            }
            for body in bodies {
                contain(&mut panic, || drop(body));
            }
        }
        self.ready.take();
        drop(self.after_turn.take());
        let locals = self.locals.take();
        contain(&mut panic, || drop(locals));
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
        if let Some(Driver { engine: Engine::Ring(mut ring), .. }) = driver
            && ring.close().is_err()
        {
            std::mem::forget(ring);
        }
        self.pool.set_registration(None);
        panic
    }

    /// Leaks all memory that a failed ring may still use: the kernel no longer reports what it uses.
    fn leak(&self) {
        tracing::error!("the ring failed with operations in flight; their memory is leaked");
        std::mem::forget(self.driver.take());
        std::mem::forget(self.op_table.take());
    }

    /// Waits until there are no tasks. Only for one caller at a time: the thread of a core.
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

/// Runs futures on the thread that created it. See the crate's documentation.
pub struct Reactor {
    /// Dropped first: wakers of other threads then find no reactor.
    _registration: Registration,
    core: Rc<Core>,
}

impl Reactor {
    /// Starts a reactor on this thread.
    ///
    /// # Errors
    /// When the environment names an unknown backend, when io_uring is required and refused, or when the system has no
    /// descriptors or threads to give. With [`crate::BackendChoice::Auto`] a refused ring is no error; see [`Backend`].
    pub fn new(config: Config) -> Result<Reactor, StartError> {
        let registration =
            Registration::new().map_err(|source| StartError::System { what: Attempt::CreateEvent, source })?;
        let shared = Arc::clone(registration.reactor());
        let pool = Pool::new(config.pool_arena_bytes, config.pool_limit_bytes);
        let (driver, backend) = Driver::start(&config, &pool, &shared)?;
        let core = Core {
            id: shared.id(),
            tasks: RefCell::default(),
            ready: RefCell::default(),
            root_woken: Cell::new(false),
            timers: RefCell::default(),
            turns: Cell::new(0),
            after_turn: RefCell::default(),
            long_steps: LongSteps::default(),
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
            received: RefCell::default(),
            gathers: Gathers::default(),
            locals: RefCell::default(),
            pool,
            backend,
        };
        Ok(Reactor { _registration: registration, core: Rc::new(core) })
    }

    /// Runs `future` to its end, and tasks meanwhile. Remaining tasks continue in the next call.
    ///
    /// # Panics
    /// When `future` panics, when called from within a reactor, and when the kernel fails the ring itself.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        // The future ends, or is dropped by a panic, while the reactor is entered: its destructors may need the
        // reactor.
        let _entered = Entered::new(&self.core);
        let mut output = None;
        self.drive(pin!(async { output = Some(future.await) }));
        output.expect("the future has ended")
    }

    /// Polls and turns until `future` has ended. Not generic, so that it is compiled once.
    fn drive(&self, mut future: Pin<&mut dyn Future<Output = ()>>) {
        let core = &*self.core;
        let waker = waker(core.id, TaskId::ROOT);
        core.root_woken.set(true);
        loop {
            core.calls.renew();
            if core.root_woken.take() && future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                return;
            }
            core.run_ready();
            core.read_inbox();
            core.fire_timers();
            if let Err(error) = core.turn(core.wait()) {
                panic!("the kernel fails the reactor: {error}");
            }
        }
    }

    /// The reactor's backend.
    pub fn backend(&self) -> &Backend {
        &self.core.backend
    }

    /// The reactor's pool of buffers, whose arena is registered with its ring if possible.
    pub fn pool(&self) -> &Pool {
        &self.core.pool
    }

    pub(crate) fn core(&self) -> &Rc<Core> {
        &self.core
    }
}

impl Drop for Reactor {
    /// Drops all tasks and waits for the operations in flight, since the kernel may still write to their buffers. A
    /// panic of a drop resumes after that.
    fn drop(&mut self) {
        // A reactor dropped inside another one's task runs its last turns without being the current one.
        let entered = try_current().is_none().then(|| Entered::new(&self.core));
        let panic = self.core.end();
        drop(entered);
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
