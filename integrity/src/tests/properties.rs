//! Sealing and verifying, for every format.

use proptest::prelude::*;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Lba};

use super::{all_checks, formats, mismatches, noise, sealed, sizes, tags};
use crate::{
    Checks, Field, GuardKind, Interleave, Masked, Mismatch, PiFormat, PiPosition, ProtectionType, Tags, Tuple,
    Unverified, guard, seal, seal_interleaved, verify_interleaved,
};

const BLOCKS: usize = 3;

const TYPE1: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);

proptest! {
    #[test]
    fn what_is_sealed_verifies(format in formats(), size in sizes(), tags in tags(), seed in any::<u64>()) {
        let data = noise(seed, size.bytes() * BLOCKS);
        let tuples = sealed(format, size, &data, &tags);
        prop_assert_eq!(mismatches(format, size, &data, &tuples, &all_checks(&tags)), []);
        // The later blocks alone, as in another command.
        let checks = all_checks(&tags).advance(1, format);
        let (data, tuples) = (&data[size.bytes()..], &tuples[format.tuple_bytes()..]);
        prop_assert_eq!(mismatches(format, size, data, tuples, &checks), []);
    }

    #[test]
    fn a_flipped_bit_of_data_is_a_guard_error(
        format in formats(), size in sizes(), tags in tags(), seed in any::<u64>(), bit in any::<prop::sample::Index>(),
    ) {
        let mut data = noise(seed, size.bytes() * BLOCKS);
        let tuples = sealed(format, size, &data, &tags);
        let bit = bit.index(data.len() * 8);
        data[bit / 8] ^= 1 << (bit % 8);
        let block = bit / 8 / size.bytes();
        let bytes = &data[block * size.bytes()..][..size.bytes()];
        let actual = Tuple::read(format, &tuples[block * format.tuple_bytes()..]).guard;
        let expected = guard::compute(format.guard(), bytes);
        let found = mismatches(format, size, &data, &tuples, &all_checks(&tags));
        prop_assert_eq!(found, [Mismatch { block, field: Field::Guard, expected, actual }]);
        let unchecked = Checks { guard: false, ..all_checks(&tags) };
        prop_assert_eq!(mismatches(format, size, &data, &tuples, &unchecked), []);
    }

    #[test]
    fn a_flipped_bit_of_a_tuple_is_an_error_of_its_field(
        format in formats(), size in sizes(), tags in tags(), seed in any::<u64>(), bit in any::<prop::sample::Index>(),
    ) {
        let data = noise(seed, size.bytes() * BLOCKS);
        let mut tuples = sealed(format, size, &data, &tags);
        let bit = bit.index(tuples.len() * 8);
        tuples[bit / 8] ^= 0x80 >> (bit % 8);
        let (block, bit) = (bit / 8 / format.tuple_bytes(), bit as u32 % (format.tuple_bytes() as u32 * 8));
        let space = format.guard().bits() + 16;
        let field = if bit < format.guard().bits() {
            Some(Field::Guard)
        } else if bit < space {
            Some(Field::AppTag)
        } else if bit < space + u32::from(format.storage_tag_bits()) {
            Some(Field::StorageTag)
        } else {
            format.protection().increments_ref_tag().then_some(Field::RefTag)
        };
        let tuple = Tuple::read(format, &tuples[block * format.tuple_bytes()..]);
        let expected = field.filter(|_| !tuple.is_escaped(format)).map(|field| (block, field));
        let found = mismatches(format, size, &data, &tuples, &all_checks(&tags));
        prop_assert_eq!(found.iter().map(|m| (m.block, m.field)).collect::<Vec<_>>(), Vec::from_iter(expected));
        prop_assert!(found.iter().all(|m| (m.expected ^ m.actual).count_ones() == 1 || m.field == Field::Guard));
    }

    #[test]
    fn interleaved_is_the_same_tuple_by_tuple(
        format in formats(), size in sizes(), tags in tags(), seed in any::<u64>(),
    ) {
        let data = noise(seed, size.bytes() * BLOCKS);
        let tuples = sealed(format, size, &data, &tags);
        let layout = Interleave::tuple_only(format, size);
        let weave = |tuples: &[u8]| -> Vec<u8> {
            let pairs = data.chunks(size.bytes()).zip(tuples.chunks(format.tuple_bytes()));
            pairs.flat_map(|(data, tuple)| [data, tuple].concat()).collect()
        };
        let mut buffer = weave(&vec![0; tuples.len()]);
        seal_interleaved(layout, &mut buffer, &tags);
        prop_assert_eq!(&buffer, &weave(&tuples));
        prop_assert_eq!(verify_interleaved(layout, &buffer, &all_checks(&tags), &mut |_| ()), 0);
    }

    #[test]
    fn the_guard_covers_metadata_only_before_the_tuple(
        format in formats(), size in sizes(), tags in tags(), more in 1_usize..50, seed in any::<u64>(),
        position in prop::sample::select(&[PiPosition::First, PiPosition::Last][..]),
        bit in any::<prop::sample::Index>(),
    ) {
        let layout = Interleave::new(format, size, format.tuple_bytes() + more, position).unwrap();
        let mut buffer = noise(seed, layout.stride_bytes() * BLOCKS);
        seal_interleaved(layout, &mut buffer, &tags);
        prop_assert_eq!(verify_interleaved(layout, &buffer, &all_checks(&tags), &mut |_| ()), 0);
        let metadata = if position == PiPosition::First { size.bytes() + format.tuple_bytes() } else { size.bytes() };
        let bit = bit.index(more * 8);
        buffer[layout.stride_bytes() + metadata + bit / 8] ^= 1 << (bit % 8);
        let mut found = Vec::new();
        verify_interleaved(layout, &buffer, &all_checks(&tags), &mut |m| found.push((m.block, m.field)));
        let expected: &[_] = if position == PiPosition::First { &[] } else { &[(1, Field::Guard)] };
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn append_continues_every_guard(
        bytes in proptest::collection::vec(any::<u8>(), 0..3000), cut in any::<prop::sample::Index>(),
    ) {
        let cut = cut.index(bytes.len() + 1) & !1;
        for kind in GuardKind::ALL {
            let first = guard::append(kind, guard::empty(kind), &bytes[..cut]);
            prop_assert_eq!(first, guard::compute(kind, &bytes[..cut]));
            prop_assert_eq!(guard::append(kind, first, &bytes[cut..]), guard::compute(kind, &bytes));
        }
    }
}

#[test]
fn guards_do_not_depend_on_where_the_block_starts() {
    for bytes in [512, 520, 4096] {
        let data = noise(9, bytes);
        for kind in GuardKind::ALL {
            let expected = guard::compute(kind, &data);
            for offset in 0..64 {
                let moved = [vec![0xA5; offset], data.clone()].concat();
                assert_eq!(guard::compute(kind, &moved[offset..]), expected, "{kind} of {bytes} bytes at {offset}");
            }
        }
    }
}

#[test]
fn escaped_tuples_are_not_checked_at_all() {
    let (data, tags) = (noise(1, 512), Tags { app_tag: 0xFFFF, storage_tag: 0, initial_ref_tag: 5 });
    let mut tuples = sealed(TYPE1, BlockSize::B512, &data, &tags);
    tuples[0] ^= 1;
    let checks = Checks { initial_ref_tag: Some(9), ..all_checks(&tags) };
    assert_eq!(mismatches(TYPE1, BlockSize::B512, &data, &tuples, &checks), []);

    let type3 = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type3);
    assert_eq!(mismatches(type3, BlockSize::B512, &data, &tuples, &checks).len(), 1);
    tuples[4..].fill(0xFF);
    assert_eq!(mismatches(type3, BlockSize::B512, &data, &tuples, &checks), []);
}

#[test]
fn escaped_tuples_fail_if_they_are_to_be_checked() {
    let format = |guard, protection| PiFormat::with_default_storage_tag(guard, protection);
    let data = noise(1, 1024);
    let tags = Tags { app_tag: 7, storage_tag: 0, initial_ref_tag: 5 };
    for (guard, protection) in
        GuardKind::ALL.into_iter().flat_map(|guard| ProtectionType::ALL.map(|kind| (guard, kind)))
    {
        let format = format(guard, protection);
        let mut tuples = sealed(format, BlockSize::B512, &data, &tags);
        tuples[format.tuple_bytes()..].fill(0xFF);
        let app_tag = Some(Masked { expected: 7, mask: u16::MAX });
        let checks = Checks { app_tag, checks_escapes: true, ..Checks::NONE };
        let unwritten = Mismatch { block: 1, field: Field::AppTag, expected: 7, actual: 0xFFFF };
        assert_eq!(mismatches(format, BlockSize::B512, &data, &tuples, &checks), [unwritten]);
        let read =
            || Unverified::new(Slice::copy_from(&data), Slice::copy_from(&tuples), BlockSize::B512, Some(format));
        assert_eq!(read().unwrap().verify(&checks).unwrap_err(), [unwritten]);
        let lenient = Checks { checks_escapes: false, ..checks };
        assert!(read().unwrap().verify(&lenient).is_ok());
        let zeroes = Checks { guard: true, ..checks };
        assert_eq!(mismatches(format, BlockSize::B512, &data[..512], &tuples[..format.tuple_bytes()], &zeroes), []);
    }
}

#[test]
fn the_first_failing_field_is_reported_with_what_it_should_be() {
    let format = PiFormat::new(GuardKind::Crc16, ProtectionType::Type1, 8).unwrap();
    let (data, tags) = (noise(1, 1024), Tags { app_tag: 0x1234, storage_tag: 0x56, initial_ref_tag: 0xFF_FFFF });
    let right = Tuple::read(format, &sealed(format, BlockSize::B512, &data, &tags)[8..]);
    assert_eq!(right.ref_tag, 0, "the reference tag wraps at its 24 bits");
    let bad = Tuple { guard: right.guard ^ 1, app_tag: 0x4321, storage_tag: 0x65, ref_tag: 3 };
    let report = |tuple: Tuple, checks: Checks| {
        let mut tuples = sealed(format, BlockSize::B512, &data, &tags);
        tuple.write(format, &mut tuples[8..]);
        mismatches(format, BlockSize::B512, &data, &tuples, &checks)
    };
    let mismatch = |field, expected, actual| [Mismatch { block: 1, field, expected, actual }];
    let checks = all_checks(&tags);
    assert_eq!(report(bad, checks), mismatch(Field::Guard, right.guard, bad.guard));
    let bad = Tuple { guard: right.guard, ..bad };
    assert_eq!(report(bad, checks), mismatch(Field::AppTag, 0x1234, 0x4321));
    let masked = Checks { app_tag: Some(Masked { expected: 0x1234, mask: 0x00FF }), ..checks };
    assert_eq!(report(bad, masked), mismatch(Field::AppTag, 0x4334, 0x4321));
    let bad = Tuple { app_tag: right.app_tag, ..bad };
    assert_eq!(report(bad, checks), mismatch(Field::RefTag, 0, 3));
    let bad = Tuple { ref_tag: 0, ..bad };
    assert_eq!(report(bad, checks), mismatch(Field::StorageTag, 0x56, 0x65));
    assert_eq!(report(bad, Checks { storage_tag: None, ..checks }), []);
    let masked = Checks { storage_tag: Some(Masked { expected: 0x56, mask: 0 }), ..checks };
    assert_eq!(report(bad, masked), []);
}

#[test]
fn full_checks_are_the_guard_and_in_type_1_the_address() {
    let start = Lba::new(0x1_0000_0002);
    assert_eq!(Checks::full(TYPE1, start), Checks { guard: true, initial_ref_tag: Some(2), ..Checks::NONE });
    assert_eq!(Checks::full(TYPE1, start).advance(3, TYPE1).initial_ref_tag, Some(5));
    let type2 = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type2);
    assert_eq!(Checks::full(type2, start), Checks { guard: true, ..Checks::NONE }, "the writer's own choice");
    let type3 = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type3);
    assert_eq!(Checks::full(type3, start), Checks { guard: true, ..Checks::NONE });
    // A requested check of the reference tag is ignored there.
    let (data, tags) = (noise(1, 512), Tags { initial_ref_tag: 5, ..Tags::default() });
    let tuples = sealed(type3, BlockSize::B512, &data, &tags);
    let checks = Checks { initial_ref_tag: Some(6), ..all_checks(&tags) };
    assert_eq!(mismatches(type3, BlockSize::B512, &data, &tuples, &checks), []);
}

#[test]
fn every_bad_block_is_reported_once() {
    let (data, tags) = (noise(1, 512 * 8), Tags::default());
    let mut tuples = sealed(TYPE1, BlockSize::B512, &data, &tags);
    for block in [0, 3, 7] {
        tuples[block * 8..][..8].fill(0x55);
    }
    let found = mismatches(TYPE1, BlockSize::B512, &data, &tuples, &all_checks(&tags));
    assert_eq!(found.iter().map(|m| m.block).collect::<Vec<_>>(), [0, 3, 7]);
    assert_eq!(mismatches(TYPE1, BlockSize::B512, &data, &tuples, &Checks::NONE), []);
}

#[test]
fn no_blocks_are_no_errors() {
    seal(TYPE1, BlockSize::B512, &[], &mut [], &Tags::default());
    assert_eq!(mismatches(TYPE1, BlockSize::B512, &[], &[], &Checks::full(TYPE1, Lba::ZERO)), []);
}

#[test]
#[should_panic(expected = "no whole blocks")]
fn part_of_a_block_is_refused() {
    seal(TYPE1, BlockSize::B512, &[0; 513], &mut [0; 8], &Tags::default());
}

#[test]
#[should_panic(expected = "need 16 bytes of tags")]
fn too_few_tags_are_refused() {
    seal(TYPE1, BlockSize::B512, &[0; 1024], &mut [0; 8], &Tags::default());
}

#[test]
#[should_panic(expected = "no whole strides")]
fn part_of_a_stride_is_refused() {
    verify_interleaved(Interleave::tuple_only(TYPE1, BlockSize::B512), &[0; 512], &Checks::NONE, &mut |_| ());
}

#[test]
fn metadata_must_hold_the_tuple() {
    assert!(Interleave::new(TYPE1, BlockSize::B512, 8, PiPosition::First).is_ok());
    assert!(Interleave::new(TYPE1, BlockSize::B512, 7, PiPosition::First).is_err());
}
