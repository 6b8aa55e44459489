//! Where blocks are: on which member, at which of its blocks, and in which part of a request's data. Pure arithmetic.
//!
//! Chunk `c` is on member `c % members`, as the member's chunk `c / members`. So a request needs one run of each
//! member's blocks, however many chunks it spans: the chunks between the first and the last are whole, and adjacent on
//! the member.

use sealblock_units::{Extent, Lba};

/// The mapping between blocks of the stripe and of its members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StripeMap {
    members: u64,
    /// Blocks of a chunk, a power of two, as a shift.
    shift: u32,
}

/// One member's part of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MemberPart {
    pub(crate) member: usize,
    /// The blocks of the member.
    pub(crate) below: Extent,
}

/// A run of blocks that is contiguous on the stripe and on the member: within one chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChunkRun {
    pub(crate) member: usize,
    /// Its blocks on the member.
    pub(crate) below: Extent,
    /// Its first block on the stripe.
    pub(crate) stripe_lba: Lba,
    /// Index of that block among those of the request.
    pub(crate) first: usize,
}

impl StripeMap {
    /// Chunks of `1 << shift` blocks on `members` members, at least one.
    pub(crate) fn new(members: usize, shift: u32) -> StripeMap {
        StripeMap { members: members as u64, shift }
    }

    /// Blocks of a chunk.
    pub(crate) fn chunk(self) -> u64 {
        1 << self.shift
    }

    /// Maps a block of the stripe to its member and its block there.
    pub(crate) fn down(self, lba: Lba) -> (usize, Lba) {
        let (chunk, within) = (lba.get() >> self.shift, lba.get() & (self.chunk() - 1));
        ((chunk % self.members) as usize, Lba::new(((chunk / self.members) << self.shift) + within))
    }

    /// Maps a block of a member to the block of the stripe.
    pub(crate) fn up(self, member: usize, lba: Lba) -> Lba {
        let (row, within) = (lba.get() >> self.shift, lba.get() & (self.chunk() - 1));
        Lba::new(((row * self.members + member as u64) << self.shift) + within)
    }

    /// Splits a request for these blocks into one part for each member that holds any of them.
    pub(crate) fn parts(self, extent: Extent) -> impl Iterator<Item = MemberPart> {
        let chunk_of = |lba: Lba| lba.get() >> self.shift;
        let (first, last) = (chunk_of(extent.start()), chunk_of(extent.last()));
        (first..=last.min(first + self.members - 1)).map(move |chunk| {
            let end = chunk + (last - chunk) / self.members * self.members;
            let begins = self.down(if chunk == first { extent.start() } else { Lba::new(chunk << self.shift) });
            let ends =
                self.down(if end == last { extent.last() } else { Lba::new((end << self.shift) + self.chunk() - 1) });
            let below = Extent::from_raw(begins.1.get(), ends.1.get() - begins.1.get() + 1);
            MemberPart { member: begins.0, below: below.expect("no more blocks than the request has") }
        })
    }

    /// The run of a request's blocks, if they are within one chunk.
    pub(crate) fn only_run(self, extent: Extent) -> Option<ChunkRun> {
        self.runs(extent).next().filter(|run| run.below.len() == extent.len())
    }

    /// Splits a request's blocks at the ends of chunks, in order.
    pub(crate) fn runs(self, extent: Extent) -> impl Iterator<Item = ChunkRun> + Clone {
        let start = extent.start().get();
        let mut next = Some(start);
        std::iter::from_fn(move || {
            let at = next?;
            let chunk_end = at | (self.chunk() - 1);
            let end = chunk_end.min(extent.last().get());
            next = (end < extent.last().get()).then(|| end + 1);
            let (member, below) = self.down(Lba::new(at));
            let below = Extent::from_raw(below.get(), end - at + 1).expect("no more blocks than the request has");
            Some(ChunkRun { member, below, stripe_lba: Lba::new(at), first: (at - start) as usize })
        })
    }
}

impl ChunkRun {
    /// The number to add to a reference tag on the way to the member, modulo the width of the tag.
    pub(crate) fn ref_tag_delta(&self) -> u64 {
        self.below.start().get().wrapping_sub(self.stripe_lba.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn chunks_alternate_between_members() {
        let stripe_map = StripeMap::new(3, 2);
        let members: Vec<_> =
            (0..28).map(|lba| stripe_map.down(Lba::new(lba))).map(|(member, lba)| (member, lba.get())).collect();
        assert_eq!(members[..5], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]);
        assert_eq!((members[11], members[12], members[27]), ((2, 3), (0, 4), (0, 11)));
    }

    #[test]
    fn a_member_gets_one_run_of_many_chunks() {
        let stripe_map = StripeMap::new(2, 2);
        let parts: Vec<_> = stripe_map.parts(Extent::from_raw(2, 20).unwrap()).collect();
        let part = |member, start, blocks| MemberPart { member, below: Extent::from_raw(start, blocks).unwrap() };
        assert_eq!(parts, [part(0, 2, 10), part(1, 0, 10)]);
        assert_eq!(stripe_map.parts(Extent::from_raw(5, 2).unwrap()).collect::<Vec<_>>(), [part(1, 1, 2)]);
    }

    #[test]
    fn the_last_blocks_there_can_be_have_a_place() {
        let stripe_map = StripeMap::new(2, 4);
        let extent = Extent::from_raw(u64::MAX - 40, 41).unwrap();
        assert_eq!(stripe_map.parts(extent).map(|part| part.below.len()).sum::<u64>(), 41);
        assert_eq!(stripe_map.runs(extent).map(|run| run.below.len()).sum::<u64>(), 41);
    }

    proptest! {
        #[test]
        fn every_block_has_one_place(members in 1usize..65, shift in 0u32..8, start in 0u64..1 << 40, blocks in 1u64..3000) {
            let (stripe_map, extent) = (StripeMap::new(members, shift), Extent::from_raw(start, blocks).unwrap());
            let mut runs = stripe_map.runs(extent).flat_map(|run| {
                run.below.iter().enumerate().map(move |(i, below)| (run.member, below, run.first + i, run.stripe_lba.get() + i as u64))
            });
            for (i, lba) in extent.iter().enumerate() {
                let (member, below) = stripe_map.down(lba);
                prop_assert_eq!(stripe_map.up(member, below), lba);
                prop_assert_eq!(runs.next(), Some((member, below, i, lba.get())));
            }
            prop_assert_eq!(runs.next(), None);
            let mut members_seen = std::collections::HashSet::new();
            let mut total = 0;
            for part in stripe_map.parts(extent) {
                prop_assert!(members_seen.insert(part.member), "one part for each member");
                prop_assert!(part.below.iter().all(|below| extent.contains(stripe_map.up(part.member, below))));
                total += part.below.len();
            }
            prop_assert_eq!(total, blocks);
        }
    }
}
