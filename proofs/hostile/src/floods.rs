//! Floods: one command at a time, by many queues at once, on a server with its usual limits.
//!
//! For each command of the admin, Fabrics and NVM sets and of NBD, and each kind of device, eight hosts' queues keep as many commands
//! outstanding as they are told to, first completing them and then without receiving anything. Measured from outside: how far resident
//! memory grows above what it was, how long the same host's next controller takes to become ready once the queues are cut
//! off, and how long the server takes to stop. Only the bound on memory is asserted; times are printed.

use std::fmt;
use std::fs::{self, File};
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use sealblock_exports_nvme_tcp::Limits;
use sealblock_protocols_nvme::fabrics::CNTLID_DYNAMIC;
use sealblock_protocols_nvme::{Command, Completion};

use crate::process::Process;
use crate::served::Program;
use crate::wire::{C2H_DATA, Data, HANG_TIMEOUT, Pdu, Peer, R2T, RESPONSE, SUBNQN, connect, h2c};

mod commands;
pub mod nbd;

pub use commands::{AREA_BYTES, FLOODS, Flood, Kind, Set};

/// Connections of a flood.
pub const QUEUES: usize = 8;
/// How long a server may take to stop before the measurement gives up.
const MAX_STOP: Duration = Duration::from_secs(60);
/// Bytes of each namespace, most of which are never written: room for the longest Dataset Management.
const NAMESPACE_BYTES: u64 = 80 << 30;
/// The same of a raw file.
const RAW_BYTES: u64 = 80 << 30;
/// Memory beside what the limits say: allocator overhead, tables of devices, and the kernel's queued completions.
const OVERHEAD_BYTES: u64 = 40 << 20;

/// How hard to flood.
#[derive(Clone, Debug)]
pub struct Effort {
    /// The limits of the server.
    pub limits: Limits,
    /// Commands outstanding on each queue, or less where the queue holds less.
    pub outstanding: u16,
    /// How long commands are completed and replaced.
    pub time: Duration,
}

/// What a flood did to the server.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Commands that completed.
    pub completed: u64,
    /// The status of one that failed; 0 if none did.
    pub status: u16,
    /// Growth of resident memory, at most, in bytes.
    pub grown_bytes: u64,
}

/// The growth of memory that the limits allow so many connections: data, staging buffers and slots of commands.
pub fn allowed_bytes(limits: &Limits, connections: usize) -> u64 {
    let each = (512 << 10) + usize::from(limits.commands) * (8192 + 4096);
    (limits.total_bytes_in_flight + limits.total_bytes_in_flight / 8 + connections * each) as u64 + OVERHEAD_BYTES
}

/// Serves two namespaces of each kind with these limits, from a folder: those that are flooded, and others.
///
/// # Errors
/// When the program fails.
pub fn serve(program: &Program, folder: &Path, limits: &Limits) -> Result<Process> {
    let mut text = format!(
        "[[listeners]]\naddress = \"{}\"\n[limits]\ncommands = {}\nbytes_in_flight = {}\ntotal_bytes_in_flight = {}\ntransfer_bytes = {}\n\
         [[nbd]]\nsocket = {:?}\n[[subsystems]]\nnqn = \"{SUBNQN}\"\n",
        SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
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

/// What the threads of a flood are told, and tell.
#[derive(Clone, Default)]
pub(crate) struct Busy {
    is_stopping: Arc<AtomicBool>,
    completed: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
}

/// The queues of a flood, and the threads that keep them busy.
#[derive(Default)]
pub struct Queues {
    admins: Vec<Peer>,
    threads: Vec<JoinHandle<Result<()>>>,
    busy: Busy,
    cuts: Vec<Box<dyn FnOnce()>>,
}

impl Queues {
    /// Opens the queues and starts to flood.
    ///
    /// # Errors
    /// When the server refuses a queue.
    pub fn start(address: SocketAddr, flood: &'static Flood, kind: Kind, effort: &Effort) -> Result<Queues> {
        let mut queues = Queues::default();
        let entries = u32::from(effort.limits.commands);
        for number in 0..QUEUES as u64 {
            let (admin, cntlid) = Peer::admin_of(address, SUBNQN, entries, 0)?;
            let peer = match flood.set {
                Set::Admin => admin,
                Set::Io => {
                    queues.admins.push(admin);
                    let (peer, answer) = Peer::connecting(address, 0, connect(SUBNQN, 1, entries, cntlid, 0))?;
                    ensure!(answer.status == 0, "Connect: {answer:?}");
                    peer
                }
            };
            let end = peer.stream.try_clone()?;
            let cut = move || {
                // Fails only if the connection has ended.
                let _ = end.shutdown(Shutdown::Both);
            };
            let outstanding = effort.outstanding.min(effort.limits.commands - 8);
            let transfer_bytes = effort.limits.transfer_bytes;
            queues.add(cut, move |busy| keep_busy(peer, number, flood, kind, (outstanding, transfer_bytes), busy));
        }
        Ok(queues)
    }

    /// Adds a queue: how it is cut off, and what keeps it busy.
    fn add(&mut self, cut: impl FnOnce() + 'static, work: impl FnOnce(&Busy) -> Result<()> + Send + 'static) {
        let busy = self.busy.clone();
        self.cuts.push(Box::new(cut));
        self.threads.push(thread::spawn(move || work(&busy)));
    }

    /// Commands that completed so far.
    pub fn completed(&self) -> u64 {
        self.busy.completed.load(Ordering::Relaxed)
    }

    /// Receives nothing any more, and lets what is outstanding stay so.
    pub fn fall_silent(&self) {
        self.busy.is_stopping.store(true, Ordering::Relaxed);
    }

    /// Cuts all queues off.
    pub fn cut(self) {
        self.fall_silent();
        self.cuts.into_iter().for_each(|cut| cut());
        for thread in self.threads {
            // A connection that was cut off is an error of its thread.
            let _ = thread.join();
        }
    }
}

/// Keeps commands outstanding on one queue until told to stop. Its owner holds the connection.
fn keep_busy(
    mut peer: Peer,
    number: u64,
    flood: &'static Flood,
    kind: Kind,
    (outstanding, transfer_bytes): (u16, u32),
    busy: &Busy,
) -> Result<()> {
    let mut sender = peer.stream.try_clone()?;
    let (send, sends) = std::sync::mpsc::channel::<Vec<u8>>();
    // A thread of its own: who waits for room to send does not receive, and a server that waits for that receives nothing.
    thread::spawn(move || {
        for bytes in sends {
            if std::io::Write::write_all(&mut sender, &bytes).is_err() {
                return;
            }
        }
    });
    let mut turn = number << 32;
    let mut submit = |cid: u16| {
        turn += 1;
        send.send(flood.pdu(kind, turn, transfer_bytes, cid)).map_err(|_| anyhow!("the connection ended"))
    };
    if flood.repeats_cid() {
        return repeat(&mut peer, &mut submit, busy);
    }
    for cid in 0..outstanding {
        submit(cid)?;
    }
    while !busy.is_stopping.load(Ordering::Relaxed) {
        let pdu = peer.receive()?;
        match completion(&pdu) {
            Some((cid, status)) => {
                busy.completed.fetch_add(1, Ordering::Relaxed);
                if status != 0 {
                    busy.failed.store(status.into(), Ordering::Relaxed);
                }
                submit(cid)?;
            }
            None if pdu.kind == R2T => {
                let data = vec![0; pdu.dword(16) as usize];
                let answer = h2c(true, pdu.short(8), pdu.short(10), pdu.dword(12), &data);
                send.send(answer).map_err(|_| anyhow!("the connection ended"))?;
            }
            None => {}
        }
    }
    Ok(())
}

/// Submits a command that does not complete, with one identifier, again and again. The server must have received it before the next one,
/// which a Keep Alive in between proves.
fn repeat(peer: &mut Peer, submit: &mut impl FnMut(u16) -> Result<()>, busy: &Busy) -> Result<()> {
    while !busy.is_stopping.load(Ordering::Relaxed) {
        submit(1)?;
        let answer = peer.call(Command::new(0x18, 0), Data::None)?;
        ensure!(answer.status == 0, "Keep Alive: {answer:?}");
        busy.completed.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// The command that a PDU completes, and its status.
fn completion(pdu: &Pdu) -> Option<(u16, u16)> {
    match pdu.kind {
        RESPONSE => Completion::from_prefix(&pdu.header[8..])
            .map(|completion| (completion.cid.get(), completion.status().code().get())),
        C2H_DATA if pdu.flags & 8 != 0 => Some((pdu.short(8), 0)),
        _ => None,
    }
}

/// Floods a server for some time with the queues that `start` opens, then falls silent for a moment, and measures. The queues stay.
///
/// # Errors
/// When the server ends or refuses a queue.
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
    let status = queues.busy.failed.load(Ordering::Relaxed) as u16;
    let measured = Measured { completed: queues.completed(), status, grown_bytes };
    Ok((queues, measured))
}

/// How long the flooding host's next controller takes to become ready.
///
/// # Errors
/// When it does not within [`HANG_TIMEOUT`] several times over.
pub fn ready_again(address: SocketAddr) -> Result<Duration> {
    let start = Instant::now();
    let (mut peer, answer) = Peer::connecting(address, 0, connect(SUBNQN, 0, 32, CNTLID_DYNAMIC, 0))?;
    ensure!(answer.status == 0, "Connect: {answer:?}");
    peer.property(0x14, 4, 0x0046_0001)?;
    while peer.property_get(0x1C, 4)?.result & 1 == 0 {
        ensure!(start.elapsed() < HANG_TIMEOUT * 8, "CSTS.RDY stays 0");
        sleep(Duration::from_millis(2));
    }
    let answer = peer.call(Command::new(0x18, 0), Data::None)?;
    ensure!(answer.status == 0, "Keep Alive: {answer:?}");
    Ok(start.elapsed())
}

/// The table: every flood on every kind of device, each on a server of its own.
///
/// # Errors
/// When a flood makes the server hold more than its limits allow, or ends it.
pub fn table(program: &Program, effort: &Effort, wanted: impl Fn(&str) -> bool) -> Result<()> {
    let folder = tempfile::tempdir().context("making a folder")?;
    let (allowed, socket) = (allowed_bytes(&effort.limits, 2 * QUEUES), nbd_socket(folder.path()));
    println!(
        "{QUEUES} queues with {} outstanding each, for {:.1} s; memory may grow by {} MiB\n",
        effort.outstanding,
        effort.time.as_secs_f64(),
        allowed >> 20
    );
    println!(
        "| command | device | completed | last failure | memory, MiB | stopped with it, s | next one ready, s | stopped then, s |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut failed = Vec::new();
    let mut print = |name: &str, device: &str, stored: u64, row: Result<Row>| match row {
        Ok(row) => {
            println!("| {name} | {device} | {row} |");
            if row.measured.grown_bytes > allowed + stored {
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
            let start = |address| Queues::start(address, one, kind, effort);
            print(one.name, device, kind.stored_bytes(), row(program, folder.path(), effort, start, ready_again));
        }
    }
    for one in nbd::NBD_FLOODS.iter().filter(|flood| wanted(flood.name)) {
        for kind in Kind::ALL {
            let start = |_| nbd::start(&socket, one, kind, effort);
            let ready = |_| nbd::ready_again(&socket, kind);
            print(one.name, kind.name(), kind.stored_bytes(), row(program, folder.path(), effort, start, ready));
        }
    }
    ensure!(failed.is_empty(), "more than {} MiB, or no answer: {failed:?}", allowed >> 20);
    Ok(())
}

/// Where the flooded server listens for NBD clients.
pub fn nbd_socket(folder: &Path) -> PathBuf {
    folder.join("nbd.sock")
}

/// A row of the table.
struct Row {
    measured: Measured,
    /// How long the server took to stop while the flood's hosts were connected.
    stopped: Duration,
    /// How long the host's next controller took to become ready, or the next NBD client to read a block.
    ready: Duration,
    /// How long the server took to stop behind that.
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
