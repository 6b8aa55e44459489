//! The command lines of `attach` and `detach`.

use clap::Args;
use sealblock_exports_ublk::{HostGuard, MAX_DEPTH, MAX_QUEUES};
use sealblock_server::control::protocol::LogLevel;
use sealblock_server::plan::BlockDevicePlan;
use sealblock_stack::target::TargetName;

use super::values::{HOST_GUARDS, LOG_LEVELS, Labels, Members, block_device, one_of};

const ATTACH_HELP: &str = "\
Examples:
  sealblock attach v                                  # /dev/ublkb0, until Ctrl-C
  sealblock attach v --pi crc16                       # Linux 7.0 and later: the kernel makes and checks tags
  sealblock attach mirror:a,b --device 3

It serves until SIGTERM or SIGINT, which take the block device away, or until `sealblock detach`. While the block device is in use, a
signal leaves it: its requests wait for the next `sealblock attach TARGET --device N`, and so they do when this process dies. Nothing that
was written and answered is lost by that, and what was not answered is executed then.

It needs root and the kernel's driver ublk_drv (Linux 6.5 and later). No swap on it: the kernel may then wait for memory that this process
cannot get.";

/// Arguments of `attach`.
#[derive(Args, Debug)]
#[command(after_help = ATTACH_HELP)]
pub struct Attach {
    /// What becomes a block device.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// Have the kernel's block layer make a tag for each block that it writes and check that of each block that it reads. Tags are checked
    /// here, too, and change to those of the target on the way.
    #[arg(long, value_name = "GUARD", value_parser = one_of(HOST_GUARDS))]
    pub pi: Option<HostGuard>,
    /// N of /dev/ublkbN; the next free one unless given. A device of this number that waits for its server is taken over.
    #[arg(long, value_name = "N")]
    pub device: Option<u32>,
    /// Queues, each served on a core of its own; as many as there are CPUs, but not more than 4, unless given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_QUEUES)))]
    pub queues: Option<u16>,
    /// Requests of a queue at once.
    #[arg(long, value_name = "N", default_value_t = BlockDevicePlan::DEFAULT_DEPTH, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_DEPTH)))]
    pub depth: u16,
    /// Take no writes.
    #[arg(long)]
    pub read_only: bool,
    /// How labels of stripes are heeded.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether members are written to by themselves.
    #[command(flatten)]
    pub members: Members,
    /// What to write to standard error: warnings and worse unless this or SEALBLOCK_LOG says something else.
    #[arg(long, value_name = "LEVEL", value_parser = one_of(LOG_LEVELS))]
    pub log: Option<LogLevel>,
    /// Print one JSON object for each event.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `detach`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock detach 0\n  sealblock detach /dev/ublkb0")]
pub struct Detach {
    /// N, or /dev/ublkbN.
    #[arg(value_name = "N", value_parser = block_device)]
    pub device: u32,
    /// Also while it is in use: requests fail from then on.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
