//! The front half of the binary `sealblock`.
pub mod range;
pub mod rate;
mod size;
pub mod target;
