//! One sector of the log: a header and as many map entries as fit.
//!
//! Every sector is self-contained, because a crash may keep any of the sectors written since the last flush and lose
//! any other. A sector's two places in the log follow from its sequence number. A small commit joins the sector of the
//! previous commit if that has room: the sector is written again, to its other place, with the map entries of both.
//! When the next sector begins, it repeats the map entries that have only one place, after its own.

use super::{MAP_ENTRY_BYTES, MAX_COUNT, Seed, get, put};

const MAGIC: u64 = u32::from_le_bytes(*b"SLOG") as u64;
const HEADER_BYTES: usize = 32;
const AT_CHECKSUM: usize = 4;
const AT_SEQUENCE: usize = 8;
const AT_DURABLE_SEQ: usize = 16;
const AT_COUNT: usize = 24;
const AT_REPEATS: usize = 26;
const AT_EARLIER: usize = 28;
const AT_LEFT_OUT: usize = 30;

/// The header of a log sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogHeader {
    /// Counts sectors from the volume's creation on.
    pub sequence: u64,
    /// All sectors with a lower sequence number, and their data, were durable when this one was written. At most
    /// `sequence` + 1: the second copy, written later, may include the sector itself.
    pub durable_seq: u64,
    /// The number of its own first map entries that are of earlier commits: they and their data were durable when it
    /// was written.
    pub earlier: u16,
    /// The number of first own map entries of the previous sector that are not repeated. 0 if nothing is repeated.
    pub left_out: u16,
}

impl LogHeader {
    /// The header of a sector that begins with a commit and repeats all or none of the previous one's map entries.
    pub fn new(sequence: u64, durable: u64) -> LogHeader {
        LogHeader { sequence, durable_seq: durable, earlier: 0, left_out: 0 }
    }
}

/// A log sector that was read and checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogSector<'a> {
    /// Its header.
    pub header: LogHeader,
    entries: &'a [u8],
    repeats: &'a [u8],
}

/// Why a sector of the log is not used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LogSectorError {
    /// Never written, or not written whole, or of another volume.
    #[error("no log sector")]
    Invalid,
    /// Valid but impossible: it has more map entries than fit, or a durable_seq after itself.
    #[error("invalid log sector header")]
    InvalidHeader,
}

impl<'a> LogSector<'a> {
    /// Map entries that fit in a sector of this size.
    pub const fn capacity(sector_bytes: u32) -> usize {
        (sector_bytes as usize - HEADER_BYTES) / MAP_ENTRY_BYTES
    }

    /// Fills `sector` with a header, `entries`, and after them `repeats`, which are map entries of the previous sector.
    /// They must fit.
    ///
    /// # Panics
    /// When there are more map entries than [`LogSector::capacity`].
    pub fn encode<'r>(
        sector: &mut [u8],
        seed: Seed,
        header: LogHeader,
        entries: impl ExactSizeIterator<Item = &'r [u8; MAP_ENTRY_BYTES]>,
        repeats: &'r [[u8; MAP_ENTRY_BYTES]],
    ) {
        let count = entries.len() + repeats.len();
        assert!(count <= LogSector::capacity(sector.len() as u32), "map entries must fit");
        sector.fill(0);
        put::<4>(sector, 0, MAGIC);
        put::<8>(sector, AT_SEQUENCE, header.sequence);
        put::<2>(sector, AT_COUNT, count as u64);
        put::<2>(sector, AT_REPEATS, repeats.len() as u64);
        put::<2>(sector, AT_EARLIER, u64::from(header.earlier));
        put::<2>(sector, AT_LEFT_OUT, u64::from(header.left_out));
        let body = sector[HEADER_BYTES..].chunks_exact_mut(MAP_ENTRY_BYTES);
        body.zip(entries.chain(repeats)).for_each(|(place, entry)| place.copy_from_slice(entry));
        LogSector::set_durable_seq(sector, seed, header.durable_seq);
    }

    /// Changes the durable_seq of an encoded sector.
    ///
    /// # Panics
    /// When `sector` is shorter than a header.
    pub fn set_durable_seq(sector: &mut [u8], seed: Seed, durable: u64) {
        put::<8>(sector, AT_DURABLE_SEQ, durable);
        let checksum = seed.checksum(&sector[AT_SEQUENCE..]);
        put::<4>(sector, AT_CHECKSUM, u64::from(checksum));
    }

    /// Reads and checks a sector. The map entries have their own checksums.
    pub fn decode(sector: &'a [u8], seed: Seed) -> Result<LogSector<'a>, LogSectorError> {
        if sector.len() < HEADER_BYTES || get::<4>(sector, 0) != MAGIC {
            return Err(LogSectorError::Invalid);
        }
        if get::<4>(sector, AT_CHECKSUM) != u64::from(seed.checksum(&sector[AT_SEQUENCE..])) {
            return Err(LogSectorError::Invalid);
        }
        LogSector::read(sector).ok_or(LogSectorError::InvalidHeader)
    }

    /// Reads a sector that was encoded by this program, without a check of its checksum.
    ///
    /// # Panics
    /// When it cannot be one.
    pub fn of_encoded(sector: &'a [u8]) -> LogSector<'a> {
        LogSector::read(sector).expect("a sector that was encoded")
    }

    /// Reads a sector without checking its checksum; `None` if its fields are impossible.
    fn read(sector: &'a [u8]) -> Option<LogSector<'a>> {
        let (header, own, repeats) = LogSector::fields(sector)?;
        let (entries, rest) = sector[HEADER_BYTES..].split_at(own * MAP_ENTRY_BYTES);
        Some(LogSector { header, entries, repeats: &rest[..repeats * MAP_ENTRY_BYTES] })
    }

    /// The header and the numbers of own and repeated map entries; `None` if they are impossible. Nothing else is
    /// checked.
    fn fields(sector: &[u8]) -> Option<(LogHeader, usize, usize)> {
        let (count, repeats) = (get::<2>(sector, AT_COUNT) as usize, get::<2>(sector, AT_REPEATS) as usize);
        let header = LogHeader {
            sequence: get::<8>(sector, AT_SEQUENCE),
            durable_seq: get::<8>(sector, AT_DURABLE_SEQ),
            earlier: get::<2>(sector, AT_EARLIER) as u16,
            left_out: get::<2>(sector, AT_LEFT_OUT) as u16,
        };
        let (own, max) = (count.checked_sub(repeats)?, LogSector::capacity(sector.len() as u32));
        let can_repeat = usize::from(header.left_out) + repeats <= max && (repeats > 0 || header.left_out == 0);
        let is_possible = header.sequence <= MAX_COUNT
            // The second copy of a sector may say that the sector itself is durable.
            && header.durable_seq <= header.sequence + 1
            && count <= max
            && usize::from(header.earlier) <= own
            && can_repeat;
        is_possible.then_some((header, own, repeats))
    }

    /// The sequence number of a log sector of any volume, without its salt: the checksum is not checked, but every
    /// field must be possible.
    pub fn trace(sector: &[u8]) -> Option<u64> {
        let is_sector = sector.len() >= HEADER_BYTES && get::<4>(sector, 0) == MAGIC;
        let (header, ..) = is_sector.then(|| LogSector::fields(sector)).flatten()?;
        Some(header.sequence)
    }

    /// The sequence number of a log sector, and the salt for which its checksum matches; `None` if it cannot be one.
    pub fn trace_salt(sector: &[u8]) -> Option<(u64, Seed)> {
        let sequence = LogSector::trace(sector)?;
        let plain = Seed(0).checksum(&sector[AT_SEQUENCE..]);
        Some((sequence, Seed(get::<4>(sector, AT_CHECKSUM) as u32 ^ plain)))
    }

    /// The sector's own map entries, unchecked.
    pub fn entries(&self) -> &'a [[u8; MAP_ENTRY_BYTES]] {
        self.entries.as_chunks::<MAP_ENTRY_BYTES>().0
    }

    /// Map entries of the previous sector, unchecked: its own except those left out, or none if all of them have two
    /// places.
    pub fn repeats(&self) -> &'a [[u8; MAP_ENTRY_BYTES]] {
        self.repeats.as_chunks::<MAP_ENTRY_BYTES>().0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: Seed = Seed(3);
    const HEADER: LogHeader = LogHeader { sequence: 9, durable_seq: 7, earlier: 3, left_out: 2 };

    #[test]
    fn a_sector_comes_back() {
        let (entries, repeats) = ([[5; MAP_ENTRY_BYTES]; 8], [[6; MAP_ENTRY_BYTES]; 7]);
        let mut sector = [0xff; 512];
        LogSector::encode(&mut sector, SEED, HEADER, entries.iter(), &repeats);
        let read = LogSector::decode(&sector, SEED).unwrap();
        assert_eq!((read.header, read.entries(), read.repeats()), (HEADER, &entries[..], &repeats[..]));
        LogSector::set_durable_seq(&mut sector, SEED, 10);
        let again = LogSector::decode(&sector, SEED).unwrap();
        assert_eq!((again.header.durable_seq, again.entries(), again.repeats()), (10, &entries[..], &repeats[..]));
        assert_eq!(LogSector::trace(&sector), Some(9));
        assert_eq!(LogSector::trace_salt(&sector), Some((9, SEED)));
        for at in [0, 17, 24, 26, 28, 30] {
            let mut other = sector;
            other[at] = 0xff;
            assert_eq!(LogSector::trace(&other), None, "byte {at}");
        }
    }

    #[test]
    fn torn_foreign_and_unwritten_sectors_do_not_count() {
        let mut sector = [0; 512];
        assert_eq!(LogSector::decode(&sector, SEED), Err(LogSectorError::Invalid));
        LogSector::encode(&mut sector, SEED, LogHeader::new(9, 7), [[5; MAP_ENTRY_BYTES]].iter(), &[]);
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
        LogSector::encode(&mut sector, SEED, LogHeader::new(1, 3), [].iter(), &[]);
        assert_eq!(LogSector::decode(&sector, SEED), Err(LogSectorError::InvalidHeader));
        for (at, value) in [(AT_COUNT, 16), (AT_REPEATS, 2), (AT_EARLIER, 2), (AT_LEFT_OUT, 1)] {
            LogSector::encode(&mut sector, SEED, LogHeader::new(9, 7), [[5; MAP_ENTRY_BYTES]].iter(), &[]);
            assert!(LogSector::decode(&sector, SEED).is_ok());
            put::<2>(&mut sector, at, value);
            LogSector::set_durable_seq(&mut sector, SEED, HEADER.durable_seq);
            assert_eq!(LogSector::decode(&sector, SEED), Err(LogSectorError::InvalidHeader), "byte {at}");
        }
        LogSector::encode(&mut sector, SEED, LogHeader { left_out: 15, ..HEADER }, [].iter(), &[[5; MAP_ENTRY_BYTES]]);
        assert_eq!(LogSector::decode(&sector, SEED), Err(LogSectorError::InvalidHeader), "more than one sector has");
    }
}
