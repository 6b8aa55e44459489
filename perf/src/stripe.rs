//! A stripe of two legs against both legs by themselves, at the same time.
//!
//! Claim: the stripe keeps 90 % of what its legs do together, on files, which share a disk here, and on two devices that each
//! have a speed of their own. The yardstick asks both legs side by side, each with half of the depth; the stripe is asked with
//! all of it. Everything is on one core, so legs in memory, which have no time of their own, show what the layer itself
//! costs: no bar is held there.

use std::rc::Rc;

use futures_util::future::try_join;
use sealblock_block::{Device, DynDevice, Gate};
use sealblock_layers_stripe::{CHUNK, StripeLayer};
use sealblock_media_file::RawDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::BlockSize;

use crate::load::{Load, Sample, Stopwatch, Until, drive};
use crate::options::{FileOptions, Protection};
use crate::paced::Paced;
use crate::report::{Rounds, shuffled};
use crate::setup::{FILL, Prepared, Scratch, new_file, new_path};

const BAR: f64 = 0.90;
/// Speed of a device with a speed of its own: 256 MiB/s.
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

type Member = Rc<Gate<DynDevice>>;

/// Two legs, and the stripe of them.
struct Rig {
    legs: [Member; 2],
    stripe: Rc<Gate<StripeLayer<Member>>>,
    _scratch: Vec<Scratch>,
}

impl Rig {
    async fn new(legs: [DynDevice; 2], scratch: Vec<Scratch>) -> anyhow::Result<Rig> {
        let legs = legs.map(|leg| Rc::new(Gate::new("leg", leg)));
        let layer = StripeLayer::new(legs.to_vec(), CHUNK)?;
        let rig = Rig { legs, stripe: Rc::new(Gate::new("stripe", layer)), _scratch: scratch };
        let blocks = rig.stripe.geometry().capacity_blocks;
        drive(Rc::clone(&rig.stripe), FILL, Until::Asked(blocks / FILL.blocks), 1).await?;
        Ok(rig)
    }

    async fn memory(options: &FileOptions, guard: Protection) -> anyhow::Result<Rig> {
        let leg = || DynDevice::new(MemoryDevice::new(BlockSize::B4096, options.blocks() / 2, guard.0));
        Rig::new([leg(), leg()], Vec::new()).await
    }

    async fn paced(options: &FileOptions, guard: Protection) -> anyhow::Result<Rig> {
        let leg = || {
            let memory = Gate::new("memory", MemoryDevice::new(BlockSize::B4096, options.blocks() / 2, guard.0));
            DynDevice::new(Paced::new(memory, PACE))
        };
        Rig::new([leg(), leg()], Vec::new()).await
    }

    async fn files(options: &FileOptions) -> anyhow::Result<Rig> {
        let (mut legs, mut scratch) = (Vec::new(), Vec::new());
        for name in ["leg a", "leg b"] {
            let path = new_path(&options.dir, name)?;
            let medium = new_file(&path.0, options.size.get() / 2, Prepared::Written).await?;
            legs.push(DynDevice::new(RawDevice::new(medium, BlockSize::B4096)?));
            scratch.push(path);
        }
        let [a, b] = <[DynDevice; 2]>::try_from(legs).ok().expect("two legs");
        Rig::new([a, b], scratch).await
    }

    /// One turn of a contender, by its place in [`NAMES`].
    async fn turn(&self, contender: usize, load: Load, until: Until, seed: u64) -> anyhow::Result<Sample> {
        match contender {
            0 => {
                let half = Load { depth: (load.depth / 2).max(1), ..load };
                let watch = Stopwatch::start();
                let leg = |at: usize| drive(Rc::clone(&self.legs[at]), half, until, seed + at as u64);
                let (a, b) = try_join(leg(0), leg(1)).await?;
                Ok(watch.stop(a.requests + b.requests, load.blocks << BlockSize::B4096.shift()))
            }
            1 => drive(Rc::clone(&self.legs[0]), load, until, seed).await,
            _ => drive(Rc::clone(&self.stripe), load, until, seed).await,
        }
    }
}

const NAMES: [&str; 3] = ["both legs", "one leg", "stripe"];

/// Measures everything and prints it.
pub fn run(options: &FileOptions) -> anyhow::Result<()> {
    let reactor = Reactor::new(Config::default())?;
    println!("{}", reactor.backend());
    reactor.block_on(async {
        println!("\nraw files, {} in all", options.size);
        measure(options, &Rig::files(options).await?, Some(BAR)).await?;
        for &guard in &options.guards {
            println!("\nmemory at 256 MiB/s a leg, {}, {} in all", guard.name(), options.size);
            measure(options, &Rig::paced(options, guard).await?, Some(BAR)).await?;
            println!("\nmemory, {}, {} in all", guard.name(), options.size);
            measure(options, &Rig::memory(options, guard).await?, None).await?;
        }
        Ok(())
    })
}

async fn measure(options: &FileOptions, rig: &Rig, bar: Option<f64>) -> anyhow::Result<()> {
    for load in LOADS.iter().filter(|load| load.name.contains(&options.only)) {
        let mut rounds = Rounds::default();
        for number in 0..options.rounds {
            let mut turns = vec![Sample::default(); NAMES.len()];
            let mut state = u64::from(number).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            for next in shuffled(NAMES.len(), &mut state) {
                turns[next] = rig.turn(next, *load, Until::Passed(options.turn()), u64::from(number) + 1).await?;
            }
            rounds.0.push(turns);
        }
        rounds.print(load.name, &NAMES.map(str::to_owned), None);
        let ratio = rounds.ratio(2).median;
        println!("  stripe of both legs{}", crate::report::verdict(ratio, bar));
    }
    Ok(())
}
