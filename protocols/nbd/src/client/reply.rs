//! Headers of replies in each of their three forms, matched with what is in flight.

use crate::bytes::FieldReader;
use crate::client::chunk::Chunk;
use crate::client::options::ReplyStyle;
use crate::client::pending::{PendingRequest, ServerError};
use crate::client::session::{Client, ClientPhase, ClientStep, Event};
use crate::client::violation::Violation;
use crate::wire::{self, ErrorCode, chunk, command};

/// The header of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkHeader {
    pub(super) is_last: bool,
    pub(super) kind: u16,
    pub(super) length: u64,
}

impl Client {
    /// Reads the header of whatever reply comes next.
    pub(super) fn reply(&mut self) -> Result<ClientStep, Violation> {
        let Some(magic) = self.input.peek(4).and_then(|bytes| FieldReader(bytes).u32()) else {
            return Ok(ClientStep::Wait);
        };
        match (magic, self.negotiation.style) {
            (wire::SIMPLE_REPLY_MAGIC, ReplyStyle::Simple | ReplyStyle::Structured) => self.simple_reply(),
            (wire::STRUCTURED_REPLY_MAGIC, ReplyStyle::Structured) => self.chunk_header(false),
            (wire::EXTENDED_REPLY_MAGIC, ReplyStyle::Extended) => self.chunk_header(true),
            _ => Err(Violation::ReplyMagic(magic)),
        }
    }

    /// The place of the request under this cookie.
    fn place_of(&self, cookie: u64) -> Result<(usize, &PendingRequest), Violation> {
        let place = (cookie & u64::from(u32::MAX)) as usize;
        let pending = self.pending.get(place).and_then(Option::as_ref).filter(|pending| pending.cookie == cookie);
        pending.map(|pending| (place, pending)).ok_or(Violation::Cookie(cookie))
    }

    fn simple_reply(&mut self) -> Result<ClientStep, Violation> {
        let Some(bytes) = self.input.peek(wire::SIMPLE_REPLY_BYTES) else { return Ok(ClientStep::Wait) };
        let mut fields = FieldReader(&bytes[4..]);
        let (error, cookie) = (fields.u32().unwrap_or(0), fields.u64().unwrap_or(0));
        let (place, pending) = self.place_of(cookie)?;
        let (kind, length) = (pending.fields.kind, pending.fields.length);
        if self.negotiation.style != ReplyStyle::Simple && matches!(kind, command::READ | command::BLOCK_STATUS) {
            return Err(Violation::SimpleReply(kind));
        }
        self.input.take(wire::SIMPLE_REPLY_BYTES);
        if error != 0 {
            let error = ServerError { code: ErrorCode::of(error), offset: None, message: String::new() };
            return self.finish(place, Some(error));
        }
        if kind != command::READ {
            return self.finish(place, None);
        }
        let max = self.config.limits.pieces;
        let Some(pending) = &mut self.pending[place] else { return Err(Violation::Cookie(cookie)) };
        // Reads are at most 32 MiB.
        let len = length as usize;
        pending.mark_received(0, len, max)?;
        self.phase = ClientPhase::Chunk(Box::new(Chunk::whole_data(place, pending, len)));
        Ok(ClientStep::Again)
    }

    fn chunk_header(&mut self, is_extended: bool) -> Result<ClientStep, Violation> {
        let len = if is_extended { wire::EXTENDED_REPLY_BYTES } else { wire::STRUCTURED_REPLY_BYTES };
        let Some(bytes) = self.input.peek(len) else { return Ok(ClientStep::Wait) };
        let mut fields = FieldReader(&bytes[4..]);
        let (flags, kind) = (fields.u16().unwrap_or(0), fields.u16().unwrap_or(0));
        let cookie = fields.u64().unwrap_or(0);
        let offset = if is_extended { fields.u64() } else { None };
        let length = if is_extended { fields.u64() } else { fields.u32().map(u64::from) }.unwrap_or(0);
        let (place, pending) = self.place_of(cookie)?;
        if let Some(actual) = offset.filter(|offset| *offset != pending.fields.offset) {
            return Err(Violation::ReplyOffset { expected: pending.fields.offset, actual });
        }
        // Flags without a meaning are ignored, as the protocol wants it.
        let header = ChunkHeader { is_last: flags & chunk::DONE != 0, kind, length };
        let begun = Chunk::begin(place, pending.fields, header, is_extended)?;
        self.input.take(len);
        self.phase = ClientPhase::Chunk(Box::new(begun));
        Ok(ClientStep::Again)
    }

    /// The last of a request was read.
    pub(super) fn finish(&mut self, place: usize, error: Option<ServerError>) -> Result<ClientStep, Violation> {
        self.phase = ClientPhase::Reply;
        let Some(mut pending) = self.remove_request(place) else { return Ok(ClientStep::Again) };
        pending.errors.extend(error);
        Ok(ClientStep::Event(Event::Completed(pending.finish(place)?)))
    }
}
