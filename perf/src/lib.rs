//! Benchmarks, one per claim. See `docs/performance.md` for what came out.
//!
//! Two programs are made of it. `sealblock bench` measures what others have published, for users: [`mod@bench`]. `sealblock-perf` compares parts of this
//! project with baselines and with other builds of itself, for those who work on it: [`comparisons`]. The product does without it: it is compiled with the
//! feature `comparisons`, as it is by default, and `sealblock` asks for none.

// Figures that are taken for both programs, and read by the comparisons alone.
#![cfg_attr(not(feature = "comparisons"), allow(dead_code))]

pub mod bench;
#[cfg(feature = "comparisons")]
pub mod comparisons;

mod amplification;
mod contender;
mod counted;
mod cpu;
mod detection;
mod host_guard;
mod latency;
mod load;
mod medium;
mod remote;
mod report;
mod setup;
