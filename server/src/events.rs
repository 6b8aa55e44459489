//! What happens in the life of a server, for the program that runs it: values, which `docs/formats/json.md` draws.

use std::net::SocketAddr;
use std::path::PathBuf;

use sealblock_runtime_reactor::CoreAddress;
use serde::Serialize;

use crate::control::protocol::ResizeReport;
use crate::status::scrub::RunStatus;

/// The program's handler of events. It cannot fail: clients are served even if nothing reads the events.
pub type EventSink = fn(&Event);

/// Sends events from any core to the first thread, so a slow or closed reader blocks no device.
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
        // A server that is ending has no more events.
        let _ = self.home.send(move || sink(&event));
    }
}

/// What happens.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Connections are accepted.
    Ready(Serving),
    /// The configuration was read again, and is what is served now.
    Reloaded(Serving),
    /// The configuration was read again, and cannot be served; everything is as it was.
    ReloadFailed {
        /// Why.
        reason: String,
    },
    /// A target that did not open before is open, and served.
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
        /// What it has met.
        #[serde(flatten)]
        run: RunStatus,
    },
    /// What an earlier server had answered, and clients had not flushed, may be lost: the first flush of each client fails once.
    AnsweredLost {
        /// The scrubbed target.
        target: String,
        /// Of which volumes, and why.
        reasons: Vec<String>,
    },
    /// A volume has another size, and hosts were notified.
    Resized(ResizeReport),
    /// A signal came: no more connections are accepted, and commands in flight are answered.
    Draining {
        /// Connections at that moment.
        connections: usize,
    },
    /// Everything is closed.
    Stopped,
}

/// What is served, and where.
#[derive(Serialize)]
pub struct Serving {
    /// The addresses, with the ports that the system chose.
    pub listeners: Vec<SocketAddr>,
    /// The subsystems.
    pub subsystems: Vec<SubsystemInfo>,
    /// What NBD clients have, if anything.
    pub nbd: Option<NbdInfo>,
    /// The block devices of this machine's kernel.
    pub block_devices: Vec<AttachedInfo>,
}

/// A block device of this machine's kernel that is there.
#[derive(Clone, Serialize)]
pub struct AttachedInfo {
    /// Its node.
    pub path: PathBuf,
    /// What it is.
    pub target: String,
    /// True if it was there, and its last server gone.
    pub taken_over: bool,
    /// Bytes in a block.
    pub block_size: usize,
    /// How many blocks it has.
    pub blocks: u64,
    /// Its queues.
    pub queues: u16,
    /// Requests of a queue at once.
    pub depth: u16,
    /// The checksum by which the kernel protects blocks, if it does.
    pub host_guard: Option<&'static str>,
    /// True if it takes no writes.
    pub read_only: bool,
    /// True if changes are durable before they are answered.
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
    /// The one for clients that name none: the first of the plan, unless not open.
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
    /// Those whose targets are not open.
    pub not_open: Vec<NotOpenInfo>,
}

/// A namespace that is to be served, and whose target is not open.
#[derive(Serialize)]
pub struct NotOpenInfo {
    /// Which namespace of its subsystem.
    pub nsid: u32,
    /// What it is.
    pub target: String,
    /// Why not open.
    pub reason: String,
    /// Whether it is tried again.
    pub retried: bool,
}

/// A namespace whose target is open now.
#[derive(Serialize)]
pub struct OpenedInfo {
    /// Its subsystem.
    pub nqn: String,
    /// Which namespace of it.
    pub nsid: u32,
    /// What it is.
    pub target: String,
    /// The name of its NBD export, if there is one.
    pub nbd: Option<String>,
    /// How often it was tried.
    pub tries: u64,
}

/// A namespace that is served.
#[derive(Serialize)]
pub struct NamespaceInfo {
    /// Which namespace of its subsystem.
    pub nsid: u32,
    /// What it is.
    pub target: String,
    /// Its identity.
    pub uuid: String,
    /// Bytes in a block.
    pub block_size: usize,
    /// How many blocks it has.
    pub blocks: u64,
    /// Its protection information, in words.
    pub protection: String,
    /// True if hosts see that.
    pub protection_shown: bool,
    /// True if it takes no changes.
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
