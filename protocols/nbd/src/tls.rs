//! The one seam of TLS: what happens when a client asks for it.
//!
//! There is none here ("NOTLS mode"). Whoever adds it answers [`Tls::start`] with an acknowledgement, hands the stream to
//! a TLS library below this core, and has the core forget what was negotiated before.

use crate::client::NegotiationError;
use crate::wire::rep;

/// What a client is told that sends STARTTLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Tls {
    /// This server knows no TLS.
    #[default]
    Unsupported,
    /// This server is not to use TLS.
    Forbidden,
}

impl Tls {
    /// The type of the reply to STARTTLS.
    pub(crate) fn start(self) -> u32 {
        match self {
            Tls::Unsupported => rep::ERR_UNSUP,
            Tls::Forbidden => rep::ERR_POLICY,
        }
    }
}

/// The client's half of the seam: what becomes of a server that demands TLS before anything else. Whoever adds TLS sends
/// STARTTLS here, and begins the options anew once the stream below is a secure one.
pub(crate) fn demanded() -> NegotiationError {
    NegotiationError::TlsRequired
}
