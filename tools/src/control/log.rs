//! The log level of a server: what `log --json` prints and a server sends.

use serde::{Deserialize, Serialize};

use crate::cli::LogLevel;

/// The log level of a server. `docs/formats/json.md` is the contract.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LogReport {
    /// The server's process.
    pub pid: u32,
    /// The level before.
    pub before: LogLevel,
    /// The level now.
    pub level: LogLevel,
}
