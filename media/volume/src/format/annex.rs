//! The copies of the annex's slots.

use sealblock_block::ReservedArea;

use super::{COUNT_MAX, SUPERBLOCK_OFFSETS, Seed, get, put};

/// Bytes in front of what a slot holds.
pub const ANNEX_HEAD_BYTES: usize = 64;

const MAGIC: [u8; 4] = *b"SANX";
const AT_CHECKSUM: usize = 4;
const AT_SERIAL: usize = 8;
const AT_LENGTH: usize = 16;
const AT_SLOT: usize = 20;

/// One of the copies of a slot: two places are written in turn, and each is there twice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AnnexCopy {
    /// Counts the writes of the slot; the higher of two valid copies counts.
    pub serial: u64,
    /// What the slot holds.
    pub bytes: Vec<u8>,
}

/// Where a copy of a slot lies at the start, in bytes: behind the superblock of the same number. [`super::Layout::annex_offsets`]
/// also says where its twin is. Bitmap pages have no copies, and lie where [`super::Layout::bitmap_offset`] says.
pub fn annex_offset(slot: ReservedArea, copy: u64) -> u64 {
    let within = match slot {
        ReservedArea::GroupLabel => 4 << 10,
        // Of a page nobody asks.
        ReservedArea::ScrubState | ReservedArea::Bitmap { .. } => 24 << 10,
    };
    SUPERBLOCK_OFFSETS[(copy % 2) as usize] + within
}

impl AnnexCopy {
    /// The bytes of the copy.
    pub fn encode(&self, slot: ReservedArea, seed: Seed) -> Vec<u8> {
        let mut bytes = vec![0; ANNEX_HEAD_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        put::<8>(&mut bytes, AT_SERIAL, self.serial);
        put::<4>(&mut bytes, AT_LENGTH, self.bytes.len() as u64);
        put::<1>(&mut bytes, AT_SLOT, slot.index() as u64);
        bytes.extend_from_slice(&self.bytes);
        let checksum = seed.checksum(&bytes[AT_SERIAL..]);
        put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
        bytes
    }

    /// Whether `bytes` begin with the head of this copy of this slot, of whatever volume. What follows is not looked at.
    pub fn is_trace(bytes: &[u8], slot: ReservedArea, copy: u64) -> bool {
        let Some(head) = bytes.get(..ANNEX_HEAD_BYTES) else { return false };
        head.starts_with(&MAGIC)
            && get::<4>(head, AT_LENGTH) <= slot.max_bytes() as u64
            && get::<1>(head, AT_SLOT) == slot.index() as u64
            && get::<8>(head, AT_SERIAL) % 2 == copy
            && head[AT_SLOT + 1..].iter().all(|&byte| byte == 0)
    }

    /// Reads a copy; nothing where there is none that is whole.
    pub fn decode(bytes: &[u8], slot: ReservedArea, seed: Seed) -> Option<AnnexCopy> {
        if bytes.len() < ANNEX_HEAD_BYTES || !bytes.starts_with(&MAGIC) {
            return None;
        }
        let length = usize::try_from(get::<4>(bytes, AT_LENGTH)).ok().filter(|length| *length <= slot.max_bytes())?;
        let whole = bytes.get(..ANNEX_HEAD_BYTES + length)?;
        let is_whole = get::<4>(bytes, AT_CHECKSUM) == u64::from(seed.checksum(&whole[AT_SERIAL..]));
        let serial = get::<8>(bytes, AT_SERIAL);
        let fits = get::<1>(bytes, AT_SLOT) == slot.index() as u64 && serial <= COUNT_MAX;
        (is_whole && fits).then(|| AnnexCopy { serial, bytes: whole[ANNEX_HEAD_BYTES..].to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_comes_back_and_no_other_slot_volume_or_bit_passes() {
        let (seed, other) = (Seed::of(b"an identity here"), Seed::of(b"another identity"));
        let copy = AnnexCopy { serial: 7, bytes: b"notes".to_vec() };
        let bytes = copy.encode(ReservedArea::GroupLabel, seed);
        assert_eq!(AnnexCopy::decode(&bytes, ReservedArea::GroupLabel, seed), Some(copy));
        assert_eq!(AnnexCopy::decode(&bytes, ReservedArea::ScrubState, seed), None);
        assert_eq!(AnnexCopy::decode(&bytes, ReservedArea::GroupLabel, other), None);
        assert!(
            AnnexCopy::is_trace(&bytes, ReservedArea::GroupLabel, 1)
                && !AnnexCopy::is_trace(&bytes, ReservedArea::GroupLabel, 0)
        );
        assert!(!AnnexCopy::is_trace(&bytes, ReservedArea::ScrubState, 1));
        assert!(!AnnexCopy::is_trace(&bytes[..63], ReservedArea::GroupLabel, 1));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(AnnexCopy::decode(&bad, ReservedArea::GroupLabel, seed), None, "bit {bit}");
        }
        for (serial, is_copy) in [(COUNT_MAX, true), (COUNT_MAX + 1, false)] {
            let bytes = AnnexCopy { serial, bytes: Vec::new() }.encode(ReservedArea::GroupLabel, seed);
            assert_eq!(AnnexCopy::decode(&bytes, ReservedArea::GroupLabel, seed).is_some(), is_copy, "{serial}");
        }
        for length in 0..bytes.len() {
            assert_eq!(AnnexCopy::decode(&bytes[..length], ReservedArea::GroupLabel, seed), None, "{length} bytes");
        }
    }

    #[test]
    fn slots_do_not_meet_each_other_nor_the_superblocks() {
        let end = |slot: ReservedArea, copy| annex_offset(slot, copy) + (slot.max_bytes() + ANNEX_HEAD_BYTES) as u64;
        for copy in [0, 1] {
            assert!(annex_offset(ReservedArea::GroupLabel, copy) >= SUPERBLOCK_OFFSETS[copy as usize] + 4096);
            assert!(end(ReservedArea::GroupLabel, copy) <= annex_offset(ReservedArea::ScrubState, copy));
            assert!(end(ReservedArea::ScrubState, copy) <= SUPERBLOCK_OFFSETS[copy as usize] + (32 << 10));
        }
    }
}
