//! Entries of directories, and extended attributes, which have the same shape.
//!
//! A directory has two items for each entry: one by the hash of the name, shared by all entries with that hash, and one
//! by index, in the order of creation.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::entries::Entry;
use crate::error::{DecodeError, TooLong, head, length_u16, take};
use crate::key::{DiskKey, ItemType, Key};

/// Bytes of an entry before its name.
pub const ENTRY_HEAD_BYTES: usize = 30;

/// The type of an entry, according to its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FileType {
    /// Unknown.
    Unknown,
    /// A regular file.
    Regular,
    /// A directory, or a subvolume.
    Directory,
    /// A character device.
    CharacterDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A symbolic link.
    Symlink,
    /// Not an entry but an extended attribute.
    Xattr,
}

impl FileType {
    /// All, in the order of their numbers.
    pub const ALL: [FileType; 9] = [
        FileType::Unknown,
        FileType::Regular,
        FileType::Directory,
        FileType::CharacterDevice,
        FileType::BlockDevice,
        FileType::Fifo,
        FileType::Socket,
        FileType::Symlink,
        FileType::Xattr,
    ];

    /// The bits of a mode for the file type.
    pub const MODE_MASK: u32 = 0o170_000;

    /// The file type of a mode, if that has a defined one.
    pub fn of_mode(mode: u32) -> Option<FileType> {
        FileType::ALL.into_iter().find(|kind| kind.mode_bits() == Some(mode & FileType::MODE_MASK))
    }

    /// Its bits in a mode; none if no inode has this type.
    pub fn mode_bits(self) -> Option<u32> {
        Some(match self {
            FileType::Fifo => 0o010_000,
            FileType::CharacterDevice => 0o020_000,
            FileType::Directory => 0o040_000,
            FileType::BlockDevice => 0o060_000,
            FileType::Regular => 0o100_000,
            FileType::Symlink => 0o120_000,
            FileType::Socket => 0o140_000,
            FileType::Unknown | FileType::Xattr => return None,
        })
    }

    /// The bit for an encrypted name; no released kernel sets it.
    pub const ENCRYPTED: u8 = 0x80;

    /// The kind with this number.
    pub fn from_number(number: u8) -> Option<FileType> {
        FileType::ALL.get(usize::from(number)).copied()
    }
}

/// The target of an entry of a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// An inode of the same subvolume.
    Inode(u64),
    /// The top directory of another subvolume.
    Subvolume(u64),
}

impl Target {
    /// What an entry's key leads to.
    pub fn of(location: Key) -> Target {
        match location.item_type {
            ItemType::ROOT_ITEM => Target::Subvolume(location.objectid),
            _ => Target::Inode(location.objectid),
        }
    }

    /// The key by which an entry leads to it.
    pub fn location(self) -> Key {
        match self {
            Target::Inode(ino) => Key::new(ino, ItemType::INODE_ITEM, 0),
            // Entries do not name a version of a root item.
            Target::Subvolume(id) => Key::new(id, ItemType::ROOT_ITEM, u64::MAX),
        }
    }
}

/// A name in a directory with its target, or the name of an extended attribute with its value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirEntry<'a> {
    /// The inode's key, or the root item's for a subvolume; all zero for an attribute.
    pub location: Key,
    /// The transaction that made the entry.
    pub transid: u64,
    /// The number of a [`FileType`].
    pub kind: u8,
    /// The name.
    pub name: &'a [u8],
    /// The value of an attribute; empty for others.
    pub data: &'a [u8],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    location: DiskKey,
    transid: U64,
    data_bytes: U16,
    name_bytes: U16,
    kind: u8,
}

const _: () = assert!(size_of::<Head>() == ENTRY_HEAD_BYTES);

impl<'a> Entry<'a> for DirEntry<'a> {
    const WHAT: &'static str = "directory entry";

    fn split(bytes: &'a [u8], at: usize) -> Result<(Self, &'a [u8]), DecodeError> {
        let (fixed, rest) = head::<Head>(Self::WHAT, bytes, at)?;
        let (name_bytes, data_bytes) = (usize::from(fixed.name_bytes), usize::from(fixed.data_bytes));
        let (name, rest) = take(Self::WHAT, rest, at + ENTRY_HEAD_BYTES, name_bytes)?;
        let (data, rest) = take(Self::WHAT, rest, at + ENTRY_HEAD_BYTES + name_bytes, data_bytes)?;
        let (location, transid) = (fixed.location.get(), fixed.transid.get());
        Ok((DirEntry { location, transid, kind: fixed.kind, name, data }, rest))
    }

    fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong> {
        let fixed = Head {
            location: self.location.into(),
            transid: self.transid.into(),
            data_bytes: length_u16("value", self.data.len())?.into(),
            name_bytes: length_u16("name", self.name.len())?.into(),
            kind: self.kind,
        };
        out.extend_from_slice(fixed.as_bytes());
        out.extend_from_slice(self.name);
        out.extend_from_slice(self.data);
        Ok(())
    }
}

impl DirEntry<'_> {
    /// The type, if the number is known.
    pub fn file_type(&self) -> Option<FileType> {
        FileType::from_number(self.kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::items::entries::Entries;

    #[test]
    fn an_entry_is_thirty_bytes_and_its_name() {
        let location = Key::new(257, ItemType::INODE_ITEM, 0);
        let entry = DirEntry { location, transid: 9, kind: 1, name: b"file", data: b"" };
        let mut bytes = Vec::new();
        entry.write(&mut bytes).unwrap();
        assert_eq!(bytes.len(), 34);
        assert_eq!(bytes[17..30], [9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1]);
        assert_eq!(entry.file_type(), Some(FileType::Regular));
        assert_eq!(Entries::<DirEntry>::decode(&bytes).unwrap().iter().collect::<Vec<_>>(), [entry]);
    }

    #[test]
    fn attributes_of_one_hash_follow_each_other_and_no_length_leads_out() {
        let zero = Key::new(0, ItemType(0), 0);
        let one = DirEntry { location: zero, transid: 0, kind: 8, name: b"user.a", data: b"value" };
        let two = DirEntry { name: b"user.b", data: b"", ..one };
        let mut bytes = Vec::new();
        one.write(&mut bytes).unwrap();
        let first = bytes.len();
        two.write(&mut bytes).unwrap();
        assert_eq!(Entries::<DirEntry>::decode(&bytes).unwrap().iter().collect::<Vec<_>>(), [one, two]);
        for length in 0..bytes.len() {
            assert_eq!(Entries::<DirEntry>::decode(&bytes[..length]).is_ok(), length == first, "{length}");
        }
        bytes[25] = 0xff;
        let error = Entries::<DirEntry>::decode(&bytes).unwrap_err();
        assert!(matches!(error, DecodeError::Short { at: 36, needed: 0xff, .. }), "{error}");
    }

    #[test]
    fn kinds_have_their_numbers() {
        for (number, kind) in FileType::ALL.into_iter().enumerate() {
            assert_eq!((kind as usize, FileType::from_number(number as u8)), (number, Some(kind)));
        }
        assert_eq!(FileType::from_number(9), None);
    }

    #[test]
    fn kinds_have_their_bits_in_a_mode() {
        for kind in FileType::ALL {
            let bits = kind.mode_bits();
            assert_eq!(bits.is_none(), matches!(kind, FileType::Unknown | FileType::Xattr));
            assert_eq!(bits.and_then(|bits| FileType::of_mode(bits | 0o7777)), bits.and(Some(kind)));
        }
        assert_eq!(FileType::of_mode(0o100_644), Some(FileType::Regular));
        assert_eq!(FileType::of_mode(0o644), None);
        assert_eq!(FileType::of_mode(0o170_644), None);
    }

    #[test]
    fn an_entry_leads_to_an_inode_or_to_a_subvolume() {
        for (target, key) in [
            (Target::Inode(257), Key::new(257, ItemType::INODE_ITEM, 0)),
            (Target::Subvolume(258), Key::new(258, ItemType::ROOT_ITEM, u64::MAX)),
        ] {
            assert_eq!((target.location(), Target::of(key)), (key, target));
        }
    }
}
