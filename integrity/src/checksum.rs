//! Checksums of the data of many blocks, of the kinds that a device can compute without sending the data.
//!
//! Both kinds are CRCs, so the CRC of a whole can be computed from those of its parts ([`ChecksumKind::combine`]): a
//! file system that stores the CRC-32C of each sector compares those of a long run with one checksum from the device.
//!
//! Invariants: a checksum is a finished CRC in the low [`ChecksumKind::bits`] bits, and that of no bytes is 0. A
//! checksum is combined only from guards that were compared with the data before ([`ChecksumKind::append_guards`]).

use std::fmt;
use std::sync::LazyLock;

use sealblock_units::BlockSize;

use crate::combine::{Combiner, Crc, Crc32c, Crc64};
use crate::{GuardKind, PiFormat, combine, guard, tuple};

/// The kinds of checksums of the data of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ChecksumKind {
    /// CRC-64/NVME.
    #[default]
    Crc64Nvme,
    /// CRC-32C (Castagnoli), which several file systems store for each sector.
    Crc32c,
}

impl ChecksumKind {
    /// Every kind.
    pub const ALL: [ChecksumKind; 2] = [ChecksumKind::Crc64Nvme, ChecksumKind::Crc32c];

    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            ChecksumKind::Crc64Nvme => "CRC-64/NVME",
            ChecksumKind::Crc32c => "CRC-32C",
        }
    }

    /// The number of bits of a checksum.
    pub const fn bits(self) -> u32 {
        match self {
            ChecksumKind::Crc64Nvme => 64,
            ChecksumKind::Crc32c => 32,
        }
    }

    /// The guard kind that uses the same CRC.
    pub const fn guard(self) -> GuardKind {
        match self {
            ChecksumKind::Crc64Nvme => GuardKind::Crc64,
            ChecksumKind::Crc32c => GuardKind::Crc32c,
        }
    }

    /// The checksum of `bytes`.
    pub fn compute(self, bytes: &[u8]) -> u64 {
        guard::compute(self.guard(), bytes)
    }

    /// Continues a checksum: that of the bytes that `checksum` covers, followed by `bytes`. Start with 0.
    pub fn append(self, checksum: u64, bytes: &[u8]) -> u64 {
        guard::append(self.guard(), checksum, bytes)
    }

    /// The checksum of a part with checksum `first`, followed by a part with checksum `second` and `second_bytes`
    /// bytes. For many parts of the same length a [`Combiner`] is faster.
    pub fn combine(self, first: u64, second: u64, second_bytes: u64) -> u64 {
        match self {
            ChecksumKind::Crc64Nvme => combine::crc64(first, second, second_bytes),
            ChecksumKind::Crc32c => u64::from(combine::crc32c(first as u32, second as u32, second_bytes)),
        }
    }

    /// The checksum of this many zero bytes. The time is logarithmic in their number.
    pub fn of_zeroes(self, bytes: u64) -> u64 {
        // Zero bytes multiply the running state, which is all ones at the start and inverted at the end.
        let ones = u64::MAX >> (64 - self.bits());
        self.combine(ones, 0, bytes) ^ ones
    }

    /// Continues a checksum: that of the bytes that `checksum` covers, followed by blocks, computed from the guards in
    /// their tuples. `None` if the guard is another CRC, or if a tuple disables the check of its block: then the
    /// checksum must be computed from the data.
    ///
    /// Every guard must have been compared with the data that were just read; otherwise the checksum covers bytes that
    /// were not checked.
    ///
    /// # Panics
    /// If `tags` is not a whole number of tuples: a bug of the caller, which no input causes.
    pub fn append_guards(self, checksum: u64, format: PiFormat, size: BlockSize, tags: &[u8]) -> Option<u64> {
        if format.guard() != self.guard() {
            return None;
        }
        let (tuples, rest) = tags.as_chunks::<TUPLE_BYTES>();
        assert!(rest.is_empty(), "{} bytes of tags are no whole tuples", tags.len());
        let escape = tuple::escape_mask(format);
        if tuples.iter().any(|bytes| tuple::load(TUPLE_BYTES, bytes) & escape == escape) {
            return None;
        }
        Some(match self {
            ChecksumKind::Crc64Nvme => {
                let guards = tuples.iter().map(|bytes| (tuple::load(TUPLE_BYTES, bytes) >> 64) as u64);
                CRC64_OF_BLOCKS.of(size).join_more(checksum, guards)
            }
            ChecksumKind::Crc32c => {
                let guards = tuples.iter().map(|bytes| (tuple::load(TUPLE_BYTES, bytes) >> 96) as u32);
                u64::from(CRC32C_OF_BLOCKS.of(size).join_more(checksum as u32, guards))
            }
        })
    }
}

impl fmt::Display for ChecksumKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The length of a tuple with a guard of 32 or 64 bits. The guard comes first in it.
const TUPLE_BYTES: usize = GuardKind::Crc32c.tuple_bytes();
const _: () = assert!(GuardKind::Crc64.tuple_bytes() == TUPLE_BYTES);

/// The tables that combine whole blocks, created on first use and shared by all threads.
struct BlockCombiners<C: Crc> {
    b512: LazyLock<Combiner<C>>,
    b4096: LazyLock<Combiner<C>>,
}

static CRC32C_OF_BLOCKS: BlockCombiners<Crc32c> =
    BlockCombiners { b512: LazyLock::new(|| Combiner::new(512)), b4096: LazyLock::new(|| Combiner::new(4096)) };
static CRC64_OF_BLOCKS: BlockCombiners<Crc64> =
    BlockCombiners { b512: LazyLock::new(|| Combiner::new(512)), b4096: LazyLock::new(|| Combiner::new(4096)) };

impl<C: Crc> BlockCombiners<C> {
    fn of(&self, size: BlockSize) -> &Combiner<C> {
        match size {
            BlockSize::B512 => &self.b512,
            BlockSize::B4096 => &self.b4096,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Checks, ProtectionType, Sealed, Tags, Unverified};
    use proptest::prelude::*;
    use sealblock_runtime_memory::Slice;

    #[test]
    fn the_nine_digits_have_the_check_values() {
        assert_eq!(ChecksumKind::Crc32c.compute(b"123456789"), 0xE306_9283);
        assert_eq!(ChecksumKind::Crc64Nvme.compute(b"123456789"), 0xAE8B_1486_0A79_9888);
        for kind in ChecksumKind::ALL {
            let (first, second) = (kind.compute(b"1234"), kind.compute(b"56789"));
            assert_eq!(kind.combine(first, second, 5), kind.compute(b"123456789"), "{kind}");
            assert_ne!(kind.combine(second, first, 4), kind.compute(b"123456789"), "{kind} in another order");
            assert_ne!(kind.combine(first, second, 4), kind.compute(b"123456789"), "{kind} of another length");
            assert_eq!(kind.compute(b""), 0, "{kind} of nothing");
        }
    }

    #[test]
    fn zeroes_are_summed_without_being_there() {
        for kind in ChecksumKind::ALL {
            for bytes in [0, 1, 2, 3, 511, 512, 4096, 262_144, 1_000_003] {
                assert_eq!(kind.of_zeroes(bytes), kind.compute(&vec![0; bytes as usize]), "{kind} of {bytes}");
            }
        }
    }

    fn kinds() -> impl Strategy<Value = ChecksumKind> {
        prop::sample::select(&ChecksumKind::ALL[..])
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// However a run is divided, the checksums of its parts combine to that of the whole.
        #[test]
        fn parts_give_the_whole(
            kind in kinds(), bytes in proptest::collection::vec(any::<u8>(), 0..6000),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).chain([0, bytes.len()]).collect();
            at.sort_unstable();
            let parts = at.windows(2).map(|edges| &bytes[edges[0]..edges[1]]);
            let combined = parts.clone().fold(0, |whole, part| kind.combine(whole, kind.compute(part), part.len() as u64));
            prop_assert_eq!(combined, kind.compute(&bytes));
            prop_assert_eq!(parts.fold(0, |whole, part| kind.append(whole, part)), kind.compute(&bytes));
            prop_assert!(combined <= u64::MAX >> (64 - kind.bits()));
        }

        /// Blocks that were checked have the checksum of their data, with any guard and any checks.
        #[test]
        fn blocks_have_the_checksum_of_their_data(
            kind in kinds(), guard in prop::sample::select(&GuardKind::ALL[..]), is_protected: bool, checks_guard: bool,
            protection in prop::sample::select(&ProtectionType::ALL[..]), escaped in proptest::option::of(0_usize..6),
            data in proptest::collection::vec(any::<u8>(), 6 * 512), before in any::<u32>(),
        ) {
            let format = is_protected.then_some(PiFormat::with_default_storage_tag(guard, protection));
            let data = Slice::copy_from(&data);
            let made = Sealed::seal(data.clone(), BlockSize::B512, format, &Tags { initial_ref_tag: 9, ..Tags::default() });
            let mut tags = made.joined_tags().to_vec();
            if let (Some(format), Some(block)) = (format, escaped) {
                let bytes = format.tuple_bytes();
                tags[block * bytes..(block + 1) * bytes].fill(0xFF);
            }
            let read = Unverified::new(data.clone(), Slice::copy_from(&tags), BlockSize::B512, format).unwrap();
            let read = read.verify(&Checks { guard: checks_guard, ..Checks::NONE }).unwrap();
            let before = u64::from(before);
            prop_assert_eq!(read.checksum_append(kind, before), kind.append(before, &data));
            let parts = Sealed::join([read.slice(0, 2), read.slice(2, 4)]);
            prop_assert_eq!(parts.checksum(kind), kind.compute(&data));
        }
    }

    fn sealed(guard: GuardKind, size: BlockSize) -> (PiFormat, Slice, Vec<u8>) {
        let format = PiFormat::with_default_storage_tag(guard, ProtectionType::Type1);
        let bytes: Vec<u8> = (0..5 * size.bytes()).map(|i| (i * 13 + i / 77) as u8).collect();
        let data = Slice::copy_from(&bytes);
        let tags = Sealed::seal(data.clone(), size, Some(format), &Tags::default()).joined_tags().to_vec();
        (format, data, tags)
    }

    #[test]
    fn guards_of_the_same_crc_stand_for_the_data_and_no_others_do() {
        for kind in ChecksumKind::ALL {
            for size in [BlockSize::B512, BlockSize::B4096] {
                for guard in GuardKind::ALL {
                    let (format, data, tags) = sealed(guard, size);
                    let of_guards = kind.append_guards(7, format, size, &tags);
                    let wanted = (guard == kind.guard()).then(|| kind.append(7, &data));
                    assert_eq!(of_guards, wanted, "{kind} of {size}-byte blocks with guard {guard:?}");
                }
            }
        }
    }

    #[test]
    fn blocks_that_disable_their_check_are_not_summed_by_their_guards() {
        for kind in ChecksumKind::ALL {
            let (format, _, mut tags) = sealed(kind.guard(), BlockSize::B512);
            assert!(kind.append_guards(0, format, BlockSize::B512, &tags).is_some());
            tags[32..48].fill(0xFF);
            assert_eq!(kind.append_guards(0, format, BlockSize::B512, &tags), None, "{kind}");
        }
    }
}
