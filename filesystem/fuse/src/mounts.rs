//! Mounts a filesystem, identifies the mount in the kernel's table so that no other mount is removed, sets readahead,
//! and unmounts.
//!
//! `fuser` can mount as well, but when its session ends it unmounts by path, so it may unmount another mount that was
//! made there later; [`unmount`] does not. So `fuser` mounts only for users who are not root, who need a helper program
//! to mount and to unmount.

use std::ffi::{CString, OsString};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::{getgid, getuid};

/// The kernel's type name of our mounts; the kernel derives it from `fuse`.
const TYPE: &str = "fuse.sealblock";

/// How the kernel uses a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Changes.
    pub writes: bool,
    /// Programs run with the rights of their owners, if they have the set-user-ID bit.
    pub set_id: bool,
    /// Device nodes can be opened.
    pub devices: bool,
}

impl Allowed {
    /// The flags that forbid everything else. The filesystem keeps the time of the last access, not the kernel.
    fn flags(self) -> MountFlags {
        let forbidden =
            [(self.writes, MountFlags::RDONLY), (self.set_id, MountFlags::NOSUID), (self.devices, MountFlags::NODEV)];
        let flags = forbidden.into_iter().filter(|(is_allowed, _)| !is_allowed).map(|(_, flag)| flag);
        flags.fold(MountFlags::NOATIME, MountFlags::union)
    }
}

/// An entry of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Its number, unique at any time.
    pub id: u64,
    /// Major and minor number of its device, as `MAJOR:MINOR`.
    pub device: String,
}

/// Mounts on a directory, and returns the session's file descriptor. `options` are those of FUSE, separated by commas.
///
/// # Errors
/// If the kernel refuses; `PermissionDenied` if the user may not mount.
pub fn mount(point: &Path, source: &str, allowed: Allowed, options: &str) -> io::Result<OwnedFd> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
    let (number, mode) = (device.as_raw_fd(), fs::metadata(point)?.mode());
    let (uid, gid) = (getuid().as_raw(), getgid().as_raw());
    let options = format!("fd={number},rootmode={mode:o},user_id={uid},group_id={gid},{options}");
    let options = CString::new(options).map_err(io::Error::other)?;
    rustix::mount::mount(source, point, TYPE, allowed.flags(), &*options)?;
    Ok(device.into())
}

/// Ends the connection with the kernel, which then refuses requests in flight and later ones, and unmounts even if
/// files are open.
pub fn unmount(point: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(point, UnmountFlags::FORCE | UnmountFlags::DETACH)?)
}

/// Ends the connection of a mount with the kernel, wherever it is mounted. Only its owner may, and where the filesystem
/// for it is mounted.
pub fn abort(mount: &MountEntry) -> io::Result<()> {
    let number = mount.device.strip_prefix("0:").ok_or(io::ErrorKind::NotFound)?;
    fs::write(format!("/sys/fs/fuse/connections/{number}/abort"), "1")
}

/// The places where a device is mounted, as far as this process sees them.
pub fn places_of(device: &str) -> Vec<PathBuf> {
    places_in(&fs::read("/proc/self/mountinfo").unwrap_or_default(), device)
}

fn places_in(table: &[u8], device: &str) -> Vec<PathBuf> {
    let lines = table.split(|byte| *byte == b'\n');
    let places = lines.filter_map(parse).filter(|(mount, _)| mount.device == device);
    places.map(|(_, place)| PathBuf::from(OsString::from_vec(place))).collect()
}

/// The uppermost mount on a directory, given as an absolute path without links; `None` if there is none or the table
/// cannot be read.
pub fn mount_on(point: &Path) -> Option<MountEntry> {
    find(&fs::read("/proc/self/mountinfo").ok()?, point.as_os_str().as_bytes())
}

/// Sets the kernel's readahead. Only root may exceed the default of 128 KiB.
pub fn set_readahead(mount: &MountEntry, kibibytes: u32) -> io::Result<()> {
    fs::write(format!("/sys/class/bdi/{}/read_ahead_kb", mount.device), kibibytes.to_string())
}

/// Sets which part of the memory that all filesystems may fill with unwritten pages this one may fill, in percent. The
/// kernel gives FUSE one percent, a few MiB on a small machine, and then lets programs wait. Only root may change it.
pub fn set_writeback_share(mount: &MountEntry, percent: u32) -> io::Result<()> {
    fs::write(format!("/sys/class/bdi/{}/max_ratio", mount.device), percent.to_string())
}

/// Finds a directory in a table in the format of proc_pid_mountinfo(5): number, parent, device, root, directory, and
/// more.
fn find(table: &[u8], point: &[u8]) -> Option<MountEntry> {
    let lines = table.split(|byte| *byte == b'\n').rev();
    lines.filter_map(parse).find(|(_, place)| place == point).map(|(mount, _)| mount)
}

/// A mount and its directory.
fn parse(line: &[u8]) -> Option<(MountEntry, Vec<u8>)> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let device = std::str::from_utf8(fields.nth(1)?).ok()?;
    let is_device = device.split_once(':').is_some_and(|(major, minor)| {
        [major, minor].iter().all(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    });
    let folder = unescape(fields.nth(1)?);
    is_device.then(|| (MountEntry { id, device: device.to_owned() }, folder))
}

/// Decodes spaces, tabs, line ends and backslashes, which are a backslash and three octal digits in the table.
fn unescape(field: &[u8]) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(field.len()), field);
    while let [first, tail @ ..] = rest {
        let octal =
            tail.get(..3).filter(|digits| *first == b'\\' && digits.iter().all(|digit| (b'0'..b'8').contains(digit)));
        let value = octal.map(|digits| digits.iter().fold(0_u32, |value, digit| value * 8 + u32::from(digit - b'0')));
        match value.and_then(|value| u8::try_from(value).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
        30 22 0:44 / /mnt/a\\040b\\134 ro - fuse.sealblock x ro\n\
        31 30 0:45 / /mnt/a\\040b\\134 ro - fuse.sealblock y ro\n\
        32 22 ../..:45 / /mnt/c ro - fuse z ro\n\
        x 22 0:46 / /mnt/d ro\nshort\n";

    #[test]
    fn the_uppermost_mount_on_a_folder_is_found_whatever_its_name() {
        let found = find(TABLE, b"/mnt/a b\\").unwrap();
        assert_eq!(found, MountEntry { id: 31, device: "0:45".to_owned() });
        assert_eq!(find(TABLE, b"/").unwrap().id, 22);
    }

    #[test]
    fn all_places_of_a_device_are_found() {
        let more = [TABLE, b"\n33 22 0:44 /below /mnt/bound ro - fuse.sealblock x ro\n"].concat();
        assert_eq!(places_in(&more, "0:44"), [Path::new("/mnt/a b\\"), Path::new("/mnt/bound")]);
        assert_eq!(places_in(&more, "0:4"), [] as [&Path; 0]);
    }

    #[test]
    fn absent_folders_are_not_found() {
        for absent in [&b"/mnt/a"[..], b"/mnt/a b", b"/mnt/a\\040b\\134", b"/mnt/c", b"/mnt/d", b""] {
            assert_eq!(find(TABLE, absent), None, "{}", absent.escape_ascii());
        }
        assert_eq!(find(b"", b"/"), None);
    }

    #[test]
    fn what_is_not_allowed_is_forbidden() {
        let (none, all) = (Allowed::default(), Allowed { writes: true, set_id: true, devices: true });
        let strict = MountFlags::RDONLY | MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOATIME;
        assert_eq!((none.flags(), all.flags()), (strict, MountFlags::NOATIME));
        let writable = Allowed { writes: true, ..none };
        assert_eq!(writable.flags(), MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOATIME);
    }

    #[test]
    fn incomplete_escapes_stay_as_they_are() {
        assert_eq!(unescape(b"a\\04"), b"a\\04");
        assert_eq!(unescape(b"\\777\\008\\\\"), b"\\777\\008\\\\");
        assert_eq!(unescape(b"\\012"), b"\n");
    }
}
