//! Flush errors: which clients must still be told that a flush failed.
//!
//! After a failed flush, every write that completed before it may be lost. A later flush that succeeds does not show
//! it, because a device reports such a loss once. So on a shared device each failure is counted, and the next flush of
//! every client with unflushed writes fails once, even if it succeeds on the device. Linux reports write-back errors to
//! open files in the same way (`errseq_t`).
//!
//! Invariants: a flush succeeds only if no flush failed between the first write that it covers and its own completion;
//! a failure is reported to each cursor at most once, and only if its group had unflushed writes.
//!
//! Shape: connections whose flushes cover each other's writes, such as those of one client, form a [`FlushGroup`]; each
//! of them is a [`FlushCursor`]. A write costs two reads of counters that seldom change. Flushes are slow anyway and
//! take a lock.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, ErrorKind, Outcome};

/// The maximum number of groups of one device. Groups without cursors count, because they are kept for their unflushed
/// writes.
const MAX_GROUPS: usize = 1024;
/// The value of `since` without unflushed writes.
const CLEAN: u64 = u64::MAX;

/// A counter with cache lines of its own: every write reads it, and the locks beside it are taken by flushes.
#[derive(Default)]
#[repr(align(128))]
struct OwnLine(AtomicU64);

impl Deref for OwnLine {
    type Target = AtomicU64;

    fn deref(&self) -> &AtomicU64 {
        &self.0
    }
}

/// The failed flushes of one device, shared by all cores.
#[derive(Default)]
pub struct FlushErrors {
    /// The number of failures.
    count: OwnLine,
    /// The text of the last failure.
    last: Mutex<Option<String>>,
    groups: Mutex<Groups>,
}

#[derive(Default)]
struct Groups {
    by_name: BTreeMap<String, Arc<FlushGroup>>,
    /// The count of failures before the first unflushed write of all groups that were dropped for lack of room.
    dropped_since: Option<u64>,
    /// The count of failures before writes that clients may have sent to an earlier server of the device.
    earlier_since: Option<u64>,
}

impl Groups {
    /// The count of failures before the first unflushed write that a new group may have.
    fn inherited(&self) -> Option<u64> {
        self.dropped_since.into_iter().chain(self.earlier_since).min()
    }
}

/// Cursors whose flushes cover each other's writes.
pub struct FlushGroup {
    errors: Arc<FlushErrors>,
    /// The name of the client; `None` for a group of one cursor.
    name: Option<Box<str>>,
    /// The count of failures before the first write that no flush covers yet, or [`CLEAN`].
    since: OwnLine,
    state: Mutex<GroupState>,
}

#[derive(Default)]
struct GroupState {
    /// Flushes in flight by number, with the count of failures before the first write that each covers.
    in_flight: BTreeMap<u64, u64>,
    flushes: u64,
    /// The count after the last failure that may have lost writes of the group.
    lost_at: u64,
    /// The count of failures that was reported to each cursor.
    reported: BTreeMap<u64, u64>,
    /// The number of cursors so far.
    cursors: u64,
}

/// One connection of a client.
pub struct FlushCursor {
    group: Arc<FlushGroup>,
    number: u64,
}

/// A flush in flight. If it is dropped before it completes, it makes nothing durable.
pub struct FlushTicket<'a> {
    cursor: &'a FlushCursor,
    number: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FlushErrors {
    fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// Records that a flush failed, or a write with forced unit access. Call it before the request completes.
    pub fn record(&self, error: &Error) {
        *lock(&self.last) = Some(error.to_string());
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Records as a failed flush that an earlier server did not close the device cleanly, so that writes which it
    /// acknowledged may be lost. From now on every new client counts as one with unflushed writes, so its first flush
    /// fails once, until [`FlushErrors::forget_earlier`].
    pub fn unclean_start(&self, error: &Error) {
        lock(&self.groups).earlier_since = Some(self.count());
        self.record(error);
    }

    /// From now on new clients count as having no writes at an earlier server: those that had some have reconnected or
    /// given up by now.
    pub fn forget_earlier(&self) {
        lock(&self.groups).earlier_since = None;
    }

    /// A cursor in a group of its own, for a client that was not here before: it learns only about its own writes.
    pub fn alone(self: &Arc<Self>) -> FlushCursor {
        FlushGroup::new(self, None, None).join()
    }

    /// A cursor in the group of this name. The group outlives its last cursor while it has unflushed writes, so that a
    /// client that reconnects learns of their loss. At most 1024 groups are kept.
    pub fn join(self: &Arc<Self>, name: &str) -> FlushCursor {
        let mut groups = lock(&self.groups);
        if let Some(group) = groups.by_name.get(name) {
            return group.join();
        }
        // A client that was told of the loss at an earlier server, and reconnects, is not told again.
        let is_kept = groups.earlier_since.is_some();
        groups.by_name.retain(|_, group| is_kept || Arc::strong_count(group) > 1 || group.first_unflushed().is_some());
        if groups.by_name.len() >= MAX_GROUPS {
            // The group that is dropped here may belong to a client that joins later. So new groups inherit its
            // unflushed writes.
            let idle = |(_, group): &(&String, &Arc<FlushGroup>)| Arc::strong_count(group) == 1;
            if let Some(name) = groups.by_name.iter().find(idle).map(|(name, _)| name.clone()) {
                let first = groups.by_name.remove(&name).and_then(|group| group.first_unflushed());
                groups.dropped_since = groups.dropped_since.into_iter().chain(first).min();
            }
        }
        let group = FlushGroup::new(self, Some(name), groups.inherited());
        groups.by_name.insert(name.to_owned(), Arc::clone(&group));
        group.join()
    }

    fn writes_lost(&self) -> Error {
        let last = lock(&self.last).clone().unwrap_or_default();
        let reason = format!(
            "a flush failed after writes that were acknowledged and not flushed: these writes may be lost and must be written \
             again ({last})"
        );
        ErrorKind::Media { reason }.into()
    }
}

impl FlushGroup {
    fn new(errors: &Arc<FlushErrors>, name: Option<&str>, since: Option<u64>) -> Arc<FlushGroup> {
        let since = OwnLine(AtomicU64::new(since.unwrap_or(CLEAN)));
        Arc::new(FlushGroup { errors: Arc::clone(errors), name: name.map(Box::from), since, state: Mutex::default() })
    }

    fn join(self: &Arc<Self>) -> FlushCursor {
        let mut state = lock(&self.state);
        let is_clean = state.in_flight.is_empty() && self.since.load(Ordering::SeqCst) == CLEAN;
        // A cursor that was told but dropped before its next flush may not have received the report.
        let is_received = is_clean || state.reported.values().any(|reported| *reported >= state.lost_at);
        let reported = if is_received { state.lost_at } else { state.lost_at.saturating_sub(1) };
        state.cursors += 1;
        let number = state.cursors;
        state.reported.insert(number, reported);
        drop(state);
        FlushCursor { group: Arc::clone(self), number }
    }

    /// The count of failures before the first write that no flush has made durable.
    fn first_unflushed(&self) -> Option<u64> {
        let state = lock(&self.state);
        let since = Some(self.since.load(Ordering::SeqCst)).filter(|since| *since != CLEAN);
        state.in_flight.values().copied().chain(since).min()
    }

    /// Adds an unflushed write that no flush in flight covers. Requires the lock.
    fn add_unflushed(&self, since: u64) {
        self.since.store(self.since.load(Ordering::SeqCst).min(since), Ordering::SeqCst);
    }
}

impl FlushCursor {
    /// The client; `None` for a cursor in a group of its own.
    pub fn client(&self) -> Option<&str> {
        self.group.name.as_deref()
    }

    /// True if the cursor belongs to the device with these errors.
    pub fn is_of(&self, errors: &Arc<FlushErrors>) -> bool {
        Arc::ptr_eq(&self.group.errors, errors)
    }

    /// A volatile write starts. Returns the mark for [`FlushCursor::write_completed`].
    pub fn write_started(&self) -> u64 {
        self.group.errors.count()
    }

    /// Records that the write succeeded. Call it before the write is acknowledged.
    pub fn write_completed(&self, mark: u64) {
        if self.group.since.load(Ordering::SeqCst) > mark {
            let _state = lock(&self.group.state);
            self.group.add_unflushed(mark);
        }
    }

    /// Starts a flush.
    pub fn flush_started(&self) -> FlushTicket<'_> {
        let mut state = lock(&self.group.state);
        state.flushes += 1;
        let number = state.flushes;
        let since = self.group.since.swap(CLEAN, Ordering::SeqCst);
        if since != CLEAN {
            state.in_flight.insert(number, since);
        }
        drop(state);
        FlushTicket { cursor: self, number }
    }
}

impl FlushTicket<'_> {
    /// The outcome of the flush for the client, after the device has returned `outcome`.
    pub fn complete(self, outcome: Outcome) -> Outcome {
        let (group, errors) = (&self.cursor.group, &self.cursor.group.errors);
        let mut state = lock(&group.state);
        let state = &mut *state;
        let count = errors.count();
        let has_failed = |since: &u64| *since < count;
        let may_have_lost = match outcome {
            // It also covers the writes of earlier flushes that are still in flight.
            Ok(_) => {
                let later = state.in_flight.split_off(&(self.number + 1));
                std::mem::replace(&mut state.in_flight, later).values().any(has_failed)
            }
            Err(_) => {
                let since = group.since.load(Ordering::SeqCst);
                let may_have_lost = state.in_flight.values().any(has_failed) || has_failed(&since);
                if state.in_flight.remove(&self.number).is_some() {
                    group.add_unflushed(count);
                }
                may_have_lost
            }
        };
        if may_have_lost {
            state.lost_at = count;
        }
        let lost_at = state.lost_at;
        let Some(reported) = state.reported.get_mut(&self.cursor.number) else { return outcome };
        match outcome {
            Ok(_) if *reported < lost_at => {
                *reported = lost_at;
                Err(errors.writes_lost())
            }
            Ok(response) => Ok(response),
            Err(error) => {
                *reported = count;
                Err(error)
            }
        }
    }
}

impl Drop for FlushTicket<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.cursor.group.state);
        if let Some(since) = state.in_flight.remove(&self.number) {
            self.cursor.group.add_unflushed(since);
        }
    }
}

impl Drop for FlushCursor {
    fn drop(&mut self) {
        lock(&self.group.state).reported.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Response;

    fn write(cursor: &FlushCursor) {
        cursor.write_completed(cursor.write_started());
    }

    /// A flush that succeeds on the device; true if it succeeds for the client.
    fn flush(cursor: &FlushCursor) -> bool {
        cursor.flush_started().complete(Ok(Response::Done)).is_ok()
    }

    fn failed() -> Error {
        ErrorKind::Media { reason: "the disk said no".to_owned() }.into()
    }

    /// A flush that fails on the device.
    fn fail(cursor: &FlushCursor, errors: &FlushErrors) {
        let ticket = cursor.flush_started();
        errors.record(&failed());
        assert_eq!(ticket.complete(Err(failed())).unwrap_err(), failed(), "the client gets the error of the device");
    }

    #[test]
    fn each_cursor_with_unflushed_writes_is_told_once_and_no_other() {
        let errors = Arc::<FlushErrors>::default();
        let [first, second, idle, flushed] = [(); 4].map(|()| errors.alone());
        [&first, &second, &flushed].into_iter().for_each(write);
        assert!(flush(&flushed));
        fail(&first, &errors);
        assert!(flush(&first), "it was told");
        let lost = second.flush_started().complete(Ok(Response::Done)).unwrap_err();
        assert!(lost.to_string().contains("written again") && lost.to_string().contains("said no"), "{lost}");
        assert!(flush(&second) && flush(&idle) && flush(&flushed));
        write(&idle);
        assert!(flush(&idle), "it wrote after the failure");
    }

    #[test]
    fn after_an_unclean_start_the_first_flush_of_each_client_fails_once_and_of_none_that_comes_late() {
        let errors = Arc::<FlushErrors>::default();
        errors.unclean_start(&failed());
        assert!(flush(&errors.alone()), "no client had it before");
        let (host, export) = (errors.join("host"), errors.join("export"));
        for cursor in [&host, &export] {
            let lost = cursor.flush_started().complete(Ok(Response::Done)).unwrap_err();
            assert!(lost.to_string().contains("said no"), "{lost}");
            assert!(flush(cursor), "it was told");
        }
        drop(host);
        assert!(!flush(&errors.join("other")));
        let again = errors.join("host");
        assert!(flush(&again), "the same client, connected anew");
        // A client that never flushed gets the error at its first flush.
        let silent = errors.join("silent");
        write(&silent);
        errors.forget_earlier();
        assert!(!flush(&silent));
        let late = errors.join("late");
        write(&late);
        assert!(flush(&late) && flush(&errors.alone()));
        // Twin: after a clean start no client gets an error.
        let clean = Arc::<FlushErrors>::default();
        assert!(flush(&clean.join("host")) && flush(&clean.alone()));
    }

    #[test]
    fn each_failure_is_reported() {
        let errors = Arc::<FlushErrors>::default();
        let (one, other) = (errors.alone(), errors.alone());
        for _ in 0..3 {
            write(&other);
            fail(&one, &errors);
            assert!(!flush(&other) && flush(&other));
        }
        write(&other);
        fail(&one, &errors);
        fail(&one, &errors);
        assert!(!flush(&other) && flush(&other), "several at once");
        // Its own writes may also be lost by the next failure, until a flush succeeds.
        write(&one);
        fail(&one, &errors);
        fail(&other, &errors);
        assert!(!flush(&one) && flush(&one) && flush(&other));
    }

    #[test]
    fn a_group_shares_writes_and_each_cursor_is_told() {
        let errors = Arc::<FlushErrors>::default();
        let [one, two, three] = [(); 3].map(|()| errors.join("client"));
        write(&one);
        errors.record(&failed());
        assert!(!flush(&two), "a flush on any connection covers all");
        assert!(!flush(&one) && !flush(&three));
        assert!(flush(&one) && flush(&two) && flush(&three));
        assert!(flush(&errors.join("client")), "a later cursor had not written");
        write(&two);
        assert!(flush(&three));
        errors.record(&failed());
        assert!(flush(&one) && flush(&two), "the flush of another cursor covered it");
    }

    #[test]
    fn a_client_that_reconnects_is_told_of_its_lost_writes() {
        let errors = Arc::<FlushErrors>::default();
        let cursor = errors.join("client");
        write(&cursor);
        drop(cursor);
        errors.record(&failed());
        assert!(flush(&errors.join("other")));
        let back = errors.join("client");
        assert!(!flush(&back) && flush(&back));
        // It was told, but disconnected before its next flush.
        write(&back);
        fail(&back, &errors);
        drop(back);
        let again = errors.join("client");
        assert!(!flush(&again) && flush(&again));
        drop(again);
        assert!(flush(&errors.join("client")));
    }

    #[test]
    fn a_flush_covers_only_the_writes_before_it() {
        let errors = Arc::<FlushErrors>::default();
        let cursor = errors.alone();
        write(&cursor);
        let ticket = cursor.flush_started();
        write(&cursor);
        assert!(ticket.complete(Ok(Response::Done)).is_ok());
        errors.record(&failed());
        assert!(!flush(&cursor), "the second write was not flushed");
        // A write in flight while a flush fails may be lost with it.
        let mark = cursor.write_started();
        errors.record(&failed());
        assert!(flush(&cursor));
        cursor.write_completed(mark);
        assert!(!flush(&cursor) && flush(&cursor));
    }

    #[test]
    fn a_flush_that_is_cancelled_or_does_not_reach_the_device_makes_nothing_durable() {
        let errors = Arc::<FlushErrors>::default();
        let cursor = errors.alone();
        write(&cursor);
        drop(cursor.flush_started());
        let unreachable: Error = ErrorKind::Unreachable { reason: "away".to_owned() }.into();
        assert!(cursor.flush_started().complete(Err(unreachable)).is_err());
        errors.record(&failed());
        assert!(!flush(&cursor) && flush(&cursor));
    }

    #[test]
    fn concurrent_flushes_hide_nothing_from_each_other() {
        let errors = Arc::<FlushErrors>::default();
        let [one, two] = [(); 2].map(|()| errors.join("client"));
        write(&one);
        let (early, late) = (one.flush_started(), two.flush_started());
        errors.record(&failed());
        assert!(late.complete(Ok(Response::Done)).is_err(), "it covers the writes of the other one");
        assert!(early.complete(Ok(Response::Done)).is_err());
        assert!(flush(&one) && flush(&two));
    }

    #[test]
    fn groups_are_bounded_and_clients_of_dropped_groups_are_told_too() {
        let errors = Arc::<FlushErrors>::default();
        for i in 0..2 * MAX_GROUPS {
            let cursor = errors.join(&format!("clean {i}"));
            write(&cursor);
            assert!(flush(&cursor));
        }
        for i in 0..=MAX_GROUPS {
            write(&errors.join(&format!("host {i:04}")));
        }
        assert!(lock(&errors.groups).by_name.len() <= MAX_GROUPS);
        errors.record(&failed());
        for i in 0..=MAX_GROUPS {
            assert!(!flush(&errors.join(&format!("host {i:04}"))), "{i}");
        }
    }
}
