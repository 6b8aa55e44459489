//! What happens in the life of a server, as values for the program that runs it; `docs/formats/json.md` describes them.

use std::net::SocketAddr;
use std::path::PathBuf;

use sealblock_runtime_reactor::CoreAddress;
use serde::Serialize;

use crate::control::protocol::ResizeReport;
use crate::status::scrub::RunStatus;

/// The program's handler of events. It cannot fail: clients are served even if nothing reads the events.
pub type EventSink = fn(&Event);

/// Sends events from any core to the first thread, so that a slow or closed reader does not block a device.
#[derive(Clone)]
pub struct EventSender {
    home: CoreAddress,
    sink: EventSink,
}

impl EventSender {
    /// Sends events to the reactor of the calling thread.
    pub fn here(sink: EventSink) -> EventSender {
        EventSender { home: CoreAddress::here(), sink }
    }

    /// Sends an event.
    pub fn send(&self, event: Event) {
        let sink = self.sink;
        // A server that is ending sends no more events.
        let _ = self.home.send(move || sink(&event));
    }
}

/// An event.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Connections are accepted.
    Ready(Serving),
    /// The configuration was reloaded, and is now served.
    Reloaded(Serving),
    /// The configuration was reloaded, but cannot be served; nothing has changed.
    ReloadFailed {
        /// The reason.
        reason: String,
    },
    /// A target that could not be opened before is open now, and is served.
    Opened(OpenedInfo),
    /// A scrub starts, or resumes after a restart.
    ScrubStarted {
        /// The scrubbed target.
        target: String,
        /// The first block that it checks.
        position: u64,
        /// True if it resumes.
        resumed: bool,
    },
    /// A scrub has ended.
    ScrubFinished {
        /// The scrubbed target.
        target: String,
        /// Its result.
        #[serde(flatten)]
        run: RunStatus,
    },
    /// Acknowledged writes of an earlier server that clients had not flushed may be lost; the first flush of each
    /// client fails once.
    AnsweredLost {
        /// The scrubbed target.
        target: String,
        /// For each affected volume, the reason.
        reasons: Vec<String>,
    },
    /// A volume was resized, and hosts were notified.
    Resized(ResizeReport),
    /// A signal arrived: no more connections are accepted, and commands in flight are completed.
    Draining {
        /// The number of connections at that moment.
        connections: usize,
    },
    /// Everything is closed.
    Stopped,
}

/// What is served, and at which addresses.
#[derive(Serialize)]
pub struct Serving {
    /// The addresses, with the ports that the system chose.
    pub listeners: Vec<SocketAddr>,
    /// The subsystems.
    pub subsystems: Vec<SubsystemInfo>,
    /// What is served over NBD, if anything.
    pub nbd: Option<NbdInfo>,
    /// The block devices of this machine's kernel.
    pub block_devices: Vec<AttachedInfo>,
}

/// An attached block device of this machine's kernel.
#[derive(Clone, Serialize)]
pub struct AttachedInfo {
    /// Its device node.
    pub path: PathBuf,
    /// The target.
    pub target: String,
    /// True if it existed and its last server had ended.
    pub taken_over: bool,
    /// Bytes in a block.
    pub block_size: usize,
    /// How many blocks it has.
    pub blocks: u64,
    /// The number of its queues.
    pub queues: u16,
    /// Requests of a queue at a time.
    pub depth: u16,
    /// The checksum with which the kernel protects blocks, if it does.
    pub host_guard: Option<&'static str>,
    /// True if it refuses writes.
    pub read_only: bool,
    /// True if changes are durable before they are acknowledged.
    pub write_through: bool,
}

/// What is served over NBD.
#[derive(Serialize)]
pub struct NbdInfo {
    /// The addresses, with the ports that the system chose.
    pub listeners: Vec<SocketAddr>,
    /// The Unix sockets.
    pub sockets: Vec<PathBuf>,
    /// The names of the exports.
    pub exports: Vec<String>,
    /// The export for clients that name none: the first of the plan, unless that is not open.
    pub default_export: Option<String>,
}

/// A subsystem that is served.
#[derive(Serialize)]
pub struct SubsystemInfo {
    /// Its name.
    pub nqn: String,
    /// Its serial number.
    pub serial: String,
    /// The hosts that may connect; every host if `None`.
    pub hosts: Option<Vec<String>>,
    /// Its namespaces.
    pub namespaces: Vec<NamespaceInfo>,
    /// The namespaces whose targets are not open.
    pub not_open: Vec<NotOpenInfo>,
}

/// A namespace of the plan whose target is not open.
#[derive(Serialize)]
pub struct NotOpenInfo {
    /// Its identifier in the subsystem.
    pub nsid: u32,
    /// The target.
    pub target: String,
    /// Why it is not open.
    pub reason: String,
    /// True if it is retried.
    pub retried: bool,
}

/// A namespace whose target is open now.
#[derive(Serialize)]
pub struct OpenedInfo {
    /// Its subsystem.
    pub nqn: String,
    /// Its identifier in it.
    pub nsid: u32,
    /// The target.
    pub target: String,
    /// The name of its NBD export, if there is one.
    pub nbd: Option<String>,
    /// The number of attempts.
    pub tries: u64,
}

/// A namespace that is served.
#[derive(Serialize)]
pub struct NamespaceInfo {
    /// Its identifier in the subsystem.
    pub nsid: u32,
    /// The target.
    pub target: String,
    /// Its identity.
    pub uuid: String,
    /// Bytes in a block.
    pub block_size: usize,
    /// How many blocks it has.
    pub blocks: u64,
    /// Its protection information, as text.
    pub protection: String,
    /// True if hosts see its protection information.
    pub protection_shown: bool,
    /// True if it refuses changes.
    pub read_only: bool,
    /// The name of its NBD export, if there is one.
    pub nbd: Option<String>,
}

impl SubsystemInfo {
    /// The first of the hosts that may connect; `None` if every host may, or none.
    pub fn first_host(&self) -> Option<&str> {
        self.hosts.as_ref()?.first().map(String::as_str)
    }
}
