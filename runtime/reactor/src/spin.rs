//! Whether to look for completions for a while before going to sleep.
//!
//! Invariant: a reactor that has nothing to do spins only a few times, and then not again until a sleep turns out to have
//! been short; so an idle core is not burnt.
//!
//! Shape: waking a thread costs more than many an answer takes to arrive, but only recent waits tell which answers those are.

use std::time::{Duration, Instant};

use crate::driver::Wait;

/// Spins in a row that may be in vain before there are no more.
const PATIENCE: u8 = 4;
/// A sleep this many times the spin still counts as short, because falling asleep and waking up are part of it.
const SHORT_SLEEP: u32 = 2;

pub(crate) struct Spin {
    limit: Duration,
    /// Spins in a row that were in vain.
    misses: u8,
    /// When the current wait began.
    began: Option<Instant>,
}

impl Spin {
    pub(crate) fn new(limit_us: u32) -> Spin {
        Spin { limit: Duration::from_micros(limit_us.into()), misses: 0, began: None }
    }

    /// Begins a wait; says until when to spin first, if at all. `expecting` tells that something is in flight.
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
        (self.misses < PATIENCE).then_some(end)
    }

    /// The spin was worth it.
    pub(crate) fn paid(&mut self) {
        self.misses = 0;
    }

    /// The wait ended by sleeping.
    pub(crate) fn slept(&mut self) {
        if let Some(began) = self.began.take() {
            self.slept_for(began.elapsed());
        }
    }

    fn slept_for(&mut self, waited: Duration) {
        match waited <= self.limit * SHORT_SLEEP {
            true => self.misses = 0,
            false => self.misses = (self.misses + 1).min(PATIENCE),
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
        for _ in 0..PATIENCE {
            assert_eq!(spin.begin_at(now, Wait::Forever), Some(now + ms(1)));
            spin.slept_for(ms(3));
        }
        assert_eq!(spin.begin_at(now, Wait::Forever), None);
        spin.slept_for(ms(2));
        assert_eq!(spin.begin_at(now, Wait::Forever), Some(now + ms(1)));
    }

    #[test]
    fn a_spin_that_paid_forgives_those_that_did_not() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let mut spin = Spin::new(1000);
        for _ in 0..3 * PATIENCE {
            spin.slept_for(ms(9));
            spin.paid();
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
}
