//! Which kinds of requests fail at present: the last one of them did, for a reason that lies with the device.
//!
//! Invariant: while nothing fails, a request that succeeds costs one relaxed load.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use sealblock_block::RequestKind;

use crate::control::server::FailingStatus;

/// Characters that are kept of a reason.
const MAX_CHARACTERS: usize = 300;

/// What fails of one device.
#[derive(Default)]
pub struct Failing {
    any: AtomicBool,
    by_kind: Mutex<[Option<FailingStatus>; 3]>,
}

/// Requests that fail and succeed together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Reads,
    Writes,
    Flushes,
}

impl Kind {
    const fn of(kind: RequestKind) -> Kind {
        match kind {
            RequestKind::Read
            | RequestKind::Verify
            | RequestKind::Compare
            | RequestKind::Checksum
            | RequestKind::BlockStatus
            | RequestKind::ReadReserved => Kind::Reads,
            RequestKind::Write
            | RequestKind::WriteZeroes
            | RequestKind::Discard
            | RequestKind::WriteUncorrectable
            | RequestKind::Repair
            | RequestKind::WriteReserved => Kind::Writes,
            RequestKind::Flush => Kind::Flushes,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Kind::Reads => "reads",
            Kind::Writes => "writes",
            Kind::Flushes => "flushes",
        }
    }
}

impl Failing {
    /// A request of this kind failed.
    pub fn failed(&self, kind: RequestKind, by: &str, reason: &str) {
        let (kind, now) = (Kind::of(kind), unix_s());
        let reason = reason.chars().take(MAX_CHARACTERS).collect();
        let mut by_kind = self.lock();
        let place = &mut by_kind[kind as usize];
        let (since_unix_s, times) = place.as_ref().map_or((now, 0), |before| (before.since_unix_s, before.times));
        *place = Some(FailingStatus {
            requests: kind.name().to_owned(),
            reason,
            by: by.to_owned(),
            since_unix_s,
            last_unix_s: now,
            times: times + 1,
        });
        self.any.store(true, Ordering::Relaxed);
    }

    /// A request of this kind succeeded.
    pub fn succeeded(&self, kind: RequestKind) {
        if self.any.load(Ordering::Relaxed) {
            let mut by_kind = self.lock();
            by_kind[Kind::of(kind) as usize] = None;
            self.any.store(by_kind.iter().any(Option::is_some), Ordering::Relaxed);
        }
    }

    /// What fails now.
    pub fn now(&self) -> Vec<FailingStatus> {
        self.lock().iter().flatten().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, [Option<FailingStatus>; 3]> {
        self.by_kind.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Seconds since 1970.
pub fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_is_counted_until_one_of_its_kind_succeeds() {
        let failing = Failing::default();
        failing.failed(RequestKind::Write, "a", "full");
        failing.failed(RequestKind::Discard, "b", &"x".repeat(10_000));
        failing.failed(RequestKind::Flush, "a", "gone");
        let now = failing.now();
        assert_eq!((now.len(), now[0].times, now[0].requests.as_str(), now[0].by.as_str()), (2, 2, "writes", "b"));
        assert_eq!(now[0].reason.len(), MAX_CHARACTERS);
        failing.succeeded(RequestKind::Read);
        assert_eq!(failing.now().len(), 2, "reads are another kind");
        failing.succeeded(RequestKind::WriteZeroes);
        assert_eq!(failing.now().iter().map(|one| one.requests.as_str()).collect::<Vec<_>>(), ["flushes"]);
        failing.succeeded(RequestKind::Flush);
        assert!(failing.now().is_empty() && !failing.any.load(Ordering::Relaxed));
    }
}
