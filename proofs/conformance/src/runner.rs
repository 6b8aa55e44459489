//! Runs the tests: each kernel in a guest of its own, all at once, one test after the other.
//!
//! A test that fails is followed by a new guest, so that it leaves nothing to the next one. A test whose guest died is tried
//! once more: emulated machines do that, rarely, and a fault of ours does it again.

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::context::{TestContext, quiet};
use crate::harness::{Guest, GuestDied, Kernel, Parts};
use crate::served::Sealblock;
use crate::suite::{CASES, Case};

/// What to run, and how.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// The program under test.
    pub sealblock: PathBuf,
    /// Names of tests; all if empty.
    pub names: Vec<String>,
    /// What the release of a kernel has to begin with.
    pub kernel: String,
    /// True if folders of tests that passed stay.
    pub keep: bool,
}

/// How a test ended on a kernel.
struct TestResult {
    kernel: String,
    case: &'static str,
    failed: bool,
}

/// Runs them all. Prints a line for each.
///
/// # Errors
/// If one fails.
pub fn run(parts: &Parts, plan: &RunPlan) -> Result<()> {
    let cases: Vec<&Case> =
        CASES.iter().filter(|case| plan.names.is_empty() || plan.names.iter().any(|name| name == case.name)).collect();
    let results = Mutex::new(Vec::new());
    let started = Instant::now();
    for missing in &parts.missing {
        println!("left out: {missing}");
    }
    let outcome: Result<()> = thread::scope(|scope| {
        let kernels = parts.kernels.iter().filter(|kernel| kernel.is_called(&plan.kernel));
        let threads: Vec<_> = kernels.map(|kernel| scope.spawn(|| on(parts, plan, kernel, &cases, &results))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| bail!("a test panicked")))
    });
    outcome?;
    let results = results.into_inner().unwrap_or_default();
    let failed: Vec<String> = results
        .iter()
        .filter(|result| result.failed)
        .map(|result| format!("{} on {}", result.case, result.kernel))
        .collect();
    if !failed.is_empty() {
        bail!("failed: {}; logs are in {}", failed.join(", "), parts.home().join("runs").display());
    }
    if results.is_empty() {
        bail!("nothing of this name runs on a kernel of this name{}", without(&parts.missing));
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", summary(results.len(), seconds, &parts.missing));
    Ok(())
}

/// The last line, which `cargo xtask check` shows.
fn summary(tests: usize, seconds: f64, missing: &[String]) -> String {
    format!("{tests} tests passed in {seconds:.1} s{}", without(missing))
}

/// What was left out and why, behind a sentence.
fn without(missing: &[String]) -> String {
    if missing.is_empty() { String::new() } else { format!(", without {}", missing.join(" and ")) }
}

fn on(parts: &Parts, plan: &RunPlan, kernel: &Kernel, cases: &[&Case], results: &Mutex<Vec<TestResult>>) -> Result<()> {
    let short = format!("{}.{}", kernel.version().0, kernel.version().1);
    let home = parts.home().join("runs").join(&short);
    fs::remove_dir_all(&home).or_else(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })?;
    let mut guest = None;
    for case in cases.iter().filter(|case| case.is_for(kernel, !plan.names.is_empty())) {
        let started = Instant::now();
        let cpu_before_s = guest.as_ref().map_or(0.0, Guest::cpu_s);
        let outcome = with_retry(parts, plan, kernel, case, &home, &mut guest);
        let seconds = started.elapsed().as_secs_f64();
        let cpu_s = guest.as_ref().map_or(0.0, Guest::cpu_s) - cpu_before_s;
        let result = TestResult { kernel: short.clone(), case: case.name, failed: outcome.is_err() };
        match outcome {
            Ok(()) => println!("{short:<5} {:<12} ok     {seconds:>6.1} s  {cpu_s:>6.1} s CPU of the guest", case.name),
            Err(error) => println!("{short:<5} {:<12} FAILED {seconds:>6.1} s\n{error:#}\n", case.name),
        }
        results.lock().map(|mut all| all.push(result)).unwrap_or_default();
    }
    Ok(())
}

/// The test, and what the kernel has to say of it.
fn tried(case: &Case, guest: &mut Guest, sealblock: Sealblock, parts: &Parts, kernel: &Kernel) -> Result<()> {
    (case.run)(&mut TestContext { guest, parts, kernel, sealblock, version: kernel.version() })?;
    quiet(guest)
}

fn with_retry(
    parts: &Parts,
    plan: &RunPlan,
    kernel: &Kernel,
    case: &Case,
    home: &std::path::Path,
    guest: &mut Option<Guest>,
) -> Result<()> {
    let folder = home.join(case.name);
    let mut once = || -> Result<()> {
        if folder.exists() {
            fs::remove_dir_all(&folder).context("removing what an earlier try left")?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let mut own = match guest.take() {
            Some(guest) => guest,
            None => Guest::boot(parts, kernel, &home.join("guest"))?,
        };
        let sealblock = Sealblock { program: plan.sealblock.clone(), folder: folder.clone() };
        let outcome = tried(case, &mut own, sealblock, parts, kernel);
        let tail = own.console_tail();
        fs::write(folder.join("console"), &tail).context("keeping the console")?;
        match outcome {
            Ok(()) => *guest = Some(own),
            Err(error) => return Err(error.context(format!("the guest's console ends:\n{tail}\n"))),
        }
        Ok(())
    };
    let outcome = match once() {
        Err(error) if error.chain().any(|cause| cause.is::<GuestDied>()) => {
            println!("{} lost its guest, once more:\n{error:#}", case.name);
            once()
        }
        outcome => outcome,
    };
    if outcome.is_ok() && !plan.keep {
        fs::remove_dir_all(&folder).context("removing the test's folder")?;
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_out_is_in_the_last_line() {
        assert_eq!(summary(7, 1.25, &[]), "7 tests passed in 1.2 s");
        let missing = ["the kernel of a (no server)".to_owned(), "the kernel of b (404)".to_owned()];
        assert_eq!(
            summary(7, 1.25, &missing),
            "7 tests passed in 1.2 s, without the kernel of a (no server) and the kernel of b (404)"
        );
    }
}
