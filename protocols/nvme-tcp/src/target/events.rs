//! What a target's connection gives and refuses: commands with their data, events, and errors of calls.

use sealblock_protocols_nvme::{Command, SglError, StatusCode};
use sealblock_runtime_memory::Buffer;

use crate::config::Negotiated;
use crate::crcs::BlockCrcs;
use crate::violation::Closed;

/// Identifies a command in flight on one connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token(pub(super) u32);

impl Token {
    /// Index of the command: below [`max_commands`](crate::TargetConfig::max_commands), and unique among those in flight.
    pub fn place(self) -> usize {
        usize::from(self.0 as u16)
    }
}

/// Events of a connection.
#[derive(Debug)]
pub enum Event {
    /// The connection is established; capsules may arrive.
    Established(Negotiated),
    /// A command arrived. The export completes it exactly once.
    Command {
        /// Its token.
        token: Token,
        /// The submission queue entry.
        command: Command,
        /// Its data.
        data: CommandData,
    },
    /// The data that [`fetch_data`](crate::Target::fetch_data) requested has arrived. The command is still to be completed.
    DataReady {
        /// The command.
        token: Token,
        /// The data, or why there is none.
        data: Result<Received, DataError>,
    },
    /// The connection ended. Commands in flight are dropped; a termination request may be left to transmit.
    Closed(Closed),
}

/// Data from the host, complete and, with data digests, checked.
#[derive(Debug)]
pub struct Received {
    /// The data.
    pub buffer: Buffer,
    /// The CRC-32C of each block, if a layout was given, data digests are in use and the data is whole blocks.
    pub crcs: Option<BlockCrcs>,
}

/// The data of a command, by its capsule.
#[derive(Debug)]
pub enum CommandData {
    /// The command has no data.
    None,
    /// The data was in the capsule.
    InCapsule(Received),
    /// A Command Data Buffer of the host: fetched with [`fetch_data`](crate::Target::fetch_data) if the command writes,
    /// filled with [`send_data`](crate::Target::send_data) if it reads, left alone otherwise.
    Transport {
        /// Its length in bytes, not 0.
        len_bytes: u32,
    },
    /// The data is invalid: fail the command with [`DataError::status_code`].
    Unusable(DataError),
}

/// Why the data of a command is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DataError {
    /// A data digest is wrong (NVMe/TCP 3.5, "Digest Error handling").
    #[error("the data digest does not fit the data")]
    Digest,
    /// The data pointer is not one of this transport.
    #[error(transparent)]
    Sgl(SglError),
    /// The descriptor's offset is not 0, as ICDOFF = 0 requires.
    #[error("the data starts behind the start of the capsule's data")]
    Offset,
    /// The descriptor's length is not that of the capsule's data.
    #[error("the descriptor's length is not that of the data in the capsule")]
    Length,
}

impl DataError {
    /// The status to fail the command with.
    pub const fn status_code(self) -> StatusCode {
        match self {
            DataError::Digest => StatusCode::TRANSIENT_TRANSPORT_ERROR,
            DataError::Sgl(error) => error.status_code(),
            DataError::Offset => StatusCode::SGL_OFFSET_INVALID,
            DataError::Length => StatusCode::DATA_SGL_LENGTH_INVALID,
        }
    }
}

/// Why a call of the export was refused; the connection is unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CallError {
    /// No command in flight has this token; after the connection closed, none has any.
    #[error("no command in flight has this token")]
    UnknownToken,
    /// The command was completed, has no data to fetch, or is fetching it.
    #[error("the command is not in a state for this call")]
    WrongState,
    /// The length is not that of the host's buffer, exceeds what is left of it, or is no number of dwords.
    #[error("{len_bytes} bytes do not fit a host's buffer with {room_bytes} bytes left, in dwords")]
    Length {
        /// The length offered.
        len_bytes: usize,
        /// Bytes left in the host's buffer.
        room_bytes: usize,
    },
    /// [`max_bytes_in_flight`](crate::TargetConfig::max_bytes_in_flight) leaves no room; retry when other commands have completed.
    #[error("the data exceeds the bytes allowed in flight")]
    OverLimit,
}
