//! Synchronization: between tasks of one core ([`Notify`], [`Waiters`]), and of several ([`Semaphore`], [`Batch`]).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Locks state under whose lock only moves happen, so that a panic leaves it consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A notification for one waiting task. A notification before the wait is not lost.
#[derive(Default)]
pub struct Notify {
    is_notified: Cell<bool>,
    waiter: RefCell<Option<Waker>>,
}

impl Notify {
    /// Wakes the waiting task, or completes the next wait.
    pub fn notify(&self) {
        self.is_notified.set(true);
        let waiter = self.waiter.borrow_mut().take();
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }

    /// Completes the next wait without a wake-up: for calls by the waiting task itself, which waits again before it
    /// sleeps.
    pub fn notify_self(&self) {
        self.is_notified.set(true);
    }

    /// Waits for a notification since the last wait.
    pub async fn wait(&self) {
        poll_fn(|cx| {
            if self.is_notified.take() {
                return Poll::Ready(());
            }
            let previous = self.waiter.borrow_mut().replace(cx.waker().clone());
            drop(previous);
            Poll::Pending
        })
        .await
    }
}

/// The waiters for one event, in the order of arrival.
///
/// Invariant: a dropped waiter leaves no entry, if it returns its ticket. Wakers are returned and not dropped or woken
/// here, because both may run any code and the caller holds a lock.
pub(crate) struct Waiters {
    next_ticket: u64,
    waiting: BTreeMap<u64, Waker>,
}

impl Waiters {
    pub(crate) const fn new() -> Waiters {
        Waiters { next_ticket: 0, waiting: BTreeMap::new() }
    }

    /// Adds a waiter, or renews its waker. Returns the waker that is replaced.
    pub(crate) fn enter(&mut self, ticket: &mut Option<u64>, waker: &Waker) -> Option<Waker> {
        let ticket = *ticket.get_or_insert_with(|| {
            self.next_ticket += 1;
            self.next_ticket
        });
        self.waiting.insert(ticket, waker.clone())
    }

    /// Removes a waiter; `None` if it was woken or never added.
    pub(crate) fn leave(&mut self, ticket: &mut Option<u64>) -> Option<Waker> {
        self.waiting.remove(&ticket.take()?)
    }

    pub(crate) fn take_first(&mut self) -> Option<Waker> {
        self.waiting.pop_first().map(|(_, waker)| waker)
    }

    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Waker> + use<> {
        std::mem::take(&mut self.waiting).into_values()
    }
}

/// Items that any thread adds, and that one thread takes all together. Taking costs no lock while there are none.
///
/// Adding and taking are sequentially consistent with other atomics: if a thread adds a waker and then finds its
/// condition false, it is woken by the thread that makes the condition true and then takes the wakers.
pub(crate) struct Batch<T> {
    is_filled: AtomicBool,
    items: Mutex<Vec<T>>,
}

impl<T> Default for Batch<T> {
    fn default() -> Batch<T> {
        Batch { is_filled: AtomicBool::new(false), items: Mutex::default() }
    }
}

impl<T> Batch<T> {
    pub(crate) fn add(&self, item: T) {
        lock(&self.items).push(item);
        self.is_filled.store(true, Ordering::SeqCst);
    }

    pub(crate) fn take(&self) -> Vec<T> {
        if !self.is_filled.load(Ordering::SeqCst) || !self.is_filled.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut *lock(&self.items))
    }
}

impl Batch<Waker> {
    /// Adds a waker unless it is already there.
    pub(crate) fn add_waker(&self, waker: &Waker) {
        let mut wakers = lock(&self.items);
        if !wakers.iter().any(|other| other.will_wake(waker)) {
            wakers.push(waker.clone());
        }
        drop(wakers);
        self.is_filled.store(true, Ordering::SeqCst);
    }

    /// True if there is a waker other than this one.
    pub(crate) fn has_other(&self, waker: &Waker) -> bool {
        self.is_filled.load(Ordering::SeqCst) && lock(&self.items).iter().any(|other| !other.will_wake(waker))
    }

    pub(crate) fn wake_all(&self) {
        self.take().into_iter().for_each(Waker::wake);
    }
}

/// A limited number of permits, for tasks of any core. Further tasks wait in the order of arrival.
pub(crate) struct Semaphore(Mutex<SemaphoreState>);

struct SemaphoreState {
    available: u32,
    waiting: Waiters,
}

impl Semaphore {
    pub(crate) fn new(limit: u32) -> Arc<Semaphore> {
        Arc::new(Semaphore(Mutex::new(SemaphoreState { available: limit.max(1), waiting: Waiters::new() })))
    }

    /// Waits for a permit.
    pub(crate) fn acquire(self: &Arc<Self>) -> Acquire {
        Acquire { semaphore: Arc::clone(self), ticket: None }
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

pub(crate) struct Permit(Arc<Semaphore>);

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.0.0).available += 1;
        self.0.wake_first();
    }
}

/// The future of [`Semaphore::acquire`].
pub(crate) struct Acquire {
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
        // A waiter that was woken but does not take its permit wakes the next one.
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

    fn poll(acquire: &mut Acquire, count: &Arc<WakeCount>) -> Poll<Permit> {
        Pin::new(acquire).poll(&mut Context::from_waker(&Waker::from(Arc::clone(count))))
    }

    #[test]
    fn permits_go_round_in_the_order_of_arrival() {
        let permits = Semaphore::new(1);
        let counts: [Arc<WakeCount>; 3] = Default::default();
        let woken = || counts.each_ref().map(|count| count.0.load(Ordering::Relaxed));
        let mut acquiring = [permits.acquire(), permits.acquire(), permits.acquire()];
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
        let held = poll(&mut permits.acquire(), &first);
        let (mut dropped, mut waits) = (permits.acquire(), permits.acquire());
        assert!(poll(&mut dropped, &first).is_pending() && poll(&mut waits, &second).is_pending());
        drop(held);
        assert_eq!((first.0.load(Ordering::Relaxed), second.0.load(Ordering::Relaxed)), (1, 0));
        drop(dropped);
        assert_eq!(second.0.load(Ordering::Relaxed), 1);
        assert!(poll(&mut waits, &second).is_ready());
    }
}
