//! Protocol violations of a peer, and their status in the termination request.
//!
//! The side that finds a violation sends a termination request and ends the connection. A violation is a type of its own,
//! apart from the errors of commands, so that no command can fail with it by mistake.

/// Fatal Error Status (FES) of a termination request (NVMe/TCP 3.6.2.4 and 3.6.2.5).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum FatalErrorStatus {
    /// 01h: a field of a PDU header is invalid; the information is the offset of the field in bytes.
    InvalidHeaderField = 0x01,
    /// 02h: a PDU that is not allowed in this state.
    SequenceError = 0x02,
    /// 03h: a header digest is wrong; the information is the digest received.
    HeaderDigest = 0x03,
    /// 04h: a transfer leaves the range it belongs to.
    DataOutOfRange = 0x04,
    /// 05h: more data than MAXH2CDATA (sent by a target), or more R2Ts than MAXR2T (sent by a host).
    LimitExceeded = 0x05,
    /// 06h: a parameter is not supported; the information is the offset of the field in bytes.
    UnsupportedParameter = 0x06,
}

/// Clauses of the NVMe/TCP Transport Specification 1.0 that violations refer to.
pub mod clause {
    /// Initialization of a connection.
    pub const SETUP: &str = "3.1 Setup & Initialization";
    /// Which PDU goes in which direction.
    pub const TRANSFER_MODEL: &str = "3.3 Data Transfer Model";
    /// Capsules and their sizes.
    pub const CAPSULES: &str = "3.3.1 Capsules";
    /// Header and data digests.
    pub const DIGESTS: &str = "3.3.1.1 PDU Header and Data Digests";
    /// C2HData.
    pub const C2H: &str = "3.3.2.1 Controller to Host Command Data Buffer Transfers";
    /// R2T and H2CData.
    pub const H2C: &str = "3.3.2.2 Host to Controller Command Data Buffer Transfers";
    /// Handling of a wrong digest.
    pub const DIGEST_ERRORS: &str = "3.5 Error Handling Model, Digest Error handling";
    /// The common header.
    pub const COMMON_HEADER: &str = "3.6.2.1 PDU Common Header";
    /// ICReq.
    pub const ICREQ: &str = "3.6.2.2 Initialize Connection Request PDU";
    /// ICResp.
    pub const ICRESP: &str = "3.6.2.3 Initialize Connection Response PDU";
    /// CapsuleCmd.
    pub const CAPSULE_CMD: &str = "3.6.2.6 Command Capsule PDU";
    /// CapsuleResp.
    pub const CAPSULE_RESP: &str = "3.6.2.7 Response Capsule PDU";
    /// H2CData.
    pub const H2C_DATA: &str = "3.6.2.8 Host To Controller Data Transfer PDU";
    /// C2HData.
    pub const C2H_DATA: &str = "3.6.2.9 Controller To Host Data Transfer PDU";
    /// R2T.
    pub const R2T: &str = "3.6.2.10 Ready to Transfer PDU";
}

/// A fatal transport error of the peer (NVMe/TCP 3.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} ({clause})")]
pub struct Violation {
    /// The status that the termination request carries.
    pub fes: FatalErrorStatus,
    /// Its Fatal Error Information (FEI): by status, a byte offset, a digest or 0.
    pub fei: u32,
    /// The clause of the NVMe/TCP Transport Specification that is violated.
    pub clause: &'static str,
    /// What is wrong, for a log.
    pub what: &'static str,
}

impl Violation {
    /// The header field that starts at `offset` is invalid.
    pub const fn field(offset: u32, clause: &'static str, what: &'static str) -> Violation {
        Violation { fes: FatalErrorStatus::InvalidHeaderField, fei: offset, clause, what }
    }

    /// The parameter in the header field that starts at `offset` is not supported.
    pub const fn unsupported(offset: u32, clause: &'static str, what: &'static str) -> Violation {
        Violation { fes: FatalErrorStatus::UnsupportedParameter, fei: offset, clause, what }
    }

    /// This PDU may not come now.
    pub const fn sequence(clause: &'static str, what: &'static str) -> Violation {
        Violation { fes: FatalErrorStatus::SequenceError, fei: 0, clause, what }
    }

    /// The transfer leaves its range.
    pub const fn out_of_range(clause: &'static str, what: &'static str) -> Violation {
        Violation { fes: FatalErrorStatus::DataOutOfRange, fei: 0, clause, what }
    }

    /// More than was agreed on.
    pub const fn limit(clause: &'static str, what: &'static str) -> Violation {
        Violation { fes: FatalErrorStatus::LimitExceeded, fei: 0, clause, what }
    }

    /// The header digest that came, `received`, is not that of the header.
    pub const fn header_digest(received: u32) -> Violation {
        let what = "the header digest does not fit the header";
        Violation { fes: FatalErrorStatus::HeaderDigest, fei: received, clause: clause::DIGEST_ERRORS, what }
    }
}

/// Why a connection ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Closed {
    /// The peer violated the protocol; a termination request goes out (it is the last output).
    #[error("the peer violated the protocol: {0}")]
    Violated(#[from] Violation),
    /// The peer sent a termination request: it reports a violation by this side.
    #[error("the peer ended the connection with fatal error status {fes:#06x}, information {fei:#x}")]
    Terminated {
        /// The Fatal Error Status as it came.
        fes: u16,
        /// The Fatal Error Information as it came.
        fei: u32,
    },
    /// The peer sent a termination request of an illegal length, which is not to be read (NVMe/TCP 3.5).
    #[error("the peer ended the connection with a malformed termination request")]
    MalformedTermination,
    /// [`Target::close`](crate::Target::close) or [`Host::close`](crate::Host::close) was called.
    #[error("this side closed the connection")]
    Local,
}
