//! Asynchronous events of a controller, and the outstanding requests of its host that wait for them.
//!
//! Invariants: an event is reported only if the host has enabled it, and then not again until the host has read its log
//! page without Retain Asynchronous Event. No event is lost that occurs before a request arrives, or on another core
//! while a page is made: reading the page acknowledges only what had been counted before. At most [`EVENT_REQUESTS`]
//! requests are outstanding.
//!
//! Shape: any core may post events, while requests wait on the admin queue's core, so the state is behind a lock, and a
//! waiting task leaves a waker. No I/O command takes this lock.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use sealblock_protocols_nvme::StatusCode;
use sealblock_protocols_nvme::features::{AsynchronousEvent, EventConfiguration, LbaStatusInterval};
use sealblock_protocols_nvme::logs::{LogPage, changed_namespaces};

/// The maximum number of outstanding Asynchronous Event Requests (AERL).
pub(crate) const EVENT_REQUESTS: u16 = 4;
/// Entries of the Changed Attached Namespace List; one more means all namespaces.
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
    /// The occurrences that were reported, or shown by a log page that the host has read.
    reported_counts: [u64; KINDS.len()],
    /// True if the event was reported and its log page not read since.
    masked: [bool; KINDS.len()],
    changed: BTreeSet<u32>,
    /// When bad blocks were last reported.
    last_damage_report: Option<Instant>,
    /// Requests by command identifier.
    requests: HashMap<u16, Option<Waker>>,
}

/// Occurrences of each event at some time.
#[derive(Clone, Copy, Default)]
pub(crate) struct EventCounts([u64; KINDS.len()]);

/// The state of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EventPoll {
    /// Completes with this event.
    Event(AsynchronousEvent),
    /// Aborted, or the controller was reset.
    Aborted,
    /// Waits until this time, because of the reporting interval.
    NotBefore(Instant),
}

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

    /// The occurrences until now. Read them before making a page, which then shows all of them.
    pub(crate) fn counts(&self) -> EventCounts {
        self.lock().counts
    }

    /// Acknowledges the events up to `shown` of a page that the host has read without Retain Asynchronous Event.
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

    /// Adds a request.
    ///
    /// # Errors
    /// Asynchronous Event Request Limit Exceeded.
    pub(crate) fn request(&self, cid: u16) -> Result<(), StatusCode> {
        let mut state = self.lock();
        if state.requests.len() >= usize::from(EVENT_REQUESTS) {
            return Err(StatusCode::AER_LIMIT_EXCEEDED);
        }
        state.requests.insert(cid, None);
        Ok(())
    }

    /// Aborts a request; true if it was outstanding.
    pub(crate) fn abort(&self, cid: u16) -> bool {
        let request = self.lock().requests.remove(&cid);
        match request {
            Some(Some(waker)) => waker.wake(),
            Some(None) => {}
            None => return false,
        }
        true
    }

    /// Aborts all requests and drops all events, because the controller is reset or has ended.
    pub(crate) fn reset(&self) {
        self.config.store(0, Ordering::Relaxed);
        self.interval.store(0, Ordering::Relaxed);
        let state = std::mem::take(&mut *self.lock());
        state.requests.into_values().flatten().for_each(Waker::wake);
    }

    /// Ready when the request completes or must wait for the reporting interval.
    pub(crate) fn poll(&self, cid: u16, now: Instant, cx: &Context<'_>) -> Poll<EventPoll> {
        let mut state = self.lock();
        if !state.requests.contains_key(&cid) {
            return Poll::Ready(EventPoll::Aborted);
        }
        let config = EventConfiguration::from_bits_retain(self.config());
        for (i, (event, bit)) in KINDS.into_iter().enumerate() {
            if state.counts.0[i] <= state.reported_counts[i] || state.masked[i] || !config.contains(bit) {
                continue;
            }
            if event == AsynchronousEvent::LBA_STATUS {
                let interval =
                    Duration::from_millis(100) * u32::from(LbaStatusInterval::from_bits(self.interval()).report_100ms);
                if let Some(due) = state.last_damage_report.map(|reported| reported + interval).filter(|due| *due > now)
                {
                    return Poll::Ready(EventPoll::NotBefore(due));
                }
                state.last_damage_report = Some(now);
            }
            (state.reported_counts[i], state.masked[i]) = (state.counts.0[i], true);
            state.requests.remove(&cid);
            return Poll::Ready(EventPoll::Event(event));
        }
        state.requests.insert(cid, Some(cx.waker().clone()));
        Poll::Pending
    }

    fn wake(&self) {
        let mut state = self.lock();
        let wakers: Vec<Waker> = state.requests.values_mut().filter_map(Option::take).collect();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(events: &AsyncEvents, cid: u16, now: Instant) -> Poll<EventPoll> {
        events.poll(cid, now, &Context::from_waker(Waker::noop()))
    }

    fn event(event: AsynchronousEvent) -> Poll<EventPoll> {
        Poll::Ready(EventPoll::Event(event))
    }

    #[test]
    fn an_event_is_reported_once_until_its_page_is_read() {
        let (events, now) = (AsyncEvents::default(), Instant::now());
        events.configure(SUPPORTED_EVENTS.bits());
        events.request(1).unwrap();
        assert!(poll(&events, 1, now).is_pending());
        events.damage_found();
        assert_eq!(poll(&events, 1, now), event(AsynchronousEvent::LBA_STATUS));
        events.request(2).unwrap();
        events.damage_found();
        assert!(poll(&events, 2, now).is_pending(), "masked");
        events.page_was_read(LogPage::ErrorInformation, events.counts());
        assert!(poll(&events, 2, now).is_pending(), "another page");
        events.page_was_read(LogPage::LbaStatus, events.counts());
        assert!(poll(&events, 2, now).is_pending(), "the page that was read showed it");
        events.damage_found();
        assert_eq!(poll(&events, 2, now), event(AsynchronousEvent::LBA_STATUS));
    }

    #[test]
    fn events_after_a_page_was_made_are_reported_and_those_it_shows_are_not() {
        let (events, now) = (AsyncEvents::default(), Instant::now());
        events.configure(SUPPORTED_EVENTS.bits());
        events.request(1).unwrap();
        events.damage_found();
        // The page is made, and shows it.
        let shown = events.counts();
        events.page_was_read(LogPage::LbaStatus, shown);
        assert!(poll(&events, 1, now).is_pending());
        events.damage_found();
        let shown = events.counts();
        events.damage_found();
        events.page_was_read(LogPage::LbaStatus, shown);
        assert_eq!(poll(&events, 1, now), event(AsynchronousEvent::LBA_STATUS), "the page does not show the last");
        // The host reads the page of an event, and another happens meanwhile.
        events.request(2).unwrap();
        let shown = events.counts();
        events.namespace_changed(3);
        events.damage_found();
        events.page_was_read(LogPage::LbaStatus, shown);
        events.page_was_read(LogPage::ChangedNamespaces, shown);
        assert_eq!(poll(&events, 2, now), event(AsynchronousEvent::NAMESPACE_CHANGED));
        events.request(3).unwrap();
        assert_eq!(poll(&events, 3, now), event(AsynchronousEvent::LBA_STATUS));
    }

    #[test]
    fn disabled_events_are_kept_until_enabled() {
        let (events, now) = (AsyncEvents::default(), Instant::now());
        events.request(1).unwrap();
        events.namespace_changed(7);
        assert!(poll(&events, 1, now).is_pending());
        events.configure(EventConfiguration::NAMESPACE_ATTRIBUTE.bits());
        assert_eq!(poll(&events, 1, now), event(AsynchronousEvent::NAMESPACE_CHANGED));
        assert_eq!(events.take_changed()[..8], [7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(events.take_changed()[..4], [0; 4]);
        (1..=1025).for_each(|nsid| events.namespace_changed(nsid));
        assert_eq!(events.take_changed()[..4], [0xFF; 4]);
    }

    #[test]
    fn reports_of_damage_keep_their_interval() {
        let (events, now) = (AsyncEvents::default(), Instant::now());
        events.configure(SUPPORTED_EVENTS.bits());
        events.set_interval(0x0009_0005);
        assert_eq!(events.interval(), 5);
        events.request(1).unwrap();
        events.damage_found();
        assert_eq!(poll(&events, 1, now), event(AsynchronousEvent::LBA_STATUS));
        events.page_was_read(LogPage::LbaStatus, events.counts());
        events.request(1).unwrap();
        events.damage_found();
        let due = now + Duration::from_millis(500);
        assert_eq!(poll(&events, 1, now), Poll::Ready(EventPoll::NotBefore(due)));
        assert_eq!(poll(&events, 1, due), event(AsynchronousEvent::LBA_STATUS));
    }

    #[test]
    fn requests_are_limited_and_can_be_aborted() {
        let (events, now) = (AsyncEvents::default(), Instant::now());
        (0..EVENT_REQUESTS).for_each(|cid| events.request(cid).unwrap());
        assert_eq!(events.request(9), Err(StatusCode::AER_LIMIT_EXCEEDED));
        assert!(events.abort(2) && !events.abort(2));
        assert_eq!(poll(&events, 2, now), Poll::Ready(EventPoll::Aborted));
        assert!(poll(&events, 1, now).is_pending());
        events.reset();
        assert_eq!(poll(&events, 1, now), Poll::Ready(EventPoll::Aborted));
    }
}
