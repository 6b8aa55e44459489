//! The content of a block, made from its write and its address, so that reading it identifies both; and the random
//! choices.

use fastrand::Rng;
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
    /// Anything else: parts of several writes, or the content of another address.
    Foreign,
}

/// Fills one block.
pub fn fill(block: &mut [u8], version: Version, lba: Lba) {
    block[..8].copy_from_slice(&version.to_le_bytes());
    rng(version, lba.get()).fill(&mut block[8..]);
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

/// The random choices of this seed and this stream. Streams of one seed are independent.
pub fn rng(seed: u64, stream: u64) -> Rng {
    Rng::with_seed(Rng::with_seed(seed).u64(..) ^ stream)
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
        let mut draws = [rng(1, 0), rng(1, 0), rng(1, 1)];
        let drawn = draws.each_mut().map(|rng| (0..1000).map(|_| rng.u64(..8)).collect::<Vec<_>>());
        assert!(drawn[0] == drawn[1] && drawn[0] != drawn[2]);
        assert!((0..8).all(|value| drawn[0].contains(&value)) && drawn[0].iter().all(|value| *value < 8));
    }
}
