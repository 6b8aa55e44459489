//! Logical ranges that are added in any order, then sorted and joined: sectors with checksums, and sectors used
//! without. Ranges can have values; only those with equal values are joined.
//!
//! Invariant: once joined, a list has at most a given number of ranges. If there are more, it records that it is
//! incomplete.

/// The maximum number of ranges, which need 64 MiB.
pub const MAX_RANGES: usize = 4 << 20;
/// Ranges that are collected before they are joined.
const BATCH: usize = 4096;

/// Ranges, each as its value, its first address and the address after its last.
#[derive(Clone, Debug)]
pub(crate) struct RangeList<T = ()> {
    ranges: Vec<(T, u64, u64)>,
    /// The first `merged_len` ranges are sorted, and those with equal values do not touch each other.
    merged_len: usize,
    most: usize,
    is_cut: bool,
}

impl<T: Copy + Ord> RangeList<T> {
    /// A list of at most `most` ranges.
    pub fn new(most: usize) -> RangeList<T> {
        RangeList { ranges: Vec::new(), merged_len: 0, most, is_cut: false }
    }

    /// Adds a range with a value.
    pub fn add_with(&mut self, value: T, start: u64, end: u64) {
        if start >= end || self.is_cut {
            return;
        }
        match self.ranges.last_mut().filter(|last| last.0 == value && last.2 == start) {
            Some(last) => last.2 = end,
            None => self.ranges.push((value, start, end)),
        }
        if self.ranges.len() >= 2 * self.merged_len + BATCH {
            self.sort_and_merge();
        }
    }

    /// Sorts and joins the added ranges.
    pub fn sort_and_merge(&mut self) {
        self.ranges.sort_unstable();
        let mut kept = 0;
        for index in 0..self.ranges.len() {
            let (value, start, end) = self.ranges[index];
            match self.ranges[..kept].last_mut().filter(|last| last.0 == value && last.2 >= start) {
                Some(last) => last.2 = last.2.max(end),
                None => {
                    self.ranges[kept] = (value, start, end);
                    kept += 1;
                }
            }
        }
        self.is_cut |= kept > self.most;
        self.ranges.truncate(kept.min(self.most));
        self.merged_len = self.ranges.len();
    }

    /// True if some ranges did not fit.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// The ranges with their values, by value and address. Only after [`RangeList::sort_and_merge`].
    pub fn with_values(&self) -> impl Iterator<Item = (T, u64, u64)> + use<'_, T> {
        debug_assert_eq!(self.merged_len, self.ranges.len());
        self.ranges.iter().copied()
    }

    /// The ranges. Only after [`RangeList::sort_and_merge`].
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + use<'_, T> {
        self.with_values().map(|(_, start, end)| (start, end))
    }
}

impl RangeList {
    /// Adds a range.
    pub fn add(&mut self, start: u64, end: u64) {
        self.add_with((), start, end);
    }

    /// The parts of a range that are in the list. Only after [`RangeList::sort_and_merge`].
    pub fn within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> + use<'_> {
        debug_assert_eq!(self.merged_len, self.ranges.len());
        let first = self.ranges.partition_point(|range| range.2 <= start);
        let overlapping = self.ranges[first..].iter().take_while(move |range| range.1 < end);
        overlapping.map(move |range| (range.1.max(start), range.2.min(end)))
    }

    /// The parts of a range that are not in the list. Only after [`RangeList::sort_and_merge`].
    pub fn gaps(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let (mut gaps, mut at) = (Vec::new(), start);
        for (from, to) in self.within(start, end) {
            if at < from {
                gaps.push((at, from));
            }
            at = to;
        }
        if at < end {
            gaps.push((at, end));
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn too_many_ranges_are_cut_and_reported() {
        let mut list = RangeList::new(3);
        (0..3).for_each(|at| list.add(at * 10, at * 10 + 5));
        list.sort_and_merge();
        assert!(!list.is_cut() && list.iter().count() == 3);
        list.add(25, 30);
        list.sort_and_merge();
        assert!(!list.is_cut(), "it joins another one");
        list.add(100, 101);
        list.sort_and_merge();
        assert!(list.is_cut() && list.iter().count() == 3);
        let mut list = RangeList::new(10);
        (0..10 * BATCH as u64).for_each(|at| list.add(at * 2, at * 2 + 1));
        assert!(list.is_cut() && list.ranges.len() <= 10 + BATCH, "{}", list.ranges.len());
    }

    proptest! {
        #[test]
        fn ranges_are_those_of_a_set(
            added in proptest::collection::vec((0..200_u64, 0..20_u64), 0..40), start in 0..220_u64, bytes in 0..60_u64,
        ) {
            let (mut list, mut set) = (RangeList::new(MAX_RANGES), BTreeSet::new());
            for (start, bytes) in added {
                list.add(start, start + bytes);
                set.extend(start..start + bytes);
            }
            list.sort_and_merge();
            let flat = |ranges: &mut dyn Iterator<Item = (u64, u64)>| ranges.flat_map(|(from, to)| from..to).collect::<Vec<_>>();
            prop_assert_eq!(flat(&mut list.iter()), set.iter().copied().collect::<Vec<_>>());
            let wanted = start..start + bytes;
            let within: Vec<u64> = wanted.clone().filter(|at| set.contains(at)).collect();
            prop_assert_eq!(flat(&mut list.within(wanted.start, wanted.end)), within);
            let gaps: Vec<u64> = wanted.clone().filter(|at| !set.contains(at)).collect();
            prop_assert_eq!(flat(&mut list.gaps(wanted.start, wanted.end).into_iter()), gaps);
        }
    }
}
