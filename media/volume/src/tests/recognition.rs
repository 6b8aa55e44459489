//! What is recognised from bytes on a medium: volumes, remains of volumes, and everything else.

use futures_executor::block_on;
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_units::BlockSize;

use super::setup::{Harness, TestMedium, created, pattern, protection};
use crate::format::{Layout, SUPERBLOCK_OFFSETS};
use crate::{CreateOptions, Recognised, Trace, VolumeError, create, open, recognise};

const BLOCKS: u64 = 512;

/// A volume that was written to and closed.
fn used() -> TestMedium {
    let medium = created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &pattern(1, 64 * 4096)).unwrap();
    harness.close()
}

fn third() -> usize {
    Layout::new(BlockSize::B4096, 512, BLOCKS).unwrap().third_offset() as usize
}

fn wipe(medium: &TestMedium, from: usize, to: usize) {
    medium.bytes.borrow_mut()[from..to].fill(0);
}

fn recognised(medium: &TestMedium) -> Recognised {
    block_on(recognise(medium)).unwrap()
}

fn traces(medium: &TestMedium) -> Vec<Trace> {
    match recognised(medium) {
        Recognised::Remains(traces) => traces,
        other => panic!("{other:?}"),
    }
}

/// The copies of the superblock that an open for reading finds lost.
fn lost(medium: &TestMedium) -> Vec<u64> {
    let options = crate::OpenOptions { read_only: true, ..Default::default() };
    let opened = block_on(open(medium.clone(), super::setup::TestClock::default(), &options)).unwrap();
    let lost = opened.description.superblocks.into_iter().filter(|copy| copy.lost.is_some());
    lost.map(|copy| copy.offset_bytes).collect()
}

#[test]
fn a_volume_opens_from_any_copy_and_an_opening_for_writing_mends_the_others() {
    let places = [SUPERBLOCK_OFFSETS[0] as usize, SUPERBLOCK_OFFSETS[1] as usize, third()];
    for mask in 0..7 {
        let medium = used();
        let gone: Vec<usize> = (0..3).filter(|at| mask >> at & 1 == 1).map(|at| places[at]).collect();
        gone.iter().for_each(|&at| wipe(&medium, at, at + 512));
        assert_eq!((recognised(&medium), lost(&medium).len()), (Recognised::Volume, gone.len()), "{mask:03b}");
        let harness = Harness::open(&medium, true).unwrap();
        assert_eq!(harness.read(0, 64).unwrap(), pattern(1, 64 * 4096), "{mask:03b}");
        drop(harness);
        assert_eq!(lost(&medium).len(), gone.len(), "reading writes nothing");
        drop(Harness::open(&medium, false).unwrap());
        assert_eq!(lost(&medium), [], "{mask:03b}");
        let harness = Harness::open(&medium, false).unwrap();
        assert_eq!(harness.read(0, 64).unwrap(), pattern(1, 64 * 4096), "{mask:03b}");
        harness.verify().unwrap();
    }
}

#[test]
fn a_wiped_start_costs_nothing_that_was_flushed() {
    let medium = used();
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(100, &pattern(2, 16 * 4096)).unwrap();
    harness.flush().unwrap();
    drop(harness);
    wipe(&medium, 0, 64 << 10);
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!(harness.read(100, 16).unwrap(), pattern(2, 16 * 4096));
    assert_eq!(harness.read(0, 64).unwrap(), pattern(1, 64 * 4096));
}

#[test]
fn the_third_copy_is_never_older_than_the_log_it_needs() {
    // More commits than the log has sectors, so that old places are reused between checkpoints.
    let medium = used();
    let harness = Harness::open(&medium, false).unwrap();
    for round in 0..300 {
        harness.write(round % 8, &pattern(round, 4096)).unwrap();
        harness.flush().unwrap();
        let image = TestMedium::new(0, 512);
        *image.bytes.borrow_mut() = medium.bytes.borrow().clone();
        wipe(&image, 0, 64 << 10);
        let copy = Harness::open(&image, true).unwrap();
        assert_eq!(copy.read(round % 8, 1).unwrap(), pattern(round, 4096), "round {round}");
    }
}

#[test]
fn what_is_left_of_a_volume_is_recognised_by_any_part_of_it() {
    let medium = used();
    for at in SUPERBLOCK_OFFSETS {
        medium.bytes.borrow_mut()[at as usize + 2] ^= 0xff;
    }
    wipe(&medium, third(), third() + 512);
    assert_eq!(traces(&medium)[..2], [Trace::Superblock(0), Trace::Superblock(32 << 10)]);
    assert!(matches!(Harness::open(&medium, true).err(), Some(VolumeError::Superblock(_))));
    wipe(&medium, 0, 64 << 10);
    let layout = Layout::new(BlockSize::B4096, 512, BLOCKS).unwrap();
    let (map, tables) = (layout.group_map_offset(0), layout.groups_offset());
    assert_eq!(traces(&medium), [Trace::Log(64 << 10), Trace::GroupMap(map), Trace::MapEntries(tables)]);
    let logless = TestMedium::new(0, 512);
    *logless.bytes.borrow_mut() = medium.bytes.borrow().clone();
    wipe(&logless, 64 << 10, map as usize);
    assert_eq!(traces(&logless), [Trace::GroupMap(map), Trace::MapEntries(tables)]);
    wipe(&logless, 64 << 10, tables as usize);
    assert_eq!(traces(&logless), [Trace::MapEntries(tables)]);
    // A volume that was never written to is recognised by its group map.
    let fresh = created(BlockSize::B4096, 512, BLOCKS, None);
    wipe(&fresh, 0, map as usize);
    wipe(&fresh, third(), third() + 512);
    assert_eq!(traces(&fresh), [Trace::GroupMap(map)]);
    // Only a third superblock, damaged.
    let medium = used();
    wipe(&medium, 0, third());
    medium.bytes.borrow_mut()[third() + 40] ^= 1;
    assert_eq!(traces(&medium), [Trace::Superblock(third() as u64)]);
}

#[test]
fn map_pages_are_found_behind_logs_of_any_length() {
    for (size, sector, blocks) in [(BlockSize::B512, 512, 200_000), (BlockSize::B4096, 4096, 30_000)] {
        let medium = created(size, sector, blocks, protection(GuardKind::Crc16, ProtectionType::Type1));
        let harness = Harness::open(&medium, false).unwrap();
        harness.write(0, &pattern(1, 16 * size.bytes())).unwrap();
        let medium = harness.close();
        let tables = Layout::new(size, sector, blocks).unwrap().groups_offset();
        assert!(tables > 320 << 10);
        wipe(&medium, 0, tables as usize);
        let length = medium.bytes.borrow().len();
        wipe(&medium, length - 4096, length);
        assert_eq!(traces(&medium), [Trace::MapEntries(tables)]);
    }
}

#[test]
fn other_bytes_are_nothing_and_neither_is_what_holds_a_volume_further_in() {
    let other = |bytes: Vec<u8>| {
        let medium = TestMedium::new(0, 512);
        *medium.bytes.borrow_mut() = bytes;
        recognised(&medium)
    };
    for length in [0, 512, 4096, 64 << 10, 200 << 10, 3 << 20] {
        assert_eq!(other(vec![0; length]), Recognised::Nothing, "{length}");
        assert_eq!(other(vec![0xff; length]), Recognised::Nothing, "{length}");
        assert_eq!(other(pattern(7, length)), Recognised::Nothing, "{length}");
    }
    let volume = used().bytes.borrow().clone();
    for before in [512, 4096, 28 << 10, 32 << 10, 60 << 10, 64 << 10, 1 << 20] {
        for behind in [0, 4096, 1 << 20] {
            let bytes = [vec![0; before], volume.clone(), vec![0; behind]].concat();
            assert_eq!(other(bytes), Recognised::Nothing, "{before} before, {behind} behind");
        }
    }
    // A volume with other bytes after it is a volume.
    assert_eq!(other([volume, vec![1; 8192]].concat()), Recognised::Volume);
}

#[test]
fn what_cannot_be_read_is_not_called_nothing() {
    let medium = TestMedium::new(1 << 20, 512);
    medium.unreadable.set((0, 512));
    assert!(block_on(recognise(&medium)).is_err());
    medium.unreadable.set((4096, 8192));
    assert_eq!(recognised(&medium), Recognised::Nothing);
    let medium = used();
    wipe(&medium, 32 << 10, 33 << 10);
    medium.unreadable.set((0, 512));
    assert_eq!(recognised(&medium), Recognised::Volume);
    wipe(&medium, third(), third() + 512);
    assert!(matches!(recognised(&medium), Recognised::Remains(_)));
}

#[test]
fn a_new_volume_leaves_no_superblock_of_the_one_before() {
    let medium = used();
    let length = medium.bytes.borrow().len();
    medium.bytes.borrow_mut().resize(length + (8 << 20), 0);
    let options = CreateOptions {
        block_size: BlockSize::B4096,
        capacity_blocks: 64,
        protection: None,
        uuid: [3; 16],
        preallocate: false,
    };
    block_on(create(&medium, &options)).unwrap();
    assert!(medium.bytes.borrow()[third()..third() + 512] == [0; 512], "the old third copy is gone");
    wipe(&medium, 0, 64 << 10);
    medium.bytes.borrow_mut().truncate(length);
    assert!(!matches!(recognised(&medium), Recognised::Volume));
}
