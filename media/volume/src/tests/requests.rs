//! Requests, and their effects after the volume was closed and opened again.

use sealblock_block::{BadBlockCause, Device, Durability, ErrorKind, Request};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use super::setup::{Harness, TestMedium, created, pattern, protection};
use crate::{OpenOptions, VolumeError};

/// Every guard and type, and no protection information, with both block sizes.
fn shapes() -> impl Iterator<Item = (BlockSize, Option<PiFormat>)> {
    let guards = [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64];
    let types = [ProtectionType::Type1, ProtectionType::Type2, ProtectionType::Type3];
    let formats = guards.into_iter().flat_map(move |guard| types.map(|t| protection(guard, t))).chain([None]);
    formats.flat_map(|format| [BlockSize::B512, BlockSize::B4096].map(|size| (size, format)))
}

#[test]
fn what_was_written_is_read_before_and_after_reopening() {
    for (size, format) in shapes() {
        let harness = Harness::new(size, 700, format);
        let (first, second) = (pattern(1, 300 * size.bytes()), pattern(2, 7 * size.bytes()));
        harness.write(100, &first).unwrap();
        harness.write(350, &second).unwrap();
        let mut expected = vec![0; 700 * size.bytes()];
        expected[100 * size.bytes()..400 * size.bytes()].copy_from_slice(&first);
        expected[350 * size.bytes()..357 * size.bytes()].copy_from_slice(&second);
        assert!(harness.read(0, 700).unwrap() == expected, "{size} {format:?}");
        harness.verify().unwrap();
        let medium = harness.close();
        for read_only in [true, false] {
            let again = Harness::open(&medium, read_only).unwrap();
            assert!(again.read(0, 700).unwrap() == expected, "{size} {format:?} read-only {read_only}");
            again.verify().unwrap();
        }
    }
}

#[test]
fn what_was_flushed_survives_without_closing() {
    for sector_bytes in [512, 4096] {
        let format = protection(GuardKind::Crc16, ProtectionType::Type1);
        let medium = created(BlockSize::B4096, sector_bytes, 300, format);
        let harness = Harness::open(&medium, false).unwrap();
        harness.write(5, &pattern(1, 20 * 4096)).unwrap();
        harness.flush().unwrap();
        harness.write_durably(10, &pattern(2, 4096), Durability::ForceUnitAccess).unwrap();
        drop(harness);
        let again = Harness::open(&medium, true).unwrap();
        assert_eq!(again.read(10, 1).unwrap(), pattern(2, 4096));
        assert_eq!(again.read(5, 5).unwrap(), pattern(1, 20 * 4096)[..5 * 4096]);
        again.verify().unwrap();
    }
}

#[test]
fn overwriting_a_full_volume_again_and_again_finds_physical_blocks_and_log_space() {
    let harness = Harness::new(BlockSize::B4096, 256, protection(GuardKind::Crc64, ProtectionType::Type1));
    for round in 0..40 {
        harness.write(0, &pattern(round, 256 * 4096)).unwrap();
    }
    assert!(harness.read(0, 256).unwrap() == pattern(39, 256 * 4096));
    let again = Harness::open(&harness.close(), false).unwrap();
    assert!(again.read(0, 256).unwrap() == pattern(39, 256 * 4096));
    again.verify().unwrap();
}

#[test]
fn a_flush_of_many_blocks_is_one_small_write() {
    let harness = Harness::new(BlockSize::B4096, 256, protection(GuardKind::Crc32c, ProtectionType::Type1));
    // The very first commit marks the log as in use in the superblock.
    harness.write(200, &pattern(200, 8 * 4096)).unwrap();
    harness.flush().unwrap();
    let (written, syncs) = (harness.medium.written_bytes.get(), harness.medium.syncs.get());
    (0..30).for_each(|i| harness.write(i * 7, &pattern(i, 4096)).unwrap());
    harness.flush().unwrap();
    assert_eq!(harness.medium.written_bytes.get() - written, 30 * 4096 + 2 * 2 * 512, "two sectors, twice");
    assert_eq!(harness.medium.syncs.get() - syncs, 1);
    harness.flush().unwrap();
    assert_eq!(harness.medium.syncs.get() - syncs, 1, "nothing new to make durable");
    for blocks in [1, 7, 8] {
        let written = harness.medium.written_bytes.get();
        harness.write(0, &pattern(blocks, blocks as usize * 4096)).unwrap();
        harness.flush().unwrap();
        let places = if blocks <= 7 { 1 } else { 2 };
        assert_eq!(harness.medium.written_bytes.get() - written, blocks * 4096 + places * 512, "{blocks}");
    }
}

#[test]
fn given_up_blocks_read_as_zeroes_and_their_space_goes_back() {
    let harness = Harness::new(BlockSize::B4096, 256, protection(GuardKind::Crc32c, ProtectionType::Type1));
    harness.write(0, &pattern(1, 200 * 4096)).unwrap();
    harness.flush().unwrap();
    let punched = harness.medium.punched_bytes.get();
    let extents = vec![Extent::from_raw(0, 50).unwrap(), Extent::from_raw(100, 10).unwrap()];
    harness.run(harness.gate.execute(Request::discard(extents))).unwrap();
    let zeroes = |may_unmap| {
        Request::write_zeroes(
            Extent::from_raw(if may_unmap { 60 } else { 70 }, 5).unwrap(),
            may_unmap,
            Durability::Volatile,
        )
    };
    harness.run(harness.gate.execute(zeroes(true))).unwrap();
    harness.run(harness.gate.execute(zeroes(false))).unwrap();
    assert_eq!(harness.medium.punched_bytes.get(), punched, "not before it is durable");
    harness.flush().unwrap();
    let mut expected = pattern(1, 200 * 4096);
    for range in [0..50, 100..110, 60..65, 70..75] {
        expected[range.start * 4096..range.end * 4096].fill(0);
    }
    harness.idle();
    assert_eq!(harness.medium.punched_bytes.get() - punched, 3 * (64 << 10), "three times 64 KiB are wholly free");
    let medium = harness.close();
    let again = Harness::open(&medium, false).unwrap();
    assert!(again.read(0, 200).unwrap() == expected);
    again.verify().unwrap();
}

#[test]
fn a_full_medium_fails_the_write_and_keeps_the_old_block() {
    let harness = Harness::new(BlockSize::B4096, 256, protection(GuardKind::Crc32c, ProtectionType::Type1));
    harness.write(0, &pattern(1, 256 * 4096)).unwrap();
    harness.flush().unwrap();
    let pbns = harness.gate.device().layout.block_group(0).unwrap().data_offset;
    harness.medium.full_from.set(pbns);
    let why = harness.write(3, &pattern(2, 8 * 4096)).unwrap_err();
    assert!(matches!(why.kind(), ErrorKind::NoSpace { .. }), "{why}");
    assert!(harness.read(0, 256).unwrap() == pattern(1, 256 * 4096));
    harness.medium.full_from.set(u64::MAX);
    harness.write(3, &pattern(2, 8 * 4096)).unwrap();
    assert!(harness.read(3, 8).unwrap() == pattern(2, 8 * 4096));
    Harness::open(&harness.close(), true).unwrap().verify().unwrap();
}

#[test]
fn a_log_that_cannot_be_written_stops_writes_and_not_reads() {
    let harness = Harness::new(BlockSize::B4096, 256, protection(GuardKind::Crc32c, ProtectionType::Type1));
    harness.write(0, &pattern(1, 4096)).unwrap();
    harness.flush().unwrap();
    harness.write(1, &pattern(2, 4096)).unwrap();
    harness.medium.full_from.set(0);
    assert!(harness.flush().is_err());
    let why = harness.write(2, &pattern(3, 4096)).unwrap_err();
    assert!(why.to_string().contains("volume failed, writes disabled"), "{why}");
    assert_eq!(harness.read(1, 1).unwrap(), pattern(2, 4096));
    harness.medium.full_from.set(u64::MAX);
    assert!(harness.flush().is_err(), "what the log holds is not known any more");
    assert_eq!(Harness::open(&harness.medium, false).unwrap().read(0, 1).unwrap(), pattern(1, 4096));
}

#[test]
fn a_read_only_volume_refuses_changes() {
    let medium = created(BlockSize::B512, 512, 64, None);
    medium.read_only.set(true);
    assert!(matches!(Harness::open(&medium, false), Err(VolumeError::ReadOnly)));
    let harness = Harness::open(&medium, true).unwrap();
    assert_eq!(harness.read(0, 64).unwrap(), vec![0; 64 * 512]);
    assert!(matches!(harness.write(0, &[1; 512]).unwrap_err().kind(), ErrorKind::ReadOnly));
}

#[test]
fn bad_media_are_refused_by_name() {
    let medium = created(BlockSize::B4096, 512, 64, None);
    let whole = medium.bytes.borrow().clone();
    medium.bytes.borrow_mut().truncate(whole.len() - 4096);
    assert!(matches!(Harness::open(&medium, true), Err(VolumeError::Truncated { .. })));
    // Only an open for reading may accept a truncated medium.
    let truncated = |read_only| OpenOptions { read_only, truncated: true, ..OpenOptions::default() };
    assert!(matches!(Harness::open_with(&medium, truncated(false)), Err(VolumeError::Truncated { .. })));
    Harness::open_with(&medium, truncated(true)).unwrap();
    let other = TestMedium { sector_bytes: 4096, ..TestMedium::new(whole.len() as u64, 4096) };
    other.bytes.borrow_mut().copy_from_slice(&whole);
    assert!(matches!(Harness::open(&other, true), Err(VolumeError::Sector { .. })));
    let empty = TestMedium::new(0, 512);
    assert!(matches!(Harness::open(&empty, true), Err(VolumeError::Superblock(_))));
    let one_copy = created(BlockSize::B4096, 512, 64, None);
    one_copy.bytes.borrow_mut()[..512].fill(0);
    Harness::open(&one_copy, true).unwrap();
}

#[test]
fn a_volume_on_larger_sectors_than_it_was_made_for_is_read_there_and_not_written() {
    for (size, protected) in [(BlockSize::B4096, true), (BlockSize::B512, true), (BlockSize::B4096, false)] {
        let format = protection(GuardKind::Crc32c, ProtectionType::Type1).filter(|_| protected);
        let harness = Harness::new(size, 300, format);
        let data = pattern(3, 300 * size.bytes());
        harness.write(0, &data).unwrap();
        harness.flush().unwrap();
        // Content that is only in the log, after a crash, and content in the block map.
        for medium in [harness.medium.copy(), harness.close()] {
            let larger = medium.on_sectors(4096);
            let refused = Harness::open(&larger, false).map(drop);
            assert!(matches!(refused, Err(VolumeError::Sector { volume_bytes: 512, medium_bytes: 4096 })));
            let before = larger.bytes.borrow().clone();
            let opened = Harness::open(&larger, true).unwrap();
            assert!(opened.read(0, 300).unwrap() == data);
            opened.verify().unwrap();
            assert!(matches!(opened.write(0, &data[..size.bytes()]).unwrap_err().kind(), ErrorKind::ReadOnly));
            assert!(*larger.bytes.borrow() == before);
        }
    }
}

fn spoil(harness: &Harness, start: u64, blocks: u64, durability: Durability) {
    let extent = Extent::from_raw(start, blocks).unwrap();
    harness.run(harness.gate.execute(Request::write_uncorrectable(extent, durability))).unwrap();
}

fn unreadable(outcome: Result<impl Sized, sealblock_block::Error>) -> Vec<u64> {
    let error = outcome.err().expect("blocks are unreadable");
    let bad_blocks = error.bad_blocks().expect("damage is named").as_slice();
    assert!(bad_blocks.iter().all(|bad_block| bad_block.cause == BadBlockCause::Media));
    bad_blocks.iter().map(|bad_block| bad_block.lba.get()).collect()
}

#[test]
fn blocks_made_unreadable_stay_so_over_a_restart_until_they_are_changed() {
    for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
        let harness = Harness::new(BlockSize::B4096, 256, protection(guard, ProtectionType::Type1));
        harness.write(0, &pattern(1, 8 * 4096)).unwrap();
        assert!(!harness.gate.device().superblock().uncorrectable);
        // A stored block, one on its way to the log, and one that was never written.
        spoil(&harness, 2, 2, Durability::Volatile);
        harness.write(20, &pattern(2, 4096)).unwrap();
        harness.flush().unwrap();
        spoil(&harness, 20, 2, Durability::ForceUnitAccess);
        assert!(harness.gate.device().superblock().uncorrectable, "said before the first map entry of the kind");
        for harness in [&harness, &Harness::open(&harness.medium, true).unwrap()] {
            assert_eq!(unreadable(harness.verify()), [2, 3, 20, 21]);
            assert_eq!(unreadable(harness.read(0, 8)), [2, 3]);
            assert_eq!(harness.read(4, 4).unwrap(), pattern(1, 8 * 4096)[4 * 4096..]);
            let extent = Extent::from_raw(20, 2).unwrap();
            let data = Sealed::seal(Slice::copy_from(&[0; 8192]), harness.size(), None, &Tags::default());
            assert_eq!(unreadable(harness.run(harness.gate.execute(Request::compare(extent, data)))), [20, 21]);
        }
        let harness = Harness::open(&harness.close(), false).unwrap();
        assert_eq!(unreadable(harness.verify()), [2, 3, 20, 21]);
        harness.write(2, &pattern(3, 4096)).unwrap();
        let at = |start| Extent::from_raw(start, 1).unwrap();
        let zeroes = |start, may_unmap| Request::write_zeroes(at(start), may_unmap, Durability::Volatile);
        for change in [Request::discard([at(3)]), zeroes(20, true), zeroes(21, false)] {
            harness.run(harness.gate.execute(change)).unwrap();
        }
        let harness = Harness::open(&harness.close(), false).unwrap();
        harness.verify().unwrap();
        assert_eq!(harness.read(2, 1).unwrap(), pattern(3, 4096));
        for block in [3, 20, 21] {
            assert_eq!(harness.read(block, 1).unwrap(), [0; 4096]);
        }
        assert!(harness.gate.device().superblock().uncorrectable, "older programs stay out");
    }
}

#[test]
fn a_crash_leaves_blocks_unreadable_if_that_was_durable() {
    let harness = Harness::new(BlockSize::B4096, 256, protection(GuardKind::Crc32c, ProtectionType::Type1));
    harness.write(0, &pattern(1, 8 * 4096)).unwrap();
    harness.flush().unwrap();
    spoil(&harness, 2, 2, Durability::ForceUnitAccess);
    spoil(&harness, 5, 1, Durability::Volatile);
    let medium = harness.medium.clone();
    drop(harness);
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!(unreadable(harness.verify()), [2, 3], "the last one never reached the log");
    assert_eq!(harness.read(4, 4).unwrap(), pattern(1, 8 * 4096)[4 * 4096..]);
}

#[test]
fn writers_that_wait_for_physical_blocks_in_use_keep_no_task_busy_and_are_served() {
    let harness = Harness::new(BlockSize::B4096, 16, None);
    let commits = || harness.gate.device().commits.completed.get();
    // Writes are slow, and there are physical blocks for only a few at once.
    harness.medium.turns.set(1_000);
    let extent = Extent::from_raw(0, 16).unwrap();
    let write = |seed| {
        let data = Sealed::seal(Slice::copy_from(&pattern(seed, 16 * 4096)), BlockSize::B4096, None, &Tags::default());
        harness.gate.execute(Request::write(extent, data, Durability::Volatile))
    };
    let written = harness.run(futures_util::future::join_all((0..100).map(write)));
    assert!(written.iter().all(Result::is_ok));
    assert!(commits() <= 200, "{} commits for 100 writes", commits());
}
