//! The CRC-32C of data blocks interleaved with their tags, without reading the data again.

use sealblock_units::BlockSize;

use super::{Combiner, Crc32c};
use crate::{GuardKind, PiFormat, guard};

/// The operators for one block size and tuple size. Make it once for a namespace; it holds no state of
/// a run.
#[derive(Clone)]
pub struct InterleavedDigest {
    /// Appends a block's data.
    data: Combiner<Crc32c>,
    /// Appends a tuple.
    tuple: Combiner<Crc32c>,
}

impl InterleavedDigest {
    /// The operators for data blocks of `size`, each followed by `tuple_bytes` bytes (none, for plain data).
    pub fn new(size: BlockSize, tuple_bytes: usize) -> InterleavedDigest {
        InterleavedDigest { data: Combiner::new(size.bytes() as u64), tuple: Combiner::new(tuple_bytes as u64) }
    }

    /// The CRC-32C of what `crc` was computed over, followed by a block with CRC-32C `data_crc` and then by `tuple`;
    /// start with 0.
    ///
    /// Panics if `tuple` has not the length that the operators were made for.
    #[inline]
    pub fn join(&self, crc: u32, data_crc: u32, tuple: &[u8]) -> u32 {
        assert_eq!(tuple.len() as u64, self.tuple.part_bytes(), "the digest was made for tuples of another length");
        let crc = self.data.join(crc, data_crc);
        if tuple.is_empty() { crc } else { self.tuple.join(crc, guard::crc32c(tuple)) }
    }

    /// The CRC-32C of what `crc` was computed over, followed by blocks and their tuples, interleaved. The data's CRCs
    /// are the guards in the tuples, which must have been verified against the data before, or the digest vouches for
    /// bytes that nobody looked at.
    ///
    /// Panics if the guard of `format` is not CRC-32C, or `tags` is no whole number of tuples.
    pub fn join_sealed(&self, crc: u32, format: PiFormat, tags: &[u8]) -> u32 {
        assert_eq!(format.guard(), GuardKind::Crc32c, "only the guard of the digest's own kind can stand for the data");
        let (tuples, rest) = tags.as_chunks::<{ GuardKind::Crc32c.tuple_bytes() }>();
        assert!(rest.is_empty(), "{} bytes of tags are no whole tuples", tags.len());
        tuples.iter().fold(crc, |crc, tuple| {
            let (guard, _) = tuple.split_first_chunk().expect("a tuple is longer than its guard");
            self.join(crc, u32::from_be_bytes(*guard), tuple)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ProtectionType, Tags, seal};
    use proptest::prelude::*;

    const FORMAT: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);

    fn interleaved(size: BlockSize, data: &[u8], tags: &[u8], tuple_bytes: usize) -> Vec<u8> {
        data.chunks(size.bytes()).zip(tags.chunks(tuple_bytes)).flat_map(|(d, t)| [d, t].concat()).collect()
    }

    proptest! {
        #[test]
        fn guards_give_the_digest_of_the_interleaved_bytes(
            data in proptest::collection::vec(any::<u8>(), 512 * 5),
            before in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let size = BlockSize::B512;
            let mut tags = [0; 16 * 5];
            seal(FORMAT, size, &data, &mut tags, &Tags { app_tag: 1, storage_tag: 2, initial_ref_tag: 3 });
            let whole = [before.clone(), interleaved(size, &data, &tags, 16)].concat();
            let digest = InterleavedDigest::new(size, 16).join_sealed(guard::crc32c(&before), FORMAT, &tags);
            prop_assert_eq!(digest, guard::crc32c(&whole));
        }

        #[test]
        fn tuples_of_any_length_join(
            data in proptest::collection::vec(any::<u8>(), 512 * 3), tuple_bytes in 1_usize..20,
        ) {
            let size = BlockSize::B512;
            let tags: Vec<u8> = (0..3 * tuple_bytes).map(|i| i as u8).collect();
            let digest = InterleavedDigest::new(size, tuple_bytes);
            let blocks = data.chunks(512).zip(tags.chunks(tuple_bytes));
            let crc = blocks.fold(0, |crc, (data, tuple)| digest.join(crc, guard::crc32c(data), tuple));
            prop_assert_eq!(crc, guard::crc32c(&interleaved(size, &data, &tags, tuple_bytes)));
        }
    }

    #[test]
    fn without_tuples_the_data_alone_is_joined() {
        let data = [7; 1024];
        let digest = InterleavedDigest::new(BlockSize::B512, 0);
        let crc = data.chunks(512).fold(0, |crc, data| digest.join(crc, guard::crc32c(data), &[]));
        assert_eq!(crc, guard::crc32c(&data));
    }

    #[test]
    #[should_panic(expected = "own kind")]
    fn another_guard_is_refused() {
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1);
        InterleavedDigest::new(BlockSize::B512, 16).join_sealed(0, format, &[0; 16]);
    }
}
