//! `cargo xtask package`: makes a Debian package. In the check it also goes through the package's life: it is built,
//! installed into a folder, its service is started and used as the unit defines, and it is removed.
//!
//! Nothing on this machine is changed: dpkg works only in the folder (`--root`), and maintainer scripts do nothing to
//! the running system when `DPKG_ROOT` names another one.

mod docs;
mod root;
mod service;
mod trial;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::step::{self, Done};
use crate::workspace::{self, Workspace};

/// The version of cargo-deb that makes packages.
const CARGO_DEB: &str = "3.8.0";
/// Shells for which the package has completions.
const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

/// Makes the package, and with `symbols` a second one with the debug symbols. Returns a readable line.
pub fn make(symbols: bool) -> Result<String> {
    let workspace = workspace::load()?;
    let profile = if symbols { Profile::Symbols } else { Profile::Release };
    let package = build(&workspace, profile, &log(&workspace)?)?;
    Ok(package.display().to_string())
}

/// Makes the package and tries it. Returns a readable line.
pub fn make_and_try() -> Result<String> {
    let workspace = workspace::load()?;
    let log = log(&workspace)?;
    let mut build = workspace::cargo();
    step::run(build.args(["build", "--package", "sealblock-runtime-reactor", "--example", "forbid_uring"]), &log)?;
    match tried(&workspace, Profile::Release, &log)? {
        Done::Ok(what) | Done::Partly(what) => Ok(what),
        Done::Skipped(why) => Ok(format!("skipped: {why}")),
    }
}

/// The same as a step of the check, which has already built all programs in the dev profile.
pub fn check(workspace: &Workspace, log: &Path) -> Result<Done> {
    tried(workspace, Profile::Dev, log)
}

fn tried(workspace: &Workspace, profile: Profile, log: &Path) -> Result<Done> {
    for program in ["dpkg", "dpkg-deb"] {
        if !step::is_installed(program) {
            return Ok(Done::Skipped(format!("there is no {program} here")));
        }
    }
    if !root::is_root() && !step::is_installed("fakeroot") {
        return Ok(Done::Skipped("dpkg installs as root or under fakeroot only".to_owned()));
    }
    let package = build(workspace, profile, log)?;
    trial::run(workspace, &package, log).map(Done::Ok)
}

fn log(workspace: &Workspace) -> Result<PathBuf> {
    let logs = workspace.target.join("xtask");
    fs::create_dir_all(&logs).with_context(|| format!("making {}", logs.display()))?;
    Ok(logs.join("package.log"))
}

/// How Cargo builds the program.
#[derive(Clone, Copy)]
enum Profile {
    /// Like tests, for a package that is only tried.
    Dev,
    /// Stripped, as packages usually are.
    Release,
    /// With its symbols, which go into a separate package.
    Symbols,
}

impl Profile {
    fn name(self) -> &'static str {
        match self {
            Profile::Dev => "dev",
            Profile::Release => "release",
            Profile::Symbols => "symbols",
        }
    }
}

fn build(workspace: &Workspace, profile: Profile, log: &Path) -> Result<PathBuf> {
    let cargo_deb = step::tool(workspace, "cargo-deb", CARGO_DEB, log)?;
    let built = match profile {
        Profile::Dev => workspace.built(""),
        Profile::Release | Profile::Symbols => {
            let mut build = workspace::cargo();
            build.args(["build", "--package", "sealblock", "--profile", profile.name()]);
            step::run(&mut build, log)?;
            workspace.target.join(profile.name())
        }
    };
    generate(&built.join("sealblock"), &built.join("package"), log)?;
    let documents = built.join("package/doc");
    docs::write(&workspace.root, &documents)?;
    let changelogs = docs::write_changelogs(&workspace.root, &documents)?;
    step::run(Command::new("gzip").arg("-9n").args(changelogs), log)?;
    let output = workspace.target.join("package");
    if output.exists() {
        fs::remove_dir_all(&output).with_context(|| format!("removing {}", output.display()))?;
    }
    let mut deb = Command::new(cargo_deb);
    deb.current_dir(&workspace.root).args(["--no-build", "--package", "sealblock", "--output"]).arg(&output);
    deb.args(["--profile", profile.name()]);
    match profile {
        Profile::Dev => deb.arg("--fast"),
        Profile::Release => &mut deb,
        Profile::Symbols => deb.arg("--dbgsym"),
    };
    step::run(&mut deb, log)?;
    let there = fs::read_dir(&output).with_context(|| format!("listing {}", output.display()))?;
    let mut debs =
        there.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "deb"));
    debs.next().with_context(|| format!("cargo-deb left no package in {}", output.display()))
}

/// What the program generates about itself: manual pages and completions.
fn generate(program: &Path, parts: &Path, log: &Path) -> Result<()> {
    if parts.exists() {
        fs::remove_dir_all(parts).with_context(|| format!("removing {}", parts.display()))?;
    }
    fs::create_dir_all(parts).with_context(|| format!("making {}", parts.display()))?;
    let pages = parts.join("man");
    step::run(Command::new(program).arg("man").arg(&pages), log)?;
    let pages = fs::read_dir(&pages).context("listing manual pages")?.flatten().map(|page| page.path());
    step::run(Command::new("gzip").arg("-9n").args(pages), log)?;
    for shell in SHELLS {
        let output = Command::new(program).args(["completions", shell]).output().context("making completions")?;
        if !output.status.success() {
            bail!("completions for {shell}: {}", String::from_utf8_lossy(&output.stderr));
        }
        fs::write(parts.join(format!("sealblock.{shell}")), output.stdout).context("writing completions")?;
    }
    Ok(())
}
