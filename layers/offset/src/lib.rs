//! A run of another device's blocks as a device of its own, which starts at block 0.
//!
//! Invariants: no request reaches a block outside the run, and every address that comes back (in faults, miscompares and
//! reference tags) is one of this device's own.
//!
//! Reference tags are shifted with the addresses. Everything in this system that checks a whole device expects a reference tag to be
//! the block's address on the device it reads, so the run would not verify as a device if it kept the tags of the device
//! below, nor would the device below if it stored those of the run. The shift is plain arithmetic on each tuple: a demand,
//! a stored tag and a reported tag move by the same amount, so a wrong tag stays exactly as wrong as it was, which
//! replacing it with a counted one would not keep. It is done for Type 2 as well, whose tags are the command's choice:
//! what is written through the run with any tag is read through it with the same one. Type 3 never counts and stays.
//! The guard covers the data alone and is handed through, so data is neither read nor copied here.

use std::iter::repeat;

use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlockCause, BadBlocks, Checksum, Coverage, Device, Error, ErrorKind, Geometry,
    Outcome, Request, Response, Unchecked, VerifyStats,
};
use sealblock_integrity::{Checks, Field, PiFormat, Sealed};
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
    /// The run goes past the end of the device below.
    #[error("{blocks} blocks from block {first} go past the end of a device of {capacity_blocks} blocks")]
    PastEnd {
        /// First block of the run.
        first: Lba,
        /// Blocks of the run.
        blocks: u64,
        /// Blocks of the device below.
        capacity_blocks: u64,
    },
}

/// A run of the blocks of `D`. See the crate's header.
pub struct OffsetLayer<D> {
    below: D,
    first: u64,
    geometry: Geometry,
}

impl<D: Device> OffsetLayer<D> {
    /// The `blocks` blocks from `first` on as a device. `below` is behind its gate.
    ///
    /// # Errors
    /// When the run is empty or not wholly on the device below.
    pub fn new(below: D, first: Lba, blocks: u64) -> Result<OffsetLayer<D>, OffsetError> {
        let capacity_blocks = below.geometry().capacity_blocks;
        if blocks == 0 {
            return Err(OffsetError::Empty { first });
        }
        if first.get().checked_add(blocks).is_none_or(|end| end > capacity_blocks) {
            return Err(OffsetError::PastEnd { first, blocks, capacity_blocks });
        }
        let geometry = Geometry { capacity_blocks: blocks, ..below.geometry().clone() };
        Ok(OffsetLayer { below, first: first.get(), geometry })
    }

    /// The device below.
    pub fn below(&self) -> &D {
        &self.below
    }

    /// The first block of the run on the device below.
    pub fn first(&self) -> Lba {
        Lba::new(self.first)
    }

    /// The format whose reference tags move with the addresses, if they do.
    fn moving_tags(&self) -> Option<PiFormat> {
        self.geometry.protection.filter(|format| format.protection().increments_ref_tag() && self.first != 0)
    }

    fn down(&self, extent: Extent) -> Extent {
        Extent::new(Lba::new(extent.start().get() + self.first), extent.blocks())
            .expect("the run lies within the device below, whose blocks have addresses")
    }

    fn checks_down(&self, checks: Checks) -> Checks {
        match self.moving_tags() {
            Some(format) => Checks {
                initial_ref_tag: checks.initial_ref_tag.map(|tag| format.reference_tag(tag, self.first)),
                ..checks
            },
            None => checks,
        }
    }

    /// Data to be stored or compared, with tags as the device below has them.
    fn data_down(&self, data: Sealed) -> Sealed {
        match self.moving_tags() {
            // Compared data may have tags of no or another format, which nobody compares.
            Some(format) if data.format() == Some(format) => data.with_ref_tags_shifted(repeat(self.first)),
            _ => data,
        }
    }

    fn operation_down(&self, operation: Request) -> Request {
        match operation {
            Request::Read { extent, checks } => {
                Request::Read { extent: self.down(extent), checks: self.checks_down(checks) }
            }
            Request::Verify { extent, checks } => {
                Request::Verify { extent: self.down(extent), checks: self.checks_down(checks) }
            }
            Request::Checksum { extent, checks } => {
                Request::Checksum { extent: self.down(extent), checks: self.checks_down(checks) }
            }
            Request::Repair { extent, checks } => {
                Request::Repair { extent: self.down(extent), checks: self.checks_down(checks) }
            }
            Request::BlockStatus { extent } => Request::BlockStatus { extent: self.down(extent) },
            Request::Write { extent, data, durability } => {
                Request::Write { extent: self.down(extent), data: self.data_down(data), durability }
            }
            Request::Compare { extent, data } => {
                Request::Compare { extent: self.down(extent), data: self.data_down(data) }
            }
            Request::WriteZeroes { extent, may_unmap, durability } => {
                Request::WriteZeroes { extent: self.down(extent), may_unmap, durability }
            }
            Request::WriteUncorrectable { extent, durability } => {
                Request::WriteUncorrectable { extent: self.down(extent), durability }
            }
            Request::Discard { extents } => {
                Request::Discard { extents: extents.into_iter().map(|extent| self.down(extent)).collect() }
            }
            Request::Flush | Request::ReadReserved { .. } | Request::WriteReserved { .. } => operation,
        }
    }

    fn answer_up(&self, answer: Response) -> Response {
        match answer {
            Response::Data(data) => Response::Data(data.with_ref_tags_shifted(repeat(self.first.wrapping_neg()))),
            Response::Verified(of) => Response::Verified(VerifyStats { coverage: self.coverage_up(of.coverage), ..of }),
            Response::Checksum(of) => Response::Checksum(Checksum { coverage: self.coverage_up(of.coverage), ..of }),
            answer => answer,
        }
    }

    fn coverage_up(&self, coverage: Coverage) -> Coverage {
        coverage.map(|run| Unchecked { first: self.lba_up(run.first), last: self.lba_up(run.last), ..run })
    }

    fn lba_up(&self, lba: Lba) -> Lba {
        Lba::new(lba.get().saturating_sub(self.first))
    }

    fn fault_up(&self, fault: &BadBlock) -> BadBlock {
        let tag_up = |tag: Option<u64>| match self.moving_tags() {
            Some(format) if fault.cause == BadBlockCause::Tag(Field::RefTag) => {
                tag.map(|tag| format.reference_tag(tag, self.first.wrapping_neg()))
            }
            _ => tag,
        };
        let (expected, actual) = (tag_up(fault.expected), tag_up(fault.actual));
        BadBlock { lba: self.lba_up(fault.lba), expected, actual, ..*fault }
    }

    /// An error with this device's addresses. One that names blocks is said to come from this hop, whose blocks it names.
    #[cold]
    fn error_up(&self, error: Error) -> Error {
        match error.kind() {
            ErrorKind::Integrity(faults) => {
                let coverage = self.coverage_up(faults.coverage().clone());
                let faults = faults.as_slice().iter().map(|fault| self.fault_up(fault)).collect();
                BadBlocks::new(faults).expect("there were faults before").covering(coverage).into()
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
            | ErrorKind::Unreachable { .. } => error,
        }
    }
}

impl<D: Device> Device for OffsetLayer<D> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        // What is noted beside all blocks is not this run's.
        Abilities { reserved: Ability::Absent, ..self.below.abilities() }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        match self.below.execute(self.operation_down(operation)).await {
            Ok(answer) => Ok(self.answer_up(answer)),
            Err(error) => Err(self.error_up(error)),
        }
    }
}

#[cfg(test)]
mod tests;
