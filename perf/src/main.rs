//! `sealblock-perf`: benchmarks for those who work on sealblock.

use clap::Parser;
use sealblock_perf::comparisons::{Command, run};

fn main() -> anyhow::Result<()> {
    run(Command::parse())
}
