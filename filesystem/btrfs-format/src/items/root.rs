//! Items of the root tree: the root node of each tree, and the positions of subvolumes.

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::inode::{InodeItem, Timespec};
use crate::error::{DecodeError, TooLong, head, length_u16, whole};
use crate::key::DiskKey;

bitflags! {
    /// The flags of a subvolume.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct RootFlags: u64 {
        /// It must not be written.
        const READONLY = 1;
        /// It is being deleted.
        const DEAD = 1 << 48;
    }
}

/// The fixed first part of every root item, 239 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RootHead {
    /// An inode of which only the flags have a meaning.
    pub inode: InodeItem,
    /// The transaction that wrote the root node.
    pub generation: U64,
    /// The inode of the top directory.
    pub root_dirid: U64,
    /// The logical address of the root node.
    pub bytenr: U64,
    /// 0.
    pub byte_limit: U64,
    /// Bytes of all nodes.
    pub bytes_used: U64,
    /// The transaction of the last snapshot of this subvolume.
    pub last_snapshot: U64,
    /// See [`RootFlags`].
    pub flags: U64,
    /// 0 when it is being deleted.
    pub refs: U32,
    /// How far the deletion has come.
    pub drop_progress: DiskKey,
    /// The level of the node that the deletion has reached.
    pub drop_level: u8,
    /// The level of the root node.
    pub level: u8,
}

/// The second part of root items, which exists since subvolumes have UUIDs and times, 200 bytes. Reserved bytes are
/// kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RootTail {
    /// Equal to the generation if this part is valid. Otherwise a program that does not know this part wrote the item
    /// later.
    pub generation_v2: U64,
    /// UUID of the subvolume; zero for other trees.
    pub uuid: [u8; 16],
    /// UUID of the source of this snapshot.
    pub parent_uuid: [u8; 16],
    /// UUID of the subvolume from which it was received.
    pub received_uuid: [u8; 16],
    /// The transaction of the last change.
    pub ctransid: U64,
    /// The transaction that made it.
    pub otransid: U64,
    /// The transaction of the sender when it was sent.
    pub stransid: U64,
    /// The transaction that received it.
    pub rtransid: U64,
    /// Last change.
    pub ctime: Timespec,
    /// Creation.
    pub otime: Timespec,
    /// Sent.
    pub stime: Timespec,
    /// Received.
    pub rtime: Timespec,
    /// Kept as they are.
    pub reserved: [U64; 8],
}

/// A tree's root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RootItem<'a> {
    /// The fixed part.
    pub head: &'a RootHead,
    /// The second part; absent only if a very old program wrote the item.
    pub tail: Option<&'a RootTail>,
}

impl<'a> RootItem<'a> {
    /// Reads the item.
    ///
    /// # Errors
    /// If it has neither of the two sizes, 239 and 439 bytes.
    pub fn decode(bytes: &'a [u8]) -> Result<RootItem<'a>, DecodeError> {
        let (head, rest) = head::<RootHead>("root item", bytes, 0)?;
        let tail = if rest.is_empty() { None } else { Some(whole("second part of a root item", rest)?) };
        Ok(RootItem { head, tail })
    }

    /// The second part, if it is valid.
    pub fn valid_tail(&self) -> Option<&'a RootTail> {
        self.tail.filter(|tail| tail.generation_v2 == self.head.generation)
    }

    /// The flags, unknown ones too.
    pub fn flags(&self) -> RootFlags {
        RootFlags::from_bits_retain(self.head.flags.get())
    }

    /// Appends its bytes.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.head.as_bytes());
        out.extend_from_slice(self.tail.map_or(&[], |tail| tail.as_bytes()));
    }
}

/// The position of a subvolume in another one. Both directions have the same bytes; their keys have object and offset
/// exchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RootRef<'a> {
    /// The directory of the outer subvolume.
    pub dirid: u64,
    /// The index of the entry in it.
    pub sequence: u64,
    /// The name of the entry.
    pub name: &'a [u8],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RootRefHead {
    dirid: U64,
    sequence: U64,
    name_bytes: U16,
}

impl<'a> RootRef<'a> {
    const WHAT: &'static str = "root reference";

    /// Reads the item.
    ///
    /// # Errors
    /// If the name does not end where the item ends.
    pub fn decode(bytes: &'a [u8]) -> Result<RootRef<'a>, DecodeError> {
        let (fixed, name) = head::<RootRefHead>(Self::WHAT, bytes, 0)?;
        let expected = size_of::<RootRefHead>() + usize::from(fixed.name_bytes);
        if bytes.len() != expected {
            return Err(DecodeError::Size { what: Self::WHAT, expected, found: bytes.len() });
        }
        Ok(RootRef { dirid: fixed.dirid.get(), sequence: fixed.sequence.get(), name })
    }

    /// Appends its bytes.
    ///
    /// # Errors
    /// If the name is too long for its length field.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong> {
        let name_bytes = length_u16("name", self.name.len())?.into();
        let fixed = RootRefHead { dirid: self.dirid.into(), sequence: self.sequence.into(), name_bytes };
        out.extend_from_slice(fixed.as_bytes());
        out.extend_from_slice(self.name);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sizes_are_read_and_no_other() {
        assert_eq!((size_of::<RootHead>(), size_of::<RootTail>()), (239, 200));
        let bytes: Vec<u8> = (0..439).map(|at| at as u8).collect();
        for length in 0..=440 {
            let bytes = [&bytes[..], &[0]].concat();
            let root = RootItem::decode(&bytes[..length]);
            assert_eq!(root.is_ok(), length == 239 || length == 439, "{length}");
            if let Ok(root) = root {
                let mut again = Vec::new();
                root.write(&mut again);
                assert_eq!((&again[..], root.tail.is_some()), (&bytes[..length], length == 439));
            }
        }
    }

    #[test]
    fn the_second_part_counts_only_where_its_generation_is_that_of_the_item() {
        let mut bytes = [0; 439];
        (bytes[160], bytes[239]) = (7, 7);
        assert!(RootItem::decode(&bytes).unwrap().valid_tail().is_some());
        bytes[160] = 8;
        assert!(RootItem::decode(&bytes).unwrap().valid_tail().is_none());
        assert!(RootItem::decode(&bytes[..239]).unwrap().valid_tail().is_none());
    }

    #[test]
    fn a_reference_ends_with_its_name() {
        let good = RootRef { dirid: 256, sequence: 3, name: b"snapshot" };
        let mut bytes = Vec::new();
        good.write(&mut bytes).unwrap();
        assert_eq!((bytes.len(), RootRef::decode(&bytes)), (26, Ok(good)));
        assert!(RootRef::decode(&bytes[..25]).is_err());
        assert!(RootRef::decode(&[&bytes[..], b"s"].concat()).is_err());
    }
}
