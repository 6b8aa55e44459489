//! Operations on names and inodes of subvolumes, as a filesystem offers them to programs: each is planned, and applied
//! in one step.
//!
//! Invariants:
//! - An operation is atomic: it is a whole part of one transaction, or it changed nothing.
//! - A subvolume is opened by the first operation on it. One that is deleted has no operations, and one that is
//!   read-only none that changes it ([`SubvolumeError`](crate::subvolumes::SubvolumeError)).
//! - Orphans that an earlier mount left, or that a snapshot has from its source, are deleted before the first change of
//!   a subvolume. Nobody can use them, as they have no names. Those that come later may be in use: only
//!   [`Engine::release`] deletes them.
//! - While the filesystem is open, an inode number is not used twice. Neither is an index of a directory, unless very
//!   many directories are changed.
//!
//! Nothing here checks the permissions of a user ([`EngineError::errno`] has the number of each refusal).

mod errno;
mod read;
mod release;
mod rename;
mod space;
mod subvolumes;

use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem, Timespec};
use sealblock_btrfs_format::superblock::Geometry;

use crate::change::Change;
use crate::datasum::Datasum;
use crate::engine::{Engine, EngineError};
use crate::inode::{AttributeChanges, Ownership};
use crate::names::{NewFile, Place, Unlinked};
use crate::numbers::{SubvolumePlan, Taken};
use crate::plan::{Plan, PlanContext, PlanError};
use crate::subvolumes::Access;
use crate::transaction::{ChangeError, Transaction};
use crate::xattrs::XattrMode;

pub use read::{DirectoryItem, Resolved, ResolvedEntry};
pub use space::DataSpace;
pub use subvolumes::{NewSnapshot, SubvolumePlace};

/// An operation on the files of one subvolume.
struct Operation<'d> {
    root: u64,
    /// The time of the changes.
    now: Timespec,
    /// The directories that get entries.
    directories: &'d [u64],
    /// True if it frees more space than it uses.
    frees_space: bool,
}

impl Engine {
    /// Runs an operation that changes files of one subvolume.
    async fn run_operation<T>(
        &self,
        operation: Operation<'_>,
        mut plan_it: impl FnMut(&mut SubvolumePlan<'_>) -> Result<T, PlanError>,
    ) -> Result<T, EngineError> {
        let Operation { root, now, directories, frees_space } = operation;
        self.recover_orphans(root).await?;
        self.change(|transaction| {
            transaction.open_subvolume(root, Access::Change)?;
            let (result, taken, items) = transaction.plan(root, now, |plan| {
                self.numbers.borrow().give(root, directories, plan);
                let result = plan_it(plan)?;
                Ok((result, Taken::of(plan), plan.changes().clone()))
            })?;
            if !items.is_empty() {
                transaction.apply_change(&Change { frees_space, ..Change::of(root, items) })?;
                transaction.mark_changed(root, now);
            }
            self.numbers.borrow_mut().take(root, taken);
            Ok(result)
        })
        .await
    }

    /// Creates a file of any type, or a directory. Returns its inode number.
    ///
    /// # Errors
    /// Those of [`Plan::create`], of the subvolume, and of the engine.
    pub async fn create(
        &self,
        root: u64,
        place: Place<'_>,
        file: NewFile<'_>,
        owner: &Ownership,
        now: Timespec,
    ) -> Result<u64, EngineError> {
        let operation = Operation { root, now, directories: &[place.directory], frees_space: false };
        self.run_operation(operation, |plan| plan.create(place, file, owner)).await
    }

    /// As [`Engine::create`], where the permissions of `owner` are those that were asked for, before the umask: it, or the
    /// default access control list of the directory, limits them.
    ///
    /// # Errors
    /// Those of [`Plan::create_masked`], of the subvolume, and of the engine.
    pub async fn create_masked(
        &self,
        root: u64,
        place: Place<'_>,
        file: NewFile<'_>,
        (owner, umask): (&Ownership, u32),
        now: Timespec,
    ) -> Result<u64, EngineError> {
        let operation = Operation { root, now, directories: &[place.directory], frees_space: false };
        self.run_operation(operation, |plan| plan.create_masked(place, file, owner, umask)).await
    }

    /// Creates a regular file without a name (O_TMPFILE), which inherits from a directory. It is to be released
    /// ([`Engine::release`]) unless it gets a name.
    ///
    /// # Errors
    /// Those of [`Plan::create_unnamed`], of the subvolume, and of the engine.
    pub async fn create_unnamed(
        &self,
        root: u64,
        directory: u64,
        owner: &Ownership,
        now: Timespec,
    ) -> Result<u64, EngineError> {
        let operation = Operation { root, now, directories: &[], frees_space: false };
        self.run_operation(operation, |plan| plan.create_unnamed(directory, owner)).await
    }

    /// Gives a file another name.
    ///
    /// # Errors
    /// Those of [`Plan::link`], of the subvolume, and of the engine.
    pub async fn link(&self, root: u64, ino: u64, place: Place<'_>, now: Timespec) -> Result<(), EngineError> {
        let operation = Operation { root, now, directories: &[place.directory], frees_space: false };
        self.run_operation(operation, |plan| plan.link(ino, place)).await
    }

    /// Gives a file its first name that [`Engine::create_unnamed`] made. Whether it did is the caller's to know.
    ///
    /// # Errors
    /// Those of [`Plan::link_unnamed`], of the subvolume, and of the engine.
    pub async fn link_unnamed(&self, root: u64, ino: u64, place: Place<'_>, now: Timespec) -> Result<(), EngineError> {
        let operation = Operation { root, now, directories: &[place.directory], frees_space: false };
        self.run_operation(operation, |plan| plan.link_unnamed(ino, place)).await
    }

    /// Removes a name of a file that is not a directory. An inode that has none left is to be released
    /// ([`Engine::release`]) when nobody uses it.
    ///
    /// # Errors
    /// Those of [`Plan::unlink`], of the subvolume, and of the engine.
    pub async fn unlink(&self, root: u64, place: Place<'_>, now: Timespec) -> Result<Unlinked, EngineError> {
        let operation = Operation { root, now, directories: &[], frees_space: true };
        self.run_operation(operation, |plan| plan.unlink(place)).await
    }

    /// Changes attributes of an inode.
    ///
    /// # Errors
    /// Those of [`Plan::set_attributes`], of the subvolume, and of the engine.
    pub async fn set_attributes(
        &self,
        root: u64,
        ino: u64,
        changes: &AttributeChanges,
        now: Timespec,
    ) -> Result<InodeItem, EngineError> {
        let operation = Operation { root, now, directories: &[], frees_space: false };
        self.run_operation(operation, |plan| plan.set_attributes(ino, changes)).await
    }

    /// Gives an inode these of the flags that programs can set.
    ///
    /// # Errors
    /// Those of [`Plan::set_flags`], of the subvolume, and of the engine.
    pub async fn set_flags(
        &self,
        root: u64,
        ino: u64,
        wanted: InodeFlags,
        now: Timespec,
    ) -> Result<InodeItem, EngineError> {
        let operation = Operation { root, now, directories: &[], frees_space: false };
        self.run_operation(operation, |plan| plan.set_flags(ino, wanted)).await
    }

    /// Sets where the checksums of the data of an empty file are kept, or of those of new files in a directory.
    ///
    /// # Errors
    /// Those of [`Plan::set_datasum`], of the subvolume, and of the engine.
    pub async fn set_datasum(
        &self,
        root: u64,
        ino: u64,
        datasum: Datasum,
        now: Timespec,
    ) -> Result<InodeItem, EngineError> {
        let operation = Operation { root, now, directories: &[], frees_space: false };
        self.run_operation(operation, |plan| plan.set_datasum(ino, datasum)).await
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// Those of [`Plan::set_xattr`], of the subvolume, and of the engine.
    pub async fn set_xattr(
        &self,
        root: u64,
        ino: u64,
        (name, value): (&[u8], &[u8]),
        mode: XattrMode,
        now: Timespec,
    ) -> Result<(), EngineError> {
        let operation = Operation { root, now, directories: &[], frees_space: false };
        self.run_operation(operation, |plan| plan.set_xattr(ino, name, value, mode)).await
    }

    /// Sets the access control list of an inode, and with it its mode.
    ///
    /// # Errors
    /// Those of [`Plan::set_access_acl`], of the subvolume, and of the engine.
    pub async fn set_access_acl(
        &self,
        root: u64,
        ino: u64,
        value: &[u8],
        kills_set_group_id: bool,
        now: Timespec,
    ) -> Result<(), EngineError> {
        let operation = Operation { root, now, directories: &[], frees_space: false };
        self.run_operation(operation, |plan| plan.set_access_acl(ino, value, kills_set_group_id)).await
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// Those of [`Plan::remove_xattr`], of the subvolume, and of the engine.
    pub async fn remove_xattr(&self, root: u64, ino: u64, name: &[u8], now: Timespec) -> Result<(), EngineError> {
        let operation = Operation { root, now, directories: &[], frees_space: true };
        self.run_operation(operation, |plan| plan.remove_xattr(ino, name)).await
    }
}

impl Transaction {
    /// Plans with the items of an open subvolume.
    ///
    /// # Errors
    /// Those of the plan.
    pub(crate) fn plan<T>(
        &self,
        root: u64,
        now: Timespec,
        plan_it: impl FnOnce(&mut SubvolumePlan<'_>) -> Result<T, PlanError>,
    ) -> Result<T, ChangeError> {
        let (view, geometry) = (self.view(root)?, *self.geometry());
        let mut plan = Plan::new(&view, self.plan_context(&geometry, now));
        Ok(plan_it(&mut plan)?)
    }

    /// What a plan needs to know of this transaction. `geometry` is a copy of its own.
    pub fn plan_context<'a>(&self, geometry: &'a Geometry, now: Timespec) -> PlanContext<'a> {
        PlanContext { geometry, generation: self.generation(), now, has_device_sums: self.has_device_sums }
    }
}
