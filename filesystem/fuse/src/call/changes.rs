//! Requests that change the filesystem. They own what the kernel only lends.

use fuser::{Errno, ReplyAttr, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyWrite};

use crate::changes::{Allocate, Caller, Changes, Content, CopyRange, NewInode, OpenMode, RenameMode, Write, XattrMode};
use crate::interface::Kind;

/// A new inode, and where it gets its name.
#[derive(Debug)]
pub struct NewName {
    pub parent: u64,
    pub name: Vec<u8>,
    pub mode: u16,
    pub umask: u16,
    pub caller: Caller,
}

impl NewName {
    /// The same for the filesystem.
    pub fn as_new(&self) -> NewInode<'_> {
        let NewName { parent, name, mode, umask, caller } = self;
        NewInode { parent: *parent, name, mode: *mode, umask: *umask, caller: *caller }
    }
}

/// The content of a new inode.
#[derive(Debug)]
pub enum OwnedContent {
    Directory,
    Symlink(Vec<u8>),
    Node(Kind, u32),
}

impl OwnedContent {
    /// The same for the filesystem.
    pub fn as_content(&self) -> Content<'_> {
        match self {
            OwnedContent::Directory => Content::Directory,
            OwnedContent::Symlink(target) => Content::Symlink(target),
            OwnedContent::Node(kind, device) => Content::Node(*kind, *device),
        }
    }
}

/// A request for a change, with its reply.
#[derive(Debug)]
pub enum ChangeRequest {
    Create {
        new: NewName,
        mode: OpenMode,
        bypasses_cache: bool,
        reply: ReplyCreate,
    },
    Make {
        new: NewName,
        content: OwnedContent,
        reply: ReplyEntry,
    },
    Link {
        ino: u64,
        parent: u64,
        name: Vec<u8>,
        reply: ReplyEntry,
    },
    Unlink {
        parent: u64,
        name: Vec<u8>,
        reply: ReplyEmpty,
    },
    Rmdir {
        parent: u64,
        name: Vec<u8>,
        reply: ReplyEmpty,
    },
    Rename {
        from: (u64, Vec<u8>),
        to: (u64, Vec<u8>),
        mode: RenameMode,
        reply: ReplyEmpty,
    },
    SetAttributes {
        ino: u64,
        changes: Changes,
        reply: ReplyAttr,
    },
    Write {
        write: Write,
        reply: ReplyWrite,
    },
    Sync {
        ino: u64,
        data_only: bool,
        reply: ReplyEmpty,
    },
    SyncDirectory {
        ino: u64,
        reply: ReplyEmpty,
    },
    Allocate {
        ino: u64,
        what: Allocate,
        range: (u64, u64),
        keeps_size: bool,
        kills_set_id: bool,
        reply: ReplyEmpty,
    },
    CopyRange {
        copy: CopyRange,
        kills_set_id: bool,
        reply: ReplyWrite,
    },
    SetXattr {
        ino: u64,
        name: Vec<u8>,
        value: Vec<u8>,
        mode: XattrMode,
        /// If the attribute is an access control list: the groups of which the caller is a member. `None` if that does
        /// not matter.
        groups: Option<Vec<u32>>,
        reply: ReplyEmpty,
    },
    RemoveXattr {
        ino: u64,
        name: Vec<u8>,
        reply: ReplyEmpty,
    },
    Ioctl {
        caller: Caller,
        ino: u64,
        command: u32,
        argument: Vec<u8>,
        answer_bytes: u32,
        reply: ReplyIoctl,
    },
}

impl ChangeRequest {
    /// Answers with this error.
    pub fn refuse(self, errno: Errno) {
        match self {
            ChangeRequest::Create { reply, .. } => reply.error(errno),
            ChangeRequest::Make { reply, .. } | ChangeRequest::Link { reply, .. } => reply.error(errno),
            ChangeRequest::SetAttributes { reply, .. } => reply.error(errno),
            ChangeRequest::Write { reply, .. } | ChangeRequest::CopyRange { reply, .. } => reply.error(errno),
            ChangeRequest::Ioctl { reply, .. } => reply.error(errno),
            ChangeRequest::Unlink { reply, .. }
            | ChangeRequest::Rmdir { reply, .. }
            | ChangeRequest::Rename { reply, .. }
            | ChangeRequest::Sync { reply, .. }
            | ChangeRequest::SyncDirectory { reply, .. }
            | ChangeRequest::Allocate { reply, .. }
            | ChangeRequest::SetXattr { reply, .. }
            | ChangeRequest::RemoveXattr { reply, .. } => reply.error(errno),
        }
    }
}
