//! Where a copy comes from.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};

use futures_util::stream::{self, LocalBoxStream, StreamExt};
use sealblock_block::{Ability, Answer, Device, Operation, RunState};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::Extent;

use super::{CHUNK_BYTES, IN_FLIGHT};
use crate::cli::Endpoint;
use crate::exit::Failure;
use crate::stack::{Access, Opened, data_of, of_block, open};

/// A chunk of data and where it lies, in bytes from the start.
pub(super) type Chunk = Result<(u64, Slice), Failure>;

/// Where a copy comes from.
pub(super) enum Source {
    /// A device.
    Device(Box<Opened>),
    /// A run of bytes, with its length where that is known.
    Bytes { name: String, input: RefCell<Box<dyn Read>>, length: Option<u64> },
}

impl Source {
    /// Opens the place.
    pub async fn open(endpoint: &Endpoint) -> Result<Source, Failure> {
        match endpoint {
            Endpoint::Standard => Ok(Source::Bytes {
                name: "standard input".to_owned(),
                input: RefCell::new(Box::new(io::stdin())),
                length: None,
            }),
            Endpoint::Target(target) => {
                let opened = open(target, Access::Read).await?;
                match target.path() {
                    // Read as bytes, so that what lies behind the last whole block is copied too.
                    Some(path) if opened.facts.kind == "raw file" => {
                        let failed = |error| Failure::io("opening", &error).on(target);
                        let file = File::open(path).map_err(failed)?;
                        let length = file.metadata().map_err(failed)?.len();
                        let input: Box<dyn Read> = Box::new(file);
                        Ok(Source::Bytes { name: target.to_string(), input: RefCell::new(input), length: Some(length) })
                    }
                    _ => Ok(Source::Device(Box::new(opened))),
                }
            }
        }
    }

    /// How many bytes there are, where that is known.
    pub fn bytes(&self) -> Option<u64> {
        match self {
            Source::Device(opened) => Some(opened.gate.geometry().capacity_bytes()),
            Source::Bytes { length, .. } => *length,
        }
    }

    /// The data, in order, read ahead where that is possible.
    pub fn chunks(&self) -> LocalBoxStream<'_, Chunk> {
        match self {
            Source::Device(opened) => device_chunks(opened).boxed_local(),
            Source::Bytes { name, input, .. } => {
                let next = move |offset| async move {
                    let chunk =
                        next_bytes(&mut **input.borrow_mut()).map_err(|error| Failure::io("reading", &error).on(name));
                    match chunk {
                        Ok(data) if data.is_empty() => None,
                        Ok(data) => Some((Ok((offset, data.clone())), offset + data.len() as u64)),
                        Err(failure) => Some((Err(failure), offset)),
                    }
                };
                stream::unfold(0, next).boxed_local()
            }
        }
    }

    /// Closes the place.
    pub async fn close<T>(self, result: Result<T, Failure>) -> Result<T, Failure> {
        match self {
            Source::Device(opened) => opened.close(result).await,
            Source::Bytes { .. } => result,
        }
    }
}

fn device_chunks(opened: &Opened) -> impl futures_util::Stream<Item = Chunk> {
    let geometry = opened.gate.geometry();
    let shift = geometry.block_size.shift();
    let total = geometry.capacity_bytes();
    let step = CHUNK_BYTES as u64;
    let chunks = (0..total.div_ceil(step)).map(move |i| (i * step, step.min(total - i * step)));
    let tells_holes = opened.gate.abilities().allocation == Ability::Native;
    let zeroes = if tells_holes { Buffer::zeroed(CHUNK_BYTES).freeze() } else { Slice::empty() };
    stream::iter(chunks)
        .map(move |(offset, length)| {
            let zeroes = zeroes.clone();
            async move {
                let extent = Extent::from_raw(offset >> shift, length >> shift).expect("chunks lie within the device");
                if tells_holes && is_hole(opened, extent).await {
                    return Ok((offset, zeroes.slice(..length as usize)));
                }
                let answer = opened.read(extent).await.map_err(|error| of_block("reading", &error))?;
                Ok((offset, data_of(answer)))
            }
        })
        .buffered(IN_FLIGHT)
}

/// Whether the device says that there is nothing but zeroes. What it cannot say is read.
async fn is_hole(opened: &Opened, extent: Extent) -> bool {
    match opened.gate.execute(Operation::Allocation { extent }).await {
        Ok(Answer::Allocation(runs)) => runs.iter().all(|run| run.state == RunState::Hole),
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
