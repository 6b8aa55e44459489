//! Making a volume.

use sealblock_block::Medium;
use sealblock_integrity::PiFormat;
use sealblock_runtime_memory::Buffer;
use sealblock_units::BlockSize;

use crate::block_groups::BlockGroups;
use crate::error::VolumeError;
use crate::format::{Layout, Seed, Superblock};
use crate::superblocks;

/// Bytes written at once where zeroes are written.
const CHUNK_BYTES: u64 = 1 << 20;

/// The shape of a new volume.
#[derive(Clone, Copy, Debug)]
pub struct CreateOptions {
    /// Size of a block.
    pub block_size: BlockSize,
    /// Number of blocks.
    pub capacity_blocks: u64,
    /// Format of the protection information, if any.
    pub protection: Option<PiFormat>,
    /// Identity; two volumes must not share one, because it salts their checksums.
    pub uuid: [u8; 16],
    /// Take the space of the whole volume at once, and never give it back.
    pub preallocate: bool,
}

/// Makes an empty volume on a medium, whatever was there before. The medium must have [`Layout::medium_bytes`].
///
/// # Errors
/// When the shape is impossible, the medium is too short, has not the space or cannot promise it, or fails. An earlier volume
/// on it is gone then.
pub async fn create<M: Medium>(medium: &M, options: &CreateOptions) -> Result<(), VolumeError> {
    let layout = Layout::new(options.block_size, medium.sector_bytes(), options.capacity_blocks)?;
    if medium.len_bytes() < layout.medium_bytes() {
        return Err(VolumeError::Truncated { medium_bytes: medium.len_bytes(), needed_bytes: layout.medium_bytes() });
    }
    // The old superblocks go first: a volume that was half made must not look like the one that was there before.
    superblocks::wipe(medium, &layout).await?;
    medium.sync().await?;
    if options.preallocate {
        medium.reserve(0, layout.medium_bytes()).await?;
    }
    // The log is written, not only reserved: flushes must not wait for a file system to convert extents, nor find it full.
    write_zeroes(medium, layout.log_offset(), layout.log_bytes()).await?;
    // Nothing but the group map says that nothing was written; what lies where the block map goes does not matter.
    BlockGroups::uninitialized(layout, Seed::of(&options.uuid)).create(medium).await?;
    medium.sync().await?;
    for write_seq in [0, 1] {
        let superblock = Superblock {
            uuid: options.uuid,
            write_seq,
            layout,
            protection: options.protection,
            is_clean: true,
            uncorrectable: false,
            keeps_space: options.preallocate,
            log_tail: 0,
            initialized_groups: 0,
        };
        superblocks::write(medium, &superblock).await?;
    }
    medium.sync().await?;
    Ok(())
}

async fn write_zeroes<M: Medium>(medium: &M, offset: u64, length: u64) -> Result<(), VolumeError> {
    let zeroes = Buffer::zeroed(CHUNK_BYTES.min(length) as usize).freeze();
    let mut at = 0;
    while at < length {
        let chunk = CHUNK_BYTES.min(length - at);
        medium.write(offset + at, zeroes.slice(..chunk as usize)).await?;
        at += chunk;
    }
    Ok(())
}
