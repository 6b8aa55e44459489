//! Where a copy goes.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use sealblock_block::{Device, Durability, Operation};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::Extent;

use crate::cli::Endpoint;
use crate::exit::{Cause, Failure};
use crate::stack::{Access, Opened, of_block, open};

/// Where a copy goes.
pub(super) enum Sink {
    /// A device.
    Device(Box<Opened>),
    /// Bytes one after another, and the file to be made durable at the end.
    Bytes { name: String, output: RefCell<Box<dyn Write>>, file: Option<File> },
}

impl Sink {
    /// Opens the place; a path where nothing is, or an empty file, becomes an ordinary file with the bytes.
    pub async fn open(endpoint: &Endpoint) -> Result<Sink, Failure> {
        match endpoint {
            Endpoint::Standard => Ok(Sink::Bytes {
                name: "standard output".to_owned(),
                output: RefCell::new(Box::new(io::stdout())),
                file: None,
            }),
            Endpoint::Target(target) => match target.path().filter(|path| is_new(path)) {
                Some(path) => {
                    let failed = |error| Failure::io("creating", &error).on(target);
                    let file = File::create(path).map_err(failed)?;
                    let output: Box<dyn Write> = Box::new(file.try_clone().map_err(failed)?);
                    Ok(Sink::Bytes { name: target.to_string(), output: RefCell::new(output), file: Some(file) })
                }
                None => Ok(Sink::Device(Box::new(open(target, Access::Write).await?))),
            },
        }
    }

    /// How many bytes fit, where there is a limit.
    pub fn room_bytes(&self) -> Option<u64> {
        match self {
            Sink::Device(opened) => Some(opened.gate.geometry().capacity_bytes()),
            Sink::Bytes { .. } => None,
        }
    }

    /// Whether chunks must come one after another.
    pub fn in_order(&self) -> bool {
        matches!(self, Sink::Bytes { .. })
    }

    /// Writes a chunk.
    pub async fn write(&self, offset: u64, data: &Slice) -> Result<(), Failure> {
        match self {
            Sink::Device(opened) => write_blocks(opened, offset, data).await,
            Sink::Bytes { name, output, .. } => {
                output.borrow_mut().write_all(data).map_err(|error| Failure::io("writing", &error).on(name))
            }
        }
    }

    /// Makes everything durable.
    pub async fn finish(&self) -> Result<(), Failure> {
        match self {
            Sink::Device(opened) => opened.flush().await,
            Sink::Bytes { name, output, file } => {
                let synced = output.borrow_mut().flush().and_then(|()| file.as_ref().map_or(Ok(()), File::sync_all));
                synced.map_err(|error| Failure::io("writing", &error).on(name))
            }
        }
    }

    /// Closes the place.
    pub async fn close<T>(self, result: Result<T, Failure>) -> Result<T, Failure> {
        match self {
            Sink::Device(opened) => opened.close(result).await,
            Sink::Bytes { .. } => result,
        }
    }
}

/// Whether nothing is at a path yet.
fn is_new(path: &Path) -> bool {
    match std::fs::metadata(path) {
        Ok(known) => known.is_file() && known.len() == 0,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

async fn write_blocks(opened: &Opened, offset: u64, data: &Slice) -> Result<(), Failure> {
    let geometry = opened.gate.geometry();
    let size = geometry.block_size;
    let whole = data.len().next_multiple_of(size.bytes());
    let blocks = (whole >> size.shift()) as u64;
    let start = offset >> size.shift();
    let extent = Extent::from_raw(start, blocks)
        .ok()
        .filter(|extent| extent.fits(geometry.capacity_blocks))
        .ok_or_else(|| full(opened))?;
    let operation = if opened.gate.abilities().unmap_zeroes && data.iter().fold(0, |seen, byte| seen | byte) == 0 {
        Operation::WriteZeroes { extent, may_unmap: true, durability: Durability::Volatile }
    } else {
        let tags = Tags { app_tag: 0, storage_tag: 0, first_ref: start };
        let data = Sealed::seal(padded(data, whole), size, geometry.protection, &tags);
        Operation::Write { extent, data, durability: Durability::Volatile }
    };
    opened.gate.execute(operation).await.map(drop).map_err(|error| of_block("writing", &error))
}

fn full(opened: &Opened) -> Failure {
    let room = opened.gate.geometry().capacity_bytes();
    Failure::new(Cause::Unsuitable, "writing", format!("the data do not fit into its {room} bytes"))
        .on(opened.target())
        .advise("a larger volume")
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
