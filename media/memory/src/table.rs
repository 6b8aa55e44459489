//! The chunks of a sparse range of bytes, found by their number, without hashing.
//!
//! Invariants: `live` counts the existing chunks; an empty leaf is freed.
//!
//! Two levels: a directory of leaves of neighbouring chunks. Chunks so far out that the directory would have to grow
//! large are in a tree, so that one block at the end of an enormous device costs no more than any other.

use std::collections::BTreeMap;

use sealblock_runtime_memory::Slice;

/// Chunks of a leaf.
const LEAF: usize = 256;
/// The most leaves in the directory, which then has half a MiB.
const NEAR: u64 = 1 << 16;

/// Chunks by number.
#[derive(Default)]
pub(crate) struct Table {
    near: Vec<Option<Box<Leaf>>>,
    far: BTreeMap<u64, Box<Leaf>>,
    live: u64,
}

struct Leaf {
    chunks: [Option<Slice>; LEAF],
    live: usize,
}

impl Leaf {
    fn empty() -> Box<Leaf> {
        Box::new(Leaf { chunks: [const { None }; LEAF], live: 0 })
    }
}

/// The leaf of a chunk, and the chunk's place in it.
fn place(chunk: u64) -> (u64, usize) {
    (chunk / LEAF as u64, (chunk % LEAF as u64) as usize)
}

impl Table {
    /// The number of existing chunks.
    pub(crate) fn live(&self) -> u64 {
        self.live
    }

    /// The chunk, if it exists.
    #[inline]
    pub(crate) fn get(&self, chunk: u64) -> Option<&Slice> {
        let (leaf, within) = place(chunk);
        let leaf = match leaf < NEAR {
            true => self.near.get(leaf as usize)?.as_ref()?,
            false => self.far.get(&leaf)?,
        };
        leaf.chunks[within].as_ref()
    }

    /// Replaces the chunk, or its absence, with the result of `with`.
    pub(crate) fn replace(&mut self, chunk: u64, with: impl FnOnce(Option<Slice>) -> Slice) {
        let (leaf, within) = place(chunk);
        let leaf = match leaf < NEAR {
            true => {
                if self.near.len() <= leaf as usize {
                    self.near.resize_with(leaf as usize + 1, || None);
                }
                self.near[leaf as usize].get_or_insert_with(Leaf::empty)
            }
            false => self.far.entry(leaf).or_insert_with(Leaf::empty),
        };
        let old = leaf.chunks[within].take();
        let is_new = old.is_none();
        leaf.chunks[within] = Some(with(old));
        leaf.live += usize::from(is_new);
        self.live += u64::from(is_new);
    }

    /// Removes the chunk.
    pub(crate) fn remove(&mut self, chunk: u64) -> Option<Slice> {
        let (number, within) = place(chunk);
        let leaf = match number < NEAR {
            true => self.near.get_mut(number as usize)?.as_mut()?,
            false => self.far.get_mut(&number)?,
        };
        let old = leaf.chunks[within].take()?;
        leaf.live -= 1;
        self.live -= 1;
        if leaf.live == 0 {
            match number < NEAR {
                true => self.near[number as usize] = None,
                false => drop(self.far.remove(&number)),
            }
        }
        Some(old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_found_near_and_far_and_their_leaves_are_given_back() {
        let mut table = Table::default();
        let numbers = [0, 255, 256, NEAR * LEAF as u64 - 1, NEAR * LEAF as u64, u64::MAX];
        for (i, &number) in numbers.iter().enumerate() {
            assert!(table.get(number).is_none() && table.remove(number).is_none());
            table.replace(number, |old| {
                assert!(old.is_none());
                Slice::copy_from(&[i as u8])
            });
        }
        for (i, &number) in numbers.iter().enumerate() {
            assert_eq!(table.get(number).map(|chunk| chunk[0]), Some(i as u8));
            table.replace(number, |old| old.expect("it is there"));
        }
        assert_eq!((table.live(), table.far.len()), (6, 2));
        assert!(numbers.iter().all(|&number| table.remove(number).is_some() && table.get(number).is_none()));
        assert!(table.live() == 0 && table.far.is_empty() && table.near.iter().all(Option::is_none));
    }
}
