//! One sector of the log: a header and as many records as fit.
//!
//! Every sector stands by itself, because a crash may keep any of the sectors written since the last flush and lose any
//! other. A sector's place in the log follows from its sequence number.

use super::{RECORD_BYTES, Seed, get, put};

const MAGIC: u64 = u32::from_le_bytes(*b"SLOG") as u64;
const HEADER_BYTES: usize = 32;
const AT_CHECKSUM: usize = 4;
const AT_SEQUENCE: usize = 8;
const AT_DURABLE: usize = 16;
const AT_COUNT: usize = 24;

/// The header of a log sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogHeader {
    /// Counts sectors from the volume's creation on.
    pub sequence: u64,
    /// Every sector with a lower sequence number was durable, its data too, when this one was written.
    pub durable: u64,
}

/// A log sector that was read and checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogSector<'a> {
    /// Its header.
    pub header: LogHeader,
    records: &'a [u8],
}

/// Why a sector of the log does not count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LogSectorError {
    /// Never written, or not written whole, or of another volume.
    #[error("no log sector")]
    Invalid,
    /// Valid, and impossible: it says more records than fit or a durable mark past itself.
    #[error("the log sector's header cannot be")]
    Impossible,
}

impl<'a> LogSector<'a> {
    /// Records that fit in a sector of this size.
    pub const fn capacity(sector_bytes: u32) -> usize {
        (sector_bytes as usize - HEADER_BYTES) / RECORD_BYTES
    }

    /// Fills `sector` with a header and `records`, which must fit.
    ///
    /// # Panics
    /// When there are more records than [`LogSector::capacity`].
    pub fn encode<'r>(
        sector: &mut [u8],
        seed: Seed,
        header: LogHeader,
        records: impl ExactSizeIterator<Item = &'r [u8; RECORD_BYTES]>,
    ) {
        assert!(records.len() <= LogSector::capacity(sector.len() as u32), "records must fit");
        sector.fill(0);
        put::<4>(sector, 0, MAGIC);
        put::<8>(sector, AT_SEQUENCE, header.sequence);
        put::<8>(sector, AT_DURABLE, header.durable);
        put::<2>(sector, AT_COUNT, records.len() as u64);
        let body = sector[HEADER_BYTES..].chunks_exact_mut(RECORD_BYTES);
        body.zip(records).for_each(|(place, record)| place.copy_from_slice(record));
        let checksum = seed.checksum(&sector[AT_SEQUENCE..]);
        put::<4>(sector, AT_CHECKSUM, u64::from(checksum));
    }

    /// Reads a sector, checking it. The records have their own checks.
    pub fn decode(sector: &'a [u8], seed: Seed) -> Result<LogSector<'a>, LogSectorError> {
        if sector.len() < HEADER_BYTES || get::<4>(sector, 0) != MAGIC {
            return Err(LogSectorError::Invalid);
        }
        if get::<4>(sector, AT_CHECKSUM) != u64::from(seed.checksum(&sector[AT_SEQUENCE..])) {
            return Err(LogSectorError::Invalid);
        }
        let header = LogHeader { sequence: get::<8>(sector, AT_SEQUENCE), durable: get::<8>(sector, AT_DURABLE) };
        let end = HEADER_BYTES + get::<2>(sector, AT_COUNT) as usize * RECORD_BYTES;
        let records = sector.get(HEADER_BYTES..end).ok_or(LogSectorError::Impossible)?;
        if header.durable > header.sequence || header.sequence > u64::MAX / 2 {
            return Err(LogSectorError::Impossible);
        }
        Ok(LogSector { header, records })
    }

    /// The sequence number of a log sector of whatever volume, whose salt is not known: the checksum is not looked at, but
    /// every field has to be possible.
    pub fn trace(sector: &[u8]) -> Option<u64> {
        let header = sector.get(..HEADER_BYTES).filter(|header| get::<4>(header, 0) == MAGIC)?;
        let (sequence, durable) = (get::<8>(header, AT_SEQUENCE), get::<8>(header, AT_DURABLE));
        let count = get::<2>(header, AT_COUNT) as usize;
        let is_possible = durable <= sequence
            && sequence <= u64::MAX / 2
            && count <= LogSector::capacity(sector.len() as u32)
            && header[AT_COUNT + 2..].iter().all(|&byte| byte == 0);
        is_possible.then_some(sequence)
    }

    /// The records, unchecked.
    pub fn records(&self) -> impl Iterator<Item = &'a [u8; RECORD_BYTES]> + use<'a> {
        self.records.as_chunks::<RECORD_BYTES>().0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: Seed = Seed(3);
    const HEADER: LogHeader = LogHeader { sequence: 9, durable: 7 };

    #[test]
    fn a_sector_comes_back() {
        let records = [[5; RECORD_BYTES]; 15];
        let mut sector = [0xff; 512];
        LogSector::encode(&mut sector, SEED, HEADER, records.iter());
        let read = LogSector::decode(&sector, SEED).unwrap();
        assert_eq!(read.header, HEADER);
        assert!(read.records().eq(&records));
        assert_eq!(LogSector::trace(&sector), Some(9));
        for at in [0, 16, 24, 26] {
            let mut other = sector;
            other[at] = 0xff;
            assert_eq!(LogSector::trace(&other), None, "byte {at}");
        }
    }

    #[test]
    fn torn_foreign_and_blank_sectors_do_not_count() {
        let mut sector = [0; 512];
        assert_eq!(LogSector::decode(&sector, SEED), Err(LogSectorError::Invalid));
        LogSector::encode(&mut sector, SEED, HEADER, [[5; RECORD_BYTES]].iter());
        assert_eq!(LogSector::decode(&sector, Seed(4)), Err(LogSectorError::Invalid));
        for bit in 0..512 * 8 {
            let mut bad = sector;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(LogSector::decode(&bad, SEED).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn impossible_headers_are_refused() {
        let mut sector = [0; 512];
        LogSector::encode(&mut sector, SEED, LogHeader { sequence: 1, durable: 2 }, [].iter());
        assert_eq!(LogSector::decode(&sector, SEED), Err(LogSectorError::Impossible));
        LogSector::encode(&mut sector, SEED, HEADER, [].iter());
        put::<2>(&mut sector, AT_COUNT, 16);
        let checksum = SEED.checksum(&sector[AT_SEQUENCE..]);
        put::<4>(&mut sector, AT_CHECKSUM, u64::from(checksum));
        assert_eq!(LogSector::decode(&sector, SEED), Err(LogSectorError::Impossible));
    }
}
