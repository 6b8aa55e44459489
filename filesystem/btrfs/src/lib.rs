//! Reads Btrfs from its devices: filesystems of one or several devices, their trees, directories and files, and their
//! damage.
//!
//! `sealblock-btrfs-format` defines single structures; this crate has the rules that connect them. It sends reads,
//! verifies and checksum requests to devices, and writes nothing.
//!
//! - [`Filesystem::open`]: from devices to trees; a [`Candidate`] is a device that may belong to the filesystem.
//! - [`Cursor`]: the items of a tree in order, skipping lost nodes.
//! - [`walk::Walk`], [`Filesystem::resolve`], [`Filesystem::read`]: directories, paths, and the data of files.
//! - [`verify`]: every copy of everything that is in use; [`check`]: whether the trees agree with each other.
//! - [`chunk_map`]: from a logical address to every copy of it, for all nine profiles.
//! - [`parity`]: restores missing or damaged pieces of a row of RAID5 or RAID6 from the others.
//!
//! | profile | devices with a byte | how many may be lost |
//! | --- | --- | --- |
//! | SINGLE, RAID0 | 1 | 0 |
//! | DUP | 1, two copies | 0, but either copy |
//! | RAID1, RAID10 | 2 | 1 |
//! | RAID1C3, RAID1C4 | 3, 4 | 2, 3 |
//! | RAID5, RAID6 | 1, and the rest of its row | 1, 2 of the row |
//!
//! Invariants:
//! - A map has only valid chunks that do not overlap, so a look-up fails only for an address outside all chunks, and
//!   never leaves a stripe.
//! - Only nodes and sectors that passed their check are returned, and a sector without a checksum only from a file
//!   without checksums.
//! - Whatever a filesystem contains, each of its nodes and directories is visited once, and lengths are limited.
//! - Restored data have the length of their sources. Only a checksum can show whether they are right, because a damaged
//!   source gives wrong data.
//!
//! # Examples
//!
//! Restores a piece in RAID6, where one device is missing and another piece has a wrong checksum:
//!
//! ```
//! use sealblock_btrfs::parity;
//!
//! let data: [&[u8]; 3] = [b"first...", b"second..", b"third..."];
//! let (p, q) = (parity::p(&data), parity::q(&data));
//! let there = [None, None, Some(data[2])];
//! assert_eq!(parity::restore(0, &there, Some(&p), Some(&q))?, data[0]);
//! assert_eq!(parity::restore(1, &there, Some(&p), Some(&q))?, data[1]);
//! # Ok::<(), parity::ParityError>(())
//! ```
//!
//! The places of a byte of a chunk with two copies on one device:
//!
//! ```
//! use sealblock_btrfs::chunk_map::{ChunkMap, Place};
//! use sealblock_btrfs_format::items::chunk::Chunk;
//!
//! let mut bytes = vec![0; 48 + 2 * 32];
//! bytes[2] = 0x80; // 8 MiB
//! bytes[24] = 0x24; // metadata, DUP
//! bytes[44] = 2; // stripes, both on device 1, at 1 and at 16 MiB
//! (bytes[48], bytes[58]) = (1, 0x10);
//! (bytes[80], bytes[91]) = (1, 1);
//! let mut map = ChunkMap::default();
//! map.add(1 << 30, &Chunk::decode(&bytes)?)?;
//!
//! let located = map.locate((1 << 30) + 4096, 16_384)?;
//! let place = |offset: u64| Place { devid: 1, offset: offset + 4096 };
//! assert_eq!(located.copies[..], [place(1 << 20), place(1 << 24)]);
//! assert_eq!((located.bytes, located.row), (16_384, None));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod check;
pub mod chunk_map;
pub mod cursor;
pub mod data;
pub mod devices;
pub mod directory;
pub mod error;
pub mod extents;
pub mod filesystem;
pub mod inode;
pub mod nodes;
pub mod parity;
pub mod replicas;
pub mod roots;
pub mod space;
pub mod subvolumes;
mod superblocks;
pub mod tags;
pub mod verify;
pub mod walk;
mod witnesses;
mod write;

pub use chunk_map::{ChunkMap, Located, MapError, Place, Row};
pub use cursor::{Cursor, TreeRoot};
pub use devices::Candidate;
pub use error::{BadCopy, CopyFault, FsError, FsFuture, Lost};
pub use filesystem::{Filesystem, OpenOptions};
pub use parity::{ParityError, Role};
pub use roots::{RootSource, Roots, RootsFrom};
