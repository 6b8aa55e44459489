//! Asynchronous events of a controller.
//!
//! Invariants: an event is reported only if the host has enabled it, and after that not again until the host has read
//! its log page without Retain Asynchronous Event. No event is lost if it occurs before a request arrives, or on
//! another core while a page is made, because reading the page acknowledges only what had been counted before.
//!
//! Shape: any core may post events, while the requests of the host wait on the admin queue's core ([`EventRequests`]).
//! So the state is behind a lock, and the task that waits for all requests leaves its waker there. No I/O command takes
//! this lock.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use sealblock_protocols_nvme::features::{AsynchronousEvent, EventConfiguration, LbaStatusInterval};
use sealblock_protocols_nvme::logs::{LogPage, changed_namespaces};
use sealblock_protocols_nvme::{Command, StatusCode};
use sealblock_protocols_nvme_tcp::target::Token;

/// The maximum number of outstanding Asynchronous Event Requests (AERL).
pub(crate) const EVENT_REQUESTS: u16 = 4;
/// The maximum number of entries in the Changed Attached Namespace List; one more means all namespaces.
const MAX_CHANGED_NAMESPACES: usize = 1024;
/// The events, with the bit that enables each.
const KINDS: [(AsynchronousEvent, EventConfiguration); 4] = [
    (AsynchronousEvent::NAMESPACE_CHANGED, EventConfiguration::NAMESPACE_ATTRIBUTE),
    (AsynchronousEvent::LBA_STATUS, EventConfiguration::LBA_STATUS),
    (AsynchronousEvent::DISCOVERY_CHANGED, EventConfiguration::DISCOVERY_LOG_CHANGE),
    (AsynchronousEvent::RELIABILITY, EventConfiguration::RELIABILITY),
];

/// OAES: the events that a controller with namespaces supports.
pub(crate) const SUPPORTED_EVENTS: EventConfiguration =
    EventConfiguration::NAMESPACE_ATTRIBUTE.union(EventConfiguration::LBA_STATUS);

/// The events of one controller.
#[derive(Default)]
pub(crate) struct AsyncEvents {
    config: AtomicU32,
    /// Feature LBA Status Information Attributes, as its dword.
    interval: AtomicU32,
    state: Mutex<EventState>,
}

#[derive(Default)]
struct EventState {
    /// Occurrences of each event, by index in `KINDS`.
    counts: EventCounts,
    /// The occurrences that were reported, or that were shown by a log page that the host has read.
    reported_counts: [u64; KINDS.len()],
    /// True if the event was reported and its log page has not been read since.
    masked: [bool; KINDS.len()],
    changed: BTreeSet<u32>,
    /// When bad blocks were last reported.
    last_damage_report: Option<Instant>,
    /// The task that has requests, or will get some.
    waiting: Option<Waker>,
}

/// The occurrences of each event at some time.
#[derive(Clone, Copy, Default)]
pub(crate) struct EventCounts([u64; KINDS.len()]);

impl AsyncEvents {
    fn lock(&self) -> MutexGuard<'_, EventState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value of feature Asynchronous Event Configuration.
    pub(crate) fn config(&self) -> u32 {
        self.config.load(Ordering::Relaxed)
    }

    /// Enables and disables events.
    pub(crate) fn configure(&self, dword: u32) {
        self.config.store(dword, Ordering::Relaxed);
        self.wake();
    }

    /// The value of feature LBA Status Information Attributes.
    pub(crate) fn interval(&self) -> u32 {
        self.interval.load(Ordering::Relaxed)
    }

    /// Sets the minimum time between two reports of bad blocks. The controller owns LSIPI, which is 0.
    pub(crate) fn set_interval(&self, dword: u32) {
        let asked = LbaStatusInterval::from_bits(dword);
        self.interval.store(LbaStatusInterval { poll_100ms: 0, ..asked }.bits(), Ordering::Relaxed);
        self.wake();
    }

    /// Counts newly found bad blocks.
    pub(crate) fn damage_found(&self) {
        self.lock().counts.0[1] += 1;
        self.wake();
    }

    /// Counts a change of the discovery log.
    pub(crate) fn discovery_changed(&self) {
        self.lock().counts.0[2] += 1;
        self.wake();
    }

    /// Counts that copies of a namespace's blocks went offline or out of sync.
    pub(crate) fn reliability_degraded(&self) {
        self.lock().counts.0[3] += 1;
        self.wake();
    }

    /// Counts a change of a namespace's Identify data.
    pub(crate) fn namespace_changed(&self, nsid: u32) {
        {
            let mut state = self.lock();
            state.counts.0[0] += 1;
            if state.changed.len() <= MAX_CHANGED_NAMESPACES {
                state.changed.insert(nsid);
            }
        }
        self.wake();
    }

    /// Returns the Changed Attached Namespace List, and empties it.
    pub(crate) fn take_changed(&self) -> [u8; 4096] {
        let changed: Vec<u32> = std::mem::take(&mut self.lock().changed).into_iter().collect();
        changed_namespaces(&changed)
    }

    /// The occurrences so far. Call this before making a page, which then shows all of them.
    pub(crate) fn counts(&self) -> EventCounts {
        self.lock().counts
    }

    /// Acknowledges the events up to `shown`, after the host has read their page without Retain Asynchronous Event.
    pub(crate) fn page_was_read(&self, page: LogPage, shown: EventCounts) {
        {
            let mut state = self.lock();
            for (i, (event, _)) in KINDS.iter().enumerate() {
                if event.log_page == page.code() {
                    state.reported_counts[i] = state.reported_counts[i].max(shown.0[i]);
                    state.masked[i] = false;
                }
            }
        }
        self.wake();
    }

    /// Drops all events, because the controller is reset or has ended.
    pub(crate) fn reset(&self) {
        self.config.store(0, Ordering::Relaxed);
        self.interval.store(0, Ordering::Relaxed);
        let waiting = {
            let mut state = self.lock();
            let waiting = state.waiting.take();
            *state = EventState::default();
            waiting
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Wakes this task when something changes.
    pub(crate) fn listen(&self, cx: &Context<'_>) {
        let before = self.lock().waiting.replace(cx.waker().clone());
        drop(before);
    }

    /// Takes an event to be reported now. If an event waits for the reporting interval, the error has the time at which
    /// it is due.
    pub(crate) fn take(&self, now: Instant) -> Result<AsynchronousEvent, Option<Instant>> {
        let mut state = self.lock();
        let config = EventConfiguration::from_bits_retain(self.config());
        let mut due = None;
        for (i, (event, bit)) in KINDS.into_iter().enumerate() {
            if state.counts.0[i] <= state.reported_counts[i] || state.masked[i] || !config.contains(bit) {
                continue;
            }
            if event == AsynchronousEvent::LBA_STATUS {
                let interval =
                    Duration::from_millis(100) * u32::from(LbaStatusInterval::from_bits(self.interval()).report_100ms);
                due = state.last_damage_report.map(|reported| reported + interval).filter(|due| *due > now);
                if due.is_some() {
                    continue;
                }
                state.last_damage_report = Some(now);
            }
            (state.reported_counts[i], state.masked[i]) = (state.counts.0[i], true);
            return Ok(event);
        }
        Err(due)
    }

    /// Wakes the task that has requests.
    pub(crate) fn wake(&self) {
        let waiting = self.lock().waiting.take();
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// The outstanding requests of one admin queue, oldest first: at most [`EVENT_REQUESTS`], whatever identifiers they
/// have.
#[derive(Default)]
pub(crate) struct EventRequests {
    waiting: RefCell<VecDeque<(Token, Command)>>,
    /// True if there was a request before.
    is_known: Cell<bool>,
}

impl EventRequests {
    /// Adds a request; true if it is the first ever.
    ///
    /// # Errors
    /// Asynchronous Event Request Limit Exceeded.
    pub(crate) fn add(&self, token: Token, command: &Command) -> Result<bool, StatusCode> {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.len() >= usize::from(EVENT_REQUESTS) {
            return Err(StatusCode::AER_LIMIT_EXCEEDED);
        }
        waiting.push_back((token, *command));
        Ok(!self.is_known.replace(true))
    }

    /// Removes the request with this command identifier: it is aborted, or another command uses the identifier.
    pub(crate) fn take(&self, cid: u16) -> Option<(Token, Command)> {
        let mut waiting = self.waiting.borrow_mut();
        let at = waiting.iter().position(|(_, command)| command.cid.get() == cid)?;
        waiting.remove(at)
    }

    /// Removes the oldest request.
    pub(crate) fn take_oldest(&self) -> Option<(Token, Command)> {
        self.waiting.borrow_mut().pop_front()
    }

    /// Removes all requests.
    pub(crate) fn take_all(&self) -> impl Iterator<Item = Token> + use<> {
        self.waiting.take().into_iter().map(|(token, _)| token)
    }

    /// True if no request is outstanding.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.borrow().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enabled() -> (AsyncEvents, Instant) {
        let events = AsyncEvents::default();
        events.configure(SUPPORTED_EVENTS.bits());
        (events, Instant::now())
    }

    const NOTHING: Result<AsynchronousEvent, Option<Instant>> = Err(None);

    #[test]
    fn an_event_is_reported_once_until_its_page_is_read() {
        let (events, now) = enabled();
        assert_eq!(events.take(now), NOTHING);
        events.damage_found();
        assert_eq!(events.take(now), Ok(AsynchronousEvent::LBA_STATUS));
        events.damage_found();
        assert_eq!(events.take(now), NOTHING, "masked");
        events.page_was_read(LogPage::ErrorInformation, events.counts());
        assert_eq!(events.take(now), NOTHING, "another page");
        events.page_was_read(LogPage::LbaStatus, events.counts());
        assert_eq!(events.take(now), NOTHING, "the page that was read showed it");
        events.damage_found();
        assert_eq!(events.take(now), Ok(AsynchronousEvent::LBA_STATUS));
    }

    #[test]
    fn events_after_a_page_was_made_are_reported_and_those_it_shows_are_not() {
        let (events, now) = enabled();
        events.damage_found();
        // The page is made now, and shows the event.
        let shown = events.counts();
        events.page_was_read(LogPage::LbaStatus, shown);
        assert_eq!(events.take(now), NOTHING);
        events.damage_found();
        let shown = events.counts();
        events.damage_found();
        events.page_was_read(LogPage::LbaStatus, shown);
        assert_eq!(events.take(now), Ok(AsynchronousEvent::LBA_STATUS), "the page does not show the last");
        // While the host reads the page of an event, another event occurs.
        let shown = events.counts();
        events.namespace_changed(3);
        events.damage_found();
        events.page_was_read(LogPage::LbaStatus, shown);
        events.page_was_read(LogPage::ChangedNamespaces, shown);
        assert_eq!(events.take(now), Ok(AsynchronousEvent::NAMESPACE_CHANGED));
        assert_eq!(events.take(now), Ok(AsynchronousEvent::LBA_STATUS));
    }

    #[test]
    fn disabled_events_are_kept_until_enabled() {
        let (events, now) = (AsyncEvents::default(), Instant::now());
        events.namespace_changed(7);
        assert_eq!(events.take(now), NOTHING);
        events.configure(EventConfiguration::NAMESPACE_ATTRIBUTE.bits());
        assert_eq!(events.take(now), Ok(AsynchronousEvent::NAMESPACE_CHANGED));
        assert_eq!(events.take_changed()[..8], [7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(events.take_changed()[..4], [0; 4]);
        (1..=1025).for_each(|nsid| events.namespace_changed(nsid));
        assert_eq!(events.take_changed()[..4], [0xFF; 4]);
    }

    #[test]
    fn reports_of_damage_keep_their_interval_and_other_events_do_not_wait_for_it() {
        let (events, now) = enabled();
        events.set_interval(0x0009_0005);
        assert_eq!(events.interval(), 5);
        events.damage_found();
        assert_eq!(events.take(now), Ok(AsynchronousEvent::LBA_STATUS));
        events.page_was_read(LogPage::LbaStatus, events.counts());
        events.damage_found();
        let due = now + Duration::from_millis(500);
        assert_eq!(events.take(now), Err(Some(due)));
        events.namespace_changed(1);
        assert_eq!(events.take(now), Ok(AsynchronousEvent::NAMESPACE_CHANGED));
        assert_eq!(events.take(due), Ok(AsynchronousEvent::LBA_STATUS));
        events.damage_found();
        events.reset();
        assert_eq!((events.take(due), events.config(), events.interval()), (NOTHING, 0, 0));
    }
}
