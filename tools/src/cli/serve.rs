//! The command line of `serve`.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use sealblock_exports_nvme_tcp::PiVisibility;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_server::control::protocol::LogLevel;
use sealblock_server::control::socket_path::ControlSocket;
use sealblock_server::plan::{nbd_address, nvme_address};
use sealblock_stack::quantity::{Rate, Time};
use sealblock_stack::target::TargetName;

use super::values::{LOG_LEVELS, Labels, Members, RemoteServer, VISIBILITIES, one_of};

const SERVE_HELP: &str = "\
Examples:
  sealblock serve
  sealblock serve v --nbd 127.0.0.1:10809
  sealblock serve v --nbd-socket /run/user/1000/v.sock
  sealblock serve v other.volume --listen 127.0.0.1:4420 --allow-host nqn.2014-08.org.nvmexpress:uuid:...

Without a target, the command serves what ./sealblock.toml configures. Without that file it serves one volume,
sealblock-data/default.volume, and creates it if missing. The discovery service has the same address and port as the subsystems.

SIGHUP reloads the configuration and changes only what differs. SIGTERM and SIGINT complete commands in flight, close volumes and
exit; a second signal exits at once.";

/// Arguments of `serve`.
#[derive(Args, Debug)]
#[command(after_help = SERVE_HELP)]
pub struct Serve {
    /// Targets to serve. Each is namespace 1 of its own subsystem, nqn.2026-11.io.sealblock:NAME.
    #[arg(value_name = "TARGET")]
    pub targets: Vec<TargetName>,
    /// Configuration file, in the format of docs/sealblock.toml, instead of targets.
    #[arg(long, value_name = "FILE", conflicts_with = "targets")]
    pub config: Option<PathBuf>,
    /// Address and port to listen on; repeatable. With port 0 the system chooses one. [default: 127.0.0.1:4420]
    #[arg(long, value_name = "ADDR:PORT", value_parser = nvme_address)]
    pub listen: Vec<SocketAddr>,
    /// Address and port to listen on for NBD clients; repeatable. Each target is an export NAME. [default port: 10809]
    #[arg(long, value_name = "ADDR:PORT", value_parser = nbd_address)]
    pub nbd: Vec<SocketAddr>,
    /// Listen for NBD clients on a Unix socket at this path, which only this user can open; repeatable.
    #[arg(long, value_name = "PATH")]
    pub nbd_socket: Vec<PathBuf>,
    /// Fail if any target cannot be opened. [default: serve the other targets and retry]
    #[arg(long)]
    pub strict: bool,
    /// Number of cores, each a thread on its own CPU. A volume stays on one core, its shards go round all of them;
    /// connections are spread over all.
    /// [default: the number of CPUs, at most 8]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub cores: Option<NonZeroUsize>,
    /// Allow only this host to connect; repeatable. Host NQNs are not authenticated.
    #[arg(long, value_name = "NQN", value_parser = nqn)]
    pub allow_host: Vec<Nqn>,
    /// Whether hosts see the protection information of blocks. From 6.12 on, Linux gives namespaces that show it no
    /// capacity. [default: plain]
    #[arg(long, value_name = "HOW", value_parser = one_of(VISIBILITIES))]
    pub protection: Option<PiVisibility>,
    /// Refuse writes.
    #[arg(long)]
    pub read_only: bool,
    /// Do not move blocks next to their neighbours while volumes are idle.
    #[arg(long)]
    pub no_relocate: bool,
    /// Also serve, read-only, targets whose blocks may be older than what was written, such as a volume that lost its log.
    #[arg(long)]
    pub accept_older: bool,
    /// Serve members of a mirror or stripe that another host assembles. They refuse writes until that host has written their
    /// label.
    #[arg(long, conflicts_with_all = ["read_only", "force_member"])]
    pub as_member: bool,
    /// How labels are used.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether a single member may be written.
    #[command(flatten)]
    pub members: Members,
    /// Interval between scrubs of each target, e.g. 7d. [default: never]
    #[arg(long, value_name = "TIME", value_parser = scrub_time)]
    pub scrub_every: Option<Time>,
    /// Maximum rate of scrubs. [default: unlimited]
    #[arg(long, value_name = "SIZE/s")]
    pub scrub_rate: Option<Rate>,
    /// Control socket of this server, for `sealblock status`, `log`, `scrub`, `mirror` and `resize`. [default: in this user's
    /// runtime directory, where these commands find it]
    #[arg(long, value_name = "PATH|none")]
    pub control: Option<ControlSocket>,
    /// Log level for standard error; `sealblock log` changes it while the server runs. [default: SEALBLOCK_LOG, or warn]
    #[arg(long, value_name = "LEVEL", value_parser = one_of(LOG_LEVELS))]
    pub log: Option<LogLevel>,
    /// Print one JSON object for each event.
    #[arg(long)]
    pub json: bool,
}

/// Reads a number that is not 0.
fn at_least_one(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| "must be a number of at least 1".to_owned())
}

/// Reads how often to scrub.
fn scrub_time(text: &str) -> Result<Time, String> {
    let time: Time = text.parse().map_err(|error| format!("{error}"))?;
    if time.0.as_secs() > 0 { Ok(time) } else { Err("must be at least 1s".to_owned()) }
}

fn nqn(text: &str) -> Result<Nqn, String> {
    text.parse().map_err(|error| format!("{error}"))
}

const DISCOVER_HELP: &str = "\
Examples:
  sealblock discover localhost
  sealblock discover 192.0.2.7:8009 --host-nqn nqn.2014-08.org.nvmexpress:uuid:... --json
  sealblock discover nbd://localhost

`sealblock serve` has its discovery service at port 4420 by default; other servers often use port 8009.";

/// Arguments of `discover`.
#[derive(Args, Debug)]
#[command(after_help = DISCOVER_HELP)]
pub struct Discover {
    /// The server: NVMe/TCP (default port 4420), or NBD by TCP (default port 10809) or on a Unix socket.
    #[arg(value_name = "HOST[:PORT]|nbd://HOST[:PORT]|nbd+unix:///?socket=PATH")]
    pub server: RemoteServer,
    /// Host NQN to connect with. [default: /etc/nvme/hostnqn, or one from /etc/machine-id]
    #[arg(long, value_name = "NQN", value_parser = nqn)]
    pub host_nqn: Option<Nqn>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
