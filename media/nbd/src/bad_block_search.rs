//! Finds the bad blocks of a Read that failed.
//!
//! A server may name an offset with its error. That block is bad; the blocks before and after it are read again, so that
//! one bad block never hides another. Without an offset, a failing run is halved. Every step makes runs shorter, so a read
//! of n blocks costs fewer than 2n further reads, whatever the server replies.

use sealblock_block::{BadBlock, Error, RequestKind};
use sealblock_protocols_nbd::client::ServerError;
use sealblock_units::{Extent, Lba};

use crate::connection::ReplyResult;
use crate::status::{failure, is_about_blocks};

/// The bad blocks of an extent whose Read failed with EIO; none if every block alone is readable. `read` executes one Read,
/// of blocks of 1 << `shift` bytes.
///
/// # Errors
/// Errors of the server other than EIO.
pub(crate) async fn find_bad_blocks(
    extent: Extent,
    errors: Vec<ServerError>,
    shift: u32,
    read: impl AsyncFn(Extent) -> Result<ReplyResult, Error>,
) -> Result<Vec<BadBlock>, Error> {
    let mut bad_blocks = Vec::new();
    let mut failing = vec![(extent, errors)];
    while let Some((run, errors)) = failing.pop() {
        if run.len() == 1 {
            bad_blocks.push(BadBlock::media(run.start()));
            continue;
        }
        let named = named(run, &errors, shift);
        bad_blocks.extend(named.iter().map(|lba| BadBlock::media(*lba)));
        let parts = if named.is_empty() { halves(run) } else { between(run, &named) };
        for part in parts {
            match read(part).await? {
                Ok(_) => {}
                Err(errors) if is_about_blocks(&errors) => failing.push((part, errors)),
                Err(errors) => return Err(failure(RequestKind::Read, Some(part), &errors)),
            }
        }
    }
    Ok(bad_blocks)
}

/// The blocks of `run` that errors name, in order, each once.
fn named(run: Extent, errors: &[ServerError], shift: u32) -> Vec<Lba> {
    let offsets = errors.iter().filter_map(|error| error.offset);
    let end = run.start().get() + run.len();
    let mut blocks: Vec<u64> =
        offsets.map(|offset| offset >> shift).filter(|lba| (run.start().get()..end).contains(lba)).collect();
    blocks.sort_unstable();
    blocks.dedup();
    blocks.into_iter().map(Lba::new).collect()
}

/// The parts of `run` between these blocks.
fn between(run: Extent, blocks: &[Lba]) -> Vec<Extent> {
    let end = run.start().get() + run.len();
    let mut from = run.start().get();
    let mut parts = Vec::new();
    for at in blocks.iter().map(|lba| lba.get()).chain([end]) {
        parts.extend(Extent::from_raw(from, at - from));
        from = at + 1;
    }
    parts
}

/// Both halves of a run of at least two blocks.
fn halves(run: Extent) -> Vec<Extent> {
    let (start, half) = (run.start().get(), run.len() / 2);
    [Extent::from_raw(start, half), Extent::from_raw(start + half, run.len() - half)].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_protocols_nbd::ErrorCode;

    fn extent(start: u64, blocks: u64) -> Extent {
        Extent::from_raw(start, blocks).unwrap()
    }

    #[test]
    fn named_blocks_are_those_of_the_run_each_once() {
        let at = |offset| ServerError { code: ErrorCode::Io, offset, message: String::new() };
        let errors = [at(Some(5 << 12)), at(None), at(Some((4 << 12) + 9)), at(Some(5 << 12)), at(Some(9 << 12))];
        assert_eq!(named(extent(3, 4), &errors, 12), [Lba::new(4), Lba::new(5)]);
    }

    #[test]
    fn parts_leave_out_the_named_blocks_and_nothing_else() {
        let lbas = |blocks: &[u64]| blocks.iter().copied().map(Lba::new).collect::<Vec<_>>();
        assert_eq!(between(extent(3, 5), &lbas(&[5])), [extent(3, 2), extent(6, 2)]);
        assert_eq!(between(extent(3, 5), &lbas(&[3, 7])), [extent(4, 3)]);
        assert_eq!(between(extent(3, 2), &lbas(&[3, 4])), []);
        assert_eq!(halves(extent(3, 3)), [extent(3, 1), extent(4, 2)]);
    }
}
