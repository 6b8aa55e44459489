//! What is written of a new filesystem, and in which order.
//!
//! The order makes a crash harmless. An old filesystem is found by its superblocks, so these go first, and nothing else
//! of it is overwritten as long as one of them could be left. Then the starts of the devices are cleared, and nodes are
//! written, which nothing refers to. Superblocks come last: first the further copies, then the first copy, which is the
//! only one that Linux reads, of each device, and of device 1 at the very end. So at any time there is the old
//! filesystem, or none, or the new one with all its nodes. A new filesystem on several devices that lacks the
//! superblocks of some has devices missing; Linux mounts it only if that is asked for.

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::commit_record::CommitRecord;
use sealblock_btrfs_format::items::root::RootNode;
use sealblock_btrfs_format::key::objectid;
use sealblock_btrfs_format::own_windows::OwnWindows;
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, SUPERBLOCK_BYTES, Superblock, copy_offsets};
use sealblock_btrfs_format::superblock_edit::{Commit, Creation, TreeRoots};
use zerocopy::IntoBytes;

use super::items::{bytes_used, device_item};
use super::layout::{BlockGroup, FIRST, Layout, superblock_places};
use super::nodes::SettledTrees;
use super::options::{FormatError, FormatOptions};
use super::shapes::Trees;

/// A range of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceRange {
    /// The device's number.
    pub devid: u64,
    /// The first byte.
    pub offset: u64,
    /// Bytes, at least one sector.
    pub bytes: u64,
}

/// Bytes for a place of a device. Offset and length are multiples of a sector.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceWrite {
    /// The device's number.
    pub devid: u64,
    /// The first byte.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The transaction whose tag the blocks must have, if any: in a filesystem without checksums nothing else shows that they
    /// are good.
    pub tag: Option<u64>,
}

/// A step of writing a filesystem. What a stage writes may be written in any order. It must be durable on all devices
/// before the next stage begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage<'a> {
    /// Zeroes.
    Erase(&'a [DeviceRange]),
    /// Nodes, or superblocks.
    Write(&'a [DeviceWrite]),
}

/// A new filesystem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FormattedImage {
    /// The places of all superblocks, also of an older filesystem. Until these are zeroed and durable on all devices,
    /// nothing else may be changed or discarded.
    pub superblock_places: Vec<DeviceRange>,
    /// The start of each device, which is zeroed next: there may be superblocks of other filesystems.
    pub starts: Vec<DeviceRange>,
    /// All copies of all nodes.
    pub nodes: Vec<DeviceWrite>,
    /// All superblocks but the first ones of the devices.
    pub mirrors: Vec<DeviceWrite>,
    /// The first superblocks: of each device, that of device 1 last.
    pub superblocks: Vec<DeviceWrite>,
    /// Its block groups.
    pub groups: Vec<BlockGroup>,
    /// Bytes of all devices.
    pub total_bytes: u64,
    /// Bytes of all nodes, each counted once.
    pub bytes_used: u64,
}

impl FormattedImage {
    /// What is written, in its order.
    pub fn stages(&self) -> impl Iterator<Item = Stage<'_>> {
        let (others, first) = self.superblocks.split_at(self.superblocks.len().saturating_sub(1));
        let writes = [&self.nodes[..], &self.mirrors, others, first];
        let erased = [&self.superblock_places[..], &self.starts];
        erased.into_iter().map(Stage::Erase).chain(writes.into_iter().map(Stage::Write))
    }
}

/// Puts everything together.
///
/// # Errors
/// If a node or a superblock breaks a rule.
pub(super) fn assemble(
    options: &FormatOptions,
    layout: &Layout,
    settled: &SettledTrees,
) -> Result<FormattedImage, FormatError> {
    let tag = (options.checksum == ChecksumType::None).then_some(options.first_transaction);
    let mut nodes = Vec::new();
    for (address, bytes) in settled.write(options)? {
        let located = layout.map.locate(address, bytes.len() as u64)?;
        if located.bytes != bytes.len() as u64 {
            return Err(FormatError::NoRoom);
        }
        let write = |place: &sealblock_btrfs::chunk_map::Place| DeviceWrite {
            devid: place.devid,
            offset: place.offset,
            bytes: bytes.clone(),
            tag,
        };
        nodes.extend(located.copies.iter().map(write));
    }
    let superblock = superblock(options, layout, &settled.trees)?;
    let (mut mirrors, mut superblocks, mut places) = (Vec::new(), Vec::new(), Vec::new());
    for device in layout.devices.iter().rev() {
        let devid = device.devid;
        let item = device_item(options, device);
        for offset in copy_offsets(device.bytes) {
            let copy = superblock.copy_for(&item, offset);
            copy.check(offset)?;
            let all = if offset == COPY_OFFSETS[0] { &mut superblocks } else { &mut mirrors };
            all.push(DeviceWrite { devid, offset, bytes: copy.as_bytes().to_vec(), tag });
        }
        let bytes = SUPERBLOCK_BYTES as u64;
        places.extend(superblock_places(device.bytes).map(|offset| DeviceRange { devid, offset, bytes }));
    }
    let starts = layout.devices.iter().map(|device| DeviceRange { devid: device.devid, offset: 0, bytes: FIRST });
    let bytes_used = bytes_used(options, &settled.trees);
    let (groups, total_bytes) = (layout.groups.clone(), layout.total_bytes);
    Ok(FormattedImage {
        superblock_places: places,
        starts: starts.collect(),
        nodes,
        mirrors,
        superblocks,
        groups,
        total_bytes,
        bytes_used,
    })
}

/// The superblock, without its device.
fn superblock(options: &FormatOptions, layout: &Layout, trees: &Trees) -> Result<Superblock, FormatError> {
    let FormatOptions { fsid, sector_bytes, node_bytes, checksum, .. } = *options;
    let features = options.features();
    let creation = Creation { fsid, label: &options.label, sector_bytes, node_bytes, checksum, features };
    let mut superblock = Superblock::create(&creation)?;
    let system = &layout.groups[0];
    superblock.push_sys_chunk(system.chunk_key(), &layout.chunk(system, sector_bytes).as_item())?;
    let root = |owner: u64| -> RootNode { trees[&owner].root() };
    superblock.set_commit(&Commit {
        generation: options.first_transaction,
        roots: TreeRoots {
            tree: root(objectid::ROOT_TREE),
            chunk: root(objectid::CHUNK_TREE),
            extent: root(objectid::EXTENT_TREE),
            fs: root(objectid::FS_TREE),
            dev: root(objectid::DEV_TREE),
            csum: root(objectid::CSUM_TREE),
        },
        total_bytes: layout.total_bytes,
        bytes_used: bytes_used(options, trees),
        num_devices: layout.devices.len() as u64,
    });
    let has_tags = checksum == ChecksumType::None;
    if has_tags || options.is_host_sealed {
        // In a filesystem without checksums it says that everything has tags.
        let devices = layout.devices.iter().map(|device| (device.uuid, has_tags));
        let mut record = CommitRecord::new(options.first_transaction, options.first_transaction, devices);
        if has_tags {
            record.windows = OwnWindows::default().with(0, true, options.first_transaction);
        }
        record.is_host_sealed = options.is_host_sealed;
        record.write(&mut superblock);
    }
    Ok(superblock)
}
