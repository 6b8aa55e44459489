//! Rebasing, for every pair of formats.

use proptest::prelude::*;
use sealblock_units::BlockSize;

use super::{all_checks, formats, mismatches, noise, sealed, sizes, tags};
use sealblock_runtime_memory::Slice;

use crate::{Checks, Field, GuardKind, Keep, PiFormat, ProtectionType, RebaseTags, Tags, Tuple, Unverified, rebase};

const CRC16: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
const CRC64: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1);
const IP: PiFormat = PiFormat::with_default_storage_tag(GuardKind::IpChecksum, ProtectionType::Type1);
const TYPE3: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type3);
const SIZE: BlockSize = BlockSize::B512;

fn replace_all(tags: &Tags) -> RebaseTags {
    RebaseTags {
        app_tag: Keep::Replace(tags.app_tag),
        storage_tag: Keep::Replace(tags.storage_tag),
        initial_ref_tag: Keep::Replace(tags.initial_ref_tag),
    }
}

/// The new tuples, and which fields of which blocks were bad.
fn rebased(
    (from, to): (PiFormat, PiFormat),
    size: BlockSize,
    data: &[u8],
    tuples: &[u8],
    checks: &Checks,
    output: &RebaseTags,
) -> (Vec<u8>, Vec<(usize, Field)>) {
    let mut new = vec![0xEE; data.len() / size.bytes() * to.tuple_bytes()];
    let mut found = Vec::new();
    let report = &mut |m: crate::Mismatch| found.push((m.block, m.field));
    let bad = rebase(from, to, size, data, tuples, &mut new, checks, output, report);
    assert_eq!(bad, found.len());
    (new, found)
}

proptest! {
    #[test]
    fn rebasing_is_sealing_anew(
        from in formats(), to in formats(), size in sizes(), old in tags(), new in tags(), seed in any::<u64>(),
    ) {
        let data = noise(seed, size.bytes() * 3);
        let tuples = sealed(from, size, &data, &old);
        // A reference tag of all ones together with an application tag of all ones cannot occur: `tags` creates no
        // escapes.
        let result = rebased((from, to), size, &data, &tuples, &all_checks(&old), &replace_all(&new));
        prop_assert_eq!(result, (sealed(to, size, &data, &new), vec![]));
    }

    #[test]
    fn keeping_everything_changes_nothing(format in formats(), size in sizes(), tags in tags(), seed in any::<u64>()) {
        let data = noise(seed, size.bytes() * 3);
        let tuples = sealed(format, size, &data, &tags);
        let result = rebased((format, format), size, &data, &tuples, &all_checks(&tags), &RebaseTags::default());
        prop_assert_eq!(result, (tuples, vec![]));
    }

    #[test]
    fn a_bad_block_is_found_and_gets_a_tuple_that_is_bad_too(
        from in formats(), to in formats(), size in sizes(), old in tags(), new in tags(), seed in any::<u64>(),
        bit in any::<prop::sample::Index>(),
    ) {
        let mut data = noise(seed, size.bytes() * 3);
        let tuples = sealed(from, size, &data, &old);
        let bit = bit.index(data.len() * 8);
        data[bit / 8] ^= 1 << (bit % 8);
        let block = bit / 8 / size.bytes();
        let (result, found) = rebased((from, to), size, &data, &tuples, &all_checks(&old), &replace_all(&new));
        prop_assert_eq!(found, [(block, Field::Guard)]);
        let after = mismatches(to, size, &data, &result, &all_checks(&new));
        prop_assert_eq!(after.iter().map(|m| (m.block, m.field)).collect::<Vec<_>>(), [(block, Field::Guard)]);
    }
}

#[test]
fn a_bad_tag_spoils_the_new_tuple_though_the_data_is_good() {
    let (data, tags) = (noise(1, 512), Tags { app_tag: 1, storage_tag: 0, initial_ref_tag: 7 });
    let tuples = sealed(IP, SIZE, &data, &tags);
    let checks = Checks { initial_ref_tag: Some(8), ..all_checks(&tags) };
    // Even if the new tags would be an escape.
    for app_tag in [1, 0xFFFF] {
        let output = RebaseTags { app_tag: Keep::Replace(app_tag), ..RebaseTags::default() };
        let (new, found) = rebased((IP, CRC16), SIZE, &data, &tuples, &checks, &output);
        assert_eq!(found, [(0, Field::RefTag)]);
        assert!(!Tuple::read(CRC16, &new).is_escaped(CRC16));
        let guard_only = Checks { guard: true, ..Checks::NONE };
        assert_eq!(mismatches(CRC16, SIZE, &data, &new, &guard_only).len(), 1);
    }
}

#[test]
fn a_guard_of_the_same_kind_is_carried_over_even_unchecked() {
    let (mut data, tags) = (noise(1, 512), Tags::default());
    let tuples = sealed(CRC64, SIZE, &data, &tags);
    data[100] ^= 4;
    let output = RebaseTags { initial_ref_tag: Keep::Replace(9), ..RebaseTags::default() };
    let (new, found) = rebased((CRC64, CRC64), SIZE, &data, &tuples, &Checks::NONE, &output);
    assert_eq!(found, []);
    assert_eq!(Tuple::read(CRC64, &new).ref_tag, 9);
    assert_eq!(mismatches(CRC64, SIZE, &data, &new, &Checks { guard: true, ..Checks::NONE }).len(), 1);
}

#[test]
fn escaped_blocks_stay_escaped() {
    let (data, tags) = (noise(1, 1024), Tags { app_tag: 0xFFFF, storage_tag: 0, initial_ref_tag: 5 });
    let tuples = sealed(CRC16, SIZE, &data, &tags);
    let output = RebaseTags { app_tag: Keep::Replace(3), initial_ref_tag: Keep::Replace(20), ..RebaseTags::default() };
    let checks = Checks { guard: true, ..Checks::NONE };
    for to in [CRC16, CRC64, IP, TYPE3] {
        let (new, found) = rebased((CRC16, to), SIZE, &data, &tuples, &checks, &output);
        assert_eq!(found, []);
        for (block, bytes) in new.chunks(to.tuple_bytes()).enumerate() {
            let tuple = Tuple::read(to, bytes);
            assert!(tuple.is_escaped(to), "{to:?}");
            if to.protection().increments_ref_tag() {
                assert_eq!(tuple.ref_tag, 20 + block as u64);
            }
        }
    }
}

#[test]
fn kept_tags_are_cut_to_the_new_format() {
    let (data, tags) = (noise(1, 512), Tags { app_tag: 9, storage_tag: 0, initial_ref_tag: 0x1234_5678_9ABC });
    let tuples = sealed(CRC64, SIZE, &data, &tags);
    let (new, found) = rebased((CRC64, CRC16), SIZE, &data, &tuples, &all_checks(&tags), &RebaseTags::default());
    assert_eq!(found, []);
    let tuple = Tuple::read(CRC16, &new);
    assert_eq!((tuple.app_tag, tuple.ref_tag), (9, 0x5678_9ABC));
}

#[test]
fn blocks_that_arrive_with_tags_of_one_format_leave_with_those_of_another() {
    let (data, tags) = (noise(1, 1024), Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 40 });
    let checks = Checks { initial_ref_tag: Some(40), ..Checks { guard: true, ..Checks::NONE } };
    let output = RebaseTags { initial_ref_tag: Keep::Replace(40), ..RebaseTags::default() };
    let arrived = |data: &[u8]| {
        let tuples = sealed(IP, SIZE, &noise(1, 1024), &tags);
        Unverified::new(Slice::copy_from(data), Slice::copy_from(&tuples), SIZE, Some(IP)).unwrap()
    };
    let made = arrived(&data).rebase(Some(CRC64), &checks, &output).unwrap();
    assert!(made.has_verified_guards());
    assert_eq!(made.joined_tags()[..], sealed(CRC64, SIZE, &data, &tags)[..]);
    let plain = arrived(&data).rebase(None, &checks, &output).unwrap();
    assert_eq!((plain.format(), plain.joined_tags().len(), plain.joined_data().to_vec()), (None, 0, data.clone()));
    let mut bent = data;
    bent[700] ^= 1;
    for to in [None, Some(IP), Some(CRC64)] {
        let found = arrived(&bent).rebase(to, &checks, &output).unwrap_err();
        assert_eq!(found.iter().map(|found| (found.block, found.field)).collect::<Vec<_>>(), [(1, Field::Guard)]);
    }
}
