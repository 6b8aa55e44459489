//! Programs of this machine that a benchmark runs, and the loop devices that they make.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};

/// Clock ticks per second in `/proc/PID/stat`: `USER_HZ`, which is 100 on every architecture that this runs on.
pub const TICKS_PER_SECOND: f64 = 100.0;

/// One run of a program.
#[derive(Clone, Copy)]
pub struct Turn {
    /// From its start to its end.
    pub seconds: f64,
    /// CPU time of the program.
    pub cpu_seconds: f64,
}

/// The words of a command line.
pub fn words(program: &str, arguments: &[&str]) -> Vec<String> {
    std::iter::once(program).chain(arguments.iter().copied()).map(str::to_owned).collect()
}

/// Runs a command, which must succeed.
pub fn turn(words: &[String]) -> anyhow::Result<Turn> {
    let before = children_cpu_seconds()?;
    let start = Instant::now();
    let output = Command::new(&words[0]).args(&words[1..]).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("starting {words:?}"))?;
    let seconds = start.elapsed().as_secs_f64();
    if !output.status.success() {
        bail!("{words:?} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(Turn { seconds, cpu_seconds: children_cpu_seconds()? - before })
}

/// CPU time of all children that have ended: fields 16 and 17 of `/proc/self/stat`.
fn children_cpu_seconds() -> anyhow::Result<f64> {
    let stat = fs::read_to_string("/proc/self/stat").context("reading /proc/self/stat")?;
    // The name of the program, field 2, is in parentheses and may contain spaces.
    let (_, fields) = stat.rsplit_once(") ").context("a process has a name")?;
    let ticks = fields.split(' ').skip(13).take(2).map(str::parse::<u64>).sum::<Result<u64, _>>()?;
    Ok(ticks as f64 / TICKS_PER_SECOND)
}

/// A loop device with direct I/O; detached on drop.
pub struct Loop(pub String);

impl Loop {
    /// A new one on a file, if there can be any.
    pub fn new(file: &Path) -> Option<Loop> {
        let mut losetup = Command::new("losetup");
        let output = losetup.args(["--find", "--show", "--direct-io=on"]).arg(PathBuf::from(file)).output().ok()?;
        output.status.success().then(|| Loop(String::from_utf8_lossy(&output.stdout).trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // If it cannot be detached, it is left for the user.
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}
