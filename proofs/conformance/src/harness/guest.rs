//! A running guest.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::cpio::Archive;
use super::qemu::{Drive, Machine};
use super::wire::Frame;
use super::{Kernel, Parts};

const INIT: &str = include_str!("init.sh");
/// Functions that all scripts can use.
const PRELUDE: &str = include_str!("prelude.sh");
/// The file in a guest's folder with its kernel's messages.
const CONSOLE: &str = "console";
/// Time limit from the start of QEMU to the agent's greeting.
const BOOT: Duration = Duration::from_secs(120);
const MEMORY_MIB: u32 = 1024;
/// The duration of the longest script of this run so far, in milliseconds.
static LONGEST_SCRIPT_MS: AtomicU64 = AtomicU64::new(0);

/// The duration of the longest script of all guests so far, for comparison with the limit.
pub fn longest_script() -> Duration {
    Duration::from_millis(LONGEST_SCRIPT_MS.load(Ordering::Relaxed))
}

/// The guest ended or stopped responding without a request. Emulated machines sometimes do, so the test is retried
/// once.
#[derive(Debug, thiserror::Error)]
#[error("the guest {0}")]
pub struct GuestDied(String);

/// The result of a script.
#[derive(Clone, Debug)]
pub struct ScriptOutput {
    /// Its exit status.
    pub status: i32,
    /// Its output.
    pub output: String,
    /// The end of its standard error: the last commands, and their messages.
    pub errors: String,
}

/// The parts that are specific to a guest.
pub struct Extras {
    /// The number of processors.
    pub processors: u32,
    /// Its drives.
    pub drives: Vec<Drive>,
    /// Programs from this machine: the name in the guest, and the file.
    pub programs: Vec<(&'static str, PathBuf)>,
}

/// A guest. Dropping it ends it.
pub struct Guest {
    /// The kernel's release, as the guest reports it.
    pub release: String,
    qemu: Child,
    input: ChildStdin,
    frames: Receiver<io::Result<Frame>>,
}

impl Guest {
    /// Boots a kernel. `folder` gets the kernel's messages (`console`).
    ///
    /// # Errors
    /// [`GuestDied`] if it does not start.
    pub fn boot(parts: &Parts, kernel: &Kernel, folder: &Path) -> Result<Guest> {
        let extras = Extras { processors: kernel.processors, drives: Vec::new(), programs: Vec::new() };
        Guest::boot_with(parts, kernel, folder, &extras)
    }

    /// The same with parts that a test needs in addition.
    ///
    /// # Errors
    /// As for [`Guest::boot`].
    pub fn boot_with(parts: &Parts, kernel: &Kernel, folder: &Path, extras: &Extras) -> Result<Guest> {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let initrd = folder.join("initrd");
        join_archives(parts, kernel, &initrd, &extras.programs)?;
        let console = folder.join(CONSOLE);
        fs::write(&console, "").context("making the console's file")?;
        let machine = Machine {
            kernel: &kernel.image,
            initrd: &initrd,
            console: &console,
            processors: extras.processors,
            memory_mib: MEMORY_MIB,
            drives: &extras.drives,
        };
        let errors = File::create(folder.join("qemu")).context("making QEMU's log")?;
        let mut command = parts.qemu.command(&machine);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let mut qemu = command.spawn().context("starting QEMU")?;
        let input = qemu.stdin.take().context("QEMU has no standard input")?;
        let output = qemu.stdout.take().context("QEMU has no standard output")?;
        let (sender, frames) = channel();
        thread::spawn(move || receive(output, &sender));
        let mut guest = Guest { release: String::new(), qemu, input, frames };
        match guest.next(Instant::now() + BOOT)? {
            Frame::Hello(release) => guest.release = release,
            other => bail!("the guest began with {other:?}"),
        }
        // The kernel has loaded it into memory by now.
        fs::remove_file(&initrd).context("removing the guest's first file system")?;
        Ok(guest)
    }

    /// Runs a script after the prelude's functions; returns its result.
    ///
    /// # Errors
    /// [`GuestDied`] if the guest ends, or if the script exceeds `limit` (then the guest cannot be used any more).
    pub fn run(&mut self, script: &str, limit: Duration) -> Result<ScriptOutput> {
        let started = Instant::now();
        let deadline = started + limit;
        let sent = Frame::Script(format!("{PRELUDE}\n{script}")).write(&mut self.input);
        sent.map_err(|error| GuestDied(format!("does not listen: {error}")))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (mut output, mut errors) = (Vec::new(), Vec::new());
        loop {
            match self.next(deadline) {
                Ok(Frame::Output(bytes)) => output.extend(bytes),
                Ok(Frame::Errors(bytes)) => errors = bytes,
                Ok(Frame::Status(status)) => {
                    let took = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
                    LONGEST_SCRIPT_MS.fetch_max(took, Ordering::Relaxed);
                    return Ok(ScriptOutput { status, output: text(&output), errors: text(&errors) });
                }
                Ok(other) => bail!("the guest replies with {other:?}"),
                Err(error) => {
                    return Err(error.context(format!("a script of the guest, which had said:\n{}", text(&output))));
                }
            }
        }
    }

    fn next(&mut self, deadline: Instant) -> Result<Frame> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.frames.recv_timeout(left) {
            Ok(Ok(frame)) => Ok(frame),
            Ok(Err(error)) => bail!(GuestDied(format!("died: {error}"))),
            Err(RecvTimeoutError::Timeout) => bail!(GuestDied("was silent too long".to_owned())),
            Err(RecvTimeoutError::Disconnected) => bail!(GuestDied("has died".to_owned())),
        }
    }

    /// CPU seconds that the emulator has used so far; 0 if the system does not report them.
    pub fn cpu_s(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.qemu.id())).unwrap_or_default();
        // Fields 14 and 15 of proc(5), counted after the name in parentheses; Linux counts in hundredths of a second
        // there.
        let ticks = stat.rsplit(") ").next().into_iter().flat_map(|rest| rest.split(' ').skip(11).take(2));
        ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
    }

    /// The last lines on the console of the guest in this folder: errors and crashes only.
    pub fn console_tail(folder: &Path) -> String {
        let text = fs::read(folder.join(CONSOLE)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // A guest has no data that need an orderly shutdown.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn receive(mut output: ChildStdout, frames: &Sender<io::Result<Frame>>) {
    loop {
        let frame = Frame::read(&mut output);
        let is_over = frame.is_err();
        if frames.send(frame).is_err() || is_over {
            return;
        }
    }
}

/// The guest's initial file system: programs, modules, and this program as the agent.
fn join_archives(parts: &Parts, kernel: &Kernel, initrd: &Path, programs: &[(&str, PathBuf)]) -> Result<()> {
    let program = std::env::current_exe().and_then(fs::read).context("reading this program")?;
    let mut out = File::create(initrd).with_context(|| format!("making {}", initrd.display()))?;
    for part in [&parts.programs.archive, &kernel.modules] {
        let mut part = File::open(part).with_context(|| format!("opening {}", part.display()))?;
        io::copy(&mut part, &mut out).context("copying an archive")?;
    }
    let mut archive = Archive::new(out);
    archive.file("init", 0o755, INIT.as_bytes())?;
    archive.file("bin/conformance", 0o755, &program)?;
    for (name, file) in programs {
        let content = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
        archive.file(&format!("usr/bin/{name}"), 0o755, &content)?;
    }
    archive.finish()?;
    Ok(())
}
