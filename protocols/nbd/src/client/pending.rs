//! Requests in flight, and the part of their reply that has arrived.

use sealblock_runtime_memory::Buffer;

use crate::client::request::RequestFields;
use crate::client::violation::{Violation, after_colon};
use crate::reply::StatusDescriptor;
use crate::wire::ErrorCode;

/// An error in a server's reply.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{code}{}{}", .offset.map(|at| format!(" at byte {at}")).unwrap_or_default(), after_colon(.message))]
pub struct ServerError {
    /// The error.
    pub code: ErrorCode,
    /// Offset on the export, in bytes, if the reply has one; within the request.
    pub offset: Option<u64>,
    /// The server's text, possibly empty, without characters that are not printable.
    pub message: String,
}

/// Reply to a request that succeeded.
#[derive(Debug)]
pub enum Reply {
    /// Success without data.
    Done,
    /// All data of a read.
    Data(Buffer),
    /// Status descriptors from the request's offset on; they end at its end or before. At least one.
    Status(Vec<StatusDescriptor>),
}

/// The end of a request.
#[derive(Debug)]
pub struct CompletedRequest {
    /// Index that [`crate::client::Client::submit`] returned.
    pub place: usize,
    /// The reply, or errors in the order in which they came: at least one.
    pub outcome: Result<Reply, Vec<ServerError>>,
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct PendingRequest {
    pub(super) cookie: u64,
    pub(super) fields: RequestFields,
    /// Data of a read, and the byte ranges of it that have arrived: in order, with gaps between them.
    pub(super) data: Buffer,
    pieces: Vec<(usize, usize)>,
    data_chunks: usize,
    pub(super) runs: Option<Vec<StatusDescriptor>>,
    pub(super) errors: Vec<ServerError>,
}

impl PendingRequest {
    pub(super) fn new(cookie: u64, fields: RequestFields, data: Buffer) -> PendingRequest {
        let (pieces, errors) = (Vec::new(), Vec::new());
        PendingRequest { cookie, fields, data, pieces, data_chunks: 0, runs: None, errors }
    }

    /// Position of these bytes in the request's data, if they are part of it.
    pub(super) fn within(&self, offset: u64, length: u64) -> Result<(usize, usize), Violation> {
        let into = offset.checked_sub(self.fields.offset);
        let fits = |into: &u64| into.checked_add(length).is_some_and(|end| length > 0 && end <= self.fields.length);
        // The data is in memory, so positions in it fit into usize.
        let into =
            into.filter(fits).and_then(|into| Some((usize::try_from(into).ok()?, usize::try_from(length).ok()?)));
        into.ok_or(Violation::OutOfRange { offset, length })
    }

    /// Marks these bytes as received; refuses bytes that were received before.
    pub(super) fn mark_received(&mut self, at: usize, len: usize, max_pieces: usize) -> Result<(), Violation> {
        self.data_chunks += 1;
        if self.data_chunks > 1 && self.fields.flags & crate::wire::flag::DF != 0 {
            return Err(Violation::Fragmented);
        }
        let end = at + len;
        let index = self.pieces.partition_point(|piece| piece.0 < at);
        let overlap = Violation::Overlap { offset: self.fields.offset + at as u64, length: len as u64 };
        let before = index.checked_sub(1);
        if before.is_some_and(|i| self.pieces[i].1 > at) || self.pieces.get(index).is_some_and(|next| next.0 < end) {
            return Err(overlap);
        }
        let joins_before = before.is_some_and(|i| self.pieces[i].1 == at);
        let joins_next = self.pieces.get(index).is_some_and(|next| next.0 == end);
        match (joins_before, joins_next) {
            (true, true) => self.pieces[index - 1].1 = self.pieces.remove(index).1,
            (true, false) => self.pieces[index - 1].1 = end,
            (false, true) => self.pieces[index].0 = at,
            (false, false) if self.pieces.len() >= max_pieces => return Err(Violation::Pieces(max_pieces)),
            (false, false) => self.pieces.insert(index, (at, end)),
        }
        Ok(())
    }

    /// Completes the request after its last chunk.
    pub(super) fn finish(self, place: usize) -> Result<CompletedRequest, Violation> {
        if !self.errors.is_empty() {
            return Ok(CompletedRequest { place, outcome: Err(self.errors) });
        }
        let answer = match self.fields.kind {
            crate::wire::command::READ if self.pieces[..] == [(0, self.data.len())] => Reply::Data(self.data),
            crate::wire::command::READ => return Err(Violation::Incomplete),
            crate::wire::command::BLOCK_STATUS => Reply::Status(self.runs.ok_or(Violation::Incomplete)?),
            _ => Reply::Done,
        };
        Ok(CompletedRequest { place, outcome: Ok(answer) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::command;

    fn pending(length: u64) -> PendingRequest {
        let fields = RequestFields { kind: command::READ, flags: 0, offset: 4096, length };
        PendingRequest::new(1, fields, Buffer::zeroed(length as usize))
    }

    #[test]
    fn pieces_join_in_any_order_and_never_overlap() {
        let mut read = pending(100);
        for (at, len) in [(40, 10), (0, 10), (90, 10), (10, 30), (50, 40)] {
            assert_eq!(read.mark_received(at, len, 8), Ok(()), "{at}");
        }
        assert_eq!(read.pieces, [(0, 100)]);
        for (at, len) in [(0, 1), (99, 1), (30, 20), (0, 100)] {
            let overlap = Violation::Overlap { offset: 4096 + at as u64, length: len as u64 };
            assert_eq!(read.mark_received(at, len, 8), Err(overlap));
        }
        let mut read = pending(100);
        assert_eq!((read.mark_received(0, 1, 2), read.mark_received(10, 1, 2)), (Ok(()), Ok(())));
        assert_eq!(read.mark_received(20, 1, 2), Err(Violation::Pieces(2)));
        assert_eq!(read.mark_received(11, 1, 2), Ok(()), "what joins a piece is no piece more");
    }

    #[test]
    fn what_is_outside_of_a_request_is_not_within() {
        let read = pending(100);
        assert_eq!(read.within(4096, 100), Ok((0, 100)));
        assert_eq!(read.within(4195, 1), Ok((99, 1)));
        for (offset, length) in [(4095, 1), (4096, 101), (4196, 1), (4100, 0), (4097, u64::MAX), (u64::MAX, 2)] {
            assert_eq!(read.within(offset, length), Err(Violation::OutOfRange { offset, length }));
        }
    }
}
