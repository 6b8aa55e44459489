//! Tools that checks need and that Cargo builds: each once, into the target folder.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::step;
use crate::workspace::{self, Workspace};

/// Where the tool is, built first if it is not there. The version is part of the path: another one is built anew.
pub fn tool(workspace: &Workspace, name: &str, version: &str, log: &Path) -> Result<PathBuf> {
    let tools = workspace.target.join("tools");
    let home = tools.join(format!("{name}-{version}"));
    let program = home.join("bin").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    if program.is_file() {
        return Ok(program);
    }
    print!("(building {name} {version}, once) ");
    let build = tools.join("build");
    let mut install = workspace::cargo();
    install.args(["install", "--locked", "--version", version]);
    // They run for seconds and would be optimised for minutes.
    install.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1").env("CARGO_PROFILE_RELEASE_LTO", "off");
    install.arg("--root").arg(&home).arg("--target-dir").arg(&build).arg(name);
    step::run(&mut install, log)
        .with_context(|| format!("{name} is needed; `cargo xtask check --fast` does without it"))?;
    fs::remove_dir_all(&build).with_context(|| format!("removing {}", build.display()))?;
    Ok(program)
}
