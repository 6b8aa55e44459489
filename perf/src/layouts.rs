//! Ways to keep tags consistent with data across a crash, as patterns of real writes and syncs on a plain file.
//!
//! Each scheme does the writes and `fdatasync`s that its rules ask for, on a file whose every byte was written before,
//! with direct I/O through the reactor, and nothing else: no checksums, no lookups. Syncs are shared by all requests that
//! wait for one at the same time, in every scheme alike, and each turn ends with a flush. The real volume runs along to
//! show how far the emulation of its scheme can be trusted. What each scheme guarantees is printed beside its figures.

mod emulation;

use std::rc::Rc;

use fastrand::Rng;
use sealblock_runtime_reactor::{Config, Reactor};

use crate::load::{Load, Sample, Until};
use crate::options::{FileOptions, Protection};
use crate::report::{Rounds, Spread, shuffled};
use crate::setup::{Contender, Prepared};
use emulation::{Emulation, Scheme};

const SCHEMES: [(Scheme, &str); 6] = [
    (Scheme::Raw, "no tags: old, new or a mix of both, and no check shows which"),
    (Scheme::FreeSlots, "old or new with its tag; a torn write leaves the old block"),
    (Scheme::TagsFirst, "old or new with its tag, but a torn 4 KiB block matches neither tag: reads fail"),
    (Scheme::TwoTags, "old or new with its tag, but a torn 4 KiB block matches neither tag: reads fail"),
    (Scheme::Journal, "old or new with its tag; all writes twice"),
    (Scheme::Bitmap, "blocks of regions in use are sealed anew as found: torn and corrupt ones pass"),
];

/// Loads by flushes: 4 KiB at random, and 1 MiB in sequence.
const LOADS: [Load; 4] = [
    Load {
        name: "write 4 KiB, random, QD 32, flush every 1024",
        write: true,
        blocks: 1,
        random: true,
        depth: 32,
        flush_every: 1024,
    },
    Load {
        name: "write 4 KiB, random, QD 32, flush every 32",
        write: true,
        blocks: 1,
        random: true,
        depth: 32,
        flush_every: 32,
    },
    Load {
        name: "write 4 KiB, random, QD 32, flush every 1",
        write: true,
        blocks: 1,
        random: true,
        depth: 32,
        flush_every: 1,
    },
    Load {
        name: "write 1 MiB, sequential, QD 8, flush every 32",
        write: true,
        blocks: 256,
        random: false,
        depth: 8,
        flush_every: 32,
    },
];

/// Measures everything and prints it.
pub fn run(options: &FileOptions) -> anyhow::Result<()> {
    let reactor = Reactor::new(Config::default())?;
    println!("{}; files of {}, every byte written before", reactor.backend(), options.size);
    for (scheme, promise) in SCHEMES {
        println!("  {:14} after a crash: {promise}", scheme.name());
    }
    let wanted = |load: &&Load| load.name.contains(&options.only);
    LOADS.iter().filter(wanted).try_for_each(|load| reactor.block_on(one(options, *load)))
}

async fn one(options: &FileOptions, load: Load) -> anyhow::Result<()> {
    let mut emulations = Vec::new();
    for (scheme, _) in SCHEMES {
        emulations.push(Emulation::new(scheme, options, load.blocks).await?);
    }
    let guard: Protection = "crc16".parse()?;
    let volume = Contender::volume(options, guard, Prepared::Written).await?;
    let (mut rounds, mut written) = (Rounds::default(), vec![Vec::new(); SCHEMES.len() + 1]);
    let mut rng = Rng::with_seed(1);
    for number in 0..options.rounds {
        let mut turns = vec![Sample::default(); SCHEMES.len() + 1];
        for next in shuffled(turns.len(), &mut rng) {
            let before = volume.written_bytes();
            let (turn, bytes) = match emulations.get(next) {
                Some(emulation) => emulation::drive(Rc::clone(emulation), load, options.turn(), rng.u64(..)).await?,
                None => {
                    let turn = volume.turn(load, Until::Passed(options.turn()), u64::from(number) + 1).await?;
                    (turn, volume.written_bytes() - before)
                }
            };
            turns[next] = turn;
            written[next].push(bytes as f64 / turn.bytes as f64);
        }
        rounds.0.push(turns);
    }
    print(load, &rounds, written);
    volume.close().await
}

fn print(load: Load, rounds: &Rounds, written: Vec<Vec<f64>>) {
    println!("{}", load.name);
    let names = SCHEMES.iter().map(|(scheme, _)| scheme.name()).chain(["the volume"]);
    for (contender, (name, written)) in names.zip(written).enumerate() {
        let ratio = rounds.ratio(contender);
        println!(
            "  {name:14} {:9.0} /s {:7.1} us CPU {:6.1} % of raw [{:5.1} .. {:5.1}]  {:5.3} bytes written per byte",
            rounds.rate(contender).median,
            rounds.cpu_us(contender),
            ratio.median * 100.0,
            ratio.least * 100.0,
            ratio.most * 100.0,
            Spread::of(written.into_iter()).median,
        );
    }
}
