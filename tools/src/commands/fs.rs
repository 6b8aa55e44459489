//! `sealblock fs`: looks into Btrfs filesystems, wherever they lie.
//!
//! Everything is read by this process from the targets, checked as it is read, and nothing is written to them.

mod copy;
mod extract;
mod info;
mod ls;
mod mount;
mod place;
mod rescue;
mod tree;
mod verify;
mod verify_report;

use sealblock_stack::StackError;

use crate::cli::{Fs, FsCommand};
use crate::exit::Exit;

/// Does what is asked.
pub fn run(arguments: &Fs) -> Result<Exit, StackError> {
    match &arguments.command {
        FsCommand::Info(arguments) => info::run(arguments),
        FsCommand::Ls(arguments) => ls::run(arguments),
        FsCommand::Cat(arguments) => copy::cat(arguments),
        FsCommand::Get(arguments) => copy::get(arguments),
        FsCommand::Mount(arguments) => mount::run(arguments),
        FsCommand::Verify(arguments) => verify::run(arguments),
        FsCommand::Rescue(arguments) => rescue::run(arguments),
        FsCommand::Tree(arguments) => tree::run(arguments),
    }
}
