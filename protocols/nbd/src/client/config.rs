//! What a client's connection is set up with.

use sealblock_runtime_memory::Pool;

use crate::config::MAX_PAYLOAD_BYTES;
use crate::wire::STRING_BYTES;

/// What the connection is for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Goal {
    /// Name the exports, and end.
    List,
    /// Describe an export, and end. The empty name is the server's default.
    Info(String),
    /// Use an export. The empty name is the server's default.
    Go(String),
}

/// What a server can make a connection hold or do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Replies to one option, such as exports that LIST names; more end the connection.
    pub option_replies: usize,
    /// Bytes of all replies to options together; more end the connection.
    pub negotiation_bytes: u64,
    /// Longest data of a read or write, in bytes, unless the server says less. At most 32 MiB.
    pub payload_bytes: u32,
    /// Requests in flight; [`crate::client::Client::submit`] refuses more.
    pub commands: usize,
    /// Runs of data of one read that do not touch each other; more end the connection.
    pub pieces: usize,
    /// Runs of status in one reply; more end the connection.
    pub runs: usize,
    /// Errors of one request that are kept; further ones are forgotten.
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

/// What a connection is set up with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where memory comes from.
    pub pool: Pool,
    /// What it is for.
    pub goal: Goal,
    /// Whether extended headers are asked for; structured replies always are.
    pub wants_extended: bool,
    /// Whether `base:allocation` is asked for.
    pub wants_status: bool,
    /// What a server can make the connection hold.
    pub limits: Limits,
    /// Bytes that are received at once unless they go straight to their place; at least what a reply to an option may have.
    pub staging_bytes: usize,
    /// Data of a read of which at least this much is missing is received in its place.
    pub direct_bytes: usize,
}

/// Longest data of a reply to an option: an export with name and description, or an error with its text.
pub(super) const OPTION_REPLY_DATA_BYTES: usize = 8 + 2 * STRING_BYTES;

impl Config {
    /// Everything that the server has, within default limits.
    pub fn new(pool: Pool, goal: Goal) -> Config {
        Config {
            pool,
            goal,
            wants_extended: true,
            wants_status: true,
            limits: Limits::default(),
            staging_bytes: 64 << 10,
            direct_bytes: 8 << 10,
        }
    }

    /// The same, brought to what the protocol can say and the core needs.
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

    /// The name of the export it is about.
    pub(super) fn export(&self) -> &str {
        match &self.goal {
            Goal::List => "",
            Goal::Info(name) | Goal::Go(name) => name,
        }
    }
}
