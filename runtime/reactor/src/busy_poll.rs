//! Whether a receive asks again and again before it lets the backend wait.
//!
//! Invariants: at most one operation of a reactor lingers, and for no longer than the limit; its task stays ready meanwhile, so
//! nothing else waits for it. None lingers while a disk works for the reactor.
//!
//! Shape: a peer that answers soon is met sooner by asking than by being told, which takes the kernel a notice, this thread a
//! turn, and both of them again for the next wait. With more peers than one, being told is cheaper. And while a disk works, the
//! peer most likely waits for what it will answer, and each system call here delays the kernel's work on that.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// What the operations of a reactor know of each other.
pub(crate) struct BusyPolling {
    limit: Duration,
    is_taken: Cell<bool>,
}

/// One operation's part in it.
#[derive(Default)]
pub(crate) struct BusyPoll(Option<Instant>);

impl BusyPolling {
    /// An operation lingers for half of the time that an idle reactor looks for work; the rest is the backend's.
    pub(crate) fn new(spin_us: u32) -> BusyPolling {
        BusyPolling { limit: Duration::from_micros(u64::from(spin_us)) / 2, is_taken: Cell::new(false) }
    }
}

impl BusyPoll {
    /// Whether to ask again in the next turn. `awaits_disk` tells that a disk works for the reactor.
    pub(crate) fn goes_on(&mut self, all: &BusyPolling, awaits_disk: bool) -> bool {
        if awaits_disk {
            self.end(all);
            return false;
        }
        if let Some(end) = self.0 {
            let goes_on = Instant::now() < end;
            if !goes_on {
                self.end(all);
            }
            return goes_on;
        }
        if all.limit.is_zero() || all.is_taken.replace(true) {
            return false;
        }
        self.0 = Some(Instant::now() + all.limit);
        true
    }

    /// Lets others linger.
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
    fn one_lingers_at_a_time_and_not_for_ever() {
        let all = BusyPolling::new(40_000);
        let (mut first, mut second) = (BusyPoll::default(), BusyPoll::default());
        assert!(first.goes_on(&all, false) && first.goes_on(&all, false));
        assert!(!second.goes_on(&all, false), "one at a time");
        first.end(&all);
        assert!(second.goes_on(&all, false));
        std::thread::sleep(Duration::from_millis(25));
        assert!(!second.goes_on(&all, false), "its time is over");
        assert!(first.goes_on(&all, false), "and others may");
    }

    #[test]
    fn none_lingers_while_a_disk_works() {
        let all = BusyPolling::new(40_000);
        let (mut first, mut second) = (BusyPoll::default(), BusyPoll::default());
        assert!(!first.goes_on(&all, true));
        assert!(first.goes_on(&all, false));
        assert!(!first.goes_on(&all, true), "not even if it has begun");
        assert!(second.goes_on(&all, false), "and others may afterwards");
    }

    #[test]
    fn a_reactor_that_does_not_spin_does_not_linger() {
        assert!(!BusyPoll::default().goes_on(&BusyPolling::new(0), false));
    }
}
