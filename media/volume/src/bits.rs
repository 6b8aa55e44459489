//! A run of bits in words, and the runs of clear ones among them.

/// A run: the first one and how many.
pub(crate) type Run = (u32, u32);

/// So many bits. Nothing behind the last one is ever found.
pub(crate) struct Bits {
    words: Vec<u64>,
    len: u32,
}

impl Bits {
    /// So many bits, all clear.
    pub fn clear(len: u32) -> Bits {
        Bits { words: vec![0; len.div_ceil(64) as usize], len }
    }

    /// How many there are.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether a bit is set.
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

    /// Whether a run lies within and every bit of it is clear.
    pub fn is_clear(&self, (start, count): Run) -> bool {
        start + count <= self.len && self.next_set(start, start + count).is_none()
    }

    /// The first run of clear bits from `from` on and before `end`: its start and its length, at most `max`.
    pub fn clear_run(&self, from: u32, end: u32, max: u32) -> Option<Run> {
        let start = self.next(from, end, |word| !word)?;
        let end = end.min(self.len).min(start.saturating_add(max));
        Some((start, self.next_set(start, end).unwrap_or(end) - start))
    }

    /// Every run of clear bits from `from` on and before `end`, none longer than `max`.
    pub fn clear_runs(&self, from: u32, end: u32, max: u32) -> impl Iterator<Item = Run> {
        let mut at = from;
        std::iter::from_fn(move || {
            let (start, len) = self.clear_run(at, end, max)?;
            at = start + len;
            Some((start, len))
        })
    }

    /// The first set bit from `from` on and before `end`.
    pub fn next_set(&self, from: u32, end: u32) -> Option<u32> {
        self.next(from, end, |word| word)
    }

    /// The first bit from `from` on and before `end` that is set in `view` of its word.
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
}
