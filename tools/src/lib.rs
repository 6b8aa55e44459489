//! The binary `sealblock`: its command line, what it understands, and what it answers.
//!
//! A library beside the binary, so that tests reach the commands. The files under `commands` do the work, one for each
//! subcommand.

// These macros panic where standard output or error is closed or full. What is printed goes through `report`.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod cli;
pub mod exit;
pub mod findings;
pub mod interrupt;
pub mod new_file;
pub mod outputs;
pub mod progress;
pub mod report;
pub mod tally;
pub mod terminal;

/// What the commands do.
pub mod commands {
    pub mod attach;
    pub mod bench;
    pub mod compare;
    pub mod complete;
    pub mod copy;
    pub mod corrupt;
    pub mod create;
    pub mod demo;
    pub mod discover;
    pub mod fs;
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

    use sealblock_stack::StackError;

    use crate::cli::Command;
    use crate::exit::Exit;
    use crate::outputs;

    /// Does what the command line asks.
    pub fn run(command: &Command) -> Result<Exit, StackError> {
        outputs::check(command)?;
        match command {
            Command::Create(arguments) => create::run(arguments),
            Command::Info(arguments) => info::run(arguments),
            Command::Serve(arguments) => serve::run(arguments),
            Command::Attach(arguments) => attach::run(arguments),
            Command::Detach(arguments) => attach::detach(arguments),
            Command::Status(arguments) => status::run(arguments),
            Command::Log(arguments) => status::log(arguments),
            Command::Scrub(arguments) => scrub::run(arguments),
            Command::Discover(arguments) => discover::run(arguments),
            Command::Verify(arguments) => verify::run(arguments),
            Command::Compare(arguments) => compare::run(arguments),
            Command::Zero(arguments) => unmap::zero(arguments),
            Command::Discard(arguments) => unmap::discard(arguments),
            Command::Copy(arguments) => copy::run(arguments),
            Command::Rescue(arguments) => rescue::run(arguments),
            Command::Resize(arguments) => resize::run(arguments),
            Command::Mirror(arguments) => mirror::run(arguments),
            Command::Fs(arguments) => fs::run(arguments),
            Command::Corrupt(arguments) => corrupt::run(arguments),
            Command::Demo(arguments) => demo::run(arguments),
            Command::Bench(arguments) => bench::run(arguments),
            Command::Completions(arguments) => complete::script_of(arguments),
            Command::Complete(arguments) => complete::run(arguments),
            Command::Man(arguments) => man::run(arguments),
        }
    }
}
