//! The report of a verification: damage, unchecked data, and how much was checked.
//!
//! Invariants:
//! - All damage is counted, and the first [`VerifyOptions::most_listed`](super::VerifyOptions) findings are listed.
//! - Data that could not be checked are not damage, but they never count as clean.

use std::collections::BTreeMap;
use std::fmt;

use sealblock_btrfs_format::Key;
use sealblock_btrfs_format::checker::Expected;

use crate::chunk_map::{MapError, Place};
use crate::error::{BadCopy, CopyFault, FsError, Lost};
use crate::filesystem::ShortDevice;
use crate::parity::Role;
use crate::tags::WrittenIn;

/// The maximum number of files that are listed for one finding.
pub const MAX_FILES_LISTED: usize = 100;

/// A part of a file that uses damaged data.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FileUse {
    /// The subvolume; 1 for a space cache, which is a file of the root tree.
    pub subvolume: u64,
    /// The subvolume's path from the top of the first subvolume; `None` if it cannot be found.
    pub subvolume_path: Option<Vec<u8>>,
    /// The inode.
    pub ino: u64,
    /// The first affected byte of the file.
    pub offset: u64,
    /// The number of bytes; for a compressed extent, everything that the file uses of it.
    pub bytes: u64,
    /// Every path of the inode from the top of the subvolume; empty if none can be found.
    pub paths: Vec<Vec<u8>>,
}

/// The files that use damaged data.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Uses {
    /// The first [`MAX_FILES_LISTED`].
    pub files: Vec<FileUse>,
    /// The number of further files.
    pub more: u64,
}

/// A node without a good copy.
#[derive(Clone, Debug)]
pub struct LostNode {
    /// The trees that contain it, including those that share it.
    pub trees: Vec<u64>,
    /// Its level: 0 for a leaf.
    pub level: u8,
    /// The first key that can no longer be reached; `None` for the root node, with which the whole tree is lost.
    pub from: Option<Key>,
    /// The first key after the lost ones that can be reached.
    pub before: Option<Key>,
    /// The fault of each copy.
    pub lost: Lost,
}

/// The fault of data.
#[derive(Clone, Debug)]
pub enum DataFault {
    /// A copy does not match its checksum or its tags, or cannot be read.
    Copy {
        /// The copy.
        copy: BadCopy,
        /// True if the data cannot be restored from another copy or parity either.
        is_lost: bool,
        /// When data without a checksum were written, if tags can show it.
        written: Option<WrittenIn>,
    },
    /// A file uses them, but they lack the checksums that they should have.
    NoSum,
    /// Their checksums are lost, so no copy of them can be used.
    SumsLost,
    /// They are outside all chunks.
    Unmapped(MapError),
    /// Copies of data without checksums differ, and nothing shows which one is right. Contains the number, from 1, and
    /// the place of each compared copy. Copies that were checked against protection information, or that could not be
    /// read, are not included.
    CopiesDiffer(Vec<(usize, Place)>),
}

/// Damaged data.
#[derive(Clone, Debug)]
pub struct BadData {
    /// Their logical address.
    pub logical: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The fault.
    pub fault: DataFault,
    /// The files that use them.
    pub uses: Uses,
}

/// Data that a device found intact, and of which no tag shows that they were written last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unattested {
    /// Their logical address.
    pub logical: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The files that use them.
    pub uses: Uses,
}

/// A finding.
#[derive(Clone, Debug)]
pub enum Finding {
    /// A copy of a superblock, or a whole device that missed transactions.
    Superblock(BadCopy),
    /// A device that is too small.
    ShortDevice(ShortDevice),
    /// A copy of a node whose other copy or parity is good.
    Node {
        /// The first tree in which it was found.
        tree: u64,
        /// Its level, if it was read as a part of a tree.
        level: Option<u8>,
        /// The copy.
        copy: BadCopy,
        /// What its parent says of it, if it was read as a part of a tree.
        expected: Option<Expected>,
    },
    /// A node that is lost.
    LostNode(Box<LostNode>),
    /// A tree that contradicts itself.
    Tree {
        /// The tree.
        tree: u64,
        /// The contradiction.
        error: FsError,
    },
    /// Data.
    Data(Box<BadData>),
    /// Parity that does not match the good data of its row.
    Parity {
        /// The logical address of the row's first byte.
        logical: u64,
        /// P or Q.
        role: Role,
        /// Its place.
        place: Place,
        /// The number of bytes.
        bytes: u64,
        /// The error if it could not be read.
        fault: Option<CopyFault>,
    },
}

impl Finding {
    /// The sort key of findings: superblocks, then nodes and trees, then data by address, then parity.
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
            DataFault::Copy { copy, is_lost: false, .. } => write!(f, ": {copy}"),
            DataFault::Copy { copy, is_lost: true, .. } => write!(f, ": {copy}; no other copy is good"),
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

/// Why data were not checked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum WhyUnchecked {
    /// A device is missing.
    MissingDevice,
    /// A device can no longer be reached.
    Unreachable,
    /// Data without a checksum on a device that missed transactions.
    StaleDevice,
    /// Data without a checksum, on a device without protection information. They could be read.
    NoChecksum,
    /// Data without a checksum that the device found intact. Nothing shows that they are those that were written last:
    /// another program wrote them, or they were written in place and have no tag.
    Unattested,
    /// Nodes without checksums, on a device that does not have the tags of its blocks. They could be read.
    NodeTags,
    /// Data whose checksums are lost.
    ChecksumsLost,
    /// Data of a lost inode, of which it is unknown whether they should have checksums.
    InodeLost,
    /// A device that consists of several copies did not check all of them.
    CopiesBelow,
    /// Parity of a row of which a piece is damaged or missing.
    Parity,
    /// The log of syncs after the last transaction, which is not checked.
    LogTree,
    /// Trees of an interrupted balance, which are not checked.
    Relocation,
    /// More nodes than the limit.
    TooManyNodes,
    /// More scattered ranges than the limit.
    TooManyRanges,
    /// The verification was stopped.
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
            WhyUnchecked::Unattested => "unattested",
            WhyUnchecked::NodeTags => "node_tags",
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
            WhyUnchecked::Unattested => {
                "the data have no checksum; their seals are good, and no tag shows that they are what was written last"
            }
            WhyUnchecked::NodeTags => {
                "nodes have no checksums, and a device lacks the tags that show whether they are good; they can be read"
            }
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

/// The verdict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Every copy of everything in use was checked against a checksum or tags, and all are good.
    Clean,
    /// What was checked is not damaged, but not everything was checked.
    Incomplete,
    /// Damage was found.
    Damaged,
}

/// The outcome of a verification.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Nodes that were checked, each counted once.
    pub nodes_verified: u64,
    /// Bytes that were checked, counting each copy: of nodes, data and parity.
    pub bytes_verified: u64,
    /// Bytes that were transferred from devices to this host.
    pub bytes_transferred: u64,
    /// True if devices computed checksums of data.
    pub is_offloaded: bool,
    /// Data that are unattested ([`WhyUnchecked::Unattested`]) and the files that use them, up to the limit of listed
    /// findings. A device that verifies a range says only that some of it is.
    pub unattested: Vec<Unattested>,
    /// True if more data than those are unattested.
    pub has_more_unattested: bool,
    /// The findings, up to the limit of listed ones.
    pub findings: Vec<Finding>,
    /// The number of findings, listed or not.
    pub damage_count: u64,
    /// Unchecked bytes by reason, as far as known.
    pub unchecked: BTreeMap<WhyUnchecked, u64>,
}

impl Report {
    /// The verdict.
    pub fn verdict(&self) -> Verdict {
        match (self.damage_count, self.unchecked.is_empty()) {
            (0, true) => Verdict::Clean,
            (0, false) => Verdict::Incomplete,
            _ => Verdict::Damaged,
        }
    }
}
