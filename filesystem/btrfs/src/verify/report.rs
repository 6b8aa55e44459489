//! What a verification found: what is damaged, what could not be checked, and how much was checked.
//!
//! Invariants:
//! - Everything that is damaged counts, and the first [`VerifyOptions::most_listed`](super::VerifyOptions) of it are listed.
//! - What could not be checked is no damage, and what was not checked is never called clean.

use std::collections::BTreeMap;
use std::fmt;

use sealblock_btrfs_format::Key;

use crate::chunk_map::{MapError, Place};
use crate::error::{BadCopy, CopyFault, FsError, Lost};
use crate::filesystem::ShortDevice;
use crate::parity::Role;

/// The most files that are listed for one damaged place.
pub const MAX_FILES_LISTED: usize = 100;

/// A part of a file that something damaged is used for.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FileUse {
    /// The subvolume; 1 for a space cache, which is a file of the tree of trees.
    pub subvolume: u64,
    /// Where that lies, from the top of the first subvolume on; none where it cannot be found.
    pub subvolume_path: Option<Vec<u8>>,
    /// The inode.
    pub ino: u64,
    /// The first byte of the file that is concerned.
    pub offset: u64,
    /// How many bytes: of a compressed extent all that the file has of it.
    pub bytes: u64,
    /// Every path of the inode from the top of the subvolume on; empty where none can be found.
    pub paths: Vec<Vec<u8>>,
}

/// Files that something is used for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Uses {
    /// The first [`MAX_FILES_LISTED`].
    pub files: Vec<FileUse>,
    /// How many more there are.
    pub more: u64,
}

/// A node of which no copy can be had.
#[derive(Clone, Debug)]
pub struct LostNode {
    /// The trees that it is of, those that share it too.
    pub trees: Vec<u64>,
    /// Its level: 0 for a leaf.
    pub level: u8,
    /// The first key that can no longer be reached; none for the root node of a tree, all of which is lost.
    pub from: Option<Key>,
    /// The first key behind it that can be reached.
    pub before: Option<Key>,
    /// What is wrong with each copy.
    pub lost: Lost,
}

/// What is wrong with data.
#[derive(Clone, Debug)]
pub enum DataFault {
    /// A copy is not what its checksum says, or cannot be read.
    Copy {
        /// The copy.
        copy: BadCopy,
        /// True if the data cannot be had from anywhere else either.
        is_lost: bool,
    },
    /// A file uses them that should have checksums, and they have none.
    NoSum,
    /// Their checksums are lost, so they cannot be read from any copy.
    SumsLost,
    /// They are in no chunk.
    Unmapped(MapError),
    /// Copies of data without checksums are not the same, and nothing says which one is right. Each is named by its number, counted
    /// from 1, and its place; copies that were checked by seals, or could not be read, are not among them.
    CopiesDiffer(Vec<(usize, Place)>),
}

/// Damaged data.
#[derive(Clone, Debug)]
pub struct BadData {
    /// Their logical address.
    pub logical: u64,
    /// How many bytes.
    pub bytes: u64,
    /// What is wrong.
    pub fault: DataFault,
    /// The files that use them.
    pub uses: Uses,
}

/// Something that is damaged.
#[derive(Clone, Debug)]
pub enum Finding {
    /// A copy of a superblock, or all of a device that missed transactions.
    Superblock(BadCopy),
    /// A device that ends before it should.
    ShortDevice(ShortDevice),
    /// A copy of a node of which another copy, or its parity, is good.
    Node {
        /// The tree by which it was reached first.
        tree: u64,
        /// Its level, where it was read as a part of a tree that is checked.
        level: Option<u8>,
        /// The copy.
        copy: BadCopy,
    },
    /// A node that is lost.
    LostNode(Box<LostNode>),
    /// A tree that contradicts itself.
    Tree {
        /// The tree.
        tree: u64,
        /// How.
        error: FsError,
    },
    /// Data.
    Data(Box<BadData>),
    /// Parity that does not fit the data of its row, which are good.
    Parity {
        /// The logical address of the row's first byte.
        logical: u64,
        /// Which of the two.
        role: Role,
        /// Where it is.
        place: Place,
        /// How many bytes.
        bytes: u64,
        /// Why it could not be read, if that is it.
        fault: Option<CopyFault>,
    },
}

impl Finding {
    /// What findings are sorted by: superblocks, then nodes and trees, then data by their addresses, then parity.
    pub(super) fn order(&self) -> (u8, u64, usize, u64) {
        match self {
            Finding::Superblock(copy) => (0, copy.place.devid, copy.mirror, copy.place.offset),
            Finding::ShortDevice(device) => (0, device.devid, 0, 0),
            Finding::Node { tree, copy, .. } => (1, copy.logical.unwrap_or_default(), copy.mirror, *tree),
            Finding::LostNode(node) => (1, node.lost.logical, 0, 0),
            Finding::Tree { tree, .. } => (2, *tree, 0, 0),
            Finding::Data(data) => match &data.fault {
                DataFault::Copy { copy, .. } => (3, data.logical, copy.mirror, copy.place.offset),
                DataFault::NoSum | DataFault::SumsLost | DataFault::Unmapped(_) | DataFault::CopiesDiffer(_) => {
                    (3, data.logical, 0, 0)
                }
            },
            Finding::Parity { logical, role, place, .. } => (4, *logical, usize::from(*role == Role::Q), place.offset),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Superblock(copy) => write!(f, "superblock: {copy}"),
            Finding::ShortDevice(device) => device.fmt(f),
            Finding::Node { tree, copy, .. } => {
                write!(f, "node {} of tree {tree}: {copy}", copy.logical.unwrap_or_default())
            }
            Finding::LostNode(node) => {
                write!(f, "a node of tree {} is lost", list(&node.trees))?;
                match (node.from, node.before) {
                    (None, _) => write!(f, ", and with it all of the tree")?,
                    (Some(from), None) => write!(f, ", and with it all keys from {from} on")?,
                    (Some(from), Some(before)) => write!(f, ", and with it the keys from {from} up to {before}")?,
                }
                write!(f, ": {}", node.lost)
            }
            Finding::Tree { tree, error } => write!(f, "tree {tree}: {error}"),
            Finding::Data(data) => data.fmt(f),
            Finding::Parity { logical, role, place, bytes, fault } => {
                let Place { devid, offset } = place;
                write!(
                    f,
                    "parity {role:?} of the row at the logical address {logical}, {bytes} bytes on device {devid} at byte {offset}: "
                )?;
                match fault {
                    Some(fault) => write!(f, "{fault}"),
                    None => write!(f, "it does not fit the data of the row"),
                }
            }
        }
    }
}

impl fmt::Display for BadData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of data at the logical address {}", self.bytes, self.logical)?;
        match &self.fault {
            DataFault::Copy { copy, is_lost: false } => write!(f, ": {copy}"),
            DataFault::Copy { copy, is_lost: true } => write!(f, ": {copy}; no other copy is good"),
            DataFault::NoSum => write!(f, " have no checksum, and a file that should have one uses them"),
            DataFault::SumsLost => write!(f, ": their checksums are lost"),
            DataFault::Unmapped(why) => write!(f, ": {why}"),
            DataFault::CopiesDiffer(copies) => {
                write!(f, " have no checksum, and their copies differ")?;
                let mut signs = [": "].into_iter().chain(std::iter::repeat(", "));
                copies.iter().try_for_each(|(mirror, Place { devid, offset })| {
                    let sign = signs.next().unwrap_or_default();
                    write!(f, "{sign}copy {mirror} on device {devid} at byte {offset}")
                })
            }
        }
    }
}

fn list(trees: &[u64]) -> String {
    trees.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

/// Why something was not checked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum WhyUnchecked {
    /// A device is missing.
    MissingDevice,
    /// A device can no longer be reached.
    Unreachable,
    /// Data without a checksum on a device that missed transactions.
    StaleDevice,
    /// Data that have no checksum, on a device that has no seals. They could be read.
    NoChecksum,
    /// Data whose checksums are lost.
    ChecksumsLost,
    /// Data of an inode that is lost, so it is unknown whether they should have checksums.
    InodeLost,
    /// A device that holds copies of its own did not check all of them.
    CopiesBelow,
    /// Parity of a row of which a piece is damaged or missing.
    Parity,
    /// The log of what was synced after the last transaction, which is left aside.
    LogTree,
    /// Trees of an interrupted balance, which are left aside.
    Relocation,
    /// More nodes than are remembered.
    TooManyNodes,
    /// More scattered ranges than are remembered.
    TooManyRanges,
    /// It was stopped before it came to an end.
    Stopped,
}

impl WhyUnchecked {
    /// The name in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            WhyUnchecked::MissingDevice => "missing_device",
            WhyUnchecked::Unreachable => "unreachable",
            WhyUnchecked::StaleDevice => "stale_device",
            WhyUnchecked::NoChecksum => "no_checksum",
            WhyUnchecked::ChecksumsLost => "checksums_lost",
            WhyUnchecked::InodeLost => "inode_lost",
            WhyUnchecked::CopiesBelow => "copies_below",
            WhyUnchecked::Parity => "parity",
            WhyUnchecked::LogTree => "log_tree",
            WhyUnchecked::Relocation => "relocation",
            WhyUnchecked::TooManyNodes => "too_many_nodes",
            WhyUnchecked::TooManyRanges => "too_many_ranges",
            WhyUnchecked::Stopped => "stopped",
        }
    }
}

impl fmt::Display for WhyUnchecked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhyUnchecked::MissingDevice => "a device is missing",
            WhyUnchecked::Unreachable => "a device can no longer be reached",
            WhyUnchecked::StaleDevice => "a device missed transactions, and the data have no checksum",
            WhyUnchecked::NoChecksum => "the data have no checksum, and the device has no seals; they can be read",
            WhyUnchecked::ChecksumsLost => "the checksums of the data are lost",
            WhyUnchecked::InodeLost => "the inode is lost, so whether its data should have checksums is unknown",
            WhyUnchecked::CopiesBelow => "a device holds copies of its own and did not check all of them",
            WhyUnchecked::Parity => "parity of rows of which a piece is damaged or missing",
            WhyUnchecked::LogTree => {
                "there is a log of what was synced after the last transaction, and it is left aside"
            }
            WhyUnchecked::Relocation => "a balance was interrupted, and its trees are left aside",
            WhyUnchecked::TooManyNodes => "there are more nodes than are remembered",
            WhyUnchecked::TooManyRanges => "there are more scattered extents than are remembered",
            WhyUnchecked::Stopped => "it was stopped",
        })
    }
}

/// What can be said in the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Every copy of everything that is in use was checked against a checksum or a seal, and all of them are good.
    Clean,
    /// Nothing is damaged as far as it was checked.
    Incomplete,
    /// Something is damaged.
    Damaged,
}

/// The outcome of a verification.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Nodes that were checked, each once, whatever number of copies it has.
    pub nodes_verified: u64,
    /// Bytes that were checked, each copy counted: of nodes, of data, of parity.
    pub bytes_verified: u64,
    /// Bytes that crossed from devices to this host.
    pub bytes_transferred: u64,
    /// True if devices computed checksums of data where these are.
    pub is_offloaded: bool,
    /// What is damaged; the rest of more than are listed only counts.
    pub findings: Vec<Finding>,
    /// How much is damaged, listed or not.
    pub damage_count: u64,
    /// Why something was not checked, and how many bytes of it, as far as that is known.
    pub unchecked: BTreeMap<WhyUnchecked, u64>,
}

impl Report {
    /// What can be said.
    pub fn verdict(&self) -> Verdict {
        match (self.damage_count, self.unchecked.is_empty()) {
            (0, true) => Verdict::Clean,
            (0, false) => Verdict::Incomplete,
            _ => Verdict::Damaged,
        }
    }
}
