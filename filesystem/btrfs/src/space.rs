//! The space for data and trees: its profiles, and how much is used.

use std::collections::BTreeMap;

use sealblock_btrfs_format::features::CompatRo;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::chunk::{BlockGroupFlags, Profile};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use crate::cursor::Cursor;
use crate::error::FsError;
use crate::filesystem::Filesystem;

/// All block groups of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// Logical bytes.
    pub total_bytes: u64,
    /// Bytes on devices.
    pub device_bytes: u64,
    /// Used logical bytes.
    pub used_bytes: u64,
}

impl Filesystem {
    /// The space by use and profile ([`BlockGroupFlags`]).
    ///
    /// # Errors
    /// If the chunk tree, or the tree with block groups, cannot be read.
    pub async fn space(&self) -> Result<BTreeMap<u64, Space>, FsError> {
        let mut all = BTreeMap::new();
        let mut cursor = Cursor::all(self.nodes(), self.chunk_root());
        while let Some((key, data)) = cursor.next().await? {
            if let Ok(Item::Chunk(chunk)) = Item::decode(key, data) {
                let space: &mut Space = all.entry(of_use(chunk.flags())).or_default();
                let (length, count) = (chunk.head.length.get(), chunk.head.num_stripes.get());
                let data_stripes = chunk.flags().profile().map_or(1, |profile| profile.data_stripes(count)).max(1);
                space.total_bytes += length;
                space.device_bytes += (length / u64::from(data_stripes)).saturating_mul(u64::from(count));
            }
        }
        let has_own = self.storage().geometry().features.compat_ro.contains(CompatRo::BLOCK_GROUP_TREE);
        let id = if has_own { objectid::BLOCK_GROUP_TREE } else { objectid::EXTENT_TREE };
        let tree = self.tree(id).await?.ok_or_else(|| FsError::Absent("tree with block groups".into()))?;
        // The key of a block group consists of its address and length, so one look-up for each is cheaper than a walk
        // over all extents.
        for (logical, bytes) in self.storage().map.ranges() {
            let key = Key::new(logical, ItemType::BLOCK_GROUP_ITEM, bytes);
            let mut cursor = self.cursor(tree, key..=key);
            if let Some((key, data)) = cursor.next().await?
                && let Ok(Item::BlockGroup(group)) = Item::decode(key, data)
            {
                let flags = BlockGroupFlags::from_bits_retain(group.flags.get());
                all.entry(of_use(flags)).or_default().used_bytes += group.used.get();
            }
        }
        Ok(all)
    }
}

fn of_use(flags: BlockGroupFlags) -> u64 {
    flags.intersection(BlockGroupFlags::TYPES | BlockGroupFlags::PROFILES).bits()
}

/// The name of a profile.
pub fn profile_name(profile: Profile) -> &'static str {
    match profile {
        Profile::Single => "single",
        Profile::Dup => "DUP",
        Profile::Raid0 => "RAID0",
        Profile::Raid1 => "RAID1",
        Profile::Raid1C3 => "RAID1C3",
        Profile::Raid1C4 => "RAID1C4",
        Profile::Raid10 => "RAID10",
        Profile::Raid5 => "RAID5",
        Profile::Raid6 => "RAID6",
    }
}

/// The name of a block group's use.
pub fn kind_name(flags: BlockGroupFlags) -> &'static str {
    let mixed = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
    match flags.intersection(BlockGroupFlags::TYPES) {
        kind if kind == mixed => "data and metadata",
        BlockGroupFlags::DATA => "data",
        BlockGroupFlags::METADATA => "metadata",
        BlockGroupFlags::SYSTEM => "system",
        _ => "unknown",
    }
}
