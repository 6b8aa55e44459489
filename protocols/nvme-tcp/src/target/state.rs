//! What the phases of a target share: the commands in flight, what is to be told and what is to be sent.

use std::collections::VecDeque;

use sealblock_protocols_nvme::{Command, Completion};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use super::{Counters, Event};
use crate::config::{Negotiated, TargetConfig, whole_dwords};
use crate::gather::Headers;
use crate::payload::Payload;
use crate::pdu::{Direction, Frame, IcResp, PduRules, PduType, TermReq};
use crate::receive::{Fill, Side, Sink};
use crate::slab::Slab;
use crate::tags::TagSet;
use crate::violation::Closed;

pub(super) struct TargetState {
    pub(super) config: TargetConfig,
    pub(super) incoming: PduRules,
    pub(super) outgoing: PduRules,
    pub(super) negotiated: Option<Negotiated>,
    pub(super) closed: Option<Closed>,
    pub(super) success_flag: bool,
    pub(super) commands: Slab<CommandState>,
    /// By the place of their command, as far as there was one there.
    pub(super) transfers: Vec<Transfer>,
    /// Command identifiers of the commands in flight.
    pub(super) cids: TagSet,
    pub(super) events: VecDeque<Event>,
    pub(super) output: VecDeque<Output>,
    pub(super) bytes_in_flight: usize,
    /// Of those, bytes that came in capsules.
    pub(super) capsule_bytes: usize,
    /// Transfers on their way that are long enough to be received in place.
    pub(super) long_transfers: usize,
    pub(super) counters: Counters,
    pub(super) headers: Headers,
}

/// A command in flight. What only few commands have lies elsewhere: a slot is written and dropped for each of them.
pub(super) struct CommandState {
    pub(super) cid: u16,
    /// Length of the host's Command Data Buffer, 0 if there is none.
    pub(super) len_bytes: u32,
    /// What this command holds of `bytes_in_flight`.
    pub(super) held_bytes: usize,
    /// The export may never answer it.
    pub(super) may_stay_unanswered: bool,
    pub(super) stage: CommandStage,
    /// Data to send, in order; `queued_bytes` of it were given so far.
    pub(super) sends: SmallVec<[OutgoingData; 1]>,
    pub(super) queued_bytes: u32,
    pub(super) sent_bytes: u32,
    pub(super) completion: Option<Completion>,
}

pub(super) enum CommandStage {
    /// In-capsule data of this command is arriving.
    Capsule(Command),
    /// The export has the command, and may fetch its data if `fetched` says it has not.
    Received { fetched: bool },
    /// Data is being fetched; `State::transfers` has the transfer.
    Fetching,
    /// The completion is known.
    Completed,
}

/// Data on its way from the host.
#[derive(Default)]
pub(super) struct Transfer {
    /// The memory; `None` while a PDU fills it.
    pub(super) fill: Option<Fill>,
    /// Bytes that came, or are announced by the header of the PDU that is coming.
    pub(super) received: u32,
    /// Bytes that R2Ts handed out asked for.
    pub(super) solicited: u32,
    /// Bytes that R2Ts handed out or waiting in the output ask for.
    pub(super) queued: u32,
    pub(super) is_long: bool,
}

pub(super) struct OutgoingData {
    pub(super) payload: Payload,
    pub(super) sent: usize,
}

pub(super) enum Output {
    IcResp(Box<IcResp>),
    R2t(u32),
    Data(u32),
    Response(u32),
    Terminate(Box<[u8]>),
}

impl TargetState {
    pub(super) fn new(mut config: TargetConfig) -> TargetState {
        config.cpda = config.cpda.min(crate::pdu::MAX_ALIGNMENT_CODE);
        config.max_h2c_data_bytes = whole_dwords(config.max_h2c_data_bytes).max(crate::pdu::MIN_MAXH2CDATA_BYTES);
        config.max_r2t_bytes = whole_dwords(config.max_r2t_bytes);
        config.max_c2h_data_bytes = whole_dwords(config.max_c2h_data_bytes);
        TargetState {
            incoming: PduRules::initial(Direction::ToController),
            outgoing: PduRules::initial(Direction::ToHost),
            negotiated: None,
            closed: None,
            success_flag: false,
            commands: Slab::new(config.max_commands),
            transfers: Vec::new(),
            cids: TagSet::default(),
            events: VecDeque::new(),
            output: VecDeque::new(),
            bytes_in_flight: 0,
            capsule_bytes: 0,
            long_transfers: 0,
            counters: Counters::default(),
            headers: Headers::default(),
            config,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.closed.is_none()
    }

    /// Ends the connection. A violation is told to the host, with the header that was being read.
    pub(super) fn fail(&mut self, closed: Closed, header: &[u8]) {
        if !self.is_open() {
            return;
        }
        self.closed = Some(closed);
        self.output.clear();
        self.commands.clear();
        self.transfers.clear();
        self.cids = TagSet::default();
        (self.bytes_in_flight, self.capsule_bytes) = (0, 0);
        if let Closed::Violated(violation) = closed {
            let request = TermReq::new(Direction::ToHost, &violation, header.len());
            self.output.push_back(Output::Terminate([request.as_bytes(), header].concat().into()));
        }
        self.events.push_back(Event::Closed(closed));
    }

    /// Forgets a command whose response is on its way.
    pub(super) fn release(&mut self, token: u32) {
        let freed = self.commands.release(token, |slot| (slot.cid, slot.held_bytes, slot.len_bytes));
        if let Some((cid, held_bytes, len_bytes)) = freed {
            self.cids.remove(cid);
            self.bytes_in_flight -= held_bytes;
            // Only data that is fetched has a buffer of the host behind it.
            self.capsule_bytes -= if len_bytes == 0 { held_bytes } else { 0 };
        }
    }

    /// The transfer of a command that is in [`Stage::Fetching`].
    pub(super) fn transfer(&mut self, token: u32) -> Option<(&mut CommandState, &mut Transfer)> {
        let slot = self.commands.get_mut(token).filter(|slot| matches!(slot.stage, CommandStage::Fetching))?;
        Some((slot, self.transfers.get_mut(usize::from(token as u16))?))
    }
}

impl Side for TargetState {
    fn rules(&self) -> PduRules {
        self.incoming
    }

    fn awaits_long_payload(&self) -> bool {
        self.long_transfers > 0
    }

    fn header(&mut self, kind: PduType, header: &[u8], frame: &Frame, sink: &mut Sink) -> Result<(), Closed> {
        if kind == PduType::H2CTermReq {
            return Err(crate::terminated(header));
        }
        let outcome = match (self.negotiated, kind) {
            (None, _) => self.connect(kind, header),
            (Some(_), PduType::CapsuleCmd) => self.capsule(header, frame, sink),
            (Some(negotiated), PduType::H2CData) => self.h2c_data(header, frame, &negotiated, sink),
            (Some(_), _) => Err(crate::violation::Violation::sequence(
                crate::violation::clause::SETUP,
                "a second request to set the connection up",
            )),
        };
        outcome.map_err(Closed::Violated)
    }

    fn payload(&mut self, sink: Sink) {
        let Some(slot) = self.commands.get_mut(sink.token) else { return };
        match slot.stage {
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
}
