//! Busy polling: whether an idle reactor polls for completions before it sleeps ([`Spin`]), whether a receive is
//! retried before the backend waits for it ([`BusyPoll`]), and whether a woken reactor waits for more completions
//! ([`Collecting`]).
//!
//! Invariants: a reactor without work spins only a few times, and then not again until a sleep turns out to be short,
//! so an idle core uses no CPU. At most one operation of a reactor busy polls, and no longer than the limit; its task
//! stays ready meanwhile, so nothing else waits for it. No operation busy polls while a disk operation of the reactor
//! is in flight.
//!
//! Shape: waking a thread takes longer than many responses, but only recent waits show which. For a receive, polling is
//! better than a completion if the peer replies within microseconds: it saves a kernel wake-up, a turn, and the next
//! submission. With several peers completions are cheaper. While a disk operation is in flight, the peer most likely
//! waits for its result, and each system call here delays the kernel's work on it.
//!
//! File systems complete changes of files in a kernel thread of the same CPU, several in sequence. The first completion
//! wakes the reactor, which then takes the CPU from that thread and would spin while the thread waits with the other
//! completions. So the reactor sleeps again until they are done, for a short time only, and rarely if completions come
//! one by one, as on block devices.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long a turn may sleep while nothing has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    Until(Instant),
    Forever,
}

/// The number of consecutive spins without a completion after which a reactor no longer spins.
const MAX_MISSES: u8 = 4;
/// A sleep of up to this many times the spin counts as short, because it includes falling asleep and waking up.
const SHORT_SLEEP: u32 = 2;

pub(crate) struct Spin {
    limit: Duration,
    /// Consecutive spins without a completion.
    misses: u8,
    /// When the current wait began.
    began: Option<Instant>,
}

impl Spin {
    pub(crate) fn new(limit_us: u32) -> Spin {
        Spin { limit: Duration::from_micros(limit_us.into()), misses: 0, began: None }
    }

    /// Starts a wait. Returns until when to spin first, if at all. `expecting` is true if something is in flight.
    pub(crate) fn begin(&mut self, expecting: bool, wait: Wait) -> Option<Instant> {
        self.began = None;
        if self.limit.is_zero() || !expecting {
            return None;
        }
        self.begin_at(Instant::now(), wait)
    }

    fn begin_at(&mut self, now: Instant, wait: Wait) -> Option<Instant> {
        self.began = Some(now);
        let end = now + self.limit;
        let end = if let Wait::Until(deadline) = wait { end.min(deadline) } else { end };
        (self.misses < MAX_MISSES).then_some(end)
    }

    /// Records that the spin found a completion.
    pub(crate) fn hit(&mut self) {
        self.misses = 0;
    }

    /// Records that the wait ended with a sleep.
    pub(crate) fn slept(&mut self) {
        if let Some(began) = self.began.take() {
            self.slept_for(began.elapsed());
        }
    }

    fn slept_for(&mut self, waited: Duration) {
        match waited <= self.limit * SHORT_SLEEP {
            true => self.misses = 0,
            false => self.misses = (self.misses + 1).min(MAX_MISSES),
        }
    }
}

/// How long a reactor that the completion of a change woke waits for completions of other changes.
pub(crate) const COLLECTING: Duration = Duration::from_micros(20);
/// Waiting costs more than it saves if the average time between completions is longer.
const COLLECTED_EACH: Duration = Duration::from_micros(5);
/// The maximum number of wake-ups before waiting is retried.
const MAX_SKIPPED: u32 = 63;

/// Decides whether to wait for completions of other changes after one has woken the reactor.
#[derive(Default)]
pub(crate) struct Collecting {
    /// Wake-ups to skip after a wait that cost more than it saved.
    backoff: u32,
    /// The number of these that remain.
    skip: u32,
}

impl Collecting {
    /// True if the reactor should wait after this wake-up.
    pub(crate) fn is_due(&mut self) -> bool {
        let is_due = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        is_due
    }

    /// Records how long the wait after a wake-up took, and how many changes completed.
    pub(crate) fn collected(&mut self, ended: usize, waited: Duration) {
        let is_worth_it = ended > 0 && waited <= COLLECTED_EACH * ended as u32;
        self.backoff = if is_worth_it { 0 } else { (self.backoff * 2 + 1).min(MAX_SKIPPED) };
        self.skip = self.backoff;
    }
}

/// The state that the operations of a reactor share.
pub(crate) struct BusyPolling {
    limit: Duration,
    is_taken: Cell<bool>,
}

/// The state of one operation: until when it busy polls.
#[derive(Default)]
pub(crate) struct BusyPoll(Option<Instant>);

impl BusyPolling {
    /// An operation busy polls for half of the time that an idle reactor spins; the backend gets the rest.
    pub(crate) fn new(spin_us: u32) -> BusyPolling {
        BusyPolling { limit: Duration::from_micros(u64::from(spin_us)) / 2, is_taken: Cell::new(false) }
    }
}

impl BusyPoll {
    /// True if the operation should be retried in the next turn. `awaits_disk` is true while a disk operation is in
    /// flight.
    pub(crate) fn poll_again(&mut self, all: &BusyPolling, awaits_disk: bool) -> bool {
        if awaits_disk {
            self.end(all);
            return false;
        }
        if let Some(end) = self.0 {
            let poll_again = Instant::now() < end;
            if !poll_again {
                self.end(all);
            }
            return poll_again;
        }
        if all.limit.is_zero() || all.is_taken.replace(true) {
            return false;
        }
        self.0 = Some(Instant::now() + all.limit);
        true
    }

    /// Ends busy polling, so that another operation can start it.
    pub(crate) fn end(&mut self, all: &BusyPolling) {
        if self.0.take().is_some() {
            all.is_taken.set(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_reactor_stops_spinning_until_a_sleep_is_short() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let mut spin = Spin::new(1000);
        for _ in 0..MAX_MISSES {
            assert_eq!(spin.begin_at(now, Wait::Forever), Some(now + ms(1)));
            spin.slept_for(ms(3));
        }
        assert_eq!(spin.begin_at(now, Wait::Forever), None);
        spin.slept_for(ms(2));
        assert_eq!(spin.begin_at(now, Wait::Forever), Some(now + ms(1)));
    }

    #[test]
    fn a_spin_with_a_completion_resets_the_misses() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let mut spin = Spin::new(1000);
        for _ in 0..3 * MAX_MISSES {
            spin.slept_for(ms(9));
            spin.hit();
            assert!(spin.begin_at(now, Wait::Forever).is_some());
        }
    }

    #[test]
    fn a_timer_ends_the_spin_and_nothing_in_flight_avoids_it() {
        let now = Instant::now();
        let soon = now + Duration::from_micros(10);
        assert_eq!(Spin::new(1000).begin_at(now, Wait::Until(soon)), Some(soon));
        assert_eq!(Spin::new(1000).begin(false, Wait::Forever), None);
        assert_eq!(Spin::new(0).begin(true, Wait::Forever), None);
    }

    #[test]
    fn one_operation_polls_at_a_time_and_not_for_ever() {
        let all = BusyPolling::new(40_000);
        let (mut first, mut second) = (BusyPoll::default(), BusyPoll::default());
        assert!(first.poll_again(&all, false) && first.poll_again(&all, false));
        assert!(!second.poll_again(&all, false), "one at a time");
        first.end(&all);
        assert!(second.poll_again(&all, false));
        std::thread::sleep(Duration::from_millis(25));
        assert!(!second.poll_again(&all, false), "its time is over");
        assert!(first.poll_again(&all, false), "and another operation may");
    }

    #[test]
    fn no_operation_polls_while_a_disk_operation_is_in_flight() {
        let all = BusyPolling::new(40_000);
        let (mut first, mut second) = (BusyPoll::default(), BusyPoll::default());
        assert!(!first.poll_again(&all, true));
        assert!(first.poll_again(&all, false));
        assert!(!first.poll_again(&all, true), "not even after it has started");
        assert!(second.poll_again(&all, false), "and another operation may afterwards");
    }

    #[test]
    fn ends_of_changes_are_waited_for_as_long_as_they_come_quickly() {
        let (mut collecting, us) = (Collecting::default(), Duration::from_micros);
        assert!(collecting.is_due());
        collecting.collected(4, us(20));
        assert!(collecting.is_due(), "four in 20 us are worth it");
        collecting.collected(1, us(15));
        assert!(!collecting.is_due() && collecting.is_due(), "one in 15 us is not");
        (0..10).for_each(|_| collecting.collected(0, us(20)));
        assert_eq!((0..100).position(|_| collecting.is_due()), Some(MAX_SKIPPED as usize), "and is seldom tried again");
    }

    #[test]
    fn a_reactor_that_does_not_spin_does_not_busy_poll() {
        assert!(!BusyPoll::default().poll_again(&BusyPolling::new(0), false));
    }
}
