//! Finds the superblock of a volume in shards, and decides whether it counts.

use sealblock_block::{Medium, MediumError};

use crate::format::{Container, ContainerError, SUPERBLOCK_OFFSETS, Superblock, uuid_text};
use crate::medium::superblocks::{self, COPIES, SuperblockCopy};
use crate::options::VolumeError;

/// The superblock of a volume in shards, and its copies as they were found.
#[derive(Clone, Debug)]
pub struct ContainerProbe {
    /// The one that counts.
    pub container: Container,
    /// All copies.
    pub copies: [SuperblockCopy; COPIES],
}

/// Why a copy cannot be used.
#[derive(Debug, thiserror::Error)]
enum CopyError {
    #[error("{0}")]
    Medium(MediumError),
    #[error("{0}")]
    Container(#[from] ContainerError),
    #[error("the superblock of another volume is there, {}", uuid_text(.0))]
    Foreign([u8; 16]),
}

type ReadCopy = (u64, Result<Container, CopyError>);

/// Finds out whether a volume in shards is on a medium. `None` if there is none, or if a volume of version 2 counts
/// instead, as far as that can be told from here.
///
/// # Errors
/// When there is one that this program does not understand, or when it is unclear which of two volumes counts.
pub async fn probe_shards<M: Medium>(medium: &M) -> Result<Option<ContainerProbe>, VolumeError> {
    let copies = read_copies(medium).await;
    let mut found: Vec<Container> = copies.iter().filter_map(|(_, copy)| copy.as_ref().ok().copied()).collect();
    found.dedup();
    let at_start = || copies.iter().filter(|(offset, _)| SUPERBLOCK_OFFSETS.contains(offset));
    if let Some(unknown) = at_start().find_map(|(_, copy)| unknown(copy)) {
        return Err(unknown.into());
    }
    let container = match (&found[..], superblocks::claimants(medium).await.is_empty()) {
        ([], _) => return Ok(None),
        ([alone], true) => *alone,
        (several, is_alone) => {
            let owner = shard_at_start(medium).await;
            let is_owner = |container: &&Container| owner.contains(&container.shard_uuid(0));
            match (several.iter().find(is_owner), is_alone) {
                (Some(container), _) => *container,
                (None, true) => return Err(VolumeError::TwoContainers),
                (None, false) => return Ok(None),
            }
        }
    };
    Ok(Some(ContainerProbe { container, copies: of_container(&container, copies) }))
}

/// Reads the copies at the start, and every candidate for the third one.
async fn read_copies<M: Medium>(medium: &M) -> Vec<ReadCopy> {
    let mut copies = Vec::new();
    for offset in SUPERBLOCK_OFFSETS {
        copies.push((offset, read_copy(medium, offset).await));
    }
    let implied = copies.iter().filter_map(|(_, copy)| copy.as_ref().ok()).map(|found| found.copy_offsets()[2]);
    let mut thirds: Vec<u64> = implied.chain(superblocks::tail_offset(medium)).collect();
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

/// Why a valid superblock is not understood.
fn unknown(copy: &Result<Container, CopyError>) -> Option<ContainerError> {
    match copy {
        Err(CopyError::Container(error)) if error.is_unknown() => Some(*error),
        _ => None,
    }
}

/// The identities in the superblocks at the start of the first window.
async fn shard_at_start<M: Medium>(medium: &M) -> Vec<[u8; 16]> {
    let mut found = Vec::new();
    for offset in SUPERBLOCK_OFFSETS {
        found.extend(superblock_at(medium, Container::windows_offset() + offset).await.map(|found| found.uuid));
    }
    found
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

async fn superblock_at<M: Medium>(medium: &M, offset: u64) -> Option<Superblock> {
    let sector = medium.sector_bytes() as usize;
    if offset + sector as u64 > medium.len_bytes() {
        return None;
    }
    let (read, bytes) = medium.read(offset, medium.buffer(sector)).await;
    read.ok().and_then(|()| Superblock::decode(&bytes).ok())
}

/// The copies of the container that counts, as they were found.
fn of_container(container: &Container, mut copies: Vec<ReadCopy>) -> [SuperblockCopy; COPIES] {
    container.copy_offsets().map(|offset_bytes| {
        let at = copies.iter().position(|(at, _)| *at == offset_bytes);
        let copy = at.map_or(Err(ContainerError::Magic.into()), |at| copies.swap_remove(at).1);
        let loss = match copy {
            Ok(found) if found == *container => None,
            Ok(found) => Some(CopyError::Foreign(found.uuid())),
            Err(loss) => Some(loss),
        };
        let is_foreign = matches!(loss, Some(CopyError::Foreign(_)));
        SuperblockCopy { offset_bytes, lost: loss.map(|loss| loss.to_string()), write_seq: None, is_foreign }
    })
}

/// The third copies that superblocks of volumes in shards imply: where copies may be.
pub(crate) async fn third_offsets<M: Medium>(medium: &M) -> Vec<u64> {
    let copies = read_copies(medium).await;
    copies.into_iter().filter_map(|(_, copy)| copy.ok()).map(|found| found.copy_offsets()[2]).collect()
}
