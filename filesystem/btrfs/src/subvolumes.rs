//! Subvolumes: a list of them, their positions in each other, and the default one.

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

/// The name of the entry for the default subvolume.
const DEFAULT_NAME: &[u8] = b"default";

/// The position of a subvolume in another one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parent {
    /// The outer subvolume.
    pub id: u64,
    /// The directory in it.
    pub dirid: u64,
    /// The name in that directory.
    pub name: Vec<u8>,
}

/// A subvolume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subvolume {
    /// The root of its tree, which has the same number.
    pub root: TreeRoot,
    /// The inode of its top directory.
    pub root_dirid: u64,
    /// True if it is read-only.
    pub is_read_only: bool,
    /// True if it is being deleted: parts of it may be gone, and their space may be reused.
    pub is_dead: bool,
    /// Its UUID; zero if it has none.
    pub uuid: [u8; 16],
    /// UUID of the source of this snapshot; zero for none.
    pub parent_uuid: [u8; 16],
    /// UUID of the subvolume from which it was received; zero for none.
    pub received_uuid: [u8; 16],
    /// Its creation time, if known.
    pub created: Option<Timespec>,
    /// Its position; `None` for the first subvolume and for one that is being deleted.
    pub parent: Option<Parent>,
}

impl Filesystem {
    /// All subvolumes, by number. Returns also the lost parts of the root tree.
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
    /// If it does not exist, or cannot be read.
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

    /// The number of the subvolume that is mounted by default.
    ///
    /// # Errors
    /// If it cannot be read.
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

    /// True if the entry for a subvolume is at its recorded position. A snapshot has entries for the subvolumes that
    /// were in its source, but not the subvolumes themselves.
    ///
    /// # Errors
    /// If it cannot be read.
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

/// Adds an item of the root tree to the subvolumes.
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
            // A root item precedes the references of its tree.
            if let Some(subvolume) = all.get_mut(&key.objectid) {
                subvolume.parent = Some(Parent { id: key.offset, dirid: found.dirid, name: found.name.to_vec() });
            }
        }
        _ => {}
    }
}
