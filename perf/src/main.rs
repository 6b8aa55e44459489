//! Benchmarks, one per claim. See `docs/performance.md` for what came out.

mod amplification;
mod counted;
mod guards;
mod layouts;
mod load;
mod options;
mod report;
mod rig;
mod touched;
mod verify;
mod volume;

use clap::Parser;

use options::{Claim, Command};

fn main() -> anyhow::Result<()> {
    match Command::parse().claim {
        Claim::Guards => print!("{}", guards::run()?),
        Claim::Volume(options) => volume::run(&options)?,
        Claim::Amplification(options) => amplification::run(&options)?,
        Claim::Verify(options) => verify::run(&options)?,
        Claim::Layouts(options) => layouts::run(&options)?,
    }
    Ok(())
}
