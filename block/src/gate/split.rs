//! Requests larger than a device takes, cut up.
//!
//! Pieces run side by side, a bounded number at a time. A damaged block in one piece does not hide one in another: all
//! pieces are carried out, and their faults are joined into one error.

use futures_util::stream::{self, StreamExt};
use sealblock_integrity::{Checks, PiFormat, Sealed, combine};
use sealblock_units::{BlockCount, BlockSize, Extent};

use super::Gate;
use super::emulate::answered_wrongly;
use crate::{Answer, Device, Digested, Error, Limits, Operation, Outcome, Tally, Verified};

/// Pieces of one request under way at once. Enough to keep a device busy, few enough to bound buffers.
const PIECES_IN_FLIGHT: usize = 8;

/// The most blocks a piece may have, if the request is over that.
pub(super) fn limit(limits: &Limits, operation: &Operation) -> Option<BlockCount> {
    let most = match operation {
        Operation::Read { .. } | Operation::Write { .. } | Operation::Compare { .. } => limits.transfer,
        Operation::Verify { .. }
        | Operation::Digest { .. }
        | Operation::Repair { .. }
        | Operation::Allocation { .. } => limits.verify,
        Operation::WriteZeroes { .. } | Operation::WriteUncorrectable { .. } => limits.zero,
        Operation::Discard { extents } => {
            return extents.iter().any(|extent| extent.blocks() > limits.zero).then_some(limits.zero);
        }
        Operation::Flush | Operation::ReadAnnex { .. } | Operation::WriteAnnex { .. } => return None,
    };
    operation.extent().filter(|extent| extent.blocks() > most).map(|_| most)
}

impl<D: Device> Gate<D> {
    /// Carries a request out in pieces of at most `most` blocks.
    pub(super) async fn in_pieces(&self, operation: Operation, most: BlockCount) -> Outcome {
        let (read, digested) = (matches!(operation, Operation::Read { .. }), digested(&operation));
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
fn digested(operation: &Operation) -> Option<Extent> {
    match operation {
        Operation::Digest { extent, .. } => Some(*extent),
        _ => None,
    }
}

/// The operation once per piece.
fn pieces(operation: Operation, most: BlockCount, format: Option<PiFormat>) -> Box<dyn Iterator<Item = Operation>> {
    match (operation.extent(), operation) {
        (Some(whole), operation) => {
            Box::new(whole.split_aligned(most).map(move |piece| part(&operation, whole, piece, format)))
        }
        (None, Operation::Discard { extents }) => Box::new(
            extents
                .into_iter()
                .flat_map(move |extent| extent.split_aligned(most))
                .map(|extent| Operation::Discard { extents: vec![extent] }),
        ),
        (None, operation) => Box::new(std::iter::once(operation)),
    }
}

/// The operation on one piece of its blocks.
fn part(operation: &Operation, whole: Extent, extent: Extent, format: Option<PiFormat>) -> Operation {
    let first = extent.start().get() - whole.start().get();
    // Reference tags count on from piece to piece.
    let onward = |checks: &Checks| format.map_or(*checks, |format| checks.advance(first, format));
    let cut = |data: &Sealed| data.slice(first as usize, extent.len() as usize);
    match operation {
        Operation::Read { checks, .. } => Operation::Read { extent, checks: onward(checks) },
        Operation::Verify { checks, .. } => Operation::Verify { extent, checks: onward(checks) },
        Operation::Digest { checks, .. } => Operation::Digest { extent, checks: onward(checks) },
        Operation::Repair { checks, .. } => Operation::Repair { extent, checks: onward(checks) },
        Operation::Allocation { .. } => Operation::Allocation { extent },
        Operation::Write { data, durability, .. } => {
            Operation::Write { extent, data: cut(data), durability: *durability }
        }
        Operation::Compare { data, .. } => Operation::Compare { extent, data: cut(data) },
        Operation::WriteZeroes { may_unmap, durability, .. } => {
            Operation::WriteZeroes { extent, may_unmap: *may_unmap, durability: *durability }
        }
        Operation::WriteUncorrectable { durability, .. } => {
            Operation::WriteUncorrectable { extent, durability: *durability }
        }
        Operation::Flush | Operation::ReadAnnex { .. } | Operation::WriteAnnex { .. } => operation.clone(),
        Operation::Discard { .. } => Operation::Discard { extents: vec![extent] },
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
            Ok(Answer::Done | Answer::Annex(_)) => {}
            Ok(Answer::Digest(part)) => tally.coverage.merge(part.coverage),
            Ok(Answer::Allocation(part)) => runs.extend(part),
            Ok(Answer::Data(part)) => parts.push(part),
            Ok(Answer::Verified(part)) => {
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
        (true, _) => Ok(Answer::Data(Sealed::join(&parts))),
        (false, None) if !runs.is_empty() => Ok(Answer::Allocation(runs)),
        (false, Some(bytes_transferred)) => Ok(Answer::Verified(Verified { bytes_transferred, coverage })),
        (false, None) => Ok(Answer::Done),
    }
}

/// One digest out of those of pieces, which have these extents.
fn join_digests(extents: impl Iterator<Item = Extent>, outcomes: Vec<Outcome>, size: BlockSize) -> Outcome {
    if outcomes.iter().any(Result::is_err) {
        return join(outcomes, false);
    }
    let mut whole = Digested::default();
    for (extent, outcome) in extents.zip(outcomes) {
        let Ok(Answer::Digest(part)) = outcome else { return Err(answered_wrongly()) };
        whole.crc64 = combine::crc64(whole.crc64, part.crc64, extent.bytes(size));
        whole.bytes_transferred += part.bytes_transferred;
        whole.coverage.merge(part.coverage);
    }
    Ok(Answer::Digest(whole))
}
