//! The configuration file: parses TOML into a [`Plan`].
//!
//! An unknown key is an error, and every error names the file and the line. Nothing is opened here. Relative paths are
//! relative to the folder of the file, wherever the server was started; a service manager starts it in `/`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rustix::fs::{OFlags, statfs};
use sealblock_exports_nvme_tcp::{Hosts, Limits, MAX_NSID, PiVisibility};
use sealblock_exports_ublk::{HostGuard, MAX_DEPTH, MAX_QUEUES};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_scrub::Settings;
use sealblock_stack::identity::uuid_from;
use sealblock_stack::quantity::{Rate, Time};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError, Usage, printable};
use sealblock_units::ByteCount;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use toml::Spanned;

use crate::plan::{
    BlockDevicePlan, Listening, NBD, NQN_PREFIX, NamespacePlan, Plan, SubsystemPlan, nbd_address, nvme_address,
};

/// The default name of the file.
pub const DEFAULT_NAME: &str = "sealblock.toml";
/// The maximum bytes of a configuration.
const MAX_BYTES: u64 = 16 << 20;
/// The maximum number of characters shown of a line, of TOML's message for it, and of any reason.
const MAX_LINE_CHARS: usize = 120;
const MAX_MESSAGE_CHARS: usize = 400;
const MAX_WHY_CHARS: usize = 1000;
/// The maximum values of limits. Sums and products of them fit with a wide margin: the largest, a transfer of 1 GiB
/// with tags for each connection, is below 2^47.
const MAX_CONNECTIONS: u64 = 1 << 16;
const MAX_TOTAL: ByteCount = ByteCount::new(1 << 44);
const MAX_CORES: usize = 4096;
/// SN and MN in the Identify Controller data structure (NVM Express Base 2.1, figure 312).
const MAX_SERIAL_CHARS: usize = 20;
const MAX_MODEL_CHARS: usize = 40;
const MAX_TIME: Duration = Duration::from_secs(365 * 86_400);
/// The longest time between scrubs; dates that far ahead can still be computed.
const MAX_EVERY: Duration = Duration::from_secs(36_500 * 86_400);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    cores: Option<NonZeroUsize>,
    #[serde(default)]
    strict: bool,
    #[serde(default)]
    listeners: Vec<ListenerTable>,
    #[serde(default)]
    nbd: Vec<Spanned<NbdTable>>,
    #[serde(default)]
    ublk: Vec<Spanned<UblkTable>>,
    #[serde(default)]
    limits: LimitsTable,
    #[serde(default)]
    scrub: ScrubTable,
    #[serde(default)]
    subsystems: Vec<Spanned<SubsystemTable>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListenerTable {
    #[serde(deserialize_with = "address")]
    address: SocketAddr,
    #[serde(default, deserialize_with = "some_address")]
    advertise: Option<SocketAddr>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NbdTable {
    #[serde(default, deserialize_with = "nbd_listener")]
    address: Option<SocketAddr>,
    socket: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UblkTable {
    target: Written<TargetName>,
    device: u32,
    #[serde(default, deserialize_with = "host_guard")]
    pi: Option<HostGuard>,
    queues: Option<u16>,
    depth: Option<u16>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct LimitsTable {
    connections: Option<u64>,
    io_queues: Option<u64>,
    commands: Option<u64>,
    #[serde(deserialize_with = "size")]
    bytes_in_flight: Option<ByteCount>,
    #[serde(deserialize_with = "size")]
    total_bytes_in_flight: Option<ByteCount>,
    #[serde(deserialize_with = "size")]
    transfer_bytes: Option<ByteCount>,
    #[serde(deserialize_with = "text")]
    connect: Option<Time>,
    #[serde(deserialize_with = "text")]
    idle: Option<Time>,
    #[serde(deserialize_with = "text")]
    receive: Option<Time>,
    #[serde(deserialize_with = "text")]
    drain: Option<Time>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SubsystemTable {
    #[serde(default, deserialize_with = "text")]
    nqn: Option<Nqn>,
    name: Option<String>,
    hosts: Option<Vec<Written<Nqn>>>,
    #[serde(default, deserialize_with = "serial")]
    serial: Option<String>,
    #[serde(default, deserialize_with = "model")]
    model: Option<String>,
    #[serde(default)]
    namespaces: Vec<Spanned<NamespaceTable>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamespaceTable {
    nsid: Option<NonZeroU32>,
    target: Written<TargetName>,
    #[serde(default)]
    protection: Shown,
    #[serde(default)]
    read_only: bool,
    #[serde(default = "yes")]
    relocate: bool,
    #[serde(default)]
    accept_older: bool,
    #[serde(default)]
    as_member: bool,
    #[serde(default, deserialize_with = "uuid")]
    uuid: Option<[u8; 16]>,
    #[serde(default)]
    scrub: ScrubTable,
    #[serde(default, deserialize_with = "export_name")]
    nbd: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase")]
enum Shown {
    #[default]
    Plain,
    Shown,
}

fn yes() -> bool {
    true
}

/// A value in the same form as on the command line.
struct Written<T>(T);

impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for Written<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Written<T>, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map(Written).map_err(de::Error::custom)
    }
}

fn text<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(from: D) -> Result<Option<T>, D::Error> {
    Written::deserialize(from).map(|written: Written<T>| Some(written.0))
}

fn address<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
    nvme_address(&String::deserialize(from)?).map_err(de::Error::custom)
}

fn nbd_listener<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    nbd_address(&String::deserialize(from)?).map(Some).map_err(de::Error::custom)
}

fn host_guard<'de, D: Deserializer<'de>>(from: D) -> Result<Option<HostGuard>, D::Error> {
    let text = String::deserialize(from)?;
    let known = HostGuard::ALL.into_iter().find(|guard| guard.as_str() == text);
    known.map(Some).ok_or_else(|| de::Error::custom(format!("pi = {text:?}: write \"ip\", \"crc16\" or \"crc64\"")))
}

fn some_address<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    address(from).map(Some)
}

/// A size: a number of bytes, or a text with a unit.
fn size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<ByteCount>, D::Error> {
    struct Size;
    impl Visitor<'_> for Size {
        type Value = ByteCount;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a size, such as 4096 or \"4KiB\"")
        }

        fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteCount, E> {
            u64::try_from(bytes).map(ByteCount::new).map_err(|_| E::custom("a size must not be negative"))
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteCount, E> {
            text.parse().map_err(E::custom)
        }
    }
    from.deserialize_any(Size).map(Some)
}

/// An identity in its usual form of 36 characters. All zeroes mean that a namespace has none.
fn uuid<'de, D: Deserializer<'de>>(from: D) -> Result<Option<[u8; 16]>, D::Error> {
    let text = String::deserialize(from)?;
    let error = || format!("'{text}' is not a UUID such as f81d4fae-7dec-11d0-a765-00a0c91e6bf6");
    let uuid = uuid_from(&text).filter(|uuid| *uuid != [0; 16]);
    uuid.map(Some).ok_or_else(|| de::Error::custom(error()))
}

/// The serial number of a subsystem. Cut off, two of them could become equal, and hosts would take two devices for one.
fn serial<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    identify_text(from, "serial", MAX_SERIAL_CHARS)
}

fn model<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    identify_text(from, "model", MAX_MODEL_CHARS)
}

/// A text of the Identify Controller data structure: printable ASCII, padded with spaces to its full length.
fn identify_text<'de, D: Deserializer<'de>>(from: D, name: &str, most: usize) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(from)?;
    let is_ascii = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    let is_padded = text.starts_with(' ') || text.ends_with(' ');
    if text.is_empty() || text.len() > most || !is_ascii || is_padded {
        let rule = "printable ASCII characters, without spaces at the start or end";
        return Err(de::Error::custom(format!("{name} = {text:?}: from 1 to {most} {rule}")));
    }
    Ok(Some(text))
}

/// The name of an NBD export. Clients print it, and some start programs with it.
fn export_name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let name = String::deserialize(from)?;
    match name.chars().any(char::is_control) {
        true => Err(de::Error::custom(format!("nbd = {name:?}: control characters are not allowed"))),
        false => Ok(Some(name)),
    }
}

/// How namespaces are scrubbed: `[scrub]`, and `scrub = { ... }` in a namespace. The inner `None` means that the value
/// was explicitly set to none.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct ScrubTable {
    #[serde(deserialize_with = "every")]
    every: Option<Option<Duration>>,
    #[serde(deserialize_with = "rate")]
    rate: Option<Option<Rate>>,
    pause_when_busy: Option<bool>,
}

/// How often: a duration, or `never`.
fn every<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<Duration>>, D::Error> {
    let text = String::deserialize(from)?;
    match text.parse() {
        _ if text == "never" => Ok(Some(None)),
        Ok(Time(time)) if time.as_secs() == 0 => Err(de::Error::custom("every: must be at least 1s")),
        Ok(Time(time)) if time > MAX_EVERY => {
            Err(de::Error::custom(format!("every = {}: at most {}", Time(time), Time(MAX_EVERY))))
        }
        Ok(Time(time)) => Ok(Some(Some(time))),
        Err(error) => Err(de::Error::custom(format!("{error}, or never"))),
    }
}

/// How fast: a rate, or `none`.
fn rate<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<Rate>>, D::Error> {
    let text = String::deserialize(from)?;
    match text.parse::<Rate>() {
        _ if text == "none" => Ok(Some(None)),
        Ok(rate) => Ok(Some(Some(rate))),
        Err(error) => Err(de::Error::custom(format!("{error}, or none"))),
    }
}

impl ScrubTable {
    /// The settings of a namespace: from its own table, or else from `all`.
    fn over(&self, all: &ScrubTable) -> Settings {
        let usual = Settings::default();
        Settings {
            every: self.every.or(all.every).flatten(),
            rate: self.rate.or(all.rate).flatten().map(Rate::bytes_per_second),
            pause_when_busy: self.pause_when_busy.or(all.pause_when_busy).unwrap_or(usual.pause_when_busy),
        }
    }
}

/// Reads a configuration file.
///
/// # Errors
/// If the file cannot be read; bad usage, with file and line, if it is invalid.
pub fn read(path: &Path) -> Result<Plan, StackError> {
    const ACTION: &str = "load the configuration from";
    let failed = |error: std::io::Error| {
        StackError::io(ACTION, &error).on(path.display()).advise("give the path of an existing file as --config")
    };
    let refused = |why: String| StackError::new(Cause::Usage, ACTION, why).on(path.display());
    // Checked before opening, which would block on a pipe until it has a writer.
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(refused(
            "it is not a regular file; a reload reads it again, so it cannot be a pipe or a device".to_owned(),
        ));
    }
    if is_made_by_kernel(path).map_err(failed)? {
        return Err(refused("the kernel generates its content on each read, and a reload reads it again".to_owned()));
    }
    let mut bytes = Vec::new();
    // Never blocks, whatever the file system is.
    let file = fs::File::options().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path);
    let file = file.map_err(failed)?;
    // The file may grow while it is read.
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(refused(format!("it is larger than {MAX_BYTES} bytes")));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let (valid, rest) = error.as_bytes().split_at(error.utf8_error().valid_up_to());
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count();
        refused(format!("line {line}: it is not UTF-8 (byte {:#04x})", rest.first().copied().unwrap_or_default()))
    })?;
    let plan = parse(&text).map_err(|why| refused(cut(&why, MAX_WHY_CHARS)))?;
    Ok(plan.relative_to(path.parent().unwrap_or(Path::new(""))))
}

/// True if a path is a file of procfs or of a tracing file system. Some of these block until something happens, such as
/// `/proc/kmsg`.
fn is_made_by_kernel(path: &Path) -> io::Result<bool> {
    const PROC: u64 = 0x9fa0;
    const TRACE: u64 = 0x7472_6163;
    const DEBUG: u64 = 0x6462_6720;
    Ok([PROC, TRACE, DEBUG].contains(&(statfs(path)?.f_type as u64)))
}

/// The beginning of a text, up to this number of characters.
fn cut(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((at, _)) => format!("{} ...", &text[..at]),
        None => text.to_owned(),
    }
}

/// The error for a text that is not TOML, or not a valid configuration, with a part of the line. The file may not be
/// the intended one, and its content must not be revealed.
fn toml_error(error: &toml::de::Error, text: &str) -> String {
    let message = cut(&plain_types(error.message()), MAX_MESSAGE_CHARS);
    let Some(span) = error.span() else { return message };
    let at = text.floor_char_boundary(span.start.min(text.len()));
    let start = text[..at].rfind('\n').map_or(0, |end| end + 1);
    let line = text[start..].lines().next().unwrap_or_default();
    let (number, column) = (1 + text[..at].matches('\n').count(), 1 + text[start..at].chars().count());
    let skipped = column.saturating_sub(MAX_LINE_CHARS / 2);
    let from = line.char_indices().nth(skipped).map_or(line.len(), |(at, _)| at);
    let (before, part) = (if from > 0 { "... " } else { "" }, cut(&line[from..], MAX_LINE_CHARS));
    format!("TOML line {number}, column {column}: {message}\n{number} | {before}{}", printable(&part))
}

/// The message of a TOML error, with the names of Rust types replaced by what to write.
fn plain_types(message: &str) -> String {
    let Some((found, expected)) = message.rsplit_once("expected ") else { return message.to_owned() };
    let expected = match expected {
        "a nonzero usize" | "a nonzero u32" | "a nonzero u64" => "a number of at least 1",
        "usize" | "u16" | "u32" | "u64" => "a number",
        "a sequence" => "an array",
        _ if expected.starts_with("struct ") => "a table",
        _ => expected,
    };
    format!("{found}expected {expected}")
}

/// Parses a plan.
///
/// # Errors
/// What is wrong, and in which line.
pub fn parse(text: &str) -> Result<Plan, String> {
    let file: File = toml::from_str(text).map_err(|error| toml_error(&error, text))?;
    let line = |at: usize| 1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count();
    if file.subsystems.is_empty() {
        return Err(
            "there are no subsystems: write [[subsystems]] with a name and [[subsystems.namespaces]]".to_owned()
        );
    }
    let mut nqns = BTreeSet::new();
    let mut subsystems = Vec::with_capacity(file.subsystems.len());
    for table in file.subsystems {
        let at = line(table.span().start);
        let subsystem =
            subsystem(table.into_inner(), &file.scrub, &line).map_err(|why| match why.starts_with("line ") {
                true => why,
                false => format!("line {at}: {why}"),
            })?;
        if !nqns.insert(subsystem.nqn.clone()) {
            return Err(format!("line {at}: duplicate subsystem {}", subsystem.nqn));
        }
        subsystems.push(subsystem);
    }
    block_devices(file.ublk, &mut subsystems, &line)?;
    let listening = BTreeMap::from([(NBD, nbd(file.nbd, &line)?)]);
    if let Some(cores) = file.cores.filter(|cores| cores.get() > MAX_CORES) {
        return Err(format!("cores = {cores}: from 1 to {MAX_CORES}"));
    }
    let (strict, cores, limits) = (file.strict, file.cores, limits(&file.limits)?);
    let mut plan = Plan { listening, strict, cores, limits, ..Plan::new(subsystems) };
    if !file.listeners.is_empty() {
        plan.listeners = file.listeners.iter().map(|listener| listener.address).collect();
    }
    let advertised = |listener: &ListenerTable| Some((listener.address, listener.advertise?));
    plan.advertised = file.listeners.iter().filter_map(advertised).collect();
    Ok(plan)
}

/// Where NBD clients are accepted; each table has an address or a socket.
fn nbd(tables: Vec<Spanned<NbdTable>>, line: &impl Fn(usize) -> usize) -> Result<Listening, String> {
    let mut listening = Listening::default();
    for table in tables {
        let at = line(table.span().start);
        match table.into_inner() {
            NbdTable { address: Some(address), socket: None } => listening.addresses.push(address),
            NbdTable { address: None, socket: Some(path) } => listening.sockets.push(path),
            NbdTable { .. } => return Err(format!("line {at}: [[nbd]] needs either an address or a socket")),
        }
    }
    Ok(listening)
}

/// Gives namespaces the block devices that tables request for their targets.
fn block_devices(
    tables: Vec<Spanned<UblkTable>>,
    subsystems: &mut [SubsystemPlan],
    line: &impl Fn(usize) -> usize,
) -> Result<(), String> {
    const DEFAULT_QUEUES: u16 = 1;
    let mut numbers = BTreeSet::new();
    for table in tables {
        let at = line(table.span().start);
        let UblkTable { target: Written(target), device, pi, queues, depth } = table.into_inner();
        let refused = |why: String| Err(format!("line {at}: {why}"));
        let within = |name: &str, asked: Option<u16>, usual: u16, most: u16| match asked.unwrap_or(usual) {
            asked @ 1.. if asked <= most => Ok(asked),
            asked => Err(format!("line {at}: {name} = {asked}: from 1 to {most}")),
        };
        let queues = within("queues", queues, DEFAULT_QUEUES, MAX_QUEUES)?;
        let depth = within("depth", depth, BlockDevicePlan::DEFAULT_DEPTH, MAX_DEPTH)?;
        if !numbers.insert(device) {
            return refused(format!("duplicate block device {device}"));
        }
        let mut all = subsystems.iter_mut().flat_map(|subsystem| &mut subsystem.namespaces);
        let Some(namespace) = all.find(|namespace| namespace.target == target) else {
            return refused(format!(
                "{target} is not the target of a namespace: a block device must use the target of a namespace"
            ));
        };
        if namespace.block_device.is_some() {
            return refused(format!("{target} already has another block device"));
        }
        let read_only = namespace.read_only;
        namespace.block_device =
            Some(BlockDevicePlan { number: Some(device), queues, depth, guard: pi, read_only, tampering: None });
    }
    Ok(())
}

/// Refuses limits with which no host could be served, and those that no machine can provide. Only `drain` may be 0;
/// then commands in flight are not waited for.
fn check_limits(table: &LimitsTable) -> Result<(), String> {
    // Hosts request this many for the admin queue.
    const MIN_COMMANDS: u64 = 32;
    let u16_max = u64::from(u16::MAX);
    let counts = [
        ("connections", table.connections, 1, MAX_CONNECTIONS),
        ("io_queues", table.io_queues, 1, u16_max),
        ("commands", table.commands, MIN_COMMANDS, u16_max),
    ];
    for (name, count, least, most) in counts {
        if let Some(count) = count.filter(|count| !(least..=most).contains(count)) {
            return Err(format!("limits.{name} = {count}: from {least} to {most}"));
        }
    }
    let below_4_gib = ByteCount::new(u32::MAX.into());
    let sizes = [
        ("bytes_in_flight", table.bytes_in_flight, below_4_gib),
        ("total_bytes_in_flight", table.total_bytes_in_flight, MAX_TOTAL),
        ("transfer_bytes", table.transfer_bytes, below_4_gib),
    ];
    for (name, size, most) in sizes {
        if let Some(size) = size.filter(|size| !(1..=most.get()).contains(&size.get())) {
            return Err(format!("limits.{name} = {}: from 1 to {} bytes", size.get(), most.get()));
        }
    }
    let moment = Duration::from_millis(1);
    let times = [
        ("connect", table.connect, moment),
        ("idle", table.idle, moment),
        ("receive", table.receive, moment),
        ("drain", table.drain, Duration::ZERO),
    ];
    for (name, time, least) in times {
        if let Some(time) = time.filter(|time| !(least..=MAX_TIME).contains(&time.0)) {
            return Err(format!("limits.{name} = \"{time}\": from {} to {}", Time(least), Time(MAX_TIME)));
        }
    }
    Ok(())
}

fn limits(table: &LimitsTable) -> Result<Limits, String> {
    check_limits(table)?;
    let or = Limits::default();
    // All of them are small enough at this point.
    let size = |size: Option<ByteCount>, or: usize| size.map_or(or, |size| size.get() as usize);
    let time = |time: Option<Time>, or: Duration| time.map_or(or, |time| time.0);
    Ok(Limits {
        connections: table.connections.map_or(or.connections, |count| count as usize),
        io_queues: table.io_queues.map_or(or.io_queues, |count| count as u16),
        commands: table.commands.map_or(or.commands, |count| count as u16),
        bytes_in_flight: size(table.bytes_in_flight, or.bytes_in_flight),
        total_bytes_in_flight: size(table.total_bytes_in_flight, or.total_bytes_in_flight),
        transfer_bytes: table.transfer_bytes.map_or(or.transfer_bytes, |size| size.get() as u32),
        connect: time(table.connect, or.connect),
        idle: time(table.idle, or.idle),
        receive: time(table.receive, or.receive),
        drain: time(table.drain, or.drain),
    })
}

fn subsystem(
    table: SubsystemTable,
    scrub: &ScrubTable,
    line: &impl Fn(usize) -> usize,
) -> Result<SubsystemPlan, String> {
    let nqn = match (table.nqn, table.name) {
        (Some(nqn), None) => nqn,
        (None, Some(name)) => {
            let nqn = format!("{NQN_PREFIX}{name}");
            nqn.parse().map_err(|error| format!("name = {name:?} gives no valid NQN: {error}"))?
        }
        (Some(_), Some(_)) => return Err("a subsystem takes either nqn or name".to_owned()),
        (None, None) => return Err("a subsystem needs nqn = \"nqn...\" or name = \"...\"".to_owned()),
    };
    if nqn.is_discovery() {
        return Err(format!("{nqn} is the discovery subsystem, which is built in"));
    }
    let hosts = match table.hosts {
        None => Hosts::Any,
        Some(hosts) => Hosts::Only(hosts.into_iter().map(|host| host.0).collect()),
    };
    let namespaces = namespaces(&nqn, table.namespaces, scrub, line)?;
    Ok(SubsystemPlan { nqn, hosts, serial: table.serial, model: table.model, namespaces })
}

fn namespaces(
    nqn: &Nqn,
    tables: Vec<Spanned<NamespaceTable>>,
    scrub: &ScrubTable,
    line: &impl Fn(usize) -> usize,
) -> Result<Vec<NamespacePlan>, String> {
    let mut namespaces = Vec::with_capacity(tables.len());
    let mut taken = BTreeSet::new();
    for table in tables {
        let at = line(table.span().start);
        let table = table.into_inner();
        let nsid = table.nsid.map_or(namespaces.len() as u32 + 1, NonZeroU32::get);
        if nsid > MAX_NSID {
            return Err(format!("line {at}: nsid = {nsid}: must be at most {MAX_NSID}"));
        }
        if !taken.insert(nsid) {
            return Err(format!("line {at}: {nqn} has duplicate namespace {nsid}"));
        }
        if table.read_only && table.as_member {
            return Err(format!("line {at}: read_only and as_member exclude each other"));
        }
        namespaces.push(NamespacePlan {
            nsid,
            target: table.target.0,
            protection: match table.protection {
                Shown::Plain => PiVisibility::Plain,
                Shown::Shown => PiVisibility::Protected,
            },
            read_only: table.read_only,
            relocate: table.relocate,
            accept_older: table.accept_older,
            usage: if table.as_member { Usage::AsMember } else { Usage::Alone },
            uuid: table.uuid,
            scrub: table.scrub.over(scrub),
            nbd: table.nbd,
            block_device: None,
        });
    }
    Ok(namespaces)
}

#[cfg(test)]
mod tests;
