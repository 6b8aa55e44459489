//! C2HData that arrives for reads (NVMe/TCP 3.3.2.1).

use sealblock_protocols_nvme::{Completion, Status};
use zerocopy::FromBytes;

use super::state::{HostState, TransferData};
use crate::pdu::{C2HData, CCCID_AT, Frame};
use crate::receive::Sink;
use crate::violation::{Violation, clause};

impl HostState {
    pub(super) fn c2h_data(&mut self, header: &[u8], frame: &Frame, sink: &mut Sink) -> Result<(), Violation> {
        let pdu = C2HData::ref_from_bytes(header).expect("the header of a C2HData has its length");
        pdu.check(frame)?;
        let unknown = Violation::field(CCCID_AT, clause::C2H, "no command in flight has this CCCID");
        let token = self.commands.by_tag(pdu.cccid.get()).ok_or(unknown)?;
        let slot = self.commands.get_mut(token).ok_or(unknown)?;
        let TransferData::Read(read) = &mut slot.data else {
            return Err(Violation::sequence(clause::C2H, "data for a command that reads none"));
        };
        if !slot.is_sent {
            return Err(Violation::sequence(clause::C2H, "data for a command that was not sent yet"));
        }
        if read.is_last {
            return Err(Violation::sequence(clause::C2H, "data behind the last data of its command"));
        }
        let (offset, len) = (pdu.datao.get(), pdu.datal.get());
        if u64::from(offset) + u64::from(len) > u64::from(read.len_bytes) {
            return Err(Violation::out_of_range(clause::C2H, "data outside the Command Data Buffer"));
        }
        if offset != read.received {
            return Err(Violation::sequence(clause::C2H, "data that does not follow the data before it"));
        }
        read.received += len;
        read.is_last = pdu.is_last();
        read.is_success = pdu.is_success();
        *sink = Sink { token, fill: read.fill.take() };
        Ok(())
    }

    /// The data of a PDU is there.
    pub(super) fn read_data(&mut self, sink: Sink) {
        let Some(slot) = self.commands.get_mut(sink.token) else { return };
        let TransferData::Read(read) = &mut slot.data else { return };
        read.fill = sink.fill;
        if read.is_success {
            let cid = slot.command.cid.get();
            self.complete(sink.token, Completion::new(cid, Status::SUCCESS, 0));
        }
    }
}
