//! The three copies of the superblock on a medium.
//!
//! Two lie at the start and are written in turn; the third lies at the end and is written with each of them, before the sync
//! that frees log space. So the third is never older than what the log still has map entries for, and a volume whose first
//! two were overwritten, or put back to what they were, opens from it as it is.

use sealblock_block::{Medium, MediumError};
use sealblock_runtime_memory::Slice;

use crate::format::{Layout, SUPERBLOCK_OFFSETS, Superblock, SuperblockError, THIRD_FROM_END_BYTES};
use crate::medium::padded;
use crate::options::VolumeError;

/// Copies of a superblock.
pub(crate) const COPIES: usize = 3;

/// A copy of the superblock, as it was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SuperblockCopy {
    /// Where it lies, in bytes.
    pub offset_bytes: u64,
    /// Why it cannot be used, where it cannot.
    pub lost: Option<String>,
}

/// The copies of a volume of which none can be used.
pub(crate) fn lost_copies(layout: &Layout) -> [SuperblockCopy; COPIES] {
    let [a, b] = SUPERBLOCK_OFFSETS;
    let lost = || Some("no superblock can be used".to_owned());
    [a, b, layout.third_offset()].map(|offset_bytes| SuperblockCopy { offset_bytes, lost: lost() })
}

/// What the copies say together.
pub(crate) struct SuperblockProbe {
    /// The one that counts: the newest.
    pub superblock: Superblock,
    /// Each of them.
    pub copies: [SuperblockCopy; COPIES],
    /// All are there and begin the log at the same place.
    pub are_all_usable: bool,
}

/// Why a copy cannot be used.
#[derive(Debug, thiserror::Error)]
enum CopyError {
    #[error("{0}")]
    Medium(MediumError),
    #[error("{0}")]
    Superblock(SuperblockError),
    /// It is this many writes older than the others.
    #[error("it missed {0} writes of the others")]
    Behind(u64),
}

impl CopyError {
    /// Whether it is a superblock all the same: one that is not understood. No other copy may be used in its stead.
    fn is_foreign(&self) -> bool {
        use SuperblockError::{Checksum, Features, Field, Layout, Magic, Place, Truncated, Version};
        match self {
            CopyError::Medium(_)
            | CopyError::Behind(_)
            | CopyError::Superblock(Magic | Truncated | Checksum | Place) => false,
            CopyError::Superblock(Version(_) | Features(_) | Field { .. } | Layout(_)) => true,
        }
    }
}

impl From<CopyError> for VolumeError {
    fn from(loss: CopyError) -> VolumeError {
        match loss {
            CopyError::Medium(error) => VolumeError::Medium(error),
            CopyError::Superblock(error) => VolumeError::Superblock(error),
            CopyError::Behind(_) => VolumeError::Superblock(SuperblockError::Place),
        }
    }
}

/// Where the third copy is if a volume fills the medium.
pub(crate) fn tail_offset<M: Medium>(medium: &M) -> Option<u64> {
    (medium.len_bytes() / THIRD_FROM_END_BYTES).checked_sub(1).map(|tail| tail * THIRD_FROM_END_BYTES)
}

/// Reads the copies of a volume's superblock.
///
/// # Errors
/// When there is none that can be used: what is wrong with the first one, unless only another begins like a superblock.
pub(crate) async fn read<M: Medium>(medium: &M) -> Result<SuperblockProbe, VolumeError> {
    let first = read_at_start(medium, 0).await;
    let second = read_at_start(medium, 1).await;
    let third = |superblock: Superblock| async move {
        let offset = superblock.layout.third_offset();
        (offset, read_third(medium, offset, &superblock).await)
    };
    let newest = match (&first, &second) {
        (Ok(a), Ok(b)) => Some(if b.write_seq > a.write_seq { *b } else { *a }),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => Some(*one),
        (Err(a), Err(b)) if a.is_foreign() || b.is_foreign() => None,
        (Err(_), Err(_)) => read_tail(medium).await,
    };
    let Some(newest) = newest else { return Err(reason(first, second)) };
    let (mut newest, mut last) = (newest, third(newest).await);
    if last.1.is_err()
        && let Some(ahead) = read_ahead(medium, &newest).await
    {
        (newest, last) = (ahead, third(ahead).await);
    }
    let (offset, third) = last;
    let superblock = third.as_ref().ok().filter(|third| third.write_seq > newest.write_seq).copied().unwrap_or(newest);
    let serves = |copy: &Result<Superblock, CopyError>| {
        copy.as_ref().is_ok_and(|copy| {
            copy.log_tail == superblock.log_tail && copy.uuid == superblock.uuid && copy.layout == superblock.layout
        })
    };
    let are_all_usable = [&first, &second, &third].into_iter().all(serves);
    let copy = |offset_bytes, copy| SuperblockCopy { offset_bytes, lost: lost(copy, &superblock) };
    let [a, b] = SUPERBLOCK_OFFSETS;
    Ok(SuperblockProbe { superblock, copies: [copy(a, first), copy(b, second), copy(offset, third)], are_all_usable })
}

/// Why a copy cannot be used beside the one that counts, where it cannot.
fn lost(copy: Result<Superblock, CopyError>, newest: &Superblock) -> Option<String> {
    match copy {
        // They take turns, and a crash may have come between a write of theirs and that of the third.
        Ok(copy) if copy.uuid == newest.uuid => {
            let missed = newest.write_seq.saturating_sub(copy.write_seq);
            (missed > 2).then(|| CopyError::Behind(missed).to_string())
        }
        Ok(_) => Some("the superblock of another volume is there".to_owned()),
        Err(loss) => Some(loss.to_string()),
    }
}

/// What to say where no copy can be used.
fn reason(first: Result<Superblock, CopyError>, second: Result<Superblock, CopyError>) -> VolumeError {
    match (first, second) {
        (Err(CopyError::Superblock(SuperblockError::Magic)), Err(second)) => second.into(),
        (Err(first), Err(second)) if second.is_foreign() && !first.is_foreign() => second.into(),
        (Err(first), _) => first.into(),
        (Ok(_), Err(second)) => second.into(),
        (Ok(_), Ok(_)) => SuperblockError::Magic.into(),
    }
}

async fn read_copy<M: Medium>(medium: &M, offset: u64) -> Result<Superblock, CopyError> {
    let sector = medium.sector_bytes() as usize;
    if offset + sector as u64 > medium.len_bytes() {
        return Err(CopyError::Superblock(SuperblockError::Magic));
    }
    let (read, bytes) = medium.read(offset, medium.buffer(sector)).await;
    read.map_err(CopyError::Medium)?;
    Superblock::decode(&bytes).map_err(CopyError::Superblock)
}

/// One of the first two. They take turns, so one in the other's place is part of something else, such as of a volume that
/// lies as a whole further on.
async fn read_at_start<M: Medium>(medium: &M, copy: usize) -> Result<Superblock, CopyError> {
    let found = read_copy(medium, SUPERBLOCK_OFFSETS[copy]).await?;
    if found.write_seq % 2 != copy as u64 {
        return Err(CopyError::Superblock(SuperblockError::Place));
    }
    Ok(found)
}

/// The third one of a volume that another copy tells of. One that missed writes is as good as lost.
async fn read_third<M: Medium>(medium: &M, offset: u64, of: &Superblock) -> Result<Superblock, CopyError> {
    let found = read_copy(medium, offset).await?;
    if found.uuid != of.uuid || found.layout != of.layout {
        return Err(CopyError::Superblock(SuperblockError::Place));
    }
    match of.write_seq.saturating_sub(found.write_seq) {
        // A crash may have come between the two writes.
        0 | 1 => Ok(found),
        missed => Err(CopyError::Behind(missed)),
    }
}

/// The third one where nothing else is known: at the end of the medium, if it says itself that it belongs there.
async fn read_tail<M: Medium>(medium: &M) -> Option<Superblock> {
    let offset = tail_offset(medium)?;
    read_copy(medium, offset).await.ok().filter(|found| found.layout.third_offset() == offset)
}

/// A third copy that is ahead of the first two and tells of another size, where it would be if these are what they were before the
/// volume was resized: at the end of the medium, or where they say. None is written before one of the first two tells of its size, so
/// older ones were put back.
async fn read_ahead<M: Medium>(medium: &M, of: &Superblock) -> Option<Superblock> {
    for offset in [Some(of.layout.third_offset()), tail_offset(medium)].into_iter().flatten() {
        let found = read_copy(medium, offset).await.ok();
        let is_ahead = |found: &Superblock| {
            found.uuid == of.uuid && found.write_seq > of.write_seq && found.layout.third_offset() == offset
        };
        if let Some(found) = found.filter(is_ahead) {
            return Some(found);
        }
    }
    None
}

/// Writes a superblock to the place of the older of the first two copies, and to that of the third.
///
/// # Errors
/// When the former fails. Without the third the volume stays usable: the third counts only if the others are lost.
pub(crate) async fn write<M: Medium>(medium: &M, superblock: &Superblock) -> Result<(), MediumError> {
    write_at_start(medium, superblock).await?;
    if let Err(error) = medium.write(superblock.layout.third_offset(), image(medium, superblock)).await {
        tracing::warn!(%error, "cannot write the third copy of the superblock");
    }
    Ok(())
}

/// Writes a superblock to the place of the older of the first two copies alone: the first one that tells of a new size.
///
/// The third must not be ahead of the others: should these not tell of the new size, then on a medium longer than the volume,
/// where the third is not found by itself, the volume would go on with the old size, and leave the third behind as it is.
///
/// # Errors
/// When the medium fails.
pub(crate) async fn write_at_start<M: Medium>(medium: &M, superblock: &Superblock) -> Result<(), MediumError> {
    medium.write(SUPERBLOCK_OFFSETS[(superblock.write_seq % 2) as usize], image(medium, superblock)).await
}

/// Bytes that are written for one copy: a sector, of the volume or of the medium.
fn copy_bytes<M: Medium>(medium: &M, layout: &Layout) -> usize {
    layout.sector_bytes().max(medium.sector_bytes()) as usize
}

fn image<M: Medium>(medium: &M, superblock: &Superblock) -> Slice {
    padded(medium, &superblock.encode(), copy_bytes(medium, &superblock.layout))
}

/// Makes the third copy of a layout unreadable: it must not be found where that layout is not the volume's any more.
///
/// # Errors
/// When the medium fails.
pub(crate) async fn wipe_third<M: Medium>(medium: &M, layout: &Layout) -> Result<(), MediumError> {
    medium.write(layout.third_offset(), padded(medium, &[], copy_bytes(medium, layout))).await
}

/// Makes every copy that an earlier volume may have left on the medium unreadable, before a new one is laid out like this.
///
/// # Errors
/// When the medium fails.
pub(crate) async fn wipe<M: Medium>(medium: &M, layout: &Layout) -> Result<(), MediumError> {
    let old = read(medium).await.ok().map(|found| found.superblock.layout.third_offset());
    let thirds = [old, tail_offset(medium), Some(layout.third_offset())];
    let sector = copy_bytes(medium, layout);
    for offset in SUPERBLOCK_OFFSETS.into_iter().chain(thirds.into_iter().flatten()) {
        if offset + sector as u64 <= medium.len_bytes() {
            medium.write(offset, padded(medium, &[], sector)).await?;
        }
    }
    Ok(())
}
