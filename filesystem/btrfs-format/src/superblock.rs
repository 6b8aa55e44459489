//! The superblock: the first trees, the features of the filesystem, and the device.
//!
//! Each device has up to three copies at fixed places. All bytes are kept, including unknown bits and reserved bytes,
//! so decoding and encoding never change a superblock. It is trusted only after [`Superblock::check`].

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::{ChecksumMismatch, ChecksumType, FIELD_BYTES};
use crate::error::{DecodeError, head, whole};
use crate::features::{Compat, CompatRo, Features, Incompat};
use crate::items::chunk::Chunk;
use crate::items::device::DevItem;
use crate::key::{DiskKey, ItemType, Key};

/// Bytes of a superblock.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// Where the copies of a device are, in bytes.
pub const COPY_OFFSETS: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];
/// The magic number of a Btrfs superblock.
pub const MAGIC: [u8; 8] = *b"_BHRfS_M";
/// Levels of a tree: 0 is a leaf.
pub const MAX_LEVELS: u8 = 8;
/// The smallest sector.
const MIN_SECTOR_BYTES: u32 = 4096;
/// The largest sector, and the largest node.
pub const MAX_NODE_BYTES: u32 = 64 << 10;

/// The offsets of the copies that fit on a device of this size.
pub fn copy_offsets(device_bytes: u64) -> impl Iterator<Item = u64> {
    COPY_OFFSETS.into_iter().filter(move |offset| offset + (SUPERBLOCK_BYTES as u64) < device_bytes)
}

/// The roots of an earlier transaction, 168 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[allow(missing_docs, reason = "addresses of root nodes, and the transactions that wrote them")]
pub struct BackupRoot {
    pub tree_root: U64,
    pub tree_root_generation: U64,
    pub chunk_root: U64,
    pub chunk_root_generation: U64,
    pub extent_root: U64,
    pub extent_root_generation: U64,
    pub fs_root: U64,
    pub fs_root_generation: U64,
    pub dev_root: U64,
    pub dev_root_generation: U64,
    pub csum_root: U64,
    pub csum_root_generation: U64,
    pub total_bytes: U64,
    pub bytes_used: U64,
    pub num_devices: U64,
    pub unused: [U64; 4],
    pub tree_root_level: u8,
    pub chunk_root_level: u8,
    pub extent_root_level: u8,
    pub fs_root_level: u8,
    pub dev_root_level: u8,
    pub csum_root_level: u8,
    pub unused_bytes: [u8; 10],
}

/// A superblock, 4096 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Superblock {
    /// The checksum of everything after it.
    pub csum: [u8; FIELD_BYTES],
    /// The public UUID.
    pub fsid: [u8; 16],
    /// The offset of this copy.
    pub bytenr: U64,
    /// See [`flags`].
    pub flags: U64,
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// The last transaction.
    pub generation: U64,
    /// The address of the root node of the root tree.
    pub root: U64,
    /// That of the chunk tree.
    pub chunk_root: U64,
    /// That of the tree of logs; 0 where there is none.
    pub log_root: U64,
    /// 0.
    pub log_root_transid: U64,
    /// Bytes of all devices.
    pub total_bytes: U64,
    /// Bytes of all nodes and data extents.
    pub bytes_used: U64,
    /// 6.
    pub root_dir_objectid: U64,
    /// Devices.
    pub num_devices: U64,
    /// Bytes of a sector.
    pub sector_bytes: U32,
    /// Bytes of a node.
    pub node_bytes: U32,
    /// The same value as the bytes of a node.
    pub leaf_bytes: U32,
    /// The bytes of a sector, or 4096; unused.
    pub stripe_bytes: U32,
    /// The used bytes of `sys_chunk_array`.
    pub sys_chunk_array_bytes: U32,
    /// The transaction that wrote the root node of the chunk tree.
    pub chunk_root_generation: U64,
    /// See [`Compat`].
    pub compat: U64,
    /// See [`CompatRo`].
    pub compat_ro: U64,
    /// See [`Incompat`].
    pub incompat: U64,
    /// The number of a [`ChecksumType`].
    pub csum_type: U16,
    /// The level of the root node.
    pub root_level: u8,
    /// That of the chunk tree.
    pub chunk_root_level: u8,
    /// That of the tree of logs.
    pub log_root_level: u8,
    /// The device that this copy is on.
    pub dev_item: DevItem,
    /// A name that ends with a zero byte.
    pub label: [u8; 256],
    /// The transaction up to which the space cache of version 1 is valid.
    pub cache_generation: U64,
    /// The transaction up to which the UUID tree is valid.
    pub uuid_tree_generation: U64,
    /// The UUID in nodes, with METADATA_UUID.
    pub metadata_uuid: [u8; 16],
    /// Fields of experimental features, and reserved bytes; kept as they are.
    pub reserved: [u8; 224],
    /// Keys and chunks of the block groups with the chunk tree, without gaps.
    pub sys_chunk_array: [u8; 2048],
    /// The roots of the last few transactions.
    pub backup_roots: [BackupRoot; 4],
    /// Kept as they are.
    pub padding: [u8; 565],
}

const _: () = assert!(size_of::<Superblock>() == SUPERBLOCK_BYTES);

/// Flags of a superblock.
pub mod flags {
    /// Set in nodes and superblocks that were written.
    pub const WRITTEN: u64 = 1;
    /// In superblocks without a meaning.
    pub const RELOC: u64 = 1 << 1;
    /// Set in a superblock after an error.
    pub const ERROR: u64 = 1 << 2;
    /// A seed device: read-only, and the base of another filesystem.
    pub const SEEDING: u64 = 1 << 32;
    /// An image that has only metadata, whose chunks map logical addresses to the same places.
    pub const METADUMP: u64 = 1 << 33;
    /// An image that has only metadata.
    pub const METADUMP_V2: u64 = 1 << 34;
    /// A change of UUIDs was interrupted, in an older and a newer form.
    pub const CHANGING_FSID: u64 = 1 << 35 | 1 << 36;
    /// All of these. Linux refuses a filesystem with any other.
    pub const ALL: u64 = WRITTEN | RELOC | ERROR | SEEDING | METADUMP | METADUMP_V2 | CHANGING_FSID;
}

/// The properties that are needed to read a filesystem's nodes. Only a checked superblock provides them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bytes of a sector.
    pub sector_bytes: u32,
    /// Bytes of a node.
    pub node_bytes: u32,
    /// How checksums are computed.
    pub checksum: ChecksumType,
    /// Features.
    pub features: Features,
    /// The UUID in nodes.
    pub node_uuid: [u8; 16],
    /// The last transaction.
    pub generation: u64,
}

/// Why a superblock is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SuperblockError {
    /// The number of bytes is wrong.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Not a superblock of Btrfs.
    #[error("no magic of Btrfs")]
    Magic,
    /// A copy that belongs to another offset.
    #[error("it says that it is the copy at {found}, and was read at {expected}")]
    Offset {
        /// The offset where it was read.
        expected: u64,
        /// The offset that it records.
        found: u64,
    },
    /// An unknown checksum type.
    #[error("checksum type {0} is unknown")]
    ChecksumType(u16),
    /// The checksum type and the features contradict each other.
    #[error("checksum type {number:#x} {relation} the feature NO_CHECKSUMS")]
    ChecksumFeature {
        /// The number of the type.
        number: u16,
        /// "with" the feature, or "without" it.
        relation: &'static str,
    },
    /// A feature that needs checksums.
    #[error("the feature {0} in a filesystem without checksums")]
    NeedsChecksums(&'static str),
    /// The checksum is wrong.
    #[error(transparent)]
    Checksum(#[from] ChecksumMismatch),
    /// A field has an invalid value.
    #[error("{field} is {value}: {rule}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it must be.
        rule: &'static str,
    },
    /// The device's item belongs to another filesystem.
    #[error("the device's item is of another filesystem")]
    DeviceUuid,
}

impl Superblock {
    /// Interprets bytes as a superblock; checks only their number.
    ///
    /// # Errors
    /// If there are not 4096.
    pub fn decode(bytes: &[u8]) -> Result<&Superblock, DecodeError> {
        whole("superblock", bytes)
    }

    /// Checks the copy that was read at an offset of a device. The caller checks the features.
    ///
    /// # Errors
    /// If it is not a superblock, or contradicts itself.
    pub fn check(&self, read_at: u64) -> Result<Geometry, SuperblockError> {
        if self.magic != MAGIC {
            return Err(SuperblockError::Magic);
        }
        let number = self.csum_type.get();
        let checksum = ChecksumType::from_number(number).ok_or(SuperblockError::ChecksumType(number))?;
        checksum.of_superblock().verify(self.as_bytes())?;
        self.check_checksum(checksum)?;
        if self.bytenr.get() != read_at {
            return Err(SuperblockError::Offset { expected: read_at, found: self.bytenr.get() });
        }
        self.check_sizes()?;
        self.check_roots()?;
        self.check_counts()?;
        let node_uuid = self.node_uuid();
        if self.dev_item.fsid != node_uuid {
            return Err(SuperblockError::DeviceUuid);
        }
        Ok(Geometry {
            sector_bytes: self.sector_bytes.get(),
            node_bytes: self.node_bytes.get(),
            checksum,
            features: self.features(),
            node_uuid,
            generation: self.generation.get(),
        })
    }

    /// The type without checksums and its feature come together. What is restored from parity has no tags of its own, so it
    /// would be without any proof.
    fn check_checksum(&self, checksum: ChecksumType) -> Result<(), SuperblockError> {
        let incompat = self.features().incompat;
        let has_none = checksum == ChecksumType::None;
        if incompat.contains(Incompat::NO_CHECKSUMS) != has_none {
            let relation = if has_none { "without" } else { "with" };
            return Err(SuperblockError::ChecksumFeature { number: checksum.number(), relation });
        }
        match has_none && incompat.contains(Incompat::RAID56) {
            true => Err(SuperblockError::NeedsChecksums("RAID56")),
            false => Ok(()),
        }
    }

    fn check_sizes(&self) -> Result<(), SuperblockError> {
        let (sector, node) = (self.sector_bytes.get(), self.node_bytes.get());
        let is_size = |size: u32, least: u32| size.is_power_of_two() && (least..=MAX_NODE_BYTES).contains(&size);
        require(is_size(sector, MIN_SECTOR_BYTES), "sector size", sector, "a power of two from 4096 to 65536")?;
        require(is_size(node, sector), "node size", node, "a power of two from the sector size to 65536")?;
        require(self.leaf_bytes == node, "leaf size", self.leaf_bytes.get(), "the node size")?;
        let stripe = self.stripe_bytes.get();
        require(stripe == sector || stripe == MIN_SECTOR_BYTES, "stripe size", stripe, "the sector size or 4096")?;
        let mixed = self.features().incompat.contains(Incompat::MIXED_GROUPS);
        require(!mixed || node == sector, "node size", node, "the sector size, where data and metadata are mixed")
    }

    fn check_roots(&self) -> Result<(), SuperblockError> {
        let sector = u64::from(self.sector_bytes.get());
        for (field, root, level, may_be_none) in [
            ("root", self.root.get(), self.root_level, false),
            ("chunk root", self.chunk_root.get(), self.chunk_root_level, false),
            ("log root", self.log_root.get(), self.log_root_level, true),
        ] {
            require(root.is_multiple_of(sector), field, root, "a multiple of the sector size")?;
            require(root != 0 || may_be_none, field, root, "an address")?;
            require(level < MAX_LEVELS, field, level, "a level below 8")?;
        }
        Ok(())
    }

    fn check_counts(&self) -> Result<(), SuperblockError> {
        let (generation, chunk) = (self.generation.get(), self.chunk_root_generation.get());
        require(generation != 0, "generation", generation, "at least 1")?;
        require(chunk <= generation, "chunk root generation", chunk, "at most the generation")?;
        let devices = self.num_devices.get();
        require((1..=1 << 31).contains(&devices), "number of devices", devices, "from 1 to 2^31")?;
        let least = 6 * u64::from(self.node_bytes.get());
        require(self.bytes_used >= least, "bytes used", self.bytes_used.get(), "at least six nodes")?;
        let total = self.total_bytes.get();
        require(total != 0, "total bytes", total, "at least 1")?;
        let (array, capacity) = (self.sys_chunk_array_bytes.get(), self.sys_chunk_array.len() as u32);
        require((97..=capacity).contains(&array), "size of the system chunks", array, "from one chunk to 2048")
    }

    /// Its features.
    pub fn features(&self) -> Features {
        Features {
            compat: Compat::from_bits_retain(self.compat.get()),
            compat_ro: CompatRo::from_bits_retain(self.compat_ro.get()),
            incompat: Incompat::from_bits_retain(self.incompat.get()),
        }
    }

    /// The UUID in nodes and in the device's item.
    pub fn node_uuid(&self) -> [u8; 16] {
        if self.features().incompat.contains(Incompat::METADATA_UUID) { self.metadata_uuid } else { self.fsid }
    }

    /// The label, without its zero byte.
    pub fn label(&self) -> &[u8] {
        self.label.split(|byte| *byte == 0).next().unwrap_or_default()
    }

    /// The chunks of the chunk tree, with their keys. Stops at the first error.
    pub fn sys_chunks(&self) -> impl Iterator<Item = Result<(Key, Chunk<'_>), DecodeError>> {
        let length = self.sys_chunk_array.len().min(self.sys_chunk_array_bytes.get() as usize);
        let all = &self.sys_chunk_array[..length];
        let mut rest = Some(all).filter(|all| !all.is_empty());
        std::iter::from_fn(move || {
            let bytes = rest.take()?;
            let one = sys_chunk(bytes, length - bytes.len());
            Some(one.map(|(key, chunk, behind)| {
                rest = Some(behind).filter(|behind| !behind.is_empty());
                (key, chunk)
            }))
        })
    }

    /// The index of the newest backup root; the one after it, cyclically, is overwritten next.
    pub fn newest_backup(&self) -> usize {
        let newest = |index: &usize| self.backup_roots[*index].tree_root_generation.get();
        (0..self.backup_roots.len()).max_by_key(newest).unwrap_or(0)
    }

    /// True if another copy of the same device is equal except for its place. The log is ignored, because a sync
    /// between transactions writes it only to the first copy.
    pub fn says_the_same_as(&self, other: &Superblock) -> bool {
        let Superblock { csum, bytenr, log_root, log_root_transid, log_root_level, .. } = *self;
        *self == Superblock { csum, bytenr, log_root, log_root_transid, log_root_level, ..*other }
    }

    /// Sets the checksum, if its type is known.
    pub fn seal(&mut self) {
        if let Some(checksum) = ChecksumType::from_number(self.csum_type.get()) {
            checksum.of_superblock().seal(self.as_mut_bytes());
        }
    }
}

fn sys_chunk(bytes: &[u8], at: usize) -> Result<(Key, Chunk<'_>, &[u8]), DecodeError> {
    let (key, rest) = head::<DiskKey>("key of a system chunk", bytes, at)?;
    let key = key.get();
    if key.item_type != ItemType::CHUNK_ITEM {
        let value = u64::from(key.item_type.0);
        return Err(DecodeError::Layout { what: "key of a system chunk", field: "type", value });
    }
    let (chunk, rest) = Chunk::split(rest, at + size_of::<DiskKey>())?;
    Ok((key, chunk, rest))
}

fn require(holds: bool, field: &'static str, value: impl Into<u64>, rule: &'static str) -> Result<(), SuperblockError> {
    if holds { Ok(()) } else { Err(SuperblockError::Field { field, value: value.into(), rule }) }
}

#[cfg(test)]
mod tests;
