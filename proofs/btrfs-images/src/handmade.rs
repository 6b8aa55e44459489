//! Filesystems that are built item by item, without any program, for tests without privileges and for states that no
//! program creates.
//!
//! One device, with system and metadata chunks in two copies, and data in one. Trees are cut into leaves of a few
//! items, with inner nodes above them. Every node has a valid checksum, so that readers reach the items instead of
//! stopping at the checksum.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::chunk::{BlockGroupFlags, BlockGroupItem, Chunk, ChunkHead, STRIPE_BYTES, Stripe};
use sealblock_btrfs_format::items::device::DevItem;
use sealblock_btrfs_format::items::directory::{DirEntry, FileType};
use sealblock_btrfs_format::items::entries::Entry;
use sealblock_btrfs_format::items::file_extent::{ExtentLocation, FileExtentHead, kind};
use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem, InodeRef};
use sealblock_btrfs_format::items::root::RootHead;
use sealblock_btrfs_format::key::{DiskKey, ItemType, Key, objectid};
use sealblock_btrfs_format::names::name_hash;
use sealblock_btrfs_format::node::{HEADER_BYTES, Header, KeyPointer, flags, write_inner, write_leaf};
use sealblock_btrfs_format::superblock::{MAGIC, SUPERBLOCK_BYTES, Superblock, copy_offsets};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Bytes of the device, unless its [`Identity`] has others.
pub const DEVICE_BYTES: u64 = 64 << 20;
/// The start of file data, by logical address and on the device.
pub const DATA_START: u64 = 16 << 20;
/// The transaction that made everything.
pub const GENERATION: u64 = 9;
/// Bytes of a sector.
pub const SECTOR_BYTES: usize = 4096;

const SYSTEM: (u64, u64, [u64; 2]) = (1 << 20, 1 << 20, [1 << 20, 2 << 20]);
const METADATA: (u64, u64, [u64; 2]) = (4 << 20, 4 << 20, [4 << 20, 8 << 20]);
const DATA_BYTES: u64 = DEVICE_BYTES - DATA_START;
/// The maximum number of items in a leaf and of pointers in an inner node. Few, so that trees have several levels.
const MOST_ITEMS: usize = 12;

/// How the data of a file are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Storage {
    /// In the item.
    Inline,
    /// In an extent, with checksums.
    Summed,
    /// In an extent, without checksums.
    Unsummed,
}

/// What distinguishes filesystems with the same content.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// The UUID of the filesystem.
    pub fsid: [u8; 16],
    /// The UUID of its device.
    pub device_uuid: [u8; 16],
    /// Bytes of the device: with more than [`DEVICE_BYTES`], it has further copies of the superblock.
    pub device_bytes: u64,
    /// Bytes by which everything lies later on the device. With 512 KiB, a small filesystem and one without a shift
    /// overwrite nothing of each other, except the superblocks.
    pub shift_bytes: u64,
}

impl Default for Identity {
    fn default() -> Identity {
        Identity {
            fsid: *b"made by hand....",
            device_uuid: *b"the only device.",
            device_bytes: DEVICE_BYTES,
            shift_bytes: 0,
        }
    }
}

/// A filesystem under construction.
#[derive(Clone)]
pub struct Handmade {
    identity: Identity,
    checksum: ChecksumType,
    node_bytes: u32,
    /// Items by tree.
    pub trees: BTreeMap<u64, BTreeMap<Key, Vec<u8>>>,
    data: Vec<u8>,
    next_ino: u64,
}

/// The content of the device: runs of bytes with their offsets; the rest is zero.
#[derive(Clone, Debug, Default)]
pub struct Pieces(pub Vec<(u64, Vec<u8>)>);

impl Pieces {
    /// Writes the file of the device.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        file.set_len(DEVICE_BYTES)?;
        self.0.iter().try_for_each(|(at, bytes)| file.write_all_at(bytes, *at))
    }
}

fn zeroed<T: FromZeros>() -> T {
    T::new_zeroed()
}

impl Handmade {
    /// A filesystem with an empty directory.
    pub fn new(node_bytes: u32, checksum: ChecksumType) -> Handmade {
        Handmade::of(Identity::default(), node_bytes, checksum)
    }

    /// The same with another identity.
    pub fn of(identity: Identity, node_bytes: u32, checksum: ChecksumType) -> Handmade {
        let next_ino = objectid::FIRST_FREE + 1;
        let mut made = Handmade { identity, checksum, node_bytes, trees: BTreeMap::new(), data: Vec::new(), next_ino };
        let trees =
            [objectid::ROOT_TREE, objectid::CHUNK_TREE, objectid::FS_TREE, objectid::CSUM_TREE, objectid::EXTENT_TREE];
        made.trees.extend(trees.map(|id| (id, BTreeMap::new())));
        let top = objectid::FIRST_FREE;
        made.put_inode(top, 0o040_755, 0, InodeFlags::empty());
        made.put_name(top, top, 0, b"..");
        for ((logical, bytes, _), kind) in [(SYSTEM, BlockGroupFlags::SYSTEM), (METADATA, BlockGroupFlags::METADATA)] {
            made.put_chunk(logical, bytes, kind | BlockGroupFlags::DUP);
        }
        made.put_chunk(DATA_START, DATA_BYTES, BlockGroupFlags::DATA);
        let device = made.device();
        made.put(
            objectid::CHUNK_TREE,
            Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, 1),
            device.as_bytes().to_vec(),
        );
        made
    }

    /// Adds an item to a tree; replaces the one with the same key.
    pub fn put(&mut self, tree: u64, key: Key, bytes: Vec<u8>) {
        self.trees.entry(tree).or_default().insert(key, bytes);
    }

    fn device(&self) -> DevItem {
        DevItem {
            devid: 1.into(),
            total_bytes: self.identity.device_bytes.into(),
            bytes_used: (DEVICE_BYTES / 2).into(),
            sector_size: (SECTOR_BYTES as u32).into(),
            uuid: self.identity.device_uuid,
            fsid: self.identity.fsid,
            ..zeroed()
        }
    }

    fn put_chunk(&mut self, logical: u64, bytes: u64, flags: BlockGroupFlags) {
        let key = Key::new(objectid::FIRST_CHUNK_TREE, ItemType::CHUNK_ITEM, logical);
        let item = self.chunk(logical, bytes, flags);
        self.put(objectid::CHUNK_TREE, key, item);
        let (used, chunk_objectid) = (0.into(), objectid::FIRST_CHUNK_TREE.into());
        let group = BlockGroupItem { used, chunk_objectid, flags: flags.bits().into() };
        let key = Key::new(logical, ItemType::BLOCK_GROUP_ITEM, bytes);
        self.put(objectid::EXTENT_TREE, key, group.as_bytes().to_vec());
    }

    fn put_inode(&mut self, ino: u64, mode: u32, size: u64, flags: InodeFlags) {
        let inode = InodeItem {
            generation: GENERATION.into(),
            transid: GENERATION.into(),
            size: size.into(),
            nlink: 1.into(),
            mode: mode.into(),
            flags: flags.bits().into(),
            ..zeroed()
        };
        self.put(objectid::FS_TREE, Key::new(ino, ItemType::INODE_ITEM, 0), inode.as_bytes().to_vec());
    }

    fn put_name(&mut self, ino: u64, parent: u64, index: u64, name: &[u8]) {
        let mut bytes = Vec::new();
        InodeRef { index, name }.write(&mut bytes).expect("names of tests are short");
        self.put(objectid::FS_TREE, Key::new(ino, ItemType::INODE_REF, parent), bytes);
    }

    /// Adds an entry to a directory; its target may be absent.
    pub fn put_entry(&mut self, parent: u64, name: &[u8], ino: u64, file_type: FileType) {
        let location = Key::new(ino, ItemType::INODE_ITEM, 0);
        let entry = DirEntry { location, transid: GENERATION, kind: file_type as u8, name, data: b"" };
        let mut bytes = Vec::new();
        entry.write(&mut bytes).expect("names of tests are short");
        let tree = self.trees.entry(objectid::FS_TREE).or_default();
        let indices = Key::new(parent, ItemType::DIR_INDEX, 0)..=Key::new(parent, ItemType::DIR_INDEX, u64::MAX);
        let index = tree.range(indices).next_back().map_or(2, |(key, _)| key.offset + 1);
        tree.insert(Key::new(parent, ItemType::DIR_INDEX, index), bytes.clone());
        // Names with the same hash share an item.
        tree.entry(Key::new(parent, ItemType::DIR_ITEM, name_hash(name))).or_default().extend(bytes);
    }

    /// Makes a directory in another one.
    pub fn directory(&mut self, parent: u64, name: &[u8]) -> u64 {
        let ino = self.next_ino;
        self.next_ino += 1;
        self.put_inode(ino, 0o040_755, 0, InodeFlags::empty());
        self.put_name(ino, parent, 2, name);
        self.put_entry(parent, name, ino, FileType::Directory);
        ino
    }

    /// Makes a file with this content.
    pub fn file(&mut self, parent: u64, name: &[u8], content: &[u8], storage: Storage) -> u64 {
        let ino = self.next_ino;
        self.next_ino += 1;
        let flags = if storage == Storage::Unsummed { InodeFlags::NODATASUM } else { InodeFlags::empty() };
        self.put_inode(ino, 0o100_644, content.len() as u64, flags);
        self.put_name(ino, parent, 2, name);
        self.put_entry(parent, name, ino, FileType::Regular);
        match storage {
            Storage::Inline => self.put_extent(ino, 0, &inline(content)),
            Storage::Summed | Storage::Unsummed => {
                let logical = self.store(content, storage == Storage::Summed);
                let bytes = (content.len().next_multiple_of(SECTOR_BYTES)) as u64;
                self.put_extent(ino, 0, &regular(logical, bytes, 0, bytes));
            }
        }
        ino
    }

    /// Adds a part of a file at an offset.
    pub fn put_extent(&mut self, ino: u64, at: u64, extent: &[u8]) {
        self.put(objectid::FS_TREE, Key::new(ino, ItemType::EXTENT_DATA, at), extent.to_vec());
    }

    /// Stores sectors and returns their logical address.
    pub fn store(&mut self, content: &[u8], with_sums: bool) -> u64 {
        let logical = DATA_START + self.data.len() as u64;
        let mut sums = Vec::new();
        for sector in content.chunks(SECTOR_BYTES) {
            let mut sector = sector.to_vec();
            sector.resize(SECTOR_BYTES, 0);
            sums.extend_from_slice(self.checksum.compute(&sector).as_bytes());
            self.data.extend_from_slice(&sector);
        }
        assert!(self.data.len() as u64 <= DATA_BYTES, "tests store little");
        // As many as certainly fit into an item of a small leaf.
        let per_item = 32;
        for (index, run) in sums.chunks(per_item * self.checksum.bytes()).enumerate().filter(|_| with_sums) {
            let at = logical + (index * per_item * SECTOR_BYTES) as u64;
            let key = Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
            self.put(objectid::CSUM_TREE, key, run.to_vec());
        }
        logical
    }

    /// Writes everything to its device.
    pub fn build(&self) -> Pieces {
        let mut nodes = Nodes { made: self, next: METADATA.0, written: Vec::new() };
        let mut roots = BTreeMap::new();
        for (id, items) in &self.trees {
            if !matches!(*id, objectid::ROOT_TREE | objectid::CHUNK_TREE) {
                roots.insert(*id, nodes.tree(*id, items));
            }
        }
        let mut root_items = self.trees.get(&objectid::ROOT_TREE).cloned().unwrap_or_default();
        for (id, (bytenr, level)) in roots {
            let key = Key::new(id, ItemType::ROOT_ITEM, 0);
            root_items.entry(key).or_insert_with(|| root_item(bytenr, level));
        }
        let (root, root_level) = nodes.tree(objectid::ROOT_TREE, &root_items);
        nodes.next = SYSTEM.0;
        let (chunk_root, chunk_root_level) = nodes.tree(objectid::CHUNK_TREE, &self.trees[&objectid::CHUNK_TREE]);
        let mut pieces = Vec::new();
        let shift = self.identity.shift_bytes;
        for (logical, bytes) in nodes.written {
            let (start, _, places) = if logical < METADATA.0 { SYSTEM } else { METADATA };
            pieces.extend(places.map(|place| (place + shift + (logical - start), bytes.clone())));
        }
        pieces.push((DATA_START + shift, self.data.clone()));
        for offset in copy_offsets(self.identity.device_bytes) {
            let mut superblock = self.superblock((root, root_level), (chunk_root, chunk_root_level));
            superblock.bytenr = offset.into();
            superblock.seal();
            pieces.push((offset, superblock.as_bytes().to_vec()));
        }
        Pieces(pieces)
    }

    fn superblock(&self, root: (u64, u8), chunk_root: (u64, u8)) -> Superblock {
        let mut array =
            Vec::from(DiskKey::from(Key::new(objectid::FIRST_CHUNK_TREE, ItemType::CHUNK_ITEM, SYSTEM.0)).as_bytes());
        array.extend(self.chunk(SYSTEM.0, SYSTEM.1, BlockGroupFlags::SYSTEM | BlockGroupFlags::DUP));
        let mut superblock = Superblock::read_from_bytes(&[0; SUPERBLOCK_BYTES]).expect("it has its size");
        superblock.sys_chunk_array[..array.len()].copy_from_slice(&array);
        let node_bytes = self.node_bytes.into();
        let features =
            Incompat::MIXED_BACKREF | Incompat::SKINNY_METADATA | Incompat::NO_HOLES | Incompat::EXTENDED_IREF;
        Superblock {
            fsid: self.identity.fsid,
            magic: MAGIC,
            generation: GENERATION.into(),
            root: root.0.into(),
            root_level: root.1,
            chunk_root: chunk_root.0.into(),
            chunk_root_level: chunk_root.1,
            chunk_root_generation: GENERATION.into(),
            total_bytes: self.identity.device_bytes.into(),
            bytes_used: (1 << 20).into(),
            root_dir_objectid: objectid::ROOT_TREE_DIR.into(),
            num_devices: 1.into(),
            sector_bytes: (SECTOR_BYTES as u32).into(),
            node_bytes,
            leaf_bytes: node_bytes,
            stripe_bytes: (SECTOR_BYTES as u32).into(),
            sys_chunk_array_bytes: (array.len() as u32).into(),
            incompat: features.bits().into(),
            csum_type: self.checksum.number().into(),
            dev_item: self.device(),
            ..superblock
        }
    }

    fn chunk(&self, logical: u64, bytes: u64, flags: BlockGroupFlags) -> Vec<u8> {
        let places: &[u64] = match logical {
            _ if logical == SYSTEM.0 => &SYSTEM.2,
            _ if logical == METADATA.0 => &METADATA.2,
            _ => &[DATA_START],
        };
        let Identity { device_uuid: dev_uuid, shift_bytes, .. } = self.identity;
        let stripe = |offset: &u64| Stripe { devid: 1.into(), offset: (offset + shift_bytes).into(), dev_uuid };
        let head = ChunkHead {
            length: bytes.into(),
            owner: objectid::EXTENT_TREE.into(),
            stripe_len: STRIPE_BYTES.into(),
            flags: flags.bits().into(),
            sector_size: (SECTOR_BYTES as u32).into(),
            ..zeroed()
        };
        let stripes: Vec<Stripe> = places.iter().map(stripe).collect();
        Item::Chunk(Chunk { head: &head, stripes: &stripes }).encode().expect("a chunk of two stripes fits")
    }
}

/// Writes the nodes of trees, one after the other.
struct Nodes<'a> {
    made: &'a Handmade,
    next: u64,
    written: Vec<(u64, Vec<u8>)>,
}

impl Nodes<'_> {
    /// Writes a tree, and returns the address and the level of its root node.
    fn tree(&mut self, owner: u64, items: &BTreeMap<Key, Vec<u8>>) -> (u64, u8) {
        let (node_bytes, checksum) = (self.made.node_bytes, self.made.checksum);
        let (mut rest, mut pointers, mut level) = (items.iter().collect::<Vec<_>>(), Vec::new(), 0);
        loop {
            let header = self.header(owner, level);
            // As many items as fit in a leaf; none for an empty tree.
            let (mut count, mut leaf) = (0, write_leaf(&header, [], node_bytes, checksum));
            while count < rest.len().min(MOST_ITEMS) {
                let longer = rest[..=count].iter().map(|(key, bytes)| (**key, &bytes[..]));
                match write_leaf(&header, longer, node_bytes, checksum) {
                    Ok(longer) => (count, leaf) = (count + 1, Ok(longer)),
                    Err(_) => break,
                }
            }
            let first = rest.first().map_or(Key::MIN, |(key, _)| **key);
            pointers.push((first, self.write(leaf.expect("an empty leaf fits"))));
            // An item that fits in no leaf is omitted; a test that adds one will notice.
            rest.drain(..count.max(1).min(rest.len()));
            if rest.is_empty() {
                break;
            }
        }
        while pointers.len() > 1 {
            level += 1;
            let below = std::mem::take(&mut pointers);
            for group in below.chunks(MOST_ITEMS) {
                let header = self.header(owner, level);
                let inner: Vec<KeyPointer> =
                    group.iter().map(|(key, bytenr)| KeyPointer::new(*key, *bytenr, GENERATION)).collect();
                let node = write_inner(&header, &inner, node_bytes, checksum).expect("few pointers fit");
                pointers.push((group[0].0, self.write(node)));
            }
        }
        (pointers[0].1, level)
    }

    fn header(&self, owner: u64, level: u8) -> Header {
        let mut header = Header::read_from_bytes(&[0; HEADER_BYTES]).expect("it has its size");
        (header.fsid, header.bytenr, header.generation) =
            (self.made.identity.fsid, self.next.into(), GENERATION.into());
        (header.owner, header.level, header.flags) =
            (owner.into(), level, (flags::WRITTEN | flags::MIXED_BACKREF).into());
        header
    }

    fn write(&mut self, node: Vec<u8>) -> u64 {
        let at = self.next;
        self.next += u64::from(self.made.node_bytes);
        self.written.push((at, node));
        at
    }
}

fn root_item(bytenr: u64, level: u8) -> Vec<u8> {
    let mut root: RootHead = zeroed();
    (root.generation, root.root_dirid) = (GENERATION.into(), objectid::FIRST_FREE.into());
    (root.bytenr, root.level, root.refs) = (bytenr.into(), level, 1.into());
    root.as_bytes().to_vec()
}

fn head(kind: u8, plain_bytes: u64) -> FileExtentHead {
    FileExtentHead {
        generation: GENERATION.into(),
        ram_bytes: plain_bytes.into(),
        compression: 0,
        encryption: 0,
        other_encoding: 0.into(),
        kind,
    }
}

/// An inline part of a file.
pub fn inline(content: &[u8]) -> Vec<u8> {
    [head(kind::INLINE, content.len() as u64).as_bytes(), content].concat()
}

/// A part of a file in an extent of `stored` bytes at a logical address: `bytes` of them from `offset` on.
pub fn regular(logical: u64, stored: u64, offset: u64, bytes: u64) -> Vec<u8> {
    let location = ExtentLocation {
        disk_bytenr: logical.into(),
        disk_num_bytes: stored.into(),
        offset: offset.into(),
        num_bytes: bytes.into(),
    };
    [head(kind::REGULAR, stored).as_bytes(), location.as_bytes()].concat()
}
