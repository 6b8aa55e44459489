//! The command line: every command, option and help text.
//!
//! Only what is parsed lives here. A value that can be wrong is parsed into its own type, so that bad usage ends with exit
//! status 2 before anything is opened. The doc comments of commands and options are their help.

mod attach;
mod bench;
mod fs;
mod mirror;
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
pub use fs::{Fs, FsCat, FsCommand, FsGet, FsInfo, FsLs, FsMount, FsRescue, FsTree, FsVerify};
pub use mirror::{
    Mirror, MirrorAcceptStale, MirrorAdd, MirrorCommand, MirrorCreate, MirrorRemove, MirrorReplace, MirrorStatus,
};
pub use scrub::{Scrub, ScrubCommand, ScrubStart, ScrubStatus, Scrubbed, ServedName};
pub use serve::{Discover, Serve};
pub use status::{Log, ServerName, Status};
pub use values::{Endpoint, Guard, Labels, Members, Mode, RemoteServer, Volume};

use values::{CORRUPTIONS, GUARDS, PROTECTION_TYPES, one_of};

const EXIT_STATUS: &str = "\
Exit status:
  0  clean
  1  the command worked and found damage or a difference
  2  bad usage
  3  the work could not be done
  4  nothing bad was found, but not everything could be checked, or a copy is missing or out of sync
  130, 143  ended by Ctrl-C (SIGINT) or SIGTERM: it has said what was found or done until then, and where to go on

Targets:
  PATH, file:PATH                     a protected volume, or a block device; for copy and compare also a plain file
  raw:PATH                            a plain file's bytes as blocks, without seals
  mem:SIZE, null:SIZE                 memory; a device that stores nothing
  offset:FIRST..LAST,TARGET           a slice of another target
  fault:[RULES],TARGET                another target that fails on purpose
  mirror:A,B stripe:A,B multipath:A,B one device made of others; stripe-16KiB:A,B for chunks of another size,
                                      stripe-nolabel:A,B for members without labels
  mirror:[stripe:A,B],C               brackets nest
  nvme+tcp://HOST[:PORT]/NQN[/NSID]   a namespace over NVMe/TCP; ?hdgst&ddgst&pract=1&queues=4&depth=64&hostnqn=NQN,
                                      ?timeout=5s&keepalive=5s&reconnect=0s&attempts=3
  nbd://HOST[:PORT]/EXPORT            a network block device; ?connections=4
  nbd+unix:///EXPORT?socket=PATH      the same on a Unix socket of this machine; &connections=4
  /dev/nvmeXnY /dev/ngXnY /dev/sdX    a drive of this machine, which verifies by itself if it can

Sizes are 4096, 4KiB, 1GiB, 1.5GiB or 1GB: KiB, MiB, GiB, TiB, PiB and EiB are powers of 1024, KB to EB powers of 1000.
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

impl Cli {
    /// The command, with options that say of targets what their names could say as well put into the names.
    pub fn settled(mut self) -> Command {
        match &mut self.command {
            Command::Info(info) => info.labels.settle(&mut info.target),
            Command::Verify(verify) => verify.targets.iter_mut().for_each(|target| verify.labels.settle(target)),
            Command::Zero(zero) => zero.labels.settle(&mut zero.target),
            Command::Discard(discard) => discard.labels.settle(&mut discard.target),
            Command::Attach(attach) => attach.labels.settle(&mut attach.target),
            Command::Serve(serve) => serve.targets.iter_mut().for_each(|target| serve.labels.settle(target)),
            Command::Compare(compare) => {
                let targets = [&mut compare.a, &mut compare.b, &mut compare.zero];
                targets.into_iter().flatten().for_each(|target| compare.labels.settle(target));
            }
            Command::Copy(copy) => {
                for end in [&mut copy.from, &mut copy.to] {
                    if let Endpoint::Target(target) = end {
                        copy.labels.settle(target);
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
    /// Make a protected volume in a file or on a block device.
    Create(Create),
    /// Say what a target is: size, block size, protection, and what its device can do.
    Info(Info),
    /// Export targets over NVMe/TCP, for any NVMe/TCP host.
    Serve(Serve),
    /// Make a target a block device of this machine's kernel, /dev/ublkbN.
    Attach(Attach),
    /// Take such a block device away again.
    Detach(Detach),
    /// Say how servers are: what is served to whom, what is damaged or degraded, scrubs, and what failed last.
    Status(Status),
    /// Say how much a server logs, and change it while it runs.
    Log(Log),
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
    /// Copy what still verifies out of a damaged volume, and list the rest.
    Rescue(Rescue),
    /// Give a protected volume another size, while it is served as well.
    Resize(Resize),
    /// Show the replicas of a mirror; add, remove or replace one.
    Mirror(Mirror),
    /// Look into a Btrfs filesystem, wherever it lies, and take files out of it: no kernel mounts it, and nothing of it changes.
    Fs(Fs),
    /// Damage one block of a volume on purpose, behind its seal's back.
    Corrupt(Corrupt),
    /// Show the main job: make a volume, fill it, verify it, damage it, find the damage.
    Demo(Demo),
    /// Measure on this machine what others claim of such storage, and say of each claim whether it holds here.
    Bench(Bench),
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
    #[arg(long, value_name = "GUARD", default_value = "crc32c", value_parser = one_of(GUARDS))]
    pub guard: Guard,
    /// What the reference tag means: 1, the block's address; 2, the address from a start that each command gives; 3,
    /// nothing that is checked.
    #[arg(long = "type", value_name = "TYPE", default_value = "1", value_parser = one_of(PROTECTION_TYPES))]
    pub protection_type: ProtectionType,
    /// Take the space of the whole volume at once, so that no write fails for lack of it later. Blocks that are deallocated
    /// then keep their space. Without this a file takes space as it is written, and gives it back.
    #[arg(long)]
    pub preallocate: bool,
    /// Overwrite a volume, a file, or a file system or partition table on a block device that is already there.
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
    /// What to look at.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// How its label is heeded.
    #[command(flatten)]
    pub labels: Labels,
}

/// Arguments of `verify`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock verify v --range 0..9999 --rate 100MiB/s --json\n  sealblock verify a b /dev/sdX\n\n\
    Exit status 1 says that blocks are damaged; standard output names them. Exit status 4 says that nothing bad was found, but that not \
    every copy of every block could be checked: one is away or out of sync. Only what was checked against seals is called clean.\n\n\
    Of several targets the exit status is the worst: 1 before 3 before 2 before 4 before 0. Damage comes first, since it is known and may get \
    worse; a target that could not be verified is named on standard error. With --json each target has an object on a line of its own, when it \
    has ended; that of a target that could not be verified has only `target` and `error`.\n\n\
    Damaged blocks are named while it works. Ctrl-C ends it and says where to go on: --range, from the first block that was not checked."
)]
pub struct Verify {
    /// What to check. Several targets are checked side by side where they lie on different devices.
    #[arg(value_name = "TARGET", required = true)]
    pub targets: Vec<TargetName>,
    /// Which blocks of each target; all of them unless given.
    #[arg(long, value_name = "FIRST..LAST")]
    pub range: Option<BlockRange>,
    /// Who checks: the device, this process, or whichever moves less data.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Mode::Auto)]
    pub mode: Mode,
    /// Rewrite a damaged block from another copy, where the target has one.
    #[arg(long)]
    pub repair: bool,
    /// Of a mirror: accept the older copies on this replica of blocks that every other replica has lost.
    /// Only with one target.
    #[arg(long, value_name = "REPLICA", requires = "repair")]
    pub accept_stale: Option<TargetName>,
    /// Forget that writes which were answered and not flushed may be lost: no server tells its hosts of it any more.
    #[arg(long, requires = "repair")]
    pub accept_lost: bool,
    /// Go on by this file where an earlier run ended, and save in it how far this one is. Only with one target.
    #[arg(long, value_name = "FILE", conflicts_with = "accept_stale")]
    pub resume: Option<PathBuf>,
    /// Check no faster than this.
    #[arg(long, value_name = "SIZE/s")]
    pub rate: Option<Rate>,
    /// Wait while others use the devices that the target lies on; at least 4 MiB/s are checked all the same. Only of targets on devices of
    /// this machine.
    #[arg(long)]
    pub idle: bool,
    /// Print one JSON object for each target.
    #[arg(long)]
    pub json: bool,
    /// Print nothing when all is clean, and show no progress.
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,
    /// How its label is heeded.
    #[command(flatten)]
    pub labels: Labels,
}

/// Arguments of `compare`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock compare v nbd://localhost/v\n  sealblock compare v w --range 1000..1999\n  sealblock compare --zero v\n\n\
    Blocks that cannot be read are named like those that differ, and the others are compared; exit status 1 says that there are some.\n\n\
    Ctrl-C ends it and says where to go on: --range, from the first block that was not compared."
)]
pub struct Compare {
    /// The one target.
    #[arg(value_name = "TARGET_A", required_unless_present = "zero")]
    pub a: Option<TargetName>,
    /// The other target.
    #[arg(value_name = "TARGET_B", required_unless_present = "zero")]
    pub b: Option<TargetName>,
    /// Compare this target with zeroes instead.
    #[arg(long, value_name = "TARGET", conflicts_with_all = ["a", "b"])]
    pub zero: Option<TargetName>,
    /// Which blocks, in blocks of the larger size; all that both have unless given. Up to a last one, other sizes are no difference.
    #[arg(long, value_name = "FIRST..LAST")]
    pub range: Option<BlockRange>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// How its label is heeded.
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
    /// Which blocks [default: all of them]. All blocks have to be confirmed, however they are given: on a terminal, or by --yes.
    #[arg(long, value_name = "FIRST..LAST")]
    pub range: Option<BlockRange>,
    /// Do not ask before the whole target loses what it holds. Needed without a terminal.
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
    /// Where.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// Which of its blocks.
    #[command(flatten)]
    pub how: Unmapping,
    /// Keep the space of the blocks instead of giving it back.
    #[arg(long)]
    pub no_unmap: bool,
    /// How its label is heeded.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether a member is written to by itself.
    #[command(flatten)]
    pub members: Members,
}

/// Arguments of `discard`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock discard v --range 200..\n  sealblock discard v --yes")]
pub struct Discard {
    /// Where.
    #[arg(value_name = "TARGET")]
    pub target: TargetName,
    /// Which of its blocks.
    #[command(flatten)]
    pub how: Unmapping,
    /// How its label is heeded.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether a member is written to by itself.
    #[command(flatten)]
    pub members: Members,
}

const COPY_HELP: &str = "\
Examples:
  sealblock copy photos.tar v
  sealblock copy v - | sha256sum

FROM and TO may be plain files, to the last byte: a file that is written to is made, cut or grown to the length of what is
copied, and has holes where that is zeroes. A volume or another device keeps its size, and what it has behind the data.

With --salvage what cannot be read is never written as if it were data. In TO such blocks are unreadable too where TO can say so, as
a protected volume can; a plain file, standard output and devices of this machine without seals have zeroes there; any other
device keeps what it had in these blocks. Exit status 1 says that there are some; they are named on standard error. Where blocks
of TO are larger, what shares one with a block that is lost is lost too.";

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
    /// Go on past blocks that cannot be read, name them, and copy the others.
    #[arg(long)]
    pub salvage: bool,
    /// Overwrite what is left of a damaged volume, a file system or partition table on a device, or a plain file of another format than the
    /// data.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// How its label is heeded.
    #[command(flatten)]
    pub labels: Labels,
    /// Whether a member is written to by itself.
    #[command(flatten)]
    pub members: Members,
}

const RESCUE_HELP: &str = "\
Examples:
  sealblock rescue v saved.img
  sealblock rescue v new.volume --json
  sealblock rescue /dev/sdX saved.img --capacity 100GiB

VOLUME is only read. Any of the three copies of its superblock will do. Where none is left, the shape of the volume is found
from its records and the length of the medium; where it does not fill the medium, --capacity says how large it was.
Blocks that are lost are unreadable in a TO that can say so, such as a protected volume. A plain file, standard output and devices
of this machine without seals have zeroes there; any other device keeps what it had in these blocks.
Exit status 1 says that some are, or that no superblock was left; standard output names them.";

/// Arguments of `resize`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock resize v --size 2GiB\n\n\
    A server that serves the volume changes its size under load: requests wait for a moment, NVMe hosts are told and see the new \
    size by themselves, NBD clients when they connect again. A volume becomes smaller only where its last blocks hold no data; \
    use a smaller file system first, and `sealblock discard`. Members of mirrors and stripes keep their size.")]
pub struct Resize {
    /// The volume, by its path, or by what it is served as: the NQN of its subsystem (and /NSID), or a nvme+tcp:// URI of this
    /// machine.
    #[arg(value_name = "VOLUME")]
    pub target: ServedName,
    /// Bytes of data that the volume is to hold: a multiple of the block size.
    #[arg(long, value_name = "SIZE")]
    pub size: ByteCount,
    /// The control socket of the server; those of this user's servers are found without it.
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
    /// Where to; a path where nothing is becomes a plain file; - is standard output.
    #[arg(value_name = "TO")]
    pub to: Endpoint,
    /// The size at creation (`create --size`) of a volume without a superblock, if the length of the medium does not show it.
    #[arg(long, value_name = "SIZE")]
    pub capacity: Option<ByteCount>,
    /// Bytes of data in a block of a volume without a superblock.
    #[arg(long, value_name = "512|4096", value_parser = values::block_size)]
    pub block_size: Option<BlockSize>,
    /// Take it for this volume, where records of several lie there and whose it is cannot be told.
    #[arg(long, value_name = "UUID", value_parser = values::uuid)]
    pub identity: Option<[u8; 16]>,
    /// Overwrite what is left of another damaged volume, a file system or partition table on a device, or a plain file of another
    /// format than the data.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Whether a member is written to by itself.
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
    /// Which block, counted from 0.
    #[arg(long, value_name = "N", value_parser = values::lba)]
    pub lba: Lba,
    /// What to damage.
    #[arg(long, value_name = "KIND", value_parser = one_of(CORRUPTIONS))]
    pub kind: CorruptionKind,
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
