//! What is to be served, and by what names: pure values, checked before anything is opened.
//!
//! NBD knows no names of hosts. So a namespace of a subsystem that is only for some hosts is offered over NBD only if the
//! plan gives it a name there.

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

/// What the names of subsystems that have none begin with.
pub const NQN_PREFIX: &str = "nqn.2026-11.io.sealblock:";
/// Longest name that is made from a target's, in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Longest name of an export, in bytes ("String encoding" of the protocol).
const MAX_EXPORT_NAME_BYTES: usize = 4096;
/// The default address to listen on: loopback, and the port of NVMe/TCP.
pub const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), NVME_TCP_PORT);

/// The names of protocols in JSON.
pub const NVME: &str = "nvme";
/// That of NBD.
pub const NBD: &str = "nbd";

/// Where to listen for clients of a protocol; may be nowhere.
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
    /// Sockets that a service manager has opened; those of a protocol stand in its listeners instead of all others.
    pub inherited: Inherited,
    /// What discovery names instead, for some of these.
    pub advertised: Vec<(SocketAddr, SocketAddr)>,
    /// Where to listen for clients of other protocols, by the protocol's name in JSON.
    pub listening: BTreeMap<&'static str, Listening>,
    /// Whether every target has to open at the start.
    pub strict: bool,
    /// Cores to serve on, where that is said.
    pub cores: Option<NonZeroUsize>,
    /// What hosts may make the server hold.
    pub limits: Limits,
    /// The subsystems; never empty, and no two of one name.
    pub subsystems: Vec<SubsystemPlan>,
}

/// A subsystem that is to be served.
#[derive(Clone, Debug)]
pub struct SubsystemPlan {
    /// Its name.
    pub nqn: Nqn,
    /// Who may connect.
    pub hosts: Hosts,
    /// Its serial number; from its name unless given.
    pub serial: Option<String>,
    /// Its model number; the program's name unless given.
    pub model: Option<String>,
    /// Its namespaces, no two of one identifier. There may be none yet.
    pub namespaces: Vec<NamespacePlan>,
}

/// A namespace that is to be served.
#[derive(Clone, Debug)]
pub struct NamespacePlan {
    /// Its identifier, from 1.
    pub nsid: u32,
    /// What it is.
    pub target: TargetName,
    /// What hosts see of its protection information.
    pub protection: PiVisibility,
    /// Whether it takes no changes.
    pub read_only: bool,
    /// Whether a device that may lack what was written last is served, too: for reading only, unless a mirror on another host puts it
    /// right.
    pub accept_older: bool,
    /// Whether volumes move blocks to lie beside their neighbours while they are idle.
    pub relocate: bool,
    /// What it is opened for, should it be a member of a group.
    pub usage: Usage,
    /// Its identity; the volume's own, or one from its name, unless given.
    pub uuid: Option<[u8; 16]>,
    /// When and how it is scrubbed.
    pub scrub: Settings,
    /// The name of its NBD export, where that is said.
    pub nbd: Option<String>,
    /// As which block device of this machine's kernel it is served besides, if it is.
    pub block_device: Option<BlockDevicePlan>,
}

/// How a target becomes a block device of this machine's kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockDevicePlan {
    /// N of `/dev/ublkbN`; the next free one if nothing is said.
    pub number: Option<u32>,
    /// Queues, and cores to serve them.
    pub queues: u16,
    /// Requests of a queue at once.
    pub depth: u16,
    /// How the kernel protects blocks.
    pub guard: Option<HostGuard>,
    /// It takes no writes.
    pub read_only: bool,
    /// Bits that change on the way, in proofs.
    pub tampering: Option<Tampering>,
}

impl BlockDevicePlan {
    /// Requests of a queue at once, unless said otherwise.
    pub const DEFAULT_DEPTH: u16 = 128;
}

impl NamespacePlan {
    /// What the target is opened to do.
    pub fn access(&self) -> Access {
        match (self.read_only, self.relocate) {
            (true, _) => Access::Read,
            (false, true) => Access::Write,
            (false, false) => Access::WriteInPlace,
        }
    }

    /// The same, where the target may lack what was written last.
    pub fn access_to_older(&self) -> Access {
        match (self.read_only, self.usage) {
            (false, Usage::AsMember) => self.access().of_replica(),
            _ => Access::ReadOlder,
        }
    }
}

impl Plan {
    /// These subsystems, at the default address and with the default limits.
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

    /// Refuses what could only fail later with a worse reason.
    ///
    /// # Errors
    /// Bad usage: a file that is served twice, two NBD exports of one name, a listener for NBD that has nothing to offer.
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

    /// Whether NBD clients are listened for.
    pub fn has_nbd(&self) -> bool {
        !self.places_of(NBD).is_empty()
    }

    /// Where hosts are listened for.
    pub fn places(&self) -> Vec<Place> {
        self.listeners.iter().copied().map(Place::Tcp).collect()
    }

    /// Where clients of another protocol are listened for.
    pub fn places_of(&self, protocol: &str) -> Vec<Place> {
        let Some(Listening { addresses, sockets }) = self.listening.get(protocol) else { return Vec::new() };
        addresses.iter().copied().map(Place::Tcp).chain(sockets.iter().cloned().map(Place::Unix)).collect()
    }

    /// Every target of every namespace.
    pub fn targets(&self) -> impl Iterator<Item = &TargetName> {
        self.subsystems.iter().flat_map(|subsystem| subsystem.namespaces.iter().map(|namespace| &namespace.target))
    }

    /// A warning for a configuration that is valid and may be a mistake.
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

/// Whether others than this machine may reach one of these.
fn is_reachable(addresses: &[SocketAddr]) -> bool {
    addresses.iter().any(|address| !address.ip().to_canonical().is_loopback())
}

/// The export name of a namespace for NBD clients, if it has one: the configured name; else that of the
/// subsystem without our prefix, with the namespace's number behind it but for the first.
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

/// Refuses names of exports that are taken or too long, and exports that would all stay away.
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

/// The limits of NBD connections: those that mean the same. The rest are the protocol's own. The longest request stays what
/// clients assume that do not ask, since the protocol lets a server end the connection over a longer one.
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

/// A name for the subsystem of each target, no two alike.
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

/// A name for a target: its file's, or its kind's, in characters that need no quotes anywhere.
fn name_of(target: &TargetName) -> String {
    let raw = match target {
        TargetName::File(path) | TargetName::Raw(path) | TargetName::Linux { path, .. } => {
            path.file_stem().map_or(String::new(), |stem| stem.to_string_lossy().into_owned())
        }
        TargetName::Memory(_) => "mem".to_owned(),
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
    format!("nvme+tcp://{}:{}/{}{nsid}{as_host}", host_text(address).1, address.port(), encode(nqn, ":"))
}

/// How clients name an NBD export as a target.
pub fn export_uri(address: SocketAddr, name: &str) -> String {
    format!("nbd://{}:{}/{}", host_text(address).1, address.port(), encode(name, ":/"))
}

/// How clients write an address, alone and in a URI.
pub fn host_text(address: SocketAddr) -> (String, String) {
    // The operator fills in an address of this machine that the hosts can reach.
    let host = if address.ip().is_unspecified() { "HOST".to_owned() } else { address.ip().to_string() };
    let in_uri = if host.contains(':') { format!("[{host}]") } else { host.clone() };
    (host, in_uri)
}

/// The address by which this machine's own clients reach a listener.
pub fn on_this_machine(listener: SocketAddr) -> SocketAddr {
    let port = listener.port();
    match listener {
        SocketAddr::V4(address) if address.ip().is_unspecified() => (Ipv4Addr::LOCALHOST, port).into(),
        SocketAddr::V6(address) if address.ip().is_unspecified() => (Ipv6Addr::LOCALHOST, port).into(),
        other => other,
    }
}

/// Reads `ADDR:PORT`, or an address alone for the usual port of NVMe/TCP.
///
/// # Errors
/// What is to be written instead.
pub fn nvme_address(text: &str) -> Result<SocketAddr, String> {
    address(text, NVME_TCP_PORT)
}

/// Reads `ADDR:PORT`, or an address alone for the usual port of NBD.
///
/// # Errors
/// What is to be written instead.
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
