//! The state of a server: what `status --json` prints and a server sends.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::damage::DamageStatus;
use super::files::FileError;
use super::health::Health;
use super::mirror::MirrorStatus;
use super::scrub::ScrubStatus;

/// How a server is. `docs/formats/json.md` is the contract. Times are seconds since 1970.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Its process.
    pub pid: u32,
    /// The user that it runs as.
    pub uid: u32,
    /// Its version.
    pub version: String,
    /// When it was started.
    pub started_unix_s: u64,
    /// Its control socket.
    pub control: String,
    /// The worst of what its devices are.
    pub health: Health,
    /// The same in a sentence.
    pub summary: String,
    /// Where it listens for NVMe/TCP hosts.
    pub listeners: Vec<SocketAddr>,
    /// Where it listens for NBD clients.
    pub nbd_listeners: Vec<SocketAddr>,
    /// The Unix sockets where it listens for NBD clients.
    #[serde(default)]
    pub nbd_sockets: Vec<PathBuf>,
    /// What it serves.
    pub devices: Vec<DeviceStatus>,
    /// Who uses it, as far as there is room.
    pub clients: Vec<ClientStatus>,
    /// How many more use it.
    pub clients_unlisted: u64,
    /// The last warnings and errors that it logged, oldest first: objects as of `serve --json` on standard error.
    pub errors: Vec<Map<String, Value>>,
}

/// How a served device is.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// What it is.
    pub target: String,
    /// How well it is.
    pub health: Health,
    /// The same in a sentence.
    pub summary: String,
    /// What to do about it.
    pub advice: Option<String>,
    /// By what names it is served.
    pub exports: Vec<ExportStatus>,
    /// Why it is not open, where it is not.
    #[serde(default)]
    pub opening: Option<OpeningStatus>,
    /// Its state, if it responded.
    #[serde(flatten)]
    pub seen: DeviceSnapshot,
}

/// How it goes with a target that is to be served and does not open.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OpeningStatus {
    /// Why it did not open the last time.
    pub reason: String,
    /// When it did not open first.
    pub since_unix_s: u64,
    /// How often it was tried.
    pub tries: u64,
    /// Whether it is tried again without anybody doing anything.
    pub retried: bool,
}

/// The state of a device.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct DeviceSnapshot {
    /// The files and block devices that it was opened with, by canonical paths.
    #[serde(default)]
    pub files: Vec<String>,
    /// Those of them that were deleted, renamed, replaced or cut off.
    #[serde(default)]
    pub file_trouble: Vec<FileError>,
    /// Why its state is unknown: it is being replaced or closed, or was too slow.
    pub silent: Option<String>,
    /// Blocks that are known to be bad now.
    pub damage: DamageStatus,
    /// Kinds of requests that fail at present.
    pub failing: Vec<FailingStatus>,
    /// The mirrors that it is made of, at any depth.
    pub mirrors: Vec<NamedMirror>,
    /// Its paths.
    pub paths: Vec<PathStatus>,
    /// What is missing of it that neither reads nor checks of blocks meet, in words: what was written last.
    pub lost_metadata: Vec<String>,
    /// Why what an earlier server had answered, and clients had not flushed, may be lost, for each volume of it, as long as those that come are
    /// told.
    #[serde(default)]
    pub unflushed_lost: Vec<String>,
    /// Its scrub, with the last runs.
    pub scrub: Option<ScrubStatus>,
    /// What went through it since it was opened.
    pub io: IoStatus,
}

/// A name by which a device is served.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ExportStatus {
    /// `nvme`, `nbd` or `ublk`.
    pub protocol: String,
    /// The NQN of the subsystem, the name of the export, or the node of the block device.
    pub name: String,
    /// Which namespace of the subsystem.
    pub nsid: Option<u32>,
    /// The hosts that may connect; every one if there is nothing.
    pub hosts: Option<Vec<String>>,
    /// What clients on this machine type, if there is a listener.
    pub uri: Option<String>,
    /// Whether clients can only read it.
    pub read_only: bool,
}

/// Requests of one kind of which the last one failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FailingStatus {
    /// What they ask for: `reads`, `writes` or `flushes`.
    pub requests: String,
    /// Why the last one failed.
    pub reason: String,
    /// Whose it was.
    pub by: String,
    /// When the first one failed after the last that did not.
    pub since_unix_s: u64,
    /// When the last one failed.
    pub last_unix_s: u64,
    /// How many failed since then.
    pub times: u64,
}

/// A mirror, by its target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NamedMirror {
    /// What it is.
    pub target: String,
    /// Its state.
    #[serde(flatten)]
    pub status: MirrorStatus,
}

/// A path of a multipath device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PathStatus {
    /// What it is.
    pub path: String,
    /// Whether it takes requests.
    pub live: bool,
    /// Why not.
    pub trouble: Option<String>,
    /// Times that it failed.
    pub failures: u64,
}

/// What went through a device.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct IoStatus {
    /// Requests in flight.
    pub in_flight: u64,
    /// By operation.
    #[serde(flatten)]
    pub operations: BTreeMap<String, CountStatus>,
}

/// Requests of one operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CountStatus {
    /// Requests that were answered, errors among them.
    pub requests: u64,
    /// Bytes of data that successful ones were about.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
}

/// Who uses a server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClientStatus {
    /// `nvme` or `nbd`.
    pub protocol: String,
    /// The host's name; nothing where it said none, or cannot.
    pub host: Option<String>,
    /// Its address.
    pub from: String,
    /// The NQN of the subsystem, or the name of the export.
    pub name: String,
    /// I/O queues of a host.
    pub queues: Option<u64>,
    /// For how many seconds it has been there.
    pub connected_s: u64,
}

impl IoStatus {
    /// The counts of an operation.
    pub fn of(&self, operation: &str) -> CountStatus {
        self.operations.get(operation).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_tells_comes_back() {
        let io = IoStatus { in_flight: 2, operations: BTreeMap::from([("read".to_owned(), CountStatus::default())]) };
        let device = DeviceStatus {
            target: "v".to_owned(),
            health: Health::Damaged,
            summary: String::new(),
            advice: None,
            exports: Vec::new(),
            opening: None,
            seen: DeviceSnapshot { io, ..DeviceSnapshot::default() },
        };
        let text = serde_json::to_string(&device).unwrap();
        assert!(text.contains(r#""io":{"in_flight":2,"read":{"requests":0"#), "{text}");
        assert_eq!(serde_json::from_str::<DeviceStatus>(&text).unwrap(), device);
    }
}
