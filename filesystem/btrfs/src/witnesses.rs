//! Decides which filesystem and device a target belongs to, if its intact superblocks do not agree.
//!
//! A superblock is valid wherever it is put, so its checksum shows nothing about its place. The nodes do: each has the
//! UUID of its filesystem and its own address, and the chunk tree has the UUID of each device. So each identity is
//! followed from the newest superblock that has it: the system chunks in it, the chunk tree, the device's item there,
//! and the root of the root tree ([`Grade`]). The filesystem that leads furthest is used. If several lead equally far,
//! the first copy counts: a new filesystem always writes it, and one that is smaller than the filesystem before it
//! leaves later copies of that one.
//!
//! Invariants:
//! - Targets whose copies agree are not examined, so nothing is read for them.
//! - The work is limited, whatever a superblock or a tree contains: at most three identities of each target, each with
//!   at most [`MOST_ITEMS`] items and [`MOST_SEARCHED`] nodes, and twice for targets of several devices.

use std::cmp::Reverse;
use std::rc::Rc;

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use crate::chunk_map::ChunkMap;
use crate::cursor::{Cursor, TreeRoot};
use crate::devices::DeviceSet;
use crate::error::FsError;
use crate::nodes::NodeCache;
use crate::replicas::Storage;
use crate::roots::{self, system_chunks};
use crate::superblocks::{Copies, Identity, IntactCopy, Used};

/// The maximum number of items of a chunk tree that are read for one identity.
const MOST_ITEMS: usize = 1 << 20;
/// The maximum number of nodes of the system chunks that are read for one identity.
const MOST_SEARCHED: u64 = 2048;

/// How far a superblock leads.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Grade {
    /// Nowhere: its system chunks are invalid.
    Invalid,
    /// No node of the chunk tree is where its system chunks are.
    NoNode,
    /// To a chunk tree of its filesystem in which another device has the number, or none.
    OtherDevice,
    /// To the chunk tree, and to no root of the root tree.
    Chunks,
    /// To roots of both trees.
    Trees,
}

impl Grade {
    /// The order of the devices of one filesystem. That nodes of the filesystem are there is no evidence for a device
    /// that the filesystem does not have.
    fn of_device(self) -> Option<Grade> {
        Some(self).filter(|grade| *grade != Grade::OtherDevice)
    }
}

/// Chooses the superblock of each target.
pub(crate) async fn choose(all: Vec<Copies>) -> Vec<Used> {
    let mut chosen: Vec<Option<Identity>> = all.iter().map(undisputed).collect();
    let mut disputed = Vec::new();
    for (index, copies) in all.iter().enumerate().filter(|(index, _)| chosen[*index].is_none()) {
        let mut alone = Vec::new();
        for copy in copies.newest() {
            alone.push(grade(copy, &[(copies, copy)]).await);
        }
        disputed.push((index, alone));
    }
    // A target that is certain by itself helps to decide about the others.
    disputed.sort_by_key(|(_, alone)| Reverse(alone.iter().max().copied()));
    for (index, alone) in disputed {
        chosen[index] = Some(decide(&all, &chosen, index, &alone).await);
    }
    let with = all.into_iter().zip(chosen);
    with.map(|(copies, identity)| copies.used(identity.expect("each target was decided"))).collect()
}

/// The identity of a target whose copies agree.
fn undisputed(copies: &Copies) -> Option<Identity> {
    match copies.newest()[..] {
        [only] => Some(only.identity()),
        _ => None,
    }
}

/// The identity that leads furthest, together with the targets that are already decided. Superblocks of two devices of
/// one filesystem can lead equally far; of those, the one that needs no other target is chosen, and none that another
/// target has.
async fn decide(all: &[Copies], chosen: &[Option<Identity>], index: usize, alone: &[Grade]) -> Identity {
    let claims = all[index].newest();
    let mut grades = Vec::new();
    for (copy, alone) in claims.iter().zip(alone) {
        let identity = copy.identity();
        let mut devices = vec![(&all[index], *copy)];
        for (copies, other) in all.iter().zip(chosen) {
            let is_other = |other: &&Identity| other.node_uuid == identity.node_uuid && other.devid != identity.devid;
            let Some(other) = other.as_ref().filter(is_other) else { continue };
            devices
                .extend(copies.newest().into_iter().find(|copy| copy.identity() == *other).map(|copy| (copies, copy)));
        }
        let together = if devices.len() > 1 { grade(copy, &devices).await } else { *alone };
        let is_other_device = [together, *alone].contains(&Grade::OtherDevice);
        grades.push(if is_other_device { Grade::OtherDevice } else { together.max(*alone) });
    }
    // The filesystem, then the device.
    let best = grades.iter().max().copied();
    let first = claims.iter().zip(&grades).find(|(_, grade)| Some(**grade) == best).map_or(claims[0], |(copy, _)| copy);
    let is_taken = |identity: Identity| chosen.contains(&Some(identity));
    let of_filesystem = (claims.iter().zip(&grades).zip(alone))
        .filter(|((copy, _), _)| copy.identity().node_uuid == first.identity().node_uuid);
    let order = |((copy, grade), alone): &((&&IntactCopy, &Grade), &Grade)| {
        (Reverse(grade.of_device()), is_taken(copy.identity()), Reverse(**alone))
    };
    let decided = of_filesystem.min_by_key(order).map_or(first, |((copy, _), _)| copy).identity();
    let name = &all[index].name;
    tracing::debug!(%name, ?decided, ?grades, "superblocks of several filesystems or devices");
    decided
}

/// How far a superblock leads on devices, of which the first one has it.
async fn grade(copy: &IntactCopy, devices: &[(&Copies, &IntactCopy)]) -> Grade {
    let Ok(map) = system_chunks(&copy.superblock, &copy.geometry) else { return Grade::Invalid };
    let set = DeviceSet::of_witnesses(devices.iter().copied(), copy);
    let nodes = NodeCache::new(Storage::new(Rc::new(set), map), 0);
    for chunk_tree in roots::candidates(&copy.superblock, objectid::CHUNK_TREE) {
        if nodes.load(&chunk_tree.root.expected()).await.is_ok() {
            return match has_device(&nodes, chunk_tree.root, &copy.identity()).await {
                Ok(false) => Grade::OtherDevice,
                // If that part of the tree is lost, nothing is against the device.
                Ok(true) | Err(_) => grade_of_trees(copy, nodes, chunk_tree.root).await,
            };
        }
    }
    search_chunk_tree(&nodes, &copy.identity()).await
}

/// True if the chunk tree has this device.
async fn has_device(nodes: &NodeCache, chunk_tree: TreeRoot, identity: &Identity) -> Result<bool, FsError> {
    let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, identity.devid);
    let mut cursor = Cursor::new(nodes, chunk_tree, key..=key);
    let found = cursor.next().await?;
    Ok(found.is_some_and(|(key, data)| is_device(key, data, identity) == Some(true)))
}

/// Whether an item is that of this device; `None` if it is not the item of a device with this number.
fn is_device(key: Key, data: &[u8], identity: &Identity) -> Option<bool> {
    match Item::decode(key, data) {
        Ok(Item::Device(item)) if item.devid.get() == identity.devid => Some(item.uuid == identity.device_uuid),
        _ => None,
    }
}

/// Looks for a root of the root tree in the chunks of a chunk tree.
async fn grade_of_trees(copy: &IntactCopy, nodes: NodeCache, chunk_tree: TreeRoot) -> Grade {
    let mut map = ChunkMap::clone(&nodes.storage().map);
    let mut cursor = Cursor::all(&nodes, chunk_tree);
    for _ in 0..MOST_ITEMS {
        match cursor.next().await {
            Ok(None) => break,
            Ok(Some((key, data))) => {
                if let Ok(Item::Chunk(chunk)) = Item::decode(key, data) {
                    let _ = map.add(key.offset, &chunk);
                }
            }
            Err(_) => {}
        }
    }
    drop(cursor);
    let nodes = NodeCache::new(Storage::new(nodes.into_devices(), map), 0);
    for root_tree in roots::candidates(&copy.superblock, objectid::ROOT_TREE) {
        if nodes.load(&root_tree.root.expected()).await.is_ok() {
            return Grade::Trees;
        }
    }
    Grade::Chunks
}

/// Looks for remaining nodes of the chunk tree, if no root of it can be read.
async fn search_chunk_tree(nodes: &NodeCache, identity: &Identity) -> Grade {
    let node_bytes = u64::from(nodes.storage().geometry().node_bytes);
    let (mut left, mut ranges) = (MOST_SEARCHED * node_bytes, Vec::new());
    for (start, bytes) in nodes.storage().map.ranges() {
        let bytes = bytes.min(left);
        ranges.push((start, bytes));
        left -= bytes;
    }
    let found = roots::search(nodes, &ranges, objectid::CHUNK_TREE).await;
    for leaf in found.iter().filter(|node| node.level == 0) {
        let Ok(node) = nodes.load(&leaf.expected()).await else { continue };
        match node.view().entries().find_map(|(key, data)| is_device(key, data, identity)) {
            Some(true) => return Grade::Chunks,
            Some(false) => return Grade::OtherDevice,
            None => {}
        }
    }
    if found.is_empty() { Grade::NoNode } else { Grade::Chunks }
}
