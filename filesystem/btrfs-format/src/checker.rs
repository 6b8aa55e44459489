//! Checks a node before it is used: it must be the node that was requested, its structure must be valid, and all its
//! items must obey the rules.
//!
//! The same check runs after every read and before every write. A node that passes is a [`CheckedNode`]; nothing else
//! makes one.

use std::ops::Deref;

use crate::checker_items::{Context, check_item};
use crate::features::Incompat;
use crate::key::{Key, objectid};
use crate::node::{Node, flags, leaf_capacity};
use crate::refusal::{Refusal, Rule, aligned, same, within};
use crate::superblock::{Geometry, MAX_LEVELS};

/// What a parent, a root item or a superblock says about a node before it is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Expected {
    /// Its address.
    pub bytenr: u64,
    /// Its tree.
    pub owner: u64,
    /// Its level.
    pub level: u8,
    /// The transaction that wrote it.
    pub generation: u64,
    /// Its first key; `None` for a root node, which has no parent to compare with.
    pub first_key: Option<Key>,
}

/// A node that obeys all rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckedNode<'a>(Node<'a>);

impl<'a> Deref for CheckedNode<'a> {
    type Target = Node<'a>;

    fn deref(&self) -> &Node<'a> {
        &self.0
    }
}

impl CheckedNode<'_> {
    /// What this node says about the child of a pointer.
    pub fn child(&self, slot: usize, owner: u64) -> Option<Expected> {
        Expected::of_child(self, slot, owner)
    }
}

impl Expected {
    /// What a checked node of the tree `owner` says about the child of one of its pointers.
    pub fn of_child(node: &Node, slot: usize, owner: u64) -> Option<Expected> {
        let pointer = node.pointers().get(slot)?;
        Some(Expected {
            bytenr: pointer.blockptr.get(),
            owner,
            level: node.header().level.checked_sub(1)?,
            generation: pointer.generation.get(),
            first_key: Some(pointer.key()),
        })
    }
}

/// Checks a node.
///
/// # Errors
/// The first rule that it breaks, and where.
pub fn check_node<'a>(
    bytes: &'a [u8],
    geometry: &Geometry,
    expected: &Expected,
) -> Result<CheckedNode<'a>, Box<Refusal>> {
    let at = |slot, key, rule| Box::new(Refusal { bytenr: expected.bytenr, owner: expected.owner, slot, key, rule });
    let refuse = |rule| at(None, None, rule);
    check_block(bytes, geometry).map_err(refuse)?;
    let node = Node::decode(bytes).map_err(|error| refuse(error.into()))?;
    check_header(&node, geometry, expected).map_err(refuse)?;
    let place = |slot, key| move |rule| at(Some(slot), Some(key), rule);
    if node.header().level == 0 {
        check_leaf(&node, geometry, place)?;
    } else {
        check_inner(&node, geometry, place)?;
    }
    Ok(CheckedNode(node))
}

/// Checks that a node which passed before is also the node that is expected now; a node that several trees share is
/// read only once.
///
/// # Errors
/// The rule that it breaks.
pub fn check_identity(node: &Node, geometry: &Geometry, expected: &Expected) -> Result<(), Box<Refusal>> {
    let refuse =
        |rule| Box::new(Refusal { bytenr: expected.bytenr, owner: expected.owner, slot: None, key: None, rule });
    check_header(node, geometry, expected).map_err(refuse)
}

fn check_block(bytes: &[u8], geometry: &Geometry) -> Result<(), Rule> {
    same("bytes of a node", bytes.len() as u64, geometry.node_bytes)?;
    Ok(geometry.checksum.verify(bytes)?)
}

fn check_header(node: &Node, geometry: &Geometry, expected: &Expected) -> Result<(), Rule> {
    let header = node.header();
    if header.fsid != geometry.node_uuid {
        return Err(Rule::ForeignNode);
    }
    same("address", header.bytenr.get(), expected.bytenr)?;
    same("level", header.level, expected.level)?;
    within("level", header.level, 0, u64::from(MAX_LEVELS) - 1)?;
    same("generation", header.generation.get(), expected.generation)?;
    if header.flags.get() & flags::WRITTEN == 0 {
        return Err(Rule::Contradiction("the node says it was never written"));
    }
    let owner = header.owner.get();
    // Subvolumes share nodes. Such a node has the number of the subvolume for which it was made.
    if !(objectid::is_subvolume(expected.owner) && objectid::is_subvolume(owner)) {
        same("tree", owner, expected.owner)?;
    }
    match (expected.first_key, node.first_key()) {
        (Some(expected), Some(found)) if expected != found => {
            Err(Rule::OtherKey { field: "first key", expected, found })
        }
        (Some(_), None) => Err(Rule::Contradiction("an empty node that is not a root")),
        (None, None) if header.level > 0 => Err(Rule::Contradiction("a node without pointers")),
        (None, None) if !may_be_empty(owner, geometry) => Err(Rule::Contradiction("a tree that is never empty")),
        _ => Ok(()),
    }
}

/// True if a tree may have no items at all.
fn may_be_empty(owner: u64, geometry: &Geometry) -> bool {
    let is_new_layout = geometry.features.incompat.contains(Incompat::EXTENT_TREE_V2);
    match owner {
        objectid::EXTENT_TREE => is_new_layout,
        0
        | objectid::ROOT_TREE
        | objectid::CHUNK_TREE
        | objectid::DEV_TREE
        | objectid::FS_TREE
        | objectid::DATA_RELOC_TREE
        | objectid::BLOCK_GROUP_TREE => false,
        _ => true,
    }
}

fn check_leaf<F: FnOnce(Rule) -> Box<Refusal>>(
    node: &Node,
    geometry: &Geometry,
    place: impl Fn(usize, Key) -> F,
) -> Result<(), Box<Refusal>> {
    let mut data_end = leaf_capacity(geometry.node_bytes) as u64;
    let mut previous = None;
    for (slot, item) in node.items().iter().enumerate() {
        let key = item.key();
        let packed = u64::from(item.offset.get()) + u64::from(item.size.get());
        same("end of the data", packed, data_end).map_err(place(slot, key))?;
        let data = node.data(item).ok_or(Rule::Contradiction("the data overlap the heads of the items"));
        let data = data.map_err(place(slot, key))?;
        check_order(previous.map(|(key, _)| key), key).map_err(place(slot, key))?;
        let context = Context { geometry, owner: node.header().owner.get(), key, previous };
        check_item(&context, data).map_err(place(slot, key))?;
        (data_end, previous) = (u64::from(item.offset.get()), Some((key, data)));
    }
    Ok(())
}

fn check_inner<F: FnOnce(Rule) -> Box<Refusal>>(
    node: &Node,
    geometry: &Geometry,
    place: impl Fn(usize, Key) -> F,
) -> Result<(), Box<Refusal>> {
    let mut previous = None;
    for (slot, pointer) in node.pointers().iter().enumerate() {
        let (key, address) = (pointer.key(), pointer.blockptr.get());
        check_order(previous.replace(key), key)
            .and_then(|()| within("address of a child", address, 1, u64::MAX))
            .and_then(|()| aligned("address of a child", address, geometry.sector_bytes))
            .and_then(|()| within("generation of a child", pointer.generation, 0, node.header().generation.get()))
            .map_err(place(slot, key))?;
    }
    Ok(())
}

fn check_order(previous: Option<Key>, key: Key) -> Result<(), Rule> {
    previous.filter(|previous| *previous >= key).map_or(Ok(()), |previous| Err(Rule::KeyOrder(previous)))
}

#[cfg(test)]
mod tests;
