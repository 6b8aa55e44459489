//! Extents and their references: the extent tree.
//!
//! The item of an extent counts its references and contains as many as it has room for; the rest have their own items.
//! An extent is data, or a node of a tree.

use bitflags::bitflags;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::entries::{Entries, Entry};
use crate::error::{DecodeError, TooLong, head};
use crate::extent_refs::{ExtentRef, RefOrder, data_ref_hash};
use crate::key::{DiskKey, ItemType};

bitflags! {
    /// What an extent is.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct ExtentFlags: u64 {
        /// Data.
        const DATA = 1;
        /// A node of a tree.
        const TREE_BLOCK = 1 << 1;
        /// A node whose children are referred to by its address, not by its tree.
        const FULL_BACKREF = 1 << 8;
    }
}

/// The fixed first part of an extent's item, 24 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtentHead {
    /// The number of all references, wherever they are stored.
    pub refs: U64,
    /// The transaction that allocated it.
    pub generation: U64,
    /// See [`ExtentFlags`].
    pub flags: U64,
}

impl ExtentHead {
    /// The flags, unknown ones too.
    pub fn flags(&self) -> ExtentFlags {
        ExtentFlags::from_bits_retain(self.flags.get())
    }
}

/// The first key and the level of a node, 18 bytes, without SKINNY_METADATA.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TreeBlockInfo {
    /// The first key of the node.
    pub key: DiskKey,
    /// Its level.
    pub level: u8,
}

/// A file that refers to an extent, and the number of references, 28 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtentDataRef {
    /// The tree of the file.
    pub root: U64,
    /// The file.
    pub objectid: U64,
    /// The offset of the file extent in the file, minus its offset in the extent; wraps.
    pub offset: U64,
    /// The number of file extents with this difference.
    pub count: U32,
}

impl ExtentDataRef {
    /// The hash under which it is sorted.
    pub fn hash(&self) -> u64 {
        data_ref_hash(self.root.get(), self.objectid.get(), self.offset.get())
    }

    /// The reference without its count.
    pub fn reference(&self) -> ExtentRef {
        ExtentRef::Data { root: self.root.get(), objectid: self.objectid.get(), offset: self.offset.get() }
    }
}

impl<'a> Entry<'a> for &'a ExtentDataRef {
    const WHAT: &'static str = "reference of a file";

    fn split(bytes: &'a [u8], at: usize) -> Result<(Self, &'a [u8]), DecodeError> {
        head(Self::WHAT, bytes, at)
    }

    fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong> {
        out.extend_from_slice(self.as_bytes());
        Ok(())
    }
}

/// The number of references from a leaf, which the key gives, to an extent, 4 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SharedDataRef {
    /// File extents in the leaf.
    pub count: U32,
}

/// A reference after an extent's item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InlineRef<'a> {
    /// A node of the tree with this number.
    TreeBlock(u64),
    /// A node whose parent has this address.
    SharedBlock(u64),
    /// Data of a file.
    Data(&'a ExtentDataRef),
    /// Data to which the leaf with this address refers, with the number of references.
    SharedData(u64, &'a SharedDataRef),
    /// Not a reference: the tree that created the extent, for simple quotas.
    Owner(u64),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Numbered {
    item_type: u8,
    number: U64,
}

impl<'a> Entry<'a> for InlineRef<'a> {
    const WHAT: &'static str = "inline reference";

    fn split(bytes: &'a [u8], at: usize) -> Result<(Self, &'a [u8]), DecodeError> {
        let (item_type, rest) = head::<u8>(Self::WHAT, bytes, at)?;
        if ItemType(*item_type) == ItemType::EXTENT_DATA_REF {
            let (data, rest) = head(Self::WHAT, rest, at + 1)?;
            return Ok((InlineRef::Data(data), rest));
        }
        let (fixed, rest) = head::<Numbered>(Self::WHAT, bytes, at)?;
        let number = fixed.number.get();
        let one = match ItemType(fixed.item_type) {
            ItemType::TREE_BLOCK_REF => InlineRef::TreeBlock(number),
            ItemType::SHARED_BLOCK_REF => InlineRef::SharedBlock(number),
            ItemType::EXTENT_OWNER_REF => InlineRef::Owner(number),
            ItemType::SHARED_DATA_REF => {
                let (shared, rest) = head(Self::WHAT, rest, at + size_of::<Numbered>())?;
                return Ok((InlineRef::SharedData(number, shared), rest));
            }
            ItemType(other) => {
                return Err(DecodeError::Layout { what: Self::WHAT, field: "type", value: u64::from(other) });
            }
        };
        Ok((one, rest))
    }

    fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong> {
        let item_type = self.item_type().0;
        match *self {
            InlineRef::TreeBlock(number) | InlineRef::SharedBlock(number) | InlineRef::Owner(number) => {
                out.extend_from_slice(Numbered { item_type, number: number.into() }.as_bytes());
            }
            InlineRef::SharedData(number, shared) => {
                out.extend_from_slice(Numbered { item_type, number: number.into() }.as_bytes());
                out.extend_from_slice(shared.as_bytes());
            }
            InlineRef::Data(data) => {
                out.push(item_type);
                out.extend_from_slice(data.as_bytes());
            }
        }
        Ok(())
    }
}

impl InlineRef<'_> {
    /// The type that the same reference has when it is a separate item.
    pub fn item_type(&self) -> ItemType {
        match self {
            InlineRef::TreeBlock(_) => ItemType::TREE_BLOCK_REF,
            InlineRef::SharedBlock(_) => ItemType::SHARED_BLOCK_REF,
            InlineRef::Data(_) => ItemType::EXTENT_DATA_REF,
            InlineRef::SharedData(..) => ItemType::SHARED_DATA_REF,
            InlineRef::Owner(_) => ItemType::EXTENT_OWNER_REF,
        }
    }

    /// The number of references that it counts for.
    pub fn count(&self) -> u32 {
        match self {
            InlineRef::TreeBlock(_) | InlineRef::SharedBlock(_) => 1,
            InlineRef::Data(data) => data.count.get(),
            InlineRef::SharedData(_, shared) => shared.count.get(),
            InlineRef::Owner(_) => 0,
        }
    }

    /// The reference without its count; none for the owner.
    pub fn reference(&self) -> Option<ExtentRef> {
        match *self {
            InlineRef::TreeBlock(root) => Some(ExtentRef::TreeBlock { root }),
            InlineRef::SharedBlock(parent) => Some(ExtentRef::SharedBlock { parent }),
            InlineRef::Data(data) => Some(data.reference()),
            InlineRef::SharedData(parent, _) => Some(ExtentRef::SharedData { parent }),
            InlineRef::Owner(_) => None,
        }
    }

    /// Its sort position among the others.
    pub fn order(&self) -> RefOrder {
        let sequence = match self {
            InlineRef::TreeBlock(number) | InlineRef::SharedBlock(number) | InlineRef::Owner(number) => *number,
            InlineRef::SharedData(number, _) => *number,
            InlineRef::Data(data) => data.hash(),
        };
        RefOrder::new(self.item_type(), sequence)
    }
}

/// An extent, with the references after it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ExtentItem<'a> {
    /// The fixed part.
    pub head: &'a ExtentHead,
    /// Present for a node without SKINNY_METADATA.
    pub tree_block: Option<&'a TreeBlockInfo>,
    /// The references after it, if there are any.
    pub refs: Option<Entries<'a, InlineRef<'a>>>,
}

impl<'a> ExtentItem<'a> {
    /// Reads the item whose key has this type. Only an EXTENT_ITEM has a node's first key and level.
    ///
    /// # Errors
    /// If a part is cut off, or a reference has an unknown type.
    pub fn decode(item_type: ItemType, bytes: &'a [u8]) -> Result<ExtentItem<'a>, DecodeError> {
        let (fixed, mut rest) = head::<ExtentHead>("extent item", bytes, 0)?;
        let mut tree_block = None;
        if item_type == ItemType::EXTENT_ITEM && fixed.flags().contains(ExtentFlags::TREE_BLOCK) {
            let (info, behind) = head::<TreeBlockInfo>("key and level of a node", rest, size_of::<ExtentHead>())?;
            (tree_block, rest) = (Some(info), behind);
        }
        let refs = if rest.is_empty() { None } else { Some(Entries::decode_at(rest, bytes.len() - rest.len())?) };
        Ok(ExtentItem { head: fixed, tree_block, refs })
    }

    /// The references after it.
    pub fn refs(&self) -> impl Iterator<Item = InlineRef<'a>> + use<'a> {
        self.refs.into_iter().flat_map(|refs| refs.iter())
    }

    /// Appends its bytes.
    ///
    /// # Errors
    /// Never for a decoded item.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong> {
        out.extend_from_slice(self.head.as_bytes());
        out.extend_from_slice(self.tree_block.map_or(&[], |info| info.as_bytes()));
        self.refs.map_or(Ok(()), |refs| refs.write(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(flags: ExtentFlags, behind: &[&[u8]]) -> Vec<u8> {
        let head = ExtentHead { refs: 2.into(), generation: 7.into(), flags: flags.bits().into() };
        [head.as_bytes(), &behind.concat()].concat()
    }

    #[test]
    fn sizes_are_those_of_the_format() {
        assert_eq!((size_of::<ExtentHead>(), size_of::<TreeBlockInfo>(), size_of::<ExtentDataRef>()), (24, 18, 28));
        assert_eq!((size_of::<Numbered>(), size_of::<SharedDataRef>()), (9, 4));
    }

    #[test]
    fn every_kind_of_reference_comes_back() {
        let data = ExtentDataRef { root: 5.into(), objectid: 257.into(), offset: 0.into(), count: 1.into() };
        let shared = SharedDataRef { count: 3.into() };
        let refs = [
            InlineRef::Owner(5),
            InlineRef::TreeBlock(5),
            InlineRef::Data(&data),
            InlineRef::SharedBlock(65_536),
            InlineRef::SharedData(65_536, &shared),
        ];
        let mut behind = Vec::new();
        refs.iter().for_each(|one| one.write(&mut behind).unwrap());
        assert_eq!(behind.len(), 9 + 9 + 29 + 9 + 13);
        let bytes = extent(ExtentFlags::DATA, &[&behind]);
        let item = ExtentItem::decode(ItemType::EXTENT_ITEM, &bytes).unwrap();
        assert_eq!(item.refs().collect::<Vec<_>>(), refs);
        assert_eq!(item.refs().map(|one| one.count()).sum::<u32>(), 6);
        assert!(item.refs().map(|one| one.order()).is_sorted());
        let mut again = Vec::new();
        item.write(&mut again).unwrap();
        assert_eq!(again, bytes);
        for length in 0..bytes.len() {
            let is_whole = matches!(length.checked_sub(24), Some(0 | 9 | 18 | 47 | 56));
            assert_eq!(ExtentItem::decode(ItemType::EXTENT_ITEM, &bytes[..length]).is_ok(), is_whole, "{length}");
        }
    }

    #[test]
    fn a_node_has_its_key_and_level_only_under_the_older_type() {
        let info = [1; 18];
        let bytes = extent(ExtentFlags::TREE_BLOCK, &[&info]);
        let item = ExtentItem::decode(ItemType::EXTENT_ITEM, &bytes).unwrap();
        assert_eq!(item.tree_block.map(|info| info.level), Some(1));
        let error = ExtentItem::decode(ItemType::METADATA_ITEM, &bytes).unwrap_err();
        assert_eq!(error, DecodeError::Layout { what: "inline reference", field: "type", value: 1 });
        let bytes = extent(ExtentFlags::TREE_BLOCK, &[]);
        assert!(ExtentItem::decode(ItemType::EXTENT_ITEM, &bytes).is_err());
        assert_eq!(ExtentItem::decode(ItemType::METADATA_ITEM, &bytes).unwrap().refs().count(), 0);
    }
}
