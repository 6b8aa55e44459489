//! Where blocks lie: which leg, which block of it, and which part of a request's data. Pure arithmetic.
//!
//! Blocks go round the legs chunk by chunk: chunk `c` is on leg `c % legs`, as the leg's chunk `c / legs`. So what a request
//! wants of one leg is one run of the leg's blocks, however many chunks it spans: the chunks between the first and the
//! last are whole, and lie one behind the other.

use sealblock_units::{Extent, Lba};

/// How the blocks go round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StripeMap {
    legs: u64,
    /// Blocks of a chunk, a power of two, as a shift.
    shift: u32,
}

/// What a request wants of one leg.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MemberPart {
    pub(crate) leg: usize,
    /// The blocks of the leg.
    pub(crate) below: Extent,
}

/// Blocks in a row above and below.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChunkRun {
    pub(crate) leg: usize,
    /// Its blocks on the leg.
    pub(crate) below: Extent,
    /// Its first block.
    pub(crate) above: Lba,
    /// Index of that block among those of the request.
    pub(crate) first: usize,
}

impl StripeMap {
    /// Chunks of `1 << shift` blocks on `legs` legs, at least one.
    pub(crate) fn new(legs: usize, shift: u32) -> StripeMap {
        StripeMap { legs: legs as u64, shift }
    }

    /// Blocks of a chunk.
    pub(crate) fn chunk(self) -> u64 {
        1 << self.shift
    }

    /// The leg that holds a block, and where on it.
    pub(crate) fn down(self, lba: Lba) -> (usize, Lba) {
        let (chunk, within) = (lba.get() >> self.shift, lba.get() & (self.chunk() - 1));
        ((chunk % self.legs) as usize, Lba::new(((chunk / self.legs) << self.shift) + within))
    }

    /// The block that a leg's block is.
    pub(crate) fn up(self, leg: usize, lba: Lba) -> Lba {
        let (row, within) = (lba.get() >> self.shift, lba.get() & (self.chunk() - 1));
        Lba::new(((row * self.legs + leg as u64) << self.shift) + within)
    }

    /// What a request for these blocks wants of each leg that holds any of them.
    pub(crate) fn parts(self, extent: Extent) -> impl Iterator<Item = MemberPart> {
        let chunk_of = |lba: Lba| lba.get() >> self.shift;
        let (first, last) = (chunk_of(extent.start()), chunk_of(extent.last()));
        (first..=last.min(first + self.legs - 1)).map(move |chunk| {
            let end = chunk + (last - chunk) / self.legs * self.legs;
            let begins = self.down(if chunk == first { extent.start() } else { Lba::new(chunk << self.shift) });
            let ends =
                self.down(if end == last { extent.last() } else { Lba::new((end << self.shift) + self.chunk() - 1) });
            let below = Extent::from_raw(begins.1.get(), ends.1.get() - begins.1.get() + 1);
            MemberPart { leg: begins.0, below: below.expect("no more blocks than the request has") }
        })
    }

    /// The run that a request's blocks are, where they lie within one chunk.
    pub(crate) fn only_run(self, extent: Extent) -> Option<ChunkRun> {
        self.runs(extent).next().filter(|run| run.below.len() == extent.len())
    }

    /// A request's blocks cut where chunks end, in order.
    pub(crate) fn runs(self, extent: Extent) -> impl Iterator<Item = ChunkRun> {
        let start = extent.start().get();
        let mut next = Some(start);
        std::iter::from_fn(move || {
            let at = next?;
            let chunk_end = at | (self.chunk() - 1);
            let end = chunk_end.min(extent.last().get());
            next = (end < extent.last().get()).then(|| end + 1);
            let (leg, below) = self.down(Lba::new(at));
            let below = Extent::from_raw(below.get(), end - at + 1).expect("no more blocks than the request has");
            Some(ChunkRun { leg, below, above: Lba::new(at), first: (at - start) as usize })
        })
    }
}

impl ChunkRun {
    /// What a reference tag gains on the way down, modulo its width.
    pub(crate) fn ref_tag_delta(&self) -> u64 {
        self.below.start().get().wrapping_sub(self.above.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn chunks_go_round() {
        let plan = StripeMap::new(3, 2);
        let legs: Vec<_> = (0..28).map(|lba| plan.down(Lba::new(lba))).map(|(leg, lba)| (leg, lba.get())).collect();
        assert_eq!(legs[..5], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]);
        assert_eq!((legs[11], legs[12], legs[27]), ((2, 3), (0, 4), (0, 11)));
    }

    #[test]
    fn one_leg_gets_one_run_of_many_chunks() {
        let plan = StripeMap::new(2, 2);
        let parts: Vec<_> = plan.parts(Extent::from_raw(2, 20).unwrap()).collect();
        let part = |leg, start, blocks| MemberPart { leg, below: Extent::from_raw(start, blocks).unwrap() };
        assert_eq!(parts, [part(0, 2, 10), part(1, 0, 10)]);
        assert_eq!(plan.parts(Extent::from_raw(5, 2).unwrap()).collect::<Vec<_>>(), [part(1, 1, 2)]);
    }

    #[test]
    fn the_last_blocks_there_can_be_have_a_place() {
        let plan = StripeMap::new(2, 4);
        let extent = Extent::from_raw(u64::MAX - 40, 41).unwrap();
        assert_eq!(plan.parts(extent).map(|part| part.below.len()).sum::<u64>(), 41);
        assert_eq!(plan.runs(extent).map(|run| run.below.len()).sum::<u64>(), 41);
    }

    proptest! {
        #[test]
        fn every_block_has_one_place(legs in 1usize..65, shift in 0u32..8, start in 0u64..1 << 40, blocks in 1u64..3000) {
            let (plan, extent) = (StripeMap::new(legs, shift), Extent::from_raw(start, blocks).unwrap());
            let mut runs = plan.runs(extent).flat_map(|run| {
                run.below.iter().enumerate().map(move |(i, below)| (run.leg, below, run.first + i, run.above.get() + i as u64))
            });
            for (i, lba) in extent.iter().enumerate() {
                let (leg, below) = plan.down(lba);
                prop_assert_eq!(plan.up(leg, below), lba);
                prop_assert_eq!(runs.next(), Some((leg, below, i, lba.get())));
            }
            prop_assert_eq!(runs.next(), None);
            let mut legs_seen = std::collections::HashSet::new();
            let mut total = 0;
            for part in plan.parts(extent) {
                prop_assert!(legs_seen.insert(part.leg), "one part for each leg");
                prop_assert!(part.below.iter().all(|below| extent.contains(plan.up(part.leg, below))));
                total += part.below.len();
            }
            prop_assert_eq!(total, blocks);
        }
    }
}
