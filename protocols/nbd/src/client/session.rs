//! The client's side of a connection: buffers, events, and requests to send.

use sealblock_runtime_memory::{Buffer, Slice};

use crate::client::chunk::Chunk;
use crate::client::config::{Config, Goal};
use crate::client::export_info::{ExportInfo, ExportReply, ListedExport};
use crate::client::pending::{CompletedRequest, PendingRequest};
use crate::client::request::{ClientRequest, RequestFields, SubmitError};
use crate::client::violation::{Closed, Violation};
use crate::identity::Identity;
use crate::input::{Input, Step};
use crate::output::Output;
use crate::reply::ReplyStyle;
use crate::wire::{self, STRING_BYTES, command};

/// What a server did.
#[derive(Debug)]
pub enum Event {
    /// The exports of the server; for [`Goal::List`].
    Listed(Vec<ListedExport>),
    /// Information about the export; for [`Goal::Info`].
    Described(ExportInfo),
    /// Information about the export; requests may be sent now. For [`Goal::Go`].
    Ready(ExportInfo),
    /// A request completed.
    Completed(CompletedRequest),
    /// The connection ended: nothing more is read, and requests in flight are lost.
    Closed(Closed),
}

/// What the next bytes are.
pub(super) enum ClientPhase {
    Greeting,
    OptionHeader { option: u32 },
    OptionData(OptionReply),
    Reply,
    Chunk(Box<Chunk>),
}

/// What was negotiated so far.
#[derive(Debug, Default)]
pub(super) struct NegotiationState {
    pub(super) style: ReplyStyle,
    /// Identifier of `base:allocation` in replies.
    pub(super) context: Option<u32>,
    /// The server knows the session, and fences the older ones.
    pub(super) is_fenced: bool,
    /// Why blocks may be older, as bits, if the server says it.
    pub(super) older: Option<u8>,
    /// What the export is, as far as the server has said it.
    pub(super) identity: Identity,
    pub(super) listed: Vec<ListedExport>,
    pub(super) export_reply: ExportReply,
    /// Replies to the current option.
    pub(super) replies: usize,
    /// Bytes of all replies to options.
    pub(super) bytes: u64,
}

/// A reply to an option whose data is arriving.
#[derive(Clone, Copy, Debug)]
pub(super) struct OptionReply {
    pub(super) option: u32,
    pub(super) kind: u32,
    pub(super) length: u32,
}

impl OptionReply {
    pub(super) fn malformed(&self) -> Closed {
        Violation::OptionData { option: self.option, length: self.length }.into()
    }
}

/// The client's side of one connection.
///
/// The caller takes events until there are none after each [`Client::received`], and sends the output of
/// [`Client::transmit`] after that and after each [`Client::submit`].
pub struct Client {
    pub(crate) config: Config,
    pub(super) phase: ClientPhase,
    pub(super) input: Input,
    pub(super) output: Output,
    pub(super) negotiation: NegotiationState,
    pub(super) export: Option<ExportInfo>,
    /// Requests in flight by index, free indexes, and the count of all requests.
    pub(super) pending: Vec<Option<PendingRequest>>,
    free: Vec<usize>,
    sent: u32,
    /// The reason to close after the current event.
    pub(super) done: Option<Closed>,
    closed: Option<Closed>,
    is_close_reported: bool,
}

impl Client {
    /// A connection that was just opened.
    ///
    /// # Panics
    /// If the export's name is longer than 4096 bytes.
    pub fn new(config: Config) -> Client {
        let config = config.normalized();
        assert!(config.export().len() <= STRING_BYTES, "names have at most {STRING_BYTES} bytes");
        let (input, output) = (Input::new(&config.pool, config.staging_bytes), Output::new(&config.pool));
        Client {
            config,
            phase: ClientPhase::Greeting,
            input,
            output,
            negotiation: NegotiationState::default(),
            export: None,
            pending: Vec::new(),
            free: Vec::new(),
            sent: 0,
            done: None,
            closed: None,
            is_close_reported: false,
        }
    }

    /// The buffer for the next receive; `None` while one is lent, and once closed.
    pub fn receive_buffer(&mut self) -> Option<Buffer> {
        if self.closed.is_some() {
            return None;
        }
        if let ClientPhase::Chunk(chunk) = &mut self.phase
            && let Some((fill, left)) = chunk.fill()
            && *left >= self.config.direct_bytes
            && self.input.unread() == 0
        {
            return self.input.lend_direct(fill);
        }
        self.input.lend()
    }

    /// Takes the buffer of [`Client::receive_buffer`] back, whose first `len` bytes are new.
    ///
    /// # Panics
    /// If it is another buffer, or shorter than `len`.
    pub fn received(&mut self, buffer: Buffer, len: usize) {
        let fill = match &mut self.phase {
            ClientPhase::Chunk(chunk) => chunk.fill(),
            _ => None,
        };
        match fill {
            Some((fill, left)) => {
                self.input.take_back(buffer, len, Some(fill));
                *left = fill.missing();
            }
            None => self.input.take_back(buffer, len, None),
        }
    }

    /// The next event; `None` until more is received.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            if let Some(closed) = self.done.take() {
                self.end(closed);
            }
            if let Some(closed) = &self.closed {
                let is_told = std::mem::replace(&mut self.is_close_reported, true);
                return (!is_told).then(|| Event::Closed(closed.clone()));
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
        match &mut self.phase {
            ClientPhase::Greeting => self.greeting(),
            ClientPhase::OptionHeader { option } => {
                let option = *option;
                self.option_header(option)
            }
            ClientPhase::OptionData(reply) => {
                let reply = *reply;
                self.option_data(reply)
            }
            ClientPhase::Reply => Ok(self.reply()?),
            ClientPhase::Chunk(_) => Ok(self.chunk()?),
        }
    }

    fn end(&mut self, closed: Closed) {
        self.closed = Some(closed);
        // Drop requests in flight with their memory.
        self.phase = ClientPhase::Greeting;
        self.pending.clear();
        self.free.clear();
    }

    /// Sends a request; returns the index of its completion, which is not reused before.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing is sent then.
    pub fn submit(&mut self, request: ClientRequest) -> Result<usize, SubmitError> {
        let export = self.export.as_ref().filter(|_| self.closed.is_none() && self.done.is_none());
        let export = export.ok_or(SubmitError::NotReady)?;
        request.check(export, self.config.limits.payload_bytes)?;
        let is_extended = export.is_extended();
        if !self.can_submit() {
            return Err(SubmitError::Full);
        }
        let fields = request.fields(is_extended);
        // Reads are at most 32 MiB.
        let len = if fields.kind == command::READ { fields.length as usize } else { 0 };
        let data = self.config.pool.take(len);
        let place = self.free.pop().unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len() - 1
        });
        self.sent = self.sent.wrapping_add(1);
        // The count makes a late reply to an earlier request at the same index detectable.
        let cookie = u64::from(self.sent) << 32 | place as u64;
        self.pending[place] = Some(PendingRequest::new(cookie, fields, data));
        self.put_header(fields, cookie, is_extended);
        if let ClientRequest::Write { data, .. } = request {
            self.output.data([data]);
        }
        Ok(place)
    }

    fn put_header(&mut self, fields: RequestFields, cookie: u64, is_extended: bool) {
        let magic = if is_extended { wire::EXTENDED_REQUEST_MAGIC } else { wire::REQUEST_MAGIC };
        self.output.put(&magic.to_be_bytes());
        self.output.put(&fields.flags.to_be_bytes());
        self.output.put(&fields.kind.to_be_bytes());
        self.output.put(&cookie.to_be_bytes());
        self.output.put(&fields.offset.to_be_bytes());
        match is_extended {
            true => self.output.put(&fields.length.to_be_bytes()),
            // `ClientRequest::check` has seen that it fits.
            false => self.output.put(&(fields.length as u32).to_be_bytes()),
        }
    }

    /// Removes the request at `place`.
    pub(super) fn remove_request(&mut self, place: usize) -> Option<PendingRequest> {
        let pending = self.pending.get_mut(place)?.take();
        if pending.is_some() {
            self.free.push(place);
        }
        pending
    }

    /// True if one more request may be submitted now.
    pub fn can_submit(&self) -> bool {
        self.export.is_some() && self.closed.is_none() && self.in_flight() < self.config.limits.commands
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.pending.len() - self.free.len()
    }

    /// Closes the connection; after GO sends DISC, so that the server completes requests in flight. Their replies are not
    /// read.
    pub fn disconnect(&mut self) {
        let is_ready = self.export.is_some() && matches!(self.config.goal, Goal::Go(_));
        if self.closed.is_none() && is_ready {
            let fields = RequestFields { kind: command::DISC, flags: 0, offset: 0, length: 0 };
            let is_extended = self.export.as_ref().is_some_and(ExportInfo::is_extended);
            self.put_header(fields, 0, is_extended);
            self.end(Closed::Ended);
        }
        self.close();
    }

    /// Closes the connection without DISC.
    pub fn close(&mut self) {
        if self.closed.is_none() {
            self.end(Closed::Here);
        }
    }

    /// Appends all output to `out`; returns its bytes.
    pub fn transmit(&mut self, out: &mut Vec<Slice>) -> usize {
        self.output.take(out)
    }

    /// True if there is output to send.
    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Information about the export, once it was chosen.
    pub fn export(&self) -> Option<&ExportInfo> {
        self.export.as_ref()
    }

    /// Why the connection ended, if it did.
    pub fn closed(&self) -> Option<&Closed> {
        self.closed.as_ref()
    }
}
