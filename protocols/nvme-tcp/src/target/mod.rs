//! The target's side of a connection.
//!
//! `state` has the setup of the connection and the commands that arrive, `transfer` their data, their completions and the
//! PDUs to send.
//!
//! A command starts with [`Event::Command`]; the export fetches its data with [`Target::fetch_data`] until
//! [`Event::DataReady`], or sends data with [`Target::send_data`], and completes it once. The command counts against the
//! limits until its completion has left through [`Target::transmit`], so a host that does not read its responses cannot
//! make the target hold more than the limits allow.

mod events;
mod state;
mod transfer;

pub use crate::connection::Counters;
pub use events::{CallError, CommandData, DataError, Event, Received, Token};

use sealblock_runtime_memory::Buffer;

use crate::config::TargetConfig;
use crate::connection::Connection;
use state::TargetState;

/// A target's side of one connection: commands out, completions in.
pub type Target = Connection<TargetState>;

impl Target {
    /// A connection that was just accepted.
    pub fn new(config: TargetConfig) -> Target {
        let (pool, staging_bytes, direct_bytes) = (config.pool.clone(), config.staging_bytes, config.direct_bytes);
        Connection::of(TargetState::new(config), pool, staging_bytes, direct_bytes)
    }

    /// The buffer for the next receive from the socket. `None` while one is lent, once the connection is closed, and while
    /// commands with in-capsule data hold [`TargetConfig::max_bytes_in_flight`]: call again when [`Target::transmit`] has
    /// output their responses.
    pub fn receive_buffer(&mut self) -> Option<Buffer> {
        let is_full = self.state.capsule_bytes >= self.state.config.max_bytes_in_flight && self.may_pause();
        if is_full { None } else { self.lend() }
    }

    /// True if receiving may pause until a response has left: some command has all its in-capsule data, and no command
    /// waits for more.
    pub fn may_pause(&self) -> bool {
        self.receiver.is_at_header() && self.state.capsule_bytes > 0
    }

    /// Sets whether successful reads end with the SUCCESS flag in place of a response. Allowed only if the host disabled
    /// submission queue flow control in Connect; off by default.
    pub fn set_success_flag(&mut self, on: bool) {
        self.state.success_flag = on;
    }

    /// Write data of commands in flight, in bytes.
    pub fn bytes_in_flight(&self) -> usize {
        self.state.bytes_in_flight
    }
}
