//! `sealblock compare`: two targets block by block, or one with zeroes.
//!
//! Where a target is away and can sum its blocks itself, sums are compared first, see `digests.rs`.

mod digests;

use std::time::Instant;

use std::cell::Cell;

use futures_util::future::join;
use futures_util::stream::{self, StreamExt};
use sealblock_block::Device;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, ByteCount, Extent};
use serde::Serialize;

use crate::cli::{Compare, Comparison};
use crate::exit::{Cause, Exit, Failure};
use crate::progress::{Progress, Show};
use crate::report::{print_json, say};
use crate::stack::{Access, Opened, data_of, of_block, on_reactor, open};

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
        let opened_a = open(a, Access::Read).await?;
        let opened_b = match b {
            Some(b) => Some(open(b, Access::Read).await?),
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
    a: &'a Opened,
    /// Zeroes without it.
    b: Option<&'a Opened>,
    block: BlockSize,
    /// Bytes that were read of both.
    read_bytes: Cell<u64>,
}

async fn compare(a: &Opened, b: Option<&Opened>, show: Show) -> Result<Report, Failure> {
    let started = Instant::now();
    let (mut report, block) = empty_report(a, b);
    let common = report.bytes_compared;
    let sides = Sides { a, b, block, read_bytes: Cell::new(0) };
    report.offloaded = sides.have_digests();
    let received = || [Some(a), b].into_iter().flatten().filter_map(Opened::received_bytes).reduce(u64::saturating_add);
    let received_before = received();
    let progress = Progress::new("comparing", Some(ByteCount::new(common)), show);
    let step = if report.offloaded { digests::REGION_BYTES } else { CHUNK_BYTES };
    let regions = (0..common.div_ceil(step)).map(|i| (i * step, step.min(common - i * step)));
    let (sides, by_digest) = (&sides, report.offloaded);
    let mut compared = stream::iter(regions)
        .map(|(offset, length)| async move {
            let runs = match by_digest {
                true => sides.search(offset, length).await?,
                false => sides.read_runs(offset, length).await?,
            };
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
    report.elapsed_s = started.elapsed().as_secs_f64();
    Ok(report)
}

/// The report before anything was compared, and the block size of the comparison: the larger of the two, in which both
/// sides can be read.
fn empty_report(a: &Opened, b: Option<&Opened>) -> (Report, BlockSize) {
    let size = |opened: &Opened| opened.gate.geometry().block_size;
    let bytes = |opened: &Opened| opened.gate.geometry().capacity_bytes();
    let block = b.map_or(size(a), |b| size(a).max(size(b)));
    let (bytes_a, bytes_b) = (bytes(a), b.map_or(bytes(a), bytes));
    let common = bytes_a.min(bytes_b);
    let common = common - common % block.bytes() as u64;
    let report = Report {
        target_a: a.target().to_string(),
        target_b: b.map_or_else(|| "zeroes".to_owned(), |b| b.target().to_string()),
        equal: bytes_a == bytes_b,
        block_size: block.bytes(),
        bytes_compared: common,
        bytes_transferred: 0,
        bytes_a,
        bytes_b,
        offloaded: false,
        elapsed_s: 0.0,
        blocks_different: 0,
        differences: Vec::new(),
    };
    (report, block)
}

async fn read(opened: &Opened, offset: u64, length: u64) -> Result<Slice, Failure> {
    let shift = opened.gate.geometry().block_size.shift();
    let extent = Extent::from_raw(offset >> shift, length >> shift)
        .map_err(|error| Failure::new(Cause::Usage, "comparing", error))?;
    opened.read(extent).await.map(data_of).map_err(|error| of_block("comparing", &error))
}

impl Sides<'_> {
    /// The blocks that differ, found by reading both sides.
    async fn read_runs(&self, offset: u64, length: u64) -> Result<Vec<Run>, Failure> {
        let mut runs = Vec::new();
        for from in (0..length).step_by(CHUNK_BYTES as usize) {
            let (at, length) = (offset + from, CHUNK_BYTES.min(length - from));
            let other = async {
                match self.b {
                    Some(b) => read(b, at, length).await.map(Some),
                    None => Ok(None),
                }
            };
            let (a, b) = join(read(self.a, at, length), other).await;
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
    if report.bytes_a != report.bytes_b {
        say(&format!("the sizes differ: {} bytes and {} bytes", report.bytes_a, report.bytes_b))?;
    }
    let words = if report.equal { "equal" } else { "different" };
    let of = report.bytes_compared / report.block_size as u64;
    say(&format!(
        "{} and {}: {words} ({} of {of} blocks differ)",
        report.target_a, report.target_b, report.blocks_different
    ))
}
