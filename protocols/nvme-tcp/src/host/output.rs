//! The PDUs that leave: ICReq, CapsuleCmd, H2CData, H2CTermReq.

use sealblock_runtime_memory::Slice;

use super::state::{HostState, Output, TransferData};
use crate::gather::{Gather, TransmitLimit};
use crate::pdu::{CapsuleCmd, H2CData, PduType};

impl HostState {
    pub(super) fn transmit(&mut self, out: &mut Vec<Slice>, limit: TransmitLimit) -> usize {
        if self.output.is_empty() {
            return 0;
        }
        let mut summed = 0;
        let pool = self.config.pool.clone();
        let mut headers = std::mem::take(&mut self.headers);
        let mut gather = Gather::new(out, (&pool, &mut headers), limit, &mut summed);
        while gather.has_room() {
            match self.output.pop_front() {
                None => break,
                Some(Output::IcReq) => gather.header(&self.outgoing, PduType::IcReq, &self.request()),
                Some(Output::Capsule(token)) => self.put_capsule(token, &mut gather),
                Some(Output::Data(token)) => self.put_data(token, &mut gather),
                Some(Output::Terminate(request)) => gather.put(&request),
            }
        }
        let bytes = gather.finish();
        self.headers = headers;
        self.counters.payload_bytes_sent_checksummed += summed;
        bytes
    }

    fn put_capsule(&mut self, token: u32, gather: &mut Gather<'_>) {
        let Some(slot) = self.commands.get_mut(token) else { return };
        slot.is_sent = true;
        let rules = &self.outgoing;
        if let TransferData::InCapsule(payload) = &mut slot.data {
            let len = payload.len_bytes();
            let header = CapsuleCmd::new(rules, slot.command, len as u32);
            gather.with_data(rules, PduType::CapsuleCmd, &header, (payload, 0, len));
            self.counters.payload_bytes_sent += len as u64;
        } else {
            gather.header(rules, PduType::CapsuleCmd, &CapsuleCmd::new(rules, slot.command, 0));
        }
    }

    /// The next H2CData of a command. What is left waits behind the other commands' output. Nothing, if the command
    /// has been completed in the meantime.
    fn put_data(&mut self, token: u32, gather: &mut Gather<'_>) {
        let Some(slot) = self.commands.get_mut(token) else { return };
        let TransferData::Write(write) = &mut slot.data else { return };
        let Some(asked) = write.r2t_ranges.first_mut() else { return };
        let (from, left) = (asked.from as usize, (asked.to - asked.from) as usize);
        let len = write.payload.cut_bytes(from, left, self.config.max_h2c_data_bytes as usize);
        let is_last = len == left;
        let cid = slot.command.cid.get();
        let header = H2CData::new(&self.outgoing, is_last, cid, asked.ttag, asked.from, len as u32);
        gather.with_data(&self.outgoing, PduType::H2CData, &header, (&mut write.payload, from, from + len));
        asked.from += len as u32;
        if is_last {
            write.r2t_ranges.remove(0);
        }
        if !write.r2t_ranges.is_empty() {
            self.output.push_back(Output::Data(token));
        }
        self.counters.payload_bytes_sent += len as u64;
    }
}
