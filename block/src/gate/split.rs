//! Requests larger than a device takes, cut up.
//!
//! Pieces run side by side, a bounded number at a time. A damaged block in one piece does not hide one in another: all
//! pieces are carried out, and their faults are joined into one error.

use futures_util::stream::{self, StreamExt};
use sealblock_integrity::{Checks, PiFormat, Sealed, combine};
use sealblock_units::{BlockCount, BlockSize, Extent};

use super::Gate;
use super::emulate::answered_wrongly;
use crate::{Checksum, Device, Error, Limits, Outcome, Request, Response, Tally, VerifyStats};

/// Pieces of one request under way at once. Enough to keep a device busy, few enough to bound buffers.
const PIECES_IN_FLIGHT: usize = 8;

/// The most blocks a piece may have, if the request is over that.
pub(super) fn limit(limits: &Limits, operation: &Request) -> Option<BlockCount> {
    let most = match operation {
        Request::Read { .. } | Request::Write { .. } | Request::Compare { .. } => limits.max_transfer_blocks,
        Request::Verify { .. } | Request::Checksum { .. } | Request::Repair { .. } | Request::BlockStatus { .. } => {
            limits.max_verify_blocks
        }
        Request::WriteZeroes { .. } | Request::WriteUncorrectable { .. } => limits.max_zero_blocks,
        Request::Discard { extents } => {
            return extents
                .iter()
                .any(|extent| extent.blocks() > limits.max_zero_blocks)
                .then_some(limits.max_zero_blocks);
        }
        Request::Flush | Request::ReadReserved { .. } | Request::WriteReserved { .. } => return None,
    };
    operation.extent().filter(|extent| extent.blocks() > most).map(|_| most)
}

impl<D: Device> Gate<D> {
    /// Carries a request out in pieces of at most `most` blocks.
    pub(super) async fn in_pieces(&self, operation: Request, most: BlockCount) -> Outcome {
        let (read, digested) = (matches!(operation, Request::Read { .. }), digested(&operation));
        let pieces = pieces(operation, most, self.device.geometry().protection);
        let outcomes: Vec<Outcome> =
            stream::iter(pieces).map(|piece| self.device.execute(piece)).buffered(PIECES_IN_FLIGHT).collect().await;
        match digested {
            Some(extent) => join_digests(extent.split_aligned(most), outcomes, self.device.geometry().block_size),
            None => join(outcomes, read),
        }
    }
}

/// The blocks of a Digest.
fn digested(operation: &Request) -> Option<Extent> {
    match operation {
        Request::Checksum { extent, .. } => Some(*extent),
        _ => None,
    }
}

/// The operation once per piece.
fn pieces(operation: Request, most: BlockCount, format: Option<PiFormat>) -> Box<dyn Iterator<Item = Request>> {
    match (operation.extent(), operation) {
        (Some(whole), operation) => {
            Box::new(whole.split_aligned(most).map(move |piece| part(&operation, whole, piece, format)))
        }
        (None, Request::Discard { extents }) => Box::new(
            extents
                .into_iter()
                .flat_map(move |extent| extent.split_aligned(most))
                .map(|extent| Request::Discard { extents: vec![extent] }),
        ),
        (None, operation) => Box::new(std::iter::once(operation)),
    }
}

/// The operation on one piece of its blocks.
fn part(operation: &Request, whole: Extent, extent: Extent, format: Option<PiFormat>) -> Request {
    let first = extent.start().get() - whole.start().get();
    // Reference tags count on from piece to piece.
    let onward = |checks: &Checks| format.map_or(*checks, |format| checks.advance(first, format));
    let cut = |data: &Sealed| data.slice(first as usize, extent.len() as usize);
    match operation {
        Request::Read { checks, .. } => Request::Read { extent, checks: onward(checks) },
        Request::Verify { checks, .. } => Request::Verify { extent, checks: onward(checks) },
        Request::Checksum { checks, .. } => Request::Checksum { extent, checks: onward(checks) },
        Request::Repair { checks, .. } => Request::Repair { extent, checks: onward(checks) },
        Request::BlockStatus { .. } => Request::BlockStatus { extent },
        Request::Write { data, durability, .. } => Request::Write { extent, data: cut(data), durability: *durability },
        Request::Compare { data, .. } => Request::Compare { extent, data: cut(data) },
        Request::WriteZeroes { may_unmap, durability, .. } => {
            Request::WriteZeroes { extent, may_unmap: *may_unmap, durability: *durability }
        }
        Request::WriteUncorrectable { durability, .. } => {
            Request::WriteUncorrectable { extent, durability: *durability }
        }
        Request::Flush | Request::ReadReserved { .. } | Request::WriteReserved { .. } => operation.clone(),
        Request::Discard { .. } => Request::Discard { extents: vec![extent] },
    }
}

/// One outcome out of those of the pieces, which are in order.
///
/// The first failure that is not about damaged blocks wins, because it says more than any list of blocks; then all
/// damaged blocks of all pieces; for Compare, the first block that differs.
fn join(outcomes: Vec<Outcome>, read: bool) -> Outcome {
    let (mut parts, mut tally, mut verified, mut runs) = (Vec::new(), Tally::default(), None, Vec::new());
    let mut other: Option<Error> = None;
    for outcome in outcomes {
        match outcome {
            // Digests need their lengths; slots of the annex are never cut.
            Ok(Response::Done | Response::Reserved(_)) => {}
            Ok(Response::Checksum(part)) => tally.coverage.merge(part.coverage),
            Ok(Response::BlockStatus(part)) => runs.extend(part),
            Ok(Response::Data(part)) => parts.push(part),
            Ok(Response::Verified(part)) => {
                verified = Some(verified.unwrap_or(0) + part.bytes_transferred);
                tally.coverage.merge(part.coverage);
            }
            Err(error) => {
                if let Err(error) = tally.take(error) {
                    other = other.or(Some(error));
                }
            }
        }
    }
    if let Some(error) = other {
        return Err(error);
    }
    let coverage = tally.finish()?;
    match (read, verified) {
        (true, _) => Ok(Response::Data(Sealed::join(&parts))),
        (false, None) if !runs.is_empty() => Ok(Response::BlockStatus(runs)),
        (false, Some(bytes_transferred)) => Ok(Response::Verified(VerifyStats { bytes_transferred, coverage })),
        (false, None) => Ok(Response::Done),
    }
}

/// One digest out of those of pieces, which have these extents.
fn join_digests(extents: impl Iterator<Item = Extent>, outcomes: Vec<Outcome>, size: BlockSize) -> Outcome {
    if outcomes.iter().any(Result::is_err) {
        return join(outcomes, false);
    }
    let mut whole = Checksum::default();
    for (extent, outcome) in extents.zip(outcomes) {
        let Ok(Response::Checksum(part)) = outcome else { return Err(answered_wrongly()) };
        whole.crc64 = combine::crc64(whole.crc64, part.crc64, extent.bytes(size));
        whole.bytes_transferred += part.bytes_transferred;
        whole.coverage.merge(part.coverage);
    }
    Ok(Response::Checksum(whole))
}
