//! The sector with the generations of a page: for each block, the write that its map entry must belong to, or that it
//! was never written.
//!
//! It has two copies, at the head of its page and elsewhere, so that one survives any single fault. It has a checksum:
//! a block counts as never written only if a valid sector says so.

use sealblock_units::Lba;

use super::{HEAD_BYTES, Seed, get, put};

const MAGIC: [u8; 4] = *b"SGEN";
const AT_CHECKSUM: usize = 4;
const AT_FIRST: usize = 8;
const AT_SEQUENCE: usize = 16;
const AT_ZERO: usize = 24;
const HEAD: usize = HEAD_BYTES as usize;

/// One copy of the generations of a page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Generations {
    /// The page's first block.
    pub first: Lba,
    /// The sequence number of the log sector up to which the page includes the log; of two copies the higher one
    /// counts.
    pub sequence: u64,
    /// For each block of the page the generation of its map entry; 0 for a block that was never written.
    pub of_blocks: Vec<u16>,
}

impl Generations {
    /// A page of this number of blocks, none of which was ever written.
    pub fn unwritten(first: Lba, page_blocks: u64) -> Generations {
        Generations { first, sequence: 0, of_blocks: vec![0; page_blocks as usize] }
    }

    /// Encodes the generations into `sector`.
    ///
    /// # Panics
    /// When there are more generations than fit.
    pub fn encode(&self, sector: &mut [u8], seed: Seed) {
        assert!(self.of_blocks.len() * 2 <= sector.len() - HEAD, "generations must fit");
        sector.fill(0);
        sector[..MAGIC.len()].copy_from_slice(&MAGIC);
        put::<8>(sector, AT_FIRST, self.first.get());
        put::<8>(sector, AT_SEQUENCE, self.sequence);
        let places = sector[HEAD..].as_chunks_mut::<2>().0;
        places.iter_mut().zip(&self.of_blocks).for_each(|(place, generation)| *place = generation.to_le_bytes());
        let checksum = seed.checksum(&sector[AT_FIRST..]);
        put::<4>(sector, AT_CHECKSUM, u64::from(checksum));
    }

    /// Reads the generations of the page with this first block and number of blocks; `None` if they are not valid.
    pub fn decode(sector: &[u8], seed: Seed, first: Lba, page_blocks: u64) -> Option<Generations> {
        let is_whole = Generations::trace(sector) == Some(first)
            && get::<4>(sector, AT_CHECKSUM) == u64::from(seed.checksum(&sector[AT_FIRST..]));
        let pairs = sector.get(HEAD..)?.as_chunks::<2>().0.get(..page_blocks as usize)?;
        is_whole.then(|| Generations {
            first,
            sequence: get::<8>(sector, AT_SEQUENCE),
            of_blocks: pairs.iter().map(|pair| u16::from_le_bytes(*pair)).collect(),
        })
    }

    /// The first block of the page of these generations, of any volume; `None` if they cannot be generations.
    pub fn trace(sector: &[u8]) -> Option<Lba> {
        let head = sector.get(..HEAD).filter(|head| head.starts_with(&MAGIC))?;
        (get::<8>(head, AT_ZERO) == 0).then(|| Lba::new(get::<8>(head, AT_FIRST)))
    }

    /// The same, with the salt for which the checksum matches.
    pub fn trace_salt(sector: &[u8]) -> Option<(Lba, Seed)> {
        let first = Generations::trace(sector)?;
        Some((first, Seed(get::<4>(sector, AT_CHECKSUM) as u32 ^ Seed(0).checksum(&sector[AT_FIRST..]))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: Seed = Seed(77);

    #[test]
    fn generations_come_back_and_no_other_page_volume_or_bit_passes() {
        let of_blocks: Vec<u16> = (0..240).map(|index| index * 7).collect();
        let good = Generations { first: Lba::new(480), sequence: 12, of_blocks };
        let mut sector = [0xff; 512];
        good.encode(&mut sector, SEED);
        assert_eq!(Generations::decode(&sector, SEED, Lba::new(480), 240), Some(good));
        assert_eq!(Generations::decode(&sector, SEED, Lba::new(240), 240), None);
        assert_eq!(Generations::decode(&sector, Seed(78), Lba::new(480), 240), None);
        assert_eq!(Generations::trace(&sector), Some(Lba::new(480)));
        assert_eq!(Generations::trace_salt(&sector), Some((Lba::new(480), SEED)));
        for bit in 0..sector.len() * 8 {
            let mut bad = sector;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Generations::decode(&bad, SEED, Lba::new(480), 240), None, "bit {bit}");
        }
        for length in 0..sector.len() {
            assert_eq!(Generations::decode(&sector[..length], SEED, Lba::new(480), 240), None, "{length} bytes");
        }
    }

    #[test]
    fn zeroes_are_no_generations() {
        assert_eq!(Generations::decode(&[0; 512], Seed(0), Lba::ZERO, 240), None);
        assert_eq!(Generations::trace(&[0; 512]), None);
    }

    #[test]
    fn those_of_the_larger_sector_fit() {
        let good = Generations { sequence: 3, ..Generations::unwritten(Lba::new(1920), 1920) };
        let mut sector = [0; 4096];
        good.encode(&mut sector, SEED);
        assert_eq!(Generations::decode(&sector, SEED, Lba::new(1920), 1920), Some(good));
    }
}
