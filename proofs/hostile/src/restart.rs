//! Our host and a server that is repeatedly killed and restarted while the host writes and flushes.
//!
//! The host reconnects by itself. What a Flush or a durable write made durable must be there at the end and at every
//! read in between. Each block must hold one of the writes that were started. A Flush that cannot make earlier writes
//! durable must fail.

use std::cell::{Cell, RefCell};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use sealblock_block::{Device, Durability, Expectations, Request, Response};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_nvme_tcp::{NvmeTcpDevice, Options, Reconnect};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, Reactor, sleep, spawn};
use sealblock_units::Extent;

use crate::formats::{FORMATS_NQN, FormattedNamespace};
use crate::oracle::{Oracle, Version};
use crate::process::Process;
use crate::served::{Program, volume};
use crate::wire::HANG_TIMEOUT;
use fastrand::Rng;

/// Tasks that write, each to its own blocks.
const TASKS: usize = 6;
/// Blocks of each task.
const BLOCKS: usize = 8;

/// The configuration of a run.
#[derive(Clone, Debug)]
pub struct RestartConfig {
    /// The program that serves.
    pub program: Program,
    /// The folder of its volume.
    pub folder: PathBuf,
    /// The format of the volume.
    pub kind: FormattedNamespace,
    /// Makes the volume blank again before each restart; the test must detect that.
    pub forgets: bool,
    /// The number of kills.
    pub rounds: u64,
    /// Seed of the writes and of the times of kills, as far as timing is reproducible.
    pub seed: u64,
}

/// The counters of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Writes that completed.
    pub writes: u64,
    /// Flushes that succeeded.
    pub flushes: u64,
    /// Flushes that failed because writes may be lost.
    pub failed_flushes: u64,
    /// Blocks that were read with a correct version.
    pub reads: u64,
    /// Successful reconnects of the host.
    pub reconnects: u64,
}

impl RestartConfig {
    /// Makes the volume, and serves it on a port that the system chooses.
    pub fn start(&self) -> Result<Process> {
        self.program.create(&self.folder, &self.kind)?;
        fs::copy(volume(&self.folder, &self.kind), self.blank()).context("keeping the blank volume")?;
        self.serve((Ipv4Addr::LOCALHOST, 0).into())
    }

    /// Serves it at this address.
    pub fn serve(&self, address: SocketAddr) -> Result<Process> {
        self.program.serve(&self.folder, &[self.kind], address)
    }

    /// A copy of the volume as it was made.
    fn blank(&self) -> PathBuf {
        self.folder.join("blank")
    }

    /// Opens the namespace, with retry limits that are higher than the restarts need.
    pub async fn open(&self, address: SocketAddr) -> Result<NvmeTcpDevice> {
        let (first_delay, max_delay) = (Duration::from_millis(2), Duration::from_millis(20));
        let reconnect = Reconnect { attempts: 20_000, total: 2 * HANG_TIMEOUT, first_delay, max_delay };
        let options = Options {
            queues: 2,
            connect_timeout: HANG_TIMEOUT,
            max_connection_losses: u8::MAX,
            data_digest: true,
            reconnect,
            ..Options::default()
        };
        let (nqn, nsid) = (FORMATS_NQN.parse()?, Some(self.kind.nsid));
        NvmeTcpDevice::connect(address.into(), nqn, nsid, options).await.context("opening the namespace")
    }
}

/// Kills the server `rounds` times in the middle of a random load.
///
/// # Errors
/// If a durable write is lost, a block holds none of its writes, or a request fails.
pub fn run(config: &RestartConfig) -> Result<Summary> {
    let server = config.start()?;
    let (address, signals) = (server.address, Arc::new(RunSignals::default()));
    let killer = {
        let (config, signals) = (config.clone(), Arc::clone(&signals));
        thread::spawn(move || {
            let outcome = kill_repeatedly(&config, server, &signals);
            signals.is_ending.store(true, Ordering::SeqCst);
            outcome
        })
    };
    let reactor = Reactor::new(Config { pool_arena_bytes: 4 << 20, ..Config::default() })?;
    let worked = reactor.block_on(run_host(config, address, &signals));
    signals.is_ending.store(true, Ordering::SeqCst);
    let server = killer.join().map_err(|_| anyhow!("the killer panicked"))?;
    // Without a server the host cannot work; the server's error is the cause.
    let server = server?;
    let summary = worked?;
    server.stop().context("the last server stops")?;
    if !config.forgets {
        config.program.verify(&config.folder, &config.kind).context("after all kills")?;
    }
    ensure!(summary.reconnects >= config.rounds, "the host noticed fewer kills than there were: {summary:?}");
    Ok(summary)
}

/// State that the killing thread and the host share.
#[derive(Default)]
struct RunSignals {
    completed_writes: AtomicU64,
    is_ending: AtomicBool,
}

/// Kills and restarts the server each time after some more writes have completed.
fn kill_repeatedly(config: &RestartConfig, mut server: Process, signals: &RunSignals) -> Result<Process> {
    let mut random = Rng::with_seed(config.seed ^ 0xD1E);
    for _ in 0..config.rounds {
        let wanted = signals.completed_writes.load(Ordering::SeqCst) + 10 + random.u64(..100);
        let start = Instant::now();
        while signals.completed_writes.load(Ordering::SeqCst) < wanted {
            if signals.is_ending.load(Ordering::SeqCst) {
                return Ok(server);
            }
            ensure!(start.elapsed() < HANG_TIMEOUT, "the host gets nothing done");
            thread::sleep(Duration::from_millis(1));
        }
        let address = server.address;
        server.kill()?;
        thread::sleep(Duration::from_millis(random.u64(..20)));
        if config.forgets {
            // The file stays the same one, as hosts see.
            fs::copy(config.blank(), volume(&config.folder, &config.kind)).context("making the volume blank")?;
        }
        server = config.serve(address).context("starting the server again")?;
    }
    Ok(server)
}

/// A running host.
struct Host {
    device: NvmeTcpDevice,
    kind: FormattedNamespace,
    oracle: RefCell<Oracle>,
    summary: Cell<Summary>,
    signals: Arc<RunSignals>,
}

async fn run_host(config: &RestartConfig, address: SocketAddr, signals: &Arc<RunSignals>) -> Result<Summary> {
    let device = config.open(address).await?;
    let oracle = RefCell::new(Oracle::new(TASKS * BLOCKS));
    let host =
        Rc::new(Host { device, kind: config.kind, oracle, summary: Cell::default(), signals: Arc::clone(signals) });
    let mut tasks = vec![spawn(Rc::clone(&host).run_flushes())];
    for task in 0..TASKS {
        tasks.push(spawn(Rc::clone(&host).run_writes(task, Rng::with_seed(config.seed << 8 ^ task as u64))));
    }
    // If one task fails, the others end.
    let mut outcome = Ok(());
    for task in tasks {
        let ended = task.await.map_err(|_| anyhow!("a task panicked")).flatten();
        outcome = outcome.and(ended);
    }
    outcome?;
    // The last kill may have lost unflushed writes; then exactly one Flush fails.
    if !host.flush().await? {
        ensure!(host.flush().await?, "a Flush fails twice");
    }
    host.check_blocks(0..TASKS * BLOCKS).await.context("in the end")?;
    let all = Extent::from_raw(0, (TASKS * BLOCKS) as u64)?;
    host.device.execute(Request::verify(all, Expectations::NONE)).await.context("Verify in the end")?;
    host.device.close().await;
    Ok(Summary { reconnects: host.device.counters().reconnects, ..host.summary.get() })
}

impl Host {
    fn is_ending(&self) -> bool {
        self.signals.is_ending.load(Ordering::SeqCst)
    }

    fn count(&self, add: impl FnOnce(&mut Summary)) {
        let mut summary = self.summary.get();
        add(&mut summary);
        self.summary.set(summary);
    }

    /// The task that flushes. There is only one, since a failed Flush reports the loss once for all tasks.
    async fn run_flushes(self: Rc<Self>) -> Result<()> {
        while !self.is_ending() {
            sleep(Duration::from_millis(3)).await;
            self.flush().await.inspect_err(|_| self.signals.is_ending.store(true, Ordering::SeqCst))?;
        }
        Ok(())
    }

    /// Flushes; false if the Flush failed because writes may be lost.
    async fn flush(&self) -> Result<bool> {
        let mark = self.oracle.borrow().flush_started();
        match self.device.execute(Request::flush()).await {
            Ok(_) => {
                self.oracle.borrow_mut().flush_completed(mark);
                self.count(|summary| summary.flushes += 1);
                Ok(true)
            }
            Err(error) if error.to_string().contains("may be lost") => {
                self.oracle.borrow_mut().flush_failed();
                self.count(|summary| summary.failed_flushes += 1);
                Ok(false)
            }
            Err(error) => Err(error).context("Flush"),
        }
    }

    /// A task that writes its blocks, and checks them.
    async fn run_writes(self: Rc<Self>, task: usize, mut random: Rng) -> Result<()> {
        let first = task * BLOCKS;
        for version in 1.. {
            if self.is_ending() {
                break;
            }
            let (at, durable) = (random.usize(..BLOCKS), random.u64(..4) == 0);
            let len = 1 + random.usize(..BLOCKS - at);
            let step = async {
                self.write(first + at..first + at + len, version, durable).await?;
                if random.u64(..4) == 0 { self.check_blocks(first..first + BLOCKS).await } else { Ok(()) }
            };
            let completed = step.await;
            completed
                .inspect_err(|_| self.signals.is_ending.store(true, Ordering::SeqCst))
                .with_context(|| format!("task {task}, version {version}"))?;
        }
        Ok(())
    }

    async fn write(&self, blocks: std::ops::Range<usize>, version: Version, durable: bool) -> Result<()> {
        let extent = Extent::from_raw(blocks.start as u64, blocks.len() as u64)?;
        let durability = if durable { Durability::ForceUnitAccess } else { Durability::Volatile };
        let data = sealed(&self.device, &self.kind, extent, version);
        self.oracle.borrow_mut().write_started(blocks.clone(), version);
        let written = self.device.execute(Request::write(extent, data, durability)).await;
        written.with_context(|| format!("Write of {extent}"))?;
        self.oracle.borrow_mut().write_completed(blocks, version, durable);
        self.signals.completed_writes.fetch_add(1, Ordering::SeqCst);
        self.count(|summary| summary.writes += 1);
        Ok(())
    }

    /// Reads blocks of the caller; each must hold a possible version.
    async fn check_blocks(&self, blocks: std::ops::Range<usize>) -> Result<()> {
        let found = read(&self.device, Extent::from_raw(blocks.start as u64, blocks.len() as u64)?).await?;
        for (index, block) in blocks.clone().enumerate() {
            let oracle = self.oracle.borrow();
            let possible = oracle.possible(block);
            if !possible.iter().any(|version| is_version(&self.kind, &found, index, block as u64, *version)) {
                bail!("block {block} holds none of the versions that it may: {possible:?}");
            }
        }
        self.count(|summary| summary.reads += blocks.len() as u64);
        Ok(())
    }
}

/// Blocks of this version, with protection information for the device.
pub fn sealed(device: &NvmeTcpDevice, kind: &FormattedNamespace, extent: Extent, version: Version) -> Sealed {
    let (geometry, start) = (device.geometry(), extent.start().get());
    let units = (0..extent.len()).map(|index| kind.unit(version, start, index));
    let data: Vec<u8> = units.flat_map(|mut unit| unit.drain(..kind.size.bytes()).collect::<Vec<u8>>()).collect();
    let first = kind.tags(version, start, 0);
    let tags = Tags { app_tag: first.app_tag, storage_tag: first.storage_tag, initial_ref_tag: first.ref_tag };
    Sealed::seal(Slice::copy_from(&data), geometry.block_size, geometry.protection, &tags)
}

/// Reads blocks with all checks.
pub async fn read(device: &NvmeTcpDevice, extent: Extent) -> Result<Sealed> {
    match device
        .execute(Request::read(extent, Expectations::NONE))
        .await
        .with_context(|| format!("Read of {extent}"))?
    {
        Response::Data(sealed) => Ok(sealed),
        other => bail!("a Read is answered by {other:?}"),
    }
}

/// True if block `index` of the data read is this version of the block at `lba`, with its tags if it has any.
pub fn is_version(kind: &FormattedNamespace, found: &Sealed, index: usize, lba: u64, version: Version) -> bool {
    let (size, tuple) = (kind.size.bytes(), kind.format.tuple_bytes());
    let data = &found.joined_data()[index * size..][..size];
    if version == 0 {
        return data.iter().all(|byte| *byte == 0);
    }
    let unit = kind.unit(version, lba, 0);
    let has_tags = !found.joined_tags().is_empty();
    data == &unit[..size] && (!has_tags || found.joined_tags()[index * tuple..][..tuple] == unit[size..])
}
