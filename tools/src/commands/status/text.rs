//! A server for people.

use std::fmt::Write;
use std::time::Duration;

use sealblock_stack::quantity::count;
use sealblock_units::ByteCount;
use serde_json::{Map, Value};

use crate::commands::mirror::replica_texts;
use crate::commands::scrub::text::{past, run_text};
use crate::report::Lines;
use sealblock_server::dates::{date, span};
use sealblock_server::status::damage::DamageStatus;
use sealblock_server::status::health::Health;
use sealblock_server::status::scrub::{ScrubStatus, StateWord};
use sealblock_server::status::server::{
    ClientStatus, CountStatus, DeviceStatus, ExportStatus, IoStatus, LatencyStatus, ServerStatus,
};

/// Runs of scrubs that are named.
const MAX_RUNS: usize = 3;
/// Runs of bad blocks that are named.
const MAX_DAMAGE: usize = 16;

/// The kinds of requests that are printed, singular and plural.
const OPERATIONS: [(&str, &str, &str); 9] = [
    ("read", "read", "reads"),
    ("write", "write", "writes"),
    ("flush", "flush", "flushes"),
    ("discard", "discard", "discards"),
    ("write_zeroes", "zeroing", "zeroings"),
    ("verify", "verify", "verifies"),
    ("repair", "check with repair", "checks with repair"),
    ("compare", "compare", "compares"),
    ("digest", "digest", "digests"),
];

/// The status of a server, with rates since the earlier status.
pub fn of(server: &ServerStatus, earlier: Option<(Duration, &ServerStatus)>) -> String {
    let mut lines = Lines::new(10);
    let (pid, uid, version) = (server.pid, server.uid, &server.version);
    lines.put(
        "server",
        format_args!("process {pid} of user {uid}, sealblock {version}, up since {}", date(server.started_unix_s)),
    );
    lines.put("health", health(server.health, &server.summary));
    for (protocol, listeners) in [("NVMe/TCP", &server.listeners), ("NBD", &server.nbd_listeners)] {
        for address in listeners {
            lines.put("listening", format_args!("{address} for {protocol}"));
        }
    }
    for path in &server.nbd_sockets {
        lines.put("listening", format_args!("{} for NBD", path.display()));
    }
    for device in &server.devices {
        let before = earlier.and_then(|(since, server)| {
            let before = server.devices.iter().find(|other| other.exports == device.exports)?;
            Some((since, &before.seen.io))
        });
        lines.line("");
        put_device(&mut lines, device, before);
    }
    lines.line("");
    clients(&mut lines, server);
    for error in &server.errors {
        lines.put("log", log_line_text(error));
    }
    lines.into_text()
}

fn health(health: Health, summary: &str) -> String {
    format!("{}: {summary}", health.as_str())
}

fn put_device(lines: &mut Lines, device: &DeviceStatus, before: Option<(Duration, &IoStatus)>) {
    let seen = &device.seen;
    let size = seen.scrub.as_ref().map_or(String::new(), |scrub| {
        let bytes = ByteCount::new(scrub.blocks.saturating_mul(scrub.block_size as u64));
        format!(", {bytes} in blocks of {} bytes", scrub.block_size)
    });
    lines.put("device", format_args!("{}{size}", device.target));
    lines.put("health", health(device.health, &device.summary));
    if let Some(advice) = &device.advice {
        lines.put("try", advice);
    }
    for export in &device.exports {
        // What is not open keeps its names, and clients get nothing by them yet.
        lines.put(if device.opening.is_none() { "served as" } else { "kept for" }, export_text(export));
    }
    damage(lines, &seen.damage);
    for why in &seen.unflushed_lost {
        lines.put("unflushed", format_args!("completed writes may be lost; hosts are told: {why}"));
    }
    for mirror in &seen.mirrors {
        lines.put("mirror", format_args!("{} is {}", mirror.target, mirror.status.state));
        for replica in replica_texts(&mirror.status) {
            lines.put("", replica);
        }
    }
    for path in &seen.paths {
        let state = match (&path.error, path.live) {
            (_, true) => "live".to_owned(),
            (Some(why), false) => format!("not live: {why}"),
            (None, false) => "not live".to_owned(),
        };
        lines.put("path", format_args!("{}: {state}, it failed {}", path.path, count(path.failures, "time")));
    }
    if let Some(scrub) = &seen.scrub {
        put_scrub(lines, scrub);
        lines.put("I/O", io(&seen.io, before));
        put_latency(lines, &seen.io);
    }
}

/// How long requests took: two lines for each kind.
fn put_latency(lines: &mut Lines, io: &IoStatus) {
    let timed = OPERATIONS.iter().flat_map(|&(operation, _, name)| {
        let CountStatus { queue_us, device_us, .. } = io.of(operation);
        [(name, "in the device", device_us), (name, "in queue", queue_us)]
    });
    let mut label = "latency";
    for (name, place, LatencyStatus { p50, p90, p99, p99_9, max, .. }) in
        timed.filter_map(|(name, place, latency)| Some((name, place, latency?)))
    {
        let [p50, p90, p99, p99_9, max] = [p50, p90, p99, p99_9, max].map(time);
        lines.put(label, format_args!("{name} {place}: p50 {p50}, p90 {p90}, p99 {p99}, p99.9 {p99_9}, max {max}"));
        label = "";
    }
}

/// Microseconds as text of about three digits.
fn time(us: f64) -> String {
    let (value, unit) = match us {
        _ if us >= 999_500.0 => (us / 1e6, "s"),
        _ if us >= 999.5 => (us / 1e3, "ms"),
        _ => (us, "us"),
    };
    let digits = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {unit}")
}

fn damage(lines: &mut Lines, known: &DamageStatus) {
    for run in known.runs.iter().take(MAX_DAMAGE) {
        let blocks = if run.first == run.last {
            format!("block {}", run.first)
        } else {
            format!("blocks {} to {}", run.first, run.last)
        };
        lines.put("damage", format_args!("{blocks}: {}", run.field));
    }
    if known.runs.len() > MAX_DAMAGE || known.unlisted > 0 {
        lines.put("damage", "and more; `sealblock verify` lists them");
    }
    if let Some(made) = known.made_text() {
        lines.put("unreadable", made);
    }
    for device in known.not_saved.iter().filter(|_| known.has_any()) {
        lines.put("damage", format_args!("not saved when the server exits: {device}"));
    }
}

fn export_text(export: &ExportStatus) -> String {
    let name = match (&export.uri, export.nsid) {
        (Some(uri), _) => uri.clone(),
        (None, Some(nsid)) => format!("{}/{nsid}", export.name),
        (None, None) => export.name.clone(),
    };
    let hosts = match &export.hosts {
        None => String::new(),
        Some(hosts) if hosts.is_empty() => ", for no host".to_owned(),
        Some(hosts) => format!(", only for {}", hosts.join(", ")),
    };
    format!("{name}{hosts}{}", if export.read_only { ", read-only" } else { "" })
}

fn put_scrub(lines: &mut Lines, scrub: &ScrubStatus) {
    lines.put("scrub", run_text(scrub));
    if scrub.state == StateWord::Running
        && let Some(run) = &scrub.run
    {
        lines.put(
            "",
            format_args!(
                "{} checked, {} bad, {} repaired, {} unrepaired",
                count(run.blocks, "block"),
                run.bad,
                run.repaired,
                run.unrepaired
            ),
        );
    }
    for run in scrub.runs.iter().rev().take(MAX_RUNS) {
        lines.put("", past(run, scrub));
    }
}

/// What went through a device; and at which rate, since it was looked at before.
fn io(io: &IoStatus, before: Option<(Duration, &IoStatus)>) -> String {
    let mut words: Vec<String> = Vec::new();
    for (operation, one, several) in OPERATIONS {
        let (count, had) = (io.of(operation), before.map(|(_, before)| before.of(operation)));
        let CountStatus { requests, bytes, .. } = count;
        if requests == 0 {
            continue;
        }
        let of_bytes = if bytes > 0 { format!(" of {}", ByteCount::new(bytes)) } else { String::new() };
        let rate = before.zip(had).map_or(String::new(), |((since, _), had)| {
            let per_s = |now: u64, had: u64| (now.saturating_sub(had) as f64 / since.as_secs_f64().max(0.001)) as u64;
            format!(" ({}/s, {}/s)", per_s(requests, had.requests), ByteCount::new(per_s(bytes, had.bytes)))
        });
        words.push(format!("{requests} {}{of_bytes}{rate}", if requests == 1 { one } else { several }));
    }
    // Internal requests, such as for labels, may fail without effect on clients.
    let errors: u64 = OPERATIONS.iter().map(|(operation, ..)| io.of(operation).errors).sum();
    words.push(format!("{errors} failed, {} in flight", io.in_flight));
    words.join(", ")
}

fn clients(lines: &mut Lines, server: &ServerStatus) {
    for client in &server.clients {
        lines.put("client", client_text(client));
    }
    if server.clients_unlisted > 0 {
        lines.put("client", format_args!("and {} more", server.clients_unlisted));
    }
    if server.clients.is_empty() {
        lines.put("client", "none connected");
    }
}

fn client_text(client: &ClientStatus) -> String {
    let who = match (&client.host, client.protocol.as_str()) {
        (Some(host), _) => host.clone(),
        (None, "nvme") => "a host without a name".to_owned(),
        (None, "nbd") => "an NBD client".to_owned(),
        (None, protocol) => format!("a client of {protocol}"),
    };
    let queues = client.queues.map_or(String::new(), |queues| match queues {
        1 => " with 1 I/O queue".to_owned(),
        queues => format!(" with {queues} I/O queues"),
    });
    format!("{who} from {}, at {}{queues}, for {}", client.from, client.name, span(client.connected_s))
}

/// A line of the server's log.
fn log_line_text(line: &Map<String, Value>) -> String {
    let text = |name: &str| line.get(name).and_then(Value::as_str).unwrap_or_default();
    // Fractions of a second are of no use here.
    let time = text("time").split('.').next().unwrap_or_default();
    let mut words = format!("{time} {}", text("message"));
    for (name, value) in line.iter().filter(|(name, _)| !["time", "level", "message"].contains(&name.as_str())) {
        let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        write!(words, " {name}={shown}").expect("a text takes what is written to it");
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_their_unit() {
        for (us, text) in [
            (0.0, "0.00 us"),
            (0.65, "0.65 us"),
            (9.996, "10.0 us"),
            (99.96, "100 us"),
            (999.4, "999 us"),
            (999.6, "1.00 ms"),
            (123_456.0, "123 ms"),
            (2_500_000.0, "2.50 s"),
        ] {
            assert_eq!(time(us), text);
        }
    }
}
