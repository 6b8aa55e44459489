//! The three copies of the superblock on a medium.
//!
//! Two are at the start and are written alternately; the third is at the end and is written with each of them, before
//! the sync that frees log space. So the third is never older than the log's remaining map entries, and a volume whose
//! first two were overwritten, or restored from an earlier state, opens from it.

use sealblock_block::{Medium, MediumError};
use sealblock_runtime_memory::Slice;

use crate::format::{Layout, SUPERBLOCK_OFFSETS, Superblock, SuperblockError, uuid_text};
use crate::medium::containers::third_offsets;
use crate::medium::identity::{self, Claim, Standing};
use crate::medium::{padded, tail_offset};
use crate::options::VolumeError;

/// The number of copies of a superblock.
pub(crate) const COPIES: usize = 3;

/// A copy of the superblock, as it was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SuperblockCopy {
    /// Its offset.
    pub offset_bytes: u64,
    /// Why it cannot be used; `None` if it can.
    pub lost: Option<String>,
    /// Its write sequence number, if it is valid and of this volume, even if it is too old to be used.
    pub write_seq: Option<u64>,
    /// The superblock of another volume is there.
    pub is_foreign: bool,
}

/// The identity in each valid copy on a medium, of whichever volumes.
pub(crate) async fn claimants<M: Medium>(medium: &M) -> Vec<[u8; 16]> {
    AllCopies::read(medium).await.claims().iter().map(|claim| claim.superblock.uuid).collect()
}

/// The copies of a volume of which no copy can be used.
pub(crate) fn lost_copies(layout: &Layout) -> [SuperblockCopy; COPIES] {
    let [a, b] = SUPERBLOCK_OFFSETS;
    let lost = || Some("no superblock can be used".to_owned());
    let copy = |offset_bytes| SuperblockCopy { offset_bytes, lost: lost(), write_seq: None, is_foreign: false };
    [a, b, layout.third_offset()].map(copy)
}

/// What all copies show together.
pub(crate) struct SuperblockProbe {
    /// The one that counts: the newest of the volume that owns the medium.
    pub superblock: Superblock,
    /// All copies.
    pub copies: [SuperblockCopy; COPIES],
    /// All copies are usable, and begin the log at the same place.
    pub are_all_usable: bool,
    /// How their volume was determined.
    pub standing: Standing,
}

/// Why a copy cannot be used.
#[derive(Debug, thiserror::Error)]
enum CopyError {
    #[error("{0}")]
    Medium(MediumError),
    #[error("{0}")]
    Superblock(SuperblockError),
    /// It is older than the others by this number of writes.
    #[error("it missed {0} writes of the others")]
    Behind(u64),
    /// It belongs to another volume.
    #[error("the superblock of another volume is there, {}", uuid_text(.0))]
    Foreign([u8; 16]),
}

impl CopyError {
    /// True if it is a superblock that this program does not understand. Then no other copy may be used instead.
    fn is_unknown(&self) -> bool {
        use SuperblockError::{Checksum, Features, Field, Layout, Magic, Place, Truncated, Version};
        match self {
            CopyError::Medium(_)
            | CopyError::Behind(_)
            | CopyError::Foreign(_)
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
            CopyError::Behind(_) | CopyError::Foreign(_) => VolumeError::Superblock(SuperblockError::Place),
        }
    }
}

/// The result of reading one copy.
type ReadCopy = Result<Superblock, CopyError>;

/// All copies, of any volumes, before the owner of the medium is known.
struct AllCopies {
    at_start: [ReadCopy; 2],
    /// Every candidate for the third copy, with its offset.
    thirds: Vec<(u64, ReadCopy)>,
}

/// Reads the copies of a volume's superblock. First it determines which volume owns the medium; then the newest copy of
/// that volume counts, whatever the write sequence numbers of others.
///
/// # Errors
/// When no copy can be used: the error of the first one, unless only another begins like a superblock. Also when it is
/// unclear which volume owns the medium.
pub(crate) async fn read<M: Medium>(medium: &M) -> Result<SuperblockProbe, VolumeError> {
    read_as(medium, None).await
}

/// The same for the volume that is `chosen`, if any.
///
/// # Errors
/// As [`read`].
pub(crate) async fn read_as<M: Medium>(medium: &M, chosen: Option<[u8; 16]>) -> Result<SuperblockProbe, VolumeError> {
    let all = AllCopies::read(medium).await;
    let claims = all.claims();
    let [first, second] = &all.at_start;
    let is_unknown = matches!((first, second), (Err(a), Err(b)) if a.is_unknown() || b.is_unknown());
    if claims.is_empty() || is_unknown {
        let [first, second] = all.at_start;
        return Err(reason(first, second));
    }
    let (uuid, standing) = identity::establish(medium, &claims, chosen).await?;
    let (superblock, copies, are_all_usable) = all.of(&uuid).newest();
    Ok(SuperblockProbe { superblock, copies, are_all_usable, standing })
}

impl AllCopies {
    async fn read<M: Medium>(medium: &M) -> AllCopies {
        let at_start = [read_at_start(medium, 0).await, read_at_start(medium, 1).await];
        let said = at_start.iter().flatten().map(|superblock| superblock.layout.third_offset());
        let mut offsets: Vec<u64> = said.chain(tail_offset(medium)).collect();
        offsets.sort_unstable();
        offsets.dedup();
        let mut thirds = Vec::new();
        for offset in offsets {
            thirds.push((offset, read_third(medium, offset).await));
        }
        AllCopies { at_start, thirds }
    }

    /// Each valid copy, with its offset.
    fn claims(&self) -> Vec<Claim> {
        let at_start = SUPERBLOCK_OFFSETS.into_iter().zip(&self.at_start);
        let thirds = self.thirds.iter().map(|(offset, copy)| (*offset, copy));
        let all = at_start.chain(thirds);
        all.filter_map(|(offset, copy)| Some(Claim { superblock: *copy.as_ref().ok()?, offset })).collect()
    }

    /// The copies of one volume; those of others count as lost.
    fn of(self, uuid: &[u8; 16]) -> AllCopies {
        let own = |copy: ReadCopy| match copy {
            Ok(found) if found.uuid != *uuid => Err(CopyError::Foreign(found.uuid)),
            copy => copy,
        };
        let thirds = self.thirds.into_iter().map(|(offset, copy)| (offset, own(copy))).collect();
        AllCopies { at_start: self.at_start.map(own), thirds }
    }

    /// The newest of one volume's copies, of which there must be one; each copy as it was found; and whether all begin
    /// the log at the same place.
    fn newest(mut self) -> (Superblock, [SuperblockCopy; COPIES], bool) {
        let by_sequence = |superblock: &&Superblock| superblock.write_seq;
        let thirds = || self.thirds.iter().filter_map(|(_, copy)| copy.as_ref().ok());
        let newest =
            self.at_start.iter().flatten().max_by_key(by_sequence).or_else(|| thirds().max_by_key(by_sequence));
        let mut newest = *newest.expect("the identity is that of a copy");
        let is_third_of = |of: &Superblock| {
            let third = thirds().find(|third| third.layout == of.layout);
            third.is_some_and(|third| of.write_seq.saturating_sub(third.write_seq) <= 1)
        };
        // A third copy with a new size is written only after one of the first two has it. So if one with another size
        // is ahead of the first two, these were restored from an earlier state.
        let ahead = thirds().find(|third| third.write_seq > newest.write_seq);
        if let Some(ahead) = ahead.filter(|_| !is_third_of(&newest)) {
            newest = *ahead;
        }
        let offset = newest.layout.third_offset();
        let found = self.thirds.iter().position(|(at, _)| *at == offset);
        let third =
            found.map_or(Err(CopyError::Superblock(SuperblockError::Magic)), |at| self.thirds.swap_remove(at).1);
        let third = third.and_then(|third| third_of(&newest, third));
        let superblock = third.as_ref().ok().filter(|third| third.write_seq > newest.write_seq).copied();
        let superblock = superblock.unwrap_or(newest);
        let serves = |copy: &ReadCopy| {
            let serves = |copy: &Superblock| copy.log_tail == superblock.log_tail && copy.layout == superblock.layout;
            copy.as_ref().is_ok_and(serves)
        };
        let [first, second] = self.at_start;
        let are_all_usable = [&first, &second, &third].into_iter().all(serves);
        let [a, b] = SUPERBLOCK_OFFSETS;
        let copies = [(a, first), (b, second), (offset, third)];
        (superblock, copies.map(|(offset, copy)| SuperblockCopy::found(offset, copy, &superblock)), are_all_usable)
    }
}

impl SuperblockCopy {
    /// Describes a copy in relation to the newest one.
    fn found(offset_bytes: u64, copy: ReadCopy, newest: &Superblock) -> SuperblockCopy {
        let missed = |copy: &Superblock| newest.write_seq.saturating_sub(copy.write_seq);
        let write_seq = match &copy {
            Ok(copy) => Some(copy.write_seq),
            Err(CopyError::Behind(missed)) => Some(newest.write_seq.saturating_sub(*missed)),
            Err(_) => None,
        };
        let loss = match copy {
            // The first two are written in turn, and a crash may have come between the write of one of them and that of
            // the third.
            Ok(copy) => Some(missed(&copy)).filter(|missed| *missed > 2).map(CopyError::Behind),
            Err(loss) => Some(loss),
        };
        let is_foreign = matches!(loss, Some(CopyError::Foreign(_)));
        SuperblockCopy { offset_bytes, lost: loss.map(|loss| loss.to_string()), write_seq, is_foreign }
    }
}

/// The third copy in relation to the newest one. If it missed writes, it counts as lost.
fn third_of(newest: &Superblock, third: Superblock) -> ReadCopy {
    match newest.write_seq.saturating_sub(third.write_seq) {
        _ if third.layout != newest.layout => Err(CopyError::Superblock(SuperblockError::Place)),
        // A crash may have come between the two writes.
        0 | 1 => Ok(third),
        missed => Err(CopyError::Behind(missed)),
    }
}

/// The error to report if no copy can be used.
fn reason(first: ReadCopy, second: ReadCopy) -> VolumeError {
    match (first, second) {
        (Err(CopyError::Superblock(SuperblockError::Magic)), Err(second)) => second.into(),
        (Err(first), Err(second)) if second.is_unknown() && !first.is_unknown() => second.into(),
        (Err(first), _) => first.into(),
        (Ok(_), Err(second)) => second.into(),
        (Ok(_), Ok(_)) => SuperblockError::Magic.into(),
    }
}

async fn read_copy<M: Medium>(medium: &M, offset: u64) -> ReadCopy {
    let sector = medium.sector_bytes() as usize;
    if offset + sector as u64 > medium.len_bytes() {
        return Err(CopyError::Superblock(SuperblockError::Magic));
    }
    let (read, bytes) = medium.read(offset, medium.buffer(sector)).await;
    read.map_err(CopyError::Medium)?;
    Superblock::decode(&bytes).map_err(CopyError::Superblock)
}

/// Reads one of the first two copies. They are written in turn, so a copy in the other one's place is part of something
/// else, such as a whole volume that begins further on.
async fn read_at_start<M: Medium>(medium: &M, copy: usize) -> ReadCopy {
    let found = read_copy(medium, SUPERBLOCK_OFFSETS[copy]).await?;
    if found.write_seq % 2 != copy as u64 {
        return Err(CopyError::Superblock(SuperblockError::Place));
    }
    Ok(found)
}

/// Reads a third copy. It counts only if its layout places it there.
async fn read_third<M: Medium>(medium: &M, offset: u64) -> ReadCopy {
    let found = read_copy(medium, offset).await?;
    if found.layout.third_offset() != offset {
        return Err(CopyError::Superblock(SuperblockError::Place));
    }
    Ok(found)
}

/// Writes a superblock over the older of the first two copies, and over the third.
///
/// # Errors
/// When the first of these writes fails. Without the third copy the volume stays usable: it counts only if the others
/// are lost.
pub(crate) async fn write<M: Medium>(medium: &M, superblock: &Superblock) -> Result<(), MediumError> {
    write_at_start(medium, superblock).await?;
    if let Err(error) = medium.write(superblock.layout.third_offset(), image(medium, superblock)).await {
        tracing::warn!(%error, "cannot write the third copy of the superblock");
    }
    Ok(())
}

/// Writes a superblock only over the older of the first two copies. This is how the first superblock with a new size is
/// written.
///
/// The third copy must not be ahead of the others then. If they still had the old size, on a medium longer than the
/// volume the third copy would not be found; the volume would continue with the old size, and the third copy would stay
/// there.
///
/// # Errors
/// When the medium fails.
pub(crate) async fn write_at_start<M: Medium>(medium: &M, superblock: &Superblock) -> Result<(), MediumError> {
    medium.write(SUPERBLOCK_OFFSETS[(superblock.write_seq % 2) as usize], image(medium, superblock)).await
}

/// Bytes that are written for one copy: a sector of the volume or of the medium, whichever is larger.
fn copy_bytes<M: Medium>(medium: &M, layout: &Layout) -> usize {
    layout.sector_bytes().max(medium.sector_bytes()) as usize
}

fn image<M: Medium>(medium: &M, superblock: &Superblock) -> Slice {
    padded(medium, &superblock.encode(), copy_bytes(medium, &superblock.layout))
}

/// Wipes the third copy of a layout, so that it is not found there once the volume has another layout.
///
/// # Errors
/// When the medium fails.
pub(crate) async fn wipe_third<M: Medium>(medium: &M, layout: &Layout) -> Result<(), MediumError> {
    medium.write(layout.third_offset(), padded(medium, &[], copy_bytes(medium, layout))).await
}

/// Wipes every copy that an earlier volume, of any version, may have left on the medium, before a new volume is created
/// with this layout and the third copy at `third_offset`.
///
/// # Errors
/// When the medium fails.
pub(crate) async fn wipe<M: Medium>(medium: &M, layout: &Layout, third_offset: u64) -> Result<(), MediumError> {
    // Copies of any volume: it no longer matters which of them owned the medium.
    let old = AllCopies::read(medium).await.thirds.into_iter().map(|(offset, _)| offset);
    let thirds = old.chain(third_offsets(medium).await).chain([third_offset]);
    let sector = copy_bytes(medium, layout);
    for offset in SUPERBLOCK_OFFSETS.into_iter().chain(thirds) {
        if offset + sector as u64 <= medium.len_bytes() {
            medium.write(offset, padded(medium, &[], sector)).await?;
        }
    }
    Ok(())
}
