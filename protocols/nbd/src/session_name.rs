//! The metadata context by which a client names its session, so that its server ends the client's older ones: an extension of
//! sealblock (`docs/formats/vendor-extensions.md`).
//!
//! A client selects `x-sealblock:session=CLIENT/NUMBER` by SET_META_CONTEXT before GO. A server that lists the context in its reply
//! executes no request of this connection before it has stopped reading all its connections of the same client that have a lower
//! number, and has fenced what these have in flight. The context has no status: BLOCK_STATUS never reports it. Other
//! servers ignore it, as any context that they do not know.

use std::fmt;

use crate::wire::hex_digits;

/// What the name begins with.
const PREFIX: &str = "x-sealblock:session=";

/// A client's session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionName {
    /// The client: chosen at random when it begins.
    pub client: [u8; 16],
    /// The session, from 1; each has a higher number than those before it. Connections of one session have one number.
    pub number: u64,
}

impl fmt::Display for SessionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        self.client.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "/{}", self.number)
    }
}

impl SessionName {
    /// Reads the name of a context; `None` for any other context.
    pub(crate) fn parse(name: &[u8]) -> Option<SessionName> {
        let (client, number) = std::str::from_utf8(name).ok()?.strip_prefix(PREFIX)?.split_once('/')?;
        let client = hex_digits(client)?;
        let digits = number.bytes().all(|byte| byte.is_ascii_digit()) && !number.starts_with('0');
        Some(SessionName { client, number: number.parse().ok().filter(|_| digits)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written() {
        let session = SessionName { client: [0xA7; 16], number: u64::MAX };
        let name = session.to_string();
        assert_eq!(name, format!("x-sealblock:session={}/18446744073709551615", "a7".repeat(16)));
        assert_eq!(SessionName::parse(name.as_bytes()), Some(session));
    }

    #[test]
    fn other_names_are_other_contexts() {
        let client = "a7".repeat(16);
        for name in [
            "base:allocation".to_owned(),
            format!("x-sealblock:session={client}"),
            format!("x-sealblock:session={client}/"),
            format!("x-sealblock:session={client}/0"),
            format!("x-sealblock:session={client}/01"),
            format!("x-sealblock:session={client}/+1"),
            format!("x-sealblock:session={client}/18446744073709551616"),
            format!("x-sealblock:session={}/1", &client[1..]),
            format!("x-sealblock:session={}/1", client.to_uppercase()),
            format!("x-sealblock:session=+{}/1", &client[1..]),
        ] {
            assert_eq!(SessionName::parse(name.as_bytes()), None, "{name}");
        }
    }
}
