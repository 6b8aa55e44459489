//! Benchmarks, one per claim.
fn main() {}
