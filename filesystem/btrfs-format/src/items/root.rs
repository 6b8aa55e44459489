//! Items of the root tree: the root node of each tree, and the positions of subvolumes.

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

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

/// A tree's root, owned, to be changed or made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RootItemBuf {
    /// The fixed part.
    pub head: RootHead,
    /// The second part; absent only as long as a very old item was not changed.
    pub tail: Option<RootTail>,
}

/// A root node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RootNode {
    /// Its address.
    pub bytenr: u64,
    /// Its level.
    pub level: u8,
    /// The transaction that wrote it.
    pub generation: u64,
}

impl RootItemBuf {
    /// The item of a new tree; the other fields are zero. The inode of a root item has one link and the mode of a
    /// directory, as Linux sets them; nothing depends on them.
    pub fn new(root: RootNode, root_dirid: u64, node_bytes: u32) -> RootItemBuf {
        let mut head = RootHead::new_zeroed();
        head.inode.generation = 1.into();
        head.inode.size = 3.into();
        head.inode.nbytes = u64::from(node_bytes).into();
        head.inode.nlink = 1.into();
        head.inode.mode = 0o40755.into();
        (head.root_dirid, head.refs) = (root_dirid.into(), 1.into());
        let mut item = RootItemBuf { head, tail: Some(RootTail::new_zeroed()) };
        item.set_root(root, u64::from(node_bytes), [0; 16]);
        item
    }

    /// Reads the item.
    ///
    /// # Errors
    /// If it has neither of the two sizes.
    pub fn decode(bytes: &[u8]) -> Result<RootItemBuf, DecodeError> {
        let item = RootItem::decode(bytes)?;
        Ok(RootItemBuf { head: *item.head, tail: item.tail.copied() })
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        RootItem { head: &self.head, tail: self.tail.as_ref() }.write(&mut out);
        out
    }

    /// Sets the root node, and the bytes of all nodes of the tree. The second part is valid afterwards: if it was
    /// absent, or void because a program that does not know it wrote the item, its old values are lost. It is then all
    /// zero, but for `uuid`, which a subvolume needs and other trees leave zero.
    pub fn set_root(&mut self, root: RootNode, bytes_used: u64, uuid: [u8; 16]) {
        let is_valid = self.tail.is_some_and(|tail| tail.generation_v2 == self.head.generation);
        let valid = self.tail.filter(|_| is_valid);
        let mut tail = valid.unwrap_or(RootTail { uuid, ..RootTail::new_zeroed() });
        tail.generation_v2 = root.generation.into();
        self.tail = Some(tail);
        (self.head.bytenr, self.head.level) = (root.bytenr.into(), root.level);
        (self.head.generation, self.head.bytes_used) = (root.generation.into(), bytes_used.into());
    }

    /// Records that a subvolume was changed. Does nothing without a second part, which
    /// [`set_root`](RootItemBuf::set_root) makes.
    pub fn set_changed(&mut self, transid: u64, time: Timespec) {
        if let Some(tail) = &mut self.tail {
            (tail.ctransid, tail.ctime) = (transid.into(), time);
        }
    }

    /// Forgets from where the subvolume was received, because it is or becomes writable and so no longer has what was
    /// sent.
    pub fn clear_received(&mut self) {
        if let Some(tail) = &mut self.tail {
            let RootTail { received_uuid, stransid, rtransid, stime, rtime, .. } = RootTail::new_zeroed();
            *tail = RootTail { received_uuid, stransid, rtransid, stime, rtime, ..*tail };
        }
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
    use crate::key::ItemType;

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
    fn items_of_the_kernel_come_back_and_a_new_root_changes_only_what_depends_on_it() {
        let captured = crate::captured::one(ItemType::ROOT_ITEM, 439).data;
        let item = RootItemBuf::decode(&captured).unwrap();
        assert_eq!(item.encode(), captured);
        let generation = item.head.generation.get();
        let mut same = item;
        let root = RootNode { bytenr: item.head.bytenr.get(), level: item.head.level, generation };
        same.set_root(root, item.head.bytes_used.get(), [9; 16]);
        assert_eq!(same, item);

        let mut new = item;
        new.set_root(RootNode { bytenr: 1 << 20, level: 2, generation: generation + 1 }, 3 << 14, [9; 16]);
        let (tail, bytes) = (new.tail.unwrap(), new.encode());
        assert_eq!((tail.generation_v2.get(), tail.uuid), (generation + 1, item.tail.unwrap().uuid));
        assert!(RootItem::decode(&bytes).unwrap().valid_tail().is_some());
        let changed: Vec<_> = (0..439).filter(|at| bytes[*at] != captured[*at]).collect();
        let is_known = |at: &usize| matches!(at, 160..168 | 176..184 | 192..200 | 238 | 239..247);
        assert!(changed.iter().all(is_known), "{changed:?}");
    }

    #[test]
    fn a_second_part_that_is_absent_or_void_is_made_anew() {
        let old = RootItemBuf::decode(&[1; 239]).unwrap();
        let void = RootItemBuf::decode(&[&[1; 239][..], &[2; 200]].concat()).unwrap();
        for mut item in [old, void] {
            item.set_root(RootNode { bytenr: 1 << 20, level: 0, generation: 9 }, 1 << 14, [7; 16]);
            let tail = item.tail.unwrap();
            assert_eq!((tail.generation_v2.get(), tail.uuid, tail.parent_uuid), (9, [7; 16], [0; 16]));
            assert_eq!((item.encode().len(), item.head.refs), (439, old.head.refs));
        }
    }

    #[test]
    fn a_writable_subvolume_is_not_received_and_its_change_has_a_time() {
        let mut item = RootItemBuf::new(RootNode { bytenr: 1 << 20, level: 0, generation: 9 }, 256, 16_384);
        let tail = item.tail.as_mut().unwrap();
        (tail.received_uuid, tail.uuid, tail.stransid, tail.rtransid) = ([1; 16], [2; 16], 3.into(), 4.into());
        tail.rtime.seconds = 5.into();
        item.clear_received();
        item.set_changed(9, Timespec { seconds: 6.into(), nanoseconds: 7.into() });
        let tail = RootTail { received_uuid: [0; 16], uuid: [2; 16], ..item.tail.unwrap() };
        assert_eq!(item.tail, Some(tail));
        assert_eq!((tail.stransid, tail.rtransid, tail.rtime.seconds.get()), (0.into(), 0.into(), 0));
        assert_eq!((tail.ctransid.get(), tail.ctime.seconds.get(), tail.otransid.get()), (9, 6, 0));
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
