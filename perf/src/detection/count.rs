//! Counted faults: rates with their confidence interval, and whether a count matches an expected rate.
//!
//! Injected faults are independent trials, so the count of undetected ones has a binomial distribution, and everything
//! here is exact for that, even with few or no undetected faults. A rate is never shown as 0. If none of N was
//! undetected, it is shown as less than 3/N, the largest rate with a chance of 5 % that none is undetected.

use statrs::distribution::{Beta, Binomial, ContinuousCDF, DiscreteCDF};

/// The fraction of all experiments whose interval does not contain the true rate.
const OUTSIDE: f64 = 0.05;
/// A count does not match if chance would produce one as far from the expected count in fewer than one in a million
/// cases. A run has a few hundred counts.
const UNLIKELY: f64 = 1e-6;
/// Enough steps to make the interval far smaller than any rate that this many faults could show.
const HALVINGS: u32 = 80;

/// The number of undetected faults among the injected ones.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Count {
    /// Injected faults, each of which changed the block.
    pub trials: u64,
    /// Those whose guard equals the guard of the changed block.
    pub undetected: u64,
}

impl Count {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: Count) {
        self.trials += other.trials;
        self.undetected += other.undetected;
    }

    /// Undetected faults as a fraction of all; NaN if there were no faults.
    pub fn rate(self) -> f64 {
        self.undetected as f64 / self.trials as f64
    }

    /// The smallest and the largest rate that are compatible with this count, with a confidence of 95 % (Clopper and
    /// Pearson). If no fault or every fault was undetected, one bound is certain, and the whole error probability is on
    /// the other side.
    pub fn interval(self) -> (f64, f64) {
        let (trials, seen) = (self.trials as f64, self.undetected as f64);
        match (self.undetected, self.trials - self.undetected) {
            (0, 0) => (0.0, 1.0),
            (0, _) => (0.0, 1.0 - OUTSIDE.powf(1.0 / trials)),
            (_, 0) => (OUTSIDE.powf(1.0 / trials), 1.0),
            _ => (
                quantile(seen, trials - seen + 1.0, OUTSIDE / 2.0),
                quantile(seen + 1.0, trials - seen, 1.0 - OUTSIDE / 2.0),
            ),
        }
    }

    /// True if this rate plausibly produces the count. A rate of 0 or 1 allows no exception.
    pub fn fits(self, rate: f64) -> bool {
        if rate <= 0.0 {
            return rate == 0.0 && self.undetected == 0;
        }
        let Ok(expected) = Binomial::new(rate, self.trials) else { return false };
        let at_most = expected.cdf(self.undetected);
        let at_least = self.undetected.checked_sub(1).map_or(1.0, |less| expected.sf(less));
        2.0 * at_most.min(at_least) >= UNLIKELY
    }
}

/// The quantile of a beta distribution, by bisection.
fn quantile(a: f64, b: f64, part: f64) -> f64 {
    let Ok(beta) = Beta::new(a, b) else { return f64::NAN };
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..HALVINGS {
        let middle = (low + high) / 2.0;
        if beta.cdf(middle) < part { low = middle } else { high = middle }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(undetected: u64, trials: u64) -> Count {
        Count { trials, undetected }
    }

    fn is_near(value: f64, expected: f64) -> bool {
        (value / expected - 1.0).abs() < 0.01
    }

    #[test]
    fn intervals_are_those_of_tables() {
        // Clopper and Pearson, 95 %: 10 of 100 and 1 of 20.
        let (low, high) = count(10, 100).interval();
        assert!(is_near(low, 0.0490) && is_near(high, 0.1762), "{low} {high}");
        let (low, high) = count(1, 20).interval();
        assert!(is_near(low, 0.00127) && is_near(high, 0.2487), "{low} {high}");
        // Poisson, 95 %: 1526 events have 1450.4 to 1604.5.
        let (low, high) = count(1526, 100_000_000).interval();
        assert!(is_near(low * 1e8, 1450.4) && is_near(high * 1e8, 1604.5), "{low} {high}");
    }

    #[test]
    fn none_of_many_is_less_than_three_of_them() {
        let (low, high) = count(0, 1_000_000).interval();
        assert!(low == 0.0 && is_near(high, 3e-6), "{high}");
        let (low, high) = count(1_000_000, 1_000_000).interval();
        assert!(is_near(1.0 - low, 3e-6) && high == 1.0, "{low}");
        assert_eq!(count(0, 0).interval(), (0.0, 1.0));
    }

    #[test]
    fn a_count_fits_its_own_rate_and_no_rate_far_from_it() {
        let sixteen_bits = 1.0 / 65536.0;
        assert!(count(153, 10_000_000).fits(sixteen_bits) && count(120, 10_000_000).fits(sixteen_bits));
        assert!(!count(153, 10_000_000).fits(2.0 * sixteen_bits) && !count(153, 10_000_000).fits(sixteen_bits / 2.0));
        assert!(count(5_000_000, 10_000_000).fits(0.5) && !count(5_010_000, 10_000_000).fits(0.5));
    }

    #[test]
    fn rare_faults_fit_when_they_happen_once_and_not_when_they_happen_often() {
        let thirty_two_bits = 2.0_f64.powi(-32);
        assert!(count(0, 100_000_000).fits(thirty_two_bits) && count(1, 100_000_000).fits(thirty_two_bits));
        assert!(!count(5, 100_000_000).fits(thirty_two_bits));
        assert!(count(0, 100_000_000).fits(2.0_f64.powi(-64)) && !count(1, 100_000_000).fits(2.0_f64.powi(-64)));
    }

    #[test]
    fn what_is_certain_allows_no_exception() {
        assert!(count(0, 1000).fits(0.0) && !count(1, 1000).fits(0.0));
        assert!(count(1000, 1000).fits(1.0) && !count(999, 1000).fits(1.0));
        assert!(!count(0, 1000).fits(f64::NAN) && !count(0, 1000).fits(1.5) && !count(0, 1000).fits(-1.0));
    }

    #[test]
    fn counts_add_up() {
        let mut all = count(1, 10);
        all.add(count(2, 30));
        assert_eq!((all, all.rate()), (count(3, 40), 0.075));
        assert!(Count::default().rate().is_nan());
    }
}
