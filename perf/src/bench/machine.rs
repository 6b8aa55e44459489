//! The measured machine.
//!
//! A figure is meaningless without its machine, and so is a figure of an unoptimised build. Values that the system does
//! not report are `unknown`, and never guessed.

use std::fmt::{Display, Formatter};
use std::fs;
use std::path::Path;
use std::thread;

use serde::Serialize;

/// A machine, and the build that ran there.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Machine {
    /// The model of the CPU.
    pub cpu: String,
    /// CPUs that this process may run on.
    pub cores: usize,
    /// Bytes of memory; 0 if unknown.
    pub memory_bytes: u64,
    /// Its kernel and the kernel's version.
    pub kernel: String,
    /// The load average of the minute before the measurement; `None` if unknown.
    pub load: Option<f64>,
    /// The version of sealblock.
    pub sealblock: &'static str,
    /// `release` or `debug`; figures of a debug build do not apply to the installed software.
    pub build: &'static str,
    /// All of this in one readable line.
    pub text: String,
}

impl Machine {
    /// Describes this machine.
    pub fn this() -> Machine {
        let machine = Machine {
            cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".to_owned()),
            cores: thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory_bytes().unwrap_or(0),
            kernel: kernel(&read("/proc/sys/kernel/ostype"), &read("/proc/sys/kernel/osrelease")),
            load: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()),
            sealblock: env!("CARGO_PKG_VERSION"),
            build: if cfg!(debug_assertions) { "debug" } else { "release" },
            text: String::new(),
        };
        Machine { text: machine.line(), ..machine }
    }
}

impl Machine {
    fn line(&self) -> String {
        let Machine { cpu, cores, memory_bytes, kernel, load, sealblock, build, .. } = self;
        let memory = match memory_bytes {
            0 => "memory unknown".to_owned(),
            bytes => format!("{:.1} GiB of memory", *bytes as f64 / (1_u64 << 30) as f64),
        };
        let load = load.map_or(String::new(), |load| format!("load {load:.1} before, "));
        format!("{cpu}, {cores} CPUs, {memory}, {kernel}, {load}sealblock {sealblock} ({build} build)")
    }
}

/// Bytes of this machine's memory, if known.
pub fn memory_bytes() -> Option<u64> {
    field(&read("/proc/meminfo"), "MemTotal").as_deref().and_then(kibibytes)
}

/// Bytes of memory that programs can get without swapping, if known.
pub fn available_bytes() -> Option<u64> {
    field(&read("/proc/meminfo"), "MemAvailable").as_deref().and_then(kibibytes)
}

/// The mount of a folder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    /// Major and minor number of its device, as in `254:0`; for some file systems it is not a block device.
    device: String,
    kind: String,
    /// True if unmapped space is discarded on the disk at once, which takes the disk's time.
    discards: bool,
}

/// The file system of a folder, if the system reports it.
pub fn mount_of(dir: &Path) -> Option<Mount> {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    mounted(&read("/proc/self/mountinfo"), &dir)
}

/// The mount with the longest mount point above a path; of several the last one, because later mounts hide earlier
/// ones. A line has, among other fields, the device's numbers, the mount point, and after a dash the type, the source
/// and the options of the file system.
fn mounted(mountinfo: &str, path: &Path) -> Option<Mount> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let (mut mount, mut file_system) = (mount.split(' ').skip(2), file_system.split(' '));
        let (device, point) = (mount.next()?, mount.nth(1)?);
        let (kind, options) = (file_system.next()?, file_system.nth(1)?);
        let discards = options.split(',').any(|option| option == "discard");
        Some((point, Mount { device: device.to_owned(), kind: kind.to_owned(), discards }))
    });
    let above = mounts.filter(|(point, _)| path.starts_with(point));
    above.max_by_key(|(point, _)| point.len()).map(|(_, mount)| mount)
}

impl Display for Mount {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.kind)?;
        if self.discards {
            f.write_str(", mounted with discard: the disk discards at once what is unmapped")?;
        }
        Ok(())
    }
}

/// Discards that a disk has executed, for any process.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Discards {
    /// Their number.
    pub requests: u64,
    /// Their total time in milliseconds, each from its submission to its completion.
    pub milliseconds: u64,
}

impl Discards {
    /// The difference to an earlier count.
    pub fn since(self, before: Discards) -> Discards {
        Discards {
            requests: self.requests.saturating_sub(before.requests),
            milliseconds: self.milliseconds.saturating_sub(before.milliseconds),
        }
    }
}

impl Mount {
    /// The discards of its disk since the machine started, if the kernel counts them.
    pub fn discards_so_far(&self) -> Option<Discards> {
        discards(&read(&self.statistics()))
    }

    /// The path of the disk's statistics.
    pub fn statistics(&self) -> String {
        format!("/sys/dev/block/{}/stat", self.device)
    }
}

/// The discard fields of a disk's statistics: the 12th is their number, the 15th their time.
fn discards(stat: &str) -> Option<Discards> {
    let fields: Vec<u64> = stat.split_whitespace().map_while(|field| field.parse().ok()).collect();
    Some(Discards { requests: *fields.get(11)?, milliseconds: *fields.get(14)? })
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The first value of a field in a file of lines like `name : value`.
fn field(text: &str, name: &str) -> Option<String> {
    let values = text.lines().filter_map(|line| line.split_once(':'));
    let mut values = values.filter(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned());
    values.next().filter(|value| !value.is_empty())
}

fn kibibytes(value: &str) -> Option<u64> {
    value.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn kernel(kind: &str, release: &str) -> String {
    match (kind.trim(), release.trim()) {
        ("", _) | (_, "") => "kernel unknown".to_owned(),
        (kind, release) => format!("{kind} {release}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_and_missing_ones_are_unknown() {
        let cpu = "processor\t: 0\nmodel name\t: A CPU @ 2.5GHz\n\nprocessor\t: 1\nmodel name\t: B\n";
        assert_eq!(field(cpu, "model name").as_deref(), Some("A CPU @ 2.5GHz"));
        assert_eq!((field(cpu, "model"), field("model name :\n", "model name")), (None, None));
        assert_eq!(field("MemTotal:  1024 kB\n", "MemTotal").as_deref().and_then(kibibytes), Some(1 << 20));
        assert_eq!((kibibytes("1024"), kibibytes("x kB"), kibibytes("18446744073709551615 kB")), (None, None, None));
        assert_eq!(
            (kernel("Linux\n", "6.18\n").as_str(), kernel("", "6.18").as_str()),
            ("Linux 6.18", "kernel unknown")
        );
    }

    #[test]
    fn the_nearest_mount_is_the_one_that_counts() {
        let mounts = "27 1 254:0 / / rw,relatime - ext4 /dev/a rw,discard\n\
            28 27 0:24 / /dev/shm rw shared:3 master:1 - tmpfs tmpfs rw,size=4k\n\
            29 27 8:1 / /dev rw,discard - xfs /dev/b rw\n\
            30 27 0:31 / /dev rw - btrfs /dev/c rw,nodiscard\n\
            a line that says nothing\n";
        let of = |path: &str| mounted(mounts, Path::new(path)).map(|mount| (mount.to_string(), mount.statistics()));
        let words = |kind: &str, device: &str| Some((kind.to_owned(), format!("/sys/dev/block/{device}/stat")));
        assert_eq!((of("/dev/shm/x"), of("/dev/x")), (words("tmpfs", "0:24"), words("btrfs", "0:31")));
        let discarding = "ext4, mounted with discard: the disk discards at once what is unmapped";
        assert_eq!((of("/devices"), of("relative")), (words(discarding, "254:0"), None));
    }

    #[test]
    fn discards_are_counted_where_the_kernel_does_and_nowhere_else() {
        let stat = " 1 2 3 4 5 6 7 8 0 10 11 691455 60 590215544 144812 518172 49624\n";
        assert_eq!(discards(stat), Some(Discards { requests: 691_455, milliseconds: 144_812 }));
        let later = Discards { requests: 691_462, milliseconds: 144_896 };
        let taken = discards(stat).map(|before| later.since(before));
        assert_eq!(taken, Some(Discards { requests: 7, milliseconds: 84 }));
        assert_eq!(
            (discards("1 2 3 4 5 6 7 8 0 10 11\n"), discards("")),
            (None, None),
            "a kernel before 4.18, no disk"
        );
    }

    #[test]
    fn this_machine_has_what_is_needed_to_run_tests() {
        let machine = Machine::this();
        assert!(machine.cores > 0 && machine.kernel.starts_with("Linux ") && machine.memory_bytes > 1 << 20);
        let line = Machine { load: None, memory_bytes: 0, ..machine }.line();
        assert!(line.contains("memory unknown") && line.contains(env!("CARGO_PKG_VERSION")), "{line}");
    }
}
