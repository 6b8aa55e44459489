//! `sealblock compare`: two targets block by block, or one with zeroes.
//!
//! Every byte counts: a plain file may end within a block, which is compared as far as both sides have it.
//! If a target is remote and can compute checksums itself, checksums are compared first, see `checksums.rs`.
//! A block that cannot be read does not keep the others from being compared: it is named, and the targets are not called equal.

mod checksums;
mod report;

use std::cell::Cell;
use std::time::Instant;

use futures_util::future::{join, ready};
use futures_util::stream::{self, StreamExt};
use sealblock_block::Device;
use sealblock_runtime_memory::Slice;
use sealblock_stack::range::{BlockRange, Run, join_run};
use sealblock_stack::{Cause, StackError, Whole, on_reactor};
use sealblock_units::{BlockSize, ByteCount, Lba};

use crate::cli::{Compare, Comparison};
use crate::exit::Exit;
use crate::findings::{Findings, Voice};
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::print_json;
use report::{Report, Unreadable, What};

/// Bytes read from each side at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// Chunks in flight at once.
const IN_FLIGHT: usize = 8;

/// Compares.
pub fn run(arguments: &Compare) -> Result<Exit, StackError> {
    let comparison = arguments
        .comparison()
        .ok_or_else(|| StackError::new(Cause::Usage, "comparing", "two targets are needed, or --zero and one"))?;
    let show = if arguments.json { Show::Never } else { Show::OnTerminal };
    let voice = if arguments.json { Voice::Silent } else { Voice::Output };
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
        let report = compare(&opened_a, opened_b.as_ref(), arguments.range, show, voice).await;
        let report = match opened_b {
            Some(opened_b) => opened_b.close(report).await,
            None => report,
        };
        opened_a.close(report).await
    })?;
    if arguments.json {
        print_json(&report)?
    } else {
        report.print_text()?
    }
    report::report_resume(&report.names(), arguments.range, report.resume_lba);
    Ok(report.exit())
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

async fn compare(
    a: &Whole,
    b: Option<&Whole>,
    range: Option<BlockRange>,
    show: Show,
    voice: Voice,
) -> Result<Report, StackError> {
    let (mut report, block) = Report::empty(a, b);
    let (from, to) = report.narrow(range)?;
    interrupt::watch();
    let started = Instant::now();
    let sides = Sides { a, b, block, first: Cell::new(None), read_bytes: Cell::new(0) };
    report.offloaded = sides.have_digests();
    let each = || [Some(a), b].into_iter().flatten();
    let received = || each().filter_map(|side| side.opened.received_bytes()).reduce(u64::saturating_add);
    let received_before = received();
    let progress = Progress::new("comparing", Some(ByteCount::new(to - from)), show);
    let mut findings = Findings::new(voice);
    let reached = Cell::new(from);
    let resume_lba = || Some(reached.get() >> block.shift()).filter(|_| reached.get() < to);
    let (offloaded, names) = (report.offloaded, report.names());
    let work = regions(&sides, to, offloaded, &progress, &mut findings, &reached);
    // What does not answer does not keep anybody from knowing how far it came.
    let compared = interrupt::or_end(work, || report::report_resume(&names, range, resume_lba())).await;
    // What was found before a target did not answer is worth knowing, too.
    findings.finish(&progress)?;
    (report.blocks_different, report.blocks_unreadable) = compared?;
    let done = reached.get();
    report.resume_lba = resume_lba();
    report.bytes_compared = done - from;
    // What is away counts what came over the network; a device that is here sent nothing that way.
    let received = received().zip(received_before).map(|(now, before)| now - before);
    report.bytes_transferred = received.unwrap_or(sides.read_bytes.get());
    report.equal &= report.blocks_different + report.blocks_unreadable == 0 && done == to;
    report.list(findings);
    report.first_different_byte = sides.first_byte(report.differences.first().map(|run| run.lba));
    report.elapsed_s = started.elapsed().as_secs_f64();
    Ok(report)
}

/// Compares region by region, from the byte that is reached to another, until a signal ends it, and keeps how far it came.
/// Gives how many blocks differ, and how many cannot be read.
async fn regions(
    sides: &Sides<'_>,
    to: u64,
    by_digest: bool,
    progress: &Progress,
    findings: &mut Findings<What>,
    reached: &Cell<u64>,
) -> Result<(u64, u64), StackError> {
    let step = if by_digest { checksums::REGION_BYTES } else { CHUNK_BYTES };
    let from = reached.get();
    let regions = (0..(to - from).div_ceil(step)).map(|i| from + i * step).map(|at| (at, step.min(to - at)));
    let mut compared = stream::iter(regions)
        .take_while(|_| ready(!interrupt::came()))
        .map(|(offset, length)| async move {
            let search = sides.search(offset, length);
            let runs = if by_digest { search.await? } else { sides.read_runs(offset, length).await? };
            Ok::<_, StackError>((length, runs))
        })
        .buffered(IN_FLIGHT);
    let (mut different, mut unreadable) = (0, 0);
    while let Some(region) = compared.next().await {
        let (length, runs) = region?;
        reached.set(reached.get() + length);
        for run in runs {
            progress.bad(run.blocks);
            match run.what {
                What::Differ => different += run.blocks,
                What::Unreadable(_) => unreadable += run.blocks,
            }
            findings.note(run);
        }
        progress.advance(length);
        findings.reached(Lba::new(reached.get() >> sides.block.shift()), progress);
    }
    Ok((different, unreadable))
}

/// A side's bytes, and which of its blocks could not be read.
type Read = (Slice, Vec<Run<What>>);

impl Sides<'_> {
    /// The first byte that differs, if it was read: checksums may have named a block before the first one that was.
    fn first_byte(&self, first_lba: Option<u64>) -> Option<u64> {
        let block = first_lba? << self.block.shift();
        self.first.get().filter(|byte| (block..block + self.block.bytes() as u64).contains(byte))
    }

    /// The blocks that differ or cannot be read, found by reading both sides.
    async fn read_runs(&self, offset: u64, length: u64) -> Result<Vec<Run<What>>, StackError> {
        let mut runs = Vec::new();
        for from in (0..length).step_by(CHUNK_BYTES as usize) {
            let (at, length) = (offset + from, CHUNK_BYTES.min(length - from));
            let other = async {
                match self.b {
                    Some(b) => self.read(b, at, length).await.map(Some),
                    None => Ok(None),
                }
            };
            let (a, b) = join(self.read(self.a, at, length), other).await;
            let ((a, mut lost), b) = (a?, b?);
            let (b, lost_b) = b.unzip();
            lost.extend(lost_b.into_iter().flatten());
            let is_lost = |lba: u64| lost.iter().any(|run| (run.lba..run.end()).contains(&lba));
            let mut found = self.differences(at, &a, b.as_deref(), is_lost);
            found.extend(lost);
            found.sort_by_key(|run| run.lba);
            found.into_iter().for_each(|run| join_run(&mut runs, run));
        }
        Ok(runs)
    }

    /// Reads of one side; what cannot be read is named, in blocks of the comparison.
    async fn read(&self, side: &Whole, offset: u64, length: u64) -> Result<Read, StackError> {
        let read = side.read_past_damage("comparing", offset, length).await?;
        self.read_bytes.set(self.read_bytes.get() + read.data.len() as u64);
        let (mut lost, target) = (Vec::new(), side.opened.target());
        let shift = side.opened.gate.geometry().block_size.shift();
        for run in read.lost {
            let (first, last) =
                (run.lba << shift >> self.block.shift(), (run.end() - 1) << shift >> self.block.shift());
            let what = What::Unreadable(Unreadable { target: target.to_string(), why: run.what.why });
            // Two blocks of a side may lie in one of the comparison.
            let first = lost.last().map_or(first, |before: &Run<What>| first.max(before.end()));
            if first <= last {
                join_run(&mut lost, Run::new(first, last + 1 - first, what));
            }
        }
        Ok((read.data, lost))
    }

    /// The blocks of a chunk that differ, but for those that are lost; one comparison finds equal chunks.
    fn differences(&self, offset: u64, a: &[u8], b: Option<&[u8]>, is_lost: impl Fn(u64) -> bool) -> Vec<Run<What>> {
        let mut runs = Vec::new();
        if is_equal(a, b) {
            return runs;
        }
        for (index, a) in a.chunks(self.block.bytes()).enumerate() {
            let at = index * self.block.bytes();
            let b = b.map(|b| &b[at..at + a.len()]);
            let lba = (offset >> self.block.shift()) + index as u64;
            if is_equal(a, b) || is_lost(lba) {
                continue;
            }
            let differs = |at: &usize| a[*at] != b.map_or(0, |b| b[*at]);
            let first = (0..a.len()).find(differs).map(|byte| offset + (at + byte) as u64);
            self.first.set([self.first.get(), first].into_iter().flatten().min());
            join_run(&mut runs, Run::new(lba, 1, What::Differ));
        }
        runs
    }
}

/// Whether bytes are the same, or zeroes where there is nothing to compare them with.
fn is_equal(a: &[u8], b: Option<&[u8]>) -> bool {
    match b {
        Some(b) => a == b,
        None => a.iter().fold(0, |seen, byte| seen | byte) == 0,
    }
}
