//! What happens too often to be told each time: counted, and told once a minute.

use std::time::{Duration, Instant};

use crate::kept::Locked;

/// The time between two tellings.
const REST: Duration = Duration::from_secs(60);

/// Counts. What a peer can cause at will must not fill anybody's log.
#[derive(Default)]
pub(crate) struct LogRateLimit(Locked<State>);

#[derive(Default)]
struct State {
    untold: u64,
    told: Option<Instant>,
}

impl LogRateLimit {
    /// Counts one more. The number to tell, this one and those before that were not told, if it is time to tell it.
    pub(crate) fn note(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        state.untold += 1;
        if state.told.is_some_and(|told| now.saturating_duration_since(told) < REST) {
            return None;
        }
        state.told = Some(now);
        Some(std::mem::take(&mut state.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_at_once_and_a_flood_as_a_number() {
        let (flood, start) = (LogRateLimit::default(), Instant::now());
        assert_eq!(flood.note(start), Some(1));
        for _ in 0..1000 {
            assert_eq!(flood.note(start + REST / 2), None);
        }
        assert_eq!(flood.note(start + REST), Some(1001));
        assert_eq!(flood.note(start + REST), None);
        assert_eq!(flood.note(start + REST * 3), Some(2));
    }
}
