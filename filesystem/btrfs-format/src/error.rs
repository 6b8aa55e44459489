//! Errors for bytes with a wrong shape, and functions that cut fixed parts from a slice.
//!
//! Decoding checks only the shape: all parts that a length announces must be there. The checker checks the values, so
//! items that it refuses can still be decoded, printed and saved.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::key::Key;

/// The bytes are not the expected structure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// The structure has a fixed size, and the bytes have another.
    #[error("{what}: {found} bytes instead of {expected}")]
    Size {
        /// The structure.
        what: &'static str,
        /// Bytes that it has.
        expected: usize,
        /// Bytes that it should have.
        found: usize,
    },
    /// Bytes that are there.
    #[error("{what} at byte {at}: {needed} bytes are needed, {left} are left")]
    Short {
        /// The structure.
        what: &'static str,
        /// Where it begins.
        at: usize,
        /// Bytes that it needs.
        needed: usize,
        /// Bytes that there are from there on.
        left: usize,
    },
    /// Decoded parts of equal size: there are none, or the last one is cut off.
    #[error("{what}: {found} bytes are not one or more parts of {unit}")]
    Parts {
        /// The structure.
        what: &'static str,
        /// Bytes of a part.
        unit: usize,
        /// Bytes that there are.
        found: usize,
    },
    /// A field that decides the rest of the structure has an undefined value.
    #[error("{what}: {field} is {value}, whose layout is undefined")]
    Layout {
        /// The structure.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

/// A list or a name is too long for its length field.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} of {length} bytes: at most {most} can be stored")]
pub struct TooLong {
    /// What is too long.
    pub what: &'static str,
    /// Its length.
    pub length: usize,
    /// The maximum of the length field.
    pub most: usize,
}

/// A node cannot be edited, or not in this way. The node is then unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EditError {
    /// It is not a node.
    #[error(transparent)]
    Shape(#[from] DecodeError),
    /// No node has this size.
    #[error("a node of {0} bytes")]
    NodeBytes(usize),
    /// A leaf is edited as an inner node, or an inner node as a leaf.
    #[error("a node of level {0} is neither edited nor made as one of another level")]
    Level(u8),
    /// The data of an item do not end where those of the item before it begin, or overlap the heads.
    #[error("the data of item {slot} are not packed")]
    Unpacked {
        /// The index of the item.
        slot: usize,
    },
    /// Keys would not ascend, or do not.
    #[error("{key} at index {slot} is out of order")]
    Order {
        /// The index of the key.
        slot: usize,
        /// The key.
        key: Key,
    },
    /// There is no such item or pointer.
    #[error("index {slot} of {count}")]
    Slot {
        /// The index.
        slot: usize,
        /// Items or pointers of the node.
        count: usize,
    },
    /// The item has no such bytes.
    #[error("bytes {start} to {end} of an item of {size} bytes")]
    Range {
        /// The first byte.
        start: usize,
        /// The byte after the last one.
        end: usize,
        /// Bytes of the item.
        size: usize,
    },
    /// There is no room.
    #[error("{needed} bytes are needed, {free} are free")]
    Full {
        /// Bytes that are needed.
        needed: usize,
        /// Bytes that are free.
        free: usize,
    },
    /// Two nodes cannot exchange items: their sizes or levels differ, or new nodes are not empty, or not as many as the
    /// split needs.
    #[error("the nodes do not fit each other")]
    Siblings,
}

/// The value of a 16-bit length field.
pub(crate) fn length_u16(what: &'static str, length: usize) -> Result<u16, TooLong> {
    u16::try_from(length).map_err(|_| TooLong { what, length, most: usize::from(u16::MAX) })
}

/// All of `bytes` as one structure.
pub(crate) fn whole<'a, T>(what: &'static str, bytes: &'a [u8]) -> Result<&'a T, DecodeError>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    T::ref_from_bytes(bytes).map_err(|_| DecodeError::Size { what, expected: size_of::<T>(), found: bytes.len() })
}

/// The structure at the head of `bytes`, which begin at byte `at` of an item, and what follows it.
pub(crate) fn head<'a, T>(what: &'static str, bytes: &'a [u8], at: usize) -> Result<(&'a T, &'a [u8]), DecodeError>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    let short = DecodeError::Short { what, at, needed: size_of::<T>(), left: bytes.len() };
    T::ref_from_prefix(bytes).map_err(|_| short)
}

/// The first `length` bytes, and what follows them.
pub(crate) fn take<'a>(
    what: &'static str,
    bytes: &'a [u8],
    at: usize,
    length: usize,
) -> Result<(&'a [u8], &'a [u8]), DecodeError> {
    bytes.split_at_checked(length).ok_or(DecodeError::Short { what, at, needed: length, left: bytes.len() })
}

/// All of `bytes` as one or more structures of one size.
pub(crate) fn parts<'a, T>(what: &'static str, bytes: &'a [u8]) -> Result<&'a [T], DecodeError>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    let error = DecodeError::Parts { what, unit: size_of::<T>(), found: bytes.len() };
    <[T]>::ref_from_bytes(bytes).ok().filter(|parts| !parts.is_empty()).ok_or(error)
}
