//! Claims of blocks: `models` under random interleavings of their atomic operations and locks, with twins that break one
//! rule each; `steps` one step after the other; `random` against a simple model.

/// The model checker's lock and atomics replace the standard ones for the file that is included below, and it has few
/// places, so that few changes need more.
mod primitives {
    pub use shuttle::sync::atomic::{AtomicU64, Ordering};
    pub use shuttle::sync::{Mutex, MutexGuard};

    pub const LANE_PLACES: usize = 2;
    pub const EXCLUSION_PLACES: usize = 1;
}

#[path = "../../src/claims.rs"]
mod claims;

mod models;
mod random;
mod steps;
