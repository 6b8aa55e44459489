//! Going through a directory and all that lies below it, subvolumes too, as a mount shows it.
//!
//! Invariant: each directory is gone through once. One that has a second name, or lies below itself, is reported and not entered again, so no
//! filesystem makes a walk endless. What is lost is reported where it would have been, and the walk continues.

use std::collections::HashSet;

use sealblock_btrfs_format::names::{NameError, check_file_name};

use crate::directory::{DirEntry, Target};
use crate::error::FsError;
use crate::filesystem::Filesystem;
use crate::inode::{FileKind, Inode};

/// What a walk meets.
#[derive(Debug)]
pub enum Met {
    /// An inode.
    Inode(Inode),
    /// The place of a subvolume that lies elsewhere: an empty directory with the owner of the one that it is in.
    EmptyDirectory {
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// Something that cannot be had: an entry whose inode is lost, or a part of a directory.
    Lost(FsError),
    /// An entry whose name no path can hold; it is passed over.
    BadName(NameError),
}

/// Something that a walk met, and where.
#[derive(Debug)]
pub struct Visit {
    /// The path from where the walk began, without a slash before it; empty for that itself.
    pub path: Vec<u8>,
    /// What is there.
    pub met: Met,
}

/// A directory that is gone through.
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
    /// What is to be told before the next entry.
    pending: Vec<Visit>,
    seen: HashSet<(u64, u64)>,
}

impl<'a> Walk<'a> {
    /// A walk from an inode on. If it is a directory, through its entries, and if `is_recursive`, through all below them.
    pub fn new(filesystem: &'a Filesystem, start: Inode, is_recursive: bool) -> Walk<'a> {
        let first = Visit { path: Vec::new(), met: Met::Inode(start) };
        Walk { filesystem, is_recursive, open: Vec::new(), pending: vec![first], seen: HashSet::new() }
    }

    /// What comes next; a directory before what lies in it.
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

/// An inode that is not there is damage where an entry leads to it.
fn of_entry(entry: &DirEntry, error: FsError) -> FsError {
    match (&error, entry.target) {
        (FsError::Absent(what), Target::Inode(_) | Target::Subvolume(_)) => FsError::Contradiction {
            what: "an entry of a directory".into(),
            why: format!("it leads to {what}, which is not there"),
        },
        _ => error,
    }
}
