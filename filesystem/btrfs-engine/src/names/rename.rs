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

/// A subvolume whose entry moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MovedSubvolume<'a> {
    /// The subvolume.
    pub id: u64,
    /// The directory and name of its entry now.
    pub place: Place<'a>,
    /// The index of its entry now.
    pub index: u64,
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
        self.attempt(|plan| {
            let Some((source, target)) = plan.ends_of_rename(from, to, mode)? else { return Ok(Renamed::Same) };
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

    /// Renames within the subvolume where an entry leads to a subvolume: the old one, the new one, or both. `indices`
    /// are those that the root tree has for the places of subvolumes. An entry without one is left in a snapshot of a
    /// subvolume that is elsewhere: it is replaced as an empty directory, and does not move. Returns the subvolumes
    /// that moved, whose places in the root tree the caller changes.
    ///
    /// # Errors
    /// As for [`Plan::rename`]; [`PlanError::NotEmpty`] also for a subvolume that would be replaced.
    pub fn rename_subvolumes<'p>(
        &mut self,
        from: Place<'p>,
        to: Place<'p>,
        mode: RenameMode,
        indices: &[(Place<'_>, u64)],
    ) -> Result<(Renamed, Vec<MovedSubvolume<'p>>), PlanError> {
        let index_of = |place: Place<'_>| indices.iter().find(|(at, _)| *at == place).map(|(_, index)| *index);
        self.attempt(|plan| {
            let ends = plan.ends_of_rename(from, to, mode)?;
            let Some((source, target)) = ends else { return Ok((Renamed::Same, Vec::new())) };
            plan.check_movable(source, from, to, index_of(from))?;
            plan.reserve_index(from)?;
            plan.reserve_index(to)?;
            let mut replaced = None;
            match target {
                None => {}
                Some(target) => {
                    plan.directory(to.directory, true)?;
                    if mode == RenameMode::Exchange {
                        plan.check_movable(target, to, from, index_of(to))?;
                        plan.take_entry(from, source, index_of(from))?;
                        plan.take_entry(to, target, index_of(to))?;
                        let mut moved = plan.put_entry(to, source)?;
                        moved.extend(plan.put_entry(from, target)?);
                        return Ok((Renamed::Exchanged, moved));
                    }
                    replaced = plan.remove_replaced(source, to, target, index_of(to))?;
                }
            }
            plan.take_entry(from, source, index_of(from))?;
            let moved = plan.put_entry(to, source)?;
            Ok((Renamed::Moved(replaced), moved))
        })
    }

    /// What is at the old name, and at the new one if it is there. `None` if both are one file, which stays.
    fn ends_of_rename(
        &self,
        from: Place<'_>,
        to: Place<'_>,
        mode: RenameMode,
    ) -> Result<Option<(DirectoryEntry, Option<DirectoryEntry>)>, PlanError> {
        check_name(to.name)?;
        let source = self.used_place(from)?;
        self.directory(to.directory, false)?;
        let target = self.lookup(to.directory, to.name)?;
        match (target, mode) {
            (Some(_), RenameMode::NoReplace) => Err(PlanError::Exists),
            (None, RenameMode::Exchange) => Err(PlanError::NotFound),
            (Some(target), _) if target.target == source.target => Ok(None),
            _ => Ok(Some((source, target))),
        }
    }

    /// Refuses to move what is left of a subvolume in a snapshot, and a directory below itself.
    fn check_movable(
        &self,
        entry: DirectoryEntry,
        from: Place<'_>,
        to: Place<'_>,
        index: Option<u64>,
    ) -> Result<(), PlanError> {
        match entry.target {
            Target::Subvolume(_) if index.is_none() => Err(PlanError::NotEmpty),
            Target::Subvolume(_) => Ok(()),
            Target::Inode(_) => {
                let (ino, kind) = self.target_inode(from, entry)?;
                self.check_not_below(ino, kind, from, to)
            }
        }
    }

    /// Removes an entry that a directory or a subvolume replaces, or that is left of a subvolume.
    fn remove_replaced(
        &mut self,
        source: DirectoryEntry,
        to: Place<'_>,
        target: DirectoryEntry,
        index: Option<u64>,
    ) -> Result<Option<Unlinked>, PlanError> {
        match (source.kind, target.kind) {
            (FileType::Directory, FileType::Directory) => {}
            (FileType::Directory, _) => return Err(PlanError::NotADirectory),
            _ => return Err(PlanError::IsADirectory),
        }
        match target.target {
            Target::Subvolume(_) if index.is_some() => Err(PlanError::NotEmpty),
            Target::Subvolume(_) => self.remove_subvolume_entry(to, None).map(|_| None),
            Target::Inode(_) => {
                let (old, _) = self.target_inode(to, target)?;
                if self.has_entries(old)? {
                    return Err(PlanError::NotEmpty);
                }
                self.remove_link(old, to).map(Some)
            }
        }
    }

    fn take_entry(&mut self, place: Place<'_>, entry: DirectoryEntry, index: Option<u64>) -> Result<(), PlanError> {
        match entry.target {
            Target::Inode(ino) => self.remove_name(ino, place),
            Target::Subvolume(_) => self.remove_subvolume_entry(place, index).map(drop),
        }
    }

    fn put_entry<'p>(&mut self, place: Place<'p>, entry: DirectoryEntry) -> Result<Vec<MovedSubvolume<'p>>, PlanError> {
        match entry.target {
            Target::Inode(ino) => {
                self.add_name(place, entry)?;
                self.mark_changed(ino)?;
                Ok(Vec::new())
            }
            Target::Subvolume(id) => {
                let index = self.add_subvolume_entry(place, id)?;
                Ok(vec![MovedSubvolume { id, place, index }])
            }
        }
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
        self.mark_changed(ino)?;
        self.mark_changed(other)?;
        Ok(Renamed::Exchanged)
    }

    /// Moves a name to a place that is free.
    fn move_name(&mut self, ino: u64, kind: FileType, from: Place<'_>, to: Place<'_>) -> Result<(), PlanError> {
        self.reserve_index(to)?;
        self.remove_name(ino, from)?;
        self.add_name(to, DirectoryEntry { target: Target::Inode(ino), kind })?;
        self.mark_changed(ino)
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
}
