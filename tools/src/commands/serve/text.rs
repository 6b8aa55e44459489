//! A server's events, as lines for people or as JSON objects, each whole.

use std::net::SocketAddr;
use std::path::PathBuf;

use sealblock_server::control::protocol::ResizeReport;
use sealblock_server::events::{Event, NotOpenInfo, OpenedInfo, Serving, SubsystemInfo};
use sealblock_server::plan::{export_uri, host_text, namespace_uri};
use sealblock_server::status::scrub::RunStatus;
use sealblock_stack::quantity::count;
use sealblock_stack::shell_word;
use sealblock_stack::target::NbdAddress;
use sealblock_units::ByteCount;

use crate::report::{Lines, put_event};

/// For people.
pub fn say_event(event: &Event) {
    put_event(false, event, || to_text(event));
}

/// For machines.
pub fn print_event(event: &Event) {
    put_event(true, event, String::new);
}

fn to_text(event: &Event) -> String {
    match event {
        Event::Ready(serving) => ready_text(serving),
        Event::Reloaded(serving) => format!("the configuration was reloaded\n{}", ready_text(serving)),
        Event::ReloadFailed { .. } => "the configuration was not reloaded: the old one stays in effect".to_owned(),
        Event::Opened(opened) => opened_text(opened),
        Event::ScrubStarted { target, position, resumed } => {
            let how = if *resumed { "goes on" } else { "begins" };
            format!("scrub of {target}: {how} at block {position}")
        }
        Event::ScrubFinished { target, run } => finished_text(target, run),
        Event::Resized(report) => resized_text(report),
        Event::AnsweredLost { target, reasons } => format!(
            "{target}: unflushed writes may be lost; the first flush of each client fails once: {}",
            reasons.join("; ")
        ),
        Event::Draining { connections } => format!("draining {}", count(*connections as u64, "connection")),
        Event::Stopped => "stopped".to_owned(),
    }
}

fn finished_text(target: &str, run: &RunStatus) -> String {
    let RunStatus { blocks, bad, repaired, unrepaired, unchecked, .. } = *run;
    let ended = if unchecked > 0 {
        format!("ended incomplete, {} with unchecked copies", count(unchecked, "block"))
    } else {
        "ended".to_owned()
    };
    let checked = count(blocks, "block");
    format!("scrub of {target}: {ended}, {checked} checked, {bad} bad, {repaired} repaired, {unrepaired} unrepaired")
}

/// A volume that has another size.
pub fn resized_text(report: &ResizeReport) -> String {
    let ResizeReport { target, before_bytes, size_bytes, pause_us } = report;
    let (before, size) = (ByteCount::new(*before_bytes), ByteCount::new(*size_bytes));
    if before == size {
        return format!("{target} already has {size}");
    }
    let paused =
        pause_us.map_or(String::new(), |pause_us| format!("; requests waited for {:.1} ms", pause_us as f64 / 1000.0));
    format!("{target}: resized from {before} to {size}{paused}")
}

fn opened_text(opened: &OpenedInfo) -> String {
    let OpenedInfo { nqn, nsid, target, nbd, tries } = opened;
    let nbd = nbd.as_ref().map_or(String::new(), |name| format!(", NBD export {name}"));
    format!("{target} is now served: namespace {nsid} of {nqn}{nbd} (opened after {})", count(*tries, "attempt"))
}

fn ready_text(serving: &Serving) -> String {
    let mut text = Lines::new(0);
    for subsystem in &serving.subsystems {
        text.line(subsystem_text(subsystem));
    }
    for address in &serving.listeners {
        text.line(format_args!("listening on {address}"));
    }
    if let Some(address) = serving.listeners.first() {
        text.line("on a host:");
        for line in host_lines(*address, &serving.subsystems) {
            text.line(format_args!("  {line}"));
        }
    }
    if let Some(nbd) = &serving.nbd {
        let spaces = serving.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
        let exports = spaces.filter_map(|space| Some((space.nbd.as_deref()?, space.block_size)));
        text.line(nbd_text(&nbd.listeners, &nbd.sockets, exports));
    }
    for device in &serving.block_devices {
        text.line(format_args!("{} is {}", device.path.display(), device.target));
    }
    text.line("ready");
    text.into_text()
}

fn subsystem_text(subsystem: &SubsystemInfo) -> String {
    let mut text = Lines::new(0);
    text.line(format_args!("subsystem {}", subsystem.nqn));
    if let Some(hosts) = &subsystem.hosts {
        text.line(format_args!("  only for {}", hosts.join(", ")));
    }
    for namespace in &subsystem.namespaces {
        let size = ByteCount::new(namespace.blocks.saturating_mul(namespace.block_size as u64));
        let shown = if namespace.protection_shown { " (shown)" } else { "" };
        let access = if namespace.read_only { ", read-only" } else { "" };
        let nbd = namespace.nbd.as_ref().map_or(String::new(), |name| format!(", NBD export {name}"));
        text.line(format_args!(
            "  namespace {}: {}, {size} in blocks of {} bytes, {}{shown}{access}{nbd}",
            namespace.nsid, namespace.target, namespace.block_size, namespace.protection
        ));
    }
    for NotOpenInfo { nsid, target, reason, retried } in &subsystem.not_open {
        let then = if *retried { "retrying" } else { "retried on reload" };
        text.line(format_args!("  namespace {nsid}: {target} is not open: {reason}; {then}"));
    }
    text.into_text()
}

/// Where NBD clients connect, and what they type for each name and size of blocks.
fn nbd_text<'a>(
    listeners: &[SocketAddr],
    sockets: &[PathBuf],
    exports: impl Iterator<Item = (&'a str, usize)>,
) -> String {
    let mut text = Lines::new(0);
    for address in listeners {
        text.line(format_args!("listening for NBD on {address}"));
    }
    for path in sockets {
        text.line(format_args!("listening for NBD on {}", path.display()));
    }
    text.line("on an NBD client:");
    for (name, block_size) in exports {
        let word = shell_word(name);
        if let Some(address) = listeners.first() {
            let ((host, _), port) = (host_text(*address), address.port());
            text.line(format_args!("  nbdinfo {}", export_uri(*address, name)));
            text.line(format_args!("  nbd-client {host} {port} -N {word} -b {block_size} /dev/nbd0"));
        }
        if let Some(path) = sockets.first() {
            text.line(format_args!("  nbdinfo {}", shell_word(NbdAddress::Unix(path.clone()).uri(name))));
            let path = shell_word(path.display());
            text.line(format_args!("  nbd-client -unix {path} -N {word} -b {block_size} /dev/nbd0"));
        }
    }
    text.into_text()
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
        lines.push(format!("nvme connect -t tcp -a {host} -s {port} -n {}{as_host}", shell_word(&subsystem.nqn)));
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

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_server::events::NamespaceInfo;

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
        let blank = host_lines(address, &[subsystem("a b", None)]);
        assert_eq!(blank[1], "nvme connect -t tcp -a 127.0.0.1 -s 4420 -n 'nqn.2026-11.org.example:a b'");
        assert_eq!(blank[2], "sealblock verify 'nvme+tcp://127.0.0.1:4420/nqn.2026-11.org.example:a%20b'");
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
