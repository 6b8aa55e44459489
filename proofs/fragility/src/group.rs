//! Groups of protected volumes, that is mirrors and stripes: records of members are damaged, rolled back to an earlier
//! state, or replaced by another member's.
//!
//! A [`specimen`] is a group in a known state, with every content that its blocks ever had, and the earlier states of
//! its members. A [`trial`] changes records of one member or of all ([`damage`]), opens the group with the product's
//! own code, first read-only and then writable, and reads everything ([`open`]).

pub mod damage;
pub mod open;
pub mod report;
pub mod shape;
pub mod specimen;
pub mod trial;

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use sealblock_simulator::random::{Random, mix};

use crate::arguments::{Arguments, FailedTrial, print_failed, to_text};
use crate::group::damage::{Cell, Damage};
use crate::group::report::Report;
use crate::group::shape::Kind;
use crate::group::specimen::{GroupSpecimen, State};
use crate::group::trial::Outcome;

/// The number of trials that share one group.
const PER_GROUP: u64 = 48;
/// The number of attempts to choose damage that changes something.
const DRAWS: u64 = 4;

#[derive(Default)]
struct Totals {
    report: Report,
    broken: BTreeMap<(Kind, Cell), Vec<FailedTrial>>,
    /// Groups that have faults before any damage, by their first trial.
    unmade: Vec<(u64, String)>,
    void: u64,
}

/// Runs the requested trials, and prints their results.
pub fn main(arguments: &Arguments) -> ExitCode {
    let wanted = match arguments.trial {
        Some(trial) => trial..trial.saturating_add(1),
        None => 0..arguments.trials,
    };
    let (next, totals, started) = (AtomicU64::new(wanted.start / PER_GROUP), Mutex::default(), Instant::now());
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let group = next.fetch_add(1, Ordering::Relaxed);
                    let first = (group * PER_GROUP).max(wanted.start);
                    let trials = first..((group + 1) * PER_GROUP).min(wanted.end);
                    if trials.is_empty() {
                        return;
                    }
                    run_group(arguments, group, trials, &totals);
                }
            });
        }
    });
    let totals = totals.into_inner().unwrap_or_else(PoisonError::into_inner);
    print(arguments, &totals, started.elapsed().as_secs_f64())
}

/// Runs the trials that share a group.
fn run_group(arguments: &Arguments, group: u64, trials: Range<u64>, totals: &Mutex<Totals>) {
    let (kinds, states) = (Kind::ALL.len() as u64, State::ALL.len() as u64);
    let kind = Kind::ALL[(group % kinds) as usize];
    let state = State::ALL[(group / kinds % states) as usize];
    let seed = mix(arguments.seed ^ 0x6702) ^ group;
    let add = |change: &mut dyn FnMut(&mut Totals)| change(&mut totals.lock().unwrap_or_else(PoisonError::into_inner));
    let made = catch_unwind(|| GroupSpecimen::make(seed, kind, state)).unwrap_or_else(|panic| Err(to_text(&*panic)));
    let specimen = match made {
        Ok(specimen) => specimen,
        Err(why) => return add(&mut |totals| totals.unmade.push((trials.start, format!("{kind}, {state}: {why}")))),
    };
    let mut cells = Cell::all(kind);
    if let Some(part) = &arguments.region {
        cells.retain(|cell| cell.to_string().contains(part));
    }
    for trial in trials.take_while(|_| !cells.is_empty()) {
        // The first trial of each group is shifted, so that all kinds and states of groups meet all kinds of damage.
        let cell = cells[((trial % PER_GROUP + group * 31) % cells.len() as u64) as usize];
        let outcome = run_trial(&specimen, cell, seed, trial);
        add(&mut |totals| match &outcome {
            None => totals.void += 1,
            Some((damage, outcome)) => {
                totals.report.take((kind, cell), outcome);
                if !outcome.findings.is_empty() {
                    let what = format!("{cell}, {specimen}, {damage}");
                    let broken = FailedTrial { trial, what, findings: outcome.findings.clone() };
                    totals.broken.entry((kind, cell)).or_default().push(broken);
                }
            }
        });
    }
}

/// Runs one trial; `None` if there was nothing to damage. A panic is a violation like any other.
fn run_trial(specimen: &GroupSpecimen, cell: Cell, seed: u64, trial: u64) -> Option<(Damage, Outcome)> {
    let random = Random::new(mix(seed ^ trial.rotate_left(32)));
    let damage = (0..DRAWS).find_map(|_| Damage::draw(cell, specimen, &random))?;
    let outcome = catch_unwind(AssertUnwindSafe(|| trial::run(specimen, &damage, &random)));
    let outcome = outcome.unwrap_or_else(|panic| {
        let findings = vec![format!("panic: {}", to_text(&*panic))];
        Outcome { findings, ..Outcome::default() }
    });
    Some((damage, outcome))
}

fn print(arguments: &Arguments, totals: &Totals, elapsed_s: f64) -> ExitCode {
    print!("{}", totals.report.table());
    println!("\n{} ({} more had nothing to damage); {elapsed_s:.0} s", totals.report.total(), totals.void);
    for (trial, why) in &totals.unmade {
        println!(
            "BROKEN before anything was damaged: {why}\n    again: --groups --seed {} --trial {trial}",
            arguments.seed
        );
    }
    totals.broken.values().for_each(|broken| print_failed(broken, arguments));
    let is_clean = totals.unmade.is_empty() && totals.broken.is_empty();
    if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
