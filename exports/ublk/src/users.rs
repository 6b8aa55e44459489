//! The users of a block device: exclusive holders, and processes that only have it open, which the kernel does not
//! count.
//!
//! If a device is removed while a process has it open, data are lost that the process wrote and the kernel has not
//! written back. So a device with users is only removed by force. This process sees only what it has permission for:
//! only root sees all processes of other users.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, FileType, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sealblock_runtime_ublk::block_path;

/// The maximum number of users that are named.
const MAX_NAMED: usize = 8;

/// A user of a block device.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum User {
    /// A mounted file system.
    Mount(PathBuf),
    /// Swap space.
    Swap,
    /// A block device above it.
    Device(String),
    /// A process that has it open or mapped.
    Process {
        /// Its number.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// An unknown exclusive holder.
    Unknown,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            User::Mount(point) => write!(f, "it is mounted on {}", printable(&point.to_string_lossy())),
            User::Swap => f.write_str("it is swap space"),
            User::Device(name) => write!(f, "it is a part of {}", printable(name)),
            User::Process { pid, name } => write!(f, "process {pid} ({}) has it open", printable(name)),
            User::Unknown => f.write_str("somebody has claimed it"),
        }
    }
}

/// The users of a block device; there is at least one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Users(Vec<User>);

impl Users {
    /// Returns each of them.
    pub fn each(&self) -> &[User] {
        &self.0
    }

    /// True if its only users are processes that have it open.
    pub(crate) fn are_processes(&self) -> bool {
        self.0.iter().all(|user| matches!(user, User::Process { .. }))
    }
}

impl fmt::Display for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, user) in self.0.iter().take(MAX_NAMED).enumerate() {
            write!(f, "{}{user}", if i > 0 { "; " } else { "" })?;
        }
        match self.0.len().saturating_sub(MAX_NAMED) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

/// Names come from other programs, so control characters are replaced.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).take(200).collect()
}

/// The users of `/dev/ublkbN`, if there are any.
pub(crate) fn of_block_device(number: u32) -> Option<Users> {
    let path = block_path(number);
    let system = System {
        processes: Path::new("/proc"),
        devices: Path::new("/sys/block"),
        is_kind: FileTypeExt::is_block_device,
    };
    let mut users = system.users(&path);
    if users.is_empty() && is_claimed(&path) {
        users.push(User::Unknown);
    }
    (!users.is_empty()).then_some(Users(users))
}

/// An exclusive open fails exactly if the block device has an exclusive holder.
fn is_claimed(path: &Path) -> bool {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path);
    opened.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
}

/// The kernel's files that show the users of devices.
struct System<'a> {
    /// `/proc`.
    processes: &'a Path,
    /// `/sys/block`.
    devices: &'a Path,
    /// The kind of the device's node.
    is_kind: fn(&FileType) -> bool,
}

impl System<'_> {
    /// The users of the device with the node `path`, and of its partitions.
    fn users(&self, path: &Path) -> Vec<User> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parts = self.parts(&name);
        let nodes: BTreeSet<PathBuf> = parts.iter().map(|(part, _)| path.with_file_name(part)).collect();
        let numbers: BTreeSet<String> = parts.into_iter().map(|(_, number)| number).collect();
        let mut users = BTreeSet::new();
        users.extend(self.mounts(&nodes, &numbers));
        users.extend(self.swaps(&nodes));
        users.extend(self.devices(&name, &nodes));
        users.extend(self.processes(&nodes, &numbers));
        users.into_iter().collect()
    }

    /// The names of the device and its partitions, and their numbers as `MAJOR:MINOR`.
    fn parts(&self, name: &str) -> Vec<(String, String)> {
        let folder = self.devices.join(name);
        let number = |folder: &Path| fs::read_to_string(folder.join("dev")).ok().map(|text| text.trim().to_owned());
        let partitions = names(&folder).into_iter().filter(|part| part.starts_with(name));
        let with_number = |part: String, folder: PathBuf| Some((part, number(&folder)?));
        let own = with_number(name.to_owned(), folder.clone());
        own.into_iter().chain(partitions.filter_map(|part| with_number(part.clone(), folder.join(part)))).collect()
    }

    fn mounts(&self, nodes: &BTreeSet<PathBuf>, numbers: &BTreeSet<String>) -> Vec<User> {
        let list = fs::read_to_string(self.processes.join("self/mountinfo")).unwrap_or_default();
        // ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [FIELD ...] - TYPE SOURCE OPTIONS. Btrfs has its own device numbers,
        // so the source is compared.
        let mount = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let source = words.iter().position(|word| *word == "-").and_then(|at| words.get(at + 2));
            let is_it =
                numbers.contains(*words.get(2)?) || source.is_some_and(|source| nodes.contains(Path::new(source)));
            is_it.then(|| User::Mount(PathBuf::from(words.get(4).unwrap_or(&"?").replace("\\040", " "))))
        };
        list.lines().filter_map(mount).collect()
    }

    fn swaps(&self, nodes: &BTreeSet<PathBuf>) -> Option<User> {
        let list = fs::read_to_string(self.processes.join("swaps")).unwrap_or_default();
        let is_it = |line: &str| line.split_whitespace().next().is_some_and(|path| nodes.contains(Path::new(path)));
        list.lines().any(is_it).then_some(User::Swap)
    }

    /// Devices that report it, and loop devices, whose backing files the kernel does not report.
    fn devices(&self, name: &str, nodes: &BTreeSet<PathBuf>) -> Vec<User> {
        let folder = self.devices.join(name);
        let parts = nodes.iter().filter_map(|node| node.file_name()).map(|part| folder.join(part).join("holders"));
        let holders = std::iter::once(folder.join("holders")).chain(parts).flat_map(|holders| names(&holders));
        let is_loop_of_it = |device: &String| {
            let backing = fs::read_to_string(self.devices.join(device).join("loop/backing_file"));
            backing.is_ok_and(|file| nodes.contains(Path::new(file.trim_end())))
        };
        let loops = names(self.devices).into_iter().filter(is_loop_of_it);
        holders.chain(loops).map(User::Device).collect()
    }

    fn processes(&self, nodes: &BTreeSet<PathBuf>, numbers: &BTreeSet<String>) -> Vec<User> {
        let is_open = |folder: &Path| {
            let opens = |file: String| {
                // The link is followed, because the name of a node may be another one by now.
                let Ok(about) = fs::metadata(folder.join("fd").join(file)) else { return false };
                let number = format!("{}:{}", libc::major(about.rdev()), libc::minor(about.rdev()));
                (self.is_kind)(&about.file_type()) && numbers.contains(&number)
            };
            names(&folder.join("fd")).into_iter().any(opens)
        };
        let is_mapped = |folder: &Path| {
            let maps = fs::read_to_string(folder.join("maps")).unwrap_or_default();
            maps.lines().any(|line| line.split_whitespace().nth(5).is_some_and(|path| nodes.contains(Path::new(path))))
        };
        let process = |pid: u32| {
            let folder = self.processes.join(pid.to_string());
            let name = || fs::read_to_string(folder.join("comm")).unwrap_or_default().trim_end().to_owned();
            (is_open(&folder) || is_mapped(&folder)).then(|| User::Process { pid, name: name() })
        };
        names(self.processes).iter().filter_map(|name| name.parse().ok()).filter_map(process).collect()
    }
}

/// The entries of a folder; none if it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::symlink;

    use super::*;

    /// Files like those of a kernel on which a block device `ublkb5` with a partition has these numbers, and whose
    /// processes are those of `processes`.
    fn devices(disk: &str, partition: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (part, number) in [("ublkb5", disk), ("ublkb5/ublkb5p1", partition), ("ublkb50", "259:99")] {
            fs::create_dir_all(folder.path().join(part).join("holders")).unwrap();
            fs::write(folder.path().join(part).join("dev"), format!("{number}\n")).unwrap();
        }
        folder
    }

    fn users(processes: &Path, devices: &Path) -> Vec<String> {
        let system = System { processes, devices, is_kind: FileTypeExt::is_char_device };
        system.users(Path::new("/dev/ublkb5")).iter().map(ToString::to_string).collect()
    }

    /// This process first has a device open, and then does not.
    #[test]
    fn a_process_that_merely_has_it_open_is_found() {
        let zero = fs::metadata("/dev/zero").unwrap().rdev();
        let (own, other) = (format!("{}:{}", libc::major(zero), libc::minor(zero)), "259:98");
        let processes = Path::new("/proc");
        let is_this = |user: &String| user.starts_with(&format!("process {} (", std::process::id()));
        for (disk, partition) in [(own.as_str(), other), (other, own.as_str())] {
            let devices = devices(disk, partition);
            let open = File::open("/dev/zero").unwrap();
            let found = users(processes, devices.path());
            assert!(found.iter().any(is_this), "{found:?}");
            drop(open);
            let found = users(processes, devices.path());
            assert!(!found.iter().any(is_this), "{found:?}");
        }
    }

    #[test]
    fn mounts_swap_and_devices_above_are_found_and_those_of_others_are_not() {
        let devices = devices("259:5", "259:6");
        let processes = tempfile::tempdir().unwrap();
        let (at, of) = (processes.path(), devices.path());
        fs::create_dir_all(at.join("self")).unwrap();
        let mountinfo = "36 35 259:6 / /mnt\\040a rw - ext4 /dev/other rw\n37 35 0:40 / /b rw shared:1 - btrfs /dev/ublkb5 rw\n\
            38 35 259:99 / /c rw - ext4 /dev/ublkb50 rw\nrubbish\n";
        fs::write(at.join("self/mountinfo"), mountinfo).unwrap();
        fs::write(at.join("swaps"), "Filename Type\n/dev/ublkb5p1 partition 1 2\n").unwrap();
        fs::create_dir_all(of.join("ublkb5/ublkb5p1/holders/dm-3")).unwrap();
        fs::create_dir_all(of.join("loop7/loop")).unwrap();
        fs::write(of.join("loop7/loop/backing_file"), "/dev/ublkb5\n").unwrap();
        fs::create_dir_all(at.join("77/fd")).unwrap();
        fs::write(at.join("77/comm"), "m\u{1b}map\n").unwrap();
        fs::write(at.join("77/maps"), "7f00-7f01 rw-s 00000000 00:05 812 /dev/ublkb5\n").unwrap();
        fs::create_dir_all(at.join("78/fd")).unwrap();
        symlink("/dev/null", at.join("78/fd/3")).unwrap();
        let wanted = [
            "it is mounted on /b",
            "it is mounted on /mnt a",
            "it is swap space",
            "it is a part of dm-3",
            "it is a part of loop7",
            "process 77 (m?map) has it open",
        ];
        assert_eq!(users(at, of), wanted);
    }

    #[test]
    fn a_device_that_is_not_there_and_one_that_nobody_uses_have_no_users() {
        let (empty, devices) = (tempfile::tempdir().unwrap(), devices("259:5", "259:6"));
        assert!(users(empty.path(), empty.path()).is_empty());
        assert!(users(empty.path(), devices.path()).is_empty());
        let many = Users((0..10).map(|pid| User::Process { pid, name: "a".to_owned() }).collect());
        assert!(many.to_string().ends_with("process 7 (a) has it open; and 2 more"), "{many}");
    }
}
