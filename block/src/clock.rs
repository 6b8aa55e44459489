//! Time, as an argument.

use std::time::Duration;

/// A source of delays. Real stacks pass the reactor's clock, the simulator its own.
pub trait Clock {
    /// Resolves once `delay` has passed.
    fn sleep(&self, delay: Duration) -> impl Future<Output = ()>;
}
