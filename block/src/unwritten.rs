//! Whether a device was ever written: a mirror may treat two devices as identical without a copy if neither was.

use sealblock_integrity::{ChecksumKind, Sealed};
use sealblock_units::{BlockCount, Extent};

use crate::{Abilities, Ability, BlockState, Device, Error, ErrorKind, Expectations, Request, RequestKind, Response};

/// Maximum blocks of one Read.
const READ_BLOCKS: BlockCount = BlockCount::new(1 << 10).expect("not none");
/// Maximum blocks of one Checksum or BlockStatus.
const PROBE_BLOCKS: BlockCount = BlockCount::new(1 << 16).expect("not none");

/// True if no block of the device was ever written, as far as the device shows. A device with a native block status
/// must have only holes; one with protection information only tuples of all ones and data of zeroes; any other the CRC
/// of zeroes. The first piece that does not match ends the search. An unreadable block counts as written.
///
/// # Errors
/// When a request fails for another reason than bad blocks.
pub async fn is_unwritten(device: &impl Device) -> Result<bool, Error> {
    let geometry = device.geometry().clone();
    let abilities: Abilities = device.abilities();
    let has_status = abilities.of(RequestKind::BlockStatus) == Ability::Native;
    let piece = if has_status || geometry.protection.is_none() { PROBE_BLOCKS } else { READ_BLOCKS };
    let mut next = 0;
    while next < geometry.capacity_blocks {
        let blocks = u64::from(piece.get()).min(geometry.capacity_blocks - next);
        let Ok(extent) = Extent::from_raw(next, blocks) else { return Ok(false) };
        let is_blank = if has_status {
            is_all_holes(device, extent).await
        } else if geometry.protection.is_some() {
            has_unwritten_tuples(device, extent).await
        } else {
            matches_crc_of_zeroes(device, extent).await
        };
        match is_blank {
            Ok(true) => next += blocks,
            Ok(false) => return Ok(false),
            Err(error) if error.bad_blocks().is_some() => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

async fn is_all_holes(device: &impl Device, extent: Extent) -> Result<bool, Error> {
    match device.execute(Request::block_status(extent)).await? {
        Response::BlockStatus(runs) => Ok(runs.iter().all(|run| run.state == BlockState::Hole)),
        _ => Err(unexpected_response()),
    }
}

async fn has_unwritten_tuples(device: &impl Device, extent: Extent) -> Result<bool, Error> {
    let is_all = |bytes: &[u8], value| bytes.iter().all(|byte| *byte == value);
    let is_blank = |data: &Sealed| data.iter().all(|(block, tuple)| is_all(tuple, 0xFF) && is_all(block, 0));
    match device.execute(Request::read(extent, Expectations::NONE)).await? {
        Response::Data(data) => Ok(is_blank(&data)),
        _ => Err(unexpected_response()),
    }
}

async fn matches_crc_of_zeroes(device: &impl Device, extent: Extent) -> Result<bool, Error> {
    let size = device.geometry().block_size;
    let kind = ChecksumKind::Crc64Nvme;
    match device.execute(Request::checksum(extent, kind, Expectations::NONE)).await? {
        Response::Checksum(checksum) => Ok(checksum.value == kind.of_zeroes(extent.bytes(size))),
        _ => Err(unexpected_response()),
    }
}

#[cold]
fn unexpected_response() -> Error {
    ErrorKind::Media { reason: "the device returned a response of another kind than the request".to_owned() }.into()
}
