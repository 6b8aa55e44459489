//! Records of another volume, of an empty one or of an earlier state replace good ones: the owner of the medium stays
//! the same, and nothing good is overwritten.

use futures_executor::block_on;
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_units::{BlockSize, Extent};

use sealblock_block::{Device, Expectations, Request, ReservedArea, Response, WhyOlder};
use sealblock_runtime_memory::Slice;

use super::setup::{Harness, TestClock, TestMedium, UUID, pattern, protection};
use crate::format::{Layout, SUPERBLOCK_OFFSETS, Seed, Superblock};
use crate::rescue::profile::{Hints, ProfileError};
use crate::rescue::{RemainsError, open_remains};
use crate::{
    CreateOptions, IdentityError, OpenOptions, Recognised, Trace, VolumeError, VolumeInfo, create, open, recognise,
};

const SIZE: BlockSize = BlockSize::B4096;
const BLOCKS: u64 = 512;
const OTHER: [u8; 16] = *b"another identity";
const START: u64 = 64 << 10;

/// A volume with this identity: empty, or written this often and closed.
fn volume(uuid: [u8; 16], writes: u64) -> TestMedium {
    let medium = TestMedium::new(layout().medium_bytes(), 512);
    let protection = protection(GuardKind::Crc32c, ProtectionType::Type1);
    let options = CreateOptions { block_size: SIZE, capacity_blocks: BLOCKS, protection, uuid, preallocate: false };
    block_on(create(&medium, &options)).unwrap();
    used(&medium, writes);
    medium
}

/// Uses a volume: each round writes all blocks.
fn used(medium: &TestMedium, writes: u64) {
    for round in 0..writes {
        let harness = Harness::open(medium, false).unwrap();
        harness.write(0, &content(round)).unwrap();
        harness.close();
    }
}

fn content(round: u64) -> Vec<u8> {
    pattern(round, 64 * SIZE.bytes())
}

fn layout() -> Layout {
    Layout::new(SIZE, 512, BLOCKS).unwrap()
}

/// Copies these ranges of another medium.
fn put(medium: &TestMedium, from: &TestMedium, places: &[(u64, u64)]) {
    for &(start, length) in places {
        let range = start as usize..(start + length) as usize;
        medium.bytes.borrow_mut()[range.clone()].copy_from_slice(&from.bytes.borrow()[range]);
    }
}

fn superblocks() -> [u64; 3] {
    [SUPERBLOCK_OFFSETS[0], SUPERBLOCK_OFFSETS[1], layout().third_offset()]
}

fn opened(medium: &TestMedium, options: &OpenOptions) -> Result<VolumeInfo, VolumeError> {
    Ok(block_on(open(medium.clone(), TestClock::default(), options))?.description)
}

fn reading() -> OpenOptions {
    OpenOptions { read_only: true, ..OpenOptions::default() }
}

/// Opens the medium for reading and then for writing: it must be the first volume, with its content, and report these
/// superblocks as foreign. The open for writing rewrites what was foreign, and changes nothing else.
fn assert_own(medium: &TestMedium, foreign: &[u64], doing: &str) {
    let named = |info: &VolumeInfo| -> Vec<u64> {
        info.superblocks.iter().filter(|copy| copy.is_foreign).map(|copy| copy.offset_bytes).collect()
    };
    let before = medium.bytes.borrow().clone();
    let info = opened(medium, &reading()).unwrap_or_else(|error| panic!("{doing}: {error}"));
    assert_eq!((info.uuid, named(&info)), (UUID, foreign.to_vec()), "{doing}");
    assert!(before == *medium.bytes.borrow(), "{doing}: reading writes nothing");
    assert_eq!(Harness::open(medium, true).unwrap().read(0, 64).unwrap(), content(1), "{doing}");
    let harness = Harness::open(medium, false).unwrap();
    assert_eq!(harness.read(0, 64).unwrap(), content(1), "{doing}");
    harness.verify().unwrap();
    let medium = harness.close();
    assert_eq!(named(&opened(&medium, &reading()).unwrap()), [0; 0], "{doing}: written anew");
    for at in superblocks() {
        let copy = Superblock::decode(&medium.bytes.borrow()[at as usize..]).unwrap();
        assert_eq!(copy.uuid, UUID, "{doing}");
    }
}

#[test]
fn foreign_superblocks_with_a_higher_sequence_are_lost_copies_and_take_nothing() {
    for other in [volume(OTHER, 0), volume(OTHER, 5)] {
        for mask in 1..7 {
            let medium = volume(UUID, 2);
            let foreign: Vec<u64> = (0..3).filter(|at| mask >> at & 1 == 1).map(|at| superblocks()[at]).collect();
            put(&medium, &other, &foreign.iter().map(|at| (*at, 512)).collect::<Vec<_>>());
            assert_own(&medium, &foreign, &format!("{mask:03b}"));
        }
    }
}

#[test]
fn any_64_kib_of_another_volume_at_the_start_or_the_end_costs_nothing() {
    let tail = layout().medium_bytes() - START;
    for other in [volume(OTHER, 0), volume(OTHER, 5)] {
        for start in (0..=START).step_by(16 << 10).chain([512, 33 << 10, tail]) {
            let medium = volume(UUID, 2);
            put(&medium, &other, &[(start, START)]);
            let hit: Vec<u64> = superblocks().into_iter().filter(|at| (start..start + START).contains(at)).collect();
            assert_own(&medium, &hit, &format!("from {start}"));
        }
    }
}

#[test]
fn all_that_lies_before_the_map_pages_of_a_blank_volume_is_a_doubt_and_a_volume_made_over_another_is_none() {
    let medium = volume(UUID, 2);
    put(&medium, &volume(OTHER, 0), &[(0, layout().groups_offset())]);
    let before = medium.bytes.borrow().clone();
    for options in [reading(), OpenOptions::default()] {
        let refused = opened(&medium, &options).unwrap_err();
        assert!(matches!(refused, VolumeError::Identity(IdentityError::Doubtful(_))), "{refused}");
    }
    assert!(before == *medium.bytes.borrow());
    // With its end replaced, too, it is a volume that was created over this one, of which the map pages are left.
    let medium = volume(UUID, 2);
    let protection = protection(GuardKind::Crc32c, ProtectionType::Type1);
    let options =
        CreateOptions { block_size: SIZE, capacity_blocks: BLOCKS, protection, uuid: OTHER, preallocate: false };
    block_on(create(&medium, &options)).unwrap();
    let info = opened(&medium, &OpenOptions::default()).unwrap();
    assert_eq!((info.uuid, info.standing.as_str()), (OTHER, "certain"));
}

#[test]
fn a_foreign_group_map_reads_as_nothing_that_was_never_written() {
    let (a, b) = (layout().group_map_offset(0), layout().group_map_offset(1));
    for other in [volume(OTHER, 0), volume(OTHER, 5)] {
        for places in [vec![(a, 512)], vec![(b, 512)], vec![(a, 512), (b, 512)], vec![(a, START), (b, START)]] {
            let medium = volume(UUID, 2);
            put(&medium, &other, &places);
            let harness = Harness::open(&medium, true).unwrap();
            assert_eq!(harness.lost_copies(), places.len() as u64);
            drop(harness);
            assert_own(&medium, &[], &format!("{places:?}"));
            // With the start replaced, too.
            put(&medium, &other, &places);
            put(&medium, &other, &[(0, START)]);
            assert_own(&medium, &SUPERBLOCK_OFFSETS, &format!("{places:?} and the start"));
        }
    }
}

#[test]
fn all_superblocks_of_another_volume_leave_remains_that_are_the_owners() {
    for other in [volume(OTHER, 0), volume(OTHER, 5)] {
        let medium = volume(UUID, 2);
        put(&medium, &other, &superblocks().map(|at| (at, 512)));
        let before = medium.bytes.borrow().clone();
        for read_only in [true, false] {
            let refused = opened(&medium, &OpenOptions { read_only, ..reading() });
            let Err(VolumeError::Identity(IdentityError::Foreign { foreign, owner })) = refused else {
                panic!("{refused:?}")
            };
            assert_eq!((foreign.uuid, foreign.superblocks), (Some(OTHER), superblocks().to_vec()));
            assert!(owner.uuid.is_none() && owner.witnesses.len() >= 4, "{owner:?}");
        }
        let Recognised::Remains(traces) = block_on(recognise(&medium)).unwrap() else { panic!("no remains") };
        assert_eq!(traces[..3], superblocks().map(Trace::ForeignSuperblock));
        let hints = Hints::default();
        let (_, remains) = block_on(open_remains(medium.clone(), TestClock::default(), &hints, &reading())).unwrap();
        assert_eq!(remains.profile.seed, Seed::of(&UUID));
        assert!(before == *medium.bytes.borrow());
    }
}

/// The other records that are reported as foreign, after everything was read.
fn foreign(medium: &TestMedium) -> Vec<(&'static str, u64)> {
    let harness = Harness::open(medium, true).unwrap();
    assert_eq!(harness.read(0, 64).unwrap(), content(1));
    drop(harness.verify());
    harness.run(harness.gate.device().reserved.read(&medium.clone(), ReservedArea::GroupLabel)).unwrap();
    harness.gate.device().block_map.groups.lost_copies().foreign()
}

#[test]
fn foreign_records_of_every_structure_are_named_and_damage_of_one_is_not() {
    let label = |medium: &TestMedium, of: &[u8]| {
        let harness = Harness::open(medium, false).unwrap();
        harness
            .run(harness.gate.execute(Request::write_reserved(ReservedArea::GroupLabel, Slice::copy_from(of))))
            .unwrap();
        harness.close();
    };
    let (own, other) = (volume(UUID, 2), volume(OTHER, 5));
    label(&own, b"own");
    label(&other, b"other");
    let layout = layout();
    let page = layout.page_offsets(0).unwrap();
    let reserved = layout.reserved_offsets(ReservedArea::GroupLabel, 1);
    let maps = [0, 1].map(|copy| layout.group_map_offset(copy));
    assert_eq!(foreign(&own), []);
    let due = [
        ("the log", vec![(layout.log_offset(), 512), (layout.log_offset() + 512, 512)]),
        ("the block group map", maps.map(|at| (at, 512)).to_vec()),
        ("the map pages", vec![(page.offset, 512), (layout.page_offsets(1).unwrap().offset, 512)]),
    ];
    for (place, places) in due {
        let medium = own.copy();
        put(&medium, &other, &places);
        assert!(matches!(foreign(&medium)[..], [(found, records)] if found == place && records >= 2), "{place}");
        // The next open for writing rewrites all of them.
        let harness = Harness::open(&medium, false).unwrap();
        harness.verify().unwrap();
        harness.close();
        assert_eq!(foreign(&medium), [], "{place}");
        // The same number of damaged records does not count as another volume's.
        let medium = own.copy();
        places.iter().zip(40..).for_each(|((at, _), byte)| medium.bytes.borrow_mut()[*at as usize + byte] ^= 1);
        assert_eq!(foreign(&medium), [], "{place}");
    }
    // One of the two copies, and another record of the same volume.
    let medium = own.copy();
    put(&medium, &other, &[(reserved[0], 512), (maps[0], 512)]);
    assert_eq!(foreign(&medium), [("the block group map", 1), ("the reserved areas", 1)]);
}

#[test]
fn remains_are_those_of_the_volume_that_most_places_name_and_not_of_what_there_is_most_of() {
    let (layout, hints) = (layout(), Hints::default());
    let found = |medium: &TestMedium| {
        let options = reading();
        let remains = open_remains(medium.clone(), TestClock::default(), &hints, &options);
        block_on(remains).map(|(_, remains)| remains.profile.seed)
    };
    let wiped = |medium: TestMedium| {
        superblocks().iter().for_each(|at| medium.bytes.borrow_mut()[*at as usize..][..512].fill(0));
        medium
    };
    // The log of another volume has more records than are left of this one.
    let (own, other) = (volume(UUID, 2), volume(OTHER, 9));
    put(&own, &other, &[(layout.log_offset(), layout.log_region_bytes())]);
    assert_eq!(found(&wiped(own)).unwrap(), Seed::of(&UUID));
    // A volume that was created over another one, and has written less.
    let made = volume(OTHER, 9);
    let protection = protection(GuardKind::Crc32c, ProtectionType::Type1);
    let options =
        CreateOptions { block_size: SIZE, capacity_blocks: BLOCKS, protection, uuid: UUID, preallocate: false };
    block_on(create(&made, &options)).unwrap();
    let harness = Harness::open(&made, false).unwrap();
    harness.write(500, &pattern(1, 2 * SIZE.bytes())).unwrap();
    harness.close();
    assert_eq!(found(&wiped(made)).unwrap(), Seed::of(&UUID));
    // Half of the places each: unclear.
    let own = volume(UUID, 2);
    put(&own, &other, &[(layout.log_offset(), layout.log_region_bytes()), (layout.group_map_offset(0), 512)]);
    put(&own, &other, &[(layout.tail_offset(), START)]);
    assert!(matches!(found(&wiped(own)), Err(RemainsError::Profile(ProfileError::Ambiguous { .. }))));
}

#[test]
fn a_medium_of_two_volumes_is_refused_by_both_names_and_read_as_the_one_that_is_asked_for() {
    // Half of the witnesses each.
    let (medium, other) = (volume(UUID, 2), volume(OTHER, 2));
    let layout = layout();
    let b = layout.log_sector_offset(0, 1);
    put(&medium, &other, &[(0, 512), (b, layout.log_region_bytes()), (layout.group_map_offset(0), 512)]);
    put(&medium, &other, &[(layout.third_offset(), 512)]);
    let before = medium.bytes.borrow().clone();
    for read_only in [true, false] {
        let refused = opened(&medium, &OpenOptions { read_only, ..reading() }).unwrap_err();
        let VolumeError::Identity(IdentityError::Doubtful(candidates)) = &refused else { panic!("{refused}") };
        let named: Vec<_> = candidates.iter().filter_map(|candidate| candidate.uuid).collect();
        assert!(named.len() == 2 && named.contains(&UUID) && named.contains(&OTHER), "{refused}");
        for part in
            ["616e6f74-6865-7220-6964-656e74697479", "region 1 of the log", "the map pages", "nothing was written"]
        {
            assert!(refused.to_string().contains(part), "{part}: {refused}");
        }
    }
    let chosen = OpenOptions { identity: Some(UUID), ..reading() };
    assert_eq!(opened(&medium, &chosen).unwrap().uuid, UUID);
    assert_eq!(Harness::open_with(&medium, chosen).unwrap().read(0, 64).unwrap(), content(1));
    // It opens for reading only, and not under a third identity.
    let written = opened(&medium, &OpenOptions { read_only: false, ..chosen });
    assert!(matches!(written, Err(VolumeError::Identity(IdentityError::Unproven(UUID)))), "{written:?}");
    let absent = opened(&medium, &OpenOptions { identity: Some([9; 16]), ..reading() });
    assert!(matches!(absent, Err(VolumeError::Identity(IdentityError::Absent { .. }))), "{absent:?}");
    assert!(before == *medium.bytes.borrow());
}

#[test]
fn a_superblock_that_nothing_confirms_opens_for_reading_only_and_calls_nothing_unwritten() {
    let medium = volume(UUID, 2);
    let blank = TestMedium::new(layout().medium_bytes(), 512);
    put(&blank, &medium, &[(0, START)]);
    let before = blank.bytes.borrow().clone();
    assert!(matches!(
        opened(&blank, &OpenOptions { read_only: false, ..reading() }),
        Err(VolumeError::Identity(IdentityError::Unproven(UUID)))
    ));
    let harness = Harness::open(&blank, true).unwrap();
    for lba in [0, 63, 64, BLOCKS - 1] {
        assert!(harness.read(lba, 1).is_err(), "block {lba} is no zeroes");
    }
    assert!(before == *blank.bytes.borrow());
    // A new volume is certain by its group maps.
    let new = volume(UUID, 0);
    assert_eq!(Harness::open(&new, false).unwrap().read(0, 1).unwrap(), vec![0; SIZE.bytes()]);
}

#[test]
fn superblocks_log_and_high_water_marks_of_yesterday_are_found_by_pages_that_are_newer_and_a_crash_is_none() {
    let told = |medium: &TestMedium, options: OpenOptions| {
        let harness = Harness::open_with(medium, options).unwrap();
        let extent = Extent::from_raw(0, BLOCKS).unwrap();
        let verified = harness.run(harness.gate.execute(Request::verify(extent, Expectations::NONE)));
        let complete = match verified {
            Ok(Response::Verified(stats)) => stats.coverage.is_complete(),
            other => panic!("{other:?}"),
        };
        (harness.gate.device().freshness().why_older(), complete)
    };
    let medium = volume(UUID, 1);
    let yesterday = medium.copy();
    used(&medium, 2);
    assert_eq!(told(&medium, reading()), (None, true));
    let layout = layout();
    put(&medium, &yesterday, &superblocks().map(|at| (at, 512)));
    put(&medium, &yesterday, &[(layout.log_offset(), layout.log_bytes())]);
    layout.high_water_offsets().for_each(|at| put(&medium, &yesterday, &[(at, 512)]));
    for read_only in [true, false] {
        assert_eq!(told(&medium.copy(), OpenOptions { read_only, ..reading() }), (Some(WhyOlder::RolledBack), false));
    }
    // Whatever a crash leaves, during a checkpoint or after one, has no such page; nor do the volumes that follow from
    // it.
    let start = volume(UUID, 1);
    for stop in 0..60 {
        let medium = start.copy();
        let harness = Harness::open(&medium, false).unwrap();
        harness.write(30, &content(5)).unwrap();
        harness.flush().unwrap();
        medium.changes_left.set(stop);
        drop(harness.run(harness.gate.device().close()));
        drop(harness);
        medium.changes_left.set(u64::MAX);
        for _ in 0..3 {
            assert_eq!(told(&medium, reading()), (None, true), "stopped after {stop}");
            assert_eq!(
                told(&medium, OpenOptions { read_only: false, ..reading() }),
                (None, true),
                "stopped after {stop}"
            );
        }
    }
}

#[test]
fn a_volume_that_was_made_over_another_is_its_own_and_needs_nothing_of_it() {
    let old = volume(OTHER, 5);
    let medium = old.copy();
    let protection = protection(GuardKind::Crc32c, ProtectionType::Type1);
    let options =
        CreateOptions { block_size: SIZE, capacity_blocks: BLOCKS, protection, uuid: UUID, preallocate: false };
    block_on(create(&medium, &options)).unwrap();
    let left = |range: std::ops::Range<u64>| {
        let range = range.start as usize..range.end as usize;
        let (now, then) = (medium.bytes.borrow(), old.bytes.borrow());
        now[range.clone()].iter().zip(&then[range]).any(|(now, then)| now == then && *now != 0 && *now != b'S')
    };
    let layout = layout();
    assert!(left(layout.groups_offset()..layout.tail_offset()), "its map pages stay");
    assert!(!left(SUPERBLOCK_OFFSETS[1] - (28 << 10)..SUPERBLOCK_OFFSETS[1]), "its reserved areas are gone");
    assert!(!left(layout.log_offset()..layout.group_map_offset(0)), "and its log");
    // A new volume, also with the start of the old one restored.
    for restored in [false, true] {
        let medium = medium.copy();
        if restored {
            put(&medium, &old, &[(0, START)]);
        }
        let harness = Harness::open(&medium, false).unwrap();
        assert_eq!(harness.read(0, 1).unwrap(), vec![0; SIZE.bytes()], "{restored}");
        harness.close();
        used(&medium, 2);
        assert_own(&medium, &[], "made over another");
    }
}

#[test]
fn a_volume_on_a_longer_medium_stays_whose_it_is() {
    let other = volume(OTHER, 5);
    for extra in [512, 4096, 1 << 20, layout().medium_bytes()] {
        let medium = volume(UUID, 2);
        let length = medium.bytes.borrow().len();
        medium.bytes.borrow_mut().resize(length + extra as usize, 0);
        put(&medium, &other, &[(0, 512)]);
        assert_own(&medium, &[0], &format!("{extra} more"));
        // Without the other superblock the third one is not found, and nothing is created from the foreign ones.
        put(&medium, &other, &[(0, START)]);
        let before = medium.bytes.borrow().clone();
        for read_only in [true, false] {
            // A superblock of another volume of this shape shows where the third one is.
            let info = opened(&medium, &OpenOptions { read_only, ..reading() });
            assert!(info.is_ok_and(|info| info.uuid == UUID), "{extra} more");
            *medium.bytes.borrow_mut() = before.clone();
        }
    }
    // A superblock of another shape does not show it.
    let (medium, far) = (volume(UUID, 2), TestMedium::new(Layout::new(SIZE, 512, 4096).unwrap().medium_bytes(), 512));
    let options =
        CreateOptions { block_size: SIZE, capacity_blocks: 4096, protection: None, uuid: OTHER, preallocate: false };
    block_on(create(&far, &options)).unwrap();
    medium.bytes.borrow_mut().resize(far.bytes.borrow().len(), 0);
    put(&medium, &far, &[(0, START)]);
    let before = medium.bytes.borrow().clone();
    for read_only in [true, false] {
        let refused = opened(&medium, &OpenOptions { read_only, ..reading() });
        assert!(matches!(refused, Err(VolumeError::Identity(_))), "{refused:?}");
    }
    assert!(before == *medium.bytes.borrow());
}
