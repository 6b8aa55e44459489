//! All random choices of a run, from one seed.
//!
//! SplitMix64: one word of state, no weak seeds, and random enough for choosing schedules. Each part of a run forks its
//! own generator by name, so that an additional choice in one part does not change those of another.

use std::cell::Cell;
use std::rc::Rc;

/// A random generator. Interior mutability lets the parts of one machine share it; it never leaves its thread.
#[derive(Debug)]
pub struct Random(Cell<u64>);

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes one word so that neighbouring inputs give unrelated outputs.
pub const fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Random {
    /// The generator of this seed.
    pub const fn new(seed: u64) -> Random {
        Random(Cell::new(mix(seed ^ GOLDEN)))
    }

    /// A separate generator for the part called `name`.
    pub fn fork(&self, name: &str) -> Random {
        let named = name.bytes().fold(self.word(), |word, byte| mix(word ^ u64::from(byte)));
        Random::new(named)
    }

    /// 64 random bits.
    pub fn word(&self) -> u64 {
        let next = self.0.get().wrapping_add(GOLDEN);
        self.0.set(next);
        mix(next)
    }

    /// A number below `end`; 0 when `end` is 0.
    pub fn below(&self, end: u64) -> u64 {
        // The bias of the multiplication is below 2^-32 for every range used here.
        ((u128::from(self.word()) * u128::from(end)) >> 64) as u64
    }

    /// A number from `first` to `last`, both possible.
    pub fn between(&self, first: u64, last: u64) -> u64 {
        first + self.below(last.saturating_sub(first) + 1)
    }

    /// True with a probability of `percent`.
    pub fn chance(&self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of `choices`.
    ///
    /// # Panics
    /// If `choices` is empty.
    pub fn pick<'a, T>(&self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }
}

/// A running hash of every event of a run, in order, shared by all its parts: two runs are the same if their hashes are
/// equal.
#[derive(Clone, Debug, Default)]
pub struct Trace(Rc<Cell<u64>>);

impl Trace {
    /// Adds an event: its kind, and two numbers that describe it.
    pub fn note(&self, what: u8, first: u64, second: u64) {
        let word = mix(self.0.get() ^ u64::from(what)) ^ first;
        self.0.set(mix(mix(word) ^ second));
    }

    /// The hash so far.
    pub fn hash(&self) -> u64 {
        self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_from_the_seed_and_stay_in_range() {
        let (a, b) = (Random::new(7), Random::new(7));
        for _ in 0..1000 {
            assert_eq!(a.word(), b.word());
            assert!((3..=9).contains(&a.between(3, 9)));
            assert_eq!(b.between(4, 4), 4);
        }
        assert_ne!(Random::new(1).word(), Random::new(2).word());
        assert_ne!(Random::new(1).fork("a").word(), Random::new(1).fork("b").word());
        assert_eq!(a.below(0), 0);
    }

    #[test]
    fn chances_are_about_right() {
        let random = Random::new(3);
        let hits = (0..10_000).filter(|_| random.chance(30)).count();
        assert!((2_700..3_300).contains(&hits), "{hits}");
        assert!(!random.chance(0) && random.chance(100));
    }
}
