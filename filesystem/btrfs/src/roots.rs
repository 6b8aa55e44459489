//! The roots of the chunk tree and of the root tree: those in a superblock, and substitutes if they are lost.
//!
//! For each of the two trees, the first root that can be read is used, in this order: the root in the superblock; those
//! in its four backups, the newest first; and for the root tree the newest root node that a search of the block groups
//! finds. If the chunk tree is lost, a search of the system chunks collects all its leaves, the newest first. Chunks
//! that are still unknown are reconstructed from the device tree, for profiles in which the order of stripes does not
//! matter.
//!
//! Invariants:
//! - Older roots are used only if the caller permits it ([`RootsFrom`]), and [`Roots`] reports it.
//! - An older item never replaces a newer one: missing chunks and devices are added, and existing ones stay.
//! - A search keeps at most 100000 nodes, the newest ones.

use std::collections::BTreeMap;
use std::fmt;

use futures_util::stream::{self, StreamExt};
use sealblock_btrfs_format::checker::{Expected, check_node};
use sealblock_btrfs_format::checker_items::check_chunk;
use sealblock_btrfs_format::features::CompatRo;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::chunk::{BlockGroupFlags, Chunk, ChunkHead, Profile, STRIPE_BYTES, Stripe};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::Node;
use sealblock_btrfs_format::superblock::{BackupRoot, Geometry, MAX_LEVELS, Superblock};

use crate::chunk_map::ChunkMap;
use crate::cursor::{Cursor, TreeRoot};
use crate::error::{CopyFault, FsError};
use crate::nodes::NodeCache;
use crate::replicas::NodeWritten;

/// The maximum number of nodes in a search result.
const MOST_FOUND: usize = 100_000;
/// Nodes that a search reads at once.
const SEARCHED_AT_ONCE: usize = 32;

/// The roots from which a filesystem is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RootsFrom {
    /// Only the roots in the superblock.
    #[default]
    Newest,
    /// The roots in a backup of the superblock: 0 for the newest one, up to 3.
    Backup(usize),
    /// The newest readable roots.
    Best,
}

/// The source of a root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RootSource {
    /// The superblock.
    Superblock,
    /// A backup in the superblock, as in [`RootsFrom::Backup`].
    Backup(usize),
    /// A search of the nodes.
    Search,
}

impl fmt::Display for RootSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RootSource::Superblock => f.write_str("superblock"),
            RootSource::Backup(index) => write!(f, "backup {index}"),
            RootSource::Search => f.write_str("search"),
        }
    }
}

/// A root and its source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chosen {
    /// The source.
    pub source: RootSource,
    /// The root.
    pub root: TreeRoot,
}

/// The roots from which a filesystem was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Roots {
    /// The root of the chunk tree.
    pub chunks: Chosen,
    /// The root of the root tree.
    pub trees: Chosen,
    /// The number of chunks that are only in the device tree.
    pub chunks_of_devices: usize,
}

impl Roots {
    /// True if both are in the superblock.
    pub fn are_newest(&self) -> bool {
        [self.chunks, self.trees].iter().all(|chosen| chosen.source == RootSource::Superblock)
    }
}

/// The chunks of the chunk tree, which the superblock has.
///
/// # Errors
/// If one is invalid, or if they overlap.
pub(crate) fn system_chunks(superblock: &Superblock, geometry: &Geometry) -> Result<ChunkMap, FsError> {
    let mut map = ChunkMap::default();
    for chunk in superblock.sys_chunks() {
        let bad = |why: String| FsError::Contradiction { what: "the superblock's list of chunks".into(), why };
        let (key, chunk) = chunk.map_err(|error| bad(error.to_string()))?;
        check_chunk(geometry, key, &chunk).map_err(|rule| bad(format!("{key}: {rule}")))?;
        map.add(key.offset, &chunk)?;
    }
    Ok(map)
}

/// The roots of one of the two trees in a superblock, the newest first, without duplicates.
pub(crate) fn candidates(superblock: &Superblock, tree: u64) -> Vec<Chosen> {
    let is_chunks = tree == objectid::CHUNK_TREE;
    let of = |bytenr: u64, level, generation| TreeRoot { id: tree, bytenr, level, generation };
    let newest = match is_chunks {
        true => of(superblock.chunk_root.get(), superblock.chunk_root_level, superblock.chunk_root_generation.get()),
        false => of(superblock.root.get(), superblock.root_level, superblock.generation.get()),
    };
    let mut all = vec![Chosen { source: RootSource::Superblock, root: newest }];
    for index in 0..superblock.backup_roots.len() {
        let backup = backup_of(superblock, index);
        let root = match is_chunks {
            true => of(backup.chunk_root.get(), backup.chunk_root_level, backup.chunk_root_generation.get()),
            false => of(backup.tree_root.get(), backup.tree_root_level, backup.tree_root_generation.get()),
        };
        if root.bytenr != 0 && root.level < MAX_LEVELS && all.iter().all(|other| other.root != root) {
            all.push(Chosen { source: RootSource::Backup(index), root });
        }
    }
    all
}

/// The backup that is `index` transactions older than the newest one.
fn backup_of(superblock: &Superblock, index: usize) -> &BackupRoot {
    let count = superblock.backup_roots.len();
    &superblock.backup_roots[(superblock.newest_backup() + count - index) % count]
}

/// The root of one of the two trees that is used: the newest one, that of a backup, or the first that can be read.
///
/// # Errors
/// If there is no such backup.
pub(crate) async fn choose(
    nodes: &NodeCache,
    superblock: &Superblock,
    from: RootsFrom,
    tree: u64,
) -> Result<Option<Chosen>, FsError> {
    let all = candidates(superblock, tree);
    match from {
        RootsFrom::Newest => Ok(all.first().copied()),
        RootsFrom::Backup(index) => {
            let count = superblock.backup_roots.len();
            if index >= count {
                return Err(FsError::Absent(format!("backup root {index}: there are {count}, counted from 0")));
            }
            let backup = backup_of(superblock, index);
            let (bytenr, level, generation) = match tree {
                objectid::CHUNK_TREE => (backup.chunk_root, backup.chunk_root_level, backup.chunk_root_generation),
                _ => (backup.tree_root, backup.tree_root_level, backup.tree_root_generation),
            };
            let root = TreeRoot { id: tree, bytenr: bytenr.get(), level, generation: generation.get() };
            Ok(Some(Chosen { source: RootSource::Backup(index), root }))
        }
        RootsFrom::Best => {
            for one in all {
                if nodes.load(&one.root.expected()).await.is_ok() {
                    return Ok(Some(one));
                }
            }
            Ok(None)
        }
    }
}

/// The nodes of a tree within ranges of logical addresses, the newest first; those of one transaction by level, the
/// highest first.
pub(crate) async fn search(nodes: &NodeCache, ranges: &[(u64, u64)], tree: u64) -> Vec<TreeRoot> {
    let bytes = u64::from(nodes.storage().geometry().node_bytes);
    let addresses = ranges.iter().flat_map(|(start, length)| {
        let count = length / bytes;
        (0..count).map(move |index| start + index * bytes)
    });
    let mut found = Vec::new();
    let mut reads =
        stream::iter(addresses).map(|bytenr| node_at(nodes, bytenr, tree)).buffer_unordered(SEARCHED_AT_ONCE);
    while let Some(node) = reads.next().await {
        found.extend(node);
        if found.len() >= 2 * MOST_FOUND {
            keep_newest(&mut found);
        }
    }
    keep_newest(&mut found);
    found
}

fn keep_newest(found: &mut Vec<TreeRoot>) {
    found.sort_unstable_by_key(|root| std::cmp::Reverse((root.generation, root.level, root.bytenr)));
    found.truncate(MOST_FOUND);
}

/// The node at an address, if it belongs to the tree and passes.
async fn node_at(nodes: &NodeCache, bytenr: u64, tree: u64) -> Option<TreeRoot> {
    let geometry = nodes.storage().geometry();
    let of_tree = |bytes: &[u8]| {
        let node = Node::decode(bytes).ok()?;
        let header = node.header();
        let root = TreeRoot { id: tree, bytenr, level: header.level, generation: header.generation.get() };
        (header.owner == tree && header.bytenr == bytenr).then_some(root)
    };
    let check = |bytes: &[u8]| {
        let root = of_tree(bytes).ok_or(CopyFault::NoBlock)?;
        let expected = Expected { first_key: None, ..root.expected() };
        check_node(bytes, geometry, &expected).map(drop).map_err(CopyFault::Node)
    };
    let read = nodes.storage().read_whole((bytenr, NodeWritten::AsItSays), check).await.ok()?;
    of_tree(&read.data)
}

/// The root of the root tree that a search finds: one at the level that the superblock records, if there is one,
/// otherwise the newest.
pub(crate) async fn find_root_tree(
    nodes: &NodeCache,
    superblock: &Superblock,
    ranges: &[(u64, u64)],
) -> Option<Chosen> {
    let found = search(nodes, ranges, objectid::ROOT_TREE).await;
    let of_level = found.iter().find(|root| root.level == superblock.root_level);
    of_level.or(found.first()).map(|root| Chosen { source: RootSource::Search, root: *root })
}

/// Adds chunks that are in the device tree and not in the map. Returns their number. Unreadable parts of that tree add
/// nothing.
pub(crate) async fn add_chunks_of_devices(nodes: &NodeCache, root_tree: TreeRoot, map: &mut ChunkMap) -> usize {
    let has_own = nodes.storage().geometry().features.compat_ro.contains(CompatRo::BLOCK_GROUP_TREE);
    let of_groups = if has_own { objectid::BLOCK_GROUP_TREE } else { objectid::EXTENT_TREE };
    let Ok(Some(devices)) = find_tree(nodes, root_tree, objectid::DEV_TREE).await else { return 0 };
    let Ok(Some(groups)) = find_tree(nodes, root_tree, of_groups).await else { return 0 };
    // The pieces of each unknown chunk, and their size in bytes.
    let mut unknown: BTreeMap<u64, (u64, Vec<Stripe>)> = BTreeMap::new();
    let mut cursor = Cursor::all(nodes, devices);
    loop {
        let (key, data) = match cursor.next().await {
            Ok(None) => break,
            Ok(Some(item)) => item,
            Err(_) => continue,
        };
        if let Ok(Item::DevExtent(extent)) = Item::decode(key, data)
            && map.locate(extent.chunk_offset.get(), 1).is_err()
        {
            let stripe = Stripe { devid: key.objectid.into(), offset: key.offset.into(), dev_uuid: [0; 16] };
            let (_, stripes) =
                unknown.entry(extent.chunk_offset.get()).or_insert_with(|| (extent.length.get(), Vec::new()));
            stripes.push(stripe);
        }
    }
    let mut added = 0;
    for (logical, (bytes, stripes)) in unknown {
        let range =
            Key::new(logical, ItemType::BLOCK_GROUP_ITEM, 0)..=Key::new(logical, ItemType::BLOCK_GROUP_ITEM, u64::MAX);
        let mut cursor = Cursor::new(nodes, groups, range);
        let Ok(Some((key, data))) = cursor.next().await else { continue };
        let Ok(Item::BlockGroup(group)) = Item::decode(key, data) else { continue };
        let flags = BlockGroupFlags::from_bits_retain(group.flags.get());
        // For profiles with stripes, only the chunk itself has the order of its pieces.
        let has_no_order = matches!(
            flags.profile(),
            Some(Profile::Single | Profile::Dup | Profile::Raid1 | Profile::Raid1C3 | Profile::Raid1C4)
        );
        if has_no_order && key.offset == bytes {
            let head = head_of(bytes, flags, stripes.len());
            added += usize::from(map.add(logical, &Chunk { head: &head, stripes: &stripes }).is_ok());
        }
    }
    added
}

fn head_of(bytes: u64, flags: BlockGroupFlags, stripes: usize) -> ChunkHead {
    ChunkHead {
        length: bytes.into(),
        owner: objectid::EXTENT_TREE.into(),
        stripe_len: STRIPE_BYTES.into(),
        flags: flags.bits().into(),
        io_align: 0.into(),
        io_width: 0.into(),
        sector_size: 0.into(),
        num_stripes: u16::try_from(stripes).unwrap_or(u16::MAX).into(),
        sub_stripes: 0.into(),
    }
}

/// The root of a tree, if the root tree has it.
///
/// # Errors
/// If that part of the root tree is lost.
pub(crate) async fn find_tree(nodes: &NodeCache, root_tree: TreeRoot, id: u64) -> Result<Option<TreeRoot>, FsError> {
    let key = |offset| Key::new(id, ItemType::ROOT_ITEM, offset);
    let mut cursor = Cursor::new(nodes, root_tree, key(0)..=key(u64::MAX));
    let mut found = None;
    while let Some((key, data)) = cursor.next().await? {
        found = tree_root(key, data).or(found);
    }
    Ok(found)
}

/// The root of the tree that a root item describes, unless the tree has no nodes left.
pub(crate) fn tree_root(key: Key, data: &[u8]) -> Option<TreeRoot> {
    match Item::decode(key, data) {
        Ok(Item::Root(root)) if key.item_type == ItemType::ROOT_ITEM && root.head.bytenr != 0 => Some(TreeRoot {
            id: key.objectid,
            bytenr: root.head.bytenr.get(),
            level: root.head.level,
            generation: root.head.generation.get(),
        }),
        _ => None,
    }
}
