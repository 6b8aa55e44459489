//! The content of a folder: every path below it with all attributes that a user can read.
//!
//! A reader of an image must give the same manifest as the kernel's mount of it. The manifest contains nothing that
//! depends on the reader: instead of inode numbers, which a reader may choose, it records which paths are the same
//! inode; instead of blocks, a digest of the content ([`crate::content`]).

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

/// Seconds since 1970, negative before that, and nanoseconds after that second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds after the second.
    pub nanoseconds: u32,
}

/// The attributes of one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its type.
    pub kind: Kind,
    /// Permissions, the set-user-ID and set-group-ID bits, and the sticky bit.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// The inode's link count.
    pub nlink: u64,
    /// Size in bytes.
    pub size: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// The target of a symbolic link.
    pub target: Option<Vec<u8>>,
    /// The digest of the content of a regular file.
    pub content: Option<[u8; 32]>,
    /// Extended attributes by name.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The first path, in byte order, of the same inode; `None` if this is the first.
    pub same_as: Option<Vec<u8>>,
}

/// All paths below a folder, relative to it. The folder itself is the empty path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// Entries by path.
    pub entries: BTreeMap<Vec<u8>, Entry>,
}

impl Manifest {
    /// The part below one of its folders, as if that folder had been scanned.
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
