//! The superblock of a volume in shards (format version 3): where its shards are, each a complete volume of version 2.
//!
//! It never changes after the volume was created, so its three copies are equal, and none is newer than another.
//! `docs/formats/protected-volume-shards.md` draws it.

use sealblock_block::ReservedArea;
use sealblock_integrity::PiFormat;
use sealblock_integrity::guard::crc64;
use sealblock_units::{BlockSize, Lba};

use super::segments::{ALIGNMENT, MAX_CAPACITY_BLOCKS};
use super::superblock::{
    AT_BLOCK_BYTES, AT_CAPACITY, AT_CHECKSUM, AT_FEATURES, AT_GUARD, AT_SECTOR_BYTES, AT_UUID, AT_VERSION,
    SUPERBLOCK_BYTES, SuperblockError, decode_protection, has_checksum, protection_codes, put_checksum,
};
use super::{Layout, LayoutError, SUPERBLOCK_OFFSETS, TAIL_BYTES, THIRD_FROM_END_BYTES, get, put};

/// The maximum number of shards.
pub const MAX_SHARDS: u32 = 16;
/// Bytes of a unit in new volumes: consecutive units are in consecutive shards.
pub const SHARD_UNIT_BYTES: u64 = 1 << 20;
/// The minimum number of bytes of blocks in each shard of a new volume.
pub const MIN_SHARD_BYTES: u64 = 64 << 20;

/// Most of the magic is that of version 2. So programs that know only version 2 find damaged superblocks here, and
/// neither open nor overwrite the medium.
const MAGIC: [u8; 8] = *b"\x89SEALs\n\x1a";
const VERSION: u64 = 3;
/// The first window begins where the log of a volume of version 2 does.
const WINDOWS_OFFSET: u64 = 64 << 10;

// Fields that version 2 has, too, are at the same places.
const AT_SHARDS: usize = 59;
const AT_UNIT_BYTES: usize = 60;
const AT_WINDOWS_OFFSET: usize = 64;
const AT_WINDOW_BYTES: usize = 72;
const AT_MEDIUM_BYTES: usize = 80;
const AT_UNUSED: usize = 88;

/// The content of the superblock of a volume in shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Container {
    uuid: [u8; 16],
    capacity_blocks: u64,
    protection: Option<PiFormat>,
    shards: u32,
    unit_blocks: u64,
    /// The layout of each shard.
    layout: Layout,
    medium_bytes: u64,
}

/// Why bytes are not a usable superblock of a volume in shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ContainerError {
    /// The magic bytes are missing.
    #[error("no volume in shards (the magic bytes are missing)")]
    Magic,
    /// There are too few bytes.
    #[error("the superblock is cut off")]
    Truncated,
    /// The checksum does not match.
    #[error("the superblock's checksum does not match")]
    Checksum,
    /// It is a copy for another position.
    #[error("the superblock belongs at another place")]
    Place,
    /// An unknown version of the format.
    #[error("the volume in shards has format version {0}; this program knows version 3")]
    Version(u64),
    /// Features that this program does not know.
    #[error("the volume in shards has features {0:#x}, which this program does not know")]
    Features(u64),
    /// A field has an impossible value.
    #[error("invalid {field} in the superblock: {value}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The layout of the shards is impossible.
    #[error("invalid layout of the shards: {0}")]
    Layout(#[from] LayoutError),
    /// The volume is too small for so many shards.
    #[error(
        "a volume of {} MiB is too small for {shards} shards: each needs at least 64 MiB, and more than 512 MiB if the volume has more than 512 MiB",
        bytes >> 20
    )]
    TooSmall {
        /// Bytes of the blocks of the volume.
        bytes: u64,
        /// Number of shards.
        shards: u32,
    },
}

impl ContainerError {
    /// True if it is a superblock that this program does not understand. Then no other copy may be used instead.
    pub(crate) fn is_unknown(&self) -> bool {
        use ContainerError::{Checksum, Features, Field, Layout, Magic, Place, TooSmall, Truncated, Version};
        match self {
            Magic | Truncated | Checksum | Place => false,
            Version(_) | Features(_) | Field { .. } | Layout(_) | TooSmall { .. } => true,
        }
    }
}

/// The place of a shard on the medium, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// Where it begins.
    pub offset: u64,
    /// Its length.
    pub length: u64,
}

impl Container {
    /// A new volume on a medium of `medium_bytes`, or of as many bytes as it needs, if these are more.
    ///
    /// # Errors
    /// When the layout is impossible, or too small for this number of shards.
    pub fn new(
        uuid: [u8; 16],
        (block_size, sector_bytes): (BlockSize, u32),
        capacity_blocks: u64,
        protection: Option<PiFormat>,
        (shards, medium_bytes): (u32, u64),
    ) -> Result<Container, ContainerError> {
        let unit_blocks = SHARD_UNIT_BYTES >> block_size.shift();
        let container = Container::laid_out(
            (uuid, protection),
            (block_size, sector_bytes),
            capacity_blocks,
            (shards, unit_blocks),
        )?;
        if container.is_too_small() {
            return Err(ContainerError::TooSmall { bytes: capacity_blocks << block_size.shift(), shards });
        }
        let filled = medium_bytes - medium_bytes % THIRD_FROM_END_BYTES;
        Ok(Container { medium_bytes: container.medium_bytes.max(filled), ..container })
    }

    /// A volume with units of so many blocks, however small it is, for proofs: with usual units a small volume would
    /// have all of its blocks in one shard.
    ///
    /// # Errors
    /// When the layout is impossible.
    #[cfg(any(test, feature = "mutations"))]
    pub fn with_units(
        identity: ([u8; 16], Option<PiFormat>),
        profile: (BlockSize, u32),
        capacity_blocks: u64,
        shards_and_unit: (u32, u64),
    ) -> Result<Container, ContainerError> {
        Container::laid_out(identity, profile, capacity_blocks, shards_and_unit)
    }

    /// Computes everything that follows from these fields; the medium is as short as it can be.
    fn laid_out(
        (uuid, protection): ([u8; 16], Option<PiFormat>),
        (block_size, sector_bytes): (BlockSize, u32),
        capacity_blocks: u64,
        (shards, unit_blocks): (u32, u64),
    ) -> Result<Container, ContainerError> {
        if shards == 0 || shards > MAX_SHARDS {
            return Err(invalid("number of shards", u64::from(shards)));
        }
        if !unit_blocks.is_power_of_two() || unit_blocks > MAX_CAPACITY_BLOCKS / u64::from(MAX_SHARDS) {
            return Err(invalid("unit", unit_blocks));
        }
        if capacity_blocks == 0 || capacity_blocks > MAX_CAPACITY_BLOCKS {
            return Err(invalid("capacity", capacity_blocks));
        }
        let shard_blocks = capacity_blocks.div_ceil(u64::from(shards) * unit_blocks) * unit_blocks;
        let layout = Layout::new(block_size, sector_bytes, shard_blocks)?;
        let container = Container { uuid, capacity_blocks, protection, shards, unit_blocks, layout, medium_bytes: 0 };
        Ok(Container { medium_bytes: container.windows_end() + TAIL_BYTES, ..container })
    }

    /// True if a new volume may not have so many shards: one would be tiny, or all together would have less room for
    /// the bitmaps of a mirror than a volume of this size needs.
    fn is_too_small(&self) -> bool {
        let bytes = |blocks: u64| blocks << self.block_size().shift();
        let pages = ReservedArea::bitmap_pages(bytes(self.capacity_blocks));
        bytes(self.capacity_blocks) / u64::from(self.shards) < MIN_SHARD_BYTES || self.bitmap_pages() < pages
    }

    /// The volume's identity.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Size of a block.
    pub fn block_size(&self) -> BlockSize {
        self.layout.block_size()
    }

    /// Number of blocks.
    pub fn capacity_blocks(&self) -> u64 {
        self.capacity_blocks
    }

    /// The format of the blocks' protection information; `None` without.
    pub fn protection(&self) -> Option<PiFormat> {
        self.protection
    }

    /// Number of shards.
    pub fn shards(&self) -> u32 {
        self.shards
    }

    /// Blocks of a unit, a power of two.
    pub fn unit_blocks(&self) -> u64 {
        self.unit_blocks
    }

    /// The layout of each shard.
    pub fn shard_layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of bitmap pages in the reserved areas of all shards together.
    pub fn bitmap_pages(&self) -> u32 {
        self.layout.bitmap_pages() * self.shards
    }

    /// Bytes from the start of the medium to the end of the third copy.
    pub fn medium_bytes(&self) -> u64 {
        self.medium_bytes
    }

    /// Where the last shard ends, in bytes.
    pub fn windows_end(&self) -> u64 {
        WINDOWS_OFFSET + u64::from(self.shards) * self.layout.medium_bytes()
    }

    /// The offset of the first shard, in bytes.
    pub const fn windows_offset() -> u64 {
        WINDOWS_OFFSET
    }

    /// The place of a shard.
    ///
    /// # Panics
    /// If there is no such shard.
    pub fn window(&self, shard: u32) -> Window {
        assert!(shard < self.shards, "the volume has {} shards", self.shards);
        let length = self.layout.medium_bytes();
        Window { offset: WINDOWS_OFFSET + u64::from(shard) * length, length }
    }

    /// The offsets of the three copies, in bytes.
    pub fn copy_offsets(&self) -> [u64; 3] {
        let [first, second] = SUPERBLOCK_OFFSETS;
        [first, second, self.medium_bytes - THIRD_FROM_END_BYTES]
    }

    /// The identity of a shard: of version 8, whose content its maker chooses, so no volume by itself has it. It depends
    /// on how the volume is dealt, which no shard knows otherwise: a superblock that deals it in another way finds none
    /// of its shards. Those of one volume differ in their last byte, so their salts differ, too.
    pub fn shard_uuid(&self, shard: u32) -> [u8; 16] {
        let (guard, protection, storage_tag) = protection_codes(self.protection);
        let (block_bytes, sector_bytes) = (self.block_size().bytes() as u64, u64::from(self.layout.sector_bytes()));
        let dealing = [u64::from(self.shards), self.unit_blocks, self.capacity_blocks, block_bytes, sector_bytes];
        let fields = dealing.into_iter().chain([guard, protection, storage_tag]);
        let bytes: Vec<u8> = fields.flat_map(u64::to_le_bytes).collect();
        let mut uuid = self.uuid;
        for (byte, mixed) in uuid.iter_mut().zip(crc64(&bytes).to_le_bytes()) {
            *byte ^= mixed;
        }
        uuid[6] = uuid[6] & 0x0f | 0x80;
        uuid[15] ^= shard as u8 + 1;
        uuid
    }

    /// True if this can be the identity of a shard.
    pub(crate) fn may_be_shard(uuid: &[u8; 16]) -> bool {
        uuid[6] & 0xf0 == 0x80
    }

    /// The shard of a block, and the block's place in it.
    pub fn shard_of(&self, lba: Lba) -> (u32, Lba) {
        let (unit, within) = (lba.get() / self.unit_blocks, lba.get() % self.unit_blocks);
        let shards = u64::from(self.shards);
        ((unit % shards) as u32, Lba::new(unit / shards * self.unit_blocks + within))
    }

    /// The block at this place in a shard. It may be past the end of the volume: all shards have the same size.
    pub fn block_at(&self, shard: u32, place: Lba) -> Lba {
        let (row, within) = (place.get() / self.unit_blocks, place.get() % self.unit_blocks);
        Lba::new((row * u64::from(self.shards) + u64::from(shard)) * self.unit_blocks + within)
    }

    /// True if `bytes` begin like the superblock of a volume in shards, in whatever state.
    pub fn recognise(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// Encodes the superblock.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        put::<4>(&mut bytes, AT_VERSION, VERSION);
        bytes[AT_UUID..AT_UUID + 16].copy_from_slice(&self.uuid);
        put::<4>(&mut bytes, AT_BLOCK_BYTES, self.block_size().bytes() as u64);
        put::<4>(&mut bytes, AT_SECTOR_BYTES, u64::from(self.layout.sector_bytes()));
        put::<8>(&mut bytes, AT_CAPACITY, self.capacity_blocks);
        let codes = protection_codes(self.protection);
        for (at, code) in (AT_GUARD..).zip([codes.0, codes.1, codes.2]) {
            put::<1>(&mut bytes, at, code);
        }
        put::<1>(&mut bytes, AT_SHARDS, u64::from(self.shards));
        put::<4>(&mut bytes, AT_UNIT_BYTES, self.unit_blocks << self.block_size().shift());
        put::<8>(&mut bytes, AT_WINDOWS_OFFSET, WINDOWS_OFFSET);
        put::<8>(&mut bytes, AT_WINDOW_BYTES, self.layout.medium_bytes());
        put::<8>(&mut bytes, AT_MEDIUM_BYTES, self.medium_bytes);
        put_checksum(&mut bytes);
        bytes
    }

    /// Reads a superblock and checks every field: what is accepted encodes to the same bytes.
    ///
    /// # Errors
    /// When it is none, or none that this program can use.
    pub fn decode(bytes: &[u8]) -> Result<Container, ContainerError> {
        if !Container::recognise(bytes) {
            return Err(ContainerError::Magic);
        }
        let bytes = bytes.get(..SUPERBLOCK_BYTES).ok_or(ContainerError::Truncated)?;
        if !has_checksum(bytes) {
            return Err(ContainerError::Checksum);
        }
        let (version, features) = (get::<4>(bytes, AT_VERSION), get::<4>(bytes, AT_FEATURES));
        if version != VERSION {
            return Err(ContainerError::Version(version));
        }
        if features != 0 {
            return Err(ContainerError::Features(features));
        }
        let (block_bytes, unit_bytes) = (get::<4>(bytes, AT_BLOCK_BYTES), get::<4>(bytes, AT_UNIT_BYTES));
        let block_size = BlockSize::from_bytes(block_bytes).ok_or(invalid("block size", block_bytes))?;
        let protection = decode_protection(bytes).map_err(|error| match error {
            SuperblockError::Field { field, value } => invalid(field, value),
            _ => invalid("protection", get::<1>(bytes, AT_GUARD)),
        })?;
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[AT_UUID..AT_UUID + 16]);
        let found = Container::laid_out(
            (uuid, protection),
            (block_size, get::<4>(bytes, AT_SECTOR_BYTES) as u32),
            get::<8>(bytes, AT_CAPACITY),
            (get::<1>(bytes, AT_SHARDS) as u32, unit_bytes >> block_size.shift()),
        )?;
        let medium_bytes = get::<8>(bytes, AT_MEDIUM_BYTES);
        if medium_bytes < found.medium_bytes || !medium_bytes.is_multiple_of(THIRD_FROM_END_BYTES) {
            return Err(invalid("length of the medium", medium_bytes));
        }
        let found = Container { medium_bytes, ..found };
        // Everything else follows from these fields.
        let due = found.encode();
        let repeated = [("shards' offset", AT_WINDOWS_OFFSET), ("length of a shard", AT_WINDOW_BYTES)];
        for (field, at) in repeated {
            let value = get::<8>(bytes, at);
            if value != get::<8>(&due, at) {
                return Err(invalid(field, value));
            }
        }
        match (0..AT_CHECKSUM).find(|at| bytes[*at] != due[*at]) {
            Some(at) if at >= AT_UNUSED => Err(invalid("unused byte", at as u64)),
            Some(at) => Err(invalid("byte", at as u64)),
            None => Ok(found),
        }
    }
}

fn invalid(field: &'static str, value: u64) -> ContainerError {
    ContainerError::Field { field, value }
}

const _: () = assert!(WINDOWS_OFFSET.is_multiple_of(ALIGNMENT) && SUPERBLOCK_OFFSETS[1] < WINDOWS_OFFSET);

#[cfg(test)]
mod tests;
