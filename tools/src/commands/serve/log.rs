//! What the server tells its operator besides events: lines on standard error, none of them about a single command.

use std::env;
use std::io;

use tracing::level_filters::LevelFilter;

use crate::cli::LogLevel;
use crate::exit::{Cause, Failure};

/// The level where the command line has none.
const VARIABLE: &str = "SEALBLOCK_LOG";

/// Has warnings and worse, or whatever is asked for, written to standard error from now on.
///
/// # Errors
/// Bad usage: the variable names no level.
pub fn install(asked: Option<LogLevel>) -> Result<(), Failure> {
    let level = match (asked, env::var(VARIABLE)) {
        (Some(level), _) => level,
        (None, Ok(text)) => {
            level_of(&text).map_err(|why| Failure::new(Cause::Usage, "reading the environment", why))?
        }
        (None, Err(_)) => LogLevel::default(),
    };
    tracing_subscriber::fmt()
        .with_max_level(filter(level))
        .with_writer(io::stderr)
        .with_ansi(false)
        .with_target(false)
        // A standard error that is closed is no reason to end.
        .log_internal_errors(false)
        .try_init()
        .map_err(|error| Failure::new(Cause::Io, "starting", error))
}

fn level_of(text: &str) -> Result<LogLevel, String> {
    let level = <LogLevel as clap::ValueEnum>::from_str(text, true);
    level.map_err(|_| format!("{VARIABLE}={text} is no level: off, error, warn, info or debug"))
}

fn filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_known_by_name_and_others_refused_with_the_names() {
        assert_eq!(level_of("Debug"), Ok(LogLevel::Debug));
        assert_eq!(level_of("off").map(filter), Ok(LevelFilter::OFF));
        assert!(level_of("loud").unwrap_err().contains("SEALBLOCK_LOG=loud is no level: off, error, warn"));
    }
}
