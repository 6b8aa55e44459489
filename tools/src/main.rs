//! The binary: reads the command line, has the command run, and ends with its exit status.

use std::borrow::Cow;
use std::env;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use sealblock::cli::{Cli, after_help};

use sealblock::commands;
use sealblock::exit::{Exit, status};
use sealblock::interrupt;
use sealblock::report::{note, output_error, say_aside};
use sealblock::terminal::{columns, has_colour, help_columns};
use sealblock_server::control::client::server_of_file;
use sealblock_stack::{Program, printable_lines, set_program};

fn main() -> ExitCode {
    // Bad usage ends here, with exit status 2.
    let cli = command_line();
    // What goes beyond the limit of file sizes (`ulimit -f`) is an error of the write, and does not end the process.
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default()).ok();
    set_program(Program { is_server: false, note, server_of: server_of_file, ends_by: interrupt::ends_by });
    match commands::run(&cli.into_command()) {
        // By the signal itself, so that a script ends with it.
        Ok(Exit::Interrupted) => interrupt::end(),
        Ok(exit) => exit.into(),
        Err(failure) => {
            // Where standard error is closed, the exit status has to do.
            if failure.is_unreported() {
                writeln!(io::stderr(), "{failure}").ok();
            }
            match interrupt::came() && failure.is_of_close() {
                // What the signal has ended did not close in time.
                true => interrupt::end(),
                false => ExitCode::from(status(failure.cause())),
            }
        }
    }
}

/// The command line of this process. Help, and what is wrong with the command line, are printed and end the process: with exit status 2
/// for bad usage.
fn command_line() -> Cli {
    let width = help_columns(columns(io::stdout()), env::var("COLUMNS").ok().as_deref());
    let matches = after_help::laid_out(Cli::command(), width).try_get_matches();
    matches.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap_or_else(|error| refuse(&error))
}

/// Prints help, the version, or what is wrong, without what controls a terminal: arguments may be names of files that a shell found.
fn refuse(error: &clap::Error) -> ! {
    let is_error = error.use_stderr();
    let is_terminal = if is_error { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
    let (no_color, term) = (env::var("NO_COLOR").ok(), env::var("TERM").ok());
    let plain = error.render().to_string();
    let text = match printable_lines(&plain) {
        Cow::Borrowed(_) if has_colour(is_terminal, no_color.as_deref(), term.as_deref()) => {
            error.render().ansi().to_string()
        }
        text => text.into_owned(),
    };
    let text = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => after_help::printed(&text),
        _ => text,
    };
    let written = match is_error {
        true => io::stderr().write_all(text.as_bytes()),
        false => io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()),
    };
    match written {
        // Whoever has closed the output has read enough.
        Err(error) if !is_error && error.kind() != io::ErrorKind::BrokenPipe => {
            let failure = output_error(&error);
            say_aside(&failure);
            std::process::exit(status(failure.cause()).into())
        }
        _ => std::process::exit(error.exit_code()),
    }
}
