//! The metadata context by which a client learns what an export is, so that it finds one device under two names and does not go on with
//! another one after its connection was lost: an extension of sealblock (`docs/formats/vendor-extensions.md`).
//!
//! A client queries `x-sealblock:identity` by SET_META_CONTEXT before GO. A server that knows the context lists `x-sealblock:uuid=UUID`,
//! once, and `x-sealblock:device=IDENTITY` for each device that the export is or lies on. None of them has a status.

use std::fmt;
use std::sync::Arc;

use crate::wire::{self, DEVICE_PREFIX, UUID_PREFIX};

/// More devices than this are no export that a client uses.
const MAX_DEVICES: usize = 1024;

/// What an export is, as far as its server says it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Identity {
    /// The identity of its content: the same each time it is served, and for no other export of the server.
    pub uuid: Option<[u8; 16]>,
    /// The device that it is, as long as its server has it open, and then all devices at other servers that this one lies on.
    pub devices: Vec<[u8; 16]>,
}

/// Tells what an export is, at any time. Exports do not differ by it.
#[derive(Clone)]
pub struct IdentitySource(Arc<dyn Fn() -> Identity + Send + Sync>);

impl IdentitySource {
    /// What `tell` returns.
    pub fn new(tell: impl Fn() -> Identity + Send + Sync + 'static) -> IdentitySource {
        IdentitySource(Arc::new(tell))
    }

    /// What it is now.
    pub fn identity(&self) -> Identity {
        (self.0)()
    }
}

impl Default for IdentitySource {
    /// Nothing is known.
    fn default() -> IdentitySource {
        IdentitySource::new(Identity::default)
    }
}

impl PartialEq for IdentitySource {
    fn eq(&self, _: &IdentitySource) -> bool {
        true
    }
}

impl Eq for IdentitySource {}

impl fmt::Debug for IdentitySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.identity().fmt(f)
    }
}

impl Identity {
    /// The names of the contexts that say it, each with its identifier.
    pub(crate) fn contexts(&self) -> Vec<(u32, String)> {
        let uuid = self.uuid.iter().map(|uuid| (wire::UUID_ID, name(UUID_PREFIX, uuid)));
        uuid.chain(self.devices.iter().map(|device| (wire::DEVICE_ID, name(DEVICE_PREFIX, device)))).collect()
    }

    /// Takes what the name of a context says; false if that is nothing, more than once, or too much.
    pub(crate) fn take(&mut self, context: &[u8]) -> bool {
        match (bytes_of(context, UUID_PREFIX), bytes_of(context, DEVICE_PREFIX)) {
            (Some(uuid), _) if self.uuid.is_none() => self.uuid = Some(uuid),
            (_, Some(device)) if self.devices.len() < MAX_DEVICES => self.devices.push(device),
            _ => return false,
        }
        true
    }
}

fn name(prefix: &str, of: &[u8; 16]) -> String {
    format!("{prefix}{:032x}", u128::from_be_bytes(*of))
}

fn bytes_of(context: &[u8], prefix: &str) -> Option<[u8; 16]> {
    wire::hex_digits(std::str::from_utf8(context).ok()?.strip_prefix(prefix)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_it_is_written() {
        let identity = Identity { uuid: Some([0xA7; 16]), devices: vec![[1; 16], [2; 16]] };
        let contexts = identity.contexts();
        assert_eq!(contexts[0], (4, format!("x-sealblock:uuid={}", "a7".repeat(16))));
        assert_eq!(contexts[2], (5, format!("x-sealblock:device={}", "02".repeat(16))));
        let mut read = Identity::default();
        assert!(contexts.iter().all(|(_, context)| read.take(context.as_bytes())));
        assert_eq!(read, identity);
        assert!(!read.take(contexts[0].1.as_bytes()), "two UUIDs");
        read.devices.resize(MAX_DEVICES, [3; 16]);
        assert!(!read.take(contexts[1].1.as_bytes()), "one device too many");
    }

    #[test]
    fn other_names_say_nothing() {
        let digits = "a7".repeat(16);
        for context in [
            "x-sealblock:identity".to_owned(),
            "x-sealblock:uuid=".to_owned(),
            format!("x-sealblock:uuid={}", &digits[1..]),
            format!("x-sealblock:uuid={digits}0"),
            format!("x-sealblock:device=+{}", &digits[1..]),
            format!("x-sealblock:device={}", digits.to_uppercase()),
        ] {
            assert!(!Identity::default().take(context.as_bytes()), "{context}");
        }
    }
}
