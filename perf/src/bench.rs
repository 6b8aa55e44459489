//! `sealblock bench`: measures published claims on this machine.
//!
//! A claim is an entry in [`CLAIMS`] with a function that measures it. This module calls the functions in order,
//! describes the machine, and returns the results: [`Report`]. [`text`], [`plot`] and [`html`] present them; the JSON
//! is the report itself. If a claim cannot be measured, this is reported, and the others are measured.
//!
//! To add one, write a file with a `pub const CLAIM: Claim`, and add a line to [`CLAIMS`].

mod async_seal;
mod beside;
mod dix_detection;
mod dix_guard;
pub mod html;
pub mod machine;
mod one_pass;
pub mod outcome;
mod overwrite;
pub mod plot;
pub mod text;
pub mod verdict;
mod verify_offload;
mod write_amplification;
mod write_zeroes;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use sealblock_units::ByteCount;
use serde::Serialize;

use machine::Machine;
use outcome::{Claim, Interrupted, Listener, Outcome, Progress, Published, Scale};

use crate::setup;

/// The version of the JSON format. While it stays the same, fields are only added.
pub const VERSION: u32 = 1;

/// All claims, in the order in which they are measured.
pub const CLAIMS: &[&Claim] = &[
    &verify_offload::CLAIM,
    &dix_guard::CLAIM,
    &write_zeroes::CLAIM,
    &async_seal::CLAIM,
    &one_pass::CLAIM,
    &write_amplification::CLAIM,
];

/// The claim of this name.
pub fn find(name: &str) -> Option<&'static Claim> {
    CLAIMS.iter().copied().find(|claim| claim.name == name)
}

/// The size of measurements that the user requested; an option that is not given has the claim's own default.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Wishes {
    /// Bytes of each device.
    pub size: Option<ByteCount>,
    /// Seconds of one turn of one contender, if a turn is not a fixed amount of work.
    pub seconds: Option<f64>,
    /// Rounds; every contender has a turn in each.
    pub rounds: Option<u32>,
    /// Folder for temporary files.
    pub dir: PathBuf,
}

impl Wishes {
    /// The size of a claim's measurement.
    fn scale(&self, claim: &Claim) -> Scale {
        Scale {
            size: self.size.unwrap_or(claim.defaults.size),
            seconds: self.seconds.unwrap_or(claim.defaults.seconds),
            rounds: self.rounds.unwrap_or(claim.defaults.rounds),
            dir: self.dir.clone(),
        }
    }
}

/// The result of a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// The version of this format.
    pub version: u32,
    /// The machine.
    pub machine: Machine,
    /// The start, in seconds since 1970.
    pub started_unix_s: u64,
    /// The duration, in seconds.
    pub elapsed_s: f64,
    /// True if a signal ended it; claims that were not completely measured are left out.
    pub interrupted: bool,
    /// The claims, in the order in which they were measured.
    pub claims: Vec<Measured>,
}

/// A claim and its result.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Measured {
    /// Its name on the command line.
    pub name: &'static str,
    /// The claim.
    pub claim: &'static str,
    /// The published figures.
    pub published: Vec<Published>,
    /// Bytes of each device.
    pub size_bytes: u64,
    /// Seconds of one turn of one contender, if a turn was not a fixed amount of work.
    pub seconds: f64,
    /// Rounds; every contender had a turn in each.
    pub rounds: u32,
    /// How long the measurement took, in seconds.
    pub elapsed_s: f64,
    /// Why it could not be measured; `None` if it was measured.
    pub failure: Option<String>,
    /// The result; empty if it could not be measured.
    #[serde(flatten)]
    pub outcome: Outcome,
}

#[cfg(test)]
impl Measured {
    /// A claim with this result, for tests of the presentations.
    fn sample(outcome: Outcome) -> Measured {
        Measured {
            name: "claim",
            claim: "It is so.",
            published: vec![Published { figure: "5.97 times", source: "a cover letter" }],
            size_bytes: 1 << 20,
            seconds: 0.5,
            rounds: 3,
            elapsed_s: 2.0,
            failure: None,
            outcome,
        }
    }
}

impl Report {
    /// True if a claim could not be measured.
    pub fn has_failed(&self) -> bool {
        self.claims.iter().any(|claim| claim.failure.is_some())
    }
}

/// Measures these claims in order. `listener` is called at each step, and can end the run.
pub fn measure(claims: &[&'static Claim], wishes: &Wishes, listener: &Arc<Listener>) -> Report {
    let started_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (watch, machine) = (Instant::now(), Machine::this());
    let (mut interrupted, mut measured) = (false, Vec::new());
    for &claim in claims {
        match one(claim, &wishes.scale(claim), listener) {
            Ok(claim) => measured.push(claim),
            Err(Interrupted) => {
                interrupted = true;
                break;
            }
        }
    }
    let elapsed_s = watch.elapsed().as_secs_f64();
    Report { version: VERSION, machine, started_unix_s, elapsed_s, interrupted, claims: measured }
}

fn one(claim: &'static Claim, scale: &Scale, listener: &Arc<Listener>) -> Result<Measured, Interrupted> {
    let watch = Instant::now();
    let (outcome, failure) = match checked(claim, scale, &Progress::new(claim.name, Arc::clone(listener))) {
        Ok(outcome) => (outcome, None),
        Err(error) if error.is::<Interrupted>() => return Err(Interrupted),
        Err(error) => (Outcome::default(), Some(format!("{error:#}"))),
    };
    Ok(Measured {
        name: claim.name,
        claim: claim.sentence,
        published: claim.published.to_vec(),
        size_bytes: scale.size.get(),
        seconds: scale.seconds,
        rounds: scale.rounds,
        elapsed_s: watch.elapsed().as_secs_f64(),
        failure,
        outcome,
    })
}

/// Measures a claim. If it makes files and its folder does not support them, it fails first, so that no measurement is
/// lost.
fn checked(claim: &Claim, scale: &Scale, progress: &Progress) -> anyhow::Result<Outcome> {
    if claim.makes_files {
        setup::takes_files(&scale.dir)?;
    }
    (claim.measure)(scale, progress)
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::path::Path;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::bench::outcome::{Defaults, Step};

    const DEFAULTS: Defaults = Defaults { size: ByteCount::new(1 << 20), seconds: 0.5, rounds: 3 };
    const GOOD: Claim = Claim {
        name: "good",
        sentence: "It is good.",
        published: &[],
        defaults: DEFAULTS,
        makes_files: false,
        measure: |scale, progress| {
            for round in 1..=scale.rounds {
                progress.step("all", round, scale.rounds)?;
            }
            Ok(Outcome { notes: vec![format!("{} {}", scale.size, scale.seconds)], ..Outcome::default() })
        },
    };
    const BAD: Claim =
        Claim { name: "bad", measure: |_, _| Err(anyhow::anyhow!("no disk").context("making a file")), ..GOOD };

    fn told(until: u32) -> Arc<Listener> {
        Arc::new(move |step: &Step| match step.round > until {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        })
    }

    #[test]
    fn a_claim_that_fails_does_not_keep_others_from_being_measured() {
        let report = measure(&[&BAD, &GOOD], &Wishes { seconds: Some(0.25), ..Wishes::default() }, &told(9));
        assert!(report.has_failed() && !report.interrupted);
        assert_eq!(report.claims[0].failure.as_deref(), Some("making a file: no disk"));
        assert_eq!((report.claims[1].failure.as_ref(), report.claims[1].rounds), (None, 3));
        assert_eq!(report.claims[1].outcome.notes, ["1048576 0.25".replace("1048576", &DEFAULTS.size.to_string())]);
    }

    #[test]
    fn a_folder_that_takes_no_files_is_refused_before_anything_is_measured() {
        const FILES: Claim = Claim { name: "files", makes_files: true, ..GOOD };
        let absent = std::env::temp_dir().join("sealblock-perf-no-such-folder");
        let steps = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&steps);
        let listener: Arc<Listener> = Arc::new(move |_: &Step| {
            counted.fetch_add(1, Ordering::Relaxed);
            ControlFlow::Continue(())
        });
        let failure = |claim: &'static Claim, dir: &Path| {
            let wishes = Wishes { dir: dir.to_owned(), ..Wishes::default() };
            measure(&[claim], &wishes, &listener).claims.remove(0).failure
        };
        let refused = failure(&FILES, &absent).expect("there is no such folder");
        assert_eq!(steps.load(Ordering::Relaxed), 0, "{refused}");
        assert!(refused.contains(&absent.display().to_string()), "{refused}");
        assert_eq!(refused.matches("No such file or directory").count(), 1, "{refused}");
        assert_eq!((failure(&FILES, &std::env::temp_dir()), failure(&GOOD, &absent)), (None, None));
        assert_eq!(steps.load(Ordering::Relaxed), 2 * DEFAULTS.rounds);
    }

    #[test]
    fn an_interrupted_run_has_only_what_was_measured_to_the_end() {
        let report = measure(&[&GOOD, &GOOD], &Wishes::default(), &told(2));
        assert!(report.interrupted && !report.has_failed() && report.claims.is_empty());
    }

    #[test]
    fn names_of_claims_are_found_and_different() {
        for claim in CLAIMS {
            assert_eq!(find(claim.name).map(|found| found.sentence), Some(claim.sentence));
        }
        assert!(find("verify").is_none());
    }
}
