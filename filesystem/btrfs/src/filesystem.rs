//! A filesystem that is open for reading: its devices, its chunks, and where its trees begin.
//!
//! Opening reads the superblocks, the chunks that these hold, and with them the chunk tree. What is lost of the chunk tree is a
//! finding and not the end: whatever lies in the chunks that are known can still be reached.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::rc::Rc;

use lru::LruCache;
use sealblock_block::Device as _;
use sealblock_btrfs_format::checker_items::check_chunk;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::device::DevItem;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::superblock::Superblock;

use crate::chunk_map::ChunkMap;
use crate::cursor::{Cursor, TreeRoot};
use crate::devices::{Candidate, DeviceSet, uuid};
use crate::error::{BadCopy, CopyFault, FsError};
use crate::nodes::{DEFAULT_CACHE_BYTES, NodeCache};
use crate::replicas::Storage;

/// Decompressed extents that are kept: a reader in small steps meets each several times.
const PLAIN_EXTENTS: usize = 32;

/// How a filesystem is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Bytes of nodes that are kept.
    pub cache_bytes: usize,
    /// The backup root to begin from in place of the newest roots: 0 for the newest one, up to 3.
    pub backup_root: Option<usize>,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions { cache_bytes: DEFAULT_CACHE_BYTES, backup_root: None }
    }
}

/// A device that the chunk tree has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KnownDevice {
    /// What the chunk tree says of it.
    pub item: DevItem,
    /// True if none of the targets is it.
    pub is_missing: bool,
}

/// A device that ends before the filesystem says that it does: it was cut, or copied to where it has no room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShortDevice {
    /// Its number.
    pub devid: u64,
    /// The bytes that it has.
    pub bytes: u64,
    /// The bytes that it should have.
    pub wanted_bytes: u64,
}

impl fmt::Display for ShortDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ShortDevice { devid, bytes, wanted_bytes } = self;
        write!(f, "device {devid} has {bytes} bytes, and the filesystem uses {wanted_bytes}: its end is cut off")
    }
}

/// Extents that were decompressed last, by their logical addresses.
pub(crate) struct PlainExtents(RefCell<LruCache<u64, Rc<Vec<u8>>>>);

impl PlainExtents {
    fn new() -> PlainExtents {
        PlainExtents(RefCell::new(LruCache::new(NonZeroUsize::new(PLAIN_EXTENTS).expect("it is not 0"))))
    }

    pub(crate) fn get(&self, logical: u64) -> Option<Rc<Vec<u8>>> {
        self.0.borrow_mut().get(&logical).map(Rc::clone)
    }

    pub(crate) fn put(&self, logical: u64, plain: &Rc<Vec<u8>>) {
        self.0.borrow_mut().put(logical, Rc::clone(plain));
    }
}

/// An open filesystem.
pub struct Filesystem {
    nodes: NodeCache,
    /// The devices that the chunk tree has.
    known: BTreeMap<u64, KnownDevice>,
    chunk_root: TreeRoot,
    root_tree: TreeRoot,
    /// What was lost of the chunk tree.
    lost_chunks: Vec<FsError>,
    /// The checksum tree, once it was looked for.
    csum_tree: Cell<Option<TreeRoot>>,
    pub(crate) plain: PlainExtents,
}

impl Filesystem {
    /// Opens the filesystem on these devices.
    ///
    /// # Errors
    /// When they are not devices of one filesystem, when it is of a kind that cannot be read here, or no chunk is left.
    pub async fn open(candidates: Vec<Candidate>, options: OpenOptions) -> Result<Filesystem, FsError> {
        let devices = DeviceSet::open(candidates).await?;
        let superblock = *devices.superblock();
        let geometry = *devices.geometry();
        let mut map = ChunkMap::default();
        for chunk in superblock.sys_chunks() {
            let bad = |why: String| FsError::Contradiction { what: "the superblock's list of chunks".into(), why };
            let (key, chunk) = chunk.map_err(|error| bad(error.to_string()))?;
            check_chunk(&geometry, key, &chunk).map_err(|rule| bad(format!("{key}: {rule}")))?;
            map.add(key.offset, &chunk)?;
        }
        let nodes = NodeCache::new(Storage { devices, map: map.clone() }, options.cache_bytes);
        let (chunk_root, root_tree) = roots(&superblock, options.backup_root)?;
        let mut known = BTreeMap::new();
        let mut lost_chunks = Vec::new();
        let mut cursor = Cursor::all(&nodes, chunk_root);
        loop {
            match cursor.next().await {
                Ok(None) => break,
                Ok(Some((key, data))) => add_item(key, data, &mut map, &mut known)?,
                Err(error) if error.is_damage() => lost_chunks.push(error),
                Err(error) => return Err(error),
            }
        }
        let storage = Storage { devices: nodes.into_devices(), map };
        for (devid, device) in &mut known {
            let here = storage.devices.get(*devid);
            device.is_missing = here.is_none();
            if let Some(other) = here.filter(|here| here.item.uuid != device.item.uuid) {
                let (name, wanted) = (&other.name, uuid(&device.item.uuid));
                return Err(FsError::Devices(format!(
                    "{name} says that it is device {devid}, which has the UUID {wanted} and not {}",
                    uuid(&other.item.uuid)
                )));
            }
        }
        if let Some((devid, device)) =
            storage.devices.iter().find(|(devid, _)| !known.contains_key(devid) && lost_chunks.is_empty())
        {
            let name = &device.name;
            return Err(FsError::Devices(format!(
                "{name} says that it is device {devid}, which the filesystem has not (any more)"
            )));
        }
        let nodes = NodeCache::new(storage, options.cache_bytes);
        check_history(&nodes, root_tree).await?;
        Ok(Filesystem {
            nodes,
            known,
            chunk_root,
            root_tree,
            lost_chunks,
            csum_tree: Cell::new(None),
            plain: PlainExtents::new(),
        })
    }

    /// Its nodes.
    pub fn nodes(&self) -> &NodeCache {
        &self.nodes
    }

    /// Its devices and chunks.
    pub fn storage(&self) -> &Storage {
        self.nodes.storage()
    }

    /// Its newest superblock.
    pub fn superblock(&self) -> &Superblock {
        self.storage().devices.superblock()
    }

    /// The devices that it has, by their numbers, those that are missing too.
    pub fn known_devices(&self) -> &BTreeMap<u64, KnownDevice> {
        &self.known
    }

    /// Devices that are there and end too early. Images of metadata have no data and may be of any size.
    pub fn short_devices(&self) -> Vec<ShortDevice> {
        if self.storage().devices.is_metadata_image() {
            return Vec::new();
        }
        let short = self.storage().devices.iter().filter_map(|(devid, device)| {
            // Where the chunk tree is lost, the device says it of itself.
            let item = self.known.get(&devid).map_or(&device.item, |known| &known.item);
            let (bytes, wanted_bytes) = (device.device.geometry().capacity_bytes(), item.total_bytes.get());
            (bytes < wanted_bytes).then_some(ShortDevice { devid, bytes, wanted_bytes })
        });
        short.collect()
    }

    /// What was lost of the chunk tree.
    pub fn lost_chunks(&self) -> &[FsError] {
        &self.lost_chunks
    }

    /// True if there is a log of what was synced after the last transaction. It is not replayed: what is read is the last transaction.
    pub fn has_log(&self) -> bool {
        self.superblock().log_root.get() != 0
    }

    /// The chunk tree.
    pub fn chunk_root(&self) -> TreeRoot {
        self.chunk_root
    }

    /// The tree of trees.
    pub fn root_tree(&self) -> TreeRoot {
        self.root_tree
    }

    /// Items of a tree.
    pub fn cursor(&self, root: TreeRoot, range: std::ops::RangeInclusive<Key>) -> Cursor<'_> {
        Cursor::new(&self.nodes, root, range)
    }

    /// Where a tree begins, if there is such a tree.
    ///
    /// # Errors
    /// When the tree of trees is lost there.
    pub async fn tree(&self, id: u64) -> Result<Option<TreeRoot>, FsError> {
        match id {
            objectid::ROOT_TREE => return Ok(Some(self.root_tree)),
            objectid::CHUNK_TREE => return Ok(Some(self.chunk_root)),
            _ => {}
        }
        let key = |offset| Key::new(id, ItemType::ROOT_ITEM, offset);
        let mut cursor = self.cursor(self.root_tree, key(0)..=key(u64::MAX));
        let mut found = None;
        while let Some((key, data)) = cursor.next().await? {
            found = tree_root(key, data).or(found);
        }
        Ok(found)
    }

    /// The tree of checksums.
    ///
    /// # Errors
    /// When there is none, or the tree of trees is lost there.
    pub async fn csum_tree(&self) -> Result<TreeRoot, FsError> {
        if let Some(tree) = self.csum_tree.get() {
            return Ok(tree);
        }
        let tree = self.tree(objectid::CSUM_TREE).await?;
        let tree = tree.ok_or_else(|| FsError::Absent("tree of checksums".into()))?;
        self.csum_tree.set(Some(tree));
        Ok(tree)
    }

    /// All trees: those of the superblock, and those that the tree of trees has. What is lost of that is returned beside them.
    pub async fn trees(&self) -> (Vec<TreeRoot>, Vec<FsError>) {
        let (mut trees, mut lost) = (vec![self.root_tree, self.chunk_root], Vec::new());
        let mut cursor = Cursor::all(&self.nodes, self.root_tree);
        loop {
            match cursor.next().await {
                Ok(None) => return (trees, lost),
                Ok(Some((key, data))) => trees.extend(tree_root(key, data)),
                Err(error) => lost.push(error),
            }
        }
    }

    /// Copies that did not pass, of nodes that were read since the last call.
    pub fn take_bad_copies(&self) -> Vec<BadCopy> {
        self.nodes.take_bad_copies()
    }
}

/// Refuses devices that were written apart from each other, as degraded mounts of each leave them: as many transactions later both are of the same one, and every node
/// of either passes. The root of all trees is written anew in each transaction, so its copies tell.
async fn check_history(nodes: &NodeCache, root_tree: TreeRoot) -> Result<(), FsError> {
    // What is lost is told where it is read.
    let Ok(copies) = nodes.read_copies(&root_tree.expected()).await else { return Ok(()) };
    match copies.bad.iter().find(|copy| matches!(copy.fault, CopyFault::Differs(_))) {
        None => Ok(()),
        Some(copy) => Err(FsError::Devices(format!(
            "the root node of all trees has two histories, as devices have that were written apart from each other; name those of one of them: {copy}"
        ))),
    }
}

/// The roots that a superblock, or a backup in it, has for the chunk tree and the tree of trees.
fn roots(superblock: &Superblock, backup: Option<usize>) -> Result<(TreeRoot, TreeRoot), FsError> {
    let Some(index) = backup else {
        let chunk_root = TreeRoot {
            id: objectid::CHUNK_TREE,
            bytenr: superblock.chunk_root.get(),
            level: superblock.chunk_root_level,
            generation: superblock.chunk_root_generation.get(),
        };
        let root_tree = TreeRoot {
            id: objectid::ROOT_TREE,
            bytenr: superblock.root.get(),
            level: superblock.root_level,
            generation: superblock.generation.get(),
        };
        return Ok((chunk_root, root_tree));
    };
    let count = superblock.backup_roots.len();
    if index >= count {
        return Err(FsError::Absent(format!("backup root {index}: there are {count}, counted from 0")));
    }
    let backup = &superblock.backup_roots[(superblock.newest_backup() + count - index) % count];
    let chunk_root = TreeRoot {
        id: objectid::CHUNK_TREE,
        bytenr: backup.chunk_root.get(),
        level: backup.chunk_root_level,
        generation: backup.chunk_root_generation.get(),
    };
    let root_tree = TreeRoot {
        id: objectid::ROOT_TREE,
        bytenr: backup.tree_root.get(),
        level: backup.tree_root_level,
        generation: backup.tree_root_generation.get(),
    };
    Ok((chunk_root, root_tree))
}

/// Takes what is needed of the chunk tree.
fn add_item(key: Key, data: &[u8], map: &mut ChunkMap, known: &mut BTreeMap<u64, KnownDevice>) -> Result<(), FsError> {
    // The checker decoded every item of the node.
    match Item::decode(key, data) {
        Ok(Item::Chunk(chunk)) => map.add(key.offset, &chunk)?,
        Ok(Item::Device(item)) => {
            known.insert(item.devid.get(), KnownDevice { item: *item, is_missing: true });
        }
        _ => {}
    }
    Ok(())
}

/// Where the tree of a root item begins, unless it has no node left.
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
