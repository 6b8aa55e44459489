//! Counts frequent events, and logs their number once a minute.

use std::time::{Duration, Instant};

use crate::kept::Locked;

/// The minimum time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Limits log lines that a peer can cause at will, so that they cannot fill a log.
#[derive(Default)]
pub(crate) struct LogRateLimit(Locked<RateState>);

#[derive(Default)]
struct RateState {
    unreported: u64,
    reported_at: Option<Instant>,
}

impl LogRateLimit {
    /// Counts one event. Returns the number of events since the last log line, if a line is due.
    pub(crate) fn count(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        state.unreported += 1;
        if state.reported_at.is_some_and(|reported_at| now.saturating_duration_since(reported_at) < LOG_INTERVAL) {
            return None;
        }
        state.reported_at = Some(now);
        Some(std::mem::take(&mut state.unreported))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_at_once_and_a_flood_as_a_number() {
        let (limit, start) = (LogRateLimit::default(), Instant::now());
        assert_eq!(limit.count(start), Some(1));
        for _ in 0..1000 {
            assert_eq!(limit.count(start + LOG_INTERVAL / 2), None);
        }
        assert_eq!(limit.count(start + LOG_INTERVAL), Some(1001));
        assert_eq!(limit.count(start + LOG_INTERVAL), None);
        assert_eq!(limit.count(start + LOG_INTERVAL * 3), Some(2));
    }
}
