//! The command line of the `fs` commands that change a filesystem.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use sealblock_btrfs_engine::datasum::Datasum;
use sealblock_stack::filesystem::FilesystemName;
use sealblock_stack::quantity::Time;
use sealblock_units::ByteCount;

use super::fs_format::{DATASUM_CHOICES, DATASUMS, DatasumChoice};
use super::values::{filesystem, one_of};

/// The most bits of a mode below the file type.
const PERMISSIONS: u32 = 0o7777;

/// Reads permissions in octal digits, as chmod(1).
fn permissions(text: &str) -> Result<u32, String> {
    let is_octal = !text.is_empty() && text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
    let bits = u32::from_str_radix(text, 8).ok().filter(|bits| is_octal && *bits <= PERMISSIONS);
    bits.ok_or_else(|| "permissions are octal digits, at most 7777; for example 755".to_owned())
}

/// The user and the group that a file gets; `None` stays as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// The user's number.
    pub uid: Option<u32>,
    /// The group's number.
    pub gid: Option<u32>,
}

/// Reads `UID`, `UID:GID` or `:GID`. Names of users mean nothing in another system's filesystem.
fn owner(text: &str) -> Result<Owner, String> {
    let (uid, gid) = text.split_once(':').unwrap_or((text, ""));
    let number = |text: &str| match text {
        "" => Ok(None),
        // The highest number means no change in system calls.
        digits => digits
            .parse()
            .ok()
            .filter(|number| *number != u32::MAX)
            .map(Some)
            .ok_or_else(|| format!("{digits:?} is not the number of a user or group; give UID, UID:GID or :GID")),
    };
    match (number(uid)?, number(gid)?) {
        (None, None) => Err("give UID, UID:GID or :GID".to_owned()),
        (uid, gid) => Ok(Owner { uid, gid }),
    }
}

/// Arguments of `fs put`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs put thesis.tex disk.img/home/alice/\n  \
    sealblock fs put -r ./etc disk.img/etc\n\n\
    Modes, owners, times, extended attributes, symbolic and hard links, holes, fifos, sockets and device nodes are \
    preserved. An existing file is replaced; a \
    directory is merged into one that exists. What cannot be read here is reported and left out, and the exit \
    status is 1. \
    Ctrl-C completes the step, commits what was copied, and stops.")]
pub struct FsPut {
    /// Files, and with -r directories, of this machine.
    #[arg(value_name = "LOCAL", required = true)]
    pub locals: Vec<PathBuf>,
    /// The destination: a new path, or an existing directory in which the copies keep their names.
    #[arg(value_name = "FILESYSTEM[/PATH]", value_parser = filesystem())]
    pub to: FilesystemName,
    /// Copy directories with all that is in them.
    #[arg(long, short)]
    pub recursive: bool,
    /// The time between two commits, each of which makes durable what was copied so far.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub commit_interval: Time,
    /// Where the checksums of the data of the copies are kept. [default: as in the directory that it is in]
    #[arg(long, value_name = "WHERE", value_parser = one_of(DATASUMS))]
    pub datasum: Option<Datasum>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs mkdir`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs mkdir disk.img/data\n  \
    sealblock fs mkdir -p disk.img/srv/www/html --mode 750 --owner 33:33")]
pub struct FsMkdir {
    /// The directories, all in one filesystem.
    #[arg(value_name = "FILESYSTEM/PATH", required = true, value_parser = filesystem())]
    pub names: Vec<FilesystemName>,
    /// Also make missing directories on the path, and accept existing ones.
    #[arg(long, short)]
    pub parents: bool,
    /// Permissions of the named directories, in octal digits. [default: 777 without the umask]
    #[arg(long, short, value_name = "MODE", value_parser = permissions)]
    pub mode: Option<u32>,
    /// Numbers of the owner and group. [default: those of this process]
    #[arg(long, value_name = "UID:GID", value_parser = owner)]
    pub owner: Option<Owner>,
    /// Where the checksums of the data of new files in it are kept. [default: as in the directory that it is in]
    #[arg(long, value_name = "WHERE", value_parser = one_of(DATASUMS))]
    pub datasum: Option<Datasum>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs rm`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock fs rm disk.img/etc/nologin\n  sealblock fs rm -r disk.img/var/tmp/build\n\n\
    Before a directory is removed, subvolumes in it are looked for. If there are any, nothing of it is removed \
    without --subvolumes. \
    Ctrl-C completes the step, commits what was removed, and stops."
)]
pub struct FsRm {
    /// The files, all in one filesystem.
    #[arg(value_name = "FILESYSTEM/PATH", required = true, value_parser = filesystem())]
    pub names: Vec<FilesystemName>,
    /// Remove directories with all that is in them.
    #[arg(long, short)]
    pub recursive: bool,
    /// Accept that a file does not exist.
    #[arg(long, short)]
    pub force: bool,
    /// Also delete subvolumes and snapshots.
    #[arg(long, requires = "recursive")]
    pub subvolumes: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs rmdir`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock fs rmdir disk.img/data\n\n\
    The empty directory that a snapshot shows in place of a subvolume of its source is removed, too. An empty \
    subvolume is deleted, as in Linux, unless it is the default one.")]
pub struct FsRmdir {
    /// The empty directories or subvolumes, all in one filesystem.
    #[arg(value_name = "FILESYSTEM/PATH", required = true, value_parser = filesystem())]
    pub names: Vec<FilesystemName>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs mv`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs mv disk.img/etc/fstab disk.img/etc/fstab.old\n  \
    sealblock fs mv disk.img:home disk.img:old/\n\n\
    A subvolume can move to any place in its filesystem. Any other file stays in its subvolume.")]
pub struct FsMv {
    /// The file, directory or subvolume.
    #[arg(value_name = "FROM", value_parser = filesystem())]
    pub from: FilesystemName,
    /// The new path, in the same filesystem, or an existing directory in which it keeps its name.
    #[arg(value_name = "TO", value_parser = filesystem())]
    pub to: FilesystemName,
    /// Fail if the new path exists. [default: replace a file, or an empty directory]
    #[arg(long, short, conflicts_with = "exchange")]
    pub no_clobber: bool,
    /// Exchange the two files: TO gets what FROM was, and FROM what TO was.
    #[arg(long)]
    pub exchange: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs ln`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs ln disk.img/boot/vmlinuz-6.1 disk.img/boot/vmlinuz\n  \
    sealblock fs ln -s /proc/mounts disk.img/etc/mtab")]
pub struct FsLn {
    /// The existing file, in the same filesystem and subvolume; with -s any text.
    #[arg(value_name = "TO")]
    pub to: OsString,
    /// The new name, which must not exist.
    #[arg(value_name = "FILESYSTEM/PATH", value_parser = filesystem())]
    pub name: FilesystemName,
    /// Make a symbolic link.
    #[arg(long, short)]
    pub symbolic: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs chmod`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock fs chmod 600 disk.img/etc/shadow")]
pub struct FsChmod {
    /// The permissions in octal digits.
    #[arg(value_name = "MODE", value_parser = permissions)]
    pub mode: u32,
    /// The files, all in one filesystem. Symbolic links are followed.
    #[arg(value_name = "FILESYSTEM/PATH", required = true, value_parser = filesystem())]
    pub names: Vec<FilesystemName>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs chown`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs chown 1000:1000 disk.img/home/alice\n  \
    sealblock fs chown :100 disk.img/srv\n\n\
    Files other than directories lose the set-user-ID bit, and the set-group-ID bit if the group may execute them, \
    as by chown(2).")]
pub struct FsChown {
    /// The numbers of the owner, of the group, or of both: UID, :GID or UID:GID.
    #[arg(value_name = "OWNER", value_parser = owner)]
    pub owner: Owner,
    /// The files, all in one filesystem. Symbolic links are followed.
    #[arg(value_name = "FILESYSTEM/PATH", required = true, value_parser = filesystem())]
    pub names: Vec<FilesystemName>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs datasum`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs datasum device disk.img/srv/database\n  \
    sealblock fs datasum csum disk.img/home\n\n\
    With `device`, the devices make, store and check the checksums of data, and the trees have none of them. All devices must \
    have protection information. Linux mounts such a filesystem, and reads and writes such files (NODATASUM); files that \
    it makes in such a directory have checksums in the tree.\n\n\
    The checksums of files with data stay where they are: copy such a file into the directory.")]
pub struct FsDatasum {
    /// Where the checksums of data are kept.
    #[arg(value_name = "WHERE", value_parser = one_of(DATASUM_CHOICES))]
    pub datasum: DatasumChoice,
    /// Directories, for what is made in them from now on, and empty files, all in one filesystem. Symbolic links are
    /// followed.
    #[arg(value_name = "FILESYSTEM[/PATH]", required = true, value_parser = filesystem())]
    pub names: Vec<FilesystemName>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs fallocate`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs fallocate --length 10GiB disk.img/vm.raw\n  \
    sealblock fs fallocate --punch-hole --offset 1GiB --length 1GiB disk.img/vm.raw\n  \
    sealblock fs fallocate --write-zeroes --length 10GiB disk.img/database\n\n\
    Data that are there stay, without --punch-hole and --write-zeroes; the rest reads as zeroes. A write into allocated \
    space does not fail for want of space, unless a snapshot shares it.\n\n\
    --write-zeroes is for files without copy-on-write (NODATACOW): a file that does not exist is made as one. \
    A write to written zeroes goes to the same place and changes no metadata, whereas the first write into allocated \
    space does. The devices make the zeroes, so that hardly anything is transferred; `fs info` shows whether they can.")]
pub struct FsFallocate {
    /// The file, which is made if it does not exist.
    #[arg(value_name = "FILESYSTEM/PATH", value_parser = filesystem())]
    pub name: FilesystemName,
    /// How many bytes.
    #[arg(long, short, value_name = "SIZE")]
    pub length: ByteCount,
    /// Where they begin.
    #[arg(long, short, value_name = "SIZE", default_value = "0B")]
    pub offset: ByteCount,
    /// Do not make the file longer.
    #[arg(long, short = 'n')]
    pub keep_size: bool,
    /// Free the space instead, so that the bytes read as zeroes. The size stays.
    #[arg(long, short, conflicts_with = "keep_size")]
    pub punch_hole: bool,
    /// Replace the bytes by written zeroes, to which later writes go without a change of metadata.
    #[arg(long, short, conflicts_with_all = ["keep_size", "punch_hole"])]
    pub write_zeroes: bool,
    /// Fail if a device cannot make zeroes itself, instead of transferring them.
    #[arg(long, requires = "write_zeroes")]
    pub require_offload: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs snapshot`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs snapshot disk.img:home disk.img:home-before\n  \
    sealblock fs snapshot -r disk.img: disk.img:snapshots/monday")]
pub struct FsSnapshot {
    /// The subvolume.
    #[arg(value_name = "SUBVOLUME", value_parser = filesystem())]
    pub source: FilesystemName,
    /// The new path, in the same filesystem, or an existing directory in which the snapshot gets the source's name.
    #[arg(value_name = "FILESYSTEM/PATH", value_parser = filesystem())]
    pub to: FilesystemName,
    /// Make it read-only.
    #[arg(long, short)]
    pub read_only: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs subvolume`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  sealblock fs subvolume create disk.img:home\n  sealblock fs subvolume list disk.img",
    arg_required_else_help = true
)]
pub struct FsSubvolume {
    /// What to do.
    #[command(subcommand)]
    pub command: FsSubvolumeCommand,
}

/// The commands of `fs subvolume`.
#[derive(Debug, Subcommand)]
pub enum FsSubvolumeCommand {
    /// Create empty subvolumes.
    Create(FsSubvolumeCreate),
    /// Delete subvolumes and snapshots, and free their space.
    Delete(FsSubvolumeDelete),
    /// List the subvolumes.
    List(FsSubvolumeList),
}

/// Arguments of `fs subvolume create`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock fs subvolume create disk.img:home disk.img:snapshots")]
pub struct FsSubvolumeCreate {
    /// The paths of the new subvolumes, all in one filesystem.
    #[arg(value_name = "FILESYSTEM/PATH", required = true, value_parser = filesystem())]
    pub names: Vec<FilesystemName>,
    /// Permissions of their top directories, in octal digits. [default: 777 without the umask]
    #[arg(long, short, value_name = "MODE", value_parser = permissions)]
    pub mode: Option<u32>,
    /// Numbers of the owner and group. [default: those of this process]
    #[arg(long, value_name = "UID:GID", value_parser = owner)]
    pub owner: Option<Owner>,
    /// Where the checksums of the data of new files in it are kept. [default: as in the directory that it is in]
    #[arg(long, value_name = "WHERE", value_parser = one_of(DATASUMS))]
    pub datasum: Option<Datasum>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs subvolume delete`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sealblock fs subvolume delete disk.img:home-before\n  \
    sealblock fs subvolume delete disk.img\n\n\
    The subvolumes are gone when the command has committed that; freeing their space takes longer. Ctrl-C stops it \
    after the \
    current step. This command, or a mount by Linux, then continues. Without a path it only continues what an \
    earlier one left.")]
pub struct FsSubvolumeDelete {
    /// The subvolumes, all in one filesystem.
    #[arg(value_name = "FILESYSTEM[/PATH]", required = true, value_parser = filesystem())]
    pub names: Vec<FilesystemName>,
    /// Also delete the subvolumes below them.
    #[arg(long, short = 'R')]
    pub recursive: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fs subvolume list`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  sealblock fs subvolume list disk.img")]
pub struct FsSubvolumeList {
    /// The filesystem.
    #[arg(value_name = "FILESYSTEM", value_parser = filesystem())]
    pub filesystem: FilesystemName,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_octal() {
        assert_eq!((permissions("755"), permissions("7777"), permissions("0")), (Ok(0o755), Ok(0o7777), Ok(0)));
        for bad in ["", "8", "10000", "+7", "u+x", "99999999999"] {
            assert!(permissions(bad).unwrap_err().contains("octal"), "{bad}");
        }
    }

    #[test]
    fn owners_are_numbers() {
        let both = |uid, gid| Ok(Owner { uid, gid });
        assert_eq!(owner("7"), both(Some(7), None));
        assert_eq!(owner("0:100"), both(Some(0), Some(100)));
        assert_eq!(owner(":5"), both(None, Some(5)));
        for bad in ["", ":", "root", "1:users", "4294967295", "1:2:3", "-1"] {
            assert!(owner(bad).is_err(), "{bad}");
        }
    }
}
