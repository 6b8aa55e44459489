//! `sealblock compare`: two targets block by block, or one with zeroes.
//!
//! Every byte counts: a plain file may end within a block, which is compared as far as both sides have it.
//! If a target is remote and can compute checksums itself, checksums are compared first, see `sides.rs`.
//! A block that cannot be read does not keep the others from being compared: it is named, and the targets are not called equal.

mod report;
mod sides;

use std::cell::Cell;
use std::time::Instant;

use sealblock_stack::range::BlockRange;
use sealblock_stack::{Access, ByteView, Cause, StackError, on_reactor};
use sealblock_units::{ByteCount, Lba};

use crate::cli::{Compare, Comparison};
use crate::exit::Exit;
use crate::findings::{Findings, OutputStream};
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::{note_older, print_json};
use report::{Report, What};
use sides::{CHUNK_BYTES, REGION_BYTES, Sides};

/// Chunks in flight at once.
const IN_FLIGHT: usize = 8;

/// Compares.
pub fn run(arguments: &Compare) -> Result<Exit, StackError> {
    let comparison = arguments
        .comparison()
        .ok_or_else(|| StackError::new(Cause::Usage, "compare", "give two targets, or one target with --zero"))?;
    let show = if arguments.json { Show::Never } else { Show::OnTerminal };
    let voice = if arguments.json { OutputStream::Silent } else { OutputStream::Output };
    let report = on_reactor(async {
        let (a, b) = match comparison {
            Comparison::Pair(a, b) => (a, Some(b)),
            Comparison::Zeroes(a) => (a, None),
        };
        let opened_a = ByteView::open(a, Access::ReadOlder).await?;
        let opened_b = match b {
            Some(b) => Some(ByteView::open(b, Access::ReadOlder).await?),
            None => None,
        };
        for side in [Some(&opened_a), opened_b.as_ref()].into_iter().flatten() {
            note_older(&side.opened);
        }
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

async fn compare(
    a: &ByteView,
    b: Option<&ByteView>,
    range: Option<BlockRange>,
    show: Show,
    voice: OutputStream,
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
    let step = if by_digest { REGION_BYTES } else { CHUNK_BYTES };
    let from = reached.get();
    let regions = (0..(to - from).div_ceil(step)).map(|i| from + i * step).map(|at| async move {
        let length = step.min(to - at);
        let runs = if by_digest { sides.search(at, length).await? } else { sides.read_runs(at, length).await? };
        Ok((length, runs))
    });
    let (mut different, mut unreadable) = (0, 0);
    interrupt::in_order(regions, IN_FLIGHT, |(length, runs)| {
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
    })
    .await?;
    Ok((different, unreadable))
}
