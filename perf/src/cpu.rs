//! CPUs and CPU time (which other tasks of the machine do not affect), and work over memory that is measured with it.

use std::hint::black_box;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::thread::{CpuSet, sched_getaffinity};
use rustix::time::{ClockId, clock_gettime};
use sealblock_runtime_reactor::CoreHandle;

/// The alignment of the working set.
const PAGE_BYTES: usize = 4096;

/// Work that passes over the whole working set once and returns a result, so that the compiler cannot remove it.
pub type Pass<'a> = Box<dyn FnMut() -> u64 + 'a>;

/// A page-aligned buffer, filled with varying bytes.
pub struct Memory {
    bytes: Vec<u8>,
    start: usize,
}

impl Memory {
    /// Allocates and fills this many bytes.
    pub fn new(bytes: usize) -> anyhow::Result<Memory> {
        let mut memory = Vec::new();
        memory.try_reserve_exact(bytes + PAGE_BYTES).context("no memory for a working set that no cache holds")?;
        memory.extend((0..bytes + PAGE_BYTES).map(|i| (i ^ i >> 9 ^ i >> 17) as u8));
        let start = memory.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
        Ok(Memory { bytes: memory, start })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..][..self.bytes.len() - PAGE_BYTES]
    }
}

/// CPU seconds of one pass, averaged over a turn; other tasks do not affect it.
pub fn cpu_seconds(pass: &mut Pass<'_>, turn: Duration) -> f64 {
    let (start, cpu, mut passes) = (Instant::now(), thread_cpu(), 0_u32);
    loop {
        black_box(pass());
        passes += 1;
        if start.elapsed() >= turn {
            return (thread_cpu() - cpu) / f64::from(passes);
        }
    }
}

/// Time that this thread has spent on a CPU, in seconds.
pub fn thread_cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The same for a core.
pub async fn core_cpu(core: &CoreHandle) -> anyhow::Result<f64> {
    core.call(|| async { thread_cpu() }).await.context("the target's core is gone")
}

/// The CPUs that this process may use, at least one.
pub fn allowed_cpus() -> Vec<usize> {
    let allowed = sched_getaffinity(None).ok();
    let is_allowed = |cpu: &usize| allowed.as_ref().is_some_and(|set| set.is_set(*cpu));
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(is_allowed).collect();
    match cpus.is_empty() {
        true => (0..available_parallelism().map_or(1, usize::from)).collect(),
        false => cpus,
    }
}

/// CPUs that this process may use: one for a host, and another one for a target if there are two.
pub fn two_cpus() -> (usize, usize) {
    let cpus = allowed_cpus();
    let host = cpus.first().copied().unwrap_or(0);
    (host, cpus.get(1).copied().filter(|_| available_parallelism().map_or(1, usize::from) > 1).unwrap_or(host))
}
