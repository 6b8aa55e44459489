//! What is to be served: pure values, made from the command line, checked before anything is opened.

pub mod nbd;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use sealblock_exports_nvme_tcp::{Hosts, Limits};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_scrub::Settings;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, Cause, StackError, Usage};

use super::listeners::Inherited;
use super::scrub;
use crate::cli::{Protection, Serve};

/// What the names of subsystems that have none begin with.
pub const NQN_PREFIX: &str = "nqn.2026-11.io.sealblock:";
/// Longest name that is made from a target's, in bytes.
const MAX_NAME_BYTES: usize = 64;
/// The default address to listen on: loopback, and the port of NVMe/TCP.
pub const DEFAULT_LISTEN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), sealblock_stack::target::NVME_TCP_PORT);

/// Everything that is to be served.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where to listen; never empty.
    pub listeners: Vec<SocketAddr>,
    /// Sockets that a service manager has opened; those of a protocol stand in its listeners instead of all others.
    pub inherited: Inherited,
    /// What discovery names instead, for some of these.
    pub advertised: Vec<(SocketAddr, SocketAddr)>,
    /// Where to listen for NBD clients; may be empty.
    pub nbd: Vec<SocketAddr>,
    /// Unix sockets for NBD clients; may be none.
    pub nbd_sockets: Vec<PathBuf>,
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
    pub protection: Protection,
    /// Whether it takes no changes.
    pub read_only: bool,
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
}

impl Plan {
    /// The plan of a command line: a subsystem for each target.
    pub fn of_targets(arguments: &Serve, targets: &[TargetName]) -> Plan {
        let hosts = match arguments.allow_host.as_slice() {
            [] => Hosts::Any,
            names => Hosts::Only(names.to_vec()),
        };
        let scrub = scrub::settings_of(arguments);
        let subsystem = |(nqn, target): (Nqn, &TargetName)| SubsystemPlan {
            nqn,
            hosts: hosts.clone(),
            serial: None,
            model: None,
            namespaces: vec![NamespacePlan {
                nsid: 1,
                target: target.clone(),
                protection: arguments.protection.unwrap_or_default(),
                read_only: arguments.read_only,
                relocate: !arguments.no_relocate,
                usage: if arguments.as_member { Usage::AsMember } else { arguments.members.usage() },
                uuid: None,
                scrub,
                nbd: None,
            }],
        };
        Plan {
            listeners: if arguments.listen.is_empty() { vec![DEFAULT_LISTEN] } else { arguments.listen.clone() },
            inherited: Inherited::default(),
            advertised: Vec::new(),
            nbd: arguments.nbd.clone(),
            nbd_sockets: arguments.nbd_socket.clone(),
            strict: arguments.strict,
            cores: arguments.cores,
            limits: Limits::default(),
            subsystems: names(targets).into_iter().zip(targets).map(subsystem).collect(),
        }
    }

    /// The same plan, in which relative paths begin at this folder.
    #[must_use]
    pub fn relative_to(mut self, folder: &Path) -> Plan {
        for namespace in self.subsystems.iter_mut().flat_map(|subsystem| &mut subsystem.namespaces) {
            namespace.target = namespace.target.clone().relative_to(folder);
        }
        self.nbd_sockets.iter_mut().for_each(|path| *path = folder.join(&path));
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
                    return Err(StackError::new(Cause::Usage, "serving", "a file of it is named twice")
                        .on(target)
                        .advise("each file or device once"));
                }
            }
        }
        if self.has_nbd() { nbd::check(&self.subsystems) } else { Ok(()) }
    }

    /// Whether NBD clients are listened for.
    pub fn has_nbd(&self) -> bool {
        !self.nbd.is_empty() || !self.nbd_sockets.is_empty()
    }

    /// Every target of every namespace.
    pub fn targets(&self) -> impl Iterator<Item = &TargetName> {
        self.subsystems.iter().flat_map(|subsystem| subsystem.namespaces.iter().map(|namespace| &namespace.target))
    }

    /// A warning for a configuration that is valid and may be a mistake.
    pub fn warnings(&self) -> impl Iterator<Item = &'static str> {
        const OPEN: &str = "every host that reaches this address may connect, and nothing proves who it is; \
             --allow-host names those that may, which keeps out mistakes but no attackers";
        const NBD: &str = "every NBD client that reaches this address may connect to every export; \
             NBD knows no names of hosts, so only the network can keep anybody out";
        let open =
            is_reachable(&self.listeners) && self.subsystems.iter().any(|subsystem| subsystem.hosts == Hosts::Any);
        [open.then_some(OPEN), is_reachable(&self.nbd).then_some(NBD)].into_iter().flatten()
    }
}

/// Whether others than this machine may reach one of these.
fn is_reachable(addresses: &[SocketAddr]) -> bool {
    addresses.iter().any(|address| !address.ip().to_canonical().is_loopback())
}

/// A name for each target, no two alike.
fn names(targets: &[TargetName]) -> Vec<Nqn> {
    let mut taken = BTreeSet::new();
    let mut nqns = Vec::with_capacity(targets.len());
    for target in targets {
        let name = name_of(target);
        let tries = (2_u64..).map(|number| format!("{name}-{number}"));
        let free = std::iter::once(name.clone()).chain(tries).find(|name| taken.insert(name.clone()));
        let free = free.expect("there are more numbers than targets");
        nqns.push(format!("{NQN_PREFIX}{free}").parse().expect("a prefix of the right form, and a short legal name"));
    }
    nqns
}

/// A name for a target: its file's, or its kind's, in characters that need no quotes anywhere.
fn name_of(target: &TargetName) -> String {
    let raw = match target {
        TargetName::File(path) | TargetName::Raw(path) | TargetName::Linux(path) => {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
