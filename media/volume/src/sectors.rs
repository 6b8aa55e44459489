//! Reading what may be damaged: all that the medium gives, and which sectors it does not.

use sealblock_block::{Medium, MediumError};
use sealblock_runtime_memory::Buffer;

/// How often a sector is read before it counts as unreadable.
const READ_ATTEMPTS: u32 = 3;

/// Reads whole sectors; where the medium fails, one by one. Also gives the numbers of those that it does not give, which are
/// zeroes.
///
/// # Errors
/// When the medium fails in another way than by not giving bytes.
pub(crate) async fn read_sectors<M: Medium>(
    medium: &M,
    offset: u64,
    length: usize,
    sector: usize,
) -> Result<(Buffer, Vec<usize>), MediumError> {
    let (read, mut whole) = medium.read(offset, medium.buffer(length)).await;
    match read {
        Ok(()) => return Ok((whole, Vec::new())),
        Err(error) if !error.is_local() => return Err(error),
        Err(_) => {}
    }
    // All of them between two tries of one: what troubles a medium for a moment is over by then.
    let mut missing: Vec<usize> = (0..length / sector).collect();
    whole.fill(0);
    for _ in 0..READ_ATTEMPTS {
        let mut still = Vec::new();
        for at in missing {
            let (read, bytes) = medium.read(offset + (at * sector) as u64, medium.buffer(sector)).await;
            match read {
                Ok(()) => whole[at * sector..(at + 1) * sector].copy_from_slice(&bytes),
                Err(error) if error.is_local() => still.push(at),
                Err(error) => return Err(error),
            }
        }
        missing = still;
    }
    Ok((whole, missing))
}
