//! How long somebody tries to get a lost connection back.

use std::time::Duration;

/// How a lost connection is set up again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reconnect {
    /// Attempts after which the peer is given up for good; 0 gives it up with its first loss.
    pub attempts: u32,
    /// Time after which it is given up, counted from the loss.
    pub total: Duration,
    /// Pause before the second attempt; the first is made at once. Doubles with each further one.
    pub first_delay: Duration,
    /// The longest pause.
    pub max_delay: Duration,
}

impl Default for Reconnect {
    /// 100 attempts within 60 s, pauses from 100 ms to 5 s.
    fn default() -> Reconnect {
        Reconnect {
            attempts: 100,
            total: Duration::from_secs(60),
            first_delay: Duration::from_millis(100),
            max_delay: Duration::from_secs(5),
        }
    }
}
