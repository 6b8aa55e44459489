//! Configuration of a client's connection: goal, limits, memory.

use sealblock_runtime_memory::Pool;

use crate::config::MAX_PAYLOAD_BYTES;
use crate::session_name::SessionName;
use crate::wire::STRING_BYTES;

/// Purpose of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Goal {
    /// List the exports, and end.
    List,
    /// Describe an export, and end. The empty name is the server's default.
    Info(String),
    /// Use an export. The empty name is the server's default.
    Go(String),
}

/// Bounds on what a server can make a connection hold or do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Replies to one option, such as exports that LIST names; more end the connection.
    pub option_replies: usize,
    /// Bytes of all replies to options together; more end the connection.
    pub negotiation_bytes: u64,
    /// Longest data of a read or write, in bytes, cut to the server's maximum. At most 32 MiB.
    pub payload_bytes: u32,
    /// Requests in flight; [`crate::client::Client::submit`] refuses more.
    pub commands: usize,
    /// Runs of data of one read that do not touch each other; more end the connection.
    pub pieces: usize,
    /// Status descriptors in one reply; more end the connection.
    pub runs: usize,
    /// Errors of one request that are kept; further ones are dropped.
    pub errors: usize,
}

impl Default for Limits {
    /// 8192 replies to an option, 8 MiB together; payloads of 32 MiB; 64 requests in flight; 4096 pieces of a read, 65,536
    /// runs of status, 64 errors.
    fn default() -> Limits {
        Limits {
            option_replies: 8192,
            negotiation_bytes: 8 << 20,
            payload_bytes: MAX_PAYLOAD_BYTES,
            commands: 64,
            pieces: 4096,
            runs: 65_536,
            errors: 64,
        }
    }
}

/// Configuration of a client's connection.
#[derive(Clone, Debug)]
pub struct Config {
    /// The pool for buffers.
    pub pool: Pool,
    /// Purpose of the connection.
    pub goal: Goal,
    /// True to request extended headers; structured replies are always requested.
    pub wants_extended: bool,
    /// True to request `base:allocation`.
    pub wants_status: bool,
    /// The session that the connection belongs to, for servers that end the client's older ones.
    pub session: Option<SessionName>,
    /// Bounds on what a server can make the connection hold.
    pub limits: Limits,
    /// Length of the staging buffer; raised to the longest reply to an option.
    pub staging_bytes: usize,
    /// Data of a read of which at least this much is missing is received directly into the read's memory.
    pub direct_bytes: usize,
}

/// Longest data of a reply to an option: an export with name and description, or an error with its text.
pub(super) const OPTION_REPLY_DATA_BYTES: usize = 8 + 2 * STRING_BYTES;

impl Config {
    /// Requests all extensions, with default limits.
    pub fn new(pool: Pool, goal: Goal) -> Config {
        Config {
            pool,
            goal,
            wants_extended: true,
            wants_status: true,
            session: None,
            limits: Limits::default(),
            staging_bytes: 64 << 10,
            direct_bytes: 8 << 10,
        }
    }

    /// Clamps all values to what the protocol can express and the connection needs.
    pub(super) fn normalized(mut self) -> Config {
        let limits = &mut self.limits;
        limits.payload_bytes = limits.payload_bytes.clamp(1, MAX_PAYLOAD_BYTES);
        limits.commands = limits.commands.clamp(1, u32::MAX as usize);
        limits.pieces = limits.pieces.max(1);
        limits.runs = limits.runs.max(1);
        self.staging_bytes = self.staging_bytes.max(OPTION_REPLY_DATA_BYTES);
        self.direct_bytes = self.direct_bytes.max(1);
        self
    }

    /// The name of the requested export; empty for a list.
    pub(super) fn export(&self) -> &str {
        match &self.goal {
            Goal::List => "",
            Goal::Info(name) | Goal::Go(name) => name,
        }
    }
}
