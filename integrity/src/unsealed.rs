//! Blocks whose tags are not computed yet, and the values for these tags.
//!
//! Sealing takes one pass over the data, which a device with a slow medium can do while the data are being written. So
//! data may be passed with a description of their tags instead of the tags. The data are immutable, so it makes no
//! difference when they are sealed.

use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use crate::tuple::Tuple;
use crate::{PiFormat, Sealed, Tags};

/// Blocks that are contiguous in memory, and the tags for sealing them. Only [`Unsealed::seal`] turns them into a
/// [`Sealed`].
#[derive(Clone, Debug)]
pub struct Unsealed {
    data: Slice,
    size: BlockSize,
    format: Option<PiFormat>,
    tags: Tags,
}

impl Unsealed {
    /// Data to be sealed later, with these tags and in this format.
    ///
    /// # Panics
    /// If the length of `data` is not a multiple of the block size: a bug of the caller, which no input causes.
    pub fn new(data: Slice, size: BlockSize, format: Option<PiFormat>, tags: Tags) -> Unsealed {
        assert_eq!(data.len() % size.bytes(), 0, "data must be whole blocks");
        Unsealed { data, size, format, tags }
    }

    /// Computes the tags, in one pass over the data.
    pub fn seal(self) -> Sealed {
        Sealed::seal(self.data, self.size, self.format, &self.tags)
    }

    /// The data, block after block.
    pub fn data(&self) -> &Slice {
        &self.data
    }

    /// The size of a block.
    pub fn size(&self) -> BlockSize {
        self.size
    }

    /// The format that the tuples will have.
    pub fn format(&self) -> Option<PiFormat> {
        self.format
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.data.len() >> self.size.shift()
    }

    /// `blocks` blocks, beginning with the one at index `first`. The bytes are shared; each block gets the same tags as
    /// in the whole.
    ///
    /// # Panics
    /// If the run is not within the data.
    #[must_use]
    pub fn slice(&self, first: usize, blocks: usize) -> Unsealed {
        let size = self.size.bytes();
        let initial_ref_tag = self.ref_tag_behind(first as u64);
        let data = self.data.slice(first * size..(first + blocks) * size);
        Unsealed { data, tags: Tags { initial_ref_tag, ..self.tags }, ..*self }
    }

    fn ref_tag_behind(&self, blocks: u64) -> u64 {
        let first = self.tags.initial_ref_tag;
        self.format.map_or(first, |format| format.reference_tag(first, blocks))
    }

    /// Moves the blocks to other addresses, like [`Sealed::with_ref_tags_shifted`] with the same value for every block.
    #[must_use]
    pub fn with_ref_tags_shifted(self, delta: u64) -> Unsealed {
        let Some(format) = self.format.filter(|format| format.protection().increments_ref_tag()) else { return self };
        let Tags { app_tag, storage_tag, initial_ref_tag } = self.tags;
        // In types that count blocks, the application tag alone decides, so either all tuples of these tags are escaped
        // or none.
        if (Tuple { guard: 0, app_tag, storage_tag, ref_tag: initial_ref_tag }).is_escaped(format) {
            return self;
        }
        let initial_ref_tag = format.reference_tag(initial_ref_tag, delta);
        Unsealed { tags: Tags { initial_ref_tag, ..self.tags }, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GuardKind, ProtectionType};
    use proptest::prelude::*;

    const SIZE: BlockSize = BlockSize::B512;
    const BLOCKS: usize = 5;

    fn noise(seed: u8) -> Slice {
        let bytes: Vec<u8> = (0..BLOCKS * SIZE.bytes()).map(|i| (i * 7 + i / 91) as u8 ^ seed).collect();
        Slice::copy_from(&bytes)
    }

    fn bytes_of(sealed: &Sealed) -> (Vec<u8>, Vec<u8>) {
        (sealed.joined_data().to_vec(), sealed.joined_tags().to_vec())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Sealing before or after slicing and moving gives the same data and the same tuples, escaped ones too.
        #[test]
        fn when_blocks_are_sealed_makes_no_difference(
            guard in prop::sample::select(&GuardKind::ALL[..]), protection in prop::sample::select(&ProtectionType::ALL[..]),
            seed in any::<u8>(), app_tag in prop::sample::select(&[0u16, 7, 0xFFFE, 0xFFFF][..]), storage_tag in any::<u64>(),
            initial_ref_tag in any::<u64>(), delta in any::<u64>(), first in 0..BLOCKS, blocks in 1..=BLOCKS,
        ) {
            let format = Some(PiFormat::with_default_storage_tag(guard, protection));
            let tags = Tags { app_tag, storage_tag, initial_ref_tag };
            let blocks = blocks.min(BLOCKS - first);
            let (sealed, unsealed) = (Sealed::seal(noise(seed), SIZE, format, &tags), Unsealed::new(noise(seed), SIZE, format, tags));
            prop_assert_eq!((unsealed.blocks(), unsealed.size(), unsealed.format()), (BLOCKS, SIZE, format));
            prop_assert_eq!(bytes_of(&sealed), bytes_of(&unsealed.clone().seal()));
            let (sealed, unsealed) = (sealed.slice(first, blocks), unsealed.slice(first, blocks));
            prop_assert_eq!(bytes_of(&sealed), bytes_of(&unsealed.clone().seal()));
            let (sealed, unsealed) = (sealed.with_ref_tags_shifted(std::iter::repeat(delta)), unsealed.with_ref_tags_shifted(delta));
            prop_assert_eq!(bytes_of(&sealed), bytes_of(&unsealed.seal()));
        }
    }

    #[test]
    fn blocks_without_a_format_get_no_tags_wherever_they_go() {
        let unsealed = Unsealed::new(noise(1), SIZE, None, Tags::default());
        let moved = unsealed.slice(1, 2).with_ref_tags_shifted(9).seal();
        assert_eq!((moved.blocks(), moved.joined_tags().len()), (2, 0));
        assert_eq!(moved.joined_data()[..], noise(1)[512..1536]);
        assert!(moved.has_verified_guards());
    }

    #[test]
    #[should_panic(expected = "whole blocks")]
    fn a_part_of_a_block_is_rejected() {
        let _ = Unsealed::new(noise(1).slice(..700), SIZE, None, Tags::default());
    }
}
