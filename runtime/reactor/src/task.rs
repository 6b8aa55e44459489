//! Starting tasks, and the handles that wait for them.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use futures_util::FutureExt;

use crate::core::{self, Core};
use crate::scheduler::TaskId;

/// How a task ended.
enum TaskOutcome<T> {
    Value(T),
    Panic(Box<dyn Any + Send>),
    Aborted,
}

/// The state that a task and its handle share.
struct JoinState<T> {
    end: Option<TaskOutcome<T>>,
    finished: bool,
    waker: Option<Waker>,
}

/// The task's side. It completes the handle even if the task is dropped early.
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

/// Waits for a task. Dropping it detaches the task, which continues.
///
/// A panic of the task resumes in the task that awaits the handle.
pub struct JoinHandle<T> {
    core: Rc<Core>,
    task: TaskId,
    join: Rc<RefCell<JoinState<T>>>,
}

impl<T> JoinHandle<T> {
    /// Drops the task's future, at once or, if the task aborts itself, at its next `await`. Does nothing after the task
    /// has ended.
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
    spawn_on(core::current(), future)
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
