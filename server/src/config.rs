//! The configuration file: what TOML says becomes a [`Plan`].
//!
//! A key that is not known is an error, and every error names the file and the line. Nothing is opened here. Relative paths
//! are relative to the folder of the file, wherever the server was started: a service manager starts it in `/`.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io::Read;
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use sealblock_exports_nvme_tcp::{Hosts, Limits, MAX_NSID, PiVisibility};
use sealblock_exports_ublk::{HostGuard, MAX_DEPTH, MAX_QUEUES};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_scrub::Settings;
use sealblock_stack::identity::uuid_from;
use sealblock_stack::quantity::{Rate, Time};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError, Usage};
use sealblock_units::ByteCount;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use toml::Spanned;

use crate::plan::{BlockDevicePlan, NQN_PREFIX, NamespacePlan, Plan, SubsystemPlan, nbd_address, nvme_address};

/// The file that is used when nothing else is said.
pub const DEFAULT_NAME: &str = "sealblock.toml";
/// Bytes of a configuration at most.
const MAX_BYTES: u64 = 16 << 20;

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
    connections: Option<usize>,
    io_queues: Option<u16>,
    commands: Option<u16>,
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
    serial: Option<String>,
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

/// A value that is written as the command line has it.
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
            u64::try_from(bytes).map(ByteCount::new).map_err(|_| E::custom("a size is not negative"))
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteCount, E> {
            text.parse().map_err(E::custom)
        }
    }
    from.deserialize_any(Size).map(Some)
}

/// An identity in its usual form of 36 characters.
fn uuid<'de, D: Deserializer<'de>>(from: D) -> Result<Option<[u8; 16]>, D::Error> {
    let text = String::deserialize(from)?;
    let error = || format!("'{text}' is no UUID: write it as f81d4fae-7dec-11d0-a765-00a0c91e6bf6");
    uuid_from(&text).map(Some).ok_or_else(|| de::Error::custom(error()))
}

/// How namespaces are scrubbed: `[scrub]`, and `scrub = { ... }` of a namespace. What is said may be that there is none.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct ScrubTable {
    #[serde(deserialize_with = "every")]
    every: Option<Option<Duration>>,
    #[serde(deserialize_with = "rate")]
    rate: Option<Option<Rate>>,
    pause_when_busy: Option<bool>,
}

/// How often: a time, or `never`.
fn every<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<Duration>>, D::Error> {
    let text = String::deserialize(from)?;
    match text.parse() {
        _ if text == "never" => Ok(Some(None)),
        Ok(Time(time)) if time.as_secs() == 0 => Err(de::Error::custom("every = less than a second: write 1s or more")),
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
    /// What counts for a namespace: what its own table says, and else what `all` says.
    fn over(&self, all: &ScrubTable) -> Settings {
        let usual = Settings::default();
        Settings {
            every: self.every.or(all.every).flatten(),
            rate: self.rate.or(all.rate).flatten().map(Rate::bytes_per_second),
            pause_when_busy: self.pause_when_busy.or(all.pause_when_busy).unwrap_or(usual.pause_when_busy),
        }
    }
}

/// Reads a configuration.
///
/// # Errors
/// When the file cannot be read; bad usage with file and line when it cannot be meant.
pub fn read(path: &Path) -> Result<Plan, StackError> {
    const DOING: &str = "reading the configuration";
    let failed = |error: std::io::Error| {
        StackError::io(DOING, &error).on(path.display()).advise("--config with the path of a file that is there")
    };
    let refused = |why: String| StackError::new(Cause::Usage, DOING, why).on(path.display());
    // Before it is opened: a pipe is opened only once somebody writes to it.
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(refused("it is no file; a reload reads it again, so a pipe or a device does not do".to_owned()));
    }
    let mut text = String::new();
    let file = fs::File::open(path).map_err(failed)?;
    // A file may grow, or say that it has no length, as those of /proc do.
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(refused(format!("more than {MAX_BYTES} bytes are too many")));
    }
    let plan = parse(&text).map_err(refused)?;
    Ok(plan.relative_to(path.parent().unwrap_or(Path::new(""))))
}

/// The plan that a text says.
///
/// # Errors
/// What is wrong, and on which line.
pub fn parse(text: &str) -> Result<Plan, String> {
    let file: File = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
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
            return Err(format!("line {at}: there are two subsystems {}", subsystem.nqn));
        }
        subsystems.push(subsystem);
    }
    block_devices(file.ublk, &mut subsystems, &line)?;
    let (nbd, nbd_sockets) = nbd(file.nbd, &line)?;
    let (strict, cores, limits) = (file.strict, file.cores, limits(&file.limits)?);
    let mut plan = Plan { nbd, nbd_sockets, strict, cores, limits, ..Plan::new(subsystems) };
    if !file.listeners.is_empty() {
        plan.listeners = file.listeners.iter().map(|listener| listener.address).collect();
    }
    let advertised = |listener: &ListenerTable| Some((listener.address, listener.advertise?));
    plan.advertised = file.listeners.iter().filter_map(advertised).collect();
    Ok(plan)
}

/// Where NBD clients are listened for: each table has the one or the other.
fn nbd(
    tables: Vec<Spanned<NbdTable>>,
    line: &impl Fn(usize) -> usize,
) -> Result<(Vec<SocketAddr>, Vec<PathBuf>), String> {
    let (mut addresses, mut sockets) = (Vec::new(), Vec::new());
    for table in tables {
        let at = line(table.span().start);
        match table.into_inner() {
            NbdTable { address: Some(address), socket: None } => addresses.push(address),
            NbdTable { address: None, socket: Some(path) } => sockets.push(path),
            NbdTable { .. } => return Err(format!("line {at}: [[nbd]] has an address or a socket, one of the two")),
        }
    }
    Ok((addresses, sockets))
}

/// Gives namespaces the block devices that tables want of their targets.
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
            return refused(format!("there are two block devices {device}"));
        }
        let mut all = subsystems.iter_mut().flat_map(|subsystem| &mut subsystem.namespaces);
        let Some(namespace) = all.find(|namespace| namespace.target == target) else {
            return refused(format!("no namespace is {target}: a block device is one more way to a namespace"));
        };
        if namespace.block_device.is_some() {
            return refused(format!("{target} is another block device already"));
        }
        let read_only = namespace.read_only;
        namespace.block_device =
            Some(BlockDevicePlan { number: Some(device), queues, depth, guard: pi, read_only, tampering: None });
    }
    Ok(())
}

/// Refuses limits with which no host is served. Only `drain` may be 0: then commands in flight are not waited for.
fn no_zero(table: &LimitsTable) -> Result<(), String> {
    const MIN_COMMANDS: u16 = 32;
    let counts = [("connections", table.connections), ("io_queues", table.io_queues.map(usize::from))];
    if let Some((name, _)) = counts.into_iter().find(|(_, count)| *count == Some(0)) {
        return Err(format!("limits.{name} = 0: with none no host is served; write 1 or more, or leave it out"));
    }
    if let Some(few) = table.commands.filter(|commands| *commands < MIN_COMMANDS) {
        return Err(format!(
            "limits.commands = {few}: from {MIN_COMMANDS} on, which hosts request for the admin queue"
        ));
    }
    let sizes = [
        ("bytes_in_flight", table.bytes_in_flight),
        ("total_bytes_in_flight", table.total_bytes_in_flight),
        ("transfer_bytes", table.transfer_bytes),
    ];
    if let Some((name, _)) = sizes.into_iter().find(|(_, size)| size.is_some_and(|size| size.get() == 0)) {
        return Err(format!("limits.{name} = 0: without bytes no command is executed"));
    }
    let times = [("connect", table.connect), ("idle", table.idle), ("receive", table.receive)];
    if let Some((name, _)) = times.into_iter().find(|(_, time)| time.is_some_and(|time| time.0.is_zero())) {
        return Err(format!("limits.{name} = \"0s\": every host is too late; write 1ms or more"));
    }
    Ok(())
}

fn limits(table: &LimitsTable) -> Result<Limits, String> {
    let fits = |size: ByteCount, name: &str| {
        u32::try_from(size.get()).map_err(|_| format!("limits.{name}: {} bytes are too many", size.get()))
    };
    let or = Limits::default();
    no_zero(table)?;
    let transfer_bytes = table.transfer_bytes.map(|size| fits(size, "transfer_bytes")).transpose()?;
    let bytes_in_flight = table.bytes_in_flight.map(|size| fits(size, "bytes_in_flight")).transpose()?;
    let total = table.total_bytes_in_flight.map(|size| size.get().try_into());
    let total = total.transpose().map_err(|_| "limits.total_bytes_in_flight: more than there can be".to_owned())?;
    Ok(Limits {
        connections: table.connections.unwrap_or(or.connections),
        io_queues: table.io_queues.unwrap_or(or.io_queues),
        commands: table.commands.unwrap_or(or.commands),
        bytes_in_flight: bytes_in_flight.map_or(or.bytes_in_flight, |bytes| bytes as usize),
        total_bytes_in_flight: total.unwrap_or(or.total_bytes_in_flight),
        transfer_bytes: transfer_bytes.unwrap_or(or.transfer_bytes),
        connect: table.connect.map_or(or.connect, |time| time.0),
        idle: table.idle.map_or(or.idle, |time| time.0),
        receive: table.receive.map_or(or.receive, |time| time.0),
        drain: table.drain.map_or(or.drain, |time| time.0),
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
            nqn.parse().map_err(|error| format!("name = {name:?} makes no NQN: {error}"))?
        }
        (Some(_), Some(_)) => return Err("a subsystem has nqn or name, not both".to_owned()),
        (None, None) => return Err("a subsystem needs nqn = \"nqn...\", or name = \"...\"".to_owned()),
    };
    if nqn.is_discovery() {
        return Err(format!("{nqn} is the name of the discovery subsystem, which is there by itself"));
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
            return Err(format!("line {at}: nsid = {nsid} is too large: identifiers go up to {MAX_NSID}"));
        }
        if !taken.insert(nsid) {
            return Err(format!("line {at}: {nqn} has two namespaces {nsid}"));
        }
        if table.read_only && table.as_member {
            return Err(format!("line {at}: a member that takes no changes needs no as_member: write one of the two"));
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
