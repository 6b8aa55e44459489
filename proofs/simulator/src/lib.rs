//! The stack on a simulated disk, clock and scheduler, from one seed.

pub mod disk;
pub mod executor;
pub mod random;
pub mod trace;
