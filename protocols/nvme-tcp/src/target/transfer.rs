//! Data and completions of commands: R2T requests the data of a write, H2CData transfers it (NVMe/TCP 3.3.2.2), C2HData
//! transfers the data of a read (3.3.2.1); and the PDUs to send.
//!
//! Invariants: a command's data comes from its start to its end without gaps; R2Ts cut it into equal ranges, the last
//! one shorter, so the offset of a PDU determines its R2T; all R2Ts of a command have the same tag, since a host responds
//! in order.

use sealblock_protocols_nvme::Completion;
use sealblock_runtime_memory::Buffer;
use zerocopy::FromBytes;
use zerocopy::little_endian::U16;

use super::Target;
use super::events::{CallError, DataError, Event, Received, Token};
use super::state::{CommandStage, OutgoingData, Output, TargetState, Transfer};
use crate::config::Negotiated;
use crate::crcs::BlockLayout;
use crate::output::{Gather, Payload};
use crate::pdu::{CCCID_AT, CapsuleResp, Frame, PduType, TTAG_AT, TransferPdu, flags};
use crate::receive::{Fill, Sink};
use crate::violation::{Violation, clause};

impl TargetState {
    pub(super) fn h2c_data(
        &mut self,
        header: &[u8],
        frame: &Frame,
        negotiated: &Negotiated,
        sink: &mut Sink,
    ) -> Result<(), Violation> {
        let pdu = TransferPdu::ref_from_bytes(header).expect("the header of an H2CData has its length");
        pdu.check(PduType::H2CData, frame)?;
        let unknown = Violation::field(TTAG_AT, clause::H2C, "no R2T has this TTAG");
        let token = self.commands.by_tag(pdu.ttag.get()).ok_or(unknown)?;
        let range_bytes = self.config.max_r2t_bytes;
        let entry = self.commands.get(token).ok_or(unknown)?;
        if entry.cid != pdu.cccid.get() {
            return Err(Violation::field(CCCID_AT, clause::H2C_DATA, "CCCID is not the command of the TTAG"));
        }
        let Some((_, transfer)) = self.transfer(token) else {
            return Err(Violation::sequence(clause::H2C, "data for a command that asks for none"));
        };
        if transfer.received == transfer.solicited {
            return Err(Violation::sequence(clause::H2C, "data that no R2T asks for"));
        }
        let (offset, len) = (pdu.offset.get(), pdu.length.get());
        if len > negotiated.max_h2c_data_bytes {
            return Err(Violation::limit(clause::H2C, "more data in a PDU than MAXH2CDATA"));
        }
        let range_start = transfer.received / range_bytes * range_bytes;
        let range_end = range_start.saturating_add(range_bytes).min(transfer.solicited);
        let end = u64::from(offset) + u64::from(len);
        if offset < range_start || end > u64::from(range_end) {
            return Err(Violation::out_of_range(clause::H2C, "data outside the range of its R2T"));
        }
        if offset != transfer.received {
            return Err(Violation::sequence(clause::H2C, "data that does not follow the data before it"));
        }
        if pdu.is_last() != (end == u64::from(range_end)) {
            return Err(Violation::field(1, clause::H2C, "LAST_PDU is not set in the last PDU of an R2T alone"));
        }
        transfer.received += len;
        *sink = Sink { token, fill: transfer.fill.take() };
        Ok(())
    }

    /// Queues as many R2Ts as may be outstanding.
    pub(super) fn queue_r2ts(&mut self, token: u32) {
        let max = self.link.negotiated.map_or(1, |negotiated| negotiated.max_r2ts);
        let range_bytes = self.config.max_r2t_bytes;
        let Some((entry, transfer)) = self.transfer(token) else { return };
        // A range of which a part has arrived is still outstanding, so count from its start.
        let done = transfer.received / range_bytes;
        let mut new_r2ts = 0;
        while transfer.queued < entry.len_bytes && transfer.queued.div_ceil(range_bytes) - done < max {
            transfer.queued = transfer.queued.saturating_add(range_bytes).min(entry.len_bytes);
            new_r2ts += 1;
        }
        self.link.output.extend(std::iter::repeat_with(|| Output::R2t(token)).take(new_r2ts));
    }

    /// Handles the end of a PDU's data.
    pub(super) fn transfer_data(&mut self, token: u32) {
        let Some((entry, transfer)) = self.transfer(token) else { return };
        if entry.completion.is_some() {
            self.drain(token);
        } else if transfer.received < entry.len_bytes {
            self.queue_r2ts(token);
        } else if let Some(fill) = transfer.fill.take() {
            entry.stage = CommandStage::Received { fetched: true };
            self.link.long_transfers -= usize::from(transfer.is_long);
            let data = if fill.is_damaged() {
                Err(DataError::Digest)
            } else {
                let (buffer, crcs) = fill.finish();
                Ok(Received { buffer, crcs })
            };
            self.link.events.push_back(Event::DataReady { token: Token(token), data });
        }
    }

    /// Responds to a command that completed while its data was being fetched, once all requested data has arrived: the host
    /// may have sent it before it sees the response, and data for an unknown tag would be a fatal error.
    pub(super) fn drain(&mut self, token: u32) {
        let Some((entry, transfer)) = self.transfer(token) else { return };
        if transfer.received == transfer.solicited && transfer.fill.is_some() {
            entry.stage = CommandStage::Completed;
            transfer.fill = None;
            self.link.long_transfers -= usize::from(transfer.is_long);
            self.link.output.push_back(Output::Response(token));
        }
    }
}

impl Target {
    /// Fetches the data of a command with [`Transport`](super::CommandData::Transport) into `buffer`,
    /// which is as long as the host's. Sends R2Ts; [`Event::DataReady`] returns the buffer, with the
    /// CRC-32C of each block if there is a `layout` and data digests are in use.
    ///
    /// # Errors
    /// See [`CallError`]; returns the buffer.
    pub fn fetch_data(
        &mut self,
        token: Token,
        buffer: Buffer,
        layout: Option<BlockLayout>,
    ) -> Result<(), (CallError, Buffer)> {
        match self.state.check_fetch(token, &buffer) {
            Ok(()) => self.state.start_fetch(token, buffer, layout),
            Err(error) => return Err((error, buffer)),
        }
        Ok(())
    }

    /// Sends data of a command that reads; may be called again for the following data, until `completion` is given. With
    /// [`Target::set_success_flag`], a successful completion that returns nothing else needs no response.
    ///
    /// # Errors
    /// See [`CallError`]: more data than the host's buffer has room for, no whole dwords, or a completed command.
    pub fn send_data(
        &mut self,
        token: Token,
        data: impl Into<Payload>,
        completion: Option<Completion>,
    ) -> Result<(), CallError> {
        self.state.send(token, data.into(), completion)
    }

    /// Allows a command to stay uncompleted as long as the connection, as an Asynchronous Event Request may. If the host
    /// reuses its CID for another command, the connection drops this one: SPDK's hosts do that when they disconnect.
    pub fn allow_unanswered(&mut self, token: Token) {
        if let Some(entry) = self.state.commands.get_mut(token.0) {
            entry.may_stay_unanswered =
                matches!(entry.stage, CommandStage::Received { .. }) && entry.completion.is_none();
        }
    }

    /// Drops a command that is not to be completed, as a controller reset does with those in flight. The host may use its CID again. Does
    /// nothing for a command that is not in flight, that was completed, or whose data is being fetched: the host sends that data all
    /// the same.
    pub fn forget(&mut self, token: Token) {
        let entry = self.state.commands.get_mut(token.0);
        let is_ours = entry.is_some_and(|entry| {
            matches!(entry.stage, CommandStage::Received { .. }) && entry.completion.is_none() && entry.sends.is_empty()
        });
        if is_ours {
            self.state.release(token.0);
        }
    }

    /// Completes a command, at any stage; sets the completion's CID. If data is being fetched, no further R2T is sent,
    /// arriving data is discarded, and the response follows it.
    ///
    /// # Errors
    /// For a token that is not in flight, or a completed command.
    pub fn respond(&mut self, token: Token, completion: Completion) -> Result<(), CallError> {
        self.state.respond(token, completion)
    }
}

impl TargetState {
    fn check_fetch(&mut self, Token(token): Token, buffer: &Buffer) -> Result<(), CallError> {
        let entry = self.commands.get_mut(token).ok_or(CallError::UnknownToken)?;
        let room_bytes = entry.len_bytes as usize;
        if !matches!(entry.stage, CommandStage::Received { fetched: false })
            || room_bytes == 0
            || entry.queued_bytes > 0
        {
            return Err(CallError::WrongState);
        }
        if buffer.len() != room_bytes || !room_bytes.is_multiple_of(4) {
            return Err(CallError::Length { len_bytes: buffer.len(), room_bytes });
        }
        if self.has_room(buffer.len()) { Ok(()) } else { Err(CallError::OverLimit) }
    }

    fn start_fetch(&mut self, Token(token): Token, buffer: Buffer, layout: Option<BlockLayout>) {
        let place = usize::from(token as u16);
        if self.transfers.len() <= place {
            self.transfers.resize_with(place + 1, Transfer::default);
        }
        let Some(entry) = self.commands.get_mut(token) else { return };
        let is_long = buffer.len() >= self.config.direct_bytes.saturating_mul(2);
        entry.held_bytes = buffer.len();
        self.bytes_in_flight += buffer.len();
        self.link.long_transfers += usize::from(is_long);
        let fill = Some(Fill::new(buffer, self.link.incoming.data_digest, layout));
        entry.stage = CommandStage::Fetching;
        self.transfers[place] = Transfer { fill, received: 0, solicited: 0, queued: 0, is_long };
        self.queue_r2ts(token);
    }

    fn send(&mut self, Token(token): Token, payload: Payload, completion: Option<Completion>) -> Result<(), CallError> {
        let entry = self.commands.get_mut(token).ok_or(CallError::UnknownToken)?;
        if !matches!(entry.stage, CommandStage::Received { .. }) {
            return Err(CallError::WrongState);
        }
        let (len_bytes, room_bytes) = (payload.len_bytes(), (entry.len_bytes - entry.queued_bytes) as usize);
        if len_bytes > room_bytes || !len_bytes.is_multiple_of(4) {
            return Err(CallError::Length { len_bytes, room_bytes });
        }
        if len_bytes > 0 {
            entry.queued_bytes += len_bytes as u32;
            entry.sends.push(OutgoingData { payload, sent: 0 });
            if entry.sends.len() == 1 {
                self.link.output.push_back(Output::Data(token));
            }
        }
        match completion {
            Some(completion) => self.respond(Token(token), completion),
            None => Ok(()),
        }
    }

    fn respond(&mut self, Token(token): Token, mut completion: Completion) -> Result<(), CallError> {
        let entry = self.commands.get_mut(token).ok_or(CallError::UnknownToken)?;
        if entry.completion.is_some() {
            return Err(CallError::WrongState);
        }
        completion.cid = U16::new(entry.cid);
        entry.may_stay_unanswered = false;
        entry.completion = Some(completion);
        if let CommandStage::Fetching = entry.stage {
            self.drain(token);
        } else {
            entry.stage = CommandStage::Completed;
            // The response follows the data that is still to be sent, or its SUCCESS flag replaces the response.
            if entry.sends.is_empty() {
                self.link.output.push_back(Output::Response(token));
            }
        }
        Ok(())
    }
}

impl TargetState {
    /// Outputs the R2T for the next range; nothing if the command completed in the meantime.
    pub(super) fn put_r2t(&mut self, token: u32, gather: &mut Gather<'_>) {
        let tag = self.commands.tag(token);
        let max_bytes = self.config.max_r2t_bytes;
        let Some((entry, transfer)) = self.transfer(token) else { return };
        if entry.completion.is_some() || transfer.solicited >= entry.len_bytes {
            return;
        }
        let offset = transfer.solicited;
        let len = max_bytes.min(entry.len_bytes - offset);
        transfer.solicited += len;
        let cid = entry.cid;
        let request = TransferPdu::r2t(&self.link.outgoing, cid, tag, offset, len);
        gather.header(&self.link.outgoing, PduType::R2T, &request);
    }

    /// Outputs the next C2HData of a command; the rest queues after the output of other commands.
    pub(super) fn put_data(&mut self, token: u32, gather: &mut Gather<'_>) {
        let Some(entry) = self.commands.get_mut(token) else { return };
        let is_only = entry.sends.len() == 1;
        let Some(send) = entry.sends.first_mut() else { return };
        let left = send.payload.len_bytes() - send.sent;
        let len = send.payload.cut_bytes(send.sent, left, self.config.max_c2h_data_bytes as usize);
        let is_end = len == left && is_only;
        let is_whole = entry.sent_bytes + len as u32 == entry.len_bytes;
        let is_last = is_end && (entry.completion.is_some() || is_whole);
        let plain = |c: &sealblock_protocols_nvme::Completion| c.status().is_success() && c.result.get() == 0;
        let is_success = is_last && self.success_flag && entry.completion.as_ref().is_some_and(plain);
        let more_flags = if is_last { flags::LAST } else { 0 } | if is_success { flags::SUCCESS } else { 0 };
        let cid = entry.cid;
        let header = TransferPdu::c2h_data(&self.link.outgoing, more_flags, cid, entry.sent_bytes, len as u32);
        let range = (&mut send.payload, send.sent, send.sent + len);
        gather.with_data(&self.link.outgoing, PduType::C2HData, &header, range);
        send.sent += len;
        entry.sent_bytes += len as u32;
        self.link.sent_bytes += len as u64;
        match (len == left, is_only) {
            (false, _) => {}
            (true, true) => entry.sends.clear(),
            (true, false) => drop(entry.sends.remove(0)),
        }
        let is_completed = entry.completion.is_some();
        match (is_end, is_success, is_completed) {
            (false, ..) => self.link.output.push_back(Output::Data(token)),
            (true, true, _) => self.release(token),
            (true, false, true) => self.link.output.push_back(Output::Response(token)),
            (true, false, false) => {}
        }
    }

    pub(super) fn put_response(&mut self, token: u32, gather: &mut Gather<'_>) {
        let Some(completion) = self.commands.get_mut(token).and_then(|entry| entry.completion) else { return };
        let response = CapsuleResp::new(&self.link.outgoing, completion);
        gather.header(&self.link.outgoing, PduType::CapsuleResp, &response);
        self.release(token);
    }
}
