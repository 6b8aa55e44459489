//! The target under attack, in a process of its own, whose memory and descriptors are measured from outside.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::rc::Rc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use sealblock_block::{DynDevice, Gate};
use sealblock_exports_nvme_tcp::{Limits, Namespace, PiVisibility, Subsystem, Target};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::BlockSize;
use tempfile::TempDir;

use crate::formats::{self, FORMATS_NQN, Kind};
use crate::served::Program;
use crate::wire::{HANG, SUBNQN};

/// Bytes of a block of the namespaces.
pub const BLOCK_BYTES: usize = 4096;
/// Blocks of each namespace.
pub const BLOCKS: u64 = 4096;
/// A namespace that shows plain blocks.
pub const PLAIN: u32 = 1;
/// One that shows its protection information.
pub const PROTECTED: u32 = 2;
/// One that only the neighbour uses.
pub const NEIGHBOUR: u32 = 3;

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

/// The same with all the time that a good host may need to connect on a machine that is busy with other things.
pub fn patient_limits() -> Limits {
    Limits { connect: 2 * HANG, ..limits() }
}

/// Memory that the limits let peers make the target hold, in bytes: data both ways, staging and the kernel's answers for each
/// connection, and what an allocator keeps to itself.
pub fn most_bytes(connections: usize) -> u64 {
    let limits = limits();
    let each = (256 << 10) + usize::from(limits.commands) * 8192;
    let data = limits.total_bytes_in_flight.min(connections.saturating_mul(2 * limits.bytes_in_flight));
    (connections.min(limits.connections) * each + data) as u64 + (24 << 20)
}

/// Memory that the devices take when every block of them was written.
pub fn device_bytes() -> u64 {
    let formats = formats::all().len() as u64 * formats::BLOCKS;
    (3 * BLOCKS + formats) * (BLOCK_BYTES as u64 + 16)
}

/// Is the target, until standard input ends. Prints its address first.
pub fn run(limits: Limits) -> Result<()> {
    let reactor = Reactor::new(Config::default()).context("starting a reactor")?;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // The parent ends it by closing the pipe, however the parent ends.
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
        Namespace::new(SharedDevice::publish(Rc::new(Gate::new("mem", DynDevice::new(device)))), [id; 16])
    };
    Ok(Subsystem::new(SUBNQN.parse()?, "1")
        .with_namespace(PLAIN, namespace(1))?
        .with_namespace(PROTECTED, namespace(2).with_visibility(PiVisibility::Protected)?)?
        .with_namespace(NEIGHBOUR, namespace(3))?)
}

/// A namespace in memory for each kind.
fn formats_subsystem() -> Result<Subsystem> {
    let mut subsystem = Subsystem::new(FORMATS_NQN.parse()?, "2");
    for kind in formats::all() {
        let Kind { nsid, size, format, .. } = kind;
        let device = MemoryDevice::new(size, formats::BLOCKS, Some(format));
        let device = SharedDevice::publish(Rc::new(Gate::new("mem", DynDevice::new(device))));
        let namespace = Namespace::new(device, [100 + nsid as u8; 16]).with_visibility(PiVisibility::Protected)?;
        subsystem = subsystem.with_namespace(nsid, namespace)?;
    }
    Ok(subsystem)
}

/// A process with a target. Ended when dropped.
pub struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    /// Where its volumes are, if they end with it.
    folder: Option<TempDir>,
    /// Where it listens.
    pub address: SocketAddr,
    /// Memory that it had resident when it began to listen, in bytes.
    pub start_bytes: u64,
}

/// What can be seen of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sight {
    /// Memory that it has resident, in bytes.
    pub resident_bytes: u64,
    /// The most it ever had resident since [`Process::forget_peak`].
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

    /// Starts `sealblock serve` with the same limits and subsystems, and volumes that end with it.
    pub fn start_sealblock(program: &Program) -> Result<Process> {
        let folder = tempfile::tempdir().context("making a folder")?;
        let kinds: Vec<_> = formats::all().into_iter().filter(|kind| kind.is_for_volumes).collect();
        kinds.iter().try_for_each(|kind| program.create(folder.path(), kind))?;
        let mut process = program.serve_with(folder.path(), &kinds, (Ipv4Addr::LOCALHOST, 0).into(), &limits())?;
        process.folder = Some(folder);
        Ok(process)
    }

    /// A process that accepts connections.
    pub(crate) fn of(child: Child, stdin: Option<ChildStdin>, address: SocketAddr) -> Result<Process> {
        let mut process = Process { child, stdin, folder: None, address, start_bytes: 0 };
        process.start_bytes = process.look()?.resident_bytes;
        Ok(process)
    }

    /// Ends it in the middle of whatever it does (SIGKILL).
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("killing the target")?;
        self.child.wait().map(drop).context("waiting for the end of the target")
    }

    /// Fails if it has ended, which no attack may bring about.
    pub fn is_alive(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the target ended: {status}"),
        }
    }

    /// Ends it as an operator would, which must succeed.
    pub fn stop(mut self) -> Result<()> {
        if self.stdin.take().is_none() {
            let pid = rustix::process::Pid::from_child(&self.child);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).context("telling the target to end")?;
        }
        let deadline = Instant::now() + HANG;
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
    pub fn forget_peak(&self) -> Result<()> {
        fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5").context("forgetting the peak of memory")
    }

    /// How it looks now.
    pub fn look(&self) -> Result<Sight> {
        let folder = format!("/proc/{}", self.child.id());
        let status = fs::read_to_string(format!("{folder}/status")).context("reading the target's status")?;
        let field = |name: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).context("a field of the status")?;
            Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
        };
        let descriptors = fs::read_dir(format!("{folder}/fd"))?.count();
        Ok(Sight { resident_bytes: field("VmRSS:")?, peak_bytes: field("VmHWM:")?, descriptors })
    }

    /// Waits until no more descriptors are open than `most`.
    pub fn settles(&mut self, most: usize) -> Result<()> {
        let deadline = Instant::now() + HANG;
        loop {
            self.is_alive()?;
            let open = self.look()?.descriptors;
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
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
