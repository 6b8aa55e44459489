//! Benchmarks, one per claim. `docs/performance.md` has the results.
//!
//! Two programs use this crate. `sealblock bench` measures published claims, for users: [`mod@bench`]. `sealblock-perf`
//! compares parts of this project with baselines and with other builds, for its developers: [`comparisons`]. The
//! product does not need the comparisons: they are compiled with the feature `comparisons`, which is on by default and
//! which `sealblock` turns off.

// Some figures that both programs compute are read only by the comparisons.
#![cfg_attr(not(feature = "comparisons"), allow(dead_code))]

pub mod bench;
#[cfg(feature = "comparisons")]
pub mod comparisons;
pub mod datasum;

mod amplification;
mod contender;
mod counted;
mod cpu;
mod detection;
mod engine_files;
mod host_guard;
mod latency;
mod load;
mod medium;
mod meter;
mod mounts;
mod programs;
mod remote;
mod report;
mod setup;
