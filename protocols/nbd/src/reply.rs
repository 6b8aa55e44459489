//! Writes replies in each of their three forms.

use sealblock_runtime_memory::Slice;

use crate::output::Output;
use crate::request::Ticket;
use crate::wire::{self, ErrorCode, chunk, command};

/// Maximum text of an error, in bytes; far below the protocol's maximum.
const MESSAGE_BYTES: usize = 512;

/// Form of the replies, as negotiated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReplyStyle {
    /// One header with success or an error, then data.
    #[default]
    Simple,
    /// Chunks.
    Structured,
    /// Chunks with 64-bit lengths.
    Extended,
}

/// Why a request failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ErrorReply {
    /// The error.
    pub code: ErrorCode,
    /// Offset on the export, in bytes, if known. Not sent if it is outside the request.
    pub offset: Option<u64>,
    /// Text for people; cut after 512 bytes.
    pub message: String,
}

impl From<ErrorCode> for ErrorReply {
    fn from(code: ErrorCode) -> ErrorReply {
        ErrorReply { code, offset: None, message: String::new() }
    }
}

/// A run of bytes with one status ("Block status").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusDescriptor {
    /// Its length; not 0.
    pub length: u64,
    /// Flags of `base:allocation`: bit 0 is NBD_STATE_HOLE, bit 1 NBD_STATE_ZERO.
    pub status: u32,
}

/// Writes replies of one form.
pub(crate) struct ReplyWriter<'a> {
    pub(crate) style: ReplyStyle,
    pub(crate) out: &'a mut Output,
}

impl ReplyWriter<'_> {
    /// Success without data.
    pub(crate) fn done(&mut self, ticket: &Ticket) {
        match self.style {
            ReplyStyle::Simple => self.simple(ticket, 0),
            _ => self.chunk(ticket, chunk::DONE, chunk::NONE, &[], 0),
        }
        self.out.end_reply();
    }

    /// All data of a read.
    pub(crate) fn data(&mut self, ticket: &Ticket, slices: impl IntoIterator<Item = Slice>) {
        match self.style {
            ReplyStyle::Simple => self.simple(ticket, 0),
            _ => {
                let at = ticket.offset.to_be_bytes();
                self.chunk(ticket, chunk::DONE, chunk::OFFSET_DATA, &at, ticket.length as usize);
            }
        }
        self.out.data(slices);
        self.out.end_reply();
    }

    /// An error, after the part of a read's data that was read.
    pub(crate) fn fail(&mut self, ticket: &Ticket, before: Vec<Slice>, failed: &ErrorReply) {
        if self.style == ReplyStyle::Simple {
            self.simple(ticket, failed.code as u32);
            return self.out.end_reply();
        }
        let len: usize = before.iter().map(|slice| slice.len()).sum();
        if len > 0 {
            self.chunk(ticket, 0, chunk::OFFSET_DATA, &ticket.offset.to_be_bytes(), len);
            self.out.data(before);
        }
        let message = &failed.message[..failed.message.floor_char_boundary(MESSAGE_BYTES)];
        let within = |at: &u64| at.checked_sub(ticket.offset).is_some_and(|into| into < ticket.length);
        let at = failed.offset.filter(within);
        let mut payload = (failed.code as u32).to_be_bytes().to_vec();
        payload.extend((message.len() as u16).to_be_bytes());
        payload.extend(message.bytes());
        payload.extend(at.map(u64::to_be_bytes).into_iter().flatten());
        let kind = if at.is_some() { chunk::ERROR_OFFSET } else { chunk::ERROR };
        self.chunk(ticket, chunk::DONE, kind, &payload, 0);
        self.out.end_reply();
    }

    /// Status descriptors; at least one.
    pub(crate) fn status(&mut self, ticket: &Ticket, runs: &[StatusDescriptor]) {
        let runs = if ticket.one_run { &runs[..1] } else { runs };
        let is_extended = self.style == ReplyStyle::Extended;
        let mut payload = wire::BASE_ALLOCATION_ID.to_be_bytes().to_vec();
        if is_extended {
            payload.extend((runs.len() as u32).to_be_bytes());
        }
        for run in runs {
            let length = if ticket.one_run { run.length.min(ticket.length) } else { run.length };
            if is_extended {
                payload.extend(length.to_be_bytes());
                payload.extend(u64::from(run.status).to_be_bytes());
            } else {
                payload.extend(u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
                payload.extend(run.status.to_be_bytes());
            }
        }
        let kind = if is_extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS };
        self.chunk(ticket, chunk::DONE, kind, &payload, 0);
        self.out.end_reply();
    }

    fn simple(&mut self, ticket: &Ticket, error: u32) {
        self.out.put(&wire::SIMPLE_REPLY_MAGIC.to_be_bytes());
        self.out.put(&error.to_be_bytes());
        self.out.put(&ticket.cookie.to_be_bytes());
    }

    /// The header of a chunk, its short payload, and the length of the data that is to follow.
    fn chunk(&mut self, ticket: &Ticket, flags: u16, kind: u16, payload: &[u8], data_bytes: usize) {
        let length = payload.len() + data_bytes;
        let is_extended = self.style == ReplyStyle::Extended;
        let magic = if is_extended { wire::EXTENDED_REPLY_MAGIC } else { wire::STRUCTURED_REPLY_MAGIC };
        self.out.put(&magic.to_be_bytes());
        self.out.put(&flags.to_be_bytes());
        self.out.put(&kind.to_be_bytes());
        self.out.put(&ticket.cookie.to_be_bytes());
        if is_extended {
            self.out.put(&ticket.offset.to_be_bytes());
            self.out.put(&(length as u64).to_be_bytes());
        } else {
            // A payload is at most 32 MiB.
            self.out.put(&(length as u32).to_be_bytes());
        }
        self.out.put(payload);
    }
}

/// True if a successful request returns data or status.
pub(crate) fn wants_payload(ticket: &Ticket) -> bool {
    matches!(ticket.kind, command::READ | command::BLOCK_STATUS)
}
