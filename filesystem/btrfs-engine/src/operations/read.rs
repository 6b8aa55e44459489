//! Operations that only read: names, directories, attributes, targets of symbolic links. They go on while a transaction
//! is being completed.

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::directory::{FileType, Target};
use sealblock_btrfs_format::items::file_extent::FileExtent;
use sealblock_btrfs_format::items::inode::{InodeItem, Timespec};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use zerocopy::FromZeros;

use super::SubvolumePlan;
use crate::engine::{Engine, EngineError};
use crate::inode::kind_of;
use crate::names::Place;
use crate::plan::PlanError;
use crate::subvolumes::Access;
use crate::transaction::{ChangeError, Transaction};
use crate::view::Items;

/// What a name leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resolved {
    /// An inode of the same subvolume.
    Inode(u64),
    /// The top directory of this subvolume, which has its place here.
    Subvolume(u64),
    /// This subvolume has its place elsewhere, or is deleted: the entry is left in a snapshot of the subvolume that it
    /// is in. It is shown as an empty directory.
    Elsewhere(u64),
}

/// A name that was looked up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResolvedEntry {
    /// What it leads to.
    pub target: Resolved,
    /// The type of that.
    pub kind: FileType,
}

/// An entry of a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirectoryItem {
    /// Its name.
    pub name: Vec<u8>,
    /// Its index: with it, reading goes on after this entry.
    pub index: u64,
    /// What it leads to. For a subvolume, [`Engine::lookup`] tells whether its place is here.
    pub target: Target,
    /// The type of that.
    pub kind: FileType,
}

impl Engine {
    /// Reads with the items of a subvolume.
    pub(super) async fn read_plan<T>(
        &self,
        root: u64,
        mut read: impl FnMut(&Transaction, &SubvolumePlan<'_>) -> Result<T, ChangeError>,
    ) -> Result<T, EngineError> {
        self.inspect(|transaction| {
            transaction.open_subvolume(root, Access::Read)?;
            let transaction = &*transaction;
            // A result with its own error: the plan's is another one.
            transaction.plan(root, Timespec::new_zeroed(), |plan| Ok(read(transaction, plan)))?
        })
        .await
    }

    /// The number of the subvolume that is mounted if nothing else is named.
    ///
    /// # Errors
    /// If the root tree cannot be read.
    pub async fn default_subvolume(&self) -> Result<u64, EngineError> {
        self.inspect(|transaction| transaction.default_subvolume()).await
    }

    /// Looks a name up. `None` if the directory has no such name.
    ///
    /// # Errors
    /// If the inode is not a directory, the name cannot be one, something is damaged, or cannot be read.
    pub async fn lookup(&self, root: u64, place: Place<'_>) -> Result<Option<ResolvedEntry>, EngineError> {
        self.read_plan(root, |transaction, plan| {
            check_directory(plan, place.directory)?;
            let Some(entry) = plan.lookup(place.directory, place.name)? else { return Ok(None) };
            let target = match entry.target {
                Target::Inode(ino) => Resolved::Inode(ino),
                Target::Subvolume(id) => match transaction.index_of_subvolume(id, root, place)? {
                    Some(_) => Resolved::Subvolume(id),
                    None => Resolved::Elsewhere(id),
                },
            };
            Ok(Some(ResolvedEntry { target, kind: entry.kind }))
        })
        .await
    }

    /// The attributes of an inode. The size is that which programs see, also if the item does not have it yet.
    ///
    /// # Errors
    /// If there is none, it is damaged, or cannot be read.
    pub async fn stat(&self, root: u64, ino: u64) -> Result<InodeItem, EngineError> {
        let mut inode = self.read_plan(root, |_, plan| Ok(plan.inode(ino)?)).await?;
        inode.size = self.size_ahead(root, ino).map_or(inode.size, Into::into);
        Ok(inode)
    }

    /// The subvolume and directory that a directory is in; `None` for the top of the first subvolume.
    ///
    /// # Errors
    /// If it has no name, is damaged, or cannot be read.
    pub async fn parent(&self, root: u64, directory: u64) -> Result<Option<(u64, u64)>, EngineError> {
        match (root, directory) {
            (objectid::FS_TREE, objectid::FIRST_FREE) => Ok(None),
            (_, objectid::FIRST_FREE) => {
                let (root, directory, ..) = self.inspect(|transaction| transaction.place_of(root)).await?;
                Ok(Some((root, directory)))
            }
            _ => self.read_plan(root, |_, plan| Ok(Some((root, plan.parent_of(directory)?)))).await,
        }
    }

    /// The index of the last entry of a directory, or 0. Whoever reads a directory notes it first, and reads no
    /// further: a name that is renamed again and again would be found for ever.
    ///
    /// # Errors
    /// If the inode is not a directory, or cannot be read.
    pub async fn last_index(&self, root: u64, directory: u64) -> Result<u64, EngineError> {
        self.read_plan(root, |_, plan| {
            check_directory(plan, directory)?;
            let first = Key::new(directory, ItemType::DIR_INDEX, 0);
            let last = plan.last(first..=Key { offset: u64::MAX, ..first })?;
            Ok(last.map_or(0, |(key, _)| key.offset))
        })
        .await
    }

    /// Reads entries of a directory in the order of their indices: at most this many of those after one index, up to
    /// another one. There are no more if it returns none.
    ///
    /// # Errors
    /// If the inode is not a directory, an entry is damaged, or something cannot be read.
    pub async fn read_directory(
        &self,
        root: u64,
        directory: u64,
        (after, until): (u64, u64),
        most: usize,
    ) -> Result<Vec<DirectoryItem>, EngineError> {
        self.read_plan(root, |_, plan| {
            check_directory(plan, directory)?;
            let (mut found, mut after) = (Vec::new(), after);
            let key = |index| Key::new(directory, ItemType::DIR_INDEX, index);
            while found.len() < most
                && let Some(from) = after.checked_add(1)
                && let Some((key, data)) = plan.first(key(from)..=key(until))?
            {
                found.push(directory_item(key, data)?);
                after = key.offset;
            }
            Ok(found)
        })
        .await
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// If the inode is not a symbolic link, is damaged, or cannot be read.
    pub async fn read_link(&self, root: u64, ino: u64) -> Result<Vec<u8>, EngineError> {
        self.read_plan(root, |_, plan| {
            if kind_of(&plan.inode(ino)?) != FileType::Symlink {
                return Err(PlanError::InvalidArgument("not a symbolic link").into());
            }
            let key = Key::new(ino, ItemType::EXTENT_DATA, 0);
            match plan.item(key)? {
                Some(Item::FileExtent(FileExtent::Inline(head, target)))
                    if head.compression == 0 && head.encryption == 0 && !target.is_empty() =>
                {
                    Ok(target.to_vec())
                }
                _ => Err(PlanError::Damaged { key, why: "the target of a symbolic link is not in its item" }.into()),
            }
        })
        .await
    }

    /// The value of an extended attribute, if the inode has it.
    ///
    /// # Errors
    /// If there is no such inode, the name cannot be one, something is damaged, or cannot be read.
    pub async fn xattr(&self, root: u64, ino: u64, name: &[u8]) -> Result<Option<Vec<u8>>, EngineError> {
        self.read_plan(root, |_, plan| Ok(plan.xattr(ino, name)?.map(<[u8]>::to_vec))).await
    }

    /// The names of all extended attributes of an inode.
    ///
    /// # Errors
    /// If there is no such inode, something is damaged, or cannot be read.
    pub async fn xattr_names(&self, root: u64, ino: u64) -> Result<Vec<Vec<u8>>, EngineError> {
        self.read_plan(root, |_, plan| Ok(plan.xattr_names(ino)?)).await
    }
}

fn check_directory(plan: &SubvolumePlan<'_>, ino: u64) -> Result<(), PlanError> {
    if kind_of(&plan.inode(ino)?) == FileType::Directory { Ok(()) } else { Err(PlanError::NotADirectory) }
}

fn directory_item(key: Key, data: &[u8]) -> Result<DirectoryItem, PlanError> {
    let entries = match Item::decode(key, data) {
        Ok(Item::DirIndex(entries)) => entries,
        Ok(_) => return Err(PlanError::Damaged { key, why: "not an entry of a directory" }),
        Err(error) => return Err(PlanError::Shape { key, error }),
    };
    let entry = entries.iter().next().ok_or(PlanError::Damaged { key, why: "an index without an entry" })?;
    let kind = entry.file_type().ok_or(PlanError::Damaged { key, why: "an entry without a type" })?;
    let (name, target) = (entry.name.to_vec(), Target::of(entry.location));
    Ok(DirectoryItem { name, index: key.offset, target, kind })
}
