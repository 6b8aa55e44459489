//! What the server says: lines for people, or one JSON object for each event, each at once and whole.
//!
//! A closed standard output does not end the server.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use sealblock_block::Geometry;
use sealblock_exports_nvme_tcp::Hosts;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_stack::identity::uuid_text;
use sealblock_stack::quantity::count;
use sealblock_stack::target::{NbdAddress, encode};
use sealblock_units::ByteCount;
use serde::Serialize;

use super::plan::{NamespacePlan, SubsystemPlan};
use super::scrub::{ScrubFinished, ScrubStarted};
use crate::cli::Protection;
use crate::commands::create::protection_text;
use crate::control::protocol::ResizeReport;
use crate::report::{print_json, say};

/// Says what happens.
#[derive(Clone, Copy)]
pub struct EventWriter {
    json: bool,
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
    /// A scrub begins, or goes on after a restart.
    ScrubStarted(ScrubStarted),
    /// A scrub has ended.
    ScrubFinished(ScrubFinished),
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
    /// The one for clients that name none: the first of the plan, unless it is not open.
    pub default_export: Option<String>,
}

/// A subsystem that is served.
#[derive(Serialize)]
pub struct SubsystemInfo {
    nqn: String,
    serial: String,
    /// The hosts that may connect; every host if `None`.
    hosts: Option<Vec<String>>,
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
    /// Why it is not open.
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
    nsid: u32,
    /// What it is.
    pub target: String,
    /// Its identity.
    pub uuid: String,
    block_size: usize,
    blocks: u64,
    protection: String,
    protection_shown: bool,
    read_only: bool,
    /// The name of its NBD export, if there is one.
    nbd: Option<String>,
}

impl SubsystemInfo {
    /// What there is to say of a subsystem.
    pub fn new(
        plan: &SubsystemPlan,
        serial: String,
        namespaces: Vec<NamespaceInfo>,
        not_open: Vec<NotOpenInfo>,
    ) -> SubsystemInfo {
        let hosts = match &plan.hosts {
            Hosts::Any => None,
            Hosts::Only(hosts) => Some(hosts.iter().map(Nqn::to_string).collect()),
        };
        SubsystemInfo { nqn: plan.nqn.to_string(), serial, hosts, namespaces, not_open }
    }

    /// The first of the hosts that may connect; `None` if every host may, or none.
    fn first_host(&self) -> Option<&str> {
        self.hosts.as_ref()?.first().map(String::as_str)
    }
}

impl NamespaceInfo {
    /// What there is to say of a namespace.
    pub fn new(plan: &NamespacePlan, geometry: &Geometry, uuid: &[u8; 16], nbd: Option<String>) -> NamespaceInfo {
        NamespaceInfo {
            nsid: plan.nsid,
            target: plan.target.to_string(),
            uuid: uuid_text(uuid),
            block_size: geometry.block_size.bytes(),
            blocks: geometry.capacity_blocks,
            protection: protection_text(geometry.protection),
            protection_shown: plan.protection == Protection::Shown,
            read_only: plan.read_only,
            nbd,
        }
    }
}

impl EventWriter {
    /// For people, or for machines.
    pub fn new(json: bool) -> EventWriter {
        EventWriter { json }
    }

    /// Says it.
    pub fn write(&self, event: &Event) {
        let said = if self.json { print_json(event) } else { say(to_text(event).trim_end()) };
        // The reader of the events is gone; the clients are still served.
        said.ok();
    }
}

fn to_text(event: &Event) -> String {
    match event {
        Event::Ready(serving) => ready_text(serving),
        Event::Reloaded(serving) => format!("the configuration was read again\n{}", ready_text(serving)),
        Event::ReloadFailed { .. } => "the configuration was read again, and everything stays as it was".to_owned(),
        Event::Opened(opened) => opened_text(opened),
        Event::ScrubStarted(started) => started.to_text(),
        Event::ScrubFinished(finished) => finished.to_text(),
        Event::Resized(report) => report.to_text(),
        Event::Draining { connections } => format!("draining {}", count(*connections as u64, "connection")),
        Event::Stopped => "stopped".to_owned(),
    }
}

fn opened_text(opened: &OpenedInfo) -> String {
    let OpenedInfo { nqn, nsid, target, nbd, tries } = opened;
    let nbd = nbd.as_ref().map_or(String::new(), |name| format!(", NBD export {name}"));
    format!("{target} is open now and served: namespace {nsid} of {nqn}{nbd} (it was tried {})", count(*tries, "time"))
}

fn ready_text(serving: &Serving) -> String {
    let mut text = String::new();
    for subsystem in &serving.subsystems {
        put(&mut text, subsystem_text(subsystem));
    }
    for address in &serving.listeners {
        put(&mut text, format_args!("listening on {address}"));
    }
    if let Some(address) = serving.listeners.first() {
        put(&mut text, "a host types:");
        for line in host_lines(*address, &serving.subsystems) {
            put(&mut text, format_args!("  {line}"));
        }
    }
    if let Some(nbd) = &serving.nbd {
        let spaces = serving.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
        let exports = spaces.filter_map(|space| Some((space.nbd.as_deref()?, space.block_size)));
        put(&mut text, nbd_text(&nbd.listeners, &nbd.sockets, exports));
    }
    put(&mut text, "ready");
    text
}

fn subsystem_text(subsystem: &SubsystemInfo) -> String {
    let mut text = String::new();
    put(&mut text, format_args!("subsystem {}", subsystem.nqn));
    if let Some(hosts) = &subsystem.hosts {
        put(&mut text, format_args!("  only for {}", hosts.join(", ")));
    }
    for namespace in &subsystem.namespaces {
        let size = ByteCount::new(namespace.blocks.saturating_mul(namespace.block_size as u64));
        let shown = if namespace.protection_shown { " (shown)" } else { "" };
        let access = if namespace.read_only { ", read-only" } else { "" };
        let nbd = namespace.nbd.as_ref().map_or(String::new(), |name| format!(", NBD export {name}"));
        put(
            &mut text,
            format_args!(
                "  namespace {}: {}, {size} in blocks of {} bytes, {}{shown}{access}{nbd}",
                namespace.nsid, namespace.target, namespace.block_size, namespace.protection
            ),
        );
    }
    for NotOpenInfo { nsid, target, reason, retried } in &subsystem.not_open {
        let then = if *retried { "it is tried again" } else { "a reload tries again" };
        put(&mut text, format_args!("  namespace {nsid}: {target} is not open: {reason}; {then}"));
    }
    text.trim_end().to_owned()
}

/// Where NBD clients connect, and what they type for each name and size of blocks.
fn nbd_text<'a>(
    listeners: &[SocketAddr],
    sockets: &[PathBuf],
    exports: impl Iterator<Item = (&'a str, usize)>,
) -> String {
    let mut text = String::new();
    for address in listeners {
        put(&mut text, format_args!("listening for NBD on {address}"));
    }
    for path in sockets {
        put(&mut text, format_args!("listening for NBD on {}", path.display()));
    }
    put(&mut text, "an NBD client types:");
    for (name, block_size) in exports {
        let word = shell_word(name);
        if let Some(address) = listeners.first() {
            let ((host, _), port) = (host_text(*address), address.port());
            put(&mut text, format_args!("  nbdinfo {}", export_uri(*address, name)));
            put(&mut text, format_args!("  nbd-client {host} {port} -N {word} -b {block_size} /dev/nbd0"));
        }
        if let Some(path) = sockets.first() {
            put(&mut text, format_args!("  nbdinfo {}", shell_word(&socket_uri(path, name))));
            let path = shell_word(&path.to_string_lossy());
            put(&mut text, format_args!("  nbd-client -unix {path} -N {word} -b {block_size} /dev/nbd0"));
        }
    }
    text.trim_end().to_owned()
}

/// A name as one word of a shell.
pub fn shell_word(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._/:@+,".contains(c);
    match !name.is_empty() && name.chars().all(is_plain) {
        true => name.to_owned(),
        false => format!("'{}'", name.replace('\'', r"'\''")),
    }
}

/// How hosts name a namespace as a target: by its number where the subsystem has several, and as a host that may come.
pub fn namespace_uri(address: SocketAddr, nqn: &str, nsid: Option<u32>, host: Option<&str>) -> String {
    let nsid = nsid.map_or(String::new(), |nsid| format!("/{nsid}"));
    let as_host = host.map_or(String::new(), |host| format!("?hostnqn={}", encode(host, ":")));
    format!("nvme+tcp://{}:{}/{nqn}{nsid}{as_host}", host_text(address).1, address.port())
}

/// How clients name an NBD export as a target.
pub fn export_uri(address: SocketAddr, name: &str) -> String {
    format!("nbd://{}:{}/{}", host_text(address).1, address.port(), encode(name, ":/"))
}

/// The same on a Unix socket.
pub fn socket_uri(path: &Path, name: &str) -> String {
    NbdAddress::Unix(path.to_owned()).uri(name)
}

/// How clients write an address, alone and in a URI.
fn host_text(address: SocketAddr) -> (String, String) {
    // The operator fills in an address of this machine that the hosts can reach.
    let host = if address.ip().is_unspecified() { "HOST".to_owned() } else { address.ip().to_string() };
    let in_uri = if host.contains(':') { format!("[{host}]") } else { host.clone() };
    (host, in_uri)
}

/// What a host must type to find, use and scrub the subsystems.
fn host_lines(address: SocketAddr, subsystems: &[SubsystemInfo]) -> Vec<String> {
    let (host, _) = host_text(address);
    let port = address.port();
    // A subsystem that no host may use needs no command to connect.
    let usable: Vec<&SubsystemInfo> =
        subsystems.iter().filter(|subsystem| subsystem.hosts != Some(Vec::new())).collect();
    let seen_by_all = usable.iter().any(|subsystem| subsystem.hosts.is_none());
    let as_host = |host: Option<&str>| host.map_or(String::new(), |host| format!(" --hostnqn={}", shell_word(host)));
    let finder = as_host(usable.first().filter(|_| !seen_by_all).and_then(|first| first.first_host()));
    let mut lines = vec![format!("nvme discover -t tcp -a {host} -s {port}{finder}")];
    for subsystem in &usable {
        let as_host = as_host(subsystem.first_host());
        lines.push(format!("nvme connect -t tcp -a {host} -s {port} -n {}{as_host}", subsystem.nqn));
    }
    for subsystem in usable {
        let several = subsystem.namespaces.len() + subsystem.not_open.len() > 1;
        for namespace in &subsystem.namespaces {
            let nsid = Some(namespace.nsid).filter(|_| several);
            let uri = namespace_uri(address, &subsystem.nqn, nsid, subsystem.first_host());
            lines.push(format!("sealblock verify {}", shell_word(&uri)));
        }
    }
    lines
}

fn put(text: &mut String, line: impl std::fmt::Display) {
    writeln!(text, "{line}").expect("a text takes what is written to it");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_told_what_they_may_type() {
        let subsystem = |name: &str, hosts: Option<&[&str]>| SubsystemInfo {
            nqn: format!("nqn.2026-11.org.example:{name}"),
            serial: String::new(),
            hosts: hosts.map(|hosts| hosts.iter().map(|host| format!("nqn.2026-11.org.example:{host}")).collect()),
            namespaces: vec![NamespaceInfo {
                nsid: 1,
                target: "v".to_owned(),
                uuid: String::new(),
                block_size: 4096,
                blocks: 8,
                protection: String::new(),
                protection_shown: false,
                read_only: false,
                nbd: None,
            }],
            not_open: Vec::new(),
        };
        let address = "127.0.0.1:4420".parse().unwrap();
        let open = subsystem("open", None);
        let lines = host_lines(address, &[open, subsystem("few", Some(&["a", "b"])), subsystem("none", Some(&[]))]);
        assert_eq!(
            lines,
            [
                "nvme discover -t tcp -a 127.0.0.1 -s 4420",
                "nvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn.2026-11.org.example:open",
                "nvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn.2026-11.org.example:few --hostnqn=nqn.2026-11.org.example:a",
                "sealblock verify nvme+tcp://127.0.0.1:4420/nqn.2026-11.org.example:open",
                "sealblock verify 'nvme+tcp://127.0.0.1:4420/nqn.2026-11.org.example:few?hostnqn=nqn.2026-11.org.example:a'",
            ]
        );
        let lines = host_lines(address, &[subsystem("few", Some(&["a", "b"]))]);
        assert_eq!(lines[0], "nvme discover -t tcp -a 127.0.0.1 -s 4420 --hostnqn=nqn.2026-11.org.example:a");
    }

    #[test]
    fn clients_are_told_names_that_shells_and_uris_take() {
        let exports = [("v", 512), ("photos/7", 4096), ("it's a b", 4096)];
        let listeners = ["[::]:10809".parse().unwrap(), "[::1]:7".parse().unwrap()];
        let words = nbd_text(&listeners, &["/run/a b.sock".into()], exports.into_iter());
        for line in [
            "listening for NBD on [::]:10809\n",
            "listening for NBD on [::1]:7\n",
            "listening for NBD on /run/a b.sock\n",
            "  nbdinfo 'nbd+unix:///v?socket=/run/a%20b.sock'\n",
            "  nbd-client -unix '/run/a b.sock' -N photos/7 -b 4096 /dev/nbd0\n",
            "  nbdinfo nbd://HOST:10809/v\n",
            "  nbdinfo nbd://HOST:10809/photos/7\n",
            "  nbdinfo nbd://HOST:10809/it%27s%20a%20b\n",
            "  nbd-client HOST 10809 -N v -b 512 /dev/nbd0\n",
            r"  nbd-client HOST 10809 -N 'it'\''s a b' -b 4096 /dev/nbd0",
        ] {
            assert!(words.contains(line), "'{line}' is not in:\n{words}");
        }
    }
}
