//! The inputs of a step, as a hash: a step does not run again while this is the same as when the step last passed.
//!
//! The inputs are the files of the working tree that Git does not ignore, tracked or not, and what the step depends on
//! in this machine: toolchain, kernel, user, settings, and which external programs are installed. If Git cannot list
//! these files, every step runs. The hash does not protect against deliberate deception; `--all` runs everything.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::step::Done;
use crate::workspace::{self, DependencyKind, Member, Workspace};

/// External programs that tests use if they are installed.
const PROGRAMS: [&str; 16] = [
    "btrfs",
    "cargo-nextest",
    "dpkg",
    "fakeroot",
    "fio",
    "fusermount3",
    "losetup",
    "mkfs.btrfs",
    "mkfs.ext4",
    "mkfs.xfs",
    "nbdcopy",
    "nbdkit",
    "qemu-io",
    "qemu-nbd",
    "qemu-system-x86_64",
    "systemd-analyze",
];
/// Prefixes of environment variables that change what is built or run.
const SETTINGS: [&str; 4] = ["CARGO_", "RUST", "SEALBLOCK_", "NEXTEST"];
/// Variables that Cargo sets for this program only.
const NOT_SETTINGS: [&str; 5] = ["CARGO", "CARGO_PKG_", "CARGO_MANIFEST_", "RUSTUP_TOOLCHAIN", "RUST_RECURSION_COUNT"];

/// The part of the tree that a step reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reads {
    /// All of it.
    Everything,
    /// What is compiled, and the text beside it: everything except `docs/`.
    Sources,
    /// Manifests, the lock file, and the rules for these.
    Manifests,
    /// Everything below these folders.
    Folders(BTreeSet<String>),
}

/// The working tree and the machine, and the steps that passed with them.
pub struct Inputs {
    root: PathBuf,
    machine: u64,
    passed: PathBuf,
    runs_all: bool,
}

impl Reads {
    /// A program, given by the folder of its crate, and everything from which it is built.
    pub fn program(members: &[Member], folders: &[&str]) -> Reads {
        let mut found: BTreeSet<String> = BTreeSet::new();
        let mut open: Vec<String> = folders.iter().map(|folder| (*folder).to_owned()).collect();
        while let Some(folder) = open.pop() {
            let member = members.iter().find(|member| member.folder == folder);
            let uses = member.into_iter().flat_map(|member| &member.dependencies);
            let uses = uses.filter(|dependency| dependency.kind == DependencyKind::Normal);
            open.extend(uses.map(|dependency| dependency.folder.clone()).filter(|folder| !found.contains(folder)));
            found.insert(folder);
        }
        Reads::Folders(found)
    }

    /// The same, and another folder.
    pub fn and(self, folder: &str) -> Reads {
        match self {
            Reads::Folders(mut folders) => {
                folders.insert(folder.to_owned());
                Reads::Folders(folders)
            }
            other => other,
        }
    }

    fn includes(&self, path: &str) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        let is_manifest = ["Cargo.toml", "Cargo.lock", "deny.toml", "rust-toolchain.toml"].contains(&name);
        let is_setting = path.starts_with(".cargo/") || path.starts_with(".config/");
        match self {
            Reads::Everything => true,
            Reads::Sources => !path.starts_with("docs/"),
            Reads::Manifests => is_manifest,
            Reads::Folders(folders) => {
                let is_within =
                    |folder: &String| path.strip_prefix(folder.as_str()).is_some_and(|rest| rest.starts_with('/'));
                is_setting || is_manifest && !path.contains('/') || folders.iter().any(is_within)
            }
        }
    }
}

impl Inputs {
    /// The inputs of a workspace. The record of passed steps is below its target folder.
    pub fn of(workspace: &Workspace, runs_all: bool) -> Result<Inputs> {
        let passed = workspace.target.join("xtask").join("passed");
        fs::create_dir_all(&passed).with_context(|| format!("making {}", passed.display()))?;
        Ok(Inputs { root: workspace.root.clone(), machine: machine(), passed, runs_all })
    }

    /// Runs a step unless it has passed with its current inputs.
    ///
    /// # Errors
    /// If the step fails.
    pub fn unless_passed(&self, step: &str, reads: &Reads, run: impl FnOnce() -> Result<Done>) -> Result<Done> {
        let record = self.passed.join(step);
        let number = self.number(reads);
        let last = fs::read_to_string(&record).ok();
        if let Some(number) = &number
            && last.as_ref() == Some(number)
            && !self.runs_all
        {
            return Ok(Done::Skipped(format!("passed with the same inputs ({number}); --all runs it")));
        }
        // A step that fails or is stopped halfway leaves no record.
        if last.is_some() {
            fs::remove_file(&record).with_context(|| format!("removing {}", record.display()))?;
        }
        let done = run()?;
        // A file that changed meanwhile may have been read before or after the change.
        if let (Done::Ok(_), Some(number)) = (&done, number)
            && self.number(reads).as_ref() == Some(&number)
        {
            fs::write(&record, number).with_context(|| format!("writing {}", record.display()))?;
        }
        Ok(done)
    }

    /// The hash of what a step reads; `None` if that is not known.
    fn number(&self, reads: &Reads) -> Option<String> {
        let mut hasher = DefaultHasher::new();
        self.machine.hash(&mut hasher);
        for path in files(&self.root)?.iter().filter(|path| reads.includes(path)) {
            // A file that is tracked but was removed does not exist.
            (path, fs::read(self.root.join(path)).ok()).hash(&mut hasher);
        }
        Some(format!("{:016x}", hasher.finish()))
    }
}

/// The paths of the files of a tree that Git does not ignore; `None` if Git cannot list them.
fn files(root: &Path) -> Option<Vec<String>> {
    let mut git = Command::new("git");
    git.current_dir(root).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let output = git.output().ok().filter(|output| output.status.success())?;
    let mut paths: Vec<String> =
        std::str::from_utf8(&output.stdout).ok()?.split_terminator('\0').map(str::to_owned).collect();
    paths.sort_unstable();
    paths.dedup();
    Some(paths)
}

/// A hash of the properties of the machine on which steps depend.
fn machine() -> u64 {
    let toolchain = Command::new("rustc").arg("--version").current_dir(workspace::root()).output();
    let toolchain = toolchain.map(|output| output.stdout).unwrap_or_default();
    let kernel = fs::read("/proc/sys/kernel/osrelease").unwrap_or_default();
    // The first number after "Uid:" is the user who runs this.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let user = status.lines().find(|line| line.starts_with("Uid:")).map(str::to_owned);
    let mut settings: Vec<(OsString, OsString)> =
        std::env::vars_os().filter(|(name, _)| is_setting(&name.to_string_lossy())).collect();
    settings.sort();
    let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    let is_there = |program: &&str| folders.iter().any(|folder| folder.join(program).is_file());
    let programs: Vec<&str> = PROGRAMS.into_iter().filter(|program| is_there(program)).collect();
    let mut hasher = DefaultHasher::new();
    (toolchain, kernel, user, settings, programs).hash(&mut hasher);
    hasher.finish()
}

fn is_setting(name: &str) -> bool {
    let is_ours = SETTINGS.iter().any(|beginning| name.starts_with(beginning));
    let is_cargos = NOT_SETTINGS.iter().any(|of_cargo| match of_cargo.strip_suffix('_') {
        Some(_) => name.starts_with(of_cargo),
        None => name == *of_cargo,
    });
    is_ours && !is_cargos
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Dependency;

    fn member(folder: &str, dependencies: &[(&str, DependencyKind)]) -> Member {
        let dependencies = dependencies
            .iter()
            .map(|(folder, kind)| Dependency { folder: (*folder).to_owned(), kind: *kind, features: Vec::new() })
            .collect();
        Member { folder: folder.to_owned(), dependencies, roots: Vec::new(), doctest: None }
    }

    #[test]
    fn a_program_reads_its_crate_all_that_it_is_built_of_and_the_manifests_of_the_root() {
        let members = [
            member("tools", &[("server", DependencyKind::Normal), ("proofs/x", DependencyKind::Dev)]),
            member("server", &[("units", DependencyKind::Normal)]),
            member("units", &[]),
            member("perf", &[("units", DependencyKind::Normal)]),
        ];
        let reads = Reads::program(&members, &["tools"]).and("packaging");
        for path in
            ["tools/src/main.rs", "server/a", "units/Cargo.toml", "Cargo.lock", ".cargo/config.toml", "packaging/x"]
        {
            assert!(reads.includes(path), "{path}");
        }
        for path in
            ["proofs/x/src/lib.rs", "perf/src/lib.rs", "docs/a.md", "README.md", "toolshed/a", "perf/Cargo.toml"]
        {
            assert!(!reads.includes(path), "{path}");
        }
    }

    #[test]
    fn prose_is_read_by_what_reads_everything_and_manifests_by_all() {
        let includes = |path| [Reads::Everything, Reads::Sources, Reads::Manifests].map(|reads| reads.includes(path));
        assert_eq!(includes("docs/states.md"), [true, false, false]);
        assert_eq!(includes("block/src/lib.rs"), [true, true, false]);
        assert_eq!(includes("block/Cargo.toml"), [true, true, true]);
        assert_eq!(includes("deny.toml"), [true, true, true]);
    }

    /// A separate repository with a source and a text, and its inputs; `None` without Git.
    fn repository(folder: &Path) -> Option<Inputs> {
        let git = |words: &[&str]| Command::new("git").current_dir(folder).args(words).output();
        if !git(&["init", "-q"]).is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: there is no git");
            return None;
        }
        for (path, text) in [(".gitignore", "/target/\n"), ("block/a.rs", "one"), ("docs/a.md", "one")] {
            write(folder, path, text);
        }
        let (root, target) = (folder.to_owned(), folder.join("target"));
        Some(Inputs::of(&Workspace { root, target, members: Vec::new() }, false).unwrap())
    }

    fn write(folder: &Path, path: &str, text: &str) {
        fs::create_dir_all(folder.join(path).parent().unwrap()).unwrap();
        fs::write(folder.join(path), text).unwrap();
    }

    /// Returns whether the step runs; if it does, it passes.
    fn runs(inputs: &Inputs, reads: &Reads) -> bool {
        let done = inputs.unless_passed("a", reads, || Ok(Done::Ok(String::new()))).unwrap();
        matches!(done, Done::Ok(_))
    }

    #[test]
    fn a_step_that_passed_runs_again_once_what_it_reads_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let Some(inputs) = repository(folder.path()) else { return };
        let reads = Reads::Sources;
        assert!(runs(&inputs, &reads) && !runs(&inputs, &reads));
        write(folder.path(), "docs/a.md", "two");
        write(folder.path(), "target/debug/x", "built");
        assert!(!runs(&inputs, &reads), "it reads neither");
        assert!(runs(&inputs, &Reads::Everything) && !runs(&inputs, &Reads::Everything));
        write(folder.path(), "block/a.rs", "two");
        assert!(runs(&inputs, &reads));
        write(folder.path(), "block/new.rs", "not tracked");
        assert!(runs(&inputs, &reads) && !runs(&inputs, &reads));
        fs::remove_file(folder.path().join("block/new.rs")).unwrap();
        assert!(runs(&inputs, &reads));
        assert!(runs(&Inputs { machine: inputs.machine ^ 1, ..again(&inputs) }, &reads), "another machine");
    }

    fn again(inputs: &Inputs) -> Inputs {
        let Inputs { root, machine, passed, runs_all } = inputs;
        Inputs { root: root.clone(), machine: *machine, passed: passed.clone(), runs_all: *runs_all }
    }

    #[test]
    fn only_what_passed_as_a_whole_is_left_out_and_nothing_where_all_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let Some(inputs) = repository(folder.path()) else { return };
        let reads = Reads::Everything;
        for done in [Done::Partly(String::new()), Done::Skipped(String::new())] {
            assert!(inputs.unless_passed("a", &reads, || Ok(done)).is_ok());
            assert!(runs(&inputs, &reads), "it had not passed");
            fs::remove_file(folder.path().join("target/xtask/passed/a")).unwrap();
        }
        assert!(runs(&inputs, &reads));
        assert!(runs(&Inputs { runs_all: true, ..again(&inputs) }, &reads));
        write(folder.path(), "block/a.rs", "broken");
        assert!(inputs.unless_passed("a", &reads, || anyhow::bail!("no")).is_err());
        write(folder.path(), "block/a.rs", "one");
        assert!(runs(&inputs, &reads), "the record went with the failure");
        write(folder.path(), "block/a.rs", "two");
        let changes = || {
            write(folder.path(), "block/a.rs", "three");
            Ok(Done::Ok(String::new()))
        };
        assert!(inputs.unless_passed("a", &reads, changes).is_ok());
        assert!(runs(&inputs, &reads), "it changed while the step ran");
    }

    #[test]
    fn without_git_every_step_runs() {
        let folder = tempfile::tempdir().unwrap();
        let (root, target) = (folder.path().join("no-repository"), folder.path().join("target"));
        let inputs = Inputs::of(&Workspace { root, target, members: Vec::new() }, false).unwrap();
        assert!(runs(&inputs, &Reads::Everything) && runs(&inputs, &Reads::Everything));
    }

    #[test]
    fn what_cargo_sets_for_a_program_is_no_setting() {
        for name in
            ["CARGO_INCREMENTAL", "RUSTFLAGS", "RUST_LOG", "SEALBLOCK_CONFORMANCE_CACHE", "CARGO_PROFILE_DEV_DEBUG"]
        {
            assert!(is_setting(name), "{name}");
        }
        for name in ["CARGO", "CARGO_PKG_NAME", "CARGO_MANIFEST_DIR", "RUSTUP_TOOLCHAIN", "PATH"] {
            assert!(!is_setting(name), "{name}");
        }
    }
}
