//! Changes of names, attributes and extended attributes.

use sealblock_btrfs_engine::data::now;
use sealblock_btrfs_engine::engine::EngineError;
use sealblock_btrfs_engine::inode::{AttributeChanges, Ownership, device_number};
use sealblock_btrfs_engine::names::{NewFile, Place, RenameMode as EngineRename, Renamed, Unlinked};
use sealblock_btrfs_engine::operations::Resolved;
use sealblock_btrfs_engine::plan::PlanError;
use sealblock_btrfs_engine::transaction::ChangeError;
use sealblock_btrfs_engine::xattrs::XattrMode as EngineXattr;
use sealblock_btrfs_engine::{acls, xattrs};
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_fuse::{
    Allocate, Attributes, Caller, Changes, Content, CopyRange, FsError, Kind, NewInode, NewTime, OpenMode, Opened,
    RenameMode, Time, Write, WriteFs, XattrMode,
};

use super::error::{refused, to_fuse_error, to_write_error};
use super::known::WRITES;
use super::{FIRST_INDEX, InodeId, Writable, place_of};
use crate::values::device_parts;

/// The permissions of a symbolic link, which nobody looks at.
const LINK_PERMISSIONS: u32 = 0o777;
/// The first bytes of the names of extended attributes that programs can set, beside those that mean something here.
const NAMESPACES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];

impl Writable<'_> {
    /// Creates an inode.
    async fn create_inode(&self, new: NewInode<'_>, file: NewFile<'_>) -> Result<InodeId, FsError> {
        let directory = self.directory(new.parent)?;
        let permissions = match file {
            NewFile::Symlink(_) => LINK_PERMISSIONS,
            _ => new.mode.into(),
        };
        let owner = Ownership { uid: new.caller.uid, gid: new.caller.gid, permissions };
        let place = Place { directory: directory.ino, name: new.name };
        let umask = u32::from(new.umask);
        let create = async || self.engine.create_masked(directory.root, place, file, (&owner, umask), now()).await;
        let created = self.with_space(create).await;
        Ok(InodeId { ino: created.map_err(to_fuse_error)?, ..directory })
    }

    /// An inode of a subvolume lost a name.
    fn unlinked(&self, root: u64, unlinked: Unlinked) -> Result<(), FsError> {
        if unlinked.is_orphan {
            self.known.lose_names(self.number(InodeId { root, ino: unlinked.ino })?);
        }
        Ok(())
    }

    /// Removes an empty subvolume by its name, as Linux lets rmdir(2) do.
    async fn remove_subvolume(&self, directory: InodeId, name: &[u8]) -> Result<(), FsError> {
        let not_empty = || to_fuse_error(EngineError::Change(ChangeError::Plan(PlanError::NotEmpty)));
        let Some(Resolved::Subvolume(root)) = self.resolve(directory, name).await? else { return Err(not_empty()) };
        let top = super::top_of(root);
        let entries = self.engine.read_directory(top.root, top.ino, (0, u64::MAX), 1).await.map_err(to_fuse_error)?;
        match entries.is_empty() {
            true => self.delete_subvolume(directory, name).await.map(drop),
            false => Err(not_empty()),
        }
    }

    /// Deletes the subvolume at a place. Its nodes are dropped when the kernel knows no inode of it. Returns its number.
    pub(super) async fn delete_subvolume(&self, directory: InodeId, name: &[u8]) -> Result<u64, FsError> {
        let found = match self.resolve(directory, name).await? {
            Some(Resolved::Subvolume(root)) => Some(root),
            _ => None,
        };
        // There would be nowhere to write what programs still write.
        if found.and_then(|root| self.numbers.of_subvolume(root)).is_some_and(|numbers| self.known.has_open(numbers)) {
            return Err(refused(libc::EBUSY, "a file of the subvolume is open for writing"));
        }
        let is_new = found.is_some_and(|root| self.deleted.borrow_mut().insert(root));
        let deleted = self.engine.delete_subvolume(place_of(directory, name), now()).await;
        match (&deleted, found) {
            (Ok(root), _) => _ = self.deleted.borrow_mut().insert(*root),
            (Err(_), Some(root)) if is_new => _ = self.deleted.borrow_mut().remove(&root),
            (Err(_), _) => {}
        }
        self.background.has_dead.set(true);
        deleted.map_err(to_fuse_error)
    }

    async fn rename_in(
        &self,
        (from, old): (InodeId, &[u8]),
        (to, new): (InodeId, &[u8]),
        mode: RenameMode,
    ) -> Result<Renamed, FsError> {
        let (old, new) = (Place { directory: from.ino, name: old }, Place { directory: to.ino, name: new });
        let mode = match mode {
            RenameMode::Replace => EngineRename::Replace,
            RenameMode::NoReplace => EngineRename::NoReplace,
            RenameMode::Exchange => EngineRename::Exchange,
            RenameMode::Whiteout if from.root == to.root => {
                let owner = Ownership { uid: 0, gid: 0, permissions: 0 };
                let renamed = self.engine.rename_to_whiteout(from.root, old, new, &owner, now()).await;
                return renamed.map_err(to_fuse_error);
            }
            RenameMode::Whiteout => return Err(refused(libc::EXDEV, "the names are in different subvolumes")),
        };
        self.engine.rename((from.root, old), (to.root, new), mode, now()).await.map_err(to_fuse_error)
    }
}

/// The type of file that is created.
fn new_file<'a>(content: Content<'a>) -> Result<NewFile<'a>, FsError> {
    let device = |shown| {
        let (major, minor) = device_parts(shown);
        device_number(major, minor).map_err(|error| to_fuse_error(EngineError::Change(ChangeError::Plan(error))))
    };
    Ok(match content {
        Content::Directory => NewFile::Directory,
        Content::Symlink(target) => NewFile::Symlink(target),
        Content::Node(Kind::Regular, _) => NewFile::Regular,
        Content::Node(Kind::Fifo, _) => NewFile::Fifo,
        Content::Node(Kind::Socket, _) => NewFile::Socket,
        Content::Node(Kind::CharDevice, shown) => NewFile::CharacterDevice(device(shown)?),
        Content::Node(Kind::BlockDevice, shown) => NewFile::BlockDevice(device(shown)?),
        Content::Node(Kind::Directory | Kind::Symlink, _) => return Err(FsError::WrongKind),
    })
}

fn stored_time(time: Time) -> Timespec {
    Timespec { seconds: time.seconds.into(), nanoseconds: time.nanoseconds.into() }
}

/// The attributes that change, without the size.
fn attribute_changes(changes: &Changes, now: Timespec) -> AttributeChanges {
    let time = |new: NewTime| match new {
        NewTime::Now => now,
        NewTime::At(time) => stored_time(time),
    };
    // The kernel sends the times of writes that it had in its cache like those that a program sets.
    let is_of_write = changes.mtime.is_some()
        && [changes.uid, changes.gid, changes.mode.map(u32::from)].iter().all(Option::is_none)
        && changes.atime.is_none()
        && changes.size_bytes.is_none();
    AttributeChanges {
        permissions: changes.mode.map(u32::from),
        uid: changes.uid,
        gid: changes.gid,
        atime: changes.atime.map(time),
        mtime: changes.mtime.map(time),
        ctime: changes.ctime.map(stored_time),
        kills_set_id: changes.kills_set_id,
        is_of_write,
    }
}

impl WriteFs for Writable<'_> {
    async fn open_as(&self, ino: u64, mode: OpenMode) -> Result<Opened, FsError> {
        Ok(Opened { handle: self.open_file(ino, mode).await? })
    }

    async fn last_cookie(&self, ino: u64) -> Result<u64, FsError> {
        let Some(directory) = self.find(ino)? else { return Ok(FIRST_INDEX) };
        let last = self.engine.last_index(directory.root, directory.ino).await.map_err(to_fuse_error)?;
        Ok(last.saturating_add(1).max(FIRST_INDEX))
    }

    async fn create(&self, new: NewInode<'_>, mode: OpenMode) -> Result<(Attributes, Opened), FsError> {
        let id = self.create_inode(new, NewFile::Regular).await?;
        let handle = if mode.writes { WRITES } else { 0 };
        let attributes = self.attributes_of(id).await?;
        // The kernel gets to know it only if it is opened.
        self.open_known(attributes.ino, id, mode.writes).inspect_err(|_| _ = self.known.forget(attributes.ino))?;
        Ok((attributes, Opened { handle }))
    }

    async fn make(&self, new: NewInode<'_>, content: Content<'_>) -> Result<Attributes, FsError> {
        let id = self.create_inode(new, new_file(content)?).await?;
        self.attributes_of(id).await
    }

    async fn link(&self, ino: u64, parent: u64, name: &[u8]) -> Result<Attributes, FsError> {
        let (id, directory) = (self.inode(ino)?, self.directory(parent)?);
        if id.root != directory.root {
            return Err(refused(libc::EXDEV, "a file has its names in one subvolume"));
        }
        let place = Place { directory: directory.ino, name };
        self.engine.link(id.root, id.ino, place, now()).await.map_err(to_fuse_error)?;
        self.attributes_of(id).await
    }

    async fn unlink(&self, parent: u64, name: &[u8]) -> Result<(), FsError> {
        let directory = self.directory(parent)?;
        let place = Place { directory: directory.ino, name };
        let unlinked = self.engine.unlink(directory.root, place, now()).await.map_err(to_fuse_error)?;
        self.unlinked(directory.root, unlinked)
    }

    async fn rmdir(&self, parent: u64, name: &[u8]) -> Result<(), FsError> {
        let directory = self.directory(parent)?;
        let place = Place { directory: directory.ino, name };
        match self.engine.rmdir(directory.root, place, now()).await {
            Ok(Some(unlinked)) => self.unlinked(directory.root, unlinked),
            Ok(None) => {
                self.numbers.remove_placeholder(parent, name);
                Ok(())
            }
            Err(EngineError::Change(ChangeError::Plan(PlanError::NotEmpty))) => {
                self.remove_subvolume(directory, name).await
            }
            Err(error) => Err(to_fuse_error(error)),
        }
    }

    async fn rename(&self, from: (u64, &[u8]), to: (u64, &[u8]), mode: RenameMode) -> Result<(), FsError> {
        let (old, new) = (self.directory(from.0)?, self.directory(to.0)?);
        match self.rename_in((old, from.1), (new, to.1), mode).await? {
            Renamed::Moved(replaced) => {
                // If it was the place of one.
                self.numbers.remove_placeholder(to.0, to.1);
                replaced.map_or(Ok(()), |replaced| self.unlinked(new.root, replaced))
            }
            Renamed::Same | Renamed::Exchanged => Ok(()),
        }
    }

    async fn set_attributes(&self, ino: u64, changes: &Changes) -> Result<Attributes, FsError> {
        let id = self.inode(ino)?;
        if changes.size_bytes.is_some() || changes.uid.is_some() || changes.gid.is_some() {
            self.drop_rights(ino, id, false).await?;
        }
        if let Some(size) = changes.size_bytes {
            self.engine.truncate(id.root, id.ino, size).await.map_err(to_write_error)?;
        }
        let rest = attribute_changes(changes, now());
        if rest != AttributeChanges::default() || changes.size_bytes.is_none() {
            self.engine.set_attributes(id.root, id.ino, &rest, now()).await.map_err(to_fuse_error)?;
        }
        self.attributes_of(id).await
    }

    async fn write(&self, write: Write) -> Result<(), FsError> {
        self.write_file(write).await
    }

    async fn sync(&self, ino: u64, data_only: bool) -> Result<(), FsError> {
        self.sync_file(self.file(ino)?, data_only).await
    }

    async fn sync_directory(&self, _: u64) -> Result<(), FsError> {
        self.engine.sync().await.map(drop).map_err(to_write_error)
    }

    async fn allocate(&self, ino: u64, what: Allocate, range: (u64, u64), keeps_size: bool) -> Result<(), FsError> {
        self.allocate_range(ino, what, range, keeps_size).await
    }

    async fn copy_range(&self, copy: CopyRange) -> Result<u64, FsError> {
        self.copy_file_range(copy).await
    }

    async fn set_xattr(
        &self,
        ino: u64,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        kills_set_group_id: bool,
    ) -> Result<(), FsError> {
        let id = self.inode(ino)?;
        let is_known = [acls::ACCESS, acls::DEFAULT, xattrs::COMPRESSION].contains(&name)
            || NAMESPACES.iter().any(|space| name.len() > space.len() && name.starts_with(space));
        let set = match name {
            acls::ACCESS => self.engine.set_access_acl(id.root, id.ino, value, kills_set_group_id, now()).await,
            _ if !is_known => return Err(refused(libc::EOPNOTSUPP, "extended attributes have no such namespace")),
            _ => {
                let mode = match mode {
                    XattrMode::Set => EngineXattr::Set,
                    XattrMode::Create => EngineXattr::Create,
                    XattrMode::Replace => EngineXattr::Replace,
                };
                self.with_space(async || self.engine.set_xattr(id.root, id.ino, (name, value), mode, now()).await).await
            }
        };
        self.known.set_has_no_capabilities(ino, false);
        set.map_err(to_fuse_error)
    }

    async fn remove_xattr(&self, ino: u64, name: &[u8]) -> Result<(), FsError> {
        let id = self.inode(ino)?;
        self.engine.remove_xattr(id.root, id.ino, name, now()).await.map_err(to_fuse_error)
    }

    async fn ioctl(
        &self,
        caller: Caller,
        ino: u64,
        command: u32,
        argument: &[u8],
        answer_bytes: u32,
    ) -> Result<Vec<u8>, FsError> {
        self.run_command(caller, self.inode(ino)?, (command, argument), answer_bytes).await
    }

    async fn forgotten(&self, ino: u64) {
        // What has names may be looked up at any time; what has none, never again.
        if self.known.forget(ino) {
            self.delete_orphan(ino).await;
        }
    }
}
