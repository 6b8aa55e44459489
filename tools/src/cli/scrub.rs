//! The command line of `scrub`.

use std::fmt;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_stack::quantity::Rate;
use sealblock_stack::target::TargetName;
use sealblock_units::Lba;

use super::values::lba;

const HELP: &str = "\
Examples:
  sealblock scrub start v --rate 50MiB/s
  sealblock scrub status v --json

A scrub checks every block of a served target in the background, and repairs bad blocks from another copy where the target has
one. Schedule scrubs in the configuration or by `serve --scrub-every`.";

/// Arguments of `scrub`.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct Scrub {
    /// What to do.
    #[command(subcommand)]
    pub command: ScrubCommand,
}

/// What to do with a scrub.
#[derive(Subcommand, Debug)]
pub enum ScrubCommand {
    /// Show the progress and findings of the scrub, and the results of earlier scrubs.
    #[command(after_help = "Example:\n  sealblock scrub status v\n\n\
        The exit status is 1 if the current or else the last scrub found blocks that are still bad, and 4 if it could not \
        check every copy of every block. For a volume that is not served, the results are read from the volume.")]
    Status(ScrubStatus),
    /// Start a scrub at the first block, or resume a paused one.
    #[command(after_help = "Examples:\n  sealblock scrub start v --rate 50MiB/s\n  sealblock scrub start v --wait\n\n\
        With --wait the exit status is that of `scrub status`; 4 also if the scrub was paused.")]
    Start(ScrubStart),
    /// Pause the scrub; it stays paused across a restart of the server.
    #[command(after_help = "Example:\n  sealblock scrub pause v")]
    Pause(Scrubbed),
    /// Stop the scrub.
    #[command(after_help = "Example:\n  sealblock scrub stop v")]
    Stop(Scrubbed),
}

/// What is scrubbed, and by which server.
#[derive(Args, Debug)]
pub struct Scrubbed {
    /// The served target: a path, its target name, the NQN of its subsystem (and /NSID), or a nvme+tcp:// URI of this
    /// machine.
    #[arg(value_name = "TARGET")]
    pub target: ServedName,
    /// Control socket of the server. [default: the sockets of this user's servers]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `scrub status`.
#[derive(Args, Debug)]
pub struct ScrubStatus {
    /// The target.
    #[command(flatten)]
    pub what: Scrubbed,
    /// Print findings until the scrub ends or is paused. Ctrl-C does not stop the scrub.
    #[arg(long)]
    pub watch: bool,
    /// Print one JSON object; with --watch, at the end.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `scrub start`.
#[derive(Args, Debug)]
pub struct ScrubStart {
    /// The target.
    #[command(flatten)]
    pub what: Scrubbed,
    /// Maximum rate of this run. [default: the rate of the configuration, or unlimited]
    #[arg(long, value_name = "SIZE/s")]
    pub rate: Option<Rate>,
    /// Start at this block. A scrub in progress is stopped.
    #[arg(long, value_name = "BEGIN", value_parser = lba)]
    pub from: Option<Lba>,
    /// Print findings until the scrub ends or is paused. Ctrl-C does not stop the scrub.
    #[arg(long)]
    pub wait: bool,
    /// Print one JSON object, as `scrub status` does; with --wait, at the end.
    #[arg(long)]
    pub json: bool,
}

/// What is served, by the name of its target or of its subsystem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServedName {
    /// A target.
    Target(TargetName),
    /// A subsystem, and which of its namespaces.
    Subsystem(Nqn, Option<NonZeroU32>),
}

impl FromStr for ServedName {
    type Err = String;

    fn from_str(text: &str) -> Result<ServedName, String> {
        if !text.starts_with("nqn.") {
            return text.parse().map(ServedName::Target).map_err(|error| format!("{error}"));
        }
        let (nqn, nsid) = match text.rsplit_once('/').map(|(nqn, nsid)| (nqn, nsid.parse())) {
            Some((nqn, Ok(nsid))) => (nqn, Some(nsid)),
            Some((_, Err(_))) | None => (text, None),
        };
        let error = |error| format!("{error}; a file of this name is file:{text}");
        nqn.parse().map(|nqn| ServedName::Subsystem(nqn, nsid)).map_err(error)
    }
}

impl fmt::Display for ServedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServedName::Target(target) => target.fmt(f),
            ServedName::Subsystem(nqn, None) => nqn.fmt(f),
            ServedName::Subsystem(nqn, Some(nsid)) => write!(f, "{nqn}/{nsid}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_and_print() {
        for text in ["v", "mem:1MiB", "nqn.2026-11.io.sealblock:v", "nqn.2026-11.io.sealblock:v/7", "file:nqn.x"] {
            assert_eq!(text.parse::<ServedName>().unwrap().to_string(), text.trim_start_matches("file:"), "{text}");
        }
        assert!(
            matches!("nqn.2026-11.io.sealblock:v/7".parse(), Ok(ServedName::Subsystem(_, Some(nsid))) if nsid.get() == 7)
        );
        assert!(matches!("file:nqn.x".parse(), Ok(ServedName::Target(_))));
    }

    #[test]
    fn what_is_no_name_says_why() {
        assert!("nqn.x".parse::<ServedName>().unwrap_err().contains("file:nqn.x"));
        assert!("mirror:a".parse::<ServedName>().unwrap_err().contains("two"));
    }
}
