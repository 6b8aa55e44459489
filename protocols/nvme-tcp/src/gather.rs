//! Output as a gather list: headers and digests in a block of memory, data where it lies.
//!
//! Headers that follow one another without data between them, such as a run of responses, become one slice. A block serves
//! until it is used up, so that in the long run a list costs neither an allocation nor a look into the pool.

use sealblock_integrity::guard;
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use zerocopy::{Immutable, IntoBytes};

use crate::payload::Payload;
use crate::pdu::{DIGEST_BYTES, MAX_HEADER_BYTES, PduRules, PduType};

/// Bytes for headers taken at once; they serve several calls, so that a call seldom takes any.
const BLOCK_BYTES: usize = 16 << 10;
/// The most that one PDU takes of the block: a header padded to 128 bytes, or a header of 128, twice a digest, and the
/// data of a termination request.
const MAX_PDU_HEADER_BYTES: usize = 2 * MAX_HEADER_BYTES + 2 * DIGEST_BYTES + 24;

/// How much one call of `transmit` hands out.
///
/// Whole PDUs are handed out, so a call ends with the first PDU that reaches a bound and may exceed it by that PDU.
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

/// Memory for headers, kept from call to call: what is used is cut off its front.
#[derive(Default)]
pub(crate) struct Headers(Buffer);

/// The output of one call, as it grows.
pub(crate) struct Gather<'a> {
    out: &'a mut Vec<Slice>,
    pool: &'a Pool,
    headers: &'a mut Buffer,
    /// Bytes at the front of `headers` that are written and not in `out` yet.
    used: usize,
    bytes: usize,
    /// Slices in `out` that are not of this call.
    before: usize,
    limit: TransmitLimit,
    /// Payload bytes that had to be summed for digests.
    pub(crate) checksummed: &'a mut u64,
}

impl<'a> Gather<'a> {
    pub(crate) fn new(
        out: &'a mut Vec<Slice>,
        (pool, headers): (&'a Pool, &'a mut Headers),
        limit: TransmitLimit,
        summed: &'a mut u64,
    ) -> Gather<'a> {
        let before = out.len();
        Gather { out, pool, headers: &mut headers.0, used: 0, bytes: 0, before, limit, checksummed: summed }
    }

    /// Whether one more PDU may be added. If so, there is memory for its headers.
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

    /// Adds a PDU that is all header.
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

    /// Adds a PDU with bytes `from..to` of `payload`, which are those its header announces. All bytes of a payload at once are
    /// taken out of it, and leave it empty.
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

    /// Puts the headers written so far behind what is in the list.
    fn end_headers(&mut self) {
        if self.used > 0 {
            self.out.push(self.headers.split_to(self.used).freeze());
            self.used = 0;
        }
    }

    /// Completes the list, and says how many bytes it has got.
    pub(crate) fn finish(mut self) -> usize {
        self.end_headers();
        self.bytes
    }
}
