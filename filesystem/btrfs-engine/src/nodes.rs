//! The nodes in memory: dirty ones, which the open transaction made; frozen ones, which are being written; and clean
//! ones, which were read or written and may go at any time.
//!
//! Invariants:
//! - An address has one node in memory. A node is looked for among the dirty ones first, then the frozen, then the clean.
//! - Dirty and frozen nodes stay. A clean node stays while an operation holds it ([`Nodes::pin`]), so whoever reads a node
//!   that an operation needs, and tries the operation again, finds it and every other that it read before.
//! - A clean node passed the checker when it was read. Whether it is the node that a parent names is checked at each use.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};

use sealblock_runtime_memory::{Buffer, Slice};

use crate::tree::NodeSource;

/// The minimum number of clean nodes, if there are as many: more than an operation needs.
const MIN_CLEAN: usize = 256;

struct Clean {
    bytes: Slice,
    /// True if it was used since the last look for nodes to drop.
    is_used: std::cell::Cell<bool>,
    /// The operations that hold it.
    pins: u32,
}

/// Something of nodes by their addresses. Each look-up of an item looks for some nodes.
type ByAddress<T> = HashMap<u64, T, AddressHashes>;

/// Makes hashes of addresses. The seed keeps a filesystem from having addresses whose hashes are equal.
#[derive(Clone)]
struct AddressHashes(u64);

impl Default for AddressHashes {
    fn default() -> AddressHashes {
        AddressHashes(RandomState::new().hash_one(0_u64))
    }
}

impl BuildHasher for AddressHashes {
    type Hasher = AddressHasher;

    fn build_hasher(&self) -> AddressHasher {
        AddressHasher(self.0)
    }
}

/// The hash of an address.
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, address: u64) {
        // 2^64 divided by the golden ratio. The high half of the product has all bits of the address in it.
        let product = u128::from(self.0 ^ address) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Nodes by their addresses.
pub struct Nodes {
    node_bytes: u32,
    dirty: ByAddress<Buffer>,
    frozen: ByAddress<Slice>,
    clean: ByAddress<Clean>,
    /// The clean nodes in the order in which they are looked at for dropping. May have addresses that are gone.
    order: VecDeque<u64>,
    most_clean: usize,
}

impl NodeSource for Nodes {
    fn get(&self, bytenr: u64) -> Option<&[u8]> {
        if let Some(bytes) = self.dirty.get(&bytenr) {
            return Some(bytes);
        }
        if let Some(bytes) = self.frozen.get(&bytenr) {
            return Some(bytes);
        }
        let clean = self.clean.get(&bytenr)?;
        clean.is_used.set(true);
        Some(&clean.bytes)
    }

    fn is_clean(&self, bytenr: u64) -> bool {
        !self.dirty.contains_key(&bytenr) && !self.frozen.contains_key(&bytenr)
    }
}

impl Nodes {
    /// No nodes; of clean ones there are `cache_bytes` at most, and at least 256.
    pub fn new(node_bytes: u32, cache_bytes: usize) -> Nodes {
        let most_clean = (cache_bytes / node_bytes.max(1) as usize).max(MIN_CLEAN);
        let (dirty, frozen, clean, order) = Default::default();
        Nodes { node_bytes, dirty, frozen, clean, order, most_clean }
    }

    /// Bytes of a node.
    pub fn node_bytes(&self) -> u32 {
        self.node_bytes
    }

    /// True if the open transaction made the node.
    pub fn is_dirty(&self, bytenr: u64) -> bool {
        self.dirty.contains_key(&bytenr)
    }

    /// The bytes of a dirty node, to be changed.
    pub fn get_mut(&mut self, bytenr: u64) -> Option<&mut [u8]> {
        self.dirty.get_mut(&bytenr).map(|bytes| &mut bytes[..])
    }

    /// Takes a dirty node out.
    pub fn take(&mut self, bytenr: u64) -> Option<Buffer> {
        self.dirty.remove(&bytenr)
    }

    /// Puts a dirty node in. What was at its address is gone.
    pub fn put(&mut self, bytenr: u64, bytes: Buffer) {
        debug_assert!(!self.frozen.contains_key(&bytenr), "{bytenr} is being written");
        self.clean.remove(&bytenr);
        self.dirty.insert(bytenr, bytes);
    }

    /// Forgets a node that no tree has any more. A frozen one is still written.
    pub fn forget(&mut self, bytenr: u64) {
        self.dirty.remove(&bytenr);
    }

    /// Puts a node in that was read, and holds it for the operation that needs it. [`Nodes::unpin`] lets it go.
    pub fn pin(&mut self, bytenr: u64, bytes: Slice) {
        if self.dirty.contains_key(&bytenr) || self.frozen.contains_key(&bytenr) {
            return;
        }
        let is_used = std::cell::Cell::new(true);
        let clean = self.clean.entry(bytenr).or_insert(Clean { bytes: Slice::empty(), is_used, pins: 0 });
        // A node that was read later replaces one that a parent did not name.
        clean.bytes = bytes;
        clean.pins += 1;
        self.order.push_back(bytenr);
        self.drop_some();
    }

    /// An operation ends that held these nodes.
    pub fn unpin(&mut self, bytenrs: &[u64]) {
        for bytenr in bytenrs {
            if let Some(clean) = self.clean.get_mut(bytenr) {
                clean.pins = clean.pins.saturating_sub(1);
            }
        }
    }

    /// The number of dirty nodes.
    pub fn dirty_count(&self) -> usize {
        self.dirty.len()
    }

    /// Makes all dirty nodes frozen, after `finish` completed each. Returns them by rising addresses, to be written.
    ///
    /// # Errors
    /// That of `finish`. The transaction must not be committed then.
    pub fn freeze<E>(
        &mut self,
        mut finish: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<Vec<(u64, Slice)>, E> {
        debug_assert!(self.frozen.is_empty(), "one transaction is written at a time");
        let mut frozen = Vec::with_capacity(self.dirty.len());
        for (bytenr, mut bytes) in std::mem::take(&mut self.dirty) {
            finish(bytenr, &mut bytes)?;
            frozen.push((bytenr, bytes.freeze()));
        }
        frozen.sort_unstable_by_key(|(bytenr, _)| *bytenr);
        self.frozen.extend(frozen.iter().cloned());
        Ok(frozen)
    }

    /// The frozen nodes were written: they are clean.
    pub fn thaw(&mut self) {
        for (bytenr, bytes) in std::mem::take(&mut self.frozen) {
            // A node of the next transaction cannot have the address: what it freed is not free yet.
            let is_used = std::cell::Cell::new(true);
            self.clean.insert(bytenr, Clean { bytes, is_used, pins: 0 });
            self.order.push_back(bytenr);
        }
        self.drop_some();
    }

    /// Drops clean nodes that were not used lately, until there are few enough.
    fn drop_some(&mut self) {
        let mut looks = 2 * self.order.len();
        while self.clean.len() > self.most_clean && looks > 0 {
            looks -= 1;
            let Some(bytenr) = self.order.pop_front() else { return };
            let Some(clean) = self.clean.get(&bytenr) else { continue };
            if clean.pins > 0 || clean.is_used.replace(false) {
                self.order.push_back(bytenr);
            } else {
                self.clean.remove(&bytenr);
            }
        }
        // Addresses that are gone, and those that are there twice, must not pile up.
        if self.order.len() > 4 * self.most_clean {
            let mut seen = std::collections::HashSet::new();
            let clean = &self.clean;
            self.order.retain(|bytenr| clean.contains_key(bytenr) && seen.insert(*bytenr));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(value: u8) -> Slice {
        Slice::copy_from(&[value; 64])
    }

    #[test]
    fn clean_nodes_go_when_they_are_too_many_and_pinned_ones_stay() {
        let mut nodes = Nodes::new(64, 0);
        nodes.pin(1, slice(1));
        let held: Vec<u64> = (1000..1100).collect();
        held.iter().for_each(|bytenr| nodes.pin(*bytenr, slice(2)));
        for bytenr in 2000..9000 {
            nodes.pin(bytenr, slice(3));
            nodes.unpin(&[bytenr]);
            assert!(nodes.get(1).is_some() && nodes.get(1050).is_some());
            assert!(nodes.clean.len() <= MIN_CLEAN + 1 && nodes.order.len() <= 4 * MIN_CLEAN + 1);
        }
        nodes.unpin(&held);
        nodes.unpin(&[1]);
        for bytenr in 10_000..11_000 {
            nodes.pin(bytenr, slice(4));
            nodes.unpin(&[bytenr]);
        }
        assert!(nodes.get(1050).is_none() && nodes.get(1).is_none());
        assert!(nodes.get(10_999).is_some());
    }

    #[test]
    fn a_node_is_dirty_then_frozen_then_clean() {
        let mut nodes = Nodes::new(64, 0);
        nodes.pin(7, slice(1));
        nodes.unpin(&[7]);
        nodes.put(7, Buffer::copy_from(&[2; 64]));
        assert_eq!((nodes.get(7).map(|bytes| bytes[0]), nodes.is_dirty(7)), (Some(2), true));
        nodes.pin(7, slice(1));
        assert_eq!(nodes.get(7).map(|bytes| bytes[0]), Some(2), "what is read later does not replace a dirty node");
        let frozen = nodes.freeze(|_, bytes| {
            bytes[0] = 3;
            Ok::<(), ()>(())
        });
        assert_eq!(frozen.map(|all| all.len()), Ok(1));
        assert_eq!((nodes.get(7).map(|bytes| bytes[0]), nodes.is_dirty(7)), (Some(3), false));
        assert!(nodes.get_mut(7).is_none());
        nodes.thaw();
        assert_eq!(nodes.get(7).map(|bytes| bytes[0]), Some(3));
        nodes.put(8, Buffer::copy_from(&[4; 64]));
        nodes.forget(8);
        assert!(nodes.get(8).is_none() && nodes.dirty_count() == 0);
    }
}
