//! Data on its way out: slices that are never copied, and what is known of their sums.

use sealblock_runtime_memory::Slice;
use smallvec::SmallVec;

use crate::crcs::{BlockCrcs, append, digest_of};

/// The data of a command, as a gather list.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    slices: SmallVec<[Slice; 2]>,
    len_bytes: usize,
    crcs: Option<BlockCrcs>,
}

impl Payload {
    /// The slices one after the other.
    pub fn new(slices: impl IntoIterator<Item = Slice>) -> Payload {
        let slices: SmallVec<[Slice; 2]> = slices.into_iter().filter(|slice| !slice.is_empty()).collect();
        let len_bytes = slices.iter().map(|slice| slice.len()).sum();
        Payload { slices, len_bytes, crcs: None }
    }

    /// The same data with sums that are known already: data digests are then joined from them, and the blocks are not
    /// read again. Sums of another length than the data are ignored.
    ///
    /// The sums must be right, or the peer sees a wrong data digest; so a caller that verified the guards has, with the
    /// digest, vouched for the same bytes from end to end.
    pub fn with_crcs(mut self, sums: BlockCrcs) -> Payload {
        self.crcs = Some(sums).filter(|sums| sums.len_bytes() == self.len_bytes);
        self
    }

    /// Bytes of data.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// All slices; the payload is empty then.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = Slice> + '_ {
        self.len_bytes = 0;
        self.slices.drain(..)
    }

    /// The slices.
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// How much data, at most `max_bytes`, the PDU that starts at `from` takes when `left_bytes` are to be sent: up to
    /// the edge of a block where that is possible, because the digest is then made of known sums alone.
    pub(crate) fn cut_bytes(&self, from: usize, left_bytes: usize, max_bytes: usize) -> usize {
        if left_bytes <= max_bytes {
            return left_bytes;
        }
        let Some(sums) = &self.crcs else { return max_bytes };
        let stride = sums.layout.stride_bytes();
        let end = (from + max_bytes) / stride * stride;
        // The wire wants dwords, and a stride need not be one.
        if end > from && (end - from).is_multiple_of(4) { end - from } else { max_bytes }
    }

    /// The CRC-32C of bytes `from..to`; `summed` counts those that had to be read for it.
    pub(crate) fn digest(&self, from: usize, to: usize, summed: &mut u64) -> u32 {
        if let Some(sums) = &self.crcs {
            return digest_of(sums, (from, to), |from, to, sum| self.each(from, to, |s, a, b| sum(&s[a..b])), summed);
        }
        let mut crc = (0, 0);
        self.each(from, to, |slice, a, b| crc = (append(crc.0, crc.1, &slice[a..b]), crc.1 + b - a));
        *summed += crc.1 as u64;
        crc.0
    }

    /// Calls `see` with each slice and the part of it that lies in `from..to`.
    pub(crate) fn each(&self, from: usize, to: usize, mut see: impl FnMut(&Slice, usize, usize)) {
        let mut start = 0;
        for slice in &self.slices {
            let end = start + slice.len();
            let (a, b) = (from.max(start), to.min(end));
            if a < b {
                see(slice, a - start, b - start);
            }
            if end >= to {
                break;
            }
            start = end;
        }
    }
}

impl From<Slice> for Payload {
    fn from(slice: Slice) -> Payload {
        Payload::new([slice])
    }
}

impl From<Vec<Slice>> for Payload {
    fn from(slices: Vec<Slice>) -> Payload {
        Payload::new(slices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crcs::BlockLayout;
    use sealblock_integrity::guard;

    #[test]
    fn ranges_are_cut_from_the_right_slices() {
        let payload = Payload::new([b"abc", b"def", b"ghi"].map(|bytes| Slice::copy_from(bytes)));
        let mut seen = Vec::new();
        payload.each(2, 7, |slice, a, b| seen.extend_from_slice(&slice[a..b]));
        assert_eq!(seen, b"cdefg");
        let mut summed = 0;
        assert_eq!(payload.digest(2, 7, &mut summed), guard::crc32c(b"cdefg"));
        assert_eq!(summed, 5);
    }

    #[test]
    fn sums_of_another_length_are_not_believed() {
        let shape = BlockLayout::new(512, 0).unwrap();
        let sums = |n| BlockCrcs { layout: shape.clone(), guards: std::iter::repeat_n(0, n).collect() };
        let data = || Payload::from(Slice::copy_from(&[1; 1024]));
        let mut summed = 0;
        assert_eq!(data().with_crcs(sums(1)).digest(0, 1024, &mut summed), guard::crc32c(&[1; 1024]));
        assert_eq!(summed, 1024);
        assert_ne!(data().with_crcs(sums(2)).digest(0, 1024, &mut summed), guard::crc32c(&[1; 1024]));
        assert_eq!(summed, 1024);
    }

    #[test]
    fn pdus_end_with_blocks_where_they_can() {
        let shape = BlockLayout::new(512, 8).unwrap();
        let sums = BlockCrcs { layout: shape, guards: std::iter::repeat_n(0, 4).collect() };
        let payload = Payload::from(Slice::copy_from(&[0; 2080])).with_crcs(sums);
        assert_eq!(payload.cut_bytes(0, 2080, 1100), 1040);
        assert_eq!(payload.cut_bytes(520, 1560, 4096), 1560);
        assert_eq!(payload.cut_bytes(0, 2080, 100), 100);
    }
}
