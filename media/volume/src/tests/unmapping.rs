//! What unmapping frees, and when: physical blocks are freed once, after the deallocation is durable and no read uses
//! them. A long run is one commit and lets other requests run.

use sealblock_block::{Device, Durability, ErrorKind, Expectations, Request};
use sealblock_integrity::{Checks, ChecksumKind, Field, GuardKind, Masked, ProtectionType};
use sealblock_units::{BlockSize, Extent, Lba};

use super::setup::{Harness, created, pattern, protection};
use crate::{CorruptionKind, OpenOptions};

const SIZE: BlockSize = BlockSize::B512;
/// Blocks of one write, an extent of physical blocks.
const WRITE_BLOCKS: u64 = 512;

/// A volume all of whose blocks were written.
fn written(blocks: u64) -> Harness {
    let harness = Harness::new(SIZE, blocks, protection(GuardKind::Crc32c, ProtectionType::Type1));
    write(&harness, 0, blocks);
    harness.flush().unwrap();
    harness.idle();
    harness
}

fn write(harness: &Harness, start: u64, blocks: u64) {
    let data = pattern(1, WRITE_BLOCKS as usize * SIZE.bytes());
    for at in (start..start + blocks).step_by(WRITE_BLOCKS as usize) {
        harness.write(at, &data).unwrap();
    }
}

fn zero(harness: &Harness, start: u64, blocks: u64) {
    let extent = Extent::from_raw(start, blocks).unwrap();
    harness.run(harness.gate.execute(Request::write_zeroes(extent, true, Durability::Volatile))).unwrap();
}

fn free(harness: &Harness) -> u32 {
    harness.gate.device().allocator.free(0)
}

fn is_zeroes(harness: &Harness, start: u64, blocks: u64) -> bool {
    harness.read(start, blocks).unwrap().iter().all(|byte| *byte == 0)
}

#[test]
fn physical_blocks_are_free_with_the_commit_and_their_space_goes_back_behind_it() {
    let harness = written(4096);
    let before = free(&harness);
    zero(&harness, 512, 1024);
    assert!(is_zeroes(&harness, 512, 1024));
    assert_eq!(
        (free(&harness), harness.medium.punched_bytes.get()),
        (before, 0),
        "a crash may still bring the blocks back"
    );
    harness.flush().unwrap();
    harness.idle();
    assert_eq!((free(&harness), harness.medium.punched_bytes.get()), (before + 1024, 1024 * 512));
    zero(&harness, 500, 1100);
    harness.flush().unwrap();
    harness.idle();
    assert_eq!(free(&harness), before + 1100, "those that had no data any more had nothing to give up");
    harness.verify().unwrap();
}

#[test]
fn blocks_without_tags_are_as_expected_only_if_they_may_have_none() {
    let harness = Harness::new(SIZE, 1 << 16, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let lba_of = |request| match harness.run(harness.gate.execute(request)).map_err(|error| error.kind().clone()) {
        Ok(_) => None,
        Err(ErrorKind::Expectation { lba, field: Field::AppTag, expected: 0, actual: 0xFFFF }) => Some(lba.get()),
        Err(other) => panic!("{other}"),
    };
    let outcomes = |start, blocks, checks_escapes| {
        let extent = Extent::from_raw(start, blocks).unwrap();
        let app_tag = Some(Masked { expected: 0, mask: u16::MAX });
        let expected = Expectations::new(Checks { app_tag, checks_escapes, ..Checks::NONE });
        let checksum = Request::checksum(extent, ChecksumKind::Crc32c, expected);
        [Request::read(extent, expected), Request::verify(extent, expected), checksum].map(lba_of)
    };
    assert_eq!(outcomes(5000, 8, true), [Some(5000); 3], "block groups that were never written");
    write(&harness, 0, 1024);
    zero(&harness, 100, 1);
    for is_durable in [false, true] {
        assert_eq!((outcomes(0, 100, true), outcomes(101, 900, true)), ([None; 3], [None; 3]), "written");
        assert_eq!(outcomes(90, 40, true), [Some(100); 3], "deallocated, {is_durable}");
        assert_eq!(outcomes(100, 1, true), [Some(100); 3]);
        assert_eq!((outcomes(90, 40, false), outcomes(5000, 8, false)), ([None; 3], [None; 3]));
        harness.flush().unwrap();
        harness.idle();
    }
}

#[test]
fn a_read_in_flight_keeps_the_physical_blocks_of_a_run() {
    let harness = written(4096);
    let before = free(&harness);
    let volume = harness.gate.device();
    let read = volume.allocator.read();
    zero(&harness, 0, 1000);
    harness.flush().unwrap();
    harness.idle();
    assert_eq!((free(&harness), harness.medium.punched_bytes.get()), (before, 0), "it may look at them");
    drop(read);
    harness.idle();
    assert_eq!(
        (free(&harness), harness.medium.punched_bytes.get()),
        (before + 1000, 896 * 512),
        "whole units of 64 KiB"
    );
}

#[test]
fn physical_blocks_of_writes_that_were_never_committed_are_free_at_once() {
    let harness = written(4096);
    let before = free(&harness);
    write(&harness, 512, 512);
    assert_eq!(free(&harness), before - 512);
    zero(&harness, 512, 512);
    assert_eq!(free(&harness), before, "those of the write, and not those that the block map names");
    write(&harness, 512, 512);
    harness.flush().unwrap();
    harness.idle();
    assert_eq!(free(&harness), before);
    assert_eq!(harness.read(512, 512).unwrap(), pattern(1, 512 * 512), "the write came last");
    harness.verify().unwrap();
}

#[test]
fn only_map_entries_beyond_doubt_give_their_physical_blocks_up() {
    for (damage, kept) in [(None, 0), (Some(CorruptionKind::LostWrite), 1), (Some(CorruptionKind::AppTag), 1)] {
        let harness = written(4096);
        if let Some(damage) = damage {
            harness.run(harness.gate.device().damage(Lba::new(700), damage)).unwrap();
            assert!(harness.read(700, 1).is_err(), "{damage:?}");
        }
        let before = free(&harness);
        zero(&harness, 512, 512);
        harness.flush().unwrap();
        harness.idle();
        assert_eq!(free(&harness), before + 512 - kept, "{damage:?}");
        assert!(is_zeroes(&harness, 512, 512), "{damage:?}");
        harness.verify().unwrap();
    }
}

#[test]
fn a_long_run_is_one_commit_and_as_much_in_pieces_is_several() {
    let harness = written(1 << 16);
    let volume = harness.gate.device();
    assert!(volume.commits.max_uncommitted < 1 << 12, "the premise: so many blocks one by one are too many");
    let commits = volume.log.commits.get();
    zero(&harness, 0, 1 << 16);
    assert_eq!(volume.log.commits.get(), commits, "none is needed before the flush");
    harness.flush().unwrap();
    harness.idle();
    assert_eq!(volume.log.commits.get(), commits + 1);
    assert!(is_zeroes(&harness, 0, 1 << 16));
    let again = Harness::open(&harness.close(), true).unwrap();
    assert!(is_zeroes(&again, 0, 1 << 16));

    let harness = written(1 << 16);
    let volume = harness.gate.device();
    let commits = volume.log.commits.get();
    (0..1 << 13).for_each(|at| zero(&harness, at * 8, 1));
    harness.flush().unwrap();
    assert!(volume.log.commits.get() > commits + 2, "the log and the memory have their limits");
    assert!((0..1 << 16).step_by(97).all(|lba| is_zeroes(&harness, lba, 1) == lba.is_multiple_of(8)));
}

#[test]
fn a_long_run_lets_others_have_their_turns_and_a_short_one_waits_for_none() {
    for (blocks, marking, committing) in [(1 << 16, 20..40, 3..7), (1000, 0..1, 0..1)] {
        let harness = written(1 << 16);
        let turns = || harness.medium.submits.borrow().len();
        let begun = turns();
        zero(&harness, 0, blocks);
        assert!(marking.contains(&(turns() - begun)), "{} turns of {blocks} blocks", turns() - begun);
        let begun = turns();
        harness.flush().unwrap();
        harness.idle();
        assert!(committing.contains(&(turns() - begun)), "{} turns of the commit of {blocks}", turns() - begun);
    }
}

/// Three and a half block groups.
const SPARSE_BLOCKS: u64 = 7 << 17;

#[test]
fn what_was_never_written_takes_no_record_when_it_is_unmapped() {
    let medium = created(SIZE, 512, SPARSE_BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let taken = medium.allocated_bytes();
    let written = medium.written_bytes.get();
    let harness = Harness::open_noted(&medium, OpenOptions::default()).unwrap();
    let discard = |extent| harness.run(harness.gate.execute(Request::discard([extent]))).unwrap();
    zero(&harness, 0, SPARSE_BLOCKS);
    discard(Extent::from_raw(0, SPARSE_BLOCKS).unwrap());
    discard(Extent::from_raw(5, 1).unwrap());
    harness.flush().unwrap();
    harness.idle();
    assert_eq!((medium.allocated_bytes(), harness.gate.device().log.commits.get()), (taken, 0));
    assert_eq!(medium.written_bytes.get(), written, "not even a superblock: nothing changed");
    harness.close();
    assert_eq!(
        medium.allocated_bytes(),
        taken + 2 * 4096,
        "the high-water mark, which comes with the superblocks of the close"
    );
}

#[test]
fn a_block_group_that_was_written_is_unmapped_wherever_its_map_entries_are_and_its_neighbours_are_left_alone() {
    let harness = Harness::new(SIZE, SPARSE_BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let is_initialized = |harness: &Harness| {
        (0..4).map(|group| harness.gate.device().block_map.groups.is_initialized(group)).collect::<Vec<_>>()
    };
    let at = (1 << 18) + 700;
    // First in the memtable, then in the log but not in the block map, then in the block map.
    for flushes in [0, 1, 1] {
        write(&harness, at, 512);
        (0..flushes).for_each(|_| harness.flush().unwrap());
        let before = harness.gate.device().log.commits.get();
        zero(&harness, 0, SPARSE_BLOCKS);
        assert!(is_zeroes(&harness, at, 512));
        harness.flush().unwrap();
        assert!(harness.gate.device().log.commits.get() > before, "the zeroes are recorded where there were data");
        assert!(is_zeroes(&harness, at, 512));
    }
    let harness = Harness::open(&harness.close(), false).unwrap();
    assert_eq!(is_initialized(&harness), [false, true, false, false]);
    write(&harness, at, 512);
    let harness = Harness::open(&harness.close(), false).unwrap();
    assert!(!is_zeroes(&harness, at, 512));
    zero(&harness, 0, SPARSE_BLOCKS);
    let harness = Harness::open(&harness.close(), false).unwrap();
    assert!(is_zeroes(&harness, at, 512));
    assert_eq!(is_initialized(&harness), [false, true, false, false]);
    harness.verify().unwrap();
}

#[test]
fn what_was_never_written_can_be_made_unreadable() {
    let harness = Harness::new(SIZE, SPARSE_BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let extent = Extent::from_raw(1 << 18, 8).unwrap();
    harness.run(harness.gate.execute(Request::write_uncorrectable(extent, Durability::Volatile))).unwrap();
    assert!(harness.read(1 << 18, 1).is_err());
    let harness = Harness::open(&harness.close(), false).unwrap();
    assert!(harness.read((1 << 18) + 7, 1).is_err() && harness.read((1 << 18) + 8, 1).is_ok());
    zero(&harness, 0, SPARSE_BLOCKS);
    assert!(is_zeroes(&harness, 1 << 18, 8));
}
