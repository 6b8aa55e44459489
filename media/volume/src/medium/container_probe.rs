//! Finds the superblock of a volume in shards, and decides whether it counts.

use sealblock_block::Medium;

use crate::format::{Container, ContainerError, SUPERBLOCK_OFFSETS};
use crate::medium::containers::{CopyError, ReadCopy, read_copies, superblock_at};
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

/// The copies of the container that counts, as they were found.
fn of_container(container: &Container, mut copies: Vec<ReadCopy>) -> [SuperblockCopy; COPIES] {
    container.copy_offsets().map(|offset_bytes| {
        let at = copies.iter().position(|(at, _)| *at == offset_bytes);
        let copy = at.map_or(Err(ContainerError::Magic.into()), |at| copies.swap_remove(at).1);
        let loss = match copy {
            Ok(found) if found == *container => None,
            Ok(found) if found.uuid() == container.uuid() => Some(CopyError::Differs),
            Ok(found) => Some(CopyError::Foreign(found.uuid())),
            Err(loss) => Some(loss),
        };
        let is_foreign = matches!(loss, Some(CopyError::Foreign(_)));
        SuperblockCopy { offset_bytes, lost: loss.map(|loss| loss.to_string()), write_seq: None, is_foreign }
    })
}
