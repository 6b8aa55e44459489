//! `sealblock-perf`: benchmarks for developers of sealblock.

use clap::Parser;
use sealblock_perf::comparisons::{Command, run};

fn main() -> anyhow::Result<()> {
    run(Command::parse())
}
