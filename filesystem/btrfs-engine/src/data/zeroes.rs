//! Ranges of files get extents that are written, with zeroes which the devices make (FALLOC_FL_WRITE_ZEROES).
//!
//! What is written there later goes to the same place, and changes no items. So it is only for files with NODATACOW:
//! others are written to new places each time.
//!
//! Invariants:
//! - Items show zeroes as written only when the devices have made them. A power cut before the commit leaves the file
//!   with the extents that it had; never does it show what a device had there before.
//! - Extents that the file has are zeroed in place under the rules for writes in place ([`crate::nocow`]). What
//!   somebody else has too, or a snapshot, gets a new place.
//! - Linux allows no written extents behind the end of a file, so the file grows with each step.

use std::ops::Range;
use std::rc::Rc;

use sealblock_btrfs_format::items::inode::InodeFlags;

use super::io::{Content, MAX_EXTENT_BYTES};
use super::put::{InPlaceRun, Piece, Put};
use super::resize::refused;
use super::write::may_be_in_place;
use super::{FileId, FileInfo, FileLock, ITEMS_OF_A_STEP};
use crate::engine::{Engine, EngineError};
use crate::file_map::FileMap;
use crate::plan::PlanError;
use crate::transaction::{ChangeError, Transaction};

const HAS_CHECKSUMS: &str = "only a file with NODATACOW and without checksums can have written zeroes: all others are \
    written to new places, so nothing would be gained (`chattr +C` on the file while it is empty)";

impl Engine {
    /// Makes bytes of a file zeroes that are written, so that later writes there change no items. The devices make the
    /// zeroes, and may deallocate their blocks. The file grows to the end of the range. [`Engine::fsync`] makes it
    /// durable.
    ///
    /// # Errors
    /// [`PlanError::Unsupported`] for a file that has checksums or is copied on write; otherwise as for
    /// [`Engine::truncate`]. What came before the error stays.
    pub async fn write_zeroes(&self, root: u64, ino: u64, offset: u64, bytes: u64) -> Result<(), EngineError> {
        let id = FileId { root, ino };
        let lock = self.lock_to_write(id, offset, bytes).await?;
        let info = self.change(|transaction| transaction.file_to_change(id, false)).await?;
        let range = self.change(|_| info.range(offset, bytes)).await?;
        if range.is_empty() {
            return Err(refused(id, &range, "a range of no bytes"));
        }
        if !info.has(InodeFlags::NODATACOW) || info.file.has_sums {
            return Err(EngineError::Change(PlanError::Unsupported(HAS_CHECKSUMS).into()));
        }
        self.check_room(id, &info, info.sectors(&range)).await?;
        let size = lock.state().size(info.stored_size());
        let grows = range.end > size;
        self.prepare_extents(&lock, &info, size, grows).await?;
        let mut rest = range;
        while !rest.is_empty() {
            rest.start = self.zero_step(&lock, &info, rest.clone()).await?;
            self.limit_dirty().await?;
        }
        if grows {
            lock.state().set_tail_clean(true);
        }
        Ok(())
    }

    /// Makes the first bytes of a range zeroes. Returns how far it came.
    async fn zero_step(&self, lock: &Rc<FileLock>, info: &FileInfo, bytes: Range<u64>) -> Result<u64, EngineError> {
        // No snapshot may come between the test for writes in place and these.
        let in_place_write = self.while_waiting(self.data().in_place.begin(lock.file().root)).await;
        let plan = |transaction: &mut Transaction| transaction.plan_zeroes(lock, info, bytes.clone());
        let (bytes, in_place) = self.change(plan).await?;
        let size = lock.state().size(info.stored_size());
        let mut pieces = self.zero_pieces(lock, info, bytes.clone(), size).await?.0;
        pieces.extend(between(&info.sectors(&bytes), &pieces));
        pieces.sort_by_key(|piece| piece.start);
        let put = Put { pieces, in_place, in_place_write: Some(Rc::new(in_place_write)), method: None };
        let written = self.put(lock, info, put).await?;
        let end = written.end.min(bytes.end);
        self.show(lock, written, None, end).await?;
        Ok(end)
    }
}

impl Transaction {
    /// The bytes of a step, and what of them is zeroed in place. A last sector of which only some bytes become zeroes
    /// is a step of its own, as only the last piece of a step may be written in part.
    fn plan_zeroes(
        &mut self,
        lock: &FileLock,
        info: &FileInfo,
        bytes: Range<u64>,
    ) -> Result<(Range<u64>, Vec<InPlaceRun>), ChangeError> {
        let mut end = bytes.end.min(info.sector_start(bytes.start.saturating_add(MAX_EXTENT_BYTES)));
        if info.sector_start(end) > bytes.start {
            end = info.sector_start(end);
        }
        let view = self.view(lock.file().root)?;
        let parts = FileMap::new(info.file, &view).parts(info.sectors(&(bytes.start..end)), ITEMS_OF_A_STEP)?;
        let candidates = parts.parts().iter().filter(|part| may_be_in_place(info, part));
        let in_place = self.in_place_runs(info, candidates)?;
        Ok((bytes.start..end.min(parts.range().end), in_place))
    }
}

/// Zeroes for the sectors that have no piece. Those that have one are the first or the last sector.
fn between(sectors: &Range<u64>, pieces: &[Piece]) -> Option<Piece> {
    let (mut start, mut end) = (sectors.start, sectors.end);
    for piece in pieces {
        if piece.start == start {
            start = piece.end();
        } else {
            end = piece.start;
        }
    }
    (start < end).then(|| Piece { start, content: Content::Zeroes(end - start) })
}

#[cfg(test)]
mod tests {
    use sealblock_runtime_memory::Slice;

    use super::*;

    #[test]
    fn zeroes_lie_between_sectors_that_keep_some_bytes() {
        let sector = |start| Piece::new(start, Slice::copy_from(&[1; 4096]));
        let range = |pieces: &[Piece]| between(&(4096..20480), pieces).map(|piece| piece.start..piece.end());
        assert_eq!(range(&[]), Some(4096..20480));
        assert_eq!(range(&[sector(4096)]), Some(8192..20480));
        assert_eq!(range(&[sector(16384)]), Some(4096..16384));
        assert_eq!(range(&[sector(4096), sector(16384)]), Some(8192..16384));
        assert!(between(&(4096..8192), &[sector(4096)]).is_none());
    }
}
