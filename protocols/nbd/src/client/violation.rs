//! Reasons for the end of a client's connection.

use crate::wire::rep;

/// A protocol violation of the server. Sections are those of `doc/proto.md`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// The greeting has a bad magic ("Newstyle negotiation").
    #[error("it begins with {0:#018x}, which is not NBD")]
    Greeting(u64),
    /// The greeting has an unknown style of negotiation.
    #[error("unknown style of negotiation {0:#018x}")]
    Style(u64),
    /// A reply to an option does not begin with its magic.
    #[error("a reply to an option begins with {0:#018x}")]
    OptionMagic(u64),
    /// A reply to another option than the one that was sent.
    #[error("a reply to option {actual} where {expected} was sent")]
    OptionAnswered {
        /// The option that was sent.
        expected: u32,
        /// The option in the reply.
        actual: u32,
    },
    /// A reply of a type that the option does not have ("Option reply types").
    #[error("a reply of type {kind:#x} to option {option}")]
    OptionReply {
        /// The option.
        option: u32,
        /// The type.
        kind: u32,
    },
    /// Data of a reply to an option that is malformed or has no legal length.
    #[error("{length} bytes of malformed data in a reply to option {option}")]
    OptionData {
        /// The option.
        option: u32,
        /// The data's length.
        length: u32,
    },
    /// More replies than [`crate::client::Limits::option_replies`].
    #[error("more than {0} replies to one option")]
    OptionReplies(usize),
    /// More data than [`crate::client::Limits::negotiation_bytes`].
    #[error("replies to options with more than {0} bytes")]
    NegotiationBytes(u64),
    /// GO or INFO ended without the export's size.
    #[error("it describes an export without its size")]
    NoSize,
    /// Block sizes that the protocol forbids ("Size constraints").
    #[error("impossible block sizes: {0}, {1} and {2}")]
    BlockSizes(u32, u32, u32),
    /// A reply does not begin with the magic of what was negotiated.
    #[error("a reply begins with {0:#010x}")]
    ReplyMagic(u32),
    /// A reply with the cookie of no request in flight.
    #[error("a reply to cookie {0:#x}, under which nothing is in flight")]
    Cookie(u64),
    /// A simple reply to a request that requires chunks.
    #[error("a simple reply to a request of type {0} although replies come in chunks")]
    SimpleReply(u16),
    /// A chunk of an extended reply with another offset than its request.
    #[error("a reply that names offset {actual} to a request at {expected}")]
    ReplyOffset {
        /// The request's.
        expected: u64,
        /// The reply's.
        actual: u64,
    },
    /// A chunk of a type that is unknown, or that its request does not allow.
    #[error("a chunk of type {kind:#x} to a request of type {command}")]
    Chunk {
        /// The chunk's type.
        kind: u16,
        /// The request's type.
        command: u16,
    },
    /// A chunk with a length that its type does not allow.
    #[error("a chunk of type {kind:#x} with {length} bytes")]
    ChunkLength {
        /// The chunk's type.
        kind: u16,
        /// The length of its payload in bytes.
        length: u64,
    },
    /// Data or an error outside of its request.
    #[error("{length} bytes at {offset} are outside the request")]
    OutOfRange {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
    },
    /// Data that was received before.
    #[error("{length} bytes at {offset} came twice")]
    Overlap {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
    },
    /// Data in several chunks in spite of NBD_CMD_FLAG_DF.
    #[error("several chunks of data although one was requested")]
    Fragmented,
    /// More pieces than [`crate::client::Limits::pieces`].
    #[error("a read in more than {0} pieces that do not touch")]
    Pieces(usize),
    /// A read that succeeded without all of its data, or a status without a descriptor.
    #[error("a request that succeeded without all its data")]
    Incomplete,
    /// Status of a context that was not chosen.
    #[error("status of context {0}, which was not chosen")]
    Context(u32),
    /// Status that is repeated, has a length of 0, or goes beyond the request.
    #[error("runs of status that do not fit the request")]
    Runs,
    /// An error of number 0.
    #[error("an error that says success")]
    NoError,
}

/// Why the negotiation failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NegotiationError {
    /// The server speaks oldstyle, which has no options.
    #[error("the server speaks oldstyle NBD, which has no options")]
    Oldstyle,
    /// The server speaks newstyle without replies to options.
    #[error("the server does not speak fixed newstyle NBD")]
    NotFixed,
    /// The server requires TLS, which this client does not support (NBD_REP_ERR_TLS_REQD). To add TLS, send STARTTLS here and
    /// negotiate anew on the secure stream.
    #[error("the server demands TLS, which is not part of this client")]
    TlsRequired,
    /// No such export (NBD_REP_ERR_UNKNOWN).
    #[error("the server has no such export{}", after_colon(.0))]
    Unknown(String),
    /// The server's policy forbids it (NBD_REP_ERR_POLICY).
    #[error("the server does not allow it{}", after_colon(.0))]
    Policy(String),
    /// The server is shutting down (NBD_REP_ERR_SHUTDOWN).
    #[error("the server is shutting down{}", after_colon(.0))]
    Shutdown(String),
    /// The server does not support a required option (NBD_REP_ERR_UNSUP).
    #[error("the server does not know option {option}{}", after_colon(.text))]
    Unsupported {
        /// The option.
        option: u32,
        /// The server's text.
        text: String,
    },
    /// Any other error.
    #[error("the server refuses option {option} with error {kind:#x}{}", after_colon(.text))]
    Other {
        /// The option.
        option: u32,
        /// The type of the reply.
        kind: u32,
        /// The server's text.
        text: String,
    },
}

/// A server's text behind a colon, if there is any.
pub(super) fn after_colon(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

/// The printable part of a server's text.
pub(super) fn printable(bytes: &[u8]) -> String {
    /// Maximum characters that are kept.
    const MAX_SHOWN_CHARS: usize = 256;
    String::from_utf8_lossy(bytes)
        .chars()
        .filter(|c| !c.is_control())
        .take(MAX_SHOWN_CHARS)
        .collect::<String>()
        .trim()
        .to_owned()
}

impl NegotiationError {
    /// The error that a reply to an option means.
    pub(super) fn of(option: u32, kind: u32, text: &[u8]) -> NegotiationError {
        let text = printable(text);
        match kind {
            rep::ERR_TLS_REQD => NegotiationError::TlsRequired,
            rep::ERR_UNKNOWN => NegotiationError::Unknown(text),
            rep::ERR_POLICY => NegotiationError::Policy(text),
            rep::ERR_SHUTDOWN => NegotiationError::Shutdown(text),
            rep::ERR_UNSUP => NegotiationError::Unsupported { option, text },
            _ => NegotiationError::Other { option, kind, text },
        }
    }
}

/// How a client's connection ended.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Closed {
    /// The goal is reached.
    #[error("the connection has done what it was for")]
    Ended,
    /// The server refused the negotiation.
    #[error("{0}")]
    Refused(#[from] NegotiationError),
    /// The server broke the protocol.
    #[error("the server broke the protocol: {0}")]
    Violation(#[from] Violation),
    /// This side closed it.
    #[error("closed by this client")]
    Here,
}
