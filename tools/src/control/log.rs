//! How much a server logs, as it is told: what `log --json` prints, and what a server answers.

use serde::{Deserialize, Serialize};

use crate::cli::LogLevel;

/// How much a server logs. `docs/formats/json.md` is the contract.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LogReport {
    /// The server's process.
    pub pid: u32,
    /// The level before.
    pub before: LogLevel,
    /// The level now.
    pub level: LogLevel,
}
