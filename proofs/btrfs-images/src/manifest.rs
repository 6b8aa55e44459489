//! What a folder shows: every path below it with everything that a user can ask of it.
//!
//! The manifest of the kernel's mount of an image is what a reader of the same image must show. It holds nothing that depends on how
//! the filesystem is read: no inode numbers, which a reader may choose, but which paths are one inode; no blocks, but a digest of the
//! content ([`crate::content`]).

pub mod difference;
mod lines;
mod scan;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::Display;

/// The types of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are what POSIX calls them")]
pub enum Kind {
    Regular,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// Seconds since 1970, before it if negative, and nanoseconds after that second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds after the second.
    pub nanoseconds: u32,
}

/// What one path shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub kind: Kind,
    /// Permissions, and the bits for setting user and group, and the sticky bit.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// How many names the inode says that it has.
    pub nlink: u64,
    /// Size in bytes, as the inode says it.
    pub size: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Where a symbolic link points.
    pub target: Option<Vec<u8>>,
    /// The digest of the content of a regular file.
    pub content: Option<[u8; 32]>,
    /// Extended attributes by name.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The first path, in the order of bytes, that is the same inode; `None` if that is this one.
    pub same_as: Option<Vec<u8>>,
}

/// All paths below a folder, relative to it. The folder itself is the empty path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// Entries by path.
    pub entries: BTreeMap<Vec<u8>, Entry>,
}

impl Manifest {
    /// The part below one of its folders, as if that had been read.
    pub fn below(&self, folder: &[u8]) -> Manifest {
        let relative = |path: &[u8]| -> Option<Vec<u8>> {
            match path.strip_prefix(folder)? {
                [] => Some(Vec::new()),
                [b'/', rest @ ..] if !folder.is_empty() => Some(rest.to_vec()),
                rest if folder.is_empty() => Some(rest.to_vec()),
                _ => None,
            }
        };
        let mut first_names = BTreeMap::new();
        let mut entries = BTreeMap::new();
        for (path, entry) in &self.entries {
            let Some(inside) = relative(path) else { continue };
            let inode = entry.same_as.clone().unwrap_or_else(|| path.clone());
            let first = first_names.entry(inode).or_insert_with(|| inside.clone());
            let same_as = (*first != inside).then(|| first.clone());
            entries.insert(inside, Entry { same_as, ..entry.clone() });
        }
        Manifest { entries }
    }
}

impl Display for Time {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{:09}", self.seconds, self.nanoseconds)
    }
}
