//! A filesystem of maps, for tests. It says for each operation whether it is possible, what it returns, and why not.

use std::collections::BTreeMap;

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::directory::{FileType, Target};
use sealblock_btrfs_format::names::name_hash;

use super::model::{OWNER, TOP, Tree};
use super::{RenameMode, Renamed, Unlinked};
use crate::plan::PlanError;
use crate::xattrs::XattrMode;

/// The data of the largest item of a leaf of 4 KiB.
const MOST: usize = 4096 - 101 - 25;

/// A file of any type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct File {
    pub kind: FileType,
    pub nlink: u32,
    pub permissions: u32,
    pub entries: BTreeMap<Vec<u8>, Target>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// All files of a subvolume, by inode number.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Files(pub BTreeMap<u64, File>);

/// An operation with its arguments.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Create(u64, Vec<u8>, FileType),
    CreateUnnamed(u64),
    Link(u64, u64, Vec<u8>),
    LinkUnnamed(u64, u64, Vec<u8>),
    Unlink(u64, Vec<u8>),
    Rmdir(u64, Vec<u8>),
    Rename(u64, Vec<u8>, u64, Vec<u8>, RenameMode),
    AddSubvolume(u64, Vec<u8>, u64),
    RemoveSubvolume(u64, Vec<u8>),
    SetXattr(u64, Vec<u8>, Vec<u8>, XattrMode),
    RemoveXattr(u64, Vec<u8>),
    SetPermissions(u64, u32),
    Delete(u64, usize),
}

/// What an operation returns.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    Done,
    Ino(u64),
    Unlinked(Unlinked),
    Renamed(Renamed),
    Subvolume(u64),
    Deleted(bool),
}

impl Files {
    fn file(&self, ino: u64) -> Result<&File, PlanError> {
        self.0.get(&ino).ok_or(PlanError::NotFound)
    }

    fn file_mut(&mut self, ino: u64) -> Result<&mut File, PlanError> {
        self.0.get_mut(&ino).ok_or(PlanError::NotFound)
    }

    fn directory(&self, ino: u64) -> Result<&File, PlanError> {
        let file = self.file(ino)?;
        match file.kind {
            FileType::Directory if file.nlink == 0 => Err(PlanError::NotFound),
            FileType::Directory => Ok(file),
            _ => Err(PlanError::NotADirectory),
        }
    }

    fn entry(&self, directory: u64, name: &[u8]) -> Result<Target, PlanError> {
        self.directory(directory)?.entries.get(name).copied().ok_or(PlanError::NotFound)
    }

    fn free(&self, directory: u64, name: &[u8]) -> Result<(), PlanError> {
        if self.directory(directory)?.entries.contains_key(name) { Err(PlanError::Exists) } else { Ok(()) }
    }

    fn inode(&self, target: Target) -> Result<(u64, &File), PlanError> {
        match target {
            Target::Inode(ino) => Ok((ino, &self.0[&ino])),
            Target::Subvolume(id) => Err(PlanError::IsSubvolume(id)),
        }
    }

    fn put(&mut self, directory: u64, name: &[u8], target: Target) -> Result<(), PlanError> {
        let entries = &mut self.0.get_mut(&directory).unwrap().entries;
        let is_alike = |other: &&Vec<u8>| name_hash(other) == name_hash(name);
        let bytes: usize = entries.keys().filter(is_alike).map(|other| 30 + other.len()).sum();
        if bytes + 30 + name.len() > MOST {
            return Err(PlanError::CollisionsFull);
        }
        assert_eq!(entries.insert(name.to_vec(), target), None);
        Ok(())
    }

    fn take(&mut self, directory: u64, name: &[u8]) {
        self.0.get_mut(&directory).unwrap().entries.remove(name).unwrap();
    }

    fn lose(&mut self, ino: u64) -> Unlinked {
        let file = self.0.get_mut(&ino).unwrap();
        file.nlink -= 1;
        Unlinked { ino, is_orphan: file.nlink == 0 }
    }

    fn is_within(&self, mut at: u64, other: u64) -> bool {
        while at != other && at != TOP {
            let holds = |file: &File| file.entries.values().any(|target| *target == Target::Inode(at));
            at = *self.0.iter().find(|(_, file)| holds(file)).expect("a directory has a parent").0;
        }
        at == other
    }

    /// Does an operation. After an error, what it left must be thrown away.
    pub(super) fn run(&mut self, op: &Op, new_ino: u64) -> Result<Answer, PlanError> {
        match op {
            Op::Create(directory, name, kind) => {
                self.free(*directory, name)?;
                self.put(*directory, name, Target::Inode(new_ino))?;
                self.add(new_ino, *kind, 1, self.0[directory].permissions)
            }
            Op::CreateUnnamed(directory) => {
                let permissions = self.directory(*directory)?.permissions;
                self.add(new_ino, FileType::Regular, 0, permissions)
            }
            Op::Link(ino, directory, name) => self.link(*ino, (*directory, name), false),
            Op::LinkUnnamed(ino, directory, name) => self.link(*ino, (*directory, name), true),
            Op::Unlink(directory, name) => {
                let target = self.entry(*directory, name)?;
                let (ino, file) = self.inode(target).map_err(|_| PlanError::IsADirectory)?;
                if file.kind == FileType::Directory {
                    return Err(PlanError::IsADirectory);
                }
                self.take(*directory, name);
                Ok(Answer::Unlinked(self.lose(ino)))
            }
            Op::Rmdir(directory, name) => {
                let (ino, file) = self.inode(self.entry(*directory, name)?)?;
                match file.kind {
                    FileType::Directory if !file.entries.is_empty() => return Err(PlanError::NotEmpty),
                    FileType::Directory => {}
                    _ => return Err(PlanError::NotADirectory),
                }
                self.take(*directory, name);
                Ok(Answer::Unlinked(self.lose(ino)))
            }
            Op::Rename(from, old, to, new, mode) => self.rename((*from, old), (*to, new), *mode),
            Op::AddSubvolume(directory, name, id) => {
                self.free(*directory, name)?;
                self.put(*directory, name, Target::Subvolume(*id)).map(|()| Answer::Done)
            }
            Op::RemoveSubvolume(directory, name) => match self.entry(*directory, name)? {
                Target::Subvolume(id) => {
                    self.take(*directory, name);
                    Ok(Answer::Subvolume(id))
                }
                Target::Inode(_) => Err(PlanError::InvalidArgument("the entry does not lead to a subvolume")),
            },
            Op::SetXattr(ino, name, value, mode) => self.set_xattr(*ino, name, value, *mode),
            Op::RemoveXattr(ino, name) => {
                let removed = self.file_mut(*ino)?.xattrs.remove(name);
                removed.map(|_| Answer::Done).ok_or(PlanError::NoAttribute)
            }
            Op::SetPermissions(ino, bits) => {
                self.file_mut(*ino)?.permissions = *bits;
                Ok(Answer::Done)
            }
            Op::Delete(ino, most) => self.delete(*ino, *most),
        }
    }

    fn add(&mut self, ino: u64, kind: FileType, nlink: u32, inherits: u32) -> Result<Answer, PlanError> {
        let is_directory = kind == FileType::Directory;
        let permissions = OWNER.permissions | if is_directory { inherits & 0o2000 } else { 0 };
        let (entries, xattrs) = (BTreeMap::new(), BTreeMap::new());
        self.0.insert(ino, File { kind, nlink, permissions, entries, xattrs });
        Ok(Answer::Ino(ino))
    }

    fn link(&mut self, ino: u64, to: (u64, &[u8]), is_unnamed: bool) -> Result<Answer, PlanError> {
        self.free(to.0, to.1)?;
        let file = self.file_mut(ino)?;
        match (file.nlink, is_unnamed) {
            _ if file.kind == FileType::Directory => return Err(PlanError::LinkOfDirectory),
            (0, false) => return Err(PlanError::NotFound),
            (0, true) if file.kind != FileType::Regular => return Err(PlanError::NotFound),
            (1.., true) => return Err(PlanError::InvalidArgument("the file has a name")),
            _ => {}
        }
        file.nlink += 1;
        self.put(to.0, to.1, Target::Inode(ino)).map(|()| Answer::Done)
    }

    fn delete(&mut self, ino: u64, most: usize) -> Result<Answer, PlanError> {
        let file = self.file_mut(ino)?;
        let has_target = file.kind == FileType::Symlink;
        if file.nlink > 0 {
            return Err(PlanError::InUse { ino, what: "links" });
        }
        // Its items are the inode, a target, and one for each attribute, whose hashes differ.
        if file.xattrs.len() + 1 + usize::from(has_target) <= most {
            self.0.remove(&ino);
            return Ok(Answer::Deleted(true));
        }
        let mut names: Vec<_> = file.xattrs.keys().cloned().collect();
        names.sort_by_key(|name| name_hash(name));
        let gone = names.iter().rev().take(most - usize::from(has_target && most > 0));
        gone.for_each(|name| drop(file.xattrs.remove(name)));
        Ok(Answer::Deleted(false))
    }

    fn rename(&mut self, from: (u64, &[u8]), to: (u64, &[u8]), mode: RenameMode) -> Result<Answer, PlanError> {
        let source = self.entry(from.0, from.1)?;
        let target = self.directory(to.0)?.entries.get(to.1).copied();
        match (target, mode) {
            (Some(_), RenameMode::NoReplace) => return Err(PlanError::Exists),
            (None, RenameMode::Exchange) => return Err(PlanError::NotFound),
            (Some(target), _) if target == source => return Ok(Answer::Renamed(Renamed::Same)),
            _ => {}
        }
        let (ino, file) = self.inode(source)?;
        let is_directory = file.kind == FileType::Directory;
        if is_directory && self.is_within(to.0, ino) {
            return Err(PlanError::BelowItself);
        }
        let mut replaced = None;
        if let Some(target) = target {
            if let Target::Subvolume(_) = target
                && mode == RenameMode::Replace
                && !is_directory
            {
                return Err(PlanError::IsADirectory);
            }
            let (other, old) = self.inode(target)?;
            let other_is_directory = old.kind == FileType::Directory;
            match mode {
                RenameMode::Exchange if other_is_directory && self.is_within(from.0, other) => {
                    return Err(PlanError::BelowItself);
                }
                RenameMode::Exchange => {
                    self.take(from.0, from.1);
                    self.take(to.0, to.1);
                    self.put(to.0, to.1, source)?;
                    self.put(from.0, from.1, target)?;
                    return Ok(Answer::Renamed(Renamed::Exchanged));
                }
                _ if is_directory && !other_is_directory => return Err(PlanError::NotADirectory),
                _ if !is_directory && other_is_directory => return Err(PlanError::IsADirectory),
                _ if !old.entries.is_empty() => return Err(PlanError::NotEmpty),
                _ => {}
            }
            self.take(to.0, to.1);
            replaced = Some(self.lose(other));
        }
        self.take(from.0, from.1);
        self.put(to.0, to.1, source)?;
        Ok(Answer::Renamed(Renamed::Moved(replaced)))
    }

    fn set_xattr(&mut self, ino: u64, name: &[u8], value: &[u8], mode: XattrMode) -> Result<Answer, PlanError> {
        let xattrs = &mut self.file_mut(ino)?.xattrs;
        match (xattrs.contains_key(name), mode) {
            (true, XattrMode::Create) => return Err(PlanError::Exists),
            (false, XattrMode::Replace) => return Err(PlanError::NoAttribute),
            _ => {}
        }
        if 30 + name.len() + value.len() > MOST {
            return Err(PlanError::NoSpaceForXattr);
        }
        xattrs.insert(name.to_vec(), value.to_vec());
        Ok(Answer::Done)
    }
}

/// The files that a tree has.
pub(super) fn files_of(tree: &Tree) -> Files {
    let mut files = BTreeMap::new();
    for (key, data) in tree {
        let item = Item::decode(*key, data).unwrap();
        if let Item::Inode(inode) = item {
            let kind = FileType::of_mode(inode.mode.get()).unwrap();
            let (nlink, permissions) = (inode.nlink.get(), inode.mode.get() & 0o7777);
            let (entries, xattrs) = (BTreeMap::new(), BTreeMap::new());
            files.insert(key.objectid, File { kind, nlink, permissions, entries, xattrs });
        }
        match (item, files.get_mut(&key.objectid)) {
            (Item::DirIndex(entries), Some(file)) => {
                file.entries.extend(entries.iter().map(|one| (one.name.to_vec(), Target::of(one.location))));
            }
            (Item::Xattrs(entries), Some(file)) => {
                file.xattrs.extend(entries.iter().map(|one| (one.name.to_vec(), one.data.to_vec())));
            }
            _ => {}
        }
    }
    Files(files)
}
