//! Whether a device was ever written: before two devices may be taken for alike although nothing says that they are.

use sealblock_integrity::{Checks, Sealed, guard};
use sealblock_units::{BlockCount, Extent};

use crate::{Abilities, Ability, BlockState, Device, Error, ErrorKind, Request, RequestKind, Response};

/// Blocks that are read at once, at most.
const READ_BLOCKS: BlockCount = BlockCount::new(1 << 10).expect("not none");
/// Blocks that are summed or asked about at once, at most.
const LOOK_BLOCKS: BlockCount = BlockCount::new(1 << 16).expect("not none");

/// Whether no block of a device holds anything, as far as it can tell. One that says which blocks take space says that none
/// does; of one with protection information no tuple is anything but that of a block that was never written, and no data
/// but zeroes; one with neither sums to zeroes. The first piece that is not so ends the search. A block that cannot be read
/// holds something.
///
/// # Errors
/// When the device cannot be asked.
pub async fn is_blank(device: &impl Device) -> Result<bool, Error> {
    let geometry = device.geometry().clone();
    let abilities: Abilities = device.abilities();
    let says_space = abilities.of(RequestKind::BlockStatus) == Ability::Native;
    let piece = if says_space || geometry.protection.is_none() { LOOK_BLOCKS } else { READ_BLOCKS };
    let mut next = 0;
    while next < geometry.capacity_blocks {
        let blocks = u64::from(piece.get()).min(geometry.capacity_blocks - next);
        let Ok(extent) = Extent::from_raw(next, blocks) else { return Ok(false) };
        let is_blank = if says_space {
            takes_no_space(device, extent).await
        } else if geometry.protection.is_some() {
            was_never_written(device, extent).await
        } else {
            sums_to_zeroes(device, extent).await
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

async fn takes_no_space(device: &impl Device, extent: Extent) -> Result<bool, Error> {
    match device.execute(Request::BlockStatus { extent }).await? {
        Response::BlockStatus(runs) => Ok(runs.iter().all(|run| run.state == BlockState::Hole)),
        _ => Err(answered_wrongly()),
    }
}

async fn was_never_written(device: &impl Device, extent: Extent) -> Result<bool, Error> {
    let is_blank =
        |data: &Sealed| data.tags().iter().all(|byte| *byte == 0xFF) && data.data().iter().all(|byte| *byte == 0);
    match device.execute(Request::Read { extent, checks: Checks::NONE }).await? {
        Response::Data(data) => Ok(is_blank(&data)),
        _ => Err(answered_wrongly()),
    }
}

async fn sums_to_zeroes(device: &impl Device, extent: Extent) -> Result<bool, Error> {
    let size = device.geometry().block_size;
    match device.execute(Request::Checksum { extent, checks: Checks::NONE }).await? {
        Response::Checksum(digested) => {
            let block = vec![0; size.bytes()];
            let zeroes = (0..extent.len()).fold(guard::crc64(&[]), |crc, _| guard::crc64_append(crc, &block));
            Ok(digested.crc64 == zeroes)
        }
        _ => Err(answered_wrongly()),
    }
}

#[cold]
fn answered_wrongly() -> Error {
    ErrorKind::Media { reason: "a device answered with something else than it was asked for".to_owned() }.into()
}
