//! `sealblock copy`: bytes from one place to another.
//!
//! A place is a device, standard input or output, or a plain file. Bytes need not end at a block's end: a file that is written
//! has as many as there were, and the rest of a device's last block is zeroes. Zeroes are not written where the device can
//! unmap instead, or the file has a hole. With `--salvage` blocks that cannot be read are named and left out, see `Losing`.

mod job;
mod sink;
mod source;

use std::time::{Duration, Instant};

use sealblock_block::Device;
use sealblock_stack::quantity::count;
use sealblock_stack::range::Run;
use sealblock_stack::{Cause, Lost, RAW_FILE, StackError, on_reactor, shell_word};
use sealblock_units::{BlockSize, ByteCount};
use serde::Serialize;

use crate::cli::{Copy, Endpoint};
use crate::exit::Exit;
use crate::findings::{Findings, OutputStream};
use crate::interrupt;
use crate::progress::Show;
use crate::report::{note, print_json, say_aside};
use crate::tally::Tally;

pub(super) use job::{CopyJob, Moved};
use sink::check_open_apart;
pub(super) use sink::{Losing, Sink, check_apart, check_output, overwriting};
pub(super) use source::{Reading, Source};

/// The answer of `copy`.
#[derive(Serialize)]
struct Report {
    from: String,
    to: String,
    /// Bytes that were gone through, holes and what is lost included.
    bytes: u64,
    bytes_read: u64,
    bytes_written: u64,
    elapsed_s: f64,
    block_size: usize,
    blocks_lost: u64,
    lost: Vec<Run<Lost>>,
    lost_unlisted: u64,
    lost_are: Losing,
    /// Why the data may be older than what was written to where they came from, if so.
    may_be_older: Option<&'static str>,
    /// The first byte that was not copied, when a signal ended it.
    resume_byte: Option<u64>,
    #[serde(skip)]
    resume_command: Option<String>,
}

/// Copies.
pub fn run(arguments: &Copy) -> Result<Exit, StackError> {
    check_output(arguments.json, &arguments.to)?;
    let (report, behind, lacks) = on_reactor(async {
        check_apart("copy", &arguments.from, &arguments.to)?;
        let source = Source::open(&arguments.from, arguments.salvage).await?;
        let overwriting = overwriting(arguments.force, &source, &arguments.to).await;
        let sink = Sink::open(&arguments.to, overwriting, arguments.members.usage()).await?;
        let room = sink.room_bytes();
        let copied = copy(arguments, &source, &sink).await;
        // Pages of an earlier time are found while they are read.
        source.note_older();
        let lacks = copied.is_ok() && sink.note_lacking();
        let copied = sink.close(copied).await;
        let report = source.close(copied).await?;
        let behind = room.and_then(|room| room.checked_sub(report.bytes)).filter(|behind| *behind > 0);
        Ok((report, behind, lacks))
    })?;
    if arguments.json {
        print_json(&report)?;
    } else {
        report.print(behind);
    }
    if let Some(byte) = report.resume_byte {
        report_resume(arguments, byte, report.resume_command.as_deref());
        return Ok(Exit::Interrupted);
    }
    let exit = if report.blocks_lost > 0 { Exit::DamageFound } else { Exit::Clean };
    Ok(exit.unless_older(report.may_be_older.is_some()).unless_lacking(lacks))
}

/// The command that copies the rest from `byte` on. A plain file that is written is always written from its start, and blocks of the two
/// sides may end at different bytes: then there is none. Where what was copied `is_known`, the destination now holds it, and is only overwritten by
/// force.
fn resume_command(arguments: &Copy, source: &Source, sink: &Sink, byte: u64, is_known: bool) -> Option<String> {
    let (Source::Device(from), Sink::Device(to)) = (source, sink) else { return None };
    let rest = |size: BlockSize| {
        let block_bytes = size.bytes() as u64;
        byte.is_multiple_of(block_bytes).then(|| byte / block_bytes)
    };
    if from.opened.info.kind == RAW_FILE {
        return None;
    }
    let (first, first_to) = (rest(from.named_block_size())?, rest(to.device.geometry().block_size)?);
    let options = [
        (arguments.salvage, " --salvage"),
        (arguments.force || is_known, " --force"),
        (arguments.members.force_member, " --force-member"),
    ];
    let options: String = options.into_iter().filter_map(|(is_given, option)| is_given.then_some(option)).collect();
    let rest = |first: u64, end: &Endpoint| shell_word(format_args!("offset:{first}..,{end}"));
    Some(format!("sealblock copy{options} {} {}", rest(first, &arguments.from), rest(first_to, &arguments.to)))
}

/// Says on standard error how far the copy came, and how to resume it.
fn report_resume(arguments: &Copy, byte: u64, command: Option<&str>) {
    let (rest, otherwise) = match arguments.from {
        Endpoint::Standard => ("; the rest of the input was not written", "repeat the command with all of its input"),
        Endpoint::Target(_) => ("", "repeat the command: it starts over"),
    };
    let how_far = format!("after byte {byte}{rest}");
    interrupt::report(format!("copying {} to {}", arguments.from, arguments.to), how_far, command.unwrap_or(otherwise));
}

impl Report {
    /// Prints the summary on standard error: standard output may have the data.
    fn print(&self, behind: Option<u64>) {
        let Report { from, to, .. } = self;
        if self.lost_unlisted > 0 {
            say_aside(format_args!("and {} more lost", count(self.lost_unlisted, "block")));
        }
        if self.blocks_lost > 0 {
            let blocks = count(self.blocks_lost, "block");
            say_aside(format_args!("{blocks} of {from} lost; in {to} {}", self.lost_are.to_text()));
        }
        let elapsed = Duration::from_secs_f64(self.elapsed_s);
        let tally = Tally { read: self.bytes_read, written: self.bytes_written, elapsed }.to_text();
        say_aside(format_args!("{} copied from {from} to {to} {tally}", ByteCount::new(self.bytes)));
        if self.bytes == 0 && self.resume_byte.is_none() {
            say_aside("nothing to copy");
        } else if let (Some(behind), None) = (behind, self.resume_byte) {
            let larger = ByteCount::new(behind);
            say_aside(format_args!(
                "note: {to} is {larger} larger than the data; the rest of the last block is zeroed, later blocks are unchanged"
            ));
        }
    }
}

async fn copy(arguments: &Copy, source: &Source, sink: &Sink) -> Result<Report, StackError> {
    check_open_apart((&arguments.from, source), (&arguments.to, sink))?;
    sink.check_room("copy", &arguments.to, source.bytes().unwrap_or(0))?;
    if !sink.in_order() {
        // Who writes to a pipe is blocked by it, and ends by the signal as usual.
        interrupt::watch();
    }
    let started = Instant::now();
    let show = if arguments.json { Show::Never } else { Show::OnTerminal };
    let mut findings = Findings::new(if arguments.json { OutputStream::Silent } else { OutputStream::Error });
    let reading = Reading { doing: "read", past_damage: arguments.salvage, asks_for_holes: true };
    let work = CopyJob::new("copying", source, reading, sink, show);
    // If the source does not answer, what was copied is not known: by force the command works in any case.
    let last_words = |byte| {
        let command = resume_command(arguments, source, sink, byte, true);
        report_resume(arguments, byte, command.as_deref());
    };
    let last_words_of_changes = || {
        last_words(work.total());
        interrupt::report_in_flight();
    };
    let copied = interrupt::or_end(work.run(&mut findings), last_words_of_changes).await;
    findings.finish(&work.progress)?;
    // What was copied is whole all the same.
    for lost in source.lost_metadata().iter().filter(|_| !arguments.json) {
        note(lost);
    }
    let Moved { tally, blocks_lost } = copied.map_err(|failure| advise(failure, arguments))?;
    let ((lost, lost_unlisted), total) = (findings.into_runs(), work.total());
    let resume_byte = source.is_interrupted(total).then_some(total);
    let resume_command = match resume_byte {
        Some(byte) => {
            let is_known = interrupt::or_end(source.is_known(), || last_words(byte)).await;
            resume_command(arguments, source, sink, byte, is_known)
        }
        None => None,
    };
    Ok(Report {
        from: arguments.from.to_string(),
        to: arguments.to.to_string(),
        bytes: total,
        bytes_read: tally.read,
        bytes_written: tally.written,
        elapsed_s: started.elapsed().as_secs_f64(),
        block_size: source.block_size().bytes(),
        blocks_lost,
        lost,
        lost_unlisted,
        lost_are: sink.losing(),
        may_be_older: source.older(),
        resume_command,
        resume_byte,
    })
}

/// What helps against a block that cannot be read.
fn advise(failure: StackError, arguments: &Copy) -> StackError {
    let is_read = failure.in_short().starts_with("cannot read");
    match failure.cause() {
        _ if arguments.salvage => failure,
        Cause::Damaged => {
            failure.advise("use --salvage to copy all readable blocks; `sealblock verify` lists the damaged ones")
        }
        // A medium that failed once need not fail again, and the blocks are then good.
        Cause::Io if is_read => {
            failure.advise("repeat the command; if it fails again, use --salvage to copy all readable blocks")
        }
        _ => failure,
    }
}
