//! Whether the names of a subvolume agree: each name of an inode with one DIR_INDEX, and each DIR_INDEX with one
//! DIR_ITEM.
//!
//! The items of a name are far apart, and snapshots share most of them, so they are not collected. Instead each adds a
//! hash to a sum, and the other side subtracts it: a sum of 0 shows that they agree. Sums of shared nodes are computed
//! once. Only if a sum is not 0 are the names of that subvolume compared one by one.
//!
//! The hashes are keyed at random, so no filesystem can be made to have a sum of 0 by design.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::directory::{DirEntry, FileType};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::Node;

use super::report::{Place, Rule, WhyNotChecked};
use super::session::Session;

/// The keyed hash.
#[derive(Default)]
pub(super) struct Hashes(RandomState);

impl Hashes {
    /// A name of an inode at an index of a directory.
    pub fn name(&self, parent: u64, index: u64, ino: u64, name: &[u8]) -> u64 {
        self.0.hash_one((1_u8, parent, index, ino, name))
    }

    /// An entry of a directory, without its index.
    pub fn entry(&self, parent: u64, entry: &DirEntry<'_>) -> u64 {
        let Key { objectid, item_type, offset } = entry.location;
        self.0.hash_one((2_u8, parent, objectid, item_type, offset, entry.kind, entry.name))
    }

    /// What a pointer says about a node.
    pub fn node(&self, owner: u64, level: u8, generation: u64, first_key: Option<Key>) -> u64 {
        // A subvolume may have nodes of any other.
        let owner = if objectid::is_subvolume(owner) { objectid::FS_TREE } else { owner };
        self.0.hash_one((4_u8, owner, level, generation, first_key))
    }

    /// The type of an inode.
    pub fn kind(&self, ino: u64, kind: u8) -> u64 {
        self.0.hash_one((3_u8, ino, kind))
    }
}

/// Sums that are 0 if all names of a subvolume agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct NameSums {
    /// Names of inodes less entries by index.
    names: u64,
    /// Entries by name less entries by index.
    entries: u64,
    /// Types of inodes, once for each name, less types in entries.
    kinds: u64,
}

impl NameSums {
    pub fn add(&mut self, other: &NameSums) {
        self.names = self.names.wrapping_add(other.names);
        self.entries = self.entries.wrapping_add(other.entries);
        self.kinds = self.kinds.wrapping_add(other.kinds);
    }

    pub fn is_zero(&self) -> bool {
        *self == NameSums::default()
    }

    /// Adds the type of an inode with this number of names.
    pub fn add_kind(&mut self, hashes: &Hashes, ino: u64, kind: u8, links: u64) {
        self.kinds = self.kinds.wrapping_add(hashes.kind(ino, kind).wrapping_mul(links));
    }

    pub fn add_name(&mut self, hashes: &Hashes, parent: u64, index: u64, ino: u64, name: &[u8]) {
        self.names = self.names.wrapping_add(hashes.name(parent, index, ino, name));
    }

    pub fn add_entry(&mut self, hashes: &Hashes, parent: u64, entry: &DirEntry<'_>) {
        self.entries = self.entries.wrapping_add(hashes.entry(parent, entry));
    }

    pub fn add_index(&mut self, hashes: &Hashes, parent: u64, index: u64, entry: &DirEntry<'_>) {
        self.entries = self.entries.wrapping_sub(hashes.entry(parent, entry));
        // A subvolume has its names in the root tree.
        if entry.location.item_type != ItemType::ROOT_ITEM {
            let ino = entry.location.objectid;
            self.names = self.names.wrapping_sub(hashes.name(parent, index, ino, entry.name));
            self.kinds = self.kinds.wrapping_sub(hashes.kind(ino, entry.kind));
        }
    }
}

/// The number of a file type in entries, for a mode.
pub(super) fn kind_of_mode(mode: u32) -> u8 {
    FileType::of_mode(mode).unwrap_or(FileType::Unknown) as u8
}

/// A use of a hash while names are compared one by one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// A name of an inode, or an entry by name.
    Plus,
    /// An entry by index.
    Minus,
}

/// Compares the names of one subvolume one by one: first all leaves are counted, then the differences are reported from
/// the same leaves.
pub(super) struct NameTable<'h> {
    hashes: &'h Hashes,
    /// How often each hash was added, less how often it was subtracted; without those that are 0.
    balance: HashMap<u64, i32>,
    /// Types of inodes, which entries must have.
    kinds: HashMap<u64, u8>,
    /// Inodes without links, whose names and entries do not count.
    unlinked: HashSet<u64>,
    most: usize,
    is_cut: bool,
}

impl<'h> NameTable<'h> {
    pub fn new(hashes: &'h Hashes, most: usize) -> NameTable<'h> {
        NameTable {
            hashes,
            balance: HashMap::new(),
            kinds: HashMap::new(),
            unlinked: HashSet::new(),
            most,
            is_cut: false,
        }
    }

    /// Counts the names of a leaf.
    pub fn count(&mut self, leaf: &Node<'_>) {
        let hashes = self.hashes;
        for (key, data) in leaf.entries() {
            if let Ok(Item::Inode(inode)) = Item::decode(key, data)
                && self.kinds.len() < self.most
            {
                self.kinds.insert(key.objectid, kind_of_mode(inode.mode.get()));
                if inode.nlink.get() == 0 {
                    self.unlinked.insert(key.objectid);
                }
            }
        }
        each(hashes, leaf, &mut |hash, part, _, key| {
            if !self.unlinked.contains(&key.objectid) {
                self.change(hash, part);
            }
        });
    }

    fn change(&mut self, hash: u64, part: Part) {
        let is_full = self.balance.len() >= self.most;
        let step = if part == Part::Plus { 1 } else { -1 };
        match self.balance.get_mut(&hash) {
            Some(balance) => {
                *balance = balance.saturating_add(step);
                if *balance == 0 {
                    self.balance.remove(&hash);
                }
            }
            None if is_full => self.is_cut = true,
            None => drop(self.balance.insert(hash, step)),
        }
    }

    /// Reports the names of a leaf that have no counterpart.
    pub fn report(&mut self, session: &Session<'_>, tree: u64, leaf: &Node<'_>) {
        if self.is_cut {
            session.not_checked(WhyNotChecked::TooManyNames);
            return;
        }
        let (balance, kinds, unlinked) = (&self.balance, &self.kinds, &self.unlinked);
        let has_kinds = kinds.len() < self.most;
        each(self.hashes, leaf, &mut |hash, part, what, key| {
            let Some(left) = balance.get(&hash).filter(|_| !unlinked.contains(&key.objectid)) else { return };
            if (part == Part::Plus) == (*left > 0) {
                let why = what.explain(part, left.unsigned_abs());
                session.found(Rule::Name, Place { ino: Some(key.objectid), ..Place::item(tree, key) }, why);
            }
        });
        let is_index = |key: Key| key.item_type == ItemType::DIR_INDEX && !unlinked.contains(&key.objectid);
        for (key, data) in leaf.entries().filter(|(key, _)| has_kinds && is_index(*key)) {
            let Ok(Item::DirIndex(entries)) = Item::decode(key, data) else { continue };
            for entry in entries.iter().filter(|entry| entry.location.item_type != ItemType::ROOT_ITEM) {
                let ino = entry.location.objectid;
                if let Some(kind) = kinds.get(&ino).filter(|kind| **kind != entry.kind) {
                    let why = format!(
                        "the entry {} has the type {}, and its inode {ino} has the type {kind}",
                        shown(entry.name),
                        entry.kind
                    );
                    session.found(Rule::NameKind, Place { ino: Some(key.objectid), ..Place::item(tree, key) }, why);
                }
            }
        }
    }
}

/// A use of a name.
struct Named<'a> {
    name: &'a [u8],
    ino: u64,
    parent: u64,
    /// For the pair of DIR_ITEM and DIR_INDEX, rather than of a name of an inode and DIR_INDEX.
    is_entry: bool,
}

impl Named<'_> {
    fn explain(&self, part: Part, times: u32) -> String {
        let (name, Named { ino, parent, .. }) = (shown(self.name), self);
        let twice = if times > 1 { ", or is there more than once" } else { "" };
        match (self.is_entry, part) {
            (true, Part::Plus) => format!("the DIR_ITEM {name} of inode {ino} has no equal DIR_INDEX{twice}"),
            (true, Part::Minus) => format!("the DIR_INDEX {name} of inode {ino} has no equal DIR_ITEM{twice}"),
            (false, Part::Plus) => {
                format!("the inode has the name {name} in directory {parent}, which has no such DIR_INDEX{twice}")
            }
            (false, Part::Minus) => {
                format!("the DIR_INDEX {name} leads to inode {ino}, which has no such INODE_REF or INODE_EXTREF{twice}")
            }
        }
    }
}

/// A name, for a message.
pub(super) fn shown(name: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(name))
}

/// Calls back for each hash that a leaf adds to the sums of names and entries, or subtracts from them.
fn each(hashes: &Hashes, leaf: &Node<'_>, call: &mut dyn FnMut(u64, Part, Named<'_>, Key)) {
    for (key, data) in leaf.entries() {
        match Item::decode(key, data) {
            Ok(Item::InodeRefs(refs)) => {
                for one in refs.iter().filter(|one| !is_dots(key.objectid, key.offset, one.name)) {
                    let (ino, parent) = (key.objectid, key.offset);
                    let named = Named { name: one.name, ino, parent, is_entry: false };
                    call(hashes.name(parent, one.index, ino, one.name), Part::Plus, named, key);
                }
            }
            Ok(Item::InodeExtrefs(refs)) => {
                for one in refs.iter() {
                    let (ino, parent) = (key.objectid, one.parent);
                    let named = Named { name: one.name, ino, parent, is_entry: false };
                    call(hashes.name(parent, one.index, ino, one.name), Part::Plus, named, key);
                }
            }
            Ok(Item::DirItems(entries)) => {
                for entry in entries.iter() {
                    let (ino, parent) = (entry.location.objectid, key.objectid);
                    let named = Named { name: entry.name, ino, parent, is_entry: true };
                    call(hashes.entry(parent, &entry), Part::Plus, named, key);
                }
            }
            Ok(Item::DirIndex(entries)) => {
                for entry in entries.iter() {
                    let (ino, parent) = (entry.location.objectid, key.objectid);
                    let named = |is_entry| Named { name: entry.name, ino, parent, is_entry };
                    call(hashes.entry(parent, &entry), Part::Minus, named(true), key);
                    if entry.location.item_type != ItemType::ROOT_ITEM {
                        call(hashes.name(parent, key.offset, ino, entry.name), Part::Minus, named(false), key);
                    }
                }
            }
            _ => {}
        }
    }
}

/// True for the name that a top directory has in itself.
pub(super) fn is_dots(ino: u64, parent: u64, name: &[u8]) -> bool {
    ino == parent && name == b".."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_zero_only_if_every_name_has_its_entries() {
        let (hashes, location) = (Hashes::default(), Key::new(257, ItemType::INODE_ITEM, 0));
        let entry = DirEntry { location, transid: 1, kind: 1, name: b"name", data: b"" };
        let mut sums = NameSums::default();
        sums.add_name(&hashes, 256, 2, 257, b"name");
        sums.add_entry(&hashes, 256, &entry);
        assert!(!sums.is_zero());
        sums.add_index(&hashes, 256, 2, &entry);
        assert!(!sums.is_zero(), "the type is missing");
        sums.add_kind(&hashes, 257, 1, 1);
        assert!(sums.is_zero());
        let mut twice = sums;
        twice.add_index(&hashes, 256, 3, &entry);
        twice.add_kind(&hashes, 257, 1, 1);
        twice.add_entry(&hashes, 256, &entry);
        assert!(!twice.is_zero(), "an index that no name has");
    }

    #[test]
    fn only_the_top_directory_has_a_name_in_itself() {
        assert!(is_dots(256, 256, b"..") && !is_dots(256, 256, b"a") && !is_dots(257, 256, b".."));
    }
}
