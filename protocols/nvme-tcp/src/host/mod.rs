//! The host's side of a connection.
//!
//! `state` has the setup of the connection and the life of a command, `transfer` its data and the PDUs to send.
//!
//! [`Host::submit`] assigns a command its identifier, [`Event::Completed`] ends it. Commands in flight when the connection
//! closes never complete; the submitter knows which they are.

mod state;
mod transfer;

use sealblock_protocols_nvme::Completion;
use sealblock_runtime_memory::{Buffer, Slice};

use crate::config::{HostConfig, Negotiated};
use crate::crcs::{BlockCrcs, BlockLayout};
use crate::output::Payload;
use crate::output::TransmitLimit;
use crate::receive::Receiver;
use crate::target::Counters;
use crate::violation::Closed;
use state::HostState;

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
    /// [`HostConfig::max_commands`] are in flight.
    #[error("the queue is full")]
    Full,
    /// The data is empty, longer than 4 GiB, or no whole number of dwords.
    #[error("{0} bytes of data are not a positive number of dwords below 4 GiB")]
    Length(usize),
}

/// A host's side of one connection: commands in, completions out.
pub struct Host {
    receiver: Receiver,
    state: HostState,
}

impl Host {
    /// A connection whose first output is ICReq.
    pub fn new(config: HostConfig) -> Host {
        let receiver = Receiver::new(config.pool.clone(), config.staging_bytes, config.direct_bytes);
        Host { receiver, state: HostState::new(config) }
    }

    /// The buffer for the next receive from the socket. `None` while one is lent, and once the connection is closed.
    pub fn receive_buffer(&mut self) -> Option<Buffer> {
        self.state.is_open().then(|| self.receiver.lend(&self.state)).flatten()
    }

    /// Takes back the buffer of [`Host::receive_buffer`], whose first `len` bytes are new (0 is allowed), and
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

    /// True if [`Host::transmit`] has output.
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

    /// Why the connection ended, if it did.
    pub fn closed(&self) -> Option<Closed> {
        self.state.closed
    }

    /// What was negotiated; `None` before [`Event::Established`]. A host that requires a digest checks it here.
    pub fn negotiated(&self) -> Option<Negotiated> {
        self.state.negotiated
    }

    /// Changes [`HostConfig::max_in_capsule_bytes`], once Identify Controller returns IOCCSZ.
    pub fn set_max_in_capsule_bytes(&mut self, bytes: u32) {
        self.state.config.max_in_capsule_bytes = bytes;
    }

    /// Index of a command in flight: below [`HostConfig::max_commands`] and unique, so that a caller can keep a table of its
    /// commands.
    pub fn place(&self, cid: Cid) -> usize {
        self.state.commands.place(cid.0)
    }

    /// The commands in flight; none once the connection is closed.
    pub fn in_flight(&self) -> impl Iterator<Item = Cid> {
        self.state.commands.tokens().map(|token| Cid(self.state.commands.tag(token)))
    }

    /// How many commands are in flight.
    pub fn commands_in_flight(&self) -> usize {
        self.state.commands.len()
    }

    /// What was transferred so far.
    pub fn counters(&self) -> Counters {
        Counters { received: self.receiver.counters(), ..self.state.counters }
    }
}
