//! The target's side of a connection.
//!
//! One file per phase: `connect` until ICResp, `capsule` for commands that arrive, `transfer` for the data of writes,
//! `calls` for what the export answers, `output` for the PDUs that leave. `state` is what they share.
//!
//! The way of a command: [`Event::Command`]; if its data is to be fetched, [`Target::accept_data`] and
//! [`Event::DataReady`]; if it reads, [`Target::send_data`]; in any case one completion. Until the completion has left
//! through [`Target::transmit`] the command counts against the limits, so a host that does not read its responses
//! cannot make the target keep more than the limits allow.

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

/// Names a command in flight on one connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token(u32);

impl Token {
    /// The command's place among those in flight: below [`TargetConfig::max_commands`], and no other's meanwhile.
    pub fn place(self) -> usize {
        usize::from(self.0 as u16)
    }
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// The connection is set up; capsules may come.
    Established(Negotiated),
    /// A command came. It is to be answered with exactly one completion.
    Command {
        /// Its name from here on.
        token: Token,
        /// The submission queue entry.
        command: Command,
        /// Its data.
        data: CommandData,
    },
    /// The data that [`Target::accept_data`] asked for is there. The command is still to be answered.
    DataReady {
        /// The command.
        token: Token,
        /// The data, or why there is none.
        data: Result<Received, DataError>,
    },
    /// The connection is over. Commands in flight are forgotten; a termination request may be left to transmit.
    Closed(Closed),
}

/// Data that came from the host, complete and, with data digests on, checked.
#[derive(Debug)]
pub struct Received {
    /// The data.
    pub buffer: Buffer,
    /// The CRC-32C of each of its blocks, where a shape was given, data digests are on and the data is whole blocks.
    pub crcs: Option<BlockCrcs>,
}

/// What a capsule says of its command's data.
#[derive(Debug)]
pub enum CommandData {
    /// There is none.
    None,
    /// It came in the capsule.
    InCapsule(Received),
    /// A Command Data Buffer of the host: fetched with [`Target::accept_data`] if the command writes, filled with
    /// [`Target::send_data`] if it reads, left alone otherwise.
    Transport {
        /// Its length in bytes, not 0.
        len_bytes: u32,
    },
    /// The command is to be failed with [`DataError::status_code`].
    Unusable(DataError),
}

/// Why the data of a command is not to be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DataError {
    /// A data digest is wrong (NVMe/TCP 3.5, "Digest Error handling").
    #[error("the data digest does not fit the data")]
    Digest,
    /// The data pointer is none of this transport.
    #[error(transparent)]
    Sgl(SglError),
    /// The descriptor's offset is not 0, the only one there is with ICDOFF = 0.
    #[error("the data starts behind the start of the capsule's data")]
    Offset,
    /// The descriptor's length is not that of the capsule's data.
    #[error("the descriptor's length is not that of the data in the capsule")]
    Length,
}

impl DataError {
    /// The status that the command is to be failed with.
    pub const fn status_code(self) -> StatusCode {
        match self {
            DataError::Digest => StatusCode::TRANSIENT_TRANSPORT_ERROR,
            DataError::Sgl(error) => error.status_code(),
            DataError::Offset => StatusCode::SGL_OFFSET_INVALID,
            DataError::Length => StatusCode::DATA_SGL_LENGTH_INVALID,
        }
    }
}

/// Why a call of the export was refused; the connection is as it was before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CallError {
    /// No command in flight has this token; after the connection closed, none has any.
    #[error("no command in flight has this token")]
    UnknownToken,
    /// The command has been answered, has no data to fetch, or is fetching it now.
    #[error("the command is not in a state for this call")]
    WrongState,
    /// The length is not that of the host's buffer, exceeds what is left of it, or is no number of dwords.
    #[error("{len_bytes} bytes do not fit a host's buffer with {room_bytes} bytes left, in dwords")]
    Length {
        /// The length offered.
        len_bytes: usize,
        /// What the host's buffer has left.
        room_bytes: usize,
    },
    /// [`TargetConfig::max_bytes_in_flight`] leaves no room; try again when other commands have been answered.
    #[error("the data exceeds the bytes allowed in flight")]
    OverLimit,
}

/// What went through a connection so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// What came in.
    pub received: ReceiveCounters,
    /// Bytes of command data handed out to be sent.
    pub payload_bytes_sent: u64,
    /// Of those, bytes that had to be read for a data digest; the rest came with sums, or digests are off.
    pub payload_bytes_sent_checksummed: u64,
}

/// A target's side of one connection: bytes in, events out, and the other way round.
pub struct Target {
    receiver: Receiver,
    state: TargetState,
}

impl Target {
    /// A connection on which nothing has happened yet.
    pub fn new(config: TargetConfig) -> Target {
        let receiver = Receiver::new(config.pool.clone(), config.staging_bytes, config.direct_bytes);
        Target { receiver, state: TargetState::new(config) }
    }

    /// The buffer for the next receive from the socket. `None` while one is out, once the connection is closed, and while
    /// commands with in-capsule data hold [`TargetConfig::max_bytes_in_flight`]: ask again when [`Target::transmit`] has
    /// handed out their responses.
    pub fn receive_buffer(&mut self) -> Option<Buffer> {
        let is_full = self.state.capsule_bytes >= self.state.config.max_bytes_in_flight && self.may_pause();
        (self.state.is_open() && !is_full).then(|| self.receiver.lend(&self.state)).flatten()
    }

    /// Whether receiving may pause until a response has left: some command has all its in-capsule data, and no data is
    /// expected that another one waits for.
    pub fn may_pause(&self) -> bool {
        self.receiver.is_at_header() && self.state.capsule_bytes > 0
    }

    /// Takes back the buffer of [`Target::receive_buffer`], whose first `len` bytes are new (0 is allowed), and
    /// processes them. The end of the stream is the caller's to notice.
    ///
    /// # Panics
    /// When the buffer is not the one handed out, whole, or is shorter than `len`.
    pub fn received(&mut self, buffer: Buffer, len: usize) {
        if !self.state.is_open() {
            return;
        }
        if let Err(closed) = self.receiver.take_back(buffer, len, &mut self.state) {
            self.state.fail(closed, self.receiver.offending_header());
        }
    }

    /// The next thing that happened, in order.
    pub fn next_event(&mut self) -> Option<Event> {
        self.state.events.pop_front()
    }

    /// Whether [`Target::transmit`] has something to hand out.
    pub fn has_output(&self) -> bool {
        !self.state.output.is_empty()
    }

    /// Appends what is to be sent next to `out`, in order, and says how many bytes it has. Whatever is handed out must
    /// be sent before what the next call hands out.
    pub fn transmit(&mut self, out: &mut Vec<Slice>, limit: TransmitLimit) -> usize {
        self.state.transmit(out, limit)
    }

    /// Ends the connection: commands and outputs are forgotten.
    pub fn close(&mut self) {
        self.state.fail(Closed::Local, &[]);
    }

    /// Why the connection is over, if it is. Then nothing is received any more, and it is to be shut down once
    /// [`Target::has_output`] says that the termination request is gone.
    pub fn closed(&self) -> Option<Closed> {
        self.state.closed
    }

    /// What was agreed on; `None` before [`Event::Established`].
    pub fn negotiated(&self) -> Option<Negotiated> {
        self.state.negotiated
    }

    /// Whether successful reads end with the SUCCESS flag in place of a response. Allowed only if the host disabled
    /// submission queue flow control in Connect; off at first.
    pub fn set_success_flag(&mut self, on: bool) {
        self.state.success_flag = on;
    }

    /// Changes [`TargetConfig::max_in_capsule_bytes`], when Connect tells what queue this is.
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

    /// Bytes of command data handed out to be sent so far.
    pub fn payload_bytes_sent(&self) -> u64 {
        self.state.counters.payload_bytes_sent
    }

    /// What went through so far.
    pub fn counters(&self) -> Counters {
        Counters { received: self.receiver.counters(), ..self.state.counters }
    }
}
