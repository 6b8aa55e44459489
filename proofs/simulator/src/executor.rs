//! A single-threaded executor with random scheduling and virtual time.
//!
//! The next ready task is chosen at random, and time stands still until no task is ready. Sometimes a timer fires
//! earlier, as if the ready tasks were slow. A run ends when its main task ends, when it is halted (a power cut), or
//! when it cannot end: no ready task and no timer, or more steps or time than the limit. Ending drops every task, so
//! nothing of a machine survives its run.
//!
//! Invariant: no task is polled, spawned or dropped while the task table is borrowed, since any of these may reenter.

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use sealblock_block::Clock;

use crate::random::{Random, Trace};

/// The percentage of steps in which a timer fires although tasks are ready.
const EARLY_TIMER_PERCENT: u64 = 3;

/// The limits of a run; a run above them counts as endless.
#[derive(Clone, Copy, Debug)]
pub struct RunLimits {
    /// Polls of tasks.
    pub steps: u64,
    /// Virtual time, in seconds.
    pub seconds: u64,
}

/// How a run ended.
#[derive(Debug)]
pub enum RunEnd<T> {
    /// The main task finished with this result.
    Finished(T),
    /// [`Executor::halt`] was called.
    Halted,
    /// It cannot end.
    Stuck(Stuck),
}

/// Why a run cannot end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stuck {
    /// The main task waits, no task is ready, and no timer is set.
    Deadlock {
        /// Names of the waiting tasks.
        waiting: Vec<&'static str>,
    },
    /// More polls or more virtual time than the limit.
    Endless {
        /// Names of the remaining tasks.
        waiting: Vec<&'static str>,
        /// Polls so far.
        steps: u64,
        /// Virtual time so far, in seconds.
        seconds: u64,
    },
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stuck::Deadlock { waiting } => {
                write!(f, "deadlock: {} wait and nothing will wake them", waiting.join(", "))
            }
            Stuck::Endless { waiting, steps, seconds } => {
                write!(f, "no end after {steps} steps and {seconds} s of virtual time; left: {}", waiting.join(", "))
            }
        }
    }
}

type BoxedTask = Pin<Box<dyn Future<Output = ()>>>;

struct TaskSlot {
    name: &'static str,
    /// `None` while the task is being polled and once it is done.
    future: Option<BoxedTask>,
    waker: Waker,
    handle: Arc<TaskHandle>,
}

/// The state of a waker. `Waker` requires `Send`, so this is `Send`, although it never leaves its thread.
struct TaskHandle {
    id: usize,
    queued: AtomicBool,
    ready: Arc<Mutex<Vec<usize>>>,
}

impl Wake for TaskHandle {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            self.ready.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
        }
    }
}

struct ExecutorState {
    random: Random,
    trace: Trace,
    ready: Arc<Mutex<Vec<usize>>>,
    tasks: RefCell<Vec<TaskSlot>>,
    timers: RefCell<BTreeMap<(u64, u64), Waker>>,
    timers_made: Cell<u64>,
    now_ns: Cell<u64>,
    steps: Cell<u64>,
    halted: Cell<bool>,
}

/// A machine's processor and clock. Clones are the same machine.
#[derive(Clone)]
pub struct Executor(Rc<ExecutorState>);

impl Executor {
    /// A machine whose schedule comes from `random`.
    pub fn new(random: Random, trace: Trace) -> Executor {
        Executor(Rc::new(ExecutorState {
            random,
            trace,
            ready: Arc::default(),
            tasks: RefCell::default(),
            timers: RefCell::default(),
            timers_made: Cell::new(0),
            now_ns: Cell::new(0),
            steps: Cell::new(0),
            halted: Cell::new(false),
        }))
    }

    /// Starts a task; `name` is for the report of a deadlock. Dropping the returned value leaves the task running.
    pub fn spawn<T: 'static>(&self, name: &'static str, future: impl Future<Output = T> + 'static) -> Task<T> {
        let join = Rc::new(Join { value: Cell::new(None), waiting: Cell::new(None) });
        let task = Task(Rc::clone(&join));
        let future = Box::pin(async move {
            let value = future.await;
            join.value.set(Some(value));
            if let Some(waiting) = join.waiting.take() {
                waiting.wake();
            }
        });
        let mut tasks = self.0.tasks.borrow_mut();
        let handle =
            Arc::new(TaskHandle { id: tasks.len(), queued: AtomicBool::new(false), ready: Arc::clone(&self.0.ready) });
        let waker = Waker::from(Arc::clone(&handle));
        handle.wake_by_ref();
        tasks.push(TaskSlot { name, future: Some(future), waker, handle });
        task
    }

    /// Runs `main` and all spawned tasks until `main` ends, then drops the other tasks.
    pub fn run<T: 'static>(&self, limits: RunLimits, main: impl Future<Output = T> + 'static) -> RunEnd<T> {
        let main = self.spawn("main", main);
        let end = loop {
            if self.0.halted.get() {
                break RunEnd::Halted;
            }
            if let Some(value) = main.0.value.take() {
                break RunEnd::Finished(value);
            }
            if self.0.steps.get() >= limits.steps || self.now().as_secs() >= limits.seconds {
                let (steps, seconds) = (self.0.steps.get(), self.now().as_secs());
                break RunEnd::Stuck(Stuck::Endless { waiting: self.waiting(), steps, seconds });
            }
            if !self.step() {
                break RunEnd::Stuck(Stuck::Deadlock { waiting: self.waiting() });
            }
        };
        self.clear();
        end
    }

    /// Ends the run at once: nothing is polled any more.
    pub fn halt(&self) {
        self.0.halted.set(true);
    }

    /// True if the run ends with the current poll.
    pub fn is_halted(&self) -> bool {
        self.0.halted.get()
    }

    /// Virtual time since the machine started.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.now_ns.get())
    }

    /// Polls so far.
    pub fn steps(&self) -> u64 {
        self.0.steps.get()
    }

    /// Completes after `delay` of virtual time.
    pub fn delay(&self, delay: Duration) -> Sleep {
        let delay_ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        let at_ns = self.0.now_ns.get().saturating_add(delay_ns);
        let made = self.0.timers_made.get();
        self.0.timers_made.set(made + 1);
        Sleep { executor: self.clone(), key: (at_ns, made), set: false }
    }

    /// Lets the other ready tasks run.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(|cx| {
            if yielded {
                return Poll::Ready(());
            }
            yielded = true;
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// One poll or one timer; false if there is neither.
    fn step(&self) -> bool {
        let picked = {
            let mut ready = self.0.ready.lock().unwrap_or_else(PoisonError::into_inner);
            if ready.is_empty() || self.0.random.chance(EARLY_TIMER_PERCENT) {
                None
            } else {
                let at = self.0.random.below(ready.len() as u64) as usize;
                Some(ready.swap_remove(at))
            }
        };
        match picked {
            Some(id) => self.poll(id),
            None => return self.fire() || !self.0.ready.lock().unwrap_or_else(PoisonError::into_inner).is_empty(),
        }
        true
    }

    fn poll(&self, id: usize) {
        self.0.steps.set(self.0.steps.get() + 1);
        self.0.trace.note(b't', id as u64, self.0.now_ns.get());
        let (future, waker) = {
            let slot = &mut self.0.tasks.borrow_mut()[id];
            slot.handle.queued.store(false, Ordering::Relaxed);
            (slot.future.take(), slot.waker.clone())
        };
        let Some(mut future) = future else { return };
        if future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            self.0.tasks.borrow_mut()[id].future = Some(future);
        }
    }

    /// Advances time to the next timer and wakes its waiter; false without a timer.
    fn fire(&self) -> bool {
        let Some(((at_ns, _), waker)) = self.0.timers.borrow_mut().pop_first() else { return false };
        self.0.now_ns.set(self.0.now_ns.get().max(at_ns));
        waker.wake();
        true
    }

    fn waiting(&self) -> Vec<&'static str> {
        self.0.tasks.borrow().iter().filter(|slot| slot.future.is_some()).map(|slot| slot.name).collect()
    }

    fn clear(&self) {
        let tasks = std::mem::take(&mut *self.0.tasks.borrow_mut());
        drop(tasks);
        self.0.timers.borrow_mut().clear();
        self.0.ready.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Clock for Executor {
    fn sleep(&self, delay: Duration) -> impl Future<Output = ()> {
        self.delay(delay)
    }
}

/// The future of [`Executor::delay`]. Dropping it removes its timer.
pub struct Sleep {
    executor: Executor,
    key: (u64, u64),
    set: bool,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let state = Rc::clone(&self.executor.0);
        let mut timers = state.timers.borrow_mut();
        if self.set && !timers.contains_key(&self.key) {
            return Poll::Ready(());
        }
        self.set = true;
        timers.insert(self.key, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if self.set {
            self.executor.0.timers.borrow_mut().remove(&self.key);
        }
    }
}

struct Join<T> {
    value: Cell<Option<T>>,
    waiting: Cell<Option<Waker>>,
}

/// A started task, whose end can be awaited.
pub struct Task<T>(Rc<Join<T>>);

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match self.0.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                self.0.waiting.set(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}
