//! `sealblock-fragility`: runs many trials, prints what damage to each region costs, and prints for each violation how
//! to repeat it.
//!
//! A [`specimen`] is a volume in a known state, with every content that its blocks ever had. A [`trial`] damages one
//! part of it ([`damage`]), opens it read-only and then writable, reads every block, writes some, and opens it again.
//! Blocks may be lost only if the damage covers all places of their map entry, or their data ([`specimen::Places`]). A
//! refused open and bytes that no client wrote are violations. So is an older content, except where the table of
//! [`report`] lists it.
//!
//! This program does not know the volume's format: regions come from the volume's own layout, and map entries are found
//! by a scan.

mod arguments;
mod damage;
mod group;
mod kept;
mod life;
mod look;
mod medium;
mod model;
mod parts;
mod report;
mod scan;
mod specimen;
mod trial;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Parser;
use sealblock_media_volume::format::RegionKind;
use sealblock_simulator::random::{Random, mix};

use crate::arguments::{Arguments, FailedTrial, print_failed, to_text};
use crate::damage::{Cell, Damage, Target};
use crate::report::{Key, Report};
use crate::specimen::{Kind, Specimen, State};
use crate::trial::Outcome;

/// The number of trials that share one volume.
const PER_VOLUME: u64 = 96;
/// One in this many volumes is large enough to have bitmap pages. It is not a multiple of the number of states, so that
/// large volumes occur in each state.
const VOLUMES_PER_LARGE: u64 = 41;
/// The number of attempts to choose damage that changes something.
const DRAWS: u64 = 4;
#[derive(Default)]
struct Totals {
    report: Report,
    broken: BTreeMap<(Cell, State), Vec<FailedTrial>>,
    /// Volumes that have faults before any damage, by their first trial.
    unmade: Vec<(u64, String)>,
    void: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.groups {
        return group::main(&arguments);
    }
    let (first, end) = match arguments.trial {
        Some(trial) => (trial, trial.saturating_add(1)),
        None => (0, arguments.trials),
    };
    let (next, totals, started) = (AtomicU64::new(first / PER_VOLUME), Mutex::new(Totals::default()), Instant::now());
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let volume = next.fetch_add(1, Ordering::Relaxed);
                    let trials = (volume * PER_VOLUME).max(first)..((volume + 1) * PER_VOLUME).min(end);
                    if trials.is_empty() {
                        return;
                    }
                    run_volume(&arguments, volume, trials, &totals);
                }
            });
        }
    });
    let totals = totals.into_inner().unwrap_or_else(PoisonError::into_inner);
    print(&arguments, &totals, started.elapsed().as_secs_f64())
}

/// Runs the trials of one volume.
fn run_volume(arguments: &Arguments, volume: u64, trials: std::ops::Range<u64>, totals: &Mutex<Totals>) {
    let kind = match volume % VOLUMES_PER_LARGE == VOLUMES_PER_LARGE - 1 {
        _ if arguments.shards => Kind::Shards,
        true => Kind::Large,
        false => Kind::Small,
    };
    let states = kind.states().len() as u64;
    let state = kind.states()[(volume % states) as usize];
    let seed = mix(arguments.seed) ^ volume;
    let add = |change: &mut dyn FnMut(&mut Totals)| change(&mut totals.lock().unwrap_or_else(PoisonError::into_inner));
    let made = catch_unwind(|| Specimen::make(seed, state, kind)).unwrap_or_else(|panic| Err(to_text(&*panic)));
    let specimen = match made {
        Ok(specimen) => specimen,
        Err(why) => return add(&mut |totals| totals.unmade.push((trials.start, why.clone()))),
    };
    let cells = cells(arguments, &specimen, kind);
    for trial in trials.take_while(|_| !cells.is_empty()) {
        // The first trial of each volume is shifted, so that all states and shapes meet all kinds of damage.
        let cell = cells[((trial % PER_VOLUME + volume / states * 41) % cells.len() as u64) as usize];
        let outcome = run_trial(&specimen, cell, seed, trial);
        let key = Key { cell, state, sector_bytes: specimen.shape.sector_bytes };
        add(&mut |totals| match &outcome {
            None => totals.void += 1,
            Some((damage, outcome)) => {
                if totals.report.take(key, outcome) {
                    let what = format!("{}, {}, {specimen}, bytes {:?}", cell.target, cell.damage(), damage.ranges);
                    let broken = FailedTrial { trial, what, findings: outcome.findings.clone() };
                    totals.broken.entry((cell, state)).or_default().push(broken);
                }
            }
        });
    }
}

/// The kinds of damage of a volume.
fn cells(arguments: &Arguments, specimen: &Specimen, kind: Kind) -> Vec<Cell> {
    let mut cells = Cell::all(specimen);
    if kind == Kind::Large {
        cells.retain(|cell| is_of_large(*cell));
    }
    if let Some(part) = &arguments.region {
        cells.retain(|cell| cell.target.to_string().contains(part));
    }
    cells
}

/// Opening a large volume takes long, so only damage to its bitmap pages and log is tried.
fn is_of_large(cell: Cell) -> bool {
    matches!(cell.target, Target::Region(RegionKind::BitmapPages | RegionKind::Log(_)))
}

/// Runs one trial; `None` if there was nothing to damage. A panic of the volume is a violation like any other.
fn run_trial(specimen: &Specimen, cell: Cell, seed: u64, trial: u64) -> Option<(Damage, Outcome)> {
    let random = Random::new(mix(seed ^ trial.rotate_left(32)));
    let damage = (0..DRAWS).find_map(|_| Damage::draw(cell, specimen, &random))?;
    let outcome = catch_unwind(AssertUnwindSafe(|| trial::run(specimen, &damage, &random)));
    let outcome = outcome.unwrap_or_else(|panic| {
        let why = format!("panic: {}", to_text(&*panic));
        Outcome { refused: Some(why.clone()), findings: vec![why], ..Outcome::default() }
    });
    Some((damage, outcome))
}

fn print(arguments: &Arguments, totals: &Totals, elapsed_s: f64) -> ExitCode {
    let report = &totals.report;
    print!("{}", if arguments.short { report.summary() } else { report.table(arguments.states) });
    let total = report.total();
    println!(
        "\n{} trials ({} more had nothing to damage), {} refused, {} not writable, {} with wrong data, {} with older data \
         ({} more of the last commit), {} with a guard met by chance, {} with losses beyond the bound; {elapsed_s:.0} s",
        total.trials,
        totals.void,
        total.refused,
        total.unwritable,
        total.wrong,
        total.stale,
        total.window,
        total.collisions,
        total.beyond
    );
    let mut is_clean = totals.unmade.is_empty();
    for (trial, why) in &totals.unmade {
        println!("BROKEN before anything was damaged: {why}\n    again: --seed {} --trial {trial}", arguments.seed);
    }
    for broken in totals.broken.values() {
        is_clean = false;
        print_failed(broken, arguments);
    }
    if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
