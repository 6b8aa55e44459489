//! The servers: ours in this process, the others in their own processes, all on one CPU.

use std::fs::{File, read_to_string};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use sealblock_block::DynDevice;
use sealblock_exports_nbd::{Export, Limits, Server};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{CoreHandle, Cores, pool, spawn};
use sealblock_units::BlockSize;

use crate::comparisons::options::NbdOptions;
use crate::comparisons::server::process_cpu;
use crate::cpu::core_cpu;
use crate::remote;

/// A server that listens.
pub struct Served {
    /// Its name in tables.
    pub name: String,
    /// Its address.
    pub address: SocketAddr,
    /// The export to choose.
    pub export: String,
    end: End,
}

enum End {
    Ours {
        core: CoreHandle,
        _cores: Cores,
    },
    /// A process, and the file that it serves.
    Theirs(Child, Option<PathBuf>),
}

impl Served {
    /// CPU seconds so far.
    pub fn cpu_seconds(&self) -> Result<f64> {
        match &self.end {
            End::Ours { core, .. } => {
                let core = core.clone();
                remote::wait(async move { core_cpu(&core).await })?
            }
            End::Theirs(child, _) => Ok(process_cpu(child.id())),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let End::Theirs(child, file) = &mut self.end {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
            let _ = file.take().map(std::fs::remove_file);
        }
    }
}

/// Seconds since the system started in which a CPU was not idle, for any process; accurate to a hundredth, the unit of
/// Linux.
pub fn busy_seconds(cpu: usize) -> Result<f64> {
    let (stat, name) = (read_to_string("/proc/stat")?, format!("cpu{cpu} "));
    let line =
        stat.lines().find_map(|line| line.strip_prefix(&name)).with_context(|| format!("there is no CPU {cpu}"))?;
    // User, nice, system, idle, I/O wait, interrupts (two kinds), stolen; later fields are already included in these.
    let times = line.split_whitespace().take(8).map(str::parse::<f64>).collect::<Result<Vec<_>, _>>()?;
    Ok(times.iter().enumerate().filter(|(index, _)| ![3, 4].contains(index)).map(|(_, time)| time / 100.0).sum())
}

/// Starts ours first, then the others that are installed; prints which are missing.
pub fn start(options: &NbdOptions) -> Result<Vec<Served>> {
    let mut servers = vec![ours(options)?];
    let size = options.size.get();
    if is_there("nbdkit") {
        let port = free_port()?;
        let words = ["--foreground", "--exit-with-parent", "--ipaddr=127.0.0.1"].map(str::to_owned);
        let more = [format!("--port={port}"), "memory".to_owned(), size.to_string()];
        servers.push(theirs("nbdkit", port, options, &[&words[..], &more].concat(), None)?);
    }
    if is_there("qemu-nbd") {
        let port = free_port()?;
        let path = PathBuf::from(format!("/dev/shm/sealblock-perf-{}", std::process::id()));
        let file = File::create_new(&path).with_context(|| format!("making {}", path.display()))?;
        file.set_len(size)?;
        let words = ["--persistent", "--format=raw", "--cache=writeback", "--bind=127.0.0.1"].map(str::to_owned);
        let more = [format!("--port={port}"), path.to_string_lossy().into_owned()];
        servers.push(theirs("qemu-nbd", port, options, &[&words[..], &more].concat(), Some(path))?);
    }
    Ok(servers)
}

fn ours(options: &NbdOptions) -> Result<Served> {
    let (cores, core) = remote::core(options.server_cpu, options.spin_us)?;
    let blocks = options.size.get() / 4096;
    let (guard, with) = (options.guard.0, options.guard.name());
    let serve = move || async move {
        let device = MemoryDevice::new(BlockSize::B4096, blocks, guard).with_pool(pool());
        let device = SharedDevice::publish(DynDevice::new("memory", device));
        let server = Server::new([Export::new("", device)], Limits::default())?;
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16)?;
        let address = listener.local_addr()?;
        // It serves until its core is dropped.
        drop(spawn(async move { server.serve(listener).await }));
        anyhow::Ok(address)
    };
    let address = remote::wait(core.call(serve))?.context("the server's core is gone")??;
    let name = if with == "none" { "ours".to_owned() } else { format!("ours {with}") };
    Ok(Served { name, address, export: String::new(), end: End::Ours { core, _cores: cores } })
}

fn theirs(name: &str, port: u16, options: &NbdOptions, words: &[String], file: Option<PathBuf>) -> Result<Served> {
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", &options.server_cpu.to_string(), name]).args(words).stdin(Stdio::null());
    let child = command.spawn().with_context(|| format!("starting {name}"))?;
    let address = (Ipv4Addr::LOCALHOST, port).into();
    Ok(Served { name: name.to_owned(), address, export: String::new(), end: End::Theirs(child, file) })
}

fn is_there(name: &str) -> bool {
    let found = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        println!("{name} is not installed and not measured");
    }
    found
}

/// Finds a free port. Another process may take it before the server does.
fn free_port() -> Result<u16> {
    match TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port() {
        0 => bail!("the system gives no port"),
        port => Ok(port),
    }
}
