//! The positions of the parts, for new volumes and for resized ones.

use super::*;
use crate::format::RESERVED_HEAD_BYTES;

/// For each of these shapes, a new volume and others that reached this size in several steps.
fn layouts(shapes: &[(BlockSize, u32, u64)]) -> Vec<Layout> {
    let mut layouts = Vec::new();
    for &(size, sector, blocks) in shapes {
        layouts.push(Layout::new(size, sector, blocks).unwrap());
        for steps in [&[1, 5][..], &[blocks / 2 + 1], &[blocks + 9], &[3, blocks + (1 << 18), blocks - blocks / 4]] {
            let mut layout = Layout::new(size, sector, steps[0]).unwrap();
            for &step in steps[1..].iter().chain([&blocks]) {
                layout = layout.with_capacity(step).unwrap();
            }
            layouts.push(layout);
        }
    }
    layouts
}

#[test]
fn parts_follow_one_another_and_are_aligned() {
    for layout in
        layouts(&[(BlockSize::B4096, 512, 1), (BlockSize::B4096, 4096, 262_145), (BlockSize::B512, 512, 3 << 18)])
    {
        let (size, sector, blocks) = (layout.block_size(), layout.sector_bytes(), layout.capacity_blocks);
        let mut at = layout.groups_offset();
        let mut counted = 0;
        for group in (0..layout.block_groups()).map(|i| layout.block_group(i).unwrap()) {
            assert_eq!(group.pages_offset, at);
            let pages = group.blocks.div_ceil(layout.page_blocks());
            assert!(group.second_offset >= at + pages * layout.page_bytes());
            assert!(group.data_offset >= group.second_offset + pages * u64::from(sector));
            assert!(group.end_offset >= group.data_offset + (u64::from(group.physical_blocks) << size.shift()));
            assert!(u64::from(group.physical_blocks) > group.blocks && group.physical_blocks < 1 << 24);
            assert_eq!(
                layout.physical_blocks_at(group.first.checked_add(group.blocks - 1).unwrap()),
                group.physical_blocks
            );
            assert!([group.second_offset, group.data_offset, at].iter().all(|o| o % ALIGNMENT == 0));
            (at, counted) = (group.end_offset, counted + group.blocks);
        }
        assert_eq!(at + TAIL_BYTES, layout.medium_bytes());
        let last = layout.block_group(layout.block_groups() - 1).unwrap();
        assert!(counted >= blocks && last.first.get() < blocks, "what lies wholly behind the end has gone");
        assert!(layout.is_resized() || counted == blocks);
        assert!(layout.third_offset() >= at && layout.third_offset().is_multiple_of(4096));
        assert_eq!(layout.block_group(layout.block_groups()), None);
    }
}

/// True if some 64 KiB that begin with a sector contain parts of both.
fn one_run_hits(a: u64, b: u64) -> bool {
    a.abs_diff(b) < 64 << 10
}

#[test]
fn pages_hold_each_block_once_and_their_copies_lie_apart() {
    for layout in layouts(&[
        (BlockSize::B4096, 512, 1),
        (BlockSize::B4096, 512, 1000),
        (BlockSize::B4096, 4096, (1 << 18) + 1921),
        (BlockSize::B512, 512, 3 << 18),
    ]) {
        let (sector, blocks) = (layout.sector_bytes(), layout.capacity_blocks);
        assert_eq!(layout.page_blocks(), if sector == 512 { 240 } else { 1920 });
        let numbers = (0..layout.block_groups()).flat_map(|group| layout.pages_of_group(group));
        let mut next = 0;
        for number in numbers {
            let place = layout.page_offsets(number).unwrap();
            assert_eq!(place.first.get(), next, "page {number}");
            let last = place.first.checked_add(place.blocks - 1).unwrap();
            assert_eq!(layout.page_of(place.first), (number, 0));
            assert_eq!(layout.page_of(last), (number, place.blocks as usize - 1));
            assert!(!one_run_hits(place.offset, place.second_offset), "page {number}");
            next += place.blocks;
        }
        assert!(next >= blocks && (layout.is_resized() || next == blocks));
        let group = layout.block_group(layout.block_groups() - 1).unwrap();
        let last = layout.page_offsets(layout.pages_of_group(layout.block_groups() - 1).end - 1).unwrap();
        assert!(last.offset + layout.page_bytes() <= group.second_offset);
        assert!(last.second_offset + u64::from(sector) <= group.data_offset);
        let whole = Extent::from_raw(0, blocks).unwrap();
        let pieces: Vec<(u64, Extent)> = layout.page_pieces(whole).collect();
        assert_eq!(pieces.iter().map(|(_, piece)| piece.len()).sum::<u64>(), blocks);
        assert!(pieces.iter().all(|(number, piece)| layout.page_of(piece.last()).0 == *number));
        let groups: Vec<(u64, Extent)> = layout.group_pieces(whole).collect();
        assert!(groups.iter().map(|(number, _)| *number).eq(0..layout.block_groups()));
        assert!(groups.iter().all(|(number, piece)| layout.block_group(*number).unwrap().first == piece.start()));
    }
}

#[test]
fn what_was_laid_out_stays_and_a_volume_that_lies_as_a_new_one_is_one() {
    const ZONE: u64 = 1 << 18;
    let new = |blocks| Layout::new(BlockSize::B4096, 512, blocks).unwrap();
    let mut layout = new(12 * ZONE + 100);
    for blocks in [13 * ZONE, 15 * ZONE + 7, 15 * ZONE, 14 * ZONE + 1, 20 * ZONE, 3, 12 * ZONE] {
        let next = layout.with_capacity(blocks).unwrap();
        let [had, has] =
            [layout, next].map(|layout| (0..layout.block_groups()).map(move |i| layout.block_group(i).unwrap()));
        assert!(had.zip(has).all(|(before, after)| before == after), "{blocks}");
        layout = next;
    }
    let full = new(12 * ZONE);
    let grown = full.with_capacity(12 * ZONE + ZONE / 2).unwrap();
    // With the same number of bitmap pages, the block groups are at the same place.
    assert_eq!((grown, grown.is_resized()), (new(12 * ZONE + ZONE / 2), false));
    assert!(grown.with_capacity(13 * ZONE).unwrap().is_resized());
    assert_eq!(grown.with_capacity(12 * ZONE).unwrap(), full);
    assert_eq!(full.with_capacity(MAX_CAPACITY_BLOCKS + 1), Err(LayoutError::TooLarge { blocks: (1 << 40) + 1 }));
    assert_eq!(full.with_capacity(0), Err(LayoutError::Empty));
    let (groups, limit) = (1 << 22, 491_520);
    assert_eq!(new(ZONE).with_capacity(MAX_CAPACITY_BLOCKS), Err(LayoutError::BlockGroups { groups, limit }));
}

#[test]
fn copies_of_the_block_group_map_and_of_the_reserved_area_lie_apart_from_each_other_and_from_everything_else() {
    for (size, sector, blocks) in [
        (BlockSize::B4096, 512, 1),
        (BlockSize::B512, 512, MAX_CAPACITY_BLOCKS),
        (BlockSize::B4096, 4096, MAX_CAPACITY_BLOCKS),
    ] {
        let layout = Layout::new(size, sector, blocks).unwrap();
        let [a, b] = [0, 1].map(|copy| layout.group_map_offset(copy));
        let bytes = layout.group_map_sectors() * u64::from(sector);
        assert!(layout.log_offset() + layout.log_bytes() <= a && a + bytes <= b && b + bytes <= layout.bitmap_offset());
        assert!(!one_run_hits(a, b));
        let end = layout.block_group(layout.block_groups() - 1).unwrap().end_offset;
        let mut places: Vec<(u64, u64)> = [ReservedArea::GroupLabel, ReservedArea::ScrubState]
            .into_iter()
            .flat_map(|pbn| [0, 1].map(|write_seq| (pbn, layout.reserved_offsets(pbn, write_seq)[1])))
            .map(|(pbn, at)| (at, at + 64 + pbn.max_bytes() as u64))
            .collect();
        places.sort_unstable();
        assert!(places[0].0 >= end && places[3].1 <= layout.third_offset());
        assert!(places.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{places:?}");
    }
}

#[test]
fn the_places_of_a_log_sector_and_of_what_repeats_it_lie_further_apart_than_one_fault_reaches() {
    const FAULT_BYTES: u64 = 64 << 10;
    for (size, sector, blocks) in
        [(BlockSize::B4096, 512, 1), (BlockSize::B4096, 4096, 1), (BlockSize::B512, 512, 9 << 18)]
    {
        let layout = Layout::new(size, sector, blocks).unwrap();
        let apart = |a: u64, b: u64| a.abs_diff(b) >= FAULT_BYTES + u64::from(sector);
        let sectors = layout.log_sectors();
        assert!(sectors.is_multiple_of(2), "neighbours lie in different regions at the end of the log, too");
        for sequence in (0..sectors).chain([sectors * 7 - 1, sectors * 7, sectors * 7 + 1]) {
            let [a, b] = [0, 1].map(|region| layout.log_sector_offset(sequence, region));
            assert!(apart(a, b));
            // The sector that repeats it begins in the other region, or at the end of the log in both.
            let repeated = [0, 1].map(|region| layout.log_sector_offset(sequence + 1, region));
            let is_last = (sequence + 1).is_multiple_of(sectors);
            assert_eq!((apart(a, repeated[1]), apart(b, repeated[0])), (!is_last, true), "{sequence}");
            assert!(apart(a, repeated[0]) || !is_last);
        }
        assert_eq!(layout.log_sector_offset(sectors - 1, 1) + u64::from(sector), layout.group_map_offset(0));
    }
}

#[test]
fn every_block_group_has_spare_physical_blocks_for_the_largest_request_it_can_get() {
    const TRANSFER_BYTES: u64 = 1 << 20;
    for size in [BlockSize::B512, BlockSize::B4096] {
        for blocks in [1, 15, 16, 17, 255, 2047, 2048, 2049, 100_000, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 3 << 18] {
            let layout = Layout::new(size, 512, blocks).unwrap();
            for group in (0..layout.block_groups()).map(|i| layout.block_group(i).unwrap()) {
                let spare = u64::from(group.physical_blocks) - group.blocks;
                assert!(spare >= group.blocks.min((TRANSFER_BYTES >> size.shift()) * 4), "{size} {blocks}");
            }
        }
    }
}

#[test]
fn shapes_that_cannot_be_are_refused() {
    assert_eq!(Layout::new(BlockSize::B512, 512, 0), Err(LayoutError::Empty));
    assert!(matches!(Layout::new(BlockSize::B512, 4096, 1), Err(LayoutError::Sector { .. })));
    assert!(matches!(Layout::new(BlockSize::B4096, 1024, 1), Err(LayoutError::Sector { .. })));
    assert!(matches!(Layout::new(BlockSize::B4096, 512, u64::MAX), Err(LayoutError::TooLarge { .. })));
    assert!(Layout::new(BlockSize::B4096, 512, MAX_CAPACITY_BLOCKS).is_ok());
}

#[test]
fn areas_do_not_meet_each_other_nor_the_superblocks() {
    let end = |area: ReservedArea, copy| reserved_offset(area, copy) + (area.max_bytes() + RESERVED_HEAD_BYTES) as u64;
    for copy in [0, 1] {
        assert!(reserved_offset(ReservedArea::GroupLabel, copy) >= SUPERBLOCK_OFFSETS[copy as usize] + 4096);
        assert!(end(ReservedArea::GroupLabel, copy) <= reserved_offset(ReservedArea::ScrubState, copy));
        assert!(end(ReservedArea::ScrubState, copy) <= SUPERBLOCK_OFFSETS[copy as usize] + (32 << 10));
    }
}

#[test]
fn the_high_water_mark_has_two_places_apart_from_each_other_but_where_sectors_are_large_and_there_is_no_room() {
    for blocks in [1, 240, 241, 700, 28_800, 30_481, 30_720, 30_721, 61_440, 1 << 18, 3 << 18] {
        for (size, sector_bytes) in [(BlockSize::B512, 512), (BlockSize::B4096, 512), (BlockSize::B4096, 4096)] {
            let layout = Layout::new(size, sector_bytes, blocks).unwrap();
            let places: Vec<u64> = layout.high_water_offsets().collect();
            let group = layout.block_group(0).unwrap();
            let pages = group.blocks.div_ceil(layout.page_blocks());
            let has_no_room = sector_bytes == 4096 && pages.is_multiple_of(16);
            assert_eq!(places.len(), if has_no_room { 1 } else { 2 }, "{blocks} blocks, {sector_bytes}");
            assert!(places[0] + u64::from(sector_bytes) == layout.bitmap_offset());
            assert!(places.windows(2).all(|pair| pair[1] >= pair[0] + (64 << 10)), "{places:?}");
            assert!(places.last().unwrap() + u64::from(sector_bytes) <= group.data_offset);
        }
    }
}
