//! `cargo xtask fuzz`: runs each fuzz target for a while.
//!
//! Fuzzing needs the nightly toolchain and cargo-fuzz, which the other checks do not; if they are missing, this prints
//! how to install them and does not fail.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::workspace;

/// The folder of the targets, a separate workspace.
pub const FOLDER: &str = "proofs/fuzz";
/// Its manifest.
pub const MANIFEST: &str = "proofs/fuzz/Cargo.toml";
const TOOLCHAIN: &str = "nightly";

/// Runs each target for `seconds`, and stops at the first finding.
pub fn run(seconds: u64) -> Result<()> {
    let folder = workspace::root().join(FOLDER);
    if let Some(why) = absent(&folder) {
        println!("fuzz: skipped: {why}");
        return Ok(());
    }
    let targets = targets(&folder)?;
    if targets.is_empty() {
        bail!("{FOLDER} has no target");
    }
    for target in &targets {
        println!("fuzz: {target} for {seconds} s");
        let limit = format!("-max_total_time={seconds}");
        let words = ["fuzz", "run", "--fuzz-dir", FOLDER, target, "--", &limit];
        let status = nightly(&words).stdin(Stdio::null()).status().context("starting cargo fuzz")?;
        if !status.success() {
            bail!("{target} found something ({status}); its input is under {FOLDER}/artifacts/{target}");
        }
    }
    println!("fuzz: {} targets, nothing found", targets.len());
    Ok(())
}

/// The command that checks that the targets still compile; it needs neither nightly nor cargo-fuzz. They are a separate
/// workspace, so no other step would notice that an API they use has changed.
pub fn compiles(target: &Path) -> Command {
    let mut command = workspace::cargo();
    // The lock file is part of the tree, which a check must not change.
    command.args(["check", "--quiet", "--locked", "--all-targets", "--manifest-path"]).arg(MANIFEST);
    // With the profile that dependencies have in this workspace, their metadata from other steps can be reused.
    command.args(["--config", "profile.dev.opt-level=1", "--config", "profile.dev.debug=false"]);
    command.arg("--target-dir").arg(target);
    // Nothing is linked, so the fuzzer itself need not be built.
    command.env("CUSTOM_LIBFUZZER_PATH", target.join("libnone.a"));
    command
}

/// Why there is nothing to run, or what is missing to run it.
fn absent(folder: &Path) -> Option<String> {
    if !folder.join("Cargo.toml").is_file() {
        return Some(format!("{FOLDER} is not there"));
    }
    if !succeeds(&mut nightly(&["--version"])) {
        return Some(format!("no nightly toolchain; `rustup toolchain install {TOOLCHAIN}` installs it"));
    }
    if !succeeds(&mut nightly(&["fuzz", "--version"])) {
        return Some("no cargo-fuzz; `cargo install --locked cargo-fuzz` installs it".to_owned());
    }
    None
}

fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

fn targets(folder: &Path) -> Result<Vec<String>> {
    let output = nightly(&["fuzz", "list", "--fuzz-dir"]).arg(folder).output().context("starting cargo fuzz list")?;
    if !output.status.success() {
        bail!("cargo fuzz list failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

/// Cargo of the nightly toolchain. The variables that the outer Cargo and rustup set for this program would choose the
/// wrong toolchain.
fn nightly(words: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.current_dir(workspace::root()).args(["run", TOOLCHAIN, "cargo"]).args(words);
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}
