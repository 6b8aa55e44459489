//! Floods: one kind of command, on many queues at once, on a server with its usual limits.
//!
//! For each admin, Fabrics, NVM and NBD command, and each kind of device, the queues of eight hosts keep a given number
//! of commands outstanding; at first they receive completions, later they stop receiving. Measured from outside: the
//! growth of resident memory, the time until the same host's next controller is ready after the queues are cut off, and
//! the time until the server has stopped. Only the memory has a limit; times are printed.

use std::fmt;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sealblock_exports_nvme_tcp::Limits;

use crate::process::Process;
use crate::served::Program;
use crate::wire::SUBNQN;

mod commands;
pub mod nbd;
pub mod nvme;
mod queues;

pub use commands::{AREA_BYTES, FLOODS, Flood, Kind, Set};
use queues::OVERHEAD_BYTES;
pub use queues::{Effort, QUEUES, Queues};

/// The time limit for a server to stop.
const MAX_STOP: Duration = Duration::from_secs(60);
/// Bytes of each namespace, most of which are never written: enough for the longest Dataset Management.
const NAMESPACE_BYTES: u64 = 80 << 30;
/// The same for a raw file.
const RAW_BYTES: u64 = 80 << 30;
/// The effect of a flood on the server.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Commands that completed.
    pub completed: u64,
    /// The status of a failed command; 0 if none failed.
    pub status: u16,
    /// The maximum growth of resident memory, in bytes.
    pub grown_bytes: u64,
}

/// The growth of memory that the limits allow for this number of connections: data, staging buffers and slots of
/// commands.
pub fn allowed_bytes(limits: &Limits, connections: usize) -> u64 {
    let each = (512 << 10) + usize::from(limits.commands) * (8192 + 4096);
    (limits.total_bytes_in_flight + limits.total_bytes_in_flight / 8 + connections * each) as u64 + OVERHEAD_BYTES
}

/// Serves two namespaces of each kind with these limits from a folder: one that is flooded, and another one.
///
/// # Errors
/// If the program fails.
pub fn serve(program: &Program, folder: &Path, limits: &Limits) -> Result<Process> {
    let mut text = format!(
        "[[listeners]]\naddress = \"{}\"\n[limits]\nconnections = {}\ncommands = {}\nbytes_in_flight = {}\ntotal_bytes_in_flight = {}\ntransfer_bytes = {}\n\
         [[nbd]]\nsocket = {:?}\n[[subsystems]]\nnqn = \"{SUBNQN}\"\n",
        SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        limits.connections,
        limits.commands,
        limits.bytes_in_flight,
        limits.total_bytes_in_flight,
        limits.transfer_bytes,
        nbd_socket(folder),
    );
    for (kind, nsid) in Kind::ALL.into_iter().flat_map(|kind| [(kind, kind.nsid()), (kind, kind.other_nsid())]) {
        let file = folder.join(nsid.to_string());
        let target = match kind {
            Kind::Memory => format!("mem:{NAMESPACE_BYTES}"),
            Kind::Volume => file.display().to_string(),
            Kind::Raw => format!("raw:{}", file.display()),
        };
        if kind == Kind::Volume && !file.exists() {
            program.create_sized(&file, NAMESPACE_BYTES)?;
        }
        if kind == Kind::Raw {
            File::create(&file)?.set_len(RAW_BYTES)?;
        }
        text += &format!("[[subsystems.namespaces]]\nnsid = {nsid}\ntarget = {target:?}\n");
        if nsid == kind.nsid() {
            text += &format!("nbd = \"{}\"\n", kind.name());
        }
    }
    let path = folder.join("sealblock.toml");
    fs::write(&path, text).context("writing a configuration")?;
    program.serve_configured(&path)
}

/// Floods a server for some time through the queues that `start` opens, then stops receiving for a moment, and
/// measures. The queues stay open.
///
/// # Errors
/// If the server ends or refuses a queue.
pub fn flood(
    process: &mut Process,
    time: Duration,
    start: impl FnOnce(SocketAddr) -> Result<Queues>,
) -> Result<(Queues, Measured)> {
    process.reset_peak()?;
    let before = process.usage()?.resident_bytes;
    let queues = start(process.address)?;
    sleep(time);
    queues.fall_silent();
    sleep(time / 4);
    process.check_alive()?;
    let grown_bytes = process.usage()?.peak_bytes.saturating_sub(before);
    let status = queues.failure() as u16;
    let measured = Measured { completed: queues.completed(), status, grown_bytes };
    Ok((queues, measured))
}

/// The table: every flood on every kind of device, each on a server of its own.
///
/// # Errors
/// If a flood makes the server exceed its memory limits, or ends it.
pub fn table(program: &Program, effort: &Effort, wanted: impl Fn(&str) -> bool) -> Result<()> {
    let folder = tempfile::tempdir().context("making a folder")?;
    let socket = nbd_socket(folder.path());
    let (allowed, by_nbd) = (allowed_bytes(&effort.limits, 2 * QUEUES), nbd::allowed_bytes(&effort.limits));
    println!(
        "{QUEUES} queues with {} outstanding each, for {:.1} s; memory may grow by {} MiB, by {} with NBD\n",
        effort.outstanding,
        effort.time.as_secs_f64(),
        allowed >> 20,
        by_nbd >> 20
    );
    println!(
        "| command | device | completed | last failure | memory, MiB | stopped with it, s | next one ready, s | stopped then, s |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut failed = Vec::new();
    let mut print = |name: &str, device: &str, allowed: u64, row: Result<Row>| match row {
        Ok(row) => {
            println!("| {name} | {device} | {row} |");
            if row.measured.grown_bytes > allowed {
                failed.push(format!("{name} {device}: memory"));
            }
        }
        Err(error) => {
            println!("| {name} | {device} | {error:#} |");
            failed.push(format!("{name} {device}: {error:#}"));
        }
    };
    for one in FLOODS.iter().filter(|flood| wanted(flood.name)) {
        for kind in Kind::ALL.into_iter().filter(|kind| one.runs_on(*kind)) {
            let device = if one.set == Set::Admin { "" } else { kind.name() };
            let start = |address| nvme::start(address, one, kind, effort);
            print(
                one.name,
                device,
                allowed + kind.stored_bytes(),
                row(program, folder.path(), effort, start, nvme::ready_again),
            );
        }
    }
    for one in nbd::NBD_FLOODS.iter().filter(|flood| wanted(flood.name)) {
        for kind in Kind::ALL {
            let start = |_| nbd::start(&socket, one, kind, effort);
            let ready = |_| nbd::ready_again(&socket, kind);
            print(
                one.name,
                kind.name(),
                by_nbd + kind.stored_bytes(),
                row(program, folder.path(), effort, start, ready),
            );
        }
    }
    ensure!(failed.is_empty(), "more memory than allowed, or no answer: {failed:?}");
    Ok(())
}

/// The address of the flooded server for NBD clients.
pub fn nbd_socket(folder: &Path) -> PathBuf {
    folder.join("nbd.sock")
}

/// A row of the table.
struct Row {
    measured: Measured,
    /// The time until the server stopped while the flood's hosts were connected.
    stopped: Duration,
    /// The time until the host's next controller was ready, or until the next NBD client had read a block.
    ready: Duration,
    /// The time until the server stopped after that.
    stopped_then: Duration,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [stopped, ready, then] = [self.stopped, self.ready, self.stopped_then].map(|time| time.as_secs_f64());
        let Measured { completed, status, grown_bytes } = self.measured;
        write!(f, "{completed} | {status:#x} | {} | {stopped:.2} | {ready:.2} | {then:.2}", grown_bytes >> 20)
    }
}

fn row(
    program: &Program,
    folder: &Path,
    effort: &Effort,
    start: impl Fn(SocketAddr) -> Result<Queues>,
    ready_again: impl FnOnce(SocketAddr) -> Result<Duration>,
) -> Result<Row> {
    let mut process = serve(program, folder, &effort.limits)?;
    let (queues, measured) = flood(&mut process, effort.time, &start)?;
    let begun = Instant::now();
    process.stop_within(MAX_STOP)?;
    let stopped = begun.elapsed();
    queues.cut();
    let mut process = serve(program, folder, &effort.limits)?;
    let (queues, _) = flood(&mut process, effort.time, &start)?;
    queues.cut();
    let ready = ready_again(process.address)?;
    let begun = Instant::now();
    process.stop_within(MAX_STOP)?;
    Ok(Row { measured, stopped, ready, stopped_then: begun.elapsed() })
}
