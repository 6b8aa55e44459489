//! What the phases of a host share: the commands in flight, what is to be told and what is to be sent.

use std::collections::VecDeque;

use sealblock_protocols_nvme::Command;
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use super::Event;
use crate::config::{HostConfig, Negotiated, whole_dwords};
use crate::gather::Headers;
use crate::payload::Payload;
use crate::pdu::{DIGEST_DATA, DIGEST_HEADER, Direction, Frame, IcReq, PduRules, PduType, TermReq};
use crate::receive::{Fill, Side, Sink};
use crate::slab::Slab;
use crate::target::Counters;
use crate::violation::{Closed, Violation, clause};

pub(super) struct HostState {
    pub(super) config: HostConfig,
    pub(super) incoming: PduRules,
    pub(super) outgoing: PduRules,
    pub(super) negotiated: Option<Negotiated>,
    pub(super) closed: Option<Closed>,
    pub(super) commands: Slab<CommandState>,
    pub(super) events: VecDeque<Event>,
    pub(super) output: VecDeque<Output>,
    /// Reads on their way that are long enough to be received in place.
    pub(super) long_transfers: usize,
    pub(super) counters: Counters,
    pub(super) headers: Headers,
}

/// A command in flight.
pub(super) struct CommandState {
    pub(super) command: Command,
    /// Whether the capsule has been handed out.
    pub(super) is_sent: bool,
    pub(super) data: TransferData,
}

pub(super) enum TransferData {
    None,
    /// All of it goes in the capsule.
    InCapsule(Payload),
    Write(WriteTransfer),
    Read(ReadTransfer),
}

pub(super) struct WriteTransfer {
    pub(super) payload: Payload,
    /// End of the last R2T's range.
    pub(super) solicited: u32,
    /// Ranges of R2Ts that are not wholly handed out, in order.
    pub(super) r2t_ranges: SmallVec<[R2tRange; 1]>,
}

/// What is left of the range of one R2T.
pub(super) struct R2tRange {
    pub(super) ttag: u16,
    pub(super) from: u32,
    pub(super) to: u32,
}

pub(super) struct ReadTransfer {
    /// The memory; `None` while a PDU fills it.
    pub(super) fill: Option<Fill>,
    pub(super) len_bytes: u32,
    /// Bytes that came, or are announced by the header of the PDU that is coming.
    pub(super) received: u32,
    pub(super) is_last: bool,
    pub(super) is_success: bool,
    pub(super) is_long: bool,
}

pub(super) enum Output {
    IcReq,
    Capsule(u32),
    Data(u32),
    Terminate(Box<[u8]>),
}

impl HostState {
    pub(super) fn new(mut config: HostConfig) -> HostState {
        config.hpda = config.hpda.min(crate::pdu::MAX_ALIGNMENT_CODE);
        config.max_h2c_data_bytes = whole_dwords(config.max_h2c_data_bytes);
        HostState {
            incoming: PduRules::initial(Direction::ToHost),
            outgoing: PduRules::initial(Direction::ToController),
            negotiated: None,
            closed: None,
            commands: Slab::new(config.max_commands),
            events: VecDeque::new(),
            output: VecDeque::from([Output::IcReq]),
            long_transfers: 0,
            counters: Counters::default(),
            headers: Headers::default(),
            config,
        }
    }

    /// The request that sets the connection up.
    pub(super) fn request(&self) -> IcReq {
        IcReq::new(self.config.hpda, self.requested_digests(), self.config.max_r2ts.get() - 1)
    }

    pub(super) fn requested_digests(&self) -> u8 {
        let header = if self.config.header_digest { DIGEST_HEADER } else { 0 };
        header | if self.config.data_digest { DIGEST_DATA } else { 0 }
    }

    pub(super) fn is_open(&self) -> bool {
        self.closed.is_none()
    }

    /// Ends the connection. A violation is told to the controller, with the header that was being read.
    pub(super) fn fail(&mut self, closed: Closed, header: &[u8]) {
        if !self.is_open() {
            return;
        }
        self.closed = Some(closed);
        self.output.clear();
        self.commands.clear();
        if let Closed::Violated(violation) = closed {
            let request = TermReq::new(Direction::ToController, &violation, header.len());
            self.output.push_back(Output::Terminate([request.as_bytes(), header].concat().into()));
        }
        self.events.push_back(Event::Closed(closed));
    }
}

impl Side for HostState {
    fn rules(&self) -> PduRules {
        self.incoming
    }

    fn awaits_long_payload(&self) -> bool {
        self.long_transfers > 0
    }

    fn header(&mut self, kind: PduType, header: &[u8], frame: &Frame, sink: &mut Sink) -> Result<(), Closed> {
        if kind == PduType::C2HTermReq {
            return Err(crate::terminated(header));
        }
        let outcome = match (self.negotiated, kind) {
            (None, _) => self.connect(kind, header),
            (Some(_), PduType::CapsuleResp) => self.response(header),
            (Some(_), PduType::C2HData) => self.c2h_data(header, frame, sink),
            (Some(_), PduType::R2T) => self.r2t(header),
            (Some(_), _) => Err(Violation::sequence(clause::SETUP, "a second response to set the connection up")),
        };
        outcome.map_err(Closed::Violated)
    }

    fn payload(&mut self, sink: Sink) {
        self.read_data(sink);
    }
}
