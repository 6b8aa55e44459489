//! The data of files: read and written, with all that this changes in the trees.
//!
//! A write goes to new space first. When it has completed, one change makes it visible: the file's items, the
//! references to extents, the checksums and the inode. So a crash finds the old data or the new ones. Only data of
//! files with NODATACOW and space that was allocated in advance are written in place, if nobody else has them
//! ([`crate::nocow`]).
//!
//! Invariants:
//! - A write is answered when its data were written and its change was applied. Nothing else is kept in memory for it.
//! - Data become durable with the commit of the change: [`Engine::fsync`].
//! - Bytes behind the end of a file are never relied on: before a file grows, what its last sector has there becomes
//!   zeroes, and extents that a crash left there go.
//! - A change of many items is made in steps, each of which leaves a file that is right.

mod clone;
mod compress;
mod files;
mod info;
mod io;
mod put;
mod read;
mod resize;
mod seek;
pub(crate) mod state;
mod sync;
mod write;
mod zeroes;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_btrfs_format::items::root::RootFlags;
use sealblock_btrfs_format::key::objectid;
use zerocopy::IntoBytes;

pub use clone::FilePlace;
pub(crate) use files::{FileId, FileLock, InPlaceHold, LockRange};
pub use info::now;
pub(crate) use info::{FileInfo, ITEMS_OF_A_STEP};
pub use read::MAX_FILE_READ_BYTES;
pub use write::WriteMode;

use crate::change::Change;
use crate::csums::CsumEdit;
use crate::engine::{Engine, EngineError};
use crate::file_map::FileEdit;
use crate::inode::{inode_key, kind_of};
use crate::nodes::Nodes;
use crate::plan::{Plan, PlanError};
use crate::transaction::{ChangeError, Transaction};
use crate::view::TreeView;
use put::Written;

/// Why a file of a read-only subvolume is not changed.
pub(crate) const OF_READ_ONLY_SUBVOLUME: &str = "of a read-only subvolume";

/// What the data path did so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DataCounters {
    /// The time for the checksums of written data.
    pub sum_time: Duration,
    /// The part of it during which the data were being written.
    pub hidden_sum_time: Duration,
    /// Writes whose requests were given up before they completed.
    pub abandoned_writes: u64,
    /// Sectors that were restored from another copy.
    pub repaired_sectors: u64,
}

impl Transaction {
    /// A regular file.
    ///
    /// # Errors
    /// If it is none, or a node is not in memory.
    pub(crate) fn file_info(&mut self, id: FileId) -> Result<FileInfo, ChangeError> {
        let FileId { root, ino } = id;
        if !objectid::is_subvolume(root) {
            return Err(ChangeError::NoTree(root));
        }
        self.open_tree(root)?;
        let geometry = *self.geometry();
        let view = self.view(root)?;
        let inode = Plan::new(&view, self.plan_context(&geometry, now())).inode(ino)?;
        match kind_of(&inode) {
            FileType::Regular => {}
            FileType::Directory => return Err(PlanError::IsADirectory.into()),
            _ => return Err(PlanError::InvalidArgument("not a regular file").into()),
        }
        let file = self.file(root, ino, &inode);
        Ok(FileInfo { file, inode })
    }

    /// A regular file that is to be changed. `grows` is true if bytes are only appended.
    ///
    /// # Errors
    /// As for [`Transaction::file_info`]; also if it or the subvolume must not be changed.
    pub(crate) fn file_to_change(&mut self, id: FileId, grows: bool) -> Result<FileInfo, ChangeError> {
        let info = self.file_info(id)?;
        self.check_changeable(id, &info)?;
        check_flags(&info, grows)?;
        Ok(info)
    }

    /// Checks that a file and its subvolume may be changed, as far as programs do not decide that by flags.
    fn check_changeable(&self, id: FileId, info: &FileInfo) -> Result<(), ChangeError> {
        let refuse = |flag| Err(PlanError::Protected { ino: id.ino, flag }.into());
        let root_flags = self.root_item(id.root).map_or(0, |(_, item)| item.head.flags.get());
        let root_flags = RootFlags::from_bits_retain(root_flags);
        match () {
            () if root_flags.contains(RootFlags::READONLY) => refuse(OF_READ_ONLY_SUBVOLUME),
            () if info.has(InodeFlags::READONLY | InodeFlags::VERITY) => refuse("read-only"),
            () => Ok(()),
        }
    }

    /// Plans a change of the data of a file, and applies it with the inode, and with what was written for it. The plan
    /// returns the size that the inode gets.
    ///
    /// # Errors
    /// Those of the plan; if a node is not in memory, or there is no space.
    fn change_file<T>(
        &mut self,
        id: FileId,
        how: &FileChange<'_>,
        plan: impl FnOnce(&mut FileEdit<'_, TreeView<'_, Nodes>>, &FileInfo) -> Result<(T, u64), ChangeError>,
    ) -> Result<T, ChangeError> {
        let info = self.file_info(id)?;
        let (generation, now) = (self.generation(), now());
        let view = self.view(id.root)?;
        let mut edit = FileEdit::new(info.file, &view);
        if let Some(written) = how.written {
            written.plan(&mut edit)?;
        }
        let (result, size) = plan(&mut edit, &info)?;
        if let Some(grown) = (size > info.stored_size()).then(|| info.file.sectors_end(info.stored_size())) {
            edit.fill_holes(grown..info.file.sectors_end(size), generation, NonZeroUsize::MAX)?;
        }
        let file_changes = edit.finish();
        let mut inode = info.inode;
        let nbytes = inode.nbytes.get().checked_add(file_changes.added_bytes);
        let nbytes = nbytes.and_then(|bytes| bytes.checked_sub(file_changes.removed_bytes));
        let key = inode_key(id.ino);
        let damaged = PlanError::Damaged { key, why: "its extents have other bytes than it counts" };
        (inode.nbytes, inode.size) = (nbytes.ok_or(damaged)?.into(), size.into());
        inode.flags = (inode.flags() | how.set_flags).bits().into();
        inode.transid = generation.into();
        inode.sequence = inode.sequence.get().wrapping_add(1).into();
        if how.sets_times {
            (inode.mtime, inode.ctime) = (now, now);
        }
        let mut items = file_changes.items;
        items.replace(key, inode.as_bytes().to_vec());
        let extents = how.new_space.iter().map(|space| (space.start, space.end - space.start)).collect();
        let frees_space = how.frees_space;
        let mut change = Change { refs: file_changes.refs, extents, frees_space, ..Change::of(id.root, items) };
        if let Some(written) = how.written {
            change.extents.extend(written.new_extents());
            change.items.extend(self.plan_sums(written)?.map(|sums| (objectid::CSUM_TREE, sums)));
        }
        self.apply_change(&change)?;
        self.mark_changed(id.root, now);
        Ok(result)
    }

    fn plan_sums(&self, written: &Written<'_>) -> Result<Option<ItemChanges>, ChangeError> {
        let sums = written.sums();
        if sums.is_empty() {
            return Ok(None);
        }
        let view = self.view(objectid::CSUM_TREE)?;
        let mut edit = CsumEdit::new(self.csum_shape(), &view);
        for (logical, sums) in sums {
            edit.insert(*logical, sums)?;
        }
        Ok(Some(edit.finish()))
    }
}

/// Checks the flags by which programs forbid changes of a file.
fn check_flags(info: &FileInfo, grows: bool) -> Result<(), ChangeError> {
    let refuse = |flag| Err(PlanError::Protected { ino: info.file.ino, flag }.into());
    match () {
        () if info.has(InodeFlags::IMMUTABLE) => refuse("immutable"),
        () if info.has(InodeFlags::APPEND) && !grows => refuse("append-only"),
        () => Ok(()),
    }
}

/// How a file changes, besides its items.
#[derive(Clone)]
struct FileChange<'a> {
    /// What was written for it.
    written: Option<&'a Written<'a>>,
    /// Space for a new extent to which nothing was written.
    new_space: Option<Range<u64>>,
    /// True if it may use space that is kept for changes that free more than they use.
    frees_space: bool,
    /// True if the file's times become those of now.
    sets_times: bool,
    /// Flags that the inode gets.
    set_flags: InodeFlags,
}

impl Default for FileChange<'_> {
    fn default() -> Self {
        let set_flags = InodeFlags::empty();
        FileChange { written: None, new_space: None, frees_space: false, sets_times: true, set_flags }
    }
}

impl Engine {
    /// What the data path did so far.
    pub fn data_counters(&self) -> DataCounters {
        let counters = &self.data().counters;
        DataCounters {
            sum_time: counters.sum_time.get(),
            hidden_sum_time: counters.hidden_sum_time.get(),
            abandoned_writes: counters.abandoned.get(),
            repaired_sectors: counters.repaired.get(),
        }
    }

    /// The size of a file, if it is ahead of that in its inode's item: bytes before its end are still being written.
    pub fn size_ahead(&self, root: u64, ino: u64) -> Option<u64> {
        let state = self.data().files.get(FileId { root, ino })?;
        state.is_size_ahead().then(|| state.size(0))
    }

    /// Before a snapshot of a subvolume: stores the sizes of its files, for which writes in flight are waited for, and
    /// waits until no data are being written in place. That is forbidden while the result is there. The snapshot must
    /// be taken meanwhile, or it could have a write halfway.
    ///
    /// # Errors
    /// If a size cannot be stored.
    pub(crate) async fn hold_in_place_writes(&self, root: u64) -> Result<InPlaceHold, EngineError> {
        for id in self.data().files.ahead(root) {
            self.complete_writes(id.root, id.ino).await?;
        }
        let hold = self.data().in_place.hold(root);
        self.while_waiting(hold.granted()).await;
        Ok(hold)
    }

    /// True if a file of a subvolume has writes in flight, or a size that its item does not have.
    pub(crate) fn has_unfinished_files(&self, root: u64) -> bool {
        self.data().files.has_unfinished(root)
    }

    /// Waits for something that an abandoned write may hold.
    async fn while_waiting<T>(&self, wait: impl Future<Output = T>) -> T {
        let mut wait = std::pin::pin!(wait);
        std::future::poll_fn(|context| {
            self.poll_abandoned(context);
            wait.as_mut().poll(context)
        })
        .await
    }

    /// Locks bytes of a file.
    async fn lock(&self, id: FileId, ranges: Vec<LockRange>) -> Rc<FileLock> {
        self.lock_at_once(id, ranges).await.0
    }

    /// As [`Engine::lock`]. Returns also true if there was nothing to wait for, so that nothing changed meanwhile.
    async fn lock_at_once(&self, id: FileId, ranges: Vec<LockRange>) -> (Rc<FileLock>, bool) {
        let lock = self.data().files.request(id, ranges);
        let is_held = lock.granted().now_or_never().is_some();
        if !is_held {
            self.while_waiting(lock.granted()).await;
        }
        (Rc::new(lock), is_held)
    }

    /// Locks a whole file, and stores its size if the inode's item does not have it.
    async fn lock_whole(&self, id: FileId) -> Result<Rc<FileLock>, EngineError> {
        let lock = self.lock(id, vec![LockRange::exclusive(0..u64::MAX)]).await;
        self.store_size(&lock).await?;
        Ok(lock)
    }

    /// Stores as much of the size as may be stored.
    async fn store_size(&self, lock: &FileLock) -> Result<(), EngineError> {
        if !lock.state().is_size_ahead() {
            return Ok(());
        }
        let how = FileChange { sets_times: false, ..FileChange::default() };
        self.change(|transaction| {
            let state = lock.state();
            let (size, stored) = transaction.change_file(lock.file(), &how, |_, info| {
                let size = state.size(info.stored_size());
                let stored = state.storable_size(info.stored_size(), size, None);
                Ok(((size, stored), stored))
            })?;
            state.set_size(size, stored);
            state.set_changed_in(transaction.generation());
            Ok(())
        })
        .await
    }

    /// Commits if the changes so far need too much memory. At half of it the first one who comes commits, and others go
    /// on with the next transaction meanwhile.
    pub(crate) async fn limit_dirty(&self) -> Result<(), EngineError> {
        let (bytes, generation) = {
            let transaction = self.transaction().borrow();
            let node_bytes = transaction.geometry().node_bytes as usize;
            (transaction.nodes.dirty_count().saturating_mul(node_bytes), transaction.generation())
        };
        let most = self.options().max_dirty_bytes;
        if bytes > most || bytes > most / 2 && !self.is_committing() {
            self.commit_through(generation).await?;
        }
        Ok(())
    }
}
