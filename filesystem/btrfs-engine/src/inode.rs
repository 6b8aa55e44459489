//! Inodes: their numbers, new ones, and the changes of their attributes.
//!
//! Rules, which are those of Linux:
//! - Every change of an inode sets its `transid` to the open transaction and raises its `sequence`.
//! - An inode number is higher than that of every inode which the subvolume has. It may be that of an inode which was
//!   deleted, unless the caller remembers the next one ([`Plan::set_next_ino`]).
//! - A directory has one link, and its size is twice the length of all names in it.
//! - A new inode inherits from its directory: the compression flags; NODATACOW, with which a regular file also gets
//!   NODATASUM; the group and the bit, if the directory has the set-group-ID bit. Other than in Linux, it inherits
//!   where the checksums of data are kept ([`crate::datasum`]). It inherits no other flag, so nothing is born immutable.
//! - In a filesystem without checksums every regular file has NODATASUM, from its creation on.

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem, Timespec};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use zerocopy::IntoBytes;

use crate::plan::{Plan, PlanError};
use crate::view::Items;

/// The bits of a mode without the file type.
pub const PERMISSION_MASK: u32 = 0o7777;
/// The set-user-ID and set-group-ID bits of a mode, and whether the group may execute the file.
const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTES: u32 = 0o010;
/// The attribute with the capabilities that a program gets.
const CAPABILITIES: &[u8] = b"security.capability";
/// The flags that a program can set with `chattr`.
pub const SETTABLE_FLAGS: InodeFlags = InodeFlags::NODATACOW
    .union(InodeFlags::COMPRESS)
    .union(InodeFlags::NOCOMPRESS)
    .union(InodeFlags::SYNC)
    .union(InodeFlags::IMMUTABLE)
    .union(InodeFlags::APPEND)
    .union(InodeFlags::NODUMP)
    .union(InodeFlags::NOATIME)
    .union(InodeFlags::DIRSYNC);
/// Bits of a major and a minor device number.
const MAJOR_BITS: u32 = 12;
const MINOR_BITS: u32 = 20;
pub(crate) const DEVICE_TOO_LARGE: PlanError =
    PlanError::InvalidArgument("a device number of more than 12 and 20 bits");
const NANOSECONDS: u32 = 1_000_000_000;

/// The owner and the permissions of a new inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ownership {
    /// The user.
    pub uid: u32,
    /// The group, unless the directory decides it.
    pub gid: u32,
    /// The bits of the mode below the file type, after the umask. The caller removes the set-group-ID bit if the user
    /// may not set it.
    pub permissions: u32,
}

/// Attributes that change. Those that are `None` stay.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AttributeChanges {
    /// The bits of the mode below the file type.
    pub permissions: Option<u32>,
    /// The user.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// The last access.
    pub atime: Option<Timespec>,
    /// The last change of the data.
    pub mtime: Option<Timespec>,
    /// The last change of the inode; `None` for the time of the plan.
    pub ctime: Option<Timespec>,
    /// These are the times of writes to a file that was opened when it could be changed, so flags of the inode that forbid
    /// changes do not count.
    pub is_of_write: bool,
    /// True if what gives a program the rights of its owner goes, as with a change of owner or data: the set-user-ID bit,
    /// the set-group-ID bit if the group may execute the file, and its capabilities. Directories keep them.
    pub kills_set_id: bool,
}

/// The number of a device in an inode.
///
/// # Errors
/// If a major number has more than 12 bits, or a minor number more than 20.
pub fn device_number(major: u32, minor: u32) -> Result<u64, PlanError> {
    if major >> MAJOR_BITS != 0 || minor >> MINOR_BITS != 0 {
        return Err(DEVICE_TOO_LARGE);
    }
    Ok(u64::from(major) << MINOR_BITS | u64::from(minor))
}

/// The key of an INODE_ITEM.
pub(crate) const fn inode_key(ino: u64) -> Key {
    Key::new(ino, ItemType::INODE_ITEM, 0)
}

/// The type of an inode that [`Plan::inode`] returned.
pub(crate) fn kind_of(inode: &InodeItem) -> FileType {
    FileType::of_mode(inode.mode.get()).unwrap_or(FileType::Unknown)
}

impl<V: Items> Plan<'_, V> {
    /// Remembers the number of the next new inode: higher than that of every inode which the subvolume ever had.
    pub fn set_next_ino(&mut self, ino: u64) {
        self.next_ino = Some(ino);
    }

    /// The number of the next new inode, if the plan had to find it.
    pub fn next_ino(&self) -> Option<u64> {
        self.next_ino
    }

    /// An inode.
    ///
    /// # Errors
    /// If there is none; [`PlanError::Damaged`] if its type is undefined, or it has flags that forbid writing.
    pub fn inode(&self, ino: u64) -> Result<InodeItem, PlanError> {
        self.find_inode(ino)?.ok_or(PlanError::NotFound)
    }

    /// An inode that an item of the tree leads to.
    pub(crate) fn referred_inode(&self, ino: u64) -> Result<InodeItem, PlanError> {
        let why = "an item leads to it, and it is not there";
        self.find_inode(ino)?.ok_or(PlanError::Damaged { key: inode_key(ino), why })
    }

    /// An inode, if it is there.
    pub(crate) fn find_inode(&self, ino: u64) -> Result<Option<InodeItem>, PlanError> {
        let key = inode_key(ino);
        let damaged = |why| Err(PlanError::Damaged { key, why });
        match self.item(key)? {
            Some(Item::Inode(inode)) if FileType::of_mode(inode.mode.get()).is_none() => {
                damaged("no file has its mode")
            }
            Some(Item::Inode(inode)) if !InodeFlags::all().contains(inode.flags()) => {
                damaged("it has unknown flags, with which it must not be written")
            }
            Some(Item::Inode(inode)) => Ok(Some(*inode)),
            Some(_) => damaged("not an inode"),
            None => Ok(None),
        }
    }

    /// A directory whose entries change.
    ///
    /// # Errors
    /// If it is not a directory, was removed, or is immutable; also if it is append-only, where entries go.
    pub(crate) fn directory(&self, ino: u64, entries_go: bool) -> Result<InodeItem, PlanError> {
        let inode = self.inode(ino)?;
        match kind_of(&inode) {
            FileType::Directory if inode.nlink.get() == 0 => Err(PlanError::NotFound),
            FileType::Directory => {
                self.check_protection(ino, &inode, entries_go)?;
                Ok(inode)
            }
            _ => Err(PlanError::NotADirectory),
        }
    }

    /// Refuses a change of an inode that may not be written; also one that may only grow, where the change is not that.
    pub(crate) fn check_protection(&self, ino: u64, inode: &InodeItem, forbids_append: bool) -> Result<(), PlanError> {
        let flags = inode.flags();
        let refuse = |flag| Err(PlanError::Protected { ino, flag });
        match () {
            () if flags.contains(InodeFlags::READONLY) => refuse("read-only"),
            () if flags.contains(InodeFlags::IMMUTABLE) => refuse("immutable"),
            () if forbids_append && flags.contains(InodeFlags::APPEND) => refuse("append-only"),
            () => Ok(()),
        }
    }

    /// Changes an inode, and marks it as changed in the open transaction. The times are the caller's.
    ///
    /// # Errors
    /// If it is not there or damaged; those of the change.
    pub fn edit_inode(
        &mut self,
        ino: u64,
        change: impl FnOnce(&mut InodeItem) -> Result<(), PlanError>,
    ) -> Result<InodeItem, PlanError> {
        let mut inode = self.inode(ino)?;
        change(&mut inode)?;
        inode.transid = self.context.generation.into();
        // A counter that only says that something changed; it may wrap.
        inode.sequence = inode.sequence.get().wrapping_add(1).into();
        self.put(inode_key(ino), inode.as_bytes().to_vec())?;
        Ok(inode)
    }

    /// An inode changes now, but not its data.
    pub(crate) fn mark_changed(&mut self, ino: u64) -> Result<(), PlanError> {
        let now = self.context.now;
        self.edit_inode(ino, |inode| {
            inode.ctime = now;
            Ok(())
        })?;
        Ok(())
    }

    /// Changes attributes of an inode, and with its permissions its access control list.
    ///
    /// # Errors
    /// If the inode is not there, or is immutable, append-only or read-only; [`PlanError::InvalidArgument`] for
    /// permissions that are more than that, or a time with a second or more of nanoseconds.
    pub fn set_attributes(&mut self, ino: u64, changes: &AttributeChanges) -> Result<InodeItem, PlanError> {
        self.attempt(|plan| plan.change_attributes(ino, changes))
    }

    fn change_attributes(&mut self, ino: u64, changes: &AttributeChanges) -> Result<InodeItem, PlanError> {
        let inode = self.inode(ino)?;
        if !changes.is_of_write {
            self.check_protection(ino, &inode, true)?;
        }
        if changes.permissions.is_some_and(|bits| bits & !PERMISSION_MASK != 0) {
            return Err(PlanError::InvalidArgument("permissions of more than 12 bits"));
        }
        let is_valid = |time: &Timespec| time.nanoseconds.get() < NANOSECONDS;
        if ![changes.atime, changes.mtime, changes.ctime].iter().flatten().all(is_valid) {
            return Err(PlanError::InvalidArgument("a second or more of nanoseconds"));
        }
        let now = self.context.now;
        let kills = changes.kills_set_id && kind_of(&inode) != FileType::Directory;
        if kills && self.xattr(ino, CAPABILITIES)?.is_some() {
            self.delete_xattr(ino, CAPABILITIES)?;
        }
        if let Some(bits) = changes.permissions {
            self.mode_changed(ino, bits)?;
        }
        self.edit_inode(ino, |inode| {
            let mode =
                changes.permissions.map_or(inode.mode.get(), |bits| inode.mode.get() & FileType::MODE_MASK | bits);
            inode.mode = if kills { without_set_id(mode) } else { mode }.into();
            inode.uid = changes.uid.map_or(inode.uid, Into::into);
            inode.gid = changes.gid.map_or(inode.gid, Into::into);
            inode.atime = changes.atime.unwrap_or(inode.atime);
            inode.mtime = changes.mtime.unwrap_or(inode.mtime);
            inode.ctime = changes.ctime.unwrap_or(now);
            Ok(())
        })
    }

    /// Gives an inode these of the flags that programs can set ([`SETTABLE_FLAGS`]); its other flags stay. A regular
    /// file gets NODATASUM together with NODATACOW, and loses both together, unless the filesystem has no checksums.
    ///
    /// An immutable inode can lose that flag. Whether the user may change it and APPEND is the caller's to check.
    ///
    /// # Errors
    /// If the inode is not there; [`PlanError::InvalidArgument`] for flags that are not settable or contradict each
    /// other, for inodes that are neither a regular file nor a directory, and for a change of NODATACOW of a file with
    /// data. Data that are still to be written must be written first.
    pub fn set_flags(&mut self, ino: u64, wanted: InodeFlags) -> Result<InodeItem, PlanError> {
        let inode = self.inode(ino)?;
        let refuse = |why| Err(PlanError::InvalidArgument(why));
        if !SETTABLE_FLAGS.contains(wanted) {
            return refuse("flags that cannot be set");
        }
        let excluding = InodeFlags::NOCOMPRESS | InodeFlags::NODATACOW;
        if wanted.contains(InodeFlags::COMPRESS) && wanted.intersects(excluding) {
            return refuse("flags that contradict each other");
        }
        let mut flags = inode.flags().difference(SETTABLE_FLAGS) | wanted;
        match kind_of(&inode) {
            FileType::Regular => {
                let changes = inode.flags().contains(InodeFlags::NODATACOW) != wanted.contains(InodeFlags::NODATACOW);
                if changes && (inode.size.get() != 0 || inode.nbytes.get() != 0) {
                    return refuse("a file with data keeps its NODATACOW");
                }
                if changes {
                    let has_no_sums = wanted.contains(InodeFlags::NODATACOW) || !self.has_checksums();
                    flags.set(InodeFlags::NODATASUM, has_no_sums);
                }
            }
            FileType::Directory => {}
            _ => return refuse("only regular files and directories have such flags"),
        }
        let now = self.context.now;
        self.edit_inode(ino, |inode| {
            (inode.flags, inode.ctime) = (flags.bits().into(), now);
            Ok(())
        })
    }

    /// False if the filesystem has no checksums.
    pub(crate) fn has_checksums(&self) -> bool {
        self.context.geometry.checksum != ChecksumType::None
    }

    /// The flags that a new inode has from its directory, and from the filesystem.
    fn inherited_flags(&self, directory: InodeFlags, kind: FileType) -> InodeFlags {
        // A directory with both does not compress.
        let is_plain = directory.contains(InodeFlags::NOCOMPRESS);
        let mut flags = directory & if is_plain { InodeFlags::NOCOMPRESS } else { InodeFlags::COMPRESS };
        let has_no_cow = directory.contains(InodeFlags::NODATACOW);
        flags.set(InodeFlags::NODATACOW, has_no_cow);
        let has_no_sums = match kind {
            FileType::Regular => has_no_cow || !self.has_checksums(),
            _ => false,
        };
        let inherits_datasum = match kind {
            FileType::Directory => true,
            FileType::Regular => self.context.has_device_sums,
            _ => false,
        };
        flags.set(InodeFlags::NODATASUM, has_no_sums);
        flags | directory & if inherits_datasum { InodeFlags::NODATASUM } else { InodeFlags::empty() }
    }

    /// The number of a new inode.
    pub(crate) fn take_ino(&mut self) -> Result<u64, PlanError> {
        let ino = match self.next_ino {
            Some(ino) => ino,
            None => {
                let end = Key::new(objectid::LAST_FREE, ItemType(u8::MAX), u64::MAX);
                let highest = self.last(Key::MIN..=end)?.map_or(0, |(key, _)| key.objectid);
                highest.saturating_add(1).max(objectid::FIRST_FREE + 1)
            }
        };
        if ino >= objectid::LAST_FREE {
            return Err(PlanError::NoNumber("inode number"));
        }
        if !(objectid::FIRST_FREE..).contains(&ino) || self.first(items_of(ino))?.is_some() {
            return Err(PlanError::InvalidArgument("the next inode number is in use"));
        }
        self.next_ino = Some(ino + 1);
        Ok(ino)
    }

    /// A new inode without names, which has what it inherits from its directory.
    pub(crate) fn new_inode(&self, directory: &InodeItem, kind: FileType, owner: &Ownership) -> InodeItem {
        let (generation, now) = (self.context.generation, self.context.now);
        let is_grouped = directory.mode.get() & SET_GROUP_ID != 0;
        let mut mode = kind.mode_bits().unwrap_or(0) | owner.permissions & PERMISSION_MASK;
        if is_grouped && kind == FileType::Directory {
            mode |= SET_GROUP_ID;
        }
        InodeItem {
            generation: generation.into(),
            transid: generation.into(),
            size: 0.into(),
            nbytes: 0.into(),
            block_group: 0.into(),
            nlink: 0.into(),
            uid: owner.uid.into(),
            gid: if is_grouped { directory.gid } else { owner.gid.into() },
            mode: mode.into(),
            rdev: 0.into(),
            flags: self.inherited_flags(directory.flags(), kind).bits().into(),
            sequence: 0.into(),
            reserved: [0.into(); 4],
            atime: now,
            ctime: now,
            mtime: now,
            otime: now,
        }
    }
}

/// A mode without the bits that give a program the rights of the owner of its file. Without the right to execute, the
/// set-group-ID bit means something else.
pub fn without_set_id(mode: u32) -> u32 {
    mode & !SET_USER_ID & if mode & GROUP_EXECUTES != 0 { !SET_GROUP_ID } else { u32::MAX }
}

/// All items of an inode.
pub(crate) fn items_of(ino: u64) -> std::ops::RangeInclusive<Key> {
    Key::new(ino, ItemType(0), 0)..=Key::new(ino, ItemType(u8::MAX), u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::names::model::{GENERATION, OWNER, TOP, Tree, context, geometry, new_tree, time};
    use crate::names::{NewFile, Place};
    use crate::xattrs::XattrMode;

    #[test]
    fn device_numbers_are_those_of_linux() {
        assert_eq!(device_number(8, 1), Ok(0x80_0001));
        assert_eq!(device_number(0xfff, 0xf_ffff), Ok(u64::from(u32::MAX)));
        for (major, minor) in [(0x1000, 0), (0, 0x10_0000)] {
            assert!(matches!(device_number(major, minor), Err(PlanError::InvalidArgument(_))));
        }
    }

    #[test]
    fn attributes_change_as_they_are_given_and_the_others_stay() {
        let (tree, geometry) = (new_tree(), geometry());
        let mut plan = Plan::new(&tree, context(&geometry));
        let before = plan.inode(TOP).unwrap();
        let none = AttributeChanges::default();
        let inode = plan.set_attributes(TOP, &AttributeChanges { permissions: Some(0o1700), ..none }).unwrap();
        assert_eq!((inode.mode.get(), inode.uid, inode.mtime), (0o041_700, before.uid, before.mtime));
        assert_eq!((inode.ctime, inode.transid.get(), inode.sequence.get()), (time(50), GENERATION, 1));
        let changes = AttributeChanges { uid: Some(1), gid: Some(2), mtime: Some(time(-5)), ..none };
        let inode = plan.set_attributes(TOP, &changes).unwrap();
        assert_eq!((inode.uid.get(), inode.gid.get(), inode.mtime, inode.atime), (1, 2, time(-5), before.atime));
        let changes = AttributeChanges { atime: Some(time(8)), ctime: Some(time(9)), ..none };
        let inode = plan.set_attributes(TOP, &changes).unwrap();
        assert_eq!((inode.atime, inode.ctime, inode.otime), (time(8), time(9), before.otime));
        assert_eq!(plan.inode(TOP), Ok(inode));
        let late = Timespec { seconds: 0.into(), nanoseconds: NANOSECONDS.into() };
        for changes in [
            AttributeChanges { permissions: Some(0o10_000), ..none },
            AttributeChanges { atime: Some(late), ..none },
            AttributeChanges { mtime: Some(late), ..none },
            AttributeChanges { ctime: Some(late), ..none },
        ] {
            assert!(matches!(plan.set_attributes(TOP, &changes), Err(PlanError::InvalidArgument(_))), "{changes:?}");
        }
        assert_eq!(plan.set_attributes(999, &none), Err(PlanError::NotFound));
    }

    #[test]
    fn the_rights_of_an_owner_go_where_that_is_wanted() {
        let (tree, geometry) = (new_tree(), geometry());
        let mut plan = Plan::new(&tree, context(&geometry));
        let file = plan.create(Place { directory: TOP, name: b"file" }, NewFile::Regular, &OWNER).unwrap();
        let none = AttributeChanges::default();
        let kill = AttributeChanges { kills_set_id: true, ..none };
        for (before, after) in [(0o6755, 0o755), (0o6745, 0o2745), (0o1777, 0o1777)] {
            plan.set_attributes(file, &AttributeChanges { permissions: Some(before), ..none }).unwrap();
            plan.set_xattr(file, CAPABILITIES, b"x", XattrMode::Create).unwrap();
            let inode = plan.set_attributes(file, &kill).unwrap();
            assert_eq!((inode.mode.get() & 0o7777, plan.xattr(file, CAPABILITIES)), (after, Ok(None)));
        }
        plan.set_attributes(TOP, &AttributeChanges { permissions: Some(0o6755), ..none }).unwrap();
        assert_eq!(plan.set_attributes(TOP, &kill).unwrap().mode.get() & 0o7777, 0o6755, "not of a directory");
    }

    #[test]
    fn flags_change_where_they_may() {
        use InodeFlags as F;
        let (tree, geometry) = (new_tree(), geometry());
        let mut plan = Plan::new(&tree, context(&geometry));
        let new = |plan: &mut Plan<'_, Tree>, name: &str, file| {
            plan.create(Place { directory: TOP, name: name.as_bytes() }, file, &OWNER).unwrap()
        };
        let file = new(&mut plan, "file", NewFile::Regular);
        let symlink = new(&mut plan, "symlink", NewFile::Symlink(b"x"));
        let flags = |plan: &mut Plan<'_, Tree>, ino, wanted| plan.set_flags(ino, wanted).map(|inode| inode.flags());
        let refused = |result| assert!(matches!(result, Err(PlanError::InvalidArgument(_))), "{result:?}");
        assert_eq!(flags(&mut plan, file, F::NODATACOW | F::SYNC), Ok(F::NODATACOW | F::NODATASUM | F::SYNC));
        assert_eq!(flags(&mut plan, TOP, F::NODATACOW), Ok(F::NODATACOW));
        assert_eq!(flags(&mut plan, file, F::empty()), Ok(F::empty()));
        assert_eq!(flags(&mut plan, file, F::IMMUTABLE), Ok(F::IMMUTABLE));
        assert_eq!(flags(&mut plan, file, F::COMPRESS), Ok(F::COMPRESS), "an immutable file can become another one");
        refused(flags(&mut plan, file, F::COMPRESS | F::NOCOMPRESS));
        refused(flags(&mut plan, file, F::COMPRESS | F::NODATACOW));
        refused(flags(&mut plan, file, F::NODATASUM));
        refused(flags(&mut plan, file, F::from_bits_retain(1 << 40)));
        refused(flags(&mut plan, symlink, F::NOATIME));
        plan.edit_inode(file, |inode| {
            (inode.size, inode.flags) = (1.into(), (F::PREALLOC | F::NODATASUM).bits().into());
            Ok(())
        })
        .unwrap();
        refused(flags(&mut plan, file, F::NODATACOW));
        assert_eq!(flags(&mut plan, file, F::NODUMP), Ok(F::PREALLOC | F::NODATASUM | F::NODUMP), "others stay");
    }

    #[test]
    fn inodes_that_cannot_be_written_are_refused() {
        let (mut tree, geometry) = (new_tree(), geometry());
        let good = *Plan::new(&tree, context(&geometry)).inode(TOP).as_ref().unwrap();
        let mut with = |inode: InodeItem| {
            tree.insert(inode_key(TOP), inode.as_bytes().to_vec());
            Plan::new(&tree, context(&geometry)).inode(TOP)
        };
        let verity = InodeItem { flags: InodeFlags::VERITY.bits().into(), ..good };
        assert_eq!(with(verity), Ok(verity));
        for bad in [InodeItem { flags: (1 << 50).into(), ..good }, InodeItem { mode: 0o644.into(), ..good }] {
            assert!(matches!(with(bad), Err(PlanError::Damaged { .. })));
        }
        let tree = BTreeMap::from([(inode_key(TOP), vec![0; 159])]);
        let error = Plan::new(&tree, context(&geometry)).inode(TOP);
        assert!(matches!(error, Err(PlanError::Shape { .. })));
    }
}
