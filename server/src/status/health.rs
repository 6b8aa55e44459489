//! Health as one word, and what a check proves about a block: parts of every reported state.

use serde::{Deserialize, Serialize};

/// The health of something; later values are worse.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// No problem is known.
    #[default]
    Healthy,
    /// No problem is known, but not everything could be checked.
    Incomplete,
    /// A copy or a path is missing or out of sync, or requests fail.
    Degraded,
    /// Blocks are bad.
    Damaged,
    /// A value from a later version.
    #[serde(other)]
    Other,
}

impl Health {
    /// As one word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Health::Healthy => "healthy",
            Health::Incomplete => "incomplete",
            Health::Degraded => "degraded",
            Health::Damaged => "damaged",
            Health::Other => "in a state unknown to this version",
        }
    }
}

/// What blocks were checked against.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Checked {
    /// Every block against its protection information.
    Seals,
    /// Some or all blocks have no protection information; they could be read.
    Readability,
}

impl Checked {
    /// What the blocks of a device are checked against, if they have protection information or not.
    pub const fn of(seals: bool) -> Checked {
        if seals { Checked::Seals } else { Checked::Readability }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_health_of_a_later_version_is_read_and_not_a_good_one() {
        assert_eq!(serde_json::from_str::<Health>("\"enlightened\"").unwrap(), Health::Other);
        assert!(Health::Damaged > Health::Degraded && Health::Degraded > Health::Incomplete);
    }
}
