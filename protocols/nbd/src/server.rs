//! The server's side of a connection.

use sealblock_runtime_memory::{Buffer, Slice};

use crate::config::ServerConfig;
use crate::input::{Fill, Input, Step};
use crate::output::Output;
use crate::reply::{ErrorReply, ReplyStyle, ReplyWriter, StatusDescriptor, wants_payload};
use crate::request::{Header, Request, Ticket, TransmissionMode};
use crate::session_name::SessionName;
use crate::violation::Closed;
use crate::wire::{ErrorCode, command};

/// What a client did.
#[derive(Debug)]
pub enum Event {
    /// The client requested an unknown export; the server replied with an error, or ends the connection if the option has no
    /// error reply. The first 4096 bytes of the name.
    Unknown(String),
    /// The client chose this export, by its index in [`ServerConfig::exports`]. Requests follow.
    Chosen(usize),
    /// The client sent a request.
    Request(Request),
    /// The connection ended: nothing more is read. Requests in flight may still complete.
    Closed(Closed),
}

/// A request whose payload is arriving.
pub(crate) struct IncomingPayload {
    header: Header,
    check_result: Result<(), ErrorCode>,
    /// Memory of the payload; `None` if it is skipped.
    fill: Option<Fill>,
    left: usize,
    held_bytes: usize,
}

/// What the next bytes are.
pub(crate) enum ServerPhase {
    ClientFlags,
    OptionHeader,
    Option { option: u32, len: usize },
    SkipOption { option: u32, left: usize },
    Request,
    Payload(IncomingPayload),
}

/// What was negotiated so far.
#[derive(Debug, Default)]
pub(crate) struct NegotiationState {
    pub(crate) is_fixed: bool,
    pub(crate) no_zeroes: bool,
    pub(crate) style: ReplyStyle,
    /// The export for which `base:allocation` was chosen.
    pub(crate) context: Option<usize>,
    /// The client chose the empty name.
    pub(crate) names_none: bool,
    /// The export for which the client named its session, and that session.
    pub(crate) session: Option<(usize, SessionName)>,
    /// Options so far, and the bytes of their data.
    pub(crate) options: u32,
    pub(crate) option_bytes: u64,
}

/// The server's side of one connection.
///
/// The caller takes events until there are none after each [`Server::received`], and again after each [`Server::sent`] and
/// [`Server::grant`]: requests that waited for room are read then.
pub struct Server {
    pub(crate) config: ServerConfig,
    pub(crate) phase: ServerPhase,
    pub(crate) input: Input,
    pub(crate) output: Output,
    pub(crate) negotiation: NegotiationState,
    pub(crate) chosen: Option<usize>,
    pub(crate) is_stopping: bool,
    /// Requests in flight and their bytes.
    requests: usize,
    bytes: usize,
    /// True while a request waits for room.
    is_full: bool,
    /// Granted bytes in flight, and the bytes that a waiting request needs beyond them.
    granted: usize,
    wanted: Option<usize>,
    closed: Option<Closed>,
    is_close_reported: bool,
}

impl Server {
    /// A connection that was just accepted.
    pub fn new(config: ServerConfig) -> Server {
        let config = config.normalized();
        let (input, output) = (Input::new(&config.pool, config.staging_bytes), Output::new(&config.pool));
        let mut server = Server {
            config,
            phase: ServerPhase::ClientFlags,
            input,
            output,
            negotiation: NegotiationState::default(),
            chosen: None,
            is_stopping: false,
            requests: 0,
            bytes: 0,
            is_full: false,
            granted: usize::MAX,
            wanted: None,
            closed: None,
            is_close_reported: false,
        };
        server.greet();
        server
    }

    /// The buffer for the next receive; `None` while one is lent, while a request waits for room, and once closed.
    pub fn receive_buffer(&mut self) -> Option<Buffer> {
        if self.closed.is_some() || self.is_full {
            return None;
        }
        if let ServerPhase::Payload(payload) = &mut self.phase
            && let Some(fill) = &mut payload.fill
            && payload.left >= self.config.direct_bytes
            && self.input.unread() == 0
        {
            return self.input.lend_direct(fill);
        }
        self.input.lend()
    }

    /// Takes the buffer of [`Server::receive_buffer`] back, whose first `len` bytes are new.
    ///
    /// # Panics
    /// If it is another buffer, or shorter than `len`.
    pub fn received(&mut self, buffer: Buffer, len: usize) {
        let fill = match &mut self.phase {
            ServerPhase::Payload(payload) => payload.fill.as_mut(),
            _ => None,
        };
        self.input.take_back(buffer, len, fill);
        if let ServerPhase::Payload(payload) = &mut self.phase
            && let Some(fill) = &payload.fill
        {
            payload.left = fill.missing();
        }
    }

    /// The next event; `None` until more is received or sent.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            if let Some(closed) = self.closed {
                return (!std::mem::replace(&mut self.is_close_reported, true)).then_some(Event::Closed(closed));
            }
            match self.step() {
                Ok(Step::Event(event)) => return Some(event),
                Ok(Step::Again) => {}
                Ok(Step::Wait) => return None,
                Err(closed) => self.end(closed),
            }
        }
    }

    fn step(&mut self) -> Result<Step<Event>, Closed> {
        (self.is_full, self.wanted) = (false, None);
        match &mut self.phase {
            ServerPhase::ClientFlags => self.client_flags(),
            ServerPhase::OptionHeader => self.option_header(),
            ServerPhase::Option { option, len } => {
                let (option, len) = (*option, *len);
                self.whole_option(option, len)
            }
            ServerPhase::SkipOption { option, left } => {
                let (option, left) = (*option, *left);
                self.skip_option(option, left)
            }
            ServerPhase::Request => self.request(),
            ServerPhase::Payload(_) => Ok(self.payload()),
        }
    }

    fn mode(&self) -> TransmissionMode {
        let style = self.negotiation.style;
        TransmissionMode {
            chunks: style != ReplyStyle::Simple,
            extended: style == ReplyStyle::Extended,
            status: self.negotiation.context.is_some(),
            payload_bytes: self.config.limits.payload_bytes,
        }
    }

    fn request(&mut self) -> Result<Step<Event>, Closed> {
        let mode = self.mode();
        let len = Header::bytes(mode.extended);
        let Some(bytes) = self.input.peek(len) else { return Ok(Step::Wait) };
        let header = Header::read(bytes, mode.extended)?;
        if header.kind == command::DISC {
            self.input.take(len);
            return Err(Closed::Disconnected);
        }
        let payload = header.payload(&mode)?;
        let Some(export) = self.chosen.and_then(|index| self.config.exports.get(index)) else {
            return Err(Closed::Here);
        };
        let verdict = match self.is_stopping {
            true => Err(ErrorCode::Shutdown),
            false => header.check(export, &mode),
        };
        let held_bytes = if verdict.is_ok() { header.held_bytes(payload) } else { 0 };
        if !self.has_room(held_bytes) {
            self.is_full = true;
            return Ok(Step::Wait);
        }
        self.input.take(len);
        self.requests += 1;
        self.bytes += held_bytes;
        let is_wanted = verdict.is_ok() && payload > 0;
        let fill = is_wanted.then(|| Fill::new(self.config.pool.take(payload)));
        self.phase =
            ServerPhase::Payload(IncomingPayload { header, check_result: verdict, fill, left: payload, held_bytes });
        Ok(Step::Again)
    }

    /// True if one more request with these bytes fits into the limits.
    fn has_room(&mut self, bytes: usize) -> bool {
        let held = self.bytes_in_flight();
        let limits = &self.config.limits;
        let need = held.saturating_add(bytes);
        let fits = self.requests + self.output.replies() < limits.commands
            && (bytes == 0 || held == 0 || need <= limits.bytes_in_flight);
        if fits && bytes > 0 && need > self.granted {
            self.wanted = Some(need);
            return false;
        }
        fits
    }

    /// Bounds the bytes in flight from now on, besides [`crate::Limits`]: for a limit over several connections. Requests in
    /// flight keep their bytes.
    pub fn grant(&mut self, bytes: usize) {
        self.granted = bytes;
    }

    /// Bytes in flight that the next request needs granted, if it waits for a grant.
    pub fn wanted_bytes(&self) -> Option<usize> {
        self.wanted
    }

    /// True if the data of a write have begun to arrive, and some are missing.
    pub fn is_receiving_data(&self) -> bool {
        matches!(self.phase, ServerPhase::Payload(_))
    }

    /// True if a request waits for room, within the limits or the grant.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Reads the payload of a request, which may be empty.
    fn payload(&mut self) -> Step<Event> {
        let ServerPhase::Payload(payload) = &mut self.phase else { return Step::Again };
        let now = self.input.take(payload.left);
        payload.left -= now.len();
        if let Some(fill) = &mut payload.fill {
            fill.push(now);
        }
        if payload.left > 0 {
            return Step::Wait;
        }
        let ServerPhase::Payload(payload) = std::mem::replace(&mut self.phase, ServerPhase::Request) else {
            return Step::Again;
        };
        let IncomingPayload { header, check_result: verdict, fill, held_bytes, .. } = payload;
        let data = fill.map(Fill::finish).unwrap_or_default();
        let ticket = header.ticket(held_bytes);
        if verdict.is_ok() && header.is_empty() {
            // What it is not said of ("length 0 is undefined") clients take for success; a read of no bytes is no chunk of data.
            self.release(held_bytes);
            self.writer().done(&ticket);
            return Step::Again;
        }
        match verdict.and_then(|()| header.command(data).ok_or(ErrorCode::Invalid)) {
            Ok(command) => Step::Event(Event::Request(Request { ticket, command })),
            Err(code) => {
                self.fail(ticket, Vec::new(), &code.into());
                Step::Again
            }
        }
    }

    pub(crate) fn end(&mut self, closed: Closed) {
        self.closed = Some(closed);
        // Drop the incomplete request with its memory.
        if let ServerPhase::Payload(payload) = std::mem::replace(&mut self.phase, ServerPhase::Request) {
            self.release(payload.held_bytes);
        }
    }

    /// Completes a request other than a read or a block status with success.
    ///
    /// # Panics
    /// If the request returns data or status.
    pub fn done(&mut self, ticket: Ticket) {
        assert!(!wants_payload(&ticket), "a request for data is answered with data");
        self.release(ticket.held_bytes);
        self.writer().done(&ticket);
    }

    /// Completes a read with its data.
    ///
    /// # Panics
    /// If it is no read, or if the data has another length.
    pub fn data(&mut self, ticket: Ticket, slices: impl AsRef<[Slice]> + IntoIterator<Item = Slice>) {
        let len: usize = slices.as_ref().iter().map(|slice| slice.len()).sum();
        assert!(ticket.kind == command::READ && len as u64 == ticket.length, "a read is answered with all its data");
        self.release(ticket.held_bytes);
        self.writer().data(&ticket, slices);
    }

    /// Completes a block status with descriptors from the request's offset on; the last may go beyond its end.
    ///
    /// # Panics
    /// If it is no block status, or without a descriptor.
    pub fn status(&mut self, ticket: Ticket, runs: &[StatusDescriptor]) {
        assert!(ticket.kind == command::BLOCK_STATUS && !runs.is_empty(), "a status is answered with runs");
        self.release(ticket.held_bytes);
        self.writer().status(&ticket, runs);
    }

    /// Completes a request with an error. `before` is the part of a read before the failure; simple replies omit it.
    ///
    /// # Panics
    /// If `before` has data for another request than a read, or all of its data.
    pub fn fail(&mut self, ticket: Ticket, before: Vec<Slice>, failed: &ErrorReply) {
        let len: usize = before.iter().map(|slice| slice.len()).sum();
        assert!(len == 0 || ticket.kind == command::READ && (len as u64) < ticket.length, "only a part is given");
        self.release(ticket.held_bytes);
        self.writer().fail(&ticket, before, failed);
    }

    fn release(&mut self, held_bytes: usize) {
        self.requests = self.requests.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(held_bytes);
    }

    fn writer(&mut self) -> ReplyWriter<'_> {
        ReplyWriter { style: self.negotiation.style, out: &mut self.output }
    }

    /// The session that the client has named for the chosen export.
    pub fn client_session(&self) -> Option<SessionName> {
        self.negotiation.session.filter(|(export, _)| Some(*export) == self.chosen).map(|(_, session)| session)
    }

    /// True if the client chose an export without naming it: the default.
    pub fn names_none(&self) -> bool {
        self.negotiation.names_none
    }

    /// True if replies have chunks, so a failed read may return the data before the failure.
    pub fn has_chunks(&self) -> bool {
        self.negotiation.style != ReplyStyle::Simple
    }

    /// Appends all output to `out`; returns its bytes. They count against the limits until [`Server::sent`].
    pub fn transmit(&mut self, out: &mut Vec<Slice>) -> usize {
        self.output.take(out)
    }

    /// Marks all output of [`Server::transmit`] as sent.
    pub fn sent(&mut self) {
        self.output.sent();
    }

    /// True if there is output to send.
    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Refuses further options and requests with ESHUTDOWN.
    pub fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Closes the connection: nothing more is read.
    pub fn close(&mut self) {
        if self.closed.is_none() {
            self.end(Closed::Here);
        }
    }

    /// Why the connection ended, if it did.
    pub fn closed(&self) -> Option<Closed> {
        self.closed
    }

    /// Requests in flight, including one whose payload is arriving.
    pub fn requests_in_flight(&self) -> usize {
        self.requests
    }

    /// Data bytes of requests in flight and of unsent replies.
    pub fn bytes_in_flight(&self) -> usize {
        self.bytes + self.output.data_bytes()
    }
}
