//! Divides a run of logical addresses into strips: for each copy, contiguous ranges of one device.
//!
//! In a striped chunk, consecutive pieces of 64 KiB on a device are far apart in logical addresses. A strip joins them,
//! so that one request to the device covers them.

use smallvec::SmallVec;

use crate::chunk_map::{ChunkMap, MapError, Place};

/// A strip that a device finds not as it should be is halved down to this size, which is then read.
pub(super) const DIRECT_BYTES: u64 = 64 << 10;
/// The number of strips that may still grow while a run is divided: one for each device of a chunk.
const OPEN_STRIPS: usize = 64;

/// A contiguous range of one device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Strip {
    /// The copy, counted from 0.
    pub mirror: usize,
    /// Its place.
    pub place: Place,
    /// The number of bytes.
    pub bytes: u64,
    /// The logical addresses and bytes of its parts, in the order of the device.
    parts: SmallVec<[(u64, u64); 2]>,
}

impl Strip {
    /// Its sectors from one byte offset to another, both at sector boundaries: the offset of each in the strip, and its
    /// logical address.
    pub fn sectors(&self, from: u64, to: u64, sector: u64) -> impl Iterator<Item = (u64, u64)> + use<'_> {
        let mut at = 0;
        let parts = self.parts.iter().map(move |(logical, bytes)| {
            let start = at;
            at += bytes;
            (start, *logical, *bytes)
        });
        parts.flat_map(move |(start, logical, bytes)| {
            let (first, last) = (from.clamp(start, start + bytes), to.clamp(start, start + bytes));
            (first..last).step_by(sector as usize).map(move |at| (at, logical + (at - start)))
        })
    }

    /// The place of a byte of it.
    pub fn place_of(&self, at: u64) -> Place {
        Place { offset: self.place.offset + at, ..self.place }
    }
}

/// The strips of a run, none longer than `most` bytes, and the parts outside all chunks, each with its first address,
/// its bytes and the reason.
pub(super) fn strips(map: &ChunkMap, logical: u64, bytes: u64, most: u64) -> (Vec<Strip>, Vec<(u64, u64, MapError)>) {
    let (mut strips, mut unmapped) = (Vec::<Strip>::new(), Vec::new());
    let (mut at, mut left) = (logical, bytes);
    while left > 0 {
        let length = match map.locate(at, left.min(most)) {
            Ok(located) => {
                for (mirror, place) in located.copies.iter().enumerate() {
                    add(&mut strips, mirror, *place, at, located.bytes, most);
                }
                located.bytes
            }
            Err(why) => {
                let length = map.next_chunk(at).map_or(left, |next| left.min(next - at));
                unmapped.push((at, length, why));
                length
            }
        };
        (at, left) = (at.saturating_add(length), left - length);
    }
    (strips, unmapped)
}

fn add(strips: &mut Vec<Strip>, mirror: usize, place: Place, logical: u64, bytes: u64, most: u64) {
    let continued = strips.iter_mut().rev().take(OPEN_STRIPS).find(|strip| {
        let end = Place { offset: strip.place.offset + strip.bytes, ..strip.place };
        (strip.mirror, end) == (mirror, place) && strip.bytes + bytes <= most
    });
    let Some(strip) = continued else {
        strips.push(Strip { mirror, place, bytes, parts: SmallVec::from_iter([(logical, bytes)]) });
        return;
    };
    strip.bytes += bytes;
    match strip.parts.last_mut().filter(|(start, length)| start + length == logical) {
        Some((_, length)) => *length += bytes,
        None => strip.parts.push((logical, bytes)),
    }
}

#[cfg(test)]
mod tests {
    use sealblock_btrfs_format::items::chunk::Chunk;

    use super::*;

    const KIB: u64 = 1024;

    /// A chunk of 64 MiB of data at the logical address 1 MiB, with stripes at 1 MiB on this number of devices.
    fn map(flags: u64, stripes: u16, sub_stripes: u16) -> ChunkMap {
        let mut bytes = vec![0; 48];
        bytes[..8].copy_from_slice(&(64_u64 << 20).to_le_bytes());
        bytes[24..32].copy_from_slice(&(1 | flags).to_le_bytes());
        bytes[44..46].copy_from_slice(&stripes.to_le_bytes());
        bytes[46..48].copy_from_slice(&sub_stripes.to_le_bytes());
        for devid in 1..=u64::from(stripes) {
            bytes.extend([devid.to_le_bytes(), (1_u64 << 20).to_le_bytes(), [0; 8], [0; 8]].concat());
        }
        let mut map = ChunkMap::default();
        map.add(1 << 20, &Chunk::decode(&bytes).unwrap()).unwrap();
        map
    }

    #[test]
    fn copies_are_one_strip_each_up_to_the_limit() {
        let (strips, unmapped) = strips(&map(1 << 4, 2, 1), 1 << 20, 3 << 20, 2 << 20);
        assert!(unmapped.is_empty());
        let shown: Vec<_> =
            strips.iter().map(|one| (one.mirror, one.place.devid, one.place.offset >> 20, one.bytes >> 20)).collect();
        assert_eq!(shown, [(0, 1, 1, 2), (1, 2, 1, 2), (0, 1, 3, 1), (1, 2, 3, 1)]);
    }

    #[test]
    fn striped_pieces_that_lie_behind_each_other_are_together() {
        let map = map(1 << 3, 3, 1);
        let (strips, _) = strips(&map, (1 << 20) + 32 * KIB, 6 * 64 * KIB, 1 << 20);
        assert_eq!(strips.len(), 3);
        assert_eq!(strips.iter().map(|strip| strip.bytes).sum::<u64>(), 6 * 64 * KIB);
        for strip in &strips {
            for (at, logical) in strip.sectors(0, strip.bytes, 4096) {
                assert_eq!(map.locate(logical, 4096).unwrap().copies[0], strip.place_of(at));
            }
        }
        let first = &strips[0];
        assert_eq!((first.place.devid, first.bytes), (1, (32 + 64 + 32) * KIB));
        let part: Vec<_> = first.sectors(28 * KIB, 36 * KIB, 4 * KIB).collect();
        assert_eq!(part, [(28 * KIB, (1 << 20) + 60 * KIB), (32 * KIB, (1 << 20) + 192 * KIB)]);
    }

    #[test]
    fn ranges_outside_all_chunks_are_named_and_the_rest_is_kept() {
        let (strips, unmapped) = strips(&map(0, 1, 1), (1 << 20) - 8 * KIB, (64 << 20) + 12 * KIB, 1 << 30);
        assert_eq!(
            strips.iter().map(|strip| (strip.place.offset, strip.bytes)).collect::<Vec<_>>(),
            [(1 << 20, 64 << 20)]
        );
        let holes: Vec<_> = unmapped.iter().map(|(logical, bytes, _)| (*logical, *bytes)).collect();
        assert_eq!(holes, [((1 << 20) - 8 * KIB, 8 * KIB), (65 << 20, 4 * KIB)]);
    }
}
