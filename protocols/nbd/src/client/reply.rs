//! Reads replies in each of their three forms, and the payload of each chunk type, into the request in flight.

use crate::client::chunk::{Chunk, ChunkHeader, DataChunk, StatusChunk};
use crate::client::pending::{PendingRequest, ServerError};
use crate::client::session::{Client, ClientPhase, Event};
use crate::client::violation::{Violation, printable};
use crate::input::Step;
use crate::reply::ReplyStyle;
use crate::wire::FieldReader;
use crate::wire::{self, ErrorCode, STRING_BYTES, chunk, command};

impl Client {
    /// Reads the header of the next reply.
    pub(super) fn reply(&mut self) -> Result<Step<Event>, Violation> {
        let Some(magic) = self.input.peek(4).and_then(|bytes| FieldReader(bytes).u32()) else {
            return Ok(Step::Wait);
        };
        match (magic, self.negotiation.style) {
            (wire::SIMPLE_REPLY_MAGIC, ReplyStyle::Simple | ReplyStyle::Structured) => self.simple_reply(),
            (wire::STRUCTURED_REPLY_MAGIC, ReplyStyle::Structured) => self.chunk_header(false),
            (wire::EXTENDED_REPLY_MAGIC, ReplyStyle::Extended) => self.chunk_header(true),
            _ => Err(Violation::ReplyMagic(magic)),
        }
    }

    /// The request in flight with this cookie.
    fn place_of(&self, cookie: u64) -> Result<(usize, &PendingRequest), Violation> {
        let place = (cookie & u64::from(u32::MAX)) as usize;
        let pending = self.pending.get(place).and_then(Option::as_ref).filter(|pending| pending.cookie == cookie);
        pending.map(|pending| (place, pending)).ok_or(Violation::Cookie(cookie))
    }

    fn simple_reply(&mut self) -> Result<Step<Event>, Violation> {
        let Some(bytes) = self.input.peek(wire::SIMPLE_REPLY_BYTES) else { return Ok(Step::Wait) };
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
        Ok(Step::Again)
    }

    fn chunk_header(&mut self, is_extended: bool) -> Result<Step<Event>, Violation> {
        let len = if is_extended { wire::EXTENDED_REPLY_BYTES } else { wire::STRUCTURED_REPLY_BYTES };
        let Some(bytes) = self.input.peek(len) else { return Ok(Step::Wait) };
        let mut fields = FieldReader(&bytes[4..]);
        let (flags, kind) = (fields.u16().unwrap_or(0), fields.u16().unwrap_or(0));
        let cookie = fields.u64().unwrap_or(0);
        let offset = if is_extended { fields.u64() } else { None };
        let length = if is_extended { fields.u64() } else { fields.u32().map(u64::from) }.unwrap_or(0);
        let (place, pending) = self.place_of(cookie)?;
        if let Some(actual) = offset.filter(|offset| *offset != pending.fields.offset) {
            return Err(Violation::ReplyOffset { expected: pending.fields.offset, actual });
        }
        // Unknown flags are ignored ("Structured reply flags").
        let header = ChunkHeader { is_last: flags & chunk::DONE != 0, kind, length };
        let begun = Chunk::begin(place, pending.fields, header, is_extended)?;
        self.input.take(len);
        self.phase = ClientPhase::Chunk(Box::new(begun));
        Ok(Step::Again)
    }

    /// Completes a request after its last chunk.
    pub(super) fn finish(&mut self, place: usize, error: Option<ServerError>) -> Result<Step<Event>, Violation> {
        self.phase = ClientPhase::Reply;
        let Some(mut pending) = self.remove_request(place) else { return Ok(Step::Again) };
        pending.errors.extend(error);
        Ok(Step::Event(Event::Completed(pending.finish(place)?)))
    }
}

impl Client {
    /// Goes on with the payload of a chunk.
    pub(super) fn chunk(&mut self) -> Result<Step<Event>, Violation> {
        let ClientPhase::Chunk(chunk) = &self.phase else { return Ok(Step::Again) };
        match chunk.kind {
            chunk::NONE => self.end_chunk(None),
            chunk::OFFSET_DATA if chunk.data.is_some() => self.data(),
            chunk::OFFSET_DATA => self.begin_data(),
            chunk::OFFSET_HOLE => self.hole(),
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT if chunk.status.is_some() => self.runs(),
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => self.begin_runs(),
            _ => self.error(),
        }
    }

    /// The chunk and its request.
    fn current(&mut self) -> Option<(&mut Chunk, &mut PendingRequest)> {
        let ClientPhase::Chunk(chunk) = &mut self.phase else { return None };
        let pending = self.pending.get_mut(chunk.place)?.as_mut()?;
        Some((chunk, pending))
    }

    /// Ends a chunk whose payload was read.
    fn end_chunk(&mut self, error: Option<ServerError>) -> Result<Step<Event>, Violation> {
        let max = self.config.limits.errors.max(1);
        let Some((chunk, pending)) = self.current() else { return Ok(Step::Again) };
        let (place, is_last) = (chunk.place, chunk.is_last);
        if pending.errors.len() < max {
            pending.errors.extend(error);
        }
        if is_last {
            return self.finish(place, None);
        }
        self.phase = ClientPhase::Reply;
        Ok(Step::Again)
    }

    fn begin_data(&mut self) -> Result<Step<Event>, Violation> {
        let Some(offset) = self.input.peek(8).and_then(|bytes| FieldReader(bytes).u64()) else {
            return Ok(Step::Wait);
        };
        self.input.take(8);
        let max = self.config.limits.pieces;
        let Some((chunk, pending)) = self.current() else { return Ok(Step::Again) };
        let (at, len) = pending.within(offset, chunk.left - 8)?;
        pending.mark_received(at, len, max)?;
        chunk.data = Some(DataChunk::of(pending, at, len));
        Ok(Step::Again)
    }

    fn data(&mut self) -> Result<Step<Event>, Violation> {
        let ClientPhase::Chunk(chunk) = &mut self.phase else { return Ok(Step::Again) };
        let Some(data) = &mut chunk.data else { return Ok(Step::Again) };
        let now = self.input.take(data.left);
        data.left -= now.len();
        data.fill.push(now);
        if data.left > 0 {
            return Ok(Step::Wait);
        }
        let whole = chunk.data.take().map(DataChunk::join).unwrap_or_default();
        let Some((_, pending)) = self.current() else { return Ok(Step::Again) };
        pending.data = whole;
        self.end_chunk(None)
    }

    fn hole(&mut self) -> Result<Step<Event>, Violation> {
        let Some(mut fields) = self.input.peek(12).map(FieldReader) else { return Ok(Step::Wait) };
        let (offset, length) = (fields.u64().unwrap_or(0), fields.u32().unwrap_or(0));
        self.input.take(12);
        let max = self.config.limits.pieces;
        let Some((_, pending)) = self.current() else { return Ok(Step::Again) };
        let (at, len) = pending.within(offset, length.into())?;
        pending.mark_received(at, len, max)?;
        pending.data[at..at + len].fill(0);
        self.end_chunk(None)
    }

    fn begin_runs(&mut self) -> Result<Step<Event>, Violation> {
        let context = self.negotiation.context;
        let max = self.config.limits.runs as u64;
        let ClientPhase::Chunk(chunk) = &mut self.phase else { return Ok(Step::Again) };
        let (head, run) = if chunk.is_extended { (8, 16) } else { (4, 8) };
        let Some(mut fields) = self.input.peek(head).map(FieldReader) else { return Ok(Step::Wait) };
        let id = fields.u32().unwrap_or(0);
        let runs_left = (chunk.left - head as u64) / run;
        let descriptor_count = fields.u32().map_or(runs_left, u64::from);
        self.input.take(head);
        if Some(id) != context {
            return Err(Violation::Context(id));
        }
        if descriptor_count != runs_left || runs_left > max {
            return Err(Violation::ChunkLength { kind: chunk.kind, length: chunk.left });
        }
        chunk.status = Some(StatusChunk { runs: Vec::new(), runs_left, reached: 0 });
        let is_second = self.current().is_some_and(|(_, pending)| pending.runs.is_some());
        if is_second { Err(Violation::Runs) } else { Ok(Step::Again) }
    }

    fn runs(&mut self) -> Result<Step<Event>, Violation> {
        let ClientPhase::Chunk(chunk) = &mut self.phase else { return Ok(Step::Again) };
        let Some(pending) = self.pending.get_mut(chunk.place).and_then(Option::as_mut) else {
            return Ok(Step::Again);
        };
        let Some(status) = &mut chunk.status else { return Ok(Step::Again) };
        while status.runs_left > 0 {
            let len = if chunk.is_extended { 16 } else { 8 };
            let Some(mut fields) = self.input.peek(len).map(FieldReader) else { return Ok(Step::Wait) };
            let (length, flags) = match chunk.is_extended {
                true => (fields.u64(), fields.u64()),
                false => (fields.u32().map(u64::from), fields.u32().map(u64::from)),
            };
            self.input.take(len);
            status.runs_left -= 1;
            status.take(pending.fields, length.unwrap_or(0), flags.unwrap_or(0))?;
        }
        pending.runs = chunk.status.take().map(|status| status.runs);
        self.end_chunk(None)
    }

    fn error(&mut self) -> Result<Step<Event>, Violation> {
        let ClientPhase::Chunk(chunk) = &self.phase else { return Ok(Step::Again) };
        let (kind, length) = (chunk.kind, chunk.left);
        // Not more than `ERROR_BYTES`, for which the staging buffer has room.
        let Some(payload) = self.input.peek(length as usize) else { return Ok(Step::Wait) };
        let mut fields = FieldReader(payload);
        let (number, text_len) = (fields.u32().unwrap_or(0), fields.u16().unwrap_or(0));
        let wrong = Violation::ChunkLength { kind, length };
        let message = printable(fields.bytes(text_len.into()).filter(|text| text.len() <= STRING_BYTES).ok_or(wrong)?);
        let offset = if kind == chunk::ERROR_OFFSET { Some(fields.u64().ok_or(wrong)?) } else { None };
        // An error of an unknown type may have more fields after its text.
        if matches!(kind, chunk::ERROR | chunk::ERROR_OFFSET) && fields.end().is_none() {
            return Err(wrong);
        }
        self.input.take(length as usize);
        if number == 0 {
            return Err(Violation::NoError);
        }
        let Some((_, pending)) = self.current() else { return Ok(Step::Again) };
        if let Some(offset) = offset {
            pending.within(offset, 1)?;
        }
        self.end_chunk(Some(ServerError { code: ErrorCode::of(number), offset, message }))
    }
}
