//! Faults around recovery that the simulator once found, each as a minimal case.

use sealblock_block::{BadBlock, Device, Durability, ErrorKind, Expectations, Request};
use sealblock_integrity::{Checks, Field, GuardKind, ProtectionType, Unverified};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

use super::setup::{Harness, TestClock, TestMedium, created, pattern, protection};
use crate::format::{MapEntry, SUPERBLOCK_OFFSETS, Superblock};
use crate::map::map_page::MapLookup;

fn medium() -> TestMedium {
    created(BlockSize::B4096, 512, 256, protection(GuardKind::Crc32c, ProtectionType::Type1))
}

/// The newest map entry of a block.
fn newest(harness: &Harness, lba: u64) -> MapEntry {
    let volume = harness.gate.device();
    volume.memtable.get(Lba::new(lba)).unwrap_or_else(|| match volume.lookup_cached(Lba::new(lba)) {
        Some(MapLookup::Mapped(entry)) => entry,
        other => panic!("no map entry but {other:?}"),
    })
}

/// Overwrites the data of a block's last write, as if they had never arrived.
pub(super) fn lose_data(harness: &Harness, lba: u64) {
    let volume = harness.gate.device();
    let at = volume.pbn_offset(0, newest(harness, lba).pbn) as usize;
    harness.medium.bytes.borrow_mut()[at..at + 512].fill(0xee);
}

#[test]
fn the_older_superblock_does_not_bring_back_what_recovery_left_out() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &pattern(1, 4096)).unwrap();
    harness.flush().unwrap();
    harness.write(0, &pattern(2, 4096)).unwrap();
    harness.flush().unwrap();
    lose_data(&harness, 0);
    drop(harness);
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!(harness.read(0, 1).unwrap(), pattern(1, 4096));
    for block in 1..4 {
        harness.write(block, &pattern(block, 4096)).unwrap();
        harness.flush().unwrap();
    }
    drop(harness);
    let write_seq = |at: u64| Superblock::decode(&medium.bytes.borrow()[at as usize..]).unwrap().write_seq;
    let newer = SUPERBLOCK_OFFSETS.into_iter().max_by_key(|at| write_seq(*at)).unwrap() as usize;
    medium.bytes.borrow_mut()[newer..newer + 512].fill(0);
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!(harness.read(0, 1).unwrap(), pattern(1, 4096));
    assert_eq!(harness.read(3, 1).unwrap(), pattern(3, 4096));
    harness.verify().unwrap();
}

#[test]
fn a_failed_sync_of_a_checkpoint_stops_writes_and_the_log_keeps_everything() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &pattern(1, 64 * 4096)).unwrap();
    harness.flush().unwrap();
    medium.syncs_left.set(0);
    assert!(harness.run(harness.gate.device().close()).is_err());
    assert!(harness.write(0, &pattern(2, 4096)).is_err());
    medium.syncs_left.set(u64::MAX);
    assert!(harness.write(0, &pattern(2, 4096)).is_err(), "for good");
    drop(harness);
    let again = Harness::open(&medium, false).unwrap();
    assert!(again.read(0, 64).unwrap() == pattern(1, 64 * 4096));
    again.verify().unwrap();
}

#[test]
fn opening_for_writing_syncs_before_it_decides() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &pattern(1, 4096)).unwrap();
    harness.flush().unwrap();
    drop(harness);
    medium.syncs_left.set(0);
    assert!(Harness::open(&medium, false).is_err());
    assert_eq!(Harness::open(&medium, true).unwrap().read(0, 1).unwrap(), pattern(1, 4096), "a reader decides nothing");
}

#[test]
fn a_physical_block_that_cannot_be_read_after_a_crash_is_an_unreadable_block_and_not_an_older_one() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(7, &pattern(1, 4096)).unwrap();
    harness.flush().unwrap();
    harness.write(8, &pattern(2, 4096)).unwrap();
    harness.write(7, &pattern(3, 4096)).unwrap();
    harness.flush().unwrap();
    let volume = harness.gate.device();
    let pbn = volume.pbn_offset(0, newest(&harness, 7).pbn);
    drop(harness);
    medium.unreadable.set((pbn, pbn + 4096));
    for read_only in [true, false] {
        medium.read_only.set(read_only);
        let options = crate::OpenOptions { read_only, ..crate::OpenOptions::default() };
        let told = futures_executor::block_on(crate::open(medium.copy(), TestClock::default(), &options));
        assert_eq!(told.unwrap().description.unreadable, [Lba::new(7)]);
        let harness = Harness::open(&medium, read_only).unwrap();
        assert_eq!(harness.read(7, 1).unwrap_err().bad_blocks().unwrap().as_slice(), [BadBlock::media(Lba::new(7))]);
        assert_eq!(harness.read(8, 1).unwrap(), pattern(2, 4096));
    }
    medium.unreadable.set((0, 0));
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!(harness.read(7, 1).unwrap(), pattern(3, 4096), "the medium gets over it, and so does the volume");
    harness.verify().unwrap();
}

#[test]
fn blocks_whose_guard_a_host_made_wrong_survive_a_crash_as_they_are() {
    for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
        let format = protection(guard, ProtectionType::Type3);
        let medium = created(BlockSize::B4096, 512, 64, format);
        let harness = Harness::open(&medium, false).unwrap();
        let tags = Slice::copy_from(&vec![0x11; format.unwrap().tuple_bytes()]);
        let unchecked = Unverified::new(Slice::copy_from(&pattern(1, 4096)), tags, BlockSize::B4096, format).unwrap();
        let data = unchecked.verify(&Checks::NONE).unwrap();
        let extent = Extent::from_raw(5, 1).unwrap();
        harness.run(harness.gate.execute(Request::write(extent, data, Durability::ForceUnitAccess))).unwrap();
        drop(harness);
        let again = Harness::open(&medium, false).unwrap();
        assert!(again.read(5, 1).unwrap() == pattern(1, 4096), "{guard:?}: it is as it was written");
        let guards = Expectations::new(Checks { guard: true, ..Checks::NONE });
        let error = again.run(again.gate.execute(Request::read(extent, guards))).unwrap_err();
        let field = Field::Guard;
        assert!(matches!(error.kind(), ErrorKind::Expectation { field: found, .. } if *found == field), "{error}");
    }
}
