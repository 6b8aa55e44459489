//! A plan: what operations on the files of one subvolume change, on top of the items that are there.
//!
//! A [`Plan`] reads items through what it changed itself, so operations follow each other within one plan: a file is
//! created and gets its attributes, and all becomes visible in one step. [`Plan::into_changes`] gives the changes to
//! whoever applies them.
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use sealblock_btrfs_engine::datasum::Datasum;
//! use sealblock_btrfs_engine::inode::Ownership;
//! use sealblock_btrfs_engine::names::{NewFile, Place};
//! use sealblock_btrfs_engine::plan::{Plan, PlanContext, PlanError};
//! use sealblock_btrfs_engine::xattrs::XattrMode;
//! use sealblock_btrfs_format::items::inode::Timespec;
//! # use sealblock_btrfs_format::checksum::ChecksumType;
//! # use sealblock_btrfs_format::features::{Compat, CompatRo, Features, Incompat};
//! # use sealblock_btrfs_format::superblock::Geometry;
//! # let features =
//! #     Features { compat: Compat::empty(), compat_ro: CompatRo::empty(), incompat: Incompat::EXTENDED_IREF };
//! # let (sector_bytes, node_bytes, checksum) = (4096, 16_384, ChecksumType::Crc32c);
//! # let geometry = Geometry { sector_bytes, node_bytes, checksum, features, node_uuid: [0; 16], generation: 8 };
//!
//! let items = BTreeMap::new();
//! let now = Timespec { seconds: 1_700_000_000.into(), nanoseconds: 0.into() };
//! let owner = Ownership { uid: 0, gid: 0, permissions: 0o755 };
//! let top = 256;
//!
//! let context = PlanContext { geometry: &geometry, generation: 9, now, has_device_sums: false };
//! let mut plan = Plan::new(&items, context);
//! plan.create_top(&owner, Datasum::Csum)?;
//! let ino = plan.create(Place { directory: top, name: b"file" }, NewFile::Regular, &owner)?;
//! plan.set_xattr(ino, b"user.a", b"value", XattrMode::Create)?;
//! plan.link(ino, Place { directory: top, name: b"another name" })?;
//! assert_eq!(plan.create_top(&owner, Datasum::Csum), Err(PlanError::Exists));
//! // The inode, its names and its attribute; that of the directory, and two items for each entry.
//! assert_eq!(plan.into_changes().len(), 3 + 2 + 2 * 2);
//! # Ok::<(), PlanError>(())
//! ```
//!
//! Invariants:
//! - An operation that fails leaves the plan as it was before it, whatever the error.
//! - An item is inserted only if it is not there, and replaced or deleted only if it is.
//! - An item that would not fit into a leaf is never part of a plan.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use sealblock_btrfs_format::error::DecodeError;
use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::key::Key;
use sealblock_btrfs_format::node::{ITEM_HEAD_BYTES, leaf_capacity};
use sealblock_btrfs_format::superblock::Geometry;

use crate::tree::TreeError;
use crate::view::{Items, Overlay};

/// Why an operation is refused. Each variant names the error number that a program gets for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlanError {
    /// EEXIST: the name is taken, or the extended attribute is there.
    #[error("it exists already")]
    Exists,
    /// ENOENT: there is no such name or inode, or the directory was removed.
    #[error("no such file or directory")]
    NotFound,
    /// ENODATA: the inode has no such extended attribute.
    #[error("no such extended attribute")]
    NoAttribute,
    /// ENOTEMPTY: the directory has entries.
    #[error("the directory is not empty")]
    NotEmpty,
    /// ENOTDIR: the operation needs a directory.
    #[error("not a directory")]
    NotADirectory,
    /// EISDIR: the operation is not for directories.
    #[error("a directory")]
    IsADirectory,
    /// ENAMETOOLONG: a name, or the target of a symbolic link.
    #[error("a name of {length} bytes: at most {most} are possible")]
    NameTooLong {
        /// Its bytes.
        length: usize,
        /// The maximum.
        most: usize,
    },
    /// EINVAL: a name that is empty, a dot or two, or has a slash or a zero byte.
    #[error("not a valid name")]
    InvalidName,
    /// ENOENT: the target of a symbolic link has no bytes.
    #[error("a symbolic link without a target")]
    EmptyTarget,
    /// EINVAL: an argument that no inode can have.
    #[error("{0}")]
    InvalidArgument(&'static str),
    /// EOPNOTSUPP: the inode has a property with which this is not done.
    #[error("{0}")]
    Unsupported(&'static str),
    /// EMLINK: the inode has as many names as it can have.
    #[error("too many links")]
    TooManyLinks,
    /// EOVERFLOW: too many names of the directory, or of the inode, have one hash: their item would not fit into a
    /// leaf.
    #[error("too many names with the same hash")]
    CollisionsFull,
    /// ENOSPC: the extended attribute, with those of the same hash, would not fit into a leaf.
    #[error("no space for the extended attribute")]
    NoSpaceForXattr,
    /// ENOSPC: no inode number, or no index of the directory, is left.
    #[error("no {0} is left")]
    NoNumber(&'static str),
    /// EINVAL: a directory would move below itself.
    #[error("a directory cannot move below itself")]
    BelowItself,
    /// EPERM: directories have one name.
    #[error("a directory cannot have another name")]
    LinkOfDirectory,
    /// EPERM: the inode is immutable or append-only; EACCES if it is read-only.
    #[error("inode {ino} is {flag}")]
    Protected {
        /// The inode.
        ino: u64,
        /// What it is.
        flag: &'static str,
    },
    /// EXDEV, or ENOTEMPTY if it is to be removed: the entry leads to a subvolume, which has its place in the root
    /// tree, too.
    #[error("the entry leads to subvolume {0}")]
    IsSubvolume(u64),
    /// EBUSY: the inode cannot be deleted yet.
    #[error("inode {ino} cannot be deleted: it has {what}")]
    InUse {
        /// The inode.
        ino: u64,
        /// What it has.
        what: &'static str,
    },
    /// EUCLEAN: an item has not its shape, or contradicts another one. The filesystem is damaged.
    #[error("{key}: {why}")]
    Damaged {
        /// The item, or the one that should be there.
        key: Key,
        /// What is wrong with it.
        why: &'static str,
    },
    /// EUCLEAN: an item has not the shape of its type.
    #[error("{key}: {error}")]
    Shape {
        /// The item.
        key: Key,
        /// Why.
        error: DecodeError,
    },
    /// None for [`TreeError::Need`]: read the node, and plan again. EIO for the others.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// What all operations of a plan need to know.
#[derive(Clone, Copy, Debug)]
pub struct PlanContext<'a> {
    /// The filesystem.
    pub geometry: &'a Geometry,
    /// The open transaction.
    pub generation: u64,
    /// The time that inodes get.
    pub now: Timespec,
    /// True if all devices can keep the checksums of data ([`crate::datasum`]).
    pub has_device_sums: bool,
}

impl PlanContext<'_> {
    /// The largest data that an item can have.
    pub fn max_item_bytes(&self) -> usize {
        leaf_capacity(self.geometry.node_bytes).saturating_sub(ITEM_HEAD_BYTES)
    }
}

/// The items of a subvolume, and what operations change in them.
#[derive(Debug)]
pub struct Plan<'v, V> {
    items: Overlay<'v, V>,
    pub(crate) context: PlanContext<'v>,
    pub(crate) next_ino: Option<u64>,
    pub(crate) next_index: BTreeMap<u64, u64>,
}

impl<'v, V: Items> Plan<'v, V> {
    /// A plan without changes.
    pub fn new(view: &'v V, context: PlanContext<'v>) -> Plan<'v, V> {
        Plan { items: Overlay::new(view), context, next_ino: None, next_index: BTreeMap::new() }
    }

    /// The changes so far.
    pub fn changes(&self) -> &ItemChanges {
        self.items.changes()
    }

    /// All changes, to be applied in one step.
    pub fn into_changes(self) -> ItemChanges {
        self.items.into_changes()
    }

    /// Runs an operation. If it fails, all that it changed is taken back.
    ///
    /// # Errors
    /// Those of the operation.
    pub(crate) fn attempt<T>(
        &mut self,
        operation: impl FnOnce(&mut Self) -> Result<T, PlanError>,
    ) -> Result<T, PlanError> {
        let before = (self.changes().clone(), self.next_ino, self.next_index.clone());
        let result = operation(self);
        if result.is_err() {
            self.items.set_changes(before.0);
            (self.next_ino, self.next_index) = (before.1, before.2);
        }
        result
    }

    /// An item, decoded.
    pub(crate) fn item(&self, key: Key) -> Result<Option<Item<'_>>, PlanError> {
        let Some(data) = self.at(key)? else { return Ok(None) };
        Item::decode(key, data).map(Some).map_err(|error| PlanError::Shape { key, error })
    }

    /// Gives an item these data, whether it was there or not.
    pub(crate) fn put(&mut self, key: Key, data: Vec<u8>) -> Result<(), PlanError> {
        debug_assert!(data.len() <= self.context.max_item_bytes(), "{key} does not fit into a leaf");
        Ok(self.items.put(key, data)?)
    }

    /// Deletes an item.
    ///
    /// # Errors
    /// If it is not there: the filesystem is damaged.
    pub(crate) fn delete(&mut self, key: Key) -> Result<(), PlanError> {
        match self.items.delete(key) {
            Err(TreeError::Missing(key)) => Err(PlanError::Damaged { key, why: "it is not there" }),
            result => Ok(result?),
        }
    }

    /// Gives the list of an item these entries, or deletes the item if there are none.
    pub(crate) fn put_list(&mut self, key: Key, list: Vec<u8>) -> Result<(), PlanError> {
        if list.is_empty() {
            return self.delete(key);
        }
        self.put(key, list)
    }
}

/// The items as they are once the plan is applied.
impl<V: Items> Items for Plan<'_, V> {
    fn at(&self, key: Key) -> Result<Option<&[u8]>, TreeError> {
        self.items.at(key)
    }

    fn first(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        self.items.first(range)
    }

    fn last(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        self.items.last(range)
    }
}

#[cfg(test)]
mod tests {
    use sealblock_btrfs_format::key::ItemType;

    use super::*;
    use crate::names::model::{geometry, time};

    #[test]
    fn an_operation_that_fails_leaves_the_plan_as_it_was() {
        let (items, geometry) = (BTreeMap::new(), geometry());
        let context = PlanContext { geometry: &geometry, generation: 9, now: time(1), has_device_sums: false };
        let mut plan = Plan::new(&items, context);
        let key = |number| Key::new(number, ItemType::XATTR_ITEM, 0);
        plan.attempt(|plan| plan.put(key(1), vec![1])).unwrap();
        let result: Result<(), _> = plan.attempt(|plan| {
            plan.put(key(2), vec![1])?;
            plan.delete(key(1))?;
            plan.next_index.insert(256, 7);
            plan.next_ino = Some(300);
            Err(PlanError::Exists)
        });
        assert_eq!(result, Err(PlanError::Exists));
        assert_eq!((plan.changes().len(), plan.next_ino, plan.next_index.len()), (1, None, 0));
        assert_eq!(plan.at(key(1)), Ok(Some(&[1][..])));
    }
}
