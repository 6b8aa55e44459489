//! Superblocks: any bytes are refused or mean what writing them again would mean.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sealblock_fuzz::{Pieces, forge_superblock, format};
use sealblock_media_volume::format::{Layout, SUPERBLOCK_BYTES, Superblock};
use sealblock_units::BlockSize;

fuzz_target!(|input: &[u8]| {
    check(input);
    // A good superblock with some bytes changed, its checksum right.
    let mut pieces = Pieces::new(input);
    let size = if pieces.byte() & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 };
    let sector_bytes = if pieces.byte() & 1 == 0 { 512 } else { 4096 };
    let Ok(layout) = Layout::new(size, sector_bytes, pieces.word() >> (pieces.byte() % 64)) else { return };
    let protection = format(&mut pieces);
    let (serial, uncorrectable) = (pieces.word(), pieces.byte() & 1 == 1);
    let superblock = Superblock { uuid: [3; 16], serial, layout, protection, clean: true, uncorrectable, log_tail: 5 };
    let mut bytes = superblock.encode();
    assert_eq!(Superblock::decode(&bytes), Ok(superblock));
    while !pieces.is_empty() {
        bytes[usize::from(pieces.short()) % SUPERBLOCK_BYTES] = pieces.byte();
    }
    forge_superblock(&mut bytes);
    check(&bytes);
});

fn check(bytes: &[u8]) {
    if let Ok(superblock) = Superblock::decode(bytes) {
        assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
        let layout = superblock.layout;
        assert!(layout.zones() > 0 && layout.medium_bytes() > layout.zones_offset());
        assert!(layout.zone(layout.zones() - 1).is_some() && layout.zone(layout.zones()).is_none());
        let _ = layout.zone_spare();
        assert!(Superblock::is_trace(bytes) && Superblock::is_trace_at(bytes, layout.third_offset()));
    }
    assert!(!Superblock::is_trace_at(bytes, 0) || Superblock::is_trace(bytes));
}
