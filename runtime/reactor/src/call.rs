//! Calls from one thread to the core that does the work.
//!
//! Invariants: every call that was sent completes, at the latest by the drop of its `Reply`; a permit is held from before the call
//! is sent until it completes, so a core never holds more calls than its limit.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_util::FutureExt;

use crate::cross_core::ReactorShared;
use crate::executor;
use crate::sync::Waiters;
use crate::task;

/// Why a call has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoreGone {
    /// The core stops or has stopped. The work may have been begun.
    #[error("the core has stopped")]
    Stopped,
    /// The work panicked. The core continues.
    #[error("the work panicked on its core")]
    Panicked,
}

/// Sends work to one core. Clones are for the same core.
#[derive(Clone)]
pub struct CoreHandle {
    pub(crate) shared: Arc<ReactorShared>,
    pub(crate) semaphore: Arc<Semaphore>,
}

impl CoreHandle {
    /// Calls `work` on the core to make a future, runs it there, and returns its output. While the core holds as many calls as its
    /// limit allows, the caller waits. The caller may run on any executor. Dropping the returned future does not stop work that
    /// was sent already. Calls made by a core to itself count too, so one that is awaited inside another can wait for ever
    /// when all permits are held by such callers.
    ///
    /// # Errors
    /// [`CoreGone`] when the core stops before there is a result, or the work panics.
    pub async fn call<W, F, T>(&self, work: W) -> Result<T, CoreGone>
    where
        W: FnOnce() -> F + Send + 'static,
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let permit = Acquire { semaphore: Arc::clone(&self.semaphore), ticket: None }.await;
        let shared = Arc::new(Mutex::new(CallState { value: None, waker: None }));
        let reply = Reply { shared: Arc::clone(&shared), _permit: permit };
        let message = Box::new(move || {
            // The closure itself may panic, so it runs inside the task.
            let task = async move {
                let output = AssertUnwindSafe(async move { work().await }).catch_unwind().await;
                reply.send(output.map_err(|_| CoreGone::Panicked));
            };
            drop(task::spawn_on(executor::current(), task));
        });
        // A message that is refused is dropped here, and its reply says so.
        drop(self.shared.send(message));
        std::future::poll_fn(|cx| {
            let mut call = lock(&shared);
            if let Some(value) = call.value.take() {
                return Poll::Ready(value);
            }
            let previous = call.waker.replace(cx.waker().clone());
            drop(call);
            drop(previous);
            Poll::Pending
        })
        .await
    }
}

impl std::fmt::Debug for CoreHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CoreHandle").field("event_fd", &self.shared.event_fd()).finish()
    }
}

struct CallState<T> {
    value: Option<Result<T, CoreGone>>,
    waker: Option<Waker>,
}

/// The core's side of a call. Dropped without a result, it completes the call with [`CoreGone::Stopped`].
struct Reply<T> {
    shared: Arc<Mutex<CallState<T>>>,
    _permit: Permit,
}

impl<T> Reply<T> {
    fn send(self, value: Result<T, CoreGone>) {
        self.complete(value);
    }

    fn complete(&self, value: Result<T, CoreGone>) {
        let mut call = lock(&self.shared);
        // After the caller has taken the value, a second one is ignored.
        if call.value.is_none() {
            call.value = Some(value);
        }
        let waker = call.waker.take();
        drop(call);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        // After `send` the value is set or taken already; the caller reads no second one.
        self.complete(Err(CoreGone::Stopped));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Only moves happen under these locks, so a panic leaves the state consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Limits the calls that a core holds; further ones wait in the order of arrival.
pub(crate) struct Semaphore(Mutex<SemaphoreState>);

struct SemaphoreState {
    available: u32,
    waiting: Waiters,
}

impl Semaphore {
    pub(crate) fn new(limit: u32) -> Arc<Semaphore> {
        Arc::new(Semaphore(Mutex::new(SemaphoreState { available: limit.max(1), waiting: Waiters::new() })))
    }

    /// Wakes the first waiter if a permit is available.
    fn wake_first(&self) {
        let mut state = lock(&self.0);
        let first = if state.available > 0 { state.waiting.take_first() } else { None };
        drop(state);
        if let Some(waker) = first {
            waker.wake();
        }
    }
}

struct Permit(Arc<Semaphore>);

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.0.0).available += 1;
        self.0.wake_first();
    }
}

struct Acquire {
    semaphore: Arc<Semaphore>,
    ticket: Option<u64>,
}

impl Future for Acquire {
    type Output = Permit;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Permit> {
        let permits = Arc::clone(&self.semaphore);
        let mut state = lock(&permits.0);
        if state.available > 0 {
            state.available -= 1;
            let waiting = state.waiting.leave(&mut self.ticket);
            drop(state);
            drop(waiting);
            return Poll::Ready(Permit(permits));
        }
        let previous = state.waiting.enter(&mut self.ticket, cx.waker());
        drop(state);
        drop(previous);
        Poll::Pending
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        if self.ticket.is_none() {
            return;
        }
        let waiting = lock(&self.semaphore.0).waiting.leave(&mut self.ticket);
        // A waiter that was woken and does not take its permit wakes the next one.
        if waiting.is_none() {
            self.semaphore.wake_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct WakeCount(AtomicU32);

    impl Wake for WakeCount {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn acquire(permits: &Arc<Semaphore>) -> Acquire {
        Acquire { semaphore: Arc::clone(permits), ticket: None }
    }

    fn poll(acquire: &mut Acquire, count: &Arc<WakeCount>) -> Poll<Permit> {
        Pin::new(acquire).poll(&mut Context::from_waker(&Waker::from(Arc::clone(count))))
    }

    #[test]
    fn permits_go_round_in_the_order_of_arrival() {
        let permits = Semaphore::new(1);
        let counts: [Arc<WakeCount>; 3] = Default::default();
        let woken = || counts.each_ref().map(|count| count.0.load(Ordering::Relaxed));
        let mut acquiring = [acquire(&permits), acquire(&permits), acquire(&permits)];
        let Poll::Ready(held) = poll(&mut acquiring[0], &counts[0]) else { panic!("the first permit is free") };
        assert!(poll(&mut acquiring[1], &counts[1]).is_pending() && poll(&mut acquiring[2], &counts[2]).is_pending());
        assert_eq!(woken(), [0, 0, 0]);
        drop(held);
        assert_eq!(woken(), [0, 1, 0]);
        assert!(poll(&mut acquiring[1], &counts[1]).is_ready(), "and is given back at once");
        assert_eq!(woken(), [0, 1, 1]);
    }

    #[test]
    fn a_dropped_waiter_passes_its_turn_on() {
        let permits = Semaphore::new(1);
        let (first, second) = (Arc::new(WakeCount::default()), Arc::new(WakeCount::default()));
        let held = poll(&mut acquire(&permits), &first);
        let (mut dropped, mut waits) = (acquire(&permits), acquire(&permits));
        assert!(poll(&mut dropped, &first).is_pending() && poll(&mut waits, &second).is_pending());
        drop(held);
        assert_eq!((first.0.load(Ordering::Relaxed), second.0.load(Ordering::Relaxed)), (1, 0));
        drop(dropped);
        assert_eq!(second.0.load(Ordering::Relaxed), 1);
        assert!(poll(&mut waits, &second).is_ready());
    }
}
