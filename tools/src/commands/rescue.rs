//! `sealblock rescue`: what still verifies of a damaged volume, and a list of the rest.
//!
//! The volume is only read. It opens from whichever copy of its superblock is left. What cannot be read is never passed on:
//! a destination that can make blocks unreadable gets them so, any other has zeroes there, and the list names them.

use futures_util::stream::{self, StreamExt};
use sealblock_block::{Device, Failure as BlockFailure};
use sealblock_media_file::Options;
use sealblock_media_volume::SuperblockCopy;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{ByteCount, Extent, Lba};
use serde::Serialize;

use super::copy::Sink;
use super::info::superblocks_json;
use crate::cli::{Endpoint, Rescue};
use crate::exit::{Cause, Exit, Failure};
use crate::progress::{Progress, Show};
use crate::report::{print_json, say};
use crate::stack::{Access, FileKind, Opened, data_of, inspect, of_block, of_open, on_reactor, open, open_medium};

/// Bytes read at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// Chunks under way at once.
const IN_FLIGHT: usize = 8;
/// Runs of lost blocks that are listed; further ones are counted.
const MOST_LISTED: usize = 1 << 20;

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
    lost: Vec<Run>,
    lost_unlisted: u64,
}

/// Blocks in a row that are lost for the same reason.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Run {
    lba: u64,
    blocks: u64,
    why: String,
}

/// A chunk as it could be read: zeroes where it could not.
struct Chunk {
    offset: u64,
    data: Slice,
    lost: Vec<Run>,
}

/// Rescues.
pub fn run(arguments: &Rescue) -> Result<Exit, Failure> {
    if arguments.json && arguments.to == Endpoint::Standard {
        let why = "standard output is for the data or for the report, not for both";
        return Err(Failure::new(Cause::Usage, "reading the command line", why).advise("a file for TO"));
    }
    let report = on_reactor(async {
        let volume = volume(arguments).await?;
        let copied = match Sink::open(&arguments.to, arguments.force, arguments.members.usage()).await {
            Ok(sink) => {
                let copied = copy(arguments, &volume, &sink).await;
                sink.close(copied).await
            }
            Err(failure) => Err(failure),
        };
        volume.close(copied).await
    })?;
    match (arguments.json, &arguments.to) {
        (true, _) => print_json(&report)?,
        (false, Endpoint::Standard) => words(&report).iter().for_each(|line| eprintln!("{line}")),
        (false, Endpoint::Target(_)) => words(&report).iter().try_for_each(|line| say(line))?,
    }
    Ok(if report.blocks_lost == 0 { Exit::Clean } else { Exit::Found })
}

/// Opens the volume for reading, or says why there is none to rescue anything from.
async fn volume(arguments: &Rescue) -> Result<Opened, Failure> {
    const DOING: &str = "rescuing";
    let path = arguments.volume.path();
    let medium = open_medium(path, Options::READ).await.map_err(|error| of_open(DOING, &error))?;
    let kind = inspect(&medium).await?;
    drop(medium);
    match kind {
        FileKind::Volume => open(&arguments.volume.target(), Access::Read).await,
        FileKind::Remains(parts) => {
            let why = format!(
                "no superblock is left, and without one this version cannot tell where the blocks are; what is there: {parts}"
            );
            Err(Failure::new(Cause::Damaged, DOING, why).on(path.display()).advise("another copy of the data"))
        }
        FileKind::Raw => {
            Err(Failure::new(Cause::Unsuitable, DOING, "it is no protected volume, nor what is left of one")
                .on(path.display()))
        }
    }
}

async fn copy(arguments: &Rescue, volume: &Opened, sink: &Sink) -> Result<Report, Failure> {
    let geometry = volume.gate.geometry();
    let total = geometry.capacity_bytes();
    if let Some(room) = sink.room_bytes().filter(|room| *room < total) {
        let why = format!("{total} bytes do not fit into its {room} bytes");
        return Err(Failure::new(Cause::Unsuitable, "rescuing", why).on(&arguments.to).advise("a larger volume"));
    }
    let progress = Progress::new("rescuing", Some(ByteCount::new(total)), Show::OnTerminal);
    let chunks = (0..total.div_ceil(CHUNK_BYTES)).map(|at| at * CHUNK_BYTES);
    let mut read = stream::iter(chunks)
        .map(|offset| read_chunk(volume, offset, CHUNK_BYTES.min(total - offset)))
        .buffered(IN_FLIGHT);
    let copies: &[SuperblockCopy] = volume.facts.volume.as_ref().map_or(&[], |volume| &volume.superblocks);
    let mut report = Report {
        volume: arguments.volume.to_string(),
        to: arguments.to.to_string(),
        block_size: geometry.block_size.bytes(),
        blocks: geometry.capacity_blocks,
        blocks_rescued: geometry.capacity_blocks,
        blocks_lost: 0,
        superblock_copies: superblocks_json(copies),
        lost: Vec::new(),
        lost_unlisted: 0,
    };
    while let Some(chunk) = read.next().await {
        let Chunk { offset, data, lost } = chunk?;
        sink.write(offset, &data).await?;
        progress.advance(data.len() as u64);
        for run in lost {
            sink.lose(run.lba << geometry.block_size.shift(), run.blocks << geometry.block_size.shift()).await?;
            progress.bad(run.blocks);
            note(&mut report, run);
        }
    }
    sink.finish(total).await?;
    Ok(report)
}

/// Reads a chunk; where that fails, block by block.
async fn read_chunk(volume: &Opened, offset: u64, length: u64) -> Result<Chunk, Failure> {
    let size = volume.gate.geometry().block_size;
    let extent = Extent::from_raw(offset >> size.shift(), length >> size.shift())
        .map_err(|error| Failure::new(Cause::Usage, "rescuing", error))?;
    if let Ok(answer) = volume.read(extent).await {
        return Ok(Chunk { offset, data: data_of(answer), lost: Vec::new() });
    }
    let (mut data, mut lost) = (Buffer::zeroed(length as usize), Vec::new());
    for (place, lba) in data.chunks_exact_mut(size.bytes()).zip(extent.iter()) {
        match read_block(volume, lba).await? {
            Ok(block) => place.copy_from_slice(&block),
            Err(why) => join_run(&mut lost, Run { lba: lba.get(), blocks: 1, why }),
        }
    }
    Ok(Chunk { offset, data: data.freeze(), lost })
}

/// A block, or why it is lost.
async fn read_block(volume: &Opened, lba: Lba) -> Result<Result<Slice, String>, Failure> {
    let error = match volume.read(Extent::one(lba)).await {
        Ok(answer) => return Ok(Ok(data_of(answer))),
        Err(error) => error,
    };
    match error.failure() {
        BlockFailure::Integrity(faults) => {
            Ok(Err(faults.as_slice().first().map_or("media", |fault| fault.field.as_str()).to_owned()))
        }
        BlockFailure::Media { reason } => Ok(Err(reason.clone())),
        _ => Err(of_block("rescuing", &error)),
    }
}

fn join_run(runs: &mut Vec<Run>, more: Run) {
    match runs.last_mut() {
        Some(run) if run.lba + run.blocks == more.lba && run.why == more.why => run.blocks += more.blocks,
        _ => runs.push(more),
    }
}

fn note(report: &mut Report, run: Run) {
    report.blocks_lost += run.blocks;
    report.blocks_rescued -= run.blocks;
    let blocks = run.blocks;
    join_run(&mut report.lost, run);
    if report.lost.len() > MOST_LISTED {
        report.lost.pop();
        report.lost_unlisted += blocks;
    }
}

fn words(report: &Report) -> Vec<String> {
    let mut lines: Vec<String> = report.lost.iter().map(Run::words).collect();
    if report.lost_unlisted > 0 {
        lines.push(format!("and {} more blocks lost", report.lost_unlisted));
    }
    let state = match report.blocks_lost {
        0 => "nothing lost".to_owned(),
        lost => format!("{lost} lost"),
    };
    let (rescued, blocks) = (report.blocks_rescued, report.blocks);
    lines.push(format!("{}: {rescued} of {blocks} blocks copied to {}: {state}", report.volume, report.to));
    lines
}

impl Run {
    fn words(&self) -> String {
        match self.blocks {
            1 => format!("block {} lost: {}", self.lba, self.why),
            blocks => format!("blocks {}..{} lost: {}", self.lba, self.lba + blocks - 1, self.why),
        }
    }
}
