//! Faults by rule and by seed: errors, delays, flipped bits, torn, lost and misdirected writes.
//!
//! [`FaultLayer`] makes the device below it faulty, block by block; [`FaultMedium`] makes a medium faulty, sector by sector and byte
//! by byte, since a block device cannot tear a block. Both follow the same [`Rules`], as in
//! `fault:[seed=7;read-error@100..200;flip@5;lost-write%0.01;delay=10ms@0..99],TARGET`.
//!
//! Invariants: the same rules and the same requests in the same order meet the same faults, on every machine; nothing here
//! asks a clock or a source of randomness of the system. Without a fault a request goes through untouched and uncopied.

mod counts;
mod layer;
mod medium;
mod parse;
mod rng;
mod rules;

pub use counts::Counts;
pub use layer::FaultLayer;
pub use medium::FaultMedium;
pub use parse::RuleError;
pub use rules::{Chance, Fault, Rule, Rules, Span};
