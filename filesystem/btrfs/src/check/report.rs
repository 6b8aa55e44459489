//! The report of a check: broken rules, notes, and what was not checked.
//!
//! Invariants:
//! - All findings are counted, and the first [`CheckOptions::most_listed`](super::CheckOptions) are listed.
//! - What could not be checked is not a finding, but it never counts as clean.

use std::collections::BTreeSet;
use std::fmt;

use sealblock_btrfs_format::Key;

/// Declares the rules with the name of each in JSON.
macro_rules! rules {
    ($($(#[doc = $doc:literal])* $rule:ident = $name:literal;)*) => {
        /// A rule that a filesystem breaks.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Rule {
            $($(#[doc = $doc])* $rule,)*
        }

        impl Rule {
            /// All of them.
            pub const ALL: &[Rule] = &[$(Rule::$rule,)*];

            /// The name in JSON.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Rule::$rule => $name,)*
                }
            }
        }
    };
}

rules! {
    /// No copy of a node is good.
    LostNode = "lost_node";
    /// A copy of a node is damaged, and another one is good.
    NodeCopy = "node_copy";
    /// Superblocks, or a device and its superblock, contradict each other.
    Superblock = "superblock";
    /// A tree that every filesystem has is absent.
    NoTree = "no_tree";
    /// A reference to an extent is not in the extent tree.
    ReferenceNotRecorded = "reference_not_recorded";
    /// The extent tree has a reference that nothing makes, or more of them.
    ReferenceNotFound = "reference_not_found";
    /// The count of an extent is not the sum of its references.
    ReferenceCount = "reference_count";
    /// The extent tree has the same reference twice.
    ReferenceTwice = "reference_twice";
    /// A reference is recorded for an extent that has no item.
    ReferenceAlone = "reference_alone";
    /// A node or a file extent is in no extent of the extent tree.
    NoExtent = "no_extent";
    /// Extents overlap.
    ExtentOverlap = "extent_overlap";
    /// An extent has another kind, length or flag than what refers to it.
    ExtentKind = "extent_kind";
    /// The extent tree has another level for a node.
    ExtentLevel = "extent_level";
    /// The extent tree has another generation for a node.
    ExtentGeneration = "extent_generation";
    /// A node is not referred to by its owner, although its children are.
    ExtentOwner = "extent_owner";
    /// A node crosses a border of 64 KiB in its block group.
    NodePlace = "node_place";
    /// An extent is in no block group, or in one for something else.
    ExtentGroup = "extent_group";
    /// A block group has another number of used bytes.
    GroupUsed = "group_used";
    /// A chunk has no block group, or a block group no chunk, or they differ, or a chunk differs from the filesystem.
    GroupChunk = "group_chunk";
    /// The superblock has another number of used bytes.
    BytesUsed = "bytes_used";
    /// A stripe of a chunk has no device extent or no such device, or a device extent no stripe, or they differ.
    DeviceExtent = "device_extent";
    /// Device extents overlap, or end behind their device.
    DeviceOverlap = "device_overlap";
    /// A device has another number of used bytes.
    DeviceUsed = "device_used";
    /// The superblock's array of system chunks differs from the chunk tree.
    SystemChunks = "system_chunks";
    /// The free space tree differs from the extent tree.
    FreeSpace = "free_space";
    /// The number of free runs of a block group is wrong.
    FreeSpaceCount = "free_space_count";
    /// Data that should have checksums have none.
    NoChecksum = "no_checksum";
    /// Checksums of what is no data extent.
    ChecksumAlone = "checksum_alone";
    /// Checksums of data that should have none.
    ChecksumOdd = "checksum_odd";
    /// Items with checksums overlap.
    ChecksumOverlap = "checksum_overlap";
    /// An item of a type that no subvolume has.
    UnknownItem = "unknown_item";
    /// Items of an inode that has no INODE_ITEM.
    NoInode = "no_inode";
    /// Items that the type of the inode does not allow.
    InodeKind = "inode_kind";
    /// The link count of an inode is not the number of its names.
    Links = "links";
    /// An inode without names has no ORPHAN_ITEM.
    NoOrphan = "no_orphan";
    /// The size of a directory is not twice the length of its names.
    DirectorySize = "directory_size";
    /// The bytes of an inode are not those of its extents.
    InodeBytes = "inode_bytes";
    /// Extents of a file overlap.
    FileOverlap = "file_overlap";
    /// A hole of a file has no item, without NO_HOLES.
    FileHole = "file_hole";
    /// A file extent has sizes or forms that are not allowed.
    FileExtent = "file_extent";
    /// A symbolic link is not stored in one plain inline extent of its size.
    Symlink = "symlink";
    /// DIR_ITEM, DIR_INDEX and the names of an inode disagree.
    Name = "name";
    /// The type in a directory entry is not that of the inode.
    NameKind = "name_kind";
    /// The top directory of a subvolume is absent or no directory.
    TopDirectory = "top_directory";
    /// A tree has several ROOT_ITEMs, or one where Linux does not look for it, or the default subvolume has none.
    RootItem = "root_item";
    /// ROOT_ITEM, ROOT_REF, ROOT_BACKREF and directory entries of a subvolume disagree.
    RootRef = "root_ref";
    /// A subvolume that is being deleted has no ORPHAN_ITEM, or an ORPHAN_ITEM no such subvolume.
    RootOrphan = "root_orphan";
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Where a rule is broken, as far as it has such a place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Place {
    /// The tree.
    pub tree: Option<u64>,
    /// The inode of that tree.
    pub ino: Option<u64>,
    /// The key of the item.
    pub key: Option<Key>,
    /// The logical address: of the extent, node, chunk or block group.
    pub logical: Option<u64>,
}

impl Place {
    /// A logical address.
    pub(super) fn at(logical: u64) -> Place {
        Place { logical: Some(logical), ..Place::default() }
    }

    /// An item of a tree.
    pub(super) fn item(tree: u64, key: Key) -> Place {
        Place { tree: Some(tree), key: Some(key), ..Place::default() }
    }

    /// An inode.
    pub(super) fn inode(tree: u64, ino: u64) -> Place {
        Place { tree: Some(tree), ino: Some(ino), ..Place::default() }
    }

    /// A tree.
    pub(super) fn tree(tree: u64) -> Place {
        Place { tree: Some(tree), ..Place::default() }
    }
}

/// A broken rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// Where.
    pub place: Place,
    /// Paths of the inode from the top of its subvolume, if there is one and if they could be found.
    pub paths: Vec<Vec<u8>>,
    /// What is wrong, as a sentence.
    pub why: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { tree, ino, key, logical } = self.place;
        let mut parts = Vec::new();
        parts.extend(tree.map(|tree| format!("tree {tree}")));
        parts.extend(ino.map(|ino| format!("inode {ino}")));
        for path in &self.paths {
            let path = String::from_utf8_lossy(path);
            parts.push(
                path.chars()
                    .flat_map(|one| if one.is_control() { one.escape_default().collect() } else { vec![one] })
                    .collect(),
            );
        }
        parts.extend(key.map(|key| key.to_string()));
        parts.extend(logical.map(|logical| format!("logical address {logical}")));
        if parts.is_empty() { f.write_str(&self.why) } else { write!(f, "{}: {}", parts.join(", "), self.why) }
    }
}

/// Why something was not checked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum WhyNotChecked {
    /// A device is missing, or no longer responds.
    MissingDevice,
    /// A device missed transactions: its copies of nodes are not those that others have.
    StaleDevice,
    /// Whether nodes are those that were written: they have no checksums, and a device lacks their tags.
    NodeTags,
    /// A seed device, which is not read together with what grew from it.
    SeedDevice,
    /// The log of syncs after the last transaction.
    LogTree,
    /// References from nodes that are lost.
    LostNodes,
    /// The extent tree has lost nodes, or is absent.
    ExtentTree,
    /// Names and inodes of subvolumes with lost nodes.
    LostInodes,
    /// More extents or references than the limit.
    TooManyExtents,
    /// More shared nodes than the limit.
    TooManyShared,
    /// More scattered ranges of data than the limit.
    TooManyRanges,
    /// More names, orphans or roots than the limit.
    TooManyNames,
    /// The check was stopped.
    Stopped,
}

impl WhyNotChecked {
    /// The name in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            WhyNotChecked::MissingDevice => "missing_device",
            WhyNotChecked::StaleDevice => "stale_device",
            WhyNotChecked::NodeTags => "node_tags",
            WhyNotChecked::SeedDevice => "seed_device",
            WhyNotChecked::LogTree => "log_tree",
            WhyNotChecked::LostNodes => "lost_nodes",
            WhyNotChecked::ExtentTree => "extent_tree",
            WhyNotChecked::LostInodes => "lost_inodes",
            WhyNotChecked::TooManyExtents => "too_many_extents",
            WhyNotChecked::TooManyShared => "too_many_shared",
            WhyNotChecked::TooManyRanges => "too_many_ranges",
            WhyNotChecked::TooManyNames => "too_many_names",
            WhyNotChecked::Stopped => "stopped",
        }
    }
}

impl fmt::Display for WhyNotChecked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhyNotChecked::MissingDevice => "a device is missing or does not respond",
            WhyNotChecked::StaleDevice => {
                "a device that missed transactions: `sealblock fs verify` counts what it lacks"
            }
            WhyNotChecked::NodeTags => {
                "whether nodes are good: they have no checksums, and a device lacks the tags that show it"
            }
            WhyNotChecked::SeedDevice => "a seed device, which is not read together with what grew from it",
            WhyNotChecked::LogTree => "the log of syncs after the last transaction",
            WhyNotChecked::LostNodes => "recorded references that nothing makes: lost nodes may make them",
            WhyNotChecked::ExtentTree => "references, block groups and free space: nodes of the extent tree are lost",
            WhyNotChecked::LostInodes => "names, and inodes next to lost nodes",
            WhyNotChecked::TooManyExtents => "references: there are more extents than the limit",
            WhyNotChecked::TooManyShared => "names, and some inodes: there are more shared nodes than the limit",
            WhyNotChecked::TooManyRanges => "checksums: there are more scattered ranges of data than the limit",
            WhyNotChecked::TooManyNames => "some names: there are more than the limit",
            WhyNotChecked::Stopped => "it was stopped",
        })
    }
}

/// The verdict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Everything was checked, and no rule is broken.
    Clean,
    /// No rule is broken in what was checked, but something was not checked.
    Incomplete,
    /// A rule is broken.
    Inconsistent,
}

/// The outcome of a check.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The findings, up to the limit of listed ones.
    pub findings: Vec<Finding>,
    /// The number of findings, listed or not.
    pub finding_count: u64,
    /// What is unusual and breaks no rule.
    pub notes: Vec<String>,
    /// What was not checked.
    pub not_checked: BTreeSet<WhyNotChecked>,
    /// Nodes that were checked, each counted once.
    pub nodes: u64,
    /// Extents in the extent tree.
    pub extents: u64,
    /// References in the extent tree.
    pub references: u64,
    /// Inodes of subvolumes; those that snapshots share are counted once.
    pub inodes: u64,
}

impl Report {
    /// The verdict.
    pub fn verdict(&self) -> Verdict {
        match (self.finding_count, self.not_checked.is_empty()) {
            (0, true) => Verdict::Clean,
            (0, false) => Verdict::Incomplete,
            _ => Verdict::Inconsistent,
        }
    }
}
