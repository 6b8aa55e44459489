//! `sealblock compare`: two targets block by block, or one with zeroes.
//!
//! Every byte counts: a plain file may end within a block, which is compared as far as both sides have it.
//! Where a target is away and can sum its blocks itself, sums are compared first, see `digests.rs`.

mod digests;

use std::time::Instant;

use std::cell::Cell;

use futures_util::future::join;
use futures_util::stream::{self, StreamExt};
use sealblock_block::Device;
use sealblock_units::{BlockSize, ByteCount};
use serde::Serialize;

use crate::cli::{Compare, Comparison};
use crate::exit::{Cause, Exit, Failure};
use crate::progress::{Progress, Show};
use crate::report::{print_json, say};
use crate::stack::{Whole, on_reactor};

/// Bytes read from each side at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// Chunks under way at once.
const IN_FLIGHT: usize = 8;
/// Runs of differing blocks that are listed; further ones are counted.
const MOST_LISTED: usize = 1 << 20;

/// The answer of `compare`.
#[derive(Serialize)]
struct Report {
    target_a: String,
    target_b: String,
    equal: bool,
    block_size: usize,
    bytes_compared: u64,
    bytes_transferred: u64,
    bytes_a: u64,
    bytes_b: u64,
    offloaded: bool,
    elapsed_s: f64,
    blocks_different: u64,
    /// The first byte that differs; nothing where none does, or where only sums told that its block does.
    first_different_byte: Option<u64>,
    differences: Vec<Run>,
}

/// Blocks in a row that differ, in blocks of the report's size.
#[derive(Serialize)]
struct Run {
    lba: u64,
    blocks: u64,
}

/// Compares.
pub fn run(arguments: &Compare) -> Result<Exit, Failure> {
    let comparison = arguments
        .comparison()
        .ok_or_else(|| Failure::new(Cause::Usage, "comparing", "two targets are needed, or --zero and one"))?;
    let show = if arguments.json { Show::Never } else { Show::OnTerminal };
    let report = on_reactor(async {
        let (a, b) = match comparison {
            Comparison::Pair(a, b) => (a, Some(b)),
            Comparison::Zeroes(a) => (a, None),
        };
        let opened_a = Whole::open(a).await?;
        let opened_b = match b {
            Some(b) => Some(Whole::open(b).await?),
            None => None,
        };
        let report = compare(&opened_a, opened_b.as_ref(), show).await;
        let report = match opened_b {
            Some(opened_b) => opened_b.close(report).await,
            None => report,
        };
        opened_a.close(report).await
    })?;
    if arguments.json {
        print_json(&report)?
    } else {
        print_text(&report)?
    }
    Ok(if report.equal { Exit::Clean } else { Exit::Found })
}

/// What is compared with what, in blocks of which size.
struct Sides<'a> {
    a: &'a Whole,
    /// Zeroes without it.
    b: Option<&'a Whole>,
    block: BlockSize,
    /// The first byte that was read and differs.
    first: Cell<Option<u64>>,
    /// Bytes that were read of both.
    read_bytes: Cell<u64>,
}

async fn compare(a: &Whole, b: Option<&Whole>, show: Show) -> Result<Report, Failure> {
    let started = Instant::now();
    let (mut report, block) = empty_report(a, b);
    let common = report.bytes_compared;
    let sides = Sides { a, b, block, first: Cell::new(None), read_bytes: Cell::new(0) };
    report.offloaded = sides.have_digests();
    let each = || [Some(a), b].into_iter().flatten();
    let received = || each().filter_map(|side| side.opened.received_bytes()).reduce(u64::saturating_add);
    let received_before = received();
    let progress = Progress::new("comparing", Some(ByteCount::new(common)), show);
    let step = if report.offloaded { digests::REGION_BYTES } else { CHUNK_BYTES };
    let regions = (0..common.div_ceil(step)).map(|i| (i * step, step.min(common - i * step)));
    let (sides, by_digest) = (&sides, report.offloaded);
    let mut compared = stream::iter(regions)
        .map(|(offset, length)| async move {
            let search = sides.search(offset, length);
            let runs = if by_digest { search.await? } else { sides.read_runs(offset, length).await? };
            Ok::<_, Failure>((length, runs))
        })
        .buffered(IN_FLIGHT);
    while let Some(region) = compared.next().await {
        let (length, runs) = region?;
        let before = report.blocks_different;
        runs.into_iter().for_each(|run| note(&mut report, run));
        progress.advance(length);
        if report.blocks_different > before {
            progress.bad(report.blocks_different - before);
        }
    }
    // What is away counts what came over the network; a device that is here sent nothing that way.
    report.bytes_transferred = match (received(), received_before) {
        (Some(now), Some(before)) => now - before,
        _ => sides.read_bytes.get(),
    };
    report.equal &= report.blocks_different == 0;
    report.first_different_byte = sides.first_byte(&report.differences);
    report.elapsed_s = started.elapsed().as_secs_f64();
    Ok(report)
}

/// The report before anything was compared, and the block size of the comparison: the larger of the two, in which both
/// sides can be read.
fn empty_report(a: &Whole, b: Option<&Whole>) -> (Report, BlockSize) {
    let size = |side: &Whole| side.opened.gate.geometry().block_size;
    let block = b.map_or(size(a), |b| size(a).max(size(b)));
    let (bytes_a, bytes_b) = (a.len_bytes(), b.map_or(a.len_bytes(), Whole::len_bytes));
    let report = Report {
        target_a: a.opened.target().to_string(),
        target_b: b.map_or_else(|| "zeroes".to_owned(), |b| b.opened.target().to_string()),
        equal: bytes_a == bytes_b,
        block_size: block.bytes(),
        bytes_compared: bytes_a.min(bytes_b),
        bytes_transferred: 0,
        bytes_a,
        bytes_b,
        offloaded: false,
        elapsed_s: 0.0,
        blocks_different: 0,
        first_different_byte: None,
        differences: Vec::new(),
    };
    (report, block)
}

impl Sides<'_> {
    /// The first byte that differs, if it was read: sums may have told of a block before the first one that was.
    fn first_byte(&self, differences: &[Run]) -> Option<u64> {
        let block = differences.first()?.lba << self.block.shift();
        self.first.get().filter(|byte| (block..block + self.block.bytes() as u64).contains(byte))
    }

    /// The blocks that differ, found by reading both sides.
    async fn read_runs(&self, offset: u64, length: u64) -> Result<Vec<Run>, Failure> {
        let mut runs = Vec::new();
        for from in (0..length).step_by(CHUNK_BYTES as usize) {
            let (at, length) = (offset + from, CHUNK_BYTES.min(length - from));
            let other = async {
                match self.b {
                    Some(b) => b.read("comparing", at, length).await.map(Some),
                    None => Ok(None),
                }
            };
            let (a, b) = join(self.a.read("comparing", at, length), other).await;
            let (a, b) = (a?, b?);
            self.read_bytes.set(self.read_bytes.get() + a.len() as u64 + b.as_ref().map_or(0, |b| b.len() as u64));
            self.differences(at, &a, b.as_deref(), &mut runs);
        }
        Ok(runs)
    }

    /// Adds the blocks of a chunk that differ; equal chunks are told by one comparison.
    fn differences(&self, offset: u64, a: &[u8], b: Option<&[u8]>, runs: &mut Vec<Run>) {
        let equal = |a: &[u8], b: Option<&[u8]>| match b {
            Some(b) => a == b,
            None => a.iter().fold(0, |seen, byte| seen | byte) == 0,
        };
        if equal(a, b) {
            return;
        }
        let differs = |at: &usize| a[*at] != b.map_or(0, |b| b[*at]);
        let first = (0..a.len()).find(differs).map(|at| offset + at as u64);
        self.first.set([self.first.get(), first].into_iter().flatten().min());
        for (index, a) in a.chunks(self.block.bytes()).enumerate() {
            let at = index * self.block.bytes();
            if !equal(a, b.map(|b| &b[at..at + a.len()])) {
                let lba = (offset >> self.block.shift()) + index as u64;
                join_run(runs, Run { lba, blocks: 1 });
            }
        }
    }
}

/// Adds blocks behind those that are there; makes one run of what follows one another. Answers whether a run was added.
fn join_run(runs: &mut Vec<Run>, more: Run) -> bool {
    match runs.last_mut() {
        Some(run) if run.lba + run.blocks == more.lba => {
            run.blocks += more.blocks;
            false
        }
        _ => {
            runs.push(more);
            true
        }
    }
}

/// Adds blocks that differ to the report.
fn note(report: &mut Report, run: Run) {
    report.blocks_different += run.blocks;
    if join_run(&mut report.differences, run) && report.differences.len() > MOST_LISTED {
        report.differences.pop();
    }
}

fn print_text(report: &Report) -> Result<(), Failure> {
    for run in &report.differences {
        match run.blocks {
            1 => say(&format!("block {} differs", run.lba))?,
            blocks => say(&format!("blocks {}..{} differ", run.lba, run.lba + blocks - 1))?,
        }
    }
    if let Some(byte) = report.first_different_byte {
        say(&format!("the first byte that differs is byte {byte}"))?;
    }
    if report.bytes_a != report.bytes_b {
        say(&format!("the sizes differ: {} bytes and {} bytes", report.bytes_a, report.bytes_b))?;
    }
    let words = if report.equal { "equal" } else { "different" };
    let of = report.bytes_compared.div_ceil(report.block_size as u64);
    say(&format!(
        "{} and {}: {words} ({} of {of} blocks differ)",
        report.target_a, report.target_b, report.blocks_different
    ))
}
