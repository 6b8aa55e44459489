//! `sealblock fs mount`: a mount through FUSE, read-only or for changes.
//!
//! A mount for changes holds its targets as the other commands that change do, until its last commit.

use std::cell::Cell;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::{Either, join, select};
use sealblock_block::Condition;
use sealblock_btrfs::inode::{FileKind, Inode};
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_fuse::{Mounted, Writable, WritableOptions};
use sealblock_fuse::{Ended, MountError, Options, ReadFs, Session, WriteOptions};
use sealblock_runtime_reactor::{hangup_is_shutdown, shutdown_signal, sleep, submitted, timeout};
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
/// How long it waits for the last commit if that has failed already.
const SHORT_PATIENCE: Duration = Duration::from_secs(5);
/// How often it looks whether there is progress.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

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
    let (is_root, progress) = (rustix::process::geteuid().is_root(), open.filesystem.storage().devices.executed());
    let session = begin(
        arguments,
        writable.root(),
        Some(WriteOptions {
            writeback_cache: is_root && !arguments.options.writes_through,
            allow_set_id: is_root && arguments.options.allows_set_id,
            allow_devices: is_root && arguments.options.allows_devices,
            patience: PATIENCE,
            progress: Arc::clone(&progress),
        }),
    )?;
    writable.set_notifier(session.notifier());
    let (patience, is_over) = (Cell::new(None), Condition::default());
    let serving = async {
        let ended = session.serve_writable(&writable, stop()).await;
        writable.end_background();
        patience.set(Some(if ended.is_err() { SHORT_PATIENCE } else { PATIENCE }));
        is_over.notify();
        ended
    };
    let work = async {
        let (ended, ()) = join(serving, writable.work_in_background(arguments.options.commit_interval, sleep)).await;
        // Whatever ended it, what programs were told to be written is made durable.
        (ended, writable.close().await.map_err(of_engine))
    };
    let mut work = pin!(work);
    let ended = match select(work.as_mut(), pin!(is_over.wait_until(|| patience.get().is_some()))).await {
        Either::Left((ended, _)) => Some(ended),
        Either::Right(_) => while_devices_work(work, &progress, patience.get().unwrap_or(PATIENCE)).await,
    };
    let (ended, closed) = ended.ok_or_else(|| {
        let why = "the devices execute nothing any more, so changes since the last commit may be lost";
        StackError::new(Cause::Io, "write to", why).on(arguments.place.devices())
    })?;
    // What fails at the end of serving may also be the reason for what fails after it.
    let exit = served(arguments, ended)?;
    closed?;
    let damage = [open.filesystem.take_bad_copies(), engine.take_bad_copies()].concat();
    note_damage(&damage);
    let failed = engine.failed_devices();
    failed.iter().for_each(|id| note(&format_args!("device {id} could not be written, and lacks changes")));
    let lacks = open.targets().iter().map(note_lacking).fold(!failed.is_empty(), |any, lacks| any | lacks);
    Ok(match exit.unless_lacking(lacks) {
        Exit::Clean | Exit::Incomplete if !damage.is_empty() => Exit::DamageFound,
        exit => exit,
    })
}

/// Works for as long as devices execute requests. Returns `None` if they did not for some time.
async fn while_devices_work<T>(
    mut work: impl Future<Output = T> + Unpin,
    executed: &AtomicU64,
    patience: Duration,
) -> Option<T> {
    let (mut seen, mut since) = (executed.load(Ordering::Relaxed), Instant::now());
    loop {
        if let Ok(done) = timeout(LOOK_INTERVAL.min(patience), &mut work).await {
            return Some(done);
        }
        let now = executed.load(Ordering::Relaxed);
        match now == seen {
            true if since.elapsed() >= patience => return None,
            true => {}
            false => (seen, since) = (now, Instant::now()),
        }
    }
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

#[cfg(test)]
mod tests {
    use futures_util::future::pending;

    use super::*;

    #[test]
    fn the_end_is_waited_for_while_devices_work() {
        let (executed, patience) = (AtomicU64::new(0), Duration::from_millis(300));
        let ends_after = |steps: u32, counts: bool| {
            let executed = &executed;
            on_reactor(async move {
                let work = pin!(async move {
                    for _ in 0..steps {
                        sleep(Duration::from_millis(100)).await;
                        executed.fetch_add(u64::from(counts), Ordering::Relaxed);
                    }
                });
                Ok(while_devices_work(work, executed, patience).await)
            })
            .unwrap()
        };
        assert_eq!(ends_after(1, false), Some(()));
        assert_eq!(ends_after(12, true), Some(()));
        assert_eq!(ends_after(12, false), None);
        let stuck = on_reactor(async { Ok(while_devices_work(pin!(pending::<()>()), &executed, patience).await) });
        assert_eq!(stuck.unwrap(), None);
    }
}
