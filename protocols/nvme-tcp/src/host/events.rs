//! What a host's connection takes and gives: commands with their data, and events.

use sealblock_protocols_nvme::Completion;
use sealblock_runtime_memory::Buffer;

use crate::config::Negotiated;
use crate::crcs::{BlockCrcs, BlockLayout};
use crate::output::Payload;
use crate::violation::Closed;

/// Identifier of a command in flight: the CID on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cid(pub u16);

/// The data of a command that is submitted.
#[derive(Debug, Default)]
pub enum HostData {
    /// None.
    #[default]
    None,
    /// Data to the controller, in the capsule if it fits.
    Write(Payload),
    /// Data from the controller.
    Read {
        /// Its memory; as long as the requested data.
        buffer: Buffer,
        /// With a layout and data digests, the CRC-32C of each block is returned with the data.
        layout: Option<BlockLayout>,
    },
}

/// Events of a connection.
#[derive(Debug)]
pub enum Event {
    /// The connection is established; commands may be submitted.
    Established(Negotiated),
    /// A command completed.
    Completed {
        /// The command.
        cid: Cid,
        /// Its completion. If a data digest was wrong, a successful status becomes Transient Transport Error (NVMe/TCP 3.5,
        /// "Digest Error handling"). A command that ends with the SUCCESS flag gets a completion with SQHD 0.
        completion: Completion,
        /// The data of a command that reads.
        data: Option<ReadData>,
    },
    /// The connection ended; a termination request may be left to transmit.
    Closed(Closed),
}

/// Data from the controller.
#[derive(Debug)]
pub struct ReadData {
    /// The received bytes; shorter than the submitted buffer if the controller sent less.
    pub buffer: Buffer,
    /// The CRC-32C of each block, if a layout was given, data digests are in use and the data is whole blocks.
    pub crcs: Option<BlockCrcs>,
    /// True if a data digest was wrong: the bytes must not be used.
    pub is_damaged: bool,
}

/// Why a command was not submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubmitError {
    /// The connection is not established yet, or closed.
    #[error("the connection is not open for commands")]
    NotEstablished,
    /// [`HostConfig::max_commands`](crate::HostConfig::max_commands) are in flight.
    #[error("the queue is full")]
    Full,
    /// The data is empty, longer than 4 GiB, or no whole number of dwords.
    #[error("{0} bytes of data are not a positive number of dwords below 4 GiB")]
    Length(usize),
}
