//! Requests of a connection that wait for their reply, or for room on the connection.

use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Waker;

use crate::changes::{Changes, SentChange};

/// State of an entry.
enum RequestState<R> {
    Free,
    /// In flight.
    Waiting(Option<Waker>),
    /// In flight; its future was dropped.
    Abandoned,
    /// Completed; its future has not read the reply yet.
    Done(R),
    /// The connection ended before the request did.
    Lost,
}

struct Entry<R> {
    state: RequestState<R>,
    /// Tick at which the request was submitted; `None` for a request without a timeout.
    sent_tick: Option<u32>,
    /// The change, while the request is in flight.
    change: Option<SentChange>,
}

/// Progress of a request.
pub(crate) enum RequestProgress<R> {
    /// The request is in flight.
    InFlight,
    /// The request completed.
    Done(R),
    /// The connection ended before the request completed.
    Lost,
}

/// The requests of a connection that are in flight, and those whose future has not read the reply yet.
///
/// Invariant: for each request in flight, `by_place` maps its place in the protocol's core to its entry.
pub(crate) struct InFlight<R> {
    entries: Vec<Entry<R>>,
    free: Vec<usize>,
    by_place: Vec<usize>,
    tick: u32,
}

impl<R> InFlight<R> {
    pub(crate) fn new() -> InFlight<R> {
        InFlight { entries: Vec::new(), free: Vec::new(), by_place: Vec::new(), tick: 0 }
    }

    /// Adds a request that was submitted; returns its entry.
    pub(crate) fn insert(&mut self, place: usize, has_no_timeout: bool, change: Option<SentChange>) -> usize {
        let since = (!has_no_timeout).then_some(self.tick);
        let new = Entry { state: RequestState::Waiting(None), sent_tick: since, change };
        let entry = match self.free.pop() {
            Some(entry) => {
                self.entries[entry] = new;
                entry
            }
            None => {
                self.entries.push(new);
                self.entries.len() - 1
            }
        };
        if self.by_place.len() <= place {
            self.by_place.resize(place + 1, 0);
        }
        self.by_place[place] = entry;
        entry
    }

    /// Stores the reply to the request at `place`; returns the waker of its future, and its change, which has ended.
    pub(crate) fn finish(&mut self, place: usize, reply: R) -> (Option<Waker>, Option<SentChange>) {
        let entry = self.by_place[place];
        let change = self.entries[entry].change.take();
        let state = &mut self.entries[entry].state;
        let waker = match std::mem::replace(state, RequestState::Free) {
            RequestState::Waiting(waker) => {
                *state = RequestState::Done(reply);
                waker
            }
            RequestState::Abandoned => {
                self.free.push(entry);
                None
            }
            other @ (RequestState::Free | RequestState::Done(_) | RequestState::Lost) => {
                *state = other;
                None
            }
        };
        (waker, change)
    }

    /// Polls a request: frees the entry of one that ended, keeps the waker for one in flight.
    pub(crate) fn poll(&mut self, entry: usize, waker: &Waker) -> RequestProgress<R> {
        let state = &mut self.entries[entry].state;
        match std::mem::replace(state, RequestState::Free) {
            RequestState::Waiting(before) => {
                let kept = before.filter(|before| before.will_wake(waker)).unwrap_or_else(|| waker.clone());
                *state = RequestState::Waiting(Some(kept));
                RequestProgress::InFlight
            }
            RequestState::Done(reply) => {
                self.free.push(entry);
                RequestProgress::Done(reply)
            }
            RequestState::Lost | RequestState::Abandoned | RequestState::Free => {
                self.free.push(entry);
                RequestProgress::Lost
            }
        }
    }

    /// Marks the request's future as dropped. The caller must drop the returned state outside of any borrow.
    pub(crate) fn abandon(&mut self, entry: usize) -> impl Sized + use<R> {
        let state = &mut self.entries[entry].state;
        let was = std::mem::replace(state, RequestState::Free);
        if matches!(was, RequestState::Waiting(_)) {
            *state = RequestState::Abandoned;
        } else {
            self.free.push(entry);
        }
        was
    }

    /// Marks all requests in flight as lost, and their changes as late; returns the wakers of their futures, and the
    /// list of their changes, if there were any.
    pub(crate) fn lose_all(&mut self) -> (Vec<Waker>, Option<Rc<Changes>>) {
        let (mut wakers, mut changes) = (Vec::new(), None);
        for (i, entry) in self.entries.iter_mut().enumerate() {
            if let Some(change) = entry.change.take() {
                changes = Some(change.lost());
            }
            match std::mem::replace(&mut entry.state, RequestState::Free) {
                RequestState::Waiting(waker) => {
                    entry.state = RequestState::Lost;
                    wakers.extend(waker);
                }
                RequestState::Abandoned => self.free.push(i),
                other => entry.state = other,
            }
        }
        (wakers, changes)
    }

    /// Advances the tick. True if a request has been in flight for more than `max_ticks` ticks.
    pub(crate) fn advance_tick(&mut self, max_ticks: u32) -> bool {
        self.tick = self.tick.wrapping_add(1);
        self.entries.iter().any(|entry| {
            let in_flight = matches!(entry.state, RequestState::Waiting(_) | RequestState::Abandoned);
            in_flight && entry.sent_tick.is_some_and(|since| self.tick.wrapping_sub(since) > max_ticks)
        })
    }
}

/// Requests that wait for room, first come, first served.
#[derive(Default)]
pub(crate) struct FifoWaiters {
    waiting: VecDeque<(u64, Waker)>,
    tickets: u64,
}

impl FifoWaiters {
    /// The number of waiting requests.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Adds a request at the end of the queue; returns its ticket.
    pub(crate) fn join(&mut self, waker: Waker) -> u64 {
        self.tickets += 1;
        self.waiting.push_back((self.tickets, waker));
        self.tickets
    }

    /// True if the request with this ticket is the first.
    pub(crate) fn is_first(&self, ticket: u64) -> bool {
        self.waiting.front().is_some_and(|(first, _)| *first == ticket)
    }

    /// Removes the request with this ticket.
    pub(crate) fn leave(&mut self, ticket: u64) -> Option<Waker> {
        let at = self.waiting.iter().position(|(other, _)| *other == ticket)?;
        self.waiting.remove(at).map(|(_, waker)| waker)
    }

    /// Replaces the waker of a ticket; returns the previous one, which the caller must drop outside of any borrow.
    pub(crate) fn keep_waker(&mut self, ticket: u64, waker: &Waker) -> Option<Waker> {
        let (_, kept) = self.waiting.iter_mut().find(|(other, _)| *other == ticket)?;
        if kept.will_wake(waker) { None } else { Some(std::mem::replace(kept, waker.clone())) }
    }

    /// The waker of the first request.
    pub(crate) fn first_waker(&self) -> Option<Waker> {
        self.waiting.front().map(|(_, waker)| waker.clone())
    }

    /// The wakers of all requests.
    pub(crate) fn wakers(&self) -> Vec<Waker> {
        self.waiting.iter().map(|(_, waker)| waker.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_keep_their_order_and_dropped_ones_leave_the_queue() {
        let mut waiters = FifoWaiters::default();
        let [a, b, c] = [(); 3].map(|()| waiters.join(Waker::noop().clone()));
        assert!(waiters.is_first(a) && !waiters.is_first(b));
        assert!(waiters.leave(b).is_some() && waiters.leave(a).is_some());
        assert!(waiters.is_first(c));
        assert_eq!(waiters.len(), 1);
    }

    #[test]
    fn a_request_ends_once_and_its_entry_is_used_again() {
        let (mut requests, waker) = (InFlight::new(), Waker::noop());
        let (first, second) = (requests.insert(5, false, None), requests.insert(0, false, None));
        assert!(matches!(requests.poll(first, waker), RequestProgress::InFlight));
        assert!(requests.finish(5, "done").0.is_some(), "the future is woken");
        assert!(matches!(requests.poll(first, waker), RequestProgress::Done("done")));
        drop(requests.abandon(second));
        assert!(requests.finish(0, "unread").0.is_none());
        assert_eq!(
            [requests.insert(1, false, None), requests.insert(2, false, None)].map(|entry| entry < 2),
            [true; 2]
        );
        drop(requests.lose_all());
        assert!(matches!(requests.poll(first, waker), RequestProgress::Lost));
    }

    #[test]
    fn only_a_request_with_a_timeout_is_late() {
        let mut requests = InFlight::<()>::new();
        requests.insert(0, true, None);
        assert!((0..3).all(|_| !requests.advance_tick(1)));
        requests.insert(1, false, None);
        assert!(!requests.advance_tick(1) && requests.advance_tick(1));
    }
}
