//! Random choices, all from one seed.

/// A source of random choices: xorshift64*, which is small, and good enough to choose blocks by.
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// The choices of this seed and this stream. Streams of one seed have nothing to do with each other.
    pub fn new(seed: u64, stream: u64) -> Draw {
        let mixed =
            seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream.wrapping_add(1).wrapping_mul(0xd1b5_4a32_d192_ed03);
        let mut draw = Draw(mixed | 1);
        // The first few values still resemble the seed.
        for _ in 0..8 {
            draw.word();
        }
        draw
    }

    /// 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number from 0 to `end - 1`; 0 when `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(end)) >> 64) as u64
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_stay_in_range_and_follow_the_seed() {
        let mut draws = [Draw::new(1, 0), Draw::new(1, 0), Draw::new(1, 1)];
        let drawn = draws.each_mut().map(|draw| (0..1000).map(|_| draw.below(8)).collect::<Vec<_>>());
        assert!(drawn[0] == drawn[1] && drawn[0] != drawn[2]);
        assert!((0..8).all(|value| drawn[0].contains(&value)) && drawn[0].iter().all(|value| *value < 8));
    }
}
