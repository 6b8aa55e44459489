//! The content of a block, made from the write it belongs to and its address, so that reading it tells both.

use sealblock_units::Lba;

use crate::draw::Draw;

/// The number of a write; never used twice on one volume, and never zero.
pub type Version = u64;

/// What a block was found to hold.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Content {
    /// Nothing but zeroes: never written, zeroed or discarded.
    Zeroes,
    /// Whole and only what this write put there.
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

/// What a block holds, looking at every byte.
pub fn recognise(block: &[u8], lba: Lba) -> Content {
    if block.iter().all(|byte| *byte == 0) {
        return Content::Zeroes;
    }
    let version = block.first_chunk::<8>().map_or(0, |word| Version::from_le_bytes(*word));
    let mut expected = vec![0; block.len()];
    fill(&mut expected, version, lba);
    if expected == block { Content::Written(version) } else { Content::Foreign }
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
}
