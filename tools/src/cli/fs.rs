//! The command line of `fs`: Btrfs filesystems, and places in them.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use sealblock_stack::filesystem::FilesystemName;
use sealblock_stack::quantity::Rate;

use super::mount_options::MountOptions;
use super::values::filesystem;
use super::{
    FsBench, FsChmod, FsChown, FsDatasum, FsFallocate, FsFormat, FsLn, FsMkdir, FsMv, FsPut, FsRm, FsRmdir, FsSnapshot,
    FsSubvolume, Mode,
};

const NAMES: &str = "\
Examples:
  sealblock fs ls -lR disk.img
  sealblock fs verify /dev/sdb+/dev/sdc

A FILESYSTEM is a target, or several joined by + for a filesystem of several devices. A path may follow. It starts at the default
subvolume; after a colon it starts at the top-level subvolume, and after a colon and a number at the subvolume with that ID:
  disk.img                          the default subvolume of the filesystem in a file
  disk.img/etc/fstab                a file in it
  disk.img:home/alice               a path from the top-level subvolume, which contains the others
  disk.img:257/alice                a path from subvolume 257
  /dev/sdb+/dev/sdc                 a filesystem of two devices
  nvme+tcp://HOST/NQN/1/etc/fstab   a file in a filesystem on another machine
  [nvme+tcp://HOST/NQN]:home        brackets, for a target name that has colons or plus signs";

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
    /// Make a new filesystem, as `mkfs.btrfs` does. Everything on the targets is lost.
    Format(FsFormat),
    /// Show the devices, features, space and subvolumes of a filesystem.
    Info(FsInfo),
    /// List a directory.
    Ls(FsLs),
    /// Print files to standard output.
    Cat(FsCat),
    /// Copy a file or a directory tree out of the filesystem.
    Get(FsGet),
    /// Check every copy of the blocks of a filesystem or of a file, and list the damage.
    #[command(visible_alias = "scrub")]
    Verify(FsVerify),
    /// Check that the trees of a filesystem agree with each other, as `btrfs check` does.
    Check(FsCheck),
    /// Copy the good files and sectors out of a damaged filesystem, and list the lost ones.
    Rescue(FsRescue),
    /// Mount it on a local directory, read-only or for changes.
    Mount(FsMount),
    /// Print the nodes and items of the filesystem's trees.
    Tree(FsTree),
    /// Copy files and directory trees into the filesystem.
    Put(FsPut),
    /// Make directories.
    Mkdir(FsMkdir),
    /// Remove files and directory trees.
    Rm(FsRm),
    /// Remove empty directories.
    Rmdir(FsRmdir),
    /// Rename or move a file, a directory or a subvolume.
    Mv(FsMv),
    /// Make a hard or symbolic link.
    Ln(FsLn),
    /// Set the permissions of files.
    Chmod(FsChmod),
    /// Set the owners of files.
    Chown(FsChown),
    /// Set where the checksums of data are kept: in the tree of checksums, or by the devices.
    Datasum(FsDatasum),
    /// Allocate space for a file in advance, or make a hole in it.
    Fallocate(FsFallocate),
    /// Make a snapshot of a subvolume.
    Snapshot(FsSnapshot),
    /// Create, delete or list subvolumes.
    Subvolume(FsSubvolume),
    /// Measure what it costs to keep the checksums of data in the tree, with the device, or nowhere.
    Bench(FsBench),
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
    Lost entries are reported on standard error, and the exit status is 1; the others are listed."
)]
pub struct FsLs {
    /// The directory, or a file.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub place: FilesystemName,
    /// Also show type and permissions, links, owner, group, size and time.
    #[arg(long, short)]
    pub long: bool,
    /// List subdirectories recursively.
    #[arg(long, short = 'R')]
    pub recursive: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs cat`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock fs cat disk.img/etc/fstab\n\n\
    Every sector is checked before it is written. The output ends before the first sector of which no copy is good.")]
pub struct FsCat {
    /// The files.
    #[arg(value_name = "FILESYSTEM/PATH", required = true, value_parser = filesystem())]
    pub files: Vec<FilesystemName>,
}

/// Arguments of `fs get`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock fs get disk.img/etc ./etc\n  sealblock fs get disk.img:home/alice/thesis.tex .\n\n\
    Modes, times and links are preserved; owners, attributes and device nodes are preserved where this user may set them. Lost or \
    damaged files are reported and left out, and the exit status is 1; `fs rescue` copies the good parts of them."
)]
pub struct FsGet {
    /// The file or directory.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub place: FilesystemName,
    /// The destination: a new path, or an existing directory in which the copy keeps its name.
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
    Every copy of superblocks, nodes and data, and parity, is checked against checksums. Data without checksums are checked against the \
    seals of the device, and their tags against the file. Devices that support it compare data with checksums themselves; then only metadata are transferred. Nothing is written without \
    --repair, --reseal or --forget-tags.\n\n\
    The exit status is 1 if damage was found, and 4 if none was found but not everything could be checked: a device is missing, or data have \
    neither checksums nor seals, or seals and no tag that shows that they were written last."
)]
pub struct FsVerify {
    /// The filesystem, or a file or directory tree in it.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub place: FilesystemName,
    /// Where to check data: on the devices, in this process, or wherever less data is transferred.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Mode::Auto)]
    pub mode: Mode,
    /// Maximum rate. [default: unlimited]
    #[arg(long, value_name = "SIZE/s")]
    pub rate: Option<Rate>,
    /// Before that, write damaged copies of nodes and data anew, from copies that are good.
    #[arg(long)]
    pub repair: bool,
    /// Before that, give unattested data the tags that they lack: they are what they should be.
    #[arg(long, conflicts_with = "forget_tags")]
    pub reseal: bool,
    /// Before that, forget which data have tags, so that none are demanded: they were lost in a copy.
    #[arg(long)]
    pub forget_tags: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Print nothing if no damage is found, and show no progress.
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,
}

/// Arguments of `fs check`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs check disk.img\n  sealblock fs check /dev/sdb+/dev/sdc --json\n\n\
    Checks references, extents, block groups, free space, device extents, checksum ranges, inodes, directories, links and subvolumes \
    against each other. One good copy of each node is read, and no data; `fs verify` checks every copy and the data. Nothing is written.\n\n\
    The exit status is 1 if an inconsistency was found, and 4 if none was found but not everything could be checked: nodes are lost, a \
    device is missing, there is a log tree, or a limit on memory is exceeded.")]
pub struct FsCheck {
    /// The filesystem.
    #[arg(value_name = "FILESYSTEM", value_parser = filesystem())]
    pub filesystem: FilesystemName,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Print nothing if the filesystem is clean, and show no progress.
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,
}

/// Arguments of `fs rescue`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock fs rescue disk.img ./saved\n  sealblock fs rescue disk.img ./saved --backup-root 1\n\n\
    Files keep every sector of which a copy is good; lost sectors become holes and are reported. Data whose checksums are lost are kept, and \
    reported as unverified. If the newest roots are lost, the newest readable ones are used (`sealblock fs info` lists them). Files that no \
    directory refers to are in lost+found, named by inode number. The exit status is 1 if anything is lost; standard output lists it."
)]
pub struct FsRescue {
    /// The filesystem, or a directory in it.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub place: FilesystemName,
    /// The destination: a new or empty directory.
    #[arg(value_name = "TO")]
    pub to: PathBuf,
    /// Use only these backup roots of the superblock: 0 is the newest, 3 the oldest.
    /// [default: the newest roots that can be read]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(0..4))]
    pub backup_root: Option<u8>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs mount`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs mount disk.img /mnt\n  sealblock fs mount -o rw disk.img /mnt\n\n\
    The command serves the mount through FUSE until it is unmounted, or until Ctrl-C or SIGTERM, which unmount it. Every sector is checked before it is \
    returned; a sector of which no copy is good is an input/output error. A user who is not root needs fusermount3.\n\n\
    Options, separated by commas:\n  \
    ro              read-only [default]\n  \
    rw              for changes. When the command ends, all of them are durable; its exit status is 3 if they are not\n  \
    commit=SECONDS  make changes durable at this interval, 1 to 300 [default: 5]\n  \
    discard         tell the devices what becomes free\n  \
    zero_range=written  in files without copy-on-write, zeroes of fallocate count as written\n  \
    writethrough    let each write reach the filesystem before it returns; by default the kernel collects writes, if the user is root\n  \
    dev, suid       device nodes and set-user-ID bits take effect, if the user is root\n  \
    allow_other     as --allow-other")]
pub struct FsMount {
    /// The filesystem, or a directory in it.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub place: FilesystemName,
    /// The mount point.
    #[arg(value_name = "DIRECTORY")]
    pub point: PathBuf,
    /// How it is mounted; see below.
    #[arg(short = 'o', long, value_name = "OPTIONS", value_parser = MountOptions::from_str, default_value = "ro",
        hide_default_value = true)]
    pub options: MountOptions,
    /// Also allow other users to use the mount, subject to file permissions.
    #[arg(long)]
    pub allow_other: bool,
}

/// Arguments of `fs tree`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock fs tree disk.img --tree 5\n\n\
    Prints one line for each node and item. Unreadable nodes are reported on standard error, and the exit status is 1.")]
pub struct FsTree {
    /// The filesystem.
    #[arg(value_name = "FILESYSTEM", value_parser = filesystem())]
    pub filesystem: FilesystemName,
    /// Only the tree with this ID: 1 root tree, 2 extent tree, 3 chunk tree, 5 top-level subvolume, 7 checksum tree.
    /// [default: all trees]
    #[arg(long, value_name = "NUMBER")]
    pub tree: Option<u64>,
}
