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
        let kept = layout.zones().min(next.zones());
        assert_eq!(layout.zone(kept - 1), next.zone(kept - 1));
        layout = next;
    }
    let protection = format(&mut pieces);
    let (serial, uncorrectable) = (pieces.word(), pieces.byte() & 1 == 1);
    let zones_made = serial % (layout.zones() + 1);
    let superblock = Superblock {
        uuid: [3; 16],
        serial,
        layout,
        protection,
        clean: true,
        uncorrectable,
        keeps_space: false,
        log_tail: 5,
        zones_made,
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
    let (mut first, mut first_zone, mut offset) = (0, 0, layout.zones_offset());
    for segment in layout.segments() {
        assert_eq!((segment.first, segment.first_zone, segment.offset), (first, first_zone, offset));
        assert!(segment.blocks > 0 && segment.zone_blocks > 0);
        first += segment.blocks;
        first_zone += segment.zones();
        offset = layout.zone(first_zone - 1).expect("a segment has zones").end_offset;
    }
    assert_eq!((first_zone, layout.tail_offset()), (layout.zones(), offset));
    let last = Lba::new(layout.capacity_blocks() - 1);
    assert!(layout.capacity_blocks() <= first && layout.zone_of(last) == layout.zones() - 1);
    assert!(layout.zones() <= layout.zones_max());
    let place = layout.page_place(layout.page_of(last).0).expect("the last block has a page");
    assert!(place.first <= last && last.get() < place.first.get() + place.blocks);
}

fn check(bytes: &[u8]) {
    if let Ok(superblock) = Superblock::decode(bytes) {
        assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
        let layout = superblock.layout;
        assert!(layout.zones() > 0 && layout.medium_bytes() > layout.zones_offset());
        assert!(layout.zone(layout.zones() - 1).is_some() && layout.zone(layout.zones()).is_none());
        check_segments(&layout);
        assert!(Superblock::is_trace(bytes) && Superblock::is_trace_at(bytes, layout.third_offset()));
    }
    assert!(!Superblock::is_trace_at(bytes, 0) || Superblock::is_trace(bytes));
}
