//! Inodes without names: they are deleted when nobody uses them, in steps, and so are those that an earlier mount left.
//!
//! Invariants:
//! - A step is a whole part of one transaction, after which the inode is a valid orphan, or gone. So a filesystem that
//!   stops between two steps is consistent, and whoever opens it next goes on.
//! - Extents go from the end of the file, and its size goes with them.

use std::num::NonZeroUsize;

use sealblock_block::yield_once;
use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem, Timespec};
use zerocopy::FromZeros;

use super::SubvolumePlan;
use crate::change::Change;
use crate::engine::{Engine, EngineError};
use crate::file_map::{DataRefs, File, FileEdit};
use crate::inode::kind_of;
use crate::orphans::{Orphan, orphan_key};
use crate::plan::PlanError;
use crate::subvolumes::Access;
use crate::transaction::{ChangeError, Transaction};
use crate::view::Items;

/// The items of a file that are dropped or deleted in one step.
const ITEMS_OF_A_STEP: NonZeroUsize = NonZeroUsize::new(16).expect("not 0");

/// A step of the deletion of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// There is more to do.
    Some,
    /// The inode is gone.
    Last,
    /// It has names, and stays.
    Named,
}

impl Engine {
    /// Deletes an inode that has no names left and that nobody uses. Returns false if it has names.
    ///
    /// # Errors
    /// If there is no such inode, it is damaged, something cannot be read, or there is no space. The inode stays an
    /// orphan then, and the filesystem deletes it when it is opened the next time.
    pub async fn release(&self, root: u64, ino: u64) -> Result<bool, EngineError> {
        loop {
            match self.change(|transaction| transaction.delete_step(root, ino)).await? {
                Step::Some => {}
                Step::Last => return Ok(true),
                Step::Named => return Ok(false),
            }
            self.between_steps().await?;
        }
    }

    /// Between steps of long work: commits if the changes so far need too much memory, and lets the other tasks of the
    /// core run.
    ///
    /// # Errors
    /// As for [`Engine::commit`].
    pub async fn between_steps(&self) -> Result<(), EngineError> {
        self.limit_dirty().await?;
        yield_once().await;
        Ok(())
    }

    /// Deletes the orphans that a subvolume has when it is first changed: those of earlier mounts, and those that a
    /// snapshot has from its source. What is found to be damaged is left. Every operation that changes a subvolume does
    /// this first, and only the first one finds something.
    ///
    /// # Errors
    /// If there is no such subvolume, something cannot be read, or nothing is written any more.
    pub async fn recover_orphans(&self, root: u64) -> Result<(), EngineError> {
        if self.numbers.borrow().recovered.contains(&root) {
            return Ok(());
        }
        // They are listed in one step, and those that come later are not in the list: they may be in use.
        let orphans = self
            .change(|transaction| {
                transaction.open_subvolume(root, Access::Read)?;
                let orphans = transaction.orphans(root)?;
                self.numbers.borrow_mut().recovered.insert(root);
                Ok(orphans)
            })
            .await?;
        for ino in orphans {
            match self.recover_orphan(root, ino).await {
                Err(EngineError::Change(error)) => {
                    tracing::warn!(root, ino, %error, "an orphan of an earlier mount cannot be deleted");
                }
                result => result?,
            }
        }
        Ok(())
    }

    /// Deletes the orphans that earlier mounts left in any subvolume, as [`Engine::recover_orphans`]: also in those that
    /// are not changed, or cannot be. Ends early if `is_over`.
    ///
    /// # Errors
    /// If something cannot be read, or nothing is written any more.
    pub async fn recover_all_orphans(&self, is_over: impl Fn() -> bool) -> Result<(), EngineError> {
        let mut from = 0;
        while let Some(root) = self.inspect(|transaction| transaction.next_alive(from)).await?
            && !is_over()
        {
            from = root + 1;
            self.recover_orphans_of(root).await?;
            yield_once().await;
        }
        Ok(())
    }

    /// As [`Engine::recover_orphans`], but opens the subvolume only if it has some: each open tree makes the reserve of a
    /// commit larger. What cannot be deleted stays.
    ///
    /// # Errors
    /// If nothing is written any more.
    pub(crate) async fn recover_orphans_of(&self, root: u64) -> Result<(), EngineError> {
        let recovered = match self.inspect(|transaction| transaction.has_orphans(root)).await {
            Ok(true) => self.recover_orphans(root).await,
            other => other.map(drop),
        };
        match recovered {
            Err(error) if !matches!(error, EngineError::Stopped(_)) => {
                tracing::warn!(root, %error, "inodes without names may stay in a subvolume");
                Ok(())
            }
            result => result,
        }
    }

    async fn recover_orphan(&self, root: u64, ino: u64) -> Result<(), EngineError> {
        let orphan = self
            .change(|transaction| {
                let (orphan, items) = transaction.plan(root, Timespec::new_zeroed(), |plan| {
                    Ok((plan.recover_orphan(ino)?, plan.changes().clone()))
                })?;
                if !items.is_empty() {
                    transaction.apply_change(&Change { frees_space: true, ..Change::of(root, items) })?;
                }
                Ok(orphan)
            })
            .await?;
        match orphan {
            Orphan::Unlinked => self.release(root, ino).await.map(drop),
            Orphan::Stale => Ok(()),
        }
    }
}

impl Transaction {
    /// True if a subvolume, which need not be open, has orphans.
    fn has_orphans(&self, root: u64) -> Result<bool, ChangeError> {
        let first = orphan_key(0)..=orphan_key(u64::MAX);
        self.peek(root, |items| Ok(items.first(first)?.is_some()))
    }

    fn orphans(&self, root: u64) -> Result<Vec<u64>, ChangeError> {
        self.plan(root, Timespec::new_zeroed(), |plan| {
            let (mut found, mut from) = (Vec::new(), Some(0));
            while let Some(at) = from
                && let Some(ino) = plan.next_orphan(at)?
            {
                found.push(ino);
                from = ino.checked_add(1);
            }
            Ok(found)
        })
    }

    /// Deletes some of an inode without names.
    fn delete_step(&mut self, root: u64, ino: u64) -> Result<Step, ChangeError> {
        // A subvolume that became read-only meanwhile still gets rid of what it no longer shows.
        self.open_subvolume(root, Access::Read)?;
        if let Some(change) = self.drop_extents(root, ino)? {
            self.apply_change(&change)?;
            return Ok(Step::Some);
        }
        let (step, items) = self.plan(root, Timespec::new_zeroed(), |plan| {
            if plan.inode(ino)?.nlink.get() != 0 {
                return Ok((Step::Named, plan.changes().clone()));
            }
            let is_gone = plan.delete_inode(ino, ITEMS_OF_A_STEP.get())?;
            Ok((if is_gone { Step::Last } else { Step::Some }, plan.changes().clone()))
        })?;
        if !items.is_empty() {
            self.apply_change(&Change { frees_space: true, ..Change::of(root, items) })?;
        }
        Ok(step)
    }

    /// Plans to drop the last extents of a file without names. `None` if it has none left.
    fn drop_extents(&self, root: u64, ino: u64) -> Result<Option<Change>, ChangeError> {
        let view = self.view(root)?;
        let inode = self.plan(root, Timespec::new_zeroed(), |plan| plan.inode(ino))?;
        if kind_of(&inode) != FileType::Regular || inode.nlink.get() != 0 {
            return Ok(None);
        }
        let mut edit = FileEdit::new(self.file(root, ino, &inode), &view);
        let truncated = edit.truncate(0, inode.size.get(), ITEMS_OF_A_STEP)?;
        let changes = edit.finish();
        if changes.items.is_empty() {
            return Ok(None);
        }
        let of_inode = self.plan(root, Timespec::new_zeroed(), |plan| {
            shrink(plan, ino, truncated.size, changes.removed_bytes)?;
            Ok(plan.changes().clone())
        })?;
        let items = vec![(root, changes.items), (root, of_inode)];
        let refs: DataRefs = changes.refs;
        Ok(Some(Change { items, refs, frees_space: true, ..Change::default() }))
    }

    /// A file of an open subvolume.
    pub(crate) fn file(&self, root: u64, ino: u64, inode: &InodeItem) -> File {
        let geometry = self.geometry();
        File {
            root,
            ino,
            sector_bytes: geometry.sector_bytes,
            node_bytes: geometry.node_bytes,
            has_hole_items: !geometry.features.incompat.contains(Incompat::NO_HOLES),
            has_sums: !inode.flags().contains(InodeFlags::NODATASUM),
        }
    }
}

/// A file without names lost extents.
fn shrink(plan: &mut SubvolumePlan<'_>, ino: u64, size: u64, removed_bytes: u64) -> Result<(), PlanError> {
    plan.edit_inode(ino, |inode| {
        inode.size = size.into();
        // Nobody relies on the count of a file that goes; a wrong one must not keep it.
        inode.nbytes = inode.nbytes.get().saturating_sub(removed_bytes).into();
        Ok(())
    })?;
    Ok(())
}
