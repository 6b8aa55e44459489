//! Where the checksums of a file's data are kept: in the tree of checksums, or by the devices.
//!
//! A file whose data the devices check has NODATASUM, so every implementation of Btrfs can read and write it. On devices
//! with protection information each block then has a checksum and the tag of its transaction, which the devices store and
//! check ([`sealblock_btrfs::tags`]), and nothing of it is in the trees.
//!
//! A directory has NODATASUM if new files in it, and directories and subvolumes, are to be such. Linux does not inherit
//! the flag: files that it makes have checksums.
//!
//! Invariant: a file gets NODATASUM from here only if all devices keep the checksums of data. So no data lose their
//! checksum because a filesystem was copied to other devices.

use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem};

use crate::inode::kind_of;
use crate::plan::{Plan, PlanError};
use crate::view::Items;

/// Where the checksums of data are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Datasum {
    /// In the tree of checksums. Files without copy-on-write (NODATACOW) have none there, either.
    #[default]
    Csum,
    /// By the devices.
    Device,
}

impl Datasum {
    /// The flags of a directory in which new files are such.
    pub fn flags_of_directory(self) -> InodeFlags {
        match self {
            Datasum::Csum => InodeFlags::empty(),
            Datasum::Device => InodeFlags::NODATASUM,
        }
    }
}

/// Where the checksums of the data of a file are kept, or of those of new files in a directory.
pub fn datasum_of(inode: &InodeItem) -> Datasum {
    match inode.flags().contains(InodeFlags::NODATASUM) {
        true => Datasum::Device,
        false => Datasum::Csum,
    }
}

impl<V: Items> Plan<'_, V> {
    /// Sets where the checksums of the data of an empty file are kept, or of those of new files in a directory.
    ///
    /// # Errors
    /// If the inode is not there or protected; [`PlanError::InvalidArgument`] if it is neither a regular file nor a
    /// directory, if it is a file with data, or one without copy-on-write that is to have checksums;
    /// [`PlanError::Unsupported`] if a device cannot keep checksums of data.
    pub fn set_datasum(&mut self, ino: u64, datasum: Datasum) -> Result<InodeItem, PlanError> {
        let inode = self.inode(ino)?;
        self.check_protection(ino, &inode, true)?;
        let (now, flags) = (self.context.now, inode.flags());
        let is_set = datasum_of(&inode) == datasum;
        match kind_of(&inode) {
            _ if datasum == Datasum::Device && !self.context.has_device_sums => {
                return Err(PlanError::Unsupported("a device cannot keep the checksums of data"));
            }
            _ if datasum == Datasum::Csum && !self.has_checksums() => {
                return Err(PlanError::InvalidArgument("the filesystem has no checksums"));
            }
            FileType::Directory => {}
            FileType::Regular if is_set => return Ok(inode),
            FileType::Regular if inode.size.get() != 0 || inode.nbytes.get() != 0 => {
                return Err(PlanError::InvalidArgument("the checksums of a file with data stay where they are"));
            }
            FileType::Regular if flags.contains(InodeFlags::NODATACOW) => {
                return Err(PlanError::InvalidArgument("a file without copy-on-write has no checksums in the tree"));
            }
            FileType::Regular => {}
            _ => return Err(PlanError::InvalidArgument("only regular files and directories have data with checksums")),
        }
        self.edit_inode(ino, |inode| {
            let changed = flags.difference(InodeFlags::NODATASUM) | datasum.flags_of_directory();
            (inode.flags, inode.ctime) = (changed.bits().into(), now);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::model::{OWNER, TOP, Tree, context, geometry, new_tree};
    use crate::names::{NewFile, Place};
    use crate::plan::PlanContext;

    fn create(plan: &mut Plan<'_, Tree>, directory: u64, name: &str, file: NewFile<'_>) -> InodeItem {
        let ino = plan.create(Place { directory, name: name.as_bytes() }, file, &OWNER).unwrap();
        plan.inode(ino).unwrap()
    }

    #[test]
    fn new_files_keep_their_checksums_where_the_directory_says() {
        for has_device_sums in [true, false] {
            let (tree, geometry) = (new_tree(), geometry());
            let with = PlanContext { has_device_sums: true, ..context(&geometry) };
            let mut plan = Plan::new(&tree, with);
            plan.set_datasum(TOP, Datasum::Device).unwrap();
            plan.context.has_device_sums = has_device_sums;
            let file = create(&mut plan, TOP, "file", NewFile::Regular);
            assert_eq!(datasum_of(&file) == Datasum::Device, has_device_sums);
            assert!(!file.flags().contains(InodeFlags::NODATACOW));
            let below = plan.create(Place { directory: TOP, name: b"below" }, NewFile::Directory, &OWNER).unwrap();
            assert_eq!(datasum_of(&plan.inode(below).unwrap()), Datasum::Device, "it is so again on other devices");
            let deep = create(&mut plan, below, "deep", NewFile::Regular);
            assert_eq!(datasum_of(&deep) == Datasum::Device, has_device_sums);
            let symlink = create(&mut plan, TOP, "symlink", NewFile::Symlink(b"x"));
            assert_eq!(symlink.flags(), InodeFlags::empty());
            plan.set_datasum(TOP, Datasum::Csum).unwrap();
            assert_eq!(create(&mut plan, TOP, "later", NewFile::Regular).flags(), InodeFlags::empty());
        }
    }

    #[test]
    fn the_checksums_of_data_stay_where_they_are() {
        let (tree, geometry) = (new_tree(), geometry());
        let mut plan = Plan::new(&tree, PlanContext { has_device_sums: true, ..context(&geometry) });
        let ino = plan.create(Place { directory: TOP, name: b"file" }, NewFile::Regular, &OWNER).unwrap();
        let set = |plan: &mut Plan<'_, Tree>, datasum| plan.set_datasum(ino, datasum).map(|inode| inode.flags());
        assert_eq!(set(&mut plan, Datasum::Device), Ok(InodeFlags::NODATASUM));
        assert_eq!(set(&mut plan, Datasum::Csum), Ok(InodeFlags::empty()));
        let with = |plan: &mut Plan<'_, Tree>, size: u64, flags: InodeFlags| {
            plan.edit_inode(ino, |inode| {
                (inode.size, inode.flags) = (size.into(), flags.bits().into());
                Ok(())
            })
            .unwrap();
        };
        let refused = |result| assert!(matches!(result, Err(PlanError::InvalidArgument(_))), "{result:?}");
        with(&mut plan, 1, InodeFlags::empty());
        refused(set(&mut plan, Datasum::Device));
        assert_eq!(set(&mut plan, Datasum::Csum), Ok(InodeFlags::empty()));
        with(&mut plan, 0, InodeFlags::NODATACOW | InodeFlags::NODATASUM);
        refused(set(&mut plan, Datasum::Csum));
        with(&mut plan, 0, InodeFlags::IMMUTABLE);
        assert!(matches!(set(&mut plan, Datasum::Device), Err(PlanError::Protected { .. })));
        let symlink = plan.create(Place { directory: TOP, name: b"l" }, NewFile::Symlink(b"x"), &OWNER).unwrap();
        refused(plan.set_datasum(symlink, Datasum::Device).map(|inode| inode.flags()));
    }

    #[test]
    fn devices_that_cannot_keep_checksums_are_refused() {
        let (tree, geometry) = (new_tree(), geometry());
        let mut plan = Plan::new(&tree, context(&geometry));
        assert!(matches!(plan.set_datasum(TOP, Datasum::Device), Err(PlanError::Unsupported(_))));
        plan.set_datasum(TOP, Datasum::Csum).unwrap();
    }
}
