//! The kernel's side: its requests, received on separate threads, become calls.
//!
//! If the mount is read-only, the kernel refuses changes itself. Changes that arrive nevertheless are refused with the
//! same error.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, INodeNo, InitFlags, IoctlFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
    Request, TimeOrNow, WriteFlags,
};
use sealblock_runtime_reactor::Mailbox;

use crate::attributes::{DIRECTORY_FLAGS, ino_of};
use crate::call::{Call, ChangeRequest, Forget, FsRequest, NewName, OwnedContent, Permits};
use crate::changes::{CopyRange, MAX_IOCTL_BYTES, MAX_WRITE_BYTES, OpenMode, Write};
use crate::interface::{MAX_READ_BYTES, Seek};

mod changes;

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
    /// What the kernel forgets. It needs no permit: the kernel forgets an inode only once, and only an answer makes it
    /// known again, so never more wait here than there were inodes known.
    pub forgets: Arc<Mailbox<Forget>>,
    /// The number of readahead and asynchronous requests that the kernel sends before it waits for replies. It is lower
    /// than the number of permits, so that programs need not wait for all of them.
    pub most_in_background: u16,
    /// What a mount that can be changed has agreed upon; `None` for a read-only one.
    pub writes: Option<Agreed>,
}

/// How a mount that can be changed works.
#[derive(Clone, Copy, Debug, Default)]
pub struct Agreed {
    /// The kernel collects writes in its page cache.
    pub writeback_cache: bool,
    /// Files opened with O_DIRECT may bypass the page cache; set while the kernel is asked.
    pub direct: bool,
    /// The filesystem removes the set-user-ID and set-group-ID bits; set while the kernel is asked.
    pub kills_set_id: bool,
}

impl KernelSide {
    /// Sends a request. A request that can no longer be sent is dropped, which replies with an error.
    fn ask(&self, request: FsRequest) {
        if let Some(permit) = self.permits.take() {
            drop(self.calls.push(Call { request, permit }));
        }
    }

    /// Sends a request for a change, or refuses it if the mount is read-only.
    fn change(&self, request: ChangeRequest) {
        match self.writes {
            Some(_) => self.ask(FsRequest::Change(request)),
            None => request.refuse(Errno::EROFS),
        }
    }

    fn ino(&self, node: INodeNo) -> u64 {
        ino_of(node, self.root)
    }

    /// True if the filesystem must remove set-user-ID and set-group-ID bits when this caller changes content.
    ///
    /// The kernel says so only for writes, and what it says of others does not reach us. It means callers without
    /// CAP_FSETID, which are nearly always those that are not root.
    fn kills_set_id(&self, request: &Request) -> bool {
        self.writes.is_some_and(|agreed| agreed.kills_set_id) && request.uid() != 0
    }

    /// True if the kernel does not use its page cache for a file opened like this.
    fn bypasses_cache(&self, mode: OpenMode) -> bool {
        mode.is_direct && self.writes.is_some_and(|agreed| agreed.direct)
    }

    fn name(&self, parent: INodeNo, name: &OsStr) -> (u64, Vec<u8>) {
        (self.ino(parent), name.as_bytes().to_vec())
    }

    fn new_name(&self, request: &Request, parent: INodeNo, name: &OsStr, (mode, umask): (u32, u32)) -> NewName {
        let (parent, name) = self.name(parent, name);
        // Only the lowest 12 bits count in both.
        let [mode, umask] = [mode, umask].map(|bits| (bits & 0o7777) as u16);
        NewName { parent, name, mode, umask, caller: changes::caller(request) }
    }

    /// What a mount needs for changes, as far as this kernel has it.
    fn agree_on_changes(&mut self, config: &mut KernelConfig) {
        let Some(agreed) = &mut self.writes else { return };
        if agreed.writeback_cache {
            agreed.writeback_cache = config.add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE).is_ok();
        }
        agreed.kills_set_id = config.add_capabilities(InitFlags::FUSE_HANDLE_KILLPRIV_V2).is_ok();
        // With its cache for writes, the kernel believes no time of ours, and gives a file none for writes that bypass the
        // cache by this flag: programs would see the time before them. Without the capability, what bypasses the page
        // cache would not see what other programs wrote into it.
        agreed.direct =
            !agreed.writeback_cache && config.add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP).is_ok();
        for wanted in [InitFlags::FUSE_DONT_MASK, InitFlags::FUSE_ATOMIC_O_TRUNC] {
            let _ = config.add_capabilities(wanted);
        }
        tracing::debug!(?agreed, "changes");
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
        self.agree_on_changes(config);
        // The kernel uses the nearest supported value of both; the number of pages of a read follows from them.
        let _ = config.set_max_write(MAX_READ_BYTES.max(MAX_WRITE_BYTES));
        if let Err(most) = config.set_max_readahead(MAX_READ_BYTES) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(self.most_in_background);
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

    fn forget(&self, _request: &Request, ino: INodeNo, lookups: u64) {
        if self.writes.is_some() {
            let _closed = self.forgets.push(Forget { ino: self.ino(ino), lookups });
        }
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if self.writes.is_none() && flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        let mode = changes::open_mode(flags, self.kills_set_id(request));
        let bypasses_cache = self.bypasses_cache(mode);
        self.ask(FsRequest::Open { ino: self.ino(ino), mode, bypasses_cache, reply });
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
        flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let writes = flags.acc_mode() != OpenAccMode::O_RDONLY;
        self.ask(FsRequest::Release { ino: self.ino(ino), handle: handle.0, writes, reply });
    }

    fn flush(&self, _request: &Request, _ino: INodeNo, _handle: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        // Then the kernel does not ask again.
        reply.error(Errno::ENOSYS);
    }

    fn opendir(&self, _request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.writes {
            Some(_) => self.ask(FsRequest::OpenDirectory { ino: self.ino(ino), reply }),
            None => reply.opened(FileHandle(0), DIRECTORY_FLAGS),
        }
    }

    fn readdir(&self, _request: &Request, ino: INodeNo, handle: FileHandle, cookie: u64, reply: ReplyDirectory) {
        self.ask(FsRequest::ReadDirectory { ino: self.ino(ino), handle: handle.0, cookie, reply });
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.ask(FsRequest::ReadDirectoryPlus { ino: self.ino(ino), handle: handle.0, cookie, reply });
    }

    fn releasedir(&self, _request: &Request, _ino: INodeNo, handle: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        match self.writes {
            Some(_) => self.ask(FsRequest::ReleaseDirectory { handle: handle.0, reply }),
            None => reply.ok(),
        }
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
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size_bytes: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let kills_set_id = self.writes.is_some_and(|agreed| agreed.kills_set_id) && (uid.is_some() || gid.is_some())
            || size_bytes.is_some() && self.kills_set_id(request);
        let times = (atime, mtime, ctime);
        let changes = changes::changes((mode, uid, gid, size_bytes), times, kills_set_id);
        self.change(ChangeRequest::SetAttributes { ino: self.ino(ino), changes, reply });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let Some(kind) = changes::kind_of_node(mode) else { return reply.error(Errno::EINVAL) };
        let new = self.new_name(request, parent, name, (mode, umask));
        self.change(ChangeRequest::Make { new, content: OwnedContent::Node(kind, device), reply });
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let new = self.new_name(request, parent, name, (mode, umask));
        self.change(ChangeRequest::Make { new, content: OwnedContent::Directory, reply });
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let target = target.as_os_str().as_bytes().to_vec();
        let new = self.new_name(request, parent, name, (0o777, 0));
        self.change(ChangeRequest::Make { new, content: OwnedContent::Symlink(target), reply });
    }

    fn link(&self, _request: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (parent, name) = self.name(parent, name);
        self.change(ChangeRequest::Link { ino: self.ino(ino), parent, name, reply });
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (parent, name) = self.name(parent, name);
        self.change(ChangeRequest::Unlink { parent, name, reply });
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (parent, name) = self.name(parent, name);
        self.change(ChangeRequest::Rmdir { parent, name, reply });
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let Some(mode) = changes::rename_mode(flags) else { return reply.error(Errno::EINVAL) };
        let (from, to) = (self.name(parent, name), self.name(new_parent, new_name));
        self.change(ChangeRequest::Rename { from, to, mode, reply });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let new = self.new_name(request, parent, name, (mode, umask));
        let mode = changes::open_mode(OpenFlags(flags), self.kills_set_id(request));
        self.change(ChangeRequest::Create { new, mode, bypasses_cache: self.bypasses_cache(mode), reply });
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // The kernel was configured not to send more.
        if data.len() > MAX_WRITE_BYTES as usize {
            return reply.error(Errno::EINVAL);
        }
        let durability = changes::durability(flags);
        let kills_set_id = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let (ino, handle, data) = (self.ino(ino), handle.0, data.to_vec());
        // With its cache for writes, the kernel sets the times of all writes, also of those that bypass it, and says later
        // what they are.
        let keeps_times = self.writes.is_some_and(|agreed| agreed.writeback_cache);
        let write = Write { ino, handle, offset, data, durability, kills_set_id, keeps_times };
        self.change(ChangeRequest::Write { write, reply });
    }

    fn fsync(&self, _request: &Request, ino: INodeNo, _handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        self.change(ChangeRequest::Sync { ino: self.ino(ino), data_only, reply });
    }

    fn fsyncdir(&self, _request: &Request, ino: INodeNo, _handle: FileHandle, _data_only: bool, reply: ReplyEmpty) {
        self.change(ChangeRequest::SyncDirectory { ino: self.ino(ino), reply });
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let Some((what, keeps_size)) = changes::allocation(mode) else { return reply.error(Errno::EOPNOTSUPP) };
        let (ino, range, kills_set_id) = (self.ino(ino), (offset, length), self.kills_set_id(request));
        self.change(ChangeRequest::Allocate { ino, what, range, keeps_size, kills_set_id, reply });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        from: INodeNo,
        from_handle: FileHandle,
        from_offset: u64,
        to: INodeNo,
        to_handle: FileHandle,
        to_offset: u64,
        bytes: u64,
        flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        if !flags.is_empty() {
            return reply.error(Errno::EINVAL);
        }
        let (from, to) = ((self.ino(from), from_handle.0, from_offset), (self.ino(to), to_handle.0, to_offset));
        // More could not be expressed in the answer.
        let copy = CopyRange { from, to, bytes: bytes.min(changes::MAX_COPY_BYTES) };
        self.change(ChangeRequest::CopyRange { copy, kills_set_id: self.kills_set_id(request), reply });
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let Some(mode) = changes::xattr_mode(flags) else { return reply.error(Errno::EINVAL) };
        let groups = if self.writes.is_some() { changes::groups_for_xattr(request, name) } else { None };
        let (name, value) = (name.as_bytes().to_vec(), value.to_vec());
        self.change(ChangeRequest::SetXattr { ino: self.ino(ino), name, value, mode, groups, reply });
    }

    fn removexattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.change(ChangeRequest::RemoveXattr { ino: self.ino(ino), name: name.as_bytes().to_vec(), reply });
    }

    fn ioctl(
        &self,
        request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        flags: IoctlFlags,
        command: u32,
        argument: &[u8],
        answer_bytes: u32,
        reply: ReplyIoctl,
    ) {
        let is_restricted = !flags.intersects(IoctlFlags::FUSE_IOCTL_UNRESTRICTED | IoctlFlags::FUSE_IOCTL_RETRY);
        // An argument of 32-bit programs may have another layout, which is not known here.
        let is_native = !flags.intersects(IoctlFlags::FUSE_IOCTL_COMPAT | IoctlFlags::FUSE_IOCTL_COMPAT_X32);
        let fits = argument.len() <= MAX_IOCTL_BYTES as usize && answer_bytes <= MAX_IOCTL_BYTES;
        if self.writes.is_none() || !is_restricted || !is_native || !fits {
            return reply.error(Errno::ENOTTY);
        }
        let (caller, ino, argument) = (changes::caller(request), self.ino(ino), argument.to_vec());
        self.change(ChangeRequest::Ioctl { caller, ino, command, argument, answer_bytes, reply });
    }
}
