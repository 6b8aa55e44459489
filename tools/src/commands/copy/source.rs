//! Where a copy comes from.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::AsFd;

use futures_util::future::ready;
use futures_util::stream::{self, LocalBoxStream, StreamExt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sealblock_block::{BlockState, Device, Request, RequestKind, Response, StatusRun, WhyOlder};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{StandardStream, was_closed_at_start};
use sealblock_stack::range::Run;
use sealblock_stack::{
    Access, ByteView, Cause, FORMAT_BYTES, Lost, OpenTarget, Salvaged, StackError, file_format, known_content,
};
use sealblock_units::{BlockSize, Extent};

use crate::cli::Endpoint;
use crate::interrupt;
use crate::report::note_older;

const READ_INPUT: &str = "read standard input";
/// Bytes read and written at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Chunks in flight at once, on either side.
pub(super) const IN_FLIGHT: usize = 8;
/// Bytes of which a device is asked for the holes at once, and the longest hole that is one chunk. Where a large device was never written, the
/// number of requests decides how long its copy takes.
const STRETCH_BYTES: u64 = 256 << 20;
/// Stretches that a device is asked about at once.
const STRETCHES_IN_FLIGHT: usize = 2;

/// A chunk of data.
pub(in crate::commands) struct Chunk {
    /// Where it lies, in bytes from the start.
    pub offset: u64,
    /// The data.
    pub data: ChunkData,
    /// Bytes that were read for it: none for a hole.
    pub read: u64,
    /// Blocks of the source that could not be read.
    pub lost: Vec<Run<Lost>>,
}

/// The data of a chunk.
pub(in crate::commands) enum ChunkData {
    /// Bytes that were read; zeroes where they could not be read.
    Bytes(Slice),
    /// So many zeroes, which were not read.
    Hole(u64),
}

impl ChunkData {
    /// Number of bytes.
    pub fn len_bytes(&self) -> u64 {
        match self {
            ChunkData::Bytes(data) => data.len() as u64,
            ChunkData::Hole(bytes) => *bytes,
        }
    }
}

/// How a source is read.
#[derive(Clone, Copy)]
pub(in crate::commands) struct Reading {
    /// What is being done, for errors.
    pub doing: &'static str,
    /// Whether unreadable blocks are skipped.
    pub past_damage: bool,
    /// Whether the device is asked for holes, which need not be read.
    pub asks_for_holes: bool,
}

/// Where a copy comes from.
pub(in crate::commands) enum Source {
    /// A device, or a plain file to its last byte.
    Device(Box<ByteView>),
    /// Standard input.
    Input(Input),
}

impl Source {
    /// Opens the place, `past_damage` to lose as little as possible of it.
    pub async fn open(endpoint: &Endpoint, past_damage: bool) -> Result<Source, StackError> {
        match endpoint {
            Endpoint::Standard => Input::open().map(Source::Input),
            Endpoint::Target(target) => {
                let open = if past_damage { ByteView::open_past_damage } else { ByteView::open };
                Ok(Source::Device(Box::new(open(target, Access::ReadOlder).await?)))
            }
        }
    }

    /// Why what is read may be older than what was written there, if so.
    pub fn older(&self) -> Option<&'static str> {
        match self {
            Source::Device(whole) => whole.opened.why_older().map(WhyOlder::as_str),
            Source::Input(_) => None,
        }
    }

    /// Says on standard error that what is read may be older than what was written there, if so.
    pub fn note_older(&self) {
        if let Source::Device(whole) = self {
            note_older(&whole.opened);
        }
    }

    /// How many bytes there are, where that is known.
    pub fn bytes(&self) -> Option<u64> {
        match self {
            Source::Device(whole) => Some(whole.len_bytes()),
            Source::Input(_) => None,
        }
    }

    /// Whether a signal has come before all bytes were read, of which `total` are copied.
    pub fn is_interrupted(&self, total: u64) -> bool {
        let has_rest = match self {
            Source::Device(whole) => total < whole.len_bytes(),
            Source::Input(input) => !input.has_ended.get(),
        };
        interrupt::came() && has_rest
    }

    /// Copies of metadata that were found lost so far, and records of other volumes, as text.
    pub fn lost_metadata(&self) -> Vec<String> {
        match self {
            Source::Device(whole) => {
                let info = &whole.opened.info;
                [info.lost_metadata().superblocks(), info.lost_metadata().copies()].concat()
            }
            Source::Input(_) => Vec::new(),
        }
    }

    /// The format of its data, where that is known and can be read.
    pub async fn format(&self) -> Option<&'static str> {
        let Source::Device(whole) = self else { return None };
        let start = whole.read("read", 0, whole.len_bytes().min(FORMAT_BYTES as u64)).await.ok()?;
        file_format(&start)
    }

    /// Whether it holds something known: a destination with a copy of it is only overwritten by force.
    pub async fn is_known(&self) -> bool {
        let Source::Device(whole) = self else { return false };
        self.format().await.is_some() || known_content(&whole.opened).await.is_some()
    }

    /// Bytes in a block of it.
    pub fn block_size(&self) -> BlockSize {
        match self {
            Source::Device(whole) => whole.opened.device.geometry().block_size,
            Source::Input(_) => BlockSize::B512,
        }
    }

    /// The data, in order, read ahead where that is possible, until a signal comes.
    pub fn chunks(&self, reading: Reading) -> LocalBoxStream<'_, Result<Chunk, StackError>> {
        match self {
            Source::Device(whole) => device_chunks(whole, reading).boxed_local(),
            Source::Input(input) => {
                let next = move |offset| async move {
                    let chunk = input.next_bytes().map_err(|error| StackError::io(READ_INPUT, &error));
                    match chunk {
                        Ok(data) if data.is_empty() => None,
                        Ok(data) => {
                            let read = data.len() as u64;
                            let data = ChunkData::Bytes(data);
                            Some((Ok(Chunk { offset, data, read, lost: Vec::new() }), offset + read))
                        }
                        Err(failure) => Some((Err(failure), offset)),
                    }
                };
                stream::unfold(0, next).boxed_local()
            }
        }
    }

    /// Closes the place.
    pub async fn close<T>(self, result: Result<T, StackError>) -> Result<T, StackError> {
        match self {
            Source::Device(whole) => whole.close(result).await,
            Source::Input(_) => result,
        }
    }
}

/// A part of a stretch: what is read at once, or a hole.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Piece {
    Data(Range<u64>),
    Hole(Range<u64>),
}

fn device_chunks(whole: &ByteView, reading: Reading) -> impl futures_util::Stream<Item = Result<Chunk, StackError>> {
    let total = whole.len_bytes();
    let stretches = (0..total).step_by(STRETCH_BYTES as usize).map(move |at| at..total.min(at + STRETCH_BYTES));
    let tells_holes = reading.asks_for_holes && whole.opened.device.abilities().is_native(RequestKind::BlockStatus);
    stream::iter(stretches)
        .take_while(|_| ready(!interrupt::came()))
        .map(move |stretch| async move {
            let holes = if tells_holes { holes(&whole.opened, &stretch).await } else { Vec::new() };
            stream::iter(pieces(stretch, &holes))
        })
        .buffered(STRETCHES_IN_FLIGHT)
        .flatten()
        .take_while(|_| ready(!interrupt::came()))
        .map(move |piece| read(whole, reading, piece))
        .buffered(IN_FLIGHT)
}

async fn read(whole: &ByteView, reading: Reading, piece: Piece) -> Result<Chunk, StackError> {
    let place = match piece {
        Piece::Data(place) => place,
        Piece::Hole(place) => {
            let data = ChunkData::Hole(place.end - place.start);
            return Ok(Chunk { offset: place.start, data, read: 0, lost: Vec::new() });
        }
    };
    let (offset, length) = (place.start, place.end - place.start);
    let (data, lost) = if reading.past_damage {
        let Salvaged { data, lost } = whole.read_past_damage(reading.doing, offset, length).await?;
        (data, lost)
    } else {
        (whole.read(reading.doing, offset, length).await?, Vec::new())
    };
    Ok(Chunk { offset, data: ChunkData::Bytes(data), read: length, lost })
}

/// Where the device reports zeroes, in order. Ranges with an unknown status, or that end within a block, are read.
async fn holes(opened: &OpenTarget, stretch: &Range<u64>) -> Vec<Range<u64>> {
    let geometry = opened.device.geometry();
    let shift = geometry.block_size.shift();
    let blocks = (stretch.end.min(geometry.capacity_bytes()) >> shift).saturating_sub(stretch.start >> shift);
    let Ok(extent) = Extent::from_raw(stretch.start >> shift, blocks) else { return Vec::new() };
    let Ok(Response::BlockStatus(runs)) = opened.device.execute(Request::block_status(extent)).await else {
        return Vec::new();
    };
    let mut at = stretch.start;
    let mut place = |run: &StatusRun| {
        let start = at;
        at += u64::from(run.blocks.get()) << shift;
        (run.state == BlockState::Hole).then_some(start..at)
    };
    runs.iter().filter_map(&mut place).collect()
}

/// A stretch, in order, in chunks that begin at multiples of their size. Of a hole only whole chunks are one.
fn pieces(stretch: Range<u64>, holes: &[Range<u64>]) -> Vec<Piece> {
    const STEP: u64 = CHUNK_BYTES as u64;
    let (mut pieces, mut at) = (Vec::new(), stretch.start);
    let data = |place: Range<u64>| {
        let end = place.end;
        place.step_by(CHUNK_BYTES).map(move |start| Piece::Data(start..end.min(start + STEP)))
    };
    for hole in holes {
        let start = hole.start.next_multiple_of(STEP);
        let end = if hole.end == stretch.end { hole.end } else { hole.end - hole.end % STEP };
        if start < end {
            pieces.extend(data(at..start));
            pieces.push(Piece::Hole(start..end));
            at = end;
        }
    }
    pieces.extend(data(at..stretch.end));
    pieces
}

/// Standard input. Without a buffer of its own: what it holds would not show in a poll.
pub(in crate::commands) struct Input {
    stream: RefCell<File>,
    /// Whether all of it was read.
    has_ended: Cell<bool>,
}

impl Input {
    fn open() -> Result<Input, StackError> {
        if was_closed_at_start(StandardStream::Input) {
            let failure = StackError::new(Cause::Io, READ_INPUT, "it is closed");
            return Err(failure.advise("redirect standard input from a file or a pipe"));
        }
        let stream = io::stdin().as_fd().try_clone_to_owned().map_err(|error| StackError::io(READ_INPUT, &error))?;
        Ok(Input { stream: RefCell::new(stream.into()), has_ended: Cell::new(false) })
    }

    /// The next bytes: a full chunk, unless the input ends or a signal comes.
    fn next_bytes(&self) -> io::Result<Slice> {
        let mut stream = self.stream.borrow_mut();
        let mut buffer = Buffer::zeroed(CHUNK_BYTES);
        let mut filled = 0;
        while filled < buffer.len() && !interrupt::came() {
            if !is_readable(&stream)? {
                continue;
            }
            match stream.read(&mut buffer[filled..]) {
                // A signal to a pipeline ends what wrote into the pipe, too.
                Ok(0) => {
                    self.has_ended.set(!interrupt::came());
                    break;
                }
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        buffer.truncate(filled);
        Ok(buffer.freeze())
    }
}

/// Waits a short time for bytes or the end. A read would go on waiting after a signal.
fn is_readable(stream: &File) -> io::Result<bool> {
    let wait = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    let mut streams = [PollFd::new(stream, PollFlags::IN)];
    match poll(&mut streams, Some(&wait)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    #[test]
    fn a_hole_is_one_piece_as_far_as_it_has_whole_chunks() {
        const MIB: u64 = 1 << 20;
        let data = |start, end| Piece::Data(start..end);
        let with = |stretch, hole: Range<u64>| pieces(stretch, slice::from_ref(&hole));
        for end in [5 * MIB, 2 * MIB + 7] {
            assert_eq!(with(0..end, 0..end), [Piece::Hole(0..end)], "the end of all, too");
        }
        assert_eq!(with(0..2 * MIB, 4096..2 * MIB - 4096), [data(0, MIB), data(MIB, 2 * MIB)]);
        let (start, end) = (8 * MIB, 12 * MIB + 512);
        let found = pieces(start..end, &[8 * MIB + 512..10 * MIB + 512, 11 * MIB..12 * MIB]);
        let hole = |start, end| Piece::Hole(start..end);
        let wanted = [
            data(8 * MIB, 9 * MIB),
            hole(9 * MIB, 10 * MIB),
            data(10 * MIB, 11 * MIB),
            hole(11 * MIB, 12 * MIB),
            data(12 * MIB, end),
        ];
        assert_eq!(found, wanted);
    }
}
