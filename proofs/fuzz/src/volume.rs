//! Superblocks and the log of a volume.

use sealblock_media_volume::format::{
    Answered, Container, Layout, LogSector, MAP_ENTRY_BYTES, MapEntry, MapEntryKind, MapEntryRun, SUPERBLOCK_BYTES, Seed,
    Superblock, WhyLost,
};
use sealblock_units::{BlockSize, Lba};

use crate::{Pieces, forge_log_sector, forge_map_entry, forge_superblock, format};

const UUID: [u8; 16] = [9; 16];

/// Superblocks: any bytes are refused, or decode to a value that encodes and decodes to itself.
pub fn try_superblock(input: &[u8]) {
    check_superblock(input);
    // A valid superblock with some bytes changed, and its checksum updated.
    let mut pieces = Pieces::new(input);
    let size = if pieces.byte() & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 };
    let sector_bytes = if pieces.byte() & 1 == 0 { 512 } else { 4096 };
    let Ok(mut layout) = Layout::new(size, sector_bytes, pieces.word() >> (pieces.byte() % 64)) else { return };
    for _ in 0..pieces.byte() % 20 {
        // Resized a few times; existing segments stay.
        let capacity = pieces.word() >> (pieces.byte() % 64);
        let Ok(next) = layout.with_capacity(capacity) else { continue };
        let kept = layout.block_groups().min(next.block_groups());
        assert_eq!(layout.block_group(kept - 1), next.block_group(kept - 1));
        layout = next;
    }
    let protection = format(&mut pieces);
    let (write_seq, uncorrectable) = (pieces.word(), pieces.byte() & 1 == 1);
    let initialized_groups = write_seq % (layout.block_groups() + 1);
    let superblock = Superblock {
        uuid: [3; 16],
        write_seq,
        layout,
        protection,
        is_clean: !uncorrectable,
        is_anchored: uncorrectable,
        is_begun: uncorrectable && write_seq & 2 == 2,
        is_put_back: write_seq & 8 == 8,
        uncorrectable,
        keeps_space: false,
        areas_were_zeroed: write_seq & 1 == 1,
        log_tail: 5,
        initialized_groups,
        answered: Answered::Durable,
        labels_written: write_seq >> 1,
        unreported_loss: (write_seq & 4 == 4).then_some(WhyLost::Damaged),
    };
    let mut bytes = superblock.encode();
    assert_eq!(Superblock::decode(&bytes), Ok(superblock));
    while !pieces.is_empty() {
        bytes[usize::from(pieces.short()) % SUPERBLOCK_BYTES] = pieces.byte();
    }
    forge_superblock(&mut bytes);
    check_superblock(&bytes);
}

/// Checks that segments are contiguous, and that the last one contains the last block.
fn check_segments(layout: &Layout) {
    let (mut first, mut first_group, mut offset) = (0, 0, layout.groups_offset());
    for segment in layout.segments() {
        assert_eq!((segment.first, segment.first_group, segment.offset), (first, first_group, offset));
        assert!(segment.blocks > 0 && segment.group_blocks > 0);
        first += segment.blocks;
        first_group += segment.groups();
        offset = layout.block_group(first_group - 1).expect("a segment has block groups").end_offset;
    }
    assert_eq!((first_group, layout.tail_offset()), (layout.block_groups(), offset));
    let last = Lba::new(layout.capacity_blocks() - 1);
    assert!(layout.capacity_blocks() <= first && layout.group_of(last) == layout.block_groups() - 1);
    assert!(layout.block_groups() <= layout.max_groups());
    let place = layout.page_offsets(layout.page_of(last).0).expect("the last block has a page");
    assert!(place.first <= last && last.get() < place.first.get() + place.blocks);
}

/// Superblocks of volumes in shards: any bytes are refused, or decode to a value that encodes to the same bytes.
pub fn try_container(input: &[u8]) {
    check_container(input);
    // A valid superblock with some bytes changed, and its checksum updated.
    let mut pieces = Pieces::new(input);
    let size = if pieces.byte() & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 };
    let sector_bytes = if pieces.byte() & 1 == 0 { 512 } else { 4096 };
    let capacity_blocks = pieces.word() >> (pieces.byte() % 64);
    let (shards, medium_bytes) = (u32::from(pieces.byte() % 18), pieces.word() >> (pieces.byte() % 64));
    let protection = format(&mut pieces);
    let made = Container::new([3; 16], (size, sector_bytes), capacity_blocks, protection, (shards, medium_bytes));
    let Ok(container) = made else { return };
    let mut bytes = container.encode();
    assert_eq!(Container::decode(&bytes), Ok(container));
    while !pieces.is_empty() {
        bytes[usize::from(pieces.short()) % SUPERBLOCK_BYTES] = pieces.byte();
    }
    forge_superblock(&mut bytes);
    check_container(&bytes);
}

fn check_container(bytes: &[u8]) {
    let Ok(container) = Container::decode(bytes) else { return };
    assert_eq!(container.encode(), bytes[..SUPERBLOCK_BYTES]);
    assert!(Superblock::is_trace(bytes) && Superblock::decode(bytes).is_err());
    let windows = (0..container.shards()).map(|shard| container.window(shard));
    let end = windows.fold(Container::windows_offset(), |end, window| {
        assert!(window.offset == end && window.length == container.shard_layout().medium_bytes());
        window.offset + window.length
    });
    assert!(end == container.windows_end() && end < container.copy_offsets()[2]);
    let last = Lba::new(container.capacity_blocks() - 1);
    let (shard, place) = container.shard_of(last);
    assert!(shard < container.shards() && place.get() < container.shard_layout().capacity_blocks());
    assert_eq!(container.block_at(shard, place), last);
}

fn check_superblock(bytes: &[u8]) {
    if let Ok(superblock) = Superblock::decode(bytes) {
        assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
        let layout = superblock.layout;
        assert!(layout.block_groups() > 0 && layout.medium_bytes() > layout.groups_offset());
        assert!(
            layout.block_group(layout.block_groups() - 1).is_some()
                && layout.block_group(layout.block_groups()).is_none()
        );
        check_segments(&layout);
        assert!(Superblock::is_trace(bytes) && Superblock::is_trace_at(bytes, layout.third_offset()));
    }
    assert!(!Superblock::is_trace_at(bytes, 0) || Superblock::is_trace(bytes));
}

/// Log sectors and map entries: any bytes are refused, or decode to a value that encodes and decodes to itself.
pub fn try_log(input: &[u8]) {
    check_entry(input);
    check_sector(input);
    if let Some(bytes) = input.first_chunk::<MAP_ENTRY_BYTES>() {
        let mut bytes = *bytes;
        forge_map_entry(&mut bytes, &UUID);
        check_entry(&bytes);
    }
    for sector_bytes in [512, 4096] {
        let mut sector = vec![0; sector_bytes];
        let length = input.len().min(sector_bytes);
        sector[..length].copy_from_slice(&input[..length]);
        forge_log_sector(&mut sector, &UUID);
        check_sector(&sector);
    }
}

fn check_entry(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<MAP_ENTRY_BYTES>() else { return };
    let seed = Seed::of(&UUID);
    if let Ok(entry) = MapEntry::decode(bytes, seed) {
        assert_eq!(entry.encode(seed), *bytes);
        assert_eq!(MapEntry::decode_unchecked(bytes), entry);
    }
    if let Ok(run) = MapEntryRun::decode(bytes, seed) {
        assert_eq!(run.encode(seed), *bytes);
        assert_eq!(MapEntry::decode(bytes, seed).ok(), (run.blocks == 1).then_some(run.first));
        assert!(run.blocks == 1 || run.blocks <= MapEntryRun::MAX_BLOCKS && run.first.kind != MapEntryKind::Stored);
        assert_eq!(run.extent().last().get() + 1, run.end());
    } else {
        assert!(MapEntry::decode(bytes, seed).is_err());
    }
    let _ = MapEntry::decode_unchecked(bytes);
}

fn check_sector(bytes: &[u8]) {
    let seed = Seed::of(&UUID);
    let Ok(sector) = LogSector::decode(bytes, seed) else { return };
    let (entries, repeats) = (sector.entries(), sector.repeats());
    assert!(entries.len() + repeats.len() <= LogSector::capacity(bytes.len() as u32));
    entries.iter().chain(repeats).for_each(|entry| check_entry(entry));
    let mut again = vec![0; bytes.len()];
    LogSector::encode(&mut again, seed, sector.header, entries.iter(), repeats);
    let read = LogSector::decode(&again, seed).expect("what was written is read");
    assert_eq!(read, LogSector::of_encoded(&again));
    assert_eq!((read.header, read.entries(), read.repeats()), (sector.header, entries, repeats));
    assert!(usize::from(read.header.earlier) <= entries.len());
}
