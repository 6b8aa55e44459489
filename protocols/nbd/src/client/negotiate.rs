//! The fixed newstyle negotiation as a client leads it: one option after the other, each asked once.

use crate::bytes::Fields;
use crate::client::config::{Goal, OPTION_REPLY_DATA_BYTES};
use crate::client::options::{ExportReply, Listed, ReplyStyle};
use crate::client::session::{Client, Event, Phase, Step};
use crate::client::violation::{Closed, Refused, Violation};
use crate::wire::{self, handshake, info, option, rep};

/// What was agreed on so far.
#[derive(Debug)]
pub(super) struct NegotiationState {
    pub(super) style: ReplyStyle,
    /// How replies call `base:allocation`.
    pub(super) context: Option<u32>,
    listed: Vec<Listed>,
    told: ExportReply,
    /// Replies to the option of the moment.
    replies: usize,
    /// Bytes of all of them.
    bytes: u64,
}

impl Default for NegotiationState {
    fn default() -> NegotiationState {
        let (listed, told) = (Vec::new(), ExportReply::default());
        NegotiationState { style: ReplyStyle::Simple, context: None, listed, told, replies: 0, bytes: 0 }
    }
}

/// A reply to an option whose data is coming.
#[derive(Clone, Copy, Debug)]
pub(super) struct OptionReply {
    option: u32,
    kind: u32,
    length: u32,
}

impl Client {
    pub(super) fn greeting(&mut self) -> Result<Step, Closed> {
        let Some(mut fields) = self.input.peek(16).map(Fields) else { return Ok(Step::Wait) };
        let (magic, style) = (fields.u64().unwrap_or(0), fields.u64().unwrap_or(0));
        if magic != wire::INIT_MAGIC {
            return Err(Violation::Greeting(magic).into());
        }
        match style {
            wire::OPTION_MAGIC => {}
            wire::OLDSTYLE_MAGIC => return Err(Refused::Oldstyle.into()),
            other => return Err(Violation::Style(other).into()),
        }
        let Some(flags) = self.input.peek(wire::GREETING_BYTES).and_then(|all| Fields(&all[16..]).u16()) else {
            return Ok(Step::Wait);
        };
        self.input.take(wire::GREETING_BYTES);
        if flags & handshake::FIXED_NEWSTYLE == 0 {
            return Err(Refused::NotFixed.into());
        }
        let known = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        self.output.put(&u32::from(known).to_be_bytes());
        match self.config.goal {
            Goal::List => self.ask_option(option::LIST, &[]),
            _ if self.config.wants_extended => self.ask_option(option::EXTENDED_HEADERS, &[]),
            _ => self.ask_option(option::STRUCTURED_REPLY, &[]),
        }
        Ok(Step::Again)
    }

    fn ask_option(&mut self, option: u32, data: &[u8]) {
        self.output.put(&wire::OPTION_MAGIC.to_be_bytes());
        self.output.put(&option.to_be_bytes());
        // Names were bounded when the connection was made.
        self.output.put(&(data.len() as u32).to_be_bytes());
        self.output.put(data);
        self.agreed.replies = 0;
        self.phase = Phase::OptionHeader { option };
    }

    /// Ends the negotiation without an export.
    fn abort(&mut self) -> Closed {
        self.output.put(&wire::OPTION_MAGIC.to_be_bytes());
        self.output.put(&option::ABORT.to_be_bytes());
        self.output.put(&0_u32.to_be_bytes());
        Closed::Ended
    }

    pub(super) fn option_header(&mut self, asked: u32) -> Result<Step, Closed> {
        let Some(mut fields) = self.input.peek(wire::OPTION_REPLY_BYTES).map(Fields) else { return Ok(Step::Wait) };
        let magic = fields.u64().unwrap_or(0);
        let mut word = || fields.u32().unwrap_or(0);
        let reply = OptionReply { option: word(), kind: word(), length: word() };
        self.input.take(wire::OPTION_REPLY_BYTES);
        if magic != wire::OPTION_REPLY_MAGIC {
            return Err(Violation::OptionMagic(magic).into());
        }
        if reply.option != asked {
            return Err(Violation::OptionAnswered { expected: asked, actual: reply.option }.into());
        }
        let limits = &self.config.limits;
        self.agreed.replies += 1;
        self.agreed.bytes = self.agreed.bytes.saturating_add(wire::OPTION_REPLY_BYTES as u64 + u64::from(reply.length));
        if self.agreed.replies > limits.option_replies {
            return Err(Violation::OptionReplies(limits.option_replies).into());
        }
        if self.agreed.bytes > limits.negotiation_bytes {
            return Err(Violation::NegotiationBytes(limits.negotiation_bytes).into());
        }
        if reply.length as usize > OPTION_REPLY_DATA_BYTES {
            return Err(reply.malformed());
        }
        self.phase = Phase::OptionData(reply);
        Ok(Step::Again)
    }

    pub(super) fn option_data(&mut self, reply: OptionReply) -> Result<Step, Closed> {
        let length = reply.length as usize;
        let Some(data) = self.input.peek(length).map(<[u8]>::to_vec) else { return Ok(Step::Wait) };
        self.input.take(length);
        self.phase = Phase::OptionHeader { option: reply.option };
        if reply.kind >> 31 == 1 {
            return self.option_refused(reply, &data);
        }
        match (reply.option, reply.kind) {
            (_, rep::ACK) if data.is_empty() => self.option_done(reply.option),
            (option::LIST, rep::SERVER) => {
                let listed = Listed::read(&data).ok_or_else(|| reply.malformed())?;
                self.agreed.listed.push(listed);
                Ok(Step::Again)
            }
            (option::SET_META_CONTEXT, rep::META_CONTEXT) => self.take_context(reply, &data),
            (option::INFO | option::GO, rep::INFO) => {
                self.agreed.told.take(&data).ok_or_else(|| reply.malformed())??;
                Ok(Step::Again)
            }
            (_, rep::ACK) => Err(reply.malformed()),
            (option, kind) => Err(Violation::OptionReply { option, kind }.into()),
        }
    }

    /// One context at most is there, the one that was asked for.
    fn take_context(&mut self, reply: OptionReply, data: &[u8]) -> Result<Step, Closed> {
        let mut fields = Fields(data);
        let id = fields.u32().ok_or_else(|| reply.malformed())?;
        if fields.0 != wire::BASE_ALLOCATION.as_bytes() || self.agreed.context.is_some() {
            return Err(reply.malformed());
        }
        self.agreed.context = Some(id);
        Ok(Step::Again)
    }

    /// An option that is not needed may be refused.
    fn option_refused(&mut self, reply: OptionReply, text: &[u8]) -> Result<Step, Closed> {
        let refused = Refused::of(reply.option, reply.kind, text);
        let is_final = matches!(refused, Refused::TlsRequired | Refused::Shutdown(_));
        match reply.option {
            _ if is_final => Err(refused.into()),
            option::EXTENDED_HEADERS => {
                self.ask_option(option::STRUCTURED_REPLY, &[]);
                Ok(Step::Again)
            }
            option::STRUCTURED_REPLY => self.choose(),
            option::SET_META_CONTEXT => {
                self.agreed.context = None;
                self.choose()
            }
            _ => Err(refused.into()),
        }
    }

    fn option_done(&mut self, asked: u32) -> Result<Step, Closed> {
        match asked {
            option::EXTENDED_HEADERS | option::STRUCTURED_REPLY => {
                let is_extended = asked == option::EXTENDED_HEADERS;
                self.agreed.style = if is_extended { ReplyStyle::Extended } else { ReplyStyle::Structured };
                if !self.config.wants_status {
                    return self.choose();
                }
                let (name, context) = (named(self.config.export()), named(wire::BASE_ALLOCATION));
                self.ask_option(option::SET_META_CONTEXT, &[name, 1_u32.to_be_bytes().to_vec(), context].concat());
                Ok(Step::Again)
            }
            option::SET_META_CONTEXT => self.choose(),
            option::LIST => {
                self.done = Some(self.abort());
                Ok(Step::Event(Event::Listed(std::mem::take(&mut self.agreed.listed))))
            }
            _ => self.end_of_info(asked),
        }
    }

    /// INFO or GO.
    fn choose(&mut self) -> Result<Step, Closed> {
        let option = if matches!(self.config.goal, Goal::Go(_)) { option::GO } else { option::INFO };
        let wanted = [3, info::NAME, info::DESCRIPTION, info::BLOCK_SIZE].map(u16::to_be_bytes).concat();
        let data = [named(self.config.export()), wanted].concat();
        self.ask_option(option, &data);
        Ok(Step::Again)
    }

    fn end_of_info(&mut self, asked: u32) -> Result<Step, Closed> {
        let told = std::mem::take(&mut self.agreed.told);
        let described = told.finish(self.agreed.style, self.agreed.context)?;
        if asked == option::INFO {
            self.done = Some(self.abort());
            return Ok(Step::Event(Event::Described(described)));
        }
        self.described = Some(described.clone());
        self.phase = Phase::Reply;
        Ok(Step::Event(Event::Ready(described)))
    }
}

impl OptionReply {
    fn malformed(&self) -> Closed {
        Violation::OptionData { option: self.option, length: self.length }.into()
    }
}

/// A string with its length before it.
fn named(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}
