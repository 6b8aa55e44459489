//! Configuration of a server's connection: exports, limits, memory.

use std::sync::Arc;

use sealblock_runtime_memory::Pool;

use crate::identity::IdentitySource;
use crate::wire::{STRING_BYTES, transmission};

/// Maximum payload of any connection, in bytes.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

/// An export as clients see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Export {
    /// Its name; at most 4096 bytes.
    pub name: String,
    /// Description for people, possibly empty; at most 4096 bytes.
    pub description: String,
    /// Bytes of data, a multiple of `block_bytes`.
    pub size_bytes: u64,
    /// The unit of requests in bytes, a power of two: every offset and length is a multiple of it. 1 for any.
    pub block_bytes: u32,
    /// True if clients may write.
    pub writable: bool,
    /// True if a writable export supports TRIM.
    pub trim: bool,
    /// True if a writable export supports WRITE_ZEROES.
    pub write_zeroes: bool,
    /// Why blocks may be older than what was written to the export, as bits; 0 if they are current.
    pub older: u8,
    /// What it is.
    pub identity: IdentitySource,
}

impl Export {
    /// True if the protocol can express it: its strings have legal lengths, its size is whole blocks, and one block fits into
    /// a payload.
    pub fn is_valid(&self) -> bool {
        self.name.len().max(self.description.len()) <= STRING_BYTES
            && self.block_bytes.is_power_of_two()
            && self.block_bytes <= MAX_PAYLOAD_BYTES
            && self.size_bytes.is_multiple_of(u64::from(self.block_bytes))
    }

    /// Transmission flags; `chunks` is true if replies are structured or extended.
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

/// Bounds on what a client can make a connection hold or do.
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
    /// Requests in flight; further ones stay unread. Unsent replies count too.
    pub commands: usize,
    /// Bytes of reads and writes in flight; further ones stay unread, but a single request may always execute.
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

/// Configuration of a server's connection.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The pool for buffers.
    pub pool: Pool,
    /// The exports that clients may choose.
    pub exports: Arc<[Export]>,
    /// Index of the default export, which the empty name means if no export has it; 0 by default.
    pub default_export: Option<usize>,
    /// Bounds on what a client can make the connection hold.
    pub limits: Limits,
    /// Length of the staging buffer; raised to the longest option.
    pub staging_bytes: usize,
    /// Data of a write of which at least this much is missing is received directly into the write's memory.
    pub direct_bytes: usize,
    /// The server ends and fences older sessions of a client that names its own ([`crate::SessionName`]). Else the context is unknown.
    pub fences_sessions: bool,
}

impl ServerConfig {
    /// These exports with default limits; invalid exports are dropped.
    pub fn new(pool: Pool, exports: impl IntoIterator<Item = Export>) -> ServerConfig {
        let exports = exports.into_iter().filter(Export::is_valid).collect();
        ServerConfig {
            pool,
            exports,
            default_export: Some(0),
            limits: Limits::default(),
            staging_bytes: 64 << 10,
            direct_bytes: 8 << 10,
            fences_sessions: false,
        }
    }

    /// Clamps all values to what the protocol can express and the connection needs.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn export(block_bytes: u32) -> Export {
        let (name, description) = (String::from("a"), String::new());
        Export {
            name,
            description,
            size_bytes: 8192,
            block_bytes,
            writable: true,
            trim: true,
            write_zeroes: true,
            older: 0,
            identity: IdentitySource::default(),
        }
    }

    #[test]
    fn only_what_the_protocol_can_express_is_valid() {
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
