//! Nodes of trees: a header, followed by keys with pointers to other nodes, or by keys of items whose data fill the
//! leaf from its end.
//!
//! ```text
//! leaf    | header 101 | item 25 | item 25 | ... free ... | data of item 1 | data of item 0 |
//! inner   | header 101 | pointer 33 | pointer 33 | ...                                       |
//! ```
//!
//! [`Node::decode`] checks only that as many parts as counted are there. The checker checks the rules.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::{ChecksumType, FIELD_BYTES};
use crate::error::{DecodeError, TooLong, head};
use crate::key::{DiskKey, Key};

/// The header of every node, 101 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// The checksum of everything after it.
    pub csum: [u8; FIELD_BYTES],
    /// The UUID of the filesystem.
    pub fsid: [u8; 16],
    /// The logical address of the node.
    pub bytenr: U64,
    /// Low 56 bits: see [`flags`]; high 8 bits: revision of references.
    pub flags: U64,
    /// The UUID of the chunk tree.
    pub chunk_tree_uuid: [u8; 16],
    /// The transaction that wrote it.
    pub generation: U64,
    /// The tree that it was made for.
    pub owner: U64,
    /// Items, or pointers.
    pub nritems: U32,
    /// 0 for a leaf.
    pub level: u8,
}

/// Bytes of a header.
pub const HEADER_BYTES: usize = size_of::<Header>();

/// Flags of a node.
pub mod flags {
    /// It was written.
    pub const WRITTEN: u64 = 1;
    /// It belongs to a relocation.
    pub const RELOC: u64 = 1 << 1;
    /// The revision of references since the first release.
    pub const MIXED_BACKREF: u64 = 1 << 56;
}

impl Header {
    /// The revision of references: 1, or 0 in filesystems from before the first release.
    pub fn backref_revision(&self) -> u8 {
        (self.flags.get() >> 56) as u8
    }
}

/// An item of a leaf, 25 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ItemHead {
    key: DiskKey,
    /// The position of its data, counted from the end of the header.
    pub offset: U32,
    /// Bytes of its data.
    pub size: U32,
}

impl ItemHead {
    /// A head of these parts.
    pub fn new(key: Key, offset: u32, size: u32) -> ItemHead {
        ItemHead { key: key.into(), offset: offset.into(), size: size.into() }
    }

    /// Its key.
    pub fn key(&self) -> Key {
        self.key.get()
    }
}

/// Bytes of an item besides its data.
pub const ITEM_HEAD_BYTES: usize = size_of::<ItemHead>();

/// A pointer to a node, 33 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct KeyPointer {
    key: DiskKey,
    /// The logical address of the node.
    pub blockptr: U64,
    /// The transaction that wrote the node.
    pub generation: U64,
}

impl KeyPointer {
    /// A pointer of these parts.
    pub fn new(key: Key, blockptr: u64, generation: u64) -> KeyPointer {
        KeyPointer { key: key.into(), blockptr: blockptr.into(), generation: generation.into() }
    }

    /// The first key of the child.
    pub fn key(&self) -> Key {
        self.key.get()
    }
}

/// The bytes that a leaf of this size has for items and their heads.
pub const fn leaf_capacity(node_bytes: u32) -> usize {
    (node_bytes as usize).saturating_sub(HEADER_BYTES)
}

/// The number of pointers that fit into a node of this size.
pub const fn pointer_capacity(node_bytes: u32) -> usize {
    leaf_capacity(node_bytes) / size_of::<KeyPointer>()
}

/// A node, borrowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Node<'a> {
    header: &'a Header,
    body: &'a [u8],
    items: &'a [ItemHead],
    pointers: &'a [KeyPointer],
}

impl<'a> Node<'a> {
    /// Reads a node. Its checksum and the values of its parts are not checked.
    ///
    /// # Errors
    /// If it is too small for the header, or for the items or pointers that it counts.
    pub fn decode(bytes: &'a [u8]) -> Result<Node<'a>, DecodeError> {
        let (header, body) = head::<Header>("node", bytes, 0)?;
        let count = header.nritems.get() as usize;
        let (unit, what) = match header.level {
            0 => (size_of::<ItemHead>(), "items of a leaf"),
            _ => (size_of::<KeyPointer>(), "pointers of a node"),
        };
        let needed = count.saturating_mul(unit);
        let short = DecodeError::Short { what, at: HEADER_BYTES, needed, left: body.len() };
        let table = body.get(..needed).ok_or(short)?;
        let (mut items, mut pointers): (&[ItemHead], &[KeyPointer]) = (&[], &[]);
        match header.level {
            0 => items = <[ItemHead]>::ref_from_bytes(table).map_err(|_| short)?,
            _ => pointers = <[KeyPointer]>::ref_from_bytes(table).map_err(|_| short)?,
        }
        Ok(Node { header, body, items, pointers })
    }

    /// Its header.
    pub fn header(&self) -> &'a Header {
        self.header
    }

    /// Its size in bytes.
    pub fn node_bytes(&self) -> usize {
        HEADER_BYTES + self.body.len()
    }

    /// The items of a leaf; none for another node.
    pub fn items(&self) -> &'a [ItemHead] {
        self.items
    }

    /// The pointers of a node; none for a leaf.
    pub fn pointers(&self) -> &'a [KeyPointer] {
        self.pointers
    }

    /// The data of an item, if they are in the leaf and after all heads.
    pub fn data(&self, item: &ItemHead) -> Option<&'a [u8]> {
        let start = item.offset.get() as usize;
        let end = start.checked_add(item.size.get() as usize)?;
        if start < size_of_val(self.items) { None } else { self.body.get(start..end) }
    }

    /// The first key, if the node has any.
    pub fn first_key(&self) -> Option<Key> {
        self.items.first().map(ItemHead::key).or_else(|| self.pointers.first().map(KeyPointer::key))
    }

    /// The last key, if the node has any.
    pub fn last_key(&self) -> Option<Key> {
        self.items.last().map(ItemHead::key).or_else(|| self.pointers.last().map(KeyPointer::key))
    }

    /// Keys with data, up to the first item whose data are not in the leaf.
    pub fn entries(&self) -> impl Iterator<Item = (Key, &'a [u8])> + use<'a> {
        let node = *self;
        self.items.iter().map_while(move |item| Some((item.key(), node.data(item)?)))
    }
}

/// Writes a leaf: heads from the front, data packed from the end, zeroes between them. Sets the header's count,
/// checksum and level 0.
///
/// # Errors
/// If the items do not fit.
pub fn write_leaf<'a>(
    header: &Header,
    items: impl IntoIterator<Item = (Key, &'a [u8])>,
    node_bytes: u32,
    checksum: ChecksumType,
) -> Result<Vec<u8>, TooLong> {
    let capacity = leaf_capacity(node_bytes);
    let mut node = vec![0; HEADER_BYTES + capacity];
    let (mut front, mut back, mut nritems) = (0, capacity, 0_u32);
    for (key, data) in items {
        let full = TooLong { what: "items of a leaf", length: capacity + data.len(), most: capacity };
        let start = back.checked_sub(data.len()).ok_or(full)?;
        let behind = front + size_of::<ItemHead>();
        if behind > start {
            return Err(full);
        }
        // Both are smaller than a node, whose size has 32 bits.
        let item = ItemHead::new(key, start as u32, data.len() as u32);
        let body = &mut node[HEADER_BYTES..];
        body[front..behind].copy_from_slice(item.as_bytes());
        body[start..back].copy_from_slice(data);
        (front, back, nritems) = (behind, start, nritems + 1);
    }
    finish(node, Header { nritems: nritems.into(), level: 0, ..*header }, checksum)
}

/// Writes an inner node. Sets the header's count and checksum.
///
/// # Errors
/// If the pointers do not fit.
pub fn write_inner(
    header: &Header,
    pointers: &[KeyPointer],
    node_bytes: u32,
    checksum: ChecksumType,
) -> Result<Vec<u8>, TooLong> {
    let most = pointer_capacity(node_bytes);
    if pointers.len() > most {
        return Err(TooLong { what: "pointers of a node", length: pointers.len(), most });
    }
    let mut node = vec![0; HEADER_BYTES + leaf_capacity(node_bytes)];
    node[HEADER_BYTES..][..size_of_val(pointers)].copy_from_slice(pointers.as_bytes());
    finish(node, Header { nritems: (pointers.len() as u32).into(), ..*header }, checksum)
}

fn finish(mut node: Vec<u8>, header: Header, checksum: ChecksumType) -> Result<Vec<u8>, TooLong> {
    node[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    checksum.seal(&mut node);
    Ok(node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::ItemType;

    fn header(level: u8) -> Header {
        let mut header = Header::read_from_bytes(&[0; HEADER_BYTES]).unwrap();
        (header.bytenr, header.level, header.generation) = (65_536.into(), level, 7.into());
        header
    }

    fn key(offset: u64) -> Key {
        Key::new(257, ItemType::EXTENT_DATA, offset)
    }

    #[test]
    fn sizes_are_those_of_the_format() {
        assert_eq!((HEADER_BYTES, size_of::<ItemHead>(), size_of::<KeyPointer>()), (101, 25, 33));
        assert_eq!((leaf_capacity(16_384), pointer_capacity(16_384)), (16_283, 493));
    }

    #[test]
    fn a_leaf_that_is_written_is_read() {
        let items = [(key(0), &b"zero"[..]), (key(1), b""), (key(2), b"two")];
        let bytes = write_leaf(&header(0), items, 4096, ChecksumType::Crc32c).unwrap();
        ChecksumType::Crc32c.verify(&bytes).unwrap();
        let node = Node::decode(&bytes).unwrap();
        assert_eq!(node.entries().collect::<Vec<_>>(), items);
        assert_eq!((node.first_key(), node.pointers().len(), node.node_bytes()), (Some(key(0)), 0, 4096));
        assert_eq!(&bytes[4092..], b"zero");
        assert_eq!(node.items()[2].offset, 3995 - 7);
    }

    #[test]
    fn an_inner_node_that_is_written_is_read() {
        let pointers = [KeyPointer::new(key(0), 65_536, 6), KeyPointer::new(key(9), 81_920, 7)];
        let bytes = write_inner(&header(1), &pointers, 4096, ChecksumType::XxHash64).unwrap();
        let node = Node::decode(&bytes).unwrap();
        assert_eq!((node.pointers(), node.items().len(), node.first_key()), (&pointers[..], 0, Some(key(0))));
    }

    #[test]
    fn nodes_are_filled_to_the_last_byte() {
        let leaf = |bytes| write_leaf(&header(0), [(key(0), &vec![1; bytes][..])], 4096, ChecksumType::Crc32c);
        let most = leaf_capacity(4096) - size_of::<ItemHead>();
        assert!(leaf(most).is_ok() && leaf(most + 1).is_err() && leaf(5000).is_err());
        let inner = |count| {
            let pointers = vec![KeyPointer::new(key(0), 0, 0); count];
            write_inner(&header(1), &pointers, 4096, ChecksumType::Crc32c)
        };
        assert!(inner(121).is_ok() && inner(122).is_err());
    }

    #[test]
    fn counts_and_offsets_that_lead_out_of_the_node_give_nothing() {
        let mut bytes = write_leaf(&header(0), [(key(0), &b"data"[..])], 4096, ChecksumType::Crc32c).unwrap();
        for (offset, size, is_in) in
            [(3991_u32, 4_u32, true), (3992, 4, false), (25, 3, true), (24, 3, false), (u32::MAX, u32::MAX, false)]
        {
            bytes[HEADER_BYTES + 17..][..4].copy_from_slice(&offset.to_le_bytes());
            bytes[HEADER_BYTES + 21..][..4].copy_from_slice(&size.to_le_bytes());
            let node = Node::decode(&bytes).unwrap();
            assert_eq!(node.data(&node.items()[0]).is_some(), is_in, "{offset} {size}");
            assert_eq!(node.entries().count(), usize::from(is_in));
        }
        for (count, is_node) in [(159_u32, true), (160, false), (u32::MAX, false)] {
            bytes[96..100].copy_from_slice(&count.to_le_bytes());
            assert_eq!(Node::decode(&bytes).is_ok(), is_node, "{count}");
        }
        assert!(Node::decode(&bytes[..100]).is_err());
    }
}
