//! The terminal: how wide it is, and whether it gets colours.
//!
//! The width is asked for each time: a terminal is resized while a command runs. What is no terminal has no width, and help for a file
//! or a pipe is laid out as the environment says, or else in a width that is easily read.

use std::os::fd::AsFd;

use rustix::termios::tcgetwinsize;

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
pub fn has_colour(is_terminal: bool, no_color: Option<&str>, term: Option<&str>) -> bool {
    is_terminal && no_color.unwrap_or_default().is_empty() && term != Some("dumb")
}

/// The columns to lay out help for: those of the terminal, or else those that the environment says.
pub fn help_columns(terminal: Option<usize>, environment: Option<&str>) -> usize {
    let said = || environment?.parse().ok();
    terminal.or_else(said).unwrap_or(READABLE_COLUMNS).clamp(MIN_COLUMNS, READABLE_COLUMNS)
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
