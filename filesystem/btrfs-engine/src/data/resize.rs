//! Files are truncated, get space in advance, and lose ranges.
//!
//! Invariants:
//! - A file is truncated from its end, and each step lowers its size to what is left. So whatever a crash leaves has no
//!   data behind its end.
//! - What of a sector becomes zeroes is written anew before the items around it change.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::rc::Rc;

use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_runtime_memory::Buffer;

use super::io::{MAX_EXTENT_BYTES, Reserved};
use super::put::{Piece, Put, Written};
use super::{FileChange, FileId, FileInfo, FileLock, ITEMS_OF_A_STEP};
use crate::engine::{Engine, EngineError};
use crate::file_map::{DiskExtent, ExtentPart, FileMap, FileMapError, Mapping, Order, Rewrite, ZeroPlan};
use crate::reserve::TreeCost;
use crate::space::{SpaceError, Use};
use crate::transaction::ChangeError;

/// Bytes of the items for one extent.
const ITEM_BYTES: u64 = 3 * 78;
/// Items of a step that frees space when there is little.
const FEW_ITEMS: usize = 8;

impl Engine {
    /// Gives a file this size. What it gains reads as zeroes; what is allocated behind its new end goes.
    ///
    /// # Errors
    /// If there is no space, something cannot be read or written, it is not a regular file, or it must not be changed.
    pub async fn truncate(&self, root: u64, ino: u64, size: u64) -> Result<(), EngineError> {
        let id = FileId { root, ino };
        let lock = self.lock_whole(id).await?;
        let info = self.change(|transaction| transaction.file_to_change(id, false)).await?;
        self.change(|_| info.range(0, size)).await?;
        let old = info.stored_size();
        let is_only_inline = self.form(id).await? == (true, false);
        let may_stay = is_only_inline && self.resize_inline(&lock, &info, size).await?;
        if !may_stay {
            match size > old {
                true => self.lengthen(&lock, &info, size).await?,
                false => self.shorten(&lock, &info, size).await?,
            }
        }
        drop(lock);
        self.limit_dirty().await
    }

    /// Changes the size of a file that is in its item. Returns false if it cannot stay there.
    async fn resize_inline(&self, lock: &Rc<FileLock>, info: &FileInfo, size: u64) -> Result<bool, EngineError> {
        if size == 0 || size > info.sector() {
            return Ok(false);
        }
        let id = lock.file();
        let method = self.change(|transaction| transaction.compression_of(id, info)).await?;
        let mut content = self.content(id, info.stored_size(), true).await?;
        content.resize(size as usize, 0);
        self.put_inline(lock, info, (content, method), true).await
    }

    async fn lengthen(&self, lock: &Rc<FileLock>, info: &FileInfo, size: u64) -> Result<(), EngineError> {
        let pieces: Vec<Piece> = self.clean_tail(lock, info, info.stored_size(), u64::MAX).await?.into_iter().collect();
        let written = self.put(lock, info, Put::plain(pieces)).await?;
        self.show(lock, written, None, size).await?;
        lock.state().set_tail_clean(true);
        Ok(())
    }

    async fn shorten(&self, lock: &Rc<FileLock>, info: &FileInfo, size: u64) -> Result<(), EngineError> {
        let end = info.file.sectors_end(size);
        let tail = self.zero_pieces(lock, info, size..end, info.stored_size()).await?.0;
        let (written, is_clean) = match self.put(lock, info, Put::plain(tail)).await {
            Ok(written) => (Some(written), true),
            // A full disk must not forbid it. What is behind the end is never relied on.
            Err(EngineError::Change(ChangeError::Space(SpaceError::Full(Use::Data)))) => (None, false),
            Err(error) => return Err(error),
        };
        let mut items = ITEMS_OF_A_STEP;
        loop {
            match self.shorten_step(lock, size, (written.as_ref(), items)).await {
                Ok(true) => break,
                Ok(false) => self.limit_dirty().await?,
                Err(error) => items = fewer_items(items, error)?,
            }
        }
        written.into_iter().for_each(Written::keep);
        lock.state().set_tail_clean(is_clean);
        Ok(())
    }

    /// One step. Returns true if it was the last one, with which the new last sector becomes visible.
    async fn shorten_step(
        &self,
        lock: &Rc<FileLock>,
        size: u64,
        (written, items): (Option<&Written<'_>>, NonZeroUsize),
    ) -> Result<bool, EngineError> {
        self.change(|transaction| {
            let generation = transaction.generation();
            // Whether it is the last one is found out first: only that one has what was written.
            let info = transaction.file_info(lock.file())?;
            let view = transaction.view(lock.file().root)?;
            let behind = info.file.sectors_end(size)..info.file.max_bytes();
            let left = FileMap::new(info.file, &view).parts(behind, limit(2 * items.get()))?;
            let extents = left.parts().iter().filter(|part| !matches!(part, Mapping::Hole(_))).count();
            let is_last = left.range().end == info.file.max_bytes() && extents < items.get();
            let written = written.filter(|_| is_last);
            let how = FileChange { written, frees_space: true, ..FileChange::default() };
            let (is_last, stored) = transaction.change_file(lock.file(), &how, |edit, info| {
                let cut = edit.truncate(size, info.stored_size(), if is_last { NonZeroUsize::MAX } else { items })?;
                Ok(((is_last, cut.size), cut.size))
            })?;
            lock.state().set_size(stored, stored);
            lock.state().set_changed_in(generation);
            Ok(is_last)
        })
        .await
    }

    /// The sectors that are to be written so that bytes become zeroes, and the whole sectors that are to be dropped.
    pub(super) async fn zero_pieces(
        &self,
        lock: &FileLock,
        info: &FileInfo,
        bytes: Range<u64>,
        size: u64,
    ) -> Result<(Vec<Piece>, Range<u64>), EngineError> {
        let id = lock.file();
        let ZeroPlan { rewrite, whole } = self
            .change(|transaction| {
                let view = transaction.view(id.root)?;
                Ok(FileMap::new(info.file, &view).plan_zero(bytes.clone(), size)?)
            })
            .await?;
        let mut pieces = Vec::new();
        for one in rewrite {
            let (start, zero) = match one {
                Rewrite::Sector { start, zero } => (start, zero),
                Rewrite::Inline { zero, .. } => (0, zero),
            };
            let (old, bad) = self.read_sectors(id, &(start..start + info.sector())).await?;
            self.remember_bad(bad);
            let mut new = Buffer::zeroed(old.len());
            let kept = (size.saturating_sub(start)).min(old.len() as u64) as usize;
            new[..kept].copy_from_slice(&old[..kept]);
            let end = (zero.end - start).min(old.len() as u64) as usize;
            new[((zero.start - start) as usize).min(end)..end].fill(0);
            pieces.push(Piece::new(start, new.freeze()));
        }
        // Two of an inline file are one: the second is of the first's sector.
        pieces.dedup_by(|second, first| second.start == first.start);
        Ok((pieces, whole))
    }

    /// Makes a hole of bytes of a file. Its size stays.
    ///
    /// # Errors
    /// As for [`Engine::truncate`].
    pub async fn punch(&self, root: u64, ino: u64, offset: u64, bytes: u64) -> Result<(), EngineError> {
        let id = FileId { root, ino };
        let lock = self.lock_to_write(id, offset, bytes).await?;
        self.punch_locked(&lock, offset, bytes).await?;
        drop(lock);
        self.limit_dirty().await
    }

    async fn punch_locked(&self, lock: &Rc<FileLock>, offset: u64, bytes: u64) -> Result<(), EngineError> {
        let id = lock.file();
        let info = self.change(|transaction| transaction.file_to_change(id, false)).await?;
        // Behind the longest file, nothing is there to be punched.
        let most = info.file.max_bytes().checked_sub(offset).unwrap_or(bytes);
        let range = self.change(|_| info.range(offset, bytes.min(most))).await?;
        if range.is_empty() {
            return Err(refused(id, &range, "a range of no bytes"));
        }
        let size = lock.state().size(info.stored_size());
        if self.is_inline(id).await? && range.start < size {
            self.inline_to_extent(lock, &info, size).await?;
        }
        let (pieces, whole) = self.zero_pieces(lock, &info, range, size).await?;
        if !pieces.is_empty() {
            let written = self.put(lock, &info, Put::plain(pieces)).await?;
            self.show(lock, written, None, 0).await?;
        }
        let how = FileChange { frees_space: true, ..FileChange::default() };
        let mut rest = whole;
        loop {
            rest = self
                .change(|transaction| {
                    let generation = transaction.generation();
                    let left = transaction.change_file(id, &how, |edit, info| {
                        let stored = info.stored_size();
                        let left = edit.punch(rest.clone(), (stored, generation), Order::FromStart, ITEMS_OF_A_STEP)?;
                        Ok((left, stored))
                    })?;
                    lock.state().set_changed_in(generation);
                    Ok(left)
                })
                .await?;
            if rest.is_empty() {
                return Ok(());
            }
            self.limit_dirty().await?;
        }
    }

    /// Moves the data of a file from its item to an extent.
    pub(super) async fn inline_to_extent(
        &self,
        lock: &Rc<FileLock>,
        info: &FileInfo,
        size: u64,
    ) -> Result<(), EngineError> {
        let pieces: Vec<Piece> = self.clean_tail(lock, info, size, u64::MAX).await?.into_iter().collect();
        let written = self.put(lock, info, Put::plain(pieces)).await?;
        self.show(lock, written, None, 0).await
    }

    /// Allocates space for a range of a file, where it has none. What has data keeps it, the rest reads as zeroes. The
    /// file grows to the end of the range, unless `keeps_size`.
    ///
    /// # Errors
    /// As for [`Engine::truncate`]. Nothing is allocated if there is less space than the holes of the range need.
    /// Otherwise, what was allocated before the error stays.
    pub async fn allocate_range(
        &self,
        root: u64,
        ino: u64,
        (offset, bytes): (u64, u64),
        keeps_size: bool,
    ) -> Result<(), EngineError> {
        let id = FileId { root, ino };
        let lock = self.lock_to_write(id, offset, bytes).await?;
        self.allocate_locked(&lock, (offset, bytes), keeps_size).await?;
        drop(lock);
        self.limit_dirty().await
    }

    /// Makes bytes of a file zeroes, for which space is allocated.
    ///
    /// # Errors
    /// As for [`Engine::allocate_range`].
    pub async fn zero_range(
        &self,
        root: u64,
        ino: u64,
        (offset, bytes): (u64, u64),
        keeps_size: bool,
    ) -> Result<(), EngineError> {
        let id = FileId { root, ino };
        let lock = self.lock_to_write(id, offset, bytes).await?;
        // Before anything becomes zeroes.
        let info = self.inspect(|transaction| transaction.file_info(id)).await?;
        let range = self.inspect(|_| info.range(offset, bytes)).await?;
        self.check_room(id, &info, info.sectors(&range)).await?;
        self.punch_locked(&lock, offset, bytes).await?;
        self.allocate_locked(&lock, (offset, bytes), keeps_size).await?;
        drop(lock);
        self.limit_dirty().await
    }

    async fn allocate_locked(
        &self,
        lock: &Rc<FileLock>,
        (offset, bytes): (u64, u64),
        keeps_size: bool,
    ) -> Result<(), EngineError> {
        let id = lock.file();
        let range = self.change(|transaction| transaction.file_info(id)?.range(offset, bytes)).await?;
        if range.is_empty() {
            return Err(refused(id, &range, "a range of no bytes"));
        }
        let info = self
            .change(|transaction| {
                let stored = transaction.file_info(id)?.stored_size();
                transaction.file_to_change(id, range.start >= lock.state().size(stored))
            })
            .await?;
        self.check_room(id, &info, info.sectors(&range)).await?;
        let size = lock.state().size(info.stored_size());
        let grows = range.end > size && !keeps_size;
        self.prepare_extents(lock, &info, size, grows).await?;
        let mut rest = info.sectors(&range);
        while !rest.is_empty() {
            rest.start = self.allocate_step(lock, &info, rest.clone()).await?;
            self.limit_dirty().await?;
        }
        if grows {
            let nothing = self.put(lock, &info, Put::plain(Vec::new())).await?;
            self.show(lock, nothing, None, range.end).await?;
            lock.state().set_tail_clean(true);
        }
        Ok(())
    }

    /// Before space is allocated for sectors of a file, in many steps: refuses what there cannot be space for. Otherwise
    /// the steps would take all the space that there is, before the last one fails.
    pub(super) async fn check_room(&self, id: FileId, info: &FileInfo, sectors: Range<u64>) -> Result<(), EngineError> {
        let (mut rest, mut missing) = (sectors, 0);
        while !rest.is_empty() {
            let (holes, end) = self
                .inspect(|transaction| {
                    let view = transaction.view(id.root)?;
                    let parts = FileMap::new(info.file, &view).parts(rest.clone(), ITEMS_OF_A_STEP)?;
                    let holes = parts.parts().iter().filter(|part| matches!(part, Mapping::Hole(_)));
                    let bytes = holes.map(|hole| hole.range(info.file.sector_bytes)).map(|hole| hole.end - hole.start);
                    Ok((bytes.sum::<u64>(), parts.range().end))
                })
                .await?;
            missing += holes;
            // What was freed since the last commit is free after the next one.
            if missing > self.data_space().free_bytes {
                self.sync().await?;
            }
            if missing > self.data_space().free_bytes {
                return Err(EngineError::Change(SpaceError::Full(Use::Data).into()));
            }
            rest.start = end;
        }
        Ok(())
    }

    /// Before a file gets extents: moves what is in its item to one, and if it grows, makes what is behind its end zeroes.
    pub(super) async fn prepare_extents(
        &self,
        lock: &Rc<FileLock>,
        info: &FileInfo,
        size: u64,
        grows: bool,
    ) -> Result<(), EngineError> {
        if self.is_inline(lock.file()).await? {
            self.inline_to_extent(lock, info, size).await?;
        }
        if !grows {
            return Ok(());
        }
        let pieces: Vec<Piece> = self.clean_tail(lock, info, size, u64::MAX).await?.into_iter().collect();
        if !pieces.is_empty() {
            let written = self.put(lock, info, Put::plain(pieces)).await?;
            self.show(lock, written, None, 0).await?;
        }
        Ok(())
    }

    /// Allocates space for the first hole of a range. Returns how far it came.
    async fn allocate_step(&self, lock: &Rc<FileLock>, info: &FileInfo, range: Range<u64>) -> Result<u64, EngineError> {
        let id = lock.file();
        let (hole, end) = self
            .change(|transaction| {
                let view = transaction.view(id.root)?;
                let parts = FileMap::new(info.file, &view).parts(range.clone(), ITEMS_OF_A_STEP)?;
                let hole = parts.parts().iter().find(|part| matches!(part, Mapping::Hole(_)));
                Ok((hole.map(|hole| hole.range(info.file.sector_bytes)), parts.range().end))
            })
            .await?;
        let Some(hole) = hole else { return Ok(end) };
        let bytes = (hole.end - hole.start).min(MAX_EXTENT_BYTES);
        let cost = TreeCost { tree: id.root, changes: 6, bytes: ITEM_BYTES };
        let space = self.allocate(bytes, cost).await?;
        let mut reserved = Reserved::new(self);
        reserved.push(space.clone());
        let bytes = space.end - space.start;
        let start = hole.start;
        self.change(|transaction| {
            let generation = transaction.generation();
            let extent = DiskExtent::plain(space.start, bytes);
            let part = ExtentPart { start, bytes, generation, is_prealloc: true, extent, offset: 0 };
            let (new_space, set_flags) = (Some(space.clone()), InodeFlags::PREALLOC);
            let how = FileChange { new_space, set_flags, ..FileChange::default() };
            transaction.change_file(id, &how, |edit, info| {
                edit.drop_range(start..start + bytes, Order::FromStart, NonZeroUsize::MAX)?;
                edit.insert(part)?;
                Ok(((), info.stored_size()))
            })?;
            lock.state().set_changed_in(generation);
            Ok(())
        })
        .await?;
        reserved.keep();
        Ok(start + bytes)
    }
}

/// The number of items for the next try of a step that frees space, if there was no space for so many: as few as what
/// is kept for such steps is enough for.
fn fewer_items(items: NonZeroUsize, error: EngineError) -> Result<NonZeroUsize, EngineError> {
    let is_full = matches!(error, EngineError::Change(ChangeError::Space(SpaceError::Full(Use::Metadata))));
    let fewer = limit(FEW_ITEMS);
    if is_full && items > fewer { Ok(fewer) } else { Err(error) }
}

fn limit(items: usize) -> NonZeroUsize {
    NonZeroUsize::new(items).unwrap_or(NonZeroUsize::MIN)
}

/// A range that cannot be what is requested.
pub(super) fn refused(id: FileId, range: &Range<u64>, why: &'static str) -> EngineError {
    let Range { start, end } = *range;
    EngineError::Change(ChangeError::File(FileMapError::Range { ino: id.ino, start, end, why }))
}
