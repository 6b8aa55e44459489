//! The sectors of the group map: a bit for each block group, set when the block group is initialized.
//!
//! Only this map shows which block groups were never written; zeroes prove nothing. Each sector has two separate copies
//! with checksums. Bits are only ever set, so of two copies the one with the higher write sequence number has every bit
//! of the other.

use super::{HEAD_BYTES, MAX_COUNT, Seed, get, put};

const MAGIC: [u8; 4] = *b"SZMP";
const AT_CHECKSUM: usize = 4;
const AT_INDEX: usize = 8;
const AT_WRITE_SEQ: usize = 16;
const AT_RESIZED: usize = 24;
const HEAD: usize = HEAD_BYTES as usize;

/// One copy of a sector of the group map.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupMapSector {
    /// The index of the sector in the map.
    pub index: u64,
    /// Counts the writes of the sector; the higher of two valid copies counts.
    pub write_seq: u64,
    /// A bit for each block group of the sector, in order, the lowest bit of the first byte first.
    pub bits: Vec<u8>,
    /// True if the layout differs from that of a new volume of this size: then without a superblock the positions of
    /// its block groups are unknown.
    pub is_resized: bool,
}

impl GroupMapSector {
    /// Fills `sector`, which has room for the head and the bits.
    pub fn encode(&self, sector: &mut [u8], seed: Seed) {
        sector.fill(0);
        sector[..MAGIC.len()].copy_from_slice(&MAGIC);
        put::<8>(sector, AT_INDEX, self.index);
        put::<8>(sector, AT_WRITE_SEQ, self.write_seq);
        put::<8>(sector, AT_RESIZED, u64::from(self.is_resized));
        sector[HEAD..HEAD + self.bits.len()].copy_from_slice(&self.bits);
        let checksum = seed.checksum(&sector[AT_INDEX..]);
        put::<4>(sector, AT_CHECKSUM, u64::from(checksum));
    }

    /// Whether a bit is set.
    pub fn has(&self, bit: usize) -> bool {
        self.bits[bit / 8] >> (bit % 8) & 1 == 1
    }

    /// Sets a bit.
    pub fn set(&mut self, bit: usize) {
        self.bits[bit / 8] |= 1 << (bit % 8);
    }

    /// The union of both sectors. Copies with the same write sequence number are equal, unless one is forged; a block
    /// group that one of them lacks would be initialized again, over its map pages.
    pub fn united_with(mut self, other: &GroupMapSector) -> GroupMapSector {
        self.bits.iter_mut().zip(&other.bits).for_each(|(bits, more)| *bits |= more);
        self.is_resized |= other.is_resized;
        self
    }

    /// The block groups of `older`, by index in the sector, that this one lacks.
    pub fn groups_missing_of<'a>(&'a self, older: &'a GroupMapSector) -> impl Iterator<Item = u64> + 'a {
        let is_denied = |bit: &usize| older.has(*bit) && !self.has(*bit);
        (0..self.bits.len() * 8).filter(is_denied).map(|bit| bit as u64)
    }

    /// True if `bytes` begin with the head of the first sector of a map, of any volume.
    pub fn trace(bytes: &[u8]) -> bool {
        let head = bytes.get(..HEAD);
        head.is_some_and(|head| {
            head.starts_with(&MAGIC) && get::<8>(head, AT_INDEX) == 0 && get::<8>(head, AT_RESIZED) <= 1
        })
    }

    /// The salt for which the checksum of the sector with this index matches; `None` if it cannot be one.
    pub fn trace_salt(sector: &[u8], index: u64) -> Option<Seed> {
        let head = sector.get(..HEAD).filter(|head| head.starts_with(&MAGIC))?;
        let fits = get::<8>(head, AT_INDEX) == index && get::<8>(head, AT_RESIZED) <= 1;
        fits.then(|| Seed(get::<4>(head, AT_CHECKSUM) as u32 ^ Seed(0).checksum(&sector[AT_INDEX..])))
    }

    /// Reads the sector with this index; `None` if it is not valid.
    pub fn decode(sector: &[u8], seed: Seed, index: u64) -> Option<GroupMapSector> {
        let bits = sector.get(HEAD..)?.to_vec();
        let is_whole = get::<4>(sector, AT_CHECKSUM) == u64::from(seed.checksum(&sector[AT_INDEX..]));
        let (write_seq, resized) = (get::<8>(sector, AT_WRITE_SEQ), get::<8>(sector, AT_RESIZED));
        let fits =
            sector.starts_with(&MAGIC) && get::<8>(sector, AT_INDEX) == index && write_seq <= MAX_COUNT && resized <= 1;
        (is_whole && fits).then_some(GroupMapSector { index, write_seq, bits, is_resized: resized == 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_comes_back_and_no_other_place_volume_or_bit_passes() {
        let seed = Seed(5);
        let good = GroupMapSector { index: 3, write_seq: 9, bits: vec![0xa5; 480], is_resized: true };
        let mut sector = [0; 512];
        good.encode(&mut sector, seed);
        assert_eq!(GroupMapSector::decode(&sector, seed, 3), Some(good));
        assert_eq!(GroupMapSector::decode(&sector, seed, 2), None);
        assert_eq!(GroupMapSector::decode(&sector, Seed(6), 3), None);
        assert_eq!([2, 3].map(|index| GroupMapSector::trace_salt(&sector, index)), [None, Some(seed)]);
        for bit in 0..sector.len() * 8 {
            let mut bad = sector;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(GroupMapSector::decode(&bad, seed, 3), None, "bit {bit}");
        }
        for length in 0..sector.len() {
            assert_eq!(GroupMapSector::decode(&sector[..length], seed, 3), None, "{length} bytes");
        }
        assert_eq!(GroupMapSector::decode(&[0; 512], Seed(0), 0), None);
        for (write_seq, is_sector) in [(MAX_COUNT, true), (MAX_COUNT + 1, false)] {
            GroupMapSector { index: 3, write_seq, bits: vec![0; 480], is_resized: false }.encode(&mut sector, seed);
            assert_eq!(GroupMapSector::decode(&sector, seed, 3).is_some(), is_sector, "{write_seq}");
        }
    }
}
