//! Paths in a filesystem that is being changed: the open transaction may have names that no reader of the devices sees.
//!
//! They are followed as those of readers ([`super::place::resolve`]): symbolic links stay within the filesystem, and an
//! absolute one begins where the path does.

use sealblock_btrfs_engine::engine::EngineError;
use sealblock_btrfs_engine::names::Place;
use sealblock_btrfs_engine::operations::{Resolved, ResolvedEntry};
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::key::objectid;
use sealblock_stack::filesystem::{FilesystemName, Start};
use sealblock_stack::{Cause, StackError};

use super::place::printable;
use super::write::{Writer, engine_error};

/// Symbolic links on a path.
const MAX_LINKS: usize = 40;
/// Parts of a path, with those of the links on it.
const MAX_PARTS: usize = 4096;

/// An inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Node {
    /// Its subvolume.
    pub root: u64,
    /// Its number.
    pub ino: u64,
    /// Its type.
    pub kind: FileType,
}

impl Node {
    /// The top directory of a subvolume.
    pub fn top(root: u64) -> Node {
        Node { root, ino: objectid::FIRST_FREE, kind: FileType::Directory }
    }

    /// Whether it is the top directory of a subvolume.
    pub fn is_top(self) -> bool {
        self.ino == objectid::FIRST_FREE
    }
}

/// A name in a directory, and what it leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    /// The directory.
    pub directory: Node,
    /// The name.
    pub name: Vec<u8>,
    /// What it leads to; `None` if the name is free.
    pub found: Option<ResolvedEntry>,
    /// As it is shown.
    pub shown: String,
}

impl Entry {
    /// The place for the engine.
    pub fn place(&self) -> Place<'_> {
        Place { directory: self.directory.ino, name: &self.name }
    }

    /// A failure here while `doing` something.
    pub fn failed(&self, doing: &str) -> impl Fn(EngineError) -> StackError {
        let (doing, shown) = (doing.to_owned(), self.shown.clone());
        move |error| engine_error(&doing, &error).on(&shown)
    }

    /// A refusal here.
    pub fn refused(&self, cause: Cause, doing: &str, why: &str) -> StackError {
        StackError::new(cause, doing, why).on(&self.shown)
    }
}

/// Where a path leads.
enum Way {
    There(Node),
    /// All but the last part is there.
    Missing(Vec<u8>),
}

impl Writer {
    /// Where the path of a name begins.
    async fn start(&self, name: &FilesystemName) -> Result<Node, StackError> {
        let failed = |error| engine_error("find", &error).on(name);
        let root = match name.start {
            Start::Default => self.engine.default_subvolume().await.map_err(failed)?,
            Start::TopLevel => objectid::FS_TREE,
            Start::Subvolume(id) => id,
        };
        self.engine.stat(root, objectid::FIRST_FREE).await.map_err(failed)?;
        Ok(Node::top(root))
    }

    /// What a name leads to; `None` if only its last part does not exist.
    pub async fn find(&self, name: &FilesystemName, follow_last: bool) -> Result<Option<Node>, StackError> {
        match self.walk(name, &name.path, follow_last).await? {
            Way::There(node) => Ok(Some(node)),
            Way::Missing(_) => Ok(None),
        }
    }

    /// What a name leads to, symbolic links followed.
    pub async fn existing(&self, name: &FilesystemName) -> Result<Node, StackError> {
        match self.walk(name, &name.path, true).await? {
            Way::There(node) => Ok(node),
            Way::Missing(part) => Err(absent(&part).on(name)),
        }
    }

    /// The entry that a name is; a symbolic link is an entry by itself.
    pub async fn entry(&self, name: &FilesystemName) -> Result<Entry, StackError> {
        let Some((parent, last)) = split_last(&name.path) else {
            let why = "the path must end in a name, not with `.`, `..` or the top of a subvolume";
            return Err(StackError::new(Cause::Usage, "use", why).on(name));
        };
        let directory = match self.walk(name, parent, true).await? {
            Way::There(directory) => directory,
            Way::Missing(part) => return Err(absent(&part).on(name)),
        };
        self.entry_in(directory, last, name.to_string()).await
    }

    /// The entry with a name in a directory.
    pub async fn entry_in(&self, directory: Node, name: &[u8], shown: String) -> Result<Entry, StackError> {
        let place = Place { directory: directory.ino, name };
        let found = self.engine.lookup(directory.root, place).await;
        let found = found.map_err(|error| engine_error("find", &error).on(&shown))?;
        Ok(Entry { directory, name: name.to_vec(), found, shown })
    }

    /// The entry that a file gets: the one that is named, or, if that leads to a directory, the one with the file's own
    /// name in it.
    pub async fn destination(&self, to: &FilesystemName, own: Option<&[u8]>) -> Result<Entry, StackError> {
        let directory = match self.find(to, true).await {
            Ok(Some(node)) if node.kind == FileType::Directory => node,
            Ok(_) => return self.entry(to).await,
            // A symbolic link that leads nowhere is an entry like others.
            Err(error) => {
                let entry = self.entry(to).await.ok();
                let is_link = |entry: &Entry| entry.found.is_some_and(|found| found.kind == FileType::Symlink);
                return entry.filter(is_link).ok_or(error);
            }
        };
        let own = own.ok_or_else(|| {
            let why = "it is a directory, and what would be put into it has no name of its own";
            StackError::new(Cause::Usage, "use", why).on(to).advise("give a new path")
        })?;
        self.entry_in(directory, own, below(to, own)).await
    }

    async fn walk(&self, name: &FilesystemName, path: &[u8], follow_last: bool) -> Result<Way, StackError> {
        let mut way = vec![self.start(name).await?];
        let (mut rest, mut links) = (parts(path), 0);
        while let Some(part) = rest.pop() {
            if part == b".." {
                // The parent of the first directory is itself.
                way.truncate((way.len() - 1).max(1));
                continue;
            }
            let at = way[way.len() - 1];
            let found = self.engine.lookup(at.root, Place { directory: at.ino, name: &part }).await;
            let Some(found) = found.map_err(|error| engine_error("find", &error).on(name))? else {
                if rest.is_empty() {
                    return Ok(Way::Missing(part));
                }
                return Err(absent(&part).on(name));
            };
            let node = self.node(at, &part, &found).map_err(|error| error.on(name))?;
            if node.kind != FileType::Symlink || rest.is_empty() && !follow_last {
                way.push(node);
                continue;
            }
            links += 1;
            let target = self.engine.read_link(node.root, node.ino).await;
            let target = target.map_err(|error| engine_error("follow a link on the way to", &error).on(name))?;
            if target.first() == Some(&b'/') {
                way.truncate(1);
            }
            rest.extend(parts(&target));
            if links > MAX_LINKS || rest.len() > MAX_PARTS {
                let why = format!("there are more than {MAX_LINKS} symbolic links, or {MAX_PARTS} parts, on the path");
                return Err(StackError::new(Cause::Unsuitable, "find", why).on(name));
            }
        }
        Ok(Way::There(way[way.len() - 1]))
    }

    /// The inode of an entry of a directory.
    fn node(&self, directory: Node, name: &[u8], found: &ResolvedEntry) -> Result<Node, StackError> {
        match found.target {
            Resolved::Inode(ino) => Ok(Node { root: directory.root, ino, kind: found.kind }),
            Resolved::Subvolume(id) => Ok(Node::top(id)),
            Resolved::Elsewhere(_) => {
                let why = format!("{:?} is the place of a subvolume that is not in this snapshot", printable(name));
                Err(StackError::new(Cause::Absent, "find", why))
            }
        }
    }
}

fn absent(part: &[u8]) -> StackError {
    StackError::new(Cause::Absent, "find", format!("there is no {:?}", printable(part)))
}

/// The parts of a path, the last one first.
fn parts(path: &[u8]) -> Vec<Vec<u8>> {
    let parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    parts.map(<[u8]>::to_vec).rev().collect()
}

/// The path of the directory, and the name in it; `None` if the path does not end in a name.
fn split_last(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = path.iter().rposition(|byte| *byte != b'/')? + 1;
    let path = &path[..end];
    let start = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let (parent, name) = path.split_at(start);
    (name != b"." && name != b"..").then_some((parent, name))
}

/// The own name of what a name leads to; `None` for the top of a subvolume.
pub(super) fn own_name(name: &FilesystemName) -> Option<&[u8]> {
    split_last(&name.path).map(|(_, own)| own)
}

/// How an entry in the directory of this name is shown.
pub(super) fn below(directory: &FilesystemName, name: &[u8]) -> String {
    let shown = directory.to_string();
    format!("{}/{}", shown.trim_end_matches('/'), printable(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_ends_in_a_name() {
        assert_eq!(split_last(b"a"), Some((&b""[..], &b"a"[..])));
        assert_eq!(split_last(b"a/b//"), Some((&b"a/"[..], &b"b"[..])));
        assert_eq!(split_last(b"//a"), Some((&b"//"[..], &b"a"[..])));
        for none in [&b""[..], b"/", b".", b"a/..", b"a/./"] {
            assert_eq!(split_last(none), None, "{none:?}");
        }
        assert_eq!(parts(b"/a//./b/.."), [b"..".to_vec(), b"b".to_vec(), b"a".to_vec()]);
    }
}
