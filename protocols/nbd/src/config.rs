//! What a connection is set up with.

use std::sync::Arc;

use sealblock_runtime_memory::Pool;

use crate::wire::{STRING_BYTES, rep, transmission};

/// Largest payload that any connection takes or gives, in bytes.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

/// What clients are told of an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Export {
    /// Its name; at most 4096 bytes.
    pub name: String,
    /// Text for people, or nothing; at most 4096 bytes.
    pub description: String,
    /// Bytes of data, a multiple of `block_bytes`.
    pub size_bytes: u64,
    /// Bytes of a block, a power of two: every offset and length is a multiple of it.
    pub block_bytes: u32,
    /// Whether it can be written.
    pub writable: bool,
    /// Whether TRIM is there, on a writable export.
    pub trim: bool,
    /// Whether WRITE_ZEROES is there, on a writable export.
    pub write_zeroes: bool,
}

impl Export {
    /// Whether clients can be told of it: its strings have legal lengths, its sizes fit each other, and one block fits
    /// into a payload.
    pub fn is_valid(&self) -> bool {
        self.name.len().max(self.description.len()) <= STRING_BYTES
            && self.block_bytes.is_power_of_two()
            && self.block_bytes <= MAX_PAYLOAD_BYTES
            && self.size_bytes.is_multiple_of(u64::from(self.block_bytes))
    }

    /// What NBD calls transmission flags; `chunks` says that replies come in chunks.
    pub(crate) fn flags(&self, chunks: bool) -> u16 {
        use transmission as t;
        let when = |is_so: bool, flags: u16| if is_so { flags } else { 0 };
        t::HAS_FLAGS
            | t::SEND_FLUSH
            | t::SEND_FUA
            | t::SEND_CACHE
            | t::CAN_MULTI_CONN
            | when(!self.writable, t::READ_ONLY)
            | when(self.writable && self.trim, t::SEND_TRIM)
            | when(self.writable && self.write_zeroes, t::SEND_WRITE_ZEROES | t::SEND_FAST_ZERO)
            | when(chunks, t::SEND_DF)
    }
}

/// What a client can make a connection hold or do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Options before transmission; one more ends the connection.
    pub options: u32,
    /// Longest data of an option, in bytes; longer data is skipped and refused as too big.
    pub option_bytes: usize,
    /// Bytes of all options' data together; more ends the connection.
    pub negotiation_bytes: u64,
    /// Longest data of a read or write, in bytes: announced to clients. At most 32 MiB.
    pub payload_bytes: u32,
    /// Requests in flight. Further ones wait, unread. Answers that were not sent count too.
    pub commands: usize,
    /// Bytes of reads and writes in flight. Further ones wait, unread, but one alone may always go.
    pub bytes_in_flight: usize,
}

impl Default for Limits {
    /// 64 options of up to 16 KiB, 256 KiB together; payloads of 32 MiB; 64 requests and 32 MiB in flight.
    fn default() -> Limits {
        Limits {
            options: 64,
            option_bytes: 16 << 10,
            negotiation_bytes: 256 << 10,
            payload_bytes: MAX_PAYLOAD_BYTES,
            commands: 64,
            bytes_in_flight: MAX_PAYLOAD_BYTES as usize,
        }
    }
}

/// What a connection is set up with.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where memory comes from.
    pub pool: Pool,
    /// What can be chosen.
    pub exports: Arc<[Export]>,
    /// The place of the default export, which the empty name means where no export has it; the first unless something is said.
    pub default_export: Option<usize>,
    /// What a client can make the connection hold.
    pub limits: Limits,
    /// What a client is told that asks for TLS.
    pub tls: Tls,
    /// Bytes that are received at once unless they go straight to their place; raised to what an option may have.
    pub staging_bytes: usize,
    /// Data of a write of which at least this much is missing is received in its place.
    pub direct_bytes: usize,
}

impl ServerConfig {
    /// These exports with default limits; those that are not valid are left out.
    pub fn new(pool: Pool, exports: impl IntoIterator<Item = Export>) -> ServerConfig {
        let exports = exports.into_iter().filter(Export::is_valid).collect();
        ServerConfig {
            pool,
            exports,
            default_export: Some(0),
            limits: Limits::default(),
            tls: Tls::default(),
            staging_bytes: 64 << 10,
            direct_bytes: 8 << 10,
        }
    }

    /// The same, brought to what the protocol can say and the core needs.
    pub(crate) fn normalized(mut self) -> ServerConfig {
        let largest = self.exports.iter().map(|export| export.block_bytes).max().unwrap_or(1);
        let limits = &mut self.limits;
        limits.payload_bytes = limits.payload_bytes.min(MAX_PAYLOAD_BYTES);
        // A multiple of each block size, as "Size constraints" demands.
        limits.payload_bytes = (limits.payload_bytes / largest * largest).max(largest);
        limits.commands = limits.commands.max(1);
        self.staging_bytes = self.staging_bytes.max(limits.option_bytes).max(4096);
        self.direct_bytes = self.direct_bytes.max(1);
        self
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn export(block_bytes: u32) -> Export {
        let (name, description) = (String::from("a"), String::new());
        Export { name, description, size_bytes: 8192, block_bytes, writable: true, trim: true, write_zeroes: true }
    }

    #[test]
    fn only_what_clients_can_be_told_is_valid() {
        assert!(export(512).is_valid() && export(8192).is_valid());
        let long = "x".repeat(STRING_BYTES + 1);
        for bad in [
            export(768),
            export(16384),
            Export { name: long.clone(), ..export(512) },
            Export { description: long, ..export(512) },
        ] {
            assert!(!bad.is_valid(), "{bad:?}");
        }
    }

    #[test]
    fn limits_become_legal() {
        let mut config = ServerConfig::new(Pool::new(0, 0), [export(4096), export(512)]);
        config.limits = Limits { payload_bytes: 5000, commands: 0, ..Limits::default() };
        config.staging_bytes = 0;
        let legal = config.clone().normalized();
        assert_eq!((legal.limits.payload_bytes, legal.limits.commands), (4096, 1));
        assert!(legal.staging_bytes >= legal.limits.option_bytes);
        config.limits.payload_bytes = u32::MAX;
        assert_eq!(config.normalized().limits.payload_bytes, MAX_PAYLOAD_BYTES);
    }

    #[test]
    fn flags_are_those_of_the_export() {
        use transmission as t;
        let all = export(512).flags(true);
        assert_eq!(all & t::READ_ONLY, 0);
        assert_ne!(all & t::SEND_DF, 0);
        let bare = Export { writable: false, ..export(512) }.flags(false);
        assert_eq!(bare & (t::SEND_TRIM | t::SEND_WRITE_ZEROES | t::SEND_FAST_ZERO | t::SEND_DF), 0);
        assert_ne!(bare & t::READ_ONLY, 0);
    }
}
