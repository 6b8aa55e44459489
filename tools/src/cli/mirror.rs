//! Arguments of `mirror`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::target::TargetName;

/// Arguments of `mirror`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock mirror create a b                        # then use mirror:a,b\n  sealblock mirror replace mirror:a,b b /srv/new && sealblock mirror status mirror:a,/srv/new"
)]
pub struct Mirror {
    /// What to do.
    #[command(subcommand)]
    pub command: MirrorCommand,
}

/// What `mirror` does.
#[derive(Subcommand, Debug)]
pub enum MirrorCommand {
    /// Say how each leg is: current, missing, being brought up to date, and what it lacks.
    Status(MirrorStatus),
    /// Make a mirror of devices: one keeps its content, the others get it.
    Create(MirrorCreate),
    /// Add a leg, and wait until it has everything; with a plain volume as TARGET, make a mirror of it.
    Add(MirrorAdd),
    /// Take a leg out for good. Its content stays as it is.
    Remove(MirrorRemove),
    /// Take the older copies that a leg keeps of blocks which every other leg has lost for the content of these blocks.
    AcceptStale(MirrorAcceptStale),
    /// Put a new device in the place of a leg; one that is current is taken out once the new one has everything.
    Replace(MirrorReplace),
}

/// Arguments of `mirror create`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock mirror create a b              # the one that holds data keeps it; blank ones are alike\n  sealblock mirror create a b --from a --force --no-wait\n\nAn interrupted copy goes on when the mirror is next opened for writing or served."
)]
pub struct MirrorCreate {
    /// The devices: two to eight of one size, block size and protection information.
    #[arg(value_name = "DEVICE", num_args = 2.., required = true)]
    pub legs: Vec<TargetName>,
    /// The device whose content counts; needed where several hold data.
    #[arg(long, value_name = "DEVICE")]
    pub from: Option<TargetName>,
    /// Replace what the other devices hold, also the label of another mirror.
    #[arg(long)]
    pub force: bool,
    /// Return once the devices are labelled; they are made alike when the mirror is next opened for writing or served.
    #[arg(long)]
    pub no_wait: bool,
}

/// Arguments of `mirror status`.
#[derive(Args, Debug)]
pub struct MirrorStatus {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// The control socket of the server; those of this user's servers are found without it.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `mirror add`.
#[derive(Args, Debug)]
pub struct MirrorAdd {
    /// The mirror, as mirror:A,B; or a volume that is to become the first leg of one.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// The new leg: blank, at least as large, with the same protection information.
    #[arg(value_name = "LEG")]
    pub leg: TargetName,
    /// Replace what is on it.
    #[arg(long)]
    pub force: bool,
    /// The control socket of the server; those of this user's servers are found without it.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `mirror remove`.
#[derive(Args, Debug)]
pub struct MirrorRemove {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// The leg to be taken out, as it is called in TARGET.
    #[arg(value_name = "LEG")]
    pub leg: TargetName,
    /// Where several are away and only their labels could tell which is which, go by the order of the names.
    #[arg(long)]
    pub force: bool,
    /// The control socket of the server; those of this user's servers are found without it.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `mirror accept-stale`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  sealblock verify mirror:a,b            # block 5: stale on b: an older copy is kept here\n  sealblock mirror accept-stale mirror:a,b b\n\nWhat the blocks held before they were lost may be newer than that; `sealblock verify` lists them."
)]
pub struct MirrorAcceptStale {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// The leg that keeps the copies, as it is called in TARGET.
    #[arg(value_name = "LEG")]
    pub leg: TargetName,
    /// The control socket of the server; those of this user's servers are found without it.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `mirror replace`.
#[derive(Args, Debug)]
pub struct MirrorReplace {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// The leg to be taken out, as it is called in TARGET.
    #[arg(value_name = "OLD")]
    pub old: TargetName,
    /// The device that takes its place; without it another device that is now under the name of OLD.
    #[arg(value_name = "NEW")]
    pub new: Option<TargetName>,
    /// Replace what is on it; and where several legs are away and only their labels could tell which is which, go by the order of
    /// the names.
    #[arg(long)]
    pub force: bool,
    /// The control socket of the server; those of this user's servers are found without it.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}
