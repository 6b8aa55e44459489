//! Files of this machine: what is copied of them.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;
use sealblock_btrfs_engine::inode::{AttributeChanges, Ownership, PERMISSION_MASK, device_number};
use sealblock_btrfs_engine::names::NewFile;
use sealblock_btrfs_engine::plan::PlanError;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_stack::filesystem::FilesystemName;

/// The most bytes of the names of all attributes of a file, and of a value (Linux has the same limits).
const MAX_XATTR_BYTES: usize = 64 << 10;

/// What kind of file it is.
pub(super) enum Kind {
    Regular,
    Directory,
    Symlink,
    /// One without content.
    Special(NewFile<'static>),
}

/// The kind of a file.
///
/// # Errors
/// If a device has a number that no inode can have.
pub(super) fn kind_of(about: &Metadata) -> Result<Kind, PlanError> {
    let kind = about.file_type();
    let number = || device_number(rustix::fs::major(about.rdev()), rustix::fs::minor(about.rdev()));
    Ok(match () {
        () if kind.is_dir() => Kind::Directory,
        () if kind.is_symlink() => Kind::Symlink,
        () if kind.is_fifo() => Kind::Special(NewFile::Fifo),
        () if kind.is_socket() => Kind::Special(NewFile::Socket),
        () if kind.is_char_device() => Kind::Special(NewFile::CharacterDevice(number()?)),
        () if kind.is_block_device() => Kind::Special(NewFile::BlockDevice(number()?)),
        () => Kind::Regular,
    })
}

/// The owner and permissions of a file.
pub(super) fn ownership(about: &Metadata) -> Ownership {
    Ownership { uid: about.uid(), gid: about.gid(), permissions: about.mode() & PERMISSION_MASK }
}

/// The attributes of a file that its copy gets when nothing else of it changes any more.
pub(super) fn attributes(about: &Metadata) -> AttributeChanges {
    let time = |seconds: i64, nanoseconds: i64| Timespec {
        seconds: seconds.into(),
        nanoseconds: u32::try_from(nanoseconds).unwrap_or(0).into(),
    };
    AttributeChanges {
        permissions: (!about.file_type().is_symlink()).then(|| about.mode() & PERMISSION_MASK),
        uid: Some(about.uid()),
        gid: Some(about.gid()),
        atime: Some(time(about.atime(), about.atime_nsec())),
        mtime: Some(time(about.mtime(), about.mtime_nsec())),
        ctime: None,
        kills_set_id: false,
        is_of_write: false,
    }
}

/// The names of the entries of a directory, in order.
pub(super) fn entries(path: &Path) -> io::Result<Vec<OsString>> {
    let mut names = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    // Taken from the end.
    names.sort_unstable_by(|a, b| b.cmp(a));
    Ok(names)
}

/// The target of a symbolic link.
pub(super) fn read_link(path: &Path) -> io::Result<Vec<u8>> {
    fs::read_link(path).map(|target| target.into_os_string().into_vec())
}

/// The name and the value of an extended attribute.
pub(super) type Xattr = (Vec<u8>, Vec<u8>);

/// The extended attributes of a file, and the number of those that cannot be read.
pub(super) fn xattrs(path: &Path) -> (Vec<Xattr>, u64) {
    let mut names = vec![0; MAX_XATTR_BYTES];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(length) => length,
        // A file system without attributes.
        Err(Errno::NOTSUP) => return (Vec::new(), 0),
        Err(_) => return (Vec::new(), 1),
    };
    let (mut read, mut lost, mut value) = (Vec::new(), 0, Vec::new());
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        value.resize(MAX_XATTR_BYTES, 0);
        match rustix::fs::lgetxattr(path, name, &mut value[..]) {
            Ok(length) => read.push((name.to_vec(), value[..length].to_vec())),
            Err(_) => lost += 1,
        }
    }
    (read, lost)
}

/// The files of this machine that the filesystem lies on: those are not copied into it.
pub(super) fn files_below(name: &FilesystemName) -> impl Iterator<Item = &Path> {
    name.targets.iter().flat_map(|target| target.paths())
}

/// Opens a regular file for reading, if it still is the one that was looked at. Nothing waits for a writer of a fifo
/// that took its place.
///
/// # Errors
/// If it cannot be opened, or is another one.
pub(super) fn open(path: &Path, seen: &Metadata) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let about = file.metadata()?;
    match about.is_file() && (about.dev(), about.ino()) == (seen.dev(), seen.ino()) {
        true => Ok(file),
        false => Err(io::Error::other("it was replaced while it was copied")),
    }
}

/// The next bytes of a file from an offset on that are not a hole. A file system that knows no holes has none.
///
/// # Errors
/// If it cannot be read.
pub(super) fn next_data(file: &File, from: u64, end: u64) -> io::Result<Option<Range<u64>>> {
    if from >= end {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL) => return Ok(Some(from..end)),
        Err(error) => return Err(error.into()),
    };
    let hole = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok(Some(start..hole.min(end)).filter(|range| range.start < range.end))
}

/// Reads bytes of a file; fewer only at its end.
///
/// # Errors
/// If it cannot be read.
pub(super) fn read(file: &File, offset: u64, bytes: usize) -> io::Result<Slice> {
    let mut buffer = Buffer::zeroed(bytes);
    let mut done = 0;
    while done < bytes {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(buffer.freeze().slice(..done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sparse");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_len(8 << 20).unwrap();
        file.write_all_at(b"data", 4 << 20).unwrap();
        let (mut at, mut found) = (0, Vec::new());
        while let Some(range) = next_data(&file, at, 8 << 20).unwrap() {
            at = range.end;
            found.push(range);
        }
        assert!(found.iter().any(|range| range.contains(&(4 << 20))), "{found:?}");
        assert_eq!(next_data(&file, 8 << 20, 8 << 20).unwrap(), None);
        assert_eq!(&read(&file, 4 << 20, 4).unwrap()[..], b"data");
        assert_eq!(read(&file, (8 << 20) - 1, 100).unwrap().len(), 1);
    }

    #[test]
    fn a_file_that_was_replaced_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("a"), folder.path().join("b"));
        fs::write(&path, b"a").unwrap();
        fs::write(&other, b"b").unwrap();
        let seen = path.symlink_metadata().unwrap();
        open(&path, &seen).unwrap();
        fs::rename(&other, &path).unwrap();
        assert!(open(&path, &seen).unwrap_err().to_string().contains("replaced"));
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        open(&path, &seen).unwrap_err();
    }

    #[test]
    fn kinds_and_attributes_are_those_of_the_file() {
        let about = Path::new("/dev/null").symlink_metadata().unwrap();
        let expected = device_number(1, 3).unwrap();
        assert!(matches!(kind_of(&about), Ok(Kind::Special(NewFile::CharacterDevice(number))) if number == expected));
        let about = Path::new("/usr").symlink_metadata().unwrap();
        assert!(matches!(kind_of(&about), Ok(Kind::Directory)));
        assert_eq!(attributes(&about).permissions, Some(about.mode() & 0o7777));
    }
}
