//! What the cores of a server share: its connections, and the order to end.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use sealblock_protocols_nbd as core;
use sealblock_runtime_reactor::Post;

use crate::export::Export;
use crate::limits::Limits;

/// What connections and listeners are told. Later ones include earlier ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(crate) enum Order {
    /// Take nothing more, answer what is being carried out, then end.
    Stop = 1,
    /// End at once.
    Kill = 2,
}

pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) exports: Vec<Export>,
    /// What clients are told of each.
    pub(crate) told: Arc<[core::Export]>,
    pub(crate) cores: Mutex<Vec<Post>>,
    order: AtomicU8,
    next: AtomicUsize,
    /// Whoever is to hear of an order, by number. Connections are in it for as long as they live.
    waiters: Mutex<BTreeMap<usize, (Kind, Option<Waker>)>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Listener,
    Connection,
}

/// A place among those who hear of orders, given back when it is dropped.
pub(crate) struct Place {
    pub(crate) shared: Arc<Shared>,
    pub(crate) number: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(exports: Vec<Export>, told: Arc<[core::Export]>, limits: Limits) -> Shared {
        let (order, next) = (AtomicU8::new(0), AtomicUsize::new(0));
        Shared { limits, exports, told, cores: Mutex::default(), order, next, waiters: Mutex::default() }
    }

    /// A place for one more; `None` for a connection above the limit.
    pub(crate) fn enter(self: &Arc<Self>, kind: Kind) -> Option<Place> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut waiters = lock(&self.waiters);
        let connections = waiters.values().filter(|waiter| waiter.0 == Kind::Connection).count();
        if kind == Kind::Connection && connections >= self.limits.connections {
            return None;
        }
        waiters.insert(number, (kind, None));
        Some(Place { shared: Arc::clone(self), number })
    }

    pub(crate) fn connections(&self) -> usize {
        lock(&self.waiters).values().filter(|waiter| waiter.0 == Kind::Connection).count()
    }

    /// Tells everybody. An order is never taken back.
    pub(crate) fn order(&self, order: Order) {
        self.order.fetch_max(order as u8, Ordering::SeqCst);
        let wakers: Vec<Waker> = lock(&self.waiters).values_mut().filter_map(|waiter| waiter.1.take()).collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// The core for a connection of this number, in turn; `None` for the one that accepted it.
    pub(crate) fn post(&self, number: usize) -> Option<Post> {
        let cores = lock(&self.cores);
        let index = number.checked_rem(cores.len())?;
        cores.get(index).cloned()
    }

    pub(crate) fn set_cores(&self, posts: Vec<Post>) {
        *lock(&self.cores) = posts;
    }
}

impl Place {
    /// Ready once the order is at least this one.
    pub(crate) fn poll_order(&self, at_least: Order, cx: &mut Context<'_>) -> Poll<()> {
        let before =
            lock(&self.shared.waiters).get_mut(&self.number).and_then(|waiter| waiter.1.replace(cx.waker().clone()));
        drop(before);
        match self.shared.order.load(Ordering::SeqCst) >= at_least as u8 {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let waiter = lock(&self.shared.waiters).remove(&self.number);
        drop(waiter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(connections: usize) -> Arc<Shared> {
        Arc::new(Shared::new(Vec::new(), Arc::new([]), Limits { connections, ..Limits::default() }))
    }

    #[test]
    fn places_for_connections_are_limited_and_given_back() {
        let shared = shared(1);
        let _listener = shared.enter(Kind::Listener).unwrap();
        let first = shared.enter(Kind::Connection).unwrap();
        assert!(shared.enter(Kind::Connection).is_none());
        assert_eq!(shared.connections(), 1);
        drop(first);
        assert!(shared.enter(Kind::Connection).is_some());
    }

    #[test]
    fn orders_reach_all_and_stay() {
        let shared = shared(2);
        let (one, mut cx) = (shared.enter(Kind::Connection).unwrap(), Context::from_waker(Waker::noop()));
        assert!(one.poll_order(Order::Stop, &mut cx).is_pending());
        shared.order(Order::Stop);
        let late = shared.enter(Kind::Listener).unwrap();
        assert!(one.poll_order(Order::Stop, &mut cx).is_ready() && late.poll_order(Order::Stop, &mut cx).is_ready());
        assert!(one.poll_order(Order::Kill, &mut cx).is_pending());
        shared.order(Order::Kill);
        shared.order(Order::Stop);
        assert!(one.poll_order(Order::Kill, &mut cx).is_ready());
    }
}
