//! Which volume counts where superblocks of several are on one medium, and what is refused.

use futures_executor::block_on;
use sealblock_block::Medium;
use sealblock_media_volume::format::{Container, Layout, SUPERBLOCK_OFFSETS};
use sealblock_media_volume::shards::{create_shards, probe_shards};
use sealblock_media_volume::{CreateOptions, OpenOptions, Recognised, Trace, VolumeError, create, probe, recognise};
use sealblock_units::BlockSize;

use crate::disk::{Disk, Harness, NoClock, created, options, pattern};

const MIB: u64 = 1 << 20;
const OTHER: [u8; 16] = *b"ano4her4identity";

fn container(disk: &Disk) -> Container {
    block_on(probe_shards(disk)).unwrap().expect("a volume in shards").container
}

fn create_other(disk: &Disk, bytes: u64, shards: u32) {
    block_on(create_shards(disk, &CreateOptions { uuid: OTHER, ..options(bytes) }, shards)).unwrap();
}

/// Creates a volume of version 2 that is as large as the disk has room for, or smaller.
fn create_version_2(disk: &Disk, bytes: u64) {
    block_on(create(disk, &CreateOptions { uuid: OTHER, ..options(bytes) })).unwrap();
}

#[test]
fn one_copy_of_the_superblock_is_enough_and_lost_ones_are_rewritten() {
    let disk = created(128 * MIB, 2);
    let offsets = container(&disk).copy_offsets();
    for kept in offsets {
        let damaged = disk.copy();
        for lost in offsets.into_iter().filter(|offset| *offset != kept) {
            damaged.fill(lost, 512, 0x55);
        }
        let reader = OpenOptions { read_only: true, ..OpenOptions::default() };
        let open = Harness::open_with(&damaged, &reader).unwrap();
        let lost: Vec<u64> =
            open.info.superblocks.iter().filter(|copy| copy.lost.is_some()).map(|copy| copy.offset_bytes).collect();
        assert_eq!(lost.len(), 2);
        assert!(!lost.contains(&kept) && open.info.superblocks.len() == 9);
        let open = Harness::open(&damaged).unwrap();
        open.close().unwrap();
        let open = Harness::open(&damaged).unwrap();
        assert!(open.info.superblocks.iter().all(|copy| copy.lost.is_none()));
    }
    let damaged = disk.copy();
    offsets.into_iter().for_each(|offset| damaged.fill(offset, 512, 0));
    assert!(block_on(probe_shards(&damaged)).unwrap().is_none());
    let Ok(Recognised::Remains(traces)) = block_on(recognise(&damaged)) else { panic!("not recognised") };
    assert_eq!(traces, [Trace::Shard(64 << 10)]);
}

#[test]
fn a_superblock_that_deals_the_blocks_in_another_way_never_counts() {
    let disk = created(128 * MIB, 2);
    let open = Harness::open(&disk).unwrap();
    open.write(0, &pattern(1, 600)).unwrap();
    open.close().unwrap();
    let offsets = container(&disk).copy_offsets();
    // A unit of 2 MiB in place of 1 MiB; one block less.
    for (at, value) in [(60, (2 * MIB).to_le_bytes()), (48, (((128 * MIB) >> 12) - 1).to_le_bytes())] {
        let mut other = disk.bytes.borrow()[..512].to_vec();
        let length = if at == 60 { 4 } else { 8 };
        other[at..at + length].copy_from_slice(&value[..length]);
        let checksum = sealblock_integrity::guard::crc32c(&other[..508]);
        other[508..].copy_from_slice(&checksum.to_le_bytes());
        let put = |disk: &Disk, offset: u64| disk.bytes.borrow_mut()[offset as usize..][..512].copy_from_slice(&other);
        for offset in offsets {
            let damaged = disk.copy();
            put(&damaged, offset);
            let open = Harness::open(&damaged).unwrap();
            let lost: Vec<u64> =
                open.info.superblocks.iter().filter(|copy| copy.lost.is_some()).map(|copy| copy.offset_bytes).collect();
            assert_eq!(lost, [offset], "the one that differs, whichever it is");
            assert_eq!(open.read(0, 600).unwrap(), pattern(1, 600));
            open.close().unwrap();
        }
        let damaged = disk.copy();
        offsets.into_iter().for_each(|offset| put(&damaged, offset));
        let refused = Harness::open(&damaged).err().expect("no shard is one of that volume").to_string();
        assert!(refused.contains("shard 0"), "{refused}");
    }
}

#[test]
fn a_damaged_superblock_alone_is_the_remains_of_a_volume() {
    let disk = created(128 * MIB, 2);
    let end = container(&disk).windows_end();
    disk.fill(64 << 10, end - (64 << 10), 0);
    for offset in container(&disk).copy_offsets() {
        disk.fill(offset + 100, 1, 1);
    }
    let Ok(Recognised::Remains(traces)) = block_on(recognise(&disk)) else { panic!("not recognised") };
    assert_eq!(traces.len(), 3, "{traces:?}");
}

#[test]
fn another_version_or_feature_is_refused_by_name() {
    let disk = created(128 * MIB, 2);
    for (at, value, text) in
        [(8, 4, "format version 4"), (12, 8, "features 0x8"), (59, 20, "number of shards in the superblock: 20")]
    {
        let changed = disk.copy();
        changed.fill(at, 1, value);
        let checksum = crc32c(&changed.bytes.borrow()[..508]);
        changed.bytes.borrow_mut()[508..512].copy_from_slice(&checksum.to_le_bytes());
        let refused = block_on(probe_shards(&changed)).unwrap_err().to_string();
        assert!(refused.contains(text), "{refused}");
        assert_eq!(block_on(recognise(&changed)).unwrap(), Recognised::Volume);
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    sealblock_integrity::guard::crc32c(bytes)
}

#[test]
fn a_window_with_another_shard_is_refused_by_its_number() {
    let disk = created(128 * MIB, 2);
    let (first, second) = (container(&disk).window(0), container(&disk).window(1));
    let swapped = disk.copy();
    swapped.put_from(&disk, first.offset, first.length, second.offset);
    swapped.put_from(&disk, second.offset, second.length, first.offset);
    let refused = Harness::open(&swapped).err().unwrap();
    assert!(
        matches!(&refused, VolumeError::Shard { shard: 0, error } if matches!(**error, VolumeError::ForeignShard { .. }))
    );
    assert!(refused.to_string().starts_with("shard 0: volume "), "{refused}");

    let other = Disk::new(disk.len_bytes());
    create_other(&other, 128 * MIB, 2);
    let mixed = disk.copy();
    mixed.put_from(&other, second.offset, second.length, second.offset);
    let before = mixed.bytes.borrow().clone();
    assert!(matches!(Harness::open(&mixed), Err(VolumeError::Shard { shard: 1, .. })));
    assert!(*mixed.bytes.borrow() == before, "it was refused and changed");

    let wiped = disk.copy();
    wiped.fill(second.offset, second.length, 0);
    assert!(matches!(Harness::open(&wiped), Err(VolumeError::Shard { shard: 1, .. })));
}

#[test]
fn a_volume_of_version_2_over_one_in_shards_and_the_other_way_round() {
    let disk = created(256 * MIB, 2);
    let open = Harness::open(&disk).unwrap();
    open.write(0, &pattern(1, 600)).unwrap();
    open.close().unwrap();
    let in_shards = disk.copy();
    for bytes in [40 * MIB, 200 * MIB] {
        let disk = in_shards.copy();
        create_version_2(&disk, bytes);
        assert!(block_on(probe_shards(&disk)).unwrap().is_none());
        assert_eq!(block_on(probe(&disk)).unwrap().uuid, OTHER);
        let opened = block_on(sealblock_media_volume::open(disk.clone(), NoClock, &OpenOptions::default())).unwrap();
        assert_eq!(opened.description.uuid, OTHER);
        // And back, with another number of shards.
        create_shards_again(&disk);
    }
    // The length of a volume of version 2 that ends with the medium.
    let layout = Layout::new(BlockSize::B4096, 512, 30_000).unwrap();
    let disk = Disk::new(layout.medium_bytes());
    create_version_2(&disk, 30_000 << 12);
    create_other(&disk, 100 * MIB / 4 * 4, 1);
    assert_eq!(Harness::open(&disk).unwrap().info.uuid, OTHER);
    assert!(block_on(probe(&disk)).is_err());
}

#[test]
fn a_third_copy_that_is_not_at_the_end_of_the_medium_is_wiped_too() {
    let disk = created(128 * MIB, 2);
    let third = container(&disk).copy_offsets()[2] as usize;
    // The medium grew.
    let longer = disk.len_bytes() as usize + (4 << 20);
    disk.bytes.borrow_mut().resize(longer, 0);
    assert!(Container::recognise(&disk.bytes.borrow()[third..]));
    create_version_2(&disk, 40 * MIB);
    assert!(!Container::recognise(&disk.bytes.borrow()[third..]));
}

fn create_shards_again(disk: &Disk) {
    block_on(create_shards(disk, &options(256 * MIB / 4 * 3), 1)).unwrap();
    let open = Harness::open(disk).unwrap();
    assert_eq!((open.info.uuid, open.container.shards()), (crate::disk::UUID, 1));
    open.verify().unwrap();
}

#[test]
fn a_superblock_that_was_put_back_from_another_volume_does_not_count() {
    let old = created(256 * MIB, 4);
    let version_2 = Disk::new(old.len_bytes());
    create_version_2(&version_2, 200 * MIB);
    let disk = old.copy();
    create_other(&disk, 256 * MIB, 2);
    let open = Harness::open(&disk).unwrap();
    open.write(0, &pattern(1, 600)).unwrap();
    open.close().unwrap();
    let third = container(&disk).copy_offsets()[2];
    for from in [&old, &version_2] {
        for offset in SUPERBLOCK_OFFSETS.into_iter().chain([third]) {
            let mixed = disk.copy();
            mixed.put_from(from, offset, 4096, offset);
            let open = Harness::open(&mixed).unwrap();
            assert_eq!(open.info.uuid, OTHER);
            assert_eq!(open.read(0, 600).unwrap(), pattern(1, 600));
            assert!(open.info.superblocks[..3].iter().any(|copy| copy.lost.is_some()));
        }
    }
    // The other way round: one of them on a volume of version 2.
    for offset in SUPERBLOCK_OFFSETS.into_iter().chain([third]) {
        let mixed = version_2.copy();
        mixed.put_from(&old, offset, 4096, offset);
        assert!(block_on(probe_shards(&mixed)).unwrap().is_none());
        assert_eq!(block_on(probe(&mixed)).unwrap().uuid, OTHER);
    }
    // Two of them, and nothing to tell which one counts.
    let mixed = disk.copy();
    mixed.put_from(&old, 0, 4096, 0);
    mixed.fill(64 << 10, 64 << 10, 0);
    assert!(matches!(block_on(probe_shards(&mixed)), Err(VolumeError::TwoContainers)));
}
