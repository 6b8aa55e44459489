//! Fixed input, fixed bytes. If one of these tests fails, sealed data that is already stored can no longer be verified.

use sealblock_units::BlockSize;

use super::{noise, sealed};
use crate::{GuardKind, Keep, PiFormat, ProtectionType, RebaseTags, Tags, guard, rebase};
use crate::{Interleave, PiPosition, seal_interleaved};

const TAGS: Tags = Tags { app_tag: 0x5EA1, storage_tag: 0x0123_4567_89AB_CDEF, initial_ref_tag: 0xFFFF_FFFF_FFFF_FFFE };

/// Every legal format.
fn formats() -> impl Iterator<Item = PiFormat> {
    let pairs = GuardKind::ALL.into_iter().flat_map(|guard| ProtectionType::ALL.map(|protection| (guard, protection)));
    pairs.flat_map(|(guard, protection)| {
        let (least, most) = guard.storage_tag_limits();
        (least..=most).map(move |bits| PiFormat::new(guard, protection, bits).unwrap())
    })
}

#[test]
fn tuples_have_these_bytes() {
    let data = noise(42, 1024);
    let hex = |guard, storage_tag_bits| {
        let format = PiFormat::new(guard, ProtectionType::Type1, storage_tag_bits).unwrap();
        let tuples = sealed(format, BlockSize::B512, &data, &Tags { initial_ref_tag: 0x1_0000_FFFF, ..TAGS });
        tuples.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    assert_eq!(hex(GuardKind::Crc16, 0), "19cb5ea10000ffff884c5ea100010000");
    assert_eq!(hex(GuardKind::IpChecksum, 12), "d6945ea1def0ffff25205ea1def10000");
    assert_eq!(hex(GuardKind::Crc32c, 16), "701bc1915ea1cdef000000010000ffff3f0e25995ea1cdef0000000100010000");
    assert_eq!(hex(GuardKind::Crc64, 8), "14e596957494dc085ea1ef010000ffff93a2790d7237bc385ea1ef0100010000");
}

#[test]
fn all_formats_together_have_this_hash() {
    let data = noise(43, 4096 * 4);
    let mut hash = 0;
    for format in formats() {
        for size in [BlockSize::B512, BlockSize::B4096] {
            hash = guard::crc64_append(hash, &sealed(format, size, &data, &TAGS));
        }
    }
    assert_eq!(hash, 0x7331_F132_587A_F59B);
}

#[test]
fn interleaved_metadata_has_this_hash() {
    let mut hash = 0;
    for format in formats() {
        for position in [PiPosition::First, PiPosition::Last] {
            let layout = Interleave::new(format, BlockSize::B512, 64, position).unwrap();
            let mut buffer = noise(44, layout.stride_bytes() * 3);
            seal_interleaved(layout, &mut buffer, &TAGS);
            hash = guard::crc64_append(hash, &buffer);
        }
    }
    assert_eq!(hash, 0xBE41_D0DA_9594_831C);
}

#[test]
fn rebased_tuples_have_this_hash() {
    let data = noise(45, 512 * 3);
    let output =
        RebaseTags { app_tag: Keep::Replace(7), initial_ref_tag: Keep::Replace(0xFFFF_FFFF), ..Default::default() };
    let mut hash = 0;
    for from in formats().step_by(5) {
        let old = sealed(from, BlockSize::B512, &data, &TAGS);
        for to in formats().step_by(7) {
            let mut new = vec![0; 3 * to.tuple_bytes()];
            let checks = super::all_checks(&TAGS);
            let bad = rebase(from, to, BlockSize::B512, &data, &old, &mut new, &checks, &output, &mut |_| ());
            assert_eq!(bad, 0);
            hash = guard::crc64_append(hash, &new);
        }
    }
    assert_eq!(hash, 0x7081_10B8_278B_2FE0);
}
