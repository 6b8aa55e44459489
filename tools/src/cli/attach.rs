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
  sealblock attach v --pi crc16                       # Linux 7.0 and later: the kernel generates and checks tags
  sealblock attach mirror:a,b --device 3

The command serves the device until SIGTERM, SIGINT or `sealblock detach` removes it. If the block device is in use, a signal
ends only this process: requests wait for the next `sealblock attach TARGET --device N`, as they do when this process dies. No
completed write is lost by that, and requests in flight are executed again.

Requires root and the kernel's ublk_drv driver (Linux 6.5 or later). Do not use the device for swap: the kernel may then wait
for memory that this process cannot get.";

/// Arguments of `attach`.
#[derive(Args, Debug)]
#[command(after_help = ATTACH_HELP)]
pub struct Attach {
    /// The target to attach.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// Have the kernel's block layer generate and check protection information. It is also checked here, and converted to
    /// the target's protection information.
    #[arg(long, value_name = "GUARD", value_parser = one_of(HOST_GUARDS))]
    pub pi: Option<HostGuard>,
    /// N of /dev/ublkbN. An existing device that waits for its server is recovered. [default: the next free number]
    #[arg(long, value_name = "N")]
    pub device: Option<u32>,
    /// Number of queues, each served on its own core. [default: the number of CPUs, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_QUEUES)))]
    pub queues: Option<u16>,
    /// Queue depth: requests in flight per queue.
    #[arg(long, value_name = "N", default_value_t = BlockDevicePlan::DEFAULT_DEPTH, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_DEPTH)))]
    pub depth: u16,
    /// Refuse writes.
    #[arg(long)]
    pub read_only: bool,
    /// How labels are used.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether a single member may be written.
    #[command(flatten)]
    pub members: Members,
    /// Log level for standard error. [default: SEALBLOCK_LOG, or warn]
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
    /// Remove the device even while it is in use; its requests fail from then on.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
