//! Subvolumes: which there are, where they lie in each other, and which one is the default.

use std::collections::BTreeMap;

use futures_util::future::LocalBoxFuture;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::items::root::RootFlags;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::names::name_hash;

use crate::cursor::{Cursor, TreeRoot};
use crate::error::FsError;
use crate::filesystem::Filesystem;
use crate::roots::tree_root;

/// The name of the entry that leads to the default subvolume.
const DEFAULT_NAME: &[u8] = b"default";

/// Where a subvolume lies in another one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parent {
    /// The outer subvolume.
    pub id: u64,
    /// The directory in that.
    pub dirid: u64,
    /// The name in that directory.
    pub name: Vec<u8>,
}

/// A subvolume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subvolume {
    /// Its tree, which has its number.
    pub root: TreeRoot,
    /// The inode of its top directory.
    pub root_dirid: u64,
    /// True if it is not to be written.
    pub is_read_only: bool,
    /// True if it is being deleted: some of it may be gone, and the space may be used for something else.
    pub is_dead: bool,
    /// Its UUID; zero for one that has none.
    pub uuid: [u8; 16],
    /// That of the one that it is a snapshot of; zero for none.
    pub parent_uuid: [u8; 16],
    /// That of the one that it was received from; zero for none.
    pub received_uuid: [u8; 16],
    /// When it was made, if that is known.
    pub created: Option<Timespec>,
    /// Where it lies; the first one lies in none, and neither does one that is being deleted.
    pub parent: Option<Parent>,
}

impl Filesystem {
    /// All subvolumes, by their numbers. What is lost of the tree of trees is returned beside them.
    pub fn subvolumes(&self) -> LocalBoxFuture<'_, (BTreeMap<u64, Subvolume>, Vec<FsError>)> {
        Box::pin(async move {
            let (mut all, mut lost) = (BTreeMap::<u64, Subvolume>::new(), Vec::new());
            let mut cursor = Cursor::all(self.nodes(), self.root_tree());
            loop {
                match cursor.next().await {
                    Ok(None) => return (all, lost),
                    Ok(Some((key, data))) => add(&mut all, key, data),
                    Err(error) => lost.push(error),
                }
            }
        })
    }

    /// A subvolume.
    ///
    /// # Errors
    /// When there is none with this number, or it cannot be read.
    pub fn subvolume(&self, id: u64) -> LocalBoxFuture<'_, Result<Subvolume, FsError>> {
        Box::pin(async move {
            let absent = || FsError::Absent(format!("subvolume {id}"));
            if !objectid::is_subvolume(id) {
                return Err(absent());
            }
            let (first, last) = (Key::new(id, ItemType::ROOT_ITEM, 0), Key::new(id, ItemType::ROOT_BACKREF, u64::MAX));
            let (mut one, mut cursor) = (BTreeMap::new(), self.cursor(self.root_tree(), first..=last));
            while let Some((key, data)) = cursor.next().await? {
                add(&mut one, key, data);
            }
            one.remove(&id).ok_or_else(absent)
        })
    }

    /// The number of the subvolume that is mounted where none is named.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn default_subvolume(&self) -> LocalBoxFuture<'_, Result<u64, FsError>> {
        Box::pin(async move {
            let key = Key::new(objectid::ROOT_TREE_DIR, ItemType::DIR_ITEM, name_hash(DEFAULT_NAME));
            let mut cursor = self.cursor(self.root_tree(), key..=key);
            if let Some((key, data)) = cursor.next().await?
                && let Ok(Item::DirItems(entries)) = Item::decode(key, data)
                && let Some(entry) = entries.iter().find(|entry| entry.name == DEFAULT_NAME)
            {
                return Ok(entry.location.objectid);
            }
            Ok(objectid::FS_TREE)
        })
    }

    /// True if the entry by which a subvolume is found is the one that it lies at. A snapshot has the entries of the subvolumes that lay in
    /// its source and not these themselves.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn lies_at(&self, child: u64, outer: u64, dirid: u64, name: &[u8]) -> Result<bool, FsError> {
        let key = Key::new(outer, ItemType::ROOT_REF, child);
        let mut cursor = self.cursor(self.root_tree(), key..=key);
        Ok(match cursor.next().await? {
            Some((key, data)) => match Item::decode(key, data) {
                Ok(Item::RootRef(found)) => found.dirid == dirid && found.name == name,
                _ => false,
            },
            None => false,
        })
    }
}

/// Takes what an item of the tree of trees says of a subvolume.
fn add(all: &mut BTreeMap<u64, Subvolume>, key: Key, data: &[u8]) {
    if !objectid::is_subvolume(key.objectid) {
        return;
    }
    match Item::decode(key, data) {
        Ok(Item::Root(root)) => {
            let Some(tree) = tree_root(key, data) else { return };
            let tail = root.valid_tail();
            let subvolume = Subvolume {
                root: tree,
                root_dirid: root.head.root_dirid.get(),
                is_read_only: root.flags().contains(RootFlags::READONLY),
                is_dead: root.head.refs == 0 || root.flags().contains(RootFlags::DEAD),
                uuid: tail.map_or([0; 16], |tail| tail.uuid),
                parent_uuid: tail.map_or([0; 16], |tail| tail.parent_uuid),
                received_uuid: tail.map_or([0; 16], |tail| tail.received_uuid),
                created: tail.map(|tail| tail.otime).filter(|time| time.seconds != 0),
                parent: None,
            };
            all.insert(key.objectid, subvolume);
        }
        Ok(Item::RootRef(found)) if key.item_type == ItemType::ROOT_BACKREF => {
            // A root item stands before the references of its tree.
            if let Some(subvolume) = all.get_mut(&key.objectid) {
                subvolume.parent = Some(Parent { id: key.offset, dirid: found.dirid, name: found.name.to_vec() });
            }
        }
        _ => {}
    }
}
