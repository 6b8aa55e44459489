//! Where a copy comes from.

use std::cell::RefCell;
use std::io::{self, Read};

use futures_util::future::ready;
use futures_util::stream::{self, LocalBoxStream, StreamExt};
use sealblock_block::{Ability, BlockState, Device, Request, Response, WhyOlder};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_stack::range::Run;
use sealblock_stack::{Access, FORMAT_BYTES, Lost, OpenTarget, Salvaged, StackError, Whole, file_format};
use sealblock_units::{BlockSize, Extent};

use crate::cli::Endpoint;
use crate::interrupt;
use crate::report::note_older;

/// Bytes read and written at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Chunks in flight at once, on either side.
pub(super) const IN_FLIGHT: usize = 8;

/// A chunk of data.
pub(in crate::commands) struct Chunk {
    /// Where it lies, in bytes from the start.
    pub offset: u64,
    /// The data; zeroes where they could not be read.
    pub data: Slice,
    /// Bytes that were read for it: none for a hole.
    pub read: u64,
    /// Blocks of the source that could not be read.
    pub lost: Vec<Run<Lost>>,
}

/// How a source is read.
#[derive(Clone, Copy)]
pub(in crate::commands) struct Reading {
    /// What is being done, for errors.
    pub doing: &'static str,
    /// Whether it goes on past blocks that cannot be read.
    pub past_damage: bool,
    /// Whether the device is asked for holes, which need not be read.
    pub asks_for_holes: bool,
}

/// Where a copy comes from.
pub(in crate::commands) enum Source {
    /// A device, or a plain file to its last byte.
    Device(Box<Whole>),
    /// Standard input.
    Input(RefCell<io::Stdin>),
}

impl Source {
    /// Opens the place.
    pub async fn open(endpoint: &Endpoint) -> Result<Source, StackError> {
        match endpoint {
            Endpoint::Standard => Ok(Source::Input(RefCell::new(io::stdin()))),
            Endpoint::Target(target) => Ok(Source::Device(Box::new(Whole::open(target, Access::ReadOlder).await?))),
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

    /// Copies of metadata that were found lost so far, and records of other volumes, as text.
    pub fn lost_metadata(&self) -> Vec<String> {
        match self {
            Source::Device(whole) => {
                let info = &whole.opened.info;
                [info.lost_superblocks(), info.lost_copies()].concat()
            }
            Source::Input(_) => Vec::new(),
        }
    }

    /// The format of its data, where that is known and can be read.
    pub async fn format(&self) -> Option<&'static str> {
        let Source::Device(whole) = self else { return None };
        let start = whole.read("reading", 0, whole.len_bytes().min(FORMAT_BYTES as u64)).await.ok()?;
        file_format(&start)
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
                    let chunk = next_bytes(&mut *input.borrow_mut())
                        .map_err(|error| StackError::io("reading", &error).on("standard input"));
                    match chunk {
                        Ok(data) if data.is_empty() => None,
                        Ok(data) => {
                            let read = data.len() as u64;
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

fn device_chunks(whole: &Whole, reading: Reading) -> impl futures_util::Stream<Item = Result<Chunk, StackError>> {
    let total = whole.len_bytes();
    let step = CHUNK_BYTES as u64;
    let chunks = (0..total.div_ceil(step)).map(move |i| (i * step, step.min(total - i * step)));
    let tells_holes = reading.asks_for_holes && whole.opened.device.abilities().block_status == Ability::Native;
    let zeroes = if tells_holes { Buffer::zeroed(CHUNK_BYTES).freeze() } else { Slice::empty() };
    stream::iter(chunks)
        .take_while(|_| ready(!interrupt::came()))
        .map(move |(offset, length)| {
            let zeroes = zeroes.clone();
            async move {
                if tells_holes && is_hole(&whole.opened, offset, length).await {
                    let data = zeroes.slice(..length as usize);
                    return Ok(Chunk { offset, data, read: 0, lost: Vec::new() });
                }
                if reading.past_damage {
                    let Salvaged { data, lost } = whole.read_past_damage(reading.doing, offset, length).await?;
                    return Ok(Chunk { offset, data, read: length, lost });
                }
                let data = whole.read(reading.doing, offset, length).await?;
                Ok(Chunk { offset, data, read: length, lost: Vec::new() })
            }
        })
        .buffered(IN_FLIGHT)
}

/// Whether the device says that there is nothing but zeroes. What it cannot say, or what ends within a block, is read.
async fn is_hole(opened: &OpenTarget, offset: u64, length: u64) -> bool {
    let (shift, end) = (opened.device.geometry().block_size.shift(), opened.device.geometry().capacity_bytes());
    if offset + length > end {
        return false;
    }
    let Ok(extent) = Extent::from_raw(offset >> shift, length >> shift) else { return false };
    match opened.device.execute(Request::block_status(extent)).await {
        Ok(Response::BlockStatus(runs)) => runs.iter().all(|run| run.state == BlockState::Hole),
        _ => false,
    }
}

/// The next bytes: a full chunk, unless the input ends.
fn next_bytes(input: &mut dyn Read) -> io::Result<Slice> {
    let mut buffer = Buffer::zeroed(CHUNK_BYTES);
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    buffer.truncate(filled);
    Ok(buffer.freeze())
}
