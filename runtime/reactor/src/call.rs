//! Calls from one thread to the core that does the work.
//!
//! Invariants: every call that was sent is answered, if need be by the drop of its `Reply`; a permit is held from before
//! sending until the answer, so a core never holds more calls than its limit.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_util::FutureExt;

use crate::executor;
use crate::remote::ReactorShared;
use crate::task;
use crate::waiters::Waiters;

/// Why a call has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoreGone {
    /// The core stops or has stopped. The work may have been begun.
    #[error("the core has stopped")]
    Stopped,
    /// The work itself panicked. The core goes on.
    #[error("the work panicked on its core")]
    Panicked,
}

/// Sends work to one core. Clones are for the same core.
#[derive(Clone)]
pub struct CoreHandle {
    pub(crate) remote: Arc<ReactorShared>,
    pub(crate) permits: Arc<Semaphore>,
}

impl CoreHandle {
    /// Has `work` build a future on the core, runs it there, and gives its output. While the core holds as many calls as it
    /// may, the caller waits. The caller may run on any executor. Dropping the returned future does not stop work that
    /// was sent already. Calls made by a core to itself count too, so one that is awaited inside another can wait for ever
    /// when all permits are held by such callers.
    ///
    /// # Errors
    /// [`CoreGone`] when the core stops before there is an answer, or the work panics.
    pub async fn call<W, F, T>(&self, work: W) -> Result<T, CoreGone>
    where
        W: FnOnce() -> F + Send + 'static,
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let permit = Acquire { permits: Arc::clone(&self.permits), ticket: None }.await;
        let shared = Arc::new(Mutex::new(Answer { value: None, waker: None }));
        let reply = Reply { shared: Arc::clone(&shared), _permit: permit };
        let message = Box::new(move || {
            // The closure itself may panic, so it runs inside the task.
            let answered = async move {
                let output = AssertUnwindSafe(async move { work().await }).catch_unwind().await;
                reply.send(output.map_err(|_| CoreGone::Panicked));
            };
            drop(task::spawn_on(executor::current(), answered));
        });
        // A message that is refused is dropped here, and its reply says so.
        drop(self.remote.send(message));
        std::future::poll_fn(|cx| {
            let mut answer = lock(&shared);
            if let Some(value) = answer.value.take() {
                return Poll::Ready(value);
            }
            let previous = answer.waker.replace(cx.waker().clone());
            drop(answer);
            drop(previous);
            Poll::Pending
        })
        .await
    }
}

impl std::fmt::Debug for CoreHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CoreHandle").field("event_fd", &self.remote.event_fd()).finish()
    }
}

struct Answer<T> {
    value: Option<Result<T, CoreGone>>,
    waker: Option<Waker>,
}

/// The core's side of a call. Dropped unanswered, it answers that the core is gone.
struct Reply<T> {
    shared: Arc<Mutex<Answer<T>>>,
    _permit: Permit,
}

impl<T> Reply<T> {
    fn send(self, value: Result<T, CoreGone>) {
        self.answer(value);
    }

    fn answer(&self, value: Result<T, CoreGone>) {
        let mut answer = lock(&self.shared);
        // Once the caller has taken the value, a second one finds nobody.
        if answer.value.is_none() {
            answer.value = Some(value);
        }
        let waker = answer.waker.take();
        drop(answer);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        // After `send` this finds the value there, or taken; in neither case does anybody look again.
        self.answer(Err(CoreGone::Stopped));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Only moves happen under these locks, so a panic leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many calls a core may hold, and who waits, in the order of asking.
pub(crate) struct Semaphore(Mutex<SemaphoreState>);

struct SemaphoreState {
    available: u32,
    waiting: Waiters,
}

impl Semaphore {
    pub(crate) fn new(limit: u32) -> Arc<Semaphore> {
        Arc::new(Semaphore(Mutex::new(SemaphoreState { available: limit.max(1), waiting: Waiters::new() })))
    }

    /// Wakes the first in line if there is a permit for it.
    fn pass_on(&self) {
        let mut ledger = lock(&self.0);
        let first = if ledger.available > 0 { ledger.waiting.take_first() } else { None };
        drop(ledger);
        if let Some(waker) = first {
            waker.wake();
        }
    }
}

struct Permit(Arc<Semaphore>);

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.0.0).available += 1;
        self.0.pass_on();
    }
}

struct Acquire {
    permits: Arc<Semaphore>,
    ticket: Option<u64>,
}

impl Future for Acquire {
    type Output = Permit;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Permit> {
        let permits = Arc::clone(&self.permits);
        let mut ledger = lock(&permits.0);
        if ledger.available > 0 {
            ledger.available -= 1;
            let waiting = ledger.waiting.leave(&mut self.ticket);
            drop(ledger);
            drop(waiting);
            return Poll::Ready(Permit(permits));
        }
        let previous = ledger.waiting.enter(&mut self.ticket, cx.waker());
        drop(ledger);
        drop(previous);
        Poll::Pending
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        if self.ticket.is_none() {
            return;
        }
        let waiting = lock(&self.permits.0).waiting.leave(&mut self.ticket);
        // Whoever was woken and does not take its permit passes the turn on.
        if waiting.is_none() {
            self.permits.pass_on();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn ask(permits: &Arc<Semaphore>) -> Acquire {
        Acquire { permits: Arc::clone(permits), ticket: None }
    }

    fn poll(acquire: &mut Acquire, count: &Arc<Count>) -> Poll<Permit> {
        Pin::new(acquire).poll(&mut Context::from_waker(&Waker::from(Arc::clone(count))))
    }

    #[test]
    fn permits_go_round_in_the_order_of_asking() {
        let permits = Semaphore::new(1);
        let counts: [Arc<Count>; 3] = Default::default();
        let woken = || counts.each_ref().map(|count| count.0.load(Ordering::Relaxed));
        let mut asking = [ask(&permits), ask(&permits), ask(&permits)];
        let Poll::Ready(held) = poll(&mut asking[0], &counts[0]) else { panic!("the first permit is free") };
        assert!(poll(&mut asking[1], &counts[1]).is_pending() && poll(&mut asking[2], &counts[2]).is_pending());
        assert_eq!(woken(), [0, 0, 0]);
        drop(held);
        assert_eq!(woken(), [0, 1, 0]);
        assert!(poll(&mut asking[1], &counts[1]).is_ready(), "and is given back at once");
        assert_eq!(woken(), [0, 1, 1]);
    }

    #[test]
    fn whoever_gives_up_passes_its_turn_on() {
        let permits = Semaphore::new(1);
        let (first, second) = (Arc::new(Count::default()), Arc::new(Count::default()));
        let held = poll(&mut ask(&permits), &first);
        let (mut gives_up, mut waits) = (ask(&permits), ask(&permits));
        assert!(poll(&mut gives_up, &first).is_pending() && poll(&mut waits, &second).is_pending());
        drop(held);
        assert_eq!((first.0.load(Ordering::Relaxed), second.0.load(Ordering::Relaxed)), (1, 0));
        drop(gives_up);
        assert_eq!(second.0.load(Ordering::Relaxed), 1);
        assert!(poll(&mut waits, &second).is_ready());
    }
}
