//! Where to split a leaf that has no room for a new item, and which items neighbours exchange.
//!
//! A split is chosen before it is done, so the caller can first make the new leaves. There are three cases:
//! - The item goes behind all others: it gets a new leaf, and no item moves. So a tree that grows at its end has full
//!   leaves.
//! - Otherwise the leaf is split where the two halves, one of them with the new item, differ least.
//! - If no such half has room for a large item, it gets a leaf between two others.

use crate::error::EditError;
use crate::key::Key;
use crate::leaf_edit::LeafMut;
use crate::node::ITEM_HEAD_BYTES;

/// How a leaf is split for a new item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeafSplit {
    /// The items from index `at` on move to a second leaf.
    Two {
        /// The index of the first item that moves.
        at: usize,
        /// True if the new item goes to the first leaf.
        is_left: bool,
    },
    /// The new item goes to a second leaf alone, and the items that come after it go to a third one.
    Three,
}

impl LeafSplit {
    /// Chooses the split for an item of `data_bytes` at index `slot`.
    ///
    /// # Errors
    /// If no leaf has room for the item, or there is no such index.
    pub fn choose(leaf: &LeafMut, slot: usize, data_bytes: usize) -> Result<LeafSplit, EditError> {
        let (count, capacity) = (leaf.len(), leaf.capacity());
        if slot > count {
            return Err(EditError::Slot { slot, count });
        }
        let new = data_bytes.saturating_add(ITEM_HEAD_BYTES);
        if new > capacity || count == 0 {
            return Err(EditError::Full { needed: new, free: capacity });
        }
        if slot == count {
            return Ok(LeafSplit::Two { at: count, is_left: false });
        }
        let total = leaf.used_bytes() + new;
        let (mut left, mut best) = (0, None);
        // As if the new item were there: the halves are the first `cut` items of all, and the others.
        for cut in 1..=count {
            left += match cut - 1 {
                last if last == slot => new,
                last => size_of_item(leaf, last - usize::from(last > slot)),
            };
            let right = total - left;
            let split = LeafSplit::Two { at: cut - usize::from(cut > slot), is_left: cut > slot };
            let is_better = best.is_none_or(|(difference, _)| left.abs_diff(right) < difference);
            if left.max(right) <= capacity && is_better {
                best = Some((left.abs_diff(right), split));
            }
        }
        Ok(best.map_or(LeafSplit::Three, |(_, split)| split))
    }

    /// The number of leaves that the split needs besides the one that is split.
    pub fn new_leaves(self) -> usize {
        match self {
            LeafSplit::Two { .. } => 1,
            LeafSplit::Three => 2,
        }
    }

    /// Splits a leaf and inserts the item at index `slot`. `new` are the empty leaves after it, as many as
    /// [`LeafSplit::new_leaves`]. The choice must have been made for this leaf and item.
    ///
    /// # Errors
    /// If the key does not belong there, or the leaves do not fit.
    pub fn insert(
        self,
        leaf: &mut LeafMut,
        new: &mut [LeafMut],
        slot: usize,
        (key, data): (Key, &[u8]),
    ) -> Result<(), EditError> {
        leaf.check_insert(slot, key)?;
        if LeafSplit::choose(leaf, slot, data.len())? != self
            || new.iter().any(|one| !one.is_empty() || one.capacity() != leaf.capacity())
        {
            return Err(EditError::Siblings);
        }
        let count = leaf.len();
        match (self, new) {
            (LeafSplit::Two { at, is_left }, [right]) => {
                leaf.shift_right(right, count - at)?;
                if is_left { leaf.insert(slot, key, data) } else { right.insert(slot - at, key, data) }
            }
            (LeafSplit::Three, [middle, right]) => {
                leaf.shift_right(right, count - slot)?;
                middle.insert(0, key, data)
            }
            _ => Err(EditError::Siblings),
        }
    }
}

/// Moves items between neighbours until the bytes of both differ least. Neither becomes empty, unless it is. Returns
/// true if items moved.
///
/// # Errors
/// If the leaves are not neighbours.
pub fn balance(left: &mut LeafMut, right: &mut LeafMut) -> Result<bool, EditError> {
    let (here, there) = (left.used_bytes(), right.used_bytes());
    let from_left = here > there;
    let (mut more, mut less, giver) = if from_left { (here, there, &*left) } else { (there, here, &*right) };
    let mut moved = 0;
    while moved + 1 < giver.len() {
        let slot = if from_left { giver.len() - 1 - moved } else { moved };
        let size = size_of_item(giver, slot);
        if (more - size).abs_diff(less + size) >= more.abs_diff(less) {
            break;
        }
        (more, less, moved) = (more - size, less + size, moved + 1);
    }
    if from_left {
        left.shift_right(right, moved)?
    } else {
        left.shift_left(right, moved)?
    }
    Ok(moved > 0)
}

/// Moves all items of `right` to the end of `left`.
///
/// # Errors
/// If the leaves are not neighbours, or they have more than one leaf can have.
pub fn merge(left: &mut LeafMut, right: &mut LeafMut) -> Result<(), EditError> {
    left.shift_left(right, right.len())
}

fn size_of_item(leaf: &LeafMut, slot: usize) -> usize {
    leaf.items()[slot].size.get() as usize + ITEM_HEAD_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::ItemType;
    use crate::node::{HEADER_BYTES, Header};
    use zerocopy::FromBytes;

    const CAPACITY: usize = 4096 - HEADER_BYTES;

    fn key(offset: usize) -> Key {
        Key::new(257, ItemType::XATTR_ITEM, offset as u64)
    }

    fn header() -> Header {
        Header::read_from_bytes(&[0; HEADER_BYTES]).unwrap()
    }

    /// Splits a leaf that has items of these sizes, with keys 1, 3, 5 and so on, for an item at this index. Returns the
    /// sizes of the items in each leaf.
    fn split(sizes: &[usize], slot: usize, size: usize) -> Vec<Vec<usize>> {
        let mut buffers = [[0; 4096]; 3];
        let [first, second, third] = &mut buffers;
        let mut leaf = LeafMut::create(first, &header()).unwrap();
        for (slot, size) in sizes.iter().enumerate() {
            leaf.insert(slot, key(2 * slot + 1), &vec![slot as u8; *size]).unwrap();
        }
        let mut new = [LeafMut::create(second, &header()).unwrap(), LeafMut::create(third, &header()).unwrap()];
        let choice = LeafSplit::choose(&leaf, slot, size).unwrap();
        let (new, _) = new.split_at_mut(choice.new_leaves());
        choice.insert(&mut leaf, new, slot, (key(2 * slot), &vec![99; size])).unwrap();
        let sizes = |leaf: &LeafMut| leaf.items().iter().map(|item| item.size.get() as usize).collect();
        let sizes = std::iter::once(&leaf).chain(new.iter()).map(sizes).collect();
        assert!(buffers.iter_mut().take(1 + choice.new_leaves()).all(|buffer| LeafMut::open(buffer).is_ok()));
        sizes
    }

    #[test]
    fn an_item_behind_all_others_gets_a_leaf_and_moves_none() {
        assert_eq!(split(&[1000, 1000, 1000], 3, 1000), [vec![1000, 1000, 1000], vec![1000]]);
    }

    #[test]
    fn the_halves_with_the_new_item_are_as_equal_as_they_can_be() {
        assert_eq!(split(&[900, 900, 900, 900], 0, 900), [vec![900, 900], vec![900, 900, 900]]);
        assert_eq!(split(&[100, 100, 3500], 1, 800), [vec![100, 800, 100], vec![3500]]);
        assert_eq!(split(&[3500, 100, 100], 2, 800), [vec![3500], vec![100, 800, 100]]);
        assert_eq!(split(&[3900], 0, 3900), [vec![3900], vec![3900]]);
    }

    #[test]
    fn a_large_item_in_the_middle_gets_a_leaf_between_two_others() {
        let most = CAPACITY - ITEM_HEAD_BYTES;
        assert_eq!(split(&[1900, 1900], 1, most), [vec![1900], vec![most], vec![1900]]);
        assert_eq!(split(&[1000, 1900, 900], 2, 3200), [vec![1000, 1900], vec![3200], vec![900]]);
    }

    #[test]
    fn what_cannot_be_split_is_refused_and_stays() {
        let (mut first, mut second) = ([0; 4096], [0; 4096]);
        let mut leaf = LeafMut::create(&mut first, &header()).unwrap();
        let full = LeafSplit::choose(&leaf, 0, 5000);
        assert_eq!(full, Err(EditError::Full { needed: 5025, free: CAPACITY }));
        leaf.insert(0, key(5), &[1; 3000]).unwrap();
        assert_eq!(LeafSplit::choose(&leaf, 2, 1), Err(EditError::Slot { slot: 2, count: 1 }));
        let choice = LeafSplit::choose(&leaf, 1, 3000).unwrap();
        let mut new = [LeafMut::create(&mut second, &header()).unwrap()];
        let error = choice.insert(&mut leaf, &mut new, 1, (key(4), &[2; 3000]));
        assert_eq!(error, Err(EditError::Order { slot: 1, key: key(4) }));
        assert_eq!(choice.insert(&mut leaf, &mut [], 1, (key(6), &[2; 3000])), Err(EditError::Siblings));
        assert_eq!((leaf.len(), new[0].len()), (1, 0));
        choice.insert(&mut leaf, &mut new, 1, (key(6), &[2; 3000])).unwrap();
        assert!(matches!(merge(&mut leaf, &mut new[0]), Err(EditError::Full { .. })));
        assert_eq!((leaf.len(), new[0].len()), (1, 1));
    }

    #[test]
    fn neighbours_are_balanced_from_both_sides() {
        for (left_items, right_items, moved) in [(20, 2, true), (2, 20, true), (5, 6, false), (0, 8, true)] {
            let (mut first, mut second) = ([0; 4096], [0; 4096]);
            let mut left = LeafMut::create(&mut first, &header()).unwrap();
            let mut right = LeafMut::create(&mut second, &header()).unwrap();
            (0..left_items).for_each(|slot| left.insert(slot, key(slot), &[1; 100]).unwrap());
            (0..right_items).for_each(|slot| right.insert(slot, key(100 + slot), &[2; 100]).unwrap());
            assert_eq!(balance(&mut left, &mut right).unwrap(), moved);
            assert!(left.len().abs_diff(right.len()) <= 1, "{} {}", left.len(), right.len());
            assert!(balance(&mut right, &mut left).is_err(), "in the wrong order");
        }
    }
}
