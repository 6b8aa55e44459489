//! Chunks: the ranges of devices for a range of logical addresses; block groups, and the form of their free space.

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::{DecodeError, TooLong, head, length_u16};
use crate::key::objectid;

/// Bytes of a stripe in every profile that has stripes.
pub const STRIPE_BYTES: u64 = 64 << 10;

bitflags! {
    /// The use and the profile of a block group. Without a profile bit there is one copy, on one device.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct BlockGroupFlags: u64 {
        /// Data of files.
        const DATA = 1;
        /// The chunk tree.
        const SYSTEM = 1 << 1;
        /// All other trees.
        const METADATA = 1 << 2;
        /// Striped.
        const RAID0 = 1 << 3;
        /// Two copies, on two devices.
        const RAID1 = 1 << 4;
        /// Two copies, on one device.
        const DUP = 1 << 5;
        /// Striped, each stripe on two devices.
        const RAID10 = 1 << 6;
        /// Striped with one parity.
        const RAID5 = 1 << 7;
        /// Striped with two parities.
        const RAID6 = 1 << 8;
        /// Three copies.
        const RAID1C3 = 1 << 9;
        /// Four copies.
        const RAID1C4 = 1 << 10;
    }
}

impl BlockGroupFlags {
    /// The bits for its use.
    pub const TYPES: BlockGroupFlags = BlockGroupFlags::from_bits_retain(0x7);
    /// The bits for its profile.
    pub const PROFILES: BlockGroupFlags = BlockGroupFlags::from_bits_retain(0x7f8);

    /// The profile, if at most one of its bits is set.
    pub fn profile(self) -> Option<Profile> {
        let bits = self.intersection(BlockGroupFlags::PROFILES);
        Profile::ALL.into_iter().find(|profile| profile.flag() == bits)
    }
}

/// How a block group is placed on devices.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Profile {
    /// Once, on one device.
    Single,
    /// Twice, on one device.
    Dup,
    /// Striped.
    Raid0,
    /// On two devices.
    Raid1,
    /// On three devices.
    Raid1C3,
    /// On four devices.
    Raid1C4,
    /// Striped over pairs.
    Raid10,
    /// Striped with one parity.
    Raid5,
    /// Striped with two parities.
    Raid6,
}

impl Profile {
    /// All of them.
    pub const ALL: [Profile; 9] = [
        Profile::Single,
        Profile::Dup,
        Profile::Raid0,
        Profile::Raid1,
        Profile::Raid1C3,
        Profile::Raid1C4,
        Profile::Raid10,
        Profile::Raid5,
        Profile::Raid6,
    ];

    /// Its bit in the flags.
    pub fn flag(self) -> BlockGroupFlags {
        match self {
            Profile::Single => BlockGroupFlags::empty(),
            Profile::Dup => BlockGroupFlags::DUP,
            Profile::Raid0 => BlockGroupFlags::RAID0,
            Profile::Raid1 => BlockGroupFlags::RAID1,
            Profile::Raid1C3 => BlockGroupFlags::RAID1C3,
            Profile::Raid1C4 => BlockGroupFlags::RAID1C4,
            Profile::Raid10 => BlockGroupFlags::RAID10,
            Profile::Raid5 => BlockGroupFlags::RAID5,
            Profile::Raid6 => BlockGroupFlags::RAID6,
        }
    }

    /// True if a chunk of this profile can have this number of stripes.
    pub fn allows_stripes(self, stripes: u16) -> bool {
        match self {
            Profile::Single => stripes == 1,
            Profile::Dup | Profile::Raid1 => stripes == 2,
            Profile::Raid1C3 => stripes == 3,
            Profile::Raid1C4 => stripes == 4,
            Profile::Raid0 => stripes >= 1,
            Profile::Raid10 => stripes >= 2 && stripes.is_multiple_of(2),
            Profile::Raid5 => stripes >= 2,
            Profile::Raid6 => stripes >= 3,
        }
    }

    /// The number of stripes with data among `stripes`; the others are copies or parity. Only valid for numbers that
    /// the profile allows.
    pub fn data_stripes(self, stripes: u16) -> u16 {
        match self {
            Profile::Single | Profile::Dup | Profile::Raid1 | Profile::Raid1C3 | Profile::Raid1C4 => 1,
            Profile::Raid0 => stripes,
            Profile::Raid10 => stripes / 2,
            Profile::Raid5 => stripes.saturating_sub(1),
            Profile::Raid6 => stripes.saturating_sub(2),
        }
    }

    /// The number of copies of each byte.
    pub fn copies(self) -> u16 {
        match self {
            Profile::Single | Profile::Raid0 | Profile::Raid5 | Profile::Raid6 => 1,
            Profile::Dup | Profile::Raid1 | Profile::Raid10 => 2,
            Profile::Raid1C3 => 3,
            Profile::Raid1C4 => 4,
        }
    }
}

/// The fixed first part of a chunk, 48 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChunkHead {
    /// Logical bytes.
    pub length: U64,
    /// 2, the extent tree.
    pub owner: U64,
    /// 64 KiB.
    pub stripe_len: U64,
    /// See [`BlockGroupFlags`].
    pub flags: U64,
    /// A hint.
    pub io_align: U32,
    /// A hint.
    pub io_width: U32,
    /// The smallest write of its devices.
    pub sector_size: U32,
    /// Stripes that follow.
    pub num_stripes: U16,
    /// 2 for RAID10.
    pub sub_stripes: U16,
}

/// A range of a device, 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Stripe {
    /// The device's number.
    pub devid: U64,
    /// Where it begins on the device.
    pub offset: U64,
    /// The device's UUID.
    pub dev_uuid: [u8; 16],
}

/// A chunk with its stripes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk<'a> {
    /// The fixed part. Its stripe count equals that of `stripes`.
    pub head: &'a ChunkHead,
    /// Its stripes.
    pub stripes: &'a [Stripe],
}

impl<'a> Chunk<'a> {
    const WHAT: &'static str = "chunk";

    /// Reads an item.
    ///
    /// # Errors
    /// If the stripes do not end where the item ends, or if there are none.
    pub fn decode(bytes: &'a [u8]) -> Result<Chunk<'a>, DecodeError> {
        let (chunk, rest) = Chunk::split(bytes, 0)?;
        if rest.is_empty() {
            return Ok(chunk);
        }
        Err(DecodeError::Size { what: Self::WHAT, expected: bytes.len() - rest.len(), found: bytes.len() })
    }

    /// Reads the chunk at the head of `bytes`, which begin at byte `at`, and returns what follows it.
    ///
    /// # Errors
    /// If it is cut off or has no stripe.
    pub fn split(bytes: &'a [u8], at: usize) -> Result<(Chunk<'a>, &'a [u8]), DecodeError> {
        let (fixed, rest) = head::<ChunkHead>(Self::WHAT, bytes, at)?;
        let count = usize::from(fixed.num_stripes);
        if count == 0 {
            return Err(DecodeError::Layout { what: Self::WHAT, field: "number of stripes", value: 0 });
        }
        let short = DecodeError::Short {
            what: "stripes",
            at: at + size_of::<ChunkHead>(),
            needed: count * size_of::<Stripe>(),
            left: rest.len(),
        };
        let (stripes, rest) = <[Stripe]>::ref_from_prefix_with_elems(rest, count).map_err(|_| short)?;
        Ok((Chunk { head: fixed, stripes }, rest))
    }

    /// Its use and profile, with unknown bits.
    pub fn flags(&self) -> BlockGroupFlags {
        BlockGroupFlags::from_bits_retain(self.head.flags.get())
    }

    /// Appends its bytes; the count is that of the stripes.
    ///
    /// # Errors
    /// If there are more stripes than the count can hold.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<(), TooLong> {
        let num_stripes = length_u16("chunk", self.stripes.len())?.into();
        out.extend_from_slice(ChunkHead { num_stripes, ..*self.head }.as_bytes());
        out.extend_from_slice(self.stripes.as_bytes());
        Ok(())
    }
}

/// A chunk with its stripes, owned, to be made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChunkBuf {
    /// The fixed part. Its stripe count is set when the chunk is written.
    pub head: ChunkHead,
    /// Its stripes, at least one.
    pub stripes: Vec<Stripe>,
}

impl ChunkBuf {
    /// A chunk of these bytes and this use and profile, with the values that are the same for all chunks: stripes of
    /// 64 KiB, the hints that Linux stores, and pairs of stripes in RAID10.
    pub fn new(length: u64, flags: BlockGroupFlags, sector_bytes: u32, stripes: Vec<Stripe>) -> ChunkBuf {
        let sub_stripes = if flags.contains(BlockGroupFlags::RAID10) { 2 } else { 1 };
        let head = ChunkHead {
            length: length.into(),
            owner: objectid::EXTENT_TREE.into(),
            stripe_len: STRIPE_BYTES.into(),
            flags: flags.bits().into(),
            io_align: (STRIPE_BYTES as u32).into(),
            io_width: (STRIPE_BYTES as u32).into(),
            sector_size: sector_bytes.into(),
            num_stripes: (stripes.len().min(usize::from(u16::MAX)) as u16).into(),
            sub_stripes: sub_stripes.into(),
        };
        ChunkBuf { head, stripes }
    }

    /// It as an item.
    pub fn as_item(&self) -> Chunk<'_> {
        Chunk { head: &self.head, stripes: &self.stripes }
    }

    /// Its bytes.
    ///
    /// # Errors
    /// If there are more stripes than the count can hold.
    pub fn encode(&self) -> Result<Vec<u8>, TooLong> {
        let mut out = Vec::new();
        self.as_item().write(&mut out)?;
        Ok(out)
    }
}

impl From<Chunk<'_>> for ChunkBuf {
    fn from(chunk: Chunk) -> ChunkBuf {
        ChunkBuf { head: *chunk.head, stripes: chunk.stripes.to_vec() }
    }
}

/// How much of a chunk is allocated, 24 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct BlockGroupItem {
    /// Bytes of nodes and of data extents in it.
    pub used: U64,
    /// 256.
    pub chunk_objectid: U64,
    /// As those of the chunk.
    pub flags: U64,
}

/// The form in which the free space of a block group is stored, 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FreeSpaceInfo {
    /// The number of runs of free space, in either form.
    pub extent_count: U32,
    /// Bit 0: bitmaps.
    pub flags: U32,
}

impl FreeSpaceInfo {
    /// The bit for free space in bitmaps.
    pub const USING_BITMAPS: u32 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::ItemType;

    #[test]
    fn a_chunk_has_as_many_stripes_as_it_says() {
        assert_eq!((size_of::<ChunkHead>(), size_of::<Stripe>(), size_of::<BlockGroupItem>()), (48, 32, 24));
        let mut bytes = vec![0; 48 + 64];
        bytes[44] = 2;
        bytes[48] = 1;
        let chunk = Chunk::decode(&bytes).unwrap();
        assert_eq!((chunk.stripes.len(), chunk.stripes[0].devid.get()), (2, 1));
        let mut again = Vec::new();
        chunk.write(&mut again).unwrap();
        assert_eq!(again, bytes);
        for (count, is_whole) in [(0, false), (1, false), (2, true), (3, false)] {
            bytes[44] = count;
            assert_eq!(Chunk::decode(&bytes).is_ok(), is_whole, "{count}");
        }
        bytes[44] = 1;
        assert_eq!(Chunk::split(&bytes, 0).unwrap().1.len(), 32);
    }

    #[test]
    fn chunks_of_the_kernel_come_back_and_are_made_from_their_parts() {
        let chunks = crate::captured::all().into_iter().filter(|item| item.key.item_type == ItemType::CHUNK_ITEM);
        let count = chunks.map(|item| {
            let chunk = Chunk::decode(&item.data).unwrap();
            let owned = ChunkBuf::from(chunk);
            assert_eq!((owned.encode().unwrap(), owned.as_item()), (item.data.clone(), chunk));
            let (length, sector) = (chunk.head.length.get(), chunk.head.sector_size.get());
            assert_eq!(ChunkBuf::new(length, chunk.flags(), sector, owned.stripes.clone()), owned);
        });
        assert_eq!(count.count(), 2);
        let mut many = ChunkBuf::from(Chunk::decode(&crate::captured::one(ItemType::CHUNK_ITEM, 80).data).unwrap());
        many.stripes = vec![many.stripes[0]; 65_536];
        assert!(many.encode().is_err());
    }

    #[test]
    fn profiles_follow_from_single_bits_and_say_how_many_stripes_there_may_be() {
        for profile in Profile::ALL {
            assert_eq!((profile.flag() | BlockGroupFlags::DATA).profile(), Some(profile));
        }
        assert_eq!((BlockGroupFlags::RAID0 | BlockGroupFlags::RAID1).profile(), None);
        for (profile, stripes, data) in [
            (Profile::Single, 1, 1),
            (Profile::Dup, 2, 1),
            (Profile::Raid0, 1, 1),
            (Profile::Raid10, 6, 3),
            (Profile::Raid5, 2, 1),
            (Profile::Raid6, 3, 1),
            (Profile::Raid1C4, 4, 1),
        ] {
            assert!(profile.allows_stripes(stripes), "{profile:?}");
            assert_eq!(profile.data_stripes(stripes), data, "{profile:?}");
        }
        for (profile, stripes) in [
            (Profile::Single, 2),
            (Profile::Dup, 1),
            (Profile::Raid0, 0),
            (Profile::Raid10, 3),
            (Profile::Raid5, 1),
            (Profile::Raid6, 2),
            (Profile::Raid1, 3),
        ] {
            assert!(!profile.allows_stripes(stripes), "{profile:?} {stripes}");
        }
    }
}
