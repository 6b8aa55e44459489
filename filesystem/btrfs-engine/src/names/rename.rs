//! A name moves, replaces another one, or two names exchange their inodes.

use sealblock_btrfs_format::items::directory::{FileType, Target};

use super::entries::{DirectoryEntry, check_name};
use super::{Place, Unlinked};
use crate::plan::{Plan, PlanError};
use crate::view::Items;

/// What happens if the new name is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenameMode {
    /// Its inode loses that name.
    Replace,
    /// The rename is refused (RENAME_NOREPLACE).
    NoReplace,
    /// It must be there, and both names exchange their inodes (RENAME_EXCHANGE).
    Exchange,
}

/// What a rename did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Renamed {
    /// Nothing: both names lead to the same inode.
    Same,
    /// The name moved, and replaced one of this inode, if any.
    Moved(Option<Unlinked>),
    /// The names were exchanged.
    Exchanged,
}

impl<V: Items> Plan<'_, V> {
    /// Renames a file of any type, within the subvolume.
    ///
    /// # Errors
    /// [`PlanError::NotFound`]: the old name, or the new one in an exchange. [`PlanError::Exists`]: the new name, which
    /// must not be there. [`PlanError::NotADirectory`], [`PlanError::IsADirectory`], [`PlanError::NotEmpty`]: only an
    /// empty directory is replaced by a directory, and only another file by another file. [`PlanError::BelowItself`].
    /// [`PlanError::IsSubvolume`]: the caller renames it with its entry ([`Plan::remove_subvolume_entry`]) and in the
    /// root tree. Those of names and of both directories.
    pub fn rename(&mut self, from: Place<'_>, to: Place<'_>, mode: RenameMode) -> Result<Renamed, PlanError> {
        check_name(to.name)?;
        self.attempt(|plan| {
            let source = plan.used_place(from)?;
            plan.directory(to.directory, false)?;
            let target = plan.lookup(to.directory, to.name)?;
            match (target, mode) {
                (Some(_), RenameMode::NoReplace) => return Err(PlanError::Exists),
                (None, RenameMode::Exchange) => return Err(PlanError::NotFound),
                (Some(target), _) if target.target == source.target => return Ok(Renamed::Same),
                _ => {}
            }
            let (ino, kind) = plan.target_inode(from, source)?;
            plan.check_not_below(ino, kind, from, to)?;
            match target {
                None => {
                    plan.move_name(ino, kind, from, to)?;
                    Ok(Renamed::Moved(None))
                }
                Some(target) => {
                    // The name goes, so the directory must not be one that may only grow.
                    plan.directory(to.directory, true)?;
                    match mode {
                        RenameMode::Exchange => plan.exchange((ino, kind), from, target, to),
                        RenameMode::Replace | RenameMode::NoReplace => plan.replace((ino, kind), from, target, to),
                    }
                }
            }
        })
    }

    /// Refuses to move a directory into itself or below.
    fn check_not_below(&self, ino: u64, kind: FileType, from: Place<'_>, to: Place<'_>) -> Result<(), PlanError> {
        let moves = kind == FileType::Directory && from.directory != to.directory;
        if moves && self.is_within(to.directory, ino)? { Err(PlanError::BelowItself) } else { Ok(()) }
    }

    fn replace(
        &mut self,
        (ino, kind): (u64, FileType),
        from: Place<'_>,
        target: DirectoryEntry,
        to: Place<'_>,
    ) -> Result<Renamed, PlanError> {
        if kind == FileType::Directory && target.kind != FileType::Directory {
            return Err(PlanError::NotADirectory);
        }
        if kind != FileType::Directory && target.kind == FileType::Directory {
            return Err(PlanError::IsADirectory);
        }
        let (old, old_kind) = self.target_inode(to, target)?;
        if old_kind == FileType::Directory && self.has_entries(old)? {
            return Err(PlanError::NotEmpty);
        }
        self.reserve_index(to)?;
        let unlinked = self.remove_link(old, to)?;
        self.move_name(ino, kind, from, to)?;
        Ok(Renamed::Moved(Some(unlinked)))
    }

    fn exchange(
        &mut self,
        (ino, kind): (u64, FileType),
        from: Place<'_>,
        target: DirectoryEntry,
        to: Place<'_>,
    ) -> Result<Renamed, PlanError> {
        let (other, other_kind) = self.target_inode(to, target)?;
        self.check_not_below(other, other_kind, to, from)?;
        self.reserve_index(from)?;
        self.reserve_index(to)?;
        self.remove_name(ino, from)?;
        self.remove_name(other, to)?;
        self.add_name(to, DirectoryEntry { target: Target::Inode(ino), kind })?;
        self.add_name(from, DirectoryEntry { target: Target::Inode(other), kind: other_kind })?;
        self.mark_renamed(ino)?;
        self.mark_renamed(other)?;
        Ok(Renamed::Exchanged)
    }

    /// Moves a name to a place that is free.
    fn move_name(&mut self, ino: u64, kind: FileType, from: Place<'_>, to: Place<'_>) -> Result<(), PlanError> {
        self.reserve_index(to)?;
        self.remove_name(ino, from)?;
        self.add_name(to, DirectoryEntry { target: Target::Inode(ino), kind })?;
        self.mark_renamed(ino)
    }

    /// Finds the next index of a directory before a name goes, so the new name does not get the index of the old one. A
    /// program that reads the directory meanwhile would miss it.
    fn reserve_index(&mut self, place: Place<'_>) -> Result<(), PlanError> {
        if self.next_index(place.directory).is_none() {
            let index = self.take_index(place.directory)?;
            self.set_next_index(place.directory, index);
        }
        Ok(())
    }

    fn mark_renamed(&mut self, ino: u64) -> Result<(), PlanError> {
        let now = self.context.now;
        self.edit_inode(ino, |inode| {
            inode.ctime = now;
            Ok(())
        })?;
        Ok(())
    }
}
