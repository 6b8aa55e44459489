//! Byte vectors of the standards and of devices, and round trips.

use proptest::prelude::*;
use sealblock_integrity::ProtectionType;
use sealblock_units::{Extent, Lba};

use crate::*;

fn blocks(start: u64, count: u64) -> BlockCommand {
    BlockCommand::new(Extent::from_raw(start, count).unwrap())
}

#[test]
fn commands_have_the_bytes_of_their_tables() {
    let bytes = |command: Command| command.encode().unwrap().as_bytes().to_vec();
    let lba = 0x0102_0304_0506_0708;
    let protected = BlockCommand { protect: Protect::ALL, ..blocks(lba, 9) };
    assert_eq!(bytes(Command::Read(protected)), [0x88, 0x20, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0, 0]);
    let forced = BlockCommand { force_unit_access: true, disable_page_out: true, ..blocks(lba, 9) };
    assert_eq!(bytes(Command::Write(forced))[..3], [0x8A, 0x18, 1]);
    assert_eq!(bytes(Command::Verify(protected, ByteCheck::OneBlock))[..3], [0x8F, 0x26, 1]);
    assert_eq!(bytes(Command::Verify10(blocks(0x0102_0304, 5), ByteCheck::Blocks)), [0x2F, 2, 1, 2, 3, 4, 0, 0, 5, 0]);
    assert_eq!(Command::Verify10(blocks(1, 65_536), ByteCheck::Medium).encode(), None);
    assert_eq!(Command::Verify10(blocks(1 << 32, 1), ByteCheck::Medium).encode(), None);
    assert_eq!(bytes(Command::CompareAndWrite(blocks(7, 2)))[10..], [0, 0, 0, 2, 0, 0]);
    assert_eq!(Command::CompareAndWrite(blocks(7, 256)).encode(), None);
    assert_eq!(bytes(Command::Inquiry { page: Some(0xB0), allocation_bytes: 0x1234 }), [0x12, 1, 0xB0, 0x12, 0x34, 0]);
    let zeroes = WriteSame {
        lba: Lba::new(3),
        blocks: 4,
        protect: Protect::NONE,
        anchor: false,
        unmap: true,
        no_data_out: true,
        expected: None,
    };
    assert_eq!(bytes(Command::WriteSame(zeroes))[..2], [0x93, 9]);
}

/// As Linux sends it for Type 2.
#[test]
fn type_2_has_the_form_of_32_bytes_with_its_expected_tags() {
    let profile = PiProfile { protection: ProtectionType::Type2, interval_exponent: 0 };
    let verify = profile.protect(blocks(0x11_2233_4455, 8), Protect::ALL);
    let cdb = Command::Verify(verify, ByteCheck::Medium).encode().unwrap();
    let mut expected = [0; 32];
    (expected[0], expected[7], expected[9], expected[10], expected[31]) = (0x7F, 0x18, 0x0A, 0x20, 8);
    expected[12..24].copy_from_slice(&[0, 0, 0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x22, 0x33, 0x44, 0x55]);
    assert_eq!(cdb.as_bytes(), expected);
    for protection in [ProtectionType::Type1, ProtectionType::Type3] {
        let profile = PiProfile { protection, ..profile };
        assert_eq!(profile.protect(blocks(1, 1), Protect::ALL).expected, None);
    }
    assert_eq!(profile.protect(blocks(1, 1), Protect::NONE).expected, None, "16 bytes say that nothing is checked");
    assert_eq!((profile.format().tuple_bytes(), profile.interval_bytes(512)), (8, Some(512)));
    let finer = |interval_exponent| PiProfile { interval_exponent, ..profile }.interval_bytes(4096);
    assert_eq!((finer(3), finer(12), finer(200)), (Some(512), None, None));
}

#[test]
fn what_cannot_be_read_is_named_as_a_device_server_names_it() {
    for (bytes, code) in [
        (&[0xA5; 16][..], AdditionalSense::INVALID_OPCODE),
        (&[0x9E, 0x1F, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], AdditionalSense::INVALID_OPCODE),
        (&[0x8F, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0], AdditionalSense::INVALID_FIELD_IN_CDB),
        (&[0x8F, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 4], AdditionalSense::INVALID_FIELD_IN_CDB),
        (&[0x12, 0, 0x80, 0, 0, 0], AdditionalSense::INVALID_FIELD_IN_CDB),
        (&[0x7F, 0, 0, 0, 0, 0, 0, 9], AdditionalSense::INVALID_FIELD_IN_CDB),
        (&[], AdditionalSense::INVALID_FIELD_IN_CDB),
    ] {
        let sense = Command::decode(bytes).unwrap_err().sense();
        assert_eq!((sense.key, sense.code), (SenseKey::ILLEGAL_REQUEST, code), "{bytes:x?}");
    }
    let mut past = [0xFF; 16];
    (past[0], past[1], past[15]) = (0x88, 0, 0);
    let error = Command::decode(&past).unwrap().extent().unwrap_err();
    assert_eq!(error.sense().code, AdditionalSense::LBA_OUT_OF_RANGE);
}

/// Sense data of an emulated drive, and of a real one with descriptors.
#[test]
fn sense_data_name_the_block_in_both_formats() {
    let mut fixed = [0; 18];
    (fixed[0], fixed[2], fixed[7], fixed[12]) = (0xF0, 0x43, 10, 0x11);
    fixed[3..7].copy_from_slice(&[0, 0, 0x12, 0x34]);
    let sense = Sense::decode(&fixed).unwrap();
    assert_eq!((sense.key, sense.code), (SenseKey::MEDIUM_ERROR, AdditionalSense::UNRECOVERED_READ));
    assert_eq!((sense.information, sense.is_deferred), (Some(0x1234), false));
    fixed[0] = 0x71;
    assert_eq!(Sense::decode(&fixed).map(|sense| (sense.information, sense.is_deferred)), Ok((None, true)));
    fixed[7] = 4;
    assert_eq!(Sense::decode(&fixed).unwrap().code, AdditionalSense::NONE, "the code is past the end that it names");
    let mut described =
        vec![0x72, 3, 0x11, 0, 0, 0, 0, 18, 0x80, 4, 9, 9, 9, 9, 0, 10, 0x80, 0, 0, 0, 1, 0, 0, 0, 0, 5];
    assert_eq!(Sense::decode(&described).unwrap().information, Some(0x100_0000_0005));
    described[16] = 0;
    assert_eq!(Sense::decode(&described).unwrap().information, None, "it is not valid");
    for short in [&[][..], &[0x70], &[0x70, 0], &[0x72, 3, 0x11], &[0x42, 0, 0, 0, 0, 0, 0, 0]] {
        assert!(Sense::decode(short).is_err(), "{short:x?}");
    }
}

#[test]
fn pages_are_cut_to_what_is_there() {
    let bytes = [0, 0xB2, 0, 200, 0, 0xC4, 2, 0];
    let page = Page::decode(Page::PROVISIONING, &bytes).unwrap().unwrap();
    assert_eq!(page.body.len(), 4);
    let provisioning = Provisioning::decode(page.body);
    assert_eq!((provisioning.unmap, provisioning.write_same_16, provisioning.read_zeroes), (true, true, 1));
    assert_eq!(Page::decode(Page::BLOCK_LIMITS, &bytes), Ok(None), "another page than was asked for");
    assert!(Page::decode(Page::BLOCK_LIMITS, &bytes[..3]).is_err());
    assert_eq!(BlockLimits::decode(&[1, 8]).compare_and_write_blocks, 8, "an old page is short");
    let ids = [1, 3, 0, 2, 0x50, 0x01, 2, 1, 0, 2, b'x', b'y', 1, 3, 0, 200, 1];
    let names: Vec<String> = designators(&ids).map(|one| one.name()).collect();
    assert_eq!(names, ["naa.5001", "xy"]);
    assert_eq!(text(b"  a\x07b \0"), "a?b");
}

#[test]
fn mode_pages_are_found_behind_block_descriptors_and_subpages() {
    let data = [
        0, 40, 0, 0x90, 0, 0, 0, 8, 9, 9, 9, 9, 9, 9, 9, 9, 0x4A, 5, 0, 1, 7, 0x08, 2, 4, 0, 0x8A, 10, 0xC, 0, 8, 0x80,
    ];
    let mode = ModeSense::decode(&data).unwrap();
    assert!(mode.write_protected && mode.dpo_fua);
    assert_eq!(mode.page(8).and_then(CachingPage::decode).map(|page| page.write_cache), Some(true));
    let control = mode.page(0x0A).and_then(ControlPage::decode).unwrap();
    assert!(control.descriptor_sense && control.no_check_without_protect && control.write_protected);
    assert!(control.app_tag_owned && mode.page(1).is_none());
    // Bit 3 of the next byte is NUAR, which has nothing to do with tags.
    let control = ControlPage::decode(&[0x0A, 10, 4, 8, 0, 0]).unwrap();
    assert!(control.descriptor_sense && !control.no_check_without_protect);
    let mut past = data;
    past[6] = 1;
    assert!(ModeSense::decode(&past).is_err(), "block descriptors past the end");
    assert!(ModeSense::decode(&data[..7]).is_err());
}

fn any_blocks() -> impl Strategy<Value = BlockCommand> {
    let tags = (any::<u32>(), any::<u16>(), any::<u16>())
        .prop_map(|(initial_ref_tag, app_tag, app_tag_mask)| ExpectedTags { initial_ref_tag, app_tag, app_tag_mask });
    (any::<u64>(), any::<u32>(), 0_u8..8, any::<bool>(), any::<bool>(), proptest::option::of(tags)).prop_map(
        |(lba, blocks, protect, disable_page_out, force_unit_access, expected)| BlockCommand {
            lba: Lba::new(lba),
            blocks,
            protect: Protect::from_bits(protect),
            disable_page_out,
            force_unit_access,
            expected,
        },
    )
}

fn any_command() -> impl Strategy<Value = Command> {
    let check = prop_oneof![Just(ByteCheck::Medium), Just(ByteCheck::Blocks), Just(ByteCheck::OneBlock)];
    let plain = |command: BlockCommand| BlockCommand { force_unit_access: false, ..command };
    let short = |command: BlockCommand| BlockCommand {
        lba: Lba::new(u64::from(command.lba.low32())),
        blocks: command.blocks & 0xFFFF,
        expected: None,
        ..command
    };
    prop_oneof![
        Just(Command::TestUnitReady),
        (proptest::option::of(any::<u8>()), any::<u16>())
            .prop_map(|(page, allocation_bytes)| Command::Inquiry { page, allocation_bytes }),
        (0_u8..64, any::<u8>(), any::<bool>(), any::<u16>()).prop_map(
            |(page, subpage, disable_block_descriptors, allocation_bytes)| Command::ModeSense {
                page,
                subpage,
                disable_block_descriptors,
                allocation_bytes
            }
        ),
        any::<u32>().prop_map(|allocation_bytes| Command::ReadCapacity16 { allocation_bytes }),
        (any::<u64>(), any::<u32>())
            .prop_map(|(lba, allocation_bytes)| Command::GetLbaStatus { lba: Lba::new(lba), allocation_bytes }),
        any_blocks().prop_map(Command::Read),
        any_blocks().prop_map(Command::Write),
        (any_blocks(), check.clone()).prop_map(move |(blocks, check)| Command::Verify(plain(blocks), check)),
        (any_blocks(), check).prop_map(move |(blocks, check)| Command::Verify10(plain(short(blocks)), check)),
        any_blocks().prop_map(move |blocks| Command::CompareAndWrite(BlockCommand {
            blocks: blocks.blocks & 0xFF,
            expected: None,
            ..blocks
        })),
        (any_blocks(), any::<bool>()).prop_map(|(blocks, no_data_out)| Command::WriteSame(WriteSame {
            lba: blocks.lba,
            blocks: blocks.blocks,
            protect: blocks.protect,
            anchor: blocks.disable_page_out,
            unmap: blocks.force_unit_access,
            no_data_out,
            expected: blocks.expected,
        })),
        (any::<bool>(), any::<u16>()).prop_map(|(anchor, list_bytes)| Command::Unmap { anchor, list_bytes }),
        (any::<u64>(), any::<u32>(), any::<bool>()).prop_map(|(lba, blocks, immediate)| Command::SynchronizeCache {
            lba: Lba::new(lba),
            blocks,
            immediate
        }),
    ]
}

proptest! {
    #[test]
    fn commands_are_read_as_they_were_written(command in any_command()) {
        let cdb = command.encode().expect("it has room for its blocks");
        prop_assert_eq!(Command::decode(cdb.as_bytes()), Ok(command));
        prop_assert!(Command::decode(&cdb.as_bytes()[..cdb.as_bytes().len() - 1]).is_err(), "one byte is missing");
    }

    #[test]
    fn any_bytes_are_refused_or_mean_what_writing_them_again_means(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        if let Ok(command) = Command::decode(&bytes) {
            let again = command.encode().expect("what was read can be said");
            prop_assert_eq!(Command::decode(again.as_bytes()), Ok(command));
        }
        if let Ok(sense) = Sense::decode(&bytes) {
            prop_assert_eq!(Sense::decode(&sense.encode(true)), Ok(sense));
            prop_assert_eq!(Sense::decode(&sense.encode(false)), Ok(sense));
        }
        if let Ok(list) = LbaStatusList::decode(&bytes) {
            prop_assert_eq!(LbaStatusList::decode(&list.encode()), Ok(list));
        }
        if let Ok(Some(list)) = UnmapList::decode(&bytes) {
            prop_assert_eq!(UnmapList::decode(&list.encode().expect("it came from a list")), Ok(Some(list)));
        }
        if let Ok(mode) = ModeSense::decode(&bytes) {
            let again = mode.encode();
            prop_assert_eq!(ModeSense::decode(&again), Ok(mode));
            for code in 0..64 {
                prop_assert!(mode.page(code).is_none_or(|page| page.len() <= bytes.len()));
            }
        }
        prop_assert!(designators(&bytes).map(|one| one.bytes.len()).sum::<usize>() <= bytes.len());
    }

    #[test]
    fn pages_are_read_as_they_were_written(bytes in proptest::collection::vec(any::<u8>(), 60)) {
        let limits = BlockLimits::decode(&bytes);
        prop_assert_eq!(BlockLimits::decode(&limits.encode()), limits);
        let provisioning = Provisioning::decode(&bytes);
        prop_assert_eq!(Provisioning::decode(&provisioning.encode()), provisioning);
        let extended = ExtendedInquiry::decode(&bytes);
        prop_assert_eq!(ExtendedInquiry::decode(&extended.encode()), extended);
        let characteristics = BlockCharacteristics::decode(&bytes);
        prop_assert_eq!(BlockCharacteristics::decode(&characteristics.encode()), characteristics);
        let capacity = ReadCapacity16::decode(&bytes).unwrap();
        prop_assert_eq!(ReadCapacity16::decode(&capacity.encode()), Ok(capacity));
        let inquiry = Inquiry::decode(&bytes).unwrap();
        prop_assert_eq!(Inquiry::decode(&inquiry.encode()), Ok(inquiry));
        let page = Page { code: 0xB0, body: &bytes };
        let again = page.encode();
        prop_assert_eq!(Page::decode(0xB0, &again), Ok(Some(page)));
    }
}
