//! Moving blocks to other addresses, for every format.

use std::iter::repeat;

use proptest::prelude::*;
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use super::{all_checks, formats, mismatches, noise, sizes, tags};
use crate::{Checks, Field, GuardKind, PiFormat, ProtectionType, Sealed, Tags, Unverified};

const SIZE: BlockSize = BlockSize::B512;
const TYPE1: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);

fn blocks(format: PiFormat, size: BlockSize, seed: u64, tags: &Tags) -> Sealed {
    Sealed::seal(Slice::copy_from(&noise(seed, size.bytes() * 3)), size, Some(format), tags)
}

proptest! {
    #[test]
    fn blocks_verify_where_they_were_moved_to_and_back_they_are_as_before(
        format in formats(), size in sizes(), tags in tags(), seed in any::<u64>(), gain in any::<u64>(),
    ) {
        let before = blocks(format, size, seed, &tags);
        let moved = before.clone().with_ref_tags_shifted(repeat(gain));
        let there = all_checks(&Tags { initial_ref_tag: tags.initial_ref_tag.wrapping_add(gain), ..tags });
        prop_assert_eq!(mismatches(format, size, &moved.joined_data(), &moved.joined_tags(), &there), []);
        let back = moved.with_ref_tags_shifted(repeat(gain.wrapping_neg()));
        prop_assert!(back.joined_tags()[..] == before.joined_tags()[..] && back.joined_data()[..] == before.joined_data()[..]);
    }

    /// If reference tags are checked and their bits change, the check at the old address fails.
    #[test]
    fn moved_blocks_do_not_verify_where_they_were(tags in tags(), seed in any::<u64>(), gain in 1u64..1 << 32) {
        let moved = blocks(TYPE1, SIZE, seed, &tags).with_ref_tags_shifted(repeat(gain));
        let found = mismatches(TYPE1, SIZE, &moved.joined_data(), &moved.joined_tags(), &all_checks(&tags));
        let fields: Vec<_> = found.iter().map(|mismatch| (mismatch.block, mismatch.field)).collect();
        prop_assert_eq!(fields, [(0, Field::RefTag), (1, Field::RefTag), (2, Field::RefTag)]);
    }

    #[test]
    fn each_block_has_its_own_gain_and_wrong_tags_stay_as_wrong(
        first in any::<u32>(), gains in any::<[u64; 3]>(), wrong in 1u32..,
    ) {
        let tags = Tags { initial_ref_tag: u64::from(first), ..Tags::default() };
        let sealed = blocks(TYPE1, SIZE, 5, &tags);
        let mut bytes = sealed.joined_tags().to_vec();
        let second = first.wrapping_add(1).wrapping_add(wrong);
        bytes[12..16].copy_from_slice(&second.to_be_bytes());
        let found = Unverified::new(sealed.joined_data(), Slice::copy_from(&bytes), SIZE, Some(TYPE1)).unwrap();
        let moved = found.verify(&Checks::NONE).unwrap().with_ref_tags_shifted(gains.into_iter());
        let reference = |block: usize| u32::from_be_bytes(moved.joined_tags()[block * 8 + 4..block * 8 + 8].try_into().unwrap());
        prop_assert_eq!(reference(0), first.wrapping_add(gains[0] as u32));
        prop_assert_eq!(reference(1), second.wrapping_add(gains[1] as u32));
        prop_assert_eq!(reference(2), first.wrapping_add(2).wrapping_add(gains[2] as u32));
    }
}

#[test]
fn tuples_that_switch_checking_off_stay() {
    let escaped = blocks(TYPE1, SIZE, 1, &Tags { app_tag: 0xFFFF, storage_tag: 0, initial_ref_tag: 7 });
    assert!(escaped.clone().with_ref_tags_shifted(repeat(3)).joined_tags()[..] == escaped.joined_tags()[..]);
    let checked = blocks(TYPE1, SIZE, 1, &Tags { app_tag: 0xFFFE, storage_tag: 0, initial_ref_tag: 7 });
    assert!(checked.clone().with_ref_tags_shifted(repeat(3)).joined_tags()[..] != checked.joined_tags()[..]);
}

#[test]
fn guards_of_new_tuples_count_as_unchecked() {
    let sealed = blocks(TYPE1, SIZE, 2, &Tags::default());
    assert!(
        sealed.has_verified_guards() && sealed.clone().with_ref_tags_shifted(repeat(0)).has_verified_guards(),
        "nothing changes"
    );
    assert!(!sealed.with_ref_tags_shifted(repeat(1)).has_verified_guards());
    let type3 = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type3);
    assert!(
        blocks(type3, SIZE, 2, &Tags::default()).with_ref_tags_shifted(repeat(1)).has_verified_guards(),
        "its tags never move"
    );
}

#[test]
#[should_panic(expected = "one addend for each block")]
fn a_block_without_a_gain_is_refused() {
    blocks(TYPE1, SIZE, 3, &Tags::default()).with_ref_tags_shifted([1, 2].into_iter());
}
