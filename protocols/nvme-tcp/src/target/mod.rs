//! The target's side of a connection.
//!
//! `state` has the setup of the connection and the commands that arrive, `transfer` their data, their completions and the
//! PDUs to send.
//!
//! A command starts with [`Event::Command`]; the export fetches its data with [`Target::fetch_data`] until
//! [`Event::DataReady`], or sends data with [`Target::send_data`], and completes it once. The command counts against the
//! limits until its completion has left through [`Target::transmit`], so a host that does not read its responses cannot
//! make the target hold more than the limits allow.

mod state;
mod transfer;

use sealblock_protocols_nvme::{Command, SglError, StatusCode};
use sealblock_runtime_memory::{Buffer, Slice};

use crate::config::{Negotiated, TargetConfig};
use crate::crcs::BlockCrcs;
use crate::output::TransmitLimit;
use crate::receive::{ReceiveCounters, Receiver};
use crate::violation::Closed;
use state::TargetState;

/// Identifies a command in flight on one connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token(u32);

impl Token {
    /// Index of the command: below [`TargetConfig::max_commands`], and unique among those in flight.
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
    /// The data that [`Target::fetch_data`] requested has arrived. The command is still to be completed.
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
    /// A Command Data Buffer of the host: fetched with [`Target::fetch_data`] if the command writes, filled with
    /// [`Target::send_data`] if it reads, left alone otherwise.
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
    /// [`TargetConfig::max_bytes_in_flight`] leaves no room; retry when other commands have completed.
    #[error("the data exceeds the bytes allowed in flight")]
    OverLimit,
}

/// What a connection transferred so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Received bytes.
    pub received: ReceiveCounters,
    /// Bytes of command data that were output.
    pub payload_bytes_sent: u64,
    /// Of those, bytes that were read to compute a data digest; the others had known CRCs, or no digest.
    pub payload_bytes_sent_checksummed: u64,
}

/// A target's side of one connection: commands out, completions in.
pub struct Target {
    receiver: Receiver,
    state: TargetState,
}

impl Target {
    /// A connection that was just accepted.
    pub fn new(config: TargetConfig) -> Target {
        let receiver = Receiver::new(config.pool.clone(), config.staging_bytes, config.direct_bytes);
        Target { receiver, state: TargetState::new(config) }
    }

    /// The buffer for the next receive from the socket. `None` while one is lent, once the connection is closed, and while
    /// commands with in-capsule data hold [`TargetConfig::max_bytes_in_flight`]: call again when [`Target::transmit`] has
    /// output their responses.
    pub fn receive_buffer(&mut self) -> Option<Buffer> {
        let is_full = self.state.capsule_bytes >= self.state.config.max_bytes_in_flight && self.may_pause();
        (self.state.is_open() && !is_full).then(|| self.receiver.lend(&self.state)).flatten()
    }

    /// True if receiving may pause until a response has left: some command has all its in-capsule data, and no command
    /// waits for more.
    pub fn may_pause(&self) -> bool {
        self.receiver.is_at_header() && self.state.capsule_bytes > 0
    }

    /// Takes back the buffer of [`Target::receive_buffer`], whose first `len` bytes are new (0 is allowed), and
    /// processes them. The caller detects the end of the stream.
    ///
    /// # Panics
    /// If it is not the lent buffer, whole, or is shorter than `len`.
    pub fn received(&mut self, buffer: Buffer, len: usize) {
        if !self.state.is_open() {
            return;
        }
        if let Err(closed) = self.receiver.take_back(buffer, len, &mut self.state) {
            self.state.fail(closed, self.receiver.offending_header());
        }
    }

    /// The next event, in order.
    pub fn next_event(&mut self) -> Option<Event> {
        self.state.events.pop_front()
    }

    /// True if [`Target::transmit`] has output.
    pub fn has_output(&self) -> bool {
        !self.state.output.is_empty()
    }

    /// Appends the next output to `out`, in order; returns its bytes. The caller sends it before the output of the next
    /// call.
    pub fn transmit(&mut self, out: &mut Vec<Slice>, limit: TransmitLimit) -> usize {
        self.state.transmit(out, limit)
    }

    /// Ends the connection; drops commands and output.
    pub fn close(&mut self) {
        self.state.fail(Closed::Local, &[]);
    }

    /// Why the connection ended, if it did. Nothing is received any more; shut the socket down once [`Target::has_output`]
    /// is false.
    pub fn closed(&self) -> Option<Closed> {
        self.state.closed
    }

    /// What was negotiated; `None` before [`Event::Established`].
    pub fn negotiated(&self) -> Option<Negotiated> {
        self.state.negotiated
    }

    /// Sets whether successful reads end with the SUCCESS flag in place of a response. Allowed only if the host disabled
    /// submission queue flow control in Connect; off by default.
    pub fn set_success_flag(&mut self, on: bool) {
        self.state.success_flag = on;
    }

    /// Changes [`TargetConfig::max_in_capsule_bytes`], once Connect names the queue.
    pub fn set_max_in_capsule_bytes(&mut self, bytes: u32) {
        self.state.config.max_in_capsule_bytes = bytes;
    }

    /// Commands in flight.
    pub fn commands_in_flight(&self) -> usize {
        self.state.commands.len()
    }

    /// Write data of commands in flight, in bytes.
    pub fn bytes_in_flight(&self) -> usize {
        self.state.bytes_in_flight
    }

    /// Bytes of command data that were output so far.
    pub fn payload_bytes_sent(&self) -> u64 {
        self.state.counters.payload_bytes_sent
    }

    /// What was transferred so far.
    pub fn counters(&self) -> Counters {
        Counters { received: self.receiver.counters(), ..self.state.counters }
    }
}
