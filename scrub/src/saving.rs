//! When what is remembered is due to be written.

use std::time::Duration;

/// How often a position that moves is written.
pub const SAVE_EVERY: Duration = Duration::from_secs(5);

/// What is not written yet.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SaveTimer {
    /// Something has changed.
    changed: bool,
    /// Something has changed that is not to wait.
    urgent: bool,
    /// When it was written, or tried, last.
    last: Option<Duration>,
}

impl SaveTimer {
    /// The position or the counts have changed.
    pub(crate) fn progressed(&mut self) {
        self.changed = true;
    }

    /// A run has begun, was held, or has ended.
    pub(crate) fn state_changed(&mut self) {
        (self.changed, self.urgent) = (true, true);
    }

    /// Whether it is time.
    pub(crate) fn is_due(&self, now: Duration) -> bool {
        self.urgent || self.changed && self.last.is_none_or(|last| now >= last + SAVE_EVERY)
    }

    /// Whether anything is not written.
    pub(crate) fn is_changed(&self) -> bool {
        self.changed
    }

    /// It is being written.
    pub(crate) fn begun(&mut self, now: Duration) {
        *self = SaveTimer { changed: false, urgent: false, last: Some(now) };
    }
}
