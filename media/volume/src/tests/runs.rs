//! Blocks that are deallocated or made unreadable together have one map entry, also after a crash.

use std::time::Duration;

use sealblock_block::{Device, Durability, Request};
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_units::{BlockSize, Extent, Lba};

use super::setup::{Harness, TestClock, TestMedium, created, pattern, protection};
use crate::format::{LogHeader, LogSector, MapEntry, MapEntryKind, MapEntryRun, Seed};
use crate::rescue::open_remains;
use crate::rescue::profile::Hints;
use crate::{Mutation, OpenOptions, VolumeError, open};

const BLOCKS: u64 = 4096;

fn medium(size: BlockSize, sector: u32) -> TestMedium {
    created(size, sector, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1))
}

/// A volume all of whose blocks were written, with an empty log.
fn written() -> Harness {
    let harness = Harness::open(&medium(BlockSize::B512, 512), false).unwrap();
    (0..BLOCKS).step_by(256).for_each(|start| harness.write(start, &pattern(start + 1, 256 * 512)).unwrap());
    harness.flush().unwrap();
    harness.wait(Duration::from_secs(5));
    assert_eq!(harness.gate.device().log.tail.get(), harness.gate.device().log.next.get(), "the log is empty");
    harness
}

fn block(lba: u64) -> Vec<u8> {
    let from = (lba % 256) as usize * 512;
    pattern(lba / 256 * 256 + 1, 256 * 512)[from..from + 512].to_vec()
}

fn zero(harness: &Harness, start: u64, blocks: u64) {
    let extent = Extent::from_raw(start, blocks).unwrap();
    let request = Request::write_zeroes(extent, true, Durability::Volatile);
    harness.run(harness.gate.execute(request)).unwrap();
}

fn spoil(harness: &Harness, start: u64, blocks: u64) {
    let extent = Extent::from_raw(start, blocks).unwrap();
    let request = Request::write_uncorrectable(extent, Durability::Volatile);
    harness.run(harness.gate.execute(request)).unwrap();
}

/// The machine stops.
fn crash(harness: Harness) -> TestMedium {
    let medium = harness.medium.clone();
    drop(harness);
    medium.let_all_go();
    medium.land();
    medium
}

fn is_zeroes(harness: &Harness, lba: u64) -> bool {
    harness.read(lba, 1).unwrap() == [0; 512]
}

#[test]
fn a_run_is_one_map_entry_of_the_log_and_no_memory_to_speak_of_until_the_map_pages_have_it() {
    let harness = written();
    let volume = harness.gate.device();
    // Few enough that no commit begins before the flush.
    let (before, next) = (harness.medium.written_bytes.get(), volume.log.next.get());
    zero(&harness, 7, 400);
    harness.flush().unwrap();
    assert_eq!(volume.log.next.get() - next, 1);
    assert_eq!(harness.medium.written_bytes.get() - before, 2 * 512, "a sector of the log in both places");
    assert!(volume.block_map.patches.bytes() < 4096, "{} bytes for 400 blocks", volume.block_map.patches.bytes());
    for lba in [6, 7, 200, 406, 407] {
        assert_eq!(is_zeroes(&harness, lba), (7..407).contains(&lba), "block {lba}");
    }
    let medium = harness.close();
    let again = Harness::open(&medium, true).unwrap();
    assert!((7..407).all(|lba| is_zeroes(&again, lba)));
    assert!([6, 407].into_iter().all(|lba| again.read(lba, 1).unwrap() == block(lba)));
    again.verify().unwrap();
}

#[test]
fn a_crash_right_behind_a_run_keeps_all_of_it_and_what_came_later_in_it() {
    for read_only in [true, false] {
        let harness = written();
        zero(&harness, 100, 800);
        harness.flush().unwrap();
        // The next commit writes a block, and deallocates others on both sides of it again.
        harness.write(300, &pattern(9, 512)).unwrap();
        harness.flush().unwrap();
        harness.write(500, &pattern(10, 512)).unwrap();
        harness.write(600, &pattern(11, 512)).unwrap();
        harness.flush().unwrap();
        zero(&harness, 590, 20);
        spoil(&harness, 700, 50);
        harness.flush().unwrap();
        harness.write(720, &pattern(12, 512)).unwrap();
        harness.write(990, &pattern(13, 512)).unwrap();
        zero(&harness, 980, 30);
        harness.flush().unwrap();
        let again = Harness::open(&crash(harness), read_only).unwrap();
        for lba in 90..1020 {
            let due = match lba {
                300 => pattern(9, 512),
                500 => pattern(10, 512),
                720 => pattern(12, 512),
                700..750 => {
                    assert_eq!(again.read(lba, 1).unwrap_err().bad_blocks().unwrap().as_slice()[0].lba, Lba::new(lba));
                    continue;
                }
                100..900 | 980..1010 => vec![0; 512],
                _ => block(lba),
            };
            assert!(again.read(lba, 1).unwrap() == due, "block {lba}, read-only {read_only}");
        }
    }
}

#[test]
fn a_run_may_hang_on_a_single_sector_no_more_than_as_many_blocks_one_by_one() {
    for (blocks, places) in [(7, 1), (8, 2)] {
        let harness = written();
        let before = harness.medium.written_bytes.get();
        zero(&harness, 40, blocks);
        harness.flush().unwrap();
        assert_eq!(harness.medium.written_bytes.get() - before, places * 512, "{blocks} blocks");
        let sequence = harness.gate.device().log.next.get() - 1;
        // The next commits repeat what was written once, so either place of the sector may be lost.
        for lba in [2000, 2001] {
            harness.write(lba, &pattern(5, 512)).unwrap();
            harness.flush().unwrap();
        }
        let layout = harness.gate.device().layout;
        let medium = crash(harness);
        for region in [0, 1] {
            let at = layout.log_sector_offset(sequence, region) as usize;
            let damaged = medium.copy();
            damaged.bytes.borrow_mut()[at..at + 512].fill(0);
            let again = Harness::open(&damaged, false).unwrap();
            assert!((40..40 + blocks).all(|lba| is_zeroes(&again, lba)), "{blocks} blocks, region {region}");
            assert_eq!(again.read(2000, 1).unwrap(), pattern(5, 512));
        }
    }
}

#[test]
fn faults_put_in_on_purpose_are_seen() {
    for mutation in [Mutation::None, Mutation::ShortRun, Mutation::RunsFirst] {
        let medium = crash(written());
        let harness = Harness::open_with(&medium, OpenOptions { mutation, ..OpenOptions::default() }).unwrap();
        zero(&harness, 100, 50);
        harness.flush().unwrap();
        harness.write(120, &pattern(9, 512)).unwrap();
        harness.flush().unwrap();
        let medium = crash(harness);
        let again = Harness::open_with(&medium, OpenOptions { mutation, ..OpenOptions::default() }).unwrap();
        let is_whole = is_zeroes(&again, 149);
        let is_newest = again.read(120, 1).unwrap() == pattern(9, 512);
        assert_eq!((is_whole, is_newest), (mutation != Mutation::ShortRun, mutation != Mutation::RunsFirst));
    }
}

/// A volume whose log ends with a sector of these map entries, forged with the right checksums.
fn forged(entries: &[MapEntryRun]) -> TestMedium {
    let harness = written();
    harness.write(1, &pattern(8, 512)).unwrap();
    harness.flush().unwrap();
    let (layout, sequence) = (harness.gate.device().layout, harness.gate.device().log.next.get());
    let medium = crash(harness);
    let seed = Seed::of(&super::setup::UUID);
    let raw: Vec<_> = entries.iter().map(|run| run.encode(seed)).collect();
    let header = LogHeader::new(sequence, sequence + 1);
    for region in [0, 1] {
        let at = layout.log_sector_offset(sequence, region) as usize;
        let bytes = &mut medium.bytes.borrow_mut()[at..at + 512];
        LogSector::encode(bytes, seed, header, raw.iter(), &[]);
    }
    // The next sector says that it was durable.
    let header = LogHeader::new(sequence + 1, sequence + 1);
    let at = layout.log_sector_offset(sequence + 1, 0) as usize;
    LogSector::encode(&mut medium.bytes.borrow_mut()[at..at + 512], seed, header, [].iter(), &[]);
    medium
}

#[test]
fn a_run_that_cannot_be_is_a_damaged_log_and_no_map_entry() {
    let run = |lba: u64, blocks: u32| MapEntryRun {
        first: MapEntry { generation: 3, ..MapEntry::deallocated(Lba::new(lba)) },
        blocks,
    };
    let stored = MapEntryRun::from(MapEntry { kind: MapEntryKind::Stored, ..run(12, 1).first });
    let open_for_writing = |medium: &TestMedium| {
        futures_executor::block_on(open(medium.clone(), TestClock::default(), &OpenOptions::default()))
    };
    for good in [vec![run(10, 5)], vec![run(BLOCKS - 5, 5), run(10, 2), stored]] {
        open_for_writing(&forged(&good)).unwrap();
    }
    for (what, bad) in [
        ("beyond the end", vec![run(BLOCKS - 5, 6)]),
        ("far beyond it", vec![run((1 << 40) - 1, MapEntryRun::MAX_BLOCKS)]),
        ("over one another", vec![run(10, 5), run(14, 3)]),
        ("over a block", vec![run(10, 5), stored]),
        ("no blocks", vec![run(10, 5), run(20, 0)]),
    ] {
        let medium = forged(&bad);
        let refused = open_for_writing(&medium).err();
        assert!(matches!(refused, Some(VolumeError::LogDamaged { sectors: 1, .. })), "{what}: {refused:?}");
        let options = OpenOptions { read_only: true, accept_older: true, ..OpenOptions::default() };
        let again = Harness::open_with(&medium, options).unwrap();
        assert!(
            [10, 12, 14, 20, BLOCKS - 1].into_iter().all(|lba| again.read(lba, 1).unwrap() == block(lba)),
            "{what}"
        );
        assert_eq!(again.read(1, 1).unwrap(), pattern(8, 512));
    }
}

/// A volume whose log alternates between two deallocated blocks and a written one, every two blocks, and that cannot
/// write its map pages.
fn with_a_log_of_pairs_and_writes(rounds: u64) -> Harness {
    let harness = written();
    let volume = harness.gate.device();
    let group = volume.layout.block_group(0).unwrap();
    let tail = volume.log.tail.get();
    // No checkpoint ends, so the log fills until the memory of 64 KiB is used up.
    harness.medium.held.set((volume.layout.groups_offset(), group.data_offset));
    for round in 0..rounds {
        match round % 2 {
            0 => zero(&harness, round * 2, 2),
            _ => harness.write(round * 2, &pattern(round, 512)).unwrap(),
        }
        if round % 50 == 49 {
            harness.flush().unwrap();
        }
    }
    assert_eq!(harness.gate.device().log.tail.get(), tail, "the premise");
    harness
}

#[test]
fn a_log_that_says_more_than_there_is_memory_for_goes_to_the_map_pages_bit_by_bit_and_may_be_interrupted_anywhere() {
    let rounds = 1200;
    let medium = crash(with_a_log_of_pairs_and_writes(rounds));
    let is_right = |harness: &Harness| {
        (0..rounds).all(|round| match round % 2 {
            0 => is_zeroes(harness, round * 2) && is_zeroes(harness, round * 2 + 1),
            _ => harness.read(round * 2, 1).unwrap() == pattern(round, 512),
        })
    };
    let mut interrupted = 0;
    let harness = loop {
        assert!(is_right(&Harness::open(&medium, true).unwrap()), "after {interrupted} interruptions");
        medium.syncs_left.set(interrupted);
        let opened = Harness::open(&medium, false);
        medium.syncs_left.set(u64::MAX);
        match opened {
            Ok(harness) => break harness,
            Err(_) => interrupted += 1,
        }
    };
    // Before it decides; after the pages that were in the way; after the other pages; after the superblock; after the
    // pages again. From then on the log is empty.
    assert_eq!(interrupted, 5, "syncs of a recovery");
    assert!(is_right(&harness));
    harness.verify().unwrap();
}

#[test]
fn what_is_left_of_a_volume_has_the_runs_of_its_log() {
    let harness = written();
    zero(&harness, 100, 800);
    harness.flush().unwrap();
    harness.write(300, &pattern(9, 512)).unwrap();
    harness.flush().unwrap();
    let layout = harness.gate.device().layout;
    let medium = crash(harness);
    for at in [0, 32 << 10, layout.third_offset()] {
        medium.bytes.borrow_mut()[at as usize..at as usize + 512].fill(0);
    }
    let (hints, options) = (Hints::default(), OpenOptions::default());
    let opened = open_remains(medium, TestClock::default(), &hints, &options);
    let (opened, _) = futures_executor::block_on(opened).unwrap();
    assert_eq!(opened.description.recovered, 800);
    for lba in [99, 100, 299, 300, 301, 899, 900] {
        let has_no_second_copy = (100..900).contains(&lba) && lba != 300;
        let (located, _) = futures_executor::block_on(opened.volume.locate(Extent::from_raw(lba, 1).unwrap())).unwrap();
        assert_eq!(
            matches!(located[0], crate::requests::lookup::BlockLocation::Zeroes),
            has_no_second_copy,
            "block {lba}"
        );
    }
}
