//! Reasons for the end of a server's connection.

/// A protocol violation of the client that has no reply. Sections are those of `doc/proto.md`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// Client flags that were not offered ("Client flags": the server must drop the connection).
    #[error("client flags {0:#x} have bits that were not offered")]
    ClientFlags(u32),
    /// An option does not begin with its magic ("Newstyle negotiation").
    #[error("an option begins with {0:#018x}")]
    OptionMagic(u64),
    /// More options than [`crate::Limits::options`].
    #[error("more than {0} options")]
    TooManyOptions(u32),
    /// More data of options than [`crate::Limits::negotiation_bytes`].
    #[error("options with more than {0} bytes of data")]
    NegotiationBytes(u64),
    /// EXPORT_NAME with an unknown name: the option has no error reply ("Option types").
    #[error("EXPORT_NAME asks for an export that is not there")]
    UnknownExport,
    /// An option other than EXPORT_NAME without fixed newstyle, or EXPORT_NAME with extended headers ("Option types").
    #[error("option {0} is out of place")]
    Misplaced(u32),
    /// A request does not begin with its magic ("Request message").
    #[error("a request begins with {0:#010x}")]
    RequestMagic(u32),
    /// A payload longer than announced ("Size constraints").
    #[error("a payload of {bytes} bytes, more than the {max} that were announced")]
    PayloadTooLong {
        /// Its length.
        bytes: u64,
        /// The announced maximum.
        max: u32,
    },
}

/// How a connection ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Closed {
    /// The client ended the negotiation with ABORT.
    #[error("the client ended the negotiation")]
    Aborted,
    /// The client ended transmission with DISC.
    #[error("the client disconnected")]
    Disconnected,
    /// The client broke the protocol.
    #[error("the client broke the protocol: {0}")]
    Violation(#[from] Violation),
    /// This side closed it.
    #[error("closed by the server")]
    Here,
}
