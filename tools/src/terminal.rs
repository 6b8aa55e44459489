//! The terminal: how wide it is, whether it gets colours, and what it is shown of a command line that is not understood.

use std::borrow::Cow;
use std::env;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use rustix::termios::tcgetwinsize;
use sealblock_stack::printable_lines;

use crate::cli::{Cli, after_help};

/// The width of text where nothing says how wide it may be, and the greatest width of text that is easily read.
const READABLE_COLUMNS: usize = 100;
/// The least width that is laid out for.
const MIN_COLUMNS: usize = 40;

/// How many columns a terminal has now; `None` for what is no terminal.
pub fn columns(of: impl AsFd) -> Option<usize> {
    let size = tcgetwinsize(of).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Whether a terminal gets colours (no-color.org).
fn has_colour(is_terminal: bool, no_color: Option<&str>, term: Option<&str>) -> bool {
    is_terminal && no_color.unwrap_or_default().is_empty() && term != Some("dumb")
}

/// The columns to lay out help for: those of the terminal, or else those that the environment says.
fn help_columns(terminal: Option<usize>, environment: Option<&str>) -> usize {
    let said = || environment?.parse().ok();
    terminal.or_else(said).unwrap_or(READABLE_COLUMNS).clamp(MIN_COLUMNS, READABLE_COLUMNS)
}

/// The command line of this process. Help, and what is wrong with the command line, are printed and end the process: with exit status 2
/// for bad usage.
pub fn command_line() -> Cli {
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

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn help_is_as_wide_as_the_terminal_or_as_is_readable() {
        assert_eq!(help_columns(Some(60), Some("80")), 60, "the terminal itself knows best");
        assert_eq!(help_columns(None, Some("80")), 80);
        for environment in [None, Some(""), Some("wide")] {
            assert_eq!(help_columns(None, environment), 100, "{environment:?}");
        }
        assert_eq!((help_columns(Some(250), None), help_columns(Some(1), None)), (100, 40));
        assert_eq!(columns(File::open("/dev/null").unwrap()), None, "what is no terminal has no columns");
    }

    #[test]
    fn colours_are_for_terminals_that_want_them() {
        assert!(has_colour(true, None, Some("xterm")) && has_colour(true, Some(""), None));
        assert!(!has_colour(false, None, Some("xterm")), "a pipe");
        assert!(!has_colour(true, Some("1"), Some("xterm")) && !has_colour(true, None, Some("dumb")));
    }
}
