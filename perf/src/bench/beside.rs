//! How much background zeroing slows a foreground load on the same device.
//!
//! The load writes 64 KiB at random places in the lower half of the device, four at a time. Meanwhile the upper half,
//! which was completely written just before, is zeroed once, in pieces of 1 MiB spread evenly over the turn: by Write
//! Zeroes that may unmap, or by writing zeroes. The load alone is the baseline, and has two turns in each round.

use std::cell::Cell as Counter;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context;
use sealblock_block::{Device, Durability, DynDevice, Gate, Request};
use sealblock_layers_offset::OffsetLayer;
use sealblock_runtime_reactor::{Config, Reactor, now, sleep_until, spawn};
use sealblock_units::{Extent, Lba};

use super::outcome::{Cell, Outcome, Progress, Scale, Table};
use super::verdict::{Round, Threshold, Verdict};
use crate::load::{self, Load, Sample, Until, payload, write_all, zeroes};
use crate::report::Spread;
use crate::setup;

/// The published fraction of the bandwidth that remains.
const LEFT: f64 = 0.999;
/// Blocks in one piece to be zeroed.
const PIECE_BLOCKS: u64 = 256;
const LOAD: Load = Load { name: "foreground", write: true, blocks: 16, random: true, depth: 4, flush_every: 0 };

/// What runs in the background of the load.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Background {
    Nothing,
    Unmapping,
    Writing,
}

const BACKGROUNDS: [(Background, &str); 4] = [
    (Background::Nothing, "alone"),
    (Background::Nothing, "alone, again"),
    (Background::Unmapping, "beside zero"),
    (Background::Writing, "beside written zeroes"),
];
/// The index in [`BACKGROUNDS`] of the one that the claim covers.
const CLAIMED: usize = 2;

/// A turn of the load.
#[derive(Clone, Copy)]
struct Turned {
    sample: Sample,
    zeroed_blocks: u64,
}

/// Measures it on a file and on a volume.
pub fn measure(scale: &Scale, progress: &Progress, outcome: &mut Outcome) -> anyhow::Result<()> {
    for is_raw in [true, false] {
        let name = if is_raw { "file" } else { "volume in a file" };
        let rounds = Reactor::new(Config::default())?.block_on(async {
            let (dir, blocks) = (scale.dir.as_path(), scale.blocks());
            if is_raw {
                let (device, _file) = setup::raw_device(dir, "beside", blocks).await?;
                return Halves::new(device)?.rounds(name, scale, progress).await;
            }
            let (volume, _file) = setup::volume_device(dir, "beside volume", blocks).await?;
            let rounds = Halves::new(Rc::new(volume.stack()))?.rounds(name, scale, progress).await?;
            volume.close().await?;
            Ok(rounds)
        })?;
        outcome.tables.push(table(name, &rounds));
        outcome.verdicts.push(verdict(name, &rounds));
    }
    Ok(())
}

/// A device in two halves.
struct Halves {
    whole: Rc<DynDevice>,
    lower: Rc<DynDevice>,
    half: u64,
}

impl Halves {
    fn new(whole: Rc<DynDevice>) -> anyhow::Result<Halves> {
        let half = whole.geometry().capacity_blocks / 2;
        let lower = OffsetLayer::new(Rc::clone(&whole), Lba::new(0), half)?;
        Ok(Halves { whole, lower: Rc::new(DynDevice::from(Gate::new("lower half", lower))), half })
    }

    async fn rounds(&self, name: &str, scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Vec<Turned>>> {
        let part = format!("load beside zeroing, {name}");
        let turn = Duration::from_secs_f64(scale.seconds);
        let turn = async |index: usize, round| self.turn(BACKGROUNDS[index].0, turn, round).await;
        progress.rounds(&part, scale.rounds, BACKGROUNDS.len(), turn).await
    }

    async fn turn(&self, background: Background, turn: Duration, round: u32) -> anyhow::Result<Turned> {
        // Done before every turn, so that the device is always in the same state.
        write_all(&self.whole, self.half, self.half, &payload()).await?;
        let is_over = Rc::new(Counter::new(false));
        let zeroing = spawn(zero(Rc::clone(&self.whole), self.half, background, turn, Rc::clone(&is_over)));
        let sample = load::drive(Rc::clone(&self.lower), LOAD, Until::Passed(turn), u64::from(round)).await;
        is_over.set(true);
        let zeroed_blocks = zeroing.await.context("zeroing was aborted")??;
        Ok(Turned { sample: sample?, zeroed_blocks })
    }
}

/// Zeroes the upper half evenly over the turn; returns how much was done at the end of the turn.
async fn zero(
    device: Rc<DynDevice>,
    half: u64,
    background: Background,
    turn: Duration,
    is_over: Rc<Counter<bool>>,
) -> anyhow::Result<u64> {
    let (begin, zeroes, mut done) = (now(), zeroes(), 0);
    while background != Background::Nothing && done < half && !is_over.get() {
        let piece = PIECE_BLOCKS.min(half - done);
        match background {
            Background::Nothing => {}
            Background::Unmapping => {
                let extent = Extent::from_raw(half + done, piece)?;
                device.execute(Request::write_zeroes(extent, true, Durability::Volatile)).await?;
            }
            Background::Writing => {
                let extent = Extent::from_raw(half + done, piece)?;
                device.execute(load::write_of(device.geometry(), extent, &zeroes)).await?;
            }
        }
        done += piece;
        sleep_until(begin + turn.mul_f64(done as f64 / half as f64)).await;
    }
    Ok(done)
}

fn spread(rounds: &[Vec<Turned>], index: usize, of: impl Fn(&Turned) -> f64) -> Spread {
    Spread::of(rounds.iter().map(|round| of(&round[index])))
}

fn bandwidth(turn: &Turned) -> f64 {
    turn.sample.bytes as f64 / turn.sample.seconds / 1e6
}

fn table(name: &str, rounds: &[Vec<Turned>]) -> Table {
    let title = format!("Writes of 64 KiB, random, 4 at a time, while the other half of the device is zeroed: {name}");
    let columns = [
        ("bandwidth", "MB/s"),
        ("part of that alone", "%"),
        ("latency, median", "us"),
        ("latency, 99 of 100", "us"),
        ("zeroed meanwhile", "MiB"),
    ];
    let mut table = Table::new(title, "load", &columns);
    for (index, (background, load)) in BACKGROUNDS.iter().enumerate() {
        let part = Spread::of(rounds.iter().map(|round| bandwidth(&round[index]) / bandwidth(&round[0]) * 100.0));
        let zeroed = spread(rounds, index, |turn| (turn.zeroed_blocks >> 8) as f64);
        let cells = vec![
            Cell::measured(spread(rounds, index, bandwidth)),
            if index == 0 { Cell::words("baseline") } else { Cell::measured(part) },
            Cell::measured(spread(rounds, index, |turn| turn.sample.latency.median_us)),
            Cell::measured(spread(rounds, index, |turn| turn.sample.latency.p99_us)),
            if *background == Background::Nothing { Cell::words("nothing") } else { Cell::measured(zeroed) },
        ];
        table.push(*load, cells);
    }
    table
}

fn verdict(name: &str, rounds: &[Vec<Turned>]) -> Verdict {
    let ratios = rounds.iter().map(|round| {
        let [alone, again, beside] = [0, 1, CLAIMED].map(|index| bandwidth(&round[index]));
        Round::of(alone, again, beside)
    });
    let what = format!("{name}: bandwidth of a load beside zero, as a part of that alone");
    Verdict::timed(what, Threshold::AtLeast(LEFT), &ratios.collect::<Vec<_>>())
}
