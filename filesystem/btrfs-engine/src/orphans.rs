//! Orphans: inodes without names that are still to be deleted.
//!
//! An inode that loses its last name may be open. Its ORPHAN_ITEM is there from then on, until all its items are gone,
//! so a filesystem that stops in between finds what is left to delete.
//!
//! Invariants:
//! - An inode has an ORPHAN_ITEM if and only if its link count is 0.
//! - An inode is deleted from its last item to its first, in steps of a limited size. The INODE_ITEM and the
//!   ORPHAN_ITEM go last, together.
//! - An ORPHAN_ITEM of an inode that has links is left from elsewhere. It goes, and nothing else: Linux does not
//!   truncate such a file either.

use std::ops::RangeInclusive;

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::file_extent::FileExtent;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use crate::inode::items_of;
use crate::plan::{Plan, PlanError};
use crate::view::Items;

/// What an orphan is, when a filesystem is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Orphan {
    /// An inode without names: first its extents go, and then the inode ([`Plan::delete_inode`]).
    Unlinked,
    /// An inode with names, or none at all: the ORPHAN_ITEM goes, and this plan has done that.
    Stale,
}

pub(crate) const fn orphan_key(ino: u64) -> Key {
    Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, ino)
}

impl<V: Items> Plan<'_, V> {
    /// The first orphan with this inode number or a higher one.
    ///
    /// # Errors
    /// If a node is not in memory.
    pub fn next_orphan(&self, from: u64) -> Result<Option<u64>, PlanError> {
        Ok(self.first(orphan_key(from)..=orphan_key(u64::MAX))?.map(|(key, _)| key.offset))
    }

    /// Looks at an orphan that an earlier mount left, and removes its ORPHAN_ITEM if the inode is not to be deleted.
    ///
    /// # Errors
    /// [`PlanError::NotFound`] if there is no such orphan.
    pub fn recover_orphan(&mut self, ino: u64) -> Result<Orphan, PlanError> {
        if self.at(orphan_key(ino))?.is_none() {
            return Err(PlanError::NotFound);
        }
        if self.find_inode(ino)?.is_some_and(|inode| inode.nlink.get() == 0) {
            return Ok(Orphan::Unlinked);
        }
        self.delete(orphan_key(ino))?;
        Ok(Orphan::Stale)
    }

    /// An inode has no names left.
    pub(crate) fn add_orphan(&mut self, ino: u64) -> Result<(), PlanError> {
        self.put(orphan_key(ino), Vec::new())
    }

    /// An inode without names gets one.
    pub(crate) fn remove_orphan(&mut self, ino: u64) -> Result<(), PlanError> {
        let key = orphan_key(ino);
        if self.at(key)?.is_none() {
            return Err(PlanError::Damaged { key, why: "the inode has no names, and is no orphan" });
        }
        self.delete(key)?;
        Ok(())
    }

    /// Deletes an inode that has no names, and that nobody uses: at most this many of its items, from the last one on.
    /// Returns true if the inode is gone. Otherwise the changes are to be applied, and the rest to be deleted with
    /// another plan; the inode stays an orphan until then.
    ///
    /// Its file extents outside the tree must be gone: this counts no references. What is in the item, such as the
    /// target of a symbolic link, goes with it.
    ///
    /// # Errors
    /// [`PlanError::InUse`] if the inode has links or extents; [`PlanError::Damaged`] if it has links none of which it
    /// counts, or entries.
    pub fn delete_inode(&mut self, ino: u64, max_items: usize) -> Result<bool, PlanError> {
        if self.inode(ino)?.nlink.get() != 0 {
            return Err(PlanError::InUse { ino, what: "links" });
        }
        self.attempt(|plan| {
            let mut range = Some(items_of(ino));
            for _ in 0..max_items {
                let Some(key) = range.take().map(|range| plan.last(range)).transpose()?.flatten().map(|(key, _)| key)
                else {
                    break;
                };
                plan.check_deletable(key)?;
                plan.delete(key)?;
                range = before(ino, key);
            }
            let is_gone = range.map(|range| plan.first(range)).transpose()?.flatten().is_none();
            match (is_gone, plan.at(orphan_key(ino))?.is_some()) {
                (true, true) => plan.delete(orphan_key(ino))?,
                (false, false) => plan.add_orphan(ino)?,
                _ => {}
            }
            Ok(is_gone)
        })
    }

    fn check_deletable(&self, key: Key) -> Result<(), PlanError> {
        let ino = key.objectid;
        let damaged = |why| Err(PlanError::Damaged { key, why });
        match self.item(key)? {
            Some(Item::Inode(_) | Item::Xattrs(_)) => Ok(()),
            Some(Item::VerityHead(_) | Item::VerityDescriptor(_) | Item::VerityMerkle(_)) => Ok(()),
            Some(Item::FileExtent(FileExtent::Inline(..))) => Ok(()),
            Some(Item::FileExtent(extent)) => match extent.location().is_some_and(|location| location.is_hole()) {
                true => Ok(()),
                false => Err(PlanError::InUse { ino, what: "extents" }),
            },
            Some(Item::InodeRefs(_) | Item::InodeExtrefs(_)) => damaged("the inode has names, and its link count is 0"),
            Some(Item::DirItems(_) | Item::DirIndex(_)) => damaged("a directory that was removed has entries"),
            _ => damaged("an item that no inode has"),
        }
    }
}

/// The items of an inode before one of them.
fn before(ino: u64, key: Key) -> Option<RangeInclusive<Key>> {
    let range = key.previous().map(|end| *items_of(ino).start()..=end);
    range.filter(|range| !range.is_empty())
}

#[cfg(test)]
mod tests {
    use sealblock_btrfs_format::items::inode::InodeItem;
    use zerocopy::{FromBytes, IntoBytes};

    use super::*;
    use crate::inode::inode_key;
    use crate::names::model::{OWNER, TOP, Tree, apply, check, context, geometry, new_tree};
    use crate::names::{NewFile, Place};
    use crate::xattrs::XattrMode;

    /// A tree with an inode of these attributes that lost its last name.
    fn orphan(file: NewFile<'_>, xattrs: usize) -> (Tree, u64) {
        let (mut tree, geometry) = (new_tree(), geometry());
        let mut plan = Plan::new(&tree, context(&geometry));
        let place = Place { directory: TOP, name: b"name" };
        let ino = plan.create(place, file, &OWNER).unwrap();
        for number in 0..xattrs {
            plan.set_xattr(ino, format!("user.{number}").as_bytes(), b"value", XattrMode::Create).unwrap();
        }
        let unlinked = if file == NewFile::Directory { plan.rmdir(place) } else { plan.unlink(place) };
        assert!(unlinked.unwrap().is_orphan);
        let changes = plan.into_changes();
        apply(&mut tree, changes);
        check(&tree, &geometry);
        (tree, ino)
    }

    fn delete(tree: &mut Tree, ino: u64, most: usize) -> Result<bool, PlanError> {
        let geometry = geometry();
        let mut plan = Plan::new(tree, context(&geometry));
        let result = plan.delete_inode(ino, most);
        let changes = plan.into_changes();
        assert!(result.is_ok() || changes.is_empty());
        apply(tree, changes);
        result
    }

    #[test]
    fn an_inode_goes_in_steps_and_stays_an_orphan_until_the_last_one() {
        let items_of_empty = new_tree().len();
        for most in [1, 2, 3, 7, 13, 14, 1000] {
            let (mut tree, ino) = orphan(NewFile::Symlink(b"target"), 12);
            let mut steps = 1;
            while !delete(&mut tree, ino, most).unwrap() {
                assert!(tree.contains_key(&inode_key(ino)) && tree.contains_key(&orphan_key(ino)));
                steps += 1;
            }
            assert_eq!((steps, tree.len()), (14_usize.div_ceil(most), items_of_empty), "{most}");
        }
        let (mut tree, ino) = orphan(NewFile::Directory, 0);
        assert_eq!(delete(&mut tree, ino, 0), Ok(false));
        assert_eq!(delete(&mut tree, ino, 1), Ok(true));
        assert_eq!(delete(&mut tree, ino, 1), Err(PlanError::NotFound));
        check(&tree, &geometry());
    }

    #[test]
    fn an_inode_that_still_has_something_stays() {
        let (mut tree, ino) = orphan(NewFile::Regular, 1);
        let extent = |address: u8| {
            let mut data = vec![0; 53];
            (data[20], data[22], data[46]) = (1, address, 16);
            data
        };
        let key = Key::new(ino, ItemType::EXTENT_DATA, 4096);
        tree.insert(key, extent(1));
        assert_eq!(delete(&mut tree, ino, 9), Err(PlanError::InUse { ino, what: "extents" }));
        let foreign = Key::new(ino, ItemType::DIR_INDEX, 2);
        tree.insert(key, extent(0));
        tree.insert(foreign, vec![0; 30]);
        assert!(matches!(delete(&mut tree, ino, 9), Err(PlanError::Damaged { .. })), "entries");
        tree.remove(&foreign);
        let foreign = Key::new(ino, ItemType::INODE_REF, TOP);
        tree.insert(foreign, vec![0; 10]);
        assert!(matches!(delete(&mut tree, ino, 9), Err(PlanError::Damaged { .. })), "names");
        tree.remove(&foreign);
        assert_eq!(delete(&mut tree, ino, 9), Ok(true), "a hole is no extent");
        assert_eq!(delete(&mut tree, TOP, 9), Err(PlanError::InUse { ino: TOP, what: "links" }));
    }

    #[test]
    fn orphans_are_found_and_those_with_names_are_forgotten() {
        let (mut tree, ino) = orphan(NewFile::Regular, 0);
        let mut top = *InodeItem::ref_from_bytes(&tree[&inode_key(ino)]).unwrap();
        top.nlink = 1.into();
        tree.insert(inode_key(300), top.as_bytes().to_vec());
        tree.insert(orphan_key(300), Vec::new());
        tree.insert(orphan_key(301), Vec::new());
        let geometry = geometry();
        let mut plan = Plan::new(&tree, context(&geometry));
        let next = |plan: &Plan<'_, Tree>, from| plan.next_orphan(from).unwrap();
        assert_eq!([0, ino + 1, 301, 302].map(|from| next(&plan, from)), [Some(ino), Some(300), Some(301), None]);
        assert_eq!(plan.recover_orphan(ino), Ok(Orphan::Unlinked));
        assert!(plan.changes().is_empty());
        assert_eq!(plan.recover_orphan(300), Ok(Orphan::Stale), "it has a name");
        assert_eq!(plan.recover_orphan(301), Ok(Orphan::Stale), "there is no such inode");
        assert_eq!(plan.recover_orphan(301), Err(PlanError::NotFound));
        assert_eq!((plan.changes().len(), next(&plan, ino + 1)), (2, None), "nothing else changed");
    }
}
