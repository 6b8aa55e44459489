//! Requests: their headers, validation, and the command that the caller executes.

use sealblock_runtime_memory::Buffer;

use crate::config::Export;
use crate::violation::Violation;
use crate::wire::FieldReader;
use crate::wire::{self, ErrorCode, command, flag};

/// Bytes that a server reads at a time for CACHE, which are dropped, at most.
const CACHE_BYTES: usize = 1 << 20;
/// Bytes of the runs of a block status that a server collects, at most.
const STATUS_BYTES: usize = 32 << 10;

/// A request in flight, to be returned with its reply. Do not drop it: its share of the limits would be lost.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a reply needs the ticket of its request"]
pub struct Ticket {
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) kind: u16,
    pub(crate) one_run: bool,
    /// Bytes that it counts against the limit.
    pub(crate) held_bytes: usize,
}

/// A validated command. Offsets and lengths are in bytes, in range, multiples of the export's unit, and no length is 0.
#[derive(Debug)]
pub enum Command {
    /// Read; complete it with [`crate::Server::data`].
    Read {
        /// Where.
        offset: u64,
        /// How much, at most the announced payload.
        length: u32,
    },
    /// Write.
    Write {
        /// Where.
        offset: u64,
        /// What.
        data: Buffer,
        /// Durable before the reply.
        fua: bool,
    },
    /// Make all writes durable that were completed so far, on any connection.
    Flush,
    /// Deallocate; later reads return anything.
    Trim {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
        /// Durable before the reply.
        fua: bool,
    },
    /// Prefetch: a read follows soon.
    Cache {
        /// Where.
        offset: u64,
        /// How much, at most the announced payload.
        length: u32,
    },
    /// Write zeroes.
    WriteZeroes {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
        /// Durable before the reply.
        fua: bool,
        /// Keep the blocks allocated.
        no_hole: bool,
        /// Fail at once with [`ErrorCode::NotSupported`] unless it is faster than writing.
        fast: bool,
    },
    /// Report which bytes are allocated; complete it with [`crate::Server::status`].
    BlockStatus {
        /// Where.
        offset: u64,
        /// How much; the reply may cover less, or more.
        length: u64,
        /// REQ_ONE: only the first descriptor is sent.
        one: bool,
    },
}

/// A command, and the ticket to complete it with.
#[derive(Debug)]
pub struct Request {
    /// Returned with the reply.
    pub ticket: Ticket,
    /// What to execute.
    pub command: Command,
}

/// Negotiated properties that requests depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransmissionMode {
    pub(crate) chunks: bool,
    pub(crate) extended: bool,
    pub(crate) status: bool,
    pub(crate) payload_bytes: u32,
}

/// The fields of a request's header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) flags: u16,
    pub(crate) kind: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Header {
    pub(crate) const fn bytes(extended: bool) -> usize {
        if extended { wire::EXTENDED_REQUEST_BYTES } else { wire::REQUEST_BYTES }
    }

    /// Reads a complete header.
    pub(crate) fn read(bytes: &[u8], extended: bool) -> Result<Header, Violation> {
        let mut fields = FieldReader(bytes);
        let magic = fields.u32().unwrap_or(0);
        if magic != if extended { wire::EXTENDED_REQUEST_MAGIC } else { wire::REQUEST_MAGIC } {
            return Err(Violation::RequestMagic(magic));
        }
        let (flags, kind) = (fields.u16().unwrap_or(0), fields.u16().unwrap_or(0));
        let (cookie, offset) = (fields.u64().unwrap_or(0), fields.u64().unwrap_or(0));
        let length = if extended { fields.u64() } else { fields.u32().map(u64::from) };
        Ok(Header { flags, kind, cookie, offset, length: length.unwrap_or(0) })
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Bytes that follow the header, wanted or not.
    pub(crate) fn payload(&self, mode: &TransmissionMode) -> Result<usize, Violation> {
        // A write always has a payload. With extended headers it must set PAYLOAD_LEN, which QEMU 10.0 omits; any other
        // command has a payload if the flag is set.
        let brings = self.kind == command::WRITE || (mode.extended && self.has(flag::PAYLOAD_LEN));
        match brings {
            true if self.length > u64::from(mode.payload_bytes) => {
                Err(Violation::PayloadTooLong { bytes: self.length, max: mode.payload_bytes })
            }
            true => Ok(self.length as usize),
            false => Ok(0),
        }
    }

    /// Checks flags, range and alignment of the request against its export.
    pub(crate) fn check(&self, export: &Export, mode: &TransmissionMode) -> Result<(), ErrorCode> {
        if self.flags & !self.allowed_flags(mode)? != 0 {
            return Err(ErrorCode::Invalid);
        }
        let writes = matches!(self.kind, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        if writes && !export.writable {
            return Err(ErrorCode::NotPermitted);
        }
        let is_there = match self.kind {
            command::TRIM => export.trim,
            command::WRITE_ZEROES => export.write_zeroes,
            command::BLOCK_STATUS => mode.status,
            command::FLUSH => {
                return if self.offset == 0 && self.length == 0 { Ok(()) } else { Err(ErrorCode::Invalid) };
            }
            _ => true,
        };
        // A status has one run at least, which has a byte.
        let is_status = self.kind == command::BLOCK_STATUS;
        if !is_there || is_status && self.length == 0 {
            return Err(ErrorCode::Invalid);
        }
        self.check_range(export)?;
        let is_bounded = matches!(self.kind, command::READ | command::CACHE);
        if is_bounded && self.length > u64::from(mode.payload_bytes) {
            return Err(ErrorCode::Overflow);
        }
        Ok(())
    }

    fn allowed_flags(&self, mode: &TransmissionMode) -> Result<u16, ErrorCode> {
        let own = match self.kind {
            command::READ if mode.chunks => flag::DF,
            command::WRITE if mode.extended => flag::PAYLOAD_LEN,
            command::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
            command::BLOCK_STATUS => flag::REQ_ONE,
            command::READ | command::WRITE | command::FLUSH | command::TRIM | command::CACHE => 0,
            _ => return Err(ErrorCode::Invalid),
        };
        Ok(own | flag::FUA)
    }

    fn check_range(&self, export: &Export) -> Result<(), ErrorCode> {
        let fits = self.offset.checked_add(self.length).is_some_and(|end| end <= export.size_bytes);
        if !fits {
            let fills = matches!(self.kind, command::WRITE | command::WRITE_ZEROES);
            return Err(if fills { ErrorCode::NoSpace } else { ErrorCode::Invalid });
        }
        let mask = u64::from(export.block_bytes) - 1;
        if (self.offset | self.length) & mask != 0 { Err(ErrorCode::Invalid) } else { Ok(()) }
    }

    /// True if there is nothing to do for the request: it is about no byte.
    pub(crate) fn is_empty(&self) -> bool {
        self.length == 0 && self.kind != command::FLUSH
    }

    /// Bytes that the request counts, for its data or for what it takes to execute it, against the limit of bytes in flight.
    pub(crate) fn held_bytes(&self, payload: usize) -> usize {
        match self.kind {
            command::READ => usize::try_from(self.length).unwrap_or(usize::MAX),
            // What a server reads of it at a time, and the longest list of runs.
            command::CACHE => usize::try_from(self.length).unwrap_or(usize::MAX).min(CACHE_BYTES),
            command::BLOCK_STATUS => STATUS_BYTES,
            _ => payload,
        }
    }

    pub(crate) fn ticket(&self, held_bytes: usize) -> Ticket {
        Ticket {
            cookie: self.cookie,
            offset: self.offset,
            length: self.length,
            kind: self.kind,
            one_run: self.has(flag::REQ_ONE),
            held_bytes,
        }
    }

    /// The command to execute; only for a header that passed [`Header::check`].
    pub(crate) fn command(&self, data: Buffer) -> Option<Command> {
        let (offset, length, fua) = (self.offset, self.length, self.has(flag::FUA));
        Some(match self.kind {
            command::READ => Command::Read { offset, length: u32::try_from(length).ok()? },
            command::WRITE => Command::Write { offset, data, fua },
            command::FLUSH => Command::Flush,
            command::TRIM => Command::Trim { offset, length, fua },
            command::CACHE => Command::Cache { offset, length: u32::try_from(length).ok()? },
            command::WRITE_ZEROES => {
                let (no_hole, fast) = (self.has(flag::NO_HOLE), self.has(flag::FAST_ZERO));
                Command::WriteZeroes { offset, length, fua, no_hole, fast }
            }
            command::BLOCK_STATUS => Command::BlockStatus { offset, length, one: self.has(flag::REQ_ONE) },
            _ => return None,
        })
    }
}
