//! `sealblock fs`: looks into Btrfs filesystems, wherever they lie, makes new ones, and changes them.
//!
//! Everything is read by this process from the targets, and checked as it is read. `format` writes new filesystems; the
//! commands of `allocate`, `names`, `put`, `remove` and `subvolumes` change them through [`write`].

mod allocate;
mod check;
mod copy;
mod dead;
mod extract;
mod format;
mod format_write;
mod info;
mod ls;
mod names;
mod nested;
mod paths;
mod place;
mod put;
mod remove;
mod rescue;
mod subvolumes;
mod tree;
mod verify;
mod verify_report;
mod write;

use sealblock_btrfs::inode::FileKind;
use sealblock_btrfs_fuse::Mounted;
use sealblock_fuse::{Ended, Options, ReadFs, Session};
use sealblock_runtime_reactor::shutdown_signal;
use sealblock_stack::{Cause, StackError};

use crate::cli::{Fs, FsCommand, FsMount};
use crate::exit::Exit;
use crate::report::say;
use place::{resolve, with_filesystem};

/// Does what is asked.
pub fn run(arguments: &Fs) -> Result<Exit, StackError> {
    match &arguments.command {
        FsCommand::Format(arguments) => format::run(arguments),
        FsCommand::Info(arguments) => info::run(arguments),
        FsCommand::Ls(arguments) => ls::run(arguments),
        FsCommand::Cat(arguments) => copy::cat(arguments),
        FsCommand::Get(arguments) => copy::get(arguments),
        FsCommand::Mount(arguments) => mount(arguments),
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
        FsCommand::Fallocate(arguments) => allocate::run(arguments),
        FsCommand::Snapshot(arguments) => subvolumes::snapshot(arguments),
        FsCommand::Subvolume(arguments) => subvolumes::run(arguments),
    }
}

/// Mounts, and serves until an unmount or a signal.
fn mount(arguments: &FsMount) -> Result<Exit, StackError> {
    let place = &arguments.place;
    with_filesystem(place, async |open| {
        let root = resolve(open, place, true).await?;
        let fail = |cause, why: String| StackError::new(cause, "mount on", why).on(arguments.point.display());
        if root.kind != FileKind::Directory {
            return Err(fail(Cause::Usage, format!("{place} is not a directory")));
        }
        let mounted = Mounted::new(&open.filesystem, &root).map_err(|error| fail(Cause::Damaged, error.to_string()))?;
        let options = Options { source: place.to_string(), allow_other: arguments.allow_other, ..Options::default() };
        let session = Session::mount(&arguments.point, mounted.root(), &options);
        let session = session.map_err(|error| fail(Cause::Refused, error.to_string()))?;
        say(&format!("{place} is mounted on {}; unmount it with umount or Ctrl-C", session.point().display()))?;
        let stop = async {
            if let Err(error) = shutdown_signal().await {
                tracing::warn!(%error, "signals are ignored; unmount with umount");
                std::future::pending::<()>().await;
            }
        };
        match session.serve(&mounted, stop).await {
            Ok(Ended::Unmounted | Ended::Stopped) => Ok(Exit::Clean),
            Err(error) => Err(fail(Cause::Io, error.to_string())),
        }
    })
}
