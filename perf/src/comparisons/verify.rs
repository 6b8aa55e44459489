//! Verify of a volume in the page cache, compared with plain reading of the same file, and with memory.
//!
//! Threshold: checking costs no more than reading, so that a scrub of cached data runs at memory speed. On one core and
//! on two: each core opens the volume separately, read-only and buffered, and verifies its own half. Plain reading is
//! `pread` of the same file's data in pieces of 1 MiB, on as many threads, with one buffer per thread; memory is
//! reading 256 MiB per thread, which fits in no cache.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use futures_util::future::try_join_all;
use sealblock_block::{Device, Expectations, Gate, Request};
use sealblock_media_file::{FileMedium, Options};
use sealblock_media_volume::{OpenOptions, format::Layout, open};
use sealblock_runtime_reactor::{Config, CoreHandle, Cores, Placement, Reactor};
use sealblock_units::{BlockCount, Extent};

use super::options::FileOptions;
use super::rounds::Rounds;
use crate::counted::Counted;
use crate::load::{Sample, Stopwatch};
use crate::medium::AnyMedium;
use crate::setup::{self, Prepared, Protection, Scratch, Turn, TurnClock};

const PIECE_BYTES: usize = 1 << 20;
const MEMORY_BYTES: usize = 256 << 20;
/// Blocks of one Verify request; the volume divides it into transfers itself.
const VERIFY_BLOCKS: u32 = 4096;
/// The threshold: the fraction of the speed of plain reading, with a margin for the checksums.
const THRESHOLD: f64 = 0.9;

/// Measures everything and prints it.
pub fn run(options: &FileOptions) -> anyhow::Result<()> {
    let memory = vec![1_u8; MEMORY_BYTES];
    for &guard in &options.guards {
        let (scratch, layout) = prepare(options, guard)?;
        for cores in [1, 2] {
            one(options, guard, &scratch.0, &layout, &memory, cores)?;
        }
    }
    Ok(())
}

/// A volume with every block written, all of it in the page cache.
fn prepare(options: &FileOptions, guard: Protection) -> anyhow::Result<(Scratch, Layout)> {
    let (name, blocks) = (format!("verify {}", guard.name()), options.blocks());
    Reactor::new(Config::default())?.block_on(setup::filled_volume(
        &options.dir,
        &name,
        blocks,
        guard,
        Prepared::Reserved,
    ))
}

fn one(
    options: &FileOptions,
    guard: Protection,
    path: &Path,
    layout: &Layout,
    memory: &[u8],
    cores: usize,
) -> anyhow::Result<()> {
    let running = Cores::start(Placement::Count(cores), Config::default())?;
    let handles = running.handles();
    let mut rounds = Rounds::default();
    // The first round loads the file and the tables into memory.
    for round in 0..=options.rounds {
        let turns = vec![
            plain(path, layout, cores)?,
            verify(&handles, path, layout.capacity_blocks())?,
            read_memory(memory, cores),
        ];
        if round > 0 {
            rounds.0.push(turns);
        }
    }
    let load = format!("guard {}, {cores} core(s), {}", guard.name(), options.size);
    rounds.print(&load, &["pread", "verify", "memory read"].map(str::to_owned), Some(THRESHOLD));
    let _stopped = running.shutdown(Duration::from_secs(1));
    Ok(())
}

/// Reads the physical blocks of every block group.
fn plain(path: &Path, layout: &Layout, threads: usize) -> anyhow::Result<Sample> {
    let file = File::open(path)?;
    let pieces: Vec<u64> = (0..layout.block_groups())
        .filter_map(|group| layout.block_group(group))
        .flat_map(|group| (0..group.blocks << 12).step_by(PIECE_BYTES).map(move |at| group.data_offset + at))
        .collect();
    let share = pieces.len().div_ceil(threads);
    let watch = Stopwatch::start();
    thread::scope(|scope| {
        let threads: Vec<_> = pieces
            .chunks(share)
            .map(|pieces| {
                let file = &file;
                scope.spawn(move || {
                    let mut buffer = vec![0; PIECE_BYTES];
                    pieces.iter().try_for_each(|&at| file.read_exact_at(black_box(&mut buffer), at))
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("reading does not panic"))
    })?;
    Ok(watch.stop(pieces.len() as u64, PIECE_BYTES as u64))
}

/// Every core verifies its part of the volume.
fn verify(cores: &[CoreHandle], path: &Path, blocks: u64) -> anyhow::Result<Sample> {
    let reactor = Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() })?;
    let share = blocks.div_ceil(cores.len() as u64);
    let watch = Stopwatch::start();
    reactor.block_on(try_join_all(cores.iter().enumerate().map(|(index, core)| {
        let (path, first) = (path.to_owned(), index as u64 * share);
        let part = core.call(move || verify_part(path, first, share.min(blocks - first)));
        async move { part.await.context("a core is gone")? }
    })))?;
    Ok(watch.stop(blocks >> 8, PIECE_BYTES as u64))
}

async fn verify_part(path: PathBuf, first: u64, blocks: u64) -> anyhow::Result<()> {
    let medium = FileMedium::open(path, Options { buffered: true, ..Options::READ })?;
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let medium = Counted::not(AnyMedium::File(medium));
    let opened = open(medium, TurnClock::new(Turn::default()), &options).await?;
    let gate = Gate::new("volume", opened.volume);
    let piece = BlockCount::new(VERIFY_BLOCKS).context("a piece has blocks")?;
    for start in (first..first + blocks).step_by(piece.get() as usize) {
        let extent = Extent::from_raw(start, u64::from(piece.get()).min(first + blocks - start))?;
        gate.execute(Request::verify(extent, Expectations::NONE)).await?;
    }
    Ok(())
}

fn read_memory(memory: &[u8], threads: usize) -> Sample {
    let watch = Stopwatch::start();
    thread::scope(|scope| {
        for part in memory.chunks(memory.len() / threads) {
            scope.spawn(move || black_box(add_up(black_box(part))));
        }
    });
    watch.stop((memory.len() / PIECE_BYTES) as u64, PIECE_BYTES as u64)
}

/// Reads every word and does almost nothing with it.
fn add_up(bytes: &[u8]) -> u64 {
    let mut lanes = [0_u64; 16];
    for step in bytes.as_chunks::<128>().0 {
        for (lane, word) in lanes.iter_mut().zip(step.as_chunks::<8>().0) {
            *lane |= u64::from_le_bytes(*word);
        }
    }
    lanes.iter().fold(0, |all, lane| all ^ lane)
}
