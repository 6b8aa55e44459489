//! Damaged copies of nodes, of which another copy was good when it was read, are written anew with the next commit.
//!
//! Invariant: what is written is at its place as long as it is being written. A node that the last durable transaction
//! has may be freed by the open one, but its place is free only after the next commit. So only what was read since the
//! last commit is written, and before what is durable then counts as such. What was read before may lie elsewhere now, and
//! is found again when it is read again.

use std::cell::RefCell;
use std::collections::BTreeMap;

use sealblock_btrfs::replicas::{Storage, Verified};
use sealblock_btrfs::{BadCopy, CopyFault};
use sealblock_runtime_memory::Slice;

/// The maximum number of nodes that are kept for it: 16 MiB with nodes of 64 KiB.
const MAX_NODES: usize = 256;

/// Nodes with damaged copies, by their addresses.
#[derive(Default)]
pub(crate) struct DamagedNodes(RefCell<BTreeMap<u64, Damaged>>);

struct Damaged {
    node: Slice,
    copies: Vec<BadCopy>,
    /// The last durable transaction when it was read.
    durable: u64,
}

impl DamagedNodes {
    /// Remembers the damaged copies of a good node that was read while this transaction was the last durable one.
    pub fn add(&self, bytenr: u64, Verified { data: node, bad, .. }: &Verified, durable: u64) {
        let is_damaged = |copy: &&BadCopy| {
            use CopyFault::{Checksum, Node, Tag, Unreadable};
            matches!(copy.fault, Node(_) | Checksum(_) | Tag(_) | Unreadable(_))
        };
        let copies: Vec<BadCopy> = bad.iter().filter(is_damaged).cloned().collect();
        let mut all = self.0.borrow_mut();
        if !copies.is_empty() && all.len() < MAX_NODES {
            all.insert(bytenr, Damaged { node: node.clone(), copies, durable });
        }
    }

    /// True if there are any.
    pub fn is_any(&self) -> bool {
        !self.0.borrow().is_empty()
    }

    /// Writes the damaged copies anew, except those on devices that have failed. To be called by a commit, before its
    /// transaction counts as durable: `durable` is the one before. A copy that cannot be written stays as it is.
    pub async fn write(&self, storage: &Storage, durable: u64, has_failed: impl Fn(u64) -> bool) {
        let nodes = self.0.take();
        for (bytenr, Damaged { node, copies, .. }) in nodes.into_iter().filter(|(_, one)| one.durable == durable) {
            let Ok(located) = storage.map.locate(bytenr, node.len() as u64) else { continue };
            // A node in several pieces has more places than are known of its copies.
            let is_there = |copy: &&BadCopy| located.bytes == node.len() as u64 && located.copies.contains(&copy.place);
            for copy in copies.iter().filter(is_there).filter(|copy| !has_failed(copy.place.devid)) {
                match storage.devices.write_tagged(copy.place, node.clone(), storage.node_tag(&node)).await {
                    Ok(()) => tracing::info!(%copy, "a damaged copy of a node was written anew"),
                    Err(fault) => tracing::warn!(%copy, %fault, "a damaged copy of a node cannot be written anew"),
                }
            }
        }
    }
}
