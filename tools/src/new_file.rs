//! Files whose names a user gives or another user can guess: made beside their names, and renamed when they are complete.
//!
//! Invariants: nothing that is there is opened for writing, followed or cut off, so a link at the name, or at any name beside it, leads to
//! no other file; a crash between any two steps leaves the file of before or the whole new one. Only what is no file, such as
//! `/dev/null` or a FIFO, is written to itself.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use sealblock_stack::{Cause, StackError};

/// How often another name is tried for the file beside.
const TRIES: usize = 8;

/// A file that is being made.
pub struct NewFile {
    file: File,
    path: PathBuf,
    /// Where it is until it is complete; `None` for what is written to itself.
    draft: Option<PathBuf>,
}

impl NewFile {
    /// Begins a file, so that a folder that cannot be written is no surprise in the end.
    ///
    /// # Errors
    /// When nothing can be made there.
    pub fn begin(path: &Path) -> io::Result<NewFile> {
        let there = fs::symlink_metadata(path).ok();
        let kind = there.as_ref().map(fs::Metadata::file_type);
        if kind.is_some_and(|kind| kind.is_char_device() || kind.is_fifo()) {
            let file = open(path, OFlags::WRONLY)?;
            return Ok(NewFile { file, path: path.to_owned(), draft: None });
        }
        if kind.is_some_and(|kind| kind.is_dir()) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        for _ in 0..TRIES {
            let draft = beside(path, random()?)?;
            // `O_EXCL` follows no link.
            match OpenOptions::new().write(true).create_new(true).open(&draft) {
                Ok(file) => {
                    let new = NewFile { file, path: path.to_owned(), draft: Some(draft) };
                    if let Some(there) = there.filter(fs::Metadata::is_file) {
                        new.file.set_permissions(there.permissions())?;
                    }
                    return Ok(new);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Completes it with these bytes, durably.
    ///
    /// # Errors
    /// When it could not be written; what was there before is there then.
    pub fn complete(mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        let Some(draft) = &self.draft else { return Ok(()) };
        self.file.sync_all()?;
        fs::rename(draft, &self.path)?;
        self.draft = None;
        sync_folder(&self.path)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(draft) = &self.draft {
            let _ = fs::remove_file(draft);
        }
    }
}

/// A new file that has no name until it is complete: if it is interrupted, the system takes all of it back.
pub struct UnnamedFile {
    file: File,
    path: PathBuf,
}

impl UnnamedFile {
    /// Begins a file that is to be at `path`, where nothing is yet. `None` if the file system cannot, as NFS.
    pub fn begin(path: &Path) -> Option<UnnamedFile> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(folder_of(path), flags, Mode::RUSR | Mode::WUSR).ok()?;
        let new = UnnamedFile { file: File::from(file), path: path.to_owned() };
        new.present_path().exists().then_some(new)
    }

    /// A path by which this process can open it now.
    pub fn present_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    /// Gives it its name, durably. Its content must be durable by then.
    ///
    /// # Errors
    /// When that failed, as where something has the name by now: that is left as it is.
    pub fn complete(self) -> io::Result<()> {
        rustix::fs::linkat(CWD, self.present_path(), CWD, &self.path, AtFlags::SYMLINK_FOLLOW)?;
        sync_folder(&self.path)
    }
}

/// Refuses a new file where only devices are: a node that is missing is no file that is to be made, and one there would be in memory.
///
/// # Errors
/// If the path is not there and would lie beside the nodes of devices.
pub fn check_new(path: &Path) -> Result<(), StackError> {
    let device = |path: &Path| fs::metadata(path).map(|about| about.dev()).ok();
    // A link to a node that is missing leads to where the file would be.
    let is_beside_nodes =
        device(folder_of(&followed(path))).is_some_and(|folder| Some(folder) == device(Path::new("/dev")));
    match is_beside_nodes && !path.exists() && device(Path::new("/")) != device(Path::new("/dev")) {
        true => Err(StackError::new(Cause::Unreachable, "open", "there is no such device").on(path.display())),
        false => Ok(()),
    }
}

/// Where links lead, also if nothing is there.
fn followed(path: &Path) -> PathBuf {
    /// As many links as Linux follows.
    const MAX_LINKS: usize = 40;
    let mut place = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&place) {
            Ok(target) => place = folder_of(&place).join(target),
            Err(_) => break,
        }
    }
    place
}

/// Has a file be these bytes, durably.
///
/// # Errors
/// As [`NewFile::complete`].
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    NewFile::begin(path)?.complete(bytes)
}

/// Opens a file or another node; fails for a link, and never blocks.
///
/// # Errors
/// Those of `open(2)`.
pub fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH)?;
    Ok(File::from(file))
}

/// Makes the names in a file's folder durable.
///
/// # Errors
/// Those of `fsync(2)`.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(folder_of(path))?.sync_all()
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn beside(path: &Path, number: u64) -> io::Result<PathBuf> {
    /// Bytes of the name that are kept: what is added has to fit as well.
    const KEPT: usize = 64;
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_string_lossy();
    let kept: String = name.chars().take(KEPT).collect();
    Ok(folder_of(path).join(OsString::from(format!(".{kept}.{number:016x}"))))
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_link_at_the_name_leads_nowhere_and_nothing_is_left_beside() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("r"), folder.path().join("other"));
        fs::write(&other, "a diary").unwrap();
        symlink("other", &path).unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!((fs::read(&path).unwrap(), fs::read(&other).unwrap()), (b"new".to_vec(), b"a diary".to_vec()));
        assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
        fs::hard_link(&path, folder.path().join("hard")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        replace(&path, b"newer").unwrap();
        assert_eq!(fs::read(folder.path().join("hard")).unwrap(), b"new", "nothing that is there is written to");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        drop(NewFile::begin(&path).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"newer", "one that was not completed is none");
        assert_eq!(names(folder.path()), ["hard", "other", "r"]);
    }

    #[test]
    fn nothing_is_made_beside_the_nodes_of_devices() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check_new(&folder.path().join("new")).is_ok() && check_new(Path::new("new")).is_ok());
        assert!(check_new(&folder.path().join("none/new")).is_ok(), "whoever makes it says why not");
        assert!(check_new(Path::new("/dev/null")).is_ok());
        if fs::metadata("/dev").unwrap().dev() == fs::metadata("/").unwrap().dev() {
            return;
        }
        let refused = check_new(Path::new("/dev/sealblock-not-there")).unwrap_err().to_string();
        assert!(refused.contains("'/dev/sealblock-not-there': there is no such device"), "{refused}");
        let [link, further] = ["link", "further"].map(|name| folder.path().join(name));
        symlink("/dev/sealblock-not-there", &link).unwrap();
        symlink("link", &further).unwrap();
        assert!(check_new(&link).is_err() && check_new(&further).is_err(), "a link to it");
        let [elsewhere, itself] = ["elsewhere", "itself"].map(|name| folder.path().join(name));
        symlink("not-there", &elsewhere).unwrap();
        symlink("itself", &itself).unwrap();
        assert!(check_new(&elsewhere).is_ok() && check_new(&itself).is_ok());
    }

    #[test]
    fn what_is_no_file_is_written_to_itself_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        replace(Path::new("/dev/null"), b"gone").unwrap();
        assert_eq!(replace(folder.path(), b"x").unwrap_err().kind(), io::ErrorKind::IsADirectory);
        assert_eq!(replace(&folder.path().join("no/r"), b"x").unwrap_err().kind(), io::ErrorKind::NotFound);
        let link = folder.path().join("link");
        symlink("/dev/zero", &link).unwrap();
        assert!(open(&link, OFlags::RDONLY).is_err(), "a link is not followed");
    }
}
