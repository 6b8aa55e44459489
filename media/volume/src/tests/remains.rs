//! Volumes without any superblock: what is found of them, and what can be read.

use futures_executor::block_on;
use sealblock_block::{Device, Durability, Expectations, Request, Response};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_units::{BlockSize, Extent};

use super::setup::{Harness, TestClock, TestMedium, created, pattern, protection};
use crate::OpenOptions;
use crate::format::{Layout, RegionKind};
use crate::rescue::profile::{Hints, ProfileError};
use crate::rescue::{Remains, RemainsError, open_remains};

/// A volume of which no superblock is left.
struct Found {
    remains: Remains,
    blocks: Vec<Option<Vec<u8>>>,
}

fn try_find(medium: &TestMedium, hints: &Hints) -> Result<Found, RemainsError> {
    let before = medium.bytes.borrow().clone();
    let opened = block_on(open_remains(medium.clone(), TestClock::default(), hints, &OpenOptions::default()))?;
    let (volume, remains) = (opened.0.volume, opened.1);
    let geometry = volume.geometry().clone();
    let read = |lba| {
        let extent = Extent::from_raw(lba, 1).unwrap();
        match block_on(volume.execute(Request::read(extent, Expectations::NONE))) {
            Ok(Response::Data(data)) => Some(data.joined_data().to_vec()),
            Ok(other) => panic!("{other:?}"),
            Err(_) => None,
        }
    };
    let blocks = (0..geometry.capacity_blocks).map(read).collect();
    assert!(*medium.bytes.borrow() == before, "remains are only read");
    Ok(Found { remains, blocks })
}

fn find(medium: &TestMedium) -> Found {
    try_find(medium, &Hints::default()).unwrap()
}

fn layout(size: BlockSize, sector: u32, blocks: u64) -> Layout {
    Layout::new(size, sector, blocks).unwrap()
}

/// Zeroes every region of the kinds given.
fn wipe(medium: &TestMedium, layout: &Layout, is: impl Fn(RegionKind) -> bool) {
    for region in layout.regions().into_iter().filter(|region| is(region.kind)) {
        medium.bytes.borrow_mut()[region.start as usize..region.end as usize].fill(0);
    }
}

fn wipe_superblocks(medium: &TestMedium, layout: &Layout) {
    wipe(medium, layout, |kind| matches!(kind, RegionKind::Superblock(_) | RegionKind::ReservedArea(_)));
}

/// The blocks of these bytes, after blocks of zeroes.
fn blocks_of(data: &[u8], size: BlockSize, first: usize, all: u64) -> Vec<Option<Vec<u8>>> {
    let mut bytes = vec![0; all as usize * size.bytes()];
    bytes[first * size.bytes()..][..data.len()].copy_from_slice(data);
    bytes.chunks_exact(size.bytes()).map(|block| Some(block.to_vec())).collect()
}

const FORMATS: [Option<(GuardKind, ProtectionType)>; 5] = [
    None,
    Some((GuardKind::Crc16, ProtectionType::Type1)),
    Some((GuardKind::Crc32c, ProtectionType::Type2)),
    Some((GuardKind::Crc64, ProtectionType::Type3)),
    Some((GuardKind::IpChecksum, ProtectionType::Type1)),
];

#[test]
fn volumes_of_every_shape_are_found_whole_closed_and_crashed() {
    let shapes = [(BlockSize::B4096, 512), (BlockSize::B4096, 4096), (BlockSize::B512, 512)];
    for (size, sector) in shapes {
        for (number, format) in FORMATS.into_iter().enumerate() {
            let format: Option<PiFormat> = format.and_then(|(guard, kind)| protection(guard, kind));
            let (blocks, layout) = (1500, layout(size, sector, 1500));
            let medium = created(size, sector, blocks, format);
            let harness = Harness::open(&medium, false).unwrap();
            let data = pattern(7, 300 * size.bytes());
            harness.write(200, &data).unwrap();
            harness.flush().unwrap();
            if number % 2 == 0 {
                harness.close();
            } else {
                drop(harness);
            }
            wipe_superblocks(&medium, &layout);
            let found = find(&medium);
            let name = format!("{size} {sector} {format:?}");
            let shape = found.remains.profile;
            assert_eq!((shape.layout.block_size(), shape.layout.sector_bytes()), (size, sector), "{name}");
            assert_eq!(shape.protection.map(PiFormat::guard), format.map(PiFormat::guard), "{name}");
            let all = shape.layout.capacity_blocks();
            assert_eq!(shape.layout.medium_bytes(), layout.medium_bytes(), "{name}");
            assert!(found.blocks == blocks_of(&data, size, 200, all), "{name}");
            assert!(found.remains.may_be_older, "a log that has not gone round once may be cut off");
        }
    }
}

#[test]
fn a_round_capacity_is_preferred_and_a_written_block_never_cut_off() {
    let format = protection(GuardKind::Crc32c, ProtectionType::Type1);
    for (blocks, written) in [(2048, 2047), (2045, 2044), (2045, 5)] {
        let medium = created(BlockSize::B512, 512, blocks, format);
        let harness = Harness::open(&medium, false).unwrap();
        harness.write(0, &pattern(1, 512 * 4)).unwrap();
        harness.write(written, &pattern(2, 512)).unwrap();
        harness.close();
        wipe_superblocks(&medium, &layout(BlockSize::B512, 512, blocks));
        let found = find(&medium);
        let all = found.remains.profile.layout.capacity_blocks();
        assert!(all == 2048 && found.blocks[written as usize] == Some(pattern(2, 512)), "{blocks}: {all}");
        let hints = Hints { capacity_bytes: Some(blocks * 512), block_size: None };
        let known = try_find(&medium, &hints).unwrap();
        assert_eq!(known.remains.profile.layout.capacity_blocks(), blocks);
    }
}

#[test]
fn what_the_log_has_is_newer_than_the_map_pages_unless_its_newer_part_is_gone() {
    let (size, blocks) = (BlockSize::B4096, 512);
    let (format, layout) = (protection(GuardKind::Crc16, ProtectionType::Type1), layout(size, 512, blocks));
    let medium = created(size, 512, blocks, format);
    let write = |harness: &Harness, seed| {
        harness.write_durably(9, &pattern(seed, 4096), Durability::ForceUnitAccess).unwrap();
    };
    let harness = Harness::open(&medium, false).unwrap();
    write(&harness, 1);
    write(&harness, 2);
    let harness = Harness::open(&harness.close(), false).unwrap();
    let log = |medium: &TestMedium| {
        let region = layout.regions().into_iter().find(|region| region.kind == RegionKind::Log(0)).unwrap();
        medium.bytes.borrow()[region.start as usize..region.end as usize].to_vec()
    };
    let before = log(&harness.medium);
    write(&harness, 3);
    let after = log(&harness.medium);
    // After a crash: the block map has the second content, the log has the third.
    let crashed = harness.medium.clone();
    wipe_superblocks(&crashed, &layout);
    assert_eq!(find(&crashed).blocks[9], Some(pattern(3, 4096)));
    // After a close: the block map has the third content. If the log still has the second but lost the third, the block
    // map counts.
    let medium = created(size, 512, blocks, format);
    let harness = Harness::open(&medium, false).unwrap();
    write(&harness, 1);
    write(&harness, 2);
    let harness = Harness::open(&harness.close(), false).unwrap();
    write(&harness, 3);
    let closed = harness.close();
    wipe_superblocks(&closed, &layout);
    assert_eq!(find(&closed).blocks[9], Some(pattern(3, 4096)));
    let region = layout.regions().into_iter().find(|region| region.kind == RegionKind::Log(0)).unwrap();
    let changed = (0..before.len()).filter(|&at| before[at] != after[at]);
    changed.for_each(|at| closed.bytes.borrow_mut()[region.start as usize + at] = 0);
    let found = find(&closed);
    assert_eq!(found.blocks[9], Some(pattern(3, 4096)));
    assert!(found.remains.may_be_older);
}

#[test]
fn damaged_blocks_are_lost_and_no_others() {
    let (size, blocks) = (BlockSize::B4096, 512);
    let layout = layout(size, 512, blocks);
    let medium = created(size, 512, blocks, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let harness = Harness::open(&medium, false).unwrap();
    let data = pattern(3, 64 * 4096);
    harness.write(0, &data).unwrap();
    let medium = harness.close();
    wipe_superblocks(&medium, &layout);
    wipe(&medium, &layout, |kind| matches!(kind, RegionKind::Log(_)));
    medium.bytes.borrow_mut()[layout.block_group(0).unwrap().data_offset as usize + 5 * 4096 + 7] ^= 1;
    let entry = layout.map_entry_offset(sealblock_units::Lba::new(6)) as usize;
    medium.bytes.borrow_mut()[entry] ^= 1;
    let found = find(&medium);
    let mut due = blocks_of(&data, size, 0, found.remains.profile.layout.capacity_blocks());
    (due[5], due[6]) = (None, None);
    assert!(found.blocks == due);
    assert_eq!(found.remains.log_sectors, 0);
}

fn why(medium: &TestMedium, hints: &Hints) -> ProfileError {
    match try_find(medium, hints).map(|found| found.remains) {
        Err(RemainsError::Profile(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_no_volume_is_refused_and_says_why() {
    let format = protection(GuardKind::Crc32c, ProtectionType::Type1);
    let layout = layout(BlockSize::B4096, 512, 512);
    let hints = Hints::default();
    // It was never written to, so nothing shows its layout.
    let unwritten = created(BlockSize::B4096, 512, 512, format);
    wipe_superblocks(&unwritten, &layout);
    assert_eq!(why(&unwritten, &hints), ProfileError::Nothing);
    let noise = TestMedium::new(layout.medium_bytes(), 512);
    noise.bytes.borrow_mut().copy_from_slice(&pattern(5, layout.medium_bytes() as usize));
    assert_eq!(why(&noise, &hints), ProfileError::Nothing);
    let odd = TestMedium::new(layout.medium_bytes() + 512, 512);
    assert_eq!(why(&odd, &hints), ProfileError::Length(layout.medium_bytes() + 512));
    let capacity = Hints { capacity_bytes: Some(1000), ..hints };
    assert_eq!(why(&noise, &capacity), ProfileError::Hints);
    // Map entries without any data are not enough to derive a layout.
    let harness = Harness::open(&created(BlockSize::B4096, 512, 512, format), false).unwrap();
    harness.write(0, &pattern(3, 64 * 4096)).unwrap();
    let medium = harness.close();
    wipe_superblocks(&medium, &layout);
    wipe(&medium, &layout, |kind| kind == RegionKind::PhysicalBlocks);
    assert!(matches!(why(&medium, &hints), ProfileError::NoData { entries } if entries >= 64));
}

#[test]
fn a_longer_medium_needs_the_capacity_as_a_hint() {
    let format = protection(GuardKind::Crc64, ProtectionType::Type1);
    let made = Layout::new(BlockSize::B4096, 512, 600).unwrap();
    let medium = TestMedium::new(made.medium_bytes() + (64 << 10) - 4096, 512);
    let options = crate::CreateOptions {
        block_size: BlockSize::B4096,
        capacity_blocks: 600,
        protection: format,
        uuid: [9; 16],
        preallocate: false,
    };
    block_on(crate::create(&medium, &options)).unwrap();
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(590, &pattern(3, 10 * 4096)).unwrap();
    let medium = harness.close();
    wipe_superblocks(&medium, &made);
    assert!(matches!(why(&medium, &Hints::default()), ProfileError::Length(_)));
    let hints = Hints { capacity_bytes: Some(600 * 4096), ..Hints::default() };
    assert_eq!(
        try_find(&medium, &hints).unwrap().blocks[590..],
        blocks_of(&pattern(3, 10 * 4096), BlockSize::B4096, 0, 10)[..]
    );
    let wrong = Hints { block_size: Some(BlockSize::B512), ..hints };
    assert!(matches!(why(&medium, &wrong), ProfileError::Nothing | ProfileError::NoData { .. }));
}
