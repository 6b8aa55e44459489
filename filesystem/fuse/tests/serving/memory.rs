//! A filesystem in memory, copied from a directory, with files that are damaged, that make reads wait, and that panic.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::{Deref, DerefMut};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_channel::oneshot;
use sealblock_fuse::{Attributes, DirectoryEntry, FsError, Kind, Options, ReadFs, Seek, Session, Statistics, Time};
use sealblock_proofs_btrfs_images::manifest::Manifest;
use sealblock_runtime_reactor::{Config, Reactor};

use crate::served::Serving;

/// Inode numbers above 32 bits, as in a filesystem with subvolumes.
const FIRST_INO: u64 = (5 << 48) + 256;

/// Counters that the server keeps for the tests.
#[derive(Default)]
pub struct Seen {
    /// Calls that read a directory.
    pub directory_reads: AtomicU64,
    /// The largest read, in bytes.
    pub largest_read: AtomicU64,
    /// Reads in flight, and their maximum.
    pub reads: AtomicU64,
    pub most_reads: AtomicU64,
    /// Files that are open.
    pub open_files: AtomicU64,
    pub lookups: AtomicU64,
}

struct Node {
    attributes: Attributes,
    content: Vec<u8>,
    /// Names, with `.` and `..` first.
    entries: Vec<(Vec<u8>, u64)>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// The filesystem.
pub struct Memory {
    nodes: BTreeMap<u64, Node>,
    seen: Arc<Seen>,
    /// For each read of a file called `slow`, a gate that it waits for.
    gates: RefCell<Vec<oneshot::Receiver<()>>>,
}

impl Memory {
    /// Copies a directory.
    pub fn copy(folder: &Path, seen: Arc<Seen>, gates: Vec<oneshot::Receiver<()>>) -> Memory {
        let mut memory = Memory { nodes: BTreeMap::new(), seen, gates: RefCell::new(gates) };
        let manifest = Manifest::scan(folder).unwrap();
        let mut numbers = HashMap::new();
        for (path, entry) in &manifest.entries {
            let full = folder.join(std::ffi::OsStr::from_bytes(path));
            let ino = match &entry.same_as {
                Some(first) => numbers[first],
                None => memory.add(&full, entry.xattrs.clone()),
            };
            numbers.insert(path.clone(), ino);
            let Some(name) = path.rsplit(|byte| *byte == b'/').next().filter(|_| !path.is_empty()) else { continue };
            let parent = path[..path.len() - name.len()].strip_suffix(b"/").unwrap_or_default().to_vec();
            let parent = numbers[&parent];
            memory.nodes.get_mut(&parent).unwrap().entries.push((name.to_vec(), ino));
            let node = memory.nodes.get_mut(&ino).unwrap();
            if node.attributes.kind == Kind::Directory {
                node.entries[1].1 = parent;
            }
        }
        memory
    }

    fn add(&mut self, path: &Path, xattrs: BTreeMap<Vec<u8>, Vec<u8>>) -> u64 {
        let ino = FIRST_INO + self.nodes.len() as u64;
        let metadata = fs::symlink_metadata(path).unwrap();
        let file_type = metadata.file_type();
        let (kind, content) = match () {
            () if file_type.is_dir() => (Kind::Directory, Vec::new()),
            () if file_type.is_symlink() => (Kind::Symlink, fs::read_link(path).unwrap().into_os_string().into_vec()),
            () if file_type.is_fifo() => (Kind::Fifo, Vec::new()),
            () if file_type.is_socket() => (Kind::Socket, Vec::new()),
            () if file_type.is_char_device() => (Kind::CharDevice, Vec::new()),
            () if file_type.is_block_device() => (Kind::BlockDevice, Vec::new()),
            () => (Kind::Regular, fs::read(path).unwrap()),
        };
        let time = |seconds, nanoseconds: i64| Time { seconds, nanoseconds: nanoseconds as u32 };
        let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
        let attributes = Attributes {
            ino,
            kind,
            mode: (metadata.permissions().mode() & 0o7777) as u16,
            links: metadata.nlink() as u32,
            uid: metadata.uid(),
            gid: metadata.gid(),
            size_bytes: metadata.size(),
            blocks: metadata.blocks(),
            block_size_bytes: 4096,
            device: (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12),
            atime: time(metadata.atime(), metadata.atime_nsec()),
            mtime: time(metadata.mtime(), metadata.mtime_nsec()),
            ctime: time(metadata.ctime(), metadata.ctime_nsec()),
        };
        let dots = [(b".".to_vec(), ino), (b"..".to_vec(), ino)];
        let entries = if kind == Kind::Directory { dots.to_vec() } else { Vec::new() };
        self.nodes.insert(ino, Node { attributes, content, entries, xattrs });
        ino
    }

    fn node(&self, ino: u64) -> Result<&Node, FsError> {
        self.nodes.get(&ino).ok_or(FsError::NotFound)
    }

    fn directory(&self, ino: u64) -> Result<&Node, FsError> {
        self.node(ino).and_then(|node| match node.attributes.kind {
            Kind::Directory => Ok(node),
            _ => Err(FsError::NotADirectory),
        })
    }
}

/// Counts one read while it exists.
struct Reading<'a>(&'a Seen);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.reads.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ReadFs for Memory {
    fn root(&self) -> u64 {
        FIRST_INO
    }

    async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attributes, FsError> {
        self.seen.lookups.fetch_add(1, Ordering::SeqCst);
        let entries = &self.directory(parent)?.entries;
        let (_, ino) = entries.iter().find(|(one, _)| one == name).ok_or(FsError::NotFound)?;
        self.attributes(*ino).await
    }

    async fn attributes(&self, ino: u64) -> Result<Attributes, FsError> {
        let node = self.node(ino)?;
        match node.content.starts_with(b"no inode") {
            true => Err(FsError::Damaged("an inode".to_owned())),
            false => Ok(node.attributes),
        }
    }

    async fn read_directory(
        &self,
        ino: u64,
        cookie: u64,
        add: &mut dyn FnMut(DirectoryEntry<'_>) -> bool,
    ) -> Result<(), FsError> {
        self.seen.directory_reads.fetch_add(1, Ordering::SeqCst);
        for (number, (name, ino)) in (1..).zip(&self.directory(ino)?.entries).skip(cookie as usize) {
            let kind = self.node(*ino)?.attributes.kind;
            if name == b"f-damaged-entry" {
                return Err(FsError::Damaged("an entry".to_owned()));
            }
            if !add(DirectoryEntry { ino: *ino, kind, name, next_cookie: number }) {
                break;
            }
        }
        Ok(())
    }

    async fn open(&self, ino: u64) -> Result<u64, FsError> {
        self.seen.open_files.fetch_add(1, Ordering::SeqCst);
        self.node(ino).map(|_| ino ^ 7)
    }

    async fn release(&self, ino: u64, handle: u64) {
        assert_eq!(handle, ino ^ 7);
        self.seen.open_files.fetch_sub(1, Ordering::SeqCst);
    }

    async fn read(&self, ino: u64, handle: u64, offset: u64, size_bytes: u32) -> Result<Vec<u8>, FsError> {
        if handle != ino ^ 7 {
            return Err(FsError::BadHandle);
        }
        let now = self.seen.reads.fetch_add(1, Ordering::SeqCst) + 1;
        let _reading = Reading(&self.seen);
        self.seen.most_reads.fetch_max(now, Ordering::SeqCst);
        self.seen.largest_read.fetch_max(u64::from(size_bytes), Ordering::SeqCst);
        let content = &self.node(ino)?.content;
        match &content[..content.len().min(8)] {
            b"damaged!" => return Err(FsError::Damaged("the first sector".to_owned())),
            b"panics!!" => panic!("as the test wants"),
            b"slow slo" => {
                let gate = self.gates.borrow_mut().pop();
                gate.ok_or(FsError::BadHandle)?.await.map_err(|_| FsError::WrongKind)?;
            }
            // Lets other calls run, so that several are open at once.
            _ => sealblock_runtime_reactor::yield_now().await,
        }
        let start = content.len().min(offset as usize);
        let end = content.len().min(start + size_bytes as usize);
        Ok(content[start..end].to_vec())
    }

    async fn seek(&self, ino: u64, offset: u64, what: Seek) -> Result<u64, FsError> {
        let content = &self.node(ino)?.content;
        let tail = content.get(offset as usize..).filter(|tail| !tail.is_empty()).ok_or(FsError::NoSuchOffset)?;
        // Pages of zeroes count as holes.
        let mut pages = tail.chunks(4096);
        let found = pages.position(|page| page.iter().all(|byte| *byte == 0) == (what == Seek::Hole));
        match (found, what) {
            (Some(pages), _) => Ok(offset + pages as u64 * 4096),
            (None, Seek::Hole) => Ok(content.len() as u64),
            (None, Seek::Data) => Err(FsError::NoSuchOffset),
        }
    }

    async fn read_link(&self, ino: u64) -> Result<Vec<u8>, FsError> {
        let node = self.node(ino)?;
        if node.attributes.kind == Kind::Symlink { Ok(node.content.clone()) } else { Err(FsError::WrongKind) }
    }

    async fn xattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>, FsError> {
        self.node(ino)?.xattrs.get(name).cloned().ok_or(FsError::NoAttribute)
    }

    async fn xattrs(&self, ino: u64) -> Result<Vec<Vec<u8>>, FsError> {
        Ok(self.node(ino)?.xattrs.keys().cloned().collect())
    }

    async fn statistics(&self) -> Result<Statistics, FsError> {
        let (blocks, free_blocks, available_blocks) = (1000, 300, 200);
        Ok(Statistics { block_size_bytes: 4096, blocks, free_blocks, available_blocks, inodes: (70, 7) })
    }
}

/// A copy of a directory that is served on another one.
pub struct Served {
    serving: Serving,
    pub seen: Arc<Seen>,
    /// Each ends one read of `slow`.
    pub gates: Vec<oneshot::Sender<()>>,
}

impl Served {
    /// Serves a copy of the directory with four gates.
    pub fn start(source: &Path, options: Options) -> Served {
        let (gates, waiting): (Vec<_>, Vec<_>) = (0..4).map(|_| oneshot::channel()).unzip();
        let seen = Arc::new(Seen::default());
        let (source, of_server) = (source.to_owned(), Arc::clone(&seen));
        let serving = Serving::start(move |point, ready, stopped| {
            let memory = Memory::copy(&source, of_server, waiting);
            let session = Session::mount(point, memory.root(), &options)?;
            ready.send(()).unwrap();
            let stop = async { stopped.await.unwrap_or_default() };
            Reactor::new(Config::default()).unwrap().block_on(session.serve(&memory, stop))
        });
        Served { serving, seen, gates }
    }
}

impl Deref for Served {
    type Target = Serving;

    fn deref(&self) -> &Serving {
        &self.serving
    }
}

impl DerefMut for Served {
    fn deref_mut(&mut self) -> &mut Serving {
        &mut self.serving
    }
}
