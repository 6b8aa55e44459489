//! The kernel's own verification of a mounted filesystem: the counts of its scrub for each device, and its log
//! messages.
//!
//! The scrub is read-only (`btrfs scrub start -r`): it counts a copy as corrected if another copy is good, but writes
//! nothing.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

use rustix::fs::OFlags;

/// The folder in which the program keeps the progress of each scrub, in files named by the UUID of the filesystem.
const STATUS_FOLDER: &str = "/var/lib/btrfs";
/// Larger than any log record.
const RECORD_BYTES: usize = 8 << 10;

/// The oldest kernel whose scrub counts as [`Counts`] describes; earlier kernels count nodes differently.
const OLDEST_KERNEL: (u32, u32) = (6, 18);

/// The counts of a scrub on one device. Bad copies of data and nodes are counted in sectors of 4 KiB.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Sectors of data with a wrong checksum.
    pub csum: u64,
    /// Sectors of invalid nodes.
    pub verify: u64,
    /// Invalid copies of the superblock.
    pub superblocks: u64,
    /// Sectors that could not be read.
    pub read: u64,
    /// Bad sectors with a good copy elsewhere.
    pub corrected: u64,
    /// Bad sectors without a good copy elsewhere.
    pub uncorrectable: u64,
}

/// The result of a scrub.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Scrub {
    /// By device number.
    pub devices: BTreeMap<u64, Counts>,
    /// False if it ended early, which happens if a node that it needs is lost.
    pub is_finished: bool,
}

/// True if this machine's kernel counts as [`Counts`] describes.
///
/// # Errors
/// If it is older, or its version cannot be parsed.
pub fn has_known_scrub() -> Result<(), String> {
    let file = "/proc/sys/kernel/osrelease";
    let release = fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    check_release(release.trim())
}

fn check_release(release: &str) -> Result<(), String> {
    let mut numbers = release.split(|digit: char| !digit.is_ascii_digit()).map(str::parse);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        return Err(format!("Linux {release}: no version"));
    };
    let (oldest_major, oldest_minor) = OLDEST_KERNEL;
    match (major, minor) >= OLDEST_KERNEL {
        true => Ok(()),
        false => Err(format!("Linux {release}: its scrub counts otherwise than that of {oldest_major}.{oldest_minor}")),
    }
}

/// Makes the kernel check every copy of the mounted filesystem, without writing.
///
/// # Errors
/// If the program cannot be started, or its output cannot be parsed.
pub fn scrub(mount: &Path) -> Result<Scrub, String> {
    let arguments = ["scrub", "start", "-B", "-r", "-R", "-d"];
    let output =
        Command::new("btrfs").args(arguments).arg(mount).output().map_err(|error| format!("btrfs: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    // The mounted folder itself may be below a lost node.
    if text.trim().is_empty() && said.contains("Input/output error") {
        return Ok(Scrub::default());
    }
    // The exit status is 3 if something cannot be corrected, and 1 if the scrub ended early.
    parse(&text).map_err(|why| format!("btrfs scrub: {why}: {text}{said}"))
}

/// Removes the program's records of scrubs of a filesystem.
pub fn forget(uuid: &str) {
    for kind in ["status", "progress"] {
        // Without a scrub there is no file.
        let _ = fs::remove_file(Path::new(STATUS_FOLDER).join(format!("scrub.{kind}.{uuid}")));
    }
}

fn parse(text: &str) -> Result<Scrub, String> {
    let mut scrub = Scrub { devices: BTreeMap::new(), is_finished: true };
    let mut devid = None;
    for line in text.lines().map(str::trim) {
        if line.starts_with("Scrub device ") {
            let id = line.split_once("(id ").and_then(|(_, rest)| rest.split_once(')'));
            let id =
                id.and_then(|(id, _)| id.parse().ok()).ok_or_else(|| format!("a device without number: {line}"))?;
            scrub.devices.insert(id, Counts::default());
            devid = Some(id);
        }
        let Some((name, value)) = line.split_once(':') else { continue };
        if name == "Status" {
            scrub.is_finished &= value.trim() == "finished";
        }
        let (Some(counts), Ok(value)) = (devid.and_then(|id| scrub.devices.get_mut(&id)), value.trim().parse()) else {
            continue;
        };
        match name {
            "csum_errors" => counts.csum = value,
            "verify_errors" => counts.verify = value,
            "super_errors" => counts.superblocks = value,
            "read_errors" => counts.read = value,
            "corrected_errors" => counts.corrected = value,
            "uncorrectable_errors" => counts.uncorrectable = value,
            _ => {}
        }
    }
    if scrub.devices.is_empty() { Err("it names no device".to_owned()) } else { Ok(scrub) }
}

/// The kernel's log from a given moment on.
pub struct KernelLog {
    file: File,
}

impl KernelLog {
    /// The log from now on.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn from_now_on() -> Result<KernelLog, String> {
        let nonblocking = OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(nonblocking).open("/dev/kmsg");
        let ready = file.and_then(|mut file| file.seek(SeekFrom::End(0)).map(|_| file));
        ready.map(|file| KernelLog { file }).map_err(|error| format!("/dev/kmsg: {error}"))
    }

    /// The messages since the last call, except those that the kernel has overwritten.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn messages(&mut self) -> Result<Vec<String>, String> {
        let (mut messages, mut record) = (Vec::new(), vec![0; RECORD_BYTES]);
        loop {
            let length = match self.file.read(&mut record) {
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(messages),
                // The next read returns the oldest remaining record.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => continue,
                Err(error) => return Err(format!("/dev/kmsg: {error}")),
            };
            // A record has priority, number, time and flags, then the message, and lines of details below it.
            let text = String::from_utf8_lossy(&record[..length]);
            let message = text.split_once(';').and_then(|(_, message)| message.lines().next());
            messages.extend(message.map(str::to_owned));
        }
    }
}

/// The device and byte offset in a message of a scrub: the start of the 64 KiB stripe with the bad copy.
pub fn place_of(message: &str) -> Option<(&str, u64)> {
    let (_, rest) = message.split_once("scrub: ")?;
    let (_, rest) = rest.split_once(" on dev ")?;
    let (device, rest) = rest.split_once(' ')?;
    let place = rest.strip_prefix("physical ")?;
    let digits = place.split(|digit: char| !digit.is_ascii_digit()).next()?;
    Some((device.trim_end_matches(','), digits.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
Scrub device /dev/loop0 (id 1) done
Scrub started:    Thu Nov 26 14:06:08 2026
Status:           finished
Duration:         0:00:00
\tread_errors: 0
\tcsum_errors: 2
\tverify_errors: 0
\tsuper_errors: 0
\tuncorrectable_errors: 1
\tcorrected_errors: 1

Scrub device /dev/loop1 (id 7) done
Status:           finished
\tcsum_errors: 1
\tverify_errors: 4
\tsuper_errors: 1
\tuncorrectable_errors: 1
\tcorrected_errors: 4
";

    #[test]
    fn counts_are_those_of_their_device() {
        let one = Counts { csum: 2, corrected: 1, uncorrectable: 1, ..Counts::default() };
        let seven = Counts { csum: 1, verify: 4, superblocks: 1, corrected: 4, uncorrectable: 1, ..Counts::default() };
        let expected = Scrub { devices: [(1, one), (7, seven)].into(), is_finished: true };
        assert_eq!(parse(TEXT), Ok(expected.clone()));
        let aborted = TEXT.replacen("finished", "aborted", 1);
        assert_eq!(parse(&aborted), Ok(Scrub { is_finished: false, ..expected }));
    }

    #[test]
    fn an_older_kernel_counts_otherwise() {
        for release in ["6.18.44-fc", "6.19-rc1", "7.2.0"] {
            assert_eq!(check_release(release), Ok(()), "{release}");
        }
        for (release, why) in [("6.12.3-amd64", "otherwise than"), ("5.19.0", "otherwise than"), ("next", "no version")]
        {
            assert!(check_release(release).unwrap_err().contains(why), "{release}");
        }
    }

    #[test]
    fn a_text_without_devices_is_no_outcome() {
        assert!(parse("ERROR: not a mount point").unwrap_err().contains("no device"));
        assert!(parse("Scrub device /dev/loop0 (id x) done").unwrap_err().contains("without number"));
    }

    #[test]
    fn a_message_says_where() {
        let bad = "BTRFS error (device loop0): scrub: unable to fixup (regular) error at logical 13 on dev /dev/loop1 physical 1048576";
        assert_eq!(place_of(bad), Some(("/dev/loop1", 1_048_576)));
        let file = "BTRFS warning (device loop0): scrub: checksum error at logical 1 on dev /dev/loop0, physical 4096 root 5 inode 8";
        assert_eq!(place_of(file), Some(("/dev/loop0", 4096)));
        assert_eq!(place_of("BTRFS info (device loop0): scrub: started on devid 1"), None);
    }
}
