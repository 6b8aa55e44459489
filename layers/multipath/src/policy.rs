//! Which path takes the next request, and what a failure says about its path. Pure.

use std::time::Duration;

use sealblock_block::ErrorKind;

/// How long and how often. Every wait of the layer has its limit here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RetryPolicy {
    /// Time that a request waits while no path is live, or while its blocks may still be changed by a lost path.
    pub no_path_timeout: Duration,
    /// Time for one answer, after which the path has failed. For devices without a limit of their own: it is to be longer than
    /// that of those that have one. Noticed up to an eighth late.
    pub request_timeout: Duration,
    /// Paths that one request may lose before it fails, so that a request which kills its target stops doing so.
    pub max_path_failures: u32,
    /// Time without a request after which a path is asked whether it is still there.
    pub idle: Duration,
    /// Pause before a path that failed is opened anew; doubles with each attempt that fails.
    pub min_reprobe: Duration,
    /// The longest such pause.
    pub max_reprobe: Duration,
    /// Time after which a target has certainly given up a host that it does not hear any more: over NVMe, twice the keep
    /// alive timeout, and some.
    pub quiesce_time: Duration,
    /// Whether a write that was answered may be lost with the target until a Flush.
    pub volatile: bool,
}

impl Default for RetryPolicy {
    /// 30 s without a path, 60 s for an answer, 8 paths lost, 5 s to 10 s without a request, probes after 1 s to 10 s, 15 s of
    /// quarantine, volatile.
    fn default() -> RetryPolicy {
        RetryPolicy {
            no_path_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(60),
            max_path_failures: 8,
            idle: Duration::from_secs(5),
            min_reprobe: Duration::from_secs(1),
            max_reprobe: Duration::from_secs(10),
            quiesce_time: Duration::from_secs(15),
            volatile: true,
        }
    }
}

impl RetryPolicy {
    /// The pause before a path is opened anew for the first time (0), the second, and so on.
    pub(crate) fn pause(&self, attempt: u32) -> Duration {
        self.min_reprobe.saturating_mul(1 << attempt.min(16)).min(self.max_reprobe)
    }
}

/// Whose failure it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FailureScope {
    /// The path's: another one may do better.
    Path,
    /// The data's, the device's or the request's: the same on every path.
    Final,
}

/// Judges a failure.
pub(crate) fn classify(failure: &ErrorKind) -> FailureScope {
    match failure {
        ErrorKind::Unreachable { .. } => FailureScope::Path,
        ErrorKind::Integrity(_)
        | ErrorKind::Miscompare { .. }
        | ErrorKind::Media { .. }
        | ErrorKind::NoSpace { .. }
        | ErrorKind::ReadOnly
        | ErrorKind::Range { .. }
        | ErrorKind::Limit { .. }
        | ErrorKind::Absent(_) => FailureScope::Final,
    }
}

/// The paths that are live, taken in turns.
#[derive(Debug)]
pub(crate) struct RoundRobin {
    /// The incarnation of each live path.
    live: Vec<Option<u64>>,
    next: usize,
    incarnations: u64,
}

impl RoundRobin {
    /// Of so many paths, none of them live.
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

    /// A path is there, or there again; gives its incarnation.
    pub(crate) fn restore(&mut self, path: usize) -> u64 {
        self.incarnations += 1;
        self.live[path] = Some(self.incarnations);
        self.incarnations
    }

    /// The incarnation of a path, if it is live.
    pub(crate) fn live(&self, path: usize) -> Option<u64> {
        self.live[path]
    }

    /// An incarnation of a path has failed; tells whether that is news.
    pub(crate) fn fail(&mut self, path: usize, incarnation: u64) -> bool {
        self.live[path].take_if(|live| *live == incarnation).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_paths_take_turns_and_failed_ones_are_left_out() {
        let mut turns = RoundRobin::new(3);
        assert_eq!(turns.pick(), None);
        let of: Vec<u64> = (0..3).map(|path| turns.restore(path)).collect();
        let next = |turns: &mut RoundRobin| turns.pick().map(|(path, _)| path);
        assert_eq!([(); 4].map(|()| next(&mut turns)), [Some(0), Some(1), Some(2), Some(0)]);
        assert!(turns.fail(1, of[1]) && !turns.fail(1, of[1]), "it fails once");
        assert_eq!([(); 4].map(|()| next(&mut turns)), [Some(2), Some(0), Some(2), Some(0)]);
        turns.restore(1);
        assert!(!turns.fail(1, of[1]), "an earlier incarnation says nothing about this one");
        assert_eq!([(); 3].map(|()| next(&mut turns)), [Some(1), Some(2), Some(0)]);
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
            assert_eq!(classify(&failure), FailureScope::Final, "{failure}");
        }
    }

    #[test]
    fn probes_pause_longer_and_longer() {
        let patience = RetryPolicy::default();
        let seconds = |attempt| patience.pause(attempt).as_secs();
        assert_eq!([0, 1, 2, 3, 4, 99].map(seconds), [1, 2, 4, 8, 10, 10]);
    }
}
