//! Volumes that grow and shrink.

use futures_executor::block_on;
use sealblock_block::{Device, Request, ReservedArea, Response};
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use super::setup::{Harness, TestClock, TestMedium, UUID, created, pattern, protection};
use crate::format::{GroupMapSector, MAX_SEGMENTS, SUPERBLOCK_OFFSETS, Superblock};
use crate::rescue::profile::Hints;
use crate::rescue::{RemainsError, open_remains};
use crate::{
    CreateOptions, Mutation, OpenOptions, ResizeError, ResizeOptions, Resized, create, format::Layout, probe, resize,
};

const SIZE: BlockSize = BlockSize::B4096;
const BLOCK: usize = 4096;

fn bars_all(label: &[u8]) -> Option<String> {
    Some(format!("a label of {} bytes", label.len()))
}

fn resize_with(medium: &TestMedium, blocks: u64, mutation: Mutation) -> Result<Resized, ResizeError> {
    let options = ResizeOptions { capacity_blocks: blocks, bars: bars_all, mutation };
    block_on(resize(&medium, TestClock::default(), &options))
}

fn resized(medium: &TestMedium, blocks: u64) -> Result<Resized, ResizeError> {
    resize_with(medium, blocks, Mutation::None)
}

fn volume(blocks: u64) -> TestMedium {
    created(SIZE, 512, blocks, protection(GuardKind::Crc64, ProtectionType::Type1))
}

fn layout(medium: &TestMedium) -> Layout {
    block_on(probe(medium)).unwrap().layout
}

/// Writes blocks and closes the volume.
fn fill(medium: &TestMedium, start: u64, blocks: usize, seed: u64) {
    let harness = Harness::open(medium, false).unwrap();
    harness.write(start, &pattern(seed, blocks * BLOCK)).unwrap();
    harness.flush().unwrap();
    harness.close();
}

fn discard(medium: &TestMedium, start: u64, blocks: u64) {
    let harness = Harness::open(medium, false).unwrap();
    let extents = vec![Extent::from_raw(start, blocks).unwrap()];
    harness.run(harness.gate.execute(Request::discard(extents))).unwrap();
    harness.close();
}

/// Wipes both superblocks at the start and everything beside them.
fn lose_start(medium: &TestMedium) {
    medium.bytes.borrow_mut()[..64 << 10].fill(0);
}

#[test]
fn a_volume_that_grows_keeps_its_blocks_and_gets_unwritten_ones() {
    let medium = volume(100);
    fill(&medium, 90, 10, 1);
    let before = layout(&medium);
    let done = resized(&medium, 700).unwrap();
    assert_eq!((done.before_blocks, done.capacity_blocks), (100, 700));
    assert_eq!(done.before_medium_bytes, before.medium_bytes());
    assert_eq!(medium.bytes.borrow().len() as u64, done.medium_bytes);
    let after = layout(&medium);
    assert_eq!(after.segments().iter().map(|segment| segment.blocks).collect::<Vec<_>>(), [100, 600]);
    assert_eq!((after.created_blocks(), after.log_sectors()), (100, before.log_sectors()));
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!(harness.gate.geometry().capacity_blocks, 700);
    assert_eq!(harness.read(90, 10).unwrap(), pattern(1, 10 * BLOCK));
    assert_eq!(harness.read(100, 200).unwrap(), vec![0; 200 * BLOCK]);
    // Across the border between the segments, and up to the end.
    harness.write(60, &pattern(2, 200 * BLOCK)).unwrap();
    harness.write(690, &pattern(3, 10 * BLOCK)).unwrap();
    assert!(harness.write(695, &pattern(3, 6 * BLOCK)).is_err(), "past the new end");
    harness.close();
    let harness = Harness::open(&medium, true).unwrap();
    assert_eq!(harness.read(60, 200).unwrap(), pattern(2, 200 * BLOCK));
    assert_eq!(harness.read(690, 10).unwrap(), pattern(3, 10 * BLOCK));
    harness.verify().unwrap();
    assert_eq!(harness.lost_copies(), 0);
}

#[test]
fn the_new_end_has_the_third_superblock_and_what_the_reserved_area_holds() {
    let medium = volume(100);
    let harness = Harness::open(&medium, false).unwrap();
    for text in ["first", "second", "third"] {
        let bytes = Slice::copy_from(text.as_bytes());
        harness.run(harness.gate.execute(Request::write_reserved(ReservedArea::ScrubState, bytes))).unwrap();
    }
    harness.write(0, &pattern(1, BLOCK)).unwrap();
    harness.close();
    for blocks in [300, 90] {
        resized(&medium, blocks).unwrap();
        let copy = medium.copy();
        lose_start(&copy);
        let harness = Harness::open(&copy, false).unwrap();
        assert_eq!(harness.gate.geometry().capacity_blocks, blocks);
        let held = harness.run(harness.gate.execute(Request::read_reserved(ReservedArea::ScrubState))).unwrap();
        assert!(matches!(held, Response::Reserved(bytes) if bytes[..] == *b"third"));
        assert_eq!(harness.read(0, 1).unwrap(), pattern(1, BLOCK));
    }
}

#[test]
fn superblocks_of_the_size_before_do_not_count_beside_the_new_third_one() {
    // Grown; shrunk within its last block group, so that the third superblock stays in its place; and shrunk by whole
    // block groups.
    for sizes in [[100, 300], [300, 250], [300, 100]] {
        let medium = volume(100);
        if sizes[0] != 100 {
            resized(&medium, sizes[0]).unwrap();
        }
        fill(&medium, 20, 4, 1);
        let start = medium.bytes.borrow()[..64 << 10].to_vec();
        resized(&medium, sizes[1]).unwrap();
        fill(&medium, 40, 4, 2);
        fill(&medium, sizes[1] - 2, 2, 3);
        medium.bytes.borrow_mut()[..64 << 10].copy_from_slice(&start);
        for read_only in [true, false, true] {
            let harness = Harness::open(&medium, read_only).unwrap();
            assert_eq!(harness.gate.geometry().capacity_blocks, sizes[1], "{sizes:?}");
            assert_eq!(harness.read(20, 4).unwrap(), pattern(1, 4 * BLOCK));
            assert_eq!(harness.read(40, 4).unwrap(), pattern(2, 4 * BLOCK));
            assert_eq!(harness.read(sizes[1] - 2, 2).unwrap(), pattern(3, 2 * BLOCK));
            harness.verify().unwrap();
            harness.close();
        }
        lose_start(&medium);
        assert_eq!(layout(&medium).capacity_blocks(), sizes[1]);
    }
}

#[test]
fn a_volume_shrinks_where_nothing_is_held_and_is_refused_by_block_where_something_is() {
    let medium = volume(100);
    resized(&medium, 500).unwrap();
    fill(&medium, 10, 1, 1);
    fill(&medium, 400, 3, 2);
    match resized(&medium, 300) {
        Err(ResizeError::InUse { blocks: 3, first: 400 }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(layout(&medium).capacity_blocks(), 500);
    discard(&medium, 400, 3);
    // Within the second block group: it keeps its place and its size, and so does the medium.
    let length = medium.bytes.borrow().len();
    resized(&medium, 300).unwrap();
    assert_eq!(medium.bytes.borrow().len(), length);
    assert!(Harness::open(&medium, true).unwrap().read(299, 2).is_err());
    assert_eq!(layout(&medium).block_group(1).unwrap().blocks, 400);
    // After its end: the block group is dropped, and the medium is truncated. The volume is as it was created.
    let done = resized(&medium, 100).unwrap();
    assert_eq!(medium.bytes.borrow().len() as u64, done.medium_bytes);
    assert_eq!(layout(&medium), Layout::new(SIZE, 512, 100).unwrap());
    assert!(!block_on(probe(&medium)).unwrap().layout.is_resized());
    let harness = Harness::open(&medium, true).unwrap();
    assert_eq!(harness.read(10, 1).unwrap(), pattern(1, BLOCK));
    harness.verify().unwrap();
}

#[test]
fn damage_behind_the_new_end_counts_as_data() {
    let medium = volume(100);
    fill(&medium, 80, 1, 1);
    discard(&medium, 80, 1);
    let at = layout(&medium).map_entry_offset(sealblock_units::Lba::new(80)) as usize;
    medium.bytes.borrow_mut()[at..at + 32].fill(0x55);
    assert!(matches!(resized(&medium, 50), Err(ResizeError::InUse { blocks: 1, first: 80 })));
    assert!(resized(&medium, 81).is_ok());
}

#[test]
fn what_a_smaller_size_left_over_comes_back_unwritten() {
    for keeps_length in [false, true] {
        let medium = volume(64);
        resized(&medium, 400).unwrap();
        medium.keeps_length.set(keeps_length);
        fill(&medium, 64, 300, 1);
        discard(&medium, 64, 300);
        resized(&medium, 64).unwrap();
        // Another block group gets the number of the dropped one, and then one of the same size.
        for blocks in [100, 64, 400] {
            resized(&medium, blocks).unwrap();
            let harness = Harness::open(&medium, false).unwrap();
            harness.verify().unwrap();
            let extent = Extent::from_raw(0, blocks).unwrap();
            let told = harness.run(harness.gate.execute(Request::block_status(extent))).unwrap();
            assert!(matches!(told, Response::BlockStatus(runs) if runs.len() == 1), "all holes");
            assert_eq!(harness.read(blocks - 1, 1).unwrap(), vec![0; BLOCK]);
        }
        fill(&medium, 64, 300, 2);
        assert_eq!(
            Harness::open(&medium, true).unwrap().read(64, 200).unwrap(),
            pattern(2, 300 * BLOCK)[..200 * BLOCK]
        );
    }
}

#[test]
fn map_entries_of_block_groups_that_went_count_for_no_block_group_that_comes() {
    let medium = volume(100);
    resized(&medium, 700).unwrap();
    fill(&medium, 100, 600, 3);
    discard(&medium, 100, 600);
    let larger = medium.bytes.borrow().clone();
    resized(&medium, 100).unwrap();
    // As if a crash had come before anything was written after the new end, or truncated.
    let end = layout(&medium).tail_offset() as usize;
    let mut bytes = medium.bytes.borrow().clone();
    bytes.truncate(end);
    bytes.extend_from_slice(&larger[end..]);
    *medium.bytes.borrow_mut() = bytes;
    resized(&medium, 800).unwrap();
    // The added block group gets map pages, on top of what is there.
    fill(&medium, 790, 1, 4);
    let harness = Harness::open(&medium, true).unwrap();
    assert_eq!(harness.read(100, 690).unwrap(), vec![0; 690 * BLOCK]);
    assert_eq!(harness.read(790, 1).unwrap(), pattern(4, BLOCK));
}

#[test]
fn bits_of_block_groups_that_went_count_for_no_block_group_that_comes() {
    for (mutation, is_right) in [(Mutation::None, true), (Mutation::KeepBits, false)] {
        let medium = volume(64);
        resized(&medium, 80).unwrap();
        resized(&medium, 400).unwrap();
        fill(&medium, 80, 300, 1);
        discard(&medium, 80, 300);
        resized(&medium, 80).unwrap();
        resize_with(&medium, 100, mutation).unwrap();
        assert_eq!(Harness::open(&medium, true).unwrap().verify().is_ok(), is_right);
    }
}

/// If the copies of the group map differ, the newer one counts, except for a block group that it lacks although its map
/// pages exist.
#[test]
fn a_copy_of_the_block_group_map_hides_no_map_pages_and_brings_none_back() {
    let medium = volume(64);
    resized(&medium, 80).unwrap();
    resized(&medium, 400).unwrap();
    fill(&medium, 0, 400, 1);
    discard(&medium, 80, 320);
    let maps = [0, 1].map(|copy| layout(&medium).group_map_offset(copy) as usize);
    let larger = medium.bytes.borrow().clone();
    resized(&medium, 80).unwrap();
    // As if a crash had come before the medium was truncated.
    let end = medium.bytes.borrow().len();
    medium.bytes.borrow_mut().extend_from_slice(&larger[end..]);
    resized(&medium, 400).unwrap();
    let data = pattern(1, 400 * BLOCK);
    for at in maps {
        // A copy from before the volume shrank: the block groups that were dropped and added again are unwritten.
        let stale = medium.copy();
        stale.bytes.borrow_mut()[at..at + 512].copy_from_slice(&larger[at..at + 512]);
        for read_only in [true, false] {
            let harness = Harness::open(&stale, read_only).unwrap();
            assert!(harness.read(0, 80).unwrap() == data[..80 * BLOCK]);
            assert!(harness.read(80, 320).unwrap() == vec![0; 320 * BLOCK]);
        }
        // Valid and newer than the other copy, with the right number of bits, but without those of block groups that
        // were written.
        let denying = medium.copy();
        let seed = Superblock::decode(&medium.bytes.borrow()[..512]).unwrap().seed();
        let mut sector = GroupMapSector::decode(&medium.bytes.borrow()[at..at + 512], seed, 0).unwrap();
        assert_eq!(sector.bits[0], 0b11);
        (sector.write_seq, sector.bits[0]) = (sector.write_seq + 1, 0b110);
        sector.encode(&mut denying.bytes.borrow_mut()[at..at + 512], seed);
        for read_only in [true, false] {
            assert!(Harness::open(&denying, read_only).unwrap().read(0, 64).unwrap() == data[..64 * BLOCK]);
        }
    }
}

#[test]
fn segments_end_where_their_list_does() {
    let medium = volume(10);
    let mut blocks = 10;
    for _ in 1..MAX_SEGMENTS {
        blocks += 7;
        resized(&medium, blocks).unwrap();
    }
    let harness = Harness::open(&medium, false).unwrap();
    // A request may extend over all of them.
    harness.write(0, &pattern(5, blocks as usize * BLOCK)).unwrap();
    assert_eq!(harness.read(0, blocks).unwrap(), pattern(5, blocks as usize * BLOCK));
    harness.close();
    let why = resized(&medium, blocks + 1).unwrap_err().to_string();
    assert!(why.contains("more than 16 parts") && why.contains("copy it to a new volume"), "{why}");
    assert_eq!(Harness::open(&medium, true).unwrap().read(0, blocks).unwrap(), pattern(5, blocks as usize * BLOCK));
    discard(&medium, 10, blocks - 10);
    resized(&medium, 12).unwrap();
    assert_eq!(layout(&medium).segments().len(), 2);
}

#[test]
fn a_medium_without_the_room_leaves_the_volume_as_it_was() {
    let full = volume(100);
    fill(&full, 0, 5, 1);
    let length = full.bytes.borrow().len();
    full.full_from.set(length as u64);
    let fixed = full.copy();
    fixed.keeps_length.set(true);
    for medium in [&full, &fixed] {
        let why = resized(medium, 1000).unwrap_err();
        assert!(matches!(&why, ResizeError::Room { medium_bytes, .. } if *medium_bytes == length as u64), "{why}");
        assert_eq!((medium.bytes.borrow().len(), layout(medium).capacity_blocks()), (length, 100));
        assert_eq!(Harness::open(medium, true).unwrap().read(0, 5).unwrap(), pattern(1, 5 * BLOCK));
    }
}

#[test]
fn a_medium_that_is_full_all_the_same_leaves_the_volume_as_it_was() {
    let medium = volume(100);
    fill(&medium, 0, 5, 1);
    let length = medium.bytes.borrow().len();
    // The medium can be extended, but has no space for the tail.
    medium.reserves.set(false);
    medium.full_from.set(layout(&medium).with_capacity(1000).unwrap().tail_offset() + 4096);
    medium.grows_full.set(true);
    assert!(resized(&medium, 1000).is_err());
    assert_eq!((medium.bytes.borrow().len(), layout(&medium).capacity_blocks()), (length, 100));
    lose_start(&medium);
    assert_eq!(layout(&medium).capacity_blocks(), 100, "the third superblock is still where it was");
}

#[test]
fn a_volume_that_keeps_its_space_takes_that_of_the_new_part_or_stays_as_it_is() {
    let medium = TestMedium::new(Layout::new(SIZE, 512, 100).unwrap().medium_bytes(), 512);
    let options =
        CreateOptions { block_size: SIZE, capacity_blocks: 100, protection: None, uuid: UUID, preallocate: true };
    block_on(create(&medium, &options)).unwrap();
    let length = medium.bytes.borrow().len();
    medium.reserves.set(false);
    assert!(resized(&medium, 300).is_err());
    assert_eq!((medium.bytes.borrow().len(), layout(&medium).capacity_blocks()), (length, 100));
    medium.reserves.set(true);
    let done = resized(&medium, 300).unwrap();
    assert_eq!(medium.allocated_bytes(), done.medium_bytes);
}

#[test]
fn members_of_groups_are_refused_by_whoever_knows_their_labels() {
    let medium = volume(100);
    let harness = Harness::open(&medium, false).unwrap();
    let bytes = Slice::copy_from(b"a label");
    harness.run(harness.gate.execute(Request::write_reserved(ReservedArea::GroupLabel, bytes))).unwrap();
    harness.close();
    match resized(&medium, 200) {
        Err(ResizeError::Member(why)) => assert_eq!(why, "a label of 7 bytes"),
        other => panic!("{other:?}"),
    }
    let options = ResizeOptions { capacity_blocks: 200, bars: |_| None, mutation: Mutation::None };
    assert!(block_on(resize(&&medium, TestClock::default(), &options)).is_ok());
}

#[test]
fn wherever_the_machine_stops_the_volume_has_one_size_or_the_other_and_all_of_its_blocks() {
    for (from, to) in [(100, 400), (400, 100), (400, 300), (300, 390)] {
        let whole = volume(100);
        resized(&whole, 400).unwrap();
        fill(&whole, 100, 300, 4);
        discard(&whole, 100, 300);
        resized(&whole, from).unwrap();
        fill(&whole, 20, 60, 3);
        for stop in 0.. {
            let medium = whole.copy();
            medium.changes_left.set(stop);
            let stopped = resized(&medium, to);
            medium.changes_left.set(u64::MAX);
            if stop % 2 == 1 {
                // Opened in between, as usual, or resized again at once.
                let harness = Harness::open(&medium, false).unwrap();
                assert!([from, to].contains(&harness.gate.geometry().capacity_blocks));
                harness.verify().unwrap();
                harness.close();
            }
            let done = resized(&medium, to).unwrap_or_else(|why| panic!("{from} to {to}, stopped at {stop}: {why}"));
            assert_eq!(medium.bytes.borrow().len() as u64, done.medium_bytes);
            let harness = Harness::open(&medium, true).unwrap();
            assert_eq!(harness.gate.geometry().capacity_blocks, to);
            assert_eq!(harness.read(20, 60).unwrap(), pattern(3, 60 * BLOCK));
            harness.verify().unwrap();
            assert_eq!(harness.lost_copies(), 0);
            drop(harness);
            lose_start(&medium);
            assert_eq!(layout(&medium).capacity_blocks(), to);
            if stopped.is_ok() {
                assert!(stop > 20, "{stop} steps");
                break;
            }
        }
    }
}

#[test]
fn a_stop_in_the_middle_is_noticed_where_the_order_is_wrong() {
    for (mutation, from, to) in
        [(Mutation::NameEarly, 100, 400), (Mutation::CutEarly, 400, 100), (Mutation::TailEarlier, 400, 100)]
    {
        let whole = volume(100);
        resized(&whole, 400).unwrap();
        fill(&whole, 100, 300, 4);
        discard(&whole, 100, 300);
        resized(&whole, from).unwrap();
        let is_noticed = (0..60).any(|stop| {
            let medium = whole.copy();
            medium.changes_left.set(stop);
            let _ = resize_with(&medium, to, mutation);
            medium.changes_left.set(u64::MAX);
            Harness::open(&medium, true).map_or(true, |harness| harness.verify().is_err())
        });
        assert!(is_noticed, "{mutation:?}");
    }
}

#[test]
fn a_resized_volume_without_superblocks_is_never_read_at_the_wrong_places() {
    let medium = volume(1000);
    resized(&medium, 1500).unwrap();
    fill(&medium, 900, 200, 1);
    let opens = |medium: &TestMedium, hints: Hints| {
        block_on(open_remains(medium.clone(), TestClock::default(), &hints, &OpenOptions::default())).map(|_| ())
    };
    let third = layout(&medium).third_offset() as usize;
    for at in SUPERBLOCK_OFFSETS.map(|at| at as usize).into_iter().chain([third]) {
        medium.bytes.borrow_mut()[at..at + 512].fill(0);
    }
    let of = |blocks: u64| Hints { capacity_bytes: Some(blocks << 12), ..Hints::default() };
    assert!(matches!(opens(&medium, of(1000)), Err(RemainsError::Resized)));
    assert!(opens(&medium, of(1500)).is_err() && opens(&medium, Hints::default()).is_err());
}
