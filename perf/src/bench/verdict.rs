//! Whether a claim holds, by what was measured: *holds*, *does not hold* or *too noisy to tell*.
//!
//! A machine is never quiet, so a ratio by itself says little. In each round the baseline has two turns, and its second turn as a part of its
//! first one, `again`, is 1 but for noise. Whatever `again` misses 1 by, the median of any other ratio of these rounds may be wrong by as well. So a
//! claim holds only if the median of its ratios beats the bar by more than that, and fails only if it misses the bar by more.
//!
//! The greatest miss counts; of many rounds, where one that was disturbed says little of a median, the greatest that is left when one is left out for every
//! four rounds beyond the least number of rounds. A claim that is exactly at its bar is then decided by noise, as
//! tests make it up, in at most 6 % of runs with three rounds and 1.5 % with seven.
//!
//! Three further rules keep a verdict from saying more than was seen. Fewer than three rounds have no spread that means anything. A round
//! whose ratio is not a number above 0 has measured nothing, so nothing is said. And at most one round in four may be on the other side of the bar.
//!
//! What was counted and not timed has no noise: [`Verdict::counted`].

use serde::Serialize;

use crate::report::{Spread, number};

/// Fewer rounds do not decide.
const MIN_ROUNDS: usize = 3;
/// One round in so many may be on the other side of the bar.
const DISSENT: usize = 4;
/// For so many rounds beyond [`MIN_ROUNDS`] one is left out where the baseline missed itself most.
const LEFT_OUT: usize = 4;

/// What follows of the figures.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
pub enum Ruling {
    /// The claim holds here.
    #[serde(rename = "holds")]
    Holds,
    /// It does not hold here.
    #[serde(rename = "does not hold")]
    DoesNotHold,
    /// This run does not decide.
    #[serde(rename = "too noisy to tell")]
    TooNoisy,
}

impl Ruling {
    /// In words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Ruling::Holds => "holds",
            Ruling::DoesNotHold => "does not hold",
            Ruling::TooNoisy => "too noisy to tell",
        }
    }
}

/// On which side of the bar a claim has to be.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bar {
    /// At this or above.
    AtLeast(f64),
    /// At this or below.
    AtMost(f64),
}

impl Bar {
    /// Whether a value that has no noise is on the right side.
    fn is_kept_by(self, value: f64) -> bool {
        match self {
            Bar::AtLeast(bar) => value >= bar,
            Bar::AtMost(bar) => value <= bar,
        }
    }

    /// The same bar, harder to keep by a factor above 1, or easier by one below.
    fn harder(self, factor: f64) -> Bar {
        match self {
            Bar::AtLeast(bar) => Bar::AtLeast(bar * factor),
            Bar::AtMost(bar) => Bar::AtMost(bar / factor),
        }
    }
}

impl std::fmt::Display for Bar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Bar::AtLeast(bar) => write!(f, "at least {}", number(bar)),
            Bar::AtMost(bar) => write!(f, "at most {}", number(bar)),
        }
    }
}

/// Ratios of one round.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Round {
    /// What is claimed, as a part of the baseline in the same round.
    pub claim: f64,
    /// The baseline's second turn as a part of its first one.
    pub again: f64,
}

impl Round {
    /// Of what was measured in one round, in any unit that all three have: the baseline, the baseline again, and what is claimed.
    pub fn of(baseline: f64, again: f64, claimed: f64) -> Round {
        Round { claim: claimed / baseline, again: again / baseline }
    }

    fn is_measured(self) -> bool {
        [self.claim, self.again].iter().all(|ratio| ratio.is_finite() && *ratio > 0.0)
    }
}

/// A claim with its figures and what follows of them.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Verdict {
    /// What the ratio is of, in words.
    pub what: String,
    /// The bar.
    pub bar: Bar,
    /// The median of the ratios, or the counted figure.
    pub median: f64,
    /// The least ratio.
    pub least: f64,
    /// The greatest ratio.
    pub most: f64,
    /// How many rounds there were; 0 for what was counted.
    pub rounds: usize,
    /// By what factor the baseline missed itself, rounds left out apart; nothing for what was counted, and where a round has measured nothing.
    pub yardstick_factor: Option<f64>,
    /// What follows.
    pub ruling: Ruling,
    /// All of that in a sentence.
    pub sentence: String,
}

impl Verdict {
    /// By ratios that were timed.
    pub fn timed(what: impl Into<String>, bar: Bar, rounds: &[Round]) -> Verdict {
        let ratios = Spread::of(rounds.iter().map(|round| round.claim));
        let factor = yardstick_factor(rounds);
        let verdict = Verdict {
            what: what.into(),
            bar,
            median: ratios.median,
            least: ratios.least,
            most: ratios.most,
            rounds: rounds.len(),
            yardstick_factor: factor,
            ruling: ruling(bar, rounds, factor, ratios.median),
            sentence: String::new(),
        };
        Verdict { sentence: sentence(&verdict), ..verdict }
    }

    /// By a figure that was counted, which no machine changes. What is no number cannot be compared with a bar.
    pub fn counted(what: impl Into<String>, bar: Bar, value: f64) -> Verdict {
        let ruling = match (value.is_nan(), bar.is_kept_by(value)) {
            (true, _) => Ruling::TooNoisy,
            (false, true) => Ruling::Holds,
            (false, false) => Ruling::DoesNotHold,
        };
        let (median, least, most) = (value, value, value);
        let (what, sentence) = (what.into(), String::new());
        let verdict = Verdict { what, bar, median, least, most, rounds: 0, yardstick_factor: None, ruling, sentence };
        Verdict { sentence: sentence_of_count(&verdict), ..verdict }
    }
}

/// The rounds, of so many, that say nothing of the baseline's noise.
const fn left_out(rounds: usize) -> usize {
    rounds.saturating_sub(MIN_ROUNDS) / LEFT_OUT
}

/// The greatest factor by which the baseline missed itself in rounds that are not left out; nothing if a round has measured nothing or there is none.
fn yardstick_factor(rounds: &[Round]) -> Option<f64> {
    if rounds.is_empty() || !rounds.iter().all(|round| round.is_measured()) {
        return None;
    }
    let mut factors: Vec<f64> = rounds.iter().map(|round| round.again.max(1.0 / round.again)).collect();
    factors.sort_unstable_by(f64::total_cmp);
    factors.get(factors.len() - 1 - left_out(factors.len())).copied()
}

fn ruling(bar: Bar, rounds: &[Round], factor: Option<f64>, median: f64) -> Ruling {
    let Some(factor) = factor.filter(|_| rounds.len() >= MIN_ROUNDS) else { return Ruling::TooNoisy };
    let kept = rounds.iter().filter(|round| bar.is_kept_by(round.claim)).count();
    let missed = rounds.len() - kept;
    if bar.harder(factor).is_kept_by(median) && missed * DISSENT <= rounds.len() {
        Ruling::Holds
    } else if !bar.harder(1.0 / factor).is_kept_by(median) && kept * DISSENT <= rounds.len() {
        Ruling::DoesNotHold
    } else {
        Ruling::TooNoisy
    }
}

fn sentence(verdict: &Verdict) -> String {
    let Verdict { what, bar, median, least, most, rounds, ruling, .. } = verdict;
    let (median, least, most) = (number(*median), number(*least), number(*most));
    let why = match verdict.yardstick_factor {
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
    format!("{what}: {median} [{least} .. {most}], threshold {bar}: {}; {why}", ruling.as_str())
}

fn sentence_of_count(verdict: &Verdict) -> String {
    let Verdict { what, bar, median, ruling, .. } = verdict;
    format!("{what}: {}, threshold {bar}: {}; counted, so there is no noise", number(*median), ruling.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(ratios: &[(f64, f64)]) -> Vec<Round> {
        ratios.iter().map(|&(claim, again)| Round { claim, again }).collect()
    }

    fn ruled(bar: Bar, ratios: &[(f64, f64)]) -> Ruling {
        Verdict::timed("ratio", bar, &rounds(ratios)).ruling
    }

    #[test]
    fn a_claim_holds_that_beats_the_bar_by_more_than_noise() {
        let good = [(8.0, 1.02), (8.4, 0.97), (7.9, 1.0), (8.1, 1.01)];
        assert_eq!(ruled(Bar::AtLeast(6.0), &good), Ruling::Holds);
        assert_eq!(ruled(Bar::AtMost(9.0), &good), Ruling::Holds);
    }

    #[test]
    fn a_claim_fails_that_misses_the_bar_by_more_than_noise() {
        let bad = [(4.0, 1.02), (4.4, 0.97), (3.9, 1.0), (4.1, 1.01)];
        assert_eq!(ruled(Bar::AtLeast(6.0), &bad), Ruling::DoesNotHold);
        assert_eq!(ruled(Bar::AtMost(3.0), &bad), Ruling::DoesNotHold);
    }

    #[test]
    fn a_yardstick_that_misses_itself_decides_nothing() {
        let near = |again| [(6.5, 1.0), (6.6, again), (6.4, 1.0), (6.5, 1.0)];
        assert_eq!(ruled(Bar::AtLeast(6.0), &near(1.05)), Ruling::Holds);
        // As much below 1 as above: both are noise.
        assert_eq!(ruled(Bar::AtLeast(6.0), &near(1.2)), Ruling::TooNoisy);
        assert_eq!(ruled(Bar::AtLeast(6.0), &near(1.0 / 1.2)), Ruling::TooNoisy);
        assert_eq!(ruled(Bar::AtLeast(7.0), &near(1.05)), Ruling::DoesNotHold);
        assert_eq!(ruled(Bar::AtLeast(7.0), &near(1.2)), Ruling::TooNoisy);
        // Noise is a factor, so a claim that is far off is decided all the same.
        assert_eq!(ruled(Bar::AtLeast(2.0), &near(3.0)), Ruling::Holds);
    }

    #[test]
    fn a_disturbed_round_among_many_says_nothing_of_the_noise() {
        let disturbed = |count: usize, rounds: usize| {
            let round = |at: usize| if at < count { (6.5, 3.0) } else { (6.5, 1.02) };
            Verdict::timed("ratio", Bar::AtLeast(6.0), &self::rounds(&(0..rounds).map(round).collect::<Vec<_>>()))
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

    /// A claim that is exactly at its bar is the worst case: whatever is said of it is noise. Every turn is off by a factor of its own, and in
    /// one round of eight all turns behind some moment are off by half as well.
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
                Verdict::timed("ratio", Bar::AtLeast(1.0), &ratios.collect::<Vec<_>>()).ruling
            };
            let decided = (0..RUNS).filter(|_| run() != Ruling::TooNoisy).count();
            assert!(decided * 1000 < RUNS * of_a_thousand, "{decided} of {RUNS} runs with {rounds} rounds");
        }
    }

    #[test]
    fn rounds_that_contradict_each_other_decide_nothing() {
        let split = [(9.0, 1.0), (9.0, 1.0), (9.0, 1.0), (3.0, 1.0), (3.0, 1.0)];
        assert_eq!(ruled(Bar::AtLeast(6.0), &split), Ruling::TooNoisy);
        let one_of_five = [(9.0, 1.0), (9.0, 1.0), (9.0, 1.0), (9.0, 1.0), (3.0, 1.0)];
        assert_eq!(ruled(Bar::AtLeast(6.0), &one_of_five), Ruling::Holds);
    }

    #[test]
    fn too_few_rounds_decide_nothing() {
        for ratios in [&[][..], &[(100.0, 1.0)], &[(100.0, 1.0), (100.0, 1.0)]] {
            assert_eq!(ruled(Bar::AtLeast(6.0), ratios), Ruling::TooNoisy, "{ratios:?}");
        }
        let one = Verdict::timed("ratio", Bar::AtLeast(6.0), &rounds(&[(100.0, 1.0)]));
        assert!(one.sentence.ends_with("too noisy to tell; 1 rounds, 3 are needed"), "{}", one.sentence);
    }

    #[test]
    fn rounds_that_measured_nothing_decide_nothing() {
        for broken in [f64::NAN, 0.0, -1.0, f64::INFINITY] {
            for bad in [(broken, 1.0), (8.0, broken)] {
                let verdict = Verdict::timed("ratio", Bar::AtLeast(6.0), &rounds(&[(8.0, 1.0), bad, (8.0, 1.0)]));
                assert_eq!((verdict.ruling, verdict.yardstick_factor), (Ruling::TooNoisy, None), "{bad:?}");
                assert!(verdict.sentence.contains("measured nothing"), "{}", verdict.sentence);
            }
        }
        // A turn without a result is a division by zero.
        assert!(!Round::of(0.0, 0.0, 1.0).is_measured() && Round::of(1.0, 1.1, 6.0).is_measured());
    }

    #[test]
    fn counts_have_no_noise() {
        assert_eq!(Verdict::counted("bytes", Bar::AtLeast(1000.0), 1000.0).ruling, Ruling::Holds);
        assert_eq!(Verdict::counted("bytes", Bar::AtLeast(1000.0), 999.0).ruling, Ruling::DoesNotHold);
        assert_eq!(Verdict::counted("rate", Bar::AtMost(0.0), 0.0).ruling, Ruling::Holds);
        assert_eq!(Verdict::counted("rate", Bar::AtMost(0.5), f64::NAN).ruling, Ruling::TooNoisy);
        assert_eq!(Verdict::counted("bytes", Bar::AtLeast(1000.0), f64::INFINITY).ruling, Ruling::Holds);
    }

    #[test]
    fn the_sentence_has_the_figures_of_the_verdict() {
        let verdict =
            Verdict::timed("times as fast", Bar::AtLeast(6.0), &rounds(&[(8.0, 1.1), (9.0, 1.0), (7.0, 1.0)]));
        let words = "times as fast: 8.00 [7.00 .. 9.00], threshold at least 6.00: holds; the baseline against itself is off by up to 10.0 %";
        assert_eq!(verdict.sentence, words);
        let counted = Verdict::counted("of the bytes", Bar::AtMost(0.6), 0.75);
        assert_eq!(
            counted.sentence,
            "of the bytes: 0.750, threshold at most 0.600: does not hold; counted, so there is no noise"
        );
    }
}
