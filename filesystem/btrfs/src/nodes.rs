//! Nodes in memory: each is read and checked once, and cached while there is room.
//!
//! Invariants:
//! - A returned node passed the checker, and is the one that its parent, its root item or the superblock names.
//! - The size of the cache is limited ([`NodeCache::new`]); nodes in use stay in memory after they leave it, at most
//!   eight for each cursor.

use std::cell::{Cell, RefCell};
use std::num::NonZeroUsize;
use std::rc::Rc;

use futures_util::future::join_all;
use lru::LruCache;
use sealblock_btrfs_format::Key;
use sealblock_btrfs_format::checker::{Expected, check_identity, check_node};
use sealblock_btrfs_format::node::Node;
use sealblock_runtime_memory::Slice;

use crate::devices::DeviceSet;
use crate::error::{BadCopy, CopyFault, FsError};
use crate::replicas::{NodeWritten, Storage};

/// The default size of the cache in bytes.
pub const DEFAULT_CACHE_BYTES: usize = 64 << 20;

/// A node that passed the checker.
pub struct LoadedNode {
    bytes: Slice,
}

impl LoadedNode {
    /// Its bytes.
    pub(crate) fn bytes(&self) -> &Slice {
        &self.bytes
    }

    /// Its decoded form.
    pub fn view(&self) -> Node<'_> {
        Node::decode(&self.bytes).expect("it was decoded when it was checked")
    }

    /// Checks that it ends before the next node of its tree begins.
    pub(crate) fn check_end(&self, before: Option<Key>) -> Result<(), FsError> {
        let view = self.view();
        match (view.last_key(), before) {
            (Some(key), Some(before)) if key >= before => {
                Err(FsError::KeyOrder { bytenr: view.header().bytenr.get(), key, before })
            }
            _ => Ok(()),
        }
    }

    /// The expectation for the child of a pointer, in the tree `owner`.
    pub fn child(&self, slot: usize, owner: u64) -> Option<Expected> {
        Expected::of_child(&self.view(), slot, owner)
    }
}

/// The result of reading every copy of a node.
pub struct NodeCopies {
    /// The node, from the first copy that passed, or restored from parity; `None` if it is lost.
    pub node: Option<Rc<LoadedNode>>,
    /// Copies that did not pass.
    pub bad: Vec<BadCopy>,
    /// The number of copies.
    pub count: usize,
    /// The copies that passed and are without proof: they have no checksum, their device has no tags, and no copy with
    /// proof is equal to them.
    pub unproven: usize,
}

/// Storage, and a cache of its nodes.
pub struct NodeCache {
    storage: Storage,
    nodes: RefCell<LruCache<u64, Rc<LoadedNode>>>,
    bad_copies: RefCell<Vec<BadCopy>>,
    read_nodes: Cell<u64>,
}

/// The minimum number of cached nodes.
const MIN_NODES: usize = 64;
/// The maximum number of damaged copies that are remembered until a caller takes them.
const MAX_BAD_COPIES: usize = 10_000;

impl NodeCache {
    /// A cache of at most `cache_bytes` of nodes, and at least 64 nodes: more than a cursor reads at once.
    pub fn new(storage: Storage, cache_bytes: usize) -> NodeCache {
        let most = cache_bytes / storage.geometry().node_bytes as usize;
        let most = NonZeroUsize::new(most.max(MIN_NODES)).expect("it is not 0");
        NodeCache {
            storage,
            nodes: RefCell::new(LruCache::new(most)),
            bad_copies: RefCell::default(),
            read_nodes: Cell::new(0),
        }
    }

    /// The source of the nodes.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The same devices with an empty cache.
    pub(crate) fn into_devices(self) -> Rc<DeviceSet> {
        self.storage.devices
    }

    /// The number of nodes that were read.
    pub fn read_nodes(&self) -> u64 {
        self.read_nodes.get()
    }

    /// True if a node is in the cache.
    pub fn has(&self, bytenr: u64) -> bool {
        self.nodes.borrow().contains(&bytenr)
    }

    /// Damaged copies since the last call, whose other copies were good. If there are very many, only some of them are
    /// returned.
    pub fn take_bad_copies(&self) -> Vec<BadCopy> {
        std::mem::take(&mut self.bad_copies.borrow_mut())
    }

    /// The expected node.
    ///
    /// # Errors
    /// If no copy of it passes the checker.
    pub async fn load(&self, expected: &Expected) -> Result<Rc<LoadedNode>, FsError> {
        let geometry = self.storage.geometry();
        let kept = self.nodes.borrow_mut().get(&expected.bytenr).map(Rc::clone);
        if let Some(node) = kept {
            let wrong = match check_identity(&node.view(), geometry, expected) {
                Ok(()) => return Ok(node),
                Err(refusal) => CopyFault::Node(refusal),
            };
            // This valid copy is not the expected node, but another copy may be.
            tracing::debug!(bytenr = expected.bytenr, %wrong, "a node that is kept is not the one that is expected");
        }
        let check = |bytes: &[u8]| check_node(bytes, geometry, expected).map(drop).map_err(CopyFault::Node);
        let node = (expected.bytenr, NodeWritten::In(expected.generation));
        let read = self.storage.read_whole(node, check).await?;
        self.read_nodes.set(self.read_nodes.get() + 1);
        self.remember(read.bad);
        let node = Rc::new(LoadedNode { bytes: read.data });
        self.nodes.borrow_mut().put(expected.bytenr, Rc::clone(&node));
        Ok(node)
    }

    pub(crate) fn remember(&self, bad: Vec<BadCopy>) {
        let mut all = self.bad_copies.borrow_mut();
        let room = MAX_BAD_COPIES - all.len();
        all.extend(bad.into_iter().take(room));
    }

    /// Reads every copy of a node, concurrently. If valid copies differ, the first one is used and the others are bad; one
    /// without proof is used only if none has it.
    /// A node restored from parity is not a copy; restoring is tried only if no copy passes.
    ///
    /// # Errors
    /// If the node has no place.
    pub async fn read_copies(&self, expected: &Expected) -> Result<NodeCopies, FsError> {
        let geometry = self.storage.geometry();
        let pieces = self.storage.pieces(expected.bytenr, u64::from(geometry.node_bytes))?;
        let (_, first) = &pieces[0];
        let pieces_of = &pieces;
        let read = |mirror| async move {
            let read = self.storage.read_node(pieces_of, mirror, NodeWritten::In(expected.generation)).await;
            let read = read.and_then(|read| {
                check_node(&read.0, geometry, expected).map(drop).map_err(CopyFault::Node)?;
                Ok(read)
            });
            (mirror, read)
        };
        let (mut node, mut bad): (Option<(usize, Rc<LoadedNode>)>, _) = (None, Vec::new());
        let (mut unproven, mut is_proven) = (0, false);
        let mut copies = join_all((0..first.copies.len()).map(read)).await;
        copies.sort_by_key(|(_, read)| matches!(read, Ok((_, false))));
        for (mirror, read) in copies {
            let fault = match (read, &node) {
                (Ok((bytes, is_attested)), None) => {
                    node = Some((mirror, Rc::new(LoadedNode { bytes })));
                    is_proven = is_attested;
                    unproven += usize::from(!is_proven);
                    continue;
                }
                (Ok((bytes, _)), Some((_, node))) if bytes[..] == node.bytes[..] => {
                    unproven += usize::from(!is_proven);
                    continue;
                }
                (Ok(_), Some((other, _))) => CopyFault::Differs(other + 1),
                (Err(fault), _) => fault,
            };
            bad.push(self.storage.bad_copy(expected.bytenr, first, mirror, fault));
        }
        let mut node = node.map(|(_, node)| node);
        self.read_nodes.set(self.read_nodes.get() + 1);
        match &node {
            Some(node) => drop(self.nodes.borrow_mut().put(expected.bytenr, Rc::clone(node))),
            None if first.row.is_some() => node = self.load(expected).await.ok(),
            None => {}
        }
        Ok(NodeCopies { node, bad, count: first.copies.len(), unproven })
    }
}
