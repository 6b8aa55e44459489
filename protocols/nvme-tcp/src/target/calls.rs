//! What the export asks of a command in flight.

use sealblock_protocols_nvme::Completion;
use sealblock_runtime_memory::Buffer;
use zerocopy::little_endian::U16;

use super::state::{CommandStage, OutgoingData, Output, TargetState, Transfer};
use super::{CallError, Target, Token};
use crate::crcs::BlockLayout;
use crate::payload::Payload;
use crate::receive::Fill;

impl Target {
    /// Fetches the data of a command with [`CommandData::Transport`](super::CommandData::Transport) into `buffer`,
    /// which is as long as the host's. R2Ts go out, and [`Event::DataReady`](super::Event::DataReady) brings the
    /// buffer back. With `shape`, and data digests on, it brings the CRC-32C of each block as well.
    ///
    /// # Errors
    /// Refuses, and gives the buffer back, as [`CallError`] says.
    pub fn fetch_data(
        &mut self,
        token: Token,
        buffer: Buffer,
        shape: Option<BlockLayout>,
    ) -> Result<(), (CallError, Buffer)> {
        match self.state.check_fetch(token, &buffer) {
            Ok(()) => self.state.start_fetch(token, buffer, shape),
            Err(error) => return Err((error, buffer)),
        }
        Ok(())
    }

    /// Sends data of a command that reads; may be called again for what follows, until `completion` is given. With a
    /// successful completion that returns nothing else, and [`Target::set_success_flag`], no response is needed.
    ///
    /// # Errors
    /// As [`CallError`] says: more data than the host has room for, no whole dwords, or a command already answered.
    pub fn send_data(
        &mut self,
        token: Token,
        data: impl Into<Payload>,
        completion: Option<Completion>,
    ) -> Result<(), CallError> {
        self.state.send(token, data.into(), completion)
    }

    /// Says that a command may stay unanswered as long as the connection, as an Asynchronous Event Request may. If the host
    /// uses its identifier for another command meanwhile, it has forgotten this one, and so does the connection: SPDK's
    /// hosts do that when they take leave.
    pub fn allow_unanswered(&mut self, token: Token) {
        if let Some(slot) = self.state.commands.get_mut(token.0) {
            slot.may_stay_unanswered = matches!(slot.stage, CommandStage::Received { .. }) && slot.completion.is_none();
        }
    }

    /// Answers a command, at any stage. The completion's CID is set to that of the command. If data is being fetched,
    /// no more is asked for, what comes is thrown away, and the response follows it.
    ///
    /// # Errors
    /// For a token that is not in flight, or a command that has been answered.
    pub fn respond(&mut self, token: Token, completion: Completion) -> Result<(), CallError> {
        self.state.respond(token, completion)
    }
}

impl TargetState {
    fn check_fetch(&mut self, Token(token): Token, buffer: &Buffer) -> Result<(), CallError> {
        let slot = self.commands.get_mut(token).ok_or(CallError::UnknownToken)?;
        let room_bytes = slot.len_bytes as usize;
        if !matches!(slot.stage, CommandStage::Received { fetched: false }) || room_bytes == 0 || slot.queued_bytes > 0
        {
            return Err(CallError::WrongState);
        }
        if buffer.len() != room_bytes || !room_bytes.is_multiple_of(4) {
            return Err(CallError::Length { len_bytes: buffer.len(), room_bytes });
        }
        if self.has_room(buffer.len()) { Ok(()) } else { Err(CallError::OverLimit) }
    }

    fn start_fetch(&mut self, Token(token): Token, buffer: Buffer, shape: Option<BlockLayout>) {
        let place = usize::from(token as u16);
        if self.transfers.len() <= place {
            self.transfers.resize_with(place + 1, Transfer::default);
        }
        let Some(slot) = self.commands.get_mut(token) else { return };
        let is_long = buffer.len() >= self.config.direct_bytes.saturating_mul(2);
        slot.held_bytes = buffer.len();
        self.bytes_in_flight += buffer.len();
        self.long_transfers += usize::from(is_long);
        let fill = Some(Fill::new(buffer, self.incoming.data_digest, shape));
        slot.stage = CommandStage::Fetching;
        self.transfers[place] = Transfer { fill, received: 0, solicited: 0, queued: 0, is_long };
        self.queue_r2ts(token);
    }

    fn send(&mut self, Token(token): Token, payload: Payload, completion: Option<Completion>) -> Result<(), CallError> {
        let slot = self.commands.get_mut(token).ok_or(CallError::UnknownToken)?;
        if !matches!(slot.stage, CommandStage::Received { .. }) {
            return Err(CallError::WrongState);
        }
        let (len_bytes, room_bytes) = (payload.len_bytes(), (slot.len_bytes - slot.queued_bytes) as usize);
        if len_bytes > room_bytes || !len_bytes.is_multiple_of(4) {
            return Err(CallError::Length { len_bytes, room_bytes });
        }
        if len_bytes > 0 {
            slot.queued_bytes += len_bytes as u32;
            slot.sends.push(OutgoingData { payload, sent: 0 });
            if slot.sends.len() == 1 {
                self.output.push_back(Output::Data(token));
            }
        }
        match completion {
            Some(completion) => self.respond(Token(token), completion),
            None => Ok(()),
        }
    }

    fn respond(&mut self, Token(token): Token, mut completion: Completion) -> Result<(), CallError> {
        let slot = self.commands.get_mut(token).ok_or(CallError::UnknownToken)?;
        if slot.completion.is_some() {
            return Err(CallError::WrongState);
        }
        completion.cid = U16::new(slot.cid);
        slot.may_stay_unanswered = false;
        slot.completion = Some(completion);
        if let CommandStage::Fetching = slot.stage {
            self.drain(token);
        } else {
            slot.stage = CommandStage::Completed;
            // Data that is still to be sent is followed by the response, or makes it needless.
            if slot.sends.is_empty() {
                self.output.push_back(Output::Response(token));
            }
        }
        Ok(())
    }
}
