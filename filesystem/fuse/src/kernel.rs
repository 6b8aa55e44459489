//! The kernel's side: its requests, received on separate threads, become calls; changes are refused.
//!
//! The mount is read-only, so the kernel refuses changes itself. Changes that arrive nevertheless are refused with the
//! same error.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    AccessFlags, BsdFileFlags, Errno, FileHandle, Filesystem, FopenFlags, INodeNo, InitFlags, KernelConfig, LockOwner,
    OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use sealblock_runtime_reactor::Mailbox;

use crate::attributes::ino_of;
use crate::call::{Call, FsRequest, Permits};
use crate::interface::{MAX_READ_BYTES, Seek};

/// The number of readahead and asynchronous read requests that the kernel sends before it waits for replies.
const MAX_BACKGROUND: u16 = 64;
/// Values of lseek(2).
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

/// Receives the kernel's requests.
pub struct KernelSide {
    /// The inode number of the root, which is 1 for the kernel.
    pub root: u64,
    /// The channel to the core of the filesystem.
    pub calls: Arc<Mailbox<Call>>,
    /// Permits for calls.
    pub permits: Arc<Permits>,
}

impl KernelSide {
    /// Sends a request. A request that can no longer be sent is dropped, which replies with an error.
    fn ask(&self, request: FsRequest) {
        if let Some(permit) = self.permits.take() {
            drop(self.calls.push(Call { request, permit }));
        }
    }

    fn ino(&self, node: INodeNo) -> u64 {
        ino_of(node, self.root)
    }
}

impl Filesystem for KernelSide {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // If a kernel lacks a capability, the mount works without it.
        for wanted in [
            // The kernel requests attributes with entries when programs need them.
            InitFlags::FUSE_DO_READDIRPLUS | InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_POSIX_ACL,
            InitFlags::FUSE_ASYNC_DIO,
        ] {
            let _ = config.add_capabilities(wanted);
        }
        // The kernel uses the nearest supported value of both; the number of pages of a read follows from them.
        let _ = config.set_max_write(MAX_READ_BYTES);
        if let Err(most) = config.set_max_readahead(MAX_READ_BYTES) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(MAX_BACKGROUND);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.ask(FsRequest::Lookup { parent: self.ino(parent), name: name.as_bytes().to_vec(), reply });
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        self.ask(FsRequest::Attributes { ino: self.ino(ino), reply });
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        self.ask(FsRequest::ReadLink { ino: self.ino(ino), reply });
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        self.ask(FsRequest::Open { ino: self.ino(ino), reply });
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size_bytes: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // A shorter reply would mean the end of the file, and the kernel was configured not to request more.
        if size_bytes > MAX_READ_BYTES {
            return reply.error(Errno::EINVAL);
        }
        self.ask(FsRequest::Read { ino: self.ino(ino), handle: handle.0, offset, size_bytes, reply });
    }

    fn release(
        &self,
        _request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.ask(FsRequest::Release { ino: self.ino(ino), handle: handle.0, reply });
    }

    fn flush(&self, _request: &Request, _ino: INodeNo, _handle: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        // Then the kernel does not ask again.
        reply.error(Errno::ENOSYS);
    }

    fn opendir(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR);
    }

    fn readdir(&self, _request: &Request, ino: INodeNo, _handle: FileHandle, cookie: u64, reply: ReplyDirectory) {
        self.ask(FsRequest::ReadDirectory { ino: self.ino(ino), cookie, reply });
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.ask(FsRequest::ReadDirectoryPlus { ino: self.ino(ino), cookie, reply });
    }

    fn releasedir(&self, _request: &Request, _ino: INodeNo, _handle: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        self.ask(FsRequest::Statistics { reply });
    }

    fn getxattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, size_bytes: u32, reply: ReplyXattr) {
        self.ask(FsRequest::Xattr { ino: self.ino(ino), name: name.as_bytes().to_vec(), size_bytes, reply });
    }

    fn listxattr(&self, _request: &Request, ino: INodeNo, size_bytes: u32, reply: ReplyXattr) {
        self.ask(FsRequest::Xattrs { ino: self.ino(ino), size_bytes, reply });
    }

    fn lseek(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let what = match whence {
            SEEK_DATA => Seek::Data,
            SEEK_HOLE => Seek::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        match u64::try_from(offset) {
            Ok(offset) => self.ask(FsRequest::Seek { ino: self.ino(ino), offset, what, reply }),
            Err(_) => reply.error(Errno::ENXIO),
        }
    }

    fn access(&self, _request: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        // The kernel checks permissions itself.
        reply.error(Errno::ENOSYS);
    }

    fn setattr(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.error(Errno::EROFS);
    }

    fn mknod(&self, _r: &Request, _p: INodeNo, _name: &OsStr, _m: u32, _u: u32, _dev: u32, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }

    fn mkdir(&self, _r: &Request, _parent: INodeNo, _name: &OsStr, _mode: u32, _umask: u32, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }

    fn unlink(&self, _request: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }

    fn rmdir(&self, _request: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }

    fn symlink(&self, _request: &Request, _parent: INodeNo, _name: &OsStr, _target: &Path, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }

    fn rename(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _new_parent: INodeNo,
        _new_name: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EROFS);
    }

    fn link(&self, _request: &Request, _ino: INodeNo, _parent: INodeNo, _name: &OsStr, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        _data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        reply.error(Errno::EROFS);
    }

    fn setxattr(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _name: &OsStr,
        _value: &[u8],
        _flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EROFS);
    }

    fn removexattr(&self, _request: &Request, _ino: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }

    fn create(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        reply.error(Errno::EROFS);
    }

    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        _length: u64,
        _mode: i32,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EROFS);
    }
}
