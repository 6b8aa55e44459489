//! The binary: reads the command line, has the command run, and ends with its exit status.

use std::io::{self, Write};
use std::process::ExitCode;

use sealblock::commands;
use sealblock::exit::{Exit, status};
use sealblock::interrupt;
use sealblock::report::note;
use sealblock::terminal::command_line;
use sealblock_server::control::client::server_of_file;
use sealblock_stack::{Program, set_program};

fn main() -> ExitCode {
    // Bad usage ends here, with exit status 2.
    let cli = command_line();
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
