//! The content of a block, made from its write and its address, so that reading it identifies both; and the random draws.

use sealblock_units::Lba;

/// The number of a write: unique on a volume, and never zero.
pub type Version = u64;

/// The content found in a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Content {
    /// Nothing but zeroes: never written, zeroed or discarded.
    Zeroes,
    /// Exactly the content of this write.
    Written(Version),
    /// Anything else: parts of several writes, or a block of another address.
    Foreign,
}

/// Fills one block.
pub fn fill(block: &mut [u8], version: Version, lba: Lba) {
    let mut words = Draw::new(version, lba.get());
    block[..8].copy_from_slice(&version.to_le_bytes());
    for word in block[8..].chunks_mut(8) {
        word.copy_from_slice(&words.word().to_le_bytes()[..word.len()]);
    }
}

/// Identifies the content of a block, comparing every byte.
pub fn recognise(block: &[u8], lba: Lba) -> Content {
    if block.iter().all(|byte| *byte == 0) {
        return Content::Zeroes;
    }
    let version = block.first_chunk::<8>().map_or(0, |word| Version::from_le_bytes(*word));
    let mut expected = vec![0; block.len()];
    fill(&mut expected, version, lba);
    if expected == block { Content::Written(version) } else { Content::Foreign }
}

/// A source of random choices: xorshift64*, which is small, and good enough to choose blocks by.
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// The draws of this seed and this stream. Streams of one seed are independent.
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
    fn a_block_is_recognised_and_a_mixture_is_not() {
        let (lba, mut block, mut other) = (Lba::new(7), vec![0; 512], vec![0; 512]);
        assert_eq!(recognise(&block, lba), Content::Zeroes);
        fill(&mut block, 42, lba);
        fill(&mut other, 43, lba);
        assert_eq!(recognise(&block, lba), Content::Written(42));
        assert_eq!(recognise(&block, Lba::new(8)), Content::Foreign);
        block[256..].copy_from_slice(&other[256..]);
        assert_eq!(recognise(&block, lba), Content::Foreign);
        block[256..].fill(0);
        assert_eq!(recognise(&block, lba), Content::Foreign);
    }

    #[test]
    fn choices_stay_in_range_and_follow_the_seed() {
        let mut draws = [Draw::new(1, 0), Draw::new(1, 0), Draw::new(1, 1)];
        let drawn = draws.each_mut().map(|draw| (0..1000).map(|_| draw.below(8)).collect::<Vec<_>>());
        assert!(drawn[0] == drawn[1] && drawn[0] != drawn[2]);
        assert!((0..8).all(|value| drawn[0].contains(&value)) && drawn[0].iter().all(|value| *value < 8));
    }
}
