//! Who is still to be told that a flush failed.
//!
//! After a flush has failed, what anybody wrote before it may be lost, and a later flush that succeeds says nothing about that:
//! a device reports such a loss once. So where several askers share a device each failure is counted, and every asker that
//! had writes which no flush had vouched for is told by its own next flush, once, also when that succeeds at the device. Linux
//! keeps the errors of write-back for open files in the same way (`errseq_t`).
//!
//! Invariants: a flush is answered with success only if none failed between the first write that it vouches for and its own
//! end; a failure is told to a member of a group at most once, and only if the group had such writes.
//!
//! Shape: askers that take each other's writes and flushes for their own, as the connections of one client do, are one
//! [`FlushGroup`]; each of them is a [`FlushCursor`]. What a write costs is two reads of counters that seldom change. Flushes
//! are slow anyway and take a lock.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, ErrorKind, Outcome};

/// Groups of one device that are remembered although they have no members, because they have writes that were not flushed.
const MOST_GROUPS: usize = 1024;
/// No write is unflushed.
const CLEAN: u64 = u64::MAX;

/// The failed flushes of one device, shared by all cores.
#[derive(Default)]
pub struct FlushErrors {
    /// How many there were.
    count: AtomicU64,
    last: Mutex<Option<String>>,
    groups: Mutex<Groups>,
}

#[derive(Default)]
struct Groups {
    by_name: BTreeMap<String, Arc<FlushGroup>>,
    /// The first unflushed write of a group that was forgotten.
    forgotten: Option<u64>,
}

/// Askers that take each other's writes and flushes for their own.
pub struct FlushGroup {
    errors: Arc<FlushErrors>,
    /// What the client is called; nothing for an asker of its own.
    name: Option<Box<str>>,
    /// The count of failures before the first write that no flush has begun to vouch for, or [`CLEAN`].
    since: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Flushes under way, by number, and the count before the first write that each is to vouch for.
    flights: BTreeMap<u64, u64>,
    flushes: u64,
    /// The count after the last failure that befell unflushed writes of the group.
    lost: u64,
    /// How far each member was told.
    told: BTreeMap<u64, u64>,
    members: u64,
}

/// One asker.
pub struct FlushCursor {
    group: Arc<FlushGroup>,
    number: u64,
}

/// A flush under way. Dropped before its end, it has vouched for nothing.
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

    /// A flush failed, or a write that was to be durable at once: to be told before whoever asked for it is answered.
    pub fn record(&self, error: &Error) {
        *lock(&self.last) = Some(error.to_string());
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// A new asker of its own.
    pub fn alone(self: &Arc<Self>) -> FlushCursor {
        FlushGroup::new(self, None, None).join()
    }

    /// A new asker of the group of this name. The group stays after its last member for as long as it has unflushed writes, so
    /// that a client that comes back learns what befell them; at most 1024 such are told apart.
    pub fn join(self: &Arc<Self>, name: &str) -> FlushCursor {
        let mut groups = lock(&self.groups);
        if let Some(group) = groups.by_name.get(name) {
            return group.join();
        }
        groups.by_name.retain(|_, group| Arc::strong_count(group) > 1 || group.first_unflushed().is_some());
        if groups.by_name.len() >= MOST_GROUPS {
            // Whoever comes anew may be one of those that are forgotten here.
            let idle = |(_, group): &(&String, &Arc<FlushGroup>)| Arc::strong_count(group) == 1;
            if let Some(name) = groups.by_name.iter().find(idle).map(|(name, _)| name.clone()) {
                let first = groups.by_name.remove(&name).and_then(|group| group.first_unflushed());
                groups.forgotten = groups.forgotten.into_iter().chain(first).min();
            }
        }
        let group = FlushGroup::new(self, Some(name), groups.forgotten);
        groups.by_name.insert(name.to_owned(), Arc::clone(&group));
        group.join()
    }

    fn lost(&self) -> Error {
        let last = lock(&self.last).clone().unwrap_or_default();
        let reason = format!(
            "a flush failed after writes that were acknowledged and not flushed: these writes may be lost and are to be written \
             again ({last})"
        );
        ErrorKind::Media { reason }.into()
    }
}

impl FlushGroup {
    fn new(errors: &Arc<FlushErrors>, name: Option<&str>, since: Option<u64>) -> Arc<FlushGroup> {
        let since = AtomicU64::new(since.unwrap_or(CLEAN));
        Arc::new(FlushGroup { errors: Arc::clone(errors), name: name.map(Box::from), since, state: Mutex::default() })
    }

    fn join(self: &Arc<Self>) -> FlushCursor {
        let mut state = lock(&self.state);
        let is_clean = state.flights.is_empty() && self.since.load(Ordering::SeqCst) == CLEAN;
        // Those who were told and left without flushing again may not have heard it.
        let is_known = is_clean || state.told.values().any(|told| *told >= state.lost);
        let told = if is_known { state.lost } else { state.lost.saturating_sub(1) };
        state.members += 1;
        let number = state.members;
        state.told.insert(number, told);
        drop(state);
        FlushCursor { group: Arc::clone(self), number }
    }

    /// The count before the first write that no flush has vouched for.
    fn first_unflushed(&self) -> Option<u64> {
        let state = lock(&self.state);
        let since = Some(self.since.load(Ordering::SeqCst)).filter(|since| *since != CLEAN);
        state.flights.values().copied().chain(since).min()
    }

    /// There is a write that no flush under way vouches for. Called under the lock.
    fn keep(&self, since: u64) {
        self.since.store(self.since.load(Ordering::SeqCst).min(since), Ordering::SeqCst);
    }
}

impl FlushCursor {
    /// The client that it asks for; nothing for an asker of its own.
    pub fn client(&self) -> Option<&str> {
        self.group.name.as_deref()
    }

    /// Whether it is an asker of this device.
    pub fn is_of(&self, errors: &Arc<FlushErrors>) -> bool {
        Arc::ptr_eq(&self.group.errors, errors)
    }

    /// A volatile change is about to begin: the mark for [`FlushCursor::wrote`].
    pub fn begin_write(&self) -> u64 {
        self.group.errors.count()
    }

    /// The change succeeded: to be told before it is acknowledged.
    pub fn wrote(&self, mark: u64) {
        if self.group.since.load(Ordering::SeqCst) > mark {
            let _state = lock(&self.group.state);
            self.group.keep(mark);
        }
    }

    /// A flush is about to begin.
    pub fn begin_flush(&self) -> FlushTicket<'_> {
        let mut state = lock(&self.group.state);
        state.flushes += 1;
        let number = state.flushes;
        let since = self.group.since.swap(CLEAN, Ordering::SeqCst);
        if since != CLEAN {
            state.flights.insert(number, since);
        }
        drop(state);
        FlushTicket { cursor: self, number }
    }
}

impl FlushTicket<'_> {
    /// What the flush is answered with, after the device has answered so.
    pub fn end(self, outcome: Outcome) -> Outcome {
        let (group, errors) = (&self.cursor.group, &self.cursor.group.errors);
        let mut state = lock(&group.state);
        let state = &mut *state;
        let count = errors.count();
        let befell = |since: &u64| *since < count;
        let is_hit = match outcome {
            // It vouches for what earlier flushes are under way for as well.
            Ok(_) => {
                let later = state.flights.split_off(&(self.number + 1));
                std::mem::replace(&mut state.flights, later).values().any(befell)
            }
            Err(_) => {
                let since = group.since.load(Ordering::SeqCst);
                let is_hit = state.flights.values().any(befell) || befell(&since);
                if state.flights.remove(&self.number).is_some() {
                    group.keep(count);
                }
                is_hit
            }
        };
        if is_hit {
            state.lost = count;
        }
        let lost = state.lost;
        let Some(told) = state.told.get_mut(&self.cursor.number) else { return outcome };
        match outcome {
            Ok(_) if *told < lost => {
                *told = lost;
                Err(errors.lost())
            }
            Ok(answer) => Ok(answer),
            Err(error) => {
                *told = count;
                Err(error)
            }
        }
    }
}

impl Drop for FlushTicket<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.cursor.group.state);
        if let Some(since) = state.flights.remove(&self.number) {
            self.cursor.group.keep(since);
        }
    }
}

impl Drop for FlushCursor {
    fn drop(&mut self) {
        lock(&self.group.state).told.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Response;

    fn write(cursor: &FlushCursor) {
        cursor.wrote(cursor.begin_write());
    }

    /// A flush that the device answers with success.
    fn flush(cursor: &FlushCursor) -> bool {
        cursor.begin_flush().end(Ok(Response::Done)).is_ok()
    }

    fn failed() -> Error {
        ErrorKind::Media { reason: "the disk said no".to_owned() }.into()
    }

    /// A flush that fails at the device.
    fn fail(cursor: &FlushCursor, errors: &FlushErrors) {
        let ticket = cursor.begin_flush();
        errors.record(&failed());
        assert_eq!(ticket.end(Err(failed())).unwrap_err(), failed(), "the asker sees what the device said");
    }

    #[test]
    fn everybody_who_had_written_is_told_once_and_nobody_else() {
        let errors = Arc::<FlushErrors>::default();
        let [first, second, idle, flushed] = [(); 4].map(|()| errors.alone());
        [&first, &second, &flushed].into_iter().for_each(write);
        assert!(flush(&flushed));
        fail(&first, &errors);
        assert!(flush(&first), "it was told");
        let told = second.begin_flush().end(Ok(Response::Done)).unwrap_err();
        assert!(told.to_string().contains("written again") && told.to_string().contains("said no"), "{told}");
        assert!(flush(&second) && flush(&idle) && flush(&flushed));
        write(&idle);
        assert!(flush(&idle), "it wrote after the failure");
    }

    #[test]
    fn each_failure_is_told() {
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
        // Its own writes may be lost by the next failure as well, as long as no flush has succeeded.
        write(&one);
        fail(&one, &errors);
        fail(&other, &errors);
        assert!(!flush(&one) && flush(&one) && flush(&other));
    }

    #[test]
    fn a_group_shares_writes_and_each_member_is_told() {
        let errors = Arc::<FlushErrors>::default();
        let [one, two, three] = [(); 3].map(|()| errors.join("client"));
        write(&one);
        errors.record(&failed());
        assert!(!flush(&two), "a flush on any connection covers all");
        assert!(!flush(&one) && !flush(&three));
        assert!(flush(&one) && flush(&two) && flush(&three));
        assert!(flush(&errors.join("client")), "who comes later had not written");
        write(&two);
        assert!(flush(&three));
        errors.record(&failed());
        assert!(flush(&one) && flush(&two), "the flush of another member vouched for it");
    }

    #[test]
    fn a_client_that_comes_back_learns_what_befell_its_writes() {
        let errors = Arc::<FlushErrors>::default();
        let cursor = errors.join("client");
        write(&cursor);
        drop(cursor);
        errors.record(&failed());
        assert!(flush(&errors.join("other")));
        let back = errors.join("client");
        assert!(!flush(&back) && flush(&back));
        // It was told, and left before it can be known to have heard.
        write(&back);
        fail(&back, &errors);
        drop(back);
        let again = errors.join("client");
        assert!(!flush(&again) && flush(&again));
        drop(again);
        assert!(flush(&errors.join("client")));
    }

    #[test]
    fn a_flush_vouches_for_what_was_written_before_it_only() {
        let errors = Arc::<FlushErrors>::default();
        let cursor = errors.alone();
        write(&cursor);
        let ticket = cursor.begin_flush();
        write(&cursor);
        assert!(ticket.end(Ok(Response::Done)).is_ok());
        errors.record(&failed());
        assert!(!flush(&cursor), "the second write was not flushed");
        // A write under way while a flush fails may be lost with it.
        let mark = cursor.begin_write();
        errors.record(&failed());
        assert!(flush(&cursor));
        cursor.wrote(mark);
        assert!(!flush(&cursor) && flush(&cursor));
    }

    #[test]
    fn a_flush_that_is_given_up_or_fails_on_its_way_vouches_for_nothing() {
        let errors = Arc::<FlushErrors>::default();
        let cursor = errors.alone();
        write(&cursor);
        drop(cursor.begin_flush());
        let unreachable: Error = ErrorKind::Unreachable { reason: "away".to_owned() }.into();
        assert!(cursor.begin_flush().end(Err(unreachable)).is_err());
        errors.record(&failed());
        assert!(!flush(&cursor) && flush(&cursor));
    }

    #[test]
    fn flushes_at_once_hide_nothing_from_each_other() {
        let errors = Arc::<FlushErrors>::default();
        let [one, two] = [(); 2].map(|()| errors.join("client"));
        write(&one);
        let (early, late) = (one.begin_flush(), two.begin_flush());
        errors.record(&failed());
        assert!(late.end(Ok(Response::Done)).is_err(), "it covers the writes of the other one");
        assert!(early.end(Ok(Response::Done)).is_err());
        assert!(flush(&one) && flush(&two));
    }

    #[test]
    fn groups_are_bounded_and_who_is_forgotten_is_told_all_the_same() {
        let errors = Arc::<FlushErrors>::default();
        for i in 0..2 * MOST_GROUPS {
            let cursor = errors.join(&format!("clean {i}"));
            write(&cursor);
            assert!(flush(&cursor));
        }
        for i in 0..=MOST_GROUPS {
            write(&errors.join(&format!("host {i:04}")));
        }
        assert!(lock(&errors.groups).by_name.len() <= MOST_GROUPS);
        errors.record(&failed());
        for i in 0..=MOST_GROUPS {
            assert!(!flush(&errors.join(&format!("host {i:04}"))), "{i}");
        }
    }
}
