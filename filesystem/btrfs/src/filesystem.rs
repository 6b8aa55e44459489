//! A filesystem that is open for reading: its devices, its chunks, and the roots of its trees.
//!
//! Opening reads the superblocks, the system chunks in them, and with these the chunk tree. A lost part of the chunk
//! tree is a finding but does not prevent opening: everything in the known chunks can still be read.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::rc::Rc;

use futures_util::future::LocalBoxFuture;
use lru::LruCache;
use sealblock_block::Device as _;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::chunk::BlockGroupFlags;
use sealblock_btrfs_format::items::device::DevItem;
use sealblock_btrfs_format::key::{Key, objectid};
use sealblock_btrfs_format::superblock::Superblock;

use crate::chunk_map::ChunkMap;
use crate::cursor::{Cursor, TreeRoot};
use crate::devices::{Candidate, Device, DeviceSet, read_superblocks, uuid};
use crate::error::{BadCopy, CopyFault, FsError};
use crate::nodes::{DEFAULT_CACHE_BYTES, NodeCache};
use crate::replicas::Storage;
use crate::roots::{self, Chosen, RootSource, Roots, RootsFrom, add_chunks_of_devices, system_chunks};
use crate::witnesses;

/// The number of decompressed extents in the cache, because a reader in small steps needs each several times.
const PLAIN_EXTENTS: usize = 32;

/// Options for opening a filesystem.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// The size of the node cache in bytes.
    pub cache_bytes: usize,
    /// The roots from which it is opened.
    pub roots: RootsFrom,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions { cache_bytes: DEFAULT_CACHE_BYTES, roots: RootsFrom::Newest }
    }
}

/// A device in the chunk tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KnownDevice {
    /// Its item in the chunk tree.
    pub item: DevItem,
    /// True if none of the targets is this device.
    pub is_missing: bool,
}

/// A device that is smaller than the filesystem records: it was truncated, or copied to a smaller device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShortDevice {
    /// Its number.
    pub devid: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// The size in bytes that it should have.
    pub wanted_bytes: u64,
}

impl fmt::Display for ShortDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ShortDevice { devid, bytes, wanted_bytes } = self;
        write!(f, "device {devid} has {bytes} bytes, and the filesystem uses {wanted_bytes}: its end is cut off")
    }
}

/// The most recently decompressed extents, by logical address.
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
    /// The devices in the chunk tree.
    known: BTreeMap<u64, KnownDevice>,
    roots: Roots,
    /// The lost parts of the chunk tree.
    lost_chunks: Vec<FsError>,
    /// Copies of the root node of the root tree that are valid but differ from the first one.
    differing_roots: Vec<BadCopy>,
    /// The checksum tree, once it has been looked up.
    csum_tree: Cell<Option<TreeRoot>>,
    pub(crate) plain: PlainExtents,
}

impl Filesystem {
    /// Opens the filesystem on these devices.
    ///
    /// # Errors
    /// If they are not devices of one filesystem, if it is not supported, or if no chunk can be read.
    pub fn open(
        candidates: Vec<Candidate>,
        options: OpenOptions,
    ) -> LocalBoxFuture<'static, Result<Filesystem, FsError>> {
        Box::pin(async move {
            let devices = DeviceSet::new(witnesses::choose(read_superblocks(candidates).await?).await)?;
            let superblock = *devices.superblock();
            let map = system_chunks(&superblock, devices.geometry())?;
            let nodes = NodeCache::new(Storage::new(Rc::new(devices), map.clone()), options.cache_bytes);
            let mut chunks = Chunks { map, known: BTreeMap::new(), of_nodes: Vec::new() };
            let (chosen, mut lost_chunks) = chunks.read(&nodes, &superblock, options.roots).await?;
            let mut storage = Storage::new(nodes.into_devices(), chunks.map.clone());
            let is_complete = lost_chunks.is_empty() && chosen.source == RootSource::Superblock;
            let other = check_devices(&storage.devices, &mut chunks.known, is_complete)?;
            match options.roots {
                RootsFrom::Newest => other.map_or(Ok(()), Err)?,
                RootsFrom::Backup(_) | RootsFrom::Best => lost_chunks.extend(other),
            }
            let mut nodes = NodeCache::new(storage, options.cache_bytes);
            let mut trees = choose_trees(&nodes, &superblock, options.roots, &chunks).await?;
            let mut chunks_of_devices = 0;
            if options.roots == RootsFrom::Best && !is_complete {
                chunks_of_devices = add_chunks_of_devices(&nodes, trees.root, &mut chunks.map).await;
                if chunks_of_devices > 0 {
                    storage = Storage::new(nodes.into_devices(), chunks.map.clone());
                    nodes = NodeCache::new(storage, options.cache_bytes);
                    // One of these chunks may contain a newer root.
                    trees = choose_trees(&nodes, &superblock, options.roots, &chunks).await?;
                }
            }
            let differing_roots = check_history(&nodes, trees.root).await?;
            let Chunks { known, .. } = chunks;
            Ok(Filesystem {
                nodes,
                known,
                roots: Roots { chunks: chosen, trees, chunks_of_devices },
                lost_chunks,
                differing_roots,
                csum_tree: Cell::new(None),
                plain: PlainExtents::new(),
            })
        })
    }

    /// The source of its nodes.
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

    /// Its devices by number, including the missing ones.
    pub fn known_devices(&self) -> &BTreeMap<u64, KnownDevice> {
        &self.known
    }

    /// Present devices that are too small. An image that has only metadata may have any size.
    pub fn short_devices(&self) -> Vec<ShortDevice> {
        if self.storage().devices.is_metadata_image() {
            return Vec::new();
        }
        let short = self.storage().devices.iter().filter_map(|(devid, device)| {
            // If the newest chunk tree is lost, the device's own superblock item has its size.
            let known = self.known.get(&devid).filter(|_| self.roots.chunks.source == RootSource::Superblock);
            let item = known.map_or(&device.item, |known| &known.item);
            let (bytes, wanted_bytes) = (device.device.geometry().capacity_bytes(), item.total_bytes.get());
            (bytes < wanted_bytes).then_some(ShortDevice { devid, bytes, wanted_bytes })
        });
        short.collect()
    }

    /// Sizes in the superblocks that contradict the items of the devices in the chunk tree. If all copies of a
    /// superblock were changed in the same way, they agree with each other, and only the chunk tree shows the change.
    /// Empty if the newest chunk tree is incomplete.
    pub fn size_contradictions(&self) -> Vec<FsError> {
        let mut found = Vec::new();
        if !self.lost_chunks.is_empty() || self.roots.chunks.source != RootSource::Superblock {
            return found;
        }
        let mut compare = |what: String, own: u64, in_tree: u64, slack: u64| {
            if own.abs_diff(in_tree) > slack {
                let why = format!("the superblock has {own}, and the chunk tree {in_tree}");
                found.push(FsError::Contradiction { what, why });
            }
        };
        let superblock = self.superblock();
        let count = self.known.len() as u64;
        compare("the number of devices".into(), superblock.num_devices.get(), count, 0);
        // Older kernels rounded sizes of devices down to whole sectors in only one of the two places.
        let slack = u64::from(self.storage().geometry().sector_bytes) - 1;
        let sizes = self.known.values().map(|device| device.item.total_bytes.get());
        let sum = sizes.fold(0, u64::saturating_add);
        let total = superblock.total_bytes.get();
        // With a smaller total Linux refuses to mount for writing.
        let total_slack = if total < sum { 0 } else { slack * count };
        compare("the number of bytes on all devices".into(), total, sum, total_slack);
        for (devid, device) in self.storage().devices.iter().filter(|(_, device)| !device.is_stale) {
            if let Some(known) = self.known.get(&devid) {
                let (own, in_tree) = (device.item.total_bytes.get(), known.item.total_bytes.get());
                compare(format!("the number of bytes of device {devid}"), own, in_tree, slack);
            }
        }
        found
    }

    /// The lost parts of the chunk tree.
    pub fn lost_chunks(&self) -> &[FsError] {
        &self.lost_chunks
    }

    /// Copies of the root node of the root tree that are valid but differ from the copy before them on the same device,
    /// which is used instead.
    pub fn differing_roots(&self) -> &[BadCopy] {
        &self.differing_roots
    }

    /// True if there is a log tree, for syncs after the last transaction. It is not replayed: reads return the state of
    /// the last transaction.
    pub fn has_log(&self) -> bool {
        self.superblock().log_root.get() != 0
    }

    /// The chunk tree.
    pub fn chunk_root(&self) -> TreeRoot {
        self.roots.chunks.root
    }

    /// The root tree.
    pub fn root_tree(&self) -> TreeRoot {
        self.roots.trees.root
    }

    /// The roots from which it was opened.
    pub fn roots(&self) -> &Roots {
        &self.roots
    }

    /// The roots of one of the two trees in the superblock, the newest first, with an error for those that cannot be
    /// read.
    pub fn root_candidates(&self, tree: u64) -> LocalBoxFuture<'_, Vec<(Chosen, Option<FsError>)>> {
        Box::pin(async move {
            let mut all = Vec::new();
            for one in roots::candidates(self.superblock(), tree) {
                let error = self.nodes.load(&one.root.expected()).await.err();
                all.push((one, error));
            }
            all
        })
    }

    /// Items of a tree.
    pub fn cursor(&self, root: TreeRoot, range: std::ops::RangeInclusive<Key>) -> Cursor<'_> {
        Cursor::new(&self.nodes, root, range)
    }

    /// The root of a tree, if the tree exists.
    ///
    /// # Errors
    /// If that part of the root tree is lost.
    pub async fn tree(&self, id: u64) -> Result<Option<TreeRoot>, FsError> {
        match id {
            objectid::ROOT_TREE => return Ok(Some(self.root_tree())),
            objectid::CHUNK_TREE => return Ok(Some(self.chunk_root())),
            _ => {}
        }
        roots::find_tree(&self.nodes, self.root_tree(), id).await
    }

    /// The tree of checksums.
    ///
    /// # Errors
    /// If it does not exist, or if that part of the root tree is lost.
    pub async fn csum_tree(&self) -> Result<TreeRoot, FsError> {
        if let Some(tree) = self.csum_tree.get() {
            return Ok(tree);
        }
        let tree = self.tree(objectid::CSUM_TREE).await?;
        let tree = tree.ok_or_else(|| FsError::Absent("tree of checksums".into()))?;
        self.csum_tree.set(Some(tree));
        Ok(tree)
    }

    /// All trees: those in the superblock, and those in the root tree. Returns also the lost parts of the root tree.
    pub async fn trees(&self) -> (Vec<TreeRoot>, Vec<FsError>) {
        let (mut trees, mut lost) = (vec![self.root_tree(), self.chunk_root()], Vec::new());
        let mut cursor = Cursor::all(&self.nodes, self.root_tree());
        loop {
            match cursor.next().await {
                Ok(None) => return (trees, lost),
                Ok(Some((key, data))) => trees.extend(roots::tree_root(key, data)),
                Err(error) => lost.push(error),
            }
        }
    }

    /// Bad copies of nodes that were read since the last call.
    pub fn take_bad_copies(&self) -> Vec<BadCopy> {
        self.nodes.take_bad_copies()
    }
}

/// Refuses devices that were written separately, for instance because each was mounted degraded. After the same number
/// of transactions both have the same transaction number, and every node of either is valid. The root node of the root
/// tree is rewritten in each transaction, so its copies reveal this. If copies on the same device differ, this is
/// damage and not two histories: the first one is used, and the others are returned.
async fn check_history(nodes: &NodeCache, root_tree: TreeRoot) -> Result<Vec<BadCopy>, FsError> {
    // A lost node is reported where it is read.
    let Ok(copies) = nodes.read_copies(&root_tree.expected()).await else { return Ok(Vec::new()) };
    let places = nodes.storage().map.locate(root_tree.bytenr, 1)?.copies;
    let (mut on_one, mut of_two) = (Vec::new(), None);
    for copy in copies.bad {
        match copy.fault {
            CopyFault::Differs(other) if places[other - 1].devid == copy.place.devid => on_one.push(copy),
            CopyFault::Differs(_) => of_two = of_two.or(Some(copy)),
            _ => {}
        }
    }
    match of_two {
        Some(copy) => Err(FsError::Devices(format!(
            "the root node of all trees has two histories, as devices have that were written apart from each other; name those of one of them: {copy}"
        ))),
        None => {
            nodes.remember(on_one.clone());
            Ok(on_one)
        }
    }
}

/// The content of the chunk tree.
struct Chunks {
    map: ChunkMap,
    known: BTreeMap<u64, KnownDevice>,
    /// Logical ranges of chunks that may hold nodes, as first addresses and bytes.
    of_nodes: Vec<(u64, u64)>,
}

impl Chunks {
    /// Reads the chunk tree from the chosen root. Returns the root and the lost parts of the tree.
    async fn read(
        &mut self,
        nodes: &NodeCache,
        superblock: &Superblock,
        from: RootsFrom,
    ) -> Result<(Chosen, Vec<FsError>), FsError> {
        let mut lost = Vec::new();
        let chosen = roots::choose(nodes, superblock, from, objectid::CHUNK_TREE).await?;
        if let Some(chosen) = chosen {
            let mut cursor = Cursor::all(nodes, chosen.root);
            loop {
                match cursor.next().await {
                    Ok(None) => break,
                    Ok(Some((key, data))) => self.add(key, data)?,
                    Err(error) if error.is_damage() => lost.push(error),
                    Err(error) => return Err(error),
                }
            }
        }
        let is_newest = chosen.is_some_and(|chosen| chosen.source == RootSource::Superblock);
        if from != RootsFrom::Best || is_newest && lost.is_empty() {
            return Ok((chosen.unwrap_or_else(|| roots::candidates(superblock, objectid::CHUNK_TREE)[0]), lost));
        }
        let system: Vec<(u64, u64)> = nodes.storage().map.ranges().collect();
        let found = roots::search(nodes, &system, objectid::CHUNK_TREE).await;
        for leaf in found.iter().filter(|node| node.level == 0) {
            let Ok(node) = nodes.load(&leaf.expected()).await else { continue };
            for (key, data) in node.view().entries() {
                // The existing chunk is newer.
                if !matches!(Item::decode(key, data), Ok(Item::Device(item)) if self.known.contains_key(&item.devid.get()))
                {
                    let _ = self.add(key, data);
                }
            }
        }
        let of_search = found.first().map(|root| Chosen { source: RootSource::Search, root: *root });
        match chosen.or(of_search) {
            Some(chosen) => Ok((chosen, lost)),
            None => {
                let newest = roots::candidates(superblock, objectid::CHUNK_TREE)[0];
                lost.extend(nodes.load(&newest.root.expected()).await.err());
                Ok((newest, lost))
            }
        }
    }

    /// Adds what is relevant in an item of the chunk tree.
    fn add(&mut self, key: Key, data: &[u8]) -> Result<(), FsError> {
        // The checker has decoded every item of the node.
        match Item::decode(key, data) {
            Ok(Item::Chunk(chunk)) => {
                self.map.add(key.offset, &chunk)?;
                if chunk.flags().contains(BlockGroupFlags::METADATA) {
                    self.of_nodes.push((key.offset, chunk.head.length.get()));
                }
            }
            Ok(Item::Device(item)) => {
                self.known.insert(item.devid.get(), KnownDevice { item: *item, is_missing: true });
            }
            _ => {}
        }
        Ok(())
    }
}

/// The root of the root tree that is used; the newest one if none can be read.
async fn choose_trees(
    nodes: &NodeCache,
    superblock: &Superblock,
    from: RootsFrom,
    chunks: &Chunks,
) -> Result<Chosen, FsError> {
    match roots::choose(nodes, superblock, from, objectid::ROOT_TREE).await? {
        Some(chosen) => Ok(chosen),
        None => {
            let found = roots::find_root_tree(nodes, superblock, &chunks.of_nodes).await;
            Ok(found.unwrap_or_else(|| roots::candidates(superblock, objectid::ROOT_TREE)[0]))
        }
    }
}

/// Determines which devices are missing, and refuses devices that do not match those in the chunk tree. Returns the
/// error if this is the device with the used superblock: no other device shows that it is the wrong one, so the
/// filesystem is damaged.
fn check_devices(
    devices: &DeviceSet,
    known: &mut BTreeMap<u64, KnownDevice>,
    is_complete: bool,
) -> Result<Option<FsError>, FsError> {
    let (own, mut contradiction) = (devices.superblock().dev_item.devid.get(), None);
    for (devid, device) in known.iter_mut() {
        let here = devices.get(*devid);
        device.is_missing = here.is_none();
        let Some(other) = here.filter(|here| here.item.uuid != device.item.uuid) else { continue };
        let (name, wanted, found) = (&other.name, uuid(&device.item.uuid), uuid(&other.item.uuid));
        if *devid != own {
            return Err(FsError::Devices(format!(
                "{name} says that it is device {devid}, which has the UUID {wanted} and not {found}"
            )));
        }
        contradiction = Some(FsError::Contradiction {
            what: format!("the filesystem on {name}"),
            why: format!(
                "its superblock is of device {devid} with the UUID {found}, and its chunk tree has device {devid} with the UUID {wanted}; the superblock may be of another filesystem"
            ),
        });
    }
    match devices.iter().find(|(devid, _)| is_complete && !known.contains_key(devid)) {
        None => Ok(contradiction),
        Some((devid, Device { name, .. })) if devid == own => Ok(Some(FsError::Contradiction {
            what: format!("the filesystem on {name}"),
            why: format!(
                "its superblock is of device {devid}, which its chunk tree does not have; the superblock may be of another filesystem or device"
            ),
        })),
        Some((devid, Device { name, .. })) => Err(FsError::Devices(format!(
            "{name} says that it is device {devid}, which the filesystem has not (any more)"
        ))),
    }
}
