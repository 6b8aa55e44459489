//! The file of `--resume`: where a verify goes on that was interrupted.
//!
//! The file is there exactly while a run is not complete or not reported. It is written beside itself (`FILE.new`), made durable, renamed,
//! and its folder made durable, so a crash between any two steps leaves the file of before or the new one. It never runs ahead of the
//! checks: after a crash blocks are verified again, and none is skipped. When the report was printed, the file is removed; a crash
//! before that has the next run print the same report and remove it.
//!
//! One process at a time: the lock is on a file of its own (`FILE.lock`), which stays, since a lock on a file that is
//! renamed over is a lock on a file that nobody else opens.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sealblock_block::Device;
use sealblock_server::dates::date;
use sealblock_stack::below::nodes_under;
use sealblock_stack::identity::uuid_text;
use sealblock_stack::{Cause, OpenTarget, StackError, TargetInfo, protection_text};

use super::record::{Asked, Identity, MAX_BYTES, Record, RecordError};

const DOING: &str = "going on";

/// The locked file of a run.
pub(super) struct ResumeFile {
    path: PathBuf,
    /// Locked as long as it is open.
    _lock: File,
}

impl ResumeFile {
    /// Locks the file, which need not be there yet.
    ///
    /// # Errors
    /// When another process has locked it, or the folder cannot be written.
    pub(super) fn lock(path: &Path) -> Result<ResumeFile, StackError> {
        let beside = with_suffix(path, ".lock");
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&beside);
        let lock = opened.map_err(|error| failure(&error, &beside))?;
        match lock.try_lock() {
            Ok(()) => Ok(ResumeFile { path: path.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => {
                let why = "another verify goes on by this file";
                Err(refused(Cause::Refused, path, why)
                    .advise("wait until it has ended, or use a file of its own for each"))
            }
            Err(TryLockError::Error(error)) => {
                Err(failure(&error, &beside).advise("a file on a file system that has locks"))
            }
        }
    }

    /// The record of the run to go on with, or a new one if there is no file.
    ///
    /// # Errors
    /// When the file is damaged, or of another target or run.
    pub(super) fn begin(&self, asked: Asked, identity: Identity) -> Result<Record, StackError> {
        let Some(bytes) = self.read()? else {
            let record = Record::new(asked, identity);
            // At once, so that a folder that cannot be written is no surprise at the interruption.
            self.save(&record)?;
            return Ok(record);
        };
        let anew = format!("remove {} to begin anew", self.path.display());
        let record = Record::decode(&bytes).map_err(|why| {
            let cause = if matches!(why, RecordError::Checksum) { Cause::Damaged } else { Cause::Unsuitable };
            refused(cause, &self.path, why).advise(anew.clone())
        })?;
        match difference(&record, &asked, &identity) {
            None => Ok(record),
            Some((cause, why)) => Err(refused(cause, &self.path, why).advise(anew)),
        }
    }

    fn read(&self) -> Result<Option<Vec<u8>>, StackError> {
        // Asked before it is opened, since opening a FIFO waits.
        match std::fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failure(&error, &self.path)),
            Ok(about) if !about.is_file() => return Err(refused(Cause::Unsuitable, &self.path, "it is no plain file")),
            Ok(about) if about.len() > MAX_BYTES => {
                return Err(refused(Cause::Unsuitable, &self.path, RecordError::Signature));
            }
            Ok(_) => {}
        }
        let mut bytes = Vec::new();
        let file = File::open(&self.path).map_err(|error| failure(&error, &self.path))?;
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| failure(&error, &self.path))?;
        Ok(Some(bytes))
    }

    /// Replaces the record, durably.
    ///
    /// # Errors
    /// When it could not be written; the record of before is there then.
    pub(super) fn save(&self, record: &Record) -> Result<(), StackError> {
        let new = with_suffix(&self.path, ".new");
        let write = || {
            let mut file = File::create(&new)?;
            file.write_all(&record.encode())?;
            file.sync_all()?;
            std::fs::rename(&new, &self.path)?;
            sync_folder(&self.path)
        };
        write().map_err(|error| failure(&error, &self.path))
    }

    /// Removes the record: the run is complete, and was reported.
    ///
    /// # Errors
    /// When it could not be removed.
    pub(super) fn finish(self) -> Result<(), StackError> {
        let remove = || std::fs::remove_file(&self.path).and_then(|()| sync_folder(&self.path));
        remove().map_err(|error| failure(&error, &self.path))
    }
}

/// What distinguishes an open target from others.
pub(super) fn identity_of(opened: &OpenTarget) -> Identity {
    let geometry = opened.device.geometry();
    Identity {
        blocks: geometry.capacity_blocks,
        block_size: geometry.block_size.bytes() as u64,
        protection: protection_text(geometry.protection),
        id: id_of(&opened.info),
    }
}

/// UUIDs of what it is made of. Those of a mirror's replicas are left out: it is the same mirror without one of them.
fn id_of(info: &TargetInfo) -> Option<String> {
    if let Some(mirror) = &info.mirror {
        return Some(uuid_text(&mirror.describe().uuid));
    }
    let own = info.volume.as_ref().map(|volume| volume.uuid).or(info.remote.as_ref().and_then(|remote| remote.uuid));
    if let Some(uuid) = own {
        return Some(uuid_text(&uuid));
    }
    if let Some(file) = &info.file {
        return match file.is_block_device {
            true => nodes_under(&file.path).ok()?.first()?.id.clone(),
            // Device numbers of file systems may change with every mount.
            false => fs::metadata(&file.path).ok().map(|about| format!("inode {}", about.ino())),
        };
    }
    // All paths of a multipath device lead to one device.
    let inner = if info.paths.is_some() { info.inner.iter().take(1) } else { info.inner.iter().take(usize::MAX) };
    let each: Vec<String> = inner.map(|info| id_of(info).unwrap_or_default()).collect();
    each.iter().any(|id| !id.is_empty()).then(|| each.join(" "))
}

/// Why the run of a record is not the one that is asked for now.
fn difference(record: &Record, asked: &Asked, identity: &Identity) -> Option<(Cause, String)> {
    let (was, had) = (&record.asked, &record.identity);
    if was.target != asked.target {
        return Some((Cause::Usage, format!("it is of the target {}", was.target.escape_debug())));
    }
    if (had.blocks, had.block_size) != (identity.blocks, identity.block_size) {
        let why = format!(
            "the target had {} blocks of {} bytes, and has {} of {}",
            had.blocks, had.block_size, identity.blocks, identity.block_size
        );
        return Some((Cause::Unsuitable, why));
    }
    if had.id != identity.id || had.protection != identity.protection {
        let id = |of: &Identity| of.id.as_ref().map_or("none".to_owned(), |id| id.escape_debug().to_string());
        let why = format!("another target is there now: its identity was {}, and is {}", id(had), id(identity));
        return Some((Cause::Unsuitable, why));
    }
    if (was.first, was.last) != (asked.first, asked.last) {
        return Some((Cause::Usage, format!("it is of --range {}..{}", was.first, was.last)));
    }
    if was.mode != asked.mode {
        return Some((Cause::Usage, format!("it was begun with --mode {}", was.mode.escape_debug())));
    }
    match (was.repair, asked.repair) {
        (true, false) => Some((Cause::Usage, "it was begun with --repair".to_owned())),
        (false, true) => Some((Cause::Usage, "it was begun without --repair".to_owned())),
        _ => None,
    }
}

/// What a run goes on with, for people.
pub(super) fn begun_text(record: &Record) -> Option<String> {
    let (first, last) = (record.parts.first()?, record.parts.last()?);
    let bad = record.errors.len() as u64 + record.errors_unlisted;
    Some(format!(
        "goes on at block {}: blocks {} to {} were verified before, last on {}, {bad} damaged",
        record.next(),
        first.first,
        last.last,
        date(last.ended_unix_s)
    ))
}

fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn refused(cause: Cause, path: &Path, why: impl std::fmt::Display) -> StackError {
    StackError::new(cause, format!("{DOING} by {}", path.display()), why)
}

fn failure(error: &io::Error, path: &Path) -> StackError {
    StackError::io(format!("writing or reading the resume file {}", path.display()), error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> Asked {
        Asked { target: "v".to_owned(), first: 0, last: 9, mode: "auto".to_owned(), repair: false }
    }

    fn identity() -> Identity {
        Identity { blocks: 10, block_size: 4096, protection: "guard".to_owned(), id: Some("x".to_owned()) }
    }

    #[test]
    fn a_crash_between_any_two_steps_leaves_the_record_of_before_or_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r");
        let file = ResumeFile::lock(&path).unwrap();
        let record = file.begin(asked(), identity()).unwrap();
        assert!(path.exists());
        // Before the rename: part of a file beside it.
        std::fs::write(folder.path().join("r.new"), b"half").unwrap();
        drop(file);
        let file = ResumeFile::lock(&path).unwrap();
        assert_eq!(file.begin(asked(), identity()).unwrap(), record);
        file.save(&record).unwrap();
        assert!(!folder.path().join("r.new").exists());
        file.finish().unwrap();
        assert!(!path.exists());
        // After the end: the next run is a new one.
        let file = ResumeFile::lock(&path).unwrap();
        assert_eq!(file.begin(asked(), identity()).unwrap(), record);
    }

    #[test]
    fn two_runs_do_not_share_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r");
        let first = ResumeFile::lock(&path).unwrap();
        let refusal = ResumeFile::lock(&path).err().unwrap();
        assert_eq!(refusal.cause(), Cause::Refused);
        drop(first);
        ResumeFile::lock(&path).unwrap();
        let away = ResumeFile::lock(&folder.path().join("no/folder")).err().unwrap();
        assert_eq!(away.cause(), Cause::Unreachable);
    }

    #[test]
    fn a_record_of_another_run_is_refused_and_of_the_same_one_taken() {
        let record = Record::new(asked(), identity());
        assert_eq!(difference(&record, &asked(), &identity()), None);
        let other_run = |asked: Asked| difference(&record, &asked, &identity()).unwrap();
        let other_device = |identity: Identity| difference(&record, &asked(), &identity).unwrap();
        for (asked, word) in [
            (Asked { target: "w".to_owned(), ..asked() }, "target v"),
            (Asked { first: 1, ..asked() }, "--range 0..9"),
            (Asked { last: 8, ..asked() }, "--range 0..9"),
            (Asked { mode: "emulate".to_owned(), ..asked() }, "--mode auto"),
            (Asked { repair: true, ..asked() }, "without --repair"),
        ] {
            let (cause, why) = other_run(asked);
            assert!(cause == Cause::Usage && why.contains(word), "{why}");
        }
        for (identity, word) in [
            (Identity { blocks: 11, ..identity() }, "had 10 blocks"),
            (Identity { block_size: 512, ..identity() }, "of 4096 bytes"),
            (Identity { id: Some("y".to_owned()), ..identity() }, "another target"),
            (Identity { id: None, ..identity() }, "another target"),
            (Identity { protection: "none".to_owned(), ..identity() }, "another target"),
        ] {
            let (cause, why) = other_device(identity);
            assert!(cause == Cause::Unsuitable && why.contains(word), "{why}");
        }
    }
}
