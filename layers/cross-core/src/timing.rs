//! How long requests wait before the device of this core gets them, and how long it takes.
//!
//! Shape: a request that waits for a device takes far longer than two readings of the clock, so each of those is timed.
//! One that is executed in place may take no longer than ten readings. Of those, one is timed and counts for all since
//! the one before. Their number is drawn, so that it is not the same one of each batch.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Instant;

use fastrand::Rng;
use sealblock_block::{LatencyCounters, RequestKind};
use sealblock_runtime_reactor::now;

/// One request of up to so many is timed.
const MOST_UNTIMED: u32 = 64;

/// The times of the requests of one core.
pub(crate) struct Timing {
    pub(crate) counters: Arc<LatencyCounters>,
    /// Requests executed in place up to the next one that is timed, itself included; and for how many that one counts.
    in_place_left: Cell<u32>,
    in_place_drawn: Cell<u32>,
    random: RefCell<Rng>,
}

/// A request that the device is executing.
pub(crate) struct Timer {
    arrived: Instant,
    called: Instant,
}

impl Timer {
    /// Call it when the device is called.
    pub(crate) fn start(arrived: Instant) -> Timer {
        Timer { arrived, called: now() }
    }
}

impl Default for Timing {
    fn default() -> Timing {
        let timing = Timing {
            counters: Arc::default(),
            in_place_left: Cell::new(1),
            in_place_drawn: Cell::new(1),
            random: RefCell::new(Rng::with_seed(1)),
        };
        timing.draw();
        timing
    }
}

impl Timing {
    /// Counts a request that has its outcome.
    pub(crate) fn complete(&self, kind: RequestKind, timer: Timer) {
        self.record(kind, timer, 1);
    }

    /// Now, if a request that may be executed in place is to be timed. Call it when the device is called.
    #[inline]
    pub(crate) fn start_in_place(&self) -> Option<Instant> {
        if self.in_place_left.get() == 1 { Some(now()) } else { None }
    }

    /// Counts a request that was executed in place, with the result of [`Timing::start_in_place`]. `None` as its
    /// arrival means the same moment. Not called for a request that was not executed, so that another one is timed.
    #[inline]
    pub(crate) fn complete_in_place(&self, kind: RequestKind, arrived: Option<Instant>, called: Option<Instant>) {
        match called {
            None => self.in_place_left.set(self.in_place_left.get() - 1),
            Some(called) => self.complete_timed(kind, Timer { arrived: arrived.unwrap_or(called), called }),
        }
    }

    #[cold]
    fn complete_timed(&self, kind: RequestKind, timer: Timer) {
        self.record(kind, timer, self.in_place_drawn.get().into());
        self.draw();
    }

    fn record(&self, kind: RequestKind, Timer { arrived, called }: Timer, requests: u64) {
        let (queue, device) = (called.saturating_duration_since(arrived), now().saturating_duration_since(called));
        self.counters.record(kind, queue, device, requests);
    }

    fn draw(&self) {
        let drawn = self.random.borrow_mut().u32(1..=MOST_UNTIMED);
        self.in_place_left.set(drawn);
        self.in_place_drawn.set(drawn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::Latency;

    fn latency(timing: &Timing, kind: RequestKind) -> Latency {
        let mut latency = Latency::default();
        timing.counters.add_to(kind, &mut latency);
        latency
    }

    #[test]
    fn all_requests_in_place_count_though_few_are_timed() {
        let (timing, arrived, mut timed) = (Timing::default(), now(), 0);
        for request in 0_u64..10_000 {
            if request % 3 == 0 {
                // The device could not execute it in place.
                let _called = timing.start_in_place();
            }
            let called = timing.start_in_place();
            timed += u64::from(called.is_some());
            timing.complete_in_place(RequestKind::Read, Some(arrived), called);
            let counted = latency(&timing, RequestKind::Read).device.count();
            assert!((counted..counted + 64).contains(&(request + 1)), "{counted} of {}", request + 1);
        }
        assert!((10_000 / 40..10_000 / 27).contains(&timed), "{timed}");
    }

    #[test]
    fn each_of_the_others_counts_once_with_its_wait() {
        let timing = Timing::default();
        let arrived = now();
        for _ in 0..100 {
            timing.complete(RequestKind::Verify, Timer::start(arrived));
        }
        let Latency { queue, device } = latency(&timing, RequestKind::Verify);
        assert_eq!((queue.count(), device.count()), (100, 100));
        assert!(queue.max() + device.max() <= arrived.elapsed());
        timing.complete_in_place(RequestKind::Write, None, Some(now()));
        assert_eq!(latency(&timing, RequestKind::Write).queue.max().as_nanos(), 0);
        let later = now() + std::time::Duration::from_secs(100);
        timing.complete(RequestKind::Flush, Timer { arrived: later, called: arrived });
        assert_eq!(latency(&timing, RequestKind::Flush).queue.max().as_nanos(), 0, "clocks of two cores may differ");
    }
}
