//! Operations that move or remove names which may lead to subvolumes: those have their places in the root tree, too.
//!
//! Invariants:
//! - The entry of a subvolume and the two references in the root tree change in one step, and agree on directory, index
//!   and name.
//! - No subvolume is moved below itself.

use std::collections::BTreeSet;

use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::directory::Target;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use super::{Operation, Resolved, Taken};
use crate::change::Change;
use crate::engine::{Engine, EngineError};
use crate::inode::Ownership;
use crate::names::{MovedSubvolume, NewFile, Place, RenameMode, Renamed, Unlinked};
use crate::plan::PlanError;
use crate::subvolumes::{Access, SubvolumeError};
use crate::transaction::{ChangeError, Transaction};

/// An end of a rename: a subvolume, and a place in it.
type End<'a> = (u64, Place<'a>);

impl Engine {
    /// Removes an empty directory, or the entry that is left of a subvolume in a snapshot (returned as `None`).
    ///
    /// # Errors
    /// Those of [`Plan::rmdir`](crate::plan::Plan::rmdir), of the subvolume, and of the engine;
    /// [`PlanError::NotEmpty`] for a subvolume, which [`Engine::delete_empty_subvolume`] deletes if it is empty.
    pub async fn rmdir(&self, root: u64, place: Place<'_>, now: Timespec) -> Result<Option<Unlinked>, EngineError> {
        let operation = Operation { root, now, directories: &[], frees_space: true };
        match self.run_operation(operation, |plan| plan.rmdir(place)).await {
            Err(EngineError::Change(ChangeError::Plan(PlanError::IsSubvolume(_)))) => {
                self.remove_left_over(root, place, now).await.map(|()| None)
            }
            result => result.map(Some),
        }
    }

    /// Removes the entry of a subvolume that is elsewhere.
    async fn remove_left_over(&self, root: u64, place: Place<'_>, now: Timespec) -> Result<(), EngineError> {
        self.change(|transaction| {
            transaction.open_subvolume(root, Access::Change)?;
            let items = transaction.plan(root, now, |plan| {
                plan.remove_subvolume_entry(place, None)?;
                Ok(plan.changes().clone())
            })?;
            // Only now is it known to be an entry of a subvolume.
            let entry = transaction.plan(root, now, |plan| plan.lookup(place.directory, place.name))?;
            if let Some(Target::Subvolume(id)) = entry.map(|entry| entry.target)
                && transaction.index_of_subvolume(id, root, place)?.is_some()
            {
                return Err(PlanError::NotEmpty.into());
            }
            transaction.apply_change(&Change { frees_space: true, ..Change::of(root, items) })?;
            transaction.mark_changed(root, now);
            Ok(())
        })
        .await
    }

    /// Renames a file of any type, or a subvolume. Only a subvolume can move to another subvolume, where the name must
    /// be free. If a name is replaced, the writes of the file that are in flight are waited for: programs replace a file
    /// by a new one so that a crash leaves one of the two, whole.
    ///
    /// # Errors
    /// Those of [`Plan::rename`](crate::plan::Plan::rename), of the subvolumes, and of the engine;
    /// [`SubvolumeError::Crossing`] for a file that would leave its subvolume; [`PlanError::NotEmpty`] if a subvolume
    /// would be replaced, or what is left of one in a snapshot would move.
    pub async fn rename(
        &self,
        from: End<'_>,
        to: End<'_>,
        mode: RenameMode,
        now: Timespec,
    ) -> Result<Renamed, EngineError> {
        if from.0 != to.0 {
            return self.move_to_subvolume(from, to, mode, now).await;
        }
        self.complete_source(from, to).await?;
        if mode == RenameMode::Exchange {
            self.complete_source(to, from).await?;
        }
        let directories = &[from.1.directory, to.1.directory];
        let operation = Operation { root: from.0, now, directories, frees_space: false };
        match self.run_operation(operation, |plan| plan.rename(from.1, to.1, mode)).await {
            Err(EngineError::Change(ChangeError::Plan(PlanError::IsSubvolume(_)))) => {
                self.rename_subvolumes(from.0, from.1, to.1, mode, now).await
            }
            result => result,
        }
    }

    /// Renames a file or a directory within its subvolume, and leaves a character device with the number 0 at the old
    /// name, with this owner. That hides a name of a lower layer where directories are laid over each other.
    ///
    /// # Errors
    /// As for [`Engine::rename`]; [`PlanError::IsSubvolume`] for a subvolume.
    pub async fn rename_to_whiteout(
        &self,
        root: u64,
        from: Place<'_>,
        to: Place<'_>,
        owner: &Ownership,
        now: Timespec,
    ) -> Result<Renamed, EngineError> {
        self.complete_source((root, from), (root, to)).await?;
        let directories = &[from.directory, to.directory];
        let operation = Operation { root, now, directories, frees_space: false };
        self.run_operation(operation, |plan| {
            plan.attempt(|plan| {
                let renamed = plan.rename(from, to, RenameMode::Replace)?;
                if renamed != Renamed::Same {
                    plan.create(from, NewFile::CharacterDevice(0), owner)?;
                }
                Ok(renamed)
            })
        })
        .await
    }

    /// The file that is renamed gets its size before it replaces another one, for which writes in flight are waited for:
    /// after a power cut, the name has one of the two files whole.
    async fn complete_source(&self, (root, place): End<'_>, to: End<'_>) -> Result<(), EngineError> {
        if !self.has_unfinished_files(root) {
            return Ok(());
        }
        // What is wrong with a name, the rename itself finds out.
        let replaces = matches!(self.lookup(to.0, to.1).await, Ok(Some(_)));
        if replaces
            && let Ok(Some(found)) = self.lookup(root, place).await
            && let Resolved::Inode(ino) = found.target
        {
            self.complete_writes(root, ino).await?;
        }
        Ok(())
    }

    async fn rename_subvolumes(
        &self,
        root: u64,
        from: Place<'_>,
        to: Place<'_>,
        mode: RenameMode,
        now: Timespec,
    ) -> Result<Renamed, EngineError> {
        self.change(|transaction| {
            transaction.open_subvolume(root, Access::Change)?;
            let mut indices = Vec::new();
            for place in [from, to] {
                let entry = transaction.plan(root, now, |plan| plan.lookup(place.directory, place.name))?;
                if let Some(Target::Subvolume(id)) = entry.map(|entry| entry.target) {
                    let index = transaction.index_of_subvolume(id, root, place)?;
                    indices.extend(index.map(|index| (place, index)));
                }
            }
            let (renamed, moved, items, taken) = transaction.plan(root, now, |plan| {
                self.numbers.borrow().give(root, &[from.directory, to.directory], plan);
                let (renamed, moved) = plan.rename_subvolumes(from, to, mode, &indices)?;
                Ok((renamed, moved, plan.changes().clone(), Taken::of(plan)))
            })?;
            let mut in_roots = ItemChanges::new();
            for one in &moved {
                transaction.move_place(&mut in_roots, (root, root), one)?;
            }
            let items = vec![(root, items), (objectid::ROOT_TREE, in_roots)];
            transaction.apply_change(&Change { items, ..Change::default() })?;
            transaction.mark_changed(root, now);
            self.numbers.borrow_mut().take(root, taken);
            Ok(renamed)
        })
        .await
    }

    /// Moves a subvolume to a place in another subvolume.
    async fn move_to_subvolume(
        &self,
        from: End<'_>,
        to: End<'_>,
        mode: RenameMode,
        now: Timespec,
    ) -> Result<Renamed, EngineError> {
        self.recover_orphans(from.0).await?;
        self.recover_orphans(to.0).await?;
        self.change(|transaction| {
            transaction.open_subvolume(from.0, Access::Change)?;
            transaction.open_subvolume(to.0, Access::Change)?;
            let entry = transaction
                .plan(from.0, now, |plan| plan.lookup(from.1.directory, from.1.name)?.ok_or(PlanError::NotFound))?;
            let Target::Subvolume(id) = entry.target else { return Err(SubvolumeError::Crossing.into()) };
            let index = transaction.index_of_subvolume(id, from.0, from.1)?.ok_or(PlanError::NotEmpty)?;
            transaction.check_not_within(to.0, id)?;
            let removed = transaction.plan(from.0, now, |plan| {
                plan.remove_subvolume_entry(from.1, Some(index))?;
                Ok(plan.changes().clone())
            })?;
            let (added, index, taken) = transaction.plan(to.0, now, |plan| {
                self.numbers.borrow().give(to.0, &[to.1.directory], plan);
                let index = match plan.add_subvolume_entry(to.1, id) {
                    // What is there would be replaced or exchanged across subvolumes.
                    Err(PlanError::Exists) if mode != RenameMode::NoReplace => Ok(None),
                    result => result.map(Some),
                }?;
                Ok((plan.changes().clone(), index, Taken::of(plan)))
            })?;
            let index = index.ok_or(SubvolumeError::Crossing)?;
            if mode == RenameMode::Exchange {
                return Err(PlanError::NotFound.into());
            }
            let mut in_roots = ItemChanges::new();
            let moved = MovedSubvolume { id, place: to.1, index };
            transaction.move_place(&mut in_roots, (from.0, to.0), &moved)?;
            let items = vec![(from.0, removed), (to.0, added), (objectid::ROOT_TREE, in_roots)];
            transaction.apply_change(&Change { items, ..Change::default() })?;
            transaction.mark_changed(from.0, now);
            transaction.mark_changed(to.0, now);
            self.numbers.borrow_mut().take(to.0, taken);
            Ok(Renamed::Moved(None))
        })
        .await
    }
}

impl Transaction {
    /// Refuses to move a subvolume below itself: into `target`, or what `target` is in.
    fn check_not_within(&self, target: u64, id: u64) -> Result<(), ChangeError> {
        let (mut at, mut seen) = (target, BTreeSet::new());
        while at != objectid::FS_TREE {
            if at == id {
                return Err(PlanError::BelowItself.into());
            }
            if !seen.insert(at) {
                return Err(ChangeError::Item(Key::new(at, ItemType::ROOT_BACKREF, 0)));
            }
            at = self.place_of(at)?.0;
        }
        Ok(())
    }
}
