//! A stripe of two members, compared with both members without a stripe, at the same time.
//!
//! Threshold: the stripe reaches 90 % of its two members together, on files, which share a disk here, and on two
//! devices that each have their own speed. For the baseline, both members are loaded at once, each with half the queue
//! depth; the stripe gets the whole depth. All work is on one core, so members in memory, which have no latency, show
//! the cost of the layer itself; no threshold applies to them.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures_util::future::try_join;
use sealblock_block::{Abilities, Device, DynDevice, Gate, Geometry, Outcome, Request};
use sealblock_layers_stripe::{CHUNK, StripeLayer};
use sealblock_media_file::RawDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_reactor::{Config, Reactor, now, sleep_until};
use sealblock_units::BlockSize;

use super::options::FileOptions;
use super::rounds::{Rounds, verdict};
use crate::load::{Load, Sample, Stopwatch, Until, drive};
use crate::report::shuffled;
use crate::setup::{FILL, Prepared, Protection, Scratch, new_file, new_path};

const THRESHOLD: f64 = 0.90;
/// The speed of a device with its own speed: 256 MiB/s.
const PACE: u64 = 256 << 20;

const fn load(name: &'static str, write: bool, blocks: u64, depth: u64) -> Load {
    Load { name, write, blocks, random: blocks == 1, depth, flush_every: 0 }
}

const LOADS: &[Load] = &[
    load("read 4 KiB, random, QD 32", false, 1, 32),
    load("write 4 KiB, random, QD 32", true, 1, 32),
    load("read 64 KiB, sequential, QD 16", false, 16, 16),
    load("write 64 KiB, sequential, QD 16", true, 16, 16),
    load("read 1 MiB, sequential, QD 8", false, 256, 8),
    load("write 1 MiB, sequential, QD 8", true, 256, 8),
];

/// Two members, and their stripe.
struct Setup {
    members: [DynDevice; 2],
    stripe: Rc<Gate<StripeLayer<DynDevice>>>,
    _scratch: Vec<Scratch>,
}

impl Setup {
    async fn new(members: [DynDevice; 2], scratch: Vec<Scratch>) -> anyhow::Result<Setup> {
        let layer = StripeLayer::new(members.to_vec(), CHUNK)?;
        let setup = Setup { members, stripe: Rc::new(Gate::new("stripe", layer)), _scratch: scratch };
        let blocks = setup.stripe.geometry().capacity_blocks;
        drive(Rc::clone(&setup.stripe), FILL, Until::Asked(blocks / FILL.blocks), 1).await?;
        Ok(setup)
    }

    async fn memory(options: &FileOptions, guard: Protection) -> anyhow::Result<Setup> {
        let member = || DynDevice::new("member", MemoryDevice::new(BlockSize::B4096, options.blocks() / 2, guard.0));
        Setup::new([member(), member()], Vec::new()).await
    }

    async fn paced(options: &FileOptions, guard: Protection) -> anyhow::Result<Setup> {
        let member = || {
            let memory = Gate::new("memory", MemoryDevice::new(BlockSize::B4096, options.blocks() / 2, guard.0));
            DynDevice::new("member", Paced::new(memory, PACE))
        };
        Setup::new([member(), member()], Vec::new()).await
    }

    async fn files(options: &FileOptions) -> anyhow::Result<Setup> {
        let (mut members, mut scratch) = (Vec::new(), Vec::new());
        for name in ["member a", "member b"] {
            let path = new_path(&options.dir, name)?;
            let medium = new_file(&path.0, options.size.get() / 2, Prepared::Written).await?;
            members.push(DynDevice::new(name, RawDevice::new(medium, BlockSize::B4096)?));
            scratch.push(path);
        }
        let [a, b] = <[DynDevice; 2]>::try_from(members).ok().expect("two members");
        Setup::new([a, b], scratch).await
    }

    /// One turn of a contender, by its index in [`NAMES`].
    async fn turn(&self, contender: usize, load: Load, until: Until, seed: u64) -> anyhow::Result<Sample> {
        match contender {
            0 => {
                let half = Load { depth: (load.depth / 2).max(1), ..load };
                let watch = Stopwatch::start();
                let member = |at: usize| drive(self.members[at].clone(), half, until, seed + at as u64);
                let (a, b) = try_join(member(0), member(1)).await?;
                Ok(watch.stop(a.requests + b.requests, load.blocks << BlockSize::B4096.shift()))
            }
            1 => drive(self.members[0].clone(), load, until, seed).await,
            _ => drive(Rc::clone(&self.stripe), load, until, seed).await,
        }
    }
}

const NAMES: [&str; 3] = ["both members", "one member", "stripe"];

/// Measures everything and prints it.
pub fn run(options: &FileOptions) -> anyhow::Result<()> {
    let reactor = Reactor::new(Config::default())?;
    println!("{}", reactor.backend());
    reactor.block_on(async {
        println!("\nraw files, {} in all", options.size);
        measure(options, &Setup::files(options).await?, Some(THRESHOLD)).await?;
        for &guard in &options.guards {
            println!("\nmemory at 256 MiB/s a member, {}, {} in all", guard.name(), options.size);
            measure(options, &Setup::paced(options, guard).await?, Some(THRESHOLD)).await?;
            println!("\nmemory, {}, {} in all", guard.name(), options.size);
            measure(options, &Setup::memory(options, guard).await?, None).await?;
        }
        Ok(())
    })
}

async fn measure(options: &FileOptions, setup: &Setup, threshold: Option<f64>) -> anyhow::Result<()> {
    for load in LOADS.iter().filter(|load| load.name.contains(&options.only)) {
        let mut rounds = Rounds::default();
        for number in 0..options.rounds {
            let mut turns = vec![Sample::default(); NAMES.len()];
            let mut rng = Rng::with_seed(u64::from(number));
            for next in shuffled(NAMES.len(), &mut rng) {
                turns[next] = setup.turn(next, *load, Until::Passed(options.turn()), u64::from(number) + 1).await?;
            }
            rounds.0.push(turns);
        }
        rounds.print(load.name, &NAMES.map(str::to_owned), None);
        let ratio = rounds.ratio(2).median;
        println!("  stripe of both members{}", verdict(ratio, threshold));
    }
    Ok(())
}

/// A device that takes time for every byte, one request after the other, as a separate disk does.
///
/// Two files on one disk are not faster than one file, but two of these devices are.
pub struct Paced<D> {
    inner: D,
    bytes_per_second: u64,
    /// When all requests so far will have completed.
    free: Cell<Instant>,
}

impl<D: Device> Paced<D> {
    /// `inner` at this speed, by the clock of the current reactor.
    pub fn new(inner: D, bytes_per_second: u64) -> Paced<D> {
        Paced { inner, bytes_per_second, free: Cell::new(now()) }
    }
}

impl<D: Device> Device for Paced<D> {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let bytes = request.extent().map_or(0, |extent| extent.bytes(self.geometry().block_size));
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let done = self.free.get().max(now()) + takes;
        self.free.set(done);
        let outcome = self.inner.execute(request).await;
        sleep_until(done).await;
        outcome
    }
}
