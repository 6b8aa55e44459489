//! The items of an inode apart from its data and its entries: the inode itself, its names, and its verity descriptor.

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::entries::Entry;
use crate::error::{DecodeError, TooLong, head, length_u16, take};

bitflags! {
    /// The flags of an inode. Unknown bits of the low half forbid using the inode, those of the high half only writing
    /// it.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct InodeFlags: u64 {
        /// Data without checksums.
        const NODATASUM = 1;
        /// Data are overwritten in place unless a snapshot shares them.
        const NODATACOW = 1 << 1;
        /// It must not be written.
        const READONLY = 1 << 2;
        /// It must not be compressed.
        const NOCOMPRESS = 1 << 3;
        /// It has extents that were allocated before they are written.
        const PREALLOC = 1 << 4;
        /// Every write is synchronous.
        const SYNC = 1 << 5;
        /// It must not change.
        const IMMUTABLE = 1 << 6;
        /// It may only grow.
        const APPEND = 1 << 7;
        /// Dump skips it.
        const NODUMP = 1 << 8;
        /// Access is not recorded.
        const NOATIME = 1 << 9;
        /// Changes of the directory are synchronous.
        const DIRSYNC = 1 << 10;
        /// To be compressed.
        const COMPRESS = 1 << 11;
        /// In the inode of a root item: its flags are valid.
        const ROOT_ITEM_INIT = 1 << 31;
        /// It has fs-verity.
        const VERITY = 1 << 32;
    }
}

/// Seconds since 1970, negative before that, and nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Timespec {
    /// Seconds; negative before 1970.
    pub seconds: zerocopy::little_endian::I64,
    /// Nanoseconds of the second.
    pub nanoseconds: U32,
}

/// An inode, 160 bytes. Reserved bytes are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InodeItem {
    /// The transaction that made it.
    pub generation: U64,
    /// The transaction that changed it last.
    pub transid: U64,
    /// Bytes of the file; for a directory, twice the total length of all names in it.
    pub size: U64,
    /// Bytes of the extents that it refers to.
    pub nbytes: U64,
    /// Where to allocate; 0.
    pub block_group: U64,
    /// Names that it has.
    pub nlink: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Kind and permissions, as in stat(2).
    pub mode: U32,
    /// The device of a device node.
    pub rdev: U64,
    /// See [`InodeFlags`].
    pub flags: U64,
    /// Counts changes, for NFS.
    pub sequence: U64,
    /// Kept as they are.
    pub reserved: [U64; 4],
    /// Last access.
    pub atime: Timespec,
    /// Last change of the inode.
    pub ctime: Timespec,
    /// Last change of the data.
    pub mtime: Timespec,
    /// Creation.
    pub otime: Timespec,
}

impl InodeItem {
    /// The top directory of a new tree, without entries: of the superuser, with the mode 755, and all times the same.
    pub fn new_top_directory(generation: u64, time: Timespec) -> InodeItem {
        InodeItem {
            generation: generation.into(),
            transid: generation.into(),
            nlink: 1.into(),
            mode: 0o40755.into(),
            atime: time,
            ctime: time,
            mtime: time,
            otime: time,
            ..InodeItem::new_zeroed()
        }
    }

    /// The flags, unknown ones too.
    pub fn flags(&self) -> InodeFlags {
        InodeFlags::from_bits_retain(self.flags.get())
    }
}

/// A name of an inode, in the directory that the key gives. Several names in one directory share an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InodeRef<'a> {
    /// The offset of the name's index item in the directory.
    pub index: u64,
    /// The name.
    pub name: &'a [u8],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RefHead {
    index: U64,
    name_bytes: U16,
}

impl<'a> Entry<'a> for InodeRef<'a> {
    const WHAT: &'static str = "inode reference";

    fn split(bytes: &'a [u8], at: usize) -> Result<(Self, &'a [u8]), DecodeError> {
        let (fixed, rest) = head::<RefHead>(Self::WHAT, bytes, at)?;
        let (name, rest) = take(Self::WHAT, rest, at + size_of::<RefHead>(), usize::from(fixed.name_bytes))?;
        Ok((InodeRef { index: fixed.index.get(), name }, rest))
    }

    fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong> {
        let name_bytes = length_u16("name", self.name.len())?.into();
        out.extend_from_slice(RefHead { index: self.index.into(), name_bytes }.as_bytes());
        out.extend_from_slice(self.name);
        Ok(())
    }
}

/// A name of an inode in the directory `parent`, if the item for [`InodeRef`]s has no room for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InodeExtref<'a> {
    /// The directory.
    pub parent: u64,
    /// The offset of the name's index item in the directory.
    pub index: u64,
    /// The name.
    pub name: &'a [u8],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ExtrefHead {
    parent: U64,
    index: U64,
    name_bytes: U16,
}

impl<'a> Entry<'a> for InodeExtref<'a> {
    const WHAT: &'static str = "long inode reference";

    fn split(bytes: &'a [u8], at: usize) -> Result<(Self, &'a [u8]), DecodeError> {
        let (fixed, rest) = head::<ExtrefHead>(Self::WHAT, bytes, at)?;
        let (name, rest) = take(Self::WHAT, rest, at + size_of::<ExtrefHead>(), usize::from(fixed.name_bytes))?;
        Ok((InodeExtref { parent: fixed.parent.get(), index: fixed.index.get(), name }, rest))
    }

    fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong> {
        let name_bytes = length_u16("name", self.name.len())?.into();
        let fixed = ExtrefHead { parent: self.parent.into(), index: self.index.into(), name_bytes };
        out.extend_from_slice(fixed.as_bytes());
        out.extend_from_slice(self.name);
        Ok(())
    }
}

/// The head of a verity descriptor, 25 bytes, at offset 0; the descriptor of fs-verity itself is in items at offset 1
/// and up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VerityDescriptor {
    /// Bytes of the descriptor.
    pub size: U64,
    /// Kept as they are.
    pub reserved: [U64; 2],
    /// 0.
    pub encryption: u8,
}

/// The end of a range of a directory that a log covers, 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DirLogItem {
    /// The log has all entries from the key's offset up to this one.
    pub end: U64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::items::entries::Entries;

    #[test]
    fn sizes_are_those_of_the_format() {
        assert_eq!((size_of::<InodeItem>(), size_of::<Timespec>()), (160, 12));
        assert_eq!((size_of::<RefHead>(), size_of::<ExtrefHead>(), size_of::<VerityDescriptor>()), (10, 18, 25));
    }

    #[test]
    fn several_links_share_an_item() {
        let mut bytes = Vec::new();
        for (index, name) in [(2, &b"a"[..]), (7, b"second")] {
            InodeRef { index, name }.write(&mut bytes).unwrap();
        }
        assert_eq!(bytes[..11], [2, 0, 0, 0, 0, 0, 0, 0, 1, 0, b'a']);
        let refs = Entries::<InodeRef>::decode(&bytes).unwrap();
        assert_eq!(refs.iter().map(|one| one.index).collect::<Vec<_>>(), [2, 7]);
        assert!(Entries::<InodeRef>::decode(&bytes[..bytes.len() - 1]).is_err());

        let mut bytes = Vec::new();
        let long = InodeExtref { parent: 256, index: 9, name: &[b'n'; 255] };
        long.write(&mut bytes).unwrap();
        assert_eq!(Entries::<InodeExtref>::decode(&bytes).unwrap().iter().collect::<Vec<_>>(), [long]);
    }

    #[test]
    fn a_name_that_has_no_length_field_large_enough_is_refused() {
        let name = vec![b'x'; 65_536];
        assert_eq!(InodeRef { index: 1, name: &name[1..] }.write(&mut Vec::new()), Ok(()));
        let error = InodeRef { index: 1, name: &name }.write(&mut Vec::new()).unwrap_err();
        assert_eq!((error.length, error.most), (65_536, 65_535));
    }
}
