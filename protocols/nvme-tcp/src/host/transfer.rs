//! Data of commands: R2Ts for writes (NVMe/TCP 3.3.2.2), C2HData of reads (3.3.2.1), and the PDUs to send: ICReq,
//! CapsuleCmd, H2CData, H2CTermReq.

use sealblock_protocols_nvme::{Completion, Status};
use zerocopy::FromBytes;

use super::state::{HostState, Output, R2tRange, TransferData};
use crate::output::Gather;
use crate::pdu::{CCCID_AT, CapsuleCmd, Frame, PduType, TransferPdu};
use crate::receive::Sink;
use crate::violation::{Violation, clause};

impl HostState {
    pub(super) fn r2t(&mut self, header: &[u8]) -> Result<(), Violation> {
        let pdu = TransferPdu::ref_from_bytes(header).expect("the header of an R2T has its length");
        pdu.check(PduType::R2T, &Frame::default())?;
        let unknown = Violation::field(CCCID_AT, clause::R2T, "no command in flight has this CCCID");
        let token = self.commands.by_tag(pdu.cccid.get()).ok_or(unknown)?;
        let entry = self.commands.get_mut(token).ok_or(unknown)?;
        let TransferData::Write(write) = &mut entry.data else {
            return Err(Violation::sequence(clause::H2C, "an R2T for a command without data to transfer"));
        };
        if !entry.is_sent {
            return Err(Violation::sequence(clause::H2C, "an R2T for a command that was not sent yet"));
        }
        let (offset, len) = (pdu.offset.get(), pdu.length.get());
        let end = u64::from(offset) + u64::from(len);
        if end > write.payload.len_bytes() as u64 {
            return Err(Violation::out_of_range(clause::H2C, "an R2T that exceeds the Command Data Buffer"));
        }
        if offset != write.solicited {
            return Err(Violation::sequence(clause::H2C, "an R2T that does not follow the one before it"));
        }
        if write.r2t_ranges.len() as u64 >= u64::from(self.config.max_r2ts.get()) {
            return Err(Violation::limit(clause::H2C, "more R2Ts outstanding than MAXR2T"));
        }
        write.solicited = end as u32;
        write.r2t_ranges.push(R2tRange { ttag: pdu.ttag.get(), from: offset, to: end as u32 });
        if write.r2t_ranges.len() == 1 {
            self.link.output.push_back(Output::Data(token));
        }
        Ok(())
    }
}

impl HostState {
    pub(super) fn c2h_data(&mut self, header: &[u8], frame: &Frame, sink: &mut Sink) -> Result<(), Violation> {
        let pdu = TransferPdu::ref_from_bytes(header).expect("the header of a C2HData has its length");
        pdu.check(PduType::C2HData, frame)?;
        let unknown = Violation::field(CCCID_AT, clause::C2H, "no command in flight has this CCCID");
        let token = self.commands.by_tag(pdu.cccid.get()).ok_or(unknown)?;
        let entry = self.commands.get_mut(token).ok_or(unknown)?;
        let TransferData::Read(read) = &mut entry.data else {
            return Err(Violation::sequence(clause::C2H, "data for a command that reads none"));
        };
        if !entry.is_sent {
            return Err(Violation::sequence(clause::C2H, "data for a command that was not sent yet"));
        }
        if read.is_last {
            return Err(Violation::sequence(clause::C2H, "data behind the last data of its command"));
        }
        let (offset, len) = (pdu.offset.get(), pdu.length.get());
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

    /// Handles the end of a PDU's data.
    pub(super) fn read_data(&mut self, sink: Sink) {
        let Some(entry) = self.commands.get_mut(sink.token) else { return };
        let TransferData::Read(read) = &mut entry.data else { return };
        read.fill = sink.fill;
        if read.is_success {
            let cid = entry.command.cid.get();
            self.complete(sink.token, Completion::new(cid, Status::SUCCESS, 0));
        }
    }
}

impl HostState {
    pub(super) fn put_capsule(&mut self, token: u32, gather: &mut Gather<'_>) {
        let Some(entry) = self.commands.get_mut(token) else { return };
        entry.is_sent = true;
        let rules = &self.link.outgoing;
        if let TransferData::InCapsule(payload) = &mut entry.data {
            let len = payload.len_bytes();
            let header = CapsuleCmd::new(rules, entry.command, len as u32);
            gather.with_data(rules, PduType::CapsuleCmd, &header, (payload, 0, len));
            self.link.sent_bytes += len as u64;
        } else {
            gather.header(rules, PduType::CapsuleCmd, &CapsuleCmd::new(rules, entry.command, 0));
        }
    }

    /// Outputs the next H2CData of a command; the rest queues after the output of other commands. Nothing if the command
    /// has completed in the meantime.
    pub(super) fn put_data(&mut self, token: u32, gather: &mut Gather<'_>) {
        let Some(entry) = self.commands.get_mut(token) else { return };
        let TransferData::Write(write) = &mut entry.data else { return };
        let Some(range) = write.r2t_ranges.first_mut() else { return };
        let (from, left) = (range.from as usize, (range.to - range.from) as usize);
        let len = write.payload.cut_bytes(from, left, self.config.max_h2c_data_bytes as usize);
        let is_last = len == left;
        let cid = entry.command.cid.get();
        let header = TransferPdu::h2c_data(&self.link.outgoing, is_last, cid, range.ttag, range.from, len as u32);
        gather.with_data(&self.link.outgoing, PduType::H2CData, &header, (&mut write.payload, from, from + len));
        range.from += len as u32;
        if is_last {
            write.r2t_ranges.remove(0);
        }
        if !write.r2t_ranges.is_empty() {
            self.link.output.push_back(Output::Data(token));
        }
        self.link.sent_bytes += len as u64;
    }
}
