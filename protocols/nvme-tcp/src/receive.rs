//! Receives bytes into a staging buffer, or directly into the memory of their command.
//!
//! An asynchronous receive owns its buffer until the kernel is done with it, so the buffer is chosen before the bytes
//! are known. Headers and short data arrive in the staging buffer, and data is copied from there. Once the header of a
//! long payload has been read, the next buffer is the empty part of the command's own memory, no longer than the payload,
//! so its bytes are never copied.
//!
//! Invariants: at most one buffer is lent; nothing stays in the staging buffer between two calls; a byte of a payload is
//! written only below the length that the side granted and has checked before.

use std::collections::VecDeque;

use sealblock_integrity::guard;
use sealblock_runtime_memory::{Buffer, Pool};
use zerocopy::FromBytes;

use crate::config::Negotiated;
use crate::crcs::{BlockCrcs, BlockLayout, CrcAccumulator};
use crate::output::Gather;
use crate::pdu::{self, CommonHeader, DIGEST_BYTES, Direction, Frame, MAX_HEADER_BYTES, PduRules, PduType};
use crate::violation::{Closed, Violation};

/// Staging is cut to this while a long payload is expected, so that little of it has to be copied.
const SHORT_STAGING_BYTES: usize = 4096;

/// Memory of one command's data that is arriving.
#[derive(Debug)]
pub struct Fill {
    buffer: Buffer,
    filled: usize,
    crcs: Option<CrcAccumulator>,
    is_damaged: bool,
}

impl Fill {
    /// Fills memory from its start; computes CRCs only if data digests are in use.
    pub(crate) fn new(buffer: Buffer, data_digest: bool, layout: Option<BlockLayout>) -> Fill {
        Fill { buffer, filled: 0, crcs: data_digest.then(|| CrcAccumulator::new(layout)), is_damaged: false }
    }

    pub(crate) fn is_damaged(&self) -> bool {
        self.is_damaged
    }

    /// The received bytes, and their block CRCs unless a data digest was wrong.
    pub(crate) fn finish(mut self) -> (Buffer, Option<BlockCrcs>) {
        self.buffer.truncate(self.filled);
        let accumulator = self.crcs.filter(|_| !self.is_damaged);
        (self.buffer, accumulator.and_then(CrcAccumulator::finish))
    }

    /// Counts `len` more bytes that are in place.
    fn advance(&mut self, len: usize, counters: &mut ReceiveCounters) {
        let to = self.filled + len;
        if let Some(accumulator) = &mut self.crcs {
            accumulator.update(&self.buffer[self.filled..to], &mut counters.payload_bytes_checksummed);
        }
        self.filled = to;
        counters.payload_bytes += len as u64;
    }

    fn push(&mut self, bytes: &[u8], counters: &mut ReceiveCounters) {
        self.buffer[self.filled..self.filled + bytes.len()].copy_from_slice(bytes);
        counters.payload_bytes_copied += bytes.len() as u64;
        self.advance(bytes.len(), counters);
    }

    /// Ends a PDU; marks the data as damaged unless it has this digest.
    fn check(&mut self, digest: u32) {
        self.is_damaged |= self.crcs.as_mut().is_some_and(|accumulator| accumulator.end_pdu() != digest);
    }
}

/// Where the data of one PDU goes.
#[derive(Debug)]
pub struct Sink {
    /// The token of the command.
    pub(crate) token: u32,
    /// Its memory; `None` discards the data.
    pub(crate) fill: Option<Fill>,
}

impl Sink {
    /// The data is not wanted, or there is none.
    pub(crate) fn discard(token: u32) -> Sink {
        Sink { token, fill: None }
    }
}

/// What target and host do differently.
pub trait Side {
    /// An event of this side.
    type Event;
    /// A PDU to be sent.
    type Output;

    /// What both sides have.
    fn link(&self) -> &Link<Self::Event, Self::Output>;
    /// The same, to change it.
    fn link_mut(&mut self) -> &mut Link<Self::Event, Self::Output>;
    /// Handles a header; sets in `sink`, which discards, the memory of the data that `frame` announces. In place, because a
    /// sink is large and most headers announce no data.
    fn header(&mut self, kind: PduType, header: &[u8], frame: &Frame, sink: &mut Sink) -> Result<(), Closed>;
    /// Handles the data of that PDU. Not called for PDUs without data.
    fn payload(&mut self, sink: Sink);
    /// Adds a PDU to the output.
    fn put(&mut self, output: Self::Output, gather: &mut Gather<'_>);
    /// Number of commands in flight.
    fn commands_in_flight(&self) -> usize;
    /// Drops all commands, and reports that the connection ended.
    fn end(&mut self, closed: Closed);
}

/// What both sides know of a connection, besides its commands.
pub struct Link<E, O> {
    pub(crate) incoming: PduRules,
    pub(crate) outgoing: PduRules,
    pub(crate) negotiated: Option<Negotiated>,
    pub(crate) closed: Option<Closed>,
    pub(crate) events: VecDeque<E>,
    pub(crate) output: VecDeque<O>,
    /// The request that follows the output, once the peer has violated the protocol.
    pub(crate) termination: Option<Box<[u8]>>,
    /// Transfers in flight that are long enough to be received in place.
    pub(crate) long_transfers: usize,
    /// Bytes of command data that were output.
    pub(crate) sent_bytes: u64,
}

impl<E, O> Link<E, O> {
    pub(crate) fn new(incoming: Direction, outgoing: Direction) -> Link<E, O> {
        Link {
            incoming: PduRules::initial(incoming),
            outgoing: PduRules::initial(outgoing),
            negotiated: None,
            closed: None,
            events: VecDeque::new(),
            output: VecDeque::new(),
            termination: None,
            long_transfers: 0,
            sent_bytes: 0,
        }
    }

    /// Has PDUs of both directions follow what was negotiated from now on.
    pub(crate) fn establish(&mut self, negotiated: Negotiated) {
        self.incoming = negotiated.rules(self.incoming.direction);
        self.outgoing = negotiated.rules(self.outgoing.direction);
        self.negotiated = Some(negotiated);
    }
}

/// What was received so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReceiveCounters {
    /// Received bytes of command data.
    pub payload_bytes: u64,
    /// Of those, bytes that were copied from staging.
    pub payload_bytes_copied: u64,
    /// Of those, bytes that a CRC was computed over. Equal to `payload_bytes` with data digests: each byte once.
    pub payload_bytes_checksummed: u64,
}

enum LentBuffer {
    Nothing,
    /// The staging buffer is lent, without `rest`.
    Staging {
        rest: Buffer,
    },
    /// The memory of a command is lent, without `tail` after the payload.
    Direct {
        tail: Buffer,
    },
}

#[derive(Clone, Copy)]
enum ReceivePhase {
    Header,
    Padding { left: usize },
    Data { left: usize },
    Digest,
}

/// Bytes to PDUs.
pub(crate) struct Receiver {
    pool: Pool,
    staging_bytes: usize,
    direct_bytes: usize,
    staging: Option<Buffer>,
    lent: LentBuffer,
    phase: ReceivePhase,
    header: [u8; MAX_HEADER_BYTES + DIGEST_BYTES],
    have: usize,
    kind: Option<PduType>,
    frame: Frame,
    sink: Sink,
    digest: [u8; DIGEST_BYTES],
    digest_have: usize,
    counters: ReceiveCounters,
}

impl Receiver {
    pub(crate) fn new(pool: Pool, staging_bytes: usize, direct_bytes: usize) -> Receiver {
        Receiver {
            pool,
            staging_bytes: staging_bytes.max(MAX_HEADER_BYTES),
            direct_bytes: direct_bytes.max(1),
            staging: None,
            lent: LentBuffer::Nothing,
            phase: ReceivePhase::Header,
            header: [0; MAX_HEADER_BYTES + DIGEST_BYTES],
            have: 0,
            kind: None,
            frame: Frame::default(),
            sink: Sink::discard(0),
            digest: [0; DIGEST_BYTES],
            digest_have: 0,
            counters: ReceiveCounters::default(),
        }
    }

    pub(crate) fn counters(&self) -> ReceiveCounters {
        self.counters
    }

    /// The received part of the current header, without its digest.
    pub(crate) fn offending_header(&self) -> &[u8] {
        let whole = self.kind.map_or(CommonHeader::BYTES, PduType::header_bytes);
        &self.header[..self.have.min(whole)]
    }

    /// True if no data is expected before the next header.
    pub(crate) fn is_at_header(&self) -> bool {
        matches!(self.phase, ReceivePhase::Header)
    }

    /// Lends the buffer for the next receive; `None` while one is lent.
    pub(crate) fn lend(&mut self, side: &impl Side) -> Option<Buffer> {
        if !matches!(self.lent, LentBuffer::Nothing) {
            return None;
        }
        if let (ReceivePhase::Data { left }, Some(fill)) = (self.phase, &mut self.sink.fill)
            && left >= self.direct_bytes
        {
            let mut direct = fill.buffer.split_off(fill.filled);
            self.lent = LentBuffer::Direct { tail: direct.split_off(left) };
            return Some(direct);
        }
        let (pool, len) = (&self.pool, self.staging_bytes);
        let mut staging = self.staging.take().unwrap_or_else(|| pool.take(len));
        let short = side.link().long_transfers > 0 && len > SHORT_STAGING_BYTES;
        let rest = staging.split_off(if short { SHORT_STAGING_BYTES } else { len });
        self.lent = LentBuffer::Staging { rest };
        Some(staging)
    }

    /// Takes the lent buffer back and reads its first `len` bytes.
    pub(crate) fn take_back(&mut self, buffer: Buffer, len: usize, side: &mut impl Side) -> Result<(), Closed> {
        assert!(len <= buffer.len(), "{len} bytes received in a buffer of {}", buffer.len());
        match std::mem::replace(&mut self.lent, LentBuffer::Nothing) {
            LentBuffer::Nothing => panic!("no receive buffer is out"),
            LentBuffer::Staging { rest } => {
                let result = self.read(&buffer[..len], side);
                self.staging = Some(buffer.try_join(rest).expect(SAME));
                result
            }
            LentBuffer::Direct { tail } => {
                self.direct(buffer, tail, len, side);
                Ok(())
            }
        }
    }

    fn direct(&mut self, buffer: Buffer, tail: Buffer, len: usize, side: &mut impl Side) {
        let (ReceivePhase::Data { left }, Some(fill)) = (self.phase, &mut self.sink.fill) else {
            unreachable!("memory of a command is lent only while its data is awaited");
        };
        let head = std::mem::take(&mut fill.buffer);
        let joined = head.try_join(buffer).expect(SAME);
        fill.buffer = joined.try_join(tail).expect(SAME);
        fill.advance(len, &mut self.counters);
        self.data_received(left - len, side);
    }

    fn read(&mut self, mut bytes: &[u8], side: &mut impl Side) -> Result<(), Closed> {
        while !bytes.is_empty() {
            match self.phase {
                ReceivePhase::Header => bytes = self.read_header(bytes, side)?,
                ReceivePhase::Padding { left } => {
                    let skip = left.min(bytes.len());
                    bytes = &bytes[skip..];
                    self.phase = match left - skip {
                        0 => ReceivePhase::Data { left: self.frame.data_bytes as usize },
                        left => ReceivePhase::Padding { left },
                    };
                }
                ReceivePhase::Data { left } => {
                    let (now, later) = bytes.split_at(left.min(bytes.len()));
                    if let Some(fill) = &mut self.sink.fill {
                        fill.push(now, &mut self.counters);
                    }
                    self.data_received(left - now.len(), side);
                    bytes = later;
                }
                ReceivePhase::Digest => bytes = self.read_digest(bytes, side),
            }
        }
        Ok(())
    }

    fn read_header<'b>(&mut self, bytes: &'b [u8], side: &mut impl Side) -> Result<&'b [u8], Closed> {
        let rules = side.link().incoming;
        let need = self.kind.map_or(CommonHeader::BYTES, |kind| rules.header_with_digest(kind));
        let (now, later) = bytes.split_at(bytes.len().min(need - self.have));
        self.header[self.have..self.have + now.len()].copy_from_slice(now);
        self.have += now.len();
        if self.have < need {
            return Ok(later);
        }
        let common = CommonHeader::read_from_bytes(&self.header[..CommonHeader::BYTES])
            .expect("the common header is as long as its bytes");
        match self.kind {
            None => self.kind = Some(pdu::begin(&common, &rules)?),
            Some(kind) => self.whole_header(kind, &common, &rules, side)?,
        }
        Ok(later)
    }

    fn whole_header(
        &mut self,
        kind: PduType,
        common: &CommonHeader,
        rules: &PduRules,
        side: &mut impl Side,
    ) -> Result<(), Closed> {
        let (header, rest) = self.header.split_at(kind.header_bytes());
        if rules.header_digest && kind.has_digests() {
            let digest = u32::from_le_bytes(*rest.first_chunk().expect("the header has room for its digest"));
            if guard::crc32c(header) != digest {
                return Err(Violation::header_digest(digest).into());
            }
        }
        self.frame = pdu::frame(common, kind, rules)?;
        side.header(kind, header, &self.frame, &mut self.sink)?;
        if self.frame.data_bytes == 0 {
            self.sink.fill = None;
            self.next_pdu();
            return Ok(());
        }
        self.phase = match self.frame.pad_bytes {
            0 => ReceivePhase::Data { left: self.frame.data_bytes as usize },
            left => ReceivePhase::Padding { left },
        };
        Ok(())
    }

    fn data_received(&mut self, left: usize, side: &mut impl Side) {
        self.phase = ReceivePhase::Data { left };
        if left > 0 {
            return;
        }
        if self.frame.data_digest {
            self.phase = ReceivePhase::Digest;
        } else {
            self.end_payload(side);
        }
    }

    fn read_digest<'b>(&mut self, bytes: &'b [u8], side: &mut impl Side) -> &'b [u8] {
        let (now, later) = bytes.split_at(bytes.len().min(DIGEST_BYTES - self.digest_have));
        self.digest[self.digest_have..self.digest_have + now.len()].copy_from_slice(now);
        self.digest_have += now.len();
        if self.digest_have == DIGEST_BYTES {
            if let Some(fill) = &mut self.sink.fill {
                fill.check(u32::from_le_bytes(self.digest));
            }
            self.end_payload(side);
        }
        later
    }

    fn end_payload(&mut self, side: &mut impl Side) {
        let sink = std::mem::replace(&mut self.sink, Sink::discard(0));
        self.next_pdu();
        side.payload(sink);
    }

    fn next_pdu(&mut self) {
        self.phase = ReceivePhase::Header;
        self.have = 0;
        self.digest_have = 0;
        self.kind = None;
    }
}

const SAME: &str = "the buffer that comes back is the one that was handed out, uncut";
