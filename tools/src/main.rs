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
use sealblock::report::note;
use sealblock::terminal::{columns, has_colour, help_columns};
use sealblock_server::control::client::server_of_file;
use sealblock_stack::{Program, printable_lines, set_program};

fn main() -> ExitCode {
    // Bad usage ends here, with exit status 2.
    let cli = command_line();
    // What goes beyond the limit of file sizes (`ulimit -f`) is an error of the write, and does not end the process.
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default()).ok();
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

/// The command line of this process. Help, and what is wrong with the command line, are printed and end the process: with exit status 2
/// for bad usage.
fn command_line() -> Cli {
    let width = help_columns(columns(io::stdout()), env::var("COLUMNS").ok().as_deref());
    let matches = after_help::laid_out(Cli::command(), width).try_get_matches();
    matches.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap_or_else(|error| refuse(&error))
}

/// What was typed, or made by a shell from names of files, is repeated without what controls a terminal.
fn refuse(error: &clap::Error) -> ! {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand) {
        let is_error = error.use_stderr();
        let is_terminal = if is_error { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
        let (no_color, term) = (env::var("NO_COLOR").ok(), env::var("TERM").ok());
        let help = match has_colour(is_terminal, no_color.as_deref(), term.as_deref()) {
            true => error.render().ansi().to_string(),
            false => error.render().to_string(),
        };
        let help = after_help::printed(&help);
        // Whoever has closed the output has read enough.
        _ = if is_error { io::stderr().write_all(help.as_bytes()) } else { io::stdout().write_all(help.as_bytes()) };
        std::process::exit(error.exit_code())
    }
    let text = error.render().to_string();
    match printable_lines(&text) {
        Cow::Borrowed(_) => error.exit(),
        Cow::Owned(text) => {
            write!(io::stderr(), "{text}").ok();
            std::process::exit(error.exit_code())
        }
    }
}
