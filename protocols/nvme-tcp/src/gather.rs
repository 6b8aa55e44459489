//! Output as a gather list: headers and digests in one small block of memory, data where it lies.
//!
//! Headers that follow one another without data between them, such as a run of responses, become one slice.

use sealblock_integrity::guard;
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use zerocopy::{Immutable, IntoBytes};

use crate::payload::Payload;
use crate::pdu::{DIGEST_BYTES, MAX_HEADER_BYTES, PduType, Rules};

/// Bytes for headers in one call; a call ends when it might not hold one more.
const BLOCK_BYTES: usize = 4096;
/// The most that one PDU takes of the block: a header padded to 128 bytes, or a header of 128, twice a digest, and the
/// data of a termination request.
const MOST_BYTES: usize = 2 * MAX_HEADER_BYTES + 2 * DIGEST_BYTES + 24;

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

enum Piece {
    Block { from: usize, to: usize },
    Data(Slice),
}

/// The output of one call, as it grows.
pub(crate) struct Gather<'a> {
    pieces: Vec<Piece>,
    block: Buffer,
    used: usize,
    bytes: usize,
    limit: TransmitLimit,
    /// Payload bytes that had to be summed for digests.
    pub(crate) summed: &'a mut u64,
}

impl<'a> Gather<'a> {
    pub(crate) fn new(pool: &Pool, limit: TransmitLimit, summed: &'a mut u64) -> Gather<'a> {
        let block = pool.take(BLOCK_BYTES);
        Gather { pieces: Vec::with_capacity(16), block, used: 0, bytes: 0, limit, summed }
    }

    /// Whether one more PDU may be added.
    pub(crate) fn has_room(&self) -> bool {
        self.bytes < self.limit.bytes
            && self.pieces.len() < self.limit.slices
            && self.used + MOST_BYTES <= self.block.len()
    }

    /// Adds a PDU that is all header.
    pub(crate) fn header(&mut self, rules: &Rules, kind: PduType, header: &(impl IntoBytes + Immutable)) {
        self.put(header.as_bytes());
        if rules.header_digest && kind.has_digests() {
            self.put(&guard::crc32c(header.as_bytes()).to_le_bytes());
        }
    }

    /// Adds bytes as they are.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        let to = self.used + bytes.len();
        self.block[self.used..to].copy_from_slice(bytes);
        self.extend_block(to);
    }

    /// Adds a PDU with bytes `from..to` of `payload`, which are those its header announces.
    pub(crate) fn with_data(
        &mut self,
        rules: &Rules,
        kind: PduType,
        header: &(impl IntoBytes + Immutable),
        (payload, from, to): (&Payload, usize, usize),
    ) {
        self.header(rules, kind, header);
        let pad = rules.data_offset(kind) - rules.header_with_digest(kind);
        self.put(&[0; MAX_HEADER_BYTES][..pad]);
        let pieces = &mut self.pieces;
        payload.each(from, to, |slice, a, b| pieces.push(Piece::Data(slice.slice(a..b))));
        self.bytes += to - from;
        if rules.data_digest {
            let digest = payload.digest(from, to, self.summed);
            self.put(&digest.to_le_bytes());
        }
    }

    fn extend_block(&mut self, to: usize) {
        self.bytes += to - self.used;
        match self.pieces.last_mut() {
            Some(Piece::Block { to: end, .. }) => *end = to,
            _ if to > self.used => self.pieces.push(Piece::Block { from: self.used, to }),
            _ => {}
        }
        self.used = to;
    }

    /// Appends the list to `out`, and says how many bytes it has.
    pub(crate) fn finish(mut self, out: &mut Vec<Slice>) -> usize {
        self.block.truncate(self.used);
        let block = self.block.freeze();
        out.extend(self.pieces.into_iter().map(|piece| match piece {
            Piece::Block { from, to } => block.slice(from..to),
            Piece::Data(slice) => slice,
        }));
        self.bytes
    }
}
