//! Benchmarks, one per claim. `docs/performance.md` has the results.
//!
//! Two programs use this crate. `sealblock bench` measures published claims, for users: [`mod@bench`]. `sealblock-perf`
//! compares parts of this project with baselines and with other builds, for its developers: [`comparisons`]. The
//! product does not need the latter: it is compiled with the feature `comparisons`, which is on by default and which
//! `sealblock` turns off.

// Figures for both programs that only the comparisons read.
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
