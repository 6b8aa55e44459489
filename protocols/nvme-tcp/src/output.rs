//! Output as a gather list: headers and digests are copied into a buffer, data is never copied.
//!
//! Headers that follow one another without data between them, such as a run of responses, become one slice. A buffer serves
//! until it is used up, so a typical list needs neither an allocation nor a buffer of the pool.

use sealblock_integrity::{Sealed, guard};
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use smallvec::SmallVec;
use zerocopy::{Immutable, IntoBytes};

use crate::crcs::{BlockCrcs, append, digest_of};
use crate::pdu::{DIGEST_BYTES, MAX_HEADER_BYTES, PduRules, PduType};

/// Bytes of one buffer for headers; it serves several calls.
const BLOCK_BYTES: usize = 16 << 10;
/// Maximum bytes of the buffer that one PDU needs: a header padded to 128 bytes, or a header of 128, twice a digest, and
/// the data of a termination request.
const MAX_PDU_HEADER_BYTES: usize = 2 * MAX_HEADER_BYTES + 2 * DIGEST_BYTES + 24;

/// Bounds on the output of one call of `transmit`.
///
/// A call returns whole PDUs: it ends with the first PDU that reaches a bound, and may exceed the bound by that PDU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransmitLimit {
    /// Bytes.
    pub bytes: usize,
    /// Slices; `sendmsg` takes 1024.
    pub slices: usize,
}

impl Default for TransmitLimit {
    /// 256 KiB in 256 slices.
    fn default() -> TransmitLimit {
        TransmitLimit { bytes: 256 << 10, slices: 256 }
    }
}

/// Buffer for headers, kept from call to call; used bytes are split off its front.
#[derive(Default)]
pub(crate) struct Headers(Buffer);

/// The output of one call of `transmit`.
pub struct Gather<'a> {
    out: &'a mut Vec<Slice>,
    pool: &'a Pool,
    headers: &'a mut Buffer,
    /// Bytes at the front of `headers` that are not in `out` yet.
    used: usize,
    bytes: usize,
    /// Slices in `out` before this call.
    before: usize,
    limit: TransmitLimit,
    /// Payload bytes that were read to compute digests.
    pub(crate) checksummed: &'a mut u64,
}

impl<'a> Gather<'a> {
    pub(crate) fn new(
        out: &'a mut Vec<Slice>,
        (pool, headers): (&'a Pool, &'a mut Headers),
        limit: TransmitLimit,
        checksummed: &'a mut u64,
    ) -> Gather<'a> {
        let before = out.len();
        Gather { out, pool, headers: &mut headers.0, used: 0, bytes: 0, before, limit, checksummed }
    }

    /// True if one more PDU may be added; its headers then have room in the buffer.
    pub(crate) fn has_room(&mut self) -> bool {
        if self.bytes >= self.limit.bytes || self.out.len() - self.before >= self.limit.slices {
            return false;
        }
        if self.used + MAX_PDU_HEADER_BYTES > self.headers.len() {
            self.end_headers();
            *self.headers = self.pool.take(BLOCK_BYTES);
        }
        true
    }

    /// Adds a PDU without data.
    pub(crate) fn header(&mut self, rules: &PduRules, kind: PduType, header: &(impl IntoBytes + Immutable)) {
        self.put(header.as_bytes());
        if rules.header_digest && kind.has_digests() {
            self.put(&guard::crc32c(header.as_bytes()).to_le_bytes());
        }
    }

    /// Adds bytes as they are.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        let to = self.used + bytes.len();
        self.headers[self.used..to].copy_from_slice(bytes);
        self.used = to;
        self.bytes += bytes.len();
    }

    /// Adds a PDU with bytes `from..to` of `payload`, as its header announces. All bytes at once are moved out of the payload,
    /// which is then empty.
    pub(crate) fn with_data(
        &mut self,
        rules: &PduRules,
        kind: PduType,
        header: &(impl IntoBytes + Immutable),
        (payload, from, to): (&mut Payload, usize, usize),
    ) {
        self.header(rules, kind, header);
        let pad = rules.data_offset(kind) - rules.header_with_digest(kind);
        self.put(&[0; MAX_HEADER_BYTES][..pad]);
        self.end_headers();
        let digest = rules.data_digest.then(|| payload.digest(from, to, self.checksummed));
        let out = &mut *self.out;
        match to - from == payload.len_bytes() {
            true => out.extend(payload.take()),
            false => payload.each(from, to, |slice, a, b| out.push(slice.slice(a..b))),
        }
        self.bytes += to - from;
        if let Some(digest) = digest {
            self.put(&digest.to_le_bytes());
        }
    }

    /// Appends the headers written so far to the list.
    fn end_headers(&mut self) {
        if self.used > 0 {
            self.out.push(self.headers.split_to(self.used).freeze());
            self.used = 0;
        }
    }

    /// Completes the list; returns the bytes of this call.
    pub(crate) fn finish(mut self) -> usize {
        self.end_headers();
        self.bytes
    }
}

/// The data of a command, as a gather list.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    slices: SmallVec<[Slice; 2]>,
    len_bytes: usize,
    crcs: Option<BlockCrcs>,
}

/// The data of blocks without their tuples, from where it lies.
impl From<&Sealed> for Payload {
    fn from(blocks: &Sealed) -> Payload {
        Payload::new(blocks.segments().iter().map(|segment| segment.data.clone()))
    }
}

impl Payload {
    /// A payload of these slices, in order.
    pub fn new(slices: impl IntoIterator<Item = Slice>) -> Payload {
        let slices: SmallVec<[Slice; 2]> = slices.into_iter().filter(|slice| !slice.is_empty()).collect();
        let len_bytes = slices.iter().map(|slice| slice.len()).sum();
        Payload { slices, len_bytes, crcs: None }
    }

    /// The same data with known block CRCs: data digests are combined from them, and the blocks are not read again. CRCs of
    /// another length than the data are ignored.
    ///
    /// The CRCs must be correct, or the peer sees a wrong data digest. So if the caller verified the guards, the digest
    /// protects the same bytes from end to end.
    pub fn with_crcs(mut self, crcs: BlockCrcs) -> Payload {
        self.crcs = Some(crcs).filter(|crcs| crcs.len_bytes() == self.len_bytes);
        self
    }

    /// Bytes of data.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Moves all slices out of the payload.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = Slice> + '_ {
        self.len_bytes = 0;
        self.slices.drain(..)
    }

    /// The slices.
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Data bytes, at most `max_bytes`, of the PDU that starts at `from` when `left_bytes` are to be sent. Ends at the edge
    /// of a block if possible: the digest then needs only known CRCs.
    pub(crate) fn cut_bytes(&self, from: usize, left_bytes: usize, max_bytes: usize) -> usize {
        if left_bytes <= max_bytes {
            return left_bytes;
        }
        let Some(crcs) = &self.crcs else { return max_bytes };
        let stride = crcs.layout.stride_bytes();
        let end = (from + max_bytes) / stride * stride;
        // DATAL is a number of dwords (NVMe/TCP 3.6.2.8), and a stride need not be.
        if end > from && (end - from).is_multiple_of(4) { end - from } else { max_bytes }
    }

    /// The CRC-32C of bytes `from..to`; `checksummed` counts the bytes that were read for it.
    pub(crate) fn digest(&self, from: usize, to: usize, checksummed: &mut u64) -> u32 {
        if let Some(crcs) = &self.crcs {
            return digest_of(
                crcs,
                (from, to),
                |from, to, sum| self.each(from, to, |s, a, b| sum(&s[a..b])),
                checksummed,
            );
        }
        let mut crc = (0, 0);
        self.each(from, to, |slice, a, b| crc = (append(crc.0, crc.1, &slice[a..b]), crc.1 + b - a));
        *checksummed += crc.1 as u64;
        crc.0
    }

    /// Calls `see` with each slice and the range of it that is in `from..to`.
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
    use sealblock_integrity::guard;

    use super::*;
    use crate::crcs::BlockLayout;

    #[test]
    fn ranges_are_cut_from_the_right_slices() {
        let payload = Payload::new([b"abc", b"def", b"ghi"].map(|bytes| Slice::copy_from(bytes)));
        let mut seen = Vec::new();
        payload.each(2, 7, |slice, a, b| seen.extend_from_slice(&slice[a..b]));
        assert_eq!(seen, b"cdefg");
        let mut checksummed = 0;
        assert_eq!(payload.digest(2, 7, &mut checksummed), guard::crc32c(b"cdefg"));
        assert_eq!(checksummed, 5);
    }

    #[test]
    fn crcs_of_another_length_are_ignored() {
        let layout = BlockLayout::new(512, 0).unwrap();
        let crcs = |n| BlockCrcs { layout: layout.clone(), guards: std::iter::repeat_n(0, n).collect() };
        let data = || Payload::from(Slice::copy_from(&[1; 1024]));
        let mut checksummed = 0;
        assert_eq!(data().with_crcs(crcs(1)).digest(0, 1024, &mut checksummed), guard::crc32c(&[1; 1024]));
        assert_eq!(checksummed, 1024);
        assert_ne!(data().with_crcs(crcs(2)).digest(0, 1024, &mut checksummed), guard::crc32c(&[1; 1024]));
        assert_eq!(checksummed, 1024);
    }

    #[test]
    fn pdus_end_with_blocks_where_they_can() {
        let layout = BlockLayout::new(512, 8).unwrap();
        let crcs = BlockCrcs { layout, guards: std::iter::repeat_n(0, 4).collect() };
        let payload = Payload::from(Slice::copy_from(&[0; 2080])).with_crcs(crcs);
        assert_eq!(payload.cut_bytes(0, 2080, 1100), 1040);
        assert_eq!(payload.cut_bytes(520, 1560, 4096), 1560);
        assert_eq!(payload.cut_bytes(0, 2080, 100), 100);
    }
}
