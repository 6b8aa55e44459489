//! Subvolumes in the root tree: their root items, their positions in each other, and those that are being deleted.

use std::collections::{BTreeMap, BTreeSet};

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::root::RootFlags;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::names::name_hash;
use sealblock_btrfs_format::node::Node;

use super::descent::Tree;
use super::report::{Place, Rule, WhyNotChecked};
use super::session::Session;
use crate::cursor::TreeRoot;
use crate::error::FsError;
use crate::roots::tree_root;

/// A root item.
#[derive(Clone, Copy, Debug)]
struct RootFacts {
    refs: u32,
    is_dead: bool,
    uuid: [u8; 16],
    received_uuid: [u8; 16],
    tree: Option<Tree>,
}

/// A position of a subvolume in another one: directory, index, name.
type Position = (u64, u64, Vec<u8>);

/// The root tree.
pub(super) struct Roots {
    roots: BTreeMap<u64, RootFacts>,
    /// Trees in the order of the root tree, relocations too.
    trees: Vec<Tree>,
    /// By outer and inner subvolume.
    refs: BTreeMap<(u64, u64), Position>,
    backrefs: BTreeMap<(u64, u64), Position>,
    orphans: BTreeSet<u64>,
    /// ROOT_ITEMs of trees that have another one, or belong at offset 0.
    odd: Vec<Key>,
    most: usize,
    is_cut: bool,
    /// True if nodes of the root tree are lost.
    pub has_lost: bool,
}

impl Roots {
    pub fn new(most: usize) -> Roots {
        Roots {
            roots: BTreeMap::new(),
            trees: Vec::new(),
            refs: BTreeMap::new(),
            backrefs: BTreeMap::new(),
            orphans: BTreeSet::new(),
            odd: Vec::new(),
            most,
            is_cut: false,
            has_lost: false,
        }
    }

    /// Takes a leaf of the root tree.
    pub fn take(&mut self, leaf: &Node<'_>) {
        for (key, data) in leaf.entries() {
            if self.roots.len() + self.odd.len() + self.refs.len() + self.backrefs.len() + self.orphans.len()
                >= self.most
            {
                self.is_cut = true;
                return;
            }
            match Item::decode(key, data) {
                Ok(Item::Root(root)) => {
                    let (tail, refs) = (root.valid_tail(), root.head.refs.get());
                    let tree = tree_root(key, data).map(|tree| Tree {
                        root: tree,
                        from: root.head.drop_progress.get(),
                        has_files: objectid::is_subvolume(key.objectid) && refs > 0,
                        root_dirid: root.head.root_dirid.get(),
                    });
                    let facts = RootFacts {
                        refs,
                        is_dead: refs == 0 || root.flags().contains(RootFlags::DEAD),
                        uuid: tail.map_or([0; 16], |tail| tail.uuid),
                        received_uuid: tail.map_or([0; 16], |tail| tail.received_uuid),
                        tree,
                    };
                    self.trees.extend(tree);
                    let has_another = self.roots.insert(key.objectid, facts).is_some();
                    // Those of files are found at any offset; `btrfs-convert` makes the data relocation tree at 2.
                    let is_of_files = objectid::is_subvolume(key.objectid) || key.objectid == objectid::DATA_RELOC_TREE;
                    let has_offset = key.offset != 0 && !is_of_files;
                    // Each relocation has its own, by the subvolume that it relocates.
                    if (has_another || has_offset) && key.objectid != objectid::TREE_RELOC {
                        self.odd.push(key);
                    }
                }
                Ok(Item::RootRef(one)) => {
                    let position = (one.dirid, one.sequence, one.name.to_vec());
                    match key.item_type {
                        ItemType::ROOT_REF => self.refs.insert((key.objectid, key.offset), position),
                        _ => self.backrefs.insert((key.offset, key.objectid), position),
                    };
                }
                Ok(Item::Empty) if key.item_type == ItemType::ORPHAN_ITEM => {
                    self.orphans.insert(key.offset);
                }
                _ => {}
            }
        }
    }

    /// All trees in the root tree.
    pub fn trees(&self) -> &[Tree] {
        &self.trees
    }

    /// The last root of a tree.
    pub fn tree(&self, id: u64) -> Option<TreeRoot> {
        self.roots.get(&id)?.tree.map(|tree| tree.root)
    }

    /// Checks the subvolumes against each other and against the directories that they are in.
    pub async fn check(&self, session: &Session<'_>) {
        if self.is_cut {
            session.not_checked(WhyNotChecked::TooManyNames);
        }
        if self.is_cut || self.has_lost {
            return;
        }
        let ids = [objectid::EXTENT_TREE, objectid::DEV_TREE, objectid::FS_TREE, objectid::CSUM_TREE];
        for id in ids.into_iter().filter(|id| self.tree(*id).is_none()) {
            session.found(Rule::NoTree, Place::tree(id), "the root tree has no such tree");
        }
        for key in &self.odd {
            let why = "the tree has several root items, or one at an offset at which Linux does not look for it";
            session.found(Rule::RootItem, Place::item(objectid::ROOT_TREE, *key), why);
        }
        self.check_default(session).await;
        self.check_pairs(session);
        self.check_counts(session);
        self.check_directories(session).await;
        self.check_uuids(session).await;
    }

    /// Without the default subvolume Linux mounts nothing, unless the mount names another one.
    async fn check_default(&self, session: &Session<'_>) {
        let Ok(id) = session.fs.default_subvolume().await else { return };
        if self.tree(id).is_none() {
            let why = format!("the default subvolume is {id}, which does not exist");
            session.found(Rule::RootItem, Place::tree(id), why);
        }
    }

    /// Each ROOT_REF has an equal ROOT_BACKREF, both ways.
    fn check_pairs(&self, session: &Session<'_>) {
        for ((outer, inner), position) in &self.refs {
            let key = Key::new(*outer, ItemType::ROOT_REF, *inner);
            let place = Place::item(objectid::ROOT_TREE, key);
            if self.backrefs.get(&(*outer, *inner)) != Some(position) {
                session.found(Rule::RootRef, place, "there is no equal ROOT_BACKREF");
            }
            for id in [outer, inner].into_iter().filter(|id| self.tree(**id).is_none()) {
                let why = format!("it is of subvolume {id}, which does not exist");
                session.found(Rule::RootRef, place, why);
            }
        }
        for ((outer, inner), position) in &self.backrefs {
            if self.refs.get(&(*outer, *inner)) != Some(position) {
                let key = Key::new(*inner, ItemType::ROOT_BACKREF, *outer);
                session.found(Rule::RootRef, Place::item(objectid::ROOT_TREE, key), "there is no equal ROOT_REF");
            }
        }
    }

    /// A subvolume in use has a position, and one that is being deleted an ORPHAN_ITEM.
    fn check_counts(&self, session: &Session<'_>) {
        let mut positions: BTreeMap<u64, u32> = BTreeMap::new();
        for (_, inner) in self.backrefs.keys() {
            *positions.entry(*inner).or_default() += 1;
        }
        let relocation = self.roots.get(&objectid::DATA_RELOC_TREE).and_then(|facts| facts.tree);
        if let Some(tree) = relocation.filter(|tree| tree.root_dirid != objectid::FIRST_FREE) {
            let why = format!("the top directory of the tree for the relocation of data is inode {}", tree.root_dirid);
            session.found(Rule::RootItem, Place::tree(objectid::DATA_RELOC_TREE), why);
        }
        let subvolumes = self.roots.iter().filter(|(id, facts)| objectid::is_subvolume(**id) && facts.tree.is_some());
        for (id, facts) in subvolumes {
            let (found, place) = (positions.get(id).copied().unwrap_or_default(), Place::tree(*id));
            if facts.refs == 0 {
                if found > 0 {
                    session.found(Rule::RootRef, place, "the subvolume is being deleted, and is still in another one");
                }
                if !self.orphans.contains(id) {
                    let why = "the subvolume is being deleted, and has no ORPHAN_ITEM, so it stays for ever";
                    session.found(Rule::RootOrphan, place, why);
                }
            } else if *id == objectid::FS_TREE {
                if facts.refs != 1 || found > 0 {
                    session.found(
                        Rule::RootRef,
                        place,
                        "the first subvolume has another count than 1, or is in another one",
                    );
                }
            } else if found != facts.refs {
                let why =
                    format!("the root item counts {} references, and there are {found} ROOT_BACKREFs", facts.refs);
                session.found(Rule::RootRef, place, why);
            }
        }
        for id in &self.orphans {
            match self.roots.get(id) {
                Some(facts) if facts.refs == 0 => {}
                Some(_) => session.note(format!("tree {id} is in use and has an ORPHAN_ITEM, which Linux removes")),
                None => session.note(format!("an ORPHAN_ITEM of the root tree is for tree {id}, which is gone")),
            }
        }
    }

    /// Each position has its entries in the directory.
    async fn check_directories(&self, session: &Session<'_>) {
        for ((outer, inner), position) in &self.refs {
            let Some(tree) = self.roots.get(outer).filter(|facts| !facts.is_dead).and_then(|facts| facts.tree) else {
                continue;
            };
            let (dirid, sequence, name) = position;
            let index = Key::new(*dirid, ItemType::DIR_INDEX, *sequence);
            let entry = Key::new(*dirid, ItemType::DIR_ITEM, name_hash(name));
            for key in [index, entry] {
                match has_entry(session, tree.root, key, *inner, name).await {
                    Ok(true) => {}
                    Ok(false) => {
                        let place = Place { ino: Some(*dirid), ..Place::item(*outer, key) };
                        let why = format!("there is no entry for subvolume {inner}, which ROOT_REF places there");
                        session.found(Rule::RootRef, place, why);
                    }
                    Err(_) => session.not_checked(WhyNotChecked::LostInodes),
                }
            }
        }
    }

    /// Linux rebuilds the UUID tree if it is out of date, so differences are notes.
    async fn check_uuids(&self, session: &Session<'_>) {
        let Some(tree) = self.tree(objectid::UUID_TREE) else { return };
        for (id, facts) in self.roots.iter().filter(|(id, facts)| objectid::is_subvolume(**id) && facts.refs > 0) {
            let kinds = [(facts.uuid, ItemType::UUID_SUBVOL), (facts.received_uuid, ItemType::UUID_RECEIVED_SUBVOL)];
            for (uuid, item_type) in kinds.into_iter().filter(|(uuid, _)| *uuid != [0; 16]) {
                let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| uuid[at + index]));
                let key = Key::new(half(0), item_type, half(8));
                let mut cursor = session.fs.cursor(tree, key..=key);
                let Ok(found) = cursor.next().await else { continue };
                let has = found.is_some_and(|(key, data)| {
                    matches!(Item::decode(key, data), Ok(Item::UuidSubvolumes(ids)) if ids.iter().any(|one| one == id))
                });
                if !has {
                    session.note(format!("the UUID tree does not have a UUID of subvolume {id}"));
                }
            }
        }
    }
}

async fn has_entry(session: &Session<'_>, tree: TreeRoot, key: Key, inner: u64, name: &[u8]) -> Result<bool, FsError> {
    let mut cursor = session.fs.cursor(tree, key..=key);
    Ok(match cursor.next().await? {
        Some((key, data)) => match Item::decode(key, data) {
            Ok(Item::DirIndex(entries) | Item::DirItems(entries)) => entries.iter().any(|entry| {
                let location = entry.location;
                entry.name == name && (location.objectid, location.item_type) == (inner, ItemType::ROOT_ITEM)
            }),
            _ => false,
        },
        None => false,
    })
}
