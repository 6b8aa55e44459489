//! Superblocks: any bytes are refused or mean what writing them again would mean.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sealblock_fuzz::{Pieces, forge_superblock, format};
use sealblock_media_volume::format::{Layout, SUPERBLOCK_BYTES, Superblock};
use sealblock_units::{BlockSize, Lba};

fuzz_target!(|input: &[u8]| {
    check(input);
    // A good superblock with some bytes changed, its checksum right.
    let mut pieces = Pieces::new(input);
    let size = if pieces.byte() & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 };
    let sector_bytes = if pieces.byte() & 1 == 0 { 512 } else { 4096 };
    let Ok(mut layout) = Layout::new(size, sector_bytes, pieces.word() >> (pieces.byte() % 64)) else { return };
    for _ in 0..pieces.byte() % 20 {
        // Resized a few times; what was laid out stays.
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
        is_clean: true,
        uncorrectable,
        keeps_space: false,
        log_tail: 5,
        initialized_groups,
    };
    let mut bytes = superblock.encode();
    assert_eq!(Superblock::decode(&bytes), Ok(superblock));
    while !pieces.is_empty() {
        bytes[usize::from(pieces.short()) % SUPERBLOCK_BYTES] = pieces.byte();
    }
    forge_superblock(&mut bytes);
    check(&bytes);
});

/// Segments follow one another, and the last one has the last block.
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

fn check(bytes: &[u8]) {
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
