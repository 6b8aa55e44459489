//! Byte vectors and round trips of the I/O commands.

use proptest::prelude::*;
use sealblock_integrity::{ChecksumKind, GuardKind, ProtectionType};
use sealblock_units::Lba;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::*;
use crate::wire::Count8;
use crate::{Fuse, StatusCode};

fn blocks(start: u64, count: u64) -> BlockCommand {
    BlockCommand::new(Extent::from_raw(start, count).unwrap())
}

/// A Read as Linux sends it for 8 blocks from block 0x1122334455667788 with guard and reference tag checked.
#[test]
fn a_read_has_these_bytes() {
    let format = PiFormat::new(GuardKind::Crc16, ProtectionType::Type1, 0).unwrap();
    let mut read = blocks(0x1122_3344_5566_7788, 8);
    read.protection = ProtectionInfo { pract: true, prchk: Prchk::GUARD | Prchk::REFERENCE_TAG, ..read.protection }
        .with_tags(format, 0, 0x5566_7788);
    let command = IoCommand::Read(read).encode(3).unwrap().with_cid(0x0201);
    let mut expected = [0_u8; 64];
    expected[..8].copy_from_slice(&[2, 0x40, 1, 2, 3, 0, 0, 0]);
    expected[40..48].copy_from_slice(&[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
    expected[48..52].copy_from_slice(&[7, 0, 0, 0x34]);
    expected[56..60].copy_from_slice(&[0x88, 0x77, 0x66, 0x55]);
    assert_eq!(command.as_bytes(), expected);
    assert_eq!(IoCommand::Read(read).validate(u64::MAX, Some(format)), Ok(()));
}

#[test]
fn flags_stand_in_their_bits_of_dword_12() {
    let cdw12 = |command: IoCommand| command.encode(1).unwrap().cdw12.get();
    let base = blocks(0, 1);
    assert_eq!(cdw12(IoCommand::Write(BlockCommand { force_unit_access: true, ..base })), 1 << 30);
    assert_eq!(cdw12(IoCommand::Write(BlockCommand { limited_retry: true, ..base })), 1 << 31);
    let zeroes = |deallocate, whole_namespace| WriteZeroes { blocks: base, deallocate, whole_namespace };
    assert_eq!(cdw12(IoCommand::WriteZeroes(zeroes(true, false))), 1 << 25);
    assert_eq!(cdw12(IoCommand::WriteZeroes(zeroes(false, true))), 1 << 23);
    let copy = CopyCommand {
        destination: Lba::new(9),
        ranges: Count8::new(3).unwrap(),
        format: CopyDescriptorFormat::Format1,
        read: ProtectionInfo { prchk: Prchk::GUARD, stc: true, ..ProtectionInfo::NONE },
        write: ProtectionInfo { pract: true, ..ProtectionInfo::NONE },
        force_unit_access: true,
        limited_retry: false,
    };
    assert_eq!(cdw12(IoCommand::Copy(copy)), 1 << 30 | 8 << 26 | 1 << 25 | 4 << 12 | 1 << 8 | 2);
}

#[test]
fn the_number_of_blocks_goes_from_1_to_65536() {
    for count in [1, 65_536] {
        let command = IoCommand::Verify(blocks(5, count)).encode(1).unwrap();
        assert_eq!(u64::from(command.cdw12.get()), count - 1);
        assert_eq!(IoCommand::decode(&command), Ok(IoCommand::Verify(blocks(5, count))));
    }
    let refused = Err(Invalid::TooManyBlocks { blocks: 65_537, max: 65_536 });
    assert_eq!(IoCommand::Verify(blocks(5, 65_537)).encode(1), refused);
}

#[test]
fn a_digest_has_the_fields_of_a_verify() {
    let format = PiFormat::new(GuardKind::Crc16, ProtectionType::Type1, 0).unwrap();
    let mut range = blocks(0x0102_0304_0506, 16);
    range.protection = ProtectionInfo { prchk: Prchk::GUARD | Prchk::REFERENCE_TAG, ..range.protection }.with_tags(
        format,
        0,
        0x0304_0506,
    );
    let verify = IoCommand::Verify(range).encode(3).unwrap();
    for (kind, code) in [(ChecksumKind::Crc64Nvme, 0), (ChecksumKind::Crc32c, 1)] {
        let asked = IoCommand::Checksum(Checksum { blocks: range, kind });
        let mut checksum = asked.encode(3).unwrap();
        assert_eq!((checksum.opcode, checksum.cdw13.get()), (0xC0, code));
        assert_eq!(IoCommand::decode(&checksum), Ok(asked));
        checksum.cdw13 = U32::new(0);
        assert_eq!(checksum.as_bytes()[1..], verify.as_bytes()[1..]);
        // An unknown kind would be answered with another checksum than the host takes it for.
        for code in [2, 3, 0x80, 0x100, 0x101, 1 << 31, u32::MAX] {
            checksum.cdw13 = U32::new(code);
            let refused = IoCommand::decode(&checksum).unwrap_err();
            assert_eq!((refused, refused.status_code()), (Invalid::field("CSK", 13, 0), StatusCode::INVALID_FIELD));
        }
    }
}

#[test]
fn a_checksum_is_in_the_completion_with_its_kind() {
    let of = |kind| Checksum { blocks: blocks(0, 1), kind };
    let (crc64, crc32c) = (of(ChecksumKind::Crc64Nvme), of(ChecksumKind::Crc32c));
    assert_eq!(crc64.result(0xAE8B_1486_0A79_9888), 0xAE8B_1486_0A79_9888);
    assert_eq!(crc64.checksum(0xAE8B_1486_0A79_9888), Some(0xAE8B_1486_0A79_9888));
    assert_eq!(crc32c.result(0xE306_9283), 0x1_E306_9283);
    assert_eq!(crc32c.checksum(0x1_E306_9283), Some(0xE306_9283));
    for other in [0, 0xE306_9283, 0xAE8B_1486_0A79_9888, 0x2_E306_9283, 0x8000_0001_E306_9283] {
        assert_eq!(crc32c.checksum(other), None, "{other:#x} of a target that does not know the kind");
    }
}

/// A Checksum of these blocks, of the kind that every target has.
fn checksum(blocks: BlockCommand) -> IoCommand {
    IoCommand::Checksum(Checksum { blocks, kind: ChecksumKind::Crc64Nvme })
}

#[test]
fn unknown_opcodes_wrapping_ranges_and_other_copy_formats_are_refused() {
    for opcode in [0x03, 0x0D, 0x7F, 0xFF] {
        let error = IoCommand::decode(&Command::new(opcode, 1)).unwrap_err();
        assert_eq!((error, error.status_code()), (Invalid::Opcode(opcode), StatusCode::INVALID_OPCODE));
    }
    let mut command = IoCommand::Read(blocks(u64::MAX, 1)).encode(1).unwrap();
    assert!(IoCommand::decode(&command).is_ok());
    command.cdw12 = U32::new(1);
    assert_eq!(IoCommand::decode(&command).unwrap_err().status_code(), StatusCode::LBA_OUT_OF_RANGE);
    let mut command = Command::new(IoOpcode::Copy.code(), 1);
    command.cdw12 = U32::new(2 << 8);
    assert_eq!(IoCommand::decode(&command), Err(Invalid::field("DESFMT", 12, 8)));
}

#[test]
fn the_range_of_a_whole_namespace_is_not_looked_at() {
    let mut command = IoCommand::Read(blocks(u64::MAX, 1)).encode(1).unwrap();
    command.opcode = IoOpcode::WriteZeroes.code();
    command.cdw12 = U32::new(7);
    assert!(IoCommand::decode(&command).is_err());
    command.cdw12 = U32::new(7 | 1 << 23);
    let Ok(IoCommand::WriteZeroes(zeroes)) = IoCommand::decode(&command) else { panic!("{command:?}") };
    assert!(zeroes.whole_namespace && zeroes.blocks.extent == Extent::one(Lba::ZERO));
}

#[test]
fn ranges_end_with_the_namespace() {
    for make in [IoCommand::Read, IoCommand::Write, IoCommand::Compare, IoCommand::Verify, checksum] {
        assert_eq!(make(blocks(90, 10)).validate(100, None), Ok(()));
        let error = make(blocks(91, 10)).validate(100, None).unwrap_err();
        assert_eq!(error.status_code(), StatusCode::LBA_OUT_OF_RANGE);
    }
    let zeroes = WriteZeroes { blocks: blocks(100, 1), deallocate: true, whole_namespace: false };
    assert!(IoCommand::WriteZeroes(zeroes).validate(100, None).is_err());
    assert!(IoCommand::WriteZeroes(WriteZeroes { whole_namespace: true, ..zeroes }).validate(100, None).is_ok());
}

#[test]
fn pract_goes_with_every_command_that_moves_or_checks_blocks() {
    let format = Some(PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1));
    let mut with_pract = blocks(0, 1);
    with_pract.protection.pract = true;
    for make in [IoCommand::Read, IoCommand::Write, IoCommand::Compare, IoCommand::Verify, checksum] {
        assert_eq!(make(with_pract).validate(1, format), Ok(()));
        assert_eq!(make(with_pract).validate(1, None), Ok(()), "without PI the bit means nothing, and fio sets it");
        assert!(make(with_pract).validate(0, format).is_err());
    }
}

fn copy(format: CopyDescriptorFormat, ranges: u16) -> CopyCommand {
    let read = ProtectionInfo { prchk: Prchk::GUARD, ..ProtectionInfo::NONE };
    CopyCommand {
        destination: Lba::new(1000),
        ranges: Count8::new(ranges).unwrap(),
        format,
        read,
        write: ProtectionInfo::NONE,
        force_unit_access: false,
        limited_retry: false,
    }
}

const LIMITS: CopyLimits = CopyLimits { range_blocks: 128, total_blocks: 200, ranges: Count8::saturating(4) };

fn source(command: &CopyCommand, start: u64, count: u64, space: u128) -> CopyRange {
    let protection = ProtectionInfo { space: TagSpace::from_bits(space), lbat: 0x1122, lbatm: 0x3344, ..command.read };
    CopyRange { extent: Extent::from_raw(start, count).unwrap(), protection }
}

#[test]
fn copy_source_ranges_have_these_bytes() {
    let command = copy(CopyDescriptorFormat::Format0, 1);
    let bytes = command.encode_ranges(&[source(&command, 0x0102, 3, 0xA1A2_A3A4)]).unwrap();
    let mut expected = [0; 32];
    expected[8..10].copy_from_slice(&[2, 1]);
    expected[16] = 2;
    expected[24..].copy_from_slice(&[0xA4, 0xA3, 0xA2, 0xA1, 0x22, 0x11, 0x44, 0x33]);
    assert_eq!(bytes, expected);

    let command = copy(CopyDescriptorFormat::Format1, 1);
    let bytes = command.encode_ranges(&[source(&command, 0x0102, 3, 0x0102_0304_0506_0708_090A)]).unwrap();
    let mut expected = [0; 40];
    expected[8..10].copy_from_slice(&[2, 1]);
    expected[16] = 2;
    expected[26..].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0x22, 0x11, 0x44, 0x33]);
    assert_eq!(bytes, expected);
}

#[test]
fn copy_lists_keep_to_limits_and_to_the_namespace() {
    for format in [CopyDescriptorFormat::Format0, CopyDescriptorFormat::Format1] {
        let command = copy(format, 2);
        let list = |a, b| command.encode_ranges(&[a, b]).unwrap();
        let range = |start, count| source(&command, start, count, 0x77);
        let parse = |data: &[u8]| command.parse(data, 1200, &LIMITS);
        let good = list(range(0, 128), range(500, 72));
        let (destination, ranges) = parse(&good).unwrap();
        assert_eq!((destination, ranges.len()), (Extent::from_raw(1000, 200).unwrap(), 2));
        assert_eq!(ranges[1], range(500, 72));
        assert!(matches!(parse(&good[..good.len() - 1]), Err(Invalid::DataLength { .. })));
        let too_long = Err(Invalid::TooManyBlocks { blocks: 129, max: 128 });
        assert_eq!(parse(&list(range(0, 129), range(0, 1))), too_long);
        let too_many = Err(Invalid::TooManyBlocks { blocks: 201, max: 200 });
        assert_eq!(parse(&list(range(0, 128), range(0, 73))), too_many);
        assert!(matches!(parse(&list(range(0, 1), range(1199, 2))), Err(Invalid::PastEnd { .. })));
        assert!(matches!(command.parse(&good, 1199, &LIMITS), Err(Invalid::PastEnd { .. })));
        let many = copy(format, 5);
        assert_eq!(many.parse(&[0; 4096], 1200, &LIMITS), Err(Invalid::Entries { entries: 5, max: 4 }));
    }
}

#[test]
fn the_copy_format_goes_with_the_guard() {
    let of = |guard| Some(PiFormat::with_default_storage_tag(guard, ProtectionType::Type1));
    let (zero, one) = (CopyDescriptorFormat::Format0, CopyDescriptorFormat::Format1);
    for (format, good, bad) in [(of(GuardKind::Crc16), zero, one), (of(GuardKind::Crc64), one, zero)] {
        assert_eq!(IoCommand::Copy(copy(good, 1)).validate(1, format), Ok(()));
        let error = IoCommand::Copy(copy(bad, 1)).validate(1, format).unwrap_err();
        assert_eq!(error.status_code(), StatusCode::INVALID_NAMESPACE);
        assert_eq!(IoCommand::Copy(copy(good, 1)).validate(1, None), Ok(()));
    }
}

fn any_protection() -> impl Strategy<Value = ProtectionInfo> {
    (any::<bool>(), 0..8_u8, any::<bool>(), any::<u128>(), any::<u16>(), any::<u16>()).prop_map(
        |(pract, prchk, stc, space, lbat, lbatm)| {
            let prchk = Prchk::from_bits_retain(prchk);
            let space = TagSpace::from_bits(space);
            ProtectionInfo { pract, prchk, stc, space, lbat, lbatm, ..ProtectionInfo::NONE }
        },
    )
}

fn any_blocks() -> impl Strategy<Value = BlockCommand> {
    (0..u64::MAX - 65_536, 1..=65_536_u64, any_protection(), any::<bool>(), any::<bool>()).prop_map(
        |(start, count, protection, force_unit_access, limited_retry)| BlockCommand {
            protection,
            force_unit_access,
            limited_retry,
            ..blocks(start, count)
        },
    )
}

fn any_copy() -> impl Strategy<Value = CopyCommand> {
    (any_blocks(), any::<bool>(), 1..=256_u16, any_protection()).prop_map(|(blocks, first, ranges, read)| CopyCommand {
        destination: blocks.extent.start(),
        ranges: Count8::new(ranges).unwrap(),
        format: if first { CopyDescriptorFormat::Format0 } else { CopyDescriptorFormat::Format1 },
        read: ProtectionInfo { pract: read.pract, prchk: read.prchk, stc: read.stc, ..ProtectionInfo::NONE },
        write: blocks.protection,
        force_unit_access: blocks.force_unit_access,
        limited_retry: blocks.limited_retry,
    })
}

fn any_command() -> impl Strategy<Value = IoCommand> {
    prop_oneof![
        Just(IoCommand::Flush),
        any_blocks().prop_map(IoCommand::Write),
        (any_blocks(), any::<bool>()).prop_map(|(mut blocks, checks_escapes)| {
            blocks.protection.checks_escapes = checks_escapes;
            IoCommand::Read(blocks)
        }),
        any_blocks().prop_map(|blocks| IoCommand::WriteUncorrectable(blocks.extent)),
        any_blocks().prop_map(IoCommand::Compare),
        (any_blocks(), any::<bool>()).prop_map(|(mut blocks, checks_escapes)| {
            blocks.protection.checks_escapes = checks_escapes;
            IoCommand::Verify(blocks)
        }),
        any_copy().prop_map(IoCommand::Copy),
        (any_blocks(), any::<bool>(), any::<bool>()).prop_map(|(mut blocks, deallocate, whole_namespace)| {
            if whole_namespace {
                blocks.extent = Extent::one(Lba::ZERO);
            }
            IoCommand::WriteZeroes(WriteZeroes { blocks, deallocate, whole_namespace })
        }),
        (1..=256_u16, any::<u32>()).prop_map(|(ranges, attributes)| {
            let ranges = Count8::new(ranges).unwrap();
            IoCommand::DatasetManagement(DatasetManagement {
                ranges,
                attributes: DsmAttributes::from_bits_retain(attributes),
            })
        }),
    ]
}

proptest! {
    #[test]
    fn commands_round_trip(command in any_command(), nsid: u32, cid: u16) {
        let entry = command.encode(nsid).unwrap().with_cid(cid).with_fuse(Fuse::Second);
        prop_assert_eq!(entry.nsid.get(), nsid);
        prop_assert_eq!(IoCommand::decode(&Command::from_prefix(entry.as_bytes()).unwrap()), Ok(command));
    }

    #[test]
    fn any_64_bytes_are_decoded_or_refused(bytes: [u8; 32], more: [u8; 32], opcode in 0..0x20_u8, capacity: u64) {
        let mut entry = Command::from_prefix(&[bytes, more].concat()).unwrap();
        entry.opcode = opcode;
        if let Ok(command) = IoCommand::decode(&entry) {
            let format = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1);
            let _ = command.validate(capacity, Some(format));
            prop_assert!(command.encode(1).is_ok());
        } else {
            prop_assert!(!IoCommand::decode(&entry).unwrap_err().status().is_success());
        }
        let _ = GetLbaStatus::decode(&entry).map(|ask| ask.extent(capacity));
    }

    #[test]
    fn any_copy_list_is_parsed_or_refused(data in proptest::collection::vec(any::<u8>(), 0..400), command in any_copy()) {
        let limits = CopyLimits { range_blocks: u16::MAX, total_blocks: u32::MAX, ranges: Count8::saturating(256) };
        if let Ok((destination, ranges)) = command.parse(&data, u64::MAX, &limits) {
            prop_assert_eq!(destination.len(), ranges.iter().map(|range| range.extent.len()).sum::<u64>());
        }
    }
}
