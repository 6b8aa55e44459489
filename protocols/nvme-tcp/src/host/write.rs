//! R2Ts that arrive for the data of writes (NVMe/TCP 3.3.2.2).

use zerocopy::FromBytes;

use super::state::{HostState, Output, R2tRange, TransferData};
use crate::pdu::{CCCID_AT, R2T};
use crate::violation::{Violation, clause};

impl HostState {
    pub(super) fn r2t(&mut self, header: &[u8]) -> Result<(), Violation> {
        let pdu = R2T::ref_from_bytes(header).expect("the header of an R2T has its length");
        pdu.check()?;
        let unknown = Violation::field(CCCID_AT, clause::R2T, "no command in flight has this CCCID");
        let token = self.commands.by_tag(pdu.cccid.get()).ok_or(unknown)?;
        let slot = self.commands.get_mut(token).ok_or(unknown)?;
        let TransferData::Write(write) = &mut slot.data else {
            return Err(Violation::sequence(clause::H2C, "an R2T for a command without data to transfer"));
        };
        if !slot.is_sent {
            return Err(Violation::sequence(clause::H2C, "an R2T for a command that was not sent yet"));
        }
        let (offset, len) = (pdu.r2to.get(), pdu.r2tl.get());
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
            self.output.push_back(Output::Data(token));
        }
        Ok(())
    }
}
