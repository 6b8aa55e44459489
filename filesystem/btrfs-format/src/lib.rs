//! The structures of Btrfs: bytes to values, values to the same bytes, and the rules that they must keep.
//!
//! Pure: no I/O, no clock, no waiting. `docs/formats/btrfs.md` describes the format.
//!
//! From the bottom up:
//! - [`key`], [`features`], [`checksum`], [`names`], [`extent_refs`]: the parts of all other structures.
//! - [`items`]: the data of each type of item, borrowed from the leaf.
//! - [`superblock`], [`node`]: the blocks that items and pointers are in.
//! - [`compress`]: compressed extents, decompressed into buffers of known size.
//! - [`checker`], [`checker_items`]: the rules of nodes and of items; [`refusal`] has the broken rule and its place.
//!
//! Invariants:
//! - No input makes this crate panic, loop, or allocate more than its own size, except 128 KiB for a compressed extent.
//! - Decoding checks only the shape, and a decoded value encodes to the same bytes: reserved bytes and unknown flags
//!   are kept, and nonzero ones are not refused.
//!
//! Structures and fields have the names of the format, as in Linux and btrfs-progs, and sizes have a unit. Numbers in
//! borrowed structures are little-endian types with `get`. Lengths and counts that follow from the content are no
//! fields; they are computed when the content is written.
//!
//! # Examples
//!
//! An item is read by its key and written again.
//!
//! ```
//! use sealblock_btrfs_format::items::Item;
//! use sealblock_btrfs_format::key::{ItemType, Key};
//!
//! let key = Key::new(257, ItemType::INODE_REF, 256);
//! let bytes = [2, 0, 0, 0, 0, 0, 0, 0, 4, 0, b'n', b'a', b'm', b'e'];
//! let item = Item::decode(key, &bytes)?;
//! let Item::InodeRefs(names) = item else { panic!("the key says what it is") };
//! assert_eq!(names.iter().map(|one| one.name).collect::<Vec<_>>(), [b"name"]);
//! assert_eq!(item.encode()?, bytes);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A name leads to the key of its directory entry.
//!
//! ```
//! use sealblock_btrfs_format::key::{ItemType, Key, objectid};
//! use sealblock_btrfs_format::names::name_hash;
//!
//! let key = Key::new(objectid::ROOT_TREE_DIR, ItemType::DIR_ITEM, name_hash(b"default"));
//! assert_eq!(key.to_string(), "(6 DIR_ITEM 2378154706)");
//! ```

pub mod checker;
pub mod checker_items;
pub mod checksum;
pub mod compress;
pub mod error;
pub mod extent_refs;
pub mod features;
pub mod items;
pub mod key;
pub mod names;
pub mod node;
pub mod refusal;
pub mod superblock;

pub use error::{DecodeError, TooLong};
pub use key::{ItemType, Key};

#[cfg(test)]
mod captured;
#[cfg(test)]
mod tests;
