//! Writes that a volume seals while they are in flight, against writes that are sealed before they are submitted.
//!
//! Claim: data without tags are written no slower than data that are sealed first, and the slower the medium, the less of the time
//! that sealing takes shows. Both contenders are the same volume on the same medium; one is behind a gate that seals for it. The media are a
//! file with direct I/O, and memory that takes a time of its own for every write, as a drive does whose requests run side by side. The
//! second of two equal contenders, `sealed again`, shows how much the ratios mean.

use std::rc::Rc;

use anyhow::Context;
use fastrand::Rng;
use sealblock_block::{Device, DynDevice, Gate};
use sealblock_layers_fault::{FaultMedium, Rules};
use sealblock_media_file::{FileMedium, Options};
use sealblock_media_memory::MemoryMedium;
use sealblock_media_volume::{CreateOptions, OpenOptions, create, format::Layout, open};
use sealblock_runtime_reactor::{Config, JoinHandle, Reactor, spawn};
use sealblock_units::BlockSize;

use crate::counted::Counted;
use crate::devices::SealedBefore;
use crate::load::{Load, Sample, Until, drive};
use crate::medium::{AnyMedium, PacedMemory};
use crate::options::{FileOptions, Protection};
use crate::report::{Rounds, shuffled, verdict};
use crate::setup::{FILL, PerfVolume, Prepared, TurnClock, new_path, new_volume};

/// No slower, but for noise.
const BAR: f64 = 0.98;
/// What each write to memory takes: 1 MiB at 4.2, 2.1 and 1.0 GB/s.
const DELAYS_US: [u32; 3] = [250, 500, 1000];
const SECTOR_BYTES: u32 = 512;
const UUID: [u8; 16] = *b"sealed in flight";

const fn load(name: &'static str, blocks: u64, depth: u64) -> Load {
    Load { name, write: true, blocks, random: false, depth, flush_every: 0 }
}

const LOADS: &[Load] = &[
    load("write 1 MiB, sequential, QD 1", 256, 1),
    load("write 1 MiB, sequential, QD 2", 256, 2),
    load("write 1 MiB, sequential, QD 8", 256, 8),
    load("write 64 KiB, sequential, QD 1", 16, 1),
];

const NAMES: [&str; 3] = ["sealed before", "sealed again", "sealed in flight"];

/// Measures everything and prints it.
pub fn run(options: &FileOptions) -> anyhow::Result<()> {
    let reactor = Reactor::new(Config::default())?;
    println!("{}", reactor.backend());
    reactor.block_on(async {
        for &guard in &options.guards {
            let scratch = new_path(&options.dir, &format!("async seal {}", guard.name()))?;
            new_volume(&scratch.0, options.blocks(), guard, Prepared::Written).await?;
            println!("\nfile, {}, {}", guard.name(), options.size);
            measure(options, AnyMedium::File(FileMedium::open(&scratch.0, Options::WRITE)?)).await?;
        }
        for delay_us in DELAYS_US {
            for &guard in &options.guards {
                println!("\nmemory, {delay_us} us a write, {}, {}", guard.name(), options.size);
                measure(options, memory(options.blocks(), guard, delay_us).await?).await?;
            }
        }
        Ok(())
    })
}

/// Memory of so many bytes, which takes so long for each write.
pub fn paced(bytes: u64, delay_us: u32) -> anyhow::Result<PacedMemory> {
    let memory = Rc::new(MemoryMedium::new(bytes, SECTOR_BYTES));
    let rules: Rules = format!("delay={delay_us}us").parse().context("the rule of the delay")?;
    Ok(FaultMedium::new(memory, rules, TurnClock::REAL))
}

/// Memory with an empty volume, which takes so long for each write.
pub async fn memory(capacity_blocks: u64, guard: Protection, delay_us: u32) -> anyhow::Result<AnyMedium> {
    let layout = Layout::new(BlockSize::B4096, SECTOR_BYTES, capacity_blocks)?;
    let medium = AnyMedium::Paced(paced(layout.medium_bytes(), delay_us)?);
    let protection = guard.0;
    let shape =
        CreateOptions { block_size: BlockSize::B4096, capacity_blocks, protection, uuid: UUID, preallocate: false };
    create(&medium, &shape).await?;
    Ok(medium)
}

/// A volume that is open, with its worker.
pub struct Opened {
    volume: Rc<PerfVolume>,
    worker: JoinHandle<()>,
    /// It seals while the data are in flight.
    pub in_flight: DynDevice,
    /// Its gate seals before the data are submitted.
    pub before: DynDevice,
}

impl Opened {
    /// Opens the volume on this medium and writes each of its blocks.
    pub async fn filled(medium: AnyMedium) -> anyhow::Result<Opened> {
        let opened = open(Counted::not(medium), TurnClock::REAL, &OpenOptions::default()).await?;
        let worker = spawn(opened.worker.run());
        let gate = Rc::new(Gate::new("volume", Rc::clone(&opened.volume)));
        let before = DynDevice::new("sealed before", SealedBefore(Rc::clone(&gate)));
        let blocks = gate.geometry().capacity_blocks;
        let in_flight = DynDevice::from(gate);
        drive(in_flight.clone(), FILL, Until::Asked(blocks / FILL.blocks), 1).await?;
        Ok(Opened { volume: opened.volume, worker, in_flight, before })
    }

    /// Closes it.
    pub async fn close(self) -> anyhow::Result<()> {
        self.volume.close().await?;
        self.worker.await?;
        Ok(())
    }
}

/// All loads on a volume whose every block was written.
async fn measure(options: &FileOptions, medium: AnyMedium) -> anyhow::Result<()> {
    let opened = Opened::filled(medium).await?;
    let contenders = [opened.before.clone(), opened.before.clone(), opened.in_flight.clone()];
    for load in LOADS.iter().filter(|load| load.name.contains(&options.only)) {
        let mut rounds = Rounds::default();
        for number in 0..options.rounds {
            let mut turns = vec![Sample::default(); NAMES.len()];
            let mut rng = Rng::with_seed(u64::from(number));
            for next in shuffled(NAMES.len(), &mut rng) {
                let until = Until::Passed(options.turn());
                turns[next] = drive(contenders[next].clone(), *load, until, u64::from(number) + 1).await?;
            }
            rounds.0.push(turns);
        }
        rounds.print(load.name, &NAMES.map(str::to_owned), None);
        println!("  in flight against before{}", verdict(rounds.ratio(2).median, Some(BAR)));
    }
    opened.close().await
}
