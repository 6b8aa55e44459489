//! The ends of commands: CapsuleResp, or SUCCESS with the last data (NVMe/TCP 3.3.2.1, 3.6.2.7).

use sealblock_protocols_nvme::{Completion, StatusCode};
use zerocopy::FromBytes;

use super::state::{HostState, TransferData};
use super::{Cid, Event, ReadData};
use crate::pdu::CapsuleResp;
use crate::violation::{Violation, clause};

impl HostState {
    pub(super) fn response(&mut self, header: &[u8]) -> Result<(), Violation> {
        let pdu = CapsuleResp::ref_from_bytes(header).expect("the header of a response has its length");
        let unknown = Violation::field(CapsuleResp::CID_AT, clause::CAPSULE_RESP, "no command in flight has this CID");
        let token = self.commands.by_tag(pdu.completion.cid.get()).ok_or(unknown)?;
        let slot = self.commands.get_mut(token).ok_or(unknown)?;
        if !slot.is_sent {
            return Err(Violation::sequence(clause::CAPSULE_RESP, "a response to a command that was not sent yet"));
        }
        self.complete(token, pdu.completion);
        Ok(())
    }

    /// Ends a command. Data that it was asked for and has not sent yet is not sent any more.
    pub(super) fn complete(&mut self, token: u32, mut completion: Completion) {
        let Some(slot) = self.commands.remove(token) else { return };
        let cid = slot.command.cid.get();
        let data = match slot.data {
            TransferData::Read(read) => {
                self.long_transfers -= usize::from(read.is_long);
                read.fill.map(|fill| {
                    let damaged = fill.is_damaged();
                    let (buffer, sums) = fill.finish();
                    ReadData { buffer, crcs: sums, is_damaged: damaged }
                })
            }
            _ => None,
        };
        if data.as_ref().is_some_and(|data| data.is_damaged) && completion.status().is_success() {
            let sqhd = completion.sqhd.get();
            completion = Completion::new(cid, StatusCode::TRANSIENT_TRANSPORT_ERROR.status(), 0).with_sqhd(sqhd);
        }
        self.events.push_back(Event::Completed { cid: Cid(cid), completion, data });
    }
}
