//! Runs the tests: all kernels at once, each in two lanes. In one lane a shared guest runs one test after the other; in
//! the other, tests that boot their own guest run one after the other. So at most two guests of a kernel run at once,
//! six with three kernels, each with 1 GiB of memory and 256 MiB of translated code.
//!
//! After a failed test a new guest is started, so that the next test is not affected. A test whose guest died is
//! retried once: emulated machines die now and then, and a fault of sealblock would occur again.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::context::{LIMIT, OwnGuestContext, TestContext, quiet};
use crate::harness::{Guest, GuestDied, Kernel, Parts, longest_script};
use crate::served::Sealblock;
use crate::suite::{CASES, Case, Coverage, Run, Version};

/// The configuration of a run.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// The program under test.
    pub sealblock: PathBuf,
    /// Names of tests; empty for all.
    pub names: Vec<String>,
    /// The kernels that run them.
    pub coverage: Coverage,
    /// The required start of a kernel's release.
    pub kernel: String,
    /// True if folders of tests that passed are kept.
    pub keep: bool,
    /// Number of kills in tests that kill a server again and again.
    pub kills: u32,
}

/// The result of a test on a kernel.
struct TestResult {
    kernel: String,
    case: &'static str,
    failed: bool,
}

/// Runs all tests. Prints a line for each.
///
/// # Errors
/// If a test fails.
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
    println!("the longest script took {:.0} of {} s", longest_script().as_secs_f64(), LIMIT.as_secs());
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", summary(results.len(), seconds, &parts.missing));
    Ok(())
}

/// The last line, which `cargo xtask check` shows.
fn summary(tests: usize, seconds: f64, missing: &[String]) -> String {
    format!("{tests} tests passed in {seconds:.1} s{}", without(missing))
}

/// The skipped tests and the reasons, as the end of a sentence.
fn without(missing: &[String]) -> String {
    if missing.is_empty() { String::new() } else { format!(", without {}", missing.join(" and ")) }
}

/// The tests of a kernel, by lane.
#[derive(Default)]
struct Lanes<'a> {
    /// They run in one guest, one after the other.
    shared: Vec<&'a Case>,
    /// Each runs in its own guest, one after the other.
    own: Vec<&'a Case>,
}

impl<'a> Lanes<'a> {
    /// The tests that a kernel runs.
    fn of(cases: &[&'a Case], version: Version, versions: &[Version], coverage: Coverage) -> Lanes<'a> {
        let cases = cases.iter().copied().filter(|case| case.is_for(version, versions, coverage));
        let (shared, own) = cases.partition(|case| matches!(case.run, Run::Shared(_)));
        Lanes { shared, own }
    }
}

/// Runs the tests of one lane of a kernel.
struct Lane<'a> {
    parts: &'a Parts,
    plan: &'a RunPlan,
    kernel: &'a Kernel,
    /// The kernel's name in messages and folders.
    short: String,
    home: &'a Path,
    results: &'a Mutex<Vec<TestResult>>,
    /// The shared guest.
    guest: Option<Guest>,
}

fn on(parts: &Parts, plan: &RunPlan, kernel: &Kernel, cases: &[&Case], results: &Mutex<Vec<TestResult>>) -> Result<()> {
    let short = format!("{}.{}", kernel.version().0, kernel.version().1);
    let home = parts.home().join("runs").join(&short);
    // Made before both lanes begin, because each test has a folder in it.
    fs::remove_dir_all(&home).or_else(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })?;
    let versions: Vec<Version> = parts.kernels.iter().map(Kernel::version).collect();
    let Lanes { shared, own } = Lanes::of(cases, kernel.version(), &versions, plan.coverage);
    let lane = || Lane { parts, plan, kernel, short: short.clone(), home: &home, results, guest: None };
    thread::scope(|scope| {
        let beside = scope.spawn(|| own.into_iter().for_each(|case| lane().one(case)));
        let mut lane = lane();
        shared.into_iter().for_each(|case| lane.one(case));
        beside.join().map_err(|_| anyhow::anyhow!("a test panicked"))
    })
}

impl Lane<'_> {
    /// Runs a test and prints its result.
    fn one(&mut self, case: &Case) {
        let started = Instant::now();
        let cpu_before_s = self.guest.as_ref().map_or(0.0, Guest::cpu_s);
        let outcome = self.with_retry(case);
        let seconds = started.elapsed().as_secs_f64();
        let cpu_s = self.guest.as_ref().map(|guest| guest.cpu_s() - cpu_before_s);
        let cpu = cpu_s.map(|cpu_s| format!("  {cpu_s:>6.1} s CPU of the guest")).unwrap_or_default();
        let result = TestResult { kernel: self.short.clone(), case: case.name, failed: outcome.is_err() };
        // One call for each line, because the other lane prints at the same time.
        match outcome {
            Ok(()) => println!("{:<5} {:<12} ok     {seconds:>6.1} s{cpu}", self.short, case.name),
            Err(error) => println!("{:<5} {:<12} FAILED {seconds:>6.1} s\n{error:#}\n", self.short, case.name),
        }
        self.results.lock().map(|mut all| all.push(result)).unwrap_or_default();
    }

    fn with_retry(&mut self, case: &Case) -> Result<()> {
        let folder = self.home.join(case.name);
        let outcome = match self.once(case, &folder) {
            Err(error) if error.chain().any(|cause| cause.is::<GuestDied>()) => {
                println!("{} lost its guest, once more:\n{error:#}", case.name);
                self.once(case, &folder)
            }
            outcome => outcome,
        };
        if outcome.is_ok() && !self.plan.keep {
            fs::remove_dir_all(&folder).context("removing the test's folder")?;
        }
        outcome
    }

    /// Runs the test in a folder of its own, which gets the end of the guest's console.
    fn once(&mut self, case: &Case, folder: &Path) -> Result<()> {
        if folder.exists() {
            fs::remove_dir_all(folder).context("removing what an earlier try left")?;
        }
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let sealblock = Sealblock { program: self.plan.sealblock.clone(), folder: folder.to_owned() };
        let (outcome, guest_folder) = match case.run {
            Run::Shared(run) => {
                let guest_folder = self.home.join("guest");
                (self.shared(run, sealblock, &guest_folder), guest_folder)
            }
            Run::Own(run) => {
                let (parts, kernel) = (self.parts, self.kernel);
                let context = OwnGuestContext { parts, kernel, sealblock, version: kernel.version() };
                (run(&context), context.guest_folder())
            }
        };
        let tail = Guest::console_tail(&guest_folder);
        fs::write(folder.join("console"), &tail).context("keeping the console")?;
        outcome.map_err(|error| error.context(format!("the guest's console ends:\n{tail}\n")))
    }

    /// Runs the test in the existing guest or a new one, and then checks the kernel's messages. After a failure the
    /// guest is dropped.
    fn shared(
        &mut self,
        run: fn(&mut TestContext<'_>) -> Result<()>,
        sealblock: Sealblock,
        guest_folder: &Path,
    ) -> Result<()> {
        let mut guest = match self.guest.take() {
            Some(guest) => guest,
            None => Guest::boot(self.parts, self.kernel, guest_folder)?,
        };
        let (version, kills) = (self.kernel.version(), self.plan.kills);
        run(&mut TestContext { guest: &mut guest, sealblock, version, kills })?;
        quiet(&mut guest)?;
        self.guest = Some(guest);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_with_a_guest_of_their_own_run_beside_those_that_share_one() {
        const VERSIONS: [Version; 3] = [(6, 1), (6, 12), (7, 2)];
        let all: Vec<&Case> = CASES.iter().collect();
        let names = |cases: &[&Case]| cases.iter().map(|case| case.name).collect::<Vec<_>>();
        let newest = VERSIONS[2];
        let Lanes { shared, own } = Lanes::of(&all, newest, &VERSIONS, Coverage::EveryKernel);
        assert_eq!(names(&own), ["drives", "passthrough", "scsi", "maps", "ublk"]);
        let mut both = [names(&shared), names(&own)].concat();
        let due = all.iter().filter(|case| case.is_for(newest, &VERSIONS, Coverage::EveryKernel));
        let mut due: Vec<_> = due.map(|case| case.name).collect();
        both.sort_unstable();
        due.sort_unstable();
        assert_eq!(both, due, "each test is in one lane");
        assert!(
            names(&shared).starts_with(&["identify", "statuses"]) && names(&shared).ends_with(&["restart", "kills"])
        );
        let oldest = Lanes::of(&all, VERSIONS[0], &VERSIONS, Coverage::EveryKernel);
        assert_eq!(names(&oldest.own), ["drives", "scsi"]);
        let named: Vec<&Case> = all.iter().copied().filter(|case| ["maps", "dix"].contains(&case.name)).collect();
        let only_own = Lanes::of(&named, newest, &VERSIONS, Coverage::Named);
        assert_eq!((names(&only_own.own), only_own.shared.len()), (vec!["maps", "dix"], 0));
    }

    #[test]
    fn skipped_tests_are_in_the_last_line() {
        assert_eq!(summary(7, 1.25, &[]), "7 tests passed in 1.2 s");
        let missing = ["the kernel of a (no server)".to_owned(), "the kernel of b (404)".to_owned()];
        assert_eq!(
            summary(7, 1.25, &missing),
            "7 tests passed in 1.2 s, without the kernel of a (no server) and the kernel of b (404)"
        );
    }
}
