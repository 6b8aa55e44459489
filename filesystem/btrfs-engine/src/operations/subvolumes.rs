//! Operations that make, delete and change subvolumes.

use std::collections::BTreeMap;

use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::directory::Target;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::key::{Key, objectid};

use super::Taken;
use crate::datasum::datasum_of;
use crate::engine::{Engine, EngineError};
use crate::inode::Ownership;
use crate::names::Place;
use crate::plan::{Plan, PlanError};
use crate::subvolumes::{Access, Entry, NewSubvolume, SubvolumeError};
use crate::transaction::{ChangeError, Transaction};

/// The place of a subvolume: another subvolume, and a name in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SubvolumePlace<'a> {
    /// The subvolume of the directory.
    pub root: u64,
    /// The directory and the name.
    pub place: Place<'a>,
}

/// A snapshot that is to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewSnapshot {
    /// The subvolume.
    pub source: u64,
    /// The snapshot's UUID, which no other subvolume has.
    pub uuid: [u8; 16],
    /// True if the snapshot cannot be changed.
    pub is_read_only: bool,
}

/// The entry of a new subvolume.
struct NewEntry {
    index: u64,
    items: ItemChanges,
    taken: Taken,
}

impl Engine {
    /// Creates an empty subvolume with this UUID, which no other one has. Returns its number.
    ///
    /// # Errors
    /// Those of names, of the subvolume that it will be in, and of the engine.
    pub async fn create_subvolume(
        &self,
        to: SubvolumePlace<'_>,
        uuid: [u8; 16],
        owner: &Ownership,
        now: Timespec,
    ) -> Result<u64, EngineError> {
        self.recover_orphans(to.root).await?;
        self.change(|transaction| {
            transaction.open_subvolume(to.root, Access::Change)?;
            let id = transaction.next_subvolume()?;
            let new = self.plan_subvolume_entry(transaction, to, id, now)?;
            let (nothing, geometry) = (BTreeMap::<Key, Vec<u8>>::new(), *transaction.geometry());
            let above = transaction.plan(to.root, now, |plan| plan.inode(to.place.directory))?;
            let mut top = Plan::new(&nothing, transaction.plan_context(&geometry, now));
            top.create_top(owner, datasum_of(&above))?;
            let subvolume = NewSubvolume { id, uuid, now, is_read_only: false };
            transaction.create_subvolume(subvolume, top.changes(), &entry(to, new.index, &new.items))?;
            self.subvolume_made(to, id, new.taken, true);
            Ok(id)
        })
        .await
    }

    /// Makes a snapshot. Returns its number. It has every write that was answered before this was called, and each other
    /// one wholly or not at all: data that are being written in place are waited for, and no others begin meanwhile.
    ///
    /// # Errors
    /// Those of names, of both subvolumes, and of the engine: if nothing is written any more, it may be there.
    pub async fn create_snapshot(
        &self,
        new: NewSnapshot,
        to: SubvolumePlace<'_>,
        now: Timespec,
    ) -> Result<u64, EngineError> {
        self.recover_orphans(to.root).await?;
        let _hold = self.hold_in_place_writes(new.source).await?;
        let made = self.change(|transaction| {
            transaction.open_subvolume(new.source, Access::Read)?;
            transaction.open_subvolume(to.root, Access::Change)?;
            let id = transaction.next_subvolume()?;
            let planned = self.plan_subvolume_entry(transaction, to, id, now)?;
            let snapshot = NewSubvolume { id, uuid: new.uuid, now, is_read_only: new.is_read_only };
            transaction.snapshot(new.source, snapshot, &entry(to, planned.index, &planned.items))?;
            self.subvolume_made(to, id, planned.taken, false);
            Ok(id)
        });
        let id = made.await?;
        // Its orphans are those of the source, but nobody has them open there.
        self.recover_orphans_of(id).await?;
        Ok(id)
    }

    fn plan_subvolume_entry(
        &self,
        transaction: &Transaction,
        to: SubvolumePlace<'_>,
        id: u64,
        now: Timespec,
    ) -> Result<NewEntry, ChangeError> {
        transaction.plan(to.root, now, |plan| {
            self.numbers.borrow().give(to.root, &[to.place.directory], plan);
            let index = plan.add_subvolume_entry(to.place, id)?;
            Ok(NewEntry { index, items: plan.changes().clone(), taken: Taken::of(plan) })
        })
    }

    fn subvolume_made(&self, to: SubvolumePlace<'_>, id: u64, taken: Taken, has_no_orphans: bool) {
        let mut numbers = self.numbers.borrow_mut();
        numbers.take(to.root, taken);
        if has_no_orphans {
            numbers.recovered.insert(id);
        }
    }

    /// Deletes the subvolume at a place. Returns its number. Nobody may use it any more, nor an inode of it: its nodes
    /// are dropped from then on.
    ///
    /// # Errors
    /// Those of names, of the subvolume that it is in, and of the engine; [`SubvolumeError::NotASubvolume`] if
    /// something else is there; if it is the default subvolume, or has others below it.
    pub async fn delete_subvolume(&self, at: SubvolumePlace<'_>, now: Timespec) -> Result<u64, EngineError> {
        self.delete_at(at, now, false).await
    }

    /// Deletes the subvolume at a place if it is empty, as rmdir does in Linux.
    ///
    /// # Errors
    /// As for [`Engine::delete_subvolume`], and [`PlanError::NotEmpty`].
    pub async fn delete_empty_subvolume(&self, at: SubvolumePlace<'_>, now: Timespec) -> Result<u64, EngineError> {
        self.delete_at(at, now, true).await
    }

    async fn delete_at(&self, at: SubvolumePlace<'_>, now: Timespec, must_be_empty: bool) -> Result<u64, EngineError> {
        self.recover_orphans(at.root).await?;
        self.change(|transaction| {
            transaction.open_subvolume(at.root, Access::Change)?;
            let found = transaction.plan(at.root, now, |plan| {
                plan.lookup(at.place.directory, at.place.name)?.ok_or(PlanError::NotFound)
            })?;
            let Target::Subvolume(id) = found.target else { return Err(SubvolumeError::NotASubvolume.into()) };
            let index = transaction.index_of_subvolume(id, at.root, at.place)?;
            let index = index.ok_or(SubvolumeError::NotASubvolume)?;
            transaction.open_subvolume(id, Access::Read)?;
            let top = objectid::FIRST_FREE;
            if must_be_empty && transaction.plan(id, now, |plan| plan.has_entries(top))? {
                return Err(PlanError::NotEmpty.into());
            }
            let items = transaction.plan(at.root, now, |plan| {
                plan.remove_subvolume_entry(at.place, Some(index))?;
                Ok(plan.changes().clone())
            })?;
            transaction.delete_subvolume(id, &entry(at, index, &items), now)?;
            self.numbers.borrow_mut().forget(id);
            Ok(id)
        })
        .await
    }

    /// Makes a subvolume read-only or writable. A writable one no longer has what it was received with. Nobody may be
    /// changing it meanwhile.
    ///
    /// # Errors
    /// If there is no such subvolume, and those of the engine.
    pub async fn set_read_only(&self, root: u64, is_read_only: bool) -> Result<(), EngineError> {
        self.change(|transaction| {
            transaction.open_subvolume(root, Access::Read)?;
            transaction.set_read_only(root, is_read_only)
        })
        .await
    }

    /// True if a subvolume is read-only.
    ///
    /// # Errors
    /// If there is no such subvolume, or something cannot be read.
    pub async fn is_read_only(&self, root: u64) -> Result<bool, EngineError> {
        self.inspect(|transaction| {
            transaction.open_subvolume(root, Access::Read)?;
            transaction.is_read_only(root)
        })
        .await
    }
}

fn entry<'a>(at: SubvolumePlace<'a>, index: u64, items: &'a ItemChanges) -> Entry<'a> {
    Entry { parent: at.root, directory: at.place.directory, index, name: at.place.name, items }
}
