//! The host's side of a connection.
//!
//! One file per phase: `connect` until ICResp, `submit` for commands that leave, `write` and `read` for their data,
//! `complete` for their ends, `output` for the PDUs. `state` is what they share.
//!
//! The way of a command: [`Host::submit`] gives it its identifier, [`Event::Completed`] ends it. There is nothing to do
//! in between. Commands still in flight when the connection closes never complete; the submitter knows which they are.

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

/// Names a command in flight; its number is the CID on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cid(pub u16);

/// The data of a command that is submitted.
#[derive(Debug, Default)]
pub enum HostData {
    /// None.
    #[default]
    None,
    /// Goes to the controller, in the capsule if it fits.
    Write(Payload),
    /// Comes from the controller.
    Read {
        /// Where it goes; as long as the data asked for.
        buffer: Buffer,
        /// With a shape, and data digests on, the CRC-32C of each block comes with the data.
        layout: Option<BlockLayout>,
    },
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// The connection is set up; commands may be submitted.
    Established(Negotiated),
    /// A command came to its end.
    Completed {
        /// Which.
        cid: Cid,
        /// How. If its data was damaged on the way, a successful status has become Transient Transport Error
        /// (NVMe/TCP 3.5, "Digest Error handling"). A completion without a response is made up, with SQHD 0.
        completion: Completion,
        /// The data of a command that reads.
        data: Option<ReadData>,
    },
    /// The connection is over; a termination request may be left to transmit.
    Closed(Closed),
}

/// Data that came from the controller.
#[derive(Debug)]
pub struct ReadData {
    /// The bytes that came: shorter than the buffer submitted if the controller sent less.
    pub buffer: Buffer,
    /// The CRC-32C of each of its blocks, where a shape was given, data digests are on and the data is whole blocks.
    pub crcs: Option<BlockCrcs>,
    /// A data digest was wrong: the bytes are not to be used.
    pub is_damaged: bool,
}

/// Why a command was not submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubmitError {
    /// The connection is not set up yet, or closed.
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
    /// A connection whose first output is the request to set it up.
    pub fn new(config: HostConfig) -> Host {
        let receiver = Receiver::new(config.pool.clone(), config.staging_bytes, config.direct_bytes);
        Host { receiver, state: HostState::new(config) }
    }

    /// The buffer for the next receive from the socket. `None` while one is out, and once the connection is closed.
    pub fn receive_buffer(&mut self) -> Option<Buffer> {
        self.state.is_open().then(|| self.receiver.lend(&self.state)).flatten()
    }

    /// Takes back the buffer of [`Host::receive_buffer`], whose first `len` bytes are new (0 is allowed), and
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

    /// Whether [`Host::transmit`] has something to hand out.
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

    /// Why the connection is over, if it is.
    pub fn closed(&self) -> Option<Closed> {
        self.state.closed
    }

    /// What was agreed on; `None` before [`Event::Established`]. A host that insists on a digest looks here.
    pub fn negotiated(&self) -> Option<Negotiated> {
        self.state.negotiated
    }

    /// Changes [`HostConfig::max_in_capsule_bytes`], when Identify tells IOCCSZ.
    pub fn set_max_in_capsule_bytes(&mut self, bytes: u32) {
        self.state.config.max_in_capsule_bytes = bytes;
    }

    /// The place of a command in flight: a number below [`HostConfig::max_commands`] that no other one has. Whoever keeps
    /// something for each command in flight finds it without a search.
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

    /// What went through so far.
    pub fn counters(&self) -> Counters {
        Counters { received: self.receiver.counters(), ..self.state.counters }
    }
}
