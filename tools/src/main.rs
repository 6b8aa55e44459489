//! The binary: reads the command line, has the command run, and ends with its exit status.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use sealblock::cli::Cli;
use sealblock::commands;
use sealblock::exit::Exit;
use sealblock::interrupt;

fn main() -> ExitCode {
    // Bad usage ends here, with exit status 2.
    let cli = Cli::parse();
    match commands::run(&cli.settled()) {
        // By the signal itself, so that a script ends with it.
        Ok(Exit::Interrupted) => interrupt::end(),
        Ok(exit) => exit.into(),
        Err(failure) => {
            // Where standard error is closed, the exit status has to do.
            if failure.is_unreported() {
                writeln!(io::stderr(), "{failure}").ok();
            }
            ExitCode::from(&failure)
        }
    }
}
