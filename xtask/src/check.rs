//! `cargo xtask check`: the steps in their order, cheap ones first.
//!
//! Everything that runs is built once, in the dev profile and for all packages together. With `--package`, Cargo would
//! choose other features of shared dependencies and build these again. Steps that need no programs, or nothing else,
//! run at the lowest priority beside the steps that mostly wait, so that no core is idle. A step that already passed
//! with the same [`inputs`](crate::inputs) is skipped, and each conformance test runs on one kernel, which changes with
//! each commit. Both are printed, and both can be switched off.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::inputs::{Inputs, Reads};
use crate::step::{self, Done, Steps};
use crate::test_output::{self, TestTime};
use crate::workspace::{self, Workspace};
use crate::{circles, dependencies, doctests, fuzz, links, package, sizes};

/// The cargo-deny that the check builds for itself, once, in the target folder; this takes 70 seconds of one core.
const CARGO_DENY: &str = "0.20.2";
/// What cargo-deny checks. Advisories are not checked: their database is a Git repository elsewhere, and the check must
/// give the same result where only the package registry can be reached. `cargo deny check advisories` checks them
/// manually.
const DENY_CHECKS: [&str; 3] = ["licenses", "bans", "sources"];
/// The program that connects stock Linux kernels as hosts to `sealblock serve`.
const CONFORMANCE: &str = "sealblock-conformance";
const SIMULATOR: &str = "sealblock-simulator";
/// The number of seeds of the short simulation.
const SIMULATION_SEEDS: &str = "400";
/// The number of seeds for volumes in shards.
const SHARD_SEEDS: &str = "150";
/// The number of seeds for mirrors, which take longer each.
const MIRROR_SEEDS: &str = "60";
/// The number of seeds for walks through the histories of mirrors.
const WALK_SEEDS: &str = "100";
/// The text in the suite's last line before the kernels that could not be fetched.
const WITHOUT: &str = ", without ";
/// The program that damages volumes: each region, by each kind of corruption, in each state.
const FRAGILITY: &str = "sealblock-fragility";
/// The number of trials in the short runs; the tables in docs/formats are from more trials.
const FRAGILITY_TRIALS: &str = "1824";
const FRAGILITY_SHARD_TRIALS: &str = "768";
const FRAGILITY_GROUP_TRIALS: &str = "480";
/// The number of tests that are listed with their times.
const SHOWN_TESTS: usize = 10;

/// Packages with programs that the Btrfs tests need, and with a library that is not on every system.
const BTRFS_PACKAGES: [&str; 2] = ["btrfs-progs", "liblzo2-2"];

/// Steps that run beside all others: they build nothing in this workspace, where only one build can run at a time.
const BESIDE_BUILDS: [&str; 1] = ["deny"];
/// Steps that run beside the tests and the guests. The first three need only programs, so they build nothing while
/// Cargo is still preparing the tests.
const BESIDE_TESTS: [&str; 6] = ["simulation", "fragility", "package", "docs", "fuzz", "doctests"];
/// Steps that run programs of this workspace.
const WITH_PROGRAMS: [&str; 5] = ["btrfs-progs", "conformance", "simulation", "fragility", "package"];

/// Which steps run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Selection {
    /// All of them.
    All,
    /// All except those for dependencies, documentation and crashes.
    Fast,
    /// The named ones, in the order of the check, and the steps that they need.
    Named,
    /// The named ones, started by another run of the check that has built what they need.
    Beside,
}

/// The requested check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request<'a> {
    selection: Selection,
    names: Vec<&'a str>,
    /// True if no step is skipped because it passed before.
    all: bool,
    /// True if each kernel runs every test that it supports.
    every_kernel: bool,
}

impl<'a> Request<'a> {
    /// Parses the arguments after `check`; `None` if one is unknown. Whether each name is a step is only known after
    /// the steps have run.
    pub fn parse(words: &[&'a str]) -> Option<Request<'a>> {
        let mut request = Request { selection: Selection::All, names: Vec::new(), all: false, every_kernel: false };
        for word in words {
            match *word {
                "--all" => request.all = true,
                "--every-kernel" => request.every_kernel = true,
                "--fast" => request.selection = Selection::Fast,
                "--beside" => request.selection = Selection::Beside,
                flag if flag.starts_with('-') => return None,
                name => request.names.push(name),
            }
        }
        match (request.selection, request.names.is_empty()) {
            (Selection::All, false) => request.selection = Selection::Named,
            (Selection::Fast, false) | (Selection::Beside, true) => return None,
            _ => {}
        }
        // A step that is named always runs.
        request.all |= request.selection == Selection::Named;
        Some(request)
    }

    /// For the processes that run beside this one.
    fn flags(&self) -> Vec<&'static str> {
        let flags = [(self.all, "--all"), (self.every_kernel, "--every-kernel")];
        flags.into_iter().filter_map(|(is_set, flag)| is_set.then_some(flag)).collect()
    }

    fn selects(&self, step: &str) -> bool {
        match self.selection {
            Selection::All => !BESIDE_BUILDS.contains(&step) && !BESIDE_TESTS.contains(&step),
            Selection::Fast => {
                ["fmt", "clippy", "dependencies", "circles", "sizes", "links", "tests", "doctests"].contains(&step)
            }
            Selection::Named if step == "build" => {
                self.names.iter().any(|name| WITH_PROGRAMS.contains(name) || *name == step)
            }
            Selection::Named | Selection::Beside => self.names.contains(&step),
        }
    }
}

/// Runs the steps.
pub fn run(request: &Request) -> Result<()> {
    let workspace = workspace::load()?;
    let logs = workspace.target.join("xtask");
    println!("{}{}; output of each step: {}", step::HEADING, workspace.root.display(), logs.display());
    let mut steps = Steps::new(logs, |name| request.selects(name))?;
    let inputs = Inputs::of(&workspace, request.all)?;
    let fuzzed = workspace.members_of(fuzz::MANIFEST)?;
    let members = [workspace.members.as_slice(), fuzzed.as_slice()].concat();
    let built_of = |folders: &[&str]| Reads::program(&members, folders);
    steps.run("fmt", |log| command(cargo(["fmt", "--all", "--check"]), log));
    steps.run("dependencies", |_| dependencies::check().map(Done::Ok));
    steps.run("circles", |_| circles::check().map(Done::Ok));
    steps.run("sizes", |_| sizes::check().map(Done::Ok));
    steps.run("links", |_| links::check().map(Done::Ok));
    if request.selection == Selection::All {
        steps.start_beside(&BESIDE_BUILDS, &request.flags())?;
    }
    let clippy = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    steps.run("clippy", |log| command(cargo(clippy), log));
    steps.run("build", |log| command(cargo(["build", "--workspace", "--all-targets"]), log));
    if request.selection == Selection::All {
        steps.start_beside(&BESIDE_TESTS, &request.flags())?;
    }
    steps.run("btrfs-progs", |log| btrfs_progs(&workspace, log));
    let mut times = Vec::new();
    let mut run = |name: &'static str, reads: Reads, step: &mut dyn FnMut(&Path) -> Result<Done>| {
        steps.run(name, |log| inputs.unless_passed(name, &reads, || step(log)));
    };
    run("tests", Reads::Everything, &mut |log| tests(&workspace, log, &mut times));
    run("conformance", built_of(&["tools", "proofs/conformance"]), &mut |log| conformance(&workspace, request, log));
    run("deny", Reads::Manifests, &mut |log| deny(&workspace, log));
    run("simulation", built_of(&["proofs/simulator"]), &mut |log| simulation(&workspace, log));
    run("fragility", built_of(&["proofs/fragility"]), &mut |log| fragility(&workspace, log));
    let packaged = built_of(&["tools", "xtask"]).and("packaging").and("docs");
    run("package", packaged, &mut |log| package::check(&workspace, log));
    run("docs", Reads::Sources, &mut docs);
    run("fuzz", built_of(&[fuzz::FOLDER]), &mut |log| command(fuzz::compiles(&workspace.target), log));
    run("doctests", Reads::Sources, &mut |log| doctests(&workspace, log));
    match request.selection {
        Selection::Named | Selection::Beside => steps.finish_named(&request.names),
        Selection::All | Selection::Fast => steps.finish(&slowest(&times)),
    }
}

/// A program of this workspace, as built by the step "build".
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

/// Fetches the Btrfs programs for the tests if this machine has none. Without them the tests skip what needs them, and
/// print that.
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

/// Lets a command find the fetched programs, after those of the machine.
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

/// How many tests run at once for each CPU; most wait for programs and disks.
const TESTS_PER_CPU: usize = 2;

/// All tests except those in documentation, which nextest does not run. Adds the times of tests to `times`.
fn tests(workspace: &Workspace, log: &Path, times: &mut Vec<TestTime>) -> Result<Done> {
    let nextest = cargo(["nextest", "--version"]).output().is_ok_and(|output| output.status.success());
    let threads = std::thread::available_parallelism().map_or(1, usize::from) * TESTS_PER_CPU;
    let mut command_line = match nextest {
        true => cargo(["nextest", "run", "--workspace", "--no-fail-fast", "--test-threads", &threads.to_string()]),
        false => cargo(["test", "--workspace", "--all-targets", "--no-fail-fast"]),
    };
    find_btrfs_progs(workspace, &mut command_line);
    let output = step::run(&mut command_line, log)?;
    *times = test_output::times(&output);
    Ok(passed(&output))
}

/// The slowest tests, one line each; `cargo test` only gives the times of test binaries.
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
    for (system, seeds) in [("shards", SHARD_SEEDS), ("mirror", MIRROR_SEEDS), ("walk", WALK_SEEDS)] {
        step::run(program(workspace, SIMULATOR).args(["--system", system, "--seeds", seeds]), log)?;
    }
    Ok(Done::Ok(format!(
        "{SIMULATION_SEEDS} seeds of volumes, {SHARD_SEEDS} of volumes in shards, {MIRROR_SEEDS} of mirrors, \
         {WALK_SEEDS} of walks"
    )))
}

/// Checks every limit for what damage may cost.
fn fragility(workspace: &Workspace, log: &Path) -> Result<Done> {
    step::run(program(workspace, FRAGILITY).args(["--short", "--trials", FRAGILITY_TRIALS]), log)?;
    step::run(program(workspace, FRAGILITY).args(["--shards", "--trials", FRAGILITY_SHARD_TRIALS]), log)?;
    step::run(program(workspace, FRAGILITY).args(["--groups", "--trials", FRAGILITY_GROUP_TRIALS]), log)?;
    Ok(Done::Ok(format!(
        "{FRAGILITY_TRIALS} damaged volumes, {FRAGILITY_SHARD_TRIALS} damaged volumes in shards, \
         {FRAGILITY_GROUP_TRIALS} damaged groups"
    )))
}

fn conformance(workspace: &Workspace, request: &Request, log: &Path) -> Result<Done> {
    let mut suite = program(workspace, CONFORMANCE);
    suite.arg("--sealblock").arg(workspace.built("sealblock"));
    if request.every_kernel {
        return step::run(&mut suite, log).map(|output| verdict_of_guests(&output));
    }
    let turn = turn();
    let output = step::run(suite.args(["--turn", &turn.to_string()]), log)?;
    Ok(match verdict_of_guests(&output) {
        Done::Ok(said) => Done::Ok(format!("{said}, turn {turn} of the kernels; --every-kernel runs all on each")),
        other => other,
    })
}

/// Which kernel's turn it is: the number of commits, so that the next commit uses the next kernel.
fn turn() -> u64 {
    let mut git = Command::new("git");
    git.current_dir(workspace::root()).args(["rev-list", "--count", "HEAD"]);
    let counted = git.output().ok().and_then(|output| String::from_utf8(output.stdout).ok());
    counted.and_then(|text| text.trim().parse().ok()).unwrap_or_default()
}

fn doctests(workspace: &Workspace, log: &Path) -> Result<Done> {
    doctests::check(workspace)?;
    counted(cargo(["test", "--workspace", "--doc"]), log)
}

/// The last line of the suite has the number of passed tests, or the reason why this machine cannot run guests.
fn verdict_of_guests(output: &str) -> Done {
    let last = output.lines().last().unwrap_or_default();
    match last.strip_prefix("skipped: ") {
        Some(why) => Done::Skipped(why.to_owned()),
        None if last.contains(WITHOUT) => Done::Partly(last.to_owned()),
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

    fn asked<'a>(words: &[&'a str]) -> Request<'a> {
        Request::parse(words).expect("these words are known")
    }

    #[test]
    fn words_are_flags_or_steps_and_unknown_flags_are_refused() {
        for wrong in [&["--help"][..], &["-h"], &["--every"], &["--fast", "tests"], &["--beside"]] {
            assert_eq!(Request::parse(wrong), None, "{wrong:?}");
        }
        assert_eq!(asked(&[]).flags(), [""; 0]);
        assert_eq!(asked(&["--every-kernel", "--all"]).flags(), ["--all", "--every-kernel"]);
        assert!(asked(&["tests"]).all && !asked(&[]).all && !asked(&["--beside", "deny"]).all);
    }

    #[test]
    fn each_step_runs_here_or_beside_and_by_its_name() {
        let (all, fast) = (asked(&[]), asked(&["--fast"]));
        assert!(all.selects("tests") && !all.selects("deny"));
        assert!(fast.selects("tests") && !fast.selects("conformance"));
        for beside in BESIDE_BUILDS.iter().chain(&BESIDE_TESTS) {
            assert!(asked(&["--beside", beside]).selects(beside) && !all.selects(beside));
        }
        assert!(!asked(&BESIDE_TESTS).selects("tests"));
    }

    #[test]
    fn programs_are_built_before_steps_that_are_named_and_run_them() {
        assert!(asked(&["package"]).selects("build"));
        assert!(asked(&["build"]).selects("build"));
        assert!(!asked(&["fmt"]).selects("build"));
        assert!(!asked(&["--beside", "package"]).selects("build"));
    }

    #[test]
    fn a_suite_that_cannot_run_is_seen_as_skipped() {
        assert_eq!(verdict_of_guests("skipped: no server\n"), Done::Skipped("no server".to_owned()));
        let passed = "6.1   files ok\n17 tests passed in 99.0 s\n";
        assert_eq!(verdict_of_guests(passed), Done::Ok("17 tests passed in 99.0 s".to_owned()));
        let partly = "9 tests passed in 9.0 s, without the kernel of sid (404)";
        assert_eq!(verdict_of_guests(partly), Done::Partly(partly.to_owned()));
    }
}
