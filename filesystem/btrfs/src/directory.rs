//! Directories: their entries in the order of creation, the entry with a given name, and the inode at a path.

use futures_util::future::LocalBoxFuture;
use sealblock_btrfs_format::items::Item;
pub use sealblock_btrfs_format::items::directory::Target;
use sealblock_btrfs_format::items::directory::{DirEntry as StoredEntry, FileType};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::names::name_hash;

use crate::cursor::TreeRoot;
use crate::error::{FsError, FsFuture};
use crate::filesystem::Filesystem;
use crate::inode::{FileKind, Inode};
use crate::subvolumes::Subvolume;

/// The maximum number of symbolic links in one look-up, as in Linux.
pub const MAX_LINKS: usize = 40;
/// The maximum depth of directories below the first subvolume, and of nested subvolumes: enough for the longest
/// possible path.
const MAX_DEPTH: usize = 4096;

/// An entry of a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirEntry {
    /// Its name, which may contain any bytes; the checker only checked their number.
    pub name: Vec<u8>,
    /// Its index, which no other entry ever had; 0 if it was found by name.
    pub index: u64,
    /// Its target.
    pub target: Target,
    /// The type of its target.
    pub kind: FileType,
}

impl DirEntry {
    fn of(entry: &StoredEntry, index: u64) -> Option<DirEntry> {
        let target = Target::of(entry.location);
        Some(DirEntry { name: entry.name.to_vec(), index, target, kind: entry.file_type()? })
    }
}

impl Filesystem {
    /// At most `most` entries of a directory with index `from` or higher, in the order of their indices.
    ///
    /// # Errors
    /// If a leaf is lost. The entries before it are not returned; those after it can be read from a later index.
    pub fn entries<'a>(
        &'a self,
        directory: &'a Inode,
        from: u64,
        most: usize,
    ) -> LocalBoxFuture<'a, Result<Vec<DirEntry>, FsError>> {
        Box::pin(async move {
            require_directory(directory)?;
            let first = Key::new(directory.ino, ItemType::DIR_INDEX, from);
            let last = Key::new(directory.ino, ItemType::DIR_INDEX, u64::MAX);
            let (mut cursor, mut all) = (self.cursor(directory.tree, first..=last), Vec::new());
            while all.len() < most
                && let Some((key, data)) = cursor.next().await?
            {
                if let Ok(Item::DirIndex(entries)) = Item::decode(key, data) {
                    all.extend(entries.iter().filter_map(|entry| DirEntry::of(&entry, key.offset)));
                }
            }
            Ok(all)
        })
    }

    /// All readable entries of a directory, and its lost parts.
    ///
    /// # Errors
    /// If it is not a directory.
    pub fn reachable_entries<'a>(&'a self, directory: &'a Inode) -> FsFuture<'a, (Vec<DirEntry>, Vec<FsError>)> {
        Box::pin(async move {
            require_directory(directory)?;
            let range = crate::inode::items_of(directory.ino, ItemType::DIR_INDEX);
            let (mut cursor, mut all, mut lost) = (self.cursor(directory.tree, range), Vec::new(), Vec::new());
            loop {
                match cursor.next().await {
                    Ok(None) => return Ok((all, lost)),
                    Ok(Some((key, data))) => {
                        if let Ok(Item::DirIndex(entries)) = Item::decode(key, data) {
                            all.extend(entries.iter().filter_map(|entry| DirEntry::of(&entry, key.offset)));
                        }
                    }
                    Err(error) => lost.push(error),
                }
            }
        })
    }

    /// The entry of this name, if it exists.
    ///
    /// # Errors
    /// If it is not a directory, or cannot be read.
    pub fn entry<'a>(
        &'a self,
        directory: &'a Inode,
        name: &'a [u8],
    ) -> LocalBoxFuture<'a, Result<Option<DirEntry>, FsError>> {
        Box::pin(async move {
            require_directory(directory)?;
            let key = Key::new(directory.ino, ItemType::DIR_ITEM, name_hash(name));
            let mut cursor = self.cursor(directory.tree, key..=key);
            Ok(match cursor.next().await? {
                Some((key, data)) => match Item::decode(key, data) {
                    Ok(Item::DirItems(entries)) => {
                        let entry = entries.iter().find(|entry| entry.name == name);
                        entry.and_then(|entry| DirEntry::of(&entry, 0))
                    }
                    _ => None,
                },
                None => None,
            })
        })
    }

    /// The inode of an entry. `None` for a subvolume that is elsewhere: a snapshot shows an empty directory in its
    /// place.
    ///
    /// # Errors
    /// If it does not exist, or cannot be read.
    pub async fn follow(&self, directory: &Inode, entry: &DirEntry) -> Result<Option<Inode>, FsError> {
        match entry.target {
            Target::Inode(ino) => self.inode(directory.tree, ino).await.map(Some),
            Target::Subvolume(id) => {
                if !self.lies_at(id, directory.tree.id, directory.ino, &entry.name).await? {
                    return Ok(None);
                }
                let subvolume = self.subvolume(id).await?;
                self.top(&subvolume).await.map(Some)
            }
        }
    }

    /// The top directory of a subvolume.
    ///
    /// # Errors
    /// If it cannot be read.
    pub async fn top(&self, subvolume: &Subvolume) -> Result<Inode, FsError> {
        self.inode(subvolume.root, subvolume.root_dirid).await
    }

    /// The inode at a path below a directory. Symbolic links on the way are followed within the filesystem, absolute
    /// ones from this directory; a link at the end is followed if `follow_last`.
    ///
    /// # Errors
    /// If a part does not exist, is not a directory, or cannot be read.
    pub fn resolve<'a>(
        &'a self,
        top: Inode,
        path: &'a [u8],
        follow_last: bool,
    ) -> LocalBoxFuture<'a, Result<Inode, FsError>> {
        Box::pin(async move {
            let split = |path: &[u8]| -> Vec<Vec<u8>> {
                path.split(|byte| *byte == b'/')
                    .filter(|part| !part.is_empty() && *part != b".")
                    .map(<[u8]>::to_vec)
                    .rev()
                    .collect()
            };
            let (mut way, mut rest, mut links) = (vec![top], split(path), 0);
            while let Some(part) = rest.pop() {
                if part == b".." {
                    // The parent of the top is the top.
                    if way.len() > 1 {
                        way.pop();
                    }
                    continue;
                }
                let directory = *way.last().expect("the top stays");
                let shown = String::from_utf8_lossy(&part).into_owned();
                if directory.kind != FileKind::Directory {
                    return Err(FsError::Kind(format!("{shown:?} cannot be in an inode that is not a directory")));
                }
                let entry = self.entry(&directory, &part).await?;
                let entry =
                    entry.ok_or_else(|| FsError::Absent(format!("{shown:?} in the directory {}", directory.ino)))?;
                let inode = match self.follow(&directory, &entry).await? {
                    Some(inode) => inode,
                    None => {
                        return Err(FsError::Absent(format!(
                            "subvolume at {shown:?}: it lies elsewhere, and this is an empty directory"
                        )));
                    }
                };
                if inode.kind == FileKind::Symlink && (!rest.is_empty() || follow_last) {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(FsError::Kind(format!(
                            "more than {MAX_LINKS} symbolic links on the way to {shown:?}"
                        )));
                    }
                    let target = self.read_link(&inode).await?;
                    if target.first() == Some(&b'/') {
                        way.truncate(1);
                    }
                    rest.extend(split(&target));
                    if rest.len() > MAX_DEPTH {
                        return Err(FsError::Kind(format!("a path of more than {MAX_DEPTH} parts")));
                    }
                    continue;
                }
                way.push(inode);
            }
            Ok(way.pop().expect("the top stays"))
        })
    }

    /// Every path of an inode from the top of its subvolume.
    ///
    /// # Errors
    /// If a name of the path cannot be read.
    pub async fn paths(&self, tree: TreeRoot, ino: u64) -> Result<Vec<Vec<u8>>, FsError> {
        let mut paths = Vec::new();
        for name in self.names(tree, ino).await? {
            let mut path = self.path_of_directory(tree, name.parent).await?;
            path.push(b'/');
            path.extend_from_slice(&name.name);
            paths.push(path);
        }
        Ok(paths)
    }

    /// The path of a directory from the top of its subvolume: empty for the top itself, and with a slash before each
    /// name.
    ///
    /// # Errors
    /// If a name of the path cannot be read, or the path has no end.
    pub async fn path_of_directory(&self, tree: TreeRoot, ino: u64) -> Result<Vec<u8>, FsError> {
        let (mut parts, mut at) = (Vec::new(), ino);
        while at != objectid::FIRST_FREE {
            let names = self.names(tree, at).await?;
            let name = names.into_iter().next();
            let name =
                name.ok_or_else(|| FsError::Absent(format!("name of the directory {at} in subvolume {}", tree.id)))?;
            at = name.parent;
            parts.push(name.name);
            if parts.len() > MAX_DEPTH {
                let what = format!("the directory {ino} in subvolume {}", tree.id);
                return Err(FsError::Contradiction {
                    what,
                    why: format!("it lies below more than {MAX_DEPTH} others"),
                });
            }
        }
        Ok(parts.iter().rev().flat_map(|part| std::iter::once(b'/').chain(part.iter().copied())).collect())
    }

    /// The path of a subvolume from the top of the first one, in the same form.
    ///
    /// # Errors
    /// If a name of the path cannot be read, or the path has no end.
    pub async fn path_of_subvolume(&self, id: u64) -> Result<Vec<u8>, FsError> {
        let (mut path, mut at, mut depth) = (Vec::new(), id, 0);
        while at != objectid::FS_TREE {
            let Some(parent) = self.subvolume(at).await?.parent else {
                return Err(FsError::Absent(format!("place of subvolume {at}")));
            };
            let outer = self.subvolume(parent.id).await?;
            let mut longer = self.path_of_directory(outer.root, parent.dirid).await?;
            longer.push(b'/');
            longer.extend_from_slice(&parent.name);
            longer.append(&mut path);
            (path, at, depth) = (longer, parent.id, depth + 1);
            if depth > MAX_DEPTH {
                let what = format!("subvolume {id}");
                return Err(FsError::Contradiction {
                    what,
                    why: format!("it lies below more than {MAX_DEPTH} others"),
                });
            }
        }
        Ok(path)
    }
}

fn require_directory(inode: &Inode) -> Result<(), FsError> {
    match inode.kind {
        FileKind::Directory => Ok(()),
        _ => Err(FsError::Kind(format!("inode {} is not a directory", inode.ino))),
    }
}
