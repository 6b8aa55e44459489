//! A chain of leaves under random edits, compared with a list of items for each leaf: after every edit, each leaf that
//! it touched has exactly the bytes that `write_leaf` gives for the list.

use super::*;
use crate::checksum::ChecksumType;
use crate::key::ItemType;
use crate::leaf_split::{LeafSplit, balance, merge};
use crate::node::write_leaf;

/// The number of edits, if not the default.
const EDITS: &str = "SEALBLOCK_LEAF_EDITS";

type Items = Vec<(Key, Vec<u8>)>;

fn header() -> Header {
    let mut header = Header::read_from_bytes(&[7; HEADER_BYTES]).unwrap();
    (header.level, header.nritems) = (0, 0.into());
    header
}

fn key(number: u64) -> Key {
    Key::new(number >> 20, ItemType::DIR_ITEM, number & 0xf_ffff)
}

/// Leaves in the order of their keys, and what is in each.
struct Chain {
    random: fastrand::Rng,
    node_bytes: usize,
    leaves: Vec<Vec<u8>>,
    models: Vec<Items>,
    /// Splits into three, splits into two, merges, balances that moved items.
    done: [usize; 4],
}

impl Chain {
    fn new(seed: u64, node_bytes: usize) -> Chain {
        let random = fastrand::Rng::with_seed(seed);
        let mut chain = Chain { random, node_bytes, leaves: Vec::new(), models: vec![Items::new()], done: [0; 4] };
        let leaf = chain.empty_leaf();
        chain.leaves.push(leaf);
        chain
    }

    fn empty_leaf(&self) -> Vec<u8> {
        let mut buffer = vec![0xff; self.node_bytes];
        LeafMut::create(&mut buffer, &header()).unwrap();
        buffer
    }

    fn data(&mut self) -> Vec<u8> {
        let most = self.node_bytes - HEADER_BYTES - ITEM_HEAD_BYTES;
        let size = match self.random.u8(..100) {
            0..10 => 0,
            10..80 => self.random.usize(..200),
            80..98 => self.random.usize(..most / 4),
            _ => most - self.random.usize(..most / 2),
        };
        let byte = self.random.u8(1..);
        vec![byte; size]
    }

    fn insert(&mut self, ascending: bool) {
        // Mostly anywhere; sometimes just behind the last key, as trees grow.
        let last = self.models.last().and_then(|items| items.last()).map(|(key, _)| *key);
        let key = match last.filter(|_| ascending).and_then(Key::next) {
            Some(next) => next,
            None => key(self.random.u64(..1 << 34)),
        };
        let at = self.models.partition_point(|items| items.first().is_some_and(|first| first.0 <= key));
        let (at, data) = (at.saturating_sub(1), self.data());
        let mut leaf = LeafMut::open(&mut self.leaves[at]).unwrap();
        let found = self.models[at].binary_search_by_key(&key, |item| item.0);
        assert_eq!(leaf.search(key), found);
        let Err(slot) = found else { return assert!(leaf.insert(0, key, &data).is_err()) };
        let free = leaf.free_bytes();
        let result = leaf.insert(slot, key, &data);
        if result.is_ok() {
            self.models[at].insert(slot, (key, data));
            return self.assert_same(at..at + 1);
        }
        assert_eq!(result, Err(EditError::Full { needed: ITEM_HEAD_BYTES + data.len(), free }));
        let choice = LeafSplit::choose(&leaf, slot, data.len()).unwrap();
        self.split(at, slot, (key, data), choice);
    }

    fn split(&mut self, at: usize, slot: usize, item: (Key, Vec<u8>), choice: LeafSplit) {
        let mut new = vec![self.empty_leaf(); choice.new_leaves()];
        let mut leaf = LeafMut::open(&mut self.leaves[at]).unwrap();
        let mut open: Vec<_> = new.iter_mut().map(|leaf| LeafMut::open(leaf).unwrap()).collect();
        choice.insert(&mut leaf, &mut open, slot, (item.0, &item.1)).unwrap();
        let sizes: Vec<_> = std::iter::once(&leaf).chain(&open).map(|leaf| leaf.len()).collect();
        assert!(!sizes.contains(&0), "no leaf stays empty");
        let count = sizes.len();
        let mut all = std::mem::take(&mut self.models[at]);
        all.insert(slot, item);
        let lists: Vec<Items> = sizes.iter().map(|size| all.drain(..*size).collect()).collect();
        assert!(all.is_empty());
        self.models.splice(at..=at, lists);
        self.leaves.splice(at + 1..at + 1, new);
        self.done[3 - count] += 1;
        self.assert_same(at..at + count);
    }

    fn change(&mut self, kind: u8) {
        let at = self.random.usize(..self.leaves.len());
        let count = self.models[at].len();
        if count == 0 {
            return;
        }
        let slot = self.random.usize(..count);
        let data = self.data();
        let mut leaf = LeafMut::open(&mut self.leaves[at]).unwrap();
        match kind {
            0 => {
                let end = (slot + 1 + self.random.usize(..8).saturating_sub(4)).min(count);
                leaf.delete(slot..end).unwrap();
                self.models[at].drain(slot..end);
            }
            1 => {
                let old = &mut self.models[at][slot].1;
                let start = if self.random.bool() { 0 } else { self.random.usize(..=old.len()) };
                let ends = [start, old.len(), self.random.usize(start..=old.len())];
                let end = ends[self.random.usize(..3)];
                let free = leaf.free_bytes();
                let result = leaf.splice(slot, start..end, &data);
                if data.len() <= free + (end - start) {
                    result.unwrap();
                    old.splice(start..end, data);
                } else {
                    assert_eq!(result, Err(EditError::Full { needed: data.len() - (end - start), free }));
                }
            }
            _ => {
                let next_leaf = self.models.get(at + 1).map(|items| items[0].0);
                let (old, byte) = (&mut self.models[at][slot], self.random.u8(..));
                let new = old.0.next().unwrap();
                leaf.data_mut(slot).unwrap().fill(byte);
                old.1.fill(byte);
                assert_eq!(leaf.data(slot).unwrap(), old.1);
                // The next item may have that key, here or in the next leaf.
                if next_leaf != Some(new) && leaf.set_key(slot, new).is_ok() {
                    old.0 = new;
                }
            }
        }
        self.assert_same(at..at + 1);
        if self.models[at].is_empty() && self.leaves.len() > 1 {
            self.models.remove(at);
            self.leaves.remove(at);
        }
    }

    fn join(&mut self, is_merge: bool) {
        let at = self.random.usize(..self.leaves.len());
        if at + 1 == self.leaves.len() {
            return;
        }
        let [left, right] = &mut self.leaves[at..at + 2] else { unreachable!() };
        let (mut left, mut right) = (LeafMut::open(left).unwrap(), LeafMut::open(right).unwrap());
        let used = left.used_bytes() + right.used_bytes();
        let mut all: Items = self.models[at..at + 2].iter_mut().flat_map(std::mem::take).collect();
        if is_merge {
            assert_eq!(merge(&mut left, &mut right).is_ok(), used <= left.capacity());
            self.done[2] += usize::from(right.is_empty());
        } else {
            let before = left.used_bytes().abs_diff(right.used_bytes());
            let moved = balance(&mut left, &mut right).unwrap();
            let behind = left.used_bytes().abs_diff(right.used_bytes());
            assert!(if moved { behind < before } else { behind == before });
            self.done[3] += usize::from(moved);
        }
        self.models[at] = all.drain(..left.len()).collect();
        assert_eq!(all.len(), right.len());
        self.models[at + 1] = all;
        self.assert_same(at..at + 2);
        if self.models[at + 1].is_empty() {
            self.models.remove(at + 1);
            self.leaves.remove(at + 1);
        }
    }

    fn assert_same(&mut self, leaves: Range<usize>) {
        for at in leaves {
            let items = self.models[at].iter().map(|(key, data)| (*key, &data[..]));
            let wanted = write_leaf(&header(), items, self.node_bytes as u32, ChecksumType::Crc32c).unwrap();
            // Bytes of the checksum are not the edit's.
            assert!(self.leaves[at][32..] == wanted[32..], "leaf {at} with {} items", self.models[at].len());
        }
    }

    fn run(mut self, edits: usize) {
        for edit in 0..edits {
            // Times of growth and of shrinking take turns.
            let grows = edit / 4096 % 2 == 0;
            match self.random.u8(..20) {
                0..8 if grows => self.insert(edit / 512 % 4 == 0),
                0..4 => self.insert(false),
                4..13 => self.change(0),
                13..17 => self.change(1),
                17 => self.change(2),
                18 => self.join(true),
                _ => self.join(false),
            }
        }
        println!("{} leaves; threes, twos, merges, balances: {:?}", self.leaves.len(), self.done);
        assert!(self.done.iter().all(|count| *count > 0), "{:?}", self.done);
    }
}

#[test]
fn leaves_after_any_edits_have_the_bytes_of_their_items() {
    let edits = std::env::var(EDITS).ok().and_then(|text| text.parse().ok()).unwrap_or(60_000);
    Chain::new(1, 4096).run(edits);
    Chain::new(2, 16_384).run(edits);
}

fn leaf() -> Vec<u8> {
    let items = [(key(10), &b"ten"[..]), (key(20), b""), (key(30), b"thirty")];
    write_leaf(&header(), items, 4096, ChecksumType::Crc32c).unwrap()
}

#[test]
fn what_is_no_packed_leaf_is_refused() {
    let good = leaf();
    LeafMut::open(&mut good.clone()).unwrap();
    let head = |slot: usize| HEADER_BYTES + slot * ITEM_HEAD_BYTES;
    let unpacked = |slot| EditError::Unpacked { slot };
    for (at, value, error) in [
        (100, 1, EditError::Level(1)),
        (head(0) + 17, 0, unpacked(0)),
        (head(0) + 21, 4, unpacked(0)),
        (head(1) + 21, 1, unpacked(1)),
        (head(2) + 20, 0xff, unpacked(2)),
        (head(1), 9, EditError::Order { slot: 2, key: key(30) }),
        (96, 2, unpacked(9)),
    ] {
        let mut bytes = good.clone();
        bytes[at] = value;
        match LeafMut::open(&mut bytes) {
            Err(found) => assert_eq!(found, error, "{at}"),
            // A leaf with fewer items than it had is still one.
            Ok(leaf) => assert_eq!((error, leaf.len()), (unpacked(9), 2)),
        }
    }
    let mut bytes = good.clone();
    bytes[97] = 0xff;
    assert!(matches!(LeafMut::open(&mut bytes), Err(EditError::Shape(_))));
    assert_eq!(LeafMut::open(&mut bytes[..100]).err(), Some(EditError::NodeBytes(100)));
    assert_eq!(LeafMut::open(&mut vec![0; 65_537]).err(), Some(EditError::NodeBytes(65_537)));
    let inner = Header { level: 1, ..header() };
    assert_eq!(LeafMut::create(&mut bytes, &inner).err(), Some(EditError::Level(1)));
}

#[test]
fn an_edit_that_fails_changes_nothing() {
    let (good, mut bytes, mut other) = (leaf(), leaf(), leaf());
    let mut leaf = LeafMut::open(&mut bytes).unwrap();
    let backwards = Range { start: 2, end: 1 };
    assert!(leaf.insert(4, key(40), b"").is_err());
    assert!(leaf.insert(1, key(20), b"").is_err() && leaf.insert(1, key(10), b"").is_err());
    assert!(leaf.insert(3, key(40), &[1; 4096]).is_err());
    assert!(leaf.delete(2..4).is_err() && leaf.delete(backwards.clone()).is_err());
    assert!(leaf.splice(3, 0..0, b"x").is_err() && leaf.splice(0, 2..4, b"x").is_err());
    assert!(leaf.splice(0, backwards, b"x").is_err() && leaf.splice(0, 0..3, &[1; 4000]).is_err());
    assert!(leaf.set_key(0, key(20)).is_err() && leaf.set_key(1, key(30)).is_err() && leaf.set_key(3, key(9)).is_err());
    let mut other = LeafMut::open(&mut other).unwrap();
    assert!(leaf.shift_right(&mut other, 1).is_err() && leaf.shift_left(&mut other, 1).is_err());
    let mut larger = vec![0; 8192];
    let mut larger = LeafMut::create(&mut larger, &header()).unwrap();
    assert_eq!(leaf.shift_right(&mut larger, 1), Err(EditError::Siblings));
    assert_eq!(bytes, good);
}

#[test]
fn bytes_that_another_program_left_between_heads_and_data_can_be_removed() {
    let (good, mut bytes) = (leaf(), leaf());
    bytes[2000] = 1;
    let mut leaf = LeafMut::open(&mut bytes).unwrap();
    leaf.zero_gap();
    leaf.set_header(&Header { level: 3, ..header() });
    assert_eq!((leaf.len(), leaf.header().level), (3, 0));
    assert!(bytes[32..] == good[32..], "only the checksum is another one");
}
