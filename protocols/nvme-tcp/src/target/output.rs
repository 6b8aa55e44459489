//! The PDUs that leave: ICResp, R2T, C2HData, CapsuleResp, C2HTermReq.

use sealblock_runtime_memory::Slice;

use super::state::{Output, TargetState};
use crate::gather::{Gather, TransmitLimit};
use crate::pdu::{C2HData, CapsuleResp, PduType, R2T, flags};

impl TargetState {
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
                Some(Output::IcResp(response)) => gather.header(&self.outgoing, PduType::IcResp, &*response),
                Some(Output::R2t(token)) => self.put_r2t(token, &mut gather),
                Some(Output::Data(token)) => self.put_data(token, &mut gather),
                Some(Output::Response(token)) => self.put_response(token, &mut gather),
                Some(Output::Terminate(request)) => gather.put(&request),
            }
        }
        let bytes = gather.finish();
        self.headers = headers;
        self.counters.payload_bytes_sent_checksummed += summed;
        bytes
    }

    /// The R2T for the next range; none any more if the command was answered in the meantime.
    fn put_r2t(&mut self, token: u32, gather: &mut Gather<'_>) {
        let tag = self.commands.tag(token);
        let most_bytes = self.config.max_r2t_bytes;
        let Some((slot, transfer)) = self.transfer(token) else { return };
        if slot.completion.is_some() || transfer.solicited >= slot.len_bytes {
            return;
        }
        let offset = transfer.solicited;
        let len = most_bytes.min(slot.len_bytes - offset);
        transfer.solicited += len;
        let cid = slot.cid;
        let request = R2T::new(&self.outgoing, cid, tag, offset, len);
        gather.header(&self.outgoing, PduType::R2T, &request);
    }

    /// The next C2HData of a command. What is left waits behind the other commands' output.
    fn put_data(&mut self, token: u32, gather: &mut Gather<'_>) {
        let Some(slot) = self.commands.get_mut(token) else { return };
        let is_only = slot.sends.len() == 1;
        let Some(send) = slot.sends.first_mut() else { return };
        let left = send.payload.len_bytes() - send.sent;
        let len = send.payload.cut_bytes(send.sent, left, self.config.max_c2h_data_bytes as usize);
        let is_end = len == left && is_only;
        let is_whole = slot.sent_bytes + len as u32 == slot.len_bytes;
        let is_last = is_end && (slot.completion.is_some() || is_whole);
        let plain = |c: &sealblock_protocols_nvme::Completion| c.status().is_success() && c.result.get() == 0;
        let is_success = is_last && self.success_flag && slot.completion.as_ref().is_some_and(plain);
        let more_flags = if is_last { flags::LAST } else { 0 } | if is_success { flags::SUCCESS } else { 0 };
        let cid = slot.cid;
        let header = C2HData::new(&self.outgoing, more_flags, cid, slot.sent_bytes, len as u32);
        let range = (&mut send.payload, send.sent, send.sent + len);
        gather.with_data(&self.outgoing, PduType::C2HData, &header, range);
        send.sent += len;
        slot.sent_bytes += len as u32;
        self.counters.payload_bytes_sent += len as u64;
        match (len == left, is_only) {
            (false, _) => {}
            (true, true) => slot.sends.clear(),
            (true, false) => drop(slot.sends.remove(0)),
        }
        let is_answered = slot.completion.is_some();
        match (is_end, is_success, is_answered) {
            (false, ..) => self.output.push_back(Output::Data(token)),
            (true, true, _) => self.release(token),
            (true, false, true) => self.output.push_back(Output::Response(token)),
            (true, false, false) => {}
        }
    }

    fn put_response(&mut self, token: u32, gather: &mut Gather<'_>) {
        let Some(completion) = self.commands.get_mut(token).and_then(|slot| slot.completion) else { return };
        let response = CapsuleResp::new(&self.outgoing, completion);
        gather.header(&self.outgoing, PduType::CapsuleResp, &response);
        self.release(token);
    }
}
