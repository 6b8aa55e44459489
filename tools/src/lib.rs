//! The binary `sealblock`: its command line, what it understands, and what it answers.
//!
//! A library beside the binary, so that tests reach the commands. The files under `commands` do the work, one for each
//! subcommand.

pub mod cli;
pub mod exit;
pub mod findings;
pub mod interrupt;
pub mod progress;
pub mod report;
pub mod tally;

/// What the commands do.
pub mod commands {
    pub mod compare;
    pub mod copy;
    pub mod corrupt;
    pub mod create;
    pub mod demo;
    pub mod discover;
    pub mod info;
    pub mod man;
    pub mod mirror;
    pub mod rescue;
    pub mod resize;
    pub mod scrub;
    pub mod serve;
    pub mod status;
    pub mod unmap;
    pub mod verify;
}

use sealblock_stack::StackError;

use cli::Command;
use exit::Exit;

/// Does what the command line asks.
pub fn run(command: &Command) -> Result<Exit, StackError> {
    match command {
        Command::Create(arguments) => commands::create::run(arguments),
        Command::Info(arguments) => commands::info::run(arguments),
        Command::Serve(arguments) => commands::serve::run(arguments),
        Command::Status(arguments) => commands::status::run(arguments),
        Command::Log(arguments) => commands::status::log(arguments),
        Command::Scrub(arguments) => commands::scrub::run(arguments),
        Command::Discover(arguments) => commands::discover::run(arguments),
        Command::Verify(arguments) => commands::verify::run(arguments),
        Command::Compare(arguments) => commands::compare::run(arguments),
        Command::Zero(arguments) => commands::unmap::zero(arguments),
        Command::Discard(arguments) => commands::unmap::discard(arguments),
        Command::Copy(arguments) => commands::copy::run(arguments),
        Command::Rescue(arguments) => commands::rescue::run(arguments),
        Command::Resize(arguments) => commands::resize::run(arguments),
        Command::Mirror(arguments) => commands::mirror::run(arguments),
        Command::Corrupt(arguments) => commands::corrupt::run(arguments),
        Command::Demo(arguments) => commands::demo::run(arguments),
        Command::Completions(arguments) => commands::man::completions(arguments),
        Command::Man(arguments) => commands::man::run(arguments),
    }
}
