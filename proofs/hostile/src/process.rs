//! The target under attack, in its own process, whose memory and descriptors are measured from outside.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use sealblock_block::DynDevice;
use sealblock_exports_nvme_tcp::{Limits, Namespace, PiVisibility, Subsystem, Target};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::BlockSize;
use tempfile::TempDir;

use crate::formats::{self, FORMATS_NQN, FormattedNamespace};
use crate::wire::{HANG_TIMEOUT, SUBNQN};

/// Bytes of a block of the namespaces.
pub const BLOCK_BYTES: usize = 4096;
/// Blocks of each namespace.
pub const BLOCKS: u64 = 4096;
/// A namespace without metadata.
pub const PLAIN: u32 = 1;
/// A namespace with visible protection information.
pub const PROTECTED: u32 = 2;
/// A namespace that only the bystander uses.
pub const BYSTANDER: u32 = 3;

/// Limits of the target: small, so that attacks reach them.
pub fn limits() -> Limits {
    Limits {
        connections: 48,
        io_queues: 4,
        commands: 64,
        bytes_in_flight: 2 << 20,
        total_bytes_in_flight: 16 << 20,
        transfer_bytes: 256 << 10,
        connect: Duration::from_secs(3),
        idle: Duration::from_secs(60),
        receive: Duration::from_secs(60),
        drain: Duration::from_secs(1),
    }
}

/// The same limits, with the time that a correct host may need to connect on a busy machine.
pub fn patient_limits() -> Limits {
    Limits { connect: 2 * HANG_TIMEOUT, ..limits() }
}

/// Memory in bytes that peers may make the target hold under these limits: data in both directions, buffers and
/// completions queued in the kernel for each connection, and allocator overhead.
pub fn max_resident_bytes(connections: usize) -> u64 {
    let limits = limits();
    let each = (256 << 10) + usize::from(limits.commands) * 8192;
    let data = limits.total_bytes_in_flight.min(connections.saturating_mul(2 * limits.bytes_in_flight));
    (connections.min(limits.connections) * each + data) as u64 + (24 << 20)
}

/// Memory that the devices need once all their blocks have been written.
pub fn device_bytes() -> u64 {
    let formats = formats::all().len() as u64 * formats::BLOCKS;
    (3 * BLOCKS + formats) * (BLOCK_BYTES as u64 + 16)
}

/// Runs the target until standard input ends. Prints its address first.
pub fn run(limits: Limits) -> Result<()> {
    let reactor = Reactor::new(Config::default()).context("starting a reactor")?;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // When the parent ends, the pipe closes, which stops the target.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = sender.send(());
    });
    reactor.block_on(async {
        let target = Target::new([subsystem()?, formats_subsystem()?], limits)?;
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 1024)?;
        println!("{}", listener.local_addr()?);
        std::io::stdout().flush()?;
        let stopper = target.clone();
        sealblock_runtime_reactor::spawn(async move {
            while receiver.try_recv().is_err() {
                sealblock_runtime_reactor::sleep(Duration::from_millis(20)).await;
            }
            stopper.stop();
        });
        target.serve(listener).await.context("serving")
    })
}

fn subsystem() -> Result<Subsystem> {
    let format = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
    let size = BlockSize::from_bytes(BLOCK_BYTES as u64).context("a block size")?;
    let namespace = |id| {
        let device = MemoryDevice::new(size, BLOCKS, Some(format));
        Namespace::new(SharedDevice::publish(DynDevice::new("mem", device)), [id; 16])
    };
    Ok(Subsystem::new(SUBNQN.parse()?, "1")
        .with_namespace(PLAIN, namespace(1))?
        .with_namespace(PROTECTED, namespace(2).with_visibility(PiVisibility::Protected)?)?
        .with_namespace(BYSTANDER, namespace(3))?)
}

/// A namespace in memory for each kind.
fn formats_subsystem() -> Result<Subsystem> {
    let mut subsystem = Subsystem::new(FORMATS_NQN.parse()?, "2");
    for kind in formats::all() {
        let FormattedNamespace { nsid, size, format, .. } = kind;
        let device = MemoryDevice::new(size, formats::BLOCKS, Some(format));
        let device = SharedDevice::publish(DynDevice::new("mem", device));
        let namespace = Namespace::new(device, [100 + nsid as u8; 16]).with_visibility(PiVisibility::Protected)?;
        subsystem = subsystem.with_namespace(nsid, namespace)?;
    }
    Ok(subsystem)
}

/// A process with a target. Killed when dropped.
pub struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    /// The folder of its volumes, if it is removed together with the process.
    pub(crate) folder: Option<TempDir>,
    /// Where it listens.
    pub address: SocketAddr,
    /// Resident memory when it began to listen, in bytes.
    pub start_bytes: u64,
}

/// Memory and descriptors of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessUsage {
    /// Resident memory, in bytes.
    pub resident_bytes: u64,
    /// Peak resident memory since [`Process::reset_peak`], in bytes.
    pub peak_bytes: u64,
    /// Open descriptors.
    pub descriptors: usize,
}

impl Process {
    /// Starts `program`, which is this crate's binary.
    pub fn start(program: &Path) -> Result<Process> {
        Process::start_as(program, &["target"])
    }

    /// The same with [`patient_limits`].
    pub fn start_patient(program: &Path) -> Result<Process> {
        Process::start_as(program, &["target", "--patient"])
    }

    fn start_as(program: &Path, role: &[&str]) -> Result<Process> {
        let mut command = Command::new(program);
        command.args(role).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {}", program.display()))?;
        let stdin = child.stdin.take();
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("the target's output")?).read_line(&mut line)?;
        let address = line.trim().parse().with_context(|| format!("the target says {line:?}"))?;
        Process::of(child, stdin, address)
    }

    /// A process that accepts connections.
    pub(crate) fn of(child: Child, stdin: Option<ChildStdin>, address: SocketAddr) -> Result<Process> {
        let mut process = Process { child, stdin, folder: None, address, start_bytes: 0 };
        process.start_bytes = process.usage()?.resident_bytes;
        Ok(process)
    }

    /// Kills it (SIGKILL).
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("killing the target")?;
        self.child.wait().map(drop).context("waiting for the end of the target")
    }

    /// Fails if it has ended, which no attack may cause.
    pub fn check_alive(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the target ended: {status}"),
        }
    }

    /// Stops it as an operator would, which must succeed.
    pub fn stop(self) -> Result<()> {
        self.stop_within(HANG_TIMEOUT)
    }

    /// The same within this time.
    pub fn stop_within(mut self, time: Duration) -> Result<()> {
        if self.stdin.take().is_none() {
            let pid = rustix::process::Pid::from_child(&self.child);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).context("telling the target to end")?;
        }
        let deadline = Instant::now() + time;
        loop {
            match self.child.try_wait()? {
                Some(status) => {
                    ensure!(status.success(), "the target ended with {status}");
                    return Ok(());
                }
                None => ensure!(Instant::now() < deadline, "the target does not stop"),
            }
            sleep(Duration::from_millis(10));
        }
    }

    /// Starts a new measurement of the peak.
    pub fn reset_peak(&self) -> Result<()> {
        fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5").context("forgetting the peak of memory")
    }

    /// Measures it now.
    pub fn usage(&self) -> Result<ProcessUsage> {
        let folder = format!("/proc/{}", self.child.id());
        let status = fs::read_to_string(format!("{folder}/status")).context("reading the target's status")?;
        let field = |name: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).context("a field of the status")?;
            Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
        };
        let descriptors = fs::read_dir(format!("{folder}/fd"))?.count();
        Ok(ProcessUsage { resident_bytes: field("VmRSS:")?, peak_bytes: field("VmHWM:")?, descriptors })
    }

    /// Waits until at most `most` descriptors are open.
    pub fn wait_descriptors(&mut self, most: usize) -> Result<()> {
        let deadline = Instant::now() + HANG_TIMEOUT;
        loop {
            self.check_alive()?;
            let open = self.usage()?.descriptors;
            if open <= most {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{open} descriptors are open where {most} were");
            sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
