//! The machine that figures are of.
//!
//! A figure without its machine means nothing, and neither does one of a build without optimisation. What the system does not tell is
//! `unknown`, and never guessed.

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
    /// Its kernel with its version.
    pub kernel: String,
    /// Tasks that wanted to run in the minute before the measurement; nothing if unknown.
    pub load: Option<f64>,
    /// The version of sealblock.
    pub sealblock: &'static str,
    /// `release` or `debug`; figures of a debug build say nothing of the software that is installed.
    pub build: &'static str,
    /// All of that in a line for people.
    pub text: String,
}

impl Machine {
    /// This one.
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

/// The kind of file system that a folder is on, and whether what is unmapped there is discarded on the disk at once, which takes the disk's time.
pub fn file_system(dir: &Path) -> String {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    mounted(&read("/proc/self/mounts"), &dir).unwrap_or_else(|| "a file system that is unknown".to_owned())
}

/// What is mounted at the longest mount point above a path: the last one of that, since later mounts hide earlier ones.
fn mounted(mounts: &str, path: &Path) -> Option<String> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        Some((words.next()?, words.next()?, words.next()?))
    });
    let above = mounts.filter(|(point, ..)| path.starts_with(point));
    let (_, kind, options) = above.max_by_key(|(point, ..)| point.len())?;
    Some(match options.split(',').any(|option| option == "discard") {
        true => format!("{kind}, mounted with discard: the disk discards at once what is unmapped"),
        false => kind.to_owned(),
    })
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
    fn fields_are_found_and_what_is_not_told_is_unknown() {
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
        let mounts = "/dev/a / ext4 rw,discard 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n/dev/b /dev xfs rw 0 0\n/dev/c /dev btrfs rw,nodiscard 0 0\n";
        let of = |path: &str| mounted(mounts, Path::new(path));
        assert_eq!((of("/dev/shm/x").as_deref(), of("/dev/x").as_deref()), (Some("tmpfs"), Some("btrfs")));
        assert!(of("/devices").is_some_and(|text| text.starts_with("ext4, mounted with discard")));
        assert_eq!(of("relative"), None);
    }

    #[test]
    fn this_machine_has_what_is_needed_to_run_tests() {
        let machine = Machine::this();
        assert!(machine.cores > 0 && machine.kernel.starts_with("Linux ") && machine.memory_bytes > 1 << 20);
        let line = Machine { load: None, memory_bytes: 0, ..machine }.line();
        assert!(line.contains("memory unknown") && line.contains(env!("CARGO_PKG_VERSION")), "{line}");
    }
}
