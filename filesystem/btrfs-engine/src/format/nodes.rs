//! Places the nodes of all trees, and writes them.
//!
//! How many nodes there are depends on themselves: each has an item in the extent tree, and takes free space. So nodes
//! are counted and placed again until nothing changes. More nodes never mean fewer items, so the counts only grow.

use std::collections::BTreeMap;

use sealblock_btrfs_format::checker::{Expected, check_node};
use sealblock_btrfs_format::key::{Key, objectid};
use sealblock_btrfs_format::node::{Header, KeyPointer, flags, write_inner, write_leaf};
use sealblock_btrfs_format::superblock::Geometry;
use zerocopy::FromZeros;

use super::items;
use super::layout::Layout;
use super::options::{FormatError, FormatOptions};
use super::shapes::{Items, PlacedNode, PlacedTree, Shape, Trees};

/// More rounds than there can be: a round that is not the last one adds a node.
const MAX_ROUNDS: usize = 1000;

/// All trees of a new filesystem.
#[derive(Debug)]
pub(super) struct SettledTrees {
    pub trees: Trees,
    items: BTreeMap<u64, Items>,
}

/// Places the nodes of all trees.
///
/// # Errors
/// If they have no room.
pub(super) fn settle(options: &FormatOptions, layout: &Layout) -> Result<SettledTrees, FormatError> {
    let empty = Shape::of(&Items::new(), options.node_bytes);
    let mut shapes: Vec<(u64, Shape)> =
        items::owners(options).into_iter().map(|owner| (owner, empty.clone())).collect();
    for _ in 0..MAX_ROUNDS {
        let trees = place(options, layout, &shapes)?;
        let items = items::all(options, layout, &trees)?;
        let next: Vec<_> =
            shapes.iter().map(|(owner, _)| (*owner, Shape::of(&items[owner], options.node_bytes))).collect();
        if next == shapes {
            return Ok(SettledTrees { trees, items });
        }
        shapes = next;
    }
    Err(FormatError::NoRoom)
}

/// Gives every node an address: tree by tree, from the start of the group on.
fn place(options: &FormatOptions, layout: &Layout, shapes: &[(u64, Shape)]) -> Result<Trees, FormatError> {
    let mut trees = Trees::new();
    for is_system in [true, false] {
        let here = |owner: u64| (owner == objectid::CHUNK_TREE) == is_system;
        let of_group = || shapes.iter().filter(|(owner, _)| here(*owner));
        let Some((owner, _)) = of_group().next() else { continue };
        let count = of_group().map(|(_, shape)| shape.nodes()).sum();
        let group = layout.group_of_tree(*owner);
        let mut addresses = layout.node_addresses(group, options.node_bytes, count)?.into_iter();
        for (owner, shape) in of_group() {
            let addresses = addresses.by_ref().take(shape.nodes()).collect();
            trees.insert(*owner, PlacedTree::new(shape.clone(), addresses, options.first_transaction));
        }
    }
    Ok(trees)
}

impl SettledTrees {
    /// All nodes with their addresses, checked.
    ///
    /// # Errors
    /// If a node breaks a rule.
    pub fn write(&self, options: &FormatOptions) -> Result<Vec<(u64, Vec<u8>)>, FormatError> {
        let geometry = Geometry {
            sector_bytes: options.sector_bytes,
            node_bytes: options.node_bytes,
            checksum: options.checksum,
            features: options.features(),
            node_uuid: options.fsid,
            generation: options.first_transaction,
        };
        let mut nodes = Vec::new();
        for (owner, tree) in &self.trees {
            let is_root = |node: &PlacedNode| node.address == tree.root().bytenr;
            let items = &self.items[owner];
            let bytes = write_tree(options, *owner, tree, items)?;
            for (node, bytes) in tree.nodes().zip(bytes) {
                let PlacedNode { address: bytenr, level, first_item } = node;
                let first_key = items.get(first_item).map(|(key, _)| *key).filter(|_| !is_root(&node));
                let expected =
                    Expected { bytenr, owner: *owner, level, generation: options.first_transaction, first_key };
                check_node(&bytes, &geometry, &expected).map_err(FormatError::Node)?;
                nodes.push((bytenr, bytes));
            }
        }
        Ok(nodes)
    }
}

/// The nodes of a tree, in the order of their addresses.
fn write_tree(
    options: &FormatOptions,
    owner: u64,
    tree: &PlacedTree,
    items: &Items,
) -> Result<Vec<Vec<u8>>, FormatError> {
    let FormatOptions { node_bytes, checksum, .. } = *options;
    let header = |address: u64, level: u8| Header {
        fsid: options.fsid,
        bytenr: address.into(),
        flags: (flags::WRITTEN | flags::MIXED_BACKREF).into(),
        chunk_tree_uuid: options.chunk_tree_uuid,
        generation: options.first_transaction.into(),
        owner: owner.into(),
        level,
        ..Header::new_zeroed()
    };
    let mut addresses = tree.addresses.iter().copied();
    let (mut written, mut children) = (Vec::new(), Vec::<KeyPointer>::new());
    for (level, counts) in (0..).zip(tree.levels()) {
        let (mut next, mut pointers) = (0, Vec::new());
        for (count, address) in counts.iter().zip(addresses.by_ref().take(counts.len())) {
            let (header, range) = (header(address, level), next..next + count);
            next = range.end;
            let first = match level {
                0 => {
                    let here = items.get(range).unwrap_or_default();
                    let entries = here.iter().map(|(key, data)| (*key, &data[..]));
                    written.push(write_leaf(&header, entries, node_bytes, checksum)?);
                    here.first().map(|(key, _)| *key)
                }
                _ => {
                    let here = children.get(range).unwrap_or_default();
                    written.push(write_inner(&header, here, node_bytes, checksum)?);
                    here.first().map(KeyPointer::key)
                }
            };
            pointers.push(KeyPointer::new(first.unwrap_or(Key::MIN), address, options.first_transaction));
        }
        children = pointers;
    }
    Ok(written)
}
