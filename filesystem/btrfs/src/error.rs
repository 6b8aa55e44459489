//! Why data or metadata of a filesystem cannot be read, and what is wrong with a copy.
//!
//! A bad copy is a [`BadCopy`], whether or not another copy was good. An [`FsError`] means that nothing could be read:
//! no copy was good, an item is absent, or the filesystem is not supported.

use std::fmt;

use futures_util::future::LocalBoxFuture;
use sealblock_block::Error;
use sealblock_btrfs_format::Key;
use sealblock_btrfs_format::checksum::ChecksumMismatch;
use sealblock_btrfs_format::compress::CompressError;
use sealblock_btrfs_format::features::Unsupported;
use sealblock_btrfs_format::refusal::Refusal;
use sealblock_btrfs_format::superblock::SuperblockError;

use crate::chunk_map::{MapError, Place};
use crate::parity::ParityError;
use crate::tags::TagMismatch;

/// What is wrong with a copy.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CopyFault {
    /// Its device is missing.
    #[error("the device is missing")]
    Missing,
    /// Its device missed transactions, and no checksum shows whether the data are current.
    #[error("the device is of an older transaction, and the data have no checksum")]
    Stale,
    /// The device reports that it is damaged or cannot be read.
    #[error("{0}")]
    Unreadable(Error),
    /// The place is impossible on the device: not a multiple of its blocks, or beyond its end.
    #[error("no block of the device begins there")]
    NoBlock,
    /// A node that breaks a rule.
    #[error("{0}")]
    Node(Box<Refusal>),
    /// A node or superblock that is valid, but differs from the copy with this number, which is valid too.
    #[error("it is valid, but differs from copy {0}, which is valid, too")]
    Differs(usize),
    /// The data do not match their checksum.
    #[error("{0}")]
    Checksum(ChecksumMismatch),
    /// The data are intact, and not those that the file should have; or the same of a node.
    #[error("{0}")]
    Tag(TagMismatch),
    /// The other pieces of the row, from which it would be restored, are missing or damaged too.
    #[error("{0}")]
    Parity(ParityError),
    /// A superblock that is older than another one of its device.
    #[error("it is of transaction {found}, and another copy of {newest}")]
    Old {
        /// Its transaction.
        found: u64,
        /// The transaction of the newest one.
        newest: u64,
    },
    /// A valid superblock of another filesystem.
    #[error("it is of another filesystem, with the UUID {found}; that of {used} is used")]
    OtherFilesystem {
        /// The UUID of that filesystem.
        found: String,
        /// The UUID of the filesystem that the device is used for.
        used: String,
    },
    /// A valid superblock of another device of the filesystem, or of a filesystem with the same UUID.
    #[error("it is of another device, number {found}; that of number {used} is used")]
    OtherDevice {
        /// The number and UUID of that device.
        found: String,
        /// The number and UUID of the device that is used.
        used: String,
    },
    /// Not a valid superblock.
    #[error("{0}")]
    Superblock(SuperblockError),
}

/// A bad copy.
#[derive(Clone, Debug)]
pub struct BadCopy {
    /// Its first logical address; `None` for a superblock.
    pub logical: Option<u64>,
    /// Its place.
    pub place: Place,
    /// The number of the copy, from 1. Numbers after those of the copies stand for pieces restored from parity.
    pub mirror: usize,
    /// What is wrong.
    pub fault: CopyFault,
}

impl fmt::Display for BadCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { devid, offset } = self.place;
        write!(f, "copy {} on device {devid} at byte {offset}: {}", self.mirror, self.fault)
    }
}

/// No copy of a range is good, or could be written.
#[derive(Clone, Debug)]
pub struct Lost {
    /// The first logical address.
    pub logical: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// What is wrong with each copy.
    pub copies: Vec<BadCopy>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at the logical address {} are lost{}", self.bytes, self.logical, self.copies())
    }
}

impl Lost {
    /// The copies, for the end of a sentence.
    fn copies(&self) -> String {
        self.copies.iter().map(|copy| format!("; {copy}")).collect()
    }
}

/// A boxed future, so that its body is compiled in this crate and not with every caller.
pub type FsFuture<'a, T> = LocalBoxFuture<'a, Result<T, FsError>>;

/// Why a read failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FsError {
    /// A target without a superblock.
    #[error("{name}: no superblock of Btrfs: {why}")]
    NoSuperblock {
        /// The target.
        name: String,
        /// What is wrong with its first superblock.
        why: CopyFault,
    },
    /// Targets that do not belong together, or too few of them.
    #[error("{0}")]
    Devices(String),
    /// Features that are not supported.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// Another property of the filesystem that is not supported.
    #[error("it is not read here: {0}")]
    NotReadable(&'static str),
    /// A property of the filesystem with which it is not written.
    #[error("it is not written here: {0}")]
    NotWritable(String),
    /// No copy is good.
    #[error("{0}")]
    Lost(Box<Lost>),
    /// No copy could be written. What was there before may still be.
    #[error("{} bytes at the logical address {} could not be written{}", .0.bytes, .0.logical, .0.copies())]
    WriteFailed(Box<Lost>),
    /// A logical address that no chunk has.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A node whose keys are not between those of its neighbours.
    #[error("the node at {bytenr} has the key {key}, which belongs behind it, at {before} or later")]
    KeyOrder {
        /// Its logical address.
        bytenr: u64,
        /// Its last key.
        key: Key,
        /// The first key after the node in its tree.
        before: Key,
    },
    /// A referenced object does not exist.
    #[error("there is no {0}")]
    Absent(String),
    /// An object does not have the required type.
    #[error("{0}")]
    Kind(String),
    /// An item contradicts other items.
    #[error("{what} contradicts itself: {why}")]
    Contradiction {
        /// The item.
        what: String,
        /// The contradiction.
        why: String,
    },
    /// A sector of a file that should have a checksum has none.
    #[error("the sector at the logical address {logical} has no checksum")]
    NoSum {
        /// Its logical address.
        logical: u64,
    },
    /// The checksums of data cannot be read, so the data cannot be checked.
    #[error("the checksums of the data at the logical address {logical} cannot be read: {why}")]
    SumsLost {
        /// The first address of the data.
        logical: u64,
        /// The reason.
        why: Box<FsError>,
    },
    /// A compressed extent cannot be decompressed, although its checksum may match.
    #[error("the extent at the logical address {logical}: {why}")]
    Compressed {
        /// Its logical address; 0 for an inline extent.
        logical: u64,
        /// The reason.
        why: CompressError,
    },
}

impl FsError {
    /// True if the filesystem is damaged; false if an object does not exist or is not supported.
    pub fn is_damage(&self) -> bool {
        match self {
            FsError::Lost(_)
            | FsError::Map(_)
            | FsError::KeyOrder { .. }
            | FsError::Contradiction { .. }
            | FsError::NoSum { .. }
            | FsError::SumsLost { .. }
            | FsError::Compressed { .. } => true,
            FsError::NoSuperblock { .. }
            | FsError::Devices(_)
            | FsError::Unsupported(_)
            | FsError::NotReadable(_)
            | FsError::NotWritable(_)
            | FsError::WriteFailed(_)
            | FsError::Absent(_)
            | FsError::Kind(_) => false,
        }
    }
}
