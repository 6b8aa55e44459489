//! Checks of a request before its device gets it.

use sealblock_integrity::PiFormat;
use sealblock_units::{BlockCount, BlockSize, Extent};

use crate::{
    Abilities, Ability, Durability, Error, ErrorKind, Geometry, Limits, Operation, Request, RequestKind, WriteData,
};

/// Adds the device's name to an error and traces it. Requests without errors do not pay for it.
#[cold]
pub(super) fn named(name: &str, kind: RequestKind, error: Error) -> Error {
    let error = error.with_device(name);
    tracing::debug!(device = %name, request = kind.name(), %error, "request failed");
    error
}

/// True for data without tags if the device does not seal.
pub(super) fn lacks_seals(abilities: &Abilities, request: &Request) -> bool {
    let is_unsealed = matches!(request.operation, Operation::Write(WriteData::Unsealed(_)));
    is_unsealed && abilities.writable && !abilities.is_native(RequestKind::Write)
}

/// The same Write with tags.
pub(super) fn sealed(request: Request) -> Request {
    match request.operation {
        Operation::Write(data) => {
            Request { operation: Operation::Write(WriteData::Sealed(data.into_sealed())), ..request }
        }
        operation => Request { operation, ..request },
    }
}

/// True if the device executes the request itself and in one piece.
pub(super) fn is_plain(geometry: &Geometry, abilities: &Abilities, request: &Request) -> bool {
    abilities.of_request(request) == Ability::Native && piece_limit(&geometry.limits, request).is_none()
}

/// Rejects a request that does not fit the device's geometry.
pub(super) fn check(geometry: &Geometry, abilities: &Abilities, request: &Request) -> Result<(), Error> {
    request.extents.iter().try_for_each(|extent| geometry.check(*extent))?;
    match &request.operation {
        Operation::Write(data) => {
            check_written(geometry, request.extents.one(), (data.size(), data.blocks(), data.format()))
        }
        Operation::CompareAndWrite(data) => {
            let (extent, limit) = (request.extents.one(), abilities.compare_and_write_blocks);
            let (expected, new) = (&data.expected, &data.new);
            check_shape(geometry, extent, expected.size(), expected.blocks())?;
            check_written(geometry, extent, (new.size(), new.blocks(), new.format()))?;
            // Pieces would be atomic only one by one, so it is not split. If the device does not support it, that is
            // the error.
            match limit {
                1.. if extent.len() > u64::from(limit) => {
                    Err(shape("blocks of a Compare and Write", u64::from(limit), extent.len()))
                }
                _ => Ok(()),
            }
        }
        Operation::Compare(data) => check_shape(geometry, request.extents.one(), data.size(), data.blocks()),
        Operation::Copy { source, .. } => check_copy(geometry, *source, request.extents.one()),
        // The client's own Flush makes these durable: only that reports failed flushes of other clients in between.
        Operation::Discard | Operation::Repair if request.durability == Durability::ForceUnitAccess => {
            Err(shape("a Discard or Repair with FUA; flush behind it", 0, 1))
        }
        Operation::WriteReserved(area, bytes) if bytes.len() > area.max_bytes() => {
            Err(shape("bytes for the reserved area", area.max_bytes() as u64, bytes.len() as u64))
        }
        Operation::ReadReserved(area) | Operation::WriteReserved(area, _) => {
            let (pages, wanted) = (abilities.bitmap_pages, area.pages());
            if wanted > pages {
                Err(shape("bitmap pages of the reserved area", u64::from(pages), u64::from(wanted)))
            } else {
                Ok(())
            }
        }
        _ => Ok(()),
    }
}

/// Rejects data whose length differs from that of the extent.
fn check_shape(geometry: &Geometry, extent: Extent, size: BlockSize, blocks: usize) -> Result<(), Error> {
    if size != geometry.block_size {
        return Err(shape("block size of the data", geometry.block_size.bytes() as u64, size.bytes() as u64));
    }
    if blocks as u64 != extent.len() {
        return Err(shape("blocks of data", extent.len(), blocks as u64));
    }
    Ok(())
}

/// The same for data to be written. Later reads return the stored tags, so they must have the device's own format.
fn check_written(
    geometry: &Geometry,
    extent: Extent,
    (size, blocks, format): (BlockSize, usize, Option<PiFormat>),
) -> Result<(), Error> {
    check_shape(geometry, extent, size, blocks)?;
    match format == geometry.protection {
        true => Ok(()),
        false => Err(shape("protection information of another format", 1, 0)),
    }
}

/// Rejects a Copy whose blocks do not exist, whose source and destination differ in length, or whose source and
/// destination overlap: devices copy in any order, so there is no right result.
fn check_copy(geometry: &Geometry, source: Extent, destination: Extent) -> Result<(), Error> {
    geometry.check(source)?;
    if source.len() != destination.len() {
        return Err(shape("blocks of the source", destination.len(), source.len()));
    }
    let both = destination.len().saturating_sub(source.start().get().abs_diff(destination.start().get()));
    if both > 0 { Err(shape("blocks in both source and destination", 0, both)) } else { Ok(()) }
}

fn shape(what: &'static str, limit: u64, actual: u64) -> Error {
    ErrorKind::Limit { what, limit, actual }.into()
}

/// The maximum number of blocks of a piece; `None` if the request does not exceed it.
pub(super) fn piece_limit(limits: &Limits, request: &Request) -> Option<BlockCount> {
    let max_blocks = match request.kind() {
        RequestKind::Read | RequestKind::Salvage | RequestKind::Write | RequestKind::Compare => {
            limits.max_transfer_blocks
        }
        RequestKind::Verify | RequestKind::Checksum | RequestKind::Repair | RequestKind::BlockStatus => {
            limits.max_verify_blocks
        }
        RequestKind::WriteZeroes | RequestKind::WriteUncorrectable | RequestKind::Discard => limits.max_zero_blocks,
        // A device with Copy has limits of its own, also for the number of ranges in one command.
        RequestKind::Copy => return None,
        // The gate has refused one that is too long, because its pieces would not be atomic together.
        RequestKind::CompareAndWrite => return None,
        RequestKind::Flush | RequestKind::ReadReserved | RequestKind::WriteReserved => return None,
    };
    request.extents.iter().any(|extent| extent.blocks() > max_blocks).then_some(max_blocks)
}
