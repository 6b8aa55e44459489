//! Why devices are refused: as a mirror when it is opened, and as replicas when a mirror is created or changed.

use sealblock_block::Error;
use sealblock_integrity::PiFormat;
use sealblock_units::BlockSize;

use crate::label::assemble::AssembleError;
use crate::label::regions::MAX_BLOCKS;
use crate::label::{LabelError, MAX_REPLICAS};

/// Why devices cannot be opened as a mirror.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MirrorError {
    /// There are too few or too many of them.
    #[error("a mirror has 2 to {MAX_REPLICAS} replicas, not {0}")]
    ReplicaCount(usize),
    /// They do not make a mirror.
    #[error("{error} ({})", .replicas.join(", "))]
    Assemble {
        /// Why.
        error: AssembleError,
        /// Names of the replicas in question.
        replicas: Vec<String>,
    },
    /// The label of a replica is invalid.
    #[error("{replica}: {error}")]
    Label {
        /// Name of the replica.
        replica: String,
        /// Why.
        error: LabelError,
    },
    /// A replica failed a request while it was probed.
    #[error("{replica}: {error}")]
    Replica {
        /// Name of the replica.
        replica: String,
        /// Why.
        error: Error,
    },
    /// The labels of a new mirror cannot be written.
    #[error("cannot write mirror labels: {0}")]
    WriteLabels(Error),
    /// A replica has another block size than the mirror.
    #[error("{replica} has blocks of {actual} bytes, the mirror of {expected}")]
    BlockSize {
        /// Name of the replica.
        replica: String,
        /// Block size of the mirror.
        expected: BlockSize,
        /// Block size of the replica.
        actual: BlockSize,
    },
    /// There are more blocks than regions can track.
    #[error(
        "a mirror cannot have {blocks} blocks: its replicas have room to track fewer, and the maximum is {MAX_BLOCKS}"
    )]
    Capacity {
        /// Blocks of the mirror.
        blocks: u64,
    },
    /// The reserved area of a replica has too few bitmap pages for the mirror.
    #[error("{replica} has room for {actual} bitmap pages, the mirror needs {expected}")]
    Pages {
        /// Name of the replica.
        replica: String,
        /// Pages that the mirror needs.
        expected: u32,
        /// Pages of the replica.
        actual: u32,
    },
    /// A replica is smaller than the mirror, or of another size than the other replicas of a new one.
    #[error("{replica} has {actual} blocks, the mirror {expected}")]
    Size {
        /// Name of the replica.
        replica: String,
        /// Blocks of the mirror.
        expected: u64,
        /// Blocks of the replica.
        actual: u64,
    },
    /// A replica has another format of protection information than the mirror. Otherwise data without tags could be
    /// sealed unchecked.
    #[error("{replica} has {}, the mirror has {}", pi_to_text(*.actual), pi_to_text(*.expected))]
    Protection {
        /// Name of the replica.
        replica: String,
        /// Format of the mirror.
        expected: Option<PiFormat>,
        /// Format of the replica.
        actual: Option<PiFormat>,
    },
}

/// A format of protection information for people.
fn pi_to_text(format: Option<PiFormat>) -> String {
    format.map_or("no protection information".to_owned(), |format| {
        let (guard, kind, bits) = (format.guard(), format.protection() as u8 + 1, format.storage_tag_bits());
        format!("protection information {guard} Type {kind} with {bits} bits of storage tag")
    })
}

/// The replicas that would be left.
fn left_text(left: &[String]) -> String {
    if left.is_empty() {
        String::new()
    } else {
        format!(", and what would be left is no full copy: {}", left.join(", "))
    }
}

/// Why the replicas of a mirror cannot be changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReplicaError {
    /// The mirror has [`MAX_REPLICAS`] replicas.
    #[error("the mirror has {MAX_REPLICAS} replicas already")]
    Full,
    /// The mirror is open for reading only.
    #[error("the mirror is open for reading only")]
    ReadOnly,
    /// The device is offline.
    #[error("{replica} is offline: {reason}")]
    Offline {
        /// Its name.
        replica: String,
        /// Why.
        reason: String,
    },
    /// The replica is online and out of sync.
    #[error("{0} is out of sync: its resync decides which older copies are kept")]
    OutOfSync(String),
    /// The device has a label that is damaged or of another kind, so its group is unknown.
    #[error("{replica} is a device whose label cannot be used: {reason}")]
    BadLabel {
        /// Its name.
        replica: String,
        /// Why.
        reason: LabelError,
    },
    /// The content of the device cannot be used.
    #[error("{replica} cannot be what the others are made equal to: {reason}")]
    Unusable {
        /// Its name.
        replica: String,
        /// Why.
        reason: String,
    },
    /// The device has the label of a mirror, or of another group.
    #[error("{replica} is {what}")]
    Labelled {
        /// Its name.
        replica: String,
        /// What it is, by its label.
        what: String,
    },
    /// Devices for a new mirror are replicas of mirrors.
    #[error("{what}")]
    Replicas {
        /// What they are, by their labels.
        what: String,
    },
    /// The device would be overwritten, and by its label no other has its content.
    #[error("{replica} may hold the only good copy: it is {what}")]
    OnlyCopy {
        /// Its name.
        replica: String,
        /// What it is, by its label.
        what: String,
    },
    /// The device is in use in this mirror.
    #[error("{replica} is a replica of this mirror")]
    InUse {
        /// Its name.
        replica: String,
    },
    /// The device is not blank.
    #[error("{replica} holds data that would be replaced")]
    NotBlank {
        /// Its name.
        replica: String,
    },
    /// Several devices for a new mirror hold data.
    #[error("several devices hold data ({replicas}), and nothing says whose counts")]
    AmbiguousSource {
        /// Their names.
        replicas: String,
    },
    /// The replica with the content has no room for a label.
    #[error("{0} has no room for a label")]
    NoRoom(String),
    /// The device does not fit the mirror.
    #[error(transparent)]
    Unfit(#[from] MirrorError),
    /// No replica has this name.
    #[error("the mirror has no replica {0}")]
    Unknown(String),
    /// The replica is offline since the open, and nothing distinguishes it from other offline ones.
    #[error("{replica} is offline, as is {others}, and without their labels nothing tells which is which")]
    Ambiguous {
        /// Its name.
        replica: String,
        /// Names of the others.
        others: String,
    },
    /// It is the last in-sync replica.
    #[error("{replica} is the last in-sync replica{}", left_text(.left))]
    LastInSync {
        /// Its name.
        replica: String,
        /// The replicas that would be left, each with the reason why it is no full copy.
        left: Vec<String>,
    },
    /// The stale copies cannot be written to the other replicas.
    #[error("cannot write the stale copies: {0}")]
    WriteBlocks(Error),
    /// The labels cannot be written.
    #[error("cannot write mirror labels: {0}")]
    WriteLabels(Error),
}
