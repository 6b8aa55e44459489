//! Histograms of the durations of requests: how long each waited before its device got it, and how long the device
//! took.
//!
//! Invariant: only one core writes a [`LatencyCounters`], so a count is a load and a store, and no locked instruction.
//! Every core may read it. A reader may see a request in one field and not yet in another.
//!
//! Shape: steps grow with the duration. Each power of two from 64 ns to 2^40 ns has eight, so a percentile is at most an
//! eighth above the true value. A histogram has 2.2 KiB, and a core has two for each kind of request that it has
//! completed.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::RequestKind;

/// Steps in each power of two, and in all that is below the first one.
const STEPS: usize = 8;
/// The first power of two with steps of its own, in nanoseconds.
const FIRST_POWER: u32 = 6;
/// The end of the last power of two. What takes longer, 18 minutes, counts as that.
const LAST_POWER: u32 = 40;
const BUCKETS: usize = STEPS * (1 + (LAST_POWER - FIRST_POWER) as usize);

/// The step of a duration.
fn bucket(ns: u64) -> usize {
    let ns = ns.min((1 << LAST_POWER) - 1);
    if ns < 1 << FIRST_POWER {
        return (ns >> (FIRST_POWER - STEPS.ilog2())) as usize;
    }
    let power = ns.ilog2();
    let within = (ns >> (power - STEPS.ilog2())) as usize % STEPS;
    STEPS * (1 + (power - FIRST_POWER) as usize) + within
}

/// The end of a step in nanoseconds, which is the start of the next one.
fn end_ns(bucket: usize) -> u64 {
    let (power, within) = (bucket / STEPS, (bucket % STEPS) as u64);
    match power {
        0 => (within + 1) << (FIRST_POWER - STEPS.ilog2()),
        _ => (STEPS as u64 + within + 1) << (FIRST_POWER + power as u32 - 1 - STEPS.ilog2()),
    }
}

fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

/// A histogram that one core writes.
struct HistogramCells {
    counts: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
}

impl HistogramCells {
    const fn new() -> HistogramCells {
        let (sum_ns, max_ns) = (AtomicU64::new(0), AtomicU64::new(0));
        HistogramCells { counts: [const { AtomicU64::new(0) }; BUCKETS], sum_ns, max_ns }
    }

    fn record(&self, duration: Duration, requests: u64) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        add(&self.counts[bucket(ns)], requests);
        add(&self.sum_ns, ns.wrapping_mul(requests));
        if ns > self.max_ns.load(Ordering::Relaxed) {
            self.max_ns.store(ns, Ordering::Relaxed);
        }
    }
}

/// The two durations of requests of one kind.
struct KindCells {
    queue: HistogramCells,
    device: HistogramCells,
}

/// The durations of the requests that one core sends to a device, by kind.
#[derive(Default)]
pub struct LatencyCounters {
    /// Made for the first request of the kind, since most devices get requests of few kinds.
    by_kind: [OnceLock<Box<KindCells>>; RequestKind::ALL.len()],
}

impl LatencyCounters {
    /// Counts a request that waited for `queue`, and took its device `device`, as `requests` requests. Call it on the
    /// core that writes the counters.
    pub fn record(&self, kind: RequestKind, queue: Duration, device: Duration, requests: u64) {
        let make = || Box::new(KindCells { queue: HistogramCells::new(), device: HistogramCells::new() });
        let cells = self.by_kind[kind.index()].get_or_init(make);
        cells.queue.record(queue, requests);
        cells.device.record(device, requests);
    }

    /// Adds the durations of requests of this kind to `sum`.
    pub fn add_to(&self, kind: RequestKind, sum: &mut Latency) {
        if let Some(cells) = self.by_kind[kind.index()].get() {
            sum.queue.add(&cells.queue);
            sum.device.add(&cells.device);
        }
    }
}

/// The durations of requests of one kind, over all cores.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Latency {
    /// From the arrival of a request at its export to the call of the device.
    pub queue: Histogram,
    /// From the call of the device to its outcome.
    pub device: Histogram,
}

/// A histogram of durations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Histogram {
    counts: Box<[u64; BUCKETS]>,
    sum_ns: u64,
    max_ns: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: Box::new([0; BUCKETS]), sum_ns: 0, max_ns: 0 }
    }
}

impl Histogram {
    fn add(&mut self, cells: &HistogramCells) {
        for (count, more) in self.counts.iter_mut().zip(&cells.counts) {
            *count += more.load(Ordering::Relaxed);
        }
        self.sum_ns = self.sum_ns.wrapping_add(cells.sum_ns.load(Ordering::Relaxed));
        self.max_ns = self.max_ns.max(cells.max_ns.load(Ordering::Relaxed));
    }

    /// The number of requests.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of all durations.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// The longest duration.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max_ns)
    }

    /// The duration that this share of the requests (0 to 1) does not exceed, or up to an eighth more; `None` without
    /// requests.
    pub fn percentile(&self, share: f64) -> Option<Duration> {
        let count = self.count();
        let rank = ((count as f64 * share).ceil() as u64).clamp(1, count.max(1));
        let mut seen = 0;
        let last = self.counts.iter().position(|&more| {
            seen += more;
            seen >= rank
        })?;
        Some(Duration::from_nanos(end_ns(last)).min(self.max()))
    }

    /// For each power of two from 64 ns on, it and the number of requests that took less. The last one has all that
    /// were counted, however long they took.
    pub fn cumulative(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let mut below = 0;
        self.counts.chunks_exact(STEPS).enumerate().map(move |(power, counts)| {
            below += counts.iter().sum::<u64>();
            (Duration::from_nanos(1 << (FIRST_POWER as usize + power)), below)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NS: fn(u64) -> Duration = Duration::from_nanos;

    fn of(durations: &[(u64, u64)]) -> Histogram {
        let counters = LatencyCounters::default();
        for &(ns, requests) in durations {
            counters.record(RequestKind::Read, NS(ns.saturating_add(1)), NS(ns), requests);
        }
        let mut latency = Latency::default();
        counters.add_to(RequestKind::Write, &mut latency);
        assert_eq!(latency, Latency::default(), "no writes");
        counters.add_to(RequestKind::Read, &mut latency);
        assert_eq!(latency.queue.count(), latency.device.count());
        latency.device
    }

    #[test]
    fn steps_follow_each_other_without_gaps_and_are_an_eighth_at_most() {
        let (mut start, mut last) = (0, 0);
        for step in 0..BUCKETS {
            let end = end_ns(step);
            assert!((bucket(start), bucket(end - 1)) == (step, step), "{step}: {start}..{end}");
            assert!(end - start <= (start / 8).max(8), "{step}: {start}..{end}");
            (last, start) = (start, end);
        }
        assert_eq!((start, bucket(u64::MAX)), (1 << LAST_POWER, bucket(last)));
    }

    #[test]
    fn percentiles_do_not_understate_and_the_longest_is_exact() {
        let histogram = of(&[(1000, 90), (10_000, 9), (123_456_789, 1)]);
        let us = |share| histogram.percentile(share).unwrap().as_nanos();
        assert_eq!((histogram.count(), histogram.max()), (100, NS(123_456_789)));
        assert_eq!(histogram.sum(), NS(90_000 + 90_000 + 123_456_789));
        assert_eq!((us(0.0), us(0.5), us(0.9), us(1.0)), (1024, 1024, 1024, 123_456_789));
        assert!((10_000..=11_250).contains(&us(0.91)) && us(0.91) == us(0.99), "{}", us(0.99));
        assert_eq!(of(&[(1000, 1)]).percentile(0.5), Some(NS(1000)), "not beyond the longest");
        assert_eq!(of(&[]).percentile(0.5), None);
    }

    #[test]
    fn what_is_longer_than_the_last_step_counts_there() {
        let histogram = of(&[(u64::MAX, 1)]);
        assert_eq!((histogram.count(), histogram.percentile(0.5)), (1, Some(NS(1 << LAST_POWER))));
        assert_eq!(histogram.max(), NS(u64::MAX));
    }

    #[test]
    fn cumulative_counts_grow_to_the_count_by_powers_of_two() {
        let histogram = of(&[(63, 1), (64, 2), (127, 3), (128, 4), (u64::MAX, 5)]);
        let below: Vec<_> = histogram.cumulative().collect();
        assert_eq!(below[..3], [(NS(64), 1), (NS(128), 6), (NS(256), 10)]);
        assert_eq!(below.last(), Some(&(NS(1 << LAST_POWER), 15)));
        assert!(below.is_sorted() && below.len() == 1 + (LAST_POWER - FIRST_POWER) as usize);
    }

    #[test]
    fn the_sums_of_several_cores_are_those_of_one() {
        let (one, other, both) = (LatencyCounters::default(), LatencyCounters::default(), LatencyCounters::default());
        for (number, core) in [(1, &one), (7, &other), (3, &one)] {
            for counters in [core, &both] {
                counters.record(RequestKind::Flush, NS(1000 * number), NS(5000 * number), number);
            }
        }
        let sum = |cores: &[&LatencyCounters]| {
            let mut latency = Latency::default();
            cores.iter().for_each(|core| core.add_to(RequestKind::Flush, &mut latency));
            latency
        };
        assert_eq!(sum(&[&one, &other]), sum(&[&both]));
        assert_eq!(sum(&[&both]).device.count(), 11);
    }
}
