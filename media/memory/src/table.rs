//! The chunks of a store, found by their number without hashing and without a lock of the whole.
//!
//! Invariants: a leaf or node that was made stays where it is until the table is dropped, so a reference to a chunk's
//! lock needs no count. A chunk has a cache line of its own, so cores that lock neighbours do not disturb each other.
//!
//! A tree whose depth depends on the number of chunks: up to 32 GiB of chunks of 128 KiB have one node above the
//! leaves. Only what leads to chunks that were written is made, so one block at the end of an enormous device costs
//! hardly more than any other.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::chunk::Chunk;

/// The power of two of the chunks of a leaf.
const LEAF_SHIFT: u32 = 8;
/// The power of two of the branches of a node.
const NODE_SHIFT: u32 = 10;

/// See the module's header.
pub(crate) struct Table {
    root: Node,
    /// The power of two of the leaves below a branch of the root.
    root_shift: u32,
}

type Node = Box<[OnceLock<Branch>]>;

enum Branch {
    Node(Node),
    Leaf(Box<Leaf>),
}

type Leaf = [Place; 1 << LEAF_SHIFT];

/// A chunk behind its lock.
#[derive(Default)]
#[repr(align(64))]
struct Place(Mutex<Chunk>);

const _: () = assert!(size_of::<Place>() == 64, "512 KiB for each GiB of data");

impl Place {
    fn lock(&self) -> MutexGuard<'_, Chunk> {
        // A chunk is whole whenever its lock is free: what could panic in between would be a bug of ours, and has
        // ended the request already.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A node of this many branches that lead nowhere.
fn node(branches: u64) -> Node {
    std::iter::repeat_with(OnceLock::new).take(branches as usize).collect()
}

fn leaf() -> Branch {
    let places: Box<[Place]> = std::iter::repeat_with(Place::default).take(1 << LEAF_SHIFT).collect();
    Branch::Leaf(places.try_into().unwrap_or_else(|_| unreachable!("as many places as a leaf has")))
}

impl Table {
    /// Without chunks, for chunks below this number.
    pub(crate) fn new(chunks: u64) -> Table {
        let leaves = chunks.div_ceil(1 << LEAF_SHIFT).max(1);
        let mut root_shift = 0;
        while leaves.div_ceil(1 << root_shift) > 1 << NODE_SHIFT {
            root_shift += NODE_SHIFT;
        }
        Table { root: node(leaves.div_ceil(1 << root_shift)), root_shift }
    }

    /// A chunk that may have something, locked; `None` if nothing near it was ever written.
    #[inline]
    pub(crate) fn get(&self, chunk: u64) -> Option<MutexGuard<'_, Chunk>> {
        let (leaf, within) = (chunk >> LEAF_SHIFT, (chunk & ((1 << LEAF_SHIFT) - 1)) as usize);
        let (mut node, mut shift) = (&self.root, self.root_shift);
        let mut branch = usize::try_from(leaf >> shift).ok()?;
        loop {
            match node.get(branch)?.get()? {
                Branch::Leaf(places) => return Some(places[within].lock()),
                Branch::Node(below) => {
                    (node, shift) = (below, shift - NODE_SHIFT);
                    branch = (leaf >> shift & ((1 << NODE_SHIFT) - 1)) as usize;
                }
            }
        }
    }

    /// A chunk, locked, whose place is made if it is missing.
    ///
    /// # Panics
    /// If the chunk is not below the table's number: a bug of the caller.
    #[inline]
    pub(crate) fn get_or_make(&self, chunk: u64) -> MutexGuard<'_, Chunk> {
        if let Some(found) = self.get(chunk) {
            return found;
        }
        self.make(chunk);
        self.get(chunk).expect("it was made")
    }

    #[cold]
    fn make(&self, chunk: u64) {
        let leaf_number = chunk >> LEAF_SHIFT;
        let (mut below, mut shift) = (&self.root, self.root_shift);
        let mut branch = (leaf_number >> shift) as usize;
        loop {
            let make = || if shift == 0 { leaf() } else { Branch::Node(node(1 << NODE_SHIFT)) };
            let Branch::Node(next) = below[branch].get_or_init(make) else { return };
            (below, shift) = (next, shift - NODE_SHIFT);
            branch = (leaf_number >> shift & ((1 << NODE_SHIFT) - 1)) as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_runtime_memory::Buffer;

    #[test]
    fn chunks_are_found_near_and_far() {
        for count in [1, 256, 257, 1 << 18, (1 << 18) + 1, 1 << 30, u64::MAX >> 16] {
            let table = Table::new(count);
            let numbers = [0, 1, 255, 256, 1 << 18, 1 << 28, count / 2, count - 1];
            let mut numbers: Vec<u64> = numbers.into_iter().filter(|number| *number < count).collect();
            numbers.sort_unstable();
            numbers.dedup();
            assert!(numbers.iter().all(|&number| table.get(number).is_none()));
            for (i, &number) in numbers.iter().enumerate() {
                *table.get_or_make(number) = Chunk::written(Buffer::copy_from(&[i as u8]));
            }
            for (i, &number) in numbers.iter().enumerate() {
                assert_eq!(table.get(number).unwrap().data().map(|data| data[0]), Some(i as u8), "{number} of {count}");
            }
        }
    }

    #[test]
    fn what_is_beyond_the_end_is_missing() {
        let table = Table::new(1 << 10);
        table.make(1023);
        assert!(table.get(1023).is_some() && table.get(1024).is_none() && table.get(u64::MAX).is_none());
    }

    #[test]
    fn two_threads_make_one_leaf() {
        for _ in 0..50 {
            let table = Table::new(1 << 20);
            std::thread::scope(|scope| {
                for number in 0..2 {
                    let table = &table;
                    scope.spawn(move || *table.get_or_make(number) = Chunk::written(Buffer::zeroed(1)));
                }
            });
            assert!((0..2).all(|number| table.get(number).unwrap().data().is_some()));
        }
    }
}
