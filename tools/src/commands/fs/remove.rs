//! `sealblock fs rm` and `sealblock fs rmdir`.
//!
//! A directory tree is removed from its leaves. Each name goes in one step, and an inode without names with it; so
//! whenever it ends, what is left is a valid part of the tree.

use std::collections::VecDeque;

use sealblock_btrfs_engine::engine::EngineError;
use sealblock_btrfs_engine::names::{Place, Unlinked};
use sealblock_btrfs_engine::operations::{DirectoryItem, Resolved, SubvolumePlace};
use sealblock_btrfs_format::items::directory::{FileType, Target};
use sealblock_stack::filesystem::FilesystemName;
use sealblock_stack::quantity::count;
use sealblock_stack::{Cause, StackError};
use serde::Serialize;

use super::dead::{Dead, drop_dead};
use super::nested::Placed;
use super::paths::Entry;
use super::place::printable;
use super::write::{Done, Order, Writer, change, engine_error, now};
use crate::cli::{FsRm, FsRmdir};
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::Show;

const ACTION: &str = "remove";
/// Entries of a directory that are read at once.
const BATCH: usize = 256;

/// What was removed, in JSON.
#[derive(Default, Serialize)]
pub(super) struct Removed {
    /// Names of files that are no directories.
    files: u64,
    directories: u64,
    /// Numbers of deleted subvolumes.
    pub subvolumes: Vec<u64>,
    /// What became of these.
    #[serde(flatten)]
    dead: Dead,
}

impl Done for Removed {}

impl Removed {
    /// Frees the space of subvolumes that were deleted.
    async fn free_deleted(
        mut self,
        writer: &Writer,
        names: &[&FilesystemName],
        show: Show,
    ) -> Result<Removed, StackError> {
        if !self.subvolumes.is_empty() {
            let failed = |error| engine_error("write to", &error).on(names[0].devices());
            self.dead = drop_dead(writer, show).await.map_err(failed)?;
        }
        Ok(self)
    }
}

/// Removes files and directory trees.
pub fn rm(arguments: &FsRm) -> Result<Exit, StackError> {
    let names: Vec<&FilesystemName> = arguments.names.iter().collect();
    let order = Order { names: &names, json: arguments.json, needs_subvolumes: arguments.recursive };
    let show = if arguments.json { Show::Never } else { Show::OnTerminal };
    change(&order, async |writer| {
        let mut removed = Removed::default();
        for name in &arguments.names {
            remove_one(writer, arguments, &writer.entry(name).await?, &mut removed).await?;
            if writer.stops() {
                report_interrupted(&removed);
                return Ok(removed);
            }
        }
        removed.free_deleted(writer, &names, show).await
    })
}

async fn remove_one(writer: &Writer, arguments: &FsRm, entry: &Entry, removed: &mut Removed) -> Result<(), StackError> {
    let root = entry.directory.root;
    let Some(found) = entry.found else {
        return match arguments.force {
            true => Ok(()),
            false => Err(entry.refused(Cause::Absent, ACTION, "it does not exist")),
        };
    };
    match (found.target, found.kind) {
        (Resolved::Inode(ino), FileType::Directory) => {
            let below = writer.nested.below(root, ino);
            check_directory(arguments, entry, &below)?;
            check_deletable(writer, entry, &below, None).await?;
            delete_below(writer, &below, removed).await?;
            Tree::new(writer, entry, removed).remove(ino).await?;
        }
        (Resolved::Inode(_), _) => {
            let unlinked = writer.engine.unlink(root, entry.place(), now()).await.map_err(entry.failed(ACTION))?;
            release(writer, root, unlinked).await.map_err(entry.failed(ACTION))?;
            removed.files += 1;
        }
        (Resolved::Subvolume(id), _) => {
            if !arguments.subvolumes {
                let refused = entry.refused(Cause::Refused, ACTION, &format!("it is subvolume {id}"));
                return Err(refused.advise("`sealblock fs subvolume delete`, or -r --subvolumes"));
            }
            let below = writer.nested.below_subvolume(id);
            check_deletable(writer, entry, &below, Some(id)).await?;
            delete_below(writer, &below, removed).await?;
            delete_entry(writer, entry).await?;
            removed.subvolumes.push(id);
        }
        (Resolved::Elsewhere(_), _) => {
            check_directory(arguments, entry, &[])?;
            remove_empty(writer, entry).await?;
            removed.directories += 1;
        }
    }
    Ok(())
}

/// Removes empty directories and empty subvolumes.
pub fn rmdir(arguments: &FsRmdir) -> Result<Exit, StackError> {
    let names: Vec<&FilesystemName> = arguments.names.iter().collect();
    let order = Order { names: &names, json: arguments.json, needs_subvolumes: false };
    let show = if arguments.json { Show::Never } else { Show::OnTerminal };
    change(&order, async |writer| {
        let mut removed = Removed::default();
        for name in &arguments.names {
            let entry = writer.entry(name).await?;
            match entry.found.map(|found| found.target) {
                None => return Err(entry.refused(Cause::Absent, ACTION, "it does not exist")),
                Some(Resolved::Subvolume(_)) => {
                    let at = SubvolumePlace { root: entry.directory.root, place: entry.place() };
                    let deleted = writer.engine.delete_empty_subvolume(at, now()).await;
                    removed.subvolumes.push(deleted.map_err(entry.failed(ACTION))?);
                }
                Some(_) => {
                    remove_empty(writer, &entry).await?;
                    removed.directories += 1;
                }
            }
        }
        removed.free_deleted(writer, &names, show).await
    })
}

/// Refuses a directory without --recursive, and one with subvolumes without --subvolumes.
fn check_directory(arguments: &FsRm, entry: &Entry, below: &[&Placed]) -> Result<(), StackError> {
    if !arguments.recursive {
        return Err(entry.refused(Cause::Refused, ACTION, "it is a directory").advise("`sealblock fs rmdir`, or -r"));
    }
    match below.last().filter(|_| !arguments.subvolumes) {
        None => Ok(()),
        Some(one) => {
            let why =
                format!("{} in it, for example {:?}", count(below.len() as u64, "subvolume"), printable(&one.name));
            let refused = entry.refused(Cause::Refused, ACTION, &why);
            Err(refused.advise("delete them first, or use --subvolumes; `sealblock fs subvolume list` lists them"))
        }
    }
}

fn report_interrupted(removed: &Removed) {
    let Removed { files, directories, subvolumes, .. } = removed;
    let subvolumes = subvolumes.len();
    let how_far = format!("after {files} files, {directories} directories and {subvolumes} subvolumes");
    interrupt::report("removing", how_far, "the same command removes the rest");
}

/// Before the first subvolume goes: refuses to delete several of which one cannot be deleted.
pub(super) async fn check_deletable(
    writer: &Writer,
    entry: &Entry,
    below: &[&Placed],
    own: Option<u64>,
) -> Result<(), StackError> {
    if below.is_empty() {
        return Ok(());
    }
    let default = writer.engine.default_subvolume().await.map_err(entry.failed("delete"))?;
    if let Some(id) = below.iter().map(|one| one.id).chain(own).find(|id| *id == default) {
        return Err(entry.refused(Cause::Refused, "delete", &format!("subvolume {id} is the default subvolume")));
    }
    for one in below {
        if writer.engine.is_read_only(one.parent).await.map_err(entry.failed("delete"))? {
            let (id, parent) = (one.id, one.parent);
            let why = format!("subvolume {id} is in subvolume {parent}, which is read-only");
            return Err(entry.refused(Cause::Refused, "delete", &why));
        }
    }
    Ok(())
}

/// Deletes these subvolumes, in this order.
pub(super) async fn delete_below(writer: &Writer, below: &[&Placed], removed: &mut Removed) -> Result<(), StackError> {
    for one in below {
        // An earlier name of the command may have contained it.
        if removed.subvolumes.contains(&one.id) {
            continue;
        }
        let at = SubvolumePlace { root: one.parent, place: Place { directory: one.directory, name: &one.name } };
        let deleted = writer.engine.delete_subvolume(at, now()).await;
        deleted.map_err(|error| engine_error("delete subvolume", &error).on(printable(&one.name)))?;
        removed.subvolumes.push(one.id);
        writer.checkpoint().await.map_err(|error| engine_error("commit", &error))?;
    }
    Ok(())
}

/// Deletes the subvolume at an entry. Returns its number.
pub(super) async fn delete_entry(writer: &Writer, entry: &Entry) -> Result<u64, StackError> {
    let at = SubvolumePlace { root: entry.directory.root, place: entry.place() };
    writer.engine.delete_subvolume(at, now()).await.map_err(entry.failed("delete"))
}

async fn remove_empty(writer: &Writer, entry: &Entry) -> Result<(), StackError> {
    let root = entry.directory.root;
    let unlinked = writer.engine.rmdir(root, entry.place(), now()).await.map_err(entry.failed(ACTION))?;
    match unlinked {
        Some(unlinked) => release(writer, root, unlinked).await.map_err(entry.failed(ACTION)),
        None => Ok(()),
    }
}

/// Deletes an inode that lost its last name: nobody else uses the filesystem.
pub(super) async fn release(writer: &Writer, root: u64, unlinked: Unlinked) -> Result<(), EngineError> {
    if unlinked.is_orphan {
        writer.engine.release(root, unlinked.ino).await?;
    }
    Ok(())
}

/// A directory that is being removed.
struct Level {
    ino: u64,
    /// Its name in the level above.
    name: Vec<u8>,
    /// Entries that were read and are still there.
    entries: VecDeque<DirectoryItem>,
    /// The indices of the last entry that was read, and of the last one that there was.
    read: (u64, u64),
}

/// A directory tree that is being removed.
struct Tree<'a> {
    writer: &'a Writer,
    entry: &'a Entry,
    removed: &'a mut Removed,
    /// From the top down.
    levels: Vec<Level>,
}

impl<'a> Tree<'a> {
    fn new(writer: &'a Writer, entry: &'a Entry, removed: &'a mut Removed) -> Tree<'a> {
        Tree { writer, entry, removed, levels: Vec::new() }
    }

    fn root(&self) -> u64 {
        self.entry.directory.root
    }

    /// Removes everything, or as much as there is time for.
    async fn remove(mut self, ino: u64) -> Result<(), StackError> {
        self.enter(ino, self.entry.name.clone()).await?;
        while !self.levels.is_empty() && !self.writer.stops() {
            self.writer.checkpoint().await.map_err(|error| self.failed(None, &error))?;
            match self.next().await? {
                Some(item) => self.remove_item(item).await?,
                None => self.leave().await?,
            }
        }
        Ok(())
    }

    async fn enter(&mut self, ino: u64, name: Vec<u8>) -> Result<(), StackError> {
        let last = self.writer.engine.last_index(self.root(), ino).await;
        let last = last.map_err(|error| self.failed(Some(&name), &error))?;
        self.levels.push(Level { ino, name, entries: VecDeque::new(), read: (0, last) });
        Ok(())
    }

    /// The next entry of the lowest level.
    async fn next(&mut self) -> Result<Option<DirectoryItem>, StackError> {
        let root = self.root();
        let Some(level) = self.levels.last_mut() else { return Ok(None) };
        if level.entries.is_empty() {
            let read = self.writer.engine.read_directory(root, level.ino, level.read, BATCH).await;
            match read {
                Ok(items) => level.entries.extend(items),
                Err(error) => return Err(self.failed(None, &error)),
            }
        }
        let item = level.entries.pop_front();
        level.read.0 = item.as_ref().map_or(level.read.0, |item| item.index);
        Ok(item)
    }

    async fn remove_item(&mut self, item: DirectoryItem) -> Result<(), StackError> {
        let directory = self.levels.last().map_or(0, |level| level.ino);
        match (item.target, item.kind) {
            (Target::Inode(ino), FileType::Directory) => return self.enter(ino, item.name).await,
            (Target::Inode(_), _) => {
                let place = Place { directory, name: &item.name };
                self.unlink(place).await.map_err(|error| self.failed(Some(&item.name), &error))?;
                self.removed.files += 1;
            }
            // What is left of a subvolume that is elsewhere.
            (Target::Subvolume(_), _) => {
                let place = Place { directory, name: &item.name };
                let removed = self.writer.engine.rmdir(self.root(), place, now()).await;
                removed.map_err(|error| self.failed(Some(&item.name), &error))?;
                self.removed.directories += 1;
            }
        }
        Ok(())
    }

    async fn unlink(&self, place: Place<'_>) -> Result<(), EngineError> {
        let unlinked = self.writer.engine.unlink(self.root(), place, now()).await?;
        release(self.writer, self.root(), unlinked).await
    }

    /// The lowest level is empty, and goes.
    async fn leave(&mut self) -> Result<(), StackError> {
        let Some(level) = self.levels.pop() else { return Ok(()) };
        let directory = self.levels.last().map_or(self.entry.directory.ino, |above| above.ino);
        let place = Place { directory, name: &level.name };
        let root = self.root();
        let result = async {
            match self.writer.engine.rmdir(root, place, now()).await? {
                Some(unlinked) => release(self.writer, root, unlinked).await,
                None => Ok(()),
            }
        };
        result.await.map_err(|error| self.failed(Some(&level.name), &error))?;
        self.removed.directories += 1;
        Ok(())
    }

    /// A failure at a name in the lowest level, or at that itself.
    fn failed(&self, name: Option<&[u8]>, error: &EngineError) -> StackError {
        let levels =
            self.levels.iter().skip(1).map(|level| &level.name[..]).chain(name.filter(|_| !self.levels.is_empty()));
        let path: String = levels.map(|name| format!("/{}", printable(name))).collect();
        engine_error(ACTION, error).on(format_args!("{}{path}", self.entry.shown))
    }
}
