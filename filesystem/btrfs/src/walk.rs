//! Walks a directory and everything below it, including subvolumes, as a mount shows it.
//!
//! Invariant: each directory is visited once. A directory with a second name, or inside itself, is reported and not
//! entered again, so every walk ends. A lost entry is reported in its place, and the walk continues.

use std::collections::HashSet;

use sealblock_btrfs_format::names::{NameError, check_file_name};

use crate::directory::{DirEntry, Target};
use crate::error::FsError;
use crate::filesystem::Filesystem;
use crate::inode::{FileKind, Inode};

/// What a walk finds.
#[derive(Debug)]
pub enum Met {
    /// An inode.
    Inode(Inode),
    /// An empty directory in place of a subvolume that is elsewhere, with the owner of its parent.
    EmptyDirectory {
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// Something is unreadable: an entry whose inode is lost, or a part of a directory.
    Lost(FsError),
    /// An entry whose name is not valid in a path; it is skipped.
    BadName(NameError),
}

/// A result of a walk, and its path.
#[derive(Debug)]
pub struct Visit {
    /// The path from the start of the walk, without a leading slash; empty for the start itself.
    pub path: Vec<u8>,
    /// The result.
    pub met: Met,
}

/// A directory whose entries are visited.
struct Open {
    path: Vec<u8>,
    inode: Inode,
    entries: std::vec::IntoIter<DirEntry>,
}

/// A walk.
pub struct Walk<'a> {
    filesystem: &'a Filesystem,
    is_recursive: bool,
    open: Vec<Open>,
    /// Results to return before the next entry.
    pending: Vec<Visit>,
    seen: HashSet<(u64, u64)>,
}

impl<'a> Walk<'a> {
    /// A walk from an inode. For a directory, its entries, and if `is_recursive`, everything below them.
    pub fn new(filesystem: &'a Filesystem, start: Inode, is_recursive: bool) -> Walk<'a> {
        let first = Visit { path: Vec::new(), met: Met::Inode(start) };
        Walk { filesystem, is_recursive, open: Vec::new(), pending: vec![first], seen: HashSet::new() }
    }

    /// The next result; a directory comes before its entries.
    pub async fn next(&mut self) -> Option<Visit> {
        loop {
            if let Some(visit) = self.pending.pop() {
                if let Met::Inode(inode) = visit.met
                    && inode.kind == FileKind::Directory
                    && (self.is_recursive || visit.path.is_empty())
                {
                    self.enter(visit.path.clone(), inode).await;
                }
                return Some(visit);
            }
            let directory = self.open.last_mut()?;
            let Some(entry) = directory.entries.next() else {
                self.open.pop();
                continue;
            };
            let mut path = directory.path.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(&entry.name);
            if let Err(error) = check_file_name(&entry.name) {
                return Some(Visit { path, met: Met::BadName(error) });
            }
            let inode = directory.inode;
            let met = match self.filesystem.follow(&inode, &entry).await {
                Ok(Some(inode)) => Met::Inode(inode),
                Ok(None) => Met::EmptyDirectory { uid: inode.item.uid.get(), gid: inode.item.gid.get() },
                Err(error) => Met::Lost(of_entry(&entry, error)),
            };
            self.pending.push(Visit { path, met });
        }
    }

    async fn enter(&mut self, path: Vec<u8>, inode: Inode) {
        if !self.seen.insert((inode.tree.id, inode.ino)) {
            let why = "it has a second name, or lies below itself".to_owned();
            let error = FsError::Contradiction { what: format!("the directory {}", inode.ino), why };
            self.pending.push(Visit { path, met: Met::Lost(error) });
            return;
        }
        match self.filesystem.reachable_entries(&inode).await {
            Ok((entries, lost)) => {
                let told = lost.into_iter().map(|error| Visit { path: path.clone(), met: Met::Lost(error) });
                self.pending.extend(told);
                self.open.push(Open { path, inode, entries: entries.into_iter() });
            }
            Err(error) => self.pending.push(Visit { path, met: Met::Lost(error) }),
        }
    }
}

/// If an entry refers to an inode that does not exist, this is damage.
fn of_entry(entry: &DirEntry, error: FsError) -> FsError {
    match (&error, entry.target) {
        (FsError::Absent(what), Target::Inode(_) | Target::Subvolume(_)) => FsError::Contradiction {
            what: "an entry of a directory".into(),
            why: format!("it leads to {what}, which is not there"),
        },
        _ => error,
    }
}
