//! The arithmetic of an arena: which units are free. No memory is touched here, only unit numbers.
//!
//! A buddy allocator over units of 512 bytes, blocks of 2^order units, orders 0 to 11 (512 bytes to 1 MiB). A block lies
//! at a multiple of its own length. In front of it stands one short list per order of blocks that were just freed and
//! are not merged yet, so that the common case, one length taken and returned over and over, neither splits nor merges.
//!
//! Invariants: every unit belongs to exactly one block; `state` is set only at a block's first unit; two free buddies of
//! one order never rest unmerged in the free lists (they may in the short lists, which are merged before a take fails).

/// Bytes in the smallest block.
pub(crate) const UNIT_BYTES: usize = 512;
/// Number of block lengths.
pub(crate) const ORDERS: usize = 12;
/// Bytes in the largest block.
pub(crate) const LARGEST_BYTES: usize = UNIT_BYTES << (ORDERS - 1);
/// Blocks per order that wait unmerged for the next request of their length.
const RECENT_LIMIT: usize = 64;

/// The state of a block, at its first unit; interior units and, briefly, detached blocks are `Interior`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnitState {
    Interior,
    Free(u8),
    Taken(u8),
}

/// Neighbours in the free list of an order, as unit number plus one; zero ends the list.
#[derive(Clone, Copy, Default)]
struct Links {
    next: u32,
    previous: u32,
}

pub(crate) struct Buddy {
    state: Vec<UnitState>,
    links: Vec<Links>,
    heads: [u32; ORDERS],
    recent: [Vec<u32>; ORDERS],
}

/// The smallest order whose blocks hold `len` bytes, or `None` when even the largest is too short.
pub(crate) fn order_for(len: usize) -> Option<u8> {
    let units = len.div_ceil(UNIT_BYTES).max(1).next_power_of_two();
    let order = units.trailing_zeros();
    (len <= LARGEST_BYTES).then_some(order as u8)
}

/// Bytes in a block of this order.
pub(crate) fn bytes_of(order: u8) -> usize {
    UNIT_BYTES << order
}

impl Buddy {
    /// An arena of `blocks` free blocks of the largest order.
    pub(crate) fn new(blocks: u32) -> Buddy {
        let step = 1u32 << (ORDERS - 1);
        let units = blocks.checked_mul(step).expect("an arena is shorter than 2 TiB") as usize;
        let mut buddy = Buddy {
            state: vec![UnitState::Interior; units],
            links: vec![Links::default(); units],
            heads: [0; ORDERS],
            recent: std::array::from_fn(|_| Vec::with_capacity(RECENT_LIMIT)),
        };
        for block in (0..blocks).rev() {
            buddy.insert(block * step, (ORDERS - 1) as u8);
        }
        buddy
    }

    /// Takes a block; `None` when no block of that order can be made.
    pub(crate) fn take(&mut self, order: u8) -> Option<u32> {
        if let Some(unit) = self.recent[order as usize].pop() {
            return Some(unit);
        }
        if let Some(unit) = self.split(order) {
            return Some(unit);
        }
        self.merge_recent();
        self.split(order)
    }

    /// Returns a block and says its order.
    pub(crate) fn give_back(&mut self, unit: u32) -> u8 {
        let UnitState::Taken(order) = self.state[unit as usize] else {
            unreachable!("only a taken block is given back")
        };
        let recent = &mut self.recent[order as usize];
        if recent.len() < RECENT_LIMIT {
            recent.push(unit);
        } else {
            self.merge(unit, order);
        }
        order
    }

    fn merge_recent(&mut self) {
        for order in 0..ORDERS {
            while let Some(unit) = self.recent[order].pop() {
                self.merge(unit, order as u8);
            }
        }
    }

    fn split(&mut self, order: u8) -> Option<u32> {
        let from = (order as usize..ORDERS).find(|&order| self.heads[order] != 0)?;
        let unit = self.heads[from] - 1;
        self.remove(unit, from as u8);
        for smaller in (order..from as u8).rev() {
            self.insert(unit + (1 << smaller), smaller);
        }
        self.state[unit as usize] = UnitState::Taken(order);
        Some(unit)
    }

    fn merge(&mut self, mut unit: u32, mut order: u8) {
        self.state[unit as usize] = UnitState::Interior;
        while (order as usize) < ORDERS - 1 {
            let buddy = unit ^ (1 << order);
            if self.state[buddy as usize] != UnitState::Free(order) {
                break;
            }
            self.remove(buddy, order);
            unit = unit.min(buddy);
            order += 1;
        }
        self.insert(unit, order);
    }

    fn insert(&mut self, unit: u32, order: u8) {
        let next = self.heads[order as usize];
        self.state[unit as usize] = UnitState::Free(order);
        self.links[unit as usize] = Links { next, previous: 0 };
        if next != 0 {
            self.links[next as usize - 1].previous = unit + 1;
        }
        self.heads[order as usize] = unit + 1;
    }

    fn remove(&mut self, unit: u32, order: u8) {
        let Links { next, previous } = self.links[unit as usize];
        match previous {
            0 => self.heads[order as usize] = next,
            _ => self.links[previous as usize - 1].next = next,
        }
        if next != 0 {
            self.links[next as usize - 1].previous = previous;
        }
        self.state[unit as usize] = UnitState::Interior;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_map_to_the_smallest_order_that_holds_them() {
        assert_eq!(order_for(1), Some(0));
        assert_eq!(order_for(512), Some(0));
        assert_eq!(order_for(513), Some(1));
        assert_eq!(order_for(4096), Some(3));
        assert_eq!(order_for(1 << 20), Some(11));
        assert_eq!(order_for((1 << 20) + 1), None);
        assert_eq!(order_for(usize::MAX), None);
    }

    #[test]
    fn small_blocks_merge_back_into_a_large_one() {
        let mut buddy = Buddy::new(1);
        let units: Vec<u32> = std::iter::from_fn(|| buddy.take(0)).collect();
        assert_eq!(units.len(), 2048);
        assert_eq!(buddy.take(11), None);
        for unit in units {
            assert_eq!(buddy.give_back(unit), 0);
        }
        assert_eq!(buddy.take(11), Some(0));
    }

    #[test]
    fn one_taken_unit_keeps_the_large_block_from_forming() {
        let mut buddy = Buddy::new(1);
        let kept = buddy.take(0).expect("an empty arena has a unit");
        assert_eq!(buddy.take(11), None);
        buddy.give_back(kept);
        assert_eq!(buddy.take(11), Some(0));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            cases: if cfg!(miri) { 4 } else { 256 },
            ..ProptestConfig::default()
        })]

        /// Taken blocks never overlap, lie at multiples of their length, and after all are returned the arena is whole.
        #[test]
        fn blocks_are_disjoint(steps in prop::collection::vec((any::<bool>(), 0u8..12, any::<prop::sample::Index>()), 1..200)) {
            let mut buddy = Buddy::new(2);
            let mut live: Vec<(u32, u8)> = Vec::new();
            for (take, order, index) in steps {
                if take || live.is_empty() {
                    let Some(unit) = buddy.take(order) else { continue };
                    let end = unit + (1 << order);
                    prop_assert_eq!(unit % (1 << order), 0);
                    prop_assert!(end <= 4096);
                    prop_assert!(live.iter().all(|&(u, o)| end <= u || u + (1 << o) <= unit));
                    live.push((unit, order));
                } else {
                    let (unit, order) = live.swap_remove(index.index(live.len()));
                    prop_assert_eq!(buddy.give_back(unit), order);
                }
            }
            for (unit, _) in live {
                buddy.give_back(unit);
            }
            prop_assert!(buddy.take(11).is_some() && buddy.take(11).is_some());
        }
    }
}
