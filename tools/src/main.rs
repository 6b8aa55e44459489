//! The binary: reads the command line, has the command run, and ends with its exit status.

use std::process::ExitCode;

use clap::Parser;
use sealblock::cli::Cli;
use sealblock::commands;

fn main() -> ExitCode {
    // Bad usage ends here, with exit status 2.
    let cli = Cli::parse();
    match commands::run(&cli.command) {
        Ok(exit) => exit.into(),
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(&failure)
        }
    }
}
