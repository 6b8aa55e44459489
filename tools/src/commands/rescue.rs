//! `sealblock rescue`: what still verifies of a damaged volume, and a list of the rest.
//!
//! The volume is only read. It opens from any copy of its superblock, or, without one, from what its map entries show
//! of its shape. What cannot be read is never passed on:
//! a destination that can make blocks unreadable gets them so, a file has zeroes there, and the list names them.

use sealblock_block::{Device, WhyOlder};
use sealblock_media_file::Options;
use sealblock_media_volume::rescue::Remains;
use sealblock_media_volume::rescue::profile::Hints;
use sealblock_media_volume::{Standing, SuperblockCopy};
use sealblock_stack::quantity::count;
use sealblock_stack::range::Run;
use sealblock_stack::rescue::{open_shapeless, open_truncated};
use sealblock_stack::{
    ByteView, Cause, FileKind, Lost, OpenTarget, StackError, inspect, on_reactor, open_error, open_medium,
};
use sealblock_units::ByteCount;
use serde::Serialize;

use super::copy::{CopyJob, Reading, Sink, Source, check_apart, check_output, overwriting};
use super::info::superblocks_json;
use crate::cli::{Endpoint, Rescue};
use crate::exit::Exit;
use crate::findings::{Findings, OutputStream};
use crate::progress::Show;
use crate::report::{print_json, say, say_aside};

/// The answer of `rescue`.
#[derive(Serialize)]
struct Report {
    volume: String,
    to: String,
    block_size: usize,
    blocks: u64,
    blocks_rescued: u64,
    blocks_lost: u64,
    superblock_copies: serde_json::Value,
    log_sectors_lost: u64,
    may_be_older: Option<&'static str>,
    /// How it was found out whose volume it is.
    identity: &'static str,
    /// Records of other volumes that lie in place of this one's, superblocks too.
    foreign_records: u64,
    /// Pages of the block map that are newer than the log, as far as was seen: blocks may be older than what was written.
    newer_pages: u64,
    without_superblock: Option<WithoutSuperblock>,
    lost: Vec<Run<Lost>>,
    lost_unlisted: u64,
}

/// What was found of a volume that has no superblock left.
#[derive(Serialize)]
struct WithoutSuperblock {
    sector_bytes: u32,
    guard: Option<&'static str>,
    /// Records and log sectors that agree with each other.
    agreeing: u64,
    log_sectors: u64,
    log_sectors_missing: u64,
    may_be_older: bool,
}

/// Rescues.
pub fn run(arguments: &Rescue) -> Result<Exit, StackError> {
    check_output(arguments.json, &arguments.to)?;
    check_apart("rescue", &Endpoint::Target(arguments.volume.target()), &arguments.to)?;
    let (report, lacks) = on_reactor(async {
        let (volume, remains) = volume(arguments).await?;
        let report = Report::nothing_lost(arguments, &volume, remains.as_ref().map(WithoutSuperblock::of));
        let found = volume.info.volume.as_ref().map(|volume| volume.lost_copies.clone());
        let volume = Source::Device(Box::new(ByteView::of_blocks(volume)));
        let copied = async {
            let overwriting = overwriting(arguments.force, &volume, &arguments.to).await;
            let sink = Sink::open(&arguments.to, overwriting, arguments.members.usage()).await?;
            let mut copied = copy(arguments, &volume, &sink, report).await;
            // Seen only when pages were read.
            if let (Ok(report), Some(found)) = (&mut copied, found) {
                report.newer_pages = found.newer_pages();
                report.may_be_older = volume.older();
            }
            volume.note_older();
            let lacks = copied.is_ok() && sink.note_lacking();
            sink.close(copied.map(|report| (report, lacks))).await
        };
        let copied = copied.await;
        volume.close(copied).await
    })?;
    match (arguments.json, &arguments.to) {
        (true, _) => print_json(&report)?,
        (false, Endpoint::Standard) => to_text(&report).iter().for_each(say_aside),
        (false, Endpoint::Target(_)) => to_text(&report).iter().try_for_each(|line| say(line))?,
    }
    let is_whole = report.blocks_lost == 0 && report.is_certain();
    let exit = if is_whole { Exit::Clean } else { Exit::DamageFound };
    Ok(exit.unless_older(report.is_older()).unless_lacking(lacks))
}

/// Opens the volume for reading, and says what was found where it has no superblock.
async fn volume(arguments: &Rescue) -> Result<(OpenTarget, Option<Remains>), StackError> {
    const ACTION: &str = "rescue";
    let path = arguments.volume.path();
    let medium = open_medium(path, Options::READ).await.map_err(|error| open_error(ACTION, &error))?;
    let kind = inspect(&medium).await?;
    drop(medium);
    let target = arguments.volume.target();
    let hints = Hints { capacity_bytes: arguments.capacity.map(ByteCount::get), block_size: arguments.block_size };
    let is_hinted = hints != Hints::default();
    match kind {
        FileKind::Volume if is_hinted => {
            let why = "the volume has a superblock with its capacity and block size";
            Err(StackError::new(Cause::Usage, ACTION, why)
                .on(path.display())
                .advise("omit --capacity and --block-size"))
        }
        FileKind::Volume => Ok((open_truncated(&target, path, arguments.identity).await?, None)),
        _ if arguments.identity.is_some() => {
            let why = "no superblock is usable, so its identity is unknown";
            Err(StackError::new(Cause::Usage, ACTION, why).on(path.display()).advise("omit --identity"))
        }
        FileKind::Remains(_) => {
            open_shapeless(&target, path, &hints).await.map(|(opened, remains)| (opened, Some(remains)))
        }
        // Even where nothing is recognised there may be something: not every place is looked at for that.
        FileKind::Raw => match open_shapeless(&target, path, &hints).await {
            Ok((opened, remains)) => Ok((opened, Some(remains))),
            Err(failure) if is_hinted => Err(failure),
            Err(_) => {
                let why = "it is not a protected volume or the remains of one";
                let advice = "if it was a volume, give the capacity that it was created with as --capacity SIZE";
                Err(StackError::new(Cause::Unsuitable, ACTION, why).on(path.display()).advise(advice))
            }
        },
    }
}

impl Report {
    /// What is said of a volume before anything of it is read.
    fn nothing_lost(arguments: &Rescue, volume: &OpenTarget, without_superblock: Option<WithoutSuperblock>) -> Report {
        let geometry = volume.device.geometry();
        let description = volume.info.volume.as_ref();
        let copies: &[SuperblockCopy] = description.map_or(&[], |volume| &volume.superblocks);
        Report {
            volume: arguments.volume.to_string(),
            to: arguments.to.to_string(),
            block_size: geometry.block_size.bytes(),
            blocks: geometry.capacity_blocks,
            blocks_rescued: geometry.capacity_blocks,
            blocks_lost: 0,
            superblock_copies: superblocks_json(copies),
            log_sectors_lost: description.map_or(0, |volume| volume.log_lost),
            may_be_older: volume.why_older().map(WhyOlder::as_str),
            identity: description.map_or(Standing::Unopposed, |volume| volume.standing).as_str(),
            foreign_records: description.map_or(0, |volume| {
                let superblocks = volume.superblocks.iter().filter(|copy| copy.is_foreign).count() as u64;
                superblocks + volume.lost_copies.foreign().iter().map(|(_, records)| records).sum::<u64>()
            }),
            newer_pages: 0,
            without_superblock,
            lost: Vec::new(),
            lost_unlisted: 0,
        }
    }

    /// Whether what was written last may be missing.
    fn is_older(&self) -> bool {
        self.may_be_older.is_some() || self.log_sectors_lost + self.newer_pages > 0
    }

    /// Whether all that the volume had last is known to be here: it is certain whose it is, and nothing of another volume's lies in
    /// place of its own.
    fn is_certain(&self) -> bool {
        self.foreign_records == 0 && self.identity == Standing::Certain.as_str() && self.without_superblock.is_none()
    }
}

/// Where what is lost is named.
fn voice(arguments: &Rescue) -> OutputStream {
    match (arguments.json, &arguments.to) {
        (true, _) => OutputStream::Silent,
        // Standard output is for the data.
        (false, Endpoint::Standard) => OutputStream::Error,
        (false, Endpoint::Target(_)) => OutputStream::Output,
    }
}

async fn copy(arguments: &Rescue, volume: &Source, sink: &Sink, mut report: Report) -> Result<Report, StackError> {
    sink.check_room("rescue", &arguments.to, volume.bytes().unwrap_or(0))?;
    let mut findings = Findings::new(voice(arguments));
    // The holes of a damaged map are not trusted: every block is read.
    let reading = Reading { doing: "rescue", past_damage: true, asks_for_holes: false };
    let work = CopyJob::new("rescuing", volume, reading, sink, Show::OnTerminal);
    report.blocks_lost = work.run(&mut findings).await?.blocks_lost;
    report.blocks_rescued -= report.blocks_lost;
    findings.finish(&work.progress)?;
    (report.lost, report.lost_unlisted) = findings.into_runs();
    Ok(report)
}

fn to_text(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    if report.lost_unlisted > 0 {
        lines.push(format!("and {} more lost", count(report.lost_unlisted, "block")));
    }
    let state = match report.blocks_lost {
        0 if report.is_certain() && report.is_older() => {
            "no damage found, but the last writes may be missing".to_owned()
        }
        0 if report.is_certain() => "nothing lost".to_owned(),
        0 => "no block is known to be lost".to_owned(),
        lost => format!("{lost} lost"),
    };
    if report.foreign_records > 0 {
        let records = count(report.foreign_records, "record");
        lines.push(format!("{}: {records} of another volume instead of this one", report.volume));
    }
    if report.newer_pages > 0 {
        let pages = count(report.newer_pages, "page");
        lines.push(format!(
            "{}: {pages} of the block map newer than the log: blocks may have older content than was written",
            report.volume
        ));
    }
    if report.without_superblock.is_none() && report.identity != Standing::Certain.as_str() {
        lines.push(format!("{}: the identity of the volume is not proven ({})", report.volume, report.identity));
    }
    if report.log_sectors_lost > 0 {
        lines.push(format!(
            "{}: sectors of the log are lost ({}): blocks written last may have older content",
            report.volume, report.log_sectors_lost
        ));
    }
    lines.extend(report.without_superblock.iter().flat_map(|found| found.to_text(report)));
    let (rescued, blocks) = (report.blocks_rescued, report.blocks);
    lines.push(format!("{}: {rescued} of {} copied to {}: {state}", report.volume, count(blocks, "block"), report.to));
    lines
}

impl WithoutSuperblock {
    fn of(remains: &Remains) -> WithoutSuperblock {
        let shape = &remains.profile;
        WithoutSuperblock {
            sector_bytes: shape.layout.sector_bytes(),
            guard: shape.protection.map(|format| format.guard().as_str()),
            agreeing: shape.agreeing,
            log_sectors: remains.log_sectors,
            log_sectors_missing: remains.log_sectors_missing,
            may_be_older: remains.may_be_older,
        }
    }

    fn to_text(&self, report: &Report) -> Vec<String> {
        let Report { volume, block_size, blocks, .. } = report;
        let guard = self.guard.unwrap_or("none");
        let mut lines = vec![format!(
            "{volume}: no superblock can be used; {} records and log sectors tell its shape: {blocks} blocks of {block_size} \
             bytes, sectors of {}, guard {guard}",
            self.agreeing, self.sector_bytes
        )];
        if self.may_be_older {
            lines.push(format!(
                "{volume}: its log cannot be told to be whole ({} places were never written, or are gone): blocks written shortly \
                 before the volume was last in use may have an older content",
                self.log_sectors_missing
            ));
        }
        lines
    }
}
