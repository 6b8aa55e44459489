//! Our host at a server that is killed and started again, again and again, while the host writes and flushes.
//!
//! The host reconnects by itself. Whatever a Flush or a durable write has vouched for must be there in the end, and at every
//! read on the way; no block may be anything but one of the writes that were begun; and a Flush that cannot vouch says so.

use std::cell::{Cell, RefCell};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use sealblock_block::{Device, Durability, Request, Response};
use sealblock_integrity::{Checks, Sealed, Tags};
use sealblock_media_nvme_tcp::{NvmeTcpDevice, Options, Reconnect};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, Reactor, sleep, spawn};
use sealblock_units::Extent;

use crate::formats::{FORMATS_NQN, Kind};
use crate::oracle::{Account, Version};
use crate::process::{PLAIN, Process};
use crate::random::Random;
use crate::served::Program;
use crate::wire::{HANG, SUBNQN};

/// Tasks that write, each its own blocks.
const TASKS: usize = 6;
/// Blocks of each.
const BLOCKS: usize = 8;

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What serves.
    pub program: Program,
    /// Where its volume is.
    pub folder: PathBuf,
    /// What the volume is.
    pub kind: Kind,
    /// Uses memory of the server in place of the volume, which loses everything: the fault that must be noticed.
    pub forgets: bool,
    /// How often the server is killed.
    pub rounds: u64,
    /// What is written where, and when the server is killed, as far as that is not left to the machine.
    pub seed: u64,
}

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Writes that were answered.
    pub writes: u64,
    /// Flushes that succeeded.
    pub flushes: u64,
    /// Flushes that said that writes may be lost.
    pub doubts: u64,
    /// Blocks that were read and found good.
    pub reads: u64,
    /// Times that the host found the server again.
    pub reconnects: u64,
}

impl Plan {
    /// Makes the volume, and serves it on a port of the system's choice.
    pub fn begin(&self) -> Result<Process> {
        self.program.create(&self.folder, &self.kind)?;
        self.serve((Ipv4Addr::LOCALHOST, 0).into())
    }

    /// Serves it at this address.
    pub fn serve(&self, address: SocketAddr) -> Result<Process> {
        self.program.serve(&self.folder, &[self.kind], address)
    }

    /// Opens the namespace, with limits that a server which is started again at once does not reach.
    pub async fn open(&self, address: SocketAddr) -> Result<NvmeTcpDevice> {
        let (nqn, nsid) = if self.forgets { (SUBNQN, PLAIN) } else { (FORMATS_NQN, self.kind.nsid) };
        let (first_delay, max_delay) = (Duration::from_millis(2), Duration::from_millis(20));
        let reconnect = Reconnect { attempts: 20_000, total: 2 * HANG, first_delay, max_delay };
        let options = Options {
            queues: 2,
            connect_timeout: HANG,
            max_connection_losses: u8::MAX,
            data_digest: true,
            reconnect,
            ..Options::default()
        };
        NvmeTcpDevice::connect(address.into(), nqn.parse()?, Some(nsid), options).await.context("opening the namespace")
    }
}

/// Kills the server `rounds` times in the middle of a random load.
///
/// # Errors
/// When anything is lost that was vouched for, a block holds what nobody wrote, or a request fails.
pub fn run(plan: &Plan) -> Result<Summary> {
    let server = plan.begin()?;
    let (address, signs) = (server.address, Arc::new(Signs::default()));
    let killer = {
        let (plan, signs) = (plan.clone(), Arc::clone(&signs));
        thread::spawn(move || {
            let outcome = kill(&plan, server, &signs);
            signs.ends.store(true, Ordering::SeqCst);
            outcome
        })
    };
    let reactor = Reactor::new(Config { pool_arena_bytes: 4 << 20, ..Config::default() })?;
    let worked = reactor.block_on(work(plan, address, &signs));
    signs.ends.store(true, Ordering::SeqCst);
    let server = killer.join().map_err(|_| anyhow!("the killer panicked"))?;
    let summary = worked?;
    server?.stop().context("the last server stops")?;
    if !plan.forgets {
        plan.program.verify(&plan.folder, &plan.kind).context("after all kills")?;
    }
    ensure!(summary.reconnects >= plan.rounds, "the host noticed fewer kills than there were: {summary:?}");
    Ok(summary)
}

/// What the killer and the host tell each other.
#[derive(Default)]
struct Signs {
    answered: AtomicU64,
    ends: AtomicBool,
}

/// Kills the server whenever some more writes were answered, and starts it again.
fn kill(plan: &Plan, mut server: Process, signs: &Signs) -> Result<Process> {
    let mut random = Random::new(plan.seed ^ 0xD1E);
    for _ in 0..plan.rounds {
        let wanted = signs.answered.load(Ordering::SeqCst) + 10 + random.below(100);
        let start = Instant::now();
        while signs.answered.load(Ordering::SeqCst) < wanted {
            if signs.ends.load(Ordering::SeqCst) {
                return Ok(server);
            }
            ensure!(start.elapsed() < HANG, "the host gets nothing done");
            thread::sleep(Duration::from_millis(1));
        }
        let address = server.address;
        server.kill()?;
        thread::sleep(Duration::from_millis(random.below(20)));
        server = plan.serve(address).context("starting the server again")?;
    }
    Ok(server)
}

/// A host at work.
struct Host {
    device: NvmeTcpDevice,
    kind: Kind,
    account: RefCell<Account>,
    summary: Cell<Summary>,
    signs: Arc<Signs>,
}

async fn work(plan: &Plan, address: SocketAddr, signs: &Arc<Signs>) -> Result<Summary> {
    let device = plan.open(address).await?;
    let account = RefCell::new(Account::new(TASKS * BLOCKS));
    let host = Rc::new(Host { device, kind: plan.kind, account, summary: Cell::default(), signs: Arc::clone(signs) });
    let mut tasks = vec![spawn(Rc::clone(&host).flushes())];
    for task in 0..TASKS {
        tasks.push(spawn(Rc::clone(&host).writes(task, Random::new(plan.seed << 8 ^ task as u64))));
    }
    // One that fails ends the others.
    let mut outcome = Ok(());
    for task in tasks {
        let ended = task.await.map_err(|_| anyhow!("a task panicked")).flatten();
        outcome = outcome.and(ended);
    }
    outcome?;
    // The last kill may have left something in doubt; then it is said once, and only once.
    if !host.flush().await? {
        ensure!(host.flush().await?, "a Flush fails twice");
    }
    host.judge(0..TASKS * BLOCKS).await.context("in the end")?;
    let checks = Checks { guard: true, ..Checks::NONE };
    let all = Extent::from_raw(0, (TASKS * BLOCKS) as u64)?;
    host.device.execute(Request::Verify { extent: all, checks }).await.context("Verify in the end")?;
    host.device.close().await;
    Ok(Summary { reconnects: host.device.counters().reconnects, ..host.summary.get() })
}

impl Host {
    fn ends(&self) -> bool {
        self.signs.ends.load(Ordering::SeqCst)
    }

    fn count(&self, add: impl FnOnce(&mut Summary)) {
        let mut summary = self.summary.get();
        add(&mut summary);
        self.summary.set(summary);
    }

    /// The task that flushes. It is the only one, since a Flush that fails does so for all who flush.
    async fn flushes(self: Rc<Self>) -> Result<()> {
        while !self.ends() {
            sleep(Duration::from_millis(3)).await;
            self.flush().await.inspect_err(|_| self.signs.ends.store(true, Ordering::SeqCst))?;
        }
        Ok(())
    }

    /// Whether a Flush vouched for what was answered before.
    async fn flush(&self) -> Result<bool> {
        let mark = self.account.borrow().flush();
        match self.device.execute(Request::Flush).await {
            Ok(_) => {
                self.account.borrow_mut().flushed(mark);
                self.count(|summary| summary.flushes += 1);
                Ok(true)
            }
            Err(error) if error.to_string().contains("may be lost") => {
                self.account.borrow_mut().doubted();
                self.count(|summary| summary.doubts += 1);
                Ok(false)
            }
            Err(error) => Err(error).context("Flush"),
        }
    }

    /// A task that writes its blocks, and looks at them.
    async fn writes(self: Rc<Self>, task: usize, mut random: Random) -> Result<()> {
        let first = task * BLOCKS;
        for version in 1.. {
            if self.ends() {
                break;
            }
            let (at, durable) = (random.below(BLOCKS as u64) as usize, random.below(4) == 0);
            let len = 1 + random.below((BLOCKS - at) as u64) as usize;
            let step = async {
                self.write(first + at..first + at + len, version, durable).await?;
                if random.below(4) == 0 { self.judge(first..first + BLOCKS).await } else { Ok(()) }
            };
            let done = step.await;
            done.inspect_err(|_| self.signs.ends.store(true, Ordering::SeqCst))
                .with_context(|| format!("task {task}, version {version}"))?;
        }
        Ok(())
    }

    async fn write(&self, blocks: std::ops::Range<usize>, version: Version, durable: bool) -> Result<()> {
        let extent = Extent::from_raw(blocks.start as u64, blocks.len() as u64)?;
        let durability = if durable { Durability::ForceUnitAccess } else { Durability::Volatile };
        let data = sealed(&self.device, &self.kind, extent, version);
        self.account.borrow_mut().begin(blocks.clone(), version);
        let written = self.device.execute(Request::Write { extent, data, durability }).await;
        written.with_context(|| format!("Write of {extent}"))?;
        self.account.borrow_mut().answered(blocks, version, durable);
        self.signs.answered.fetch_add(1, Ordering::SeqCst);
        self.count(|summary| summary.writes += 1);
        Ok(())
    }

    /// Reads blocks whose writer is the caller; each must hold what it may.
    async fn judge(&self, blocks: std::ops::Range<usize>) -> Result<()> {
        let found = read(&self.device, Extent::from_raw(blocks.start as u64, blocks.len() as u64)?).await?;
        for (index, block) in blocks.clone().enumerate() {
            let account = self.account.borrow();
            let possible = account.possible(block);
            if !possible.iter().any(|version| holds(&self.kind, &found, index, block as u64, *version)) {
                bail!("block {block} holds none of the versions that it may: {possible:?}");
            }
        }
        self.count(|summary| summary.reads += blocks.len() as u64);
        Ok(())
    }
}

/// Blocks of this version, sealed for the device.
pub fn sealed(device: &NvmeTcpDevice, kind: &Kind, extent: Extent, version: Version) -> Sealed {
    let (geometry, start) = (device.geometry(), extent.start().get());
    let units = (0..extent.len()).map(|index| kind.unit(version, start, index));
    let data: Vec<u8> = units.flat_map(|mut unit| unit.drain(..kind.size.bytes()).collect::<Vec<u8>>()).collect();
    let first = kind.tags(version, start, 0);
    let tags = Tags { app_tag: first.app_tag, storage_tag: first.storage_tag, initial_ref_tag: first.ref_tag };
    Sealed::seal(Slice::copy_from(&data), geometry.block_size, geometry.protection, &tags)
}

/// Reads blocks with every check that is possible.
pub async fn read(device: &NvmeTcpDevice, extent: Extent) -> Result<Sealed> {
    let checks = device.geometry().protection.map_or(Checks::NONE, |format| Checks::full(format, extent.start()));
    match device.execute(Request::Read { extent, checks }).await.with_context(|| format!("Read of {extent}"))? {
        Response::Data(sealed) => Ok(sealed),
        other => bail!("a Read is answered by {other:?}"),
    }
}

/// Whether block `index` of what was read is this version of the block at `lba`, with its tags where it has any.
pub fn holds(kind: &Kind, found: &Sealed, index: usize, lba: u64, version: Version) -> bool {
    let (size, tuple) = (kind.size.bytes(), kind.format.tuple_bytes());
    let data = &found.data()[index * size..][..size];
    if version == 0 {
        return data.iter().all(|byte| *byte == 0);
    }
    let unit = kind.unit(version, lba, 0);
    let has_tags = !found.tags().is_empty();
    data == &unit[..size] && (!has_tags || found.tags()[index * tuple..][..tuple] == unit[size..])
}
