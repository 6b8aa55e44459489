//! Opens namespaces over NVMe/TCP, with the identity of this host, and exports over NBD; what members of groups are opened with that
//! are on other hosts; failures to connect.

use std::fs;
use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use sealblock_media_nbd::{Address as NbdPeer, ConnectError as NbdConnectError, NbdDevice, Options as NbdOptions};
use sealblock_media_nvme_tcp::{ConnectError, HostPort as Peer, NvmeTcpDevice, Options, PiSource, Reconnect};
use sealblock_protocols_nvme::fabrics::InvalidParameter;
use sealblock_protocols_nvme::logs::DiscoveryEntry;
use sealblock_protocols_nvme::nqn::{Nqn, UUID_PREFIX};
use sealblock_protocols_nvme::{Status, StatusCode};

use crate::error::{Cause, StackError, shell_word};
use crate::identity::{host_of_machine, uuid_from, uuid_of};
use crate::opened::held::Access;
use crate::target::{Address, NBD_PORT, NVME_TCP_PORT, NbdAddress, RemoteOptions, TargetName};

/// The files with the identity of a Linux host, for all programs that connect.
const HOST_NQN_FILE: &str = "/etc/nvme/hostnqn";
const HOST_ID_FILE: &str = "/etc/nvme/hostid";
/// The file with the identity of a Linux system, machine-id(5), which is not to be given away as it is.
const MACHINE_ID_FILE: &str = "/etc/machine-id";
/// The default number of I/O connections.
const QUEUES: u16 = 1;

/// Connects to a namespace.
pub(crate) async fn connect(
    address: &Address,
    nqn: &str,
    nsid: Option<NonZeroU32>,
    options: &RemoteOptions,
) -> Result<NvmeTcpDevice, StackError> {
    let usage = |error| StackError::new(Cause::Usage, "parse the name", error);
    let subsystem: Nqn = nqn.parse().map_err(usage)?;
    let host = options.host_nqn.as_ref().map(|nqn| nqn.parse()).transpose().map_err(usage)?;
    let usual = Options::default();
    let reconnect = Reconnect {
        attempts: match (options.reconnect, options.attempts) {
            (Some(Duration::ZERO), _) => 0,
            (_, Some(attempts)) => attempts.get().into(),
            (_, None) => usual.reconnect.attempts,
        },
        total: options.reconnect.unwrap_or(usual.reconnect.total),
        ..usual.reconnect
    };
    let options = Options {
        queues: options.queues.map_or(QUEUES, Into::into),
        queue_depth: options.depth.map_or(usual.queue_depth, Into::into),
        header_digest: options.header_digest,
        data_digest: options.data_digest,
        request_timeout: options.timeout.unwrap_or(usual.request_timeout),
        connect_timeout: options.timeout.unwrap_or(usual.connect_timeout),
        keep_alive: options.keep_alive.unwrap_or(usual.keep_alive),
        // A target with traffic based keep alive may need twice the time to notice a lost host.
        quiesce: options.keep_alive.map_or(usual.quiesce, |time| time * 2 + Duration::from_secs(1)),
        reconnect,
        protection: match options.target_makes_tags {
            None => PiSource::Auto,
            Some(false) => PiSource::Host,
            Some(true) => PiSource::Target,
        },
        ..as_host(host)
    };
    let connected = NvmeTcpDevice::connect(peer(address), subsystem, nsid.map(NonZeroU32::get), options).await;
    connected.map_err(|error| connect_error("connect to", &error))
}

/// The subsystems that a server names.
pub fn discover(address: &Address, host: Option<Nqn>) -> LocalBoxFuture<'_, Result<Vec<DiscoveryEntry>, StackError>> {
    Box::pin(async move {
        let found = sealblock_media_nvme_tcp::discover(peer(address), as_host(host)).await;
        found.map_err(|error| connect_error("query", &error).on(address))
    })
}

fn peer(address: &Address) -> Peer {
    Peer::new(address.host_name(), address.port.map_or(NVME_TCP_PORT, Into::into))
}

/// The default options: the given host NQN, else that of this machine, else one from its identity. Commands of one machine are one host:
/// a server that has something to tell each host tells it once. Without any, each process is a host of its own.
fn as_host(named: Option<Nqn>) -> Options {
    let line = |path| fs::read_to_string(path).ok().map(|text: String| text.trim().to_owned());
    let (nqn, id) = match named {
        Some(nqn) => (Some(nqn), None),
        None => match line(HOST_NQN_FILE).and_then(|line| line.parse().ok()) {
            Some(nqn) => (Some(nqn), line(HOST_ID_FILE)),
            None => (line(MACHINE_ID_FILE).as_deref().and_then(host_of_machine).map(Nqn::from_uuid), None),
        },
    };
    let Some(host_nqn) = nqn else { return Options::default() };
    // A name and an identifier go together: targets may refuse one name with two of them.
    let id = id.as_deref().and_then(uuid_from);
    let from_name = || host_nqn.as_str().strip_prefix(UUID_PREFIX).and_then(uuid_from);
    let host_id = id.or_else(from_name).unwrap_or_else(|| uuid_of(&["host", host_nqn.as_str()]));
    Options { host_nqn, host_id, ..Options::default() }
}

/// The default request timeout and keep-alive timeout of a path or member over NVMe/TCP. Short, since there is another
/// one.
pub(crate) const SHORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The same target, with short timeouts where it names none.
pub(crate) fn with_short_timeouts(target: &TargetName) -> TargetName {
    let mut target = target.clone();
    hasten(&mut target);
    target
}

fn hasten(target: &mut TargetName) {
    match target {
        TargetName::NvmeTcp { options, .. } => {
            options.timeout.get_or_insert(SHORT_TIMEOUT);
            options.keep_alive.get_or_insert(SHORT_TIMEOUT);
            options.reconnect.get_or_insert(Duration::ZERO);
        }
        TargetName::Group { members, .. } => members.iter_mut().for_each(hasten),
        TargetName::Offset { target, .. } | TargetName::Fault { target, .. } => hasten(target),
        TargetName::File(_)
        | TargetName::Raw(_)
        | TargetName::Linux { .. }
        | TargetName::Memory { .. }
        | TargetName::Null(_)
        | TargetName::Nbd { .. } => {}
    }
}

/// The options of all namespaces over NVMe/TCP in a target.
pub(crate) fn remotes(target: &TargetName) -> Vec<&RemoteOptions> {
    let options = target.leaves().into_iter().filter_map(|leaf| match leaf {
        TargetName::NvmeTcp { options, .. } => Some(options),
        _ => None,
    });
    options.collect()
}

/// True if any part of it is on another host.
pub(crate) fn is_remote(target: &TargetName) -> bool {
    !remotes(target).is_empty()
}

/// True if Connect was refused for the subsystem that it named.
fn is_of_subsystem(status: Status, detail: &str) -> bool {
    status.code() == StatusCode::CONNECT_INVALID_PARAMETERS && detail.contains(&InvalidParameter::SUBNQN.to_string())
}

/// A failure to connect as a failure of a command.
fn connect_error(doing: &str, error: &ConnectError) -> StackError {
    const CHECK: &str = "check that the server is running, and its address and port";
    let (cause, advice) = match error {
        ConnectError::Resolve { .. } => (Cause::Unreachable, Some("give the name or address of a host")),
        ConnectError::Connect { .. } | ConnectError::Timeout { .. } | ConnectError::Lost { .. } => {
            (Cause::Unreachable, Some(CHECK))
        }
        ConnectError::Refused { status, .. } if status.code() == StatusCode::CONNECT_INVALID_HOST => (
            Cause::Refused,
            Some("use ?hostnqn=NQN with a name that the server allows, or add it with the server's --allow-host"),
        ),
        // The same answer for a subsystem that is not there and one that is for other hosts: a server does not tell which.
        ConnectError::Refused { status, detail, .. } if is_of_subsystem(*status, detail) => {
            let why = "the server has no such subsystem, or does not admit this host to it";
            return StackError::new(Cause::Refused, doing, why)
                .advise("`sealblock discover` lists the subsystems for this host; ?hostnqn=NQN names another host");
        }
        ConnectError::Refused { .. } => (Cause::Refused, Some("`sealblock discover` lists the subsystems")),
        ConnectError::NoDigest(_) => (Cause::Absent, Some("omit the digest option")),
        ConnectError::AuthenticationRequired => (Cause::Refused, None),
        ConnectError::NoNamespace { .. } | ConnectError::WhichNamespace { .. } => {
            (Cause::Unsuitable, Some("use nvme+tcp://HOST/NQN/NSID with one of them"))
        }
        ConnectError::Unexpected { .. }
        | ConnectError::Format { .. }
        | ConnectError::Unsupported { .. }
        | ConnectError::Changed { .. } => (Cause::Unsuitable, None),
    };
    StackError::new(cause, doing, error).advise_if(advice)
}

/// Opens an export, with `small_blocks` in blocks as small as the server takes them. A replica of a mirror is compared with the others
/// when it is opened, so only one that its server identifies is used on after a lost connection.
pub(crate) async fn connect_nbd(
    address: &NbdAddress,
    export: &str,
    connections: Option<NonZeroU16>,
    small_blocks: bool,
    access: Access,
) -> Result<NbdDevice, StackError> {
    let wanted = connections.map_or(NbdOptions::default().connections, Into::into);
    let needs_identity = matches!(access, Access::Replica | Access::ReplicaInPlace);
    let options = NbdOptions { connections: wanted, small_blocks, needs_identity, ..NbdOptions::default() };
    let opened = NbdDevice::connect(nbd_peer(address), export, options).await;
    opened.map_err(|error| nbd_connect_error("connect to", &error, address))
}

/// Names and descriptions of what a server exports.
pub fn exports(address: &NbdAddress) -> LocalBoxFuture<'_, Result<Vec<(String, String)>, StackError>> {
    Box::pin(async move {
        let found = sealblock_media_nbd::discover(nbd_peer(address), NbdOptions::default()).await;
        let found = found.map_err(|error| nbd_connect_error("query", &error, address).on(address))?;
        Ok(found.into_iter().map(|listed| (listed.name, listed.description)).collect())
    })
}

fn nbd_peer(address: &NbdAddress) -> NbdPeer {
    match address {
        NbdAddress::Tcp(address) => NbdPeer::new(address.host_name(), address.port.map_or(NBD_PORT, Into::into)),
        NbdAddress::Unix(path) => NbdPeer::Unix(path.clone()),
    }
}

/// A failure to connect as a failure of a command.
fn nbd_connect_error(doing: &str, error: &NbdConnectError, address: &NbdAddress) -> StackError {
    let check = match address {
        NbdAddress::Tcp(_) => "check that the server is running, and its address and port",
        NbdAddress::Unix(_) => {
            "check that the server is running, the path of its socket, and that this user may open it"
        }
    };
    let failure = |cause| StackError::new(cause, doing, error);
    match error {
        NbdConnectError::Resolve { .. } => failure(Cause::Unreachable).advise("give the name or address of a host"),
        NbdConnectError::Connect { .. } | NbdConnectError::Timeout { .. } | NbdConnectError::Lost { .. } => {
            failure(Cause::Unreachable).advise(check)
        }
        NbdConnectError::Refused(_) if doing == "query" => failure(Cause::Refused),
        NbdConnectError::Refused(_) if error.is_transient() => {
            failure(Cause::Refused).advise(format!("`sealblock discover {}` lists the exports", shell_word(address)))
        }
        NbdConnectError::Refused(_) => failure(Cause::Refused),
        NbdConnectError::Violation(_) => failure(Cause::Unsuitable).advise("give the address of an NBD server"),
        NbdConnectError::Name => failure(Cause::Usage),
        NbdConnectError::Unsupported(_) | NbdConnectError::Unidentified | NbdConnectError::Changed { .. } => {
            failure(Cause::Unsuitable)
        }
    }
}
