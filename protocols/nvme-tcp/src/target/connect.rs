//! The first phase: ICReq comes, ICResp goes, and both directions have their rules (NVMe/TCP 3.1).

use zerocopy::FromBytes;

use super::Event;
use super::state::{Output, TargetState};
use crate::config::Negotiated;
use crate::pdu::{self, DIGEST_DATA, DIGEST_HEADER, IcReq, IcResp, PduType};
use crate::violation::{Violation, clause};

impl TargetState {
    pub(super) fn connect(&mut self, kind: PduType, header: &[u8]) -> Result<(), Violation> {
        if kind != PduType::IcReq {
            return Err(Violation::sequence(clause::SETUP, "a PDU before the connection is set up"));
        }
        let request = IcReq::ref_from_bytes(header).expect("the header of an ICReq has its length");
        request.check()?;
        let config = &self.config;
        let allowed =
            if config.header_digest { DIGEST_HEADER } else { 0 } | if config.data_digest { DIGEST_DATA } else { 0 };
        let digests = request.digests & allowed;
        let negotiated = Negotiated {
            header_digest: digests & DIGEST_HEADER != 0,
            data_digest: digests & DIGEST_DATA != 0,
            host_alignment_bytes: pdu::alignment_bytes(request.hpda),
            controller_alignment_bytes: pdu::alignment_bytes(config.cpda),
            max_h2c_data_bytes: config.max_h2c_data_bytes,
            max_r2ts: request.maxr2t.get().saturating_add(1).min(config.max_r2ts.get()),
        };
        let response = IcResp::new(config.cpda, digests, config.max_h2c_data_bytes);
        for rules in [&mut self.incoming, &mut self.outgoing] {
            rules.header_digest = negotiated.header_digest;
            rules.data_digest = negotiated.data_digest;
        }
        self.incoming.alignment_bytes = negotiated.controller_alignment_bytes;
        self.outgoing.alignment_bytes = negotiated.host_alignment_bytes;
        self.negotiated = Some(negotiated);
        self.output.push_back(Output::IcResp(Box::new(response)));
        self.events.push_back(Event::Established(negotiated));
        Ok(())
    }
}
