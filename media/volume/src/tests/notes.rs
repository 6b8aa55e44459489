//! Completed changes outlive the process: when notes count and when they do not.

use std::collections::BTreeMap;

use futures_util::FutureExt;
use sealblock_block::{Device, Durability, Request};
use sealblock_integrity::{GuardKind, ProtectionType, Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use super::setup::{Harness, TestMedium, created, pattern, protection};
use crate::format::{Answered, NOTES_PER_PAGE, NotesPlace, Superblock};
use crate::{AnsweredChanges, OpenOptions, ResizeOptions, WhyLost, open, resize};

const BLOCKS: u64 = 600;

fn medium() -> TestMedium {
    created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc16, ProtectionType::Type1))
}

fn noted(medium: &TestMedium) -> Harness {
    Harness::open_noted(medium, OpenOptions::default()).unwrap()
}

fn discard(harness: &Harness, start: u64, blocks: u64) {
    let extent = Extent::from_raw(start, blocks).unwrap();
    harness.run(harness.gate.execute(Request::discard(vec![extent]))).unwrap();
}

/// What the next open would report about completed changes; that open leaves no trace.
fn answered(medium: &TestMedium, read_only: bool) -> AnsweredChanges {
    let (copy, options) = (copied(medium), OpenOptions { read_only, ..OpenOptions::default() });
    let clock = super::setup::TestClock::default();
    futures_executor::block_on(open(copy, clock, &options)).unwrap().description.answered
}

/// The medium as it is after the death of the process.
fn copied(medium: &TestMedium) -> TestMedium {
    let copy = medium.copy();
    copy.boot.set(medium.boot.get());
    copy
}

/// The same after a reboot of the machine.
fn rebooted(medium: &TestMedium) -> TestMedium {
    let copy = medium.copy();
    copy.boot.set(Some(2));
    copy
}

fn place(medium: &TestMedium) -> NotesPlace {
    let newest = [0, 32 << 10].map(|at| Superblock::decode(&medium.bytes.borrow()[at..]).unwrap());
    match newest.into_iter().max_by_key(|superblock| superblock.write_seq).unwrap().answered {
        Answered::Noted(place) => place,
        other => panic!("no notes: {other:?}"),
    }
}

/// Flushed, then changed in every way, and not flushed again.
fn used() -> (TestMedium, BTreeMap<u64, Option<Vec<u8>>>) {
    let medium = medium();
    let harness = noted(&medium);
    harness.write(0, &pattern(1, 40 * 4096)).unwrap();
    harness.flush().unwrap();
    let mut expected: BTreeMap<u64, Option<Vec<u8>>> = BTreeMap::new();
    for (seed, (start, blocks)) in [(3, 4), (5, 1), (5, 1), (100, 9), (4, 2)].into_iter().enumerate() {
        let data = pattern(seed as u64 + 10, blocks * 4096);
        harness.write(start, &data).unwrap();
        (start..).zip(data.chunks(4096)).for_each(|(lba, block)| drop(expected.insert(lba, Some(block.to_vec()))));
    }
    discard(&harness, 20, 8);
    (20..28).for_each(|lba| drop(expected.insert(lba, None)));
    harness.write(22, &pattern(30, 4096)).unwrap();
    expected.insert(22, Some(pattern(30, 4096)));
    let spoil = Request::write_uncorrectable(Extent::from_raw(33, 1).unwrap(), Durability::Volatile);
    harness.run(harness.gate.execute(spoil)).unwrap();
    (medium, expected)
}

fn check(harness: &Harness, expected: &BTreeMap<u64, Option<Vec<u8>>>) {
    for (lba, block) in expected {
        assert!(harness.read(*lba, 1).unwrap() == block.clone().unwrap_or(vec![0; 4096]), "block {lba}");
    }
    assert!(harness.read(33, 1).is_err(), "it was made unreadable");
    let first = &pattern(1, 40 * 4096)[..4096];
    assert!(harness.read(0, 1).unwrap() == first, "what was not changed since");
}

/// Exactly the flushed content.
fn check_flushed(harness: &Harness) {
    assert!(harness.read(0, 40).unwrap() == pattern(1, 40 * 4096), "what was flushed");
    assert!(harness.read(100, 9).unwrap() == vec![0; 9 * 4096], "what was not");
    harness.verify().unwrap();
}

#[test]
fn what_was_answered_is_there_after_the_death_of_the_process_for_readers_and_writers() {
    let (medium, expected) = used();
    assert_eq!(answered(&medium, true), answered(&medium, false));
    let said = answered(&medium, true);
    assert!(matches!(said, AnsweredChanges::Noted(changes) if changes > 20), "{said:?}");
    for read_only in [true, false] {
        let copy = copied(&medium);
        let harness = Harness::open_noted(&copy, OpenOptions { read_only, ..OpenOptions::default() }).unwrap();
        check(&harness, &expected);
    }
    // It is durable from then on.
    let copy = copied(&medium);
    drop(noted(&copy));
    check(&noted(&rebooted(&copy)), &expected);
}

#[test]
fn without_notes_it_is_lost() {
    let medium = medium();
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &pattern(1, 4096)).unwrap();
    harness.flush().unwrap();
    harness.write(0, &pattern(2, 4096)).unwrap();
    assert!(matches!(answered(&medium, true), AnsweredChanges::MayBeLost(_)));
    assert_eq!(noted(&copied(&medium)).read(0, 1).unwrap(), pattern(1, 4096));
}

#[test]
fn notes_of_another_boot_do_not_count_and_it_is_said() {
    let (medium, _) = used();
    let copy = rebooted(&medium);
    assert!(matches!(answered(&copy, true), AnsweredChanges::MayBeLost(WhyLost::OtherBoot)));
    check_flushed(&noted(&copy));
    assert_eq!(answered(&copy, true), AnsweredChanges::MayBeLost(WhyLost::OtherBoot), "nobody was told");
    // Notes also do not count if no boot has an identity.
    let copy = medium.copy();
    copy.boot.set(None);
    check_flushed(&noted(&copy));
}

#[test]
fn what_is_closed_in_good_order_has_no_notes() {
    let (medium, expected) = used();
    let medium = noted(&copied(&medium)).close();
    assert_eq!(answered(&medium, true), AnsweredChanges::AllDurable);
    check(&noted(&rebooted(&medium)), &expected);
}

#[test]
fn a_damaged_note_costs_what_was_not_flushed_and_nothing_else_and_it_is_said() {
    let (medium, _) = used();
    let place = place(&medium).offset as usize;
    let half = self::place(&medium).half_bytes as usize;
    // The flush was the first commit, so later notes are in the second half.
    for at in [half, half + 3, half + 70, half + 64 + 48 * 5 + 40] {
        let copy = copied(&medium);
        copy.bytes.borrow_mut()[place + at] ^= 4;
        let said = answered(&copy, true);
        assert!(matches!(said, AnsweredChanges::MayBeLost(_)), "byte {at}: {said:?}");
        check_flushed(&noted(&copy));
    }
    // Twin: a free physical block is before the place.
    let copy = copied(&medium);
    copy.bytes.borrow_mut()[place - 1] ^= 4;
    let said = answered(&copy, true);
    assert!(matches!(said, AnsweredChanges::Noted(_)), "{said:?}");
}

#[test]
fn that_changes_may_be_lost_is_known_until_who_sent_them_was_told_whatever_opens_the_volume() {
    const SAID: AnsweredChanges = AnsweredChanges::MayBeLost(WhyLost::OtherBoot);
    let (used, _) = used();
    let medium = rebooted(&used);
    assert_eq!(answered(&medium, true), SAID);
    // Opened for writing and killed at once, used and closed, used and killed with all notes there, resized.
    drop(noted(&medium));
    assert_eq!((answered(&medium, true), answered(&medium, false)), (SAID, SAID));
    let harness = noted(&copied(&medium));
    harness.write(7, &pattern(7, 4096)).unwrap();
    let medium = harness.close();
    assert_eq!((answered(&medium, true), answered(&medium, false)), (SAID, SAID));
    let medium = copied(&medium);
    let harness = noted(&medium);
    harness.write(8, &pattern(8, 4096)).unwrap();
    drop(harness);
    assert_eq!(answered(&medium, true), SAID);
    let medium = std::rc::Rc::new(copied(&medium));
    let options = ResizeOptions { capacity_blocks: BLOCKS + 40, bars: |_| None, mutation: crate::Mutation::None };
    let resized = futures_executor::block_on(resize(&medium, super::setup::TestClock::default(), &options)).unwrap();
    assert_eq!(resized.may_be_lost, Some(WhyLost::OtherBoot));
    assert_eq!(answered(&medium, true), SAID);
    // An open for reading cannot clear it.
    let reader =
        Harness::open_noted(&copied(&medium), OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
    reader.run(reader.gate.device().forget_lost()).unwrap();
    assert_eq!(reader.gate.device().may_be_lost(), Some(WhyLost::OtherBoot));
    let harness = noted(&copied(&medium));
    assert_eq!(harness.read(8, 1).unwrap(), pattern(8, 4096));
    harness.run(harness.gate.device().forget_lost()).unwrap();
    assert_eq!(harness.gate.device().may_be_lost(), None);
    let medium = harness.close();
    assert_eq!(
        (answered(&medium, true), answered(&medium, false)),
        (AnsweredChanges::AllDurable, AnsweredChanges::AllDurable)
    );
}

#[test]
fn a_death_while_recovery_works_does_not_hide_that_changes_may_be_lost() {
    let (used, _) = used();
    for changes in 0.. {
        let copy = rebooted(&used);
        copy.changes_left.set(changes);
        let opened = Harness::open_noted(&copy, OpenOptions::default());
        copy.changes_left.set(u64::MAX);
        assert!(matches!(answered(&copy, true), AnsweredChanges::MayBeLost(_)), "after {changes} changes");
        if opened.is_ok() {
            assert!(changes > 5, "recovery made only {changes} changes");
            return;
        }
    }
}

#[test]
fn data_that_are_not_there_make_all_notes_count_for_nothing() {
    let (medium, _) = used();
    let harness = noted(&copied(&medium));
    let pbn = harness.gate.device().lookup_cached(sealblock_units::Lba::new(104));
    drop(harness);
    let Some(crate::map::map_page::MapLookup::Mapped(entry)) = pbn else { panic!("{pbn:?}") };
    let offset = Superblock::decode(&medium.bytes.borrow()).unwrap().layout.data_offset(&entry).unwrap() as usize;
    medium.bytes.borrow_mut()[offset + 9] ^= 1;
    assert!(matches!(answered(&medium, true), AnsweredChanges::MayBeLost(WhyLost::DataGone)));
    check_flushed(&noted(&copied(&medium)));
}

#[test]
fn a_death_while_recovery_works_loses_nothing_and_a_power_cut_then_nothing_flushed() {
    let (medium, expected) = used();
    for changes in 0.. {
        let copy = copied(&medium);
        copy.changes_left.set(changes);
        let opened = Harness::open_noted(&copy, OpenOptions::default());
        copy.changes_left.set(u64::MAX);
        if opened.is_ok() {
            assert!(changes > 10, "recovery made only {changes} changes");
            return;
        }
        let (dead, off) = (copied(&copy), rebooted(&copy));
        check(&noted(&dead), &expected);
        let harness = noted(&off);
        // Each block is as it was flushed, or as it was changed since.
        let flushed = pattern(1, 40 * 4096);
        for (lba, block) in &expected {
            let found = harness.read(*lba, 1).unwrap();
            let before =
                flushed.get(*lba as usize * 4096..(*lba as usize + 1) * 4096).map_or(vec![0; 4096], <[u8]>::to_vec);
            assert!(found == before || Some(&found) == block.as_ref() || found == [0; 4096], "block {lba}");
        }
        harness.verify().err().iter().for_each(|error| {
            assert!(
                error.bad_blocks().is_some_and(|bad| bad.as_slice().iter().all(|bad| bad.lba.get() == 33)),
                "{error}"
            );
        });
    }
}

#[test]
fn a_medium_that_takes_no_notes_has_changes_durable_before_they_are_answered() {
    let medium = medium();
    medium.boot.set(None);
    let harness = noted(&medium);
    for lba in 0..3 {
        let syncs = medium.syncs.get();
        harness.write(lba, &pattern(lba, 4096)).unwrap();
        assert!(medium.syncs.get() > syncs);
    }
    let syncs = medium.syncs.get();
    discard(&harness, 1, 1);
    assert!(medium.syncs.get() > syncs);
    assert_eq!(answered(&medium, true), AnsweredChanges::AllDurable);
    let again = Harness::open_noted(&copied(&medium), OpenOptions::default()).unwrap();
    assert_eq!(again.read(0, 3).unwrap(), [pattern(0, 4096), vec![0; 4096], pattern(2, 4096)].concat());
}

#[test]
fn a_volume_too_small_for_notes_has_changes_durable_before_they_are_answered() {
    let medium = created(BlockSize::B512, 512, 40, None);
    let harness = noted(&medium);
    harness.write(3, &pattern(1, 512)).unwrap();
    assert_eq!(answered(&medium, true), AnsweredChanges::AllDurable);
    assert_eq!(noted(&rebooted(&medium)).read(3, 1).unwrap(), pattern(1, 512));
}

#[test]
fn a_note_that_fails_makes_changes_durable_from_then_on() {
    let medium = medium();
    let harness = noted(&medium);
    harness.write(0, &pattern(1, 4096)).unwrap();
    medium.note_fails.set(true);
    for lba in 0..4 {
        harness.write(lba, &pattern(lba + 5, 4096)).unwrap();
        let harness = noted(&copied(&medium));
        assert_eq!(harness.read(lba, 1).unwrap(), pattern(lba + 5, 4096));
        assert_eq!(answered(&medium, true), AnsweredChanges::AllDurable);
    }
    harness.close();
}

#[test]
fn a_half_that_is_full_has_a_commit_made_and_changes_go_on_beside_it() {
    let medium = medium();
    let options = OpenOptions { notes_half_bytes: 4096, ..OpenOptions::default() };
    let harness = Harness::open_noted(&medium, options).unwrap();
    let mut last = BTreeMap::new();
    for write in 0..3 * NOTES_PER_PAGE as u64 + 5 {
        let lba = write * 7 % 50;
        harness.write(lba, &pattern(write, 4096)).unwrap();
        last.insert(lba, write);
    }
    let long = pattern(999, 200 * 4096);
    harness.write(100, &long).unwrap();
    for medium in [copied(&medium), rebooted(&medium)] {
        let is_dead = medium.boot.get() == Some(1);
        let harness = noted(&medium);
        for (lba, write) in &last {
            let found = harness.read(*lba, 1).unwrap();
            assert!(!is_dead || found == pattern(*write, 4096), "block {lba}");
        }
        assert!(!is_dead || harness.read(100, 200).unwrap() == long);
    }
}

#[test]
fn what_of_a_dropped_change_is_not_noted_never_takes_effect() {
    let medium = medium();
    let harness = noted(&medium);
    harness.write(0, &pattern(1, 4096)).unwrap();
    let write = |start: u64, seed: u64| {
        let extent = Extent::from_raw(start, 1).unwrap();
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: start };
        let data = Slice::copy_from(&pattern(seed, 4096));
        let sealed = Sealed::seal(data, BlockSize::B4096, harness.gate.geometry().protection, &tags);
        Box::pin(harness.gate.execute(Request::write(extent, sealed, Durability::Volatile)))
    };
    // A change in flight has whoever notes let others run before.
    medium.held.set((0, u64::MAX));
    let mut other = write(9, 2);
    assert!(other.as_mut().now_or_never().is_none());
    medium.held.set((0, 0));
    let free = harness.gate.device().allocator.free(0);
    for is_dropped in [true, false] {
        let mut noting = write(5, 3);
        assert!(noting.as_mut().now_or_never().is_none(), "its data are written, and it is about to be noted");
        if is_dropped {
            drop(noting);
            assert_eq!(harness.gate.device().allocator.free(0), free, "its physical block is free again");
        } else {
            harness.run(noting).unwrap();
        }
        // Blocks that are known to be deallocated already need no map entry.
        discard(&harness, 5, 1);
        assert_eq!(harness.read(5, 1).unwrap(), vec![0; 4096]);
        harness.write(6, &pattern(4, 4096)).unwrap();
        assert_eq!(harness.read(5, 1).unwrap(), vec![0; 4096], "dropped: {is_dropped}");
    }
    medium.let_all_go();
    harness.run(other).unwrap();
    assert_eq!(noted(&copied(&medium)).read(9, 1).unwrap(), pattern(2, 4096));
    harness.verify().unwrap();
}

/// Drops the first writes of an opening after this number of polls each, then writes, and lets what was dropped arrive
/// late. Returns the number of free physical blocks, and true if a write ended before it was dropped.
fn after_dropped_first_writes(polls: usize, writes: usize) -> (u32, bool) {
    let medium = medium();
    medium.turns.set(1);
    let harness = noted(&medium);
    let mut is_ended = false;
    for _ in 0..writes {
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 7 };
        let data = Slice::copy_from(&pattern(1, 4096));
        let sealed = Sealed::seal(data, BlockSize::B4096, harness.gate.geometry().protection, &tags);
        let first = Request::write(Extent::from_raw(7, 1).unwrap(), sealed, Durability::Volatile);
        let mut first = Box::pin(harness.gate.execute(first));
        is_ended |= (0..polls).any(|_| first.as_mut().now_or_never().is_some());
    }
    harness.write(7, &pattern(2, 4096)).unwrap();
    medium.land();
    assert_eq!(noted(&copied(&medium)).read(7, 1).unwrap(), pattern(2, 4096), "{polls} polls");
    harness.flush().unwrap();
    harness.idle();
    let free = harness.gate.device().allocator.free(0);
    harness.verify().unwrap();
    harness.close();
    (free, is_ended)
}

/// The place of notes is made, and the superblock that names it is written, by whichever change is the first.
#[test]
fn a_first_change_that_is_dropped_at_any_step_takes_no_space_and_its_late_superblock_does_no_harm() {
    let (free, _) = after_dropped_first_writes(0, 0);
    for polls in 0.. {
        for writes in 1..=3 {
            let (left, is_ended) = after_dropped_first_writes(polls, writes);
            assert_eq!(left, free, "{writes} writes were dropped after {polls} polls");
            if writes == 1 && is_ended {
                assert!(polls > 8, "the premise: it waits on its way, {polls}");
                return;
            }
        }
    }
}

#[test]
fn a_snapshot_with_old_notes_is_a_crash_image() {
    let medium = medium();
    let harness = noted(&medium);
    harness.write(0, &pattern(1, 4096)).unwrap();
    let old = copied(&medium);
    // So many that the log records the first commit as durable, and its physical block is reused.
    for seed in 2..8 {
        harness.write(0, &pattern(seed, 4096)).unwrap();
        harness.flush().unwrap();
    }
    let place = place(&medium);
    let (from, to) = (place.offset as usize, (place.offset + place.bytes()) as usize);
    let copy = copied(&medium);
    copy.bytes.borrow_mut()[from..to].copy_from_slice(&old.bytes.borrow()[from..to]);
    assert_eq!(noted(&copy).read(0, 1).unwrap(), pattern(7, 4096));
}

#[test]
fn the_place_of_notes_has_no_commit_made_earlier() {
    const MANY: u64 = 8 << 10;
    let commits = |keeps_answered| {
        let medium = created(BlockSize::B4096, 512, MANY, protection(GuardKind::Crc32c, ProtectionType::Type1));
        let harness = Harness::open_noted(&medium, OpenOptions { keeps_answered, ..OpenOptions::default() }).unwrap();
        for write in 0..2 * MANY {
            harness.write(write * 7 % MANY, &pattern(write, 4096)).unwrap();
            // Lets the worker run.
            harness.idle();
        }
        let volume = harness.gate.device();
        assert_eq!(volume.notes.blocks_taken(0) > 0, keeps_answered);
        volume.log.commits.get()
    };
    let (without, with) = (commits(false), commits(true));
    assert!(without > 10 && with <= without, "{with} commits with notes, {without} without");
}
