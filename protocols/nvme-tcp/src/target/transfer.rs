//! The data of writes: R2Ts ask for it, H2CData brings it (NVMe/TCP 3.3.2.2).
//!
//! Invariants: a command's data comes from its start to its end without gaps; R2Ts cut it into equal ranges, the last
//! one shorter, so which R2T a PDU answers follows from its offset; all R2Ts of a command have the same tag, since a
//! host answers them in order.

use zerocopy::FromBytes;

use super::state::{CommandStage, Output, TargetState};
use super::{DataError, Event, Received, Token};
use crate::config::Negotiated;
use crate::pdu::{CCCID_AT, Frame, H2CData, TTAG_AT};
use crate::receive::Sink;
use crate::violation::{Violation, clause};

impl TargetState {
    pub(super) fn h2c_data(
        &mut self,
        header: &[u8],
        frame: &Frame,
        negotiated: &Negotiated,
        sink: &mut Sink,
    ) -> Result<(), Violation> {
        let pdu = H2CData::ref_from_bytes(header).expect("the header of an H2CData has its length");
        pdu.check(frame)?;
        let unknown = Violation::field(TTAG_AT, clause::H2C, "no R2T has this TTAG");
        let token = self.commands.by_tag(pdu.ttag.get()).ok_or(unknown)?;
        let range_bytes = self.config.max_r2t_bytes;
        let slot = self.commands.get(token).ok_or(unknown)?;
        if slot.cid != pdu.cccid.get() {
            return Err(Violation::field(CCCID_AT, clause::H2C_DATA, "CCCID is not the command of the TTAG"));
        }
        let Some((_, transfer)) = self.transfer(token) else {
            return Err(Violation::sequence(clause::H2C, "data for a command that asks for none"));
        };
        if transfer.received == transfer.solicited {
            return Err(Violation::sequence(clause::H2C, "data that no R2T asks for"));
        }
        let (offset, len) = (pdu.datao.get(), pdu.datal.get());
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
        let most = self.negotiated.map_or(1, |negotiated| negotiated.max_r2ts);
        let range_bytes = self.config.max_r2t_bytes;
        let Some((slot, transfer)) = self.transfer(token) else { return };
        // A range that has partly come is still outstanding, so the count starts at the range's start.
        let done = transfer.received / range_bytes;
        let mut asked = 0;
        while transfer.queued < slot.len_bytes && transfer.queued.div_ceil(range_bytes) - done < most {
            transfer.queued = transfer.queued.saturating_add(range_bytes).min(slot.len_bytes);
            asked += 1;
        }
        self.output.extend(std::iter::repeat_with(|| Output::R2t(token)).take(asked));
    }

    /// The data of a PDU is there.
    pub(super) fn transfer_data(&mut self, token: u32) {
        let Some((slot, transfer)) = self.transfer(token) else { return };
        if slot.completion.is_some() {
            self.drain(token);
        } else if transfer.received < slot.len_bytes {
            self.queue_r2ts(token);
        } else if let Some(fill) = transfer.fill.take() {
            slot.stage = CommandStage::Received { fetched: true };
            self.long_transfers -= usize::from(transfer.is_long);
            let data = if fill.is_damaged() {
                Err(DataError::Digest)
            } else {
                let (buffer, sums) = fill.finish();
                Ok(Received { buffer, crcs: sums })
            };
            self.events.push_back(Event::DataReady { token: Token(token), data });
        }
    }

    /// Answers a command that was completed while its data was on the way, once all data has come that was asked for:
    /// the host may have sent it before it sees the response, and data for an unknown tag would be a fatal error.
    pub(super) fn drain(&mut self, token: u32) {
        let Some((slot, transfer)) = self.transfer(token) else { return };
        if transfer.received == transfer.solicited && transfer.fill.is_some() {
            slot.stage = CommandStage::Completed;
            transfer.fill = None;
            self.long_transfers -= usize::from(transfer.is_long);
            self.output.push_back(Output::Response(token));
        }
    }
}
