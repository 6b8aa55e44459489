//! Connections of remote devices that are lost.

use sealblock_stack::LostRemote;
use serde::{Deserialize, Serialize};

use crate::dates::date;

/// The connection of a remote device that is lost.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LostConnection {
    /// The target name of the device.
    pub target: String,
    /// When it was lost.
    pub since_unix_s: u64,
    /// Why it was lost.
    pub reason: String,
    /// True if it is set up again as soon as the other host responds.
    pub reconnecting: bool,
}

impl LostConnection {
    /// The loss as text.
    pub fn to_text(&self) -> String {
        let LostConnection { target, since_unix_s, reason, reconnecting } = self;
        let state = if *reconnecting { "reconnecting" } else { "no longer reconnecting" };
        format!("connection to {target} lost since {}, {state}: {reason}", date(*since_unix_s))
    }
}

impl From<LostRemote> for LostConnection {
    fn from(lost: LostRemote) -> LostConnection {
        let LostRemote { target, since_unix_s, reason, is_reconnecting } = lost;
        LostConnection { target, since_unix_s, reason, reconnecting: is_reconnecting }
    }
}
