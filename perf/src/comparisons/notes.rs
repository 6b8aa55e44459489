//! The cost of writes that survive the death of the process: volumes that note completed writes, compared with volumes
//! that keep them only in memory.
//!
//! Thresholds: random writes of 4 KiB at a queue depth of 32 lose at most a tenth of their rate, and long sequential
//! writes 3 %. All contenders are volumes on files in one folder, completely written, and alternate. `in memory again` is identical to another
//! contender and shows the noise of the ratios. With a flush after every write, the figures show the cost of note pages
//! that a sync writes along with the log.

use std::rc::Rc;

use fastrand::Rng;
use sealblock_block::{Device, DynDevice, Gate};
use sealblock_media_file::{FileMedium, Options};
use sealblock_media_volume::{OpenOptions, open};
use sealblock_runtime_reactor::{Config, JoinHandle, Reactor, spawn};

use super::options::FileOptions;
use super::rounds::{Rounds, verdict};
use crate::counted::Counted;
use crate::load::{Load, Sample, Until, drive};
use crate::medium::AnyMedium;
use crate::report::shuffled;
use crate::setup::{FILL, PerfVolume, Prepared, Protection, Scratch, TurnClock, new_path, new_volume};

/// The loads, and the threshold of each that has one.
const LOADS: &[(Load, Option<f64>)] = &[
    (random("write 4 KiB, random, QD 1, no flush", 1, 1, 0), None),
    (random("write 4 KiB, random, QD 32, no flush", 1, 32, 0), Some(0.90)),
    (random("write 4 KiB, random, QD 1, flush every 1", 1, 1, 1), None),
    (random("write 4 KiB, random, QD 32, flush every 32", 1, 32, 32), None),
    (random("write 256 KiB, random, QD 8, no flush", 64, 8, 0), None),
    (Load { random: false, ..random("write 1 MiB, sequential, QD 8, flush every 32", 256, 8, 32) }, Some(0.97)),
];

const fn random(name: &'static str, blocks: u64, depth: u64, flush_every: u64) -> Load {
    Load { name, write: true, blocks, random: true, depth, flush_every }
}

const NAMES: [&str; 3] = ["in memory", "in memory again", "noted"];

/// A volume that is open, with its worker.
struct Contender {
    volume: Rc<PerfVolume>,
    worker: JoinHandle<()>,
    device: DynDevice,
    _scratch: Scratch,
}

impl Contender {
    /// A new volume with all blocks written.
    async fn new(options: &FileOptions, guard: Protection, name: &str) -> anyhow::Result<Contender> {
        let scratch = new_path(&options.dir, &format!("notes {} {name}", guard.name()))?;
        new_volume(&scratch.0, options.blocks(), guard, Prepared::Written).await?;
        let medium = FileMedium::open(&scratch.0, Options::WRITE)?;
        let opening = OpenOptions { keeps_answered: name == NAMES[2], relocate: false, ..OpenOptions::default() };
        let medium = Counted::not(AnyMedium::File(medium));
        let opened = open(medium, TurnClock::REAL, &opening).await?;
        let worker = spawn(opened.worker.run());
        let gate = Rc::new(Gate::new("volume", Rc::clone(&opened.volume)));
        let blocks = gate.geometry().capacity_blocks;
        let device = DynDevice::from(gate);
        drive(device.clone(), FILL, Until::Asked(blocks / FILL.blocks), 1).await?;
        Ok(Contender { volume: opened.volume, worker, device, _scratch: scratch })
    }

    async fn close(self) -> anyhow::Result<()> {
        self.volume.close().await?;
        self.worker.await?;
        Ok(())
    }
}

/// Measures everything and prints it.
pub fn run(options: &FileOptions) -> anyhow::Result<()> {
    let reactor = Reactor::new(Config::default())?;
    println!("{}", reactor.backend());
    reactor.block_on(async {
        for &guard in &options.guards {
            println!("\nfile, {}, {}", guard.name(), options.size);
            let mut contenders = Vec::new();
            for name in NAMES {
                contenders.push(Contender::new(options, guard, name).await?);
            }
            measure(options, &contenders).await?;
            for contender in contenders {
                contender.close().await?;
            }
        }
        Ok(())
    })
}

/// All loads.
async fn measure(options: &FileOptions, contenders: &[Contender]) -> anyhow::Result<()> {
    for (load, threshold) in LOADS.iter().filter(|(load, _)| load.name.contains(&options.only)) {
        let mut rounds = Rounds::default();
        for number in 0..options.rounds {
            let mut turns = vec![Sample::default(); NAMES.len()];
            let mut rng = Rng::with_seed(u64::from(number));
            for next in shuffled(NAMES.len(), &mut rng) {
                let until = Until::Passed(options.turn());
                turns[next] = drive(contenders[next].device.clone(), *load, until, u64::from(number) + 1).await?;
            }
            rounds.0.push(turns);
        }
        rounds.print(load.name, &NAMES.map(str::to_owned), None);
        println!("  noted against in memory{}", verdict(rounds.ratio(2).median, *threshold));
    }
    Ok(())
}
