//! Tasks: futures that the reactor owns, and the handles that wait for them.
//!
//! Invariants: a future is never dropped while the table of tasks is borrowed, because dropping may run anything; a slot
//! whose future is being polled is `Running`, so aborting it from within only marks it.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use futures_util::FutureExt;

use crate::executor::{self, Core};
use crate::waker::{FIELD_MASK, TaskId};

pub(crate) type Body = Pin<Box<dyn Future<Output = ()>>>;

enum TaskState {
    Free,
    Idle(Body),
    Running,
    AbortedWhileRunning,
}

struct Slot {
    generation: u32,
    queued: bool,
    state: TaskState,
}

#[derive(Default)]
pub(crate) struct Tasks {
    slots: Vec<Slot>,
    free: Vec<u32>,
    live: usize,
}

impl Tasks {
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    /// Gives the future a slot, which counts as queued already.
    fn insert(&mut self, body: Body) -> TaskId {
        self.live += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, queued: false, state: TaskState::Free });
            self.slots.len() as u32 - 1
        });
        // The last index is the root's.
        assert!(index < FIELD_MASK, "a reactor holds fewer than 2^24 - 1 tasks");
        let slot = &mut self.slots[index as usize];
        slot.state = TaskState::Idle(body);
        slot.queued = true;
        TaskId { index, generation: slot.generation }
    }

    fn slot(&mut self, id: TaskId) -> Option<&mut Slot> {
        self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation)
    }

    fn release(&mut self, id: TaskId) {
        let slot = &mut self.slots[id.index as usize];
        slot.generation = (slot.generation + 1) & FIELD_MASK;
        slot.queued = false;
        slot.state = TaskState::Free;
        self.free.push(id.index);
        self.live -= 1;
    }

    /// Queues the task to be polled; false if it is gone or queued already.
    pub(crate) fn enqueue(&mut self, id: TaskId) -> bool {
        match self.slot(id) {
            Some(slot) if !matches!(slot.state, TaskState::Free) => !std::mem::replace(&mut slot.queued, true),
            _ => false,
        }
    }

    /// Takes the future out to poll it.
    pub(crate) fn begin(&mut self, id: TaskId) -> Option<Body> {
        let slot = self.slot(id)?;
        slot.queued = false;
        match std::mem::replace(&mut slot.state, TaskState::Running) {
            TaskState::Idle(body) => Some(body),
            other => {
                slot.state = other;
                None
            }
        }
    }

    /// Ends a poll. Returns the future of a task that has ended, for the caller to drop.
    pub(crate) fn end(&mut self, id: TaskId, body: Body, finished: bool) -> Option<Body> {
        let slot = self.slot(id)?;
        if finished || matches!(slot.state, TaskState::AbortedWhileRunning) {
            self.release(id);
            return Some(body);
        }
        slot.state = TaskState::Idle(body);
        None
    }

    /// Takes away the future of a task that is not running; a running one ends with its poll.
    fn abort(&mut self, id: TaskId) -> Option<Body> {
        let slot = self.slot(id)?;
        match std::mem::replace(&mut slot.state, TaskState::AbortedWhileRunning) {
            TaskState::Idle(body) => {
                self.release(id);
                Some(body)
            }
            TaskState::Free => {
                slot.state = TaskState::Free;
                None
            }
            TaskState::Running | TaskState::AbortedWhileRunning => None,
        }
    }

    /// Takes away any one future, while there is one.
    pub(crate) fn evict(&mut self) -> Option<Body> {
        let index = self.slots.iter().position(|slot| matches!(slot.state, TaskState::Idle(_)))?;
        let generation = self.slots[index].generation;
        self.abort(TaskId { index: index as u32, generation })
    }
}

/// How a task ended.
enum TaskOutcome<T> {
    Value(T),
    Panic(Box<dyn Any + Send>),
    Aborted,
}

/// What a task and its handle share.
struct JoinState<T> {
    end: Option<TaskOutcome<T>>,
    finished: bool,
    waker: Option<Waker>,
}

/// The task's side; it completes the handle even if the task is dropped before its end.
struct JoinSender<T>(Rc<RefCell<JoinState<T>>>);

impl<T> JoinSender<T> {
    fn finish(&self, end: TaskOutcome<T>) {
        let mut join = self.0.borrow_mut();
        if std::mem::replace(&mut join.finished, true) {
            return;
        }
        join.end = Some(end);
        let waker = join.waker.take();
        drop(join);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Drop for JoinSender<T> {
    fn drop(&mut self) {
        self.finish(TaskOutcome::Aborted);
    }
}

/// A task was aborted, by its handle or by its reactor's end, before it had a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the task was aborted")]
pub struct Aborted;

/// Waits for a task. Dropping it lets the task run on by itself.
///
/// A panic of the task resumes in the task that awaits the handle.
pub struct JoinHandle<T> {
    core: Rc<Core>,
    task: TaskId,
    join: Rc<RefCell<JoinState<T>>>,
}

impl<T> JoinHandle<T> {
    /// Drops the task's future, at once or, if the task aborts itself, at its next `await`. Does nothing after the task has ended.
    pub fn abort(&self) {
        if self.is_finished() {
            return;
        }
        let body = self.core.tasks.borrow_mut().abort(self.task);
        drop(body);
        self.core.task_ended();
    }

    /// True if the task has ended: with a value, a panic or an abort.
    pub fn is_finished(&self) -> bool {
        self.join.borrow().finished
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, Aborted>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut join = self.join.borrow_mut();
        let previous = match join.end.take() {
            Some(TaskOutcome::Value(value)) => return Poll::Ready(Ok(value)),
            Some(TaskOutcome::Aborted) => return Poll::Ready(Err(Aborted)),
            Some(TaskOutcome::Panic(panic)) => {
                drop(join);
                resume_unwind(panic)
            }
            None => join.waker.replace(cx.waker().clone()),
        };
        drop(join);
        drop(previous);
        Poll::Pending
    }
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinHandle").field("finished", &self.is_finished()).finish()
    }
}

/// Starts a task on the current reactor. It first runs when the caller next waits.
///
/// # Panics
/// Outside a reactor, and when the reactor holds 2^24 - 1 tasks already.
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    spawn_on(executor::current(), future)
}

pub(crate) fn spawn_on<F>(core: Rc<Core>, future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    let join = Rc::new(RefCell::new(JoinState { end: None, finished: false, waker: None }));
    let finish = JoinSender(Rc::clone(&join));
    let body = Box::pin(async move {
        match AssertUnwindSafe(future).catch_unwind().await {
            Ok(value) => finish.finish(TaskOutcome::Value(value)),
            Err(panic) => {
                if Rc::strong_count(&finish.0) == 1 {
                    // The panic hook has printed it, and no handle is left.
                    tracing::error!("a detached task panicked");
                }
                finish.finish(TaskOutcome::Panic(panic));
            }
        }
    });
    let task = core.tasks.borrow_mut().insert(body);
    core.ready.borrow_mut().push_back(task);
    JoinHandle { core, task, join }
}
