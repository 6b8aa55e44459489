//! Makes and changes Btrfs filesystems.
//!
//! - [`engine`]: a filesystem that is open for writing; [`transaction`]: what it is now; [`change`]: how it changes.
//! - [`refs`]: the references to extents that a transaction adds and drops.
//! - [`tree`]: trees whose nodes are in memory.
//! - [`view`]: the items that an operation reads, with those that it planned itself.
//! - [`file_map`], [`nocow`], [`csums`]: plans for the data of files and their checksums.
//! - [`operations`]: names, inodes and subvolumes, as a filesystem offers them to programs.
//! - [`data`]: the data of files, read and written.
//! - [`plan`]: what operations on the files of a subvolume change: [`names`], [`inode`]s, [`xattrs`], [`acls`],
//!   [`orphans`].
//! - [`format`](mod@format): new filesystems.
//!
//! Invariants:
//! - Only [`engine`], [`operations`] and [`data`] wait, do I/O, or measure time. Everything else changes what is in memory:
//!   a change runs when the nodes that it needs are there.
//! - Counts that come from the medium are checked. One that would fall below zero is an error, after which the
//!   transaction must not be committed.
//!
//! # Examples
//!
//! A new leaf of subvolume 256 gets a second reference, from subvolume 257, and its item is made once:
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use sealblock_btrfs_engine::refs::{DelayedRefs, Fate, NewExtent};
//! use sealblock_btrfs_format::extent_refs::ExtentRef;
//! use sealblock_btrfs_format::items::extent::ExtentFlags;
//! use sealblock_btrfs_format::items::extent_buf::ExtentItemBuf;
//! use sealblock_btrfs_format::key::{ItemType, Key};
//!
//! let (bytenr, generation, node_bytes) = (30 << 20, 7, 16_384);
//! let key = Key::new(bytenr, ItemType::METADATA_ITEM, 0);
//! let item = ExtentItemBuf::new(generation, ExtentFlags::TREE_BLOCK, None);
//!
//! let mut refs = DelayedRefs::new();
//! refs.insert(NewExtent { key, item })?;
//! refs.add(bytenr, ExtentRef::TreeBlock { root: 256 }, 1)?;
//! refs.add(bytenr, ExtentRef::TreeBlock { root: 257 }, 1)?;
//! assert_eq!(refs.net(bytenr), 2);
//!
//! // The extent tree.
//! let mut tree = BTreeMap::new();
//! let head = refs.take(bytenr).expect("it has references");
//! assert_eq!(head.run(bytenr, &mut tree, node_bytes)?, Fate::Lives(key));
//! let item = ExtentItemBuf::decode(key.item_type, &tree[&key])?;
//! assert_eq!(item.refs(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod acls;
pub mod change;
pub mod chunks;
pub mod cow;
pub mod csums;
pub mod data;
pub mod datasum;
pub mod drop;
mod editor;
pub mod engine;
pub mod error;
pub mod file_map;
pub mod format;
mod gate;
mod growth;
pub mod inode;
pub mod names;
pub mod nocow;
pub mod nodes;
mod numbers;
mod open;
pub mod operations;
pub mod orphans;
pub mod plan;
pub mod refs;
mod repair;
pub mod reseal;
pub mod reserve;
mod settle;
pub mod space;
pub mod subvolumes;
mod tagging;
pub mod transaction;
pub mod tree;
pub mod view;
pub mod xattrs;
