//! Tables of ratios: medians over rounds in which every contender has its turn.

use crate::load::Sample;
use crate::report::Spread;

/// The turns of all contenders under one load: one list per round, in the order of contenders; the first is the
/// baseline.
#[derive(Default)]
pub struct Rounds(pub Vec<Vec<Sample>>);

impl Rounds {
    /// Requests per second.
    pub fn rate(&self, contender: usize) -> Spread {
        Spread::of(self.0.iter().map(|round| round[contender].rate()))
    }

    /// The rate relative to the baseline's in the same round.
    pub fn ratio(&self, contender: usize) -> Spread {
        self.ratio_to(contender, 0)
    }

    /// The rate relative to another contender's in the same round.
    pub fn ratio_to(&self, contender: usize, other: usize) -> Spread {
        Spread::of(self.0.iter().map(|round| round[contender].rate() / round[other].rate()))
    }

    /// MB (10^6 bytes) per second.
    pub fn megabytes(&self, contender: usize) -> f64 {
        Spread::of(self.0.iter().map(|round| round[contender].bytes as f64 / round[contender].seconds / 1e6)).median
    }

    /// Microseconds of CPU time per request.
    pub fn cpu_us(&self, contender: usize) -> f64 {
        let per_request = |turn: &Sample| turn.cpu_seconds * 1e6 / turn.requests as f64;
        Spread::of(self.0.iter().map(|round| per_request(&round[contender]))).median
    }

    /// Prints one line per contender. `threshold` is the smallest acceptable ratio.
    pub fn print(&self, load: &str, names: &[String], threshold: Option<f64>) {
        println!("{load}");
        for (contender, name) in names.iter().enumerate() {
            let ratio = self.ratio(contender);
            print!(
                "  {name:16} {:9.0} /s {:7.0} MB/s {:8.1} us CPU",
                self.rate(contender).median,
                self.megabytes(contender),
                self.cpu_us(contender)
            );
            match contender {
                0 => println!("   (baseline)"),
                _ => println!("   {ratio}{}", verdict(ratio.median, threshold.filter(|_| !name.starts_with("raw")))),
            }
        }
    }
}

/// A ratio compared with its threshold.
pub fn verdict(ratio: f64, threshold: Option<f64>) -> String {
    match threshold {
        None => String::new(),
        Some(threshold) if ratio >= threshold => format!("  threshold {:.0} %: kept", threshold * 100.0),
        Some(threshold) => {
            format!("  threshold {:.0} %: MISSED by {:.1} points", threshold * 100.0, (threshold - ratio) * 100.0)
        }
    }
}
