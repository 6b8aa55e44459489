//! Walks every tree of an image by its raw pointers. Each node and item must pass the checker and encode to the same
//! bytes.
//!
//! It can only locate blocks of chunks that are on one device without stripes. The images have only such chunks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sealblock_btrfs_format::checker::{CheckedNode, Expected, check_node};
use sealblock_btrfs_format::checker_items::check_chunk;
use sealblock_btrfs_format::compress::{Sizes, decompress};
use sealblock_btrfs_format::free_space::GroupFreeSpace;
use sealblock_btrfs_format::inner_edit::InnerMut;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::chunk::{Chunk, ChunkBuf};
use sealblock_btrfs_format::items::entries::{Entries, Entry, push_entry};
use sealblock_btrfs_format::items::extent_buf::{ExtentItemBuf, decode_keyed, keyed_data};
use sealblock_btrfs_format::items::file_extent::{Compression, FileExtent};
use sealblock_btrfs_format::items::root::RootItemBuf;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::leaf_edit::LeafMut;
use sealblock_btrfs_format::node::{HEADER_BYTES, ItemHead, write_inner, write_leaf};
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, Geometry, SUPERBLOCK_BYTES, Superblock};
use sealblock_proofs_btrfs_images::content::text;

/// Statistics of one image or of several.
#[derive(Default, Debug)]
pub struct Seen {
    /// Nodes.
    pub nodes: usize,
    /// The highest level.
    pub height: u8,
    /// Items by type.
    pub items: BTreeMap<ItemType, usize>,
    /// Sectors whose checksum was compared with the data.
    pub sectors: usize,
    /// Extents that were decompressed, and compared with the file's content.
    pub decompressed: BTreeMap<u8, usize>,
    /// The maximum number of names with the same hash in one item.
    pub most_entries: usize,
    /// Kinds of file extents.
    pub extent_kinds: BTreeSet<u8>,
    /// Types of references behind extents.
    pub inline_refs: BTreeSet<u8>,
    /// Groups whose free space is in runs, and in bitmaps.
    pub groups: BTreeMap<bool, usize>,
}

impl Seen {
    /// Adds the statistics of another image.
    pub fn add(&mut self, other: Seen) {
        self.nodes += other.nodes;
        self.height = self.height.max(other.height);
        self.most_entries = self.most_entries.max(other.most_entries);
        self.sectors += other.sectors;
        other.items.into_iter().for_each(|(item, count)| *self.items.entry(item).or_default() += count);
        other.decompressed.into_iter().for_each(|(kind, count)| *self.decompressed.entry(kind).or_default() += count);
        self.extent_kinds.extend(other.extent_kinds);
        other.groups.into_iter().for_each(|(form, count)| *self.groups.entry(form).or_default() += count);
        self.inline_refs.extend(other.inline_refs);
    }
}

/// The image that is walked.
struct Walker {
    file: File,
    geometry: Geometry,
    /// By the logical start of a chunk: bytes, and the offset of its first stripe.
    chunks: BTreeMap<u64, (u64, u64)>,
    /// Checksums of data that were not compared yet.
    csums: Vec<(u64, Vec<u8>)>,
    /// Items of the free space tree that were not loaded yet.
    free_space: Vec<(Key, Vec<u8>)>,
    seen: Seen,
}

/// Walks all trees of an image.
///
/// # Panics
/// If a part of it is refused or encodes to other bytes.
pub fn walk(image: &Path) -> Seen {
    let file = File::open(image).unwrap();
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    file.read_exact_at(&mut bytes, COPY_OFFSETS[0]).unwrap();
    let superblock = Superblock::decode(&bytes).unwrap();
    let geometry = superblock.check(COPY_OFFSETS[0]).unwrap();
    geometry.features.check_reading().unwrap();
    let mut resealed = *superblock;
    resealed.seal();
    assert_eq!(&resealed, superblock, "sealing a good superblock changes nothing");

    let (chunks, csums, free_space, seen) = (BTreeMap::new(), Vec::new(), Vec::new(), Seen::default());
    let mut walker = Walker { file, geometry, chunks, csums, free_space, seen };
    assert_sys_chunks(superblock);
    for chunk in superblock.sys_chunks() {
        let (key, chunk) = chunk.unwrap();
        check_chunk(&geometry, key, &chunk).unwrap();
        walker.map(key, &chunk);
    }
    let generation = superblock.chunk_root_generation.get();
    walker.tree(objectid::CHUNK_TREE, superblock.chunk_root.get(), superblock.chunk_root_level, generation);
    let generation = superblock.generation.get();
    walker.tree(objectid::ROOT_TREE, superblock.root.get(), superblock.root_level, generation);
    if superblock.log_root != 0 {
        walker.tree(objectid::TREE_LOG, superblock.log_root.get(), superblock.log_root_level, generation + 1);
    }
    walker.compare_csums();
    walker.seen
}

impl Walker {
    fn map(&mut self, key: Key, chunk: &Chunk) {
        let profile = chunk.flags().profile().unwrap();
        assert_eq!(profile.data_stripes(chunk.head.num_stripes.get()), 1, "striped chunks are not for this walker");
        self.chunks.insert(key.offset, (chunk.head.length.get(), chunk.stripes[0].offset.get()));
    }

    fn read(&self, logical: u64, bytes: usize) -> Vec<u8> {
        let (start, (length, offset)) = self.chunks.range(..=logical).next_back().expect("an address in a chunk");
        assert!(logical - start + bytes as u64 <= *length, "{logical} and {bytes} bytes lie in one chunk");
        let mut data = vec![0; bytes];
        self.file.read_exact_at(&mut data, offset + (logical - start)).unwrap();
        data
    }

    fn tree(&mut self, owner: u64, bytenr: u64, level: u8, generation: u64) {
        self.seen.height = self.seen.height.max(level);
        let mut roots = Vec::new();
        let mut pending = vec![Expected { bytenr, owner, level, generation, first_key: None }];
        while let Some(expected) = pending.pop() {
            let bytes = self.read(expected.bytenr, self.geometry.node_bytes as usize);
            let node = check_node(&bytes, &self.geometry, &expected).unwrap();
            self.seen.nodes += 1;
            self.assert_encodes(&node, &bytes);
            let children = (0..node.pointers().len()).rev();
            pending.extend(children.map(|slot| node.child(slot, owner).unwrap()));
            for (key, data) in node.entries() {
                let item = Item::decode(key, data).unwrap();
                assert_eq!(item.encode().unwrap(), data, "{key}: {item:?}");
                assert_owned(key, &item, data);
                *self.seen.items.entry(key.item_type).or_default() += 1;
                self.look_at(key, &item, &mut roots);
            }
        }
        self.load_free_space();
        for (owner, bytenr, level, generation) in roots {
            self.tree(owner, bytenr, level, generation);
        }
    }

    /// Every block group's free space loads from its items, and gives them again.
    fn load_free_space(&mut self) {
        let items = std::mem::take(&mut self.free_space);
        for group in items.chunk_by(|_, (key, _)| key.item_type != ItemType::FREE_SPACE_INFO) {
            let borrowed = group.iter().map(|(key, data)| (*key, &data[..]));
            let space = GroupFreeSpace::load(self.geometry.sector_bytes, borrowed).unwrap();
            assert_eq!(space.items(), group);
            *self.seen.groups.entry(space.is_bitmaps()).or_default() += 1;
        }
    }

    fn assert_encodes(&self, node: &CheckedNode, bytes: &[u8]) {
        let (node_bytes, checksum) = (self.geometry.node_bytes, self.geometry.checksum);
        let again = match node.header().level {
            0 => write_leaf(node.header(), node.entries(), node_bytes, checksum),
            _ => write_inner(node.header(), node.pointers(), node_bytes, checksum),
        };
        let mut again = again.unwrap();
        // mkfs leaves old bytes between heads and data; the kernel zeroes them.
        let (front, back) = match (node.items(), node.pointers()) {
            (items, []) => (size_of_val(items), items.last().map_or(again.len() - HEADER_BYTES, data_offset)),
            (_, pointers) => (size_of_val(pointers), again.len() - HEADER_BYTES),
        };
        let free = HEADER_BYTES + front..HEADER_BYTES + back;
        let edited = edited(node, bytes);
        assert!(edited[HEADER_BYTES..] == again[HEADER_BYTES..], "node {} made by edits", node.header().bytenr);
        again[free.clone()].copy_from_slice(&bytes[free]);
        checksum.seal(&mut again);
        let differs = again.iter().zip(bytes).position(|(again, before)| again != before);
        assert_eq!(differs, None, "node {} of tree {}", node.header().bytenr, node.header().owner);
    }

    fn look_at(&mut self, key: Key, item: &Item, roots: &mut Vec<(u64, u64, u8, u64)>) {
        match item {
            // The cache of version 1 has other items.
            _ if matches!(key.item_type.0, 198..=200) => self.free_space.push((key, item.encode().unwrap())),
            Item::Chunk(chunk) => self.map(key, chunk),
            Item::Root(root) if root.head.refs != 0 || !objectid::is_subvolume(key.objectid) => {
                roots.push((key.objectid, root.head.bytenr.get(), root.head.level, root.head.generation.get()));
            }
            Item::DirItems(entries) | Item::Xattrs(entries) => {
                self.seen.most_entries = self.seen.most_entries.max(entries.iter().count());
            }
            Item::Csums(csums) => self.csums.push((key.offset, csums.to_vec())),
            Item::Extent(extent) => self.seen.inline_refs.extend(extent.refs().map(|one| one.item_type().0)),
            Item::FileExtent(extent) => {
                self.seen.extent_kinds.insert(extent.head().kind);
                self.decompress(key, extent);
            }
            _ => {}
        }
    }

    fn decompress(&mut self, key: Key, extent: &FileExtent) {
        let kind = Compression::from_number(extent.head().compression).unwrap();
        if kind == Compression::None {
            return;
        }
        let (stored, offset) = match extent {
            FileExtent::Inline(_, data) => (data.to_vec(), 0),
            FileExtent::Regular(_, at) | FileExtent::Prealloc(_, at) => {
                (self.read(at.disk_bytenr.get(), at.disk_num_bytes.get() as usize), at.offset.get())
            }
        };
        let plain_bytes = extent.head().ram_bytes.get() as usize;
        let sizes = Sizes { plain_bytes, sector_bytes: self.geometry.sector_bytes as usize };
        let plain = decompress(kind, &stored, sizes).unwrap_or_else(|error| panic!("{key}: {error}"));
        // All compressed files begin with the same text, and are padded with zeroes to the end of the sector.
        let start = key.offset.checked_sub(offset).unwrap() as usize;
        let expected = text(start + plain_bytes);
        let written = plain.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        assert_eq!(plain[..written], expected[start..start + written], "{key}");
        assert!(plain_bytes - written < 4096, "{key}");
        *self.seen.decompressed.entry(kind as u8).or_default() += 1;
    }

    fn compare_csums(&mut self) {
        let (sector, checksum) = (self.geometry.sector_bytes as usize, self.geometry.checksum);
        for (start, csums) in std::mem::take(&mut self.csums) {
            for (index, csum) in csums.chunks(checksum.bytes()).enumerate() {
                let logical = start + (index * sector) as u64;
                assert_eq!(checksum.compute(&self.read(logical, sector)).as_bytes(), csum, "data at {logical}");
                self.seen.sectors += 1;
            }
        }
    }
}

/// A node with the same items, inserted from the middle outwards, into a node that was opened and emptied.
fn edited(node: &CheckedNode, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let outwards =
        |count: usize| (0..count / 2).rev().map(|slot| (0, slot)).chain((count / 2..count).map(|at| (at, at)));
    if node.header().level == 0 {
        let mut leaf = LeafMut::open(&mut bytes).unwrap();
        leaf.delete(0..leaf.len()).unwrap();
        leaf.zero_gap();
        for (at, slot) in outwards(node.items().len()) {
            let item = &node.items()[slot];
            leaf.insert(at, item.key(), node.data(item).unwrap()).unwrap();
        }
    } else {
        let mut inner = InnerMut::open(&mut bytes).unwrap();
        inner.delete(0..inner.len()).unwrap();
        inner.zero_gap();
        for (at, slot) in outwards(node.pointers().len()) {
            inner.insert(at, node.pointers()[slot]).unwrap();
        }
    }
    bytes
}

/// The owned form of an item encodes to the same bytes; so does a list to which its entries are pushed.
fn assert_owned(key: Key, item: &Item, data: &[u8]) {
    let again = match item {
        Item::Extent(extent) => {
            let owned = ExtentItemBuf::decode(key.item_type, data).unwrap();
            assert_eq!(owned.inline().len(), extent.refs().count());
            owned.encode()
        }
        Item::Root(_) => RootItemBuf::decode(data).unwrap().encode(),
        Item::Chunk(chunk) => ChunkBuf::from(*chunk).encode().unwrap(),
        Item::InodeRefs(entries) => pushed(entries),
        Item::InodeExtrefs(entries) => pushed(entries),
        Item::Xattrs(entries) | Item::DirItems(entries) | Item::DirIndex(entries) => pushed(entries),
        Item::ExtentDataRefs(entries) => pushed(entries),
        _ => data.to_vec(),
    };
    assert_eq!(again, data, "{key}: {item:?}");
    if let Some((what, count)) = decode_keyed(key, data).unwrap() {
        assert_eq!((keyed_data(what, count), what.item_type()), (data.to_vec(), key.item_type), "{key}");
    }
}

fn pushed<'a, E: Entry<'a>>(entries: &Entries<'a, E>) -> Vec<u8> {
    let mut out = Vec::new();
    entries.iter().for_each(|entry| push_entry(&mut out, &entry, usize::MAX).unwrap());
    out
}

/// The system chunks are the same after they were removed and pushed again.
fn assert_sys_chunks(superblock: &Superblock) {
    let mut again = *superblock;
    for chunk in superblock.sys_chunks() {
        let (key, chunk) = chunk.unwrap();
        assert!(again.remove_sys_chunk(key).unwrap());
        again.push_sys_chunk(key, &chunk).unwrap();
    }
    assert!(again == *superblock);
}

fn data_offset(item: &ItemHead) -> usize {
    item.offset.get() as usize
}
