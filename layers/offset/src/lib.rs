//! A run of another device's blocks as a device of its own, which starts at block 0.
//!
//! Invariants: no request reaches a block outside the run, and every address in a response (in bad blocks, miscompares
//! and reference tags) is an address of the run.
//!
//! Reference tags are shifted with the addresses. A check of a whole device expects each reference tag to be the
//! block's address on the device that it reads. So the run would not verify if it kept the tags of the inner device,
//! nor would the inner device if it stored those of the run. The shift adds the same amount to checked, stored and
//! reported tags, so a wrong tag stays exactly as wrong as it was; replacing the tag would lose that. It also applies
//! to Type 2, whose tags the command chooses: blocks that were written through the run with any tag are read through it
//! with the same one. Type 3 tags do not increment and stay. The guard covers only the data, so data are neither read
//! nor copied here.

use std::iter::repeat;

use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlockCause, BadBlocks, Checksum, Coverage, Device, Error, ErrorKind, Geometry,
    Outcome, Request, RequestKind, Response, Unchecked, VerifyStats, WriteData,
};
use sealblock_integrity::{Field, PiFormat};
use sealblock_units::{Extent, Lba};

/// Why a run of blocks cannot be a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OffsetError {
    /// The run has no block.
    #[error("the range from block {first} has no block")]
    Empty {
        /// First block of the run.
        first: Lba,
    },
    /// The run goes past the end of the inner device.
    #[error("{blocks} blocks from block {first} go past the end of a device of {capacity_blocks} blocks")]
    PastEnd {
        /// First block of the run.
        first: Lba,
        /// Blocks of the run.
        blocks: u64,
        /// Blocks of the inner device.
        capacity_blocks: u64,
    },
}

/// A run of the blocks of `D`. See the crate's header.
pub struct OffsetLayer<D> {
    inner: D,
    first: u64,
    geometry: Geometry,
}

impl<D: Device> OffsetLayer<D> {
    /// The `blocks` blocks from `first` on as a device. `inner` is behind its gate.
    ///
    /// # Errors
    /// When the run is empty or not wholly on the inner device.
    pub fn new(inner: D, first: Lba, blocks: u64) -> Result<OffsetLayer<D>, OffsetError> {
        let capacity_blocks = inner.geometry().capacity_blocks;
        if blocks == 0 {
            return Err(OffsetError::Empty { first });
        }
        if first.get().checked_add(blocks).is_none_or(|end| end > capacity_blocks) {
            return Err(OffsetError::PastEnd { first, blocks, capacity_blocks });
        }
        let geometry = Geometry { capacity_blocks: blocks, ..inner.geometry().clone() };
        Ok(OffsetLayer { inner, first: first.get(), geometry })
    }

    /// The inner device.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The first block of the run on the inner device.
    pub fn first(&self) -> Lba {
        Lba::new(self.first)
    }

    /// The format whose reference tags are shifted with the addresses; `None` if they are not.
    fn shifted_format(&self) -> Option<PiFormat> {
        self.geometry.protection.filter(|format| format.protection().increments_ref_tag() && self.first != 0)
    }

    fn down(&self, extent: Extent) -> Extent {
        Extent::new(Lba::new(extent.start().get() + self.first), extent.blocks())
            .expect("the run lies within the inner device, whose blocks have addresses")
    }

    /// Returns data to store or compare, with the reference tags of the inner device.
    fn data_down(&self, data: WriteData) -> WriteData {
        match self.shifted_format() {
            // Data to compare may have tags of another format or none; a Compare ignores tags.
            Some(format) if data.format() == Some(format) => data.with_ref_tags_shifted(self.first),
            _ => data,
        }
    }

    fn request_down(&self, request: Request) -> Request {
        let format = self.shifted_format();
        let request = request
            .map_expectations(|expectations| expectations.advance(self.first, format))
            .map_data(|data| self.data_down(data));
        request.map_extents(|extent| self.down(extent))
    }

    fn response_up(&self, response: Response) -> Response {
        match response {
            Response::Data(data) => Response::Data(data.with_ref_tags_shifted(repeat(self.first.wrapping_neg()))),
            Response::Verified(stats) => {
                Response::Verified(VerifyStats { coverage: self.coverage_up(stats.coverage), ..stats })
            }
            Response::Checksum(checksum) => {
                Response::Checksum(Checksum { coverage: self.coverage_up(checksum.coverage), ..checksum })
            }
            response => response,
        }
    }

    fn coverage_up(&self, coverage: Coverage) -> Coverage {
        coverage.map(|run| Unchecked { first: self.lba_up(run.first), last: self.lba_up(run.last), ..run })
    }

    fn lba_up(&self, lba: Lba) -> Lba {
        Lba::new(lba.get().saturating_sub(self.first))
    }

    fn bad_block_up(&self, bad_block: &BadBlock) -> BadBlock {
        let tag_up = |tag: Option<u64>| match self.shifted_format() {
            Some(format) if bad_block.cause == BadBlockCause::Tag(Field::RefTag) => {
                tag.map(|tag| format.reference_tag(tag, self.first.wrapping_neg()))
            }
            _ => tag,
        };
        let (expected, actual) = (tag_up(bad_block.expected), tag_up(bad_block.actual));
        BadBlock { lba: self.lba_up(bad_block.lba), expected, actual, ..*bad_block }
    }

    /// The error with this device's addresses. An error with block addresses loses its device name, since they are now
    /// those of this device.
    #[cold]
    fn error_up(&self, error: Error) -> Error {
        match error.kind() {
            ErrorKind::Integrity(bad_blocks) => {
                let coverage = self.coverage_up(bad_blocks.coverage().clone());
                let bad_blocks = bad_blocks.as_slice().iter().map(|bad_block| self.bad_block_up(bad_block)).collect();
                BadBlocks::new(bad_blocks).expect("the error names a bad block").with_coverage(coverage).into()
            }
            kind @ ErrorKind::Expectation { lba, .. } => {
                kind.clone().expectation_at(self.lba_up(*lba), self.shifted_format()).into()
            }
            ErrorKind::Miscompare { lba } => ErrorKind::Miscompare { lba: self.lba_up(*lba) }.into(),
            ErrorKind::Range { extent, last } => match Extent::new(self.lba_up(extent.start()), extent.blocks()) {
                Ok(extent) => ErrorKind::Range { extent, last: self.lba_up(*last) }.into(),
                Err(_) => error,
            },
            ErrorKind::Media { .. }
            | ErrorKind::NoSpace { .. }
            | ErrorKind::ReadOnly
            | ErrorKind::Limit { .. }
            | ErrorKind::Absent(_)
            | ErrorKind::MayBeOlder(_)
            | ErrorKind::Unreachable { .. } => error,
        }
    }
}

impl<D: Device> Device for OffsetLayer<D> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        // The reserved area belongs to the whole inner device, not to this run.
        self.inner.abilities().with([RequestKind::ReadReserved, RequestKind::Salvage], Ability::Absent)
    }

    async fn execute(&self, request: Request) -> Outcome {
        match self.inner.execute(self.request_down(request)).await {
            Ok(response) => Ok(self.response_up(response)),
            Err(error) => Err(self.error_up(error)),
        }
    }
}

#[cfg(test)]
mod tests;
