//! Every kind of damage is found on exactly the damaged blocks, and reported as what it is.

use sealblock_block::{BadBlock, BadBlockCause, ErrorKind};
use sealblock_integrity::{Field, GuardKind, ProtectionType};
use sealblock_units::{BlockSize, Lba};

use super::setup::{Harness, pattern, protection};
use crate::{CorruptionError, CorruptionKind};

fn bad_blocks(harness: &Harness) -> Vec<BadBlock> {
    harness.verify().unwrap_err().bad_blocks().expect("an integrity error").as_slice().to_vec()
}

#[test]
fn each_kind_is_found_with_its_field_for_every_format() {
    let kinds = [
        (3, CorruptionKind::Data, Field::Guard),
        (9, CorruptionKind::Guard, Field::Guard),
        (10, CorruptionKind::RefTag, Field::RefTag),
        (11, CorruptionKind::AppTag, Field::AppTag),
        (40, CorruptionKind::LostWrite, Field::StorageTag),
        (63, CorruptionKind::Misdirected, Field::RefTag),
    ];
    for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
        for size in [BlockSize::B512, BlockSize::B4096] {
            for kind in [ProtectionType::Type1, ProtectionType::Type2, ProtectionType::Type3] {
                let harness = Harness::new(size, 64, protection(guard, kind));
                let data = pattern(1, 64 * size.bytes());
                harness.write(0, &data).unwrap();
                for (lba, damage, _) in kinds {
                    harness.run(harness.gate.device().damage(Lba::new(lba), damage)).unwrap();
                }
                let harness = Harness::open(&harness.close(), true).unwrap();
                let found: Vec<_> = bad_blocks(&harness).iter().map(|f| (f.lba.get(), f.cause)).collect();
                let due: Vec<_> = kinds.iter().map(|&(lba, _, field)| (lba, BadBlockCause::Tag(field))).collect();
                assert_eq!(found, due, "{guard:?} {kind:?} {size}");
                for lba in 0..64 {
                    let read = harness.read(lba, 1);
                    if kinds.iter().any(|kind| kind.0 == lba) {
                        assert!(matches!(read.unwrap_err().kind(), ErrorKind::Integrity(_)));
                    } else {
                        let at = lba as usize * size.bytes();
                        assert!(read.unwrap() == data[at..at + size.bytes()]);
                    }
                }
            }
        }
    }
}

#[test]
fn expected_and_actual_are_the_values_in_question() {
    let harness = Harness::new(BlockSize::B4096, 64, protection(GuardKind::Crc16, ProtectionType::Type1));
    harness.write(0, &pattern(1, 64 * 4096)).unwrap();
    harness.run(harness.gate.device().damage(Lba::new(7), CorruptionKind::RefTag)).unwrap();
    harness.run(harness.gate.device().damage(Lba::new(8), CorruptionKind::AppTag)).unwrap();
    harness.run(harness.gate.device().damage(Lba::new(9), CorruptionKind::Misdirected)).unwrap();
    let found: Vec<_> = bad_blocks(&harness).iter().map(|f| (f.expected.unwrap(), f.actual.unwrap())).collect();
    assert_eq!(found, [(7, 8), (0, 1), (9, 8)]);
}

#[test]
fn a_host_may_choose_reference_tags_and_a_bit_that_falls_over_in_one_is_damage() {
    for kind in [ProtectionType::Type2, ProtectionType::Type3] {
        for guard in [GuardKind::Crc16, GuardKind::Crc64] {
            let harness = Harness::new(BlockSize::B4096, 64, protection(guard, kind));
            harness.write_with_first_ref(0, &pattern(1, 64 * 4096), 0x3FF).unwrap();
            harness.verify().unwrap();
            harness.run(harness.gate.device().damage(Lba::new(8), CorruptionKind::RefTag)).unwrap();
            let found = bad_blocks(&harness);
            let stored = if kind == ProtectionType::Type2 { 0x3FF + 8 } else { 0x3FF };
            let bad_block =
                BadBlock::new(Lba::new(8), BadBlockCause::Tag(Field::RefTag), Some(stored), Some(stored + 1));
            assert_eq!(found, [bad_block], "{kind:?} {guard:?}");
        }
    }
}

#[test]
fn rewriting_a_damaged_block_mends_it() {
    let harness = Harness::new(BlockSize::B512, 64, protection(GuardKind::Crc64, ProtectionType::Type1));
    harness.write(0, &pattern(1, 64 * 512)).unwrap();
    let kinds = [
        CorruptionKind::Data,
        CorruptionKind::Guard,
        CorruptionKind::AppTag,
        CorruptionKind::LostWrite,
        CorruptionKind::Misdirected,
    ];
    for (lba, kind) in kinds.into_iter().enumerate() {
        harness.run(harness.gate.device().damage(Lba::new(lba as u64), kind)).unwrap();
    }
    assert_eq!(bad_blocks(&harness).len(), kinds.len());
    harness.write(0, &pattern(2, 5 * 512)).unwrap();
    harness.verify().unwrap();
    let again = Harness::open(&harness.close(), false).unwrap();
    again.verify().unwrap();
    assert_eq!(again.read(0, 5).unwrap(), pattern(2, 5 * 512));
}

#[test]
fn what_cannot_be_damaged_says_why() {
    let harness = Harness::new(BlockSize::B512, 64, protection(GuardKind::Crc16, ProtectionType::Type1));
    let damage = |lba, kind| harness.run(harness.gate.device().damage(Lba::new(lba), kind));
    assert!(matches!(damage(64, CorruptionKind::Data), Err(CorruptionError::Range { .. })));
    assert!(matches!(damage(3, CorruptionKind::Data), Err(CorruptionError::Empty(_))));
    harness.write(3, &[7; 512]).unwrap();
    damage(3, CorruptionKind::Guard).unwrap();
    assert!(matches!(damage(3, CorruptionKind::Guard), Err(CorruptionError::Damaged(_))));
    let plain = Harness::new(BlockSize::B512, 64, None);
    plain.write(3, &[7; 512]).unwrap();
    let why = plain.run(plain.gate.device().damage(Lba::new(3), CorruptionKind::Guard));
    assert!(matches!(why, Err(CorruptionError::Unprotected)));
}
