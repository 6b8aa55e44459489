//! The binary: reads the command line, has the command run, and ends with its exit status.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use sealblock::cli::Cli;
use sealblock::commands;
use sealblock::exit::Cause;

fn main() -> ExitCode {
    // Bad usage ends here, with exit status 2.
    let cli = Cli::parse();
    match commands::run(&cli.settled()) {
        Ok(exit) => exit.into(),
        Err(failure) => {
            // Who closed a pipe knows it, and expects no words about it. Where standard error is closed, the exit status
            // has to do.
            if failure.cause() != Cause::Unread {
                writeln!(io::stderr(), "{failure}").ok();
            }
            ExitCode::from(&failure)
        }
    }
}
