//! The high-water mark: how far the superblocks, the log and the reserved areas have come.
//!
//! Each of them numbers its writes. If all copies of one are restored from an earlier state together, nothing in them
//! shows it. The mark is stored elsewhere and is written after them, so it is never ahead of what is on the medium.
//! Whatever is older than the mark was restored from an earlier state.

use super::{MAX_COUNT, Seed, get, put};

/// Bytes of the record; the rest of its sector is zero.
pub(crate) const HIGH_WATER_BYTES: usize = 64;

const MAGIC: [u8; 4] = *b"SHWM";
const AT_CHECKSUM: usize = 4;
const AT_SUPERBLOCKS: usize = 8;
const AT_LOG_END: usize = 16;
const AT_LABELS: usize = 24;
const AT_SCRUB_STATES: usize = 32;
const AT_ZERO: usize = 40;

/// What was durable before the mark was written; zero if nothing is known. Every count only grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HighWaterMark {
    /// The write sequence number of the superblocks.
    pub superblocks: u64,
    /// The sequence number after the last log sector that had been written to all its places.
    pub log_end: u64,
    /// The number of writes of the group label.
    pub labels: u64,
    /// The number of writes of the scrub state.
    pub scrub_states: u64,
}

impl HighWaterMark {
    /// Encodes the record.
    pub fn encode(&self, seed: Seed) -> [u8; HIGH_WATER_BYTES] {
        let mut bytes = [0; HIGH_WATER_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        put::<8>(&mut bytes, AT_SUPERBLOCKS, self.superblocks);
        put::<8>(&mut bytes, AT_LOG_END, self.log_end);
        put::<8>(&mut bytes, AT_LABELS, self.labels);
        put::<8>(&mut bytes, AT_SCRUB_STATES, self.scrub_states);
        let checksum = seed.checksum(&bytes[AT_SUPERBLOCKS..]);
        put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
        bytes
    }

    /// Reads a record of this volume; `None` if it is not valid.
    pub fn decode(bytes: &[u8], seed: Seed) -> Option<HighWaterMark> {
        let bytes = bytes.get(..HIGH_WATER_BYTES).filter(|bytes| bytes.starts_with(&MAGIC))?;
        let is_whole = get::<4>(bytes, AT_CHECKSUM) == u64::from(seed.checksum(&bytes[AT_SUPERBLOCKS..]));
        let [superblocks, log_end, labels, scrub_states] =
            [AT_SUPERBLOCKS, AT_LOG_END, AT_LABELS, AT_SCRUB_STATES].map(|at| get::<8>(bytes, at));
        let are_counts = [superblocks, log_end, labels, scrub_states].iter().all(|count| *count <= MAX_COUNT);
        let is_rest_zero = bytes[AT_ZERO..].iter().all(|byte| *byte == 0);
        (is_whole && are_counts && is_rest_zero).then_some(HighWaterMark { superblocks, log_end, labels, scrub_states })
    }

    /// The higher value of each count.
    #[must_use]
    pub fn and(&self, other: &HighWaterMark) -> HighWaterMark {
        HighWaterMark {
            superblocks: self.superblocks.max(other.superblocks),
            log_end: self.log_end.max(other.log_end),
            labels: self.labels.max(other.labels),
            scrub_states: self.scrub_states.max(other.scrub_states),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: Seed = Seed(5);

    fn mark() -> HighWaterMark {
        HighWaterMark { superblocks: 9, log_end: 77, labels: 3, scrub_states: MAX_COUNT }
    }

    #[test]
    fn a_mark_comes_back_and_no_other_volume_length_or_bit_passes() {
        let bytes = mark().encode(SEED);
        assert_eq!(HighWaterMark::decode(&bytes, SEED), Some(mark()));
        assert_eq!(HighWaterMark::decode(&bytes, Seed(6)), None);
        for length in 0..bytes.len() {
            assert_eq!(HighWaterMark::decode(&bytes[..length], SEED), None, "{length} bytes");
        }
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(HighWaterMark::decode(&bad, SEED), None, "bit {bit}");
        }
        assert_eq!(HighWaterMark::decode(&[0; HIGH_WATER_BYTES], Seed(0)), None);
    }

    #[test]
    fn forged_counts_and_bytes_that_have_no_meaning_are_no_mark() {
        let forged = HighWaterMark { labels: MAX_COUNT + 1, ..mark() };
        assert_eq!(HighWaterMark::decode(&forged.encode(SEED), SEED), None);
        let mut bytes = mark().encode(SEED);
        bytes[AT_ZERO + 3] = 1;
        let checksum = SEED.checksum(&bytes[AT_SUPERBLOCKS..]);
        put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
        assert_eq!(HighWaterMark::decode(&bytes, SEED), None);
    }

    #[test]
    fn the_higher_count_of_each_counts() {
        let other = HighWaterMark { superblocks: 8, log_end: 78, labels: 3, scrub_states: 0 };
        let both = HighWaterMark { log_end: 78, ..mark() };
        assert_eq!((mark().and(&other), other.and(&mark())), (both, both));
    }
}
