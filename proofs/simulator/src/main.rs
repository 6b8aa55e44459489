//! `sealblock-simulator`: runs many seeds, prints one line for each load, and for a failure the command that repeats
//! it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Parser;
use sealblock_simulator::system_under_test::SystemUnderTest;
use sealblock_simulator::trial::{FailureReport, Report, TrialConfig};
use sealblock_simulator::workload::Workload;

/// Runs protected volumes, or mirrors of them, on simulated disks that lose, tear and reorder writes, and checks the
/// content after crashes.
#[derive(Parser)]
#[command(after_help = "Example: sealblock-simulator --seeds 100 --workload laps\n\n\
    Exit status: 0 nothing found, 1 something found, 2 bad usage.")]
struct Arguments {
    /// Number of seeds for each load.
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only this load [default: all].
    #[arg(long, value_enum)]
    workload: Option<Workload>,
    /// The system under test: volume, shards (volumes in shards), mirror, or walk (mirrors with random histories of their replicas).
    #[arg(long, default_value = "volume")]
    system: String,
    /// The mutation to inject; for an unknown name, the error lists those of volumes or of mirrors. Mirrors and walks:
    /// none, skip-mark, complete-early, read-resyncing, clear-unflushed, evict-unflushed, unordered, poison-last-copy,
    /// forget-stale, forget-flushing, forget-out-of-sync, skip-lineage, skip-own-label, skip-removed-label,
    /// forget-sessions, trust-order, reattach-diverged, late-label, count-on, trust-pages,
    /// keep-delegating.
    #[arg(long, default_value = "none")]
    mutation: String,
    /// Stop the machine that is first under load at its n-th start or end of an I/O.
    #[arg(long, conflicts_with = "every_boundary")]
    crash_at: Option<u64>,
    /// Run each seed once for every start and end of an I/O of its first load, and stop there.
    #[arg(long)]
    every_boundary: bool,
    /// Number of threads; each runs its own seeds.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Continue after a finding, and report all.
    #[arg(long)]
    keep_going: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let system_under_test = match SystemUnderTest::new(&arguments.system, &arguments.mutation) {
        Ok(system_under_test) => system_under_test,
        Err(why) => {
            eprintln!("error: {why}");
            return ExitCode::from(2);
        }
    };
    let loads = arguments.workload.map_or(system_under_test.loads().to_vec(), |one| vec![one]);
    let mut clean = true;
    for workload in loads {
        clean &= run_load(&arguments, system_under_test, workload);
        if !clean && !arguments.keep_going {
            break;
        }
    }
    if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs all seeds of one load and prints its line; true without a finding.
fn run_load(arguments: &Arguments, system_under_test: SystemUnderTest, workload: Workload) -> bool {
    let (next, stop, started) = (AtomicU64::new(arguments.seed), AtomicBool::new(false), Instant::now());
    let (total, failures) = (Mutex::new((0, Report::default())), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.max(1) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= arguments.seed.saturating_add(arguments.seeds) {
                        break;
                    }
                    run_seed(arguments, system_under_test, workload, seed, &total, &mut |failure| {
                        stop.store(!arguments.keep_going, Ordering::Relaxed);
                        failures.lock().unwrap_or_else(PoisonError::into_inner).push(failure);
                    });
                }
            });
        }
    });
    let (runs, report) = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    failures.sort_by_key(|failure| (failure.config.seed, failure.config.crash_at));
    println!("{}", line(workload, runs, &report, started.elapsed().as_secs_f64(), failures.len()));
    for failure in &failures {
        print!("{failure}");
        println!("    again: {}", again(arguments, &failure.config));
    }
    failures.is_empty()
}

/// The summary of one load.
fn line(workload: Workload, runs: u64, report: &Report, elapsed_s: f64, failures: usize) -> String {
    let verdict = if failures == 0 { "clean".to_owned() } else { format!("{failures} FAILED") };
    let Report {
        crashes,
        recovery_crashes,
        ios,
        completed,
        failed,
        blocks_checked,
        damages_found,
        decays,
        corrupted,
        resizings,
        ..
    } = report;
    format!(
        "{:7} {runs} runs, {crashes} crashes ({recovery_crashes} in recovery), {ios} I/Os, {completed} requests, \
         {failed} failed as planned, {blocks_checked} blocks checked, {damages_found} damages found, {decays} decays, \
         {corrupted} spoilt, {resizings} resizings, {elapsed_s:.1} s: {verdict}",
        workload.name(),
    )
}

/// Runs a seed; with `--every-boundary`, once for each start and end of an I/O.
fn run_seed(
    arguments: &Arguments,
    system_under_test: SystemUnderTest,
    workload: Workload,
    seed: u64,
    total: &Mutex<(u64, Report)>,
    on_failure: &mut dyn FnMut(Box<FailureReport>),
) {
    let mut crash_at = if arguments.every_boundary { Some(1) } else { arguments.crash_at };
    loop {
        let config = TrialConfig { seed, workload, crash_at };
        match run_caught(system_under_test, config) {
            Ok(report) => {
                let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                total.0 += 1;
                total.1 += report;
                if !arguments.every_boundary || !report.first_crashed {
                    return;
                }
            }
            Err(failure) => {
                on_failure(failure);
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
fn run_caught(system_under_test: SystemUnderTest, config: TrialConfig) -> Result<Report, Box<FailureReport>> {
    catch_unwind(AssertUnwindSafe(|| system_under_test.run(config))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        let finding = format!("panic: {}", text.unwrap_or_default());
        Err(Box::new(FailureReport { config, finding, log_lines: Vec::new() }))
    })
}

fn again(arguments: &Arguments, config: &TrialConfig) -> String {
    let mut command = format!(
        "cargo run --release -p sealblock-simulator -- --system {} --seeds 1 --seed {} --workload {}",
        arguments.system,
        config.seed,
        config.workload.name()
    );
    if arguments.mutation != "none" {
        command += &format!(" --mutation {}", arguments.mutation);
    }
    if let Some(at) = config.crash_at {
        command += &format!(" --crash-at {at}");
    }
    command
}
