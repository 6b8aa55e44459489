//! `sealblock serve` in its own process, with volumes in a folder that remain after it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use sealblock_exports_nvme_tcp::Limits;

use crate::formats::{self, FORMATS_NQN, FormattedNamespace};
use crate::process::{BLOCK_BYTES, BLOCKS, BYSTANDER, PLAIN, PROTECTED, Process, limits, patient_limits};
use crate::wire::{HANG_TIMEOUT, SUBNQN};

/// Messages of the program about a volume that another process has open, and about an address where another process
/// still listens.
const IN_USE: [&str; 2] = ["in use by another process", "address already in use"];

/// A program with the command line of `sealblock`.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    /// Arguments before the command.
    before: &'static [&'static str],
}

impl Program {
    /// `sealblock` itself.
    pub fn sealblock(path: impl Into<PathBuf>) -> Program {
        Program { path: path.into(), before: &[] }
    }

    /// This crate's binary, which contains all of `sealblock`.
    pub fn hostile(path: impl Into<PathBuf>) -> Program {
        Program { path: path.into(), before: &["sealblock"] }
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.path);
        command.args(self.before).arg(name);
        command
    }

    /// Makes the volume of this kind in a folder.
    ///
    /// # Errors
    /// If the program fails.
    pub fn create(&self, folder: &Path, kind: &FormattedNamespace) -> Result<()> {
        let mut command = self.command("create");
        command.arg(volume(folder, kind)).arg("--size").arg((formats::BLOCKS << kind.size.shift()).to_string());
        command.arg("--block-size").arg(kind.size.bytes().to_string());
        command.arg("--guard").arg(kind.format.guard().as_str());
        let number = kind.format.protection() as u8 + 1;
        succeeds(command.arg("--type").arg(number.to_string()))
    }

    /// Makes a volume of this size with the usual protection.
    ///
    /// # Errors
    /// If the program fails.
    pub fn create_sized(&self, volume: &Path, bytes: u64) -> Result<()> {
        succeeds(self.command("create").arg(volume).arg("--size").arg(bytes.to_string()))
    }

    /// Serves a configuration until killed or stopped.
    ///
    /// # Errors
    /// If the program does not start to accept connections.
    pub fn serve_configured(&self, configuration: &Path) -> Result<Process> {
        patiently(|| self.start(configuration))
    }

    /// Checks every block of the volume of this kind directly, without a server.
    ///
    /// # Errors
    /// If a block is bad, or the program fails.
    pub fn verify(&self, folder: &Path, kind: &FormattedNamespace) -> Result<()> {
        patiently(|| succeeds(self.command("verify").arg(volume(folder, kind))))
    }

    /// Serves the volumes of these kinds, and the memory namespaces of the library's target, until killed or stopped.
    ///
    /// # Errors
    /// If the program does not start to accept connections.
    pub fn serve(&self, folder: &Path, kinds: &[FormattedNamespace], listen: SocketAddr) -> Result<Process> {
        self.serve_with(folder, kinds, listen, &patient_limits())
    }

    /// The same with these limits.
    ///
    /// # Errors
    /// As for [`Program::serve`].
    pub fn serve_with(
        &self,
        folder: &Path,
        kinds: &[FormattedNamespace],
        listen: SocketAddr,
        limits: &Limits,
    ) -> Result<Process> {
        let path = folder.join("sealblock.toml");
        fs::write(&path, configuration(folder, kinds, listen, limits)).context("writing a configuration")?;
        patiently(|| self.start(&path))
    }

    fn start(&self, configuration: &Path) -> Result<Process> {
        let mut command = self.command("serve");
        command.arg("--config").arg(configuration).arg("--json").stdin(Stdio::null()).stdout(Stdio::piped());
        // A file, because this process does not read a pipe while the program serves.
        let said = configuration.with_extension("stderr");
        command.stderr(fs::File::create(&said).context("a file for standard error")?);
        let mut child = command.spawn().with_context(|| format!("starting {}", self.path.display()))?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("the server's output")?).read_line(&mut line)?;
        let address = line.split_once("\"listeners\":[\"").and_then(|(_, rest)| rest.split_once('"'));
        let Some((address, _)) = address else {
            child.wait().context("waiting for the server that does not serve")?;
            bail!("the server says {line:?}: {}", fs::read_to_string(&said)?);
        };
        let address = address.parse()?;
        Process::of(child, None, address)
    }
}

impl Process {
    /// Starts `sealblock serve` with the same limits and subsystems, and with volumes that are removed together with
    /// it.
    pub fn start_sealblock(program: &Program) -> Result<Process> {
        let folder = tempfile::tempdir().context("making a folder")?;
        let kinds: Vec<_> = formats::all().into_iter().filter(|kind| kind.is_for_volumes).collect();
        kinds.iter().try_for_each(|kind| program.create(folder.path(), kind))?;
        let mut process = program.serve_with(folder.path(), &kinds, (Ipv4Addr::LOCALHOST, 0).into(), &limits())?;
        process.folder = Some(folder);
        Ok(process)
    }
}

/// Retries while the error is one of these. Files and sockets that a killed process had registered with its io_uring
/// stay open and locked until the kernel has torn down the ring, some time after the process ended.
fn patiently<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        match attempt() {
            Err(error)
                if IN_USE.iter().any(|why| format!("{error:#}").contains(why)) && start.elapsed() < HANG_TIMEOUT =>
            {
                sleep(Duration::from_millis(20));
            }
            outcome => return outcome,
        }
    }
}

/// The path of the volume of a kind.
pub(crate) fn volume(folder: &Path, kind: &FormattedNamespace) -> PathBuf {
    folder.join(format!("{}.volume", kind.nsid))
}

fn succeeds(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("starting {command:?}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    Ok(())
}

fn configuration(folder: &Path, kinds: &[FormattedNamespace], listen: SocketAddr, limits: &Limits) -> String {
    let (connect, idle, drain) = (limits.connect.as_secs(), limits.idle.as_secs(), limits.drain.as_secs());
    let size = BLOCKS * BLOCK_BYTES as u64;
    let mut text = format!(
        "[[listeners]]\naddress = \"{listen}\"\n[limits]\nconnections = {}\nio_queues = {}\ncommands = {}\n\
         bytes_in_flight = {}\ntotal_bytes_in_flight = {}\ntransfer_bytes = {}\nconnect = \"{connect}s\"\nidle = \"{idle}s\"\ndrain = \"{drain}s\"\n\
         [[subsystems]]\nnqn = \"{SUBNQN}\"\n",
        limits.connections,
        limits.io_queues,
        limits.commands,
        limits.bytes_in_flight,
        limits.total_bytes_in_flight,
        limits.transfer_bytes,
    );
    for nsid in [PLAIN, PROTECTED, BYSTANDER] {
        // The same after a restart, so that a host does not know by the identity alone that the content is lost.
        let uuid = format!("6ba7b810-9dad-11d1-80b4-00c04fd4{nsid:04x}");
        text += &format!("[[subsystems.namespaces]]\nnsid = {nsid}\ntarget = \"mem:{size}\"\nuuid = \"{uuid}\"\n");
    }
    text += &format!("[[subsystems]]\nnqn = \"{FORMATS_NQN}\"\n");
    for kind in kinds {
        let (nsid, path) = (kind.nsid, volume(folder, kind));
        text += &format!("[[subsystems.namespaces]]\nnsid = {nsid}\ntarget = {path:?}\nprotection = \"shown\"\n");
    }
    text
}
