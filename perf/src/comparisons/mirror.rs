//! A mirror of two replicas, compared with the same devices without a mirror, written at the same time.
//!
//! Thresholds: writing to the mirror reaches 90 % of the slower replica's rate when both are written at once, because a
//! mirror must do exactly that. (`in step` writes to both replicas with nothing in between, which shows what it costs
//! that each request waits for the slower replica.) A Verify of the mirror lets both replicas verify at once. So with
//! replicas that have their own latencies, it takes no longer than one replica alone for the same blocks, and half as
//! long as one replica after the other. There are three kinds of replicas: protected volumes in files, which share one
//! disk here; memory in which every request takes 2 ms, like a remote or slow disk; and plain memory. In the last case
//! all work is on one core and a write to the mirror is two writes, so half the rate of one replica is the maximum.

use std::rc::Rc;

use fastrand::Rng;
use futures_util::future::try_join;
use sealblock_block::{Abilities, Device, DynDevice, Expectations, Gate, Geometry, Outcome, Request, RequestKind};
use sealblock_layers_fault::FaultLayer;
use sealblock_layers_mirror::{Mirror, OpenOptions, ReplicaSource};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_reactor::{Config, Reactor, spawn};
use sealblock_units::{BlockCount, BlockSize, Extent};

use super::options::FileOptions;
use super::rounds::{Rounds, verdict};
use crate::load::{Load, Sample, Stopwatch, Until, drive};
use crate::report::shuffled;
use crate::setup::{
    FILL, OpenVolume, Prepared, Protection, Scratch, Turn, TurnClock, new_path, new_volume, open_volume,
};

const THRESHOLD: f64 = 0.90;
const IDENTITY: [u8; 16] = *b"a mirror in perf";

const fn load(name: &'static str, write: bool, blocks: u64, depth: u64) -> Load {
    Load { name, write, blocks, random: blocks == 1, depth, flush_every: 0 }
}

const LOADS: &[Load] = &[
    load("write 4 KiB, random, QD 32", true, 1, 32),
    load("write 4 KiB, random, QD 1", true, 1, 1),
    load("write 128 KiB, sequential, QD 8", true, 32, 8),
    load("read 4 KiB, random, QD 32", false, 1, 32),
];

/// Two replicas, and their mirror.
struct Setup {
    replicas: [DynDevice; 2],
    mirror: Rc<Gate<Rc<Mirror<TurnClock>>>>,
    /// Blocks of one Verify.
    piece: BlockCount,
    volumes: Vec<OpenVolume>,
    _scratch: Vec<Scratch>,
}

impl Setup {
    async fn new(replicas: [DynDevice; 2], volumes: Vec<OpenVolume>, scratch: Vec<Scratch>) -> anyhow::Result<Setup> {
        let source = |replica: &DynDevice| ReplicaSource::new("replica", Ok(replica.clone()), None);
        let options = OpenOptions { is_read_only: false, accepts_lost_label: false, random: IDENTITY };
        let opened =
            sealblock_layers_mirror::open(replicas.iter().map(source).collect(), TurnClock::REAL, options).await?;
        drop(spawn(opened.worker.run()));
        let mirror = Rc::new(Gate::new("mirror", opened.mirror));
        let blocks = mirror.geometry().capacity_blocks;
        drive(Rc::clone(&mirror), FILL, Until::Asked(blocks / FILL.blocks), 1).await?;
        let piece = mirror.geometry().limits.max_verify_blocks;
        Ok(Setup { replicas, mirror, piece, volumes, _scratch: scratch })
    }

    async fn memory(options: &FileOptions, guard: Protection) -> anyhow::Result<Setup> {
        let replica = || DynDevice::new("memory", MemoryDevice::new(BlockSize::B4096, options.blocks() / 2, guard.0));
        Setup::new([replica(), replica()], Vec::new(), Vec::new()).await
    }

    async fn volumes(options: &FileOptions, guard: Protection) -> anyhow::Result<Setup> {
        let (mut replicas, mut volumes, mut scratch) = (Vec::new(), Vec::new(), Vec::new());
        for name in ["replica a", "replica b"] {
            let path = new_path(&options.dir, name)?;
            new_volume(&path.0, options.blocks() / 2, guard, Prepared::Written).await?;
            let volume = open_volume(&path.0, Turn::endless()).await?;
            replicas.push(volume.stack());
            volumes.push(volume);
            scratch.push(path);
        }
        let [a, b] = <[DynDevice; 2]>::try_from(replicas).ok().expect("two replicas");
        Setup::new([a, b], volumes, scratch).await
    }

    /// Replicas with a latency for each request.
    async fn slow(options: &FileOptions, guard: Protection) -> anyhow::Result<Setup> {
        let replica = || -> anyhow::Result<DynDevice> {
            let memory = Gate::new("memory", MemoryDevice::new(BlockSize::B4096, options.blocks() / 2, guard.0));
            Ok(DynDevice::new("slow", FaultLayer::new(memory, "delay=2ms".parse()?, TurnClock::REAL)))
        };
        let setup = Setup::new([replica()?, replica()?], Vec::new(), Vec::new()).await?;
        // So few that their CPU time is small compared with the waiting time.
        Ok(Setup { piece: BlockCount::new(32).expect("not zero"), ..setup })
    }

    /// One turn of a contender, by its index in [`NAMES`].
    async fn turn(&self, contender: usize, load: Load, until: Until, seed: u64) -> anyhow::Result<Sample> {
        match contender {
            BOTH => {
                let watch = Stopwatch::start();
                let replica = |at: usize| drive(self.replicas[at].clone(), load, until, seed + at as u64);
                let (a, b) = try_join(replica(0), replica(1)).await?;
                Ok(watch.stop(a.requests.min(b.requests), load.blocks << BlockSize::B4096.shift()))
            }
            ALONE => drive(self.replicas[0].clone(), load, until, seed).await,
            IN_STEP => drive(Rc::new(InStep(self.replicas.clone())), load, until, seed).await,
            _ => drive(Rc::clone(&self.mirror), load, until, seed).await,
        }
    }

    /// The number of blocks to verify, from the first on.
    fn verified(&self) -> u64 {
        self.mirror.geometry().capacity_blocks.min(VERIFIES * u64::from(self.piece.get()))
    }

    /// Verifies blocks of the mirror, or the same blocks of replicas, by the contender's index in [`VERIFY_NAMES`].
    async fn verify(&self, contender: usize) -> anyhow::Result<Sample> {
        let blocks = self.verified();
        let replica = |at: usize| verify(&self.replicas[at], blocks, self.piece);
        let watch = Stopwatch::start();
        match contender {
            0 => replica(0).await?,
            1 => {
                replica(0).await?;
                replica(1).await?;
            }
            2 => drop(try_join(replica(0), replica(1)).await?),
            _ => verify(&*self.mirror, blocks, self.piece).await?,
        }
        Ok(watch.stop(blocks, BlockSize::B4096.bytes() as u64))
    }

    async fn close(self) -> anyhow::Result<()> {
        self.mirror.device().close().await?;
        drop((self.mirror, self.replicas));
        for volume in self.volumes {
            volume.close().await?;
        }
        Ok(())
    }
}

/// Verifies the first `blocks` of a device, one piece after the other.
async fn verify(device: &impl Device, blocks: u64, piece: BlockCount) -> anyhow::Result<()> {
    for start in (0..blocks).step_by(piece.get() as usize) {
        let extent = Extent::from_raw(start, (blocks - start).min(u64::from(piece.get())))?;
        device.execute(Request::verify(extent, Expectations::NONE)).await?;
    }
    Ok(())
}

const BOTH: usize = 0;
const ALONE: usize = 1;
const IN_STEP: usize = 2;
const MIRROR: usize = 3;
const NAMES: [&str; 4] = ["slower of both", "one replica alone", "in step", "mirror"];
const VERIFY_NAMES: [&str; 4] = ["one replica", "one by one", "both at once", "mirror"];
/// The maximum number of Verify requests of a turn.
const VERIFIES: u64 = 512;

/// Sends requests to both replicas at once and does nothing else: the minimum cost of a mirror.
struct InStep([DynDevice; 2]);

impl Device for InStep {
    fn geometry(&self) -> &Geometry {
        self.0[0].geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0[0].abilities()
    }

    async fn execute(&self, operation: Request) -> Outcome {
        let [a, b] = &self.0;
        if operation.kind() == RequestKind::Read {
            return a.execute(operation).await;
        }
        try_join(a.execute(operation.clone()), b.execute(operation)).await.map(|(answer, _)| answer)
    }
}

/// Measures everything and prints it.
pub fn run(options: &FileOptions) -> anyhow::Result<()> {
    let reactor = Reactor::new(Config::default())?;
    println!("{}", reactor.backend());
    reactor.block_on(async {
        for &guard in &options.guards {
            println!("\nvolumes, {}, {} in all", guard.name(), options.size);
            measure(options, Setup::volumes(options, guard).await?, BOTH, Some(THRESHOLD)).await?;
            println!("\nmemory, 2 ms a request, {}, {} in all", guard.name(), options.size);
            measure(options, Setup::slow(options, guard).await?, BOTH, Some(THRESHOLD)).await?;
            println!("\nmemory, {}, {} in all", guard.name(), options.size);
            measure(options, Setup::memory(options, guard).await?, ALONE, None).await?;
        }
        Ok(())
    })
}

/// Measures against a baseline. A device that never waits cannot serve two loads at once, because the first one would
/// take all the time.
async fn measure(options: &FileOptions, setup: Setup, baseline: usize, threshold: Option<f64>) -> anyhow::Result<()> {
    let contenders = if baseline == BOTH { vec![BOTH, ALONE, IN_STEP, MIRROR] } else { vec![ALONE, IN_STEP, MIRROR] };
    let names: Vec<String> = contenders.iter().map(|contender| NAMES[*contender].to_owned()).collect();
    for load in LOADS.iter().filter(|load| load.name.contains(&options.only)) {
        let mut rounds = Rounds::default();
        for number in 0..options.rounds {
            let mut turns = vec![Sample::default(); contenders.len()];
            let mut rng = Rng::with_seed(u64::from(number));
            for next in shuffled(contenders.len(), &mut rng) {
                let until = Until::Passed(options.turn());
                turns[next] = setup.turn(contenders[next], *load, until, u64::from(number) + 1).await?;
            }
            rounds.0.push(turns);
        }
        rounds.print(load.name, &names, None);
        let threshold = threshold.filter(|_| load.write);
        let mirror = contenders.len() - 1;
        println!("  mirror of both replicas{}", verdict(rounds.ratio(mirror).median, threshold));
        println!("  mirror of in step   {:.1} %", rounds.ratio_to(mirror, mirror - 1).median * 100.0);
    }
    // Replicas that were written separately differ, so all blocks are written once more.
    let blocks = setup.mirror.geometry().capacity_blocks;
    drive(Rc::clone(&setup.mirror), FILL, Until::Asked(blocks / FILL.blocks), 2).await?;
    setup.mirror.execute(Request::flush()).await?;
    if "verify".contains(&options.only) {
        verifies(options, &setup).await?;
    }
    setup.close().await
}

async fn verifies(options: &FileOptions, setup: &Setup) -> anyhow::Result<()> {
    let mut rounds = Rounds::default();
    for number in 0..options.rounds {
        let mut turns = vec![Sample::default(); VERIFY_NAMES.len()];
        let mut rng = Rng::with_seed(u64::from(number));
        for next in shuffled(VERIFY_NAMES.len(), &mut rng) {
            turns[next] = setup.verify(next).await?;
        }
        rounds.0.push(turns);
    }
    let what = format!("verify, {} blocks, {} in one request", setup.verified(), setup.piece.get());
    rounds.print(&what, &VERIFY_NAMES.map(str::to_owned), None);
    Ok(())
}
