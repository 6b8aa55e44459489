//! Scans a folder into a manifest. Only ranges that the kernel reports as data are read; holes are not.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File, FileType, Metadata};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::{Entry, Kind, Manifest, Time};
use crate::content::ContentDigest;

/// The Linux limit for all attribute names of a file, and for one value.
const MAX_XATTR_BYTES: usize = 64 << 10;
/// Bytes of one read of a file.
const PIECE_BYTES: usize = 1 << 20;
/// The inode number, within its subvolume, of the empty folder that a snapshot has in place of a nested subvolume.
const PLACE_OF_SUBVOLUME: u64 = 2;
/// The bits of an inode number that are the number within its subvolume.
const WITHIN_SUBVOLUME: u64 = (1 << 48) - 1;

struct Scan {
    entries: BTreeMap<Vec<u8>, Entry>,
    /// The paths of inodes with several names, by device and number.
    inodes: HashMap<(u64, u64), Vec<Vec<u8>>>,
    buffer: Vec<u8>,
}

impl Manifest {
    /// Scans a folder.
    ///
    /// A snapshot has an empty folder in place of each nested subvolume. The kernel reports the current time for it, so
    /// it has no times here. It is recognised by inode number 2 within the subvolume (the upper 16 bits may hold a
    /// subvolume number).
    ///
    /// # Errors
    /// If something cannot be read; the error names it.
    pub fn scan(folder: &Path) -> Result<Manifest, String> {
        scan(folder)
    }
}

fn scan(folder: &Path) -> Result<Manifest, String> {
    let buffer = vec![0; PIECE_BYTES];
    let mut scan = Scan { entries: BTreeMap::new(), inodes: HashMap::new(), buffer };
    let mut pending = vec![OsString::new()];
    while let Some(path) = pending.pop() {
        let full = if path.is_empty() { folder.to_owned() } else { folder.join(&path) };
        let entry = scan.entry(&full, path.as_bytes()).map_err(|error| format!("{}: {error}", full.display()))?;
        if entry.kind == Kind::Directory {
            let names = fs::read_dir(&full).and_then(|names| names.collect::<Result<Vec<_>, _>>());
            let names = names.map_err(|error| format!("{}: {error}", full.display()))?;
            pending.extend(names.iter().map(|name| join(&path, &name.file_name())));
        }
        scan.entries.insert(path.into_vec(), entry);
    }
    Ok(scan.finish())
}

fn join(folder: &OsStr, name: &OsStr) -> OsString {
    let separator: &[u8] = if folder.is_empty() { b"" } else { b"/" };
    OsString::from_vec([folder.as_bytes(), separator, name.as_bytes()].concat())
}

impl Scan {
    fn entry(&mut self, full: &Path, path: &[u8]) -> std::io::Result<Entry> {
        let metadata = fs::symlink_metadata(full)?;
        let kind = kind(metadata.file_type());
        let is_place = kind == Kind::Directory && metadata.ino() & WITHIN_SUBVOLUME == PLACE_OF_SUBVOLUME;
        let [atime, mtime, ctime] = if is_place { [Time::default(); 3] } else { times(&metadata) };
        let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
        // Avoids reading the content once for each name of an inode.
        let mut content = None;
        if kind == Kind::Regular {
            let names = self.inodes.get(&(metadata.dev(), metadata.ino()));
            let known = names.and_then(|names| self.entries.get(&names[0])).and_then(|entry| entry.content);
            content = Some(known.map_or_else(|| digest(full, metadata.len(), &mut self.buffer), Ok)?);
        }
        let target = (kind == Kind::Symlink).then(|| fs::read_link(full)).transpose()?;
        if kind != Kind::Directory && metadata.nlink() > 1 {
            self.inodes.entry((metadata.dev(), metadata.ino())).or_default().push(path.to_vec());
        }
        Ok(Entry {
            kind,
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
            nlink: metadata.nlink(),
            size: metadata.size(),
            atime,
            mtime,
            ctime,
            device: (major, minor),
            target: target.map(|target| target.into_os_string().into_vec()),
            content,
            xattrs: xattrs(full)?,
            same_as: None,
        })
    }

    /// Sets the first name in all other names of an inode.
    fn finish(mut self) -> Manifest {
        for names in self.inodes.values_mut() {
            names.sort_unstable();
            for name in &names[1..] {
                if let Some(entry) = self.entries.get_mut(name) {
                    entry.same_as = Some(names[0].clone());
                }
            }
        }
        Manifest { entries: self.entries }
    }
}

fn kind(file: FileType) -> Kind {
    match file {
        _ if file.is_dir() => Kind::Directory,
        _ if file.is_symlink() => Kind::Symlink,
        _ if file.is_fifo() => Kind::Fifo,
        _ if file.is_socket() => Kind::Socket,
        _ if file.is_char_device() => Kind::CharDevice,
        _ if file.is_block_device() => Kind::BlockDevice,
        _ => Kind::Regular,
    }
}

fn times(metadata: &Metadata) -> [Time; 3] {
    // The kernel's nanoseconds are below 1,000,000,000.
    let time = |seconds, nanoseconds: i64| Time { seconds, nanoseconds: nanoseconds as u32 };
    [
        time(metadata.atime(), metadata.atime_nsec()),
        time(metadata.mtime(), metadata.mtime_nsec()),
        time(metadata.ctime(), metadata.ctime_nsec()),
    ]
}

fn digest(path: &Path, size: u64, buffer: &mut [u8]) -> std::io::Result<[u8; 32]> {
    let mut digest = ContentDigest::new(size);
    let file = if size == 0 { None } else { Some(File::open(path)?) };
    let mut position = 0;
    while let Some(file) = &file
        && position < size
    {
        let data = match seek(file, SeekFrom::Data(position)) {
            Ok(data) => data.min(size),
            // Only a hole remains.
            Err(Errno::NXIO) => size,
            Err(error) => return Err(error.into()),
        };
        digest.zeroes(data - position);
        position = data;
        let end = if data < size { seek(file, SeekFrom::Hole(data))?.min(size) } else { size };
        while position < end {
            let piece = &mut buffer[..(end - position).min(PIECE_BYTES as u64) as usize];
            file.read_exact_at(piece, position)?;
            digest.bytes(piece);
            position += piece.len() as u64;
        }
    }
    digest.finish().map_err(std::io::Error::other)
}

/// All attributes of the file itself, never of a link's target.
fn xattrs(path: &Path) -> std::io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut names = vec![0; MAX_XATTR_BYTES];
    let bytes = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(bytes) => bytes,
        Err(Errno::OPNOTSUPP) => 0,
        Err(error) => return Err(error.into()),
    };
    let mut xattrs = BTreeMap::new();
    for name in names[..bytes].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0; MAX_XATTR_BYTES];
        let name_of_c = CString::new(name).map_err(std::io::Error::other)?;
        let bytes = rustix::fs::lgetxattr(path, &*name_of_c, &mut value[..])?;
        value.truncate(bytes);
        xattrs.insert(name.to_vec(), value);
    }
    Ok(xattrs)
}
