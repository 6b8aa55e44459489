//! What the filesystem that can be changed does for each request.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use sealblock_fuse::{
    Allocate, Attributes, Caller, Changes, Content, CopyRange, DirectoryEntry, FsError, Kind, NewInode, NewTime,
    OpenMode, Opened, ReadFs, RenameMode, Seek, Statistics, Write, WriteDurability, WriteFs, XattrMode,
};
use sealblock_runtime_reactor::yield_now;

use crate::disk::{Disk, ENOSPC, ROOT, now, refused};

/// Commands for the flags of an inode, which programs can use without unsafe code.
const GET_FLAGS: u32 = 0x8008_6601;
const SET_FLAGS: u32 = 0x4008_6602;
/// The other form of these flags, which the kernel asks for before it sets either.
const GET_EXTENDED_FLAGS: u32 = 0x801c_581f;

/// Setting this flag of a file replaces the start of its content by [`REPLACED`], behind the kernel's back.
pub const REPLACES: u32 = 0x80;
pub const REPLACED: &[u8] = b"replaced behind the back of the kernel";
/// Setting this flag of a directory removes the entry `victim`, behind the kernel's back.
pub const REMOVES: u32 = 0x40;
/// Setting this flag panics.
pub const PANICS: u32 = 0x04;
/// A file with this flag returns more than was asked for.
pub const RETURNS_TOO_MUCH: u32 = 0x08;

const HANDLE: u64 = 0x5ea1;

impl ReadFs for Disk {
    fn root(&self) -> u64 {
        ROOT
    }

    async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attributes, FsError> {
        self.find(parent, name).and_then(|ino| self.attributes_of(ino))
    }

    async fn attributes(&self, ino: u64) -> Result<Attributes, FsError> {
        self.attributes_of(ino)
    }

    async fn read_directory(
        &self,
        ino: u64,
        cookie: u64,
        add: &mut dyn FnMut(DirectoryEntry<'_>) -> bool,
    ) -> Result<(), FsError> {
        self.list(ino, cookie, add)
    }

    async fn open(&self, _ino: u64) -> Result<u64, FsError> {
        Err(FsError::NotImplemented)
    }

    async fn release(&self, ino: u64, handle: u64) {
        assert_eq!(handle, ino ^ HANDLE);
        self.asked.open_files.fetch_sub(1, Ordering::SeqCst);
    }

    async fn read(&self, ino: u64, handle: u64, offset: u64, size_bytes: u32) -> Result<Vec<u8>, FsError> {
        assert_eq!(handle, ino ^ HANDLE);
        self.asked.reads.fetch_add(1, Ordering::SeqCst);
        yield_now().await;
        self.with(ino, |node| {
            let start = node.content.len().min(offset as usize);
            let end = node.content.len().min(start + size_bytes as usize);
            Ok(node.content[start..end].to_vec())
        })
    }

    async fn seek(&self, ino: u64, offset: u64, what: Seek) -> Result<u64, FsError> {
        let size_bytes = self.attributes_of(ino)?.size_bytes;
        match what {
            _ if offset >= size_bytes => Err(FsError::NoSuchOffset),
            Seek::Data => Ok(offset),
            Seek::Hole => Ok(size_bytes),
        }
    }

    async fn read_link(&self, ino: u64) -> Result<Vec<u8>, FsError> {
        self.with(ino, |node| Ok(node.content.clone()))
    }

    async fn xattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>, FsError> {
        self.with(ino, |node| node.xattrs.get(name).cloned().ok_or(FsError::NoAttribute))
    }

    async fn xattrs(&self, ino: u64) -> Result<Vec<Vec<u8>>, FsError> {
        self.with(ino, |node| Ok(node.xattrs.keys().cloned().collect()))
    }

    async fn statistics(&self) -> Result<Statistics, FsError> {
        let blocks = 1 << 20;
        Ok(Statistics { block_size_bytes: 4096, blocks, free_blocks: blocks, available_blocks: blocks, inodes: (0, 0) })
    }
}

impl Disk {
    fn opened(&self, ino: u64) -> Opened {
        self.asked.open_files.fetch_add(1, Ordering::SeqCst);
        Opened { handle: ino ^ HANDLE }
    }

    fn set_flags(&self, ino: u64, flags: u32) -> Result<(), FsError> {
        let notifier = self.notifier.borrow().clone().unwrap();
        assert_eq!(flags & PANICS, 0, "as the test wants");
        if flags & REPLACES != 0 {
            self.with(ino, |node| node.write_at(0, REPLACED))?;
            notifier.inode(ino);
        }
        if flags & REMOVES != 0 {
            self.drop_name(ino, b"victim", false)?;
            notifier.entry(ino, b"victim");
            notifier.inode(ino);
        }
        self.with(ino, |node| {
            node.flags = flags;
            Ok(())
        })
    }

    /// Moves a name; what has the new one loses it.
    fn move_name(&self, from: (u64, &[u8]), to: (u64, &[u8])) -> Result<(), FsError> {
        let ino = self.find(from.0, from.1)?;
        let is_directory = self.attributes_of(ino)?.kind == Kind::Directory;
        match self.find(to.0, to.1) {
            // Two names of one inode: nothing happens.
            Ok(other) if other == ino => return Ok(()),
            Ok(_) => self.drop_name(to.0, to.1, is_directory)?,
            Err(_) => {}
        }
        self.directory(from.0, |node| node.remove(from.1))?;
        self.directory(to.0, |node| {
            node.add(to.1, ino);
            Ok(())
        })?;
        self.set_parent(ino, to.0)
    }

    fn exchange(&self, from: (u64, &[u8]), to: (u64, &[u8])) -> Result<(), FsError> {
        let (one, other) = (self.find(from.0, from.1)?, self.find(to.0, to.1)?);
        for ((parent, name), ino) in [(from, other), (to, one)] {
            self.directory(parent, |node| {
                let (cookie, _) = node.find(name).ok_or(FsError::NotFound)?;
                node.entries.insert(cookie, (name.to_vec(), ino));
                node.touch();
                Ok(())
            })?;
            self.set_parent(ino, parent)?;
        }
        Ok(())
    }

    fn set_parent(&self, ino: u64, parent: u64) -> Result<(), FsError> {
        self.with(ino, |node| {
            node.attributes.ctime = now();
            if node.attributes.kind == Kind::Directory {
                node.entries.insert(2, (b"..".to_vec(), parent));
            }
            Ok(())
        })
    }
}

impl WriteFs for Disk {
    async fn open_as(&self, ino: u64, mode: OpenMode) -> Result<Opened, FsError> {
        self.with(ino, |node| {
            if mode.truncates {
                node.resize(0)?;
            }
            if mode.kills_set_id {
                node.kill_set_id();
            }
            Ok(())
        })?;
        Ok(self.opened(ino))
    }

    async fn last_cookie(&self, ino: u64) -> Result<u64, FsError> {
        self.directory(ino, |node| Ok(node.last_cookie))
    }

    async fn create(&self, new: NewInode<'_>, _mode: OpenMode) -> Result<(Attributes, Opened), FsError> {
        let ino = self.add(new, Kind::Regular)?;
        Ok((self.attributes_of(ino)?, self.opened(ino)))
    }

    async fn make(&self, new: NewInode<'_>, content: Content<'_>) -> Result<Attributes, FsError> {
        let kind = match content {
            Content::Directory => Kind::Directory,
            Content::Symlink(_) => Kind::Symlink,
            Content::Node(kind, _) => kind,
        };
        let ino = self.add(new, kind)?;
        self.with(ino, |node| match content {
            Content::Directory => Ok(()),
            Content::Symlink(target) => node.write_at(0, target),
            Content::Node(_, device) => {
                node.attributes.device = device;
                Ok(())
            }
        })?;
        self.attributes_of(ino)
    }

    async fn link(&self, ino: u64, parent: u64, name: &[u8]) -> Result<Attributes, FsError> {
        if self.find(parent, name).is_ok() {
            return Err(FsError::Exists);
        }
        self.with(ino, |node| {
            node.attributes.links += 1;
            node.attributes.ctime = now();
            Ok(())
        })?;
        self.directory(parent, |node| {
            node.add(name, ino);
            Ok(())
        })?;
        self.attributes_of(ino)
    }

    async fn unlink(&self, parent: u64, name: &[u8]) -> Result<(), FsError> {
        self.drop_name(parent, name, false)
    }

    async fn rmdir(&self, parent: u64, name: &[u8]) -> Result<(), FsError> {
        self.drop_name(parent, name, true)
    }

    async fn rename(&self, from: (u64, &[u8]), to: (u64, &[u8]), mode: RenameMode) -> Result<(), FsError> {
        match mode {
            RenameMode::NoReplace if self.find(to.0, to.1).is_ok() => Err(FsError::Exists),
            RenameMode::Replace | RenameMode::NoReplace => self.move_name(from, to),
            RenameMode::Exchange => self.exchange(from, to),
            RenameMode::Whiteout => {
                self.move_name(from, to)?;
                let (parent, name) = from;
                let new = NewInode { parent, name, mode: 0, umask: 0, caller: Caller::default() };
                self.add(new, Kind::CharDevice).map(drop)
            }
        }
    }

    async fn set_attributes(&self, ino: u64, changes: &Changes) -> Result<Attributes, FsError> {
        self.spring(ino)?;
        self.with(ino, |node| {
            if let Some(bytes) = changes.size_bytes {
                node.resize(bytes)?;
            }
            let attributes = &mut node.attributes;
            let time = |new: NewTime| match new {
                NewTime::Now => now(),
                NewTime::At(time) => time,
            };
            attributes.mode = changes.mode.unwrap_or(attributes.mode);
            attributes.uid = changes.uid.unwrap_or(attributes.uid);
            attributes.gid = changes.gid.unwrap_or(attributes.gid);
            attributes.atime = changes.atime.map_or(attributes.atime, time);
            attributes.mtime = changes.mtime.map_or(attributes.mtime, time);
            attributes.ctime = changes.ctime.unwrap_or_else(now);
            if changes.kills_set_id {
                node.kill_set_id();
            }
            Ok(node.attributes)
        })
    }

    async fn write(&self, write: Write) -> Result<(), FsError> {
        let Write { ino, handle, offset, data, durability, kills_set_id, .. } = write;
        assert_eq!(handle, ino ^ HANDLE);
        let asked = &self.asked;
        asked.writes.fetch_add(1, Ordering::SeqCst);
        asked.largest_write.fetch_max(data.len() as u64, Ordering::SeqCst);
        self.hold().await;
        self.spring(ino)?;
        yield_now().await;
        if durability != WriteDurability::None {
            asked.durable.lock().unwrap().push(durability);
        }
        self.with(ino, |node| {
            node.write_at(offset, &data)?;
            if kills_set_id {
                node.kill_set_id();
            }
            Ok(())
        })
    }

    async fn sync(&self, ino: u64, _data_only: bool) -> Result<(), FsError> {
        self.asked.syncs.fetch_add(1, Ordering::SeqCst);
        self.spring(ino)
    }

    async fn sync_directory(&self, ino: u64) -> Result<(), FsError> {
        self.asked.directory_syncs.fetch_add(1, Ordering::SeqCst);
        self.directory(ino, |_| Ok(()))
    }

    async fn allocate(
        &self,
        ino: u64,
        what: Allocate,
        (offset, bytes): (u64, u64),
        keeps_size: bool,
    ) -> Result<(), FsError> {
        self.with(ino, |node| {
            let size_bytes = node.content.len() as u64;
            let end = offset.checked_add(bytes).ok_or(refused(ENOSPC, "too far"))?;
            if end > size_bytes && !keeps_size {
                node.resize(end)?;
            }
            let zeroed = offset.min(size_bytes) as usize..end.min(size_bytes) as usize;
            if what != Allocate::Reserve {
                node.content[zeroed].fill(0);
            }
            node.touch();
            Ok(())
        })
    }

    async fn copy_range(&self, copy: CopyRange) -> Result<u64, FsError> {
        self.asked.copies.fetch_add(1, Ordering::SeqCst);
        let ((from, from_handle, offset), (to, to_handle, target)) = (copy.from, copy.to);
        assert_eq!((from_handle, to_handle), (from ^ HANDLE, to ^ HANDLE));
        let data = self.read(from, from_handle, offset, copy.bytes.min(1 << 30) as u32).await?;
        self.with(to, |node| node.write_at(target, &data))?;
        Ok(data.len() as u64)
    }

    async fn set_xattr(
        &self,
        ino: u64,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        kills_set_group_id: bool,
    ) -> Result<(), FsError> {
        self.with(ino, |node| {
            match (mode, node.xattrs.contains_key(name)) {
                (XattrMode::Create, true) => return Err(FsError::Exists),
                (XattrMode::Replace, false) => return Err(FsError::NoAttribute),
                _ => node.xattrs.insert(name.to_vec(), value.to_vec()),
            };
            if name == b"system.posix_acl_access" {
                node.attributes.mode = node.attributes.mode & !0o777 | mode_of_list(value);
            }
            if kills_set_group_id {
                node.attributes.mode &= !0o2000;
            }
            Ok(())
        })
    }

    async fn remove_xattr(&self, ino: u64, name: &[u8]) -> Result<(), FsError> {
        self.with(ino, |node| node.xattrs.remove(name).map(drop).ok_or(FsError::NoAttribute))
    }

    async fn ioctl(
        &self,
        _caller: Caller,
        ino: u64,
        command: u32,
        argument: &[u8],
        answer_bytes: u32,
    ) -> Result<Vec<u8>, FsError> {
        match command {
            GET_FLAGS => self.with(ino, |node| {
                assert_eq!((argument.len(), answer_bytes), (0, 4));
                let too_much = if node.flags & RETURNS_TOO_MUCH != 0 { 5 } else { 4 };
                Ok([&node.flags.to_ne_bytes()[..], &[0]].concat()[..too_much].to_vec())
            }),
            GET_EXTENDED_FLAGS => Ok(vec![0; 28]),
            SET_FLAGS => {
                let flags = u32::from_ne_bytes(argument.try_into().map_err(|_| FsError::WrongKind)?);
                self.set_flags(ino, flags).map(|()| Vec::new())
            }
            _ => Err(FsError::NoSuchCommand),
        }
    }

    async fn forgotten(&self, ino: u64) {
        self.asked.forgotten.lock().unwrap().push(ino);
        yield_now().await;
        let has_no_name = self.attributes_of(ino).is_ok_and(|attributes| attributes.links == 0);
        if has_no_name {
            self.nodes.borrow_mut().remove(&ino);
            self.asked.deleted.lock().unwrap().push(ino);
        }
    }
}

/// The permissions of owner, group or mask, and others, in an access control list of Linux.
fn mode_of_list(list: &[u8]) -> u16 {
    let entries: BTreeMap<u16, u16> = list[4..]
        .chunks_exact(8)
        .map(|entry| (u16::from_le_bytes([entry[0], entry[1]]), u16::from_le_bytes([entry[2], entry[3]])))
        .collect();
    let of = |tag| entries.get(&tag).copied();
    let group = of(0x10).or(of(0x04)).unwrap_or_default();
    of(0x01).unwrap_or_default() << 6 | group << 3 | of(0x20).unwrap_or_default()
}
