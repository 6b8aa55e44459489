//! A raw device: the blocks of a medium, without protection information.

use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlocks, BlockState, Device, Durability, Error, ErrorKind, Geometry, Limits,
    Medium, MediumError, MediumErrorKind, Operation, Outcome, Request, RequestKind, Response, StatusRuns,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_units::{BlockCount, BlockSize, Extent};

use crate::FileMedium;

/// Bytes of data in one transfer, the largest allocation of a reactor's arena; the gate splits larger requests.
const TRANSFER_BYTES: usize = 1 << 20;
/// Bytes of one WriteZeroes or Discard at most, to limit how long one takes if zeroes must be written.
const ZERO_BYTES: u64 = 1 << 30;

/// The reason why a medium cannot be used as blocks of a size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BlockError {
    /// Blocks are smaller than the medium's sectors.
    #[error("blocks of {block_size} bytes are smaller than the medium's sectors of {sector_bytes} bytes")]
    SectorsTooLarge {
        /// Bytes of a block.
        block_size: BlockSize,
        /// Bytes of a sector.
        sector_bytes: u32,
    },
}

/// Blocks without tags on a file, a block device, or another medium. Bytes after the last whole block are not used.
pub struct RawDevice<M = FileMedium> {
    medium: M,
    geometry: Geometry,
}

impl<M: Medium> RawDevice<M> {
    /// Uses `medium` as blocks of `block_size`.
    ///
    /// # Errors
    /// If blocks are smaller than the medium's sectors.
    pub fn new(medium: M, block_size: BlockSize) -> Result<RawDevice<M>, BlockError> {
        let sector_bytes = medium.sector_bytes();
        if !(block_size.bytes() as u64).is_multiple_of(u64::from(sector_bytes)) {
            return Err(BlockError::SectorsTooLarge { block_size, sector_bytes });
        }
        let geometry = Geometry {
            block_size,
            capacity_blocks: medium.len_bytes() >> block_size.shift(),
            protection: None,
            limits: Limits::new(block_size, TRANSFER_BYTES, (ZERO_BYTES >> block_size.shift()) as u32),
        };
        Ok(RawDevice { medium, geometry })
    }

    /// The medium, for everything but requests, such as its description.
    pub fn medium(&self) -> &M {
        &self.medium
    }

    fn offset_bytes(&self, extent: Extent) -> u64 {
        extent.start().get() << self.geometry.block_size.shift()
    }

    fn length_bytes(&self, extent: Extent) -> u64 {
        extent.bytes(self.geometry.block_size)
    }

    async fn read_raw(&self, extent: Extent) -> Result<Sealed, MediumError> {
        let buffer = self.medium.buffer(self.length_bytes(extent) as usize);
        let (result, buffer) = self.medium.read(self.offset_bytes(extent), buffer).await;
        result?;
        Ok(Sealed::seal(buffer.freeze(), self.geometry.block_size, None, &Tags::default()))
    }

    async fn read(&self, extent: Extent) -> Outcome {
        match self.read_raw(extent).await {
            Ok(data) => Ok(Response::Data(data)),
            Err(error) if error.kind == MediumErrorKind::Failed => self.read_one_by_one(extent).await,
            Err(error) => Err(error.into()),
        }
    }

    /// Reads again block by block, to name the blocks that cannot be read, or to get them all after a transient
    /// failure.
    #[cold]
    async fn read_one_by_one(&self, extent: Extent) -> Outcome {
        let (mut parts, mut faults) = (Vec::new(), Vec::new());
        for lba in extent.iter() {
            match self.read_raw(Extent::one(lba)).await {
                Ok(part) => parts.push(part),
                Err(error) if error.kind == MediumErrorKind::Failed => {
                    tracing::debug!(%error, "unreadable block");
                    faults.push(BadBlock::media(lba));
                }
                Err(error) => return Err(error.into()),
            }
        }
        match BadBlocks::new(faults) {
            Some(faults) => Err(faults.into()),
            None => Ok(Response::Data(Sealed::join(parts))),
        }
    }

    async fn write_zeroes(&self, extent: Extent, may_unmap: bool) -> Result<(), Error> {
        let (offset, length) = (self.offset_bytes(extent), self.length_bytes(extent));
        match may_unmap {
            true => Ok(self.medium.punch(offset, length).await?),
            false => Ok(self.medium.zero(offset, length).await?),
        }
    }

    async fn discard(&self, extents: &[Extent]) -> Result<(), Error> {
        for &extent in extents {
            self.medium.discard(self.offset_bytes(extent), self.length_bytes(extent)).await?;
        }
        Ok(())
    }

    /// Which blocks are holes, as far as the medium reports it. A block is a hole only if all of it is.
    fn allocation(&self, extent: Extent) -> Response {
        let shift = self.geometry.block_size.shift();
        let (mut block, end) = (extent.start().get(), extent.start().get() + extent.len());
        let mut runs = StatusRuns::default();
        while block < end {
            let (bytes, is_hole) = self.medium.status_at(block << shift, (end - block) << shift);
            let (whole, begun) = (bytes >> shift, bytes.div_ceil(1 << shift));
            let (blocks, state) = match is_hole {
                true if whole > 0 => (whole, BlockState::Hole),
                _ => (begun.max(1), BlockState::Allocated),
            };
            let blocks =
                u32::try_from(blocks.min(end - block)).ok().and_then(BlockCount::new).unwrap_or(BlockCount::ONE);
            runs.push(blocks, state);
            block += u64::from(blocks.get());
        }
        Response::BlockStatus(runs.into_vec())
    }

    /// Waits for the medium if the request requires it.
    async fn sync_if_required(&self, durability: Durability) -> Result<(), Error> {
        match durability {
            Durability::Volatile => Ok(()),
            Durability::ForceUnitAccess => Ok(self.medium.sync().await?),
        }
    }
}

impl<M: Medium> Device for RawDevice<M> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        let (writable, unmap_zeroes) = (!self.medium.is_read_only(), self.medium.can_punch());
        Abilities { writable, unmap_zeroes, ..Abilities::BASIC }
            .with([RequestKind::WriteZeroes, RequestKind::BlockStatus], Ability::Native)
            .with([RequestKind::Discard], Ability::native_if(self.medium.can_discard()))
    }

    async fn execute(&self, request: Request) -> Outcome {
        let kind = request.kind();
        let Request { operation, extents, durability, .. } = request;
        match operation {
            Operation::Read(_) => return self.read(extents.one()).await,
            Operation::BlockStatus => return Ok(self.allocation(extents.one())),
            Operation::Write(data) => {
                self.medium.write_blocks(self.offset_bytes(extents.one()), &data).await?;
                self.sync_if_required(durability).await?;
            }
            Operation::WriteZeroes { may_unmap } => {
                self.write_zeroes(extents.one(), may_unmap).await?;
                self.sync_if_required(durability).await?;
            }
            Operation::Discard => self.discard(&extents).await?,
            Operation::Flush => self.medium.sync().await?,
            Operation::Verify(_)
            | Operation::Copy { .. }
            | Operation::Compare(_)
            | Operation::CompareAndWrite(_)
            | Operation::WriteUncorrectable { .. }
            | Operation::Checksum(..)
            | Operation::Repair
            | Operation::Salvage
            | Operation::ReadReserved(_)
            | Operation::WriteReserved(..) => return Err(ErrorKind::Absent(kind).into()),
        }
        Ok(Response::Done)
    }
}

#[cfg(test)]
mod tests;
