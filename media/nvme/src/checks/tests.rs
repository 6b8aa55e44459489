use super::*;
use sealblock_integrity::{GuardKind, Masked};
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use crate::profile::PiSource;
use crate::profile::tests::profile_of;

fn format(guard: GuardKind, kind: ProtectionType) -> PiFormat {
    PiFormat::with_default_storage_tag(guard, kind)
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn sealed(size: BlockSize, format: PiFormat, start: u64, blocks: usize) -> Sealed {
    let bytes: Vec<u8> = (0..blocks * size.bytes()).map(|i| (i / 5) as u8).collect();
    let tags = Tags { app_tag: 5, storage_tag: 0, initial_ref_tag: start };
    Sealed::seal(Slice::copy_from(&bytes), size, Some(format), &tags)
}

#[test]
fn uniform_tags_are_checked_and_others_are_left_alone() {
    let format = format(GuardKind::Crc16, ProtectionType::Type1);
    let profile = profile_of(BlockSize::B512, format, PiSource::Host);
    let same = sealed(BlockSize::B512, format, 3, 2);
    let info = profile.write_checks(extent(3, 2), &same);
    assert_eq!((info.prchk.bits(), info.lbat, info.lbatm, info.pract), (7, 5, 0xFFFF, false));
    assert_eq!(info.reference_tag(format), 3);
    let seal = |app_tag, first_ref| {
        let tags = Tags { app_tag, storage_tag: 0, initial_ref_tag: first_ref };
        Sealed::seal(Slice::copy_from(&[1; 512]), BlockSize::B512, Some(format), &tags)
    };
    let mixed = Sealed::join([seal(1, 3), seal(2, 4)]);
    assert!(!profile.write_checks(extent(3, 2), &mixed).prchk.contains(Prchk::APPLICATION_TAG));
    assert!(!profile.write_checks(extent(3, 1), &seal(0xFFFF, 3)).prchk.contains(Prchk::APPLICATION_TAG));
}

#[test]
fn the_type_says_which_reference_tag_a_write_starts_with() {
    for (kind, expected) in
        [(ProtectionType::Type1, Some(3)), (ProtectionType::Type2, Some(90)), (ProtectionType::Type3, None)]
    {
        let format = format(GuardKind::Crc16, kind);
        let data = sealed(BlockSize::B512, format, 90, 1);
        let info = profile_of(BlockSize::B512, format, PiSource::Host).write_checks(extent(3, 1), &data);
        let checked = info.prchk.contains(Prchk::REFERENCE_TAG).then(|| info.reference_tag(format));
        assert_eq!(checked, expected);
    }
}

#[test]
fn what_a_command_cannot_say_is_told() {
    let format = PiFormat::new(GuardKind::Crc64, ProtectionType::Type1, 16).unwrap();
    let profile = profile_of(BlockSize::B4096, format, PiSource::Host);
    let place = extent(10, 4);
    let full = Checks::full(format, place.start());
    assert!(profile.read_checks(place, &full, true).1);
    assert!(!profile.read_checks(place, &Checks { initial_ref_tag: Some(11), ..full }, true).1);
    let storage = |mask| Checks { storage_tag: Some(Masked { expected: 7, mask }), ..full };
    let (info, says_all) = profile.read_checks(place, &storage(0xFFFF), true);
    assert_eq!((info.stc, info.storage_tag(format), says_all), (true, 7, true));
    assert!(!profile.read_checks(place, &storage(0xFF), true).1);
    let escapes = Checks { app_tag: Some(Masked { expected: 7, mask: u16::MAX }), ..full };
    assert!(profile.read_checks(place, &escapes, true).1);
    assert!(!profile.read_checks(place, &Checks { checks_escapes: true, ..escapes }, true).1);
}

#[test]
fn escaped_blocks_are_checked_by_a_verify_where_the_target_offers_that() {
    let format = format(GuardKind::Crc32c, ProtectionType::Type1);
    let app_tag = Some(Masked { expected: 7, mask: u16::MAX });
    let checks = Checks { app_tag, checks_escapes: true, ..Checks::NONE };
    for (source, offers, is_verify, expected) in [
        (PiSource::Host, true, true, (true, true)),
        (PiSource::Host, true, false, (false, false)),
        (PiSource::Host, false, true, (false, false)),
        // This host sees no tags, so there is nothing that a caller could expect.
        (PiSource::Target, true, true, (false, true)),
    ] {
        let profile = NamespaceProfile { checks_escapes: offers, ..profile_of(BlockSize::B4096, format, source) };
        let (info, says_all) = profile.read_checks(extent(10, 4), &checks, is_verify);
        assert_eq!((info.checks_escapes, says_all), expected, "{source:?} {offers} {is_verify}");
        let (info, says_all) =
            profile.read_checks(extent(10, 4), &Checks { checks_escapes: false, ..checks }, is_verify);
        assert_eq!((info.checks_escapes, says_all), (false, true), "not asked for");
    }
}

#[test]
fn a_target_that_makes_the_tags_checks_them_too() {
    let format = format(GuardKind::Crc16, ProtectionType::Type1);
    let profile = profile_of(BlockSize::B4096, format, PiSource::Target);
    assert_eq!(profile.metadata.bytes, 0);
    let (read, _) = profile.read_checks(extent(9, 2), &Checks::NONE, false);
    assert_eq!((read.pract, read.prchk.bits(), read.reference_tag(format)), (true, 5, 9));
    assert!(!profile.read_checks(extent(9, 2), &Checks::NONE, true).0.pract, "Verify has nothing to strip");
}
