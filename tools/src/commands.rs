//! What the commands do, one file for each.

pub mod completions;
pub mod man;

use crate::cli::Command;
use crate::exit::{Cause, Exit, Failure};

/// Does what the command line asks.
pub fn run(command: &Command) -> Result<Exit, Failure> {
    match command {
        Command::Create(_) => absent("create"),
        Command::Info(_) => absent("info"),
        Command::Verify(_) => absent("verify"),
        Command::Compare(_) => absent("compare"),
        Command::Zero(_) => absent("zero"),
        Command::Discard(_) => absent("discard"),
        Command::Copy(_) => absent("copy"),
        Command::Corrupt(_) => absent("corrupt"),
        Command::Demo(_) => absent("demo"),
        Command::Completions(arguments) => completions::run(arguments),
        Command::Man(arguments) => man::run(arguments),
    }
}

/// A command that this binary knows by name and not by heart.
fn absent(command: &str) -> Result<Exit, Failure> {
    Err(Failure::new(Cause::Absent, command, "not built into this binary yet").advise("a newer version"))
}
