//! The numbers of the protocol, by their names in `doc/proto.md` without `NBD_`, and a reader of fields. All are big-endian
//! on the wire.

/// First word of a server: "NBDMAGIC".
pub const INIT_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// Second word of a newstyle server, and the first of each option: "IHAVEOPT".
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// First word of a reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First word of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First word of a chunk of an extended reply.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Second word of an oldstyle server, which has no options.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;

/// Bytes of an option's header.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Bytes of the header of a reply to an option.
pub const OPTION_REPLY_BYTES: usize = 20;
/// Bytes of a server's first words.
pub const GREETING_BYTES: usize = 18;
/// Bytes of a compact request's header.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of an extended request's header.
pub const EXTENDED_REQUEST_BYTES: usize = 32;
/// Bytes of a simple reply's header.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of the header of a chunk of a structured reply.
pub const STRUCTURED_REPLY_BYTES: usize = 20;
/// Bytes of the header of a chunk of an extended reply.
pub const EXTENDED_REPLY_BYTES: usize = 32;
/// Longest string of the protocol, a name or a message, in bytes ("Values", "strings").
pub const STRING_BYTES: usize = 4096;
/// Zeroes after the reply to EXPORT_NAME, for clients without NO_ZEROES.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// Handshake flags; the client flags have the same bits.
pub mod handshake {
    /// The server replies to every option.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No zeroes after the reply to EXPORT_NAME.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options.
pub mod option {
    /// Choose an export; has no reply for errors.
    pub const EXPORT_NAME: u32 = 1;
    /// End the negotiation.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Begin TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and begin transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use extended headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod rep {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Unknown option.
    pub const ERR_UNSUP: u32 = 1 << 31 | 1;
    /// Forbidden by the server.
    pub const ERR_POLICY: u32 = 1 << 31 | 2;
    /// Malformed, or out of place.
    pub const ERR_INVALID: u32 = 1 << 31 | 3;
    /// TLS comes first.
    pub const ERR_TLS_REQD: u32 = 1 << 31 | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: u32 = 1 << 31 | 7;
    /// Too large.
    pub const ERR_TOO_BIG: u32 = 1 << 31 | 9;
    /// Extended headers were negotiated before.
    pub const ERR_EXT_HEADER_REQD: u32 = 1 << 31 | 10;
}

/// Types of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// Text for people.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, best and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags.
pub mod transmission {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// The export is read-only.
    pub const READ_ONLY: u16 = 1 << 1;
    /// The server supports FLUSH.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The server supports the flag FUA.
    pub const SEND_FUA: u16 = 1 << 3;
    /// The server supports TRIM.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// The server supports WRITE_ZEROES.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The server supports the flag DF.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections see each other's writes and flushes.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// The server supports CACHE.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The server supports the flag FAST_ZERO.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Disconnect.
    pub const DISC: u16 = 2;
    /// Make writes durable.
    pub const FLUSH: u16 = 3;
    /// Deallocate.
    pub const TRIM: u16 = 4;
    /// Prefetch.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Report metadata.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub mod flag {
    /// Durable before the reply.
    pub const FUA: u16 = 1;
    /// Keep the blocks allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// At most one chunk of data.
    pub const DF: u16 = 1 << 2;
    /// One status descriptor.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Only if it is faster than writing.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is the payload's.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types and flags of chunks.
pub mod chunk {
    /// Flag: the last chunk of its reply.
    pub const DONE: u16 = 1;
    /// Nothing but success.
    pub const NONE: u16 = 0;
    /// Data.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeroes, without their bytes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Status in 32 bits.
    pub const BLOCK_STATUS: u16 = 5;
    /// Status in 64 bits.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// An error.
    pub const ERROR: u16 = 1 << 15 | 1;
    /// An error at an offset.
    pub const ERROR_OFFSET: u16 = 1 << 15 | 2;
}

/// The metadata context of allocation, the only one supported.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Identifier of [`BASE_ALLOCATION`] in replies.
pub const BASE_ALLOCATION_ID: u32 = 1;
/// Identifier of the context that names a session ([`crate::SessionName`]); no reply has it.
pub const SESSION_ID: u32 = 2;

/// The metadata context by which a server tells whether an export's blocks may be older than what was written to it, an extension of
/// sealblock (`docs/formats/vendor-extensions.md`). The reply appends `=` and the bits as two hexadecimal digits.
pub const OLDER: &str = "x-sealblock:older";
/// Identifier of [`OLDER`]; no reply has it.
pub const OLDER_ID: u32 = 3;

/// The metadata context by which a server tells what an export is ([`crate::Identity`]).
pub const IDENTITY: &str = "x-sealblock:identity";
/// What the name of the context begins with that tells the UUID.
pub const UUID_PREFIX: &str = "x-sealblock:uuid=";
/// Identifier of the context that tells the UUID; no reply has it.
pub const UUID_ID: u32 = 4;
/// What the name of a context begins with that tells a device.
pub const DEVICE_PREFIX: &str = "x-sealblock:device=";
/// Identifier of the contexts that tell devices; no reply has it.
pub const DEVICE_ID: u32 = 5;

/// 32 hexadecimal digits, as names of contexts have them.
pub(crate) fn hex_digits(digits: &str) -> Option<[u8; 16]> {
    let is_hex = digits.len() == 32 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    u128::from_str_radix(digits, 16).ok().filter(|_| is_hex).map(u128::to_be_bytes)
}

/// Errors of replies ("Error values"), shown by the names that the protocol has for them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[repr(u32)]
pub enum ErrorCode {
    /// The export is read-only.
    #[error("EPERM")]
    NotPermitted = 1,
    /// The medium failed, or blocks are damaged.
    #[error("EIO")]
    Io = 5,
    /// The server has no memory.
    #[error("ENOMEM")]
    NoMemory = 12,
    /// Malformed, out of range, misaligned or unknown.
    #[error("EINVAL")]
    Invalid = 22,
    /// A write past the end, or a full medium.
    #[error("ENOSPC")]
    NoSpace = 28,
    /// Longer than the announced payload.
    #[error("EOVERFLOW")]
    Overflow = 75,
    /// FAST_ZERO was set, and zeroing would not be fast.
    #[error("ENOTSUP")]
    NotSupported = 95,
    /// The server is shutting down.
    #[error("ESHUTDOWN")]
    Shutdown = 108,
}

impl ErrorCode {
    /// The error of this number. One that the protocol does not name means EINVAL ("Error values").
    pub fn of(number: u32) -> ErrorCode {
        use ErrorCode::*;
        let named = [NotPermitted, Io, NoMemory, NoSpace, Overflow, NotSupported, Shutdown];
        named.into_iter().find(|code| *code as u32 == number).unwrap_or(Invalid)
    }
}

/// Reads fields from the front of a slice. A read beyond the end returns `None` and consumes nothing.
pub(crate) struct FieldReader<'a>(pub(crate) &'a [u8]);

impl<'a> FieldReader<'a> {
    pub(crate) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (now, later) = self.0.split_at_checked(len)?;
        self.0 = later;
        Some(now)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string with its length in 32 bits before it.
    pub(crate) fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(usize::try_from(len).ok()?)
    }

    /// `Some` if all bytes were read.
    pub(crate) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_big_endian_and_end_where_the_bytes_do() {
        let mut fields = FieldReader(&[0, 1, 0, 0, 0, 2, b'a', b'b', 9]);
        assert_eq!(fields.u16(), Some(1));
        assert_eq!(fields.string(), Some(&b"ab"[..]));
        assert_eq!((fields.u16(), fields.end()), (None, None), "one byte is left, and stays");
        assert_eq!(fields.bytes(1), Some(&[9][..]));
        assert_eq!(fields.end(), Some(()));
        assert_eq!(FieldReader(&[255; 4]).string(), None);
        assert_eq!(FieldReader(&[0, 0, 0, 0, 0, 0, 1, 0]).u64(), Some(256));
    }
}
