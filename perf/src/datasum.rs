//! What it costs to keep the checksums of Btrfs data in the tree, with the device, or nowhere: `sealblock fs bench`.
//!
//! Each turn has a new device and a new filesystem with one file, which is written at random before anything is measured
//! ([`load`]). All modes have a turn in each round, in a new order each time, so ratios are those of turns that were near
//! to each other. What reaches the device is counted at the device ([`counting`]), and for the kernel by its loop device.
//!
//! CPU time is that of this process and of all kernel threads, which work for the kernel's modes and for files.

pub mod counting;
pub mod kernel;
pub mod load;
pub mod modes;
pub mod report;
pub mod scratch;
pub mod text;

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::ByteCount;

use self::load::{Target, TurnLoad};
use self::modes::{Mode, Options, Point};
use self::report::{PointReport, Report, TurnResult, VERSION};
use self::scratch::{Ground, Scratch};
use crate::bench::machine::{Machine, available_bytes};
use crate::bench::outcome::{Interrupted, Listener, Progress};
use crate::meter::Meter;
use crate::report::shuffled;
use crate::setup;

/// Measures all. `listener` is called at each step, and can end the run.
///
/// # Errors
/// What cannot be measured, and why; before anything is written if that can be known.
pub fn measure(options: &Options, listener: &Arc<Listener>) -> anyhow::Result<Report> {
    check(options)?;
    let started_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (watch, machine) = (Instant::now(), Machine::this());
    let progress = Progress::new("fs bench", Arc::clone(listener));
    let (mut points, mut interrupted) = (Vec::new(), false);
    for point in &options.points {
        let (rounds, is_whole) = measure_point(point, options, &progress)?;
        if !rounds.is_empty() {
            points.push(PointReport::new(point, options, &rounds));
        }
        if !is_whole {
            interrupted = true;
            break;
        }
    }
    Ok(Report {
        version: VERSION,
        machine,
        started_unix_s,
        elapsed_s: watch.elapsed().as_secs_f64(),
        interrupted,
        dir: options.dir.as_ref().map(|dir| dir.display().to_string()),
        buffered: options.is_buffered,
        queue_depth: options.depth,
        commits: options.commits,
        dirty_memory_bytes: options.dirty_bytes.get(),
        points,
    })
}

/// Refuses what cannot be measured here.
fn check(options: &Options) -> anyhow::Result<()> {
    if options.modes.iter().any(|mode| mode.is_kernel()) {
        kernel::check().context("the kernel's Btrfs cannot be measured")?;
    }
    if let Some(dir) = &options.dir {
        setup::takes_files(dir)?;
        return ensure_direct(dir);
    }
    let needed = options.points.iter().map(|point| ground(point, options).bytes).max().unwrap_or(0);
    match available_bytes() {
        Some(available) if needed > available => {
            let (needed, available) = (ByteCount::new(needed), ByteCount::new(available));
            anyhow::bail!("a device of {needed} does not fit into the {available} of memory that are free: use --dir")
        }
        _ => Ok(()),
    }
}

fn ensure_direct(dir: &std::path::Path) -> anyhow::Result<()> {
    ensure!(setup::has_direct_io(dir)?, "{} has no direct I/O, and the page cache is no device", dir.display());
    Ok(())
}

fn ground<'a>(point: &Point, options: &'a Options) -> Ground<'a> {
    let bytes = options.device_bytes.map_or_else(|| point.device_bytes(), ByteCount::get);
    Ground { dir: options.dir.as_deref(), bytes }
}

/// The rounds of a point that were measured, and whether these are all.
fn measure_point(
    point: &Point,
    options: &Options,
    progress: &Progress,
) -> anyhow::Result<(Vec<Vec<TurnResult>>, bool)> {
    let (mut rounds, mut random) = (Vec::new(), fastrand::Rng::with_seed(0));
    for round in 1..=options.rounds {
        let mut turns: Vec<Option<TurnResult>> = vec![None; options.modes.len()];
        for index in shuffled(options.modes.len(), &mut random) {
            let mode = options.modes[index];
            let part = format!("{}, {}", point.size, mode.name());
            let step = || Ok(progress.step(&part, round, options.rounds)?);
            // A reactor for each turn: what a device in memory had is free before the next one is made.
            let reactor = Reactor::new(Config::default())?;
            match reactor.block_on(turn(mode, point, options, u64::from(round), &step)) {
                Ok(turn) => turns[index] = Some(turn),
                Err(error) if error.is::<Interrupted>() => return Ok((rounds, false)),
                Err(error) => return Err(error.context(format!("measuring {} with {}", mode.name(), point.size))),
            }
        }
        rounds.push(turns.into_iter().flatten().collect());
    }
    Ok((rounds, true))
}

/// One turn of a mode.
async fn turn(
    mode: Mode,
    point: &Point,
    options: &Options,
    seed: u64,
    check: &dyn Fn() -> anyhow::Result<()>,
) -> anyhow::Result<TurnResult> {
    check()?;
    let ground = ground(point, options);
    if mode.is_kernel() {
        let turn = kernel::turn(mode, (point, options), ground, seed, check).await?;
        return Ok(TurnResult::of_loop(&turn));
    }
    let scratch = Scratch::new(mode, point, ground).await?;
    let (engine, ino) = scratch.open(mode, options.dirty_bytes.get() as usize).await?;
    let load = TurnLoad::new(Target::Engine(engine.clone(), ino), point, options, seed, check);
    load.prepare().await?;
    let (before, generation) = (scratch.transferred(), engine.durable_generation());
    let meter = Meter::start(None, None)?;
    let requests = load.run().await?;
    let turn = meter.stop(requests, None)?;
    let (parts, commits) = (scratch.transferred().since(&before), engine.durable_generation() - generation);
    load.read_back().await?;
    engine.finish_writes().await;
    drop((load, engine));
    scratch.close().await?;
    Ok(TurnResult::counted(&turn, parts, commits))
}
