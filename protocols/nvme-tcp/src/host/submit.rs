//! Commands that leave: identifier, data pointer, and whether their data fits the capsule (NVMe/TCP 3.3.1, 3.3.2).

use sealblock_protocols_nvme::{Command, DataPointer};
use smallvec::SmallVec;

use super::state::{CommandState, HostState, Output, ReadTransfer, TransferData, WriteTransfer};
use super::{Cid, Host, HostData, SubmitError};
use crate::receive::Fill;

impl Host {
    /// Submits a command; its CID, PSDT and data pointer are set here. Without data the data pointer is left as a
    /// transport descriptor of length 0, as Linux sends it.
    ///
    /// # Errors
    /// As [`SubmitError`] says; the data is dropped then, so a caller that wants to try again keeps a handle on it.
    pub fn submit(&mut self, command: Command, data: HostData) -> Result<Cid, SubmitError> {
        self.state.submit(command, data)
    }

    /// Whether one more command may be submitted now.
    pub fn can_submit(&self) -> bool {
        let most = usize::from(self.state.config.max_commands.get());
        self.state.is_open() && self.state.negotiated.is_some() && self.state.commands.len() < most
    }
}

impl HostState {
    fn submit(&mut self, command: Command, data: HostData) -> Result<Cid, SubmitError> {
        if self.negotiated.is_none() || !self.is_open() {
            return Err(SubmitError::NotEstablished);
        }
        let (pointer, data) = self.place(data)?;
        let is_long = matches!(&data, TransferData::Read(read) if read.is_long);
        let mut command = command.with_data(pointer);
        // Over Fabrics PSDT is always 01b; FUSE stays as it is.
        command.flags = command.flags & 0x3F | 0x40;
        let token = self.commands.insert(CommandState { command, is_sent: false, data }).ok_or(SubmitError::Full)?;
        let cid = self.commands.tag(token);
        if let Some(slot) = self.commands.get_mut(token) {
            slot.command = slot.command.with_cid(cid);
        }
        self.long_transfers += usize::from(is_long);
        self.output.push_back(Output::Capsule(token));
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
            HostData::Read { buffer, layout: shape } => {
                let length_bytes = length(buffer.len())?;
                let is_long = buffer.len() >= self.config.direct_bytes.saturating_mul(2);
                let read = ReadTransfer {
                    fill: Some(Fill::new(buffer, self.incoming.data_digest, shape)),
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
