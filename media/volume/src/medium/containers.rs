//! The copies of the superblocks of volumes in shards on a medium, whether or not they count; see `container_probe`.

use sealblock_block::{Medium, MediumError};

use crate::format::{Container, ContainerError, SUPERBLOCK_OFFSETS, Superblock, uuid_text};
use crate::medium::tail_offset;

/// Why a copy cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    #[error("{0}")]
    Medium(MediumError),
    #[error("{0}")]
    Container(#[from] ContainerError),
    #[error("the superblock of another volume is there, {}", uuid_text(.0))]
    Foreign([u8; 16]),
    #[error("it is of this volume, and not what the copies that count say")]
    Differs,
}

/// The offset of a copy, and the copy.
pub(crate) type ReadCopy = (u64, Result<Container, CopyError>);

/// Reads the copies at the start, and every candidate for the third one.
pub(crate) async fn read_copies<M: Medium>(medium: &M) -> Vec<ReadCopy> {
    let mut copies = Vec::new();
    for offset in SUPERBLOCK_OFFSETS {
        copies.push((offset, read_copy(medium, offset).await));
    }
    let implied = copies.iter().filter_map(|(_, copy)| copy.as_ref().ok()).map(|found| found.copy_offsets()[2]);
    let mut thirds: Vec<u64> = implied.chain(tail_offset(medium)).collect();
    thirds.sort_unstable();
    thirds.dedup();
    for offset in thirds.into_iter().filter(|offset| !SUPERBLOCK_OFFSETS.contains(offset)) {
        let placed = read_copy(medium, offset).await.and_then(|found| match found.copy_offsets()[2] == offset {
            true => Ok(found),
            false => Err(ContainerError::Place.into()),
        });
        copies.push((offset, placed));
    }
    copies
}

async fn read_copy<M: Medium>(medium: &M, offset: u64) -> Result<Container, CopyError> {
    let sector = medium.sector_bytes() as usize;
    if offset + sector as u64 > medium.len_bytes() {
        return Err(ContainerError::Magic.into());
    }
    let (read, bytes) = medium.read(offset, medium.buffer(sector)).await;
    read.map_err(CopyError::Medium)?;
    Ok(Container::decode(&bytes)?)
}

/// Where the first shard of a volume in shards begins, if a superblock of one is there, of whichever volume.
pub async fn find_first_shard<M: Medium>(medium: &M) -> Option<u64> {
    trace(medium).await.map(|_| Container::windows_offset())
}

/// The offset of a superblock of a shard at the start of the first window, of whichever volume in shards.
pub(crate) async fn trace<M: Medium>(medium: &M) -> Option<u64> {
    for offset in SUPERBLOCK_OFFSETS.map(|offset| Container::windows_offset() + offset) {
        let found = superblock_at(medium, offset).await;
        if found.is_some_and(|found| Container::may_be_shard(&found.uuid)) {
            return Some(offset);
        }
    }
    None
}

/// The superblock of a volume of version 2 at an offset.
pub(crate) async fn superblock_at<M: Medium>(medium: &M, offset: u64) -> Option<Superblock> {
    let sector = medium.sector_bytes() as usize;
    if offset + sector as u64 > medium.len_bytes() {
        return None;
    }
    let (read, bytes) = medium.read(offset, medium.buffer(sector)).await;
    read.ok().and_then(|()| Superblock::decode(&bytes).ok())
}

/// The third copies that superblocks of volumes in shards imply: where copies may be.
pub(crate) async fn third_offsets<M: Medium>(medium: &M) -> Vec<u64> {
    let copies = read_copies(medium).await;
    copies.into_iter().filter_map(|(_, copy)| copy.ok()).map(|found| found.copy_offsets()[2]).collect()
}
