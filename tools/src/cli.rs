//! The command line: every command, option and help text.
//!
//! Only what is parsed lives here. A value that can be wrong is parsed into its own type, so that bad usage ends with exit
//! status 2 before anything is opened. The doc comments of commands and options are their help.

pub mod after_help;
mod attach;
mod bench;
mod fs;
mod fs_bench;
mod fs_format;
mod fs_write;
mod mirror;
mod mount_options;
mod scrub;
mod serve;
mod status;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use sealblock_integrity::ProtectionType;
use sealblock_media_volume::CorruptionKind;
use sealblock_stack::quantity::Rate;
use sealblock_stack::range::BlockRange;
use sealblock_stack::target::TargetName;
use sealblock_units::{BlockSize, ByteCount, Lba};

pub use attach::{Attach, Detach};
pub use bench::Bench;
pub use fs::{Fs, FsCat, FsCheck, FsCommand, FsGet, FsInfo, FsLs, FsMount, FsRescue, FsTree, FsVerify};
pub use fs_bench::FsBench;
pub use fs_format::{DatasumChoice, Feature, FeatureChange, FsFormat};
pub use fs_write::{
    FsChmod, FsChown, FsDatasum, FsFallocate, FsLn, FsMkdir, FsMv, FsPut, FsRm, FsRmdir, FsSnapshot, FsSubvolume,
    FsSubvolumeCommand, FsSubvolumeCreate, FsSubvolumeDelete, FsSubvolumeList, Owner,
};
pub use mirror::{
    Mirror, MirrorAcceptStale, MirrorAdd, MirrorCommand, MirrorCreate, MirrorRemove, MirrorReplace, MirrorStatus,
};
pub use mount_options::MountOptions;
pub use scrub::{Scrub, ScrubCommand, ScrubStart, ScrubStatus, Scrubbed, ServedName};
pub use serve::{Discover, Serve};
pub use status::{Log, ServerName, Status};
pub use values::{Endpoint, Guard, Labels, Members, Mode, RemoteServer, Volume};

use values::{CORRUPTIONS, GUARDS, PROTECTION_TYPES, one_of, parse_shards};

const EXIT_STATUS: &str = "\
Exit status:
  0  clean
  1  the command worked and found damage or a difference
  2  bad usage
  3  the command failed
  4  no damage found, but not everything could be checked, or a copy is missing or out of sync
  130, 143  ended by Ctrl-C (SIGINT) or SIGTERM, after printing the results so far and how to resume

Targets:
  PATH, file:PATH                     a protected volume, or a block device; for copy and compare also a plain file
  raw:PATH                            a plain file's bytes as blocks, without seals
  mem:SIZE, null:SIZE                 memory, all of it taken at once with ?preallocate behind it; a device that discards
                                      writes and reads as zeroes
  offset:FIRST..LAST,TARGET           blocks FIRST to LAST of another target
  fault:[RULES],TARGET                another target with injected faults
  mirror:A,B stripe:A,B multipath:A,B a group of targets as one device; stripe-16KiB:A,B sets the chunk size,
                                      stripe-nolabel:A,B is for members without labels
  mirror:[stripe:A,B],C               groups nest in brackets
  nvme+tcp://HOST[:PORT]/NQN[/NSID]   a namespace over NVMe/TCP; options behind it: ?hdgst ?ddgst ?pract=1 ?queues=4 ?depth=64
                                      ?hostnqn=NQN ?timeout=5s ?keepalive=5s ?reconnect=0s ?attempts=3, joined by &
  nbd://HOST[:PORT]/EXPORT            a network block device; ?connections=4
  nbd+unix:///EXPORT?socket=PATH      the same on a Unix socket of this machine; &connections=4
  /dev/nvmeXnY /dev/ngXnY /dev/sdX    a local drive; verification is offloaded to it where it can

Sizes are 4096, 4KiB, 1GiB, 1.5GiB or 1GB: KiB, MiB, GiB, TiB, PiB and EiB are powers of 1024, KB to EB powers of 1000.

Ranges are FIRST..LAST with both ends included, FIRST.., ..LAST or one number.

Example:
  sealblock create v --size 1GiB && sealblock copy photos.tar v && sealblock verify v";

/// Block storage that keeps a checksum, an address and a tag with every block.
#[derive(Debug, Parser)]
#[command(name = "sealblock", version = env!("SEALBLOCK_VERSION"), after_help = EXIT_STATUS, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// The command, with options that target names can express moved into the names.
    pub fn into_command(mut self) -> Command {
        match &mut self.command {
            Command::Info(info) => info.labels.apply_to(&mut info.target),
            Command::Verify(verify) => verify.targets.iter_mut().for_each(|target| verify.labels.apply_to(target)),
            Command::Zero(zero) => zero.labels.apply_to(&mut zero.target),
            Command::Discard(discard) => discard.labels.apply_to(&mut discard.target),
            Command::Attach(attach) => attach.labels.apply_to(&mut attach.target),
            Command::Fs(Fs { command: FsCommand::Format(format) }) => {
                format.targets.iter_mut().for_each(|target| format.labels.apply_to(target));
            }
            Command::Serve(serve) => serve.targets.iter_mut().for_each(|target| serve.labels.apply_to(target)),
            Command::Compare(compare) => {
                let targets = [&mut compare.a, &mut compare.b, &mut compare.zero];
                targets.into_iter().flatten().for_each(|target| compare.labels.apply_to(target));
            }
            Command::Copy(copy) => {
                for end in [&mut copy.from, &mut copy.to] {
                    if let Endpoint::Target(target) = end {
                        copy.labels.apply_to(target);
                    }
                }
            }
            _ => {}
        }
        self.command
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create a protected volume in a file or on a block device.
    Create(Create),
    /// Show a target's size, block size, protection and capabilities.
    Info(Info),
    /// Export targets over NVMe/TCP and NBD.
    Serve(Serve),
    /// Attach a target as a local block device, /dev/ublkbN.
    Attach(Attach),
    /// Remove a block device created by `attach`.
    Detach(Detach),
    /// Show the health of servers: exports, clients, damage, mirrors, scrubs and recent errors.
    Status(Status),
    /// Show or change a running server's log level.
    Log(Log),
    /// Control background scrubs of served targets: start, pause, stop, status.
    Scrub(Scrub),
    /// List the subsystems of an NVMe/TCP server, or the exports of an NBD server.
    Discover(Discover),
    /// Check every block against its seal, and list the damaged blocks.
    Verify(Verify),
    /// Compare two targets block by block, or one target with zeroes.
    Compare(Compare),
    /// Zero blocks, and free their space where possible.
    Zero(Zero),
    /// Discard (trim) blocks. Their content is undefined afterwards.
    Discard(Discard),
    /// Copy from a target or standard input to a target or standard output.
    Copy(Copy),
    /// Copy the blocks that still verify out of a damaged volume, and list the lost ones.
    Rescue(Rescue),
    /// Resize a protected volume, also while it is served.
    Resize(Resize),
    /// Show the replicas of a mirror; add, remove or replace one.
    Mirror(Mirror),
    /// Make, read and change Btrfs filesystems on any target without the kernel: list, copy, snapshot, verify, rescue, mount.
    Fs(Fs),
    /// Damage one block of a volume on purpose, without updating its seal.
    Corrupt(Corrupt),
    /// Demonstrate the main commands: create a volume, fill it, verify it, damage it and find the damage.
    Demo(Demo),
    /// Measure published performance claims on this machine, and report whether each holds.
    Bench(Bench),
    /// Print shell completions.
    Completions(Completions),
    /// Complete a command line: for the scripts of `completions`.
    #[command(hide = true)]
    Complete(Complete),
    /// Write the manual pages into a directory.
    Man(Man),
}

/// Arguments of `create`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock create v --size 1GiB --block-size 512 --guard crc64 --type 1")]
pub struct Create {
    /// The file or block device that becomes the volume.
    #[arg(value_name = "VOLUME")]
    pub volume: Volume,
    /// Capacity of the volume in bytes: a multiple of the block size.
    #[arg(long, value_name = "SIZE")]
    pub size: ByteCount,
    /// Block size in bytes.
    #[arg(long, value_name = "512|4096", default_value = "4096", value_parser = values::block_size)]
    pub block_size: BlockSize,
    /// The checksum in each block's seal.
    #[arg(long, value_name = "GUARD", default_value = "crc32c", value_parser = one_of(GUARDS))]
    pub guard: Guard,
    /// Protection information type, which sets the meaning of the reference tag: 1, the block's address; 2, an address
    /// relative to a start that each command gives; 3, not checked.
    #[arg(long = "type", value_name = "TYPE", default_value = "1", value_parser = one_of(PROTECTION_TYPES))]
    pub protection_type: ProtectionType,
    /// Divide the volume into N volumes in one file, which a server runs on N cores: 1, 2, 4, 8 or 16. More than one need
    /// a size of more than N times 512 MiB, or of at most 512 MiB with 64 MiB for each. Volumes in shards cannot be
    /// resized. [default: 1]
    #[arg(long, value_name = "N", default_value = "1", hide_default_value = true, value_parser = parse_shards)]
    pub shards: u32,
    /// Allocate the space of the whole volume now, so that no later write fails with no space left. Deallocated blocks
    /// then keep their space. [default: space is allocated as blocks are written, and freed when they are discarded]
    #[arg(long)]
    pub preallocate: bool,
    /// Overwrite an existing volume or file, or a file system or partition table on a block device.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `info`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock info v --json")]
pub struct Info {
    /// The target to show.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// How labels are used.
    #[command(flatten)]
    pub labels: Labels,
}

/// Arguments of `verify`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock verify v --range 0..9999 --rate 100MiB/s --json\n  sealblock verify a b /dev/sdX\n\n\
    The exit status is 1 if blocks are damaged; standard output lists them. It is 4 if no damage was found but not every copy of every \
    block could be checked, because a copy is offline or out of sync, or because blocks that an earlier run with --resume checked may have been \
    written since. Only blocks that were checked against seals are called clean.\n\n\
    For several targets the exit status is the worst one, in the order 1, 3, 2, 4, 0. Damage comes first because it may get worse. A \
    target that could not be verified is reported on standard error. With --json each target has an object on its own line, printed when its \
    check ends; a target that could not be verified has only `target` and `error`.\n\n\
    Damaged blocks are listed as they are found. Ctrl-C stops the command, which then prints the --range to resume with."
)]
pub struct Verify {
    /// Targets to check. Targets on different devices are checked in parallel.
    #[arg(value_name = "TARGET", required = true)]
    pub targets: Vec<TargetName>,
    /// Range to check of each target. [default: all blocks]
    #[arg(long, value_name = "FIRST..LAST")]
    pub range: Option<BlockRange>,
    /// Where to check: on the device, in this process, or wherever less data is transferred.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Mode::Auto)]
    pub mode: Mode,
    /// Rewrite a damaged block from another copy, where the target has one.
    #[arg(long)]
    pub repair: bool,
    /// For a mirror: accept the older copies on this replica of blocks that every other replica has lost.
    /// Only for a single target.
    #[arg(long, value_name = "REPLICA", requires = "repair")]
    pub accept_stale: Option<TargetName>,
    /// Clear the record that completed, unflushed writes may be lost: servers stop notifying hosts of it. Only for volumes of
    /// this machine.
    #[arg(long, requires = "repair")]
    pub accept_lost: bool,
    /// Save progress in FILE and resume from it. Only for a single target. Volumes and files show whether they were written
    /// since; after a resumed verify of other targets the exit status is 4, and NBD exports are verified from the start.
    #[arg(long, value_name = "FILE", conflicts_with = "accept_stale")]
    pub resume: Option<PathBuf>,
    /// Maximum rate. [default: unlimited]
    #[arg(long, value_name = "SIZE/s")]
    pub rate: Option<Rate>,
    /// Pause while other processes use the underlying devices, but check at least 4 MiB/s. Only for targets on local
    /// devices.
    #[arg(long)]
    pub idle: bool,
    /// Print one JSON object for each target.
    #[arg(long)]
    pub json: bool,
    /// Print nothing if no damage is found, and show no progress.
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,
    /// How labels are used.
    #[command(flatten)]
    pub labels: Labels,
}

/// Arguments of `compare`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock compare v nbd://localhost/v\n  sealblock compare v w --range 1000..1999\n  sealblock compare --zero v\n\n\
    Blocks that cannot be read are listed like those that differ, and the exit status is 1; the others are compared.\n\n\
    Ctrl-C stops the command, which then prints the --range to resume with."
)]
pub struct Compare {
    /// The first target.
    #[arg(value_name = "TARGET_A", required_unless_present = "zero")]
    pub a: Option<TargetName>,
    /// The second target.
    #[arg(value_name = "TARGET_B", required_unless_present = "zero")]
    pub b: Option<TargetName>,
    /// Compare this target with zeroes instead.
    #[arg(long, value_name = "TARGET", conflicts_with_all = ["a", "b"])]
    pub zero: Option<TargetName>,
    /// Range to compare, in blocks of the larger block size. With a LAST block, different capacities are no difference.
    /// [default: all blocks that both targets have]
    #[arg(long, value_name = "FIRST..LAST")]
    pub range: Option<BlockRange>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// How labels are used.
    #[command(flatten)]
    pub labels: Labels,
}

/// What `compare` holds against each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Comparison<'a> {
    /// Two targets.
    Pair(&'a TargetName, &'a TargetName),
    /// A target and zeroes.
    Zeroes(&'a TargetName),
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

/// Which blocks lose what they hold.
#[derive(Args, Debug)]
pub struct Unmapping {
    /// Range of blocks. Erasing all blocks needs confirmation, on a terminal or by --yes. [default: all blocks]
    #[arg(long, value_name = "FIRST..LAST")]
    pub range: Option<BlockRange>,
    /// Erase the whole target without asking. Required without a terminal.
    #[arg(long)]
    pub yes: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `zero`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock zero v --range 100..199\n  sealblock zero v --yes")]
pub struct Zero {
    /// The target to change.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// Which of its blocks.
    #[command(flatten)]
    pub how: Unmapping,
    /// Keep the space of the blocks allocated.
    #[arg(long)]
    pub no_unmap: bool,
    /// How labels are used.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether a single member may be written.
    #[command(flatten)]
    pub members: Members,
}

/// Arguments of `discard`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock discard v --range 200..\n  sealblock discard v --yes")]
pub struct Discard {
    /// The target to change.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// Which of its blocks.
    #[command(flatten)]
    pub how: Unmapping,
    /// How labels are used.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether a single member may be written.
    #[command(flatten)]
    pub members: Members,
}

const COPY_HELP: &str = "\
Examples:
  sealblock copy photos.tar v
  sealblock copy v - | sha256sum
  sealblock copy v /dev/null           # reads everything, writes nothing

FROM and TO may be plain files of any length. A destination file is created, truncated or extended to the length of the
data, and has holes for zeroes. A volume or another device keeps its size, and its content after the data.

With --salvage, blocks that cannot be read are never written as data. In TO they become unreadable where TO supports that, as
a protected volume does; a plain file, standard output and local devices without seals get zeroes; any other device keeps its
old content in these blocks. They are listed on standard error, and the exit status is 1. Where blocks of TO are larger, a
lost block makes its whole block of TO lost.";

/// Arguments of `copy`.
#[derive(Args, Debug)]
#[command(after_help = COPY_HELP)]
pub struct Copy {
    /// The source; - is standard input.
    #[arg(value_name = "FROM")]
    pub from: Endpoint,
    /// The destination; - is standard output.
    #[arg(value_name = "TO")]
    pub to: Endpoint,
    /// Skip blocks that cannot be read, list them, and copy the others.
    #[arg(long)]
    pub salvage: bool,
    /// Overwrite the remains of a damaged volume, a file system or partition table on a device, or a plain file of
    /// another format than the data.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// How labels are used.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether a single member may be written.
    #[command(flatten)]
    pub members: Members,
}

const RESCUE_HELP: &str = "\
Examples:
  sealblock rescue v saved.img
  sealblock rescue v new.volume --json
  sealblock rescue /dev/sdX saved.img --capacity 100GiB

VOLUME is never written. One of the three copies of its superblock is enough. Where none is left, the layout of the volume is
determined from its records and the length of the medium; if the volume does not fill the medium, give its size by --capacity.

Lost blocks become unreadable in a TO that supports that, such as a protected volume. A plain file, standard output and local
devices without seals get zeroes; any other device keeps its old content in these blocks.

The exit status is 1 if blocks are lost or no superblock was left; standard output lists them.";

/// Arguments of `resize`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock resize v --size 2GiB\n\n\
    A served volume is resized by its server while clients use it: requests wait for a moment. NVMe hosts are notified and see the \
    new size; NBD clients see it when they reconnect. A volume can shrink only if its last blocks hold no data: shrink the file \
    system first, then use `sealblock discard`. Members of mirrors and stripes cannot be resized.")]
pub struct Resize {
    /// The volume: its path, or if it is served, the NQN of its subsystem (and /NSID) or a nvme+tcp:// URI of this machine.
    #[arg(value_name = "VOLUME")]
    pub target: ServedName,
    /// New capacity of the volume in bytes: a multiple of the block size.
    #[arg(long, value_name = "SIZE")]
    pub size: ByteCount,
    /// Control socket of the server. [default: the sockets of this user's servers]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `rescue`.
#[derive(Args, Debug)]
#[command(after_help = RESCUE_HELP)]
pub struct Rescue {
    /// The damaged volume.
    #[arg(value_name = "VOLUME")]
    pub volume: Volume,
    /// The destination; a path that does not exist becomes a plain file; - is standard output.
    #[arg(value_name = "TO")]
    pub to: Endpoint,
    /// Capacity of a volume without a superblock, as given to `create --size`. [default: determined from the medium]
    #[arg(long, value_name = "SIZE")]
    pub capacity: Option<ByteCount>,
    /// Block size in bytes of a volume without a superblock. [default: determined from its records]
    #[arg(long, value_name = "512|4096", value_parser = values::block_size)]
    pub block_size: Option<BlockSize>,
    /// Rescue the volume with this UUID, where the medium has records of several volumes.
    #[arg(long, value_name = "UUID", value_parser = values::uuid)]
    pub identity: Option<[u8; 16]>,
    /// Overwrite the remains of another damaged volume, a file system or partition table on a device, or a plain file
    /// of another format than the data.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Whether a single member may be written.
    #[command(flatten)]
    pub members: Members,
}

/// Arguments of `corrupt`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock corrupt v --lba 7 --kind data")]
pub struct Corrupt {
    /// The volume to damage.
    #[arg(value_name = "VOLUME")]
    pub volume: Volume,
    /// The block, counted from 0.
    #[arg(long, value_name = "N", value_parser = values::lba)]
    pub lba: Lba,
    /// The kind of damage.
    #[arg(long, value_name = "KIND", value_parser = one_of(CORRUPTIONS))]
    pub kind: CorruptionKind,
}

/// Arguments of `demo`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock demo --dir /tmp/sealblock-demo")]
pub struct Demo {
    /// The directory for the volume; created if missing.
    #[arg(long, value_name = "DIR", default_value = "sealblock-data")]
    pub dir: PathBuf,
}

/// Arguments of `completions`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock completions bash > ~/.local/share/bash-completion/completions/sealblock\n  sealblock completions fish > ~/.config/fish/completions/sealblock.fish\n\nCompletes commands, options, files, kinds of targets, and the names of what servers of this machine serve."
)]
pub struct Completions {
    /// The shell.
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: Shell,
}

/// Arguments of `complete`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock complete bash sealblock")]
pub struct Complete {
    /// The shell.
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: Shell,
    /// The command line up to the cursor.
    #[arg(value_name = "LINE", allow_hyphen_values = true)]
    pub line: String,
    /// Characters that part words in this shell, besides spaces.
    #[arg(value_name = "BREAKS", allow_hyphen_values = true)]
    pub breaks: Option<String>,
}

/// Arguments of `man`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock man ~/.local/share/man/man1")]
pub struct Man {
    /// The directory; created if missing.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

#[cfg(test)]
mod tests;
