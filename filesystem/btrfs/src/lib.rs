//! Btrfs on its devices, read: filesystems of one or several devices, their trees, directories and files, and what of them is damaged.
//!
//! `sealblock-btrfs-format` says what single structures are; here is what follows from many of them together. Requests to devices are
//! reads, verifications and checksums; nothing is written.
//!
//! - [`Filesystem::open`]: from devices to trees; [`Candidate`] is a device that may be one of it.
//! - [`Cursor`]: the items of a tree in order, past nodes that are lost.
//! - [`walk::Walk`], [`Filesystem::resolve`], [`Filesystem::read`]: directories, paths, and the data of files.
//! - [`verify`]: every copy of everything that is in use.
//! - [`chunk_map`]: from a logical address to every copy of it, for all nine profiles.
//! - [`parity`]: the pieces of a row of RAID5 or RAID6 that are absent or damaged, from those that are there.
//!
//! | profile | devices of a byte | of them may be lost |
//! | --- | --- | --- |
//! | SINGLE, RAID0 | 1 | 0 |
//! | DUP | 1, twice | 0, but either copy |
//! | RAID1, RAID10 | 2 | 1 |
//! | RAID1C3, RAID1C4 | 3, 4 | 2, 3 |
//! | RAID5, RAID6 | 1, and its row | 1, 2 of the row |
//!
//! Invariants:
//! - A map holds only chunks that can be and that do not overlap, so a look-up neither fails but for an address that no chunk has nor
//!   leads out of a stripe.
//! - No node and no sector is handed out that did not pass its check; a sector without a checksum only of a file that has none.
//! - Whatever a filesystem holds, each of its nodes and directories is gone through once, and lengths have limits.
//! - What is restored is as long as what it is restored from. Whether it is right only its checksum can say, because a damaged piece that
//!   was taken for a good one makes other damage.
//!
//! # Examples
//!
//! A piece of RAID6 whose device is gone, with another one whose checksum was wrong:
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
//! The place of a byte in a chunk that lies on one device twice:
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
pub mod verify;
pub mod walk;

pub use chunk_map::{ChunkMap, Located, MapError, Place, Row};
pub use cursor::{Cursor, TreeRoot};
pub use devices::Candidate;
pub use error::{BadCopy, CopyFault, FsError, FsFuture, Lost};
pub use filesystem::{Filesystem, OpenOptions};
pub use parity::{ParityError, Role};
pub use roots::{RootSource, Roots, RootsFrom};
