//! Files share extents.

use std::ops::Range;
use std::rc::Rc;

use sealblock_btrfs_format::items::inode::InodeFlags;

use super::put::{Piece, Put};
use super::resize::refused;
use super::{FileChange, FileId, FileLock, ITEMS_OF_A_STEP, LockRange};
use crate::engine::{Engine, EngineError};
use crate::file_map::FileMap;
use crate::transaction::{ChangeError, Transaction};

/// A file and the first byte in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FilePlace {
    /// The subvolume.
    pub root: u64,
    /// The inode.
    pub ino: u64,
    /// The first byte.
    pub offset: u64,
}

impl FilePlace {
    fn id(&self) -> FileId {
        FileId { root: self.root, ino: self.ino }
    }
}

/// What is shared: the bytes of the source, and where they begin in the target.
struct CloneRange {
    from: Range<u64>,
    to: u64,
    /// The size of the target when all is done.
    size: u64,
}

impl Engine {
    /// Makes a range of a file share the extents of a range of another one, or of itself. With 0 bytes, that is all up
    /// to the end of the source. A source that is in its item is copied.
    ///
    /// # Errors
    /// If a range does not consist of whole sectors, apart from the end of the source; one file has checksums and the
    /// other has none; the ranges overlap; there is no space; a file is not regular, or the target must not be changed.
    pub async fn clone_range(&self, from: FilePlace, to: FilePlace, bytes: u64) -> Result<(), EngineError> {
        loop {
            let range = self.clone_bounds(from, to, bytes).await?;
            let (source_lock, lock) = self.lock_for_clone(from.id(), to.id(), &range).await?;
            if source_lock.as_ref().is_some_and(|lock| lock.state().is_size_ahead()) {
                let source_lock = source_lock.as_ref().expect("it was looked at");
                self.store_size(source_lock).await?;
            }
            let again = self.clone_bounds(from, to, bytes).await?;
            if (&again.from, again.to) != (&range.from, range.to) {
                continue;
            }
            if again.from.is_empty() {
                return Ok(());
            }
            if self.is_inline(from.id()).await? {
                drop((source_lock, lock));
                return self.copy_small(from, to, &again).await;
            }
            self.clone_locked(from.id(), &lock, &again).await?;
            drop((source_lock, lock));
            return self.limit_dirty().await;
        }
    }

    /// The ranges, checked.
    async fn clone_bounds(&self, from: FilePlace, to: FilePlace, bytes: u64) -> Result<CloneRange, EngineError> {
        let size_of = |transaction: &mut Transaction, id: FileId| {
            let info = transaction.file_info(id)?;
            let state = self.data().files.get(id);
            Ok::<_, ChangeError>((info, state.map_or(info.stored_size(), |state| state.size(info.stored_size()))))
        };
        let ((source, source_size), (target, target_size)) = self
            .change(|transaction| {
                transaction.file_to_change(to.id(), false)?;
                Ok((size_of(transaction, from.id())?, size_of(transaction, to.id())?))
            })
            .await?;
        let bytes = if bytes == 0 { source_size.saturating_sub(from.offset) } else { bytes };
        let range = self.change(|_| source.range(from.offset, bytes)).await?;
        let target_range = self.change(|_| target.range(to.offset, bytes)).await?;
        if range.end > source_size {
            return Err(refused(from.id(), &range, "it ends behind the end of the file"));
        }
        let sector = source.sector();
        let is_whole = range.start.is_multiple_of(sector) && to.offset.is_multiple_of(sector);
        let ends_well = range.end.is_multiple_of(sector) || range.end == source_size && target_range.end >= target_size;
        if !is_whole || !ends_well {
            return Err(refused(from.id(), &range, "these are not whole sectors"));
        }
        let is_small = self.is_inline(from.id()).await?;
        let has_sums = |info: &super::FileInfo| !info.has(InodeFlags::NODATASUM);
        if !is_small && has_sums(&source) != has_sums(&target) {
            return Err(refused(to.id(), &target_range, "one file has checksums and the other has none"));
        }
        // Zeroes that a device made have no tags, and nothing but the flag of the file says that they may lack them.
        let is_in_place = |info: &super::FileInfo| info.has(InodeFlags::NODATACOW);
        if !is_small && self.gives_tags() && is_in_place(&source) && !is_in_place(&target) {
            return Err(refused(to.id(), &target_range, "one file is written in place, and the other must have tags"));
        }
        Ok(CloneRange { from: range, to: to.offset, size: target_range.end })
    }

    /// Locks both ranges; of two files in one order, so that two such operations cannot wait for each other. If it is
    /// one file, it has one lock.
    async fn lock_for_clone(
        &self,
        from: FileId,
        to: FileId,
        range: &CloneRange,
    ) -> Result<(Option<Rc<FileLock>>, Rc<FileLock>), EngineError> {
        // The target may grow, and the last sector of the source is shared whole.
        let source = LockRange::shared(range.from.start..range.from.end.saturating_add(u64::from(u32::MAX)));
        let target = LockRange::exclusive(0..u64::MAX);
        match from.cmp(&to) {
            std::cmp::Ordering::Equal => Ok((None, self.lock_whole(to).await?)),
            std::cmp::Ordering::Less => {
                let first = self.lock(from, vec![source]).await;
                let second = self.lock(to, vec![target]).await;
                self.store_size(&second).await?;
                Ok((Some(first), second))
            }
            std::cmp::Ordering::Greater => {
                let first = self.lock(to, vec![target]).await;
                let second = self.lock(from, vec![source]).await;
                self.store_size(&first).await?;
                Ok((Some(second), first))
            }
        }
    }

    /// Copies what is in an item.
    async fn copy_small(&self, from: FilePlace, to: FilePlace, range: &CloneRange) -> Result<(), EngineError> {
        let data = self.read(from.root, from.ino, range.from.start, range.from.end - range.from.start).await?;
        self.write(to.root, to.ino, range.to, data).await.map(drop)
    }

    async fn clone_locked(&self, source: FileId, lock: &Rc<FileLock>, range: &CloneRange) -> Result<(), EngineError> {
        let id = lock.file();
        let info = self.change(|transaction| transaction.file_to_change(id, false)).await?;
        let size = lock.state().size(info.stored_size());
        if range.size > size || self.is_inline(id).await? {
            let pieces: Vec<Piece> = self.clean_tail(lock, &info, size, u64::MAX).await?.into_iter().collect();
            let written = self.put(lock, &info, Put::plain(pieces)).await?;
            self.show(lock, written, None, 0).await?;
        }
        let (mut done, end) = (0, info.file.sectors_end(range.from.end - range.from.start));
        while done < end {
            done = self.change(|transaction| clone_step(transaction, source, lock, range, done)).await?;
            self.limit_dirty().await?;
        }
        if range.size > size {
            lock.state().set_tail_clean(false);
        }
        Ok(())
    }
}

/// Shares some parts, `done` bytes behind the beginning. Returns how far it came.
fn clone_step(
    transaction: &mut Transaction,
    source: FileId,
    lock: &FileLock,
    range: &CloneRange,
    done: u64,
) -> Result<u64, ChangeError> {
    let from = transaction.file_info(source)?;
    let view = transaction.view(source.root)?;
    let left = range.from.start + done..from.file.sectors_end(range.from.end);
    let parts = FileMap::new(from.file, &view).parts(left, ITEMS_OF_A_STEP)?;
    let generation = transaction.generation();
    let to = range.to + done;
    let how = FileChange::default();
    let (done, size) = transaction.change_file(lock.file(), &how, |edit, info| {
        let rest = edit.clone_range(&parts, to, (range.size, generation), ITEMS_OF_A_STEP)?;
        let all = parts.range().end - parts.range().start;
        let step = if rest.is_empty() { all } else { rest.start - to };
        let size = info.stored_size().max(range.size.min(to + step));
        Ok(((done + step, size), size))
    })?;
    lock.state().set_size(size, size);
    lock.state().set_changed_in(generation);
    Ok(done)
}
