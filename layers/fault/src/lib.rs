//! Faults by rule and by seed: errors, delays, flipped bits, torn, lost and misdirected writes.
//!
//! [`FaultLayer`] injects faults into a device, by block; [`FaultMedium`] injects them into a medium, by sector and byte, since a
//! block device cannot tear a block. Both follow the same [`Rules`], as in
//! `fault:[seed=7;read-error@100..200;flip@5;lost-write%0.01;delay=10ms@0..99],TARGET`.
//!
//! Invariants: the same rules and the same requests in the same order get the same faults, on every machine; nothing here
//! uses a clock or a random source of the system. A request without a fault is neither changed nor copied.

mod layer;
mod medium;
mod rng;
mod rules;

pub use layer::FaultLayer;
pub use medium::FaultMedium;
pub use rng::Counts;
pub use rules::{Chance, Fault, Rule, RuleError, Rules, Span};
