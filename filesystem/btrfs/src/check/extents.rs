//! The extents of the extent tree, and whether each node and file extent lies in the extent that it should.
//!
//! Invariants:
//! - Extents come from the extent tree in the order of their addresses, so the list is sorted and is searched by
//!   halving.
//! - Where nodes of the extent tree are lost, nothing is said about extents.

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::extent::{ExtentFlags, ExtentItem, InlineRef};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::{Header, Node, flags};

use super::references::{Maker, Reference, References};
use super::report::{Place, Rule, WhyNotChecked};
use super::session::Session;

/// An extent of the extent tree.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub start: u64,
    pub bytes: u64,
    generation: u64,
    refs: u64,
    /// The level of a node; [`DATA`] for data.
    level: u8,
    is_full: bool,
    /// True for a node that was reached.
    is_reached: bool,
}

/// In place of a level.
const DATA: u8 = u8::MAX;

impl Extent {
    pub fn is_data(&self) -> bool {
        self.level == DATA
    }

    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }
}

/// What reaching a node shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reached {
    /// For the first time.
    First { is_full: bool, is_shared: bool },
    /// It was reached before.
    Again,
}

/// All extents with their references.
pub(super) struct Extents {
    list: Vec<Extent>,
    pub references: References,
    /// Address ranges whose items are lost, ascending and apart from each other.
    unknown: Vec<(u64, u64)>,
    /// The sum of the references after the last extent.
    counted: u64,
    /// True if some references of the last extent may be lost.
    is_last_cut: bool,
    /// Nodes that were reached and have no extent.
    strays: std::collections::HashSet<u64>,
    most: usize,
    is_cut: bool,
}

impl Extents {
    pub fn new(most: usize) -> Extents {
        Extents {
            list: Vec::new(),
            references: References::new(most),
            unknown: Vec::new(),
            counted: 0,
            is_last_cut: false,
            strays: Default::default(),
            most,
            is_cut: false,
        }
    }

    /// True if all extents and references are known.
    pub fn is_complete(&self) -> bool {
        self.unknown.is_empty() && !self.is_cut && !self.references.is_cut()
    }

    /// All extents, by address.
    pub fn all(&self) -> &[Extent] {
        &self.list
    }

    /// Records that the items between two keys of the extent tree are lost.
    pub fn lost(&mut self, from: Option<Key>, before: Option<Key>) {
        let (from, to) = (from.map_or(0, |key| key.objectid), before.map_or(u64::MAX, |key| key.objectid));
        // Leaves come in the order of their keys.
        match self.unknown.last_mut() {
            Some(last) if last.1 >= from => last.1 = last.1.max(to),
            _ => self.unknown.push((from, to)),
        }
        // References of the last extent may be among them.
        self.is_last_cut = true;
    }

    fn is_unknown(&self, address: u64) -> bool {
        let behind = self.unknown.partition_point(|(from, _)| *from <= address);
        let is_lost = behind.checked_sub(1).is_some_and(|index| address <= self.unknown[index].1);
        is_lost || self.is_cut || self.references.is_cut()
    }

    /// Takes a leaf of the extent tree. Leaves come in the order of their keys.
    pub fn take(&mut self, session: &Session<'_>, leaf: &Node<'_>) {
        for (key, data) in leaf.entries() {
            match Item::decode(key, data) {
                Ok(Item::Extent(extent)) => self.take_extent(session, key, &extent),
                Ok(Item::Empty) if key.item_type == ItemType::TREE_BLOCK_REF => {
                    self.record(session, key, Maker::Tree(key.offset), 1);
                }
                Ok(Item::Empty) if key.item_type == ItemType::SHARED_BLOCK_REF => {
                    self.record(session, key, Maker::Parent(key.offset), 1);
                }
                Ok(Item::ExtentDataRefs(refs)) => {
                    for one in refs.iter() {
                        self.record(session, key, file_of(one), one.count.get());
                    }
                }
                Ok(Item::SharedDataRef(shared)) => {
                    self.record(session, key, Maker::Leaf(key.offset), shared.count.get());
                }
                _ => {}
            }
        }
    }

    fn take_extent(&mut self, session: &Session<'_>, key: Key, item: &ExtentItem<'_>) {
        self.finish_last(session);
        if self.list.len() >= self.most {
            self.is_cut = true;
            return;
        }
        let extent_flags = item.head.flags();
        let is_skinny = key.item_type == ItemType::METADATA_ITEM;
        let bytes = if is_skinny { session.node_bytes() } else { key.offset };
        let level = match item.tree_block {
            Some(info) => info.level,
            // The checker allows a level only below 8.
            None if is_skinny => key.offset as u8,
            None => DATA,
        };
        if let Some(last) = self.list.last()
            && last.end() > key.objectid
        {
            let why = format!("the extent overlaps the one at {}, which ends at {}", last.start, last.end());
            session.found(Rule::ExtentOverlap, Place::item(objectid::EXTENT_TREE, key), why);
        }
        self.list.push(Extent {
            start: key.objectid,
            bytes,
            generation: item.head.generation.get(),
            refs: item.head.refs.get(),
            level,
            is_full: extent_flags.contains(ExtentFlags::FULL_BACKREF),
            is_reached: false,
        });
        for one in item.refs() {
            let maker = match one {
                InlineRef::TreeBlock(root) => Maker::Tree(root),
                InlineRef::SharedBlock(parent) => Maker::Parent(parent),
                InlineRef::Data(data) => file_of(data),
                InlineRef::SharedData(parent, _) => Maker::Leaf(parent),
                // Not a reference.
                InlineRef::Owner(_) => continue,
            };
            self.record(session, key, maker, one.count());
        }
    }

    fn record(&mut self, session: &Session<'_>, key: Key, maker: Maker, count: u32) {
        let extent = key.objectid;
        self.references.record(Reference { extent, maker }, count);
        let place = Place::item(objectid::EXTENT_TREE, key);
        match self.list.last() {
            Some(last) if last.start == extent => {
                self.counted = self.counted.saturating_add(u64::from(count));
                if last.is_data() == maker.is_of_node() {
                    let why = "a reference to a node is recorded for data, or the other way round";
                    session.found(Rule::ExtentKind, place, why);
                }
            }
            _ if self.is_unknown(extent) => {}
            _ => session.found(Rule::ReferenceAlone, place, "a reference is recorded, and there is no extent"),
        }
    }

    /// Compares the count of the last extent with its references.
    fn finish_last(&mut self, session: &Session<'_>) {
        let (counted, is_cut) = (std::mem::take(&mut self.counted), std::mem::take(&mut self.is_last_cut));
        let Some(last) = self.list.last().filter(|last| !is_cut && last.refs != counted) else { return };
        let why = format!("the extent counts {} references, and {counted} are recorded", last.refs);
        session.found(Rule::ReferenceCount, Place::at(last.start), why);
    }

    /// Prepares for the references that are made, after the last leaf.
    pub fn sort(&mut self, session: &Session<'_>) {
        self.finish_last(session);
        self.references.sort(session);
        session.count(|report| report.extents = self.list.len() as u64);
        if !self.unknown.is_empty() {
            session.not_checked(WhyNotChecked::ExtentTree);
        }
        if self.is_cut || self.references.is_cut() {
            session.not_checked(WhyNotChecked::TooManyExtents);
        }
    }

    fn position(&self, start: u64) -> Option<usize> {
        self.list.binary_search_by_key(&start, |extent| extent.start).ok()
    }

    /// Counts a reference that something makes. What has no extent at all is reported by the caller.
    pub fn made(&mut self, session: &Session<'_>, reference: Reference) {
        let extent = reference.extent;
        if !self.references.made(reference) && !self.is_unknown(extent) && self.position(extent).is_some() {
            self.references.keep_unrecorded(session, reference);
        }
    }

    /// Counts a reference to data, and compares the extent with that of the file.
    pub fn made_to_data(&mut self, session: &Session<'_>, reference: Reference, bytes: u64, place: Place) {
        self.made(session, reference);
        let start = reference.extent;
        match self.position(start).map(|index| self.list[index]) {
            None if self.is_unknown(start) => {}
            None => {
                let why = format!("the extent at {start}, to which the file refers, is not in the extent tree");
                session.found(Rule::NoExtent, place, why);
            }
            Some(extent) if extent.is_data() && extent.bytes == bytes => {}
            Some(extent) => {
                let what = if extent.is_data() { "data" } else { "a node" };
                let found = extent.bytes;
                let why =
                    format!("the file refers to {bytes} bytes at {start}, where the extent tree has {found} of {what}");
                session.found(Rule::ExtentKind, place, why);
            }
        }
    }

    /// True if a node was reached before.
    pub fn is_reached(&self, bytenr: u64) -> bool {
        self.position(bytenr).map_or_else(|| self.strays.contains(&bytenr), |index| self.list[index].is_reached)
    }

    /// Marks a node as reached, and says what the extent tree knows about it.
    pub fn reach(&mut self, session: &Session<'_>, bytenr: u64, tree: u64) -> Reached {
        let Some(index) = self.position(bytenr) else {
            if self.strays.len() >= self.most {
                // Nodes that cannot be remembered are not walked, so that the walk ends.
                session.not_checked(WhyNotChecked::TooManyExtents);
                return Reached::Again;
            }
            if !self.strays.insert(bytenr) {
                return Reached::Again;
            }
            if !self.is_unknown(bytenr) {
                let why = "the node is in use, and the extent tree does not have it";
                session.found(Rule::NoExtent, Place { tree: Some(tree), ..Place::at(bytenr) }, why);
            }
            return Reached::First { is_full: false, is_shared: true };
        };
        let extent = &mut self.list[index];
        if std::mem::replace(&mut extent.is_reached, true) {
            return Reached::Again;
        }
        Reached::First { is_full: extent.is_full, is_shared: extent.refs > 1 }
    }

    /// Compares a node with its extent, once.
    pub fn check_node(&self, session: &Session<'_>, header: &Header, (tree, is_root): (u64, bool)) {
        let bytenr = header.bytenr.get();
        let Some(extent) = self.position(bytenr).map(|index| self.list[index]) else { return };
        let place = Place { tree: Some(tree), ..Place::at(bytenr) };
        if extent.is_data() {
            session.found(Rule::ExtentKind, place, "the node is data in the extent tree");
            return;
        }
        if extent.level != header.level {
            let why = format!("the node is at level {}, and the extent tree has {}", header.level, extent.level);
            session.found(Rule::ExtentLevel, place, why);
        }
        let generation = header.generation.get();
        if extent.generation != generation {
            let why = format!("the node is of generation {generation}, and the extent tree has {}", extent.generation);
            session.found(Rule::ExtentGeneration, place, why);
        }
        let is_moved = header.flags.get() & flags::RELOC != 0;
        if is_moved && !extent.is_full && !is_root && objectid::is_subvolume(tree) {
            let why = "the node was moved by a relocation, and the extent tree has no FULL_BACKREF for it";
            session.found(Rule::ExtentKind, place, why);
        }
        let owner = header.owner.get();
        if is_moved && !objectid::is_subvolume(tree) && tree != objectid::DATA_RELOC_TREE {
            session.found(
                Rule::ExtentKind,
                place,
                "the node was moved by a relocation, which moves only trees of files",
            );
        }
        // Such a node lost the reference of its owner, and no other tree ever lets one go.
        let has_owner = !objectid::is_subvolume(tree) || is_root || owner == tree && !is_moved;
        if extent.is_full && has_owner {
            let why = "the extent tree has FULL_BACKREF for it, but the tree that made the node still has it";
            session.found(Rule::ExtentKind, place, why);
        }
        if header.backref_revision() != 1 {
            let revision = header.backref_revision();
            let why = format!("the node says revision {revision} of references, and the extent tree has revision 1");
            session.found(Rule::ExtentKind, place, why);
        }
        let by_owner = Reference { extent: bytenr, maker: Maker::Tree(owner) };
        // What a relocation moved is referred to by its parents, also within the tree of its owner.
        let may_be_moved = owner == tree || is_moved;
        if !extent.is_full && !may_be_moved && !self.is_unknown(bytenr) && !self.references.has(by_owner) {
            let why = format!(
                "it has no FULL_BACKREF, so its owner, tree {owner}, refers to its children, and not to the node itself"
            );
            session.found(Rule::ExtentOwner, place, why);
        }
    }
}

fn file_of(data: &sealblock_btrfs_format::items::extent::ExtentDataRef) -> Maker {
    Maker::File { root: data.root.get(), ino: data.objectid.get(), offset: data.offset.get() }
}
