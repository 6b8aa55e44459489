//! A clock that runs faster than the machine's, so that the mirror's pauses of seconds meet requests of microseconds.

use std::time::Duration;

use sealblock_block::Clock;

use crate::executor::Executor;

/// Shortens every pause by a factor.
#[derive(Clone)]
pub(super) struct FasterClock {
    pub executor: Executor,
    pub factor: u32,
}

impl Clock for FasterClock {
    fn sleep(&self, delay: Duration) -> impl Future<Output = ()> {
        self.executor.delay(delay / self.factor)
    }
}
