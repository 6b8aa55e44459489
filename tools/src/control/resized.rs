//! The result of a resize: what `resize --json` prints and a server sends.

use std::time::Duration;

use sealblock_units::ByteCount;
use serde::{Deserialize, Serialize};

/// A volume that has another size. `docs/formats/json.md` is the contract.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ResizeReport {
    /// What it is.
    pub target: String,
    /// Bytes of data that it held.
    pub before_bytes: u64,
    /// Bytes of data that it holds.
    pub size_bytes: u64,
    /// Microseconds for which requests of hosts waited; `None` if no server had it open.
    pub pause_us: Option<u64>,
}

impl ResizeReport {
    /// For people.
    pub fn to_text(&self) -> String {
        let (before, size) = (ByteCount::new(self.before_bytes), ByteCount::new(self.size_bytes));
        let paused = match self.pause_us.map(Duration::from_micros) {
            Some(pause) if self.before_bytes != self.size_bytes => {
                format!("; requests waited for {:.1} ms", pause.as_secs_f64() * 1000.0)
            }
            _ => String::new(),
        };
        if self.before_bytes == self.size_bytes {
            return format!("{}: it has {size} already", self.target);
        }
        format!("{}: {before} became {size}{paused}", self.target)
    }
}
