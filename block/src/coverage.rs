//! The coverage of a check: which copies of which blocks it did not check, and whether the blocks had seals.
//!
//! Invariants: no unchecked block is ever left out; above [`MAX_RUNS`] runs are merged and then cover checked blocks
//! too. A complete coverage allocates nothing.
//!
//! Shape: bad blocks are rare, so each is a [`crate::BadBlock`] of its own; unchecked blocks are usually all of one
//! copy, so they are runs.

use sealblock_units::{Extent, Lba};

use crate::MemberPath;

/// Maximum runs of one [`Coverage`]; further ones are merged, blocks between them included.
pub const MAX_RUNS: usize = 1024;

/// Why a copy of blocks was not checked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum WhyUnchecked {
    /// The member that holds it cannot be reached.
    Absent = 0,
    /// The member is out of sync and waits for its resync.
    OutOfSync = 1,
    /// The member is being resynchronised.
    Resyncing = 2,
    /// A crash may have left the copies different here, and they are not reconciled yet.
    Unsettled = 3,
    /// The member failed without naming bad blocks, or was lost during the check.
    Failed = 4,
    /// The blocks were read from one copy only.
    OneCopy = 5,
    /// Part of the device's log is lost: each block matches its tags, but may be older than the last write.
    LogLost = 6,
}

impl WhyUnchecked {
    /// All reasons, in the order of their bits in [`Coverage::bits`].
    pub const ALL: [WhyUnchecked; 7] = [
        WhyUnchecked::Absent,
        WhyUnchecked::OutOfSync,
        WhyUnchecked::Resyncing,
        WhyUnchecked::Unsettled,
        WhyUnchecked::Failed,
        WhyUnchecked::OneCopy,
        WhyUnchecked::LogLost,
    ];

    /// The reason in messages.
    pub const fn to_text(self) -> &'static str {
        match self {
            WhyUnchecked::Absent => "the member is offline",
            WhyUnchecked::OutOfSync => "the member is out of sync",
            WhyUnchecked::Resyncing => "the member is being resynchronised",
            WhyUnchecked::Unsettled => "a crash may have left the copies different",
            WhyUnchecked::Failed => "the member failed during the check",
            WhyUnchecked::OneCopy => "only one of the copies was read",
            WhyUnchecked::LogLost => "part of the volume's log is lost, so blocks may be older than what was written",
        }
    }

    const fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// A run of blocks of which a copy was not checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unchecked {
    /// The first block.
    pub first: Lba,
    /// The last block.
    pub last: Lba,
    /// The member with the unchecked copy; [`MemberPath::NONE`] if it is unknown, or for all members.
    pub member: MemberPath,
    /// Why the copy was not checked.
    pub why: WhyUnchecked,
}

impl Unchecked {
    /// All blocks of an extent, of a device that is no group.
    pub fn new(extent: Extent, why: WhyUnchecked) -> Unchecked {
        Unchecked { first: extent.start(), last: extent.last(), member: MemberPath::NONE, why }
    }

    /// True if both runs are of the same copy, for the same reason, and overlap or touch.
    fn joins(&self, other: &Unchecked) -> bool {
        (self.member, self.why) == (other.member, other.why)
            && self.first.get() <= other.last.get().saturating_add(1)
            && other.first.get() <= self.last.get().saturating_add(1)
    }

    fn join(&mut self, other: &Unchecked) {
        self.first = self.first.min(other.first);
        self.last = self.last.max(other.last);
    }
}

/// The coverage of a check. The default is complete: every copy of every block was checked against a seal.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Coverage {
    unchecked: Vec<Unchecked>,
    is_unsealed: bool,
}

impl Coverage {
    /// The bit of [`Coverage::bits`] for blocks that were read without a seal.
    pub const UNSEALED_BIT: u32 = 1 << 8;

    /// The coverage of a check of all copies: against their seals, or without seals if `is_sealed` is false.
    pub const fn of(is_sealed: bool) -> Coverage {
        Coverage { unchecked: Vec::new(), is_unsealed: !is_sealed }
    }

    /// True if every copy was checked.
    pub fn is_complete(&self) -> bool {
        self.unchecked.is_empty()
    }

    /// True if every checked block had a seal.
    pub fn is_sealed(&self) -> bool {
        !self.is_unsealed
    }

    /// The unchecked runs; in the order of their blocks after [`Coverage::sort`].
    pub fn unchecked(&self) -> &[Unchecked] {
        &self.unchecked
    }

    /// Sorts the runs by their blocks.
    pub fn sort(&mut self) {
        self.unchecked.sort_by_key(|run| (run.first, run.last, run.member));
    }

    /// Adds an unchecked run.
    pub fn add(&mut self, mut run: Unchecked) {
        while let Some(at) = self.unchecked.iter().position(|known| known.joins(&run)) {
            run.join(&self.unchecked.swap_remove(at));
        }
        if self.unchecked.len() >= MAX_RUNS {
            self.coarsen();
        }
        self.unchecked.push(run);
    }

    /// Adds the coverage of a check of other blocks or of another copy.
    pub fn merge(&mut self, other: Coverage) {
        self.is_unsealed |= other.is_unsealed;
        if self.unchecked.is_empty() {
            self.unchecked = other.unchecked;
        } else {
            other.unchecked.into_iter().for_each(|run| self.add(run));
        }
    }

    /// Converts the runs to the addresses and members of the device above.
    #[must_use]
    pub fn map(self, up: impl Fn(Unchecked) -> Unchecked) -> Coverage {
        let mut mapped = Coverage { unchecked: Vec::new(), is_unsealed: self.is_unsealed };
        self.unchecked.into_iter().for_each(|run| mapped.add(up(run)));
        mapped
    }

    /// The number of distinct blocks with an unchecked copy.
    pub fn blocks(&self) -> u64 {
        let mut runs: Vec<(u64, u64)> = self.unchecked.iter().map(|run| (run.first.get(), run.last.get())).collect();
        runs.sort_unstable();
        let (mut blocks, mut next) = (0_u64, 0_u64);
        for (first, last) in runs {
            let from = first.max(next);
            if last >= from {
                blocks = blocks.saturating_add(last - from + 1);
                next = last.saturating_add(1);
            }
        }
        blocks
    }

    /// The reasons as bits, to send to another host: a bit for each [`WhyUnchecked`], and [`Coverage::UNSEALED_BIT`].
    pub fn bits(&self) -> u32 {
        let reasons = self.unchecked.iter().fold(0, |bits, run| bits | run.why.bit());
        reasons | if self.is_unsealed { Coverage::UNSEALED_BIT } else { 0 }
    }

    /// The coverage of a check of this extent on another host. Unknown bits count as [`WhyUnchecked::Failed`]:
    /// something was not checked.
    pub fn from_bits(bits: u32, extent: Extent) -> Coverage {
        let mut coverage = Coverage::of(bits & Coverage::UNSEALED_BIT == 0);
        let known = WhyUnchecked::ALL.iter().fold(Coverage::UNSEALED_BIT, |known, why| known | why.bit());
        let reasons = WhyUnchecked::ALL.into_iter().filter(|why| bits & why.bit() != 0);
        let unknown = (bits & !known != 0).then_some(WhyUnchecked::Failed);
        reasons.chain(unknown).for_each(|why| coverage.add(Unchecked::new(extent, why)));
        coverage
    }

    /// Merges all runs of the same copy and reason; if there are too many of these, all runs.
    fn coarsen(&mut self) {
        let runs = std::mem::take(&mut self.unchecked);
        for run in runs {
            let known = self.unchecked.iter_mut().find(|known| (known.member, known.why) == (run.member, run.why));
            match known {
                Some(known) => known.join(&run),
                None => self.unchecked.push(run),
            }
        }
        if self.unchecked.len() >= MAX_RUNS {
            let all = self.unchecked.drain(..).reduce(|mut all, run| {
                all.join(&run);
                all
            });
            self.unchecked.extend(all.map(|all| Unchecked { member: MemberPath::NONE, ..all }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, last: u64, member: MemberPath, why: WhyUnchecked) -> Unchecked {
        Unchecked { first: Lba::new(first), last: Lba::new(last), member, why }
    }

    fn runs(coverage: &mut Coverage) -> Vec<(u64, u64)> {
        coverage.sort();
        coverage.unchecked().iter().map(|run| (run.first.get(), run.last.get())).collect()
    }

    #[test]
    fn runs_of_one_copy_are_joined_in_any_order_and_runs_of_several_are_not() {
        let mut coverage = Coverage::default();
        assert!(coverage.is_complete() && coverage.is_sealed());
        let (a, b) = (MemberPath::NONE.within(0), MemberPath::NONE.within(1));
        for (first, last, member, why) in [
            (0, 9, a, WhyUnchecked::Absent),
            (20, 29, a, WhyUnchecked::Absent),
            (10, 19, a, WhyUnchecked::Absent),
            (0, 29, b, WhyUnchecked::Absent),
            (30, 31, a, WhyUnchecked::Failed),
        ] {
            coverage.add(run(first, last, member, why));
        }
        assert_eq!(runs(&mut coverage), [(0, 29), (0, 29), (30, 31)]);
        assert_eq!(coverage.blocks(), 32, "a block counts once");
        assert!(!coverage.is_complete());
    }

    #[test]
    fn too_many_runs_are_merged_and_none_is_lost() {
        let mut coverage = Coverage::default();
        for at in 0..3 * MAX_RUNS as u64 {
            coverage.add(run(at * 2, at * 2, MemberPath::NONE, WhyUnchecked::Absent));
            assert!(coverage.unchecked().len() <= MAX_RUNS);
        }
        let merged = runs(&mut coverage);
        assert_eq!((merged[0].0, merged[merged.len() - 1].1), (0, 6 * MAX_RUNS as u64 - 2));
        let mut coverage = Coverage::default();
        for member in 0..2 * MAX_RUNS {
            let path = MemberPath::NONE.within(member % 120).within(member / 120);
            coverage.add(run(member as u64 * 2, member as u64 * 2, path, WhyUnchecked::Absent));
            assert!(coverage.unchecked().len() <= MAX_RUNS);
        }
        assert!(coverage.blocks() >= 2 * MAX_RUNS as u64);
    }

    #[test]
    fn bits_for_another_host_convert_back() {
        let extent = Extent::from_raw(8, 4).unwrap();
        assert_eq!(Coverage::from_bits(0, extent), Coverage::default());
        assert_eq!(Coverage::from_bits(Coverage::UNSEALED_BIT, extent), Coverage::of(false));
        let mut coverage = Coverage::of(false);
        coverage.add(Unchecked::new(extent, WhyUnchecked::Absent));
        coverage.add(Unchecked::new(extent, WhyUnchecked::OneCopy));
        let back = Coverage::from_bits(coverage.bits(), extent);
        assert_eq!((back.bits(), back.blocks()), (coverage.bits(), 4));
        let later = Coverage::from_bits(1 << 31, extent);
        assert_eq!(later.unchecked()[0].why, WhyUnchecked::Failed, "an unknown bit is not ignored");
    }

    #[test]
    fn map_converts_members_and_addresses() {
        let mut coverage = Coverage::default();
        coverage.add(run(0, 3, MemberPath::NONE, WhyUnchecked::Absent));
        let mut up = coverage.map(|run| Unchecked { member: run.member.within(1), last: Lba::new(7), ..run });
        assert_eq!(runs(&mut up), [(0, 7)]);
        assert_eq!(up.unchecked()[0].member, MemberPath::NONE.within(1));
    }
}
