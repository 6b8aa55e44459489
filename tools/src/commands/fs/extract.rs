//! What `fs get` and `fs rescue` report of a copy out of a filesystem, and the directory that it goes to.

use std::fs;
use std::io;
use std::path::Path;

use sealblock_btrfs_extract::{Extraction, Losses, Lost, Watch, WriteError, make_directory};
use sealblock_stack::filesystem::{FilesystemName, OpenFilesystem};
use sealblock_stack::{Cause, StackError};
use serde::Serialize;

use super::place::{RootsReport, printable, why_older};
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::Progress;
use crate::report::note;

/// Shows how far a copy is, and ends it by a signal.
pub(super) struct Shown(pub Progress);

impl Watch for Shown {
    fn is_stopped(&self) -> bool {
        interrupt::came()
    }

    fn copied(&self, bytes: u64) {
        self.0.advance(bytes);
    }
}

/// Why nothing more can be copied.
pub(super) fn write_error(error: WriteError) -> StackError {
    match error {
        WriteError::Write { path, to, error } => {
            StackError::io(format!("write /{} to", printable(&path)), &error).on(to.display())
        }
        WriteError::Create { path, error } => StackError::io("create", &error).on(path.display()),
        WriteError::Remove { path, error } => StackError::io("remove", &error).on(path.display()),
    }
}

/// The outcome in JSON.
#[derive(Serialize)]
pub(super) struct Report {
    target: String,
    to: String,
    files: u64,
    bytes: u64,
    /// Inodes without a name, where these were looked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    nameless: Option<u64>,
    lost: Vec<LostReport>,
    lost_unlisted: u64,
    /// Of a rescue, what nothing vouches for.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    unverified: Option<UnverifiedReport>,
    /// Of a rescue, what it began from.
    #[serde(skip_serializing_if = "Option::is_none")]
    roots: Option<RootsReport>,
    may_be_older: Option<&'static str>,
    not_set: u64,
}

/// Bytes without checksums, in JSON.
#[derive(Serialize)]
struct UnverifiedReport {
    unverified: Vec<RangeReport>,
    unverified_unlisted: u64,
    unverified_bytes: u64,
}

/// A part of a file, in JSON.
#[derive(Serialize)]
struct RangeReport {
    path: String,
    offset: u64,
    bytes: u64,
}

/// Something that is lost, in JSON.
#[derive(Serialize)]
struct LostReport {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    why: String,
}

impl From<&Lost> for LostReport {
    fn from(lost: &Lost) -> LostReport {
        let (offset, bytes) = lost.range.unzip();
        LostReport { path: printable(&lost.path), offset, bytes, why: lost.why.clone() }
    }
}

/// The outcome.
pub(super) fn report(
    copy: &Extraction<'_>,
    (from, open): (&FilesystemName, &OpenFilesystem),
    to: &Path,
    nameless: Option<u64>,
) -> Report {
    let range = |(path, offset, bytes): &(Vec<u8>, u64, u64)| RangeReport {
        path: printable(path),
        offset: *offset,
        bytes: *bytes,
    };
    let unverified = (copy.losses() == Losses::Keep).then(|| UnverifiedReport {
        unverified: copy.unverified.listed.iter().map(range).collect(),
        unverified_unlisted: copy.unverified.more,
        unverified_bytes: copy.unverified.bytes,
    });
    Report {
        target: from.to_string(),
        to: to.display().to_string(),
        files: copy.files,
        bytes: copy.bytes,
        nameless,
        lost: copy.lost.iter().map(LostReport::from).collect(),
        lost_unlisted: copy.lost_count - copy.lost.len() as u64,
        unverified,
        roots: (copy.losses() == Losses::Keep).then(|| copy.filesystem().roots().into()),
        may_be_older: why_older(open).map(|older| older.name),
        not_set: copy.unset,
    }
}

/// The exit status of the copy.
pub(super) fn exit(copy: &Extraction<'_>) -> Exit {
    match (copy.is_stopped(), copy.lost_count == 0 && copy.unverified.bytes == 0) {
        (true, _) => Exit::Interrupted,
        (false, true) => Exit::Clean,
        (false, false) => Exit::DamageFound,
    }
}

/// Reports on standard error the attributes that could not be set.
pub(super) fn note_unset(copy: &Extraction<'_>) {
    if copy.unset > 0 {
        note(&format_args!("{} owners, attributes, times or device nodes could not be set here", copy.unset));
    }
}

/// The directory that is copied into: it has to be empty, or is made.
pub(super) fn empty_directory(to: &Path) -> Result<(), StackError> {
    let refuse = |why: &str| StackError::new(Cause::Refused, "use", why).on(to.display());
    match fs::read_dir(to) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(refuse("it is not empty").advise("give a directory that does not exist yet")),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_directory(to).map_err(|error| StackError::io("create", &error).on(to.display()))
        }
        Err(error) => Err(StackError::io("use", &error).on(to.display())),
    }
}
