//! `cargo xtask check`: the steps, in their order, cheap ones first.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::step::{self, Done, Steps};
use crate::workspace::{self, Workspace};
use crate::{circles, dependencies, fuzz, package, sizes};

/// The cargo-deny that the check builds for itself, once, into the target folder: two minutes on two cores.
const CARGO_DENY: &str = "0.20.2";
/// What cargo-deny looks at. Not advisories: their database is a Git repository elsewhere, and the check must give the
/// same answer where only the package registry can be reached. `cargo deny check advisories` asks for them by hand.
const DENY_CHECKS: [&str; 3] = ["licenses", "bans", "sources"];
/// Stock Linux kernels as hosts of what `sealblock serve` shows.
const CONFORMANCE: &str = "sealblock-proofs-conformance";
const SIMULATOR: &str = "sealblock-simulator";
/// Seeds of the short simulation.
const SIMULATION_SEEDS: &str = "400";
/// Seeds of mirrors, which take longer each.
const MIRROR_SEEDS: &str = "60";
/// Seeds of walks through the histories of mirrors.
const WALK_SEEDS: &str = "100";
/// Damaged volumes: each region, each damage, each state.
const FRAGILITY: &str = "sealblock-fragility";
/// Trials of the short run; the table in docs/formats/protected-volume.md is from 20,000.
const FRAGILITY_TRIALS: &str = "1920";
/// Whether the check fails when the simulator has no binary. Set it as soon as there is one.
const SIMULATION_REQUIRED: bool = true;

/// Runs all steps; `fast` leaves out those that look at dependencies, documentation and crashes.
pub fn run(fast: bool) -> Result<()> {
    let workspace = workspace::load()?;
    let logs = workspace.target.join("xtask");
    println!("checking {}; output of each step: {}", workspace.root.display(), logs.display());
    let mut steps = Steps::new(logs)?;
    steps.run("fmt", |log| command(cargo(["fmt", "--all", "--check"]), log));
    let clippy = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    steps.run("clippy", |log| command(cargo(clippy), log));
    steps.run("dependencies", |_| dependencies::check().map(Done::Ok));
    steps.run("circles", |_| circles::check().map(Done::Ok));
    steps.run("sizes", |_| sizes::check().map(Done::Ok));
    if !fast {
        steps.run("deny", |log| deny(&workspace, log));
        steps.run("docs", docs);
    }
    if !fast {
        steps.run("fuzz", |log| command(fuzz::compiles(&workspace.target), log));
    }
    steps.run("tests", tests);
    steps.run("doctests", |log| counted(cargo(["test", "--workspace", "--doc"]), log));
    if !fast {
        steps.run("simulation", |log| simulation(&workspace, log));
        steps.run("fragility", fragility);
        steps.run("conformance", conformance);
        steps.run("package", |log| package::check(&workspace, log));
    }
    steps.finish()
}

fn cargo<const N: usize>(words: [&str; N]) -> Command {
    let mut command = workspace::cargo();
    command.args(words);
    command
}

fn command(mut command: Command, log: &Path) -> Result<Done> {
    step::run(&mut command, log)?;
    Ok(Done::Ok(String::new()))
}

fn docs(log: &Path) -> Result<Done> {
    let mut command_line = cargo(["doc", "--workspace", "--no-deps"]);
    command_line.env("RUSTDOCFLAGS", "-D warnings");
    command(command_line, log)
}

/// All tests but those in documentation, which nextest does not run.
fn tests(log: &Path) -> Result<Done> {
    let nextest = cargo(["nextest", "--version"]).output().is_ok_and(|output| output.status.success());
    if nextest {
        let words = ["nextest", "run", "--workspace", "--no-fail-fast"];
        return counted(cargo(words), log);
    }
    counted(cargo(["test", "--workspace", "--all-targets", "--no-fail-fast"]), log)
}

fn counted(mut command: Command, log: &Path) -> Result<Done> {
    let output = step::run(&mut command, log)?;
    Ok(Done::Ok(format!("{} passed", passed(&output))))
}

/// Tests that passed, from the summaries of nextest (`12 tests run: 12 passed`) and libtest (`test result: ok. 3 passed`).
fn passed(output: &str) -> u64 {
    let summaries = output.lines().filter(|line| line.contains("tests run:") || line.contains("test result:"));
    let count = |line: &str| -> Option<u64> {
        let before = line.split_once(" passed")?.0;
        before.rsplit(' ').next()?.parse().ok()
    };
    summaries.filter_map(count).sum()
}

fn deny(workspace: &Workspace, log: &Path) -> Result<Done> {
    let program = step::tool(workspace, "cargo-deny", CARGO_DENY, log)?;
    let mut command_line = Command::new(program);
    command_line.current_dir(&workspace.root).args(["check"]).args(DENY_CHECKS);
    step::run(&mut command_line, log)?;
    Ok(Done::Ok(DENY_CHECKS.join(", ")))
}

fn simulation(workspace: &Workspace, log: &Path) -> Result<Done> {
    let ready = workspace.members.iter().any(|member| member.name == SIMULATOR && member.has_binary);
    if !ready && !SIMULATION_REQUIRED {
        return Ok(Done::Skipped(format!("{SIMULATOR} has no binary yet")));
    }
    let words = ["run", "--quiet", "--release", "--package", SIMULATOR, "--", "--seeds", SIMULATION_SEEDS];
    step::run(&mut cargo(words), log)?;
    for (system, seeds) in [("mirror", MIRROR_SEEDS), ("walk", WALK_SEEDS)] {
        let words = ["run", "--quiet", "--release", "--package", SIMULATOR, "--"];
        step::run(cargo(words).args(["--system", system, "--seeds", seeds]), log)?;
    }
    let seeds = format!("{SIMULATION_SEEDS} seeds of volumes, {MIRROR_SEEDS} of mirrors, {WALK_SEEDS} of walks");
    Ok(Done::Ok(seeds))
}

/// Every bound on what damage may cost.
fn fragility(log: &Path) -> Result<Done> {
    let words = ["run", "--quiet", "--release", "--package", FRAGILITY, "--", "--short", "--trials", FRAGILITY_TRIALS];
    step::run(&mut cargo(words), log)?;
    Ok(Done::Ok(format!("{FRAGILITY_TRIALS} damaged volumes")))
}

fn conformance(log: &Path) -> Result<Done> {
    let output = step::run(&mut cargo(["run", "--quiet", "--package", CONFORMANCE]), log)?;
    Ok(verdict_of_guests(&output))
}

/// The last line of the suite says how many tests passed, or why this machine cannot run guests.
fn verdict_of_guests(output: &str) -> Done {
    let last = output.lines().last().unwrap_or_default();
    match last.strip_prefix("skipped: ") {
        Some(why) => Done::Skipped(why.to_owned()),
        None => Done::Ok(last.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_tests_are_summed_over_all_summaries() {
        let nextest = "     Summary [   0.052s] 12 tests run: 12 passed, 0 skipped\n";
        assert_eq!(passed(nextest), 12);
        let libtest =
            "test a ... ok\ntest result: ok. 3 passed; 0 failed; 0 ignored\n\ntest result: ok. 4 passed; 0 failed\n";
        assert_eq!(passed(libtest), 7);
        assert_eq!(passed("nothing here passed\n"), 0);
    }

    #[test]
    fn a_suite_that_cannot_run_is_seen_as_skipped() {
        assert_eq!(verdict_of_guests("skipped: no server\n"), Done::Skipped("no server".to_owned()));
        let passed = "6.1   files ok\n17 tests passed in 99.0 s\n";
        assert_eq!(verdict_of_guests(passed), Done::Ok("17 tests passed in 99.0 s".to_owned()));
    }
}
