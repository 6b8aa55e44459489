//! The arithmetic of an arena: which units are free. No memory is touched here, only unit numbers.
//!
//! Chunks of 1 MiB are divided into slots of one size class: 2^order units of 512 bytes, orders 0 to 11 (512 bytes to 1
//! MiB). A slot is at a multiple of its own length. The slot that was freed last is taken first, since its memory is
//! the most likely to be in a cache. A chunk without a taken slot keeps its class until another class needs a chunk, so
//! that taking and returning one length repeatedly costs a push and a pop.
//!
//! Invariants: every chunk is either unassigned, or of one class; it is in the list of open chunks of its class if and
//! only if one of its slots is free.

/// Bytes in the smallest slot.
pub(crate) const UNIT_BYTES: usize = 512;
/// Number of size classes.
pub(crate) const ORDERS: usize = 12;
/// Bytes in the largest slot, which is a chunk.
pub(crate) const LARGEST_BYTES: usize = UNIT_BYTES << (ORDERS - 1);
/// Units in a chunk.
const CHUNK_UNITS: u16 = 1 << (ORDERS - 1);

/// The current or last class of a chunk, and the first units of its free slots.
struct Chunk {
    order: u8,
    free: Vec<u16>,
}

impl Chunk {
    fn is_unused(&self) -> bool {
        self.free.len() == usize::from(CHUNK_UNITS >> self.order)
    }
}

pub(crate) struct SizeClasses {
    chunks: Vec<Chunk>,
    open: [Vec<u32>; ORDERS],
    unassigned: Vec<u32>,
}

/// The smallest order whose slots hold `len` bytes, or `None` when even the largest is too short.
pub(crate) fn order_for(len: usize) -> Option<u8> {
    let units = len.div_ceil(UNIT_BYTES).max(1).next_power_of_two();
    let order = units.trailing_zeros();
    (len <= LARGEST_BYTES).then_some(order as u8)
}

/// Bytes in a slot of this order.
pub(crate) fn bytes_of(order: u8) -> usize {
    UNIT_BYTES << order
}

impl SizeClasses {
    /// An arena of `chunks` chunks, all free.
    pub(crate) fn new(chunks: u32) -> SizeClasses {
        let chunk = || Chunk { order: 0, free: Vec::with_capacity(CHUNK_UNITS.into()) };
        SizeClasses {
            chunks: std::iter::repeat_with(chunk).take(chunks as usize).collect(),
            open: std::array::from_fn(|_| Vec::with_capacity(chunks as usize)),
            unassigned: (0..chunks).rev().collect(),
        }
    }

    /// True if a slot of this order is free without another chunk.
    pub(crate) fn has_open(&self, order: u8) -> bool {
        !self.open[order as usize].is_empty()
    }

    /// Takes a slot and returns its first unit; `None` if none of that order is free or can be created.
    pub(crate) fn take(&mut self, order: u8) -> Option<u32> {
        let number = match self.open[order as usize].last() {
            Some(&number) => number,
            None => self.assign(order)?,
        };
        let chunk = &mut self.chunks[number as usize];
        let unit = chunk.free.pop().expect("an open chunk has a free slot");
        if chunk.free.is_empty() {
            self.open[order as usize].pop();
        }
        Some(number * u32::from(CHUNK_UNITS) + u32::from(unit))
    }

    /// Returns a taken slot, and the slot's order to the caller.
    pub(crate) fn give_back(&mut self, unit: u32) -> u8 {
        let number = unit / u32::from(CHUNK_UNITS);
        let chunk = &mut self.chunks[number as usize];
        assert!(!chunk.is_unused(), "only a taken slot is given back");
        if chunk.free.is_empty() {
            self.open[chunk.order as usize].push(number);
        }
        chunk.free.push((unit % u32::from(CHUNK_UNITS)) as u16);
        chunk.order
    }

    /// Assigns a chunk to this order, and opens it. Unused chunks of other orders are reassigned if there is no
    /// unassigned one.
    fn assign(&mut self, order: u8) -> Option<u32> {
        if self.unassigned.is_empty() {
            for open in &mut self.open {
                self.unassigned.extend(open.extract_if(.., |number| self.chunks[*number as usize].is_unused()));
            }
        }
        let number = self.unassigned.pop()?;
        let chunk = &mut self.chunks[number as usize];
        chunk.order = order;
        chunk.free.clear();
        chunk.free.extend((0..CHUNK_UNITS).step_by(1 << order).rev());
        self.open[order as usize].push(number);
        Some(number)
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
    fn small_slots_become_a_large_one_again() {
        let mut classes = SizeClasses::new(1);
        let units: Vec<u32> = std::iter::from_fn(|| classes.take(0)).collect();
        assert_eq!(units.len(), 2048);
        assert_eq!(classes.take(11), None);
        for unit in units {
            assert_eq!(classes.give_back(unit), 0);
        }
        assert_eq!(classes.take(11), Some(0));
    }

    #[test]
    fn one_taken_unit_keeps_the_chunk_in_its_class() {
        let mut classes = SizeClasses::new(1);
        let kept = classes.take(0).expect("an empty arena has a unit");
        assert_eq!(classes.take(11), None);
        classes.give_back(kept);
        assert_eq!(classes.take(11), Some(0));
    }

    #[test]
    fn the_slot_freed_last_is_taken_first_and_full_chunks_open_again() {
        let mut classes = SizeClasses::new(2);
        let units: Vec<u32> = (0..16).filter_map(|_| classes.take(8)).collect();
        assert_eq!((units.len(), classes.take(8)), (16, None));
        classes.give_back(units[3]);
        classes.give_back(units[12]);
        assert_eq!((classes.take(8), classes.take(8), classes.take(8)), (Some(units[12]), Some(units[3]), None));
    }

    #[test]
    #[should_panic(expected = "only a taken slot is given back")]
    fn a_slot_that_is_free_is_not_given_back() {
        let mut classes = SizeClasses::new(1);
        let unit = classes.take(0).expect("an empty arena has a unit");
        classes.give_back(unit);
        classes.give_back(unit);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            cases: if cfg!(miri) { 4 } else { 256 },
            ..ProptestConfig::default()
        })]

        /// Taken slots never overlap, start at multiples of their length, and after all are returned the arena is
        /// whole.
        #[test]
        fn slots_are_disjoint(steps in prop::collection::vec((any::<bool>(), 0u8..12, any::<prop::sample::Index>()), 1..200)) {
            let mut classes = SizeClasses::new(2);
            let mut live: Vec<(u32, u8)> = Vec::new();
            for (take, order, index) in steps {
                if take || live.is_empty() {
                    let Some(unit) = classes.take(order) else { continue };
                    let end = unit + (1 << order);
                    prop_assert_eq!(unit % (1 << order), 0);
                    prop_assert!(end <= 4096);
                    prop_assert!(live.iter().all(|&(u, o)| end <= u || u + (1 << o) <= unit));
                    live.push((unit, order));
                } else {
                    let (unit, order) = live.swap_remove(index.index(live.len()));
                    prop_assert_eq!(classes.give_back(unit), order);
                }
            }
            for (unit, _) in live {
                classes.give_back(unit);
            }
            prop_assert!(classes.take(11).is_some() && classes.take(11).is_some());
        }
    }
}
