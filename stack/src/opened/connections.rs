//! Connections of an open target to other hosts, and whether they are lost.

use std::time::{SystemTime, UNIX_EPOCH};

use sealblock_media_nvme_tcp::ConnectionMonitor;

/// The connection of a remote device.
#[derive(Clone, Debug)]
pub struct RemoteConnection {
    /// The target name of the device.
    target: String,
    monitor: ConnectionMonitor,
}

/// The connection of a remote device that was lost and has not been set up again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LostRemote {
    /// The target name of the device.
    pub target: String,
    /// When the connection was lost, in seconds since 1970.
    pub since_unix_s: u64,
    /// Why it was lost.
    pub reason: String,
    /// True if the device tries to set it up again by itself.
    pub is_reconnecting: bool,
}

impl RemoteConnection {
    /// The connection of the device with this target name.
    pub(crate) fn new(target: impl ToString, monitor: ConnectionMonitor) -> RemoteConnection {
        RemoteConnection { target: target.to_string(), monitor }
    }

    /// Has the device with the target name `from` be called `to`.
    pub(crate) fn rename(&mut self, from: &str, to: &str) {
        if self.target == from {
            to.clone_into(&mut self.target);
        }
    }

    /// Its loss, if it is lost.
    pub fn lost(&self) -> Option<LostRemote> {
        let lost = self.monitor.lost()?;
        let unix_s = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Some(LostRemote {
            target: self.target.clone(),
            since_unix_s: unix_s(lost.since),
            reason: lost.reason,
            is_reconnecting: lost.is_reconnecting,
        })
    }
}

/// The lost ones of these connections.
pub(crate) fn all_lost(connections: &[RemoteConnection]) -> Vec<LostRemote> {
    connections.iter().filter_map(RemoteConnection::lost).collect()
}

/// Why a device on these connections is lost, if one of them is lost and its device does not set it up again.
pub(crate) fn loss(connections: &[RemoteConnection]) -> Option<String> {
    let lost = all_lost(connections).into_iter().find(|lost| !lost.is_reconnecting)?;
    Some(format!("the connection to {} was lost: {}", lost.target, lost.reason))
}
