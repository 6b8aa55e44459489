//! One side of a connection: moves bytes between the caller's buffers and the [`Side`], and keeps its output.

use sealblock_runtime_memory::{Buffer, Pool, Slice};
use zerocopy::IntoBytes;

use crate::config::Negotiated;
use crate::output::{Gather, Headers, TransmitLimit};
use crate::pdu::TermReq;
use crate::receive::{ReceiveCounters, Receiver, Side};
use crate::violation::Closed;

/// What a connection transferred so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Received bytes.
    pub received: ReceiveCounters,
    /// Bytes of command data that were output.
    pub payload_bytes_sent: u64,
    /// Of those, bytes that were read to compute a data digest; the others had known CRCs, or no digest.
    pub payload_bytes_sent_checksummed: u64,
}

/// One side of a connection: [`crate::Target`] or [`crate::Host`].
pub struct Connection<S> {
    pub(crate) receiver: Receiver,
    pub(crate) state: S,
    pool: Pool,
    headers: Headers,
    /// Of the bytes that were output, those that were read to compute a data digest.
    checksummed_bytes: u64,
}

impl<S: Side> Connection<S> {
    pub(crate) fn of(state: S, pool: Pool, staging_bytes: usize, direct_bytes: usize) -> Connection<S> {
        let receiver = Receiver::new(pool.clone(), staging_bytes, direct_bytes);
        Connection { receiver, state, pool, headers: Headers::default(), checksummed_bytes: 0 }
    }

    /// The buffer for the next receive from the socket, unless one is lent or the connection is closed.
    pub(crate) fn lend(&mut self) -> Option<Buffer> {
        self.closed().is_none().then(|| self.receiver.lend(&self.state)).flatten()
    }

    /// Takes back the buffer of `receive_buffer`, whose first `len` bytes are new (0 is allowed), and processes them. The
    /// caller detects the end of the stream.
    ///
    /// # Panics
    /// If it is not the lent buffer, whole, or is shorter than `len`.
    pub fn received(&mut self, buffer: Buffer, len: usize) {
        if self.closed().is_some() {
            return;
        }
        let Err(closed) = self.receiver.take_back(buffer, len, &mut self.state) else { return };
        self.fail(closed);
        if let Closed::Violated(violation) = closed {
            let header = self.receiver.offending_header();
            let link = self.state.link_mut();
            let request = TermReq::new(link.outgoing.direction, &violation, header.len());
            link.termination = Some([request.as_bytes(), header].concat().into());
        }
    }

    /// Ends the connection; drops commands and output.
    fn fail(&mut self, closed: Closed) {
        let link = self.state.link_mut();
        link.closed = Some(closed);
        link.output.clear();
        self.state.end(closed);
    }

    /// The next event, in order.
    pub fn next_event(&mut self) -> Option<S::Event> {
        self.state.link_mut().events.pop_front()
    }

    /// True if [`Connection::transmit`] has output.
    pub fn has_output(&self) -> bool {
        let link = self.state.link();
        !link.output.is_empty() || link.termination.is_some()
    }

    /// Appends the next output to `out`, in order; returns its bytes. The caller sends it before the output of the next
    /// call.
    pub fn transmit(&mut self, out: &mut Vec<Slice>, limit: TransmitLimit) -> usize {
        if !self.has_output() {
            return 0;
        }
        let mut gather = Gather::new(out, (&self.pool, &mut self.headers), limit, &mut self.checksummed_bytes);
        while gather.has_room() {
            if let Some(output) = self.state.link_mut().output.pop_front() {
                self.state.put(output, &mut gather);
            } else if let Some(request) = self.state.link_mut().termination.take() {
                gather.put(&request);
            } else {
                break;
            }
        }
        gather.finish()
    }

    /// Ends the connection; drops commands and output.
    pub fn close(&mut self) {
        if self.closed().is_none() {
            self.fail(Closed::Local);
        }
    }

    /// Why the connection ended, if it did. Nothing is received any more; shut the socket down once
    /// [`Connection::has_output`] is false.
    pub fn closed(&self) -> Option<Closed> {
        self.state.link().closed
    }

    /// What was negotiated; `None` before that. A host that requires a digest checks it here.
    pub fn negotiated(&self) -> Option<Negotiated> {
        self.state.link().negotiated
    }

    /// How many commands are in flight.
    pub fn commands_in_flight(&self) -> usize {
        self.state.commands_in_flight()
    }

    /// Bytes of command data that were output so far.
    pub fn payload_bytes_sent(&self) -> u64 {
        self.state.link().sent_bytes
    }

    /// What was transferred so far.
    pub fn counters(&self) -> Counters {
        let (payload_bytes_sent, payload_bytes_sent_checksummed) = (self.payload_bytes_sent(), self.checksummed_bytes);
        Counters { received: self.receiver.counters(), payload_bytes_sent, payload_bytes_sent_checksummed }
    }
}
