//! The copies of the reserved areas.

use sealblock_block::ReservedArea;

use super::{MAX_COUNT, Seed, get, put};

/// Bytes before the content of an area.
pub const RESERVED_HEAD_BYTES: usize = 64;

const MAGIC: [u8; 4] = *b"SANX";
const AT_CHECKSUM: usize = 4;
const AT_WRITE_SEQ: usize = 8;
const AT_LENGTH: usize = 16;
const AT_AREA: usize = 20;

/// One copy of an area. An area has two places, which are written in turn, and each place has two copies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReservedCopy {
    /// Counts the writes of the area; the higher of two valid copies counts.
    pub write_seq: u64,
    /// The content of the area.
    pub bytes: Vec<u8>,
}

impl ReservedCopy {
    /// Encodes the copy.
    pub fn encode(&self, area: ReservedArea, seed: Seed) -> Vec<u8> {
        let mut bytes = vec![0; RESERVED_HEAD_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        put::<8>(&mut bytes, AT_WRITE_SEQ, self.write_seq);
        put::<4>(&mut bytes, AT_LENGTH, self.bytes.len() as u64);
        put::<1>(&mut bytes, AT_AREA, area.index() as u64);
        bytes.extend_from_slice(&self.bytes);
        let checksum = seed.checksum(&bytes[AT_WRITE_SEQ..]);
        put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
        bytes
    }

    /// True if `bytes` begin with the head of this copy of this area, of any volume. Nothing after the head is checked.
    pub fn is_trace(bytes: &[u8], area: ReservedArea, copy: u64) -> bool {
        let Some(head) = bytes.get(..RESERVED_HEAD_BYTES) else { return false };
        head.starts_with(&MAGIC)
            && get::<4>(head, AT_LENGTH) <= area.max_bytes() as u64
            && get::<1>(head, AT_AREA) == area.index() as u64
            && get::<8>(head, AT_WRITE_SEQ) % 2 == copy
            && head[AT_AREA + 1..].iter().all(|&byte| byte == 0)
    }

    /// The salt for which the checksum of this copy of this area matches; `None` if it cannot be one.
    pub fn trace_salt(bytes: &[u8], area: ReservedArea, copy: u64) -> Option<Seed> {
        let is_one = ReservedCopy::is_trace(bytes, area, copy);
        let length = is_one.then(|| get::<4>(bytes, AT_LENGTH) as usize)?;
        let whole = bytes.get(..RESERVED_HEAD_BYTES + length)?;
        Some(Seed(get::<4>(bytes, AT_CHECKSUM) as u32 ^ Seed(0).checksum(&whole[AT_WRITE_SEQ..])))
    }

    /// Reads a copy; `None` if it is not valid.
    pub fn decode(bytes: &[u8], area: ReservedArea, seed: Seed) -> Option<ReservedCopy> {
        if bytes.len() < RESERVED_HEAD_BYTES || !bytes.starts_with(&MAGIC) {
            return None;
        }
        let length = usize::try_from(get::<4>(bytes, AT_LENGTH)).ok().filter(|length| *length <= area.max_bytes())?;
        let whole = bytes.get(..RESERVED_HEAD_BYTES + length)?;
        let is_whole = get::<4>(bytes, AT_CHECKSUM) == u64::from(seed.checksum(&whole[AT_WRITE_SEQ..]));
        let write_seq = get::<8>(bytes, AT_WRITE_SEQ);
        let fits = get::<1>(bytes, AT_AREA) == area.index() as u64 && write_seq <= MAX_COUNT;
        (is_whole && fits).then(|| ReservedCopy { write_seq, bytes: whole[RESERVED_HEAD_BYTES..].to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_comes_back_and_no_other_physical_block_volume_or_bit_passes() {
        let (seed, other) = (Seed::of(b"an identity here"), Seed::of(b"another identity"));
        let copy = ReservedCopy { write_seq: 7, bytes: b"notes".to_vec() };
        let bytes = copy.encode(ReservedArea::GroupLabel, seed);
        assert_eq!(ReservedCopy::decode(&bytes, ReservedArea::GroupLabel, seed), Some(copy));
        assert_eq!(ReservedCopy::decode(&bytes, ReservedArea::ScrubState, seed), None);
        assert_eq!(ReservedCopy::decode(&bytes, ReservedArea::GroupLabel, other), None);
        let salts = [0, 1].map(|turn| ReservedCopy::trace_salt(&bytes, ReservedArea::GroupLabel, turn));
        assert_eq!(salts, [None, Some(seed)]);
        assert!(
            ReservedCopy::is_trace(&bytes, ReservedArea::GroupLabel, 1)
                && !ReservedCopy::is_trace(&bytes, ReservedArea::GroupLabel, 0)
        );
        assert!(!ReservedCopy::is_trace(&bytes, ReservedArea::ScrubState, 1));
        assert!(!ReservedCopy::is_trace(&bytes[..63], ReservedArea::GroupLabel, 1));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(ReservedCopy::decode(&bad, ReservedArea::GroupLabel, seed), None, "bit {bit}");
        }
        for (write_seq, is_copy) in [(MAX_COUNT, true), (MAX_COUNT + 1, false)] {
            let bytes = ReservedCopy { write_seq, bytes: Vec::new() }.encode(ReservedArea::GroupLabel, seed);
            assert_eq!(ReservedCopy::decode(&bytes, ReservedArea::GroupLabel, seed).is_some(), is_copy, "{write_seq}");
        }
        for length in 0..bytes.len() {
            assert_eq!(ReservedCopy::decode(&bytes[..length], ReservedArea::GroupLabel, seed), None, "{length} bytes");
        }
    }
}
