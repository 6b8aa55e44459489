//! Shape and limits of a device.

use sealblock_integrity::PiFormat;
use sealblock_units::{BlockCount, BlockSize, Lba};

use crate::{Error, ErrorKind};
use sealblock_units::Extent;

/// What one request may ask at most. The gate splits what is larger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Blocks of a Read, Write or Compare.
    pub max_transfer_blocks: BlockCount,
    /// Blocks of a Verify, which moves no payload and can so be larger.
    pub max_verify_blocks: BlockCount,
    /// Blocks of a WriteZeroes, a WriteUncorrectable, or one extent of a Discard.
    pub max_zero_blocks: BlockCount,
}

impl Limits {
    /// Limits of `transfer_bytes` of payload for transfers and `zero_blocks` for operations without payload.
    pub fn new(size: BlockSize, transfer_bytes: usize, zero_blocks: u32) -> Limits {
        let transfer = (transfer_bytes >> size.shift()).clamp(1, u32::MAX as usize) as u32;
        let count = |blocks| BlockCount::new(blocks).unwrap_or(BlockCount::ONE);
        Limits {
            max_transfer_blocks: count(transfer),
            max_verify_blocks: count(transfer),
            max_zero_blocks: count(zero_blocks),
        }
    }
}

/// Shape of a device; it does not change while the device is open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bytes of data in one block.
    pub block_size: BlockSize,
    /// Number of blocks.
    pub capacity_blocks: u64,
    /// Format of the protection information that every block carries, if any.
    pub protection: Option<PiFormat>,
    /// What one request may ask at most.
    pub limits: Limits,
}

impl Geometry {
    /// Bytes of data on the whole device.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_blocks << self.block_size.shift()
    }

    /// The extent of the whole device in pieces that fit an [`Extent`]; empty for a device without blocks.
    pub fn whole(&self, piece: BlockCount) -> impl Iterator<Item = Extent> + use<> {
        let (capacity, step) = (self.capacity_blocks, u64::from(piece.get()));
        (0..capacity.div_ceil(step)).filter_map(move |i| Extent::from_raw(i * step, step.min(capacity - i * step)).ok())
    }

    /// Refuses an extent past the end of the device.
    pub fn check(&self, extent: Extent) -> Result<(), Error> {
        if extent.fits(self.capacity_blocks) {
            return Ok(());
        }
        let last = Lba::new(self.capacity_blocks.saturating_sub(1));
        Err(ErrorKind::Range { extent, last }.into())
    }
}
