//! Copies files of this machine into a filesystem.
//!
//! Invariants:
//! - A file gets its name when all of it was written. Until then it is an orphan, which is deleted when the command, or
//!   the process, ends early.
//! - A directory gets its attributes when everything in it was copied, since that changes its times.
//! - Symbolic links of this machine are not followed, and neither are those at names that are replaced.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sealblock_btrfs_engine::datasum::Datasum;
use sealblock_btrfs_engine::engine::EngineError;
use sealblock_btrfs_engine::names::NewFile;
use sealblock_btrfs_engine::operations::Resolved;
use sealblock_btrfs_engine::xattrs::XattrMode;
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_stack::StackError;
use sealblock_stack::filesystem::FilesystemName;

use super::super::paths::{Entry, Node};
use super::super::place::printable;
use super::super::remove::release;
use super::super::write::{Writer, engine_error, now};
use super::copied::Copied;
use super::local::{self, Kind, files_below};
use crate::progress::Progress;

/// Bytes that are read and written at once.
const PIECE_BYTES: u64 = 4 << 20;

const SHORTER: &str = "it became shorter while it was copied";

/// A directory that is being copied.
struct Level {
    path: PathBuf,
    about: Metadata,
    node: Node,
    shown: String,
    /// The names that are still to be copied, the first one last.
    names: Vec<OsString>,
}

/// A copy.
pub(super) struct Copier<'a> {
    writer: &'a Writer,
    progress: &'a Progress,
    /// Device and inode numbers of the files that the filesystem lies on.
    own: Vec<(u64, u64)>,
    /// Copies of files with several names: from device and inode number to subvolume and inode number.
    links: HashMap<(u64, u64), (u64, u64)>,
    /// Where the checksums of the data of copies are kept, if that is not inherited.
    datasum: Option<Datasum>,
    pub copied: Copied,
}

impl<'a> Copier<'a> {
    pub fn new(
        writer: &'a Writer,
        progress: &'a Progress,
        to: &FilesystemName,
        datasum: Option<Datasum>,
    ) -> Copier<'a> {
        let own = files_below(to).filter_map(|path| path.metadata().ok()).map(|about| (about.dev(), about.ino()));
        Copier { writer, progress, own: own.collect(), links: HashMap::new(), datasum, copied: Copied::default() }
    }

    /// Copies a file, or a directory with all that is in it.
    ///
    /// # Errors
    /// If something cannot be written. What cannot be read is left out.
    pub async fn copy(&mut self, local: &Path, entry: &Entry) -> Result<(), StackError> {
        let mut levels: Vec<Level> = self.copy_one(local, entry).await?.into_iter().collect();
        while let Some(level) = levels.last_mut() {
            let checked = self.writer.checkpoint().await;
            checked.map_err(|error| engine_error("write to", &error).on(&level.shown))?;
            let stops = self.writer.stops();
            let Some(name) = level.names.pop().filter(|_| !stops) else {
                self.complete(&level.path, &level.about, level.node, &level.shown).await?;
                levels.pop();
                continue;
            };
            let path = level.path.join(&name);
            let shown = format!("{}/{}", level.shown, printable(name.as_bytes()));
            let entry = self.writer.entry_in(level.node, name.as_bytes(), shown).await?;
            let below = self.copy_one(&path, &entry).await?;
            levels.extend(below);
        }
        Ok(())
    }

    /// Copies a file. Of a directory only that itself: what is in it is then to be copied.
    async fn copy_one(&mut self, path: &Path, entry: &Entry) -> Result<Option<Level>, StackError> {
        let about = match path.symlink_metadata() {
            Ok(about) => about,
            Err(error) => {
                self.copied.lose(path, error);
                return Ok(None);
            }
        };
        let is_directory = entry.found.map(|found| found.kind == FileType::Directory);
        if is_directory.is_some_and(|there| there != about.is_dir()) {
            let there = if about.is_dir() { "not a directory" } else { "a directory" };
            self.copied.lose(path, format_args!("{} is {there}", entry.shown));
            return Ok(None);
        }
        match local::kind_of(&about) {
            Ok(Kind::Directory) => return self.copy_directory(path, about, entry).await,
            Ok(_) if self.link(&about, entry).await? => {}
            Ok(Kind::Regular) => self.copy_regular(path, &about, entry).await?,
            Ok(Kind::Symlink) => match local::read_link(path) {
                Ok(target) => self.make(path, &about, entry, NewFile::Symlink(&target)).await?,
                Err(error) => self.copied.lose(path, error),
            },
            Ok(Kind::Special(file)) => self.make(path, &about, entry, file).await?,
            Err(error) => self.copied.lose(path, error),
        }
        Ok(None)
    }

    async fn copy_directory(
        &mut self,
        path: &Path,
        about: Metadata,
        entry: &Entry,
    ) -> Result<Option<Level>, StackError> {
        let names = match local::entries(path) {
            Ok(names) => names,
            Err(error) => {
                self.copied.lose(path, error);
                return Ok(None);
            }
        };
        let root = entry.directory.root;
        let node = match entry.found.map(|found| found.target) {
            Some(Resolved::Inode(ino)) => Node { ino, ..Node::top(root) },
            Some(Resolved::Subvolume(id)) => Node::top(id),
            Some(Resolved::Elsewhere(_)) => {
                self.copied.lose(path, format_args!("{} is the place of a subvolume that is elsewhere", entry.shown));
                return Ok(None);
            }
            None => {
                let owner = local::ownership(&about);
                let made = self.writer.engine.create(root, entry.place(), NewFile::Directory, &owner, now()).await;
                let node = Node { ino: made.map_err(entry.failed("create"))?, ..Node::top(root) };
                self.writer.set_datasum(node, self.datasum, &entry.shown).await?;
                node
            }
        };
        Ok(Some(Level { path: path.to_owned(), about, node, shown: entry.shown.clone(), names }))
    }

    /// Gives the copy of a file another name, if it was copied under an earlier one.
    async fn link(&mut self, about: &Metadata, entry: &Entry) -> Result<bool, StackError> {
        let root = entry.directory.root;
        let copied = self.links.get(&(about.dev(), about.ino())).filter(|(of, _)| *of == root);
        let Some((_, ino)) = copied.copied() else { return Ok(false) };
        if entry.found.is_some_and(|found| found.target == Resolved::Inode(ino)) {
            return Ok(true);
        }
        self.make_room(entry).await?;
        self.writer.engine.link(root, ino, entry.place(), now()).await.map_err(entry.failed("create"))?;
        self.copied.files += 1;
        Ok(true)
    }

    /// Makes a file without data.
    async fn make(
        &mut self,
        path: &Path,
        about: &Metadata,
        entry: &Entry,
        file: NewFile<'_>,
    ) -> Result<(), StackError> {
        self.make_room(entry).await?;
        let (root, owner) = (entry.directory.root, local::ownership(about));
        let made = self.writer.engine.create(root, entry.place(), file, &owner, now()).await;
        let ino = made.map_err(entry.failed("create"))?;
        self.made(about, root, ino);
        self.complete(path, about, Node { ino, ..entry.directory }, &entry.shown).await
    }

    async fn copy_regular(&mut self, path: &Path, about: &Metadata, entry: &Entry) -> Result<(), StackError> {
        if self.own.contains(&(about.dev(), about.ino())) {
            self.copied.lose(path, "the filesystem itself is in it");
            return Ok(());
        }
        let file = match local::open(path, about) {
            Ok(file) => file,
            Err(error) => {
                self.copied.lose(path, error);
                return Ok(());
            }
        };
        let (engine, root) = (&self.writer.engine, entry.directory.root);
        let unnamed = engine.create_unnamed(root, entry.directory.ino, &local::ownership(about), now()).await;
        let node = Node { ino: unnamed.map_err(entry.failed("create"))?, ..entry.directory };
        self.writer.set_datasum(node, self.datasum, &entry.shown).await?;
        let filled = match self.write(&file, about.size(), node, entry).await {
            Ok(Filled::Whole) => self.complete(path, about, node, &entry.shown).await.map(|()| Filled::Whole),
            other => other,
        };
        match filled {
            Ok(Filled::Whole) => {
                self.make_room(entry).await?;
                let named = engine.link_unnamed(root, node.ino, entry.place(), now()).await;
                named.map_err(entry.failed("create"))?;
                self.made(about, root, node.ino);
                return Ok(());
            }
            Ok(Filled::Stopped) => {}
            Ok(Filled::Unreadable(error)) => self.copied.lose(path, error),
            Err(error) => {
                // If that fails too, whoever opens the filesystem next deletes it.
                let _ = engine.release(root, node.ino).await;
                return Err(error);
            }
        }
        engine.release(root, node.ino).await.map(drop).map_err(entry.failed("remove what was copied of"))
    }

    /// Writes the data of a file.
    async fn write(&mut self, file: &File, size: u64, node: Node, entry: &Entry) -> Result<Filled, StackError> {
        let engine = &self.writer.engine;
        let (mut at, mut end) = (0, 0);
        loop {
            let range = match local::next_data(file, at, size) {
                Ok(Some(range)) => range,
                Ok(None) => break,
                Err(error) => return Ok(Filled::Unreadable(error)),
            };
            at = range.start;
            while at < range.end {
                if self.writer.stops() {
                    return Ok(Filled::Stopped);
                }
                let data = match local::read(file, at, PIECE_BYTES.min(range.end - at) as usize) {
                    Ok(data) if data.is_empty() => return Ok(Filled::Unreadable(io::Error::other(SHORTER))),
                    Ok(data) => data,
                    Err(error) => return Ok(Filled::Unreadable(error)),
                };
                let written = engine.write(node.root, node.ino, at, data).await.map_err(entry.failed("write"))?;
                self.copied.bytes += written;
                self.progress.advance(written);
                at += written;
                end = at;
                self.writer.checkpoint().await.map_err(entry.failed("write"))?;
            }
        }
        if end < size {
            engine.truncate(node.root, node.ino, size).await.map_err(entry.failed("write"))?;
        }
        Ok(Filled::Whole)
    }

    /// Removes the file that has the name.
    async fn make_room(&self, entry: &Entry) -> Result<(), StackError> {
        if entry.found.is_none() {
            return Ok(());
        }
        let replace = async {
            let unlinked = self.writer.engine.unlink(entry.directory.root, entry.place(), now()).await?;
            release(self.writer, entry.directory.root, unlinked).await
        };
        replace.await.map_err(entry.failed("replace"))
    }

    fn made(&mut self, about: &Metadata, root: u64, ino: u64) {
        self.copied.files += 1;
        if about.nlink() > 1 {
            self.links.insert((about.dev(), about.ino()), (root, ino));
        }
    }

    /// Sets extended and other attributes, after which nothing of the file changes but its names.
    async fn complete(&mut self, path: &Path, about: &Metadata, node: Node, shown: &str) -> Result<(), StackError> {
        let engine = &self.writer.engine;
        let failed = |error: EngineError| engine_error("set the attributes", &error).on(shown);
        let (xattrs, lost) = local::xattrs(path);
        self.copied.not_set += lost;
        for (name, value) in xattrs {
            let set = engine.set_xattr(node.root, node.ino, (&name, &value), XattrMode::Set, now()).await;
            match set {
                Err(EngineError::Change(_)) => self.copied.not_set += 1,
                result => result.map_err(failed)?,
            }
        }
        let set = engine.set_attributes(node.root, node.ino, &local::attributes(about), now()).await;
        set.map(drop).map_err(failed)
    }
}

/// What became of the data of a file.
enum Filled {
    /// All were written.
    Whole,
    /// A signal came meanwhile.
    Stopped,
    /// The local file cannot be read.
    Unreadable(io::Error),
}
