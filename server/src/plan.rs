//! What is to be served, and by which names: pure values, checked before anything is opened.
//!
//! NBD has no host names. So a namespace in a subsystem that only certain hosts may use is served over NBD only if the
//! plan gives it an NBD name.

pub mod config;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sealblock_exports_nbd as nbd;
use sealblock_exports_nvme_tcp::{Hosts, Limits, PiVisibility};
use sealblock_exports_ublk::{HostGuard, Tampering};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_scrub::Settings;
use sealblock_stack::target::{NBD_PORT, NVME_TCP_PORT, TargetName, encode};
use sealblock_stack::{Access, Cause, StackError, Usage};

use crate::exports::listeners::{Inherited, Place};

/// The prefix of the names of subsystems without a configured name.
pub const NQN_PREFIX: &str = "nqn.2026-11.io.sealblock:";
/// The maximum bytes of a name made from a target.
const MAX_NAME_BYTES: usize = 64;
/// The maximum bytes of an export name ("String encoding" in the protocol).
const MAX_EXPORT_NAME_BYTES: usize = 4096;
/// The default address to listen on: loopback, and the port of NVMe/TCP.
pub const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), NVME_TCP_PORT);

/// The names of protocols in JSON.
pub const NVME: &str = "nvme";
/// The name of NBD.
pub const NBD: &str = "nbd";

/// Where to listen for clients of a protocol; possibly nowhere.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Listening {
    /// Addresses.
    pub addresses: Vec<SocketAddr>,
    /// Unix sockets.
    pub sockets: Vec<PathBuf>,
}

/// Everything that is to be served.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where to listen; never empty.
    pub listeners: Vec<SocketAddr>,
    /// Sockets from a service manager; if there are any for a protocol, they are its only listeners.
    pub inherited: Inherited,
    /// For some of these, the addresses that discovery reports instead.
    pub advertised: Vec<(SocketAddr, SocketAddr)>,
    /// Where to listen for clients of other protocols, by the protocol's name in JSON.
    pub listening: BTreeMap<&'static str, Listening>,
    /// True if every target must open at the start.
    pub strict: bool,
    /// The number of cores to serve on, if configured.
    pub cores: Option<NonZeroUsize>,
    /// The limits for what hosts can make the server hold.
    pub limits: Limits,
    /// The subsystems; never empty, and no two have the same name.
    pub subsystems: Vec<SubsystemPlan>,
}

/// A subsystem that is to be served.
#[derive(Clone, Debug)]
pub struct SubsystemPlan {
    /// Its name.
    pub nqn: Nqn,
    /// The hosts that may connect.
    pub hosts: Hosts,
    /// Its serial number [default: derived from its name].
    pub serial: Option<String>,
    /// Its model number [default: the program's name].
    pub model: Option<String>,
    /// Its namespaces; no two have the same identifier. The list may be empty.
    pub namespaces: Vec<NamespacePlan>,
}

/// A namespace that is to be served.
#[derive(Clone, Debug)]
pub struct NamespacePlan {
    /// Its identifier, from 1.
    pub nsid: u32,
    /// The target.
    pub target: TargetName,
    /// What hosts see of its protection information.
    pub protection: PiVisibility,
    /// True if it refuses changes.
    pub read_only: bool,
    /// True if a device that may lack the last writes is served too: read-only, unless a mirror on another host repairs
    /// it.
    pub accept_older: bool,
    /// True if idle volumes move blocks to be beside their neighbours.
    pub relocate: bool,
    /// What it is opened for, if it is a member of a group.
    pub usage: Usage,
    /// Its identity [default: the volume's own, or one derived from its name].
    pub uuid: Option<[u8; 16]>,
    /// When and how it is scrubbed.
    pub scrub: Settings,
    /// The name of its NBD export, if configured.
    pub nbd: Option<String>,
    /// The block device of this machine's kernel as which it is served too, if any.
    pub block_device: Option<BlockDevicePlan>,
}

/// How a target is attached as a block device of this machine's kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockDevicePlan {
    /// N of `/dev/ublkbN` [default: the next free one].
    pub number: Option<u32>,
    /// The number of queues, and of the cores that serve them.
    pub queues: u16,
    /// Requests of a queue at a time.
    pub depth: u16,
    /// How the kernel protects blocks.
    pub guard: Option<HostGuard>,
    /// True if it refuses writes.
    pub read_only: bool,
    /// Bits that are changed in between, for proofs.
    pub tampering: Option<Tampering>,
}

impl BlockDevicePlan {
    /// The default number of requests of a queue at a time.
    pub const DEFAULT_DEPTH: u16 = 128;
}

impl NamespacePlan {
    /// A target as namespace 1 of its subsystem, with the default settings.
    pub fn new(target: TargetName) -> NamespacePlan {
        NamespacePlan {
            nsid: 1,
            target,
            protection: PiVisibility::default(),
            read_only: false,
            accept_older: false,
            relocate: true,
            usage: Usage::Alone,
            uuid: None,
            scrub: Settings::default(),
            nbd: None,
            block_device: None,
        }
    }

    /// What the target is opened for: reading or writing.
    pub fn access(&self) -> Access {
        match (self.read_only, self.relocate) {
            (true, _) => Access::Read,
            (false, true) => Access::Write,
            (false, false) => Access::WriteInPlace,
        }
    }

    /// The same for a target that may lack the last writes.
    pub fn access_to_older(&self) -> Access {
        match (self.read_only, self.usage) {
            (false, Usage::AsMember) => self.access().of_replica(),
            _ => Access::ReadOlder,
        }
    }
}

impl Plan {
    /// A plan with these subsystems, the default address and the default limits.
    pub fn new(subsystems: Vec<SubsystemPlan>) -> Plan {
        Plan {
            listeners: vec![DEFAULT_LISTEN],
            inherited: Inherited::default(),
            advertised: Vec::new(),
            listening: BTreeMap::new(),
            strict: false,
            cores: None,
            limits: Limits::default(),
            subsystems,
        }
    }

    /// The same plan, in which relative paths begin at this folder.
    #[must_use]
    pub fn relative_to(mut self, folder: &Path) -> Plan {
        for namespace in self.subsystems.iter_mut().flat_map(|subsystem| &mut subsystem.namespaces) {
            namespace.target = namespace.target.clone().relative_to(folder);
        }
        let sockets = self.listening.values_mut().flat_map(|listening| &mut listening.sockets);
        sockets.for_each(|path| *path = folder.join(&path));
        self
    }

    /// Refuses what would otherwise fail only later, with a less helpful reason.
    ///
    /// # Errors
    /// Bad usage: a file that is served twice, two NBD exports with the same name, or a listener for NBD without
    /// exports.
    pub fn check(&self) -> Result<(), StackError> {
        let mut seen = BTreeSet::<PathBuf>::new();
        for target in self.targets() {
            // A path that cannot be resolved fails when it is opened.
            for path in target.paths().into_iter().filter_map(|path| path.canonicalize().ok()) {
                if !seen.insert(path) {
                    return Err(StackError::new(Cause::Usage, "serve", "one of its files is given twice")
                        .on(target)
                        .advise("give each file or device once"));
                }
            }
        }
        if self.has_nbd() { check_exports(&self.subsystems) } else { Ok(()) }
    }

    /// True if the plan listens for NBD clients.
    pub fn has_nbd(&self) -> bool {
        !self.places_of(NBD).is_empty()
    }

    /// Where the plan listens for NVMe hosts.
    pub fn places(&self) -> Vec<Place> {
        self.listeners.iter().copied().map(Place::Tcp).collect()
    }

    /// Where the plan listens for clients of another protocol.
    pub fn places_of(&self, protocol: &str) -> Vec<Place> {
        let Some(Listening { addresses, sockets }) = self.listening.get(protocol) else { return Vec::new() };
        addresses.iter().copied().map(Place::Tcp).chain(sockets.iter().cloned().map(Place::Unix)).collect()
    }

    /// All targets of all namespaces.
    pub fn targets(&self) -> impl Iterator<Item = &TargetName> {
        self.subsystems.iter().flat_map(|subsystem| subsystem.namespaces.iter().map(|namespace| &namespace.target))
    }

    /// Warnings about a configuration that is valid but may be a mistake.
    pub fn warnings(&self) -> impl Iterator<Item = &'static str> {
        const OPEN: &str = "every host that reaches this address may connect, without authentication; \
             --allow-host restricts hosts by name, which prevents mistakes but not attacks";
        const OPEN_NBD: &str = "every NBD client that reaches this address may connect to every export; \
             NBD has no host names, so restrict access by the network";
        let open =
            is_reachable(&self.listeners) && self.subsystems.iter().any(|subsystem| subsystem.hosts == Hosts::Any);
        let nbd = self.listening.get(NBD).is_some_and(|listening| is_reachable(&listening.addresses));
        [open.then_some(OPEN), nbd.then_some(OPEN_NBD)].into_iter().flatten()
    }
}

/// True if other machines may reach one of these.
fn is_reachable(addresses: &[SocketAddr]) -> bool {
    addresses.iter().any(|address| !address.ip().to_canonical().is_loopback())
}

/// The export name of a namespace for NBD clients, if it has one. It is the configured name, or else that of the
/// subsystem without our prefix, followed by the namespace's number unless it is the first.
pub fn export_name(subsystem: &SubsystemPlan, namespace: &NamespacePlan) -> Option<String> {
    if let Some(name) = &namespace.nbd {
        return Some(name.clone());
    }
    if subsystem.hosts != Hosts::Any {
        return None;
    }
    let nqn = subsystem.nqn.as_str();
    let name = nqn.strip_prefix(NQN_PREFIX).unwrap_or(nqn);
    let is_first = subsystem.namespaces.first().is_some_and(|first| first.nsid == namespace.nsid);
    Some(if is_first { name.to_owned() } else { format!("{name}/{}", namespace.nsid) })
}

/// Refuses export names that are in use or too long, and plans in which no namespace would be exported.
fn check_exports(subsystems: &[SubsystemPlan]) -> Result<(), StackError> {
    let refused = |why: String| StackError::new(Cause::Usage, "serve over NBD", why);
    let mut seen = BTreeMap::new();
    for subsystem in subsystems {
        for namespace in &subsystem.namespaces {
            let Some(name) = export_name(subsystem, namespace) else { continue };
            if name.len() > MAX_EXPORT_NAME_BYTES {
                let why = format!("an export name has at most {MAX_EXPORT_NAME_BYTES} bytes, not {}", name.len());
                return Err(refused(why).on(&namespace.target));
            }
            if let Some(other) = seen.insert(name.clone(), &namespace.target) {
                let advice = "set nbd = \"NAME\" for one of the namespaces";
                return Err(refused(format!("it would have the same export name as {other}, {name:?}"))
                    .on(&namespace.target)
                    .advise(advice));
            }
        }
    }
    if seen.is_empty() {
        let why =
            "every namespace is restricted to certain hosts, and NBD clients cannot identify themselves".to_owned();
        return Err(
            refused(why).advise("set nbd = \"NAME\" for a namespace open to all NBD clients, or omit --allow-host")
        );
    }
    Ok(())
}

/// The limits of NBD connections: those that correspond to NVMe limits are taken from these. The others are the
/// protocol's defaults. The longest request stays what clients assume that do not ask, because the protocol permits a
/// server to disconnect a client that sends a longer one.
pub fn nbd_limits(limits: &Limits) -> nbd::Limits {
    let mut own = nbd::Limits {
        connections: limits.connections,
        total_bytes_in_flight: limits.total_bytes_in_flight,
        negotiation: limits.connect.max(Duration::from_millis(1)),
        receive: limits.receive,
        drain: limits.drain,
        ..nbd::Limits::default()
    };
    own.connection.commands = limits.commands.into();
    own.connection.bytes_in_flight = limits.bytes_in_flight;
    own
}

/// A name for the subsystem of each target; no two are equal.
pub fn names(targets: &[TargetName]) -> Vec<Nqn> {
    let mut taken = BTreeSet::new();
    let mut nqns = Vec::with_capacity(targets.len());
    for target in targets {
        let name = name_of(target);
        let tries = (2_u64..).map(|number| format!("{name}-{number}"));
        let free = std::iter::once(name.clone()).chain(tries).find(|name| taken.insert(name.clone()));
        let free = free.expect("more numbers than targets");
        nqns.push(format!("{NQN_PREFIX}{free}").parse().expect("a well-formed prefix, and a short legal name"));
    }
    nqns
}

/// A name for a target: that of its file or of its kind, in characters that need no quoting anywhere.
fn name_of(target: &TargetName) -> String {
    let raw = match target {
        TargetName::File(path) | TargetName::Raw(path) | TargetName::Linux { path, .. } => {
            path.file_stem().map_or(String::new(), |stem| stem.to_string_lossy().into_owned())
        }
        TargetName::Memory { .. } => "mem".to_owned(),
        TargetName::Null(_) => "null".to_owned(),
        TargetName::NvmeTcp { nqn, .. } => nqn.rsplit(':').next().unwrap_or_default().to_owned(),
        TargetName::Nbd { export, .. } => export.clone(),
        TargetName::Group { kind, .. } => kind.name().to_owned(),
        TargetName::Offset { target, .. } | TargetName::Fault { target, .. } => return name_of(target),
    };
    let legal = |c: char| if c.is_ascii_alphanumeric() || "-._".contains(c) { c } else { '-' };
    let name: String = raw.chars().map(legal).take(MAX_NAME_BYTES).collect();
    if name.chars().all(|c| c == '-') { "disk".to_owned() } else { name }
}

/// The name of a namespace as a target for hosts: with its number if the subsystem has several, and with the name of a
/// host that may connect.
pub fn namespace_uri(address: SocketAddr, nqn: &str, nsid: Option<u32>, host: Option<&str>) -> String {
    let nsid = nsid.map_or(String::new(), |nsid| format!("/{nsid}"));
    let as_host = host.map_or(String::new(), |host| format!("?hostnqn={}", encode(host, ":")));
    format!("nvme+tcp://{}:{}/{}{nsid}{as_host}", host_text(address).1, address.port(), encode(nqn, ":"))
}

/// The name of an NBD export as a target for clients.
pub fn export_uri(address: SocketAddr, name: &str) -> String {
    format!("nbd://{}:{}/{}", host_text(address).1, address.port(), encode(name, ":/"))
}

/// An address as clients write it, alone and in a URI.
pub fn host_text(address: SocketAddr) -> (String, String) {
    // The operator fills in an address of this machine that the hosts can reach.
    let host = if address.ip().is_unspecified() { "HOST".to_owned() } else { address.ip().to_string() };
    let in_uri = if host.contains(':') { format!("[{host}]") } else { host.clone() };
    (host, in_uri)
}

/// The address by which clients on this machine reach a listener.
pub fn on_this_machine(listener: SocketAddr) -> SocketAddr {
    let port = listener.port();
    match listener {
        SocketAddr::V4(address) if address.ip().is_unspecified() => (Ipv4Addr::LOCALHOST, port).into(),
        SocketAddr::V6(address) if address.ip().is_unspecified() => (Ipv6Addr::LOCALHOST, port).into(),
        other => other,
    }
}

/// Parses `ADDR:PORT`, or an address alone with the default port of NVMe/TCP.
///
/// # Errors
/// What to write instead.
pub fn nvme_address(text: &str) -> Result<SocketAddr, String> {
    address(text, NVME_TCP_PORT)
}

/// Parses `ADDR:PORT`, or an address alone with the default port of NBD.
///
/// # Errors
/// What to write instead.
pub fn nbd_address(text: &str) -> Result<SocketAddr, String> {
    address(text, NBD_PORT)
}

fn address(text: &str, port: u16) -> Result<SocketAddr, String> {
    let alone = text.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    text.parse()
        .or_else(|_| alone.map(|address| SocketAddr::new(address, port)))
        .map_err(|_| format!("must be an address and a port, such as 127.0.0.1:{port}, [::1]:{port} or 0.0.0.0:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::parse;

    fn named(targets: &[&str]) -> Vec<String> {
        let targets: Vec<TargetName> = targets.iter().map(|text| text.parse().unwrap()).collect();
        names(&targets).iter().map(|nqn| nqn.as_str().strip_prefix(NQN_PREFIX).unwrap().to_owned()).collect()
    }

    #[test]
    fn targets_are_named_after_their_files_or_kinds() {
        for (target, name) in [
            ("dir/photos.img", "photos"),
            ("/dev/nvme0n1", "nvme0n1"),
            ("mem:1MiB", "mem"),
            ("null:1MiB", "null"),
            ("offset:0..1,dir/a b.img", "a-b"),
            ("fault:[read-error@1],v", "v"),
            ("nvme+tcp://h/nqn.2026-01.org.example:disk/1", "disk"),
            ("nbd://h/", "disk"),
            ("mirror:a,b", "mirror"),
            ("file:\u{e9}\u{e9}", "disk"),
            ("..", "disk"),
        ] {
            assert_eq!(named(&[target]), [name], "{target}");
        }
        assert_eq!(named(&[&"x".repeat(300)])[0].len(), MAX_NAME_BYTES);
    }

    #[test]
    fn no_two_have_one_name() {
        assert_eq!(named(&["a/v", "b/v", "v-2", "v"]), ["v", "v-2", "v-2-2", "v-3"]);
        assert_eq!(named(&["mem:1KiB", "mem:1KiB"]), ["mem", "mem-2"]);
    }

    const SPACE: &str = "[[subsystems.namespaces]]\ntarget = \"mem:1MiB\"\n";

    fn subsystem(head: &str, spaces: &[&str]) -> String {
        let spaces: String = spaces.iter().map(|more| format!("{SPACE}{more}\n")).collect();
        format!("[[subsystems]]\n{head}\n{spaces}")
    }

    fn export_names(text: &str) -> Vec<Option<String>> {
        let plan = parse(text).unwrap();
        let of = |subsystem: &SubsystemPlan| -> Vec<_> {
            subsystem.namespaces.iter().map(|namespace| export_name(subsystem, namespace)).collect()
        };
        plan.subsystems.iter().flat_map(of).collect()
    }

    fn refused(text: &str) -> String {
        check_exports(&parse(text).unwrap().subsystems).unwrap_err().to_string()
    }

    #[test]
    fn exports_are_named_after_subsystem_and_namespace() {
        let ours = subsystem("name = \"photos\"", &["nsid = 3", "nsid = 7", "nsid = 8\nnbd = \"mine\""]);
        let foreign = subsystem("nqn = \"nqn.2026-01.org.example:scratch\"", &[""]);
        let named = export_names(&(ours + &foreign));
        let wanted = ["photos", "photos/7", "mine", "nqn.2026-01.org.example:scratch"];
        assert_eq!(named, wanted.map(|name| Some(name.to_owned())));
    }

    #[test]
    fn what_is_only_for_some_hosts_stays_away_unless_it_is_named() {
        let hosts = "name = \"a\"\nhosts = [\"nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6\"]";
        assert_eq!(export_names(&subsystem(hosts, &["", "nbd = \"b\""])), [None, Some("b".to_owned())]);
        assert!(refused(&subsystem(hosts, &[""])).contains("restricted to certain hosts"));
        assert!(check_exports(&parse(&subsystem(hosts, &["nbd = \"b\""])).unwrap().subsystems).is_ok());
    }

    #[test]
    fn names_are_taken_once_and_not_too_long() {
        let twice = subsystem("name = \"a\"", &[""]) + &subsystem("name = \"b\"", &["nbd = \"a\""]);
        assert!(refused(&twice).contains("the same export name as mem:1MiB, \"a\""), "{}", refused(&twice));
        let long = |len: usize| subsystem("name = \"a\"", &[&format!("nbd = \"{}\"", "x".repeat(len))]);
        assert!(refused(&long(4097)).contains("4096"));
        assert!(check_exports(&parse(&long(4096)).unwrap().subsystems).is_ok());
    }

    #[test]
    fn limits_that_mean_the_same_are_the_same() {
        let ours = Limits { connections: 3, commands: 77, bytes_in_flight: 1 << 20, ..Limits::default() };
        let theirs = nbd_limits(&ours);
        assert_eq!((theirs.connections, theirs.connection.commands), (3, 77));
        assert_eq!((theirs.connection.bytes_in_flight, theirs.total_bytes_in_flight), (1 << 20, 256 << 20));
        assert_eq!((theirs.negotiation, theirs.receive, theirs.drain), (ours.connect, ours.receive, ours.drain));
        assert_eq!(theirs.connection.payload_bytes, 32 << 20, "what every client may take for granted");
    }
}
