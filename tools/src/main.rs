//! The binary: reads the command line, has the command run, and ends with its exit status.

use std::borrow::Cow;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use sealblock::cli::Cli;
use sealblock::commands;
use sealblock::exit::{Exit, status};
use sealblock::interrupt;
use sealblock::report::note;
use sealblock_server::control::client::server_of_file;
use sealblock_stack::{Program, printable_lines, set_program};

fn main() -> ExitCode {
    // Bad usage ends here, with exit status 2.
    let cli = Cli::try_parse().unwrap_or_else(|error| refuse(&error));
    set_program(Program { is_server: false, note, server_of: server_of_file });
    match commands::run(&cli.into_command()) {
        // By the signal itself, so that a script ends with it.
        Ok(Exit::Interrupted) => interrupt::end(),
        Ok(exit) => exit.into(),
        Err(failure) => {
            // Where standard error is closed, the exit status has to do.
            if failure.is_unreported() {
                writeln!(io::stderr(), "{failure}").ok();
            }
            ExitCode::from(status(failure.cause()))
        }
    }
}

/// Says what is wrong with the command line, or the help that was asked for, and ends. What was typed, or made by a shell from names of
/// files, is repeated without what controls a terminal.
fn refuse(error: &clap::Error) -> ! {
    let text = error.render().to_string();
    match printable_lines(&text) {
        Cow::Borrowed(_) => error.exit(),
        Cow::Owned(text) => {
            write!(io::stderr(), "{text}").ok();
            std::process::exit(error.exit_code())
        }
    }
}
