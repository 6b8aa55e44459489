//! The host's side of a connection.
//!
//! `state` has the setup of the connection and the life of a command, `transfer` its data and the PDUs to send.
//!
//! [`Host::submit`] assigns a command its identifier, [`Event::Completed`] ends it. Commands in flight when the connection
//! closes never complete; the submitter knows which they are.

mod events;
mod state;
mod transfer;

pub use events::{Cid, Event, HostData, ReadData, SubmitError};

use sealblock_protocols_nvme::Command;
use sealblock_runtime_memory::Buffer;

use crate::config::HostConfig;
use crate::connection::Connection;
use state::HostState;

/// A host's side of one connection: commands in, completions out.
pub type Host = Connection<HostState>;

impl Host {
    /// A connection whose first output is ICReq.
    pub fn new(config: HostConfig) -> Host {
        let (pool, staging_bytes, direct_bytes) = (config.pool.clone(), config.staging_bytes, config.direct_bytes);
        Connection::of(HostState::new(config), pool, staging_bytes, direct_bytes)
    }

    /// The buffer for the next receive from the socket. `None` while one is lent, and once the connection is closed.
    pub fn receive_buffer(&mut self) -> Option<Buffer> {
        self.lend()
    }

    /// Submits a command; its CID, PSDT and data pointer are set here. Without data the data pointer is left as a
    /// transport descriptor of length 0, as Linux sends it.
    ///
    /// # Errors
    /// See [`SubmitError`]; the data is dropped, so a caller that retries keeps a handle on it.
    pub fn submit(&mut self, command: Command, data: HostData) -> Result<Cid, SubmitError> {
        self.state.submit(command, data)
    }

    /// True if one more command may be submitted now.
    pub fn can_submit(&self) -> bool {
        let max = usize::from(self.state.config.max_commands.get());
        self.closed().is_none() && self.negotiated().is_some() && self.state.commands.len() < max
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
}
