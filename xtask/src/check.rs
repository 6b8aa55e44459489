//! `cargo xtask check`: the steps, in their order, cheap ones first.
//!
//! Everything that runs is built once, in the dev profile and for all packages together: with `--package`, Cargo chooses other
//! features of what they share and builds that again. What needs no programs, or only programs, runs at the lowest priority
//! beside the steps that wait for the clock, so that no core is idle.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::step::{self, Done, Steps};
use crate::test_output::{self, TestTime};
use crate::workspace::{self, Workspace};
use crate::{circles, dependencies, fuzz, package, sizes};

/// The cargo-deny that the check builds for itself, once, into the target folder: 70 seconds of one core.
const CARGO_DENY: &str = "0.20.2";
/// What cargo-deny looks at. Not advisories: their database is a Git repository elsewhere, and the check must give the
/// same answer where only the package registry can be reached. `cargo deny check advisories` checks them by hand.
const DENY_CHECKS: [&str; 3] = ["licenses", "bans", "sources"];
/// It connects stock Linux kernels as hosts to `sealblock serve`.
const CONFORMANCE: &str = "sealblock-conformance";
const SIMULATOR: &str = "sealblock-simulator";
/// Seeds of the short simulation.
const SIMULATION_SEEDS: &str = "400";
/// Seeds of mirrors, which take longer each.
const MIRROR_SEEDS: &str = "60";
/// Seeds of walks through the histories of mirrors.
const WALK_SEEDS: &str = "100";
/// It damages volumes: each region, by each kind of corruption, in each state.
const FRAGILITY: &str = "sealblock-fragility";
/// Trials of the short runs; the tables in docs/formats are from more.
const FRAGILITY_TRIALS: &str = "1824";
const FRAGILITY_GROUP_TRIALS: &str = "480";
/// How many tests are shown with their times.
const SHOWN_TESTS: usize = 10;

/// Programs that tests of Btrfs need, and the library that they need beside those of every system.
const BTRFS_PACKAGES: [&str; 2] = ["btrfs-progs", "liblzo2-2"];

/// Steps beside all others: they build nothing of this workspace, whose builds exclude each other.
const BESIDE_BUILDS: [&str; 1] = ["deny"];
/// Steps beside the tests and the guests. The first three need nothing but programs, so they build nothing while Cargo still
/// looks at the tests.
const BESIDE_TESTS: [&str; 6] = ["simulation", "fragility", "package", "docs", "fuzz", "doctests"];
/// Steps that run programs of this workspace.
const WITH_PROGRAMS: [&str; 5] = ["btrfs-progs", "conformance", "simulation", "fragility", "package"];

/// Which steps to run.
#[derive(Clone, Copy)]
pub enum Selection<'a> {
    /// All of them.
    All,
    /// Those that do not look at dependencies, documentation and crashes.
    Fast,
    /// Those with these names, in the order of the check, and what they need before them.
    Named(&'a [&'a str]),
    /// Those with these names, for another run of the check that has built what they need.
    Beside(&'a [&'a str]),
}

/// Runs the steps.
pub fn run(selection: Selection) -> Result<()> {
    let workspace = workspace::load()?;
    let logs = workspace.target.join("xtask");
    println!("{}{}; output of each step: {}", step::HEADING, workspace.root.display(), logs.display());
    let mut steps = Steps::new(logs, move |name| is_selected(selection, name))?;
    steps.run("fmt", |log| command(cargo(["fmt", "--all", "--check"]), log));
    steps.run("dependencies", |_| dependencies::check().map(Done::Ok));
    steps.run("circles", |_| circles::check().map(Done::Ok));
    steps.run("sizes", |_| sizes::check().map(Done::Ok));
    if matches!(selection, Selection::All) {
        steps.start_beside(&BESIDE_BUILDS)?;
    }
    let clippy = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    steps.run("clippy", |log| command(cargo(clippy), log));
    steps.run("build", |log| command(cargo(["build", "--workspace", "--all-targets"]), log));
    if matches!(selection, Selection::All) {
        steps.start_beside(&BESIDE_TESTS)?;
    }
    steps.run("btrfs-progs", |log| btrfs_progs(&workspace, log));
    let mut times = Vec::new();
    steps.run("tests", |log| tests(&workspace, log, &mut times));
    steps.run("conformance", |log| conformance(&workspace, log));
    steps.run("deny", |log| deny(&workspace, log));
    steps.run("simulation", |log| simulation(&workspace, log));
    steps.run("fragility", |log| fragility(&workspace, log));
    steps.run("package", |log| package::check(&workspace, log));
    steps.run("docs", docs);
    steps.run("fuzz", |log| command(fuzz::compiles(&workspace.target), log));
    steps.run("doctests", |log| counted(cargo(["test", "--workspace", "--doc"]), log));
    match selection {
        Selection::Named(names) | Selection::Beside(names) => steps.finish_named(names),
        Selection::All | Selection::Fast => steps.finish(&slowest(&times)),
    }
}

fn is_selected(selection: Selection, step: &str) -> bool {
    match selection {
        Selection::All => !BESIDE_BUILDS.contains(&step) && !BESIDE_TESTS.contains(&step),
        Selection::Fast => ["fmt", "clippy", "dependencies", "circles", "sizes", "tests", "doctests"].contains(&step),
        Selection::Named(names) if step == "build" => {
            names.iter().any(|name| WITH_PROGRAMS.contains(name) || *name == step)
        }
        Selection::Named(names) | Selection::Beside(names) => names.contains(&step),
    }
}

/// A program of this workspace, as the step "build" leaves it.
fn program(workspace: &Workspace, name: &str) -> Command {
    let mut command = Command::new(workspace.built(name));
    command.current_dir(&workspace.root);
    command
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

/// Fetches the programs of Btrfs for the tests where this machine has none. Without them tests leave out what needs them, and say so.
fn btrfs_progs(workspace: &Workspace, log: &Path) -> Result<Done> {
    let is_there =
        |program: &str| Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if is_there("mkfs.btrfs") && is_there("btrfs") {
        return Ok(Done::Ok("of this machine".to_owned()));
    }
    let folder = btrfs_folder(workspace);
    let output =
        step::run(program(workspace, CONFORMANCE).arg("unpack").args(BTRFS_PACKAGES).arg("--into").arg(&folder), log)?;
    Ok(match verdict_of_guests(&output) {
        Done::Skipped(why) => Done::Skipped(why),
        _ => Done::Ok(BTRFS_PACKAGES[0].to_owned()),
    })
}

fn btrfs_folder(workspace: &Workspace) -> PathBuf {
    workspace.target.join("tools").join("btrfs-progs")
}

/// Has a command find the programs that were fetched, behind those of the machine.
fn find_btrfs_progs(workspace: &Workspace, command: &mut Command) {
    let folder = btrfs_folder(workspace);
    if !folder.is_dir() {
        return;
    }
    for (variable, below) in [
        ("PATH", &["bin", "sbin", "usr/bin", "usr/sbin"][..]),
        ("LD_LIBRARY_PATH", &["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"][..]),
    ] {
        let before = std::env::var_os(variable).unwrap_or_default();
        let before = std::env::split_paths(&before).filter(|path| !path.as_os_str().is_empty()).collect::<Vec<_>>();
        let all = before.into_iter().chain(below.iter().map(|below| folder.join(below)));
        if let Ok(all) = std::env::join_paths(all) {
            command.env(variable, all);
        }
    }
}

/// All tests but those in documentation, which nextest does not run. Adds the times of tests to `times`.
fn tests(workspace: &Workspace, log: &Path, times: &mut Vec<TestTime>) -> Result<Done> {
    let nextest = cargo(["nextest", "--version"]).output().is_ok_and(|output| output.status.success());
    let mut command_line = match nextest {
        true => cargo(["nextest", "run", "--workspace", "--no-fail-fast"]),
        false => cargo(["test", "--workspace", "--all-targets", "--no-fail-fast"]),
    };
    find_btrfs_progs(workspace, &mut command_line);
    let output = step::run(&mut command_line, log)?;
    *times = test_output::times(&output);
    Ok(passed(&output))
}

/// The tests that took longest, one line each; `cargo test` gives the times of test binaries only.
fn slowest(times: &[TestTime]) -> String {
    let lines = times.iter().take(SHOWN_TESTS).map(|test| format!("{:>10.1} s  {}\n", test.seconds, test.name));
    let lines: String = lines.collect();
    if lines.is_empty() { lines } else { format!("\nslowest tests\n{lines}") }
}

fn counted(mut command: Command, log: &Path) -> Result<Done> {
    let output = step::run(&mut command, log)?;
    Ok(passed(&output))
}

fn passed(output: &str) -> Done {
    Done::Ok(format!("{} passed", test_output::passed(output)))
}

fn deny(workspace: &Workspace, log: &Path) -> Result<Done> {
    let program = step::tool(workspace, "cargo-deny", CARGO_DENY, log)?;
    let mut command_line = Command::new(program);
    command_line.current_dir(&workspace.root).args(["check"]).args(DENY_CHECKS);
    step::run(&mut command_line, log)?;
    Ok(Done::Ok(DENY_CHECKS.join(", ")))
}

fn simulation(workspace: &Workspace, log: &Path) -> Result<Done> {
    step::run(program(workspace, SIMULATOR).args(["--seeds", SIMULATION_SEEDS]), log)?;
    for (system, seeds) in [("mirror", MIRROR_SEEDS), ("walk", WALK_SEEDS)] {
        step::run(program(workspace, SIMULATOR).args(["--system", system, "--seeds", seeds]), log)?;
    }
    let seeds = format!("{SIMULATION_SEEDS} seeds of volumes, {MIRROR_SEEDS} of mirrors, {WALK_SEEDS} of walks");
    Ok(Done::Ok(seeds))
}

/// Every bound on what damage may cost.
fn fragility(workspace: &Workspace, log: &Path) -> Result<Done> {
    step::run(program(workspace, FRAGILITY).args(["--short", "--trials", FRAGILITY_TRIALS]), log)?;
    step::run(program(workspace, FRAGILITY).args(["--groups", "--trials", FRAGILITY_GROUP_TRIALS]), log)?;
    Ok(Done::Ok(format!("{FRAGILITY_TRIALS} damaged volumes, {FRAGILITY_GROUP_TRIALS} damaged groups")))
}

fn conformance(workspace: &Workspace, log: &Path) -> Result<Done> {
    let output = step::run(program(workspace, CONFORMANCE).arg("--sealblock").arg(workspace.built("sealblock")), log)?;
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
    fn only_the_ten_slowest_tests_are_shown() {
        let times = (0..12).map(|at| TestTime { name: format!("crate{at}"), seconds: 12.0 - f64::from(at) });
        let shown = slowest(&times.collect::<Vec<_>>());
        assert_eq!(shown.trim().lines().count(), 11);
        assert!(shown.starts_with("\nslowest tests\n      12.0 s  crate0\n") && shown.ends_with("crate9\n"));
        assert_eq!(slowest(&[]), "");
    }

    #[test]
    fn each_step_runs_here_or_beside_and_by_its_name() {
        assert!(is_selected(Selection::All, "tests") && !is_selected(Selection::All, "deny"));
        assert!(is_selected(Selection::Fast, "tests") && !is_selected(Selection::Fast, "conformance"));
        for beside in BESIDE_BUILDS.iter().chain(&BESIDE_TESTS) {
            assert!(is_selected(Selection::Beside(&[beside]), beside) && !is_selected(Selection::All, beside));
        }
        assert!(!is_selected(Selection::Named(&BESIDE_TESTS), "tests"));
    }

    #[test]
    fn programs_are_built_before_steps_that_are_named_and_run_them() {
        assert!(is_selected(Selection::Named(&["package"]), "build"));
        assert!(is_selected(Selection::Named(&["build"]), "build"));
        assert!(!is_selected(Selection::Named(&["fmt"]), "build"));
        assert!(!is_selected(Selection::Beside(&["package"]), "build"));
    }

    #[test]
    fn a_suite_that_cannot_run_is_seen_as_skipped() {
        assert_eq!(verdict_of_guests("skipped: no server\n"), Done::Skipped("no server".to_owned()));
        let passed = "6.1   files ok\n17 tests passed in 99.0 s\n";
        assert_eq!(verdict_of_guests(passed), Done::Ok("17 tests passed in 99.0 s".to_owned()));
    }
}
