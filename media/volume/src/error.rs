//! Why a volume cannot be created or opened.

use sealblock_block::MediumError;

use crate::format::{LayoutError, SuperblockError};

/// Why a volume cannot be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// Neither superblock can be used.
    #[error("{0}")]
    Superblock(#[from] SuperblockError),
    /// The shape asked for is impossible.
    #[error("{0}")]
    Layout(#[from] LayoutError),
    /// The medium failed.
    #[error("the medium failed: {0}")]
    Medium(#[from] MediumError),
    /// The medium ends before the volume does.
    #[error(
        "the medium has {medium_bytes} bytes and the volume needs {needed_bytes}: it was cut off or copied in part"
    )]
    Truncated {
        /// Length of the medium.
        medium_bytes: u64,
        /// Length the volume needs.
        needed_bytes: u64,
    },
    /// The volume was made for smaller sectors than the medium has.
    #[error(
        "the volume was made for sectors of {volume_bytes} bytes and the medium has sectors of {medium_bytes}: copy it to a new volume"
    )]
    Sector {
        /// The volume's sector.
        volume_bytes: u32,
        /// The medium's sector.
        medium_bytes: u32,
    },
    /// The medium takes no writes, and the volume was to be opened for writing.
    #[error("the medium is read-only")]
    ReadOnly,
    /// Every copy of log sectors that were once durable is lost, which takes two faults: which blocks they were about is not
    /// known, so the volume is not opened for writing.
    #[error(
        "{sectors} sectors of the log are lost in every copy, from number {sequence} on: blocks written shortly before the last crash may read as older content, and which ones is not known; nothing is written to such a volume"
    )]
    LogDamaged {
        /// Sequence number of the first lost sector.
        sequence: u64,
        /// How many are lost.
        sectors: u64,
    },
    /// What a crash left could not be made durable.
    #[error("recovery could not be finished: {0}")]
    Recovery(String),
}
