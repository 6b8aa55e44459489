//! The structures of Btrfs: decodes bytes to values, encodes values to the same bytes, and checks their rules.
//!
//! It does no I/O, reads no clock and never waits. `docs/formats/btrfs.md` describes the format.
//!
//! The modules, from the bottom up:
//! - [`key`], [`features`], [`checksum`], [`names`], [`extent_refs`]: the parts of all other structures.
//! - [`items`]: the data of each type of item, borrowed from the leaf.
//! - [`superblock`], [`node`]: the blocks that items and pointers are in.
//! - [`node_buffer`], [`leaf_edit`], [`leaf_split`], [`inner_edit`]: nodes, edited in their buffers.
//! - [`items::extent_buf`], [`superblock_edit`]: items with references that are counted, and the superblock of a
//!   commit.
//! - [`item_changes`], [`bitmap`], [`free_space`]: the free space of block groups, and the items that it changes.
//! - [`compress`]: compressed extents, decompressed into buffers of known size, and compressed.
//! - [`checker`], [`checker_items`]: the rules of nodes and of items; [`refusal`] names a broken rule and its place.
//!
//! Invariants:
//! - No input makes this crate panic, loop, or allocate more than the input's size (plus 128 KiB for a compressed
//!   extent).
//! - Decoding checks only the shape, and a decoded value encodes to the same bytes: reserved bytes and unknown flags
//!   are kept, and nonzero ones are not refused.
//! - Edits check what they are given, and change nothing if it is wrong. Counts never wrap.
//!
//! Structures and fields have the names of the format, as in Linux and btrfs-progs, and names of sizes include the
//! unit. Numbers in borrowed structures are little-endian types with `get`. Lengths and counts that follow from the
//! content have no fields; they are computed when the content is written.
//!
//! # Examples
//!
//! Reads an item by its key and writes it again:
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
//! Finds the key of a directory entry from its name:
//!
//! ```
//! use sealblock_btrfs_format::key::{ItemType, Key, objectid};
//! use sealblock_btrfs_format::names::name_hash;
//!
//! let key = Key::new(objectid::ROOT_TREE_DIR, ItemType::DIR_ITEM, name_hash(b"default"));
//! assert_eq!(key.to_string(), "(6 DIR_ITEM 2378154706)");
//! ```

pub mod bitmap;
pub mod checker;
pub mod checker_items;
pub mod checksum;
pub mod commit_record;
pub mod compress;
pub mod error;
pub mod extent_refs;
pub mod features;
pub mod free_space;
pub mod inner_edit;
pub mod item_changes;
pub mod items;
pub mod key;
pub mod leaf_edit;
pub mod leaf_split;
pub mod names;
pub mod node;
pub mod node_buffer;
pub mod own_windows;
pub mod refusal;
pub mod superblock;
pub mod superblock_edit;

pub use error::{DecodeError, TooLong};
pub use key::{ItemType, Key};

#[cfg(test)]
mod captured;
#[cfg(test)]
mod tests;
