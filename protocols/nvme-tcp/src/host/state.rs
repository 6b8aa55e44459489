//! State of a host's connection: its setup (NVMe/TCP 3.1), and commands from submission (3.3.1, 3.3.2) to completion
//! (3.3.2.1, 3.6.2.7).

use sealblock_protocols_nvme::{Command, Completion, DataPointer, StatusCode};
use smallvec::SmallVec;
use zerocopy::FromBytes;

use super::events::{Cid, Event, HostData, ReadData, SubmitError};
use crate::config::{HostConfig, Negotiated, whole_dwords};
use crate::output::{Gather, Payload};
use crate::pdu::{self, CapsuleResp, DIGEST_DATA, DIGEST_HEADER, Direction, Frame, IcReq, IcResp, PduType, TermReq};
use crate::receive::{Fill, Link, Side, Sink};
use crate::slab::Slab;
use crate::violation::{Closed, Violation, clause};

pub struct HostState {
    pub(super) config: HostConfig,
    pub(super) link: Link<Event, Output>,
    pub(super) commands: Slab<CommandState>,
}

/// A command in flight.
pub(super) struct CommandState {
    pub(super) command: Command,
    /// True once the capsule was output.
    pub(super) is_sent: bool,
    pub(super) data: TransferData,
}

pub(super) enum TransferData {
    None,
    /// All data goes in the capsule.
    InCapsule(Payload),
    Write(WriteTransfer),
    Read(ReadTransfer),
}

pub(super) struct WriteTransfer {
    pub(super) payload: Payload,
    /// End of the last R2T's range.
    pub(super) solicited: u32,
    /// Ranges of R2Ts that are not fully output, in order.
    pub(super) r2t_ranges: SmallVec<[R2tRange; 1]>,
}

/// The rest of the range of one R2T.
pub(super) struct R2tRange {
    pub(super) ttag: u16,
    pub(super) from: u32,
    pub(super) to: u32,
}

pub(super) struct ReadTransfer {
    /// The memory; `None` while a PDU fills it.
    pub(super) fill: Option<Fill>,
    pub(super) len_bytes: u32,
    /// Bytes that were received, or that the header of the current PDU announces.
    pub(super) received: u32,
    pub(super) is_last: bool,
    pub(super) is_success: bool,
    pub(super) is_long: bool,
}

/// A PDU to be sent; commands by their tokens.
pub enum Output {
    IcReq,
    Capsule(u32),
    Data(u32),
}

impl HostState {
    pub(super) fn new(mut config: HostConfig) -> HostState {
        config.hpda = config.hpda.min(crate::pdu::MAX_ALIGNMENT_CODE);
        config.max_h2c_data_bytes = whole_dwords(config.max_h2c_data_bytes);
        let mut link = Link::new(Direction::ToHost, Direction::ToController);
        link.output.push_back(Output::IcReq);
        HostState { link, commands: Slab::new(config.max_commands), config }
    }

    /// The ICReq of this host.
    pub(super) fn request(&self) -> IcReq {
        IcReq::new(self.config.hpda, self.requested_digests(), self.config.max_r2ts.get() - 1)
    }

    pub(super) fn requested_digests(&self) -> u8 {
        pdu::digests(self.config.header_digest, self.config.data_digest)
    }
}

impl Side for HostState {
    type Event = Event;
    type Output = Output;

    fn link(&self) -> &Link<Event, Output> {
        &self.link
    }

    fn link_mut(&mut self) -> &mut Link<Event, Output> {
        &mut self.link
    }

    fn header(&mut self, kind: PduType, header: &[u8], frame: &Frame, sink: &mut Sink) -> Result<(), Closed> {
        if kind == PduType::C2HTermReq {
            return Err(TermReq::reason(header));
        }
        let outcome = match (self.link.negotiated, kind) {
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

    fn put(&mut self, output: Output, gather: &mut Gather<'_>) {
        match output {
            Output::IcReq => gather.header(&self.link.outgoing, PduType::IcReq, &self.request()),
            Output::Capsule(token) => self.put_capsule(token, gather),
            Output::Data(token) => self.put_data(token, gather),
        }
    }

    fn commands_in_flight(&self) -> usize {
        self.commands.len()
    }

    fn end(&mut self, closed: Closed) {
        self.commands.clear();
        self.link.events.push_back(Event::Closed(closed));
    }
}

impl HostState {
    pub(super) fn connect(&mut self, kind: PduType, header: &[u8]) -> Result<(), Violation> {
        let is_requested = !self.link.output.iter().any(|output| matches!(output, Output::IcReq));
        if kind != PduType::IcResp || !is_requested {
            return Err(Violation::sequence(clause::SETUP, "a PDU before the connection is set up"));
        }
        let response = IcResp::ref_from_bytes(header).expect("the header of an ICResp has its length");
        response.check(self.requested_digests())?;
        let negotiated = Negotiated {
            header_digest: response.digests & DIGEST_HEADER != 0,
            data_digest: response.digests & DIGEST_DATA != 0,
            host_alignment_bytes: pdu::alignment_bytes(self.config.hpda),
            controller_alignment_bytes: pdu::alignment_bytes(response.cpda),
            max_h2c_data_bytes: response.maxh2cdata_bytes.get(),
            max_r2ts: self.config.max_r2ts.get(),
        };
        self.config.max_h2c_data_bytes = self.config.max_h2c_data_bytes.min(negotiated.max_h2c_data_bytes);
        self.link.establish(negotiated);
        self.link.events.push_back(Event::Established(negotiated));
        Ok(())
    }
}

impl HostState {
    pub(super) fn submit(&mut self, command: Command, data: HostData) -> Result<Cid, SubmitError> {
        if self.link.negotiated.is_none() || self.link.closed.is_some() {
            return Err(SubmitError::NotEstablished);
        }
        let (pointer, data) = self.place(data)?;
        let is_long = matches!(&data, TransferData::Read(read) if read.is_long);
        let mut command = command.with_data(pointer);
        // Over Fabrics PSDT is always 01b; FUSE stays as it is.
        command.flags = command.flags & 0x3F | 0x40;
        let token = self.commands.insert(CommandState { command, is_sent: false, data }).ok_or(SubmitError::Full)?;
        let cid = self.commands.tag(token);
        if let Some(entry) = self.commands.get_mut(token) {
            entry.command = entry.command.with_cid(cid);
        }
        self.link.long_transfers += usize::from(is_long);
        self.link.output.push_back(Output::Capsule(token));
        Ok(Cid(cid))
    }

    fn place(&self, data: HostData) -> Result<(DataPointer, TransferData), SubmitError> {
        let length = |len: usize| match u32::try_from(len) {
            Ok(len_bytes) if len_bytes > 0 && len_bytes.is_multiple_of(4) => Ok(len_bytes),
            _ => Err(SubmitError::Length(len)),
        };
        Ok(match data {
            HostData::None => (DataPointer::None, TransferData::None),
            HostData::Write(payload) => {
                let length_bytes = length(payload.len_bytes())?;
                if length_bytes <= self.config.max_in_capsule_bytes {
                    (DataPointer::InCapsule { offset_bytes: 0, length_bytes }, TransferData::InCapsule(payload))
                } else {
                    let write = WriteTransfer { payload, solicited: 0, r2t_ranges: SmallVec::new() };
                    (DataPointer::Transport { length_bytes }, TransferData::Write(write))
                }
            }
            HostData::Read { buffer, layout } => {
                let length_bytes = length(buffer.len())?;
                let is_long = buffer.len() >= self.config.direct_bytes.saturating_mul(2);
                let read = ReadTransfer {
                    fill: Some(Fill::new(buffer, self.link.incoming.data_digest, layout)),
                    len_bytes: length_bytes,
                    received: 0,
                    is_last: false,
                    is_success: false,
                    is_long,
                };
                (DataPointer::Transport { length_bytes }, TransferData::Read(read))
            }
        })
    }
}

impl HostState {
    pub(super) fn response(&mut self, header: &[u8]) -> Result<(), Violation> {
        let pdu = CapsuleResp::ref_from_bytes(header).expect("the header of a response has its length");
        let unknown = Violation::field(CapsuleResp::CID_AT, clause::CAPSULE_RESP, "no command in flight has this CID");
        let token = self.commands.by_tag(pdu.completion.cid.get()).ok_or(unknown)?;
        let entry = self.commands.get_mut(token).ok_or(unknown)?;
        if !entry.is_sent {
            return Err(Violation::sequence(clause::CAPSULE_RESP, "a response to a command that was not sent yet"));
        }
        self.complete(token, pdu.completion);
        Ok(())
    }

    /// Completes a command. Data that R2Ts request and that was not sent yet is never sent.
    pub(super) fn complete(&mut self, token: u32, mut completion: Completion) {
        let Some(entry) = self.commands.remove(token) else { return };
        let cid = entry.command.cid.get();
        let data = match entry.data {
            TransferData::Read(read) => {
                self.link.long_transfers -= usize::from(read.is_long);
                read.fill.map(|fill| {
                    let damaged = fill.is_damaged();
                    let (buffer, crcs) = fill.finish();
                    ReadData { buffer, crcs, is_damaged: damaged }
                })
            }
            _ => None,
        };
        if data.as_ref().is_some_and(|data| data.is_damaged) && completion.status().is_success() {
            let sqhd = completion.sqhd.get();
            completion = Completion::new(cid, StatusCode::TRANSIENT_TRANSPORT_ERROR.status(), 0).with_sqhd(sqhd);
        }
        self.link.events.push_back(Event::Completed { cid: Cid(cid), completion, data });
    }
}
