//! `sealblock zero` and `sealblock discard`.
//!
//! All of a device is erased only when that was confirmed: the command asks on a terminal, and wants `--yes` where there is none. What counts
//! is the blocks, not the words: `--range 0..` and `offset:0..` are the whole device, too.

use std::cell::Cell;
use std::io::{self, BufRead, IsTerminal, Write};
use std::time::{Duration, Instant};

use sealblock_block::{Device, Durability, Request};
use sealblock_stack::quantity::count;
use sealblock_stack::range::BlockRange;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, Cause, OpenTarget, StackError, Usage, device_error, on_reactor, open_for};
use sealblock_units::{ByteCount, Extent, Lba};
use serde::Serialize;

use crate::cli::{Discard, Unmapping, Zero};
use crate::exit::{Exit, note_lacking};
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::{as_text, note_lost_answers, print_report};
use crate::tally::Tally;

/// Max. bytes of one request, so that the progress bar moves.
const STEP_BYTES: u64 = 256 << 20;
/// Requests in flight at once.
const IN_FLIGHT: usize = 4;

/// The report of `zero` and `discard`.
#[derive(Serialize)]
struct Report {
    target: String,
    /// Blocks that are done, from the first one on.
    blocks: u64,
    bytes: u64,
    elapsed_s: f64,
    /// The rest of the range, if a signal ended the command.
    #[serde(serialize_with = "as_text")]
    resume: Option<BlockRange>,
}

/// One of the two.
struct UnmapJob<'a> {
    action: &'static str,
    doing: &'static str,
    done: &'static str,
    target: &'a TargetName,
    usage: Usage,
    how: &'a Unmapping,
}

/// Makes blocks read as zeroes.
pub fn zero(arguments: &Zero) -> Result<Exit, StackError> {
    let may_unmap = !arguments.no_unmap;
    let (usage, how) = (arguments.members.usage(), &arguments.how);
    let work = UnmapJob { action: "zero", doing: "zeroing", done: "zeroed", target: &arguments.target, usage, how };
    work.run(move |extent| Request::write_zeroes(extent, may_unmap, Durability::Volatile))
}

/// Deallocates blocks.
pub fn discard(arguments: &Discard) -> Result<Exit, StackError> {
    let (usage, how) = (arguments.members.usage(), &arguments.how);
    let work =
        UnmapJob { action: "discard", doing: "discarding", done: "discarded", target: &arguments.target, usage, how };
    work.run(|extent| Request::discard([extent]))
}

impl UnmapJob<'_> {
    /// Executes requests over a whole range, then flushes.
    fn run(&self, operation: impl Fn(Extent) -> Request) -> Result<Exit, StackError> {
        let (report, lacks) = on_reactor(async {
            let opened = open_for(self.target, Access::Write, self.usage).await?;
            let work = async |opened: &OpenTarget| {
                self.confirm(opened)?;
                note_lost_answers(opened);
                let report = self.pieces(opened, operation).await?;
                Ok((report, note_lacking(opened)))
            };
            opened.close_after(work).await
        })?;
        print_report(self.how.json, &report, || {
            let tally = Tally { elapsed: Duration::from_secs_f64(report.elapsed_s), ..Tally::default() }.to_text();
            let (blocks, bytes) = (count(report.blocks, "block"), ByteCount::new(report.bytes));
            format!("{}: {blocks} {} ({bytes}) {tally}", report.target, self.done)
        })?;
        let Some(resume) = report.resume else { return Ok(Exit::Clean.unless_lacking(lacks)) };
        self.report_resume(resume);
        Ok(Exit::Interrupted)
    }

    fn report_resume(&self, resume: BlockRange) {
        interrupt::report_rest(format_args!("{} {}", self.doing, self.target), resume);
    }

    /// Asks on a terminal before a whole device is erased, and refuses to without one. A part of a device is what was typed, and what is in
    /// memory ends with the command.
    fn confirm(&self, opened: &OpenTarget) -> Result<(), StackError> {
        let geometry = opened.device.geometry();
        let is_some = opened.is_part() || opened.span(self.how.range)?.blocks() < geometry.capacity_blocks;
        if is_some || self.how.yes || self.target.is_fleeting() {
            return Ok(());
        }
        let all = format!("all of {} ({})", self.target, ByteCount::new(geometry.capacity_bytes()));
        if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
            let why = format!("this erases {all}, and there is no terminal to ask on");
            let advice = "use --yes, or --range FIRST..LAST for a part";
            return Err(StackError::new(Cause::Usage, self.action, why).on(self.target).advise(advice));
        }
        // Where it cannot be asked, nobody answers yes.
        write!(io::stderr(), "This erases {all}. Continue? [y/N] ").ok();
        io::stderr().flush().ok();
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer).map_err(|error| StackError::io("read the answer", &error))?;
        match answer.trim().to_lowercase().as_str() {
            "y" | "yes" => Ok(()),
            _ => {
                let why = "not confirmed; nothing was changed";
                Err(StackError::new(Cause::Usage, self.action, why).on(self.target))
            }
        }
    }

    async fn pieces(&self, opened: &OpenTarget, operation: impl Fn(Extent) -> Request) -> Result<Report, StackError> {
        let UnmapJob { action, doing, target, how, .. } = self;
        let span = opened.span(how.range)?;
        let (started, size) = (Instant::now(), opened.device.geometry().block_size);
        let step = sealblock_units::BlockCount::new((STEP_BYTES >> size.shift()) as u32)
            .expect("a step is a multiple of every block size");
        let total = ByteCount::new(span.blocks().saturating_mul(size.bytes() as u64));
        let show = if how.json { Show::Never } else { Show::OnTerminal };
        let progress = Progress::new(&format!("{doing} {target}"), Some(total), show);
        let (progress, operation, next) = (&progress, &operation, Cell::new(span.first().get()));
        interrupt::watch();
        let work = async {
            let pieces = span.extents(step).map(|extent| async move {
                opened.device.execute(operation(extent)).await.map_err(|error| device_error(*action, &error))?;
                progress.advance_by(extent.bytes(size), 0);
                Ok(extent.len())
            });
            interrupt::in_order(pieces, IN_FLIGHT, |blocks| next.set(next.get().saturating_add(blocks))).await?;
            opened.flush().await
        };
        let rest = || match next.get() - span.first().get() < span.blocks() {
            true => BlockRange::new(Lba::new(next.get()), Some(span.last())).ok(),
            false => None,
        };
        let last_words = || {
            rest().into_iter().for_each(|resume| self.report_resume(resume));
            interrupt::report_in_flight();
        };
        interrupt::or_end(work, last_words).await?;
        let (blocks, resume) = (next.get() - span.first().get(), rest());
        let elapsed_s = started.elapsed().as_secs_f64();
        Ok(Report { target: target.to_string(), blocks, bytes: blocks << size.shift(), elapsed_s, resume })
    }
}
