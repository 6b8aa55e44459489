//! Durations of requests, in little memory and without sorting.

use std::time::Duration;

/// Steps within a power of two: the error is at most 3 %.
const STEPS: u64 = 32;

/// A histogram of durations, with steps that grow with the duration.
pub struct Latencies {
    counts: Vec<u32>,
    count: u64,
    sum_ns: u64,
    max_ns: u64,
}

/// Latencies in microseconds; 0 if none were measured.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Summary {
    /// The mean, which includes the time taken by other tasks of the machine.
    pub mean_us: f64,
    /// The median, which is hardly affected by them.
    pub median_us: f64,
    /// The 90th percentile.
    pub p90_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// What one request of a thousand exceeds.
    pub p99_9_us: f64,
    /// The longest.
    pub max_us: f64,
}

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies { counts: vec![0; 64 * STEPS as usize], count: 0, sum_ns: 0, max_ns: 0 }
    }
}

impl Latencies {
    /// Counts one duration.
    pub fn add(&mut self, latency: Duration) {
        let ns = latency.as_nanos() as u64;
        self.counts[step(ns)] += 1;
        self.count += 1;
        self.sum_ns += ns;
        self.max_ns = self.max_ns.max(ns);
    }

    /// A summary of all.
    pub fn summary(&self) -> Summary {
        if self.count == 0 {
            return Summary::default();
        }
        let without_slowest = |slowest: u64| {
            let mut left = self.count - slowest;
            let last = self.counts.iter().position(|&count| {
                left = left.saturating_sub(u64::from(count));
                left == 0
            });
            last.map_or(0.0, |step| middle_ns(step) / 1e3)
        };
        Summary {
            mean_us: self.sum_ns as f64 / self.count as f64 / 1e3,
            median_us: without_slowest(self.count / 2),
            p90_us: without_slowest(self.count / 10),
            p99_us: without_slowest(self.count / 100),
            p99_9_us: without_slowest(self.count / 1000),
            max_us: self.max_ns as f64 / 1e3,
        }
    }
}

/// The step of a duration.
fn step(ns: u64) -> usize {
    if ns < STEPS {
        return ns as usize;
    }
    let shift = ns.ilog2() - STEPS.ilog2();
    (u64::from(shift + 1) * STEPS + (ns >> shift) - STEPS) as usize
}

/// The middle of a step.
fn middle_ns(step: usize) -> f64 {
    let (power, within) = (step as u64 / STEPS, step as u64 % STEPS);
    match power {
        0 => within as f64,
        power => ((STEPS + within) as f64 + 0.5) * (1_u64 << (power - 1)) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_has_a_step_close_to_it() {
        for ns in [0, 1, 31, 32, 33, 63, 64, 1000, 12_345, 1 << 40] {
            let middle = middle_ns(step(ns));
            assert!((middle - ns as f64).abs() <= ns as f64 / 32.0, "{ns} became {middle}");
        }
        assert!(step(u64::MAX) < 64 * STEPS as usize);
    }

    #[test]
    fn the_slowest_of_a_hundred_is_left_out() {
        let mut latencies = Latencies::default();
        (0..99).for_each(|_| latencies.add(Duration::from_micros(10)));
        latencies.add(Duration::from_millis(1));
        let Summary { mean_us, median_us, p90_us, p99_us, p99_9_us, max_us } = latencies.summary();
        assert!((mean_us - 19.9).abs() < 0.01, "{mean_us}");
        assert!((p99_us - 10.0).abs() < 0.4 && median_us == p99_us, "{median_us} {p99_us}");
        assert!(p90_us == median_us && (p99_9_us - 1000.0).abs() < 40.0, "{p90_us} {p99_9_us}");
        assert_eq!((max_us, Latencies::default().summary()), (1000.0, Summary::default()));
    }
}
