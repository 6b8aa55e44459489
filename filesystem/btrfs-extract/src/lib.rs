//! Copies files from a filesystem into a local directory.
//!
//! Invariants:
//! - Existing files are not overwritten, and no path leads through a symbolic link: every name is created anew, and
//!   anything that would go into a directory not created here is left out. So names in a hostile filesystem reach
//!   nothing outside the given directory.
//! - A file that is there at the end has the data of the filesystem, checked sector by sector. Where data are lost it
//!   has a hole, which is listed, or the whole file is left out ([`Losses`]).

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::pin;

use futures_util::StreamExt;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use sealblock_btrfs::data::ORDERED_STEP_BYTES;
use sealblock_btrfs::inode::{FileKind, Inode};
use sealblock_btrfs::walk::{Met, Walk};
use sealblock_btrfs::{Filesystem, FsError};
use sealblock_runtime_memory::Slice;

/// The mode that Linux gives the directory in place of a subvolume that is elsewhere.
const PLACE_MODE: u32 = 0o755;
/// Bytes of data that are searched for at once.
const RUN_BYTES: u64 = 64 << 20;
/// The maximum number of listed losses; the others are only counted.
pub const MAX_LISTED: usize = 10_000;

/// What happens to a file with lost data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Losses {
    /// It is left out.
    LeaveOut,
    /// It is kept, with holes in place of lost data.
    Keep,
}

/// Something that was not copied, or only in part.
pub struct Lost {
    /// Its path, relative to the given directory.
    pub path: Vec<u8>,
    /// The lost bytes, if only a part of the file is lost: the first one, and their number.
    pub range: Option<(u64, u64)>,
    /// The reason.
    pub why: String,
}

/// Bytes of files that are kept without a check, because their checksums are absent or lost.
#[derive(Default)]
pub struct Unverified {
    /// The listed ranges: the path of the file, the first byte, and the number of bytes.
    pub listed: Vec<(Vec<u8>, u64, u64)>,
    /// The number of ranges that are not listed.
    pub more: u64,
    /// The number of all such bytes.
    pub bytes: u64,
}

impl Unverified {
    fn add(&mut self, path: &[u8], range: std::ops::Range<u64>) {
        let bytes = range.end - range.start;
        self.bytes += bytes;
        let has_room = self.listed.len() < MAX_LISTED;
        match self.listed.last_mut() {
            Some((last, start, length)) if last == path && *start + *length == range.start => *length += bytes,
            _ if has_room => self.listed.push((path.to_vec(), range.start, bytes)),
            _ => self.more += 1,
        }
    }
}

/// Why nothing more can be copied: the destination fails.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// A file cannot be written.
    #[error("cannot write to {}: {error}", .to.display())]
    Write {
        /// Its path in the filesystem, as bytes.
        path: Vec<u8>,
        /// The destination directory.
        to: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A directory cannot be made.
    #[error("cannot create {}: {error}", .path.display())]
    Create {
        /// Its path.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A file that is left out cannot be removed again.
    #[error("cannot remove {}: {error}", .path.display())]
    Remove {
        /// Its path.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
}

impl WriteError {
    fn write(path: &[u8], to: &Path, error: &io::Error) -> WriteError {
        let error = error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error);
        WriteError::Write { path: path.to_vec(), to: to.to_owned(), error }
    }
}

/// Observes a copy, and can stop it.
pub trait Watch {
    /// True once the copy should stop.
    fn is_stopped(&self) -> bool;

    /// Called when these bytes were copied or are lost.
    fn copied(&self, bytes: u64);
}

/// A copy into a directory.
pub struct Extraction<'a> {
    filesystem: &'a Filesystem,
    to: PathBuf,
    losses: Losses,
    watch: &'a dyn Watch,
    /// For inodes with several names, the destination path of the first one.
    links: HashMap<(u64, u64), PathBuf>,
    /// Directories whose modes and times are set after everything in them has been copied.
    directories: Vec<(PathBuf, Inode)>,
    /// Directories that could not be made.
    unmade: HashSet<Vec<u8>>,
    /// Every inode that was reached by a name.
    pub reached: HashSet<(u64, u64)>,
    /// The number of copied files.
    pub files: u64,
    /// Bytes of data written.
    pub bytes: u64,
    /// The losses, up to the limit of listed ones.
    pub lost: Vec<Lost>,
    /// The number of losses, listed or not.
    pub lost_count: u64,
    /// What was kept without a check.
    pub unverified: Unverified,
    /// The number of attributes, owners and device nodes that could not be set.
    pub unset: u64,
    is_privileged: bool,
}

impl<'a> Extraction<'a> {
    /// A copy that has not begun.
    pub fn new(filesystem: &'a Filesystem, to: PathBuf, losses: Losses, watch: &'a dyn Watch) -> Extraction<'a> {
        Extraction {
            filesystem,
            to,
            losses,
            watch,
            links: HashMap::new(),
            directories: Vec::new(),
            unmade: HashSet::new(),
            reached: HashSet::new(),
            files: 0,
            bytes: 0,
            lost: Vec::new(),
            lost_count: 0,
            unverified: Unverified::default(),
            unset: 0,
            is_privileged: rustix::process::geteuid().is_root(),
        }
    }

    /// Copies an inode and everything below it to a path below the destination directory; an empty path is that
    /// directory itself.
    ///
    /// # Errors
    /// If nothing more can be written there. Losses are counted instead.
    pub async fn copy(&mut self, start: Inode, to: &[u8]) -> Result<(), WriteError> {
        let mut walk = Walk::new(self.filesystem, start, true);
        while let Some(visit) = walk.next().await {
            if self.watch.is_stopped() {
                break;
            }
            let path = match (to.is_empty(), visit.path.is_empty()) {
                (true, _) => visit.path,
                (false, true) => to.to_vec(),
                (false, false) => [to, b"/", &visit.path].concat(),
            };
            match visit.met {
                // The destination directory already exists.
                Met::Inode(inode) if path.is_empty() => {
                    self.reached.insert((inode.tree.id, inode.ino));
                    let at = self.to.clone();
                    self.made(&at, &inode).await;
                }
                Met::Inode(inode) => self.put(&path, &inode).await?,
                Met::EmptyDirectory { uid, gid } => {
                    let at = self.at(&path);
                    match make_directory(&at) {
                        Ok(()) => self.set_owner_and_mode(&at, (uid, gid), Some(PLACE_MODE)),
                        Err(error) => self.not_made(&path, &error)?,
                    }
                }
                Met::Lost(error) => self.lose(path, None, error.to_string()),
                Met::BadName(error) => self.lose(path, None, error.to_string()),
            }
        }
        Ok(())
    }

    /// Sets the attributes of directories, the innermost first, because changes in a directory change its times.
    pub fn finish(&mut self) {
        for (path, inode) in std::mem::take(&mut self.directories).into_iter().rev() {
            self.set_state(&path, &inode);
        }
    }

    /// Makes nested directories that the filesystem does not have, and returns their path.
    ///
    /// # Errors
    /// If one cannot be made.
    pub fn folder(&mut self, names: &[String]) -> Result<Vec<u8>, WriteError> {
        let mut path = PathBuf::new();
        for name in names {
            path.push(name);
            match make_directory(&self.to.join(&path)) {
                // If the filesystem has such a name, only a directory is accepted, not a link to one.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_directory(&self.to.join(&path)) => {}
                made => made.map_err(|error| WriteError::Create { path: path.clone(), error })?,
            }
        }
        Ok(path.into_os_string().into_encoded_bytes())
    }

    /// The source filesystem.
    pub fn filesystem(&self) -> &'a Filesystem {
        self.filesystem
    }

    /// What happens to a file with lost data.
    pub fn losses(&self) -> Losses {
        self.losses
    }

    /// True if the copy was stopped early.
    pub fn is_stopped(&self) -> bool {
        self.watch.is_stopped()
    }

    fn at(&self, path: &[u8]) -> PathBuf {
        self.to.join(OsStr::from_bytes(path))
    }

    /// Counts a loss, and lists it if there is room.
    pub fn lose(&mut self, path: Vec<u8>, range: Option<(u64, u64)>, why: String) {
        self.lost_count += 1;
        if self.lost.len() < MAX_LISTED {
            self.lost.push(Lost { path, range, why });
        }
    }

    /// Handles the failure to make something at the destination. A full or failing disk ends the copy; any other error
    /// concerns only this name.
    fn not_made(&mut self, path: &[u8], error: &io::Error) -> Result<(), WriteError> {
        use io::ErrorKind;
        if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::ReadOnlyFilesystem)
            || error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
        {
            return Err(WriteError::write(path, &self.to, error));
        }
        self.unmade.insert(path.to_vec());
        let why = match error.kind() {
            ErrorKind::AlreadyExists => "it already exists".to_owned(),
            _ => format!("it cannot be created: {error}"),
        };
        self.lose(path.to_vec(), None, why);
        Ok(())
    }

    async fn put(&mut self, path: &[u8], inode: &Inode) -> Result<(), WriteError> {
        self.reached.insert((inode.tree.id, inode.ino));
        let parent = path.iter().rposition(|byte| *byte == b'/').map_or(&b""[..], |slash| &path[..slash]);
        if !path.is_empty() && self.unmade.contains(parent) {
            self.unmade.insert(path.to_vec());
            self.lose(path.to_vec(), None, "its directory could not be created".to_owned());
            return Ok(());
        }
        let at = self.at(path);
        let key = (inode.tree.id, inode.ino);
        if inode.kind != FileKind::Directory
            && let Some(first) = self.links.get(&key)
        {
            return fs::hard_link(first, &at).or_else(|error| self.not_made(path, &error));
        }
        let made = match inode.kind {
            FileKind::Regular => return self.put_file(path, &at, inode).await,
            FileKind::Directory => make_directory(&at),
            FileKind::Symlink => match self.filesystem.read_link(inode).await {
                Ok(link) => std::os::unix::fs::symlink(OsStr::from_bytes(&link), &at),
                Err(error) => {
                    self.lose(path.to_vec(), None, error.to_string());
                    return Ok(());
                }
            },
            _ => {
                if !self.is_privileged && inode.device_numbers().is_some() {
                    self.unset += 1;
                    return Ok(());
                }
                make_node(&at, inode)
            }
        };
        match made {
            Err(error) => self.not_made(path, &error),
            Ok(()) => {
                self.made(&at, inode).await;
                Ok(())
            }
        }
    }

    /// Sets the attributes of an inode that was just made.
    async fn made(&mut self, at: &Path, inode: &Inode) {
        if inode.item.nlink > 1 && inode.kind != FileKind::Directory {
            self.links.insert((inode.tree.id, inode.ino), at.to_owned());
        }
        match self.filesystem.xattrs(inode).await {
            Ok(xattrs) => {
                for one in xattrs {
                    let name = OsStr::from_bytes(&one.name);
                    let set = rustix::fs::lsetxattr(at, name, &one.value, XattrFlags::empty());
                    self.unset += u64::from(set.is_err());
                }
            }
            Err(error) => {
                let path = at.strip_prefix(&self.to).unwrap_or(at).as_os_str().as_bytes().to_vec();
                self.lose(path, None, format!("cannot read its attributes: {error}"));
            }
        }
        match inode.kind {
            FileKind::Directory => self.directories.push((at.to_owned(), *inode)),
            _ => {
                self.files += 1;
                self.set_state(at, inode);
            }
        }
    }

    /// Sets the owner and then the mode, if there is one, in this order because setting an owner clears bits of the
    /// mode.
    fn set_owner_and_mode(&mut self, at: &Path, (uid, gid): (u32, u32), mode: Option<u32>) {
        if self.is_privileged {
            let (owner, group) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
            let set = rustix::fs::chownat(CWD, at, Some(owner), Some(group), AtFlags::SYMLINK_NOFOLLOW);
            self.unset += u64::from(set.is_err());
        }
        if let Some(mode) = mode {
            let set = fs::set_permissions(at, fs::Permissions::from_mode(mode & 0o7777));
            self.unset += u64::from(set.is_err());
        }
    }

    /// Owner, mode and times.
    fn set_state(&mut self, at: &Path, inode: &Inode) {
        let item = &inode.item;
        let mode = (inode.kind != FileKind::Symlink).then(|| item.mode.get());
        self.set_owner_and_mode(at, (item.uid.get(), item.gid.get()), mode);
        let time = |time: sealblock_btrfs_format::items::inode::Timespec| Timespec {
            tv_sec: time.seconds.get(),
            tv_nsec: time.nanoseconds.get().into(),
        };
        let times = Timestamps { last_access: time(item.atime), last_modification: time(item.mtime) };
        let set = rustix::fs::utimensat(CWD, at, &times, AtFlags::SYMLINK_NOFOLLOW);
        self.unset += u64::from(set.is_err());
    }

    async fn put_file(&mut self, path: &[u8], at: &Path, inode: &Inode) -> Result<(), WriteError> {
        let mut options = OpenOptions::new();
        let file = match options.write(true).create_new(true).mode(0o600).open(at) {
            Ok(file) => file,
            Err(error) => return self.not_made(path, &error),
        };
        let whole = self.put_data(path, &file, inode).await?;
        if !whole && self.losses == Losses::LeaveOut {
            fs::remove_file(at).map_err(|error| WriteError::Remove { path: at.to_owned(), error })?;
            return Ok(());
        }
        self.made(at, inode).await;
        Ok(())
    }

    /// Writes the data of a file. Returns true if none of them are lost.
    async fn put_data(&mut self, path: &[u8], file: &File, inode: &Inode) -> Result<bool, WriteError> {
        let size = inode.size();
        if let Err(error) = file.set_len(size) {
            self.not_made(path, &error)?;
            return Ok(false);
        }
        let (mut from, mut is_whole) = (0, true);
        while from < size {
            let run = match self.filesystem.next_data(inode, from, RUN_BYTES).await {
                Ok(Some(run)) => run,
                Ok(None) => break,
                Err(error) => {
                    // From here on the positions of its extents are lost.
                    self.lose(path.to_vec(), Some((from, size - from)), error.to_string());
                    return Ok(false);
                }
            };
            let (filesystem, end) = (self.filesystem, run.1.min(size));
            let mut steps = pin!(filesystem.read_in_order(inode, run.0..end));
            while let Some((at, data)) = steps.next().await {
                // An incomplete file does not count as copied; what was written of it stays.
                if self.watch.is_stopped() {
                    return Ok(false);
                }
                let bytes = ORDERED_STEP_BYTES.min(end - at);
                let lost = match data {
                    Ok(data) => self.write(path, file, at, &data).map(|()| false)?,
                    Err(error) => self.salvage(path, file, inode, (at, bytes), error).await?,
                };
                is_whole &= !lost;
                if lost && self.losses == Losses::LeaveOut {
                    return Ok(false);
                }
                self.watch.copied(bytes);
            }
            from = run.1;
        }
        Ok(is_whole)
    }

    /// Writes what can be read of bytes that cannot be read together. If only their checksums are lost, it reads them
    /// as stored; otherwise it reads each half separately, down to a sector. Returns true if some are lost.
    async fn salvage(
        &mut self,
        path: &[u8],
        file: &File,
        inode: &Inode,
        range: (u64, u64),
        error: FsError,
    ) -> Result<bool, WriteError> {
        let sector = u64::from(self.filesystem.storage().geometry().sector_bytes);
        let mut is_lost = false;
        let first = match self.losses {
            Losses::Keep => self.read_any(path, inode, range).await,
            Losses::LeaveOut => Err(error),
        };
        let mut pending: Vec<((u64, u64), Result<Slice, FsError>)> = vec![(range, first)];
        while let Some(((at, bytes), data)) = pending.pop() {
            match data {
                Ok(data) => self.write(path, file, at, &data)?,
                Err(error) if bytes > sector && self.losses == Losses::Keep && error.is_damage() => {
                    let half = (bytes / 2).next_multiple_of(sector);
                    for range in [(at + half, bytes - half), (at, half)] {
                        let data = self.read_any(path, inode, range).await;
                        pending.push((range, data));
                    }
                }
                Err(error) => {
                    is_lost = true;
                    self.lose(path.to_vec(), Some((at, bytes)), error.to_string());
                }
            }
        }
        Ok(is_lost)
    }

    /// Reads bytes of a file, and records those that no checksum confirms.
    async fn read_any(&mut self, path: &[u8], inode: &Inode, (at, bytes): (u64, u64)) -> Result<Slice, FsError> {
        let (data, mut unverified) = self.filesystem.read_any(inode, at, bytes as usize).await?;
        unverified.sort_by_key(|range| range.start);
        unverified.into_iter().for_each(|range| self.unverified.add(path, range));
        Ok(data)
    }

    fn write(&mut self, path: &[u8], file: &File, at: u64, data: &[u8]) -> Result<(), WriteError> {
        file.write_all_at(data, at).map_err(|error| WriteError::write(path, &self.to, &error))?;
        self.bytes += data.len() as u64;
        Ok(())
    }
}

fn is_directory(at: &Path) -> bool {
    fs::symlink_metadata(at).is_ok_and(|found| found.is_dir())
}

/// Makes a directory that only its owner can use.
///
/// # Errors
/// If the system refuses.
pub fn make_directory(at: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(at)
}

/// Makes a device node, a pipe or a socket.
fn make_node(at: &Path, inode: &Inode) -> io::Result<()> {
    let kind = match inode.kind {
        FileKind::CharDevice => FileType::CharacterDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
        FileKind::Socket => FileType::Socket,
        _ => FileType::Fifo,
    };
    let (major, minor) = inode.device_numbers().unwrap_or_default();
    // Major numbers have 12 bits, minor numbers 20.
    let device = rustix::fs::makedev(major as u32, minor as u32);
    Ok(rustix::fs::mknodat(CWD, at, kind, Mode::from_raw_mode(0o600), device)?)
}
