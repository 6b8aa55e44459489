//! Writes bytes of files.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::rc::Rc;

use sealblock_btrfs_format::compress::encode::Method;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_runtime_memory::{Buffer, Slice};

use super::compress::inline_part;
use super::files::{InPlaceWrite, OrderedWrite};
use super::io::MAX_EXTENT_BYTES;
use super::put::{InPlaceRun, Piece, Put, Written};
use super::{FileChange, FileId, FileInfo, FileLock, ITEMS_OF_A_STEP, LockRange, check_flags};
use crate::engine::{Engine, EngineError};
use crate::file_map::{FileMap, FileMapError, MAX_INLINE_BYTES, Mapping, Order};
use crate::nocow::{NocowError, NocowTest};
use crate::transaction::{ChangeError, Transaction};
use crate::view::Items;

/// The most bytes that are compressed for one change.
const MAX_COMPRESSED_STEP: u64 = 4 << 20;

/// How bytes are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteMode {
    /// The times of the file change. Otherwise the caller sets them.
    pub sets_times: bool,
    /// The file was opened when it could be changed, so flags of the inode that forbid changes do not count.
    pub is_open: bool,
}

/// What a step of a write needs to know.
struct WritePlan {
    info: FileInfo,
    /// The size of the file.
    size: u64,
    /// The bytes of the step.
    bytes: Range<u64>,
    is_inline: bool,
    /// True if the whole file may be in its item afterwards.
    may_be_inline: bool,
    in_place: Vec<InPlaceRun>,
    /// True if something might be written in place, which was not looked at.
    wants_in_place: bool,
    method: Option<Method>,
}

impl Transaction {
    /// Plans a step of a write.
    fn plan_write(
        &mut self,
        lock: &FileLock,
        (at, left): (u64, u64),
        (is_open, may_write_in_place): (bool, bool),
    ) -> Result<WritePlan, ChangeError> {
        let info = self.file_info(lock.file())?;
        let stored = info.stored_size();
        let (size, planned) = (lock.state().size(stored), lock.state().planned_size(stored));
        self.check_changeable(lock.file(), &info)?;
        if !is_open {
            check_flags(&info, at >= size)?;
        }
        let method = self.compression_of(lock.file(), &info)?;
        let most = if method.is_some() { MAX_COMPRESSED_STEP } else { MAX_EXTENT_BYTES };
        let end = at + left;
        let step_end = if left > most { info.sector_start(at + most) } else { end };
        let view = self.view(lock.file().root)?;
        let map = FileMap::new(info.file, &view);
        let range = map.parts(info.sectors(&(at..step_end)), ITEMS_OF_A_STEP)?;
        let most_inline = if method.is_some() { info.sector() } else { MAX_INLINE_BYTES };
        let fits = planned.max(end) <= most_inline && !info.has(InodeFlags::NODATACOW);
        let candidates = range.parts().iter().filter(|part| may_be_in_place(&info, part));
        let in_place = match may_write_in_place {
            true => self.in_place_runs(&info, candidates.clone())?,
            false => Vec::new(),
        };
        Ok(WritePlan {
            info,
            size,
            bytes: at..step_end.min(range.range().end),
            is_inline: map.is_inline()?,
            may_be_inline: fits && !form_of(&map, &info)?.1,
            in_place,
            wants_in_place: !may_write_in_place && candidates.count() > 0,
            method,
        })
    }

    /// Those parts that may be written in place.
    pub(super) fn in_place_runs<'m>(
        &self,
        info: &FileInfo,
        parts: impl Iterator<Item = &'m Mapping>,
    ) -> Result<Vec<InPlaceRun>, ChangeError> {
        let (extents, csums) = (self.view(objectid::EXTENT_TREE)?, self.view(objectid::CSUM_TREE)?);
        let last_snapshot = self.root_item(info.file.root).map_or(0, |(_, item)| item.head.last_snapshot.get());
        let test = NocowTest {
            file: info.file,
            has_nodatacow: info.has(InodeFlags::NODATACOW),
            last_snapshot,
            // Whoever takes one holds writes in place back.
            is_snapshot_pending: false,
            extents: &extents,
            delayed: &self.refs,
            released: &self.released,
            csums: &csums,
            shape: self.csum_shape(),
        };
        let mut runs = Vec::new();
        for part in parts {
            let must_cow = test.must_cow(part, |_| false).map_err(|error| match error {
                NocowError::Tree(error) => error.into(),
                NocowError::Csums(error) => error.into(),
                NocowError::Extent { bytenr, .. } => ChangeError::Item(Key::new(bytenr, ItemType::EXTENT_ITEM, 0)),
            })?;
            if let (None, Mapping::Extent(part)) = (must_cow, part) {
                let (bytes, logical) = (part.start..part.end(), part.stored().start);
                let (is_prealloc, generation) = (part.is_prealloc, part.generation);
                runs.push(InPlaceRun { bytes, logical, is_prealloc, generation });
            }
        }
        Ok(runs)
    }

    /// True if a file has written extents behind its end, which a crash left there.
    fn has_leftovers(&self, info: &FileInfo, size: u64) -> Result<bool, ChangeError> {
        let behind = info.file.sectors_end(size)..info.file.max_bytes();
        let view = self.view(info.file.root)?;
        let parts = FileMap::new(info.file, &view).parts(behind, NonZeroUsize::MAX)?;
        Ok(parts.parts().iter().any(is_written))
    }
}

/// Whether a file is in its item, and whether it has extents.
fn form_of<T: Items>(map: &FileMap<'_, T>, info: &FileInfo) -> Result<(bool, bool), FileMapError> {
    // An extent is among the first three parts, if there is one: behind what is in the item, and a hole.
    let all = map.parts(0..info.file.max_bytes(), NonZeroUsize::new(3).expect("it is not 0"))?;
    let is_inline = matches!(all.parts().first(), Some(Mapping::Inline(_)));
    Ok((is_inline, all.parts().iter().any(|part| matches!(part, Mapping::Extent(_)))))
}

/// True if a part may be written in place, unless somebody else has it.
pub(super) fn may_be_in_place(info: &FileInfo, part: &Mapping) -> bool {
    matches!(part, Mapping::Extent(part) if part.is_prealloc || info.has(InodeFlags::NODATACOW))
}

fn is_written(part: &Mapping) -> bool {
    matches!(part, Mapping::Extent(part) if !part.is_prealloc)
}

impl Engine {
    /// Writes bytes of a file. When this returns, the data were written, and the next commit makes them durable.
    /// Returns the number of bytes that were written: fewer only if an error occurred after some were.
    ///
    /// # Errors
    /// If there is no space, no copy of a sector can be written, it is not a regular file, or it must not be changed.
    /// The file is as it was then; only what was to be written in place may have both old and new sectors.
    pub async fn write(&self, root: u64, ino: u64, offset: u64, data: Slice) -> Result<u64, EngineError> {
        self.write_as(root, ino, (offset, data), WriteMode { sets_times: true, is_open: false }).await
    }

    /// As [`Engine::write`], in this mode.
    ///
    /// # Errors
    /// As for [`Engine::write`].
    pub async fn write_as(
        &self,
        root: u64,
        ino: u64,
        (offset, data): (u64, Slice),
        mode: WriteMode,
    ) -> Result<u64, EngineError> {
        let (id, bytes) = (FileId { root, ino }, data.len() as u64);
        if bytes == 0 {
            return Ok(0);
        }
        let lock = self.lock_to_write(id, offset, bytes).await?;
        let own = lock.begin_write(offset..offset + bytes);
        let mut done = 0;
        while done < bytes {
            let step = (offset + done, data.slice(done as usize..));
            match self.write_step(&lock, &own, step, mode).await {
                Ok(written) => done += written,
                Err(error) if done == 0 || matches!(error, EngineError::Stopped(_)) => {
                    self.write_failed(&lock, own).await;
                    return Err(error);
                }
                Err(error) => {
                    tracing::debug!(%error, done, "a write ends early");
                    self.write_failed(&lock, own).await;
                    return Ok(done);
                }
            }
            self.limit_dirty().await?;
        }
        Ok(done)
    }

    /// Others may have waited for a write with the size, and it did not come.
    async fn write_failed(&self, lock: &Rc<FileLock>, own: OrderedWrite) {
        drop(own);
        if let Err(error) = self.store_size(lock).await {
            tracing::debug!(%error, "the size of a file is not stored");
        }
    }

    /// Locks the sectors of a range exclusively. If the file grows, also those from its end on. Whoever writes a file that
    /// is in its item moves that to an extent, and so locks it: otherwise it could come back over what another write put
    /// there meanwhile.
    pub(super) async fn lock_to_write(&self, id: FileId, offset: u64, bytes: u64) -> Result<Rc<FileLock>, EngineError> {
        let look = || {
            self.change(|transaction| {
                let info = transaction.file_info(id)?;
                let range = info.sectors(&info.range(offset, bytes)?);
                let view = transaction.view(id.root)?;
                if FileMap::new(info.file, &view).is_inline()? {
                    return Ok(0..range.end);
                }
                let stored = info.stored_size();
                let end = self.data().files.get(id).map_or(stored, |state| match state.is_tail_clean() {
                    true => state.planned_size(stored),
                    false => state.size(stored),
                });
                Ok(info.sector_start(end).min(range.start)..range.end)
            })
        };
        loop {
            let range = look().await?;
            let (lock, is_new) = self.lock_at_once(id, vec![LockRange::exclusive(range.clone())]).await;
            if is_new || look().await?.start >= range.start {
                return Ok(lock);
            }
        }
    }

    async fn write_step(
        &self,
        lock: &Rc<FileLock>,
        own: &OrderedWrite,
        (at, data): (u64, Slice),
        WriteMode { sets_times, is_open }: WriteMode,
    ) -> Result<u64, EngineError> {
        let (plan, in_place_write) = self.plan_write(lock, (at, data.len() as u64), is_open).await?;
        if plan.may_be_inline && self.write_inline(lock, &plan, (at, &data), sets_times).await? {
            return Ok(data.len() as u64);
        }
        let sectors = plan.info.sectors(&plan.bytes);
        let mut pieces: Vec<Piece> = Vec::new();
        let cleans_tail = plan.bytes.end > plan.size || plan.is_inline;
        if cleans_tail {
            pieces.extend(self.clean_tail(lock, &plan.info, plan.size, sectors.start).await?);
        }
        let bytes = (plan.bytes.end - at) as usize;
        let data = self.whole_sectors(lock, &plan, &data.slice(..bytes)).await?;
        pieces.push(Piece::new(sectors.start, data));
        let put = Put { pieces, in_place: plan.in_place, in_place_write, method: plan.method };
        let written = self.put(lock, &plan.info, put).await?;
        let end = written.end.min(plan.bytes.end);
        self.show_as(lock, written, (Some(own), end), sets_times).await?;
        if cleans_tail {
            lock.state().set_tail_clean(true);
        }
        Ok(end - at)
    }

    /// Plans a step. Returns also what lets a snapshot wait, if something is to be written in place.
    async fn plan_write(
        &self,
        lock: &FileLock,
        rest: (u64, u64),
        is_open: bool,
    ) -> Result<(WritePlan, Option<Rc<InPlaceWrite>>), EngineError> {
        let plan = self.change(|transaction| transaction.plan_write(lock, rest, (is_open, false))).await?;
        if !plan.wants_in_place {
            return Ok((plan, None));
        }
        // Whether it may be is looked at when no snapshot can come in between.
        let write = Rc::new(self.while_waiting(self.data().in_place.begin(lock.file().root)).await);
        let plan = self.change(|transaction| transaction.plan_write(lock, rest, (is_open, true))).await?;
        Ok((plan, Some(write)))
    }

    /// Writes a whole small file into its item. Returns false if that is not possible.
    async fn write_inline(
        &self,
        lock: &FileLock,
        plan: &WritePlan,
        (at, data): (u64, &Slice),
        sets_times: bool,
    ) -> Result<bool, EngineError> {
        let mut content = self.content(lock.file(), plan.size, plan.is_inline).await?;
        let from = at as usize;
        content.resize(content.len().max(from + data.len()), 0);
        content[from..from + data.len()].copy_from_slice(data);
        self.put_inline(lock, &plan.info, (content, plan.method), sets_times).await
    }

    /// The content of a small file.
    pub(super) async fn content(&self, id: FileId, size: u64, is_inline: bool) -> Result<Vec<u8>, EngineError> {
        let info = self.change(|transaction| transaction.file_info(id)).await?;
        let mut content = match is_inline {
            true => self.read_sectors(id, &(0..info.sector())).await?.0.to_vec(),
            false => Vec::new(),
        };
        content.resize(size as usize, 0);
        Ok(content)
    }

    /// Makes this the content of a file, in its item. Returns false if that is not possible.
    pub(super) async fn put_inline(
        &self,
        lock: &FileLock,
        info: &FileInfo,
        (content, method): (Vec<u8>, Option<Method>),
        sets_times: bool,
    ) -> Result<bool, EngineError> {
        let Some(mut part) = inline_part(info, &content, method, 0) else { return Ok(false) };
        let size = content.len() as u64;
        self.change(|transaction| {
            part.generation = transaction.generation();
            let how = FileChange { sets_times, ..FileChange::default() };
            transaction.change_file(lock.file(), &how, |edit, info| {
                edit.drop_range(0..info.sector(), Order::FromStart, NonZeroUsize::MAX)?;
                edit.insert_inline(&part, size)?;
                Ok(((), size))
            })?;
            lock.state().set_size(size, size);
            lock.state().set_changed_in(transaction.generation());
            Ok(())
        })
        .await?;
        lock.state().set_tail_clean(true);
        Ok(true)
    }

    /// The sectors of data, with what the file has before and behind them.
    async fn whole_sectors(&self, lock: &FileLock, plan: &WritePlan, data: &Slice) -> Result<Slice, EngineError> {
        let (info, bytes) = (&plan.info, &plan.bytes);
        let sectors = info.sectors(bytes);
        if sectors == *bytes {
            return Ok(data.clone());
        }
        let sector = info.sector();
        let mut whole = Buffer::zeroed((sectors.end - sectors.start) as usize);
        let (first, last) = (sectors.start, sectors.end - sector);
        let needs_first = first < bytes.start && first < plan.size;
        let needs_last = bytes.end < sectors.end && bytes.end < plan.size && !(needs_first && first == last);
        for start in [(first, needs_first), (last, needs_last)].into_iter().filter(|(_, needed)| *needed) {
            let start = start.0;
            let (old, bad) = self.read_sectors(lock.file(), &(start..start + sector)).await?;
            self.remember_bad(bad);
            // Nothing behind the end of the file counts.
            let kept = (plan.size - start).min(sector) as usize;
            whole[(start - first) as usize..][..kept].copy_from_slice(&old[..kept]);
        }
        whole[(bytes.start - first) as usize..][..data.len()].copy_from_slice(data);
        Ok(whole.freeze())
    }

    /// Sees to it that bytes behind the end of a file are zeroes, before it grows. Returns the sector that is to be
    /// written for this, unless it is that at `from` or behind, which is written anyway. If the file is in its item,
    /// this is its data.
    pub(super) async fn clean_tail(
        &self,
        lock: &Rc<FileLock>,
        info: &FileInfo,
        size: u64,
        from: u64,
    ) -> Result<Option<Piece>, EngineError> {
        let id = lock.file();
        let is_inline = self.is_inline(id).await?;
        if lock.state().is_tail_clean() && !is_inline {
            return Ok(None);
        }
        if self.change(|transaction| transaction.has_leftovers(info, size)).await? {
            self.drop_leftovers(lock, info, size).await?;
        }
        let start = info.sector_start(if is_inline { 0 } else { size });
        if start >= from || (start == size && !is_inline) {
            return Ok(None);
        }
        let (old, bad) = self.read_sectors(id, &(start..start + info.sector())).await?;
        self.remember_bad(bad);
        let kept = ((size - start) as usize).min(old.len());
        if !is_inline && old[kept..].iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let mut clean = Buffer::zeroed(old.len());
        clean[..kept].copy_from_slice(&old[..kept]);
        Ok(Some(Piece::new(start, clean.freeze())))
    }

    pub(super) async fn is_inline(&self, id: FileId) -> Result<bool, EngineError> {
        Ok(self.form(id).await?.0)
    }

    /// Whether a file is in its item, and whether it has extents.
    pub(super) async fn form(&self, id: FileId) -> Result<(bool, bool), EngineError> {
        self.change(|transaction| {
            let info = transaction.file_info(id)?;
            Ok(form_of(&FileMap::new(info.file, &transaction.view(id.root)?), &info)?)
        })
        .await
    }

    /// Drops written extents behind the end of a file. Space that was allocated there stays.
    async fn drop_leftovers(&self, lock: &FileLock, info: &FileInfo, size: u64) -> Result<(), EngineError> {
        let how = FileChange { frees_space: true, sets_times: false, ..FileChange::default() };
        let mut from = info.file.sectors_end(size);
        while from < info.file.max_bytes() {
            from = self
                .change(|transaction| {
                    transaction.change_file(lock.file(), &how, |edit, info| {
                        let behind = from..info.file.max_bytes();
                        let range = edit.map().parts(behind, ITEMS_OF_A_STEP)?;
                        for part in range.parts().iter().filter(|part| is_written(part)) {
                            let bytes = part.range(info.file.sector_bytes);
                            edit.drop_range(bytes, Order::FromStart, NonZeroUsize::MAX)?;
                        }
                        Ok((range.range().end, info.stored_size()))
                    })
                })
                .await?;
        }
        Ok(())
    }

    /// Makes visible what was written. The file has `end` bytes at least afterwards.
    pub(super) async fn show(
        &self,
        lock: &FileLock,
        written: Written<'_>,
        own: Option<&OrderedWrite>,
        end: u64,
    ) -> Result<(), EngineError> {
        self.show_as(lock, written, (own, end), true).await
    }

    async fn show_as(
        &self,
        lock: &FileLock,
        written: Written<'_>,
        (own, end): (Option<&OrderedWrite>, u64),
        sets_times: bool,
    ) -> Result<(), EngineError> {
        let how = FileChange { written: Some(&written), sets_times, ..FileChange::default() };
        self.change(|transaction| {
            let state = lock.state();
            let (size, stored, was) = transaction.change_file(lock.file(), &how, |_, info| {
                let size = state.size(info.stored_size()).max(end);
                let stored = state.storable_size(info.stored_size(), size, own.map(|own| (own, end)));
                Ok(((size, stored, info.stored_size()), stored))
            })?;
            if written.has_in_place() {
                state.set_written_in(transaction.generation());
            }
            if !written.is_in_place() || stored != was {
                state.set_changed_in(transaction.generation());
            }
            state.set_size(size, stored);
            Ok(())
        })
        .await?;
        written.keep();
        Ok(())
    }
}
