//! Opening the filesystem that a command changes, its commit, and what is reported of it.
//!
//! What a command did is committed when its work ends, also by a failure or a signal: it is a whole number of steps
//! then. Work of many steps commits in between: so that the nodes that it changed do not fill the memory, and so that not
//! all is lost in a crash.

use std::cell::Cell;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::io::Errno;
use sealblock_btrfs::BadCopy;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_btrfs_engine::plan::PlanError;
use sealblock_btrfs_engine::subvolumes::SubvolumeError;
use sealblock_btrfs_engine::transaction::ChangeError;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_runtime_reactor::submitted;
use sealblock_stack::filesystem::{FilesystemName, OpenFilesystem, filesystem_error};
use sealblock_stack::{Cause, StackError, on_reactor};
use serde::Serialize;

use super::nested::Nested;
use super::place::say_state;
use crate::exit::{Exit, note_lacking};
use crate::interrupt;
use crate::report::{note, note_lost_answers, print_json, say};

/// Changed nodes in memory, in bytes, after which work of many steps commits.
const MAX_DIRTY_BYTES: usize = 64 << 20;
/// The time after which work of many steps commits, as in Linux.
const COMMIT_INTERVAL: Duration = Duration::from_secs(30);
/// Copies that are noted one by one; JSON lists all.
const MAX_NOTED: usize = 20;

/// A filesystem that a command changes.
pub(super) struct Writer {
    /// The filesystem.
    pub engine: Engine,
    /// The subvolumes and their places when it was opened, if they were asked for.
    pub nested: Nested,
    stopped: Cell<bool>,
    /// The time of the last commit between steps, and the time between two of them.
    committed: Cell<Instant>,
    commit_interval: Cell<Duration>,
}

/// What a command did.
pub(super) trait Done: Serialize {
    /// As text for people; nothing is printed if it is empty.
    fn text(&self) -> String {
        String::new()
    }

    /// The exit status, unless there is something else to say.
    fn exit(&self) -> Exit {
        Exit::Clean
    }
}

/// The outcome in JSON.
#[derive(Serialize)]
struct Report<'a, D> {
    target: String,
    /// The transaction that has all that was done.
    transaction: u64,
    #[serde(flatten)]
    done: &'a D,
    /// Damaged copies that were read, of which other copies were good.
    damage: Vec<String>,
    /// Devices that could not be written, and are behind the others now.
    failed_devices: Vec<u64>,
    interrupted: bool,
}

/// What is done, and how.
pub(super) struct Order<'a> {
    /// Names in one filesystem: the first one says how it is opened.
    pub names: &'a [&'a FilesystemName],
    /// Print JSON.
    pub json: bool,
    /// Find out the places of all subvolumes first.
    pub needs_subvolumes: bool,
}

/// Opens the filesystem for writing, works with it, commits, closes its targets, and reports.
pub(super) fn change<D: Done>(
    order: &Order<'_>,
    work: impl AsyncFnOnce(&Writer) -> Result<D, StackError>,
) -> Result<Exit, StackError> {
    let name = one_filesystem(order.names)?;
    interrupt::watch();
    let (report, exit) = on_reactor(async {
        let open = name.open_to_write().await?;
        open.targets().iter().for_each(note_lost_answers);
        say_state(name, &open.filesystem);
        open.close_after(async |open| run(order, name, open, work).await).await
    })?;
    if order.json {
        print_json(&report.as_json(name))?;
    } else {
        note_damage(&report.damage);
        let text = report.done.text();
        if !text.is_empty() {
            say(&text)?;
        }
    }
    Ok(exit)
}

/// The outcome.
struct Outcome<D> {
    done: D,
    transaction: u64,
    damage: Vec<BadCopy>,
    failed: Vec<u64>,
    stopped: bool,
}

impl<D: Done> Outcome<D> {
    fn as_json(&self, name: &FilesystemName) -> Report<'_, D> {
        Report {
            target: name.devices(),
            transaction: self.transaction,
            done: &self.done,
            damage: self.damage.iter().map(ToString::to_string).collect(),
            failed_devices: self.failed.clone(),
            interrupted: self.stopped,
        }
    }
}

async fn run<D: Done>(
    order: &Order<'_>,
    name: &FilesystemName,
    open: &OpenFilesystem,
    work: impl AsyncFnOnce(&Writer) -> Result<D, StackError>,
) -> Result<(Outcome<D>, Exit), StackError> {
    let filesystem = &open.filesystem;
    let nested = match order.needs_subvolumes {
        true => Nested::read(filesystem).await.map_err(|error| filesystem_error("read", &error).on(name.devices()))?,
        false => Nested::default(),
    };
    let failed = |error| engine_error("write to", &error).on(name.devices());
    let options = EngineOptions { submitted: Some(|| Box::pin(submitted())), ..EngineOptions::default() };
    let engine = Engine::open(filesystem, options).await.map_err(failed)?;
    let writer = Writer::new(engine, nested);
    let result = work(&writer).await;
    // A failure of the work comes first; one that stopped the filesystem fails the commit, too.
    let committed = writer.engine.commit().await;
    // Writes whose requests ended early still use the devices, which are closed next.
    writer.engine.finish_writes().await;
    let (done, transaction) = (result?, committed.map_err(failed)?);
    let mut damage = filesystem.take_bad_copies();
    damage.extend(writer.engine.take_bad_copies());
    let failed = writer.engine.failed_devices();
    failed.iter().for_each(|id| note(&format_args!("device {id} could not be written, and lacks these changes")));
    let lacks = open.targets().iter().map(note_lacking).fold(!failed.is_empty(), |any, lacks| any | lacks);
    let exit = match (writer.stopped.get(), damage.is_empty()) {
        (true, _) => Exit::Interrupted,
        (false, false) => Exit::DamageFound,
        (false, true) => done.exit().unless_lacking(lacks),
    };
    Ok((Outcome { done, transaction, damage, failed, stopped: writer.stopped.get() }, exit))
}

/// Reports copies that were found damaged, or could not be written.
pub(super) fn note_damage(damage: &[BadCopy]) {
    damage.iter().take(MAX_NOTED).for_each(|copy| note(&format_args!("damaged: {copy}")));
    if let Some(more) = damage.len().checked_sub(MAX_NOTED).filter(|more| *more > 0) {
        note(&format_args!("{more} more damaged copies; `sealblock fs verify` finds all"));
    }
}

/// The first name, if all are in one filesystem.
fn one_filesystem<'a>(names: &[&'a FilesystemName]) -> Result<&'a FilesystemName, StackError> {
    let devices = |name: &FilesystemName| {
        let mut devices: Vec<String> = name.targets.iter().map(ToString::to_string).collect();
        devices.sort_unstable();
        devices
    };
    let first = *names.first().ok_or_else(|| StackError::new(Cause::Usage, "write", "no filesystem is given"))?;
    match names.iter().find(|name| devices(name) != devices(first)) {
        None => Ok(first),
        Some(other) => {
            let why = format!("it is not in {}: a command changes one filesystem", first.devices());
            let refused = StackError::new(Cause::Usage, "use", why).on(other);
            Err(refused
                .advise("give its targets by the same names each time; `fs get` and `fs put` copy between filesystems"))
        }
    }
}

impl Writer {
    fn new(engine: Engine, nested: Nested) -> Writer {
        let (committed, commit_interval) = (Cell::new(Instant::now()), Cell::new(COMMIT_INTERVAL));
        Writer { engine, nested, stopped: Cell::new(false), committed, commit_interval }
    }

    /// Sets the time after which [`Writer::checkpoint`] commits.
    pub fn set_commit_interval(&self, interval: Duration) {
        self.commit_interval.set(interval);
    }

    /// Whether a signal came, so that nothing more is to be begun.
    pub fn stops(&self) -> bool {
        let came = interrupt::came();
        self.stopped.set(self.stopped.get() || came);
        came
    }

    /// Commits if much was changed since the last time, or something long ago. Called between steps.
    pub async fn checkpoint(&self) -> Result<(), EngineError> {
        let bytes = self.engine.inspect(|transaction| {
            Ok(transaction.nodes.dirty_count().saturating_mul(transaction.geometry().node_bytes as usize))
        });
        if is_commit_due(bytes.await?, self.committed.get().elapsed(), self.commit_interval.get()) {
            self.engine.commit().await?;
            self.committed.set(Instant::now());
        }
        Ok(())
    }
}

/// Whether this many bytes of changed nodes are to be committed, this time after the last commit.
fn is_commit_due(bytes: usize, elapsed: Duration, interval: Duration) -> bool {
    bytes > MAX_DIRTY_BYTES || bytes > 0 && elapsed >= interval
}

/// The time now.
pub(super) fn now() -> Timespec {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    Timespec { seconds: seconds.into(), nanoseconds: since.subsec_nanos().into() }
}

/// A failure of the engine while `doing` something.
pub(super) fn engine_error(doing: &str, error: &EngineError) -> StackError {
    let refusal = match error {
        EngineError::Read(error) => return filesystem_error(doing, error),
        EngineError::Stopped(_) => return StackError::new(Cause::Io, doing, error),
        EngineError::Change(refusal) => refusal,
    };
    let cause = match Errno::from_raw_os_error(error.errno()) {
        Errno::NOSPC => Cause::Full,
        Errno::UCLEAN => Cause::Damaged,
        Errno::IO => Cause::Io,
        Errno::INVAL if matches!(refusal, ChangeError::Subvolume(_)) => Cause::Unsuitable,
        Errno::INVAL | Errno::NAMETOOLONG => Cause::Usage,
        Errno::NOENT | Errno::NODATA => Cause::Absent,
        Errno::ROFS | Errno::PERM | Errno::ACCESS => Cause::Refused,
        _ => Cause::Unsuitable,
    };
    StackError::new(cause, doing, error).advise_if(advice(refusal))
}

fn advice(refusal: &ChangeError) -> Option<&'static str> {
    Some(match refusal {
        ChangeError::Space(_) => "remove files or delete snapshots (`sealblock fs subvolume delete`)",
        ChangeError::Subvolume(SubvolumeError::Crossing) => {
            "only subvolumes move between subvolumes: copy it with `fs get` and `fs put`, and remove it"
        }
        ChangeError::Subvolume(SubvolumeError::HasSubvolume(_)) => "delete that first, or use --recursive",
        ChangeError::Subvolume(SubvolumeError::ReadOnly(_)) => {
            "make a writable snapshot of it with `sealblock fs snapshot`"
        }
        ChangeError::Plan(PlanError::Damaged { .. } | PlanError::Shape { .. }) | ChangeError::Item(_) => {
            "check the filesystem with `sealblock fs check`"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> FilesystemName {
        FilesystemName {
            targets: vec![text.parse().unwrap()],
            start: sealblock_stack::filesystem::Start::Default,
            path: Vec::new(),
            has_place: true,
        }
    }

    #[test]
    fn names_must_be_in_one_filesystem() {
        let (a, b) = (name("mem:1MiB"), name("mem:2MiB"));
        assert_eq!(one_filesystem(&[&a, &a.clone()]).unwrap(), &a);
        let error = one_filesystem(&[&a, &b]).unwrap_err();
        assert_eq!(error.cause(), Cause::Usage);
        assert!(error.to_string().contains("mem:1MiB"), "{error}");
        let mut both = a.clone();
        both.targets.push("mem:2MiB".parse().unwrap());
        let mut turned = both.clone();
        turned.targets.reverse();
        assert_eq!(one_filesystem(&[&both, &turned]).unwrap(), &both);
        assert!(one_filesystem(&[]).is_err());
    }

    #[test]
    fn much_is_committed_at_once_and_little_after_a_while() {
        let seconds = Duration::from_secs;
        assert!(is_commit_due(MAX_DIRTY_BYTES + 1, seconds(0), seconds(30)));
        assert!(!is_commit_due(MAX_DIRTY_BYTES, seconds(29), seconds(30)));
        assert!(is_commit_due(1, seconds(30), seconds(30)) && is_commit_due(1, seconds(0), seconds(0)));
        assert!(!is_commit_due(0, seconds(90), seconds(30)));
    }

    #[test]
    fn refusals_are_told_apart() {
        let cause = |error: ChangeError| engine_error("x", &EngineError::Change(error)).cause();
        assert_eq!(cause(ChangeError::Plan(PlanError::InvalidName)), Cause::Usage);
        assert_eq!(cause(ChangeError::Plan(PlanError::NotFound)), Cause::Absent);
        assert_eq!(cause(ChangeError::Plan(PlanError::Exists)), Cause::Unsuitable);
        assert_eq!(cause(ChangeError::Subvolume(SubvolumeError::ReadOnly(5))), Cause::Refused);
        assert_eq!(cause(ChangeError::Subvolume(SubvolumeError::NotASubvolume)), Cause::Unsuitable);
        assert_eq!(engine_error("x", &EngineError::Stopped("y".into())).cause(), Cause::Io);
        let crossing = EngineError::Change(ChangeError::Subvolume(SubvolumeError::Crossing));
        assert!(engine_error("x", &crossing).advice().unwrap().contains("fs put"));
    }
}
