//! Where a copy goes, and how blocks of its source are lost there.
//!
//! A destination may have larger blocks than the source, and can lose only whole ones: what shares a block with something lost is
//! lost with it, and reported.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use sealblock_block::{Device, Durability, Medium, Request, RequestKind};
use sealblock_integrity::{Tags, Unsealed};
use sealblock_media_file::FileMedium;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_stack::kernel::leaves::{Leaf, leaves_of};
use sealblock_stack::quantity::count;
use sealblock_stack::range::Run;
use sealblock_stack::target::TargetName;
use sealblock_stack::{
    Cause, Lost, OpenTarget, Overwriting, Overwritten, StackError, TargetIdentity, Usage, device_error, file_format,
    file_start, in_groups, medium_error, overwrite, overwrite_device,
};
use sealblock_units::{BlockSize, Extent};
use serde::Serialize;

use super::source::Source;
use crate::cli::Endpoint;
use crate::exit::note_lacking;
use crate::findings::Finding;
use crate::new_file::check_new;
use crate::report::{check_output_open, note_lost_answers, output_error};

/// Refuses a closed standard output for the data, and a report where the data go.
pub(in crate::commands) fn check_output(json: bool, to: &Endpoint) -> Result<(), StackError> {
    if *to == Endpoint::Standard {
        check_output_open()?;
    }
    if json && *to == Endpoint::Standard {
        let why = "standard output cannot take both the data and the report";
        return Err(StackError::new(Cause::Usage, "copy", why).advise("give a file as TO"));
    }
    Ok(())
}

/// Refuses a destination that has bytes of the source, whatever each is called: writing it destroys what is still to be read. A writer
/// keeps others out of a file by its lock, but not a loop device that is read, nor what a shell has opened.
pub(in crate::commands) fn check_apart(doing: &str, from: &Endpoint, to: &Endpoint) -> Result<(), StackError> {
    let (read, written) = (identity_of(from), identity_of(to));
    let leaves = |identity: &Option<TargetIdentity>, standard| {
        identity.as_ref().map_or_else(|| leaves_of_stream(standard), TargetIdentity::leaves)
    };
    let (read_leaves, written_leaves) = (leaves(&read, "/dev/fd/0"), leaves(&written, "/dev/fd/1"));
    let shares_bytes = read_leaves.iter().any(|leaf| written_leaves.iter().any(|other| leaf.overlaps(other)));
    // A remote device has no bytes here, but its name may be the same.
    let is_one_remote = read.zip(written).is_some_and(|(a, b)| a.is_remote() && a.shared_with(&b).is_some());
    match shares_bytes || is_one_remote {
        true => Err(not_apart(doing, from, to, "")),
        false => Ok(()),
    }
}

/// The same for what only open targets show: one remote namespace under two names.
pub(super) fn check_open_apart(
    (from, source): (&Endpoint, &Source),
    (to, sink): (&Endpoint, &Sink),
) -> Result<(), StackError> {
    let (Source::Device(source), Sink::Device(sink)) = (source, sink) else { return Ok(()) };
    let of = |opened: &OpenTarget| opened.info.remote_devices(opened.target());
    match of(&source.opened).shared_with(&of(sink)) {
        Some(namespace) => Err(not_apart("copy", from, to, &format!(": {namespace}"))),
        None => Ok(()),
    }
}

fn not_apart(doing: &str, from: &Endpoint, to: &Endpoint, more: &str) -> StackError {
    let (from, to) = (name_of(from, "standard input"), name_of(to, "standard output"));
    let why = format!("{to} and {from} are the same device or file{more}");
    StackError::new(Cause::Refused, doing, why).advise("give two different targets")
}

fn identity_of(endpoint: &Endpoint) -> Option<TargetIdentity> {
    match endpoint {
        Endpoint::Target(target) => Some(TargetIdentity::of(target)),
        Endpoint::Standard => None,
    }
}

/// The file or device that a shell has opened as a standard stream, if it is one.
fn leaves_of_stream(standard: &str) -> Vec<Leaf> {
    let about = fs::metadata(standard).ok();
    let about = about.filter(|about| about.is_file() || about.file_type().is_block_device());
    about.and_then(|about| leaves_of(&about).ok()).unwrap_or_default()
}

fn name_of(endpoint: &Endpoint, standard: &str) -> String {
    match endpoint {
        Endpoint::Standard => standard.to_owned(),
        Endpoint::Target(target) => target.to_string(),
    }
}

/// Zeroes of so many bytes, in their place, are left out of a plain file: a page of common file systems.
const HOLE_BYTES: usize = 4096;

/// Zeroes written at once, where a hole has to be written.
const ZEROES_BYTES: u64 = 1 << 20;

/// Where a copy goes.
pub(in crate::commands) enum Sink {
    /// A device, which keeps its size.
    Device(Box<OpenTarget>),
    /// A plain file, which gets the length of what is copied. It is empty in the beginning, so zeroes need not be written.
    Plain { name: String, medium: FileMedium },
    /// Standard output.
    Output(RefCell<io::Stdout>),
    /// `/dev/null`: whatever is written is gone, and nothing is written.
    Null,
}

/// What becomes of blocks that could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::commands) enum Losing {
    /// They cannot be read there either.
    Unreadable,
    /// They are not written and keep their old content: the device seals, or may seal, all data, so zeroes would pass for data.
    Unwritten,
    /// They are zeroes: the destination has no seals that would vouch for them.
    Zeroes,
    /// Nothing is kept there, neither them nor others.
    Discarded,
}

/// What a command may overwrite that copies `source` to `to`. The source is only asked for its format where the destination has one.
pub(in crate::commands) async fn overwriting(force: bool, source: &Source, to: &Endpoint) -> Overwriting {
    let paths = match to {
        Endpoint::Target(target) => target.paths(),
        Endpoint::Standard => Vec::new(),
    };
    let format = |path: &Path| file_format(&file_start(path).ok()?);
    let there = paths.into_iter().filter(|path| path.is_file()).find_map(format);
    match (force, there) {
        (true, _) => Overwriting::Anything,
        (false, None) => Overwriting::Free { format: None },
        (false, Some(_)) => Overwriting::Free { format: source.format().await },
    }
}

impl Sink {
    fn device(opened: Box<OpenTarget>) -> Sink {
        note_lost_answers(&opened);
        Sink::Device(opened)
    }

    /// Opens the place; a path where nothing is becomes a plain file.
    ///
    /// # Errors
    /// Why it cannot be opened; what is there is overwritten as `overwriting` says, a member of a group as `usage` says.
    pub async fn open(endpoint: &Endpoint, overwriting: Overwriting, usage: Usage) -> Result<Sink, StackError> {
        let target = match endpoint {
            Endpoint::Standard => return Ok(Sink::Output(RefCell::new(io::stdout()))),
            Endpoint::Target(target) => target,
        };
        let path = match target {
            TargetName::File(path) | TargetName::Raw(path) | TargetName::Linux { path, .. } => path,
            _ => return Ok(Sink::device(Box::new(overwrite_device(target, overwriting, usage).await?))),
        };
        let is_file = matches!(target, TargetName::File(_) | TargetName::Raw(_));
        if is_file && is_null(path) {
            return Ok(Sink::Null);
        }
        if is_file && !path.exists() {
            check_new(path).map_err(|failure| failure.on(target))?;
            // As a new volume: whoever may not read the source shall not read the copy.
            let made = File::options().write(true).create(true).truncate(false).mode(0o600).open(path);
            made.map_err(|error| StackError::at_path("create", &error, path))?;
        }
        match overwrite(target, path, overwriting, usage).await? {
            Overwritten::Device(opened) => Ok(Sink::device(opened)),
            Overwritten::Plain(medium) => {
                let name = target.to_string();
                medium.end_at(0).map_err(|error| medium_error("write", &error).on(&name))?;
                Ok(Sink::Plain { name, medium })
            }
        }
    }

    /// How many bytes fit, where there is a limit.
    pub fn room_bytes(&self) -> Option<u64> {
        match self {
            Sink::Device(opened) => Some(opened.device.geometry().capacity_bytes()),
            Sink::Plain { .. } | Sink::Output(_) | Sink::Null => None,
        }
    }

    /// Refuses a destination that is too small for this many bytes.
    pub fn check_room(&self, doing: &str, to: &Endpoint, bytes: u64) -> Result<(), StackError> {
        let Some(room) = self.room_bytes().filter(|room| *room < bytes) else { return Ok(()) };
        let why = format!("{} do not fit into its {}", count(bytes, "byte"), count(room, "byte"));
        Err(StackError::new(Cause::Unsuitable, doing, why).on(to).advise("use a larger volume"))
    }

    /// Whether chunks must come one after another.
    pub fn in_order(&self) -> bool {
        matches!(self, Sink::Output(_))
    }

    /// Writes a chunk. Its offset begins a block of any size, and only that of the last one may end within a block. Gives how
    /// many bytes were written, and not left out as zeroes.
    pub async fn write(&self, offset: u64, data: &Slice) -> Result<u64, StackError> {
        match self {
            Sink::Device(opened) => write_blocks(opened, offset, data).await,
            Sink::Plain { name, medium } => write_plain(medium, offset, data).await.map_err(|error| error.on(name)),
            Sink::Output(output) => {
                output.borrow_mut().write_all(data).map_err(|error| output_error(&error))?;
                Ok(data.len() as u64)
            }
            Sink::Null => Ok(0),
        }
    }

    /// Writes so many zeroes, as [`Sink::write`] would, without looking at each of them.
    pub async fn write_hole(&self, offset: u64, length: u64) -> Result<u64, StackError> {
        match self {
            Sink::Device(opened) if unmaps_zeroes(opened) => {
                unmap_blocks(opened, offset, length).await?;
                return Ok(0);
            }
            // The file was empty, and gets its length in the end.
            Sink::Plain { .. } | Sink::Null => return Ok(0),
            Sink::Device(_) | Sink::Output(_) => {}
        }
        let zeroes = Buffer::zeroed(length.min(ZEROES_BYTES) as usize).freeze();
        let mut written = 0;
        for at in (0..length).step_by(ZEROES_BYTES as usize) {
            let part = zeroes.slice(..ZEROES_BYTES.min(length - at) as usize);
            written += self.write(offset + at, &part).await?;
        }
        Ok(written)
    }

    /// What becomes of bytes that could not be read.
    pub fn losing(&self) -> Losing {
        let opened = match self {
            Sink::Device(opened) => opened,
            Sink::Null => return Losing::Discarded,
            Sink::Plain { .. } | Sink::Output(_) => return Losing::Zeroes,
        };
        let abilities = opened.device.abilities();
        let is_remote = opened.received_bytes().is_some();
        let has_seals = abilities.seals || is_remote || opened.device.geometry().protection.is_some();
        match abilities.is_native(RequestKind::WriteUncorrectable) {
            true => Losing::Unreadable,
            false if has_seals => Losing::Unwritten,
            false => Losing::Zeroes,
        }
    }

    /// Bytes that can only be lost together.
    pub fn losing_bytes(&self) -> u64 {
        match (self, self.losing()) {
            (Sink::Device(opened), Losing::Unreadable | Losing::Unwritten) => {
                opened.device.geometry().block_size.bytes() as u64
            }
            _ => 1,
        }
    }

    /// Writes a chunk of which runs of bytes are lost: ranges from the start of all data, each of [`Sink::losing_bytes`] or
    /// a multiple. They are never written as if they were data that was read, where anything makes a seal for it.
    pub async fn write_around(&self, offset: u64, data: &Slice, lost: &[Range<u64>]) -> Result<u64, StackError> {
        if matches!(self.losing(), Losing::Zeroes | Losing::Discarded) {
            return self.write(offset, data).await;
        }
        let (mut at, mut written) = (offset, 0);
        let end = offset + data.len() as u64;
        for gap in lost.iter().cloned().chain(std::iter::once(end..end)) {
            if gap.start > at {
                let good = data.slice((at - offset) as usize..(gap.start - offset) as usize);
                written += self.write(at, &good).await?;
            }
            self.lose(&gap).await?;
            at = gap.end;
        }
        Ok(written)
    }

    /// Makes bytes unreadable where the device can.
    async fn lose(&self, gap: &Range<u64>) -> Result<(), StackError> {
        let (Sink::Device(opened), Losing::Unreadable, false) = (self, self.losing(), gap.is_empty()) else {
            return Ok(());
        };
        let extent = extent_of(opened, gap.start, gap.end - gap.start)?;
        opened.device.execute(Request::mark_lost(extent)).await.map(drop).map_err(|error| device_error("write", &error))
    }

    /// Makes everything durable, and a plain file end behind `bytes`.
    pub async fn finish(&self, bytes: u64) -> Result<(), StackError> {
        match self {
            Sink::Device(opened) => opened.flush().await,
            Sink::Plain { name, medium } => {
                let failed = |error| medium_error("write", &error).on(name);
                medium.end_at(bytes).map_err(failed)?;
                medium.sync().await.map_err(failed)
            }
            Sink::Output(output) => output.borrow_mut().flush().map_err(|error| output_error(&error)),
            Sink::Null => Ok(()),
        }
    }

    /// True if a replica of a mirror lacks the written data, which this reports.
    pub fn note_lacking(&self) -> bool {
        matches!(self, Sink::Device(opened) if note_lacking(opened))
    }

    /// Closes the place.
    pub async fn close<T>(self, result: Result<T, StackError>) -> Result<T, StackError> {
        match self {
            Sink::Device(opened) => opened.close(result).await,
            Sink::Plain { .. } | Sink::Output(_) | Sink::Null => result,
        }
    }
}

/// How blocks of a source are lost in a destination.
pub(in crate::commands) struct Losses {
    block_size: BlockSize,
    /// Blocks of the source that can only be lost together.
    group: u64,
    /// Blocks of the source, the last of which may be cut short.
    blocks: u64,
}

impl Losses {
    /// From a source with these blocks and this length, where it is known.
    pub fn new(sink: &Sink, block_size: BlockSize, bytes: Option<u64>) -> Losses {
        let group = (sink.losing_bytes() >> block_size.shift()).max(1);
        Losses { block_size, group, blocks: bytes.map_or(u64::MAX, |bytes| bytes.div_ceil(block_size.bytes() as u64)) }
    }

    /// The blocks of the source.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Runs with all that is lost with them.
    pub fn widened(&self, lost: Vec<Run<Lost>>) -> Vec<Run<Lost>> {
        in_groups(lost, self.group, self.blocks)
    }
}

/// The bytes of runs, as far as `end`.
pub(in crate::commands) fn byte_ranges(lost: &[Run<Lost>], size: BlockSize, end: u64) -> Vec<Range<u64>> {
    lost.iter().map(|run| run.lba << size.shift()..(run.end() << size.shift()).min(end)).collect()
}

impl Losing {
    /// What is to be said of such blocks in the destination.
    pub fn to_text(self) -> &'static str {
        match self {
            Losing::Unreadable => "they are unreadable there, too",
            Losing::Unwritten => "they were not written and keep their old content",
            Losing::Zeroes => "they are zeroes",
            Losing::Discarded => "nothing is kept",
        }
    }
}

impl Finding for Lost {
    fn line(run: &Run<Lost>) -> String {
        format!("{} lost: {}", run.place(), run.what.why)
    }
}

/// Whether a path is `/dev/null`, by any name: it is the device that counts. Other character devices are no destination.
fn is_null(path: &Path) -> bool {
    let about = fs::metadata(path).ok().filter(|about| about.file_type().is_char_device());
    let null = fs::metadata("/dev/null").ok();
    about.zip(null).is_some_and(|(about, null)| about.rdev() == null.rdev())
}

/// Writes what is not zeroes; the rest of the last sector is, until the file's end is set. Gives how much that is.
async fn write_plain(medium: &FileMedium, offset: u64, data: &Slice) -> Result<u64, StackError> {
    let failed = |error| medium_error("write", &error);
    let data = padded(data, data.len().next_multiple_of(medium.sector_bytes() as usize));
    let end = offset + data.len() as u64;
    if end > medium.len_bytes() {
        medium.set_len_bytes(end).map_err(failed)?;
    }
    let mut written = 0;
    let mut pages = data.chunks(HOLE_BYTES).enumerate().peekable();
    while let Some((first, page)) = pages.next() {
        if is_zero(page) {
            continue;
        }
        let (from, mut to) = (first * HOLE_BYTES, first * HOLE_BYTES + page.len());
        while let Some((_, page)) = pages.next_if(|(_, page)| !is_zero(page)) {
            to += page.len();
        }
        medium.write(offset + from as u64, data.slice(from..to)).await.map_err(failed)?;
        written += (to - from) as u64;
    }
    Ok(written)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |seen, byte| seen | byte) == 0
}

/// The blocks of a device that these bytes are, the last one as a whole.
fn extent_of(opened: &OpenTarget, offset: u64, length: u64) -> Result<Extent, StackError> {
    let geometry = opened.device.geometry();
    let blocks = length.div_ceil(geometry.block_size.bytes() as u64);
    let extent = Extent::from_raw(offset >> geometry.block_size.shift(), blocks).ok();
    extent.filter(|extent| extent.fits(geometry.capacity_blocks)).ok_or_else(|| full(opened))
}

/// Whether a device has zeroes without having them written.
fn unmaps_zeroes(opened: &OpenTarget) -> bool {
    let abilities = opened.device.abilities();
    abilities.unmap_zeroes || abilities.is_native(RequestKind::WriteZeroes)
}

async fn unmap_blocks(opened: &OpenTarget, offset: u64, length: u64) -> Result<(), StackError> {
    let operation = Request::write_zeroes(extent_of(opened, offset, length)?, true, Durability::Volatile);
    opened.device.execute(operation).await.map(drop).map_err(|error| device_error("write", &error))
}

async fn write_blocks(opened: &OpenTarget, offset: u64, data: &Slice) -> Result<u64, StackError> {
    if unmaps_zeroes(opened) && is_zero(data) {
        unmap_blocks(opened, offset, data.len() as u64).await?;
        return Ok(0);
    }
    let geometry = opened.device.geometry();
    let extent = extent_of(opened, offset, data.len() as u64)?;
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
    let whole = data.len().next_multiple_of(geometry.block_size.bytes());
    let unsealed = Unsealed::new(padded(data, whole), geometry.block_size, geometry.protection, tags);
    let operation = Request::write(extent, unsealed, Durability::Volatile);
    opened.device.execute(operation).await.map_err(|error| device_error("write", &error))?;
    Ok(data.len() as u64)
}

fn full(opened: &OpenTarget) -> StackError {
    let room = opened.device.geometry().capacity_bytes();
    StackError::new(Cause::Unsuitable, "write", format!("the data do not fit into its {room} bytes"))
        .on(opened.target())
        .advise("use a larger volume")
}

/// The data with zeroes behind them up to `length`.
fn padded(data: &Slice, length: usize) -> Slice {
    if data.len() == length {
        return data.clone();
    }
    let mut whole = Buffer::zeroed(length);
    whole[..data.len()].copy_from_slice(data);
    whole.freeze()
}
