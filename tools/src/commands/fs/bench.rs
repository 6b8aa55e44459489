//! `sealblock fs bench`: what it costs to keep the checksums of data in the tree, with the device, or nowhere.
//!
//! The library `sealblock-perf` measures; this file reads what is to be measured, shows progress and prints the result.

use std::ops::ControlFlow;
use std::sync::Arc;

use sealblock_perf::bench::outcome::{Listener, Step};
use sealblock_perf::datasum::modes::{Batch, Mode, Options, Point};
use sealblock_perf::datasum::{measure, text};
use sealblock_stack::{Cause, StackError};

use crate::cli::FsBench;
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::{Show, Steps};
use crate::report::{print_json, say};

/// Measures, and prints what came out.
pub fn run(arguments: &FsBench) -> Result<Exit, StackError> {
    interrupt::watch();
    let options = options(arguments);
    let report = measure(&options, &listener(options.points.len()))
        .map_err(|error| StackError::new(Cause::Unsuitable, "measure", format!("{error:#}")))?;
    match arguments.json {
        true => print_json(&report)?,
        false => say(text::report(&report).trim_end())?,
    }
    if report.interrupted {
        interrupt::report("fs bench", "in a round", "the same command, with fewer combinations");
        return Ok(Exit::Interrupted);
    }
    Ok(Exit::Clean)
}

/// All combinations, and each mode once.
fn options(arguments: &FsBench) -> Options {
    let batches: Vec<Batch> = match (arguments.commit_interval, &arguments.commit_writes[..]) {
        (Some(seconds), _) => vec![Batch::Seconds(seconds)],
        (None, []) => vec![Batch::Blocks],
        (None, writes) => writes.iter().copied().map(Batch::Writes).collect(),
    };
    let mut points = Vec::new();
    for &size in &arguments.size {
        for &metadata in &arguments.metadata {
            points.extend(batches.iter().map(|&batch| Point { size, metadata, batch }));
        }
    }
    let of_kernel = Mode::ALL.into_iter().filter(|mode| arguments.kernel && mode.is_kernel());
    let mut modes: Vec<Mode> = Vec::new();
    for mode in arguments.modes.iter().copied().chain(of_kernel) {
        if !modes.contains(&mode) {
            modes.push(mode);
        }
    }
    Options {
        points,
        modes,
        is_buffered: arguments.buffered,
        depth: arguments.queue_depth,
        commits: arguments.commits,
        rounds: arguments.rounds,
        dir: arguments.dir.clone(),
        device_bytes: arguments.device_size,
        dirty_bytes: arguments.dirty_memory,
    }
}

/// Shows each turn on a terminal, and ends the measurement after a signal.
fn listener(points: usize) -> Arc<Listener> {
    let steps = Steps::new(Show::OnTerminal);
    Arc::new(move |step: &Step| {
        let Step { part, round, of, .. } = step;
        steps.at(format!("{part}, round {round} of {of}, {points} combinations"));
        match interrupt::came() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })
}
