//! A log with map entries after the close that all superblocks and the mark state: one of them is from another time.
//! The volume opens as it was closed, says that it may be older, and no crash is mistaken for it.

use std::time::Duration;

use futures_executor::block_on;
use sealblock_block::{Freshness, WhyOlder};
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_units::BlockSize;

use super::setup::{Harness, TestClock, TestMedium, created, freshness, opened, pattern, protection};
use crate::format::{Layout, SUPERBLOCK_OFFSETS};
use crate::{Mutation, OpenOptions, ResizeOptions, VolumeError, probe, resize};

const SIZE: BlockSize = BlockSize::B4096;
const BLOCKS: u64 = 256;
const OLDER: Freshness = Freshness::MayBeOlder(WhyOlder::RolledBack);
/// Bytes of an image that are not written if they are all zero.
const HOLE_BYTES: usize = 4096;

fn layout() -> Layout {
    Layout::new(SIZE, 512, BLOCKS).unwrap()
}

fn volume() -> TestMedium {
    created(SIZE, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1))
}

fn content(seed: u64) -> Vec<u8> {
    pattern(seed, BLOCKS as usize * SIZE.bytes())
}

/// Writes the whole volume in flushed pieces, and closes it.
fn used(medium: &TestMedium, seed: u64) {
    let harness = Harness::open(medium, false).unwrap();
    for (first, piece) in (0..).step_by(32).zip(content(seed).chunks(32 * SIZE.bytes())) {
        harness.write(first, piece).unwrap();
        harness.flush().unwrap();
    }
    harness.close();
}

/// Writes an image over a medium as a copy that skips holes does.
fn put_back_sparse(medium: &TestMedium, image: &TestMedium) {
    let (mut bytes, image) = (medium.bytes.borrow_mut(), image.bytes.borrow());
    for (place, piece) in bytes.chunks_mut(HOLE_BYTES).zip(image.chunks(HOLE_BYTES)) {
        if piece.iter().any(|byte| *byte != 0) {
            place.copy_from_slice(piece);
        }
    }
}

/// Closed volumes whose log has map entries of a later day: all of it, or part of one region.
fn mixed() -> Vec<(&'static str, TestMedium)> {
    let first = volume();
    used(&first, 1);
    let later = first.copy();
    (2..4).for_each(|seed| used(&later, seed));
    let sparse = later.copy();
    put_back_sparse(&sparse, &first);
    let region = |part: u64| {
        let mixed = first.copy();
        mixed.put_back(&later, &[(layout().log_sector_offset(0, part), 64 << 10)]);
        mixed
    };
    vec![("an image put back without its holes", sparse), ("in region A", region(0)), ("in region B", region(1))]
}

#[test]
fn a_log_of_changes_after_the_close_is_refused_and_where_that_is_accepted_the_volume_is_as_it_was_closed() {
    for (what, medium) in mixed() {
        let before = medium.bytes.borrow().clone();
        for read_only in [true, false] {
            let refused = opened(&medium, read_only, false).err();
            assert!(matches!(refused, Some(VolumeError::LogAfterClose { .. })), "{what}: {refused:?}");
        }
        let harness = opened(&medium, true, true).unwrap();
        assert_eq!(freshness(&harness), OLDER, "{what}");
        assert!(harness.read(0, BLOCKS).unwrap() == content(1), "{what}: as it was closed");
        drop(harness);
        assert!(*medium.bytes.borrow() == before, "{what}: nothing is written");
    }
}

#[test]
fn opened_for_writing_it_keeps_such_a_log_until_the_first_change_which_ends_it() {
    for (what, medium) in mixed() {
        let before = medium.bytes.borrow().clone();
        let harness = opened(&medium, false, true).unwrap();
        harness.flush().unwrap();
        harness.wait(Duration::from_secs(60));
        drop(harness.close());
        assert!(*medium.bytes.borrow() == before, "{what}: without a change nothing is written");
        let harness = opened(&medium, false, true).unwrap();
        harness.write(7, &pattern(9, SIZE.bytes())).unwrap();
        harness.flush().unwrap();
        assert_eq!(freshness(&harness), Freshness::Current, "{what}: whoever accepted it has changed it since");
        let crashed = medium.copy();
        drop(harness.close());
        let mut expected = content(1);
        expected[7 * SIZE.bytes()..8 * SIZE.bytes()].copy_from_slice(&pattern(9, SIZE.bytes()));
        for medium in [crashed, medium] {
            let harness = opened(&medium, true, false).unwrap();
            assert!(harness.read(0, BLOCKS).unwrap() == expected, "{what}");
            assert_eq!(freshness(&harness), Freshness::Current, "{what}");
        }
    }
}

/// An older superblock counts whose volume was closed; the one that marked the log as in use is gone.
#[test]
fn a_log_in_use_whose_superblocks_are_all_damaged_but_that_of_the_close_before_is_used() {
    let medium = volume();
    used(&medium, 1);
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &content(2)).unwrap();
    harness.flush().unwrap();
    drop(harness);
    let newest = block_on(probe(&medium)).unwrap();
    assert!(!newest.is_clean);
    for at in [SUPERBLOCK_OFFSETS[newest.write_seq as usize % 2], layout().third_offset()] {
        medium.bytes.borrow_mut()[at as usize..][..512].fill(0);
    }
    assert!(block_on(probe(&medium)).unwrap().is_clean);
    for read_only in [true, false] {
        let harness = opened(&medium.copy(), read_only, false).unwrap();
        assert_eq!(freshness(&harness), Freshness::Current);
        assert!(harness.read(0, BLOCKS).unwrap() == content(2));
    }
}

/// Superblocks that the mark shows to be old are no witness that the log is empty.
#[test]
fn a_log_that_is_newer_than_superblocks_of_an_earlier_close_is_used() {
    let medium = volume();
    used(&medium, 1);
    let yesterday = medium.copy();
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &content(2)).unwrap();
    harness.flush().unwrap();
    drop(harness);
    let superblocks = [SUPERBLOCK_OFFSETS[0], SUPERBLOCK_OFFSETS[1], layout().third_offset()];
    medium.put_back(&yesterday, &superblocks.map(|at| (at, 512)));
    assert!(matches!(opened(&medium, true, false), Err(VolumeError::RolledBack { .. })));
    let harness = opened(&medium, true, true).unwrap();
    assert_eq!(freshness(&harness), OLDER);
    assert!(harness.read(0, BLOCKS).unwrap() == content(2));
}

#[test]
fn a_log_that_is_used_before_the_superblocks_say_so_is_noticed() {
    let medium = volume();
    let harness =
        Harness::open_with(&medium, OpenOptions { mutation: Mutation::KeepClean, ..OpenOptions::default() }).unwrap();
    harness.write(0, &pattern(1, SIZE.bytes())).unwrap();
    harness.flush().unwrap();
    drop(harness);
    assert!(matches!(opened(&medium, true, false), Err(VolumeError::LogAfterClose { .. })));
}

/// Every change of a use of a closed volume, with and without notes, and of a resize is the last one before a crash.
#[test]
fn no_crash_leaves_changes_after_a_close_in_the_log() {
    let start = volume();
    used(&start, 1);
    for (is_noted, stop) in (0..).map(|stop| (stop % 2 == 0, stop / 2)) {
        let medium = start.copy();
        medium.changes_left.set(stop);
        let opened_for_use = || match is_noted {
            true => Harness::open_noted(&medium, OpenOptions::default()),
            false => Harness::open(&medium, false),
        };
        let all = || -> Option<()> {
            let harness = opened_for_use().ok()?;
            harness.write(3, &pattern(5, SIZE.bytes())).ok()?;
            harness.flush().ok()?;
            harness.wait(Duration::from_secs(1));
            harness.write(40, &content(6)[..32 * SIZE.bytes()]).ok()?;
            harness.run(harness.gate.device().close()).ok()?;
            let options = ResizeOptions { capacity_blocks: 2 * BLOCKS, bars: |_| None, mutation: Mutation::None };
            block_on(resize(&&medium, TestClock::default(), &options)).ok().map(drop)
        };
        let has_ended = all().is_some();
        medium.changes_left.set(u64::MAX);
        for read_only in [true, false, true] {
            let harness = opened(&medium, read_only, false);
            let harness = harness.unwrap_or_else(|why| panic!("after {stop} changes, notes {is_noted}: {why}"));
            assert_eq!(freshness(&harness), Freshness::Current, "after {stop}");
        }
        if has_ended {
            assert!(stop > 30, "{stop}");
            break;
        }
    }
}
