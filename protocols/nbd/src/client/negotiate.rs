//! The fixed newstyle negotiation of a client: one option after the other, each sent once.

use crate::client::config::{Goal, OPTION_REPLY_DATA_BYTES};
use crate::client::export_info::ListedExport;
use crate::client::session::{Client, ClientPhase, Event, OptionReply};
use crate::client::violation::{Closed, NegotiationError, Violation};
use crate::identity::Identity;
use crate::input::Step;
use crate::reply::ReplyStyle;
use crate::wire::FieldReader;
use crate::wire::{self, handshake, info, option, rep};

impl Client {
    pub(super) fn greeting(&mut self) -> Result<Step<Event>, Closed> {
        let Some(mut fields) = self.input.peek(16).map(FieldReader) else { return Ok(Step::Wait) };
        let (magic, style) = (fields.u64().unwrap_or(0), fields.u64().unwrap_or(0));
        if magic != wire::INIT_MAGIC {
            return Err(Violation::Greeting(magic).into());
        }
        match style {
            wire::OPTION_MAGIC => {}
            wire::OLDSTYLE_MAGIC => return Err(NegotiationError::Oldstyle.into()),
            other => return Err(Violation::Style(other).into()),
        }
        let Some(flags) = self.input.peek(wire::GREETING_BYTES).and_then(|all| FieldReader(&all[16..]).u16()) else {
            return Ok(Step::Wait);
        };
        self.input.take(wire::GREETING_BYTES);
        if flags & handshake::FIXED_NEWSTYLE == 0 {
            return Err(NegotiationError::NotFixed.into());
        }
        let known = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        self.output.put(&u32::from(known).to_be_bytes());
        match self.config.goal {
            Goal::List => self.send_option(option::LIST, &[]),
            _ if self.config.wants_extended => self.send_option(option::EXTENDED_HEADERS, &[]),
            _ => self.send_option(option::STRUCTURED_REPLY, &[]),
        }
        Ok(Step::Again)
    }

    fn send_option(&mut self, option: u32, data: &[u8]) {
        self.output.put(&wire::OPTION_MAGIC.to_be_bytes());
        self.output.put(&option.to_be_bytes());
        // `Client::new` bounds the name.
        self.output.put(&(data.len() as u32).to_be_bytes());
        self.output.put(data);
        self.negotiation.replies = 0;
        self.phase = ClientPhase::OptionHeader { option };
    }

    /// Ends the negotiation without an export.
    fn abort(&mut self) -> Closed {
        self.output.put(&wire::OPTION_MAGIC.to_be_bytes());
        self.output.put(&option::ABORT.to_be_bytes());
        self.output.put(&0_u32.to_be_bytes());
        Closed::Ended
    }

    pub(super) fn option_header(&mut self, option: u32) -> Result<Step<Event>, Closed> {
        let Some(mut fields) = self.input.peek(wire::OPTION_REPLY_BYTES).map(FieldReader) else {
            return Ok(Step::Wait);
        };
        let magic = fields.u64().unwrap_or(0);
        let mut word = || fields.u32().unwrap_or(0);
        let reply = OptionReply { option: word(), kind: word(), length: word() };
        self.input.take(wire::OPTION_REPLY_BYTES);
        if magic != wire::OPTION_REPLY_MAGIC {
            return Err(Violation::OptionMagic(magic).into());
        }
        if reply.option != option {
            return Err(Violation::OptionAnswered { expected: option, actual: reply.option }.into());
        }
        let limits = &self.config.limits;
        self.negotiation.replies += 1;
        self.negotiation.bytes =
            self.negotiation.bytes.saturating_add(wire::OPTION_REPLY_BYTES as u64 + u64::from(reply.length));
        if self.negotiation.replies > limits.option_replies {
            return Err(Violation::OptionReplies(limits.option_replies).into());
        }
        if self.negotiation.bytes > limits.negotiation_bytes {
            return Err(Violation::NegotiationBytes(limits.negotiation_bytes).into());
        }
        if reply.length as usize > OPTION_REPLY_DATA_BYTES {
            return Err(reply.malformed());
        }
        self.phase = ClientPhase::OptionData(reply);
        Ok(Step::Again)
    }

    pub(super) fn option_data(&mut self, reply: OptionReply) -> Result<Step<Event>, Closed> {
        let length = reply.length as usize;
        let Some(data) = self.input.peek(length).map(<[u8]>::to_vec) else { return Ok(Step::Wait) };
        self.input.take(length);
        self.phase = ClientPhase::OptionHeader { option: reply.option };
        if reply.kind >> 31 == 1 {
            return self.option_refused(reply, &data);
        }
        match (reply.option, reply.kind) {
            (_, rep::ACK) if data.is_empty() => self.option_done(reply.option),
            (option::LIST, rep::SERVER) => {
                let listed = ListedExport::read(&data).ok_or_else(|| reply.malformed())?;
                self.negotiation.listed.push(listed);
                Ok(Step::Again)
            }
            (option::SET_META_CONTEXT, rep::META_CONTEXT) => self.set_context(reply, &data),
            (option::INFO | option::GO, rep::INFO) => {
                self.negotiation.export_reply.take(&data).ok_or_else(|| reply.malformed())??;
                Ok(Step::Again)
            }
            (_, rep::ACK) => Err(reply.malformed()),
            (option, kind) => Err(Violation::OptionReply { option, kind }.into()),
        }
    }

    /// Stores the context's identifier; refuses any other context than the requested ones.
    fn set_context(&mut self, reply: OptionReply, data: &[u8]) -> Result<Step<Event>, Closed> {
        let mut fields = FieldReader(data);
        let id = fields.u32().ok_or_else(|| reply.malformed())?;
        let session = self.config.session.map(|session| session.to_string());
        if self.config.wants_status
            && fields.0 == wire::BASE_ALLOCATION.as_bytes()
            && self.negotiation.context.is_none()
        {
            self.negotiation.context = Some(id);
        } else if session.is_some_and(|session| fields.0 == session.as_bytes()) && !self.negotiation.is_fenced {
            self.negotiation.is_fenced = true;
        } else if let Some(bits) = older_bits(fields.0).filter(|_| self.negotiation.older.is_none()) {
            self.negotiation.older = Some(bits);
        } else if !self.negotiation.identity.take(fields.0) {
            return Err(reply.malformed());
        }
        Ok(Step::Again)
    }

    /// Handles an error reply: the server may refuse an optional option.
    fn option_refused(&mut self, reply: OptionReply, text: &[u8]) -> Result<Step<Event>, Closed> {
        let refused = NegotiationError::of(reply.option, reply.kind, text);
        let is_final = matches!(refused, NegotiationError::TlsRequired | NegotiationError::Shutdown(_));
        match reply.option {
            _ if is_final => Err(refused.into()),
            option::EXTENDED_HEADERS => {
                self.send_option(option::STRUCTURED_REPLY, &[]);
                Ok(Step::Again)
            }
            option::STRUCTURED_REPLY => self.choose(),
            option::SET_META_CONTEXT => {
                (self.negotiation.context, self.negotiation.is_fenced, self.negotiation.older) = (None, false, None);
                self.negotiation.identity = Identity::default();
                self.choose()
            }
            _ => Err(refused.into()),
        }
    }

    fn option_done(&mut self, option: u32) -> Result<Step<Event>, Closed> {
        match option {
            option::EXTENDED_HEADERS | option::STRUCTURED_REPLY => {
                let is_extended = option == option::EXTENDED_HEADERS;
                self.negotiation.style = if is_extended { ReplyStyle::Extended } else { ReplyStyle::Structured };
                let status = self.config.wants_status.then(|| named(wire::BASE_ALLOCATION));
                let session = self.config.session.map(|session| named(&session.to_string()));
                let of_export = [wire::OLDER, wire::IDENTITY].map(named);
                let contexts: Vec<Vec<u8>> = status.into_iter().chain(session).chain(of_export).collect();
                let head = [named(self.config.export()), (contexts.len() as u32).to_be_bytes().to_vec()].concat();
                self.send_option(option::SET_META_CONTEXT, &[head, contexts.concat()].concat());
                Ok(Step::Again)
            }
            option::SET_META_CONTEXT => self.choose(),
            option::LIST => {
                self.done = Some(self.abort());
                Ok(Step::Event(Event::Listed(std::mem::take(&mut self.negotiation.listed))))
            }
            _ => self.end_of_info(option),
        }
    }

    /// INFO or GO.
    fn choose(&mut self) -> Result<Step<Event>, Closed> {
        let option = if matches!(self.config.goal, Goal::Go(_)) { option::GO } else { option::INFO };
        let wanted = [3, info::NAME, info::DESCRIPTION, info::BLOCK_SIZE].map(u16::to_be_bytes).concat();
        let data = [named(self.config.export()), wanted].concat();
        self.send_option(option, &data);
        Ok(Step::Again)
    }

    fn end_of_info(&mut self, option: u32) -> Result<Step<Event>, Closed> {
        let export_reply = std::mem::take(&mut self.negotiation.export_reply);
        let negotiated = &mut self.negotiation;
        let (older, identity) = (negotiated.older.unwrap_or(0), std::mem::take(&mut negotiated.identity));
        let (style, context, is_fenced) = (negotiated.style, negotiated.context, negotiated.is_fenced);
        let export = export_reply.finish(style, context, is_fenced, older, identity)?;
        if option == option::INFO {
            self.done = Some(self.abort());
            return Ok(Step::Event(Event::Described(export)));
        }
        self.export = Some(export.clone());
        self.phase = ClientPhase::Reply;
        Ok(Step::Event(Event::Ready(export)))
    }
}

/// The bits of the context that tells why blocks may be older.
fn older_bits(name: &[u8]) -> Option<u8> {
    let digits = std::str::from_utf8(name).ok()?.strip_prefix(wire::OLDER)?.strip_prefix('=')?;
    let is_hex = digits.len() == 2 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    u8::from_str_radix(digits, 16).ok().filter(|_| is_hex)
}

/// A string with its length in front.
fn named(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}
