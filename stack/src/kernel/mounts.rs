//! Mounted file systems, as `/proc/self/mountinfo` lists them (`proc_pid_mountinfo(5)`).

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::kernel::DeviceNumber;

/// The list of this process.
const MOUNTINFO: &str = "/proc/self/mountinfo";
/// Where the kernel lists the devices of each mounted btrfs, in folders named by their UUIDs.
const BTRFS: &str = "/sys/fs/btrfs";

/// A mounted file system.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    /// The number that its files have: of its device, or one without a device.
    pub number: DeviceNumber,
    /// The folder of the file system that is mounted; `/` for all of it.
    pub root: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// The type, such as `ext4`.
    pub kind: String,
    /// What was mounted: the path of a device, as it was given.
    pub source: PathBuf,
    /// Options of the file system, not of the mount.
    pub options: String,
}

impl Mount {
    /// The value of an option of the file system.
    pub fn option(&self, name: &str) -> Option<&str> {
        self.options.split(',').find_map(|option| option.strip_prefix(name)?.strip_prefix('='))
    }
}

/// All mounts of this process. A list that cannot be read is empty.
pub fn mounts() -> Vec<Mount> {
    parse(&fs::read(MOUNTINFO).unwrap_or_default())
}

/// The devices of all mounted file systems, with a place where each is mounted. Mounts of a btrfs have no number of a
/// device, and name one of several; the kernel lists all of them.
pub(crate) fn mounted_devices() -> Vec<(DeviceNumber, PathBuf)> {
    let all = mounts();
    let plain = all.iter().filter(|mount| mount.number.is_device()).map(|mount| (mount.number, mount.point.clone()));
    let mut devices: Vec<_> = plain.collect();
    for folder in fs::read_dir(BTRFS).into_iter().flatten().flatten() {
        let of_this = btrfs_devices(&folder.path());
        let is_of_this = |mount: &&Mount| {
            let source = fs::metadata(&mount.source).ok().map(|about| DeviceNumber::of(&about));
            mount.kind == "btrfs" && source.is_some_and(|source| of_this.contains(&source))
        };
        // It may be mounted only in another namespace.
        let point = all.iter().find(is_of_this).map_or_else(|| folder.path(), |mount| mount.point.clone());
        devices.extend(of_this.iter().map(|device| (*device, point.clone())));
    }
    devices
}

/// The devices in a folder of a mounted btrfs; none for the folder of its features.
fn btrfs_devices(folder: &Path) -> Vec<DeviceNumber> {
    let devices = fs::read_dir(folder.join("devices")).into_iter().flatten().flatten();
    devices.filter_map(|device| fs::read_to_string(device.path().join("dev")).ok()?.trim().parse().ok()).collect()
}

/// The mount that a path is in: that of the longest mount point; of several at one, the last, which hides the others. By path, since files of a
/// btrfs have numbers of their subvolumes, which are in no list.
pub(crate) fn mount_of(path: &Path) -> Option<Mount> {
    let path = fs::canonicalize(path).ok()?;
    innermost(mounts(), &path)
}

fn innermost(mounts: Vec<Mount>, path: &Path) -> Option<Mount> {
    let around = mounts.into_iter().filter(|mount| path.starts_with(&mount.point));
    around.max_by_key(|mount| mount.point.components().count())
}

/// Lines that are none are left out.
fn parse(list: &[u8]) -> Vec<Mount> {
    list.split(|byte| *byte == b'\n').filter_map(mount).collect()
}

/// `ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [FIELD ...] - TYPE SOURCE OPTIONS`
fn mount(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|byte| *byte == b' ');
    let number = std::str::from_utf8(words.nth(2)?).ok()?.parse().ok()?;
    let (root, point) = (path(words.next()?), path(words.next()?));
    words.by_ref().find(|word| *word == b"-")?;
    let kind = std::str::from_utf8(words.next()?).ok()?.to_owned();
    let source = path(words.next()?);
    let options = String::from_utf8_lossy(words.next().unwrap_or_default()).into_owned();
    Some(Mount { number, root, point, kind, source, options })
}

/// A path in which `\` and three octal digits are a byte.
fn path(word: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let [first, tail @ ..] = rest {
        let escaped =
            tail.get(..3).filter(|digits| *first == b'\\' && digits.iter().all(|digit| (b'0'..=b'7').contains(digit)));
        match escaped {
            Some(digits) => {
                let value = digits.iter().fold(0_u32, |value, digit| value * 8 + u32::from(digit - b'0'));
                bytes.push(value as u8);
                rest = &tail[3..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_with_their_escapes_and_what_is_none_is_left_out() {
        let list = b"36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue\n\
            1 1 0:39 /@home /home rw - btrfs /dev/sdb1 rw,subvolid=257,subvol=/@home\nrubbish\n1 1 x / / rw - ext4 /dev/sda rw\n1 1 8:1 / /a rw\n";
        let found = parse(list);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].point.to_str(), found[0].kind.as_str()), (Some("/mnt 2"), "ext3"));
        assert_eq!((found[0].root.to_str(), found[0].source.to_str()), (Some("/mnt1"), Some("/dev/root")));
        assert_eq!((found[1].number.to_string().as_str(), found[1].source.to_str()), ("0:39", Some("/dev/sdb1")));
        assert_eq!(
            (found[1].option("subvolid"), found[1].option("subvo"), found[0].option("rw")),
            (Some("257"), None, None)
        );
        assert_eq!(path(b"\\0\\999\\134"), PathBuf::from("\\0\\999\\"));
    }

    #[test]
    fn a_path_is_in_the_innermost_mount_and_of_two_at_one_point_in_the_last() {
        let list = b"1 1 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /a/b rw - ext4 /dev/b rw\n3 1 0:9 / /a/b rw - btrfs /dev/c rw\n";
        let number = |path: &str| innermost(parse(list), Path::new(path)).unwrap().number.to_string();
        assert_eq!(["/a/b/c", "/a/b", "/a/bc", "/"].map(number), ["0:9", "0:9", "8:1", "8:1"]);
        assert_eq!(innermost(Vec::new(), Path::new("/")), None);
    }

    #[test]
    fn this_process_has_mounts() {
        assert!(mounts().iter().any(|mount| mount.point == Path::new("/")));
    }
}
