use super::*;
use sealblock_integrity::{Field, GuardKind, Masked};

fn codec(pi_mode: PiMode, size: BlockSize) -> BlockCodec {
    BlockCodec { size, pi_mode, storage_tag_mask: u64::MAX, crc_layout: None }
}

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

/// What leaves comes back the same, copied together or gathered.
#[test]
fn blocks_travel_interleaved_and_are_taken_apart() {
    let pool = Pool::new(0, usize::MAX);
    for size in [BlockSize::B512, BlockSize::B4096] {
        for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
            for blocks in [1, 2, 9] {
                let format = format(guard, ProtectionType::Type1);
                let codec = codec(PiMode::Host(format), size);
                let data = sealed(size, format, 7, blocks);
                let bytes: Vec<u8> =
                    codec.payload(&data, &pool).slices().iter().flat_map(|slice| slice.to_vec()).collect();
                assert_eq!(bytes.len(), codec.read_bytes(extent(7, blocks as u64)));
                let checksummed = Cell::new(0);
                let arrived = |bytes: &[u8]| {
                    let read = ReadData { buffer: Buffer::copy_from(bytes), crcs: None, is_damaged: false };
                    codec.check_read(read, &Checks::full(format, Lba::new(7)), &pool, &checksummed)
                };
                let back = arrived(&bytes).unwrap();
                assert_eq!(
                    (
                        back.joined_data()[..] == data.joined_data()[..],
                        back.joined_tags()[..] == data.joined_tags()[..]
                    ),
                    (true, true)
                );
                let mut wrong = bytes.clone();
                let last = wrong.len() - size.bytes() / 2;
                wrong[last] ^= 4;
                let mismatches = arrived(&wrong).unwrap_err();
                assert_eq!((mismatches.len(), mismatches[0].block, mismatches[0].field), (1, blocks - 1, Field::Guard));
            }
        }
    }
}

#[test]
fn uniform_tags_are_checked_and_others_are_left_alone() {
    let format = format(GuardKind::Crc16, ProtectionType::Type1);
    let codec = codec(PiMode::Host(format), BlockSize::B512);
    let same = sealed(BlockSize::B512, format, 3, 2);
    let info = codec.write_checks(extent(3, 2), &same);
    assert_eq!((info.prchk.bits(), info.lbat, info.lbatm, info.pract), (7, 5, 0xFFFF, false));
    assert_eq!(info.reference_tag(format), 3);
    let seal = |app_tag, first_ref| {
        let tags = Tags { app_tag, storage_tag: 0, initial_ref_tag: first_ref };
        Sealed::seal(Slice::copy_from(&[1; 512]), BlockSize::B512, Some(format), &tags)
    };
    let mixed = Sealed::join([seal(1, 3), seal(2, 4)]);
    assert!(!codec.write_checks(extent(3, 2), &mixed).prchk.contains(Prchk::APPLICATION_TAG));
    assert!(!codec.write_checks(extent(3, 1), &seal(0xFFFF, 3)).prchk.contains(Prchk::APPLICATION_TAG));
}

#[test]
fn the_type_says_which_reference_tag_a_write_starts_with() {
    for (kind, expected) in
        [(ProtectionType::Type1, Some(3)), (ProtectionType::Type2, Some(90)), (ProtectionType::Type3, None)]
    {
        let format = format(GuardKind::Crc16, kind);
        let data = sealed(BlockSize::B512, format, 90, 1);
        let info = codec(PiMode::Host(format), BlockSize::B512).write_checks(extent(3, 1), &data);
        let checked = info.prchk.contains(Prchk::REFERENCE_TAG).then(|| info.reference_tag(format));
        assert_eq!(checked, expected);
    }
}

#[test]
fn what_a_command_cannot_say_is_told() {
    let format = PiFormat::new(GuardKind::Crc64, ProtectionType::Type1, 16).unwrap();
    let codec = codec(PiMode::Host(format), BlockSize::B4096);
    let place = extent(10, 4);
    let full = Checks::full(format, place.start());
    assert!(codec.read_checks(place, &full, true).1);
    assert!(!codec.read_checks(place, &Checks { initial_ref_tag: Some(11), ..full }, true).1);
    let storage = |mask| Checks { storage_tag: Some(Masked { expected: 7, mask }), ..full };
    let (info, says_all) = codec.read_checks(place, &storage(0xFFFF), true);
    assert_eq!((info.stc, info.storage_tag(format), says_all), (true, 7, true));
    assert!(!codec.read_checks(place, &storage(0xFF), true).1);
}

#[test]
fn a_target_that_makes_the_tags_checks_them_too() {
    let format = format(GuardKind::Crc16, ProtectionType::Type1);
    let codec = codec(PiMode::Target(format), BlockSize::B4096);
    assert_eq!(codec.read_bytes(extent(0, 2)), 8192);
    let (read, _) = codec.read_checks(extent(9, 2), &Checks::NONE, false);
    assert_eq!((read.pract, read.prchk.bits(), read.reference_tag(format)), (true, 5, 9));
    assert!(!codec.read_checks(extent(9, 2), &Checks::NONE, true).0.pract, "Verify has nothing to strip");
}

/// The digest of data with unverified guards is computed anew.
#[test]
fn only_verified_guards_yield_a_digest() {
    let pool = Pool::new(0, usize::MAX);
    let format = format(GuardKind::Crc32c, ProtectionType::Type1);
    let layout = BlockLayout::new(4096, 16);
    let codec = BlockCodec { crc_layout: layout, ..codec(PiMode::Host(format), BlockSize::B4096) };
    let data = sealed(BlockSize::B4096, format, 0, 1);
    assert!(data.has_verified_guards());
    assert!(format!("{:?}", codec.payload(&data, &pool)).contains("crcs: Some"));
    let raw = Unverified::new(data.joined_data(), data.joined_tags(), BlockSize::B4096, Some(format)).unwrap();
    let raw = raw.verify(&Checks::NONE).unwrap();
    assert!(format!("{:?}", codec.payload(&raw, &pool)).contains("crcs: None"));
}
