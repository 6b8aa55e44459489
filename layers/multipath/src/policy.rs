//! Which path is used for the next request, and what a failure means for its path. Pure.

use std::time::Duration;

use sealblock_block::ErrorKind;

/// Timeouts and retry limits. Every wait of the layer is bounded by one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RetryPolicy {
    /// The time that a request waits while no path is live, or while a lost path may still change its blocks.
    pub no_path_timeout: Duration,
    /// The time after which a path with an unanswered request counts as failed. For devices without a timeout of their
    /// own; it must be longer than the timeouts of the others. It is noticed up to an eighth late.
    pub request_timeout: Duration,
    /// The number of paths that one request may lose before it fails, so that a request that crashes its target is not
    /// retried forever.
    pub max_path_failures: u32,
    /// The time without a request after which a path is probed with a read of one block.
    pub idle_probe_interval: Duration,
    /// Delay before a failed path is reopened; doubles with each failed attempt.
    pub min_reprobe: Duration,
    /// The maximum of this delay.
    pub max_reprobe: Duration,
    /// The time after which a target has certainly disconnected a host from which it receives nothing: over NVMe, twice
    /// the Keep Alive timeout and a bit more (CQT, NVM Express Base specification).
    pub quiesce_time: Duration,
    /// True if a target restart may lose completed writes that no Flush has made durable.
    pub has_volatile_cache: bool,
}

impl Default for RetryPolicy {
    /// 30 s without a path, 60 s for a request, 8 path failures, a probe after 5 s without a request, reopening after 1
    /// s to 10 s, 15 s of quiesce time, a volatile cache.
    fn default() -> RetryPolicy {
        RetryPolicy {
            no_path_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(60),
            max_path_failures: 8,
            idle_probe_interval: Duration::from_secs(5),
            min_reprobe: Duration::from_secs(1),
            max_reprobe: Duration::from_secs(10),
            quiesce_time: Duration::from_secs(15),
            has_volatile_cache: true,
        }
    }
}

impl RetryPolicy {
    /// The delay before the first attempt (0) to reopen a path, the second, and so on.
    pub(crate) fn reprobe_delay(&self, attempt: u32) -> Duration {
        self.min_reprobe.saturating_mul(1 << attempt.min(16)).min(self.max_reprobe)
    }
}

/// Whether an error affects other paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FailureScope {
    /// The path failed: another one may succeed.
    Path,
    /// The data, the device or the request failed: every path has the same result.
    Device,
}

/// Returns whether an error concerns the path or the device behind it.
pub(crate) fn classify(failure: &ErrorKind) -> FailureScope {
    match failure {
        ErrorKind::Unreachable { .. } => FailureScope::Path,
        ErrorKind::Integrity(_)
        | ErrorKind::Expectation { .. }
        | ErrorKind::Miscompare { .. }
        | ErrorKind::Media { .. }
        | ErrorKind::NoSpace { .. }
        | ErrorKind::ReadOnly
        | ErrorKind::Range { .. }
        | ErrorKind::Limit { .. }
        | ErrorKind::Absent(_)
        | ErrorKind::MayBeOlder(_) => FailureScope::Device,
    }
}

/// The live paths, used in turns.
#[derive(Debug)]
pub(crate) struct RoundRobin {
    /// The incarnation of each live path.
    live: Vec<Option<u64>>,
    next: usize,
    incarnations: u64,
}

impl RoundRobin {
    /// `paths` paths, none of them live.
    pub(crate) fn new(paths: usize) -> RoundRobin {
        RoundRobin { live: vec![None; paths], next: 0, incarnations: 0 }
    }

    /// The next path and its incarnation.
    pub(crate) fn pick(&mut self) -> Option<(usize, u64)> {
        let paths = self.live.len();
        let found = (0..paths).map(|i| (self.next + i) % paths).find_map(|path| Some((path, self.live[path]?)))?;
        self.next = found.0 + 1;
        Some(found)
    }

    /// True if a path is live.
    pub(crate) fn has_live(&self) -> bool {
        self.live.iter().any(Option::is_some)
    }

    /// Marks a path as live; returns its new incarnation.
    pub(crate) fn restore(&mut self, path: usize) -> u64 {
        self.incarnations += 1;
        self.live[path] = Some(self.incarnations);
        self.incarnations
    }

    /// The incarnation of a path, if it is live.
    pub(crate) fn live(&self, path: usize) -> Option<u64> {
        self.live[path]
    }

    /// Marks an incarnation of a path as failed; false if it had failed before.
    pub(crate) fn fail(&mut self, path: usize, incarnation: u64) -> bool {
        self.live[path].take_if(|live| *live == incarnation).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_paths_take_turns_and_failed_ones_are_left_out() {
        let mut round_robin = RoundRobin::new(3);
        assert_eq!(round_robin.pick(), None);
        let of: Vec<u64> = (0..3).map(|path| round_robin.restore(path)).collect();
        let next = |round_robin: &mut RoundRobin| round_robin.pick().map(|(path, _)| path);
        assert_eq!([(); 4].map(|()| next(&mut round_robin)), [Some(0), Some(1), Some(2), Some(0)]);
        assert!(round_robin.fail(1, of[1]) && !round_robin.fail(1, of[1]), "it fails once");
        assert_eq!([(); 4].map(|()| next(&mut round_robin)), [Some(2), Some(0), Some(2), Some(0)]);
        round_robin.restore(1);
        assert!(!round_robin.fail(1, of[1]), "an earlier incarnation says nothing about this one");
        assert_eq!([(); 3].map(|()| next(&mut round_robin)), [Some(1), Some(2), Some(0)]);
    }

    #[test]
    fn only_the_paths_own_failures_are_tried_elsewhere() {
        let reason = || "so".to_owned();
        assert_eq!(classify(&ErrorKind::Unreachable { reason: reason() }), FailureScope::Path);
        for failure in [
            ErrorKind::Media { reason: reason() },
            ErrorKind::NoSpace { reason: reason() },
            ErrorKind::ReadOnly,
            ErrorKind::Miscompare { lba: sealblock_units::Lba::ZERO },
            ErrorKind::Limit { what: "blocks", limit: 1, actual: 2 },
        ] {
            assert_eq!(classify(&failure), FailureScope::Device, "{failure}");
        }
    }

    #[test]
    fn probes_pause_longer_and_longer() {
        let policy = RetryPolicy::default();
        let seconds = |attempt| policy.reprobe_delay(attempt).as_secs();
        assert_eq!([0, 1, 2, 3, 4, 99].map(seconds), [1, 2, 4, 8, 10, 10]);
    }
}
