//! Copies of nodes that several trees may share, and what becomes of the references of their children.
//!
//! A snapshot shares all nodes below its root with its source. Their references count the parents: a node has one for each
//! tree or node that points to it, and its children have none for the trees that share it. Before a tree changes such a
//! node it copies it, and then both have the same children:
//!
//! | references of the old node | its children |
//! | --- | --- |
//! | several; made for this tree, and its children are referred to by tree | get a reference by the old node (FULL_BACKREF); those by the tree are the copy's |
//! | several, otherwise | get one more, by the tree of the copy |
//! | one, and its children are referred to by node | get one by the tree, and lose that by the old node |
//! | one | stay as they are |
//!
//! Invariants:
//! - Parents are copied before their children, so the reference of a node that is copied is by its tree.
//! - A node of another tree than a subvolume is never shared, and neither is a root.
//! - To copy a node that may be shared, its extent item must be in memory ([`refs_of`]).

use sealblock_btrfs_format::extent_refs::ExtentRef;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::extent::ExtentFlags;
use sealblock_btrfs_format::items::extent_buf::ExtentItemBuf;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::{Node, flags};

use crate::nodes::Nodes;
use crate::refs::DelayedRefs;
use crate::tree::{Tree, TreeError};

/// Which nodes of a tree may be shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sharing {
    /// The transaction of the last snapshot of the tree.
    pub last_snapshot: u64,
    /// True if that is the open one: what the transaction made before may be shared, too.
    pub is_now: bool,
}

impl Sharing {
    /// True if other trees may have a node of this tree, which is not its root.
    pub fn may_have(&self, owner: u64, node: &Node) -> bool {
        let header = node.header();
        let is_old = header.generation.get() <= self.last_snapshot || header.flags.get() & flags::RELOC != 0;
        objectid::is_subvolume(owner) && is_old
    }
}

/// The references of a node or extent with the delayed ones, and its flags.
///
/// # Errors
/// If a node of the extent tree is not in memory, or the extent is not there or damaged.
pub fn refs_of(
    bytenr: u64,
    extents: &Tree,
    nodes: &Nodes,
    delayed: &DelayedRefs,
) -> Result<(u64, ExtentFlags), TreeError> {
    let (first, last) =
        (Key::new(bytenr, ItemType::EXTENT_ITEM, 0), Key::new(bytenr, ItemType::METADATA_ITEM, u64::MAX));
    let damaged = TreeError::Refs(bytenr);
    let (refs, flags) = match delayed.head(bytenr).and_then(|head| head.new_item()) {
        // It is not in the tree yet. To look there, nodes would be needed that nobody walked to: a change copies nodes
        // that it made itself.
        Some(item) => (item.refs(), item.flags),
        None => match extents.first_of(nodes, first..=last)? {
            Some((key, data)) => {
                let item = ExtentItemBuf::decode(key.item_type, data).map_err(|_| damaged)?;
                (item.refs(), item.flags)
            }
            None => (0, ExtentFlags::empty()),
        },
    };
    let refs = refs.checked_add_signed(delayed.net(bytenr)).filter(|refs| *refs > 0).ok_or(damaged)?;
    Ok((refs, flags | delayed.flags(bytenr)))
}

/// What a reference of the children of a node is by.
#[derive(Clone, Copy)]
pub enum By {
    /// By the tree with this number.
    Tree(u64),
    /// By the node at this address.
    Node(u64),
}

impl By {
    fn of_node(self) -> ExtentRef {
        match self {
            By::Tree(root) => ExtentRef::TreeBlock { root },
            By::Node(parent) => ExtentRef::SharedBlock { parent },
        }
    }

    fn of_data(self, objectid: u64, offset: u64) -> ExtentRef {
        match self {
            By::Tree(root) => ExtentRef::Data { root, objectid, offset },
            By::Node(parent) => ExtentRef::SharedData { parent },
        }
    }
}

/// All references that a node has to others.
///
/// # Errors
/// If an item cannot be read.
pub fn children(node: &Node, by: By) -> Result<Vec<(u64, ExtentRef)>, TreeError> {
    let bytenr = node.header().bytenr.get();
    if node.header().level > 0 {
        return Ok(node.pointers().iter().map(|pointer| (pointer.blockptr.get(), by.of_node())).collect());
    }
    let mut all = Vec::new();
    for (key, data) in node.entries().filter(|(key, _)| key.item_type == ItemType::EXTENT_DATA) {
        let Ok(Item::FileExtent(extent)) = Item::decode(key, data) else { return Err(TreeError::Refs(bytenr)) };
        let Some(location) = extent.location().filter(|location| !location.is_hole()) else { continue };
        let offset = key.offset.wrapping_sub(location.offset.get());
        all.push((location.disk_bytenr.get(), by.of_data(key.objectid, offset)));
    }
    Ok(all)
}
