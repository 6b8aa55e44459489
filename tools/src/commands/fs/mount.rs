//! `sealblock fs mount`: a mount through FUSE, read-only or for changes.
//!
//! A mount for changes holds its targets as the other commands that change do, until its last commit.

use std::io;
use std::time::Duration;

use futures_util::future::join;
use sealblock_btrfs::inode::{FileKind, Inode};
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_fuse::{Mounted, Writable, WritableOptions};
use sealblock_fuse::{Ended, MountError, Options, ReadFs, Session, WriteOptions};
use sealblock_runtime_reactor::{hangup_is_shutdown, shutdown_signal, sleep, submitted};
use sealblock_stack::filesystem::OpenFilesystem;
use sealblock_stack::identity::new_uuid;
use sealblock_stack::{Cause, StackError, on_reactor};

use super::allocate::without_zeroes;
use super::place::{resolve, say_state, with_filesystem};
use super::write::{engine_error, note_damage};
use crate::cli::FsMount;
use crate::exit::{Exit, note_lacking};
use crate::interrupt::ignores_hangup;
use crate::report::{note, note_lost_answers, say};

/// How long a stop waits for what programs wrote, and then for requests in flight.
const PATIENCE: Duration = Duration::from_secs(30);

/// Mounts, and serves until an unmount or a signal.
pub fn run(arguments: &FsMount) -> Result<Exit, StackError> {
    if arguments.options.writes { mount_for_changes(arguments) } else { mount_read_only(arguments) }
}

fn mount_read_only(arguments: &FsMount) -> Result<Exit, StackError> {
    with_filesystem(&arguments.place, async |open| {
        let root = root_of(arguments, open).await?;
        let mounted = Mounted::new(&open.filesystem, &root);
        let mounted = mounted.map_err(|error| failed(arguments, Cause::Damaged, error))?;
        let session = begin(arguments, mounted.root(), None)?;
        served(arguments, session.serve(&mounted, stop()).await)
    })
}

fn mount_for_changes(arguments: &FsMount) -> Result<Exit, StackError> {
    on_reactor(async {
        let open = arguments.place.open_to_write().await?;
        open.targets().iter().for_each(note_lost_answers);
        say_state(&arguments.place, &open.filesystem);
        open.close_after(async |open| serve_changes(arguments, open).await).await
    })
}

async fn serve_changes(arguments: &FsMount, open: &OpenFilesystem) -> Result<Exit, StackError> {
    // What it is mounted by is the state before the first commit, in which nothing moves.
    let root = root_of(arguments, open).await?;
    let of_engine = |error| engine_error("write to", &error).on(arguments.place.devices());
    let options = EngineOptions {
        discards: arguments.options.discards,
        submitted: Some(|| Box::pin(submitted())),
        ..EngineOptions::default()
    };
    let engine = Engine::open(&open.filesystem, options).await.map_err(of_engine)?;
    let zeroes_are_written = arguments.options.zeroes_are_written;
    let slow = if zeroes_are_written { without_zeroes(&engine) } else { Vec::new() };
    if !slow.is_empty() {
        note(&format_args!("{} cannot make zeroes, so that written zeroes are transferred", slow.join(", ")));
    }
    let options = WritableOptions { new_uuid: || new_uuid().map_err(io::Error::other), zeroes_are_written };
    let writable = Writable::new(&engine, (root.tree.id, root.ino), options).await;
    let writable = writable.map_err(|error| failed(arguments, Cause::Damaged, error))?;
    let is_root = rustix::process::geteuid().is_root();
    let session = begin(
        arguments,
        writable.root(),
        Some(WriteOptions {
            writeback_cache: is_root && !arguments.options.writes_through,
            allow_set_id: is_root && arguments.options.allows_set_id,
            allow_devices: is_root && arguments.options.allows_devices,
            patience: PATIENCE,
        }),
    )?;
    writable.set_notifier(session.notifier());
    let serving = async {
        let ended = session.serve_writable(&writable, stop()).await;
        writable.end_background();
        ended
    };
    let (ended, ()) = join(serving, writable.work_in_background(arguments.options.commit_interval, sleep)).await;
    // Whatever ended it, what programs were told to be written is made durable.
    let closed = writable.close().await.map_err(of_engine);
    let exit = served(arguments, ended);
    closed?;
    let damage = [open.filesystem.take_bad_copies(), engine.take_bad_copies()].concat();
    note_damage(&damage);
    let failed = engine.failed_devices();
    failed.iter().for_each(|id| note(&format_args!("device {id} could not be written, and lacks changes")));
    let lacks = open.targets().iter().map(note_lacking).fold(!failed.is_empty(), |any, lacks| any | lacks);
    Ok(match exit?.unless_lacking(lacks) {
        Exit::Clean | Exit::Incomplete if !damage.is_empty() => Exit::DamageFound,
        exit => exit,
    })
}

/// The directory that is mounted.
async fn root_of(arguments: &FsMount, open: &OpenFilesystem) -> Result<Inode, StackError> {
    let root = resolve(open, &arguments.place, true).await?;
    match root.kind {
        FileKind::Directory => Ok(root),
        _ => Err(failed(arguments, Cause::Usage, format_args!("{} is not a directory", arguments.place))),
    }
}

fn begin(arguments: &FsMount, root: u64, write: Option<WriteOptions>) -> Result<Session, StackError> {
    let place = &arguments.place;
    let how = if write.is_some() { " for changes" } else { "" };
    let allow_other = arguments.allow_other || arguments.options.allow_other;
    let options = Options { source: place.to_string(), allow_other, write, ..Options::default() };
    let session = Session::mount(&arguments.point, root, &options);
    let session = session.map_err(|error| failed(arguments, Cause::Refused, error))?;
    say(&format!("{place} is mounted on {}{how}; unmount it with umount or Ctrl-C", session.point().display()))?;
    Ok(session)
}

/// Ends with SIGINT or SIGTERM, or when the terminal is closed, unless it was started to outlive that.
async fn stop() {
    if !ignores_hangup()
        && let Err(error) = hangup_is_shutdown()
    {
        tracing::warn!(%error, "a hangup ends it at once");
    }
    if let Err(error) = shutdown_signal().await {
        tracing::warn!(%error, "signals are ignored; unmount with umount");
        std::future::pending::<()>().await;
    }
}

fn served(arguments: &FsMount, ended: Result<Ended, MountError>) -> Result<Exit, StackError> {
    match ended {
        Ok(Ended::Unmounted | Ended::Stopped) => Ok(Exit::Clean),
        Err(error) => Err(StackError::new(Cause::Io, "serve the mount on", error).on(arguments.point.display())),
    }
}

fn failed(arguments: &FsMount, cause: Cause, why: impl std::fmt::Display) -> StackError {
    StackError::new(cause, "mount on", why).on(arguments.point.display())
}
