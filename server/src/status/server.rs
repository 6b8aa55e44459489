//! The state of a server, as `status --json` prints it and a server sends it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use sealblock_block::Histogram;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::connections::LostConnection;
use super::damage::DamageStatus;
use super::files::FileError;
use super::health::Health;
use super::mirror::MirrorStatus;
use super::scrub::ScrubStatus;

/// The state of a server. `docs/formats/json.md` defines it. Times are seconds since 1970.
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
    /// The worst health among its devices.
    pub health: Health,
    /// The same as a sentence.
    pub summary: String,
    /// The addresses on which it listens for NVMe/TCP hosts.
    pub listeners: Vec<SocketAddr>,
    /// The addresses on which it listens for NBD clients.
    pub nbd_listeners: Vec<SocketAddr>,
    /// The Unix sockets on which it listens for NBD clients.
    #[serde(default)]
    pub nbd_sockets: Vec<PathBuf>,
    /// The devices that it serves.
    pub devices: Vec<DeviceStatus>,
    /// Its clients, up to a limit.
    pub clients: Vec<ClientStatus>,
    /// The number of clients that are not listed.
    pub clients_unlisted: u64,
    /// The last warnings and errors that it logged, the oldest first: the same objects as on the standard error of
    /// `serve --json`.
    pub errors: Vec<Map<String, Value>>,
}

/// The state of a served device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// The target.
    pub target: String,
    /// Its health.
    pub health: Health,
    /// The same as a sentence.
    pub summary: String,
    /// What to do about it.
    pub advice: Option<String>,
    /// The names by which it is served.
    pub exports: Vec<ExportStatus>,
    /// Why it is not open, if it is not.
    #[serde(default)]
    pub opening: Option<OpeningStatus>,
    /// Its state, if it responded.
    #[serde(flatten)]
    pub seen: DeviceSnapshot,
}

/// The attempts to open a target that is to be served.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OpeningStatus {
    /// Why the last attempt failed.
    pub reason: String,
    /// When the first attempt failed.
    pub since_unix_s: u64,
    /// The number of attempts.
    pub tries: u64,
    /// True if it is retried automatically.
    pub retried: bool,
}

/// The state of a device.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct DeviceSnapshot {
    /// The files and block devices that it was opened with, by canonical paths.
    #[serde(default)]
    pub files: Vec<String>,
    /// Those that were deleted, renamed, replaced or truncated.
    #[serde(default)]
    pub file_errors: Vec<FileError>,
    /// Why its state is unknown: it is being replaced or closed, or was too slow.
    pub unresponsive: Option<String>,
    /// Blocks that are known to be bad now.
    pub damage: DamageStatus,
    /// The kinds of requests that fail at present.
    pub failing: Vec<FailingStatus>,
    /// The mirrors in it, at any depth.
    pub mirrors: Vec<NamedMirror>,
    /// Its paths, for a multipath device.
    pub paths: Vec<PathStatus>,
    /// The connections of its remote devices that are lost, but for those of paths and replicas, which `paths` and
    /// `mirrors` show.
    #[serde(default)]
    pub lost_connections: Vec<LostConnection>,
    /// What it has lost that neither reads nor checks of blocks can detect, as text: the last writes.
    pub lost_metadata: Vec<String>,
    /// Copies of metadata that are lost while the other copy is used, as text; those of replicas are in `mirrors`.
    #[serde(default)]
    pub lost_copies: Vec<String>,
    /// For each of its volumes, why acknowledged but unflushed writes of an earlier server may be lost, as long as
    /// clients that connect are told so.
    #[serde(default)]
    pub unflushed_lost: Vec<String>,
    /// Its scrub, with the last runs.
    pub scrub: Option<ScrubStatus>,
    /// The requests that it has executed since it was opened.
    pub io: IoStatus,
}

/// A name by which a device is served.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ExportStatus {
    /// `nvme`, `nbd` or `ublk`.
    pub protocol: String,
    /// The NQN of the subsystem, the name of the export, or the node of the block device.
    pub name: String,
    /// The identifier of the namespace in the subsystem.
    pub nsid: Option<u32>,
    /// The hosts that may connect; `None` if every host may.
    pub hosts: Option<Vec<String>>,
    /// What clients on this machine type, if there is a listener.
    pub uri: Option<String>,
    /// True if clients can only read it.
    pub read_only: bool,
}

/// Requests of one kind, of which the last one failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FailingStatus {
    /// The kind: `reads`, `writes` or `flushes`.
    pub requests: String,
    /// Why the last one failed.
    pub reason: String,
    /// The client that sent it.
    pub by: String,
    /// When the first one failed after the last success.
    pub since_unix_s: u64,
    /// When the last one failed.
    pub last_unix_s: u64,
    /// How many have failed since then.
    pub times: u64,
}

/// A mirror, by its target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NamedMirror {
    /// The target.
    pub target: String,
    /// Its state.
    #[serde(flatten)]
    pub status: MirrorStatus,
}

/// A path of a multipath device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PathStatus {
    /// Its target.
    pub path: String,
    /// True if it accepts requests.
    pub live: bool,
    /// Why not.
    pub error: Option<String>,
    /// How often it has failed.
    pub failures: u64,
}

/// The requests that a device has executed.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct IoStatus {
    /// Requests in flight.
    pub in_flight: u64,
    /// By operation.
    #[serde(flatten)]
    pub operations: BTreeMap<String, CountStatus>,
}

/// Requests of one operation.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CountStatus {
    /// Requests that were completed, including failed ones.
    pub requests: u64,
    /// Bytes of data of successful requests.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// How long requests waited before the device was called; `None` if none were timed. Older servers do not
    /// report it.
    #[serde(default)]
    pub queue_us: Option<LatencyStatus>,
    /// How long the device took.
    #[serde(default)]
    pub device_us: Option<LatencyStatus>,
}

/// How long requests took, in microseconds. A percentile may be up to an eighth too high.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct LatencyStatus {
    /// Requests that it is of. Those executed in place count, though a part of them is timed.
    pub count: u64,
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// What 90 % do not exceed.
    pub p90: f64,
    /// What 99 % do not exceed.
    pub p99: f64,
    /// What 99.9 % do not exceed.
    pub p99_9: f64,
    /// The longest.
    pub max: f64,
}

impl LatencyStatus {
    /// The percentiles of a histogram; `None` if it is empty.
    pub fn of(histogram: &Histogram) -> Option<LatencyStatus> {
        // Hundredths, which are as exact as the clock.
        let us = |time: Duration| (time.as_nanos() as f64 / 10.0).round() / 100.0;
        let percentile = |share| histogram.percentile(share).map(us);
        let count = histogram.count();
        Some(LatencyStatus {
            count,
            mean: us(Duration::from_nanos(
                u64::try_from(histogram.sum().as_nanos()).unwrap_or(u64::MAX) / count.max(1),
            )),
            p50: percentile(0.5)?,
            p90: percentile(0.9)?,
            p99: percentile(0.99)?,
            p99_9: percentile(0.999)?,
            max: us(histogram.max()),
        })
    }
}

/// A client of a server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClientStatus {
    /// `nvme` or `nbd`.
    pub protocol: String,
    /// The host's name; `None` if it has none or its protocol has none.
    pub host: Option<String>,
    /// Its address.
    pub from: String,
    /// The NQN of the subsystem, or the name of the export.
    pub name: String,
    /// I/O queues of a host.
    pub queues: Option<u64>,
    /// For how many seconds it has been connected.
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
    use sealblock_block::{Latency, LatencyCounters, RequestKind};

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

    #[test]
    fn times_come_back_and_an_older_server_has_none() {
        let counters = LatencyCounters::default();
        for us in 1..=1000 {
            counters.record(RequestKind::Read, Duration::from_nanos(650), Duration::from_micros(us), 1);
        }
        let mut latency = Latency::default();
        counters.add_to(RequestKind::Read, &mut latency);
        let count = CountStatus {
            requests: 1000,
            queue_us: LatencyStatus::of(&latency.queue),
            device_us: LatencyStatus::of(&latency.device),
            ..CountStatus::default()
        };
        let text = serde_json::to_string(&count).unwrap();
        let queue = r#""queue_us":{"count":1000,"mean":0.65,"p50":0.65,"p90":0.65,"p99":0.65,"p99_9":0.65,"max":0.65}"#;
        assert!(text.contains(queue), "{text}");
        assert_eq!(serde_json::from_str::<CountStatus>(&text).unwrap(), count);
        let device = count.device_us.unwrap();
        assert!((500.0..=562.5).contains(&device.p50) && (990.0..=1000.0).contains(&device.p99), "{device:?}");
        assert_eq!((device.max, device.mean), (1000.0, 500.5));
        assert_eq!(LatencyStatus::of(&Histogram::default()), None);
        let older: CountStatus = serde_json::from_str(r#"{"requests":1,"bytes":2,"errors":3}"#).unwrap();
        assert_eq!(older, CountStatus { requests: 1, bytes: 2, errors: 3, ..CountStatus::default() });
    }
}
