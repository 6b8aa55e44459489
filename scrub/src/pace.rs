//! How fast: the limit on bytes a second, and giving way to others.

use std::num::NonZeroU64;
use std::time::Duration;

/// Bytes of a piece at most, so that what comes behind it waits little.
pub const PIECE_BYTES: u64 = 1 << 20;
/// A piece is also no larger than what the rate allows in this time, so that a low rate comes in small pieces.
pub const PIECE_TIME: Duration = Duration::from_millis(100);
/// How far a run that was held up may catch up with its rate.
pub const SLACK: Duration = Duration::from_millis(100);
/// A device is busy until this long after a request of somebody else. Gaps between the requests of one client are shorter.
pub const QUIET: Duration = Duration::from_millis(100);
/// How long a busy device is given way to before a piece is checked all the same: 4 MiB a second at least, or 1 TiB in three
/// days.
pub const MOST_WAIT: Duration = Duration::from_millis(250);
/// How often a busy device is looked at again.
pub const LOOK: Duration = Duration::from_millis(20);

/// What others do on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Activity {
    /// Requests of others that are not answered yet.
    pub in_flight: u64,
    /// Requests of others that were answered since the device was opened.
    pub answered: u64,
}

/// When the next piece may go. Times are steady.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    due: Duration,
    last_piece: Duration,
    last_busy: Option<Duration>,
    seen: Option<u64>,
    yielding: bool,
}

impl Pace {
    /// The pace of a run that begins, or goes on, now.
    pub(crate) fn from(now: Duration) -> Pace {
        Pace { due: now, last_piece: now, ..Pace::default() }
    }

    /// Nothing before this.
    pub(crate) fn hold_until(&mut self, due: Duration) {
        self.due = self.due.max(due);
    }

    /// How long to wait before the next piece; `None` when it may go now.
    pub(crate) fn wait(&mut self, now: Duration, activity: Activity, pause_when_busy: bool) -> Option<Duration> {
        self.look(now, activity);
        self.yielding = false;
        if now < self.due {
            return Some(self.due - now);
        }
        let is_busy = self.last_busy.is_some_and(|at| now < at + QUIET);
        if pause_when_busy && is_busy && now < self.last_piece + MOST_WAIT {
            self.yielding = true;
            return Some(LOOK);
        }
        None
    }

    /// A piece goes now.
    pub(crate) fn go(&mut self, now: Duration, bytes: u64, rate: Option<NonZeroU64>) {
        self.last_piece = now;
        if let Some(rate) = rate {
            let cost = Duration::from_secs_f64(bytes as f64 / rate.get() as f64);
            self.due = self.due.max(now.saturating_sub(SLACK)) + cost;
        }
    }

    /// Whether it waits because others use the device.
    pub(crate) fn is_yielding(&self) -> bool {
        self.yielding
    }

    fn look(&mut self, now: Duration, activity: Activity) {
        let seen = self.seen.replace(activity.answered);
        if activity.in_flight > 0 || seen.is_some_and(|seen| seen != activity.answered) {
            self.last_busy = Some(now);
        }
    }
}

/// Blocks of a piece, from 1 on, under this rate.
pub(crate) fn piece_blocks(most_blocks: u32, block_shift: u32, rate: Option<NonZeroU64>) -> u32 {
    let bytes = rate.map_or(PIECE_BYTES, |rate| {
        let allowed = u128::from(rate.get()) * PIECE_TIME.as_millis() / 1000;
        PIECE_BYTES.min(u64::try_from(allowed).unwrap_or(u64::MAX))
    });
    most_blocks.min((bytes >> block_shift) as u32).max(1)
}
