//! A new filesystem: all its nodes and superblocks, laid out in memory.
//!
//! [`format()`] decides everything and does no I/O. It places the first block groups on the devices, packs the items of
//! all trees into nodes, and returns a [`FormattedImage`], which says what is written where, and in which order.
//!
//! Invariants:
//! - The result depends only on the arguments: UUIDs and the time are among them.
//! - Every node and every superblock has passed the checker.
//! - Where a device may have a superblock, there is no node, in any profile and on any device.
//! - Nothing that is not made is ignored: a feature, a profile or a size that is not supported is an error.
//!
//! # Examples
//!
//! ```
//! use sealblock_btrfs_engine::datasum::Datasum;
//! use sealblock_btrfs_engine::format::{DEFAULT_INCOMPAT, FormatOptions, NewDevice, SECTOR_BYTES, Stage, format};
//! use sealblock_btrfs_format::checksum::ChecksumType;
//! use sealblock_btrfs_format::items::chunk::Profile;
//! use sealblock_btrfs_format::items::inode::Timespec;
//!
//! let options = FormatOptions {
//!     label: b"backup".to_vec(),
//!     fsid: [1; 16],
//!     chunk_tree_uuid: [2; 16],
//!     subvolume_uuid: [3; 16],
//!     time: Timespec { seconds: 1_700_000_000.into(), nanoseconds: 0.into() },
//!     sector_bytes: SECTOR_BYTES,
//!     node_bytes: 16 << 10,
//!     checksum: ChecksumType::Crc32c,
//!     data: Profile::Single,
//!     metadata: Profile::Dup,
//!     incompat: DEFAULT_INCOMPAT,
//!     block_group_tree: false,
//!     datasum: Datasum::Csum,
//!     first_transaction: 1,
//!     is_host_sealed: false,
//! };
//! let image = format(&options, &[NewDevice { bytes: 1 << 30, uuid: [4; 16] }])?;
//! for stage in image.stages() {
//!     match stage {
//!         Stage::Erase(ranges) => { /* write zeroes there */ }
//!         Stage::Write(writes) => { /* write the bytes of each */ }
//!     }
//!     // Flush all devices before the next stage.
//! }
//! assert_eq!(image.superblocks.len() + image.mirrors.len(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod image;
mod items;
mod layout;
mod nodes;
mod options;
mod shapes;
#[cfg(test)]
mod tests;

pub use image::{DeviceRange, DeviceWrite, FormattedImage, Stage};
pub use layout::{BlockGroup, minimum_bytes};
pub use options::{
    CHOSEN_INCOMPAT, DEFAULT_INCOMPAT, FormatError, FormatOptions, MAX_FIRST_TRANSACTION, NewDevice, SECTOR_BYTES,
    default_node_bytes, default_profiles,
};

/// Lays out a new filesystem.
///
/// # Errors
/// What cannot be made, and why. Nothing has been written then.
pub fn format(options: &FormatOptions, devices: &[NewDevice]) -> Result<FormattedImage, FormatError> {
    options::check(options, devices)?;
    let layout = layout::Layout::plan(options, devices)?;
    let trees = nodes::settle(options, &layout)?;
    image::assemble(options, &layout, &trees)
}
