//! A filesystem in memory that can be changed. It keeps what a real one would keep, and notes what it was asked.
//!
//! Names of files choose what happens: writing to `damaged` fails, `panics` panics.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sealblock_fuse::{
    Attributes, DirectoryEntry, FsError, Kind, NewInode, Notifier, Options, Session, Time, WriteDurability,
    WriteOptions,
};
use sealblock_runtime_reactor::{Config, Reactor, sleep};

use crate::served::Serving;

/// The inode number of the root.
pub const ROOT: u64 = (3 << 48) + 256;
/// The largest file.
pub const MAX_FILE_BYTES: u64 = 64 << 20;
/// Error numbers of Linux.
pub const ENOSPC: i32 = 28;
const ENOTEMPTY: i32 = 39;

/// What the filesystem was asked.
#[derive(Default)]
pub struct Asked {
    pub largest_write: AtomicU64,
    pub writes: AtomicU64,
    pub syncs: AtomicU64,
    pub directory_syncs: AtomicU64,
    pub copies: AtomicU64,
    pub reads: AtomicU64,
    pub open_files: AtomicU64,
    /// Writes wait as long as this is set.
    pub holds_writes: AtomicBool,
    /// Writes that wait.
    pub held: AtomicU64,
    /// The durability of each write that must be durable.
    pub durable: Mutex<Vec<WriteDurability>>,
    /// Inodes that were forgotten, and those that were deleted then.
    pub forgotten: Mutex<Vec<u64>>,
    pub deleted: Mutex<Vec<u64>>,
    /// When serving has ended: inodes without names that are still there.
    pub without_names: AtomicU64,
    /// What is there then: the path of each inode that has one, with its content.
    pub at_end: Mutex<BTreeMap<String, Vec<u8>>>,
}

/// What an inode does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Trap {
    None,
    Damaged,
    Panics,
}

pub struct Node {
    pub attributes: Attributes,
    pub content: Vec<u8>,
    /// Names and inodes by cookie, with `.` and `..` first.
    pub entries: BTreeMap<u64, (Vec<u8>, u64)>,
    /// The highest cookie that was ever used.
    pub last_cookie: u64,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub flags: u32,
    pub trap: Trap,
}

/// The filesystem.
pub struct Disk {
    pub nodes: RefCell<BTreeMap<u64, Node>>,
    pub asked: Arc<Asked>,
    pub notifier: RefCell<Option<Notifier>>,
}

/// The error with this number.
pub fn refused(errno: i32, why: &str) -> FsError {
    FsError::Refused { errno, why: why.to_owned() }
}

pub fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    Time { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
}

impl Node {
    pub fn new(ino: u64, parent: u64, kind: Kind, mode: u16, (uid, gid): (u32, u32)) -> Node {
        let (time, is_directory) = (now(), kind == Kind::Directory);
        let attributes = Attributes {
            ino,
            kind,
            mode,
            links: 1,
            uid,
            gid,
            size_bytes: 0,
            blocks: 0,
            block_size_bytes: 4096,
            device: 0,
            atime: time,
            mtime: time,
            ctime: time,
        };
        let dots = [(1, (b".".to_vec(), ino)), (2, (b"..".to_vec(), parent))];
        let entries = if is_directory { dots.into() } else { BTreeMap::new() };
        let (content, xattrs) = (Vec::new(), BTreeMap::new());
        Node { attributes, content, entries, last_cookie: 2, xattrs, flags: 0, trap: Trap::None }
    }

    /// The cookie and the inode of a name.
    pub fn find(&self, name: &[u8]) -> Option<(u64, u64)> {
        self.entries.iter().find(|(_, (one, _))| one == name).map(|(cookie, (_, ino))| (*cookie, *ino))
    }

    pub fn add(&mut self, name: &[u8], ino: u64) {
        self.last_cookie += 1;
        self.entries.insert(self.last_cookie, (name.to_vec(), ino));
        self.touch();
    }

    /// Removes a name, and returns its inode.
    pub fn remove(&mut self, name: &[u8]) -> Result<u64, FsError> {
        let (cookie, ino) = self.find(name).ok_or(FsError::NotFound)?;
        self.entries.remove(&cookie);
        self.touch();
        Ok(ino)
    }

    /// Its content has changed.
    pub fn touch(&mut self) {
        self.attributes.mtime = now();
        self.attributes.ctime = self.attributes.mtime;
    }

    pub fn resize(&mut self, bytes: u64) -> Result<(), FsError> {
        if bytes > MAX_FILE_BYTES {
            return Err(refused(ENOSPC, "no space"));
        }
        self.content.resize(bytes as usize, 0);
        self.attributes.size_bytes = bytes;
        self.attributes.blocks = bytes.div_ceil(512);
        self.touch();
        Ok(())
    }

    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> Result<(), FsError> {
        let end = offset.saturating_add(data.len() as u64);
        if end > self.content.len() as u64 {
            self.resize(end)?;
        }
        self.content[offset as usize..end as usize].copy_from_slice(data);
        self.touch();
        Ok(())
    }

    /// Removes the set-user-ID bit, and the set-group-ID bit if the group may execute the file.
    pub fn kill_set_id(&mut self) {
        if self.attributes.kind != Kind::Directory {
            let group = if self.attributes.mode & 0o010 != 0 { 0o2000 } else { 0 };
            self.attributes.mode &= !(0o4000 | group);
        }
    }
}

impl Disk {
    /// An empty filesystem, whose root everybody may change.
    pub fn new(asked: Arc<Asked>) -> Disk {
        let root = Node::new(ROOT, ROOT, Kind::Directory, 0o777, (0, 0));
        Disk { nodes: RefCell::new([(ROOT, root)].into()), asked, notifier: RefCell::default() }
    }

    /// Uses a node.
    pub fn with<T>(&self, ino: u64, use_it: impl FnOnce(&mut Node) -> Result<T, FsError>) -> Result<T, FsError> {
        use_it(self.nodes.borrow_mut().get_mut(&ino).ok_or(FsError::NotFound)?)
    }

    pub fn directory<T>(&self, ino: u64, use_it: impl FnOnce(&mut Node) -> Result<T, FsError>) -> Result<T, FsError> {
        self.with(ino, |node| match node.attributes.kind {
            Kind::Directory => use_it(node),
            _ => Err(FsError::NotADirectory),
        })
    }

    pub fn attributes_of(&self, ino: u64) -> Result<Attributes, FsError> {
        self.with(ino, |node| Ok(node.attributes))
    }

    /// The inode behind a name.
    pub fn find(&self, parent: u64, name: &[u8]) -> Result<u64, FsError> {
        self.directory(parent, |node| node.find(name).map(|(_, ino)| ino).ok_or(FsError::NotFound))
    }

    /// Adds an inode with a name.
    pub fn add(&self, new: NewInode<'_>, kind: Kind) -> Result<u64, FsError> {
        let ino = self.nodes.borrow().last_key_value().unwrap().0 + 1;
        let (default_list, gid, group_bit) = self.directory(new.parent, |parent| {
            let has_group = parent.attributes.mode & 0o2000 != 0;
            let gid = if has_group { parent.attributes.gid } else { new.caller.gid };
            let bit = if has_group && kind == Kind::Directory { 0o2000 } else { 0 };
            match parent.find(new.name) {
                Some(_) => Err(FsError::Exists),
                None => Ok((parent.xattrs.get(&b"system.posix_acl_default"[..]).cloned(), gid, bit)),
            }
        })?;
        let mode = if default_list.is_some() { new.mode } else { new.mode & !new.umask };
        let mut node = Node::new(ino, new.parent, kind, mode | group_bit, (new.caller.uid, gid));
        node.xattrs.extend(default_list.map(|list| (b"system.posix_acl_access".to_vec(), list)));
        node.trap = match new.name {
            b"damaged" => Trap::Damaged,
            b"panics" => Trap::Panics,
            _ => Trap::None,
        };
        self.nodes.borrow_mut().insert(ino, node);
        self.directory(new.parent, |parent| {
            parent.add(new.name, ino);
            Ok(())
        })?;
        Ok(ino)
    }

    /// Removes a name, and counts down the links of its inode.
    pub fn drop_name(&self, parent: u64, name: &[u8], is_directory: bool) -> Result<(), FsError> {
        let ino = self.find(parent, name)?;
        self.with(ino, |node| match (node.attributes.kind == Kind::Directory, is_directory) {
            (true, false) => Err(FsError::IsADirectory),
            (false, true) => Err(FsError::NotADirectory),
            (true, true) if node.entries.len() > 2 => Err(refused(ENOTEMPTY, "not empty")),
            _ => {
                node.attributes.links -= 1;
                node.attributes.ctime = now();
                Ok(())
            }
        })?;
        self.directory(parent, |node| node.remove(name)).map(drop)
    }

    /// Fails or panics, if the inode does.
    pub fn spring(&self, ino: u64) -> Result<(), FsError> {
        match self.with(ino, |node| Ok(node.trap))? {
            Trap::None => Ok(()),
            Trap::Damaged => Err(FsError::Damaged("the block".to_owned())),
            Trap::Panics => panic!("as the test wants"),
        }
    }

    /// Waits as long as writes are held.
    pub async fn hold(&self) {
        if self.asked.holds_writes.load(Ordering::SeqCst) {
            self.asked.held.fetch_add(1, Ordering::SeqCst);
            while self.asked.holds_writes.load(Ordering::SeqCst) {
                sleep(Duration::from_millis(1)).await;
            }
            self.asked.held.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Lists entries from a cookie on.
    pub fn list(&self, ino: u64, cookie: u64, add: &mut dyn FnMut(DirectoryEntry<'_>) -> bool) -> Result<(), FsError> {
        let entries = self.directory(ino, |node| Ok(node.entries.clone()))?;
        for (next_cookie, (name, ino)) in entries.range(cookie + 1..) {
            let kind = self.attributes_of(*ino)?.kind;
            if !add(DirectoryEntry { ino: *ino, kind, name, next_cookie: *next_cookie }) {
                break;
            }
        }
        Ok(())
    }

    /// The content of everything that has a path.
    pub fn all_content(&self) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        self.note_content(ROOT, "", &mut found);
        found
    }

    fn note_content(&self, ino: u64, path: &str, found: &mut BTreeMap<String, Vec<u8>>) {
        let entries = self.with(ino, |node| Ok(node.entries.clone())).unwrap();
        for (name, ino) in entries.into_values().skip(2) {
            let path = format!("{path}/{}", String::from_utf8_lossy(&name));
            found.insert(path.clone(), self.with(ino, |node| Ok(node.content.clone())).unwrap());
            self.note_content(ino, &path, found);
        }
    }
}

/// A filesystem that is served, empty at first.
pub struct ServedDisk {
    serving: Serving,
    pub asked: Arc<Asked>,
}

/// A mount that can be changed.
pub fn writable() -> Options {
    Options { write: Some(WriteOptions::default()), ..Options::default() }
}

/// Without the kernel's page cache for writes.
pub fn write_through() -> Options {
    Options { write: Some(WriteOptions { writeback_cache: false, ..WriteOptions::default() }), ..Options::default() }
}

impl ServedDisk {
    pub fn start(options: Options) -> ServedDisk {
        let asked = Arc::new(Asked::default());
        let of_server = Arc::clone(&asked);
        let serving = Serving::start(move |point, ready, stopped| {
            let disk = Disk::new(Arc::clone(&of_server));
            let session = Session::mount(point, ROOT, &options)?;
            *disk.notifier.borrow_mut() = Some(session.notifier());
            ready.send(()).unwrap();
            let stop = async { stopped.await.unwrap_or_default() };
            let ended = Reactor::new(Config::default()).unwrap().block_on(session.serve_writable(&disk, stop));
            *of_server.at_end.lock().unwrap() = disk.all_content();
            let without = disk.nodes.borrow().values().filter(|node| node.attributes.links == 0).count();
            of_server.without_names.store(without as u64, Ordering::SeqCst);
            ended
        });
        ServedDisk { serving, asked }
    }

    /// The content of a file when serving had ended.
    pub fn at_end(&self, path: &str) -> Option<Vec<u8>> {
        self.asked.at_end.lock().unwrap().get(path).cloned()
    }
}

impl Deref for ServedDisk {
    type Target = Serving;

    fn deref(&self) -> &Serving {
        &self.serving
    }
}

impl DerefMut for ServedDisk {
    fn deref_mut(&mut self) -> &mut Serving {
        &mut self.serving
    }
}
