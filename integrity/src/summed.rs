//! Sealing and checking with sums that another pass over the same bytes has made already.
//!
//! The 32-bit guard of a block is the CRC-32C of its data, which is also what data digests are joined from. Whoever summed
//! the data block by block for a digest has the guards with it, and whoever checked the guards has what a digest is made of.
//!
//! Invariants: sums are used only for the guard that they are, and only if there is one for each block; [`Sealed::sums`]
//! gives none for blocks whose guards were not compared with their data, so no digest vouches for bytes that nobody
//! looked at. That the sums given are those of these very bytes is the caller's promise: nothing but a second pass could
//! tell. Debug builds make that pass.

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::BlockSize;

use crate::checks::CompiledChecks;
use crate::wire::{self, Crc32c, GuardFormat};
use crate::{Checks, GuardKind, Mismatch, PiFormat, Sealed, Tags, Tuple, Unverified, guard};

impl Sealed {
    /// Makes the tags of `data` as [`Sealed::seal`] does, from the CRC-32C of each block instead of from the data. The sums
    /// must have been made of these bytes as they are now.
    ///
    /// # Panics
    /// When the guard of `format` is not CRC-32C, when `data` is no whole number of blocks, or when there is not one sum for
    /// each of them: a caller's bug, not an input's.
    pub fn seal_with_crcs(data: Slice, size: BlockSize, format: PiFormat, with: &Tags, sums: &[u32]) -> Sealed {
        assert_sums(format, size, &data, sums);
        let mut tags = Buffer::zeroed(sums.len() * format.tuple_bytes());
        let fixed = Tuple { guard: 0, app_tag: with.app_tag, storage_tag: with.storage_tag, ref_tag: 0 };
        let fixed = wire::pack(format, &fixed);
        for (block, (sum, tuple)) in sums.iter().zip(tags.chunks_exact_mut(Crc32c::TUPLE_BYTES)).enumerate() {
            let reference = u128::from(format.reference_tag(with.initial_ref_tag, block as u64));
            wire::store(Crc32c::TUPLE_BYTES, u128::from(*sum) << Crc32c::GUARD_SHIFT | fixed | reference, tuple);
        }
        Sealed::checked(data, tags.freeze(), size, Some(format), true)
    }

    /// The CRC-32C of each block's data, as far as its tags prove it: only with the 32-bit guard, and only if every guard was
    /// made from the data or compared with it.
    pub fn block_crcs(&self) -> Option<impl ExactSizeIterator<Item = u32> + '_> {
        let format =
            self.format().filter(|format| format.guard() == GuardKind::Crc32c && self.has_verified_guards())?;
        let tuples = self.tags().chunks_exact(format.tuple_bytes());
        Some(tuples.map(move |tuple| Tuple::read(format, tuple).guard as u32))
    }
}

impl Unverified {
    /// Checks the tags as [`Unverified::verify`] does, comparing guards with the CRC-32C of each block that is given instead
    /// of reading the data. The sums must have been made of these bytes as they are now.
    ///
    /// # Errors
    /// Every block that fails, with the first field of it that does.
    ///
    /// # Panics
    /// When the guard is not CRC-32C, or there is not one sum for each block: a caller's bug, not an input's.
    pub fn verify_with_crcs(self, checks: &Checks, sums: &[u32]) -> Result<Sealed, Vec<Mismatch>> {
        let format = self.format().expect("a caller that has sums asks for blocks with guards");
        assert_sums(format, self.size(), self.data(), sums);
        let demand = CompiledChecks::new(format, checks);
        let mut mismatches = Vec::new();
        for (block, (sum, tuple)) in sums.iter().zip(self.tags().chunks_exact(Crc32c::TUPLE_BYTES)).enumerate() {
            let found = wire::load(Crc32c::TUPLE_BYTES, tuple);
            let demanded = demand.tuple(block, u128::from(*sum) << Crc32c::GUARD_SHIFT);
            if !demand.is_escaped(found) && !demand.holds(found, demanded) {
                mismatches.push(demand.mismatch(block, found, demanded));
            }
        }
        if mismatches.is_empty() { Ok(self.into_sealed(checks)) } else { Err(mismatches) }
    }
}

/// Panics unless there is one sum of the guard's kind for each block; debug builds look whether it is the right one.
fn assert_sums(format: PiFormat, size: BlockSize, data: &[u8], sums: &[u32]) {
    assert_eq!(format.guard(), GuardKind::Crc32c, "only a CRC-32C can stand for the guard");
    assert_eq!(sums.len() * size.bytes(), data.len(), "one sum for each block");
    debug_assert!(
        data.chunks_exact(size.bytes()).map(guard::crc32c).eq(sums.iter().copied()),
        "the sums are not those of the data"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Field, Masked, ProtectionType};
    use proptest::prelude::*;

    const SIZE: BlockSize = BlockSize::B512;
    const BLOCKS: usize = 4;

    fn format(kind: GuardKind, protection: ProtectionType) -> PiFormat {
        PiFormat::with_default_storage_tag(kind, protection)
    }

    fn block_crcs(data: &[u8]) -> Vec<u32> {
        data.chunks(SIZE.bytes()).map(guard::crc32c).collect()
    }

    fn noise(seed: u8) -> Slice {
        let bytes: Vec<u8> = (0..BLOCKS * SIZE.bytes()).map(|i| (i * 13 + i / 77) as u8 ^ seed).collect();
        Slice::copy_from(&bytes)
    }

    fn unverified(data: &Slice, tags: &[u8], format: PiFormat) -> Unverified {
        Unverified::new(data.clone(), Slice::copy_from(tags), SIZE, Some(format)).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Sums given and sums made seal and find the same, whatever byte of the tags is wrong and whatever is asked.
        #[test]
        fn given_sums_do_what_made_sums_do(
            protection in prop::sample::select(&ProtectionType::ALL[..]), with in any::<(u16, u64, u64)>(),
            wrong in any::<(prop::sample::Index, u8)>(), asked in any::<(bool, Option<u16>, Option<u64>)>(),
        ) {
            let format = format(GuardKind::Crc32c, protection);
            let data = noise(with.0 as u8);
            let with = Tags { app_tag: with.0, storage_tag: with.1, initial_ref_tag: with.2 };
            let made = Sealed::seal(data.clone(), SIZE, Some(format), &with);
            let given = Sealed::seal_with_crcs(data.clone(), SIZE, format, &with, &block_crcs(&data));
            prop_assert_eq!(&made.tags()[..], &given.tags()[..]);
            prop_assert_eq!(made.has_verified_guards(), given.has_verified_guards());
            let mut tags = made.tags().to_vec();
            tags[wrong.0.index(BLOCKS * 16)] ^= wrong.1;
            let app_tag = asked.1.map(|expected| Masked { expected, mask: u16::MAX });
            let checks = Checks { guard: asked.0, app_tag, storage_tag: None, initial_ref_tag: asked.2.or(Some(with.initial_ref_tag)) };
            let by_data = unverified(&data, &tags, format).verify(&checks);
            let by_sums = unverified(&data, &tags, format).verify_with_crcs(&checks, &block_crcs(&data));
            match (by_data, by_sums) {
                (Ok(one), Ok(other)) => prop_assert_eq!(one.has_verified_guards(), other.has_verified_guards()),
                (one, other) => prop_assert_eq!(one.err(), other.err()),
            }
        }
    }

    #[test]
    fn a_guard_that_is_not_the_sum_is_found() {
        let (format, data) = (format(GuardKind::Crc32c, ProtectionType::Type1), noise(1));
        let mut tags = Sealed::seal(data.clone(), SIZE, Some(format), &Tags::default()).tags().to_vec();
        let checks = Checks { guard: true, ..Checks::NONE };
        assert!(unverified(&data, &tags, format).verify_with_crcs(&checks, &block_crcs(&data)).is_ok());
        tags[2 * 16 + 3] ^= 1;
        let found = unverified(&data, &tags, format).verify_with_crcs(&checks, &block_crcs(&data)).unwrap_err();
        assert_eq!(found.iter().map(|bad| (bad.block, bad.field)).collect::<Vec<_>>(), [(2, Field::Guard)]);
    }

    #[test]
    fn only_guards_that_were_compared_are_sums() {
        let (crc32c, data) = (format(GuardKind::Crc32c, ProtectionType::Type1), noise(2));
        let sealed = Sealed::seal(data.clone(), SIZE, Some(crc32c), &Tags::default());
        assert_eq!(sealed.block_crcs().unwrap().collect::<Vec<_>>(), block_crcs(&data));
        assert_eq!(sealed.slice(1, 2).block_crcs().unwrap().collect::<Vec<_>>(), block_crcs(&data)[1..3]);
        let full = Checks { guard: true, ..Checks::NONE };
        assert!(unverified(&data, sealed.tags(), crc32c).verify(&full).unwrap().block_crcs().is_some());
        assert!(
            unverified(&data, sealed.tags(), crc32c).verify(&Checks::NONE).unwrap().block_crcs().is_none(),
            "unchecked"
        );
        let crc16 =
            Sealed::seal(data.clone(), SIZE, Some(format(GuardKind::Crc16, ProtectionType::Type1)), &Tags::default());
        assert!(crc16.block_crcs().is_none(), "another guard");
        assert!(Sealed::seal(data, SIZE, None, &Tags::default()).block_crcs().is_none(), "no guard");
    }

    /// Blocks whose tuples switch checking off pass with whatever data, so nothing may be joined from their guards.
    #[test]
    fn escaped_blocks_have_no_sums() {
        let (format, data) = (format(GuardKind::Crc32c, ProtectionType::Type1), noise(3));
        let mut tags = Sealed::seal(data.clone(), SIZE, Some(format), &Tags::default()).tags().to_vec();
        tags[16..32].fill(0xFF);
        let full = Checks { guard: true, ..Checks::NONE };
        assert!(unverified(&data, &tags, format).verify(&full).unwrap().block_crcs().is_none());
        assert!(
            unverified(&data, &tags, format)
                .verify_with_crcs(&full, &block_crcs(&data))
                .unwrap()
                .block_crcs()
                .is_none()
        );
        let rest = unverified(&data, &tags, format).verify(&full).unwrap();
        assert!(Sealed::join(&[rest.slice(0, 1), rest.slice(2, 2)]).block_crcs().is_none());
    }

    #[test]
    #[should_panic(expected = "stand for the guard")]
    fn sums_of_another_kind_are_refused() {
        Sealed::seal_with_crcs(
            noise(4),
            SIZE,
            format(GuardKind::Crc64, ProtectionType::Type1),
            &Tags::default(),
            &[0; BLOCKS],
        );
    }

    #[test]
    #[should_panic(expected = "one sum for each block")]
    fn a_block_without_a_sum_is_refused() {
        let (data, crc32c) = (noise(5), format(GuardKind::Crc32c, ProtectionType::Type1));
        Sealed::seal_with_crcs(data.clone(), SIZE, crc32c, &Tags::default(), &block_crcs(&data)[1..]);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "not those of the data")]
    fn data_that_changed_after_it_was_summed_is_noticed_by_debug_builds() {
        let crc32c = format(GuardKind::Crc32c, ProtectionType::Type1);
        Sealed::seal_with_crcs(noise(6), SIZE, crc32c, &Tags::default(), &block_crcs(&noise(7)));
    }
}
