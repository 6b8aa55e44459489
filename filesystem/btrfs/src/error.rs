//! Why something of a filesystem cannot be had, and what is wrong with a copy of it.
//!
//! A copy that is not believed is a [`BadCopy`], whether another one was or not. An [`FsError`] is what nothing could be read for: no
//! copy was good, an item is not there, or the filesystem is one that is not read here.

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

/// Why a copy is not believed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CopyFault {
    /// Its device is not there.
    #[error("the device is missing")]
    Missing,
    /// Its device missed transactions, and the data have no checksum by which they could be told from older ones.
    #[error("the device is of an older transaction, and the data have no checksum")]
    Stale,
    /// The device says that it is damaged or cannot be read.
    #[error("{0}")]
    Unreadable(Error),
    /// A place that no device can have: not a multiple of its blocks, or behind all of them.
    #[error("no block of the device begins there")]
    NoBlock,
    /// A node that breaks a rule.
    #[error("{0}")]
    Node(Box<Refusal>),
    /// A node or superblock that passes by itself, and is another one than the copy with this number, which passes too.
    #[error("it is valid, but differs from copy {0}, which is valid, too")]
    Differs(usize),
    /// Data whose checksum is another one.
    #[error("{0}")]
    Checksum(ChecksumMismatch),
    /// Other pieces of the row, from which it is restored, are not there either.
    #[error("{0}")]
    Parity(ParityError),
    /// A superblock of an earlier transaction than another one of its device.
    #[error("it is of transaction {found}, and another copy of {newest}")]
    Old {
        /// Its transaction.
        found: u64,
        /// That of the newest one.
        newest: u64,
    },
    /// A superblock that is not one.
    #[error("{0}")]
    Superblock(SuperblockError),
}

/// A copy that is not believed.
#[derive(Clone, Debug)]
pub struct BadCopy {
    /// The first logical address of it; of a superblock none.
    pub logical: Option<u64>,
    /// Where it is.
    pub place: Place,
    /// Which copy it is, counted from 1. Behind the copies come those that are restored from parity.
    pub mirror: usize,
    /// Why.
    pub fault: CopyFault,
}

impl fmt::Display for BadCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { devid, offset } = self.place;
        write!(f, "copy {} on device {devid} at byte {offset}: {}", self.mirror, self.fault)
    }
}

/// No copy of a range is good.
#[derive(Clone, Debug)]
pub struct Lost {
    /// The first logical address.
    pub logical: u64,
    /// How many bytes from there on.
    pub bytes: u64,
    /// What is wrong with each copy.
    pub copies: Vec<BadCopy>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at the logical address {} are lost", self.bytes, self.logical)?;
        self.copies.iter().try_for_each(|copy| write!(f, "; {copy}"))
    }
}

/// A call of this crate: one box, so that its body is compiled here and not with every caller.
pub type FsFuture<'a, T> = LocalBoxFuture<'a, Result<T, FsError>>;

/// Why something cannot be had.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FsError {
    /// A target without a superblock.
    #[error("{name}: no superblock of Btrfs: {why}")]
    NoSuperblock {
        /// The target.
        name: String,
        /// What is where the first one would be.
        why: CopyFault,
    },
    /// Targets that do not belong together, or do not suffice.
    #[error("{0}")]
    Devices(String),
    /// Features that are not read here.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// Something else about the filesystem that is not read here.
    #[error("it is not read here: {0}")]
    NotReadable(&'static str),
    /// No copy is good.
    #[error("{0}")]
    Lost(Box<Lost>),
    /// A logical address that no chunk has.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A node whose keys do not lie between those of its neighbours.
    #[error("the node at {bytenr} has the key {key}, which belongs behind it, at {before} or later")]
    KeyOrder {
        /// Its logical address.
        bytenr: u64,
        /// Its last key.
        key: Key,
        /// The first key of what follows it.
        before: Key,
    },
    /// Something that others refer to is not there.
    #[error("there is no {0}")]
    Absent(String),
    /// Something is not of the kind that it would have to be.
    #[error("{0}")]
    Kind(String),
    /// An item contradicts what others say.
    #[error("{what} contradicts itself: {why}")]
    Contradiction {
        /// What.
        what: String,
        /// How.
        why: String,
    },
    /// A sector of a file that should have a checksum has none.
    #[error("the sector at the logical address {logical} has no checksum")]
    NoSum {
        /// Its logical address.
        logical: u64,
    },
    /// The checksums of data cannot be read, so nothing vouches for what is stored.
    #[error("the checksums of the data at the logical address {logical} cannot be read: {why}")]
    SumsLost {
        /// The first address of the data.
        logical: u64,
        /// Why.
        why: Box<FsError>,
    },
    /// A compressed extent cannot be decompressed, though its checksum may be right.
    #[error("the extent at the logical address {logical}: {why}")]
    Compressed {
        /// Its logical address; 0 for one within an item.
        logical: u64,
        /// Why.
        why: CompressError,
    },
}

impl FsError {
    /// True if the filesystem is damaged, rather than something not being there or not being supported.
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
            | FsError::Absent(_)
            | FsError::Kind(_) => false,
        }
    }
}
