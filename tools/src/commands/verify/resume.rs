//! The file of `--resume`: where to resume an interrupted verify.
//!
//! The file is there exactly while a run is not complete or not reported. It is written beside itself (`FILE.new`), made durable, renamed,
//! and its folder made durable, so a crash between any two steps leaves the file of before or the new one. It never runs ahead of the
//! checks: after a crash blocks are verified again, and none is skipped. When the report was printed, the file is removed; a crash
//! before that has the next run print the same report and remove it.
//!
//! One process at a time: the lock is on a file of its own (`FILE.lock`), since a lock on a file that is renamed over is a lock on a file
//! that nobody else opens. Whoever has the lock removes that file in the end, and whoever gets a lock looks whether it is on the
//! file that is there.
//!
//! A record identifies the target and its state. If either differs now, or nothing identifies the target, the run starts over, and reports
//! that.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use sealblock_server::dates::date;
use sealblock_stack::{Cause, StackError};

use super::lineage::Current;
use super::record::{Asked, EARLIER_VERSION, Identity, MAX_BYTES, Record, RecordError};
use crate::new_file::{self, sync_folder};

const ACTION: &str = "resume";

/// Max. attempts to open a lock file that is removed meanwhile.
const TRIES: usize = 100;
/// Bad blocks of a run that starts over that are named.
const MAX_NAMED: usize = 8;

/// The locked file of a run.
pub(super) struct ResumeFile {
    path: PathBuf,
    /// Removed in the end.
    _lock: LockFile,
}

/// A locked file that is there as long as it is locked.
struct LockFile {
    path: PathBuf,
    file: File,
}

impl ResumeFile {
    /// Locks the file, which need not be there yet.
    ///
    /// # Errors
    /// When another process has locked it, or the folder cannot be written.
    pub(super) fn lock(path: &Path) -> Result<ResumeFile, StackError> {
        let beside = with_suffix(path, ".lock");
        for _ in 0..TRIES {
            let file = new_file::open(&beside, OFlags::RDWR | OFlags::CREATE);
            let lock = LockFile { path: beside.clone(), file: file.map_err(|error| failure(&error, &beside))? };
            if !lock.is_own() {
                let why = format!("{} is not a lock file of --resume, which is empty", beside.display());
                return Err(refused(Cause::Unsuitable, path, why).advise("use another FILE, or move that one away"));
            }
            match lock.file.try_lock() {
                Ok(()) if lock.is_there() => return Ok(ResumeFile { path: path.to_owned(), _lock: lock }),
                // The one who had it has removed it: this is a file that nobody else opens.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let why = "another verify uses this file";
                    return Err(refused(Cause::Refused, path, why)
                        .advise("wait until it ends, or use a separate file for each"));
                }
                Err(TryLockError::Error(error)) => {
                    return Err(failure(&error, &beside).advise("use a file on a file system that supports locks"));
                }
            }
        }
        Err(refused(Cause::Io, path, format!("{} is repeatedly removed", beside.display())))
    }

    /// The record of the run to go on with, or a new one if there is no file; and why a run starts over, if one does.
    ///
    /// # Errors
    /// When the file is damaged, or of another run.
    pub(super) fn begin(&self, asked: Asked, now: Current) -> Result<(Record, Option<String>), StackError> {
        let Current { identity, unidentified, .. } = now;
        let Some(bytes) = self.read()? else { return Ok((self.anew(asked, identity)?, None)) };
        let anew = format!("remove {} to start over", self.path.display());
        let record = match Record::decode(&bytes) {
            Ok(record) => record,
            Err(RecordError::Version(version)) if version == EARLIER_VERSION => {
                let why = "an earlier version of sealblock saved what was verified, but not the state of the target"
                    .to_owned();
                return Ok((self.anew(asked, identity)?, Some(why)));
            }
            Err(why) => {
                let cause = if matches!(why, RecordError::Checksum) { Cause::Damaged } else { Cause::Unsuitable };
                return Err(refused(cause, &self.path, why).advise(anew));
            }
        };
        if let Some((cause, why)) = other_run(&record, &asked, identity.blocks) {
            return Err(refused(cause, &self.path, why).advise(anew));
        }
        let unknown = || {
            let kind = unidentified.filter(|_| !record.parts.is_empty())?;
            Some(format!("nothing identifies this {kind}, so another one may be there now"))
        };
        match changed(&record, &identity).or_else(unknown) {
            None => Ok((record, None)),
            Some(why) => Ok((self.anew(asked, identity)?, Some(format!("{why}{}", found_text(&record))))),
        }
    }

    /// A new record, written at once, so that a folder that cannot be written is no surprise at the interruption.
    fn anew(&self, asked: Asked, identity: Identity) -> Result<Record, StackError> {
        let record = Record::new(asked, identity);
        self.save(&record)?;
        Ok(record)
    }

    fn read(&self) -> Result<Option<Vec<u8>>, StackError> {
        let unsuitable = |why: &dyn std::fmt::Display| refused(Cause::Unsuitable, &self.path, why);
        match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failure(&error, &self.path)),
            Ok(about) if !about.is_file() => return Err(unsuitable(&"it is not a plain file")),
            Ok(_) => {}
        }
        // Another thing may be there by now: a link is not followed, and a FIFO not waited for.
        let file = new_file::open(&self.path, OFlags::RDONLY).map_err(|error| failure(&error, &self.path))?;
        let about = file.metadata().map_err(|error| failure(&error, &self.path))?;
        if !about.is_file() || about.len() > MAX_BYTES {
            return Err(unsuitable(&RecordError::Signature));
        }
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| failure(&error, &self.path))?;
        Ok(Some(bytes))
    }

    /// Replaces the record, durably.
    ///
    /// # Errors
    /// When it could not be written; the record of before is there then.
    pub(super) fn save(&self, record: &Record) -> Result<(), StackError> {
        new_file::replace(&self.path, &record.encode()).map_err(|error| failure(&error, &self.path))
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

impl LockFile {
    /// True if the file has nothing worth keeping, and no other name leads to it.
    fn is_own(&self) -> bool {
        self.file.metadata().is_ok_and(|about| about.is_file() && about.len() == 0 && about.nlink() <= 1)
    }

    /// True if it is the file that others open.
    fn is_there(&self) -> bool {
        let number = |about: fs::Metadata| about.is_file().then(|| (about.dev(), about.ino()));
        let own = self.file.metadata().ok().and_then(number);
        own.is_some() && own == fs::symlink_metadata(&self.path).ok().and_then(number)
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // One that could not be locked is another process'.
        if self.is_own() && self.file.try_lock().is_ok() && self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Why the run of a record is not the one that is asked for now, of a target of so many blocks. A range up to the last block is the same
/// one of a target that has another size now.
fn other_run(record: &Record, asked: &Asked, blocks: u64) -> Option<(Cause, String)> {
    let was = &record.asked;
    if was.target != asked.target {
        return Some((Cause::Usage, format!("it is of the target {}", was.target.escape_debug())));
    }
    let are_to_the_end = was.last + 1 == record.identity.blocks && asked.last + 1 == blocks;
    if was.first != asked.first || was.last != asked.last && !are_to_the_end {
        return Some((Cause::Usage, format!("it is of --range {}..{}", was.first, was.last)));
    }
    if was.mode != asked.mode {
        return Some((Cause::Usage, format!("it was started with --mode {}", was.mode.escape_debug())));
    }
    match (was.repair, asked.repair) {
        (true, false) => Some((Cause::Usage, "it was started with --repair".to_owned())),
        (false, true) => Some((Cause::Usage, "it was started without --repair".to_owned())),
        _ => None,
    }
}

/// What is another than it was when the record was written.
fn changed(record: &Record, now: &Identity) -> Option<String> {
    let was = &record.identity;
    if (was.blocks, was.block_size) != (now.blocks, now.block_size) {
        return Some(format!(
            "the target had {} blocks of {} bytes, and has {} of {}",
            was.blocks, was.block_size, now.blocks, now.block_size
        ));
    }
    if was.protection != now.protection {
        return Some(format!("the target had {}, and has {}", was.protection.escape_debug(), now.protection));
    }
    let other = |was: &[String], now: &[String]| {
        let gone = was.iter().find(|text| !now.contains(text)).map(|text| text.escape_debug().to_string());
        let new = now.iter().find(|text| !was.contains(text)).cloned();
        let words = |text: Option<String>| text.unwrap_or("nothing".to_owned());
        (was != now).then(|| format!("{} was there, and {} is", words(gone), words(new)))
    };
    if let Some(difference) = other(&was.ids, &now.ids) {
        return Some(format!("it is another target now: {difference}"));
    }
    // Repairs are writes themselves: the state after them is not the one before.
    let difference = if record.asked.repair { None } else { other(&was.states, &now.states) };
    difference.map(|difference| format!("the target was written since: {difference}"))
}

/// The bad blocks of a run that starts over: repaired ones are not found again.
fn found_text(record: &Record) -> String {
    let count = record.errors.len() as u64 + record.errors_unlisted;
    if count == 0 {
        return String::new();
    }
    let named: Vec<String> = record.errors.iter().take(MAX_NAMED).map(|error| error.lba.to_string()).collect();
    let more = if count > named.len() as u64 { ", and more" } else { "" };
    format!("; damaged before: blocks {}{more}", named.join(", "))
}

/// The line printed when a run resumes.
pub(super) fn begun_text(record: &Record) -> Option<String> {
    let (first, last) = (record.parts.first()?, record.parts.last()?);
    let bad = record.errors.len() as u64 + record.errors_unlisted;
    Some(format!(
        "resumes at block {}: blocks {} to {} were verified before, last on {}, {bad} damaged",
        record.next(),
        first.first,
        last.last,
        date(last.ended_unix_s)
    ))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn refused(cause: Cause, path: &Path, why: impl std::fmt::Display) -> StackError {
    StackError::new(cause, format!("{ACTION} from {}", path.display()), why)
}

fn failure(error: &io::Error, path: &Path) -> StackError {
    StackError::at_path("use the resume file at", error, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::VerifiedPart;

    fn asked() -> Asked {
        Asked { target: "v".to_owned(), first: 0, last: 9, mode: "auto".to_owned(), repair: false }
    }

    fn identity() -> Identity {
        let texts = |text: &str| vec![text.to_owned()];
        Identity { blocks: 10, block_size: 4096, protection: "guard".to_owned(), ids: texts("x"), states: texts("1") }
    }

    fn current(identity: Identity) -> Current {
        Current { identity, unidentified: None, is_untraced: false }
    }

    /// Begins without a reason to start over.
    fn begun(file: &ResumeFile) -> Record {
        let (record, why) = file.begin(asked(), current(identity())).unwrap();
        assert_eq!(why, None);
        record
    }

    #[test]
    fn a_crash_between_any_two_steps_leaves_the_record_of_before_or_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r");
        let file = ResumeFile::lock(&path).unwrap();
        let record = begun(&file);
        assert!(path.exists());
        // Before the rename: part of a file beside it.
        std::fs::write(folder.path().join(".r.0"), b"half").unwrap();
        drop(file);
        let file = ResumeFile::lock(&path).unwrap();
        assert_eq!(begun(&file), record);
        file.save(&record).unwrap();
        file.finish().unwrap();
        assert!(!path.exists());
        // After the end: the next run is a new one.
        let file = ResumeFile::lock(&path).unwrap();
        assert_eq!(begun(&file), record);
    }

    #[test]
    fn two_runs_do_not_share_a_file_and_no_lock_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r");
        let first = ResumeFile::lock(&path).unwrap();
        let refusal = ResumeFile::lock(&path).err().unwrap();
        assert_eq!(refusal.cause(), Cause::Refused);
        assert!(with_suffix(&path, ".lock").exists(), "a refusal removes nothing");
        drop(first);
        assert!(!with_suffix(&path, ".lock").exists());
        // What a killed run has left is taken over.
        std::fs::write(with_suffix(&path, ".lock"), b"").unwrap();
        ResumeFile::lock(&path).unwrap();
        // What somebody has put there is not.
        for (name, content, twice) in [("s", "a diary", false), ("t", "", true)] {
            let (path, beside) = (folder.path().join(name), folder.path().join(format!("{name}.lock")));
            std::fs::write(&beside, content).unwrap();
            if twice {
                std::fs::hard_link(&beside, folder.path().join("twice")).unwrap();
            }
            let refusal = ResumeFile::lock(&path).err().unwrap();
            assert!(refusal.to_string().contains("is not a lock file of --resume"), "{refusal}");
            assert_eq!(std::fs::read_to_string(&beside).unwrap(), content);
        }
        let away = ResumeFile::lock(&folder.path().join("no/folder")).err().unwrap();
        assert_eq!(away.cause(), Cause::Unreachable);
    }

    #[test]
    fn links_beside_the_file_and_in_its_place_lead_nowhere() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("diary"), b"dear").unwrap();
        symlink("diary", at("r.new")).unwrap();
        drop(begun(&ResumeFile::lock(&at("r")).unwrap()));
        symlink("other", at("s.lock")).unwrap();
        assert!(ResumeFile::lock(&at("s")).is_err() && !at("other").exists());
        symlink("diary", at("t")).unwrap();
        let refusal = ResumeFile::lock(&at("t")).unwrap().begin(asked(), current(identity())).unwrap_err();
        assert!(refusal.to_string().contains("not a plain file"), "{refusal}");
        assert_eq!(std::fs::read(at("diary")).unwrap(), b"dear");
    }

    #[test]
    fn a_record_of_another_run_is_refused_and_of_the_same_one_taken() {
        let record = Record::new(asked(), identity());
        assert_eq!((other_run(&record, &asked(), 10), changed(&record, &identity())), (None, None));
        for (asked, word) in [
            (Asked { target: "w".to_owned(), ..asked() }, "target v"),
            (Asked { first: 1, ..asked() }, "--range 0..9"),
            (Asked { last: 8, ..asked() }, "--range 0..9"),
            (Asked { mode: "emulate".to_owned(), ..asked() }, "--mode auto"),
            (Asked { repair: true, ..asked() }, "without --repair"),
        ] {
            let (cause, why) = other_run(&record, &asked, 10).unwrap();
            assert!(cause == Cause::Usage && why.contains(word), "{why}");
        }
        // All blocks of a target that was resized since are all blocks, and so is the rest from a block on.
        assert_eq!(other_run(&record, &Asked { last: 19, ..asked() }, 20), None);
        assert!(other_run(&record, &Asked { last: 18, ..asked() }, 20).is_some());
        assert!(other_run(&record, &Asked { first: 1, last: 19, ..asked() }, 20).is_some());
        let rest = Record::new(Asked { first: 4, ..asked() }, identity());
        assert_eq!(other_run(&rest, &Asked { first: 4, last: 6, ..asked() }, 7), None);
        let part = Record::new(Asked { last: 8, ..asked() }, identity());
        assert!(other_run(&part, &Asked { last: 19, ..asked() }, 20).is_some());
    }

    #[test]
    fn a_record_of_what_nothing_identifies_starts_over_once_it_has_a_part() {
        let folder = tempfile::tempdir().unwrap();
        let file = ResumeFile::lock(&folder.path().join("r")).unwrap();
        let (ended_unix_s, elapsed_s) = (1, 0.0);
        let part = VerifiedPart {
            first: 0,
            last: 4,
            started_unix_s: 1,
            ended_unix_s,
            elapsed_s,
            bytes_transferred: 0,
            offloaded: false,
        };
        let mut record = begun(&file);
        record.add(part, Record::new(asked(), identity()));
        for unidentified in [None, Some("NBD export")] {
            file.save(&record).unwrap();
            let now = || Current { unidentified, ..current(identity()) };
            let (begun, why) = file.begin(asked(), now()).unwrap();
            match unidentified {
                None => assert_eq!((begun, why), (record.clone(), None), "it resumes"),
                Some(_) => {
                    assert!(why.unwrap().starts_with("nothing identifies this NBD export"));
                    assert_eq!(begun, Record::new(asked(), identity()));
                    assert_eq!(file.begin(asked(), now()).unwrap().1, None, "nothing is lost, so nothing is said");
                }
            }
        }
    }

    #[test]
    fn a_record_of_another_device_or_state_starts_over_and_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let texts = |text: &str| vec![text.to_owned()];
        let other = |change: &dyn Fn(&mut Identity)| {
            let mut identity = identity();
            change(&mut identity);
            let file = ResumeFile::lock(&folder.path().join("r")).unwrap();
            drop(file.begin(asked(), current(self::identity())).unwrap());
            let (record, why) = file.begin(asked(), current(identity.clone())).unwrap();
            assert_eq!(record, Record::new(asked(), identity.clone()), "nothing of the other one is left");
            assert_eq!(file.begin(asked(), current(identity)).unwrap().1, None, "said once, and kept");
            file.finish().unwrap();
            why.unwrap()
        };
        assert!(other(&|now| now.blocks = 11).contains("had 10 blocks"));
        assert!(other(&|now| now.block_size = 512).contains("of 4096 bytes"));
        assert!(other(&|now| now.ids = texts("y")).contains("it is another target now: x was there, and y is"));
        assert!(other(&|now| now.ids = Vec::new()).contains("another target"));
        assert!(other(&|now| now.protection = "none".to_owned()).contains("had guard"));
        assert!(other(&|now| now.states = texts("2")).contains("written since: 1 was there, and 2 is"));
        let repair = Record::new(Asked { repair: true, ..asked() }, identity());
        assert_eq!(changed(&repair, &Identity { states: texts("2"), ..identity() }), None, "repairs are writes");
        // A record of an earlier version knows of no state.
        let path = folder.path().join("r");
        std::fs::write(&path, b"sealblock-verify-resume 1 00000000\n{}\n").unwrap();
        let (_, why) = ResumeFile::lock(&path).unwrap().begin(asked(), current(identity())).unwrap();
        assert!(why.unwrap().contains("earlier version"));
    }
}
