//! The trees that a verification walks, and the key ranges of each.

use std::ops::RangeInclusive;

use sealblock_btrfs_format::checker::Expected;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use super::report::WhyUnchecked;
use super::session::Session;
use crate::cursor::{Cursor, TreeRoot};
use crate::nodes::LoadedNode;
use crate::roots::tree_root;

/// A tree, or key ranges of it.
pub(super) struct Tree {
    pub root: TreeRoot,
    /// Sorted, disjoint and not empty.
    pub wanted: Vec<RangeInclusive<Key>>,
}

impl Tree {
    /// All of it.
    pub fn whole(root: TreeRoot) -> Tree {
        Tree { root, wanted: vec![Key::MIN..=Key::MAX] }
    }

    /// True if the ranges contain a key from `first` up to the one before `before`.
    pub fn wants(&self, first: Key, before: Option<Key>) -> bool {
        let index = self.wanted.partition_point(|range| *range.end() < first);
        self.wanted.get(index).is_some_and(|range| before.is_none_or(|before| *range.start() < before))
    }

    /// The children of a node within the ranges, the last one first, each with the first key after it in the tree.
    pub fn children<'a>(
        &'a self,
        node: &'a LoadedNode,
        before: Option<Key>,
    ) -> impl Iterator<Item = (Expected, Option<Key>)> + use<'a> {
        let pointers = node.view().pointers();
        (0..pointers.len()).rev().filter_map(move |slot| {
            let before = pointers.get(slot + 1).map(|next| next.key()).or(before);
            let is_wanted = self.is_whole() || self.wants(pointers[slot].key(), before);
            Some((node.child(slot, self.root.id).filter(|_| is_wanted)?, before))
        })
    }

    /// True if the ranges are the whole tree.
    pub fn is_whole(&self) -> bool {
        self.wanted == [Key::MIN..=Key::MAX]
    }
}

/// The trees of a filesystem.
pub(super) struct Trees {
    /// The trees without files, and also the root tree and the checksum tree.
    pub of_storage: Vec<Tree>,
    /// The trees of subvolumes.
    pub of_files: Vec<Tree>,
}

impl Trees {
    /// All trees in use. Of a subvolume that is being deleted, only the remaining part, because the space of the rest
    /// may be reused. Damage to the root tree is reported when that tree is walked.
    pub async fn of(session: &Session<'_>) -> Trees {
        let fs = session.fs;
        let mut trees =
            Trees { of_storage: vec![Tree::whole(fs.root_tree()), Tree::whole(fs.chunk_root())], of_files: Vec::new() };
        let mut cursor = Cursor::all(fs.nodes(), fs.root_tree());
        loop {
            let (key, data) = match cursor.next().await {
                Ok(None) => return trees,
                Ok(Some(item)) => item,
                Err(_) => continue,
            };
            let (Some(root), Ok(Item::Root(item))) = (tree_root(key, data), Item::decode(key, data)) else { continue };
            if root.id == objectid::TREE_RELOC {
                session.unchecked(WhyUnchecked::Relocation, item.head.bytes_used.get());
                continue;
            }
            let dropped = item.head.drop_progress.get();
            let tree = match item.head.refs.get() {
                0 if dropped != Key::MIN => Tree { root, wanted: vec![dropped..=Key::MAX] },
                _ => Tree::whole(root),
            };
            if objectid::is_subvolume(root.id) { trees.of_files.push(tree) } else { trees.of_storage.push(tree) }
        }
    }
}

/// The key of a subvolume's root item, from the lowest to the highest possible.
pub(super) fn root_items(id: u64) -> RangeInclusive<Key> {
    Key::new(id, ItemType::ROOT_ITEM, 0)..=Key::new(id, ItemType::ROOT_ITEM, u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(offset: u64) -> Key {
        Key::new(256, ItemType::EXTENT_DATA, offset)
    }

    #[test]
    fn only_wanted_ranges_of_a_tree_are_walked() {
        let root = TreeRoot { id: 5, bytenr: 0, level: 1, generation: 1 };
        let tree = Tree { root, wanted: vec![key(10)..=key(19), key(30)..=key(30)] };
        for (first, before, is_wanted) in [
            (0, Some(10), false),
            (0, Some(11), true),
            (19, Some(25), true),
            (20, Some(30), false),
            (20, Some(31), true),
            (20, None, true),
            (31, None, false),
        ] {
            assert_eq!(tree.wants(key(first), before.map(key)), is_wanted, "{first} {before:?}");
        }
        assert!(Tree::whole(root).wants(Key::MAX, None));
    }
}
