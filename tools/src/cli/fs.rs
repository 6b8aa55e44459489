//! The command line of `fs`: Btrfs filesystems, and places in them.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use sealblock_stack::filesystem::FilesystemName;
use sealblock_stack::quantity::Rate;

use super::Mode;

const NAMES: &str = "\
Examples:
  sealblock fs ls -lR disk.img
  sealblock fs verify /dev/sdb+/dev/sdc

A FILESYSTEM is a target, or several joined by + where it has several devices. Behind it a path may follow, which begins at the
default subvolume; behind a colon it begins at the first subvolume, and behind a colon and a number at the subvolume that has it:
  disk.img                          the default subvolume of the filesystem in a file
  disk.img/etc/fstab                a file in it
  disk.img:home/alice               a path from the first subvolume on, in which the others lie
  disk.img:257/alice                a path from subvolume 257 on
  /dev/sdb+/dev/sdc                 a filesystem of two devices
  nvme+tcp://HOST/NQN/1/etc/fstab   a file in a filesystem on another machine
  [nvme+tcp://HOST/NQN]:home        brackets, where a name has colons or signs of its own";

/// Arguments of `fs`.
#[derive(Args, Debug)]
#[command(after_help = NAMES, arg_required_else_help = true)]
pub struct Fs {
    /// What to do with it.
    #[command(subcommand)]
    pub command: FsCommand,
}

/// The commands of `fs`.
#[derive(Debug, Subcommand)]
pub enum FsCommand {
    /// Say what a filesystem is: its devices, features, space and subvolumes.
    Info(FsInfo),
    /// List a directory.
    Ls(FsLs),
    /// Write what files hold to standard output.
    Cat(FsCat),
    /// Copy a file or a directory with all below it out of the filesystem.
    Get(FsGet),
    /// Check every copy of a filesystem, or of a file in it, and name what is damaged.
    #[command(visible_alias = "scrub")]
    Verify(FsVerify),
    /// Copy out what is good of a damaged filesystem, and list the rest.
    Rescue(FsRescue),
    /// Mount it on a directory of this machine, for reading.
    Mount(FsMount),
    /// Print the nodes and items of its trees.
    Tree(FsTree),
}

/// Reads the name of a filesystem.
fn filesystem() -> impl TypedValueParser<Value = FilesystemName> {
    OsStringValueParser::new().try_map(|text: OsString| FilesystemName::parse(&text))
}

/// Arguments of `fs info`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock fs info disk.img --json")]
pub struct FsInfo {
    /// The filesystem.
    #[arg(value_name = "FILESYSTEM", value_parser = filesystem())]
    pub filesystem: FilesystemName,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs ls`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock fs ls disk.img/etc\n  sealblock fs ls -lR disk.img:home\n  sealblock fs ls -R disk.img --json\n\n\
    What is lost is named on standard error, the rest is listed; exit status 1 says that there is some."
)]
pub struct FsLs {
    /// The directory, or a file.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub place: FilesystemName,
    /// Kind and permissions, links, owner, group, size and time, too.
    #[arg(long, short)]
    pub long: bool,
    /// All that lies below it, too.
    #[arg(long, short = 'R')]
    pub recursive: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs cat`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock fs cat disk.img/etc/fstab\n\n\
    Every sector is checked before it is written; where no copy of one is good, the output ends before it.")]
pub struct FsCat {
    /// The files.
    #[arg(value_name = "FILESYSTEM/PATH", required = true, value_parser = filesystem())]
    pub files: Vec<FilesystemName>,
}

/// Arguments of `fs get`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock fs get disk.img/etc ./etc\n  sealblock fs get disk.img:home/alice/thesis.tex .\n\n\
    Modes, times and links are those of the filesystem; owners, attributes and device nodes where this user may set them. Files that are lost or damaged are \
    named and left out, and exit status 1 says that there are some; `fs rescue` keeps what is good of them."
)]
pub struct FsGet {
    /// The file or directory.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub place: FilesystemName,
    /// Where to: a name that is not there yet, or a directory in which the copy gets the name that it has.
    #[arg(value_name = "TO")]
    pub to: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs verify`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock fs verify disk.img\n  sealblock fs verify /dev/sdb+/dev/sdc --rate 100MiB/s\n  sealblock fs verify disk.img/etc/fstab --json\n  sealblock fs verify disk.img:home/alice\n\n\
    Every copy of superblocks, nodes and data, and parity, is checked against checksums; data without checksums against the seals of the device. Devices that \
    can compare data with their checksums do, and then only metadata cross. Nothing is written.\n\n\
    Exit status 1 says that something is damaged, 4 that nothing is, but not everything could be checked: a device is missing, or data have neither checksums nor seals."
)]
pub struct FsVerify {
    /// The filesystem, a file in it, or a directory with all that lies below it.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub place: FilesystemName,
    /// Who checks data: the devices, this process, or whichever moves less data.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Mode::Auto)]
    pub mode: Mode,
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

/// Arguments of `fs rescue`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock fs rescue disk.img ./saved\n  sealblock fs rescue disk.img ./saved --backup-root 1\n\n\
    Files keep every sector of which a copy is good; those that are lost are holes there, and are named. Data whose checksums are lost are kept, and named \
    as unverified. Where the newest roots are lost it begins from the newest that can be read (`sealblock fs info` lists them). What no directory leads to any more is in \
    lost+found, by its number. Exit status 1 says that something is lost; standard output names it."
)]
pub struct FsRescue {
    /// The filesystem, or a directory in it.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub place: FilesystemName,
    /// Where to: a directory that is empty or not there yet.
    #[arg(value_name = "TO")]
    pub to: PathBuf,
    /// Begin from these roots of the superblock, and no others: 0 is the newest of its backups, 3 the oldest.
    /// [default: the newest roots that can be read]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(0..4))]
    pub backup_root: Option<u8>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs mount`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock fs mount disk.img /mnt\n\n\
    Serves the mount through FUSE until it is unmounted, or Ctrl-C or SIGTERM comes; then nothing stays mounted. Every sector is checked before a program gets it; one of which no \
    copy is good is an input/output error. A user who is not root needs fusermount3.")]
pub struct FsMount {
    /// The filesystem, or a directory in it.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub place: FilesystemName,
    /// The directory that it is mounted on.
    #[arg(value_name = "DIRECTORY")]
    pub point: PathBuf,
    /// Let other users use the mount, too, as far as permissions allow.
    #[arg(long)]
    pub allow_other: bool,
}

/// Arguments of `fs tree`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock fs tree disk.img --tree 5\n\n\
    Each node has a line, and each item in it. What cannot be read is named on standard error; exit status 1 says that there is some.")]
pub struct FsTree {
    /// The filesystem.
    #[arg(value_name = "FILESYSTEM", value_parser = filesystem())]
    pub filesystem: FilesystemName,
    /// Only the tree with this number: 1 is the tree of trees, 2 that of extents, 3 that of chunks, 5 the first subvolume, 7 that of checksums.
    #[arg(long, value_name = "NUMBER")]
    pub tree: Option<u64>,
}
