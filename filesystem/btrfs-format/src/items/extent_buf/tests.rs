//! Items of the kernel come back; and random references, added and dropped, are where the rules put them and are counted
//! like a multiset of them.

use std::collections::{BTreeMap, HashMap};

use super::*;
use crate::captured;

const BYTENR: u64 = 13 << 20;

fn no_keyed() -> KeyedRefs {
    KeyedRefs::default()
}

#[test]
fn items_of_the_kernel_come_back() {
    let mut seen = 0;
    for item in captured::all() {
        if matches!(item.key.item_type, ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM) {
            let extent = ExtentItemBuf::decode(item.key.item_type, &item.data).unwrap();
            assert_eq!((extent.encode(), extent.encoded_bytes()), (item.data.clone(), item.data.len()));
            assert_eq!(extent.inline().iter().map(|one| u64::from(one.1)).sum::<u64>(), extent.refs());
            // The same references, added in any order, make the same item.
            let mut again = ExtentItemBuf::new(extent.generation, extent.flags, extent.tree_block);
            for (what, count) in extent.inline().iter().rev() {
                assert_eq!(again.add(*what, *count, no_keyed(), 16_384), Ok(RefChange::Inline));
            }
            assert_eq!(again, extent);
            seen += 1;
        }
        if let Some((what, count)) = decode_keyed(item.key, &item.data).unwrap() {
            assert_eq!((what.key(item.key.objectid), keyed_data(what, count)), (item.key, item.data));
            seen += 1;
        }
    }
    assert_eq!(seen, 7);
}

/// Two files whose references have the same hash.
fn same_hash() -> [ExtentRef; 2] {
    let (mut random, mut seen) = (fastrand::Rng::with_seed(1), HashMap::new());
    // About a hundred thousand numbers of more than 32 bits are enough for one CRC twice.
    let mut file = || ExtentRef::Data { root: 5, objectid: random.u64(..), offset: 0 };
    (0..1 << 20)
        .find_map(|_| {
            let this = file();
            Some([seen.insert(this.sequence(), this)?, this])
        })
        .expect("a CRC of 32 bits repeats soon")
}

/// An extent as the extent tree has it.
struct Disk {
    node_bytes: u32,
    item: Vec<u8>,
    keyed: BTreeMap<Key, Vec<u8>>,
}

impl Disk {
    fn place(&self, what: ExtentRef) -> KeyedPlace {
        let items = self.keyed.range(what.key(BYTENR)..).map(|(key, data)| (*key, &data[..]));
        find_keyed(what, BYTENR, items).unwrap()
    }

    fn change(&mut self, what: ExtentRef, count: u32, is_add: bool) -> Result<(), ExtentRefError> {
        let mut extent = ExtentItemBuf::decode(ItemType::EXTENT_ITEM, &self.item).unwrap();
        let place = self.place(what);
        let (key, found) = match place {
            KeyedPlace::Found(key, count) => (key, Some(count)),
            KeyedPlace::Free(key) => (key, None),
        };
        let keyed = KeyedRefs { found, any: !self.keyed.is_empty() };
        let change = match is_add {
            true => extent.add(what, count, keyed, self.node_bytes)?,
            false => extent.drop(what, count, found)?,
        };
        match change {
            RefChange::Inline => {}
            RefChange::Keyed(0) => drop(self.keyed.remove(&key).expect("it was found")),
            RefChange::Keyed(count) => drop(self.keyed.insert(key, keyed_data(what, count))),
        }
        self.item = extent.encode();
        Ok(())
    }

    fn assert_is(&self, model: &HashMap<ExtentRef, u32>) {
        let extent = ExtentItemBuf::decode(ItemType::EXTENT_ITEM, &self.item).unwrap();
        let mut all: HashMap<ExtentRef, u32> = extent.inline().iter().copied().collect();
        assert_eq!(all.len(), extent.inline().len());
        assert!(extent.inline().is_sorted_by_key(|one| one.0.order()));
        assert!(extent.encoded_bytes() == self.item.len() && self.item.len() < inline_limit(self.node_bytes));
        for (key, data) in &self.keyed {
            let (what, count) = decode_keyed(*key, data).unwrap().unwrap();
            assert_eq!(all.insert(what, count), None, "nothing is both behind the item and in its own");
        }
        assert_eq!(&all, model);
        assert_eq!(extent.refs(), model.values().map(|count| u64::from(*count)).sum::<u64>());
    }
}

fn random_changes(seed: u64, node_bytes: u32, is_node: bool, changes: usize) {
    let mut random = fastrand::Rng::with_seed(seed);
    let flags = if is_node { ExtentFlags::TREE_BLOCK } else { ExtentFlags::DATA };
    let tree_block = is_node.then(|| TreeBlockInfo::new(Key::MIN, 1));
    let item = ExtentItemBuf::new(7, flags, tree_block).encode();
    let mut disk = Disk { node_bytes, item, keyed: BTreeMap::new() };
    let (mut model, mut most_keyed, mut frees) = (HashMap::new(), 0, 0);
    let twins = same_hash();
    for round in 0..changes {
        let what = match (is_node, random.bool()) {
            (true, true) => ExtentRef::TreeBlock { root: 256 + random.u64(..200) },
            (true, false) => ExtentRef::SharedBlock { parent: random.u64(1..200) << 14 },
            (false, _) if random.u8(..8) == 0 => twins[random.usize(..2)],
            (false, true) => ExtentRef::Data {
                root: 256 + random.u64(..4),
                objectid: 257 + random.u64(..16),
                offset: random.u64(..4).wrapping_sub(1) << 12,
            },
            (false, false) => ExtentRef::SharedData { parent: random.u64(1..200) << 14 },
        };
        let count = if is_node { 1 } else { random.u32(1..4) };
        let old = model.get(&what).copied().unwrap_or(0);
        // Growing and shrinking take turns, down to no reference.
        if random.u8(..10) < if round / 1000 % 2 == 0 { 7 } else { 1 } {
            let result = disk.change(what, count, true);
            if is_node && old == 1 {
                assert_eq!(result, Err(ExtentRefError::Overflow { what, count: 1, add: 1 }));
            } else {
                result.unwrap();
                model.insert(what, old + count);
            }
        } else {
            let result = disk.change(what, count, false);
            if old < count {
                let (count, drop) = (u64::from(old), u64::from(count));
                assert_eq!(result, Err(ExtentRefError::Underflow { what, count, drop }));
            } else {
                result.unwrap();
                model.insert(what, old - count);
                model.retain(|_, count| *count > 0);
            }
        }
        disk.assert_is(&model);
        (most_keyed, frees) = (disk.keyed.len().max(most_keyed), frees + usize::from(model.is_empty()));
    }
    // What is left goes, one by one.
    for (what, count) in std::mem::take(&mut model) {
        disk.change(what, count, false).unwrap();
    }
    disk.assert_is(&model);
    println!("{node_bytes}: at most {most_keyed} with keys, free {frees} times");
    assert!(most_keyed > 10);
}

#[test]
fn references_are_counted_like_a_multiset_wherever_they_are() {
    random_changes(1, 4096, false, 20_000);
    random_changes(2, 16_384, false, 10_000);
    random_changes(3, 4096, true, 20_000);
    random_changes(4, 16_384, true, 10_000);
}

#[test]
fn a_new_reference_gets_its_own_item_at_the_limit_or_beside_others_that_have_one() {
    assert_eq!((inline_limit(16_384), inline_limit(4096)), (992, 224));
    let parent = |number: u64| ExtentRef::SharedBlock { parent: number << 14 };
    let mut extent = ExtentItemBuf::new(7, ExtentFlags::TREE_BLOCK, None);
    for number in 1..=107 {
        assert_eq!(extent.add(parent(number), 1, no_keyed(), 16_384), Ok(RefChange::Inline), "{number}");
    }
    // 24 bytes and 107 of 9 are 987: one more would be 996.
    assert_eq!(extent.encoded_bytes(), 987);
    assert_eq!(extent.add(parent(108), 1, no_keyed(), 16_384), Ok(RefChange::Keyed(1)));
    assert_eq!(extent.drop(parent(1), 1, None), Ok(RefChange::Inline));
    let any = KeyedRefs { found: None, any: true };
    assert_eq!(extent.add(parent(109), 1, any, 16_384), Ok(RefChange::Keyed(1)));
    assert_eq!(extent.refs(), 108);
}

#[test]
fn files_with_one_hash_have_successive_keys_and_are_found_behind_a_gap() {
    let [first, second] = same_hash();
    let mut items = BTreeMap::new();
    let find = |what: ExtentRef, items: &BTreeMap<Key, Vec<u8>>| {
        find_keyed(what, BYTENR, items.iter().map(|(key, data)| (*key, &data[..]))).unwrap()
    };
    let key = first.key(BYTENR);
    assert_eq!((second.key(BYTENR), find(first, &items)), (key, KeyedPlace::Free(key)));
    items.insert(key, keyed_data(first, 1));
    let next = key.next().unwrap();
    assert_eq!(find(second, &items), KeyedPlace::Free(next));
    items.insert(next, keyed_data(second, 3));
    assert_eq!(find(second, &items), KeyedPlace::Found(next, 3));
    items.remove(&key);
    assert_eq!((find(second, &items), find(first, &items)), (KeyedPlace::Found(next, 3), KeyedPlace::Free(key)));
}

#[test]
fn wrong_counts_and_orders_are_refused_and_change_nothing() {
    let (one, two) = (ExtentRef::SharedData { parent: 16_384 }, ExtentRef::SharedData { parent: 32_768 });
    let mut extent = ExtentItemBuf::new(7, ExtentFlags::DATA, None);
    extent.add(one, u32::MAX, no_keyed(), 16_384).unwrap();
    let good = extent.clone();
    assert!(matches!(extent.add(one, 1, no_keyed(), 16_384), Err(ExtentRefError::Overflow { .. })));
    assert!(extent.add(two, 0, no_keyed(), 16_384).is_err() && extent.drop(one, 0, None).is_err());
    assert!(matches!(extent.drop(two, 1, None), Err(ExtentRefError::Underflow { count: 0, .. })));
    // Its own item counts more than the extent's.
    assert!(matches!(extent.drop(two, u32::MAX, Some(u32::MAX)), Err(ExtentRefError::Sum { total: 0, .. })));
    assert_eq!(extent.drop(one, 1, Some(1)), Err(ExtentRefError::Order));
    assert_eq!(extent, good);

    extent.add(two, 1, no_keyed(), 16_384).unwrap();
    let bytes = extent.encode();
    let decode = |bytes: &[u8]| ExtentItemBuf::decode(ItemType::EXTENT_ITEM, bytes);
    assert_eq!(decode(&bytes), Ok(extent));
    let (head, refs) = bytes.split_at(24);
    let swapped = [head, &refs[13..], &refs[..13]].concat();
    let twice = [head, &refs[..13], &refs[..13]].concat();
    assert_eq!((decode(&swapped), decode(&twice)), (Err(ExtentRefError::Order), Err(ExtentRefError::Order)));
    let mut fewer = bytes.clone();
    fewer[..8].fill(0);
    assert!(matches!(decode(&fewer), Err(ExtentRefError::Sum { total: 0, .. })));
    let mut none = bytes;
    none[24 + 9..24 + 13].fill(0);
    assert!(matches!(decode(&none), Err(ExtentRefError::Sum { inline: 0, .. })));
}
