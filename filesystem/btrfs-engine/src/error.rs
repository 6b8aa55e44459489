//! Why the open transaction is not changed.
//!
//! Each part has its own errors; here they are one. A node that is not in memory is the same error from wherever it comes,
//! [`ChangeError::Need`], because it is no failure: whoever runs the change reads the node and begins again.

use sealblock_btrfs_format::checker::Expected;
use sealblock_btrfs_format::key::Key;

use crate::csums::CsumError;
use crate::file_map::FileMapError;
use crate::plan::PlanError;
use crate::refs::RefsError;
use crate::space::SpaceError;
use crate::tree::TreeError;

/// Why a change was not made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChangeError {
    /// A tree cannot be read or changed.
    #[error(transparent)]
    Tree(TreeError),
    /// References cannot be counted.
    #[error(transparent)]
    Refs(RefsError),
    /// Space cannot be allocated or freed.
    #[error(transparent)]
    Space(SpaceError),
    /// Checksums cannot be read or changed.
    #[error(transparent)]
    Csums(CsumError),
    /// The data of a file cannot be changed.
    #[error(transparent)]
    File(FileMapError),
    /// A node is not in memory.
    #[error("node {} is not in memory", .0.bytenr)]
    Need(Expected),
    /// There is no tree with this number.
    #[error("there is no tree {0}")]
    NoTree(u64),
    /// A snapshot is changed in the transaction that made it. Linux makes snapshots at the end of a transaction, and takes
    /// all nodes of that transaction for nodes of the source when it deletes one.
    #[error("snapshot {0} is to be committed before it is changed")]
    NewSnapshot(u64),
    /// An item cannot be read.
    #[error("{0} is damaged")]
    Item(Key),
    /// A subvolume cannot be made or deleted.
    #[error(transparent)]
    Subvolume(#[from] SubvolumeError),
    /// An operation on files is refused.
    #[error(transparent)]
    Plan(PlanError),
}

impl From<TreeError> for ChangeError {
    fn from(error: TreeError) -> ChangeError {
        match error {
            TreeError::Need(expected) => ChangeError::Need(expected),
            error => ChangeError::Tree(error),
        }
    }
}

impl From<RefsError> for ChangeError {
    fn from(error: RefsError) -> ChangeError {
        match error {
            RefsError::Tree(error) => error.into(),
            error => ChangeError::Refs(error),
        }
    }
}

impl From<PlanError> for ChangeError {
    fn from(error: PlanError) -> ChangeError {
        match error {
            PlanError::Tree(error) => error.into(),
            error => ChangeError::Plan(error),
        }
    }
}

impl From<CsumError> for ChangeError {
    fn from(error: CsumError) -> ChangeError {
        match error {
            CsumError::Tree(error) => error.into(),
            error => ChangeError::Csums(error),
        }
    }
}

impl From<FileMapError> for ChangeError {
    fn from(error: FileMapError) -> ChangeError {
        match error {
            FileMapError::Tree(error) => error.into(),
            error => ChangeError::File(error),
        }
    }
}

impl From<SpaceError> for ChangeError {
    fn from(error: SpaceError) -> ChangeError {
        match error {
            SpaceError::Tree(error) => error.into(),
            error => ChangeError::Space(error),
        }
    }
}

/// Why a subvolume is not made, changed or deleted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubvolumeError {
    /// ENOTEMPTY: another subvolume is below it.
    #[error("subvolume {0} is below it")]
    HasSubvolume(u64),
    /// EPERM: it is what is mounted if nothing else is named.
    #[error("it is the default subvolume")]
    IsDefault,
    /// ENOENT: it is nowhere, or is deleted already.
    #[error("there is no subvolume {0}, or it is deleted")]
    Absent(u64),
    /// ENAMETOOLONG: its name.
    #[error("the name is too long")]
    Name,
    /// ENOSPC: no number is left.
    #[error("no number for a subvolume is left")]
    NoNumber,
    /// EROFS: it cannot be changed.
    #[error("subvolume {0} is read-only")]
    ReadOnly(u64),
    /// EXDEV: a file cannot leave its subvolume.
    #[error("the places are in different subvolumes")]
    Crossing,
    /// EINVAL: no subvolume has its place there.
    #[error("not a subvolume")]
    NotASubvolume,
}
