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

Without any target, ./sealblock.toml says what to serve if it is there; else one volume, sealblock-data/default.volume, which
is made if it is not there. Discovery is served at the same address and port as everything else.

SIGHUP reads the configuration again and changes only what differs. SIGTERM and SIGINT let commands in flight end, close volumes and exit; the same signal once more ends at once.";

/// Arguments of `serve`.
#[derive(Args, Debug)]
#[command(after_help = SERVE_HELP)]
pub struct Serve {
    /// What to serve: each target is namespace 1 of a subsystem of its own, nqn.2026-11.io.sealblock:NAME.
    #[arg(value_name = "TARGET")]
    pub targets: Vec<TargetName>,
    /// What to serve, from a file in the form of docs/sealblock.toml instead of targets.
    #[arg(long, value_name = "FILE", conflicts_with = "targets")]
    pub config: Option<PathBuf>,
    /// Where to listen; may be given several times. Port 0 lets the system choose one. 127.0.0.1:4420 unless something is said.
    #[arg(long, value_name = "ADDR:PORT", value_parser = nvme_address)]
    pub listen: Vec<SocketAddr>,
    /// Where to listen for NBD clients as well, each target an export NAME; may be given several times. Port 10809 unless given.
    #[arg(long, value_name = "ADDR:PORT", value_parser = nbd_address)]
    pub nbd: Vec<SocketAddr>,
    /// Listen for NBD clients on a Unix socket at this path, which only this user can open; may be given several times.
    #[arg(long, value_name = "PATH")]
    pub nbd_socket: Vec<PathBuf>,
    /// Refuse to start when any target does not open. Without this the others are served, and it is tried again.
    #[arg(long)]
    pub strict: bool,
    /// Cores to serve on, each a thread on a CPU of its own; as many as there are CPUs, but not more than 8, unless something is
    /// said. A volume stays on one core; connections spread over all.
    #[arg(long, value_name = "N")]
    pub cores: Option<NonZeroUsize>,
    /// Let only this host connect; may be given several times. A name is a claim, not a proof.
    #[arg(long, value_name = "NQN", value_parser = nqn)]
    pub allow_host: Vec<Nqn>,
    /// Whether hosts see the protection information of blocks. Linux gives namespaces that show it no capacity from 6.12 on;
    /// plain unless something is said.
    #[arg(long, value_name = "HOW", value_parser = one_of(VISIBILITIES))]
    pub protection: Option<PiVisibility>,
    /// Take no writes.
    #[arg(long)]
    pub read_only: bool,
    /// Do not move blocks next to their neighbours while the volumes are idle.
    #[arg(long)]
    pub no_relocate: bool,
    /// Serve targets whose blocks may be older than what was written, too, for reading only: a volume whose log is lost.
    #[arg(long)]
    pub accept_older: bool,
    /// Serve members of a mirror or stripe that another host puts together: they take no change before that host has written
    /// their label.
    #[arg(long, conflicts_with_all = ["read_only", "force_leg"])]
    pub as_member: bool,
    /// How labels of stripes are heeded.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether members are written to by themselves.
    #[command(flatten)]
    pub members: Members,
    /// Scrub each target so long after the last scrub of it; never unless something is said.
    #[arg(long, value_name = "TIME", value_parser = scrub_time)]
    pub scrub_every: Option<Time>,
    /// Scrub no faster than this.
    #[arg(long, value_name = "SIZE/s")]
    pub scrub_rate: Option<Rate>,
    /// The socket by which `sealblock status`, `log`, `scrub`, `mirror` and `resize` reach this server, or none; in this user's
    /// runtime folder unless something is said, where these commands find it by themselves.
    #[arg(long, value_name = "PATH|none")]
    pub control: Option<ControlSocket>,
    /// What to write to standard error: warnings and worse unless this or SEALBLOCK_LOG says something else. `sealblock log` changes
    /// it while the server runs.
    #[arg(long, value_name = "LEVEL", value_parser = one_of(LOG_LEVELS))]
    pub log: Option<LogLevel>,
    /// Print one JSON object for each event.
    #[arg(long)]
    pub json: bool,
}

/// Reads how often to scrub.
fn scrub_time(text: &str) -> Result<Time, String> {
    let time: Time = text.parse().map_err(|error| format!("{error}"))?;
    if time.0.as_secs() > 0 { Ok(time) } else { Err("less than a second would never end: write 1s or more".to_owned()) }
}

fn nqn(text: &str) -> Result<Nqn, String> {
    text.parse().map_err(|error| format!("{error}"))
}

const DISCOVER_HELP: &str = "\
Examples:
  sealblock discover localhost
  sealblock discover 192.0.2.7:8009 --host-nqn nqn.2014-08.org.nvmexpress:uuid:... --json
  sealblock discover nbd://localhost

`sealblock serve` answers at the port of everything else, 4420 unless it is told otherwise; other servers often at 8009.";

/// Arguments of `discover`.
#[derive(Args, Debug)]
#[command(after_help = DISCOVER_HELP)]
pub struct Discover {
    /// The server: over NVMe/TCP at port 4420 unless one is given, or over NBD at 10809 or on a Unix socket.
    #[arg(value_name = "HOST[:PORT]|nbd://HOST[:PORT]|nbd+unix:///?socket=PATH")]
    pub server: RemoteServer,
    /// The name of this host, by which servers let it in: /etc/nvme/hostnqn where that is there, else a random one.
    #[arg(long, value_name = "NQN", value_parser = nqn)]
    pub host_nqn: Option<Nqn>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
