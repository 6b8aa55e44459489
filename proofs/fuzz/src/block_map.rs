//! Generations, the block group map, reserved areas and the high-water mark of a volume.

use sealblock_block::ReservedArea;
use sealblock_media_volume::format::{Generations, GroupMapSector, HighWaterMark, ReservedCopy, Seed};
use sealblock_units::Lba;

use crate::{Pieces, forge_reserved_area, forge_sector};

const UUID: [u8; 16] = [9; 16];
/// Bytes before the content of a metadata sector.
const HEAD: usize = 32;

/// Generations, block group maps, reserved areas and high-water marks: any bytes are refused, or decode to a value that
/// encodes and decodes to itself.
pub fn try_block_map(input: &[u8]) {
    let mut pieces = Pieces::new(input);
    let (kind, place, more) = (pieces.byte(), pieces.word(), pieces.byte());
    let sector_bytes = if kind & 64 == 0 { 512 } else { 4096 };
    let rest = pieces.rest();
    check(kind, rest, place, more);
    match kind % 4 {
        0 => {
            // At least one block, and at most as many as fit.
            let blocks = (u64::from(more) * 8 + 1).min((sector_bytes - HEAD) as u64 / 2);
            let mut page = Generations::unwritten(Lba::new(place), blocks);
            (page.sequence, page.of_blocks[0]) = (place, 7);
            let mut sector = vec![0xff; sector_bytes];
            page.encode(&mut sector, Seed::of(&UUID));
            assert_eq!(Generations::decode(&sector, Seed::of(&UUID), page.first, blocks), Some(page));
            changed_sector(kind, sector, rest, place, more);
        }
        1 => {
            let bits = vec![more; sector_bytes - HEAD];
            let map = GroupMapSector { index: place, write_seq: place, bits, is_resized: kind & 128 != 0 };
            let mut sector = vec![0xff; sector_bytes];
            map.encode(&mut sector, Seed::of(&UUID));
            assert_eq!(GroupMapSector::decode(&sector, Seed::of(&UUID), place), Some(map));
            changed_sector(kind, sector, rest, place, more);
        }
        2 => changed_reserved_area(kind, rest, place, more),
        _ => {
            let mark = HighWaterMark {
                superblocks: place >> 1,
                log_end: place >> 2,
                labels: more.into(),
                scrub_states: u64::from(more) << 8,
            };
            let record = mark.encode(Seed::of(&UUID));
            assert_eq!(HighWaterMark::decode(&record, Seed::of(&UUID)), Some(mark));
            changed_sector(kind, record.to_vec(), rest, place, more);
        }
    }
}

/// A valid sector with the first bytes changed, and its checksum updated.
fn changed_sector(kind: u8, mut sector: Vec<u8>, rest: &[u8], place: u64, more: u8) {
    let mut pieces = Pieces::new(rest);
    while !pieces.is_empty() {
        let at = usize::from(pieces.short()) % sector.len();
        sector[at] = pieces.byte();
    }
    forge_sector(&mut sector, &UUID);
    check(kind, &sector, place, more);
}

/// A valid copy of an area with a part of its head changed, and its checksum updated.
fn changed_reserved_area(kind: u8, rest: &[u8], place: u64, more: u8) {
    let area = ReservedArea::ALL[usize::from(more) % ReservedArea::ALL.len()];
    let held = rest[..rest.len().min(area.max_bytes())].to_vec();
    let copy = ReservedCopy { write_seq: place, bytes: held };
    let mut bytes = copy.encode(area, Seed::of(&UUID));
    assert!(ReservedCopy::is_trace(&bytes, area, place % 2) && !ReservedCopy::is_trace(&bytes, area, 1 - place % 2));
    assert_eq!(ReservedCopy::decode(&bytes, area, Seed::of(&UUID)), Some(copy));
    for change in rest.chunks_exact(2).take(4) {
        bytes[usize::from(change[0]) % 64] = change[1];
    }
    forge_reserved_area(&mut bytes, &UUID);
    check(kind, &bytes, place, more);
}

fn check(kind: u8, bytes: &[u8], place: u64, more: u8) {
    match kind % 4 {
        0 => check_generations(bytes, place, u64::from(more) * 8),
        1 => check_group_map(bytes, place),
        2 => ReservedArea::ALL.iter().for_each(|&area| check_reserved_area(bytes, area)),
        _ => check_high_water_mark(bytes),
    }
}

/// Decoded at its own place, and at another.
fn check_generations(bytes: &[u8], place: u64, blocks: u64) {
    let seed = Seed::of(&UUID);
    for first in Generations::trace(bytes).into_iter().chain([Lba::new(place)]) {
        let Some(page) = Generations::decode(bytes, seed, first, blocks) else { continue };
        assert_eq!((page.first, page.of_blocks.len() as u64), (first, blocks));
        assert_eq!(Generations::trace(bytes), Some(first));
        let mut again = vec![0xff; bytes.len()];
        page.encode(&mut again, seed);
        assert_eq!(Generations::decode(&again, seed, first, blocks), Some(page));
        let elsewhere = Lba::new(first.get() ^ 1);
        assert_eq!(Generations::decode(bytes, seed, elsewhere, blocks), None, "no page but its own");
    }
}

fn check_group_map(bytes: &[u8], index: u64) {
    let seed = Seed::of(&UUID);
    for index in [index, 0] {
        let Some(map) = GroupMapSector::decode(bytes, seed, index) else { continue };
        assert_eq!((map.index, map.bits.len() + HEAD), (index, bytes.len()));
        assert_eq!(GroupMapSector::trace(bytes), index == 0);
        let mut again = vec![0xff; bytes.len()];
        map.encode(&mut again, seed);
        assert_eq!(GroupMapSector::decode(&again, seed, index), Some(map));
    }
}

fn check_high_water_mark(bytes: &[u8]) {
    let seed = Seed::of(&UUID);
    let Some(mark) = HighWaterMark::decode(bytes, seed) else { return };
    assert_eq!(mark.and(&HighWaterMark::default()), mark);
    assert_eq!(mark.encode(seed)[..], bytes[..mark.encode(seed).len()], "no byte without a meaning");
}

fn check_reserved_area(bytes: &[u8], area: ReservedArea) {
    let seed = Seed::of(&UUID);
    let Some(copy) = ReservedCopy::decode(bytes, area, seed) else { return };
    assert!(copy.bytes.len() <= area.max_bytes());
    let again = copy.encode(area, seed);
    assert_eq!(ReservedCopy::decode(&again, area, seed), Some(copy.clone()));
    for other in ReservedArea::ALL.iter().filter(|other| other.index() != area.index()) {
        assert_eq!(ReservedCopy::decode(bytes, *other, seed), None, "of one area only");
    }
}
