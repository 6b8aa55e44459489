//! The command line: every command, option and help text.
//!
//! Only what is parsed lives here. A value that can be wrong is parsed into its own type, so that bad usage ends with exit
//! status 2 before anything is opened. The doc comments of commands and options are their help.

mod mirror;
mod scrub;
mod serve;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use sealblock_units::{BlockSize, ByteCount, Lba};

pub use mirror::{Mirror, MirrorAdd, MirrorCommand, MirrorCreate, MirrorRemove, MirrorReplace, MirrorStatus};
pub use scrub::{Scrub, ScrubCommand, ScrubStart, ScrubStatus, Scrubbed, ServedName};
pub use serve::{ControlPlace, Discover, LogLevel, NVME_TCP_PORT, Protection, Serve, listen_address, nbd_address};
pub use values::{Endpoint, Guard, Harm, Mode, ProtectionType, RemoteServer, Volume};

use crate::range::BlockRange;
use crate::rate::Rate;
use crate::target::Target;

const EXIT_STATUS: &str = "\
Exit status:
  0  clean
  1  the command worked and found damage or a difference
  2  bad usage
  3  the work could not be done

Targets:
  PATH, file:PATH                     a protected volume, or a block device; for copy and compare also a plain file
  raw:PATH                            a plain file's bytes as blocks, without seals
  mem:SIZE, null:SIZE                 memory; a device that stores nothing
  offset:FIRST..LAST,TARGET           a slice of another target
  fault:[RULES],TARGET                another target that fails on purpose
  mirror:A,B stripe:A,B multipath:A,B one device made of others; stripe-16KiB:A,B for chunks of another size
  mirror:[stripe:A,B],C               brackets nest
  nvme+tcp://HOST[:PORT]/NQN[/NSID]   a namespace over NVMe/TCP; ?hdgst&ddgst&pract=1&queues=4&depth=64&hostnqn=NQN,
                                      ?timeout=5s&keepalive=5s&reconnect=0s&attempts=3
  nbd://HOST[:PORT]/EXPORT            a network block device; ?connections=4
  /dev/nvmeXnY /dev/ngXnY /dev/sdX    a Linux device

Sizes are 4096, 4KiB, 1GiB or 1GB.
Ranges are FIRST..LAST with both ends included, FIRST.., ..LAST or one number.

Example:
  sealblock create v --size 1GiB && sealblock copy photos.tar v && sealblock verify v";

/// Block storage in which every block carries its seal.
#[derive(Debug, Parser)]
#[command(name = "sealblock", version, after_help = EXIT_STATUS, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a protected volume in a file or on a block device.
    Create(Create),
    /// Say what a target is: size, block size, protection, and what its device can do.
    Info(Info),
    /// Export targets over NVMe/TCP, for any NVMe/TCP host.
    Serve(Serve),
    /// Check a served target in the background: begin, hold and end it, and say what it has met.
    Scrub(Scrub),
    /// Name what a server lets this host see: the subsystems over NVMe/TCP, or the exports over NBD.
    Discover(Discover),
    /// Check every block against its seal, and name those that are damaged.
    Verify(Verify),
    /// Compare two targets block by block, or one with zeroes.
    Compare(Compare),
    /// Make blocks read as zeroes, giving their space back where that is possible.
    Zero(Zero),
    /// Say that the content of blocks is no longer needed. What they read as afterwards is not promised.
    Discard(Discard),
    /// Copy blocks from one target to another, or from standard input, or to standard output.
    Copy(Copy),
    /// Say how the legs of a mirror are, and add, take out or replace one.
    Mirror(Mirror),
    /// Damage one block of a volume on purpose, behind its seal's back.
    Corrupt(Corrupt),
    /// Show the main job: make a volume, fill it, verify it, damage it, find the damage.
    Demo(Demo),
    /// Print completions for a shell.
    Completions(Completions),
    /// Write the manual pages into a folder.
    Man(Man),
}

/// Arguments of `create`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock create v --size 1GiB --block-size 512 --guard crc64 --type 1")]
pub struct Create {
    /// The file or block device that becomes the volume.
    #[arg(value_name = "VOLUME")]
    pub volume: Volume,
    /// Bytes of data that the volume holds: a multiple of the block size.
    #[arg(long, value_name = "SIZE")]
    pub size: ByteCount,
    /// Bytes of data in a block.
    #[arg(long, value_name = "512|4096", default_value = "4096", value_parser = values::block_size)]
    pub block_size: BlockSize,
    /// The checksum in each block's seal.
    #[arg(long, value_name = "GUARD", value_enum, default_value_t = Guard::Crc32c)]
    pub guard: Guard,
    /// What the reference tag means: 1, the block's address; 2, the address from a start that each command gives; 3,
    /// nothing that is checked.
    #[arg(long = "type", value_name = "TYPE", value_enum, default_value_t = ProtectionType::Type1)]
    pub protection_type: ProtectionType,
    /// Overwrite a volume or a file that is already there.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `info`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock info v --json")]
pub struct Info {
    /// What to look at.
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `verify`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock verify v --range 0..9999 --rate 100MiB/s --json\n\n\
    Exit status 1 says that blocks are damaged; standard output names them.")]
pub struct Verify {
    /// What to check.
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Which blocks; all of them unless given.
    #[arg(long, value_name = "FIRST..LAST")]
    pub range: Option<BlockRange>,
    /// Who checks: the device, this process, or whichever moves less data.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Mode::Auto)]
    pub mode: Mode,
    /// Rewrite a damaged block from another copy, where the target has one.
    #[arg(long)]
    pub repair: bool,
    /// Check no faster than this.
    #[arg(long, value_name = "SIZE/s")]
    pub rate: Option<Rate>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Print nothing when all is clean, and show no progress.
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,
}

/// Arguments of `compare`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock compare v nbd://localhost/v\n  sealblock compare --zero v")]
pub struct Compare {
    /// The one target.
    #[arg(value_name = "TARGET_A", required_unless_present = "zero")]
    pub a: Option<Target>,
    /// The other target.
    #[arg(value_name = "TARGET_B", required_unless_present = "zero")]
    pub b: Option<Target>,
    /// Compare this target with zeroes instead.
    #[arg(long, value_name = "TARGET", conflicts_with_all = ["a", "b"])]
    pub zero: Option<Target>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// What `compare` holds against each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Comparison<'a> {
    /// Two targets.
    Pair(&'a Target, &'a Target),
    /// A target and zeroes.
    Zeroes(&'a Target),
}

impl Compare {
    /// What to compare, or nothing for arguments that the parser does not let through.
    pub fn comparison(&self) -> Option<Comparison<'_>> {
        match (&self.a, &self.b, &self.zero) {
            (Some(a), Some(b), None) => Some(Comparison::Pair(a, b)),
            (None, None, Some(target)) => Some(Comparison::Zeroes(target)),
            _ => None,
        }
    }
}

/// Arguments of `zero`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock zero v --range 100..199")]
pub struct Zero {
    /// Where.
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Which blocks; all of them unless given.
    #[arg(long, value_name = "FIRST..LAST")]
    pub range: Option<BlockRange>,
    /// Keep the space of the blocks instead of giving it back.
    #[arg(long)]
    pub no_unmap: bool,
}

/// Arguments of `discard`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock discard v --range 200..")]
pub struct Discard {
    /// Where.
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Which blocks; all of them unless given.
    #[arg(long, value_name = "FIRST..LAST")]
    pub range: Option<BlockRange>,
}

const COPY_HELP: &str = "\
Examples:
  sealblock copy photos.tar v
  sealblock copy v - | sha256sum

FROM and TO may be plain files, to the last byte: a file that is written to is made, cut or grown to the length of what is
copied, and has holes where that is zeroes. A volume or another device keeps its size, and what it has behind the data.";

/// Arguments of `copy`.
#[derive(Args, Debug)]
#[command(after_help = COPY_HELP)]
pub struct Copy {
    /// Where from; - is standard input.
    #[arg(value_name = "FROM")]
    pub from: Endpoint,
    /// Where to; - is standard output.
    #[arg(value_name = "TO")]
    pub to: Endpoint,
    /// Overwrite what is left of a damaged volume.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `corrupt`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock corrupt v --lba 7 --kind data")]
pub struct Corrupt {
    /// The volume to damage.
    #[arg(value_name = "VOLUME")]
    pub volume: Volume,
    /// Which block, counted from 0.
    #[arg(long, value_name = "N", value_parser = values::lba)]
    pub lba: Lba,
    /// What to damage.
    #[arg(long, value_name = "KIND", value_enum)]
    pub kind: Harm,
}

/// Arguments of `demo`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock demo --dir /tmp/sealblock-demo")]
pub struct Demo {
    /// The folder for the volume; it is made if it is not there.
    #[arg(long, value_name = "DIR", default_value = "sealblock-data")]
    pub dir: PathBuf,
}

/// Arguments of `completions`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock completions bash > ~/.local/share/bash-completion/completions/sealblock")]
pub struct Completions {
    /// For which shell.
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: Shell,
}

/// Arguments of `man`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock man ~/.local/share/man/man1")]
pub struct Man {
    /// The folder; it is made if it is not there.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

#[cfg(test)]
mod tests;
