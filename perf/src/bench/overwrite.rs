//! Overwrites with O_DSYNC of extents that were written, compared with extents that were only allocated.
//!
//! A filesystem records that an allocated extent was never written, and reads it as zeroes. The first write of each
//! block changes this record, and with O_DSYNC the change must be durable before the write completes. Therefore zeroes
//! that count as written (`FALLOC_FL_WRITE_ZEROES`) are useful. Four threads overwrite 4 KiB blocks in order, each in
//! its own quarter of a file, until the time or the file ends. Written extents are the baseline and have two turns in a
//! round.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

use super::outcome::{Axis, Cell, Drawing, Outcome, Plot, Progress, Scale, Series, Table};
use crate::remote;
use crate::report::Spread;
use crate::setup::{self, Scratch};

const THREADS: u64 = 4;
const BLOCK: [u8; 4096] = [0x5a; 4096];
/// The maximum size of the file: larger than a turn overwrites.
const MAX_BYTES: u64 = 256 << 20;
const STATES: [&str; 3] = ["written", "written, again", "unwritten"];
/// The index of unwritten extents in [`STATES`].
const UNWRITTEN: usize = 2;

/// Measures it, or adds a note that the file system cannot allocate space without writing.
pub fn measure(scale: &Scale, progress: &Progress, outcome: &mut Outcome) -> anyhow::Result<()> {
    let bytes = scale.size.get().min(MAX_BYTES);
    let written = setup::new_path(&scale.dir, "overwritten")?;
    write(&written.0, bytes)?;
    if allocated(&scale.dir, bytes)?.is_none() {
        let note = "Overwrites of unwritten extents were not measured: this file system has no fallocate.";
        outcome.notes.push(note.to_owned());
        return Ok(());
    }
    let turn = Duration::from_secs_f64(scale.seconds);
    let rounds = progress.rounds("overwrites with O_DSYNC", scale.rounds, STATES.len(), async |index, _| {
        if index != UNWRITTEN {
            return overwrite(&written.0, bytes, turn);
        }
        let fresh = allocated(&scale.dir, bytes)?.context("space is no longer allocated")?;
        overwrite(&fresh.0, bytes, turn)
    });
    let rounds = remote::wait(rounds)??;
    outcome.tables.push(table(&rounds));
    outcome.plots.push(plot(&rounds));
    outcome.notes.push(
        "Overwrites with fast commit of ext4 were not measured: the file system would have to be made with it."
            .to_owned(),
    );
    Ok(())
}

/// A file of which every byte was written and is durable.
fn write(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let piece = vec![0; 1 << 20];
    let doing = || format!("writing {}", path.display());
    let file = File::create(path).with_context(doing)?;
    for at in (0..bytes).step_by(piece.len()) {
        file.write_all_at(&piece[..piece.len().min((bytes - at) as usize)], at).with_context(doing)?;
    }
    file.sync_all().with_context(doing)
}

/// A new file with space that is allocated but unwritten; `None` if the file system does not support this.
fn allocated(dir: &Path, bytes: u64) -> anyhow::Result<Option<Scratch>> {
    let scratch = setup::new_path(dir, "unwritten")?;
    let doing = || format!("allocating {}", scratch.0.display());
    let file = File::create(&scratch.0).with_context(doing)?;
    match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
        Err(Errno::OPNOTSUPP) => return Ok(None),
        result => result.with_context(doing)?,
    }
    file.sync_all().with_context(doing)?;
    Ok(Some(scratch))
}

/// Overwrites per second, of all threads together.
fn overwrite(path: &Path, bytes: u64, turn: Duration) -> anyhow::Result<f64> {
    let file = OpenOptions::new().write(true).custom_flags(OFlags::DSYNC.bits() as i32).open(path);
    let file = file.with_context(|| format!("opening {}", path.display()))?;
    let (part, watch) = (bytes / THREADS, Instant::now());
    let work = |first: u64| {
        let mut written = 0_u64;
        while watch.elapsed() < turn && (written + 1) * BLOCK.len() as u64 <= part {
            file.write_all_at(&BLOCK, first + written * BLOCK.len() as u64)?;
            written += 1;
        }
        std::io::Result::Ok(written)
    };
    let written: std::io::Result<u64> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || work(thread * part))).collect();
        threads.into_iter().map(|thread| thread.join().expect("writing does not panic")).sum()
    });
    let written = written.with_context(|| format!("overwriting {}", path.display()))?;
    Ok(written as f64 / watch.elapsed().as_secs_f64())
}

fn spread(rounds: &[Vec<f64>], index: usize) -> Spread {
    Spread::of(rounds.iter().map(|round| round[index]))
}

fn table(rounds: &[Vec<f64>]) -> Table {
    let title = "Overwrites of 4 KiB with O_DSYNC through the page cache, 4 threads";
    let mut table = Table::new(title, "extents", &[("rate", "IOPS"), ("times as many as unwritten", "")]);
    for (index, state) in STATES.iter().enumerate() {
        let times = Spread::of(rounds.iter().map(|round| round[index] / round[UNWRITTEN]));
        let times = if index == UNWRITTEN { Cell::words("1") } else { Cell::measured(times) };
        table.push(*state, vec![Cell::measured(spread(rounds, index)), times]);
    }
    table
}

fn plot(rounds: &[Vec<f64>]) -> Plot {
    let here = [UNWRITTEN, 0].map(|index| spread(rounds, index));
    let series =
        vec![Series::counted("published", vec![20_100.0, 98_800.0]), Series::measured("here", here.into_iter())];
    Plot {
        name: "write-zeroes-overwrite".to_owned(),
        title: "Overwrites of 4 KiB with O_DSYNC".to_owned(),
        x: Axis::linear("extents", ""),
        y: Axis::linear("rate", "IOPS"),
        drawing: Drawing::Bars { groups: vec!["unwritten".to_owned(), "written".to_owned()], series, threshold: None },
    }
}
