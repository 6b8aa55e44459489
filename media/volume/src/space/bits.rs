//! A bit set, and searches for runs of clear bits.

/// A run: its start and its length.
pub(crate) type Run = (u32, u32);

/// A set of `len` bits. Bits after the last one are never found.
pub(crate) struct Bits {
    words: Vec<u64>,
    len: u32,
}

impl Bits {
    /// This many bits, all clear.
    pub fn clear(len: u32) -> Bits {
        Bits { words: vec![0; len.div_ceil(64) as usize], len }
    }

    /// The number of bits.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// True if a bit is set.
    pub fn get(&self, at: u32) -> bool {
        self.words[at as usize / 64] >> (at % 64) & 1 == 1
    }

    /// Sets a bit.
    pub fn set(&mut self, at: u32) {
        self.words[at as usize / 64] |= 1 << (at % 64);
    }

    /// Clears a bit.
    pub fn unset(&mut self, at: u32) {
        self.words[at as usize / 64] &= !(1 << (at % 64));
    }

    /// Clears a run of bits, which must be within the set. Returns how many were set.
    pub fn unset_run(&mut self, (start, count): Run) -> u32 {
        let (mut at, end, mut were_set) = (start, start + count, 0);
        while at < end {
            let (word, bit) = (&mut self.words[at as usize / 64], at % 64);
            let here = (64 - bit).min(end - at);
            let mask = u64::MAX >> (64 - here) << bit;
            were_set += (*word & mask).count_ones();
            *word &= !mask;
            at += here;
        }
        were_set
    }

    /// True if a run is within the set and all its bits are clear.
    pub fn is_clear(&self, (start, count): Run) -> bool {
        start + count <= self.len && self.next_set(start, start + count).is_none()
    }

    /// The first run of clear bits between `from` and `end`, cut to `max` bits.
    pub fn clear_run(&self, from: u32, end: u32, max: u32) -> Option<Run> {
        let start = self.next(from, end, |word| !word)?;
        let end = end.min(self.len).min(start.saturating_add(max));
        Some((start, self.next_set(start, end).unwrap_or(end) - start))
    }

    /// All runs of clear bits between `from` and `end`, cut to `max` bits.
    pub fn clear_runs(&self, from: u32, end: u32, max: u32) -> impl Iterator<Item = Run> {
        let mut at = from;
        std::iter::from_fn(move || {
            let (start, len) = self.clear_run(at, end, max)?;
            at = start + len;
            Some((start, len))
        })
    }

    /// The first set bit between `from` and `end`.
    pub fn next_set(&self, from: u32, end: u32) -> Option<u32> {
        self.next(from, end, |word| word)
    }

    /// The first bit between `from` and `end` that is set in `view` of its word.
    fn next(&self, from: u32, end: u32, view: impl Fn(u64) -> u64) -> Option<u32> {
        let end = end.min(self.len);
        if from >= end {
            return None;
        }
        let (first, last) = (from as usize / 64, (end - 1) as usize / 64);
        let mut mask = u64::MAX << (from % 64);
        for index in first..=last {
            let seen = view(self.words[index]) & mask;
            if seen != 0 {
                let at = index as u32 * 64 + seen.trailing_zeros();
                return (at < end).then_some(at);
            }
            mask = u64::MAX;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_clear_bits_are_found_within_their_bounds() {
        let mut bits = Bits::clear(130);
        assert_eq!(bits.clear_run(0, 130, u32::MAX), Some((0, 130)));
        assert_eq!(bits.clear_run(7, 130, 20), Some((7, 20)));
        [0, 5, 63, 64, 129].into_iter().for_each(|at| bits.set(at));
        assert!(bits.get(63) && !bits.get(62));
        let runs: Vec<Run> = bits.clear_runs(0, 130, 50).collect();
        assert_eq!(runs, [(1, 4), (6, 50), (56, 7), (65, 50), (115, 14)]);
        assert!(bits.is_clear((65, 64)) && !bits.is_clear((64, 2)) && !bits.is_clear((128, 3)));
        assert_eq!(bits.clear_run(129, 130, 9), None);
        assert_eq!(bits.clear_run(128, 500, 9), Some((128, 1)), "nothing behind the last bit is clear");
        assert_eq!((bits.next_set(6, 130), bits.next_set(6, 63), bits.next_set(65, 130)), (Some(63), None, Some(129)));
        bits.unset(63);
        assert_eq!(bits.next_set(6, 130), Some(64));
    }

    #[test]
    fn a_run_is_cleared_and_nothing_beside_it_whatever_words_it_meets() {
        for run in [(0, 130), (0, 1), (63, 1), (63, 2), (64, 64), (3, 125), (129, 1), (70, 0)] {
            let mut bits = Bits::clear(130);
            let set: Vec<u32> = (0..130).filter(|at| at % 3 != 1).collect();
            set.iter().for_each(|at| bits.set(*at));
            let within = |at: &u32| (run.0..run.0 + run.1).contains(at);
            assert_eq!(bits.unset_run(run), set.iter().filter(|at| within(at)).count() as u32, "{run:?}");
            let left: Vec<u32> = (0..130).filter(|at| bits.get(*at)).collect();
            assert!(left.iter().eq(set.iter().filter(|at| !within(at))), "{run:?}: {left:?}");
        }
    }
}
