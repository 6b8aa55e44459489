//! What a turn costs: time, CPU time, and what reaches a loop device.
//!
//! CPU time is that of this process, of its children that ended meanwhile, of a daemon, and of all kernel threads:
//! those of a loop device work for every contender, and the kernel's Btrfs computes checksums and writes nodes in
//! them. It is measured in the same way for each. What other programs use is left out, but not what kernel threads do
//! for them.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use rustix::time::{ClockId, clock_gettime};

/// The flag of a kernel thread in `/proc/PID/stat`.
const KERNEL_THREAD: u64 = 0x0020_0000;
/// Clock ticks per second in `/proc/PID/stat`.
const TICKS_PER_SECOND: f64 = 100.0;
/// Bytes of a sector in the statistics of a block device.
const SECTOR_BYTES: u64 = 512;

/// The result of a turn.
#[derive(Clone, Copy, Default, Debug)]
pub struct Turn {
    /// Completed requests.
    pub requests: u64,
    /// Until all of them were durable.
    pub seconds: f64,
    /// CPU time of all that works for it.
    pub cpu_seconds: f64,
    /// What reached the loop device; nothing without one.
    pub device: DeviceCounts,
}

impl Turn {
    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds
    }
}

/// What a block device executed.
#[derive(Clone, Copy, Default, Debug)]
pub struct DeviceCounts {
    /// Write requests.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Bytes read.
    pub read_bytes: u64,
}

/// Measures from its beginning on.
pub struct Meter {
    statistics: Option<PathBuf>,
    daemon: Option<u32>,
    begin: Instant,
    cpu_seconds: f64,
    kernel_threads: HashMap<u32, u64>,
    device: DeviceCounts,
}

impl Meter {
    /// Begins to measure, with what a device such as `/dev/loop0` executes, and the CPU time of a daemon.
    pub fn start(device: Option<&str>, daemon: Option<u32>) -> anyhow::Result<Meter> {
        let file_of = |device| Path::new(device).file_name().context("a device has a name");
        let statistics = device.map(file_of).transpose()?.map(|name| Path::new("/sys/block").join(name).join("stat"));
        let device = device_counts(statistics.as_deref())?;
        let (kernel_threads, cpu_seconds) = (kernel_threads()?, cpu_seconds(daemon)?);
        Ok(Meter { statistics, daemon, begin: Instant::now(), cpu_seconds, kernel_threads, device })
    }

    /// Ends. `requests` requests have completed in `seconds`, or since the beginning.
    pub fn stop(&self, requests: u64, seconds: Option<f64>) -> anyhow::Result<Turn> {
        let seconds = seconds.unwrap_or_else(|| self.begin.elapsed().as_secs_f64());
        let before = |pid: &u32| self.kernel_threads.get(pid).copied().unwrap_or(0);
        let kernel_threads = kernel_threads()?;
        // One that ended meanwhile is missing, and with it little: idle ones end.
        let of_kernel = kernel_threads.iter().map(|(pid, time)| time.saturating_sub(before(pid))).sum::<u64>();
        let cpu_seconds = cpu_seconds(self.daemon)? - self.cpu_seconds + of_kernel as f64 / 1e9;
        let now = device_counts(self.statistics.as_deref())?;
        let device = DeviceCounts {
            writes: now.writes - self.device.writes,
            written_bytes: now.written_bytes - self.device.written_bytes,
            flushes: now.flushes - self.device.flushes,
            read_bytes: now.read_bytes - self.device.read_bytes,
        };
        Ok(Turn { requests, seconds, cpu_seconds, device })
    }
}

fn device_counts(statistics: Option<&Path>) -> anyhow::Result<DeviceCounts> {
    let Some(statistics) = statistics else { return Ok(DeviceCounts::default()) };
    let text = fs::read_to_string(statistics).with_context(|| format!("reading {}", statistics.display()))?;
    let fields: Vec<u64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let field = |index: usize| fields.get(index).copied().context("statistics of a device have 17 fields");
    let (read_bytes, written_bytes) = (field(2)? * SECTOR_BYTES, field(6)? * SECTOR_BYTES);
    Ok(DeviceCounts { writes: field(4)?, written_bytes, flushes: field(15)?, read_bytes })
}

fn cpu_seconds(daemon: Option<u32>) -> anyhow::Result<f64> {
    let own = clock_gettime(ClockId::ProcessCPUTime);
    let own = own.tv_sec as f64 + own.tv_nsec as f64 / 1e9;
    let children = ticks("/proc/self/stat", 13..15)?;
    let daemon = daemon.map_or(Ok(0.0), |pid| ticks(&format!("/proc/{pid}/stat"), 11..13))?;
    Ok(own + children + daemon)
}

/// The fields of `/proc/PID/stat` behind the name of the program, which may contain spaces.
fn fields_of(stat: &str) -> Option<Vec<&str>> {
    stat.rsplit_once(") ").map(|(_, fields)| fields.split(' ').collect())
}

/// The sum of some of these fields, in seconds.
fn ticks(path: &str, which: std::ops::Range<usize>) -> anyhow::Result<f64> {
    let stat = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
    let fields = fields_of(&stat).context("a process has a name")?;
    let some = fields.get(which).context("a process has CPU times")?;
    Ok(some.iter().map(|field| field.parse::<u64>()).sum::<Result<u64, _>>()? as f64 / TICKS_PER_SECOND)
}

/// The CPU time of kernel threads, in nanoseconds.
fn kernel_threads() -> anyhow::Result<HashMap<u32, u64>> {
    let mut times = HashMap::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let Some(pid) = path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok()) else { continue };
        // It may end meanwhile.
        let Ok(stat) = fs::read_to_string(path.join("stat")) else { continue };
        let flags = fields_of(&stat).and_then(|fields| fields.get(6)?.parse::<u64>().ok());
        if flags.is_some_and(|flags| flags & KERNEL_THREAD != 0) {
            let text = fs::read_to_string(path.join("schedstat")).unwrap_or_default();
            times.extend(text.split(' ').next().and_then(|time| time.parse().ok()).map(|time| (pid, time)));
        }
    }
    Ok(times)
}
