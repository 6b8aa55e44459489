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

A scrub checks every block of a target that `sealblock serve` serves, beside what hosts do, and has bad ones written anew where the
target holds another copy. A configuration, or serve --scrub-every, has it begin by itself.";

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
    /// Say how far it is, what it has met, and how the last ones ended.
    #[command(after_help = "Example:\n  sealblock scrub status v\n\n\
        Exit status 1 says that the run under way, or else the last one, met blocks that are bad still; 4, that it \
        could not check every copy of every block. A volume that is not \
        served says itself what the last scrubs met.")]
    Status(ScrubStatus),
    /// Begin at the first block, or go on where it was paused.
    #[command(after_help = "Examples:\n  sealblock scrub start v --rate 50MiB/s\n  sealblock scrub start v --wait\n\n\
        Exit status with --wait: as that of `scrub status`; 4 as well when it was paused.")]
    Start(ScrubStart),
    /// Hold it where it is, also over a restart of the server.
    #[command(after_help = "Example:\n  sealblock scrub pause v")]
    Pause(Scrubbed),
    /// End it.
    #[command(after_help = "Example:\n  sealblock scrub stop v")]
    Stop(Scrubbed),
}

/// What is scrubbed, and by which server.
#[derive(Args, Debug)]
pub struct Scrubbed {
    /// What is served: a path, the name it was served by, the NQN of its subsystem (and /NSID), or a nvme+tcp:// URI of this
    /// machine.
    #[arg(value_name = "TARGET")]
    pub target: ServedName,
    /// The control socket of the server; those of this user's servers are found without it.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Arguments of `scrub status`.
#[derive(Args, Debug)]
pub struct ScrubStatus {
    /// What.
    #[command(flatten)]
    pub what: Scrubbed,
    /// Watch until the run has ended or is paused, and print what it finds. Ctrl-C ends the watching, not the scrub.
    #[arg(long)]
    pub watch: bool,
    /// Print one JSON object; with --watch, in the end.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `scrub start`.
#[derive(Args, Debug)]
pub struct ScrubStart {
    /// What.
    #[command(flatten)]
    pub what: Scrubbed,
    /// Check no faster than this, during this run.
    #[arg(long, value_name = "SIZE/s")]
    pub rate: Option<Rate>,
    /// Begin at this block; a run in progress is ended.
    #[arg(long, value_name = "BEGIN", value_parser = lba)]
    pub from: Option<Lba>,
    /// Wait until it has ended or is paused, and print what it finds. Ctrl-C ends the waiting, not the scrub.
    #[arg(long)]
    pub wait: bool,
    /// Print one JSON object, as `scrub status` does; with --wait, in the end.
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
