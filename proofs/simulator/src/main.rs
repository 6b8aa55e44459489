//! `sealblock-simulator`: many seeds, one line for each load, and for a failure what to run to see it again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Parser;
use sealblock_simulator::system_under_test::Subject;
use sealblock_simulator::trial::{FailureReport, Order, Report};
use sealblock_simulator::workload::Workload;

/// Runs protected volumes, or mirrors of them, on simulated disks that lose, tear and reorder, and checks what is left after
/// crashes.
#[derive(Parser)]
#[command(after_help = "Example: sealblock-simulator --seeds 100 --workload laps\n\n\
    Exit status: 0 nothing found, 1 something found, 2 bad usage.")]
struct Arguments {
    /// Seeds to run for each load.
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One load only; all of them unless given.
    #[arg(long, value_parser = workload)]
    workload: Option<Workload>,
    /// What is put to the test: volume, mirror, or walk (mirrors through histories of their replicas).
    #[arg(long, default_value = "volume")]
    system: String,
    /// A fault to put into it; a wrong name lists those of volumes or mirrors. Mirrors and walks: none,
    /// skip-mark, answer-early, read-rebuilding, clear-unflushed, unordered, spoil-last-copy, forget-stale, forget-flushing,
    /// forget-missed, skip-lineage, untold, remove-untold, forget-sessions, believe-order, take-anybody, late-label, count-on,
    /// believe-pages.
    #[arg(long, default_value = "none")]
    mutation: String,
    /// Stop the first loaded machine at its n-th start or end of an I/O.
    #[arg(long, conflicts_with = "every_boundary")]
    crash_at: Option<u64>,
    /// Run each seed once for every start and end of an I/O of its first load, stopping there.
    #[arg(long)]
    every_boundary: bool,
    /// Threads; each runs seeds of its own.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Go on after a finding, and report all.
    #[arg(long)]
    keep_going: bool,
}

fn workload(name: &str) -> Result<Workload, String> {
    let names = || Workload::ALL.map(Workload::name).join(", ");
    Workload::from_name(name).ok_or_else(|| format!("the loads are {}", names()))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let subject = match Subject::new(&arguments.system, &arguments.mutation) {
        Ok(subject) => subject,
        Err(why) => {
            eprintln!("error: {why}");
            return ExitCode::from(2);
        }
    };
    let loads = arguments.workload.map_or(subject.loads().to_vec(), |one| vec![one]);
    let mut clean = true;
    for workload in loads {
        clean &= run_load(&arguments, subject, workload);
        if !clean && !arguments.keep_going {
            break;
        }
    }
    if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs all seeds of one load and prints its line; whether nothing was found.
fn run_load(arguments: &Arguments, subject: Subject, workload: Workload) -> bool {
    let (next, stop, started) = (AtomicU64::new(arguments.seed), AtomicBool::new(false), Instant::now());
    let (total, defeats) = (Mutex::new((0, Report::default())), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.max(1) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= arguments.seed.saturating_add(arguments.seeds) {
                        break;
                    }
                    run_seed(arguments, subject, workload, seed, &total, &mut |defeat| {
                        stop.store(!arguments.keep_going, Ordering::Relaxed);
                        defeats.lock().unwrap_or_else(PoisonError::into_inner).push(defeat);
                    });
                }
            });
        }
    });
    let (runs, report) = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut defeats = defeats.into_inner().unwrap_or_else(PoisonError::into_inner);
    defeats.sort_by_key(|defeat| (defeat.order.seed, defeat.order.crash_at));
    println!("{}", line(workload, runs, &report, started.elapsed().as_secs_f64(), defeats.len()));
    for defeat in &defeats {
        print!("{defeat}");
        println!("    again: {}", again(arguments, &defeat.order));
    }
    defeats.is_empty()
}

/// The summary of one load.
fn line(workload: Workload, runs: u64, report: &Report, elapsed_s: f64, defeats: usize) -> String {
    let verdict = if defeats == 0 { "clean".to_owned() } else { format!("{defeats} FAILED") };
    let Report {
        crashes,
        recovery_crashes,
        ios,
        answered,
        failed,
        blocks_checked,
        damages_found,
        decays,
        spoilt,
        resizings,
        ..
    } = report;
    format!(
        "{:7} {runs} runs, {crashes} crashes ({recovery_crashes} in recovery), {ios} I/Os, {answered} requests, \
         {failed} failed as planned, {blocks_checked} blocks checked, {damages_found} damages found, {decays} decays, \
         {spoilt} spoilt, {resizings} resizings, {elapsed_s:.1} s: {verdict}",
        workload.name(),
    )
}

/// Runs a seed, at all its boundaries if asked.
fn run_seed(
    arguments: &Arguments,
    subject: Subject,
    workload: Workload,
    seed: u64,
    total: &Mutex<(u64, Report)>,
    on_defeat: &mut dyn FnMut(Box<FailureReport>),
) {
    let mut crash_at = if arguments.every_boundary { Some(1) } else { arguments.crash_at };
    loop {
        let order = Order { seed, workload, crash_at };
        match run_caught(subject, order) {
            Ok(report) => {
                let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                total.0 += 1;
                total.1 += report;
                if !arguments.every_boundary || !report.first_crashed {
                    return;
                }
            }
            Err(defeat) => {
                on_defeat(defeat);
                if !arguments.keep_going {
                    return;
                }
            }
        }
        let Some(at) = crash_at.filter(|_| arguments.every_boundary) else { return };
        crash_at = Some(at + 1);
    }
}

/// A panic of the device under test is a finding like any other.
fn run_caught(subject: Subject, order: Order) -> Result<Report, Box<FailureReport>> {
    catch_unwind(AssertUnwindSafe(|| subject.run(order))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        let finding = format!("panic: {}", text.unwrap_or_default());
        Err(Box::new(FailureReport { order, finding, story: Vec::new() }))
    })
}

fn again(arguments: &Arguments, order: &Order) -> String {
    let mut command = format!(
        "cargo run --release -p sealblock-simulator -- --system {} --seeds 1 --seed {} --workload {}",
        arguments.system,
        order.seed,
        order.workload.name()
    );
    if arguments.mutation != "none" {
        command += &format!(" --mutation {}", arguments.mutation);
    }
    if let Some(at) = order.crash_at {
        command += &format!(" --crash-at {at}");
    }
    command
}
