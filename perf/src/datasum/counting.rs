//! A device that counts what is written to it: data, superblocks, and the nodes of each tree.
//!
//! Nodes and superblocks are known by their headers, which have the UUID of the filesystem. The data that are written
//! here are noise, which does not have it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use sealblock_block::{Abilities, Device, Geometry, Operation, Outcome, Request, WriteData};
use sealblock_btrfs_format::key::objectid;
use sealblock_btrfs_format::node::Header;
use sealblock_btrfs_format::superblock::MAGIC;
use sealblock_integrity::PiFormat;
use zerocopy::FromBytes;

/// Where a superblock has its magic number. A node has a part of a UUID there.
const MAGIC_OFFSET: usize = 64;

/// What was transferred.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Transferred {
    /// Bytes of data written.
    pub data: u64,
    /// Bytes of superblocks written.
    pub superblocks: u64,
    /// Bytes of nodes written, by the number of the tree that they belong to.
    pub trees: BTreeMap<u64, u64>,
    /// Bytes of tags that a device stores with these blocks.
    pub tags: u64,
    /// Bytes read.
    pub read: u64,
}

impl Transferred {
    /// Bytes of nodes written.
    pub fn nodes(&self) -> u64 {
        self.trees.values().sum()
    }

    /// What came since an earlier time.
    pub fn since(&self, before: &Transferred) -> Transferred {
        let of = |(tree, bytes): (&u64, &u64)| (*tree, bytes - before.trees.get(tree).copied().unwrap_or(0));
        Transferred {
            data: self.data - before.data,
            superblocks: self.superblocks - before.superblocks,
            trees: self.trees.iter().map(of).filter(|(_, bytes)| *bytes > 0).collect(),
            tags: self.tags.saturating_sub(before.tags),
            read: self.read - before.read,
        }
    }
}

/// The counters of a device.
pub struct Counts {
    fsid: [u8; 16],
    node_bytes: usize,
    data: Cell<u64>,
    superblocks: Cell<u64>,
    trees: RefCell<BTreeMap<u64, u64>>,
    tags: Cell<u64>,
    read: Cell<u64>,
}

fn add(counter: &Cell<u64>, bytes: usize) {
    counter.set(counter.get() + bytes as u64);
}

impl Counts {
    /// Of a filesystem with this UUID.
    pub fn new(fsid: [u8; 16], node_bytes: u32) -> Rc<Counts> {
        let (data, superblocks, trees, tags, read) = Default::default();
        Rc::new(Counts { fsid, node_bytes: node_bytes as usize, data, superblocks, trees, tags, read })
    }

    /// What was transferred until now.
    pub fn transferred(&self) -> Transferred {
        Transferred {
            data: self.data.get(),
            superblocks: self.superblocks.get(),
            trees: self.trees.borrow().clone(),
            tags: self.tags.get(),
            read: self.read.get(),
        }
    }

    fn request(&self, request: &Request, geometry: &Geometry) {
        let bytes = (request.blocks() as usize) << geometry.block_size.shift();
        match &request.operation {
            Operation::Write(data) => self.write(data),
            Operation::WriteZeroes { .. } => add(&self.data, bytes),
            Operation::Read(_) => add(&self.read, bytes),
            _ => return,
        }
        if !matches!(request.operation, Operation::Read(_)) {
            add(&self.tags, request.blocks() as usize * geometry.protection.map_or(0, PiFormat::tuple_bytes));
        }
    }

    fn write(&self, data: &WriteData) {
        for slice in data.slices() {
            match self.header_of(slice) {
                None => add(&self.data, slice.len()),
                Some(_) if slice.get(MAGIC_OFFSET..MAGIC_OFFSET + MAGIC.len()) == Some(&MAGIC[..]) => {
                    add(&self.superblocks, slice.len());
                }
                Some(_) => slice.chunks(self.node_bytes).for_each(|node| self.node(node)),
            }
        }
    }

    fn node(&self, node: &[u8]) {
        match self.header_of(node) {
            Some(header) => *self.trees.borrow_mut().entry(header.owner.get()).or_default() += node.len() as u64,
            None => add(&self.data, node.len()),
        }
    }

    fn header_of<'b>(&self, bytes: &'b [u8]) -> Option<&'b Header> {
        let (header, _) = Header::ref_from_prefix(bytes).ok()?;
        (header.fsid == self.fsid).then_some(header)
    }
}

/// The name of a tree in reports.
pub fn tree_name(id: u64) -> &'static str {
    match id {
        objectid::ROOT_TREE => "root",
        objectid::EXTENT_TREE => "extent",
        objectid::CHUNK_TREE => "chunk",
        objectid::DEV_TREE => "device",
        objectid::CSUM_TREE => "checksum",
        objectid::FREE_SPACE_TREE => "free_space",
        objectid::BLOCK_GROUP_TREE => "block_group",
        id if objectid::is_subvolume(id) => "subvolume",
        _ => "other",
    }
}

/// A device whose requests are counted.
pub struct CountingDevice<D> {
    /// The device.
    pub device: D,
    /// The counters.
    pub counts: Rc<Counts>,
}

impl<D: Device> Device for CountingDevice<D> {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.device.abilities()
    }

    fn execute(&self, request: Request) -> impl Future<Output = Outcome> {
        self.counts.request(&request, self.device.geometry());
        self.device.execute(request)
    }

    fn executes_in_place(&self) -> bool {
        self.device.executes_in_place()
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        let outcome = self.device.try_execute(request);
        if outcome.is_some() {
            self.counts.request(request, self.device.geometry());
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use sealblock_block::Durability;
    use sealblock_integrity::{Tags, Unsealed};
    use sealblock_media_memory::MemoryDevice;
    use sealblock_runtime_memory::Slice;
    use sealblock_runtime_reactor::{Config, Reactor};
    use sealblock_units::{BlockSize, Extent};

    use super::*;
    use crate::setup::Protection;

    const FSID: [u8; 16] = *b"this filesystem!";

    /// Two blocks that begin as a node of this tree does, or a superblock.
    fn blocks(fsid: [u8; 16], owner: u64, is_superblock: bool) -> Vec<u8> {
        let mut bytes = vec![7; 8192];
        bytes[32..48].copy_from_slice(&fsid);
        bytes[88..96].copy_from_slice(&owner.to_le_bytes());
        if is_superblock {
            bytes[MAGIC_OFFSET..MAGIC_OFFSET + MAGIC.len()].copy_from_slice(&MAGIC);
        }
        bytes
    }

    #[test]
    fn nodes_superblocks_and_data_are_told_apart() {
        let counts = Counts::new(FSID, 4096);
        let memory = MemoryDevice::new(BlockSize::B4096, 64, Protection::CRC32C.0);
        let device = CountingDevice { device: memory, counts: Rc::clone(&counts) };
        let write = |bytes: &[u8]| {
            let geometry = device.geometry();
            let data = Unsealed::new(Slice::copy_from(bytes), BlockSize::B4096, geometry.protection, Tags::default());
            let request = Request::write(Extent::from_raw(0, 2).unwrap(), data.seal(), Durability::Volatile);
            let reactor = Reactor::new(Config::default()).unwrap();
            reactor.block_on(device.execute(request)).unwrap();
        };
        write(&blocks(FSID, 5, false));
        let before = counts.transferred();
        // Of two nodes that are written together, the other one is of no tree.
        assert_eq!((before.trees[&5], before.data, before.tags), (4096, 4096, 32));
        write(&blocks(FSID, 2, false));
        write(&blocks(FSID, 0, true));
        write(&blocks(*b"another system!!", 5, false));
        let since = counts.transferred().since(&before);
        assert_eq!((since.trees.len(), since.trees[&2], since.superblocks), (1, 4096, 8192));
        assert_eq!((since.data, since.nodes(), since.read), (4096 + 8192, 4096, 0));
    }
}
