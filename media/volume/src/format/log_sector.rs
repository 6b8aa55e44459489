//! One sector of the log: a header and as many records as fit.
//!
//! Every sector stands by itself, because a crash may keep any of the sectors written since the last flush and lose any
//! other. A sector's two places in the log follow from its sequence number. A sector that was written to one of them only is
//! repeated by the next one, behind that one's own records.

use super::{RECORD_BYTES, Seed, get, put};

const MAGIC: u64 = u32::from_le_bytes(*b"SLOG") as u64;
const HEADER_BYTES: usize = 32;
const AT_CHECKSUM: usize = 4;
const AT_SEQUENCE: usize = 8;
const AT_DURABLE: usize = 16;
const AT_COUNT: usize = 24;
const AT_REPEATS: usize = 26;
const AT_ZERO: usize = 28;

/// The header of a log sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogHeader {
    /// Counts sectors from the volume's creation on.
    pub sequence: u64,
    /// Every sector with a lower sequence number was durable, its data too, when this one was written. At most one more than
    /// `sequence`: the second copy, written later, may count the sector itself.
    pub durable: u64,
}

/// A log sector that was read and checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogSector<'a> {
    /// Its header.
    pub header: LogHeader,
    records: &'a [u8],
    repeats: &'a [u8],
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

    /// Fills `sector` with a header, `records`, and behind them all records of the sector before if there are `repeats`. They
    /// must fit.
    ///
    /// # Panics
    /// When there are more records than [`LogSector::capacity`].
    pub fn encode<'r>(
        sector: &mut [u8],
        seed: Seed,
        header: LogHeader,
        records: impl ExactSizeIterator<Item = &'r [u8; RECORD_BYTES]>,
        repeats: &'r [[u8; RECORD_BYTES]],
    ) {
        let count = records.len() + repeats.len();
        assert!(count <= LogSector::capacity(sector.len() as u32), "records must fit");
        sector.fill(0);
        put::<4>(sector, 0, MAGIC);
        put::<8>(sector, AT_SEQUENCE, header.sequence);
        put::<2>(sector, AT_COUNT, count as u64);
        put::<2>(sector, AT_REPEATS, repeats.len() as u64);
        let body = sector[HEADER_BYTES..].chunks_exact_mut(RECORD_BYTES);
        body.zip(records.chain(repeats)).for_each(|(place, record)| place.copy_from_slice(record));
        LogSector::set_durable(sector, seed, header.durable);
    }

    /// Gives an encoded sector another durable mark.
    ///
    /// # Panics
    /// When `sector` is shorter than a header.
    pub fn set_durable(sector: &mut [u8], seed: Seed, durable: u64) {
        put::<8>(sector, AT_DURABLE, durable);
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
        let (count, repeats) = (get::<2>(sector, AT_COUNT) as usize, get::<2>(sector, AT_REPEATS) as usize);
        let records =
            sector.get(HEADER_BYTES..HEADER_BYTES + count * RECORD_BYTES).ok_or(LogSectorError::Impossible)?;
        let own = count.checked_sub(repeats).ok_or(LogSectorError::Impossible)?;
        // The second copy of a sector may say that the sector itself is durable.
        if header.sequence > u64::MAX / 2 || header.durable > header.sequence + 1 {
            return Err(LogSectorError::Impossible);
        }
        let (records, repeats) = records.split_at(own * RECORD_BYTES);
        Ok(LogSector { header, records, repeats })
    }

    /// The own records of a sector that was encoded here.
    ///
    /// # Panics
    /// When `sector` was not.
    pub fn own_records(sector: &[u8]) -> &[[u8; RECORD_BYTES]] {
        let own = get::<2>(sector, AT_COUNT) - get::<2>(sector, AT_REPEATS);
        &sector[HEADER_BYTES..].as_chunks::<RECORD_BYTES>().0[..own as usize]
    }

    /// The sequence number of a log sector of whatever volume, whose salt is not known: the checksum is not looked at, but
    /// every field has to be possible.
    pub fn trace(sector: &[u8]) -> Option<u64> {
        let header = sector.get(..HEADER_BYTES).filter(|header| get::<4>(header, 0) == MAGIC)?;
        let (sequence, durable) = (get::<8>(header, AT_SEQUENCE), get::<8>(header, AT_DURABLE));
        let (count, repeats) = (get::<2>(header, AT_COUNT) as usize, get::<2>(header, AT_REPEATS) as usize);
        let is_possible = sequence <= u64::MAX / 2
            && durable <= sequence + 1
            && repeats <= count
            && count <= LogSector::capacity(sector.len() as u32)
            && header[AT_ZERO..].iter().all(|&byte| byte == 0);
        is_possible.then_some(sequence)
    }

    /// The sequence number of a log sector and the salt with which its checksum is right, where it can be one at all.
    pub fn trace_salt(sector: &[u8]) -> Option<(u64, Seed)> {
        let sequence = LogSector::trace(sector)?;
        let plain = Seed(0).checksum(&sector[AT_SEQUENCE..]);
        Some((sequence, Seed(get::<4>(sector, AT_CHECKSUM) as u32 ^ plain)))
    }

    /// The sector's own records, unchecked.
    pub fn records(&self) -> &'a [[u8; RECORD_BYTES]] {
        self.records.as_chunks::<RECORD_BYTES>().0
    }

    /// The records of the sector before, unchecked: all of its own, or none where that one was not written once only.
    pub fn repeats(&self) -> &'a [[u8; RECORD_BYTES]] {
        self.repeats.as_chunks::<RECORD_BYTES>().0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: Seed = Seed(3);
    const HEADER: LogHeader = LogHeader { sequence: 9, durable: 7 };

    #[test]
    fn a_sector_comes_back() {
        let (records, repeats) = ([[5; RECORD_BYTES]; 8], [[6; RECORD_BYTES]; 7]);
        let mut sector = [0xff; 512];
        LogSector::encode(&mut sector, SEED, HEADER, records.iter(), &repeats);
        let read = LogSector::decode(&sector, SEED).unwrap();
        assert_eq!((read.header, read.records(), read.repeats()), (HEADER, &records[..], &repeats[..]));
        LogSector::set_durable(&mut sector, SEED, 10);
        let again = LogSector::decode(&sector, SEED).unwrap();
        assert_eq!((again.header.durable, again.records(), again.repeats()), (10, &records[..], &repeats[..]));
        assert_eq!(LogSector::trace(&sector), Some(9));
        assert_eq!(LogSector::trace_salt(&sector), Some((9, SEED)));
        for at in [0, 17, 24, 26, 28] {
            let mut other = sector;
            other[at] = 0xff;
            assert_eq!(LogSector::trace(&other), None, "byte {at}");
        }
    }

    #[test]
    fn torn_foreign_and_blank_sectors_do_not_count() {
        let mut sector = [0; 512];
        assert_eq!(LogSector::decode(&sector, SEED), Err(LogSectorError::Invalid));
        LogSector::encode(&mut sector, SEED, HEADER, [[5; RECORD_BYTES]].iter(), &[]);
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
        LogSector::encode(&mut sector, SEED, LogHeader { sequence: 1, durable: 3 }, [].iter(), &[]);
        assert_eq!(LogSector::decode(&sector, SEED), Err(LogSectorError::Impossible));
        for (at, value) in [(AT_COUNT, 16), (AT_REPEATS, 1)] {
            LogSector::encode(&mut sector, SEED, HEADER, [].iter(), &[]);
            put::<2>(&mut sector, at, value);
            LogSector::set_durable(&mut sector, SEED, HEADER.durable);
            assert_eq!(LogSector::decode(&sector, SEED), Err(LogSectorError::Impossible));
        }
    }
}
