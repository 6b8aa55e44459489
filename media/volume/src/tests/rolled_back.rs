//! Superblocks, log and reserved areas that were restored together from an earlier state: the high-water mark shows it
//! at the open, and no crash is mistaken for it.

use futures_executor::block_on;
use sealblock_block::{Device, Durability, Error, ErrorKind, Freshness, Request, ReservedArea, Response, WhyOlder};
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

use super::setup::{Harness, TestClock, TestMedium, created, freshness, opened, pattern, protection};
use crate::format::{BITMAP_PAGE_BYTES, Layout, SUPERBLOCK_OFFSETS, Superblock};
use crate::{Mutation, ResizeError, ResizeOptions, VolumeError, probe, resize};

const SIZE: BlockSize = BlockSize::B4096;
const BLOCKS: u64 = 700;
const OLDER: Freshness = Freshness::MayBeOlder(WhyOlder::RolledBack);

type Parts = Vec<(u64, u64)>;

fn layout() -> Layout {
    Layout::new(SIZE, 512, BLOCKS).unwrap()
}

fn volume() -> TestMedium {
    created(SIZE, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1))
}

fn content(seed: u64) -> Vec<u8> {
    pattern(seed, 64 * SIZE.bytes())
}

/// Uses a volume: writes its first blocks, and closes it.
fn used(medium: &TestMedium, seed: u64) {
    let harness = Harness::open(medium, false).unwrap();
    harness.write(0, &content(seed)).unwrap();
    harness.close();
}

/// Parts of a volume that are restored together.
fn put_back_together() -> [(&'static str, Parts); 5] {
    let layout = layout();
    let superblocks = || [SUPERBLOCK_OFFSETS[0], SUPERBLOCK_OFFSETS[1], layout.third_offset()].map(|at| (at, 512));
    let log = (layout.log_offset(), layout.log_bytes());
    let tail = (layout.tail_offset(), layout.medium_bytes() - layout.tail_offset());
    [
        ("the superblocks", superblocks().to_vec()),
        ("superblocks and log", superblocks().into_iter().chain([log]).collect()),
        ("what lies before the log, log and tail", vec![(0, 64 << 10), log, tail]),
        ("what lies before the block groups, and tail", vec![(0, layout.groups_offset()), tail]),
        (
            "superblocks, log and one copy of the mark",
            superblocks().into_iter().chain([log, (layout.high_water_offsets().last().unwrap(), 512)]).collect(),
        ),
    ]
}

fn write_seq(medium: &TestMedium) -> u64 {
    block_on(probe(medium)).unwrap().write_seq
}

/// The states of a volume in three successive uses, each as the machine stops.
fn states() -> Vec<TestMedium> {
    let medium = volume();
    let mut states = vec![medium.copy()];
    for seed in 1..4 {
        let harness = Harness::open(&medium, false).unwrap();
        let mut keep = || states.push(medium.copy());
        harness.write(0, &content(seed)).unwrap();
        harness.flush().unwrap();
        keep();
        harness.wait(std::time::Duration::from_secs(5));
        harness.write(100, &content(seed)).unwrap();
        harness.flush().unwrap();
        keep();
        harness.close();
        keep();
    }
    states
}

#[test]
fn an_earlier_superblock_is_refused_whatever_is_put_back_with_it() {
    let states = states();
    for (name, parts) in put_back_together() {
        for (then, now) in (0..states.len()).flat_map(|now| (0..now).map(move |then| (then, now))) {
            let medium = states[now].copy();
            medium.put_back(&states[then], &parts);
            let behind = write_seq(&states[now]) - write_seq(&states[then]);
            let before = medium.bytes.borrow().clone();
            for read_only in [true, false] {
                let refused = opened(&medium.copy(), read_only, false).err();
                let is_older = matches!(refused, Some(VolumeError::RolledBack { .. } | VolumeError::LogDamaged { .. }));
                assert!(is_older || behind == 0, "{name}: from {now} to {then}: {refused:?}");
                if let Some(VolumeError::RolledBack { write_seq: found, newest, .. }) = &refused {
                    assert_eq!((*found, *newest), (write_seq(&states[then]), write_seq(&states[now])), "{name}");
                }
            }
            if behind > 0 {
                let harness = opened(&medium, true, true).unwrap();
                assert_eq!(freshness(&harness), OLDER, "{name}: from {now} to {then}");
                drop(harness);
                assert!(*medium.bytes.borrow() == before, "reading writes nothing");
            }
        }
    }
}

/// Restored to just before a session, with a copy lost: the copy that counts is one write behind.
#[test]
fn a_lost_copy_does_not_hide_an_earlier_state() {
    let medium = volume();
    used(&medium, 1);
    let yesterday = medium.copy();
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &content(2)).unwrap();
    harness.flush().unwrap();
    drop(harness);
    let (_, parts) = &put_back_together()[1];
    medium.put_back(&yesterday, parts);
    let places = [SUPERBLOCK_OFFSETS[0], SUPERBLOCK_OFFSETS[1], layout().third_offset()];
    let earliest = volume();
    for lost in 1..8 {
        for from in [None, Some(&earliest)] {
            let medium = medium.copy();
            let lost = places.iter().enumerate().filter(|(at, _)| lost >> at & 1 == 1);
            lost.for_each(|(_, &at)| match from {
                None => medium.bytes.borrow_mut()[at as usize..][..512].fill(0),
                Some(earliest) => medium.put_back(earliest, &[(at, 512)]),
            });
            for read_only in [true, false] {
                assert!(opened(&medium, read_only, false).is_err());
            }
        }
    }
}

#[test]
fn a_log_that_is_put_back_alone_is_shorter_than_it_was_when_its_last_sector_had_both_places() {
    let medium = volume();
    let harness = Harness::open(&medium, false).unwrap();
    let flush = |seed| {
        harness.write(0, &content(seed)).unwrap();
        harness.flush().unwrap();
        // Shorter than the time until the next checkpoint.
        harness.wait(std::time::Duration::from_secs(1));
    };
    flush(1);
    let earlier = medium.copy();
    flush(2);
    drop(harness);
    assert_eq!(write_seq(&medium), write_seq(&earlier), "no superblock was written since");
    let layout = layout();
    let now = medium.copy();
    medium.put_back(&earlier, &[(layout.log_offset(), layout.log_bytes())]);
    assert!(matches!(opened(&medium, true, false), Err(VolumeError::RolledBack { .. })));
    // Restoring one of its two regions is enough.
    for region in [0, 1] {
        let medium = now.copy();
        medium.put_back(&earlier, &[(layout.log_sector_offset(0, region), layout.log_region_bytes())]);
        let harness = opened(&medium, true, false).unwrap();
        assert!(harness.read(0, 64).unwrap() == content(2));
    }
}

#[test]
fn what_is_as_it_was_left_is_current() {
    for medium in states() {
        for read_only in [true, false] {
            let harness = opened(&medium.copy(), read_only, false).unwrap();
            assert_eq!(freshness(&harness), Freshness::Current);
            harness.verify().unwrap();
        }
    }
}

#[test]
fn opening_for_writing_keeps_what_shows_it_and_the_first_change_ends_it() {
    let states = states();
    let (then, now) = (&states[3], states.last().unwrap());
    for (name, parts) in put_back_together() {
        let medium = now.copy();
        medium.put_back(then, &parts);
        let before = medium.bytes.borrow().clone();
        for _ in 0..2 {
            let harness = opened(&medium, false, true).unwrap();
            assert_eq!(freshness(&harness), OLDER, "{name}");
            harness.flush().unwrap();
            harness.wait(std::time::Duration::from_secs(60));
            drop(harness.close());
            assert!(*medium.bytes.borrow() == before, "{name}: without a change nothing is written");
        }
        let harness = opened(&medium, false, true).unwrap();
        harness.write(200, &content(9)).unwrap();
        harness.flush().unwrap();
        assert_eq!(freshness(&harness), Freshness::Current, "{name}: whoever accepted it has changed it since");
        harness.verify().unwrap();
        assert_eq!(freshness(&harness), Freshness::Current, "{name}: no page is ahead of the log any more");
        let crashed = medium.copy();
        drop(harness.close());
        for medium in [&crashed, &medium] {
            let harness = opened(medium, true, false).unwrap();
            assert_eq!(freshness(&harness), Freshness::Current, "{name}");
            harness.verify().unwrap();
            assert!(harness.read(200, 64).unwrap() == content(9), "{name}");
            drop(harness);
            medium.put_back(then, &parts);
            assert!(opened(medium, true, false).is_err(), "{name}: the same is seen again");
        }
    }
}

#[test]
fn a_lost_mark_costs_nothing_and_the_next_superblock_has_it_again() {
    let marks: Vec<u64> = layout().high_water_offsets().collect();
    assert_eq!(marks.len(), 2);
    let medium = volume();
    used(&medium, 1);
    let yesterday = medium.copy();
    used(&medium, 2);
    marks.iter().for_each(|&at| medium.bytes.borrow_mut()[at as usize..][..512].fill(0xa5));
    let unmarked = medium.copy();
    let (_, parts) = &put_back_together()[1];
    unmarked.put_back(&yesterday, parts);
    assert!(opened(&unmarked, true, false).is_ok(), "nothing at the opening shows it");
    used(&medium, 3);
    medium.put_back(&yesterday, parts);
    assert!(matches!(opened(&medium, true, false), Err(VolumeError::RolledBack { .. })));
}

#[test]
fn a_crash_at_any_change_is_no_earlier_state() {
    let start = volume();
    used(&start, 1);
    for stop in 0..120 {
        let medium = start.copy();
        medium.changes_left.set(stop);
        let all = || -> Option<()> {
            let harness = Harness::open(&medium, false).ok()?;
            harness.write(30, &content(5)).ok()?;
            harness.flush().ok()?;
            let state = Request::write_reserved(ReservedArea::ScrubState, Slice::copy_from(b"state"));
            harness.run(harness.gate.execute(state)).ok()?;
            harness.wait(std::time::Duration::from_secs(5));
            harness.write(300, &content(6)).ok()?;
            harness.flush().ok()?;
            harness.run(harness.gate.device().close()).ok()?;
            let options = ResizeOptions { capacity_blocks: 2 * BLOCKS, bars: |_| None, mutation: Mutation::None };
            block_on(resize(&&medium, TestClock::default(), &options)).ok().map(drop)
        };
        let has_ended = all().is_some();
        medium.changes_left.set(u64::MAX);
        for read_only in [true, false, true] {
            let harness = opened(&medium, read_only, false).unwrap_or_else(|error| panic!("after {stop}: {error}"));
            assert_eq!(freshness(&harness), Freshness::Current, "after {stop}");
            let before = harness.lost_copies();
            let (_, lost, is_gone) = scrub_state(&harness);
            // The twin of a copy may not have been written yet.
            assert!(!is_gone && lost - before < 2, "after {stop}: the state of the scrub is whole");
        }
        assert!(stop < 119 || has_ended, "every change had its turn");
    }
}

/// Everything but one page of the block map is put back: both copies of the mark, too.
fn put_back_but_a_page(medium: &TestMedium, then: &TestMedium, newer: Lba) {
    let layout = probe_layout(medium);
    let place = layout.page_offsets(layout.page_of(newer).0).unwrap();
    let page = medium.bytes.borrow()[place.offset as usize..][..layout.page_bytes() as usize].to_vec();
    let second = medium.bytes.borrow()[place.second_offset as usize..][..512].to_vec();
    medium.bytes.borrow_mut().clone_from(&then.bytes.borrow());
    medium.bytes.borrow_mut()[place.offset as usize..][..page.len()].copy_from_slice(&page);
    medium.bytes.borrow_mut()[place.second_offset as usize..][..512].copy_from_slice(&second);
}

fn probe_layout(medium: &TestMedium) -> Layout {
    block_on(probe(medium)).unwrap().layout
}

/// Writes blocks in one use of the volume, with a checkpoint behind each.
fn written(medium: &TestMedium, at: &[u64], closes: bool) {
    let harness = Harness::open(medium, false).unwrap();
    for start in at {
        harness.write(*start, &content(8)).unwrap();
        harness.flush().unwrap();
        harness.wait(std::time::Duration::from_secs(5));
    }
    if closes {
        harness.close();
    }
}

/// Changes of the first blocks of a volume, by every request that makes one.
fn changes(harness: &Harness) -> Vec<(&'static str, Result<(), Error>)> {
    let extent = Extent::from_raw(0, 64).unwrap();
    let run = |request: Request| harness.run(harness.gate.execute(request)).map(drop);
    vec![
        ("write", harness.write(0, &content(8))),
        ("write zeroes", run(Request::write_zeroes(extent, false, Durability::Volatile))),
        ("deallocate", run(Request::write_zeroes(extent, true, Durability::Volatile))),
        ("discard", run(Request::discard([extent]))),
        ("make unreadable", run(Request::write_uncorrectable(extent, Durability::Volatile))),
    ]
}

#[test]
fn a_page_ahead_of_the_log_refuses_the_first_change_and_is_remembered() {
    for closes in [true, false] {
        let medium = volume();
        used(&medium, 1);
        let yesterday = medium.copy();
        written(&medium, &[500], true);
        put_back_but_a_page(&medium, &yesterday, Lba::new(500));
        assert_eq!(freshness(&opened(&medium, true, false).unwrap()), Freshness::Current, "the opening reads no page");
        let harness = Harness::open(&medium, false).unwrap();
        for (change, made) in changes(&harness) {
            let refused = made.expect_err(change);
            assert!(matches!(refused.kind(), ErrorKind::MayBeOlder(WhyOlder::RolledBack)), "{change}: {refused}");
        }
        harness.flush().unwrap();
        assert!(harness.read(0, 64).unwrap() == content(1), "nothing is changed");
        if closes {
            harness.close();
        }
        for _ in 0..3 {
            for read_only in [true, false] {
                let refused = opened(&medium.copy(), read_only, false).err();
                assert!(matches!(refused, Some(VolumeError::NewerPages)), "closed {closes}: {refused:?}");
            }
            assert_eq!(freshness(&opened(&medium, true, true).unwrap()), OLDER);
        }
        let before = medium.bytes.borrow().clone();
        drop(opened(&medium, false, true).unwrap().close());
        assert!(*medium.bytes.borrow() == before, "without a change nothing is written");
        let harness = opened(&medium, false, true).unwrap();
        harness.write(0, &content(9)).unwrap();
        harness.flush().unwrap();
        assert_eq!(freshness(&harness), Freshness::Current, "whoever accepted it has changed it since");
        harness.close();
        let harness = opened(&medium, false, false).unwrap();
        harness.write(600, &content(9)).unwrap();
        assert_eq!(freshness(&harness), Freshness::Current, "no page is ahead of the log any more");
        assert!(harness.read(0, 64).unwrap() == content(9));
    }
}

/// Each block group is compared with the log as it was opened, not with what was written since.
#[test]
fn a_page_ahead_of_the_log_is_found_with_the_first_write_to_its_block_group_in_the_same_use() {
    let medium = volume();
    let options = ResizeOptions { capacity_blocks: 2 * BLOCKS, bars: |_| None, mutation: Mutation::None };
    block_on(resize(&&medium, TestClock::default(), &options)).unwrap();
    assert_eq!(probe_layout(&medium).block_groups(), 2);
    written(&medium, &[0, BLOCKS], true);
    let yesterday = medium.copy();
    written(&medium, &[BLOCKS + 500], true);
    put_back_but_a_page(&medium, &yesterday, Lba::new(BLOCKS + 500));
    let harness = Harness::open(&medium, false).unwrap();
    for at in [0, 64, 128] {
        harness.write(at, &content(8)).unwrap();
        harness.flush().unwrap();
        harness.wait(std::time::Duration::from_secs(5));
    }
    for at in [BLOCKS, 192] {
        let refused = harness.write(at, &content(8)).unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::MayBeOlder(WhyOlder::RolledBack)), "{refused}");
    }
    harness.flush().unwrap();
    harness.close();
    assert!(matches!(opened(&medium, true, false).err(), Some(VolumeError::NewerPages)));
}

/// What shrinking reads may show it, and growing reads nothing.
#[test]
fn a_volume_with_a_page_ahead_of_the_log_does_not_shrink_and_growing_hides_nothing() {
    let medium = volume();
    let size = |capacity_blocks| ResizeOptions { capacity_blocks, bars: |_| None, mutation: Mutation::None };
    used(&medium, 1);
    let yesterday = medium.copy();
    written(&medium, &[500], true);
    let harness = Harness::open(&medium, false).unwrap();
    harness.run(harness.gate.execute(Request::discard([Extent::from_raw(500, 64).unwrap()]))).unwrap();
    harness.close();
    put_back_but_a_page(&medium, &yesterday, Lba::new(500));
    let grown = medium.copy();
    block_on(resize(&&grown, TestClock::default(), &size(2 * BLOCKS))).unwrap();
    let harness = Harness::open(&grown, false).unwrap();
    assert!(matches!(harness.write(0, &content(8)).unwrap_err().kind(), ErrorKind::MayBeOlder(WhyOlder::RolledBack)));
    let refused = block_on(resize(&&medium, TestClock::default(), &size(490))).unwrap_err();
    assert!(matches!(refused, ResizeError::Volume(VolumeError::NewerPages)), "{refused}");
    assert!(matches!(opened(&medium, true, false).err(), Some(VolumeError::NewerPages)));
}

/// A new volume has no earlier state: its first two superblocks and everything else are written before one sync.
#[test]
fn whatever_of_a_new_volume_has_arrived_is_no_earlier_state() {
    let medium = volume();
    let places = [SUPERBLOCK_OFFSETS[0], SUPERBLOCK_OFFSETS[1], layout().third_offset()];
    let first = Superblock { write_seq: 0, ..Superblock::decode(&medium.bytes.borrow()).unwrap() };
    for lost in 0..4 {
        let medium = medium.copy();
        // The third place may have the first of the two superblocks that were written there.
        medium.bytes.borrow_mut()[places[2] as usize..][..512].copy_from_slice(&first.encode());
        let lost = (0..2).filter(|at| lost >> at & 1 == 1);
        lost.for_each(|at| medium.bytes.borrow_mut()[places[at] as usize..][..512].fill(0));
        assert_eq!(freshness(&opened(&medium, true, false).unwrap()), Freshness::Current);
    }
}

/// On a medium longer than the volume, such as a disk, only this shows it: the third superblock is not searched there.
#[test]
fn superblocks_from_before_a_resize_are_found_out_on_a_longer_medium() {
    let medium = TestMedium::new(layout().medium_bytes() * 4, 512);
    medium.keeps_length.set(true);
    let protection = protection(GuardKind::Crc32c, ProtectionType::Type1);
    let uuid = super::setup::UUID;
    let options =
        crate::CreateOptions { block_size: SIZE, capacity_blocks: BLOCKS, protection, uuid, preallocate: false };
    block_on(crate::create(&medium, &options)).unwrap();
    used(&medium, 1);
    let yesterday = medium.copy();
    let options = ResizeOptions { capacity_blocks: 2 * BLOCKS, bars: |_| None, mutation: Mutation::None };
    block_on(resize(&&medium, TestClock::default(), &options)).unwrap();
    medium.put_back(&yesterday, &SUPERBLOCK_OFFSETS.map(|at| (at, 512)));
    for read_only in [true, false] {
        assert!(matches!(opened(&medium, read_only, false), Err(VolumeError::RolledBack { .. })));
    }
}

/// The state, how many copies of metadata are lost, and whether nothing is left of the state.
fn scrub_state(harness: &Harness) -> (Vec<u8>, u64, bool) {
    match harness.run(harness.gate.execute(Request::read_reserved(ReservedArea::ScrubState))) {
        Ok(Response::Reserved(bytes)) => {
            let is_lost = harness.gate.device().block_map.groups.lost_copies().is_scrub_state_lost();
            (bytes.to_vec(), harness.lost_copies(), is_lost)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_state_of_the_scrub_that_is_put_back_or_blank_in_all_places_is_none_and_counts_as_lost() {
    let layout = layout();
    let medium = volume();
    let write = |text: &[u8]| {
        let harness = Harness::open(&medium, false).unwrap();
        let request = Request::write_reserved(ReservedArea::ScrubState, Slice::copy_from(text));
        harness.run(harness.gate.execute(request)).unwrap();
        harness.close();
    };
    write(b"good");
    write(b"block 7 is bad");
    let yesterday = medium.copy();
    write(b"block 8 is bad, too");
    write(b"blocks 7 and 8 are bad");
    assert_eq!(scrub_state(&Harness::open(&medium, true).unwrap()), (b"blocks 7 and 8 are bad".to_vec(), 0, false));
    let bytes = (crate::format::RESERVED_HEAD_BYTES + ReservedArea::ScrubState.max_bytes()) as u64;
    assert!(bytes <= BITMAP_PAGE_BYTES * 2);
    let places = [0, 1].into_iter().flat_map(|turn| layout.reserved_offsets(ReservedArea::ScrubState, turn));
    let places: Parts = places.map(|at| (at, bytes)).collect();
    let blank = TestMedium::new(medium.bytes.borrow().len() as u64, 512);
    for from in [&yesterday, &blank] {
        let medium = medium.copy();
        medium.put_back(from, &places);
        assert_eq!(scrub_state(&Harness::open(&medium, true).unwrap()), (Vec::new(), 0, true));
        let harness = Harness::open(&medium, false).unwrap();
        assert_eq!(scrub_state(&harness), (Vec::new(), 0, true));
        harness.close();
        let harness = Harness::open(&medium, false).unwrap();
        assert_eq!(scrub_state(&harness), (Vec::new(), 0, true), "only a state that says so may take its place");
        let request = Request::write_reserved(ReservedArea::ScrubState, Slice::copy_from(b"new"));
        harness.run(harness.gate.execute(request)).unwrap();
        assert_eq!(scrub_state(&harness), (b"new".to_vec(), 0, false));
        harness.close();
        assert_eq!(scrub_state(&Harness::open(&medium, true).unwrap()), (b"new".to_vec(), 0, false));
    }
    // Twin: one copy of the newest state is left, and is used.
    let newest = places[2..].iter().chain(&places[..2]).map(|place| vec![*place]);
    let lost: Vec<_> = newest
        .map(|place: Parts| {
            let medium = medium.copy();
            medium.put_back(&blank, &place);
            scrub_state(&Harness::open(&medium, true).unwrap())
        })
        .collect();
    assert!(lost.iter().all(|state| state.0 == b"blocks 7 and 8 are bad" && !state.2), "{lost:?}");
    assert_eq!(lost.iter().map(|state| state.1).sum::<u64>(), 2, "the copies of the newest state count");
}

/// A superblock is one sector, and here all of its copies are restored.
#[test]
fn an_older_superblock_is_used_where_both_copies_of_the_newest_are_lost() {
    let medium = volume();
    used(&medium, 1);
    let newest = write_seq(&medium);
    for at in [SUPERBLOCK_OFFSETS[newest as usize % 2], layout().third_offset()] {
        medium.bytes.borrow_mut()[at as usize..][..512].fill(0);
    }
    let harness = opened(&medium, true, false).unwrap();
    let Superblock { write_seq, .. } = harness.gate.device().superblock();
    assert_eq!((write_seq, freshness(&harness)), (newest - 1, Freshness::Current));
    assert!(harness.read(0, 64).unwrap() == content(1));
}
