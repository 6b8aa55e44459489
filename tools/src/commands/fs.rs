//! `sealblock fs`: looks into Btrfs filesystems, wherever they lie, makes new ones, and changes them.
//!
//! Everything is read by this process from the targets, and checked as it is read. `format` writes new filesystems; the
//! commands of `allocate`, `datasum`, `names`, `put`, `remove` and `subvolumes` change them through [`write`].
//!
//! `mount` shows a filesystem to programs until it is unmounted, and with `-o rw` lets them change it. `bench` measures
//! filesystems that it makes itself.

mod allocate;
mod bench;
mod check;
mod copy;
mod datasum;
mod dead;
mod extract;
mod format;
mod format_write;
mod info;
mod ls;
mod mount;
mod names;
mod nested;
mod paths;
mod place;
mod put;
mod remove;
mod rescue;
mod reseal;
mod subvolumes;
mod tree;
mod verify;
mod verify_report;
mod write;

use sealblock_stack::StackError;

use crate::cli::{Fs, FsCommand};
use crate::exit::Exit;

/// Does what is asked.
pub fn run(arguments: &Fs) -> Result<Exit, StackError> {
    match &arguments.command {
        FsCommand::Format(arguments) => format::run(arguments),
        FsCommand::Info(arguments) => info::run(arguments),
        FsCommand::Ls(arguments) => ls::run(arguments),
        FsCommand::Cat(arguments) => copy::cat(arguments),
        FsCommand::Get(arguments) => copy::get(arguments),
        FsCommand::Mount(arguments) => mount::run(arguments),
        FsCommand::Verify(arguments) => verify::run(arguments),
        FsCommand::Check(arguments) => check::run(arguments),
        FsCommand::Rescue(arguments) => rescue::run(arguments),
        FsCommand::Tree(arguments) => tree::run(arguments),
        FsCommand::Put(arguments) => put::run(arguments),
        FsCommand::Mkdir(arguments) => names::mkdir(arguments),
        FsCommand::Rm(arguments) => remove::rm(arguments),
        FsCommand::Rmdir(arguments) => remove::rmdir(arguments),
        FsCommand::Mv(arguments) => names::mv(arguments),
        FsCommand::Ln(arguments) => names::ln(arguments),
        FsCommand::Chmod(arguments) => names::chmod(arguments),
        FsCommand::Chown(arguments) => names::chown(arguments),
        FsCommand::Datasum(arguments) => datasum::run(arguments),
        FsCommand::Fallocate(arguments) => allocate::run(arguments),
        FsCommand::Snapshot(arguments) => subvolumes::snapshot(arguments),
        FsCommand::Subvolume(arguments) => subvolumes::run(arguments),
        FsCommand::Bench(arguments) => bench::run(arguments),
    }
}
