//! How far a check went: which copies of which blocks it could not look at, and whether there was a seal to check against.
//!
//! Invariants: nothing that was not checked is ever left out, only told more coarsely once there are [`MOST_RUNS`] runs; a
//! check that reached everything allocates nothing.
//!
//! Shape: what is wrong with a block is a [`crate::BadBlock`], one for each block; what was not looked at is usually all of one
//! copy, so it is told in runs.

use sealblock_units::{Extent, Lba};

use crate::{BadBlock, BadBlocks, Error, MemberPath};

/// Runs that one [`Coverage`] keeps at most; further ones are joined with others, blocks between them included.
pub const MOST_RUNS: usize = 1024;

/// Why a copy of blocks was not checked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum WhyUnchecked {
    /// The member that holds it cannot be reached.
    Absent = 0,
    /// The member has missed changes and waits to be brought up to date.
    OutOfSync = 1,
    /// The member is being brought up to date.
    Resyncing = 2,
    /// A crash may have left the copies different here, and nobody has made them alike since.
    Unsettled = 3,
    /// The member failed, without saying which blocks are bad, or was lost while it was asked.
    Failed = 4,
    /// The blocks were read from one copy, and the others were not looked at.
    OneCopy = 5,
    /// Part of the device's log is lost: each block is whole and checks, but may be older than what was last written.
    LogLost = 6,
}

impl WhyUnchecked {
    /// All of them, in the order of their bits in [`Coverage::bits`].
    pub const ALL: [WhyUnchecked; 7] = [
        WhyUnchecked::Absent,
        WhyUnchecked::OutOfSync,
        WhyUnchecked::Resyncing,
        WhyUnchecked::Unsettled,
        WhyUnchecked::Failed,
        WhyUnchecked::OneCopy,
        WhyUnchecked::LogLost,
    ];

    /// The reason as people read it.
    pub const fn words(self) -> &'static str {
        match self {
            WhyUnchecked::Absent => "the member is not there",
            WhyUnchecked::OutOfSync => "the member is out of sync",
            WhyUnchecked::Resyncing => "the member is being resynchronised",
            WhyUnchecked::Unsettled => "a crash may have left the copies different",
            WhyUnchecked::Failed => "the member failed while it was checked",
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
    /// Whose copy: the member of a group; [`MemberPath::NONE`] where that is not known, or all are meant.
    pub leg: MemberPath,
    /// Why not.
    pub why: WhyUnchecked,
}

impl Unchecked {
    /// All blocks of an extent, of a device that is no group.
    pub fn new(extent: Extent, why: WhyUnchecked) -> Unchecked {
        Unchecked { first: extent.start(), last: extent.last(), leg: MemberPath::NONE, why }
    }

    /// Whether the other is about the same copy for the same reason, without a block between them that is in neither.
    fn joins(&self, other: &Unchecked) -> bool {
        (self.leg, self.why) == (other.leg, other.why)
            && self.first.get() <= other.last.get().saturating_add(1)
            && other.first.get() <= self.last.get().saturating_add(1)
    }

    fn join(&mut self, other: &Unchecked) {
        self.first = self.first.min(other.first);
        self.last = self.last.max(other.last);
    }
}

/// How far a check went. The usual one reached every copy of every block, and had a seal to check each against.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Coverage {
    unchecked: Vec<Unchecked>,
    is_unsealed: bool,
}

impl Coverage {
    /// The bit of [`Coverage::bits`] that says that blocks were read without a seal to check them against.
    pub const UNSEALED_BIT: u32 = 1 << 8;

    /// Of blocks that were checked against their seals, or only read because there are none.
    pub const fn of(sealed: bool) -> Coverage {
        Coverage { unchecked: Vec::new(), is_unsealed: !sealed }
    }

    /// Whether every copy was looked at and all of them are in sync.
    pub fn is_complete(&self) -> bool {
        self.unchecked.is_empty()
    }

    /// Whether all that was looked at had a seal to be checked against.
    pub fn is_sealed(&self) -> bool {
        !self.is_unsealed
    }

    /// What was not checked, in the order of the blocks once [`Coverage::sort`] was called.
    pub fn unchecked(&self) -> &[Unchecked] {
        &self.unchecked
    }

    /// Sorts the runs by their blocks.
    pub fn sort(&mut self) {
        self.unchecked.sort_by_key(|run| (run.first, run.last, run.leg));
    }

    /// Adds a run that was not checked.
    pub fn add(&mut self, mut run: Unchecked) {
        while let Some(at) = self.unchecked.iter().position(|known| known.joins(&run)) {
            run.join(&self.unchecked.swap_remove(at));
        }
        if self.unchecked.len() >= MOST_RUNS {
            self.coarsen();
        }
        self.unchecked.push(run);
    }

    /// Adds what another check, of other blocks or another copy, could not do.
    pub fn merge(&mut self, other: Coverage) {
        self.is_unsealed |= other.is_unsealed;
        if self.unchecked.is_empty() {
            self.unchecked = other.unchecked;
        } else {
            other.unchecked.into_iter().for_each(|run| self.add(run));
        }
    }

    /// The same as seen from above, where blocks have other addresses or the device is a member of a group.
    #[must_use]
    pub fn map(self, up: impl Fn(Unchecked) -> Unchecked) -> Coverage {
        let mut mapped = Coverage { unchecked: Vec::new(), is_unsealed: self.is_unsealed };
        self.unchecked.into_iter().for_each(|run| mapped.add(up(run)));
        mapped
    }

    /// How many different blocks have a copy that was not checked.
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

    /// In one number, for those who tell another host: a bit for each [`WhyUnchecked`], and [`Coverage::UNSEALED_BIT`].
    pub fn bits(&self) -> u32 {
        let reasons = self.unchecked.iter().fold(0, |bits, run| bits | run.why.bit());
        reasons | if self.is_unsealed { Coverage::UNSEALED_BIT } else { 0 }
    }

    /// What another host has said of a check of this extent. Bits that are not known count as [`WhyUnchecked::Failed`]: something was not
    /// checked.
    pub fn from_bits(bits: u32, extent: Extent) -> Coverage {
        let mut coverage = Coverage::of(bits & Coverage::UNSEALED_BIT == 0);
        let known = WhyUnchecked::ALL.iter().fold(Coverage::UNSEALED_BIT, |known, why| known | why.bit());
        let said = WhyUnchecked::ALL.into_iter().filter(|why| bits & why.bit() != 0);
        let unknown = (bits & !known != 0).then_some(WhyUnchecked::Failed);
        said.chain(unknown).for_each(|why| coverage.add(Unchecked::new(extent, why)));
        coverage
    }

    /// Joins all runs of a copy that are there for one reason; should there be too many copies, then all runs.
    fn coarsen(&mut self) {
        let runs = std::mem::take(&mut self.unchecked);
        for run in runs {
            let known = self.unchecked.iter_mut().find(|known| (known.leg, known.why) == (run.leg, run.why));
            match known {
                Some(known) => known.join(&run),
                None => self.unchecked.push(run),
            }
        }
        if self.unchecked.len() >= MOST_RUNS {
            let all = self.unchecked.drain(..).reduce(|mut all, run| {
                all.join(&run);
                all
            });
            self.unchecked.extend(all.map(|all| Unchecked { leg: MemberPath::NONE, ..all }));
        }
    }
}

/// What checks of several runs of blocks, or of several copies, have found, put together.
#[derive(Default)]
pub struct Tally {
    /// The damaged blocks.
    pub faults: Vec<BadBlock>,
    /// How far all of them went.
    pub coverage: Coverage,
}

impl Tally {
    /// Takes in what a check has failed with.
    ///
    /// # Errors
    /// The error itself, where it is about something else than damaged blocks.
    pub fn take(&mut self, error: Error) -> Result<(), Error> {
        let (faults, coverage) = error.into_damage()?;
        self.faults.extend(faults);
        self.coverage.merge(coverage);
        Ok(())
    }

    /// How far the checks went, where they have found no damage.
    ///
    /// # Errors
    /// The damaged blocks.
    pub fn finish(self) -> Result<Coverage, Error> {
        match BadBlocks::new(self.faults) {
            Some(faults) => Err(faults.covering(self.coverage).into()),
            None => Ok(self.coverage),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, last: u64, leg: MemberPath, why: WhyUnchecked) -> Unchecked {
        Unchecked { first: Lba::new(first), last: Lba::new(last), leg, why }
    }

    fn runs(coverage: &mut Coverage) -> Vec<(u64, u64)> {
        coverage.sort();
        coverage.unchecked().iter().map(|run| (run.first.get(), run.last.get())).collect()
    }

    #[test]
    fn runs_of_one_copy_are_joined_in_any_order_and_others_are_not() {
        let mut coverage = Coverage::default();
        assert!(coverage.is_complete() && coverage.is_sealed());
        let (a, b) = (MemberPath::NONE.within(0), MemberPath::NONE.within(1));
        for (first, last, leg, why) in [
            (0, 9, a, WhyUnchecked::Absent),
            (20, 29, a, WhyUnchecked::Absent),
            (10, 19, a, WhyUnchecked::Absent),
            (0, 29, b, WhyUnchecked::Absent),
            (30, 31, a, WhyUnchecked::Failed),
        ] {
            coverage.add(run(first, last, leg, why));
        }
        assert_eq!(runs(&mut coverage), [(0, 29), (0, 29), (30, 31)]);
        assert_eq!(coverage.blocks(), 32, "a block counts once");
        assert!(!coverage.is_complete());
    }

    #[test]
    fn too_many_runs_are_told_coarsely_and_none_is_lost() {
        let mut coverage = Coverage::default();
        for at in 0..3 * MOST_RUNS as u64 {
            coverage.add(run(at * 2, at * 2, MemberPath::NONE, WhyUnchecked::Absent));
            assert!(coverage.unchecked().len() <= MOST_RUNS);
        }
        let told = runs(&mut coverage);
        assert_eq!((told[0].0, told[told.len() - 1].1), (0, 6 * MOST_RUNS as u64 - 2));
        let mut coverage = Coverage::default();
        for leg in 0..2 * MOST_RUNS {
            let path = MemberPath::NONE.within(leg % 120).within(leg / 120);
            coverage.add(run(leg as u64 * 2, leg as u64 * 2, path, WhyUnchecked::Absent));
            assert!(coverage.unchecked().len() <= MOST_RUNS);
        }
        assert!(coverage.blocks() >= 2 * MOST_RUNS as u64);
    }

    #[test]
    fn what_is_told_another_host_comes_back() {
        let extent = Extent::from_raw(8, 4).unwrap();
        assert_eq!(Coverage::from_bits(0, extent), Coverage::default());
        assert_eq!(Coverage::from_bits(Coverage::UNSEALED_BIT, extent), Coverage::of(false));
        let mut coverage = Coverage::of(false);
        coverage.add(Unchecked::new(extent, WhyUnchecked::Absent));
        coverage.add(Unchecked::new(extent, WhyUnchecked::OneCopy));
        let back = Coverage::from_bits(coverage.bits(), extent);
        assert_eq!((back.bits(), back.blocks()), (coverage.bits(), 4));
        let later = Coverage::from_bits(1 << 31, extent);
        assert_eq!(later.unchecked()[0].why, WhyUnchecked::Failed, "what is not understood is not taken for nothing");
    }

    #[test]
    fn what_lies_below_is_seen_from_above() {
        let mut coverage = Coverage::default();
        coverage.add(run(0, 3, MemberPath::NONE, WhyUnchecked::Absent));
        let mut up = coverage.map(|run| Unchecked { leg: run.leg.within(1), last: Lba::new(7), ..run });
        assert_eq!(runs(&mut up), [(0, 7)]);
        assert_eq!(up.unchecked()[0].leg, MemberPath::NONE.within(1));
    }
}
