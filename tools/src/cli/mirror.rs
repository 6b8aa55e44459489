//! Arguments of `mirror`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use sealblock_layers_mirror::label::name::MirrorName;
use sealblock_stack::target::TargetName;

/// Arguments of `mirror`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock mirror create a b              # then use mirror:a,b\n  sealblock mirror status mirror:a,b\n  sealblock mirror replace mirror:a,b b c  # then use mirror:a,c"
)]
pub struct Mirror {
    /// What to do.
    #[command(subcommand)]
    pub command: MirrorCommand,
}

/// What `mirror` does.
#[derive(Subcommand, Debug)]
pub enum MirrorCommand {
    /// Show each replica: in sync, out of sync or resyncing, and how much is out of sync.
    Status(MirrorStatus),
    /// Create a mirror of devices: one keeps its content, the others get it.
    Create(MirrorCreate),
    /// Add a replica and wait for its resync; with a plain volume as TARGET, create a mirror of it.
    Add(MirrorAdd),
    /// Remove a replica. Its content stays as it is.
    Remove(MirrorRemove),
    /// Accept the older copies on a replica of blocks that every other replica has lost.
    AcceptStale(MirrorAcceptStale),
    /// Replace a replica by a new device; one that is in sync is removed after the resync of the new one.
    Replace(MirrorReplace),
}

/// Arguments of `mirror create`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock mirror create a b              # the device with data keeps it; blank devices need no --from\n  sealblock mirror create a b --from a --force --no-wait\n\nAn interrupted resync continues when the mirror is next opened for writing or served."
)]
pub struct MirrorCreate {
    /// The devices: two to eight of one size, block size and protection information.
    #[arg(value_name = "DEVICE", num_args = 2.., required = true)]
    pub replicas: Vec<TargetName>,
    /// The device to copy from; required if several devices hold data.
    #[arg(long, value_name = "DEVICE")]
    pub from: Option<TargetName>,
    /// Name of the mirror: at most 24 letters, digits, `-`, `_` and `.`.
    #[arg(long, value_name = "NAME")]
    pub name: Option<MirrorName>,
    /// Overwrite the data of the other devices, also the label of another mirror.
    #[arg(long)]
    pub force: bool,
    /// Return once the devices are labelled. The resync runs when the mirror is next opened for writing or served.
    #[arg(long)]
    pub no_wait: bool,
}

/// Arguments of `mirror status`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  sealblock mirror status mirror:a,b --json\n\nThe exit status is 1 if blocks are lost, and 4 if the mirror is degraded or not compared after a crash."
)]
pub struct MirrorStatus {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Control socket of the server. [default: the sockets of this user's servers]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `mirror add`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock mirror add v copy          # makes a mirror of the volume v; then use mirror:v,copy\n  sealblock mirror add mirror:a,b c    # then use mirror:a,b,c\n\nA new mirror needs devices of one size; a replica that is added to a mirror may be larger. An interrupted resync continues when the mirror is next opened for writing or served."
)]
pub struct MirrorAdd {
    /// The mirror, as mirror:A,B; or a volume that becomes the first replica of one.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// The new replica: blank, at least as large, with the same protection information.
    #[arg(value_name = "REPLICA")]
    pub replica: TargetName,
    /// Overwrite the data on it.
    #[arg(long)]
    pub force: bool,
    /// Control socket of the server. [default: the sockets of this user's servers]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `mirror remove`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock mirror remove mirror:a,b,c c    # then use mirror:a,b")]
pub struct MirrorRemove {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// The replica to remove, by its name in TARGET.
    #[arg(value_name = "REPLICA")]
    pub replica: TargetName,
    /// Remove it although it may have the only copy of some blocks; and if several replicas are offline and only their labels
    /// could identify them, trust the order of the names.
    #[arg(long)]
    pub force: bool,
    /// Control socket of the server. [default: the sockets of this user's servers]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `mirror accept-stale`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  sealblock verify mirror:a,b              # block 5: stale on b: an older copy is kept here\n  sealblock mirror accept-stale mirror:a,b b\n\nThe lost data may be newer than these copies; `sealblock verify` lists the blocks."
)]
pub struct MirrorAcceptStale {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// The replica with the copies, by its name in TARGET.
    #[arg(value_name = "REPLICA")]
    pub replica: TargetName,
    /// Control socket of the server. [default: the sockets of this user's servers]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `mirror replace`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock mirror replace mirror:a,b b c  # then use mirror:a,c\n  sealblock mirror replace mirror:a,b b    # another device now has the name b"
)]
pub struct MirrorReplace {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// The replica to remove, by its name in TARGET.
    #[arg(value_name = "OLD")]
    pub old: TargetName,
    /// The new device. [default: another device that now has the name OLD]
    #[arg(value_name = "NEW")]
    pub new: Option<TargetName>,
    /// Overwrite the data on NEW; remove OLD although it may have the only copy of some blocks; and if several replicas are
    /// offline and only their labels could identify them, trust the order of the names.
    #[arg(long)]
    pub force: bool,
    /// Control socket of the server. [default: the sockets of this user's servers]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}
