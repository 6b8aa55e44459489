//! The verdict on a claim from its measurement: *holds*, *does not hold* or *too noisy to tell*.
//!
//! A machine always has other load, so a ratio alone is not enough. In each round the baseline has two turns. The ratio
//! of its second turn to its first, `again`, is 1 except for noise. The median of any other ratio in these rounds may
//! be wrong by as much as `again` differs from 1. So a claim holds only if the median of its ratios exceeds the
//! threshold by more than that, and does not hold only if the median misses the threshold by more than that.
//!
//! The largest deviation is used. With more rounds than the minimum, the largest deviation is left out once for every
//! four additional rounds, because one disturbed round hardly affects a median. If a claim is exactly at its threshold,
//! noise alone decides; in simulations this happens in at most 6 % of runs with three rounds and 1.5 % with seven.
//!
//! Three more rules prevent unfounded verdicts. Fewer than three rounds have no meaningful spread, so there is no
//! verdict. A round whose ratio is not a number above 0 has measured nothing, so there is no verdict either. And at
//! most one round in four may be on the other side of the threshold.
//!
//! A count has no noise: [`Verdict::counted`].

use serde::Serialize;

use crate::report::{Spread, number};

/// The minimum number of rounds for a verdict.
const MIN_ROUNDS: usize = 3;
/// One round in this many may be on the other side of the threshold.
const DISSENT: usize = 4;
/// For each additional number of this many rounds above [`MIN_ROUNDS`], the round with the largest deviation of the
/// baseline is left out.
const LEFT_OUT: usize = 4;

/// The verdict.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
pub enum Ruling {
    /// The claim holds here.
    #[serde(rename = "holds")]
    Holds,
    /// It does not hold here.
    #[serde(rename = "does not hold")]
    DoesNotHold,
    /// This run does not decide it.
    #[serde(rename = "too noisy to tell")]
    TooNoisy,
}

impl Ruling {
    /// As text.
    pub const fn as_str(self) -> &'static str {
        match self {
            Ruling::Holds => "holds",
            Ruling::DoesNotHold => "does not hold",
            Ruling::TooNoisy => "too noisy to tell",
        }
    }
}

/// The threshold of a claim, and on which side of it values must be.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Threshold {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
}

impl Threshold {
    /// True if a value without noise meets the threshold.
    fn is_kept_by(self, value: f64) -> bool {
        match self {
            Threshold::AtLeast(threshold) => value >= threshold,
            Threshold::AtMost(threshold) => value <= threshold,
        }
    }

    /// The same threshold, made harder to meet by a factor above 1, or easier by a factor below 1.
    fn harder(self, factor: f64) -> Threshold {
        match self {
            Threshold::AtLeast(threshold) => Threshold::AtLeast(threshold * factor),
            Threshold::AtMost(threshold) => Threshold::AtMost(threshold / factor),
        }
    }
}

impl std::fmt::Display for Threshold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Threshold::AtLeast(threshold) => write!(f, "at least {}", number(threshold)),
            Threshold::AtMost(threshold) => write!(f, "at most {}", number(threshold)),
        }
    }
}

/// Ratios of one round.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Round {
    /// The claimed quantity relative to the baseline in the same round.
    pub claim: f64,
    /// The baseline's second turn relative to its first.
    pub again: f64,
}

impl Round {
    /// From the results of one round, in the same unit: the baseline, the baseline again, and the claim.
    pub fn of(baseline: f64, again: f64, claimed: f64) -> Round {
        Round { claim: claimed / baseline, again: again / baseline }
    }

    fn is_measured(self) -> bool {
        [self.claim, self.again].iter().all(|ratio| ratio.is_finite() && *ratio > 0.0)
    }
}

/// A claim with its figures and the verdict.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Verdict {
    /// The meaning of the ratio.
    pub what: String,
    /// The threshold.
    #[serde(rename = "bar")]
    pub threshold: Threshold,
    /// The median of the ratios, or the count.
    pub median: f64,
    /// The least ratio.
    pub least: f64,
    /// The greatest ratio.
    pub most: f64,
    /// The number of rounds; 0 for a count.
    pub rounds: usize,
    /// The factor by which the baseline deviates from itself, without the rounds that are left out; `None` for a count,
    /// or if a round has measured nothing.
    #[serde(rename = "yardstick_factor")]
    pub baseline_factor: Option<f64>,
    /// The verdict.
    pub ruling: Ruling,
    /// All of it in a sentence.
    pub sentence: String,
}

impl Verdict {
    /// A verdict from timed ratios.
    pub fn timed(what: impl Into<String>, threshold: Threshold, rounds: &[Round]) -> Verdict {
        let ratios = Spread::of(rounds.iter().map(|round| round.claim));
        let factor = baseline_factor(rounds);
        let verdict = Verdict {
            what: what.into(),
            threshold,
            median: ratios.median,
            least: ratios.least,
            most: ratios.most,
            rounds: rounds.len(),
            baseline_factor: factor,
            ruling: ruling(threshold, rounds, factor, ratios.median),
            sentence: String::new(),
        };
        Verdict { sentence: sentence(&verdict), ..verdict }
    }

    /// A verdict from a count, which is the same on every machine. NaN cannot be compared with a threshold.
    pub fn counted(what: impl Into<String>, threshold: Threshold, value: f64) -> Verdict {
        let ruling = match (value.is_nan(), threshold.is_kept_by(value)) {
            (true, _) => Ruling::TooNoisy,
            (false, true) => Ruling::Holds,
            (false, false) => Ruling::DoesNotHold,
        };
        let (median, least, most) = (value, value, value);
        let (what, sentence) = (what.into(), String::new());
        let verdict =
            Verdict { what, threshold, median, least, most, rounds: 0, baseline_factor: None, ruling, sentence };
        Verdict { sentence: sentence_of_count(&verdict), ..verdict }
    }
}

/// How many of this number of rounds are left out because of the baseline's noise.
const fn left_out(rounds: usize) -> usize {
    rounds.saturating_sub(MIN_ROUNDS) / LEFT_OUT
}

/// The largest factor by which the baseline deviates from itself in the remaining rounds; `None` if a round has
/// measured nothing, or if there are no rounds.
fn baseline_factor(rounds: &[Round]) -> Option<f64> {
    if rounds.is_empty() || !rounds.iter().all(|round| round.is_measured()) {
        return None;
    }
    let mut factors: Vec<f64> = rounds.iter().map(|round| round.again.max(1.0 / round.again)).collect();
    factors.sort_unstable_by(f64::total_cmp);
    factors.get(factors.len() - 1 - left_out(factors.len())).copied()
}

fn ruling(threshold: Threshold, rounds: &[Round], factor: Option<f64>, median: f64) -> Ruling {
    let Some(factor) = factor.filter(|_| rounds.len() >= MIN_ROUNDS) else { return Ruling::TooNoisy };
    let kept = rounds.iter().filter(|round| threshold.is_kept_by(round.claim)).count();
    let missed = rounds.len() - kept;
    if threshold.harder(factor).is_kept_by(median) && missed * DISSENT <= rounds.len() {
        Ruling::Holds
    } else if !threshold.harder(1.0 / factor).is_kept_by(median) && kept * DISSENT <= rounds.len() {
        Ruling::DoesNotHold
    } else {
        Ruling::TooNoisy
    }
}

fn sentence(verdict: &Verdict) -> String {
    let Verdict { what, threshold, median, least, most, rounds, ruling, .. } = verdict;
    let (median, least, most) = (number(*median), number(*least), number(*most));
    let why = match verdict.baseline_factor {
        None => "a round measured nothing that can be compared".to_owned(),
        Some(_) if *rounds < MIN_ROUNDS => format!("{rounds} rounds, {MIN_ROUNDS} are needed"),
        Some(factor) => {
            let percent = number((factor - 1.0) * 100.0);
            let apart = match left_out(*rounds) {
                0 => String::new(),
                left_out => format!(" in {} of {rounds} rounds", rounds - left_out),
            };
            format!("the baseline against itself is off by up to {percent} %{apart}")
        }
    };
    format!("{what}: {median} [{least} .. {most}], threshold {threshold}: {}; {why}", ruling.as_str())
}

fn sentence_of_count(verdict: &Verdict) -> String {
    let Verdict { what, threshold, median, ruling, .. } = verdict;
    format!("{what}: {}, threshold {threshold}: {}; counted, so there is no noise", number(*median), ruling.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(ratios: &[(f64, f64)]) -> Vec<Round> {
        ratios.iter().map(|&(claim, again)| Round { claim, again }).collect()
    }

    fn ruled(threshold: Threshold, ratios: &[(f64, f64)]) -> Ruling {
        Verdict::timed("ratio", threshold, &rounds(ratios)).ruling
    }

    #[test]
    fn a_claim_holds_that_beats_the_bar_by_more_than_noise() {
        let good = [(8.0, 1.02), (8.4, 0.97), (7.9, 1.0), (8.1, 1.01)];
        assert_eq!(ruled(Threshold::AtLeast(6.0), &good), Ruling::Holds);
        assert_eq!(ruled(Threshold::AtMost(9.0), &good), Ruling::Holds);
    }

    #[test]
    fn a_claim_fails_that_misses_the_bar_by_more_than_noise() {
        let bad = [(4.0, 1.02), (4.4, 0.97), (3.9, 1.0), (4.1, 1.01)];
        assert_eq!(ruled(Threshold::AtLeast(6.0), &bad), Ruling::DoesNotHold);
        assert_eq!(ruled(Threshold::AtMost(3.0), &bad), Ruling::DoesNotHold);
    }

    #[test]
    fn a_baseline_that_misses_itself_decides_nothing() {
        let near = |again| [(6.5, 1.0), (6.6, again), (6.4, 1.0), (6.5, 1.0)];
        assert_eq!(ruled(Threshold::AtLeast(6.0), &near(1.05)), Ruling::Holds);
        // Deviations below 1 count like those above 1, because both are noise.
        assert_eq!(ruled(Threshold::AtLeast(6.0), &near(1.2)), Ruling::TooNoisy);
        assert_eq!(ruled(Threshold::AtLeast(6.0), &near(1.0 / 1.2)), Ruling::TooNoisy);
        assert_eq!(ruled(Threshold::AtLeast(7.0), &near(1.05)), Ruling::DoesNotHold);
        assert_eq!(ruled(Threshold::AtLeast(7.0), &near(1.2)), Ruling::TooNoisy);
        // Noise is a factor, so a claim that is far from its threshold is decided nevertheless.
        assert_eq!(ruled(Threshold::AtLeast(2.0), &near(3.0)), Ruling::Holds);
    }

    #[test]
    fn a_disturbed_round_among_many_says_nothing_of_the_noise() {
        let disturbed = |count: usize, rounds: usize| {
            let round = |at: usize| if at < count { (6.5, 3.0) } else { (6.5, 1.02) };
            Verdict::timed("ratio", Threshold::AtLeast(6.0), &self::rounds(&(0..rounds).map(round).collect::<Vec<_>>()))
        };
        let ruled = |count, rounds| disturbed(count, rounds).ruling;
        assert_eq!([ruled(1, 3), ruled(1, 6), ruled(1, 7)], [Ruling::TooNoisy, Ruling::TooNoisy, Ruling::Holds]);
        assert_eq!([ruled(2, 10), ruled(2, 11), ruled(3, 11)], [Ruling::TooNoisy, Ruling::Holds, Ruling::TooNoisy]);
        let sentence = disturbed(1, 7).sentence;
        assert!(
            sentence.ends_with("holds; the baseline against itself is off by up to 2.00 % in 6 of 7 rounds"),
            "{sentence}"
        );
    }

    /// A claim that is exactly at its threshold is the worst case: any verdict comes from noise. Every turn is off by
    /// its own factor, and in one round of eight all turns after some moment are also slower by half.
    #[test]
    fn noise_alone_decides_few_runs() {
        const RUNS: usize = 10_000;
        for (rounds, of_a_thousand) in [(3, 60), (5, 25), (7, 15), (9, 10), (13, 5)] {
            let mut random = fastrand::Rng::with_seed(rounds);
            let mut turn = |is_late: bool| {
                let sum: f64 = (0..12).map(|_| random.f64()).sum();
                (0.1 * (sum - 6.0)).exp() * if is_late { 1.5 } else { 1.0 }
            };
            let mut order = fastrand::Rng::with_seed(!rounds);
            let mut run = || {
                let ratios = (0..rounds).map(|_| {
                    let late_from = if order.u8(..8) == 0 { order.usize(..3) } else { 3 };
                    let mut times = [0, 1, 2].map(|at| turn(at >= late_from));
                    order.shuffle(&mut times);
                    Round::of(times[0], times[1], times[2])
                });
                Verdict::timed("ratio", Threshold::AtLeast(1.0), &ratios.collect::<Vec<_>>()).ruling
            };
            let decided = (0..RUNS).filter(|_| run() != Ruling::TooNoisy).count();
            assert!(decided * 1000 < RUNS * of_a_thousand, "{decided} of {RUNS} runs with {rounds} rounds");
        }
    }

    #[test]
    fn rounds_that_contradict_each_other_decide_nothing() {
        let split = [(9.0, 1.0), (9.0, 1.0), (9.0, 1.0), (3.0, 1.0), (3.0, 1.0)];
        assert_eq!(ruled(Threshold::AtLeast(6.0), &split), Ruling::TooNoisy);
        let one_of_five = [(9.0, 1.0), (9.0, 1.0), (9.0, 1.0), (9.0, 1.0), (3.0, 1.0)];
        assert_eq!(ruled(Threshold::AtLeast(6.0), &one_of_five), Ruling::Holds);
    }

    #[test]
    fn too_few_rounds_decide_nothing() {
        for ratios in [&[][..], &[(100.0, 1.0)], &[(100.0, 1.0), (100.0, 1.0)]] {
            assert_eq!(ruled(Threshold::AtLeast(6.0), ratios), Ruling::TooNoisy, "{ratios:?}");
        }
        let one = Verdict::timed("ratio", Threshold::AtLeast(6.0), &rounds(&[(100.0, 1.0)]));
        assert!(one.sentence.ends_with("too noisy to tell; 1 rounds, 3 are needed"), "{}", one.sentence);
    }

    #[test]
    fn rounds_that_measured_nothing_decide_nothing() {
        for broken in [f64::NAN, 0.0, -1.0, f64::INFINITY] {
            for bad in [(broken, 1.0), (8.0, broken)] {
                let verdict = Verdict::timed("ratio", Threshold::AtLeast(6.0), &rounds(&[(8.0, 1.0), bad, (8.0, 1.0)]));
                assert_eq!((verdict.ruling, verdict.baseline_factor), (Ruling::TooNoisy, None), "{bad:?}");
                assert!(verdict.sentence.contains("measured nothing"), "{}", verdict.sentence);
            }
        }
        // A turn without a result is a division by zero.
        assert!(!Round::of(0.0, 0.0, 1.0).is_measured() && Round::of(1.0, 1.1, 6.0).is_measured());
    }

    #[test]
    fn counts_have_no_noise() {
        assert_eq!(Verdict::counted("bytes", Threshold::AtLeast(1000.0), 1000.0).ruling, Ruling::Holds);
        assert_eq!(Verdict::counted("bytes", Threshold::AtLeast(1000.0), 999.0).ruling, Ruling::DoesNotHold);
        assert_eq!(Verdict::counted("rate", Threshold::AtMost(0.0), 0.0).ruling, Ruling::Holds);
        assert_eq!(Verdict::counted("rate", Threshold::AtMost(0.5), f64::NAN).ruling, Ruling::TooNoisy);
        assert_eq!(Verdict::counted("bytes", Threshold::AtLeast(1000.0), f64::INFINITY).ruling, Ruling::Holds);
    }

    #[test]
    fn the_sentence_has_the_figures_of_the_verdict() {
        let verdict =
            Verdict::timed("times as fast", Threshold::AtLeast(6.0), &rounds(&[(8.0, 1.1), (9.0, 1.0), (7.0, 1.0)]));
        let words = "times as fast: 8.00 [7.00 .. 9.00], threshold at least 6.00: holds; the baseline against itself is off by up to 10.0 %";
        assert_eq!(verdict.sentence, words);
        let counted = Verdict::counted("of the bytes", Threshold::AtMost(0.6), 0.75);
        assert_eq!(
            counted.sentence,
            "of the bytes: 0.750, threshold at most 0.600: does not hold; counted, so there is no noise"
        );
    }
}
