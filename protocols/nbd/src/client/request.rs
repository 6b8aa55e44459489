//! Requests: checked against the export's information, then written as a header.

use sealblock_runtime_memory::Slice;

use crate::client::export_info::ExportInfo;
use crate::wire::{command, flag, transmission};

/// One request. Offsets and lengths are in bytes.
#[derive(Clone, Debug)]
pub enum ClientRequest {
    /// Read.
    Read {
        /// Where.
        offset: u64,
        /// How much.
        length: u32,
        /// DF: all data in one chunk.
        whole: bool,
    },
    /// Write.
    Write {
        /// Where.
        offset: u64,
        /// What.
        data: Slice,
        /// Durable before the reply.
        fua: bool,
    },
    /// Make all writes durable that were completed so far.
    Flush,
    /// Deallocate.
    Trim {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
        /// Durable before the reply.
        fua: bool,
    },
    /// Prefetch: a read follows soon.
    Cache {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
    },
    /// Write zeroes.
    WriteZeroes {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
        /// Durable before the reply.
        fua: bool,
        /// Keep the blocks allocated.
        no_hole: bool,
        /// Only if it is faster than writing.
        fast: bool,
    },
    /// Report which bytes are allocated.
    BlockStatus {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
        /// REQ_ONE: one descriptor only.
        one: bool,
    },
}

/// Why a request was not sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubmitError {
    /// No export was chosen yet, or the connection ended.
    #[error("the connection is not ready for requests")]
    NotReady,
    /// [`crate::client::Limits::commands`] are in flight.
    #[error("as many requests are in flight as may be")]
    Full,
    /// The server does not support it.
    #[error("the server does not offer {0}")]
    NotOffered(&'static str),
    /// The range is empty, or not within the export.
    #[error("{length} bytes at {offset} are not on an export of {size} bytes")]
    Range {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
        /// The export's size.
        size: u64,
    },
    /// Not a multiple of the smallest block.
    #[error("{length} bytes at {offset} are not a multiple of the block size, {block} bytes")]
    Misaligned {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
        /// The smallest block.
        block: u32,
    },
    /// Longer than a request may be.
    #[error("{length} bytes at once are more than {max}")]
    TooLong {
        /// How much.
        length: u64,
        /// The maximum.
        max: u64,
    },
}

/// The fields of a request's header, without magic and cookie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RequestFields {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl ClientRequest {
    /// The header's fields; PAYLOAD_LEN only with extended headers.
    pub(super) fn fields(&self, extended: bool) -> RequestFields {
        let when = |is_so: bool, flag: u16| if is_so { flag } else { 0 };
        let (kind, flags, offset, length) = match *self {
            ClientRequest::Read { offset, length, whole } => {
                (command::READ, when(whole, flag::DF), offset, length.into())
            }
            ClientRequest::Write { offset, ref data, fua } => {
                let flags = when(fua, flag::FUA) | when(extended, flag::PAYLOAD_LEN);
                (command::WRITE, flags, offset, data.len() as u64)
            }
            ClientRequest::Flush => (command::FLUSH, 0, 0, 0),
            ClientRequest::Trim { offset, length, fua } => (command::TRIM, when(fua, flag::FUA), offset, length),
            ClientRequest::Cache { offset, length } => (command::CACHE, 0, offset, length),
            ClientRequest::WriteZeroes { offset, length, fua, no_hole, fast } => {
                let flags = when(fua, flag::FUA) | when(no_hole, flag::NO_HOLE) | when(fast, flag::FAST_ZERO);
                (command::WRITE_ZEROES, flags, offset, length)
            }
            ClientRequest::BlockStatus { offset, length, one } => {
                (command::BLOCK_STATUS, when(one, flag::REQ_ONE), offset, length)
            }
        };
        RequestFields { kind, flags, offset, length }
    }

    /// Checks the request against the export's information and the maximum payload.
    pub(super) fn check(&self, export: &ExportInfo, max: u32) -> Result<(), SubmitError> {
        self.check_offered(export)?;
        if matches!(self, ClientRequest::Flush) {
            return Ok(());
        }
        let RequestFields { offset, length, .. } = self.fields(false);
        let (size, block) = (export.size_bytes, export.sizes.smallest);
        if length == 0 || offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(SubmitError::Range { offset, length, size });
        }
        if (offset | length) & (u64::from(block) - 1) != 0 {
            return Err(SubmitError::Misaligned { offset, length, block });
        }
        let has_data = matches!(self, ClientRequest::Read { .. } | ClientRequest::Write { .. });
        let max = match export.is_extended() {
            _ if has_data => u64::from(max.min(export.sizes.largest)),
            true => u64::MAX,
            false => u64::from(u32::MAX),
        };
        if length > max { Err(SubmitError::TooLong { length, max }) } else { Ok(()) }
    }

    fn check_offered(&self, export: &ExportInfo) -> Result<(), SubmitError> {
        use transmission as t;
        let needs = |flag, name| if export.has(flag) { Ok(()) } else { Err(SubmitError::NotOffered(name)) };
        let changes = match *self {
            ClientRequest::Write { fua, .. }
            | ClientRequest::Trim { fua, .. }
            | ClientRequest::WriteZeroes { fua, .. } => Some(fua),
            _ => None,
        };
        if changes.is_some() && export.has(t::READ_ONLY) {
            return Err(SubmitError::NotOffered("writing"));
        }
        match self {
            ClientRequest::Read { whole: true, .. } => needs(t::SEND_DF, "reads in one chunk")?,
            ClientRequest::Flush => needs(t::SEND_FLUSH, "FLUSH")?,
            ClientRequest::Trim { .. } => needs(t::SEND_TRIM, "TRIM")?,
            ClientRequest::Cache { .. } => needs(t::SEND_CACHE, "CACHE")?,
            ClientRequest::WriteZeroes { fast, .. } => {
                needs(t::SEND_WRITE_ZEROES, "WRITE_ZEROES")?;
                if *fast {
                    needs(t::SEND_FAST_ZERO, "FAST_ZERO")?;
                }
            }
            ClientRequest::BlockStatus { .. } if export.context.is_none() => {
                return Err(SubmitError::NotOffered("base:allocation"));
            }
            ClientRequest::Read { .. } | ClientRequest::Write { .. } | ClientRequest::BlockStatus { .. } => {}
        }
        if changes == Some(true) { needs(t::SEND_FUA, "FUA") } else { Ok(()) }
    }
}
