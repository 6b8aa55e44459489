//! Runs the scripts that the host sends, one after the other.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result};

use crate::harness::wire::Frame;

/// How much of a script's standard error is sent, at most.
const MOST_ERROR_BYTES: usize = 2048;

/// Sends a greeting through the port, then runs the scripts that arrive. Returns only when the guest ends.
pub fn run(port: &Path) -> Result<()> {
    let mut port = OpenOptions::new().read(true).write(true).open(port).context("opening the host's port")?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("reading the kernel's release")?;
    Frame::Hello(release.trim().to_owned()).write(&mut port)?;
    loop {
        if let Frame::Script(script) = Frame::read(&mut port).context("waiting for a script")? {
            let status = execute(&script, &mut port)?;
            Frame::Status(status).write(&mut port)?;
        }
    }
}

/// Runs a script with tracing, so that a failure shows the last commands before it.
fn execute(script: &str, port: &mut File) -> Result<i32> {
    fs::write("/tmp/script", script).context("writing the script")?;
    let errors = File::create("/tmp/stderr").context("making the file of errors")?;
    let mut shell = Command::new("/bin/sh");
    shell.args(["-x", "/tmp/script"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
    let mut child = shell.spawn().context("starting the shell")?;
    let mut output = child.stdout.take().context("the shell has no standard output")?;
    let mut bytes = [0; 65536];
    loop {
        match output.read(&mut bytes).context("reading the script's output")? {
            0 => break,
            len => Frame::Output(bytes[..len].to_vec()).write(port)?,
        }
    }
    let status = number(child.wait().context("waiting for the shell")?);
    let errors = fs::read("/tmp/stderr").context("reading the script's errors")?;
    Frame::Errors(errors[errors.len().saturating_sub(MOST_ERROR_BYTES)..].to_vec()).write(port)?;
    Ok(status)
}

/// The exit status as shells report it.
fn number(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_counted_as_shells_do() {
        assert_eq!(number(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(number(ExitStatus::from_raw(9)), 137);
    }
}
