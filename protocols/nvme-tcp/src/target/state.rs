//! State of a target's connection: its setup (NVMe/TCP 3.1), and commands that arrive, with or without data in their
//! capsule (3.3.1, 3.6.2.6).

use rustc_hash::FxHashSet;
use sealblock_protocols_nvme::{Command, Completion, DataPointer};
use smallvec::SmallVec;
use zerocopy::FromBytes;

use super::events::{CommandData, DataError, Event, Received, Token};
use crate::config::{Negotiated, TargetConfig, whole_dwords};
use crate::output::{Gather, Payload};
use crate::pdu::{self, CapsuleCmd, DIGEST_DATA, DIGEST_HEADER, Direction, Frame, IcReq, IcResp, PduType, TermReq};
use crate::receive::{Fill, Link, Side, Sink};
use crate::slab::Slab;
use crate::violation::{Closed, Violation, clause};

pub struct TargetState {
    pub(super) config: TargetConfig,
    pub(super) link: Link<Event, Output>,
    pub(super) success_flag: bool,
    pub(super) commands: Slab<CommandState>,
    /// By the index of their command.
    pub(super) transfers: Vec<Transfer>,
    /// Command identifiers of the commands in flight.
    pub(super) cids: FxHashSet<u16>,
    pub(super) bytes_in_flight: usize,
    /// Of those, bytes in capsules.
    pub(super) capsule_bytes: usize,
}

/// A command in flight. Kept small, because it is written and dropped for each command; see [`Transfer`].
pub(super) struct CommandState {
    pub(super) cid: u16,
    /// Length of the host's Command Data Buffer, 0 if there is none.
    pub(super) len_bytes: u32,
    /// This command's share of `bytes_in_flight`.
    pub(super) held_bytes: usize,
    /// True if the export may leave it uncompleted (Asynchronous Event Request).
    pub(super) may_stay_unanswered: bool,
    pub(super) stage: CommandStage,
    /// Data to send, in order; `queued_bytes` of it were queued so far.
    pub(super) sends: SmallVec<[OutgoingData; 1]>,
    pub(super) queued_bytes: u32,
    pub(super) sent_bytes: u32,
    pub(super) completion: Option<Completion>,
}

pub(super) enum CommandStage {
    /// In-capsule data of this command is arriving.
    Capsule(Command),
    /// The export has the command, and may fetch its data unless `fetched`.
    Received { fetched: bool },
    /// Data is being fetched; `State::transfers` has the transfer.
    Fetching,
    /// The completion is known.
    Completed,
}

/// Data of a write that is being fetched.
#[derive(Default)]
pub(super) struct Transfer {
    /// The memory; `None` while a PDU fills it.
    pub(super) fill: Option<Fill>,
    /// Bytes that were received, or that the header of the current PDU announces.
    pub(super) received: u32,
    /// Bytes that R2Ts requested which were output.
    pub(super) solicited: u32,
    /// Bytes that R2Ts requested which were output or queued.
    pub(super) queued: u32,
    pub(super) is_long: bool,
}

pub(super) struct OutgoingData {
    pub(super) payload: Payload,
    pub(super) sent: usize,
}

/// A PDU to be sent; of commands, by their tokens.
pub enum Output {
    IcResp(Box<IcResp>),
    R2t(u32),
    Data(u32),
    Response(u32),
}

impl TargetState {
    pub(super) fn new(mut config: TargetConfig) -> TargetState {
        config.cpda = config.cpda.min(crate::pdu::MAX_ALIGNMENT_CODE);
        config.max_h2c_data_bytes = whole_dwords(config.max_h2c_data_bytes).max(crate::pdu::MIN_MAXH2CDATA_BYTES);
        config.max_r2t_bytes = whole_dwords(config.max_r2t_bytes);
        config.max_c2h_data_bytes = whole_dwords(config.max_c2h_data_bytes);
        TargetState {
            link: Link::new(Direction::ToController, Direction::ToHost),
            success_flag: false,
            commands: Slab::new(config.max_commands),
            transfers: Vec::new(),
            cids: FxHashSet::default(),
            bytes_in_flight: 0,
            capsule_bytes: 0,
            config,
        }
    }

    /// Removes a command whose response was output.
    pub(super) fn release(&mut self, token: u32) {
        let freed = self.commands.release(token, |entry| (entry.cid, entry.held_bytes, entry.len_bytes));
        if let Some((cid, held_bytes, len_bytes)) = freed {
            self.cids.remove(&cid);
            self.bytes_in_flight -= held_bytes;
            // A command without a host's buffer had its data in the capsule.
            self.capsule_bytes -= if len_bytes == 0 { held_bytes } else { 0 };
        }
    }

    /// The transfer of a command that is in [`CommandStage::Fetching`].
    pub(super) fn transfer(&mut self, token: u32) -> Option<(&mut CommandState, &mut Transfer)> {
        let entry = self.commands.get_mut(token).filter(|entry| matches!(entry.stage, CommandStage::Fetching))?;
        Some((entry, self.transfers.get_mut(usize::from(token as u16))?))
    }
}

impl Side for TargetState {
    type Event = Event;
    type Output = Output;

    fn link(&self) -> &Link<Event, Output> {
        &self.link
    }

    fn link_mut(&mut self) -> &mut Link<Event, Output> {
        &mut self.link
    }

    fn header(&mut self, kind: PduType, header: &[u8], frame: &Frame, sink: &mut Sink) -> Result<(), Closed> {
        if kind == PduType::H2CTermReq {
            return Err(TermReq::reason(header));
        }
        let outcome = match (self.link.negotiated, kind) {
            (None, _) => self.connect(kind, header),
            (Some(_), PduType::CapsuleCmd) => self.capsule(header, frame, sink),
            (Some(negotiated), PduType::H2CData) => self.h2c_data(header, frame, &negotiated, sink),
            (Some(_), _) => Err(Violation::sequence(clause::SETUP, "a second request to set the connection up")),
        };
        outcome.map_err(Closed::Violated)
    }

    fn payload(&mut self, sink: Sink) {
        let Some(entry) = self.commands.get_mut(sink.token) else { return };
        match entry.stage {
            CommandStage::Capsule(command) => self.capsule_data(sink, command),
            CommandStage::Fetching => {
                if let Some((_, transfer)) = self.transfer(sink.token) {
                    transfer.fill = sink.fill;
                }
                self.transfer_data(sink.token);
            }
            CommandStage::Received { .. } | CommandStage::Completed => {}
        }
    }

    fn put(&mut self, output: Output, gather: &mut Gather<'_>) {
        match output {
            Output::IcResp(response) => gather.header(&self.link.outgoing, PduType::IcResp, &*response),
            Output::R2t(token) => self.put_r2t(token, gather),
            Output::Data(token) => self.put_data(token, gather),
            Output::Response(token) => self.put_response(token, gather),
        }
    }

    fn commands_in_flight(&self) -> usize {
        self.commands.len()
    }

    fn end(&mut self, closed: Closed) {
        self.commands.clear();
        self.transfers.clear();
        self.cids.clear();
        (self.bytes_in_flight, self.capsule_bytes) = (0, 0);
        self.link.events.push_back(Event::Closed(closed));
    }
}

impl TargetState {
    pub(super) fn connect(&mut self, kind: PduType, header: &[u8]) -> Result<(), Violation> {
        if kind != PduType::IcReq {
            return Err(Violation::sequence(clause::SETUP, "a PDU before the connection is set up"));
        }
        let request = IcReq::ref_from_bytes(header).expect("the header of an ICReq has its length");
        request.check()?;
        let config = &self.config;
        let digests = request.digests & pdu::digests(config.header_digest, config.data_digest);
        let negotiated = Negotiated {
            header_digest: digests & DIGEST_HEADER != 0,
            data_digest: digests & DIGEST_DATA != 0,
            host_alignment_bytes: pdu::alignment_bytes(request.hpda),
            controller_alignment_bytes: pdu::alignment_bytes(config.cpda),
            max_h2c_data_bytes: config.max_h2c_data_bytes,
            max_r2ts: request.maxr2t.get().saturating_add(1).min(config.max_r2ts.get()),
        };
        let response = IcResp::new(config.cpda, digests, config.max_h2c_data_bytes);
        self.link.establish(negotiated);
        self.link.output.push_back(Output::IcResp(Box::new(response)));
        self.link.events.push_back(Event::Established(negotiated));
        Ok(())
    }
}

impl TargetState {
    pub(super) fn capsule(&mut self, header: &[u8], frame: &Frame, sink: &mut Sink) -> Result<(), Violation> {
        let command = CapsuleCmd::ref_from_bytes(header).expect("the header of a capsule has its length").command;
        if frame.data_bytes > self.config.max_in_capsule_bytes {
            return Err(Violation::field(4, clause::CAPSULES, "more in-capsule data than the controller takes"));
        }
        let data = self.capsule_data_of(&command, frame)?;
        let cid = command.cid.get();
        if self.cids.contains(&cid) && !self.forget_unanswered(cid) {
            return Err(Violation::field(CapsuleCmd::CID_AT, clause::CAPSULE_CMD, "the CID is in use"));
        }
        let entry = || CommandState {
            cid,
            len_bytes: 0,
            held_bytes: 0,
            may_stay_unanswered: false,
            stage: CommandStage::Received { fetched: false },
            sends: SmallVec::new(),
            queued_bytes: 0,
            sent_bytes: 0,
            completion: None,
        };
        let Some(token) = self.commands.insert_with(entry) else {
            return Err(Violation::sequence(clause::CAPSULES, "more commands than the queue has entries"));
        };
        self.cids.insert(cid);
        self.deliver(token, command, data, (frame, sink));
        Ok(())
    }

    /// The command's data by its data pointer, checked against the capsule.
    fn capsule_data_of(&self, command: &Command, frame: &Frame) -> Result<CommandData, Violation> {
        let unusable = |error| Ok(CommandData::Unusable(error));
        match command.data() {
            Err(error) => unusable(DataError::Sgl(error)),
            Ok(DataPointer::None | DataPointer::Transport { .. }) if frame.data_bytes > 0 => {
                Err(Violation::field(4, clause::CAPSULES, "data in a capsule whose command has none there"))
            }
            Ok(DataPointer::None) => Ok(CommandData::None),
            Ok(DataPointer::Transport { length_bytes }) => Ok(CommandData::Transport { len_bytes: length_bytes }),
            Ok(DataPointer::InCapsule { length_bytes, .. }) if length_bytes != frame.data_bytes => {
                unusable(DataError::Length)
            }
            Ok(DataPointer::InCapsule { offset_bytes, .. }) if offset_bytes != 0 => unusable(DataError::Offset),
            Ok(DataPointer::InCapsule { length_bytes, .. }) => {
                let buffer = self.config.pool.take(length_bytes as usize);
                Ok(CommandData::InCapsule(Received { buffer, crcs: None }))
            }
        }
    }

    /// Removes a command with this CID that may stay uncompleted. True if there was one.
    fn forget_unanswered(&mut self, cid: u16) -> bool {
        let mut all = self.commands.tokens();
        let kept = all.find(|&token| self.commands.get(token).is_some_and(|s| s.may_stay_unanswered && s.cid == cid));
        drop(all);
        kept.is_some_and(|token| {
            self.release(token);
            true
        })
    }

    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.bytes_in_flight.saturating_add(bytes) <= self.config.max_bytes_in_flight
    }

    /// Reports the command, now or once its in-capsule data has arrived.
    fn deliver(&mut self, token: u32, command: Command, data: CommandData, (frame, sink): (&Frame, &mut Sink)) {
        let entry = self.commands.get_mut(token).expect("the caller has just made the entry");
        match data {
            CommandData::InCapsule(Received { buffer, .. }) => {
                entry.stage = CommandStage::Capsule(command);
                entry.held_bytes = buffer.len();
                self.bytes_in_flight += buffer.len();
                self.capsule_bytes += buffer.len();
                let layout =
                    self.config.layout_of.as_ref().filter(|_| frame.data_digest).and_then(|layout| layout.of(&command));
                *sink = Sink { token, fill: Some(Fill::new(buffer, frame.data_digest, layout)) };
            }
            data => {
                if let CommandData::Transport { len_bytes } = data {
                    entry.len_bytes = len_bytes;
                }
                self.link.events.push_back(Event::Command { token: Token(token), command, data });
            }
        }
    }

    /// Reports a command whose in-capsule data has arrived.
    pub(super) fn capsule_data(&mut self, sink: Sink, command: Command) {
        let (Some(entry), Some(fill)) = (self.commands.get_mut(sink.token), sink.fill) else { return };
        entry.stage = CommandStage::Received { fetched: true };
        let data = if fill.is_damaged() {
            CommandData::Unusable(DataError::Digest)
        } else {
            let (buffer, crcs) = fill.finish();
            CommandData::InCapsule(Received { buffer, crcs })
        };
        self.link.events.push_back(Event::Command { token: Token(sink.token), command, data });
    }
}
