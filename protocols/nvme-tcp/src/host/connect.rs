//! The first phase: ICReq has gone, ICResp comes, and both directions have their rules (NVMe/TCP 3.1).

use zerocopy::FromBytes;

use super::Event;
use super::state::{HostState, Output};
use crate::config::Negotiated;
use crate::pdu::{self, DIGEST_DATA, DIGEST_HEADER, IcResp, PduType};
use crate::violation::{Violation, clause};

impl HostState {
    pub(super) fn connect(&mut self, kind: PduType, header: &[u8]) -> Result<(), Violation> {
        let is_requested = !self.output.iter().any(|output| matches!(output, Output::IcReq));
        if kind != PduType::IcResp || !is_requested {
            return Err(Violation::sequence(clause::SETUP, "a PDU before the connection is set up"));
        }
        let response = IcResp::ref_from_bytes(header).expect("the header of an ICResp has its length");
        response.check(self.requested_digests())?;
        let negotiated = Negotiated {
            header_digest: response.digests & DIGEST_HEADER != 0,
            data_digest: response.digests & DIGEST_DATA != 0,
            host_alignment_bytes: pdu::alignment_bytes(self.config.hpda),
            controller_alignment_bytes: pdu::alignment_bytes(response.cpda),
            max_h2c_data_bytes: response.maxh2cdata_bytes.get(),
            max_r2ts: self.config.max_r2ts.get(),
        };
        for rules in [&mut self.incoming, &mut self.outgoing] {
            rules.header_digest = negotiated.header_digest;
            rules.data_digest = negotiated.data_digest;
        }
        self.incoming.alignment_bytes = negotiated.host_alignment_bytes;
        self.outgoing.alignment_bytes = negotiated.controller_alignment_bytes;
        self.config.max_h2c_data_bytes = self.config.max_h2c_data_bytes.min(negotiated.max_h2c_data_bytes);
        self.negotiated = Some(negotiated);
        self.events.push_back(Event::Established(negotiated));
        Ok(())
    }
}
