//! Arguments of `mirror`.

use clap::{Args, Subcommand};

use crate::target::Target;

/// Arguments of `mirror`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  sealblock mirror replace mirror:a,b b /srv/new && sealblock mirror status mirror:a,/srv/new"
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
    /// Add a leg. What is on it is replaced; it is waited for until it has everything.
    Add(MirrorAdd),
    /// Take a leg out for good. Its content stays as it is.
    Remove(MirrorRemove),
    /// Add a leg, and take another one out once the new one has everything.
    Replace(MirrorReplace),
}

/// Arguments of `mirror status`.
#[derive(Args, Debug)]
pub struct MirrorStatus {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `mirror add`.
#[derive(Args, Debug)]
pub struct MirrorAdd {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// The new leg.
    #[arg(value_name = "LEG")]
    pub leg: Target,
}

/// Arguments of `mirror remove`.
#[derive(Args, Debug)]
pub struct MirrorRemove {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// The leg to be taken out, as it is called in TARGET.
    #[arg(value_name = "LEG")]
    pub leg: Target,
}

/// Arguments of `mirror replace`.
#[derive(Args, Debug)]
pub struct MirrorReplace {
    /// The mirror, as mirror:A,B.
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// The leg to be taken out, as it is called in TARGET.
    #[arg(value_name = "OLD")]
    pub old: Target,
    /// The leg that takes its place.
    #[arg(value_name = "NEW")]
    pub new: Target,
}
