//! Whether a filesystem can be written, and what a transaction needs to know of it first.
//!
//! Whatever a writer would have to keep up to date and does not know is refused, by name.

use sealblock_block::Device as _;
use sealblock_btrfs::replicas::Storage;
use sealblock_btrfs::{Cursor, Filesystem, FsError, RootSource, TreeRoot};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::features::{CompatRo, Incompat};
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::chunk::{BlockGroupFlags, BlockGroupItem};
use sealblock_btrfs_format::items::device::DevItem;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::superblock::flags;

use crate::transaction::Transaction;

/// What a transaction needs.
pub struct Opened {
    /// That of the headers of nodes.
    pub chunk_tree_uuid: [u8; 16],
    /// The devices' items.
    pub devices: Vec<DevItem>,
    /// The trees that are always open.
    pub trees: Vec<u64>,
    /// What identifies the last replacement of a device; 0 without one.
    pub replacement: u32,
    groups: Vec<(u64, u64, BlockGroupItem)>,
}

impl Opened {
    /// Adds the block groups.
    pub fn add_groups(&self, transaction: &mut Transaction, storage: &Storage) {
        for (start, bytes, item) in &self.groups {
            transaction.space.add_group(*start, *bytes, item, storage.map.superblock_ranges(*start));
        }
    }
}

/// Checks that a filesystem can be written.
///
/// # Errors
/// The property that forbids it, or what cannot be read.
pub async fn check(filesystem: &Filesystem) -> Result<Opened, FsError> {
    check_superblock(filesystem)?;
    check_devices(filesystem)?;
    let replacement = check_trees(filesystem).await?;
    let root = filesystem.nodes().load(&filesystem.root_tree().expected()).await?;
    let header = *root.view().header();
    if header.backref_revision() == 0 {
        return Err(refused("its references are in the format from before the first release"));
    }
    let has_own = filesystem.storage().geometry().features.compat_ro.contains(CompatRo::BLOCK_GROUP_TREE);
    let of_groups = if has_own { objectid::BLOCK_GROUP_TREE } else { objectid::EXTENT_TREE };
    let mut trees = vec![objectid::EXTENT_TREE, objectid::DEV_TREE, objectid::FS_TREE, objectid::CSUM_TREE];
    trees.push(objectid::FREE_SPACE_TREE);
    trees.extend(has_own.then_some(objectid::BLOCK_GROUP_TREE));
    // Only old filesystems lack it.
    trees.extend(filesystem.tree(objectid::UUID_TREE).await?.map(|_| objectid::UUID_TREE));
    for id in &trees {
        tree(filesystem, *id).await?;
    }
    Ok(Opened {
        chunk_tree_uuid: header.chunk_tree_uuid,
        devices: filesystem.known_devices().values().map(|device| device.item).collect(),
        groups: groups(filesystem, tree(filesystem, of_groups).await?).await?,
        trees,
        replacement,
    })
}

fn refused(why: impl Into<String>) -> FsError {
    FsError::NotWritable(why.into())
}

fn check_superblock(filesystem: &Filesystem) -> Result<(), FsError> {
    let (superblock, features) = (filesystem.superblock(), filesystem.storage().geometry().features);
    features.check_writing()?;
    if !features.compat_ro.contains(CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID) {
        return Err(refused("it has no valid free space tree; mount it once with Linux and `space_cache=v2`"));
    }
    if !features.incompat.contains(Incompat::SKINNY_METADATA | Incompat::EXTENDED_IREF | Incompat::MIXED_BACKREF) {
        return Err(refused("it lacks skinny metadata or extended references of inodes; `btrfstune -r -x` adds them"));
    }
    if filesystem.has_log() {
        return Err(refused(
            "it has a log of syncs after the last transaction; mount it once with Linux, which replays it",
        ));
    }
    let set = superblock.flags.get();
    if set & flags::SEEDING != 0 {
        return Err(refused("it is a seed device"));
    }
    if set & (flags::METADUMP | flags::METADUMP_V2 | flags::CHANGING_FSID) != 0 {
        return Err(refused("it is an image of metadata, or a change of its UUID was interrupted"));
    }
    if set & flags::ERROR != 0 {
        return Err(refused("an error is recorded in its superblock; check it first"));
    }
    if !filesystem.roots().are_newest() || filesystem.roots().chunks.source != RootSource::Superblock {
        return Err(refused("it was opened from older roots than the newest ones"));
    }
    Ok(())
}

fn check_devices(filesystem: &Filesystem) -> Result<(), FsError> {
    let own = filesystem.storage().geometry().node_uuid;
    for (devid, device) in filesystem.known_devices() {
        if device.is_missing && device.item.fsid != own {
            return Err(refused(format!("it grew from a seed, device {devid}, which is not read together with it")));
        }
        if device.is_missing {
            return Err(refused(format!("device {devid} is missing")));
        }
    }
    if let Some(short) = filesystem.short_devices().first() {
        return Err(refused(short.to_string()));
    }
    if let Some(error) = filesystem.lost_chunks().first().or(filesystem.size_contradictions().first()) {
        return Err(refused(format!("its chunk tree is damaged: {error}")));
    }
    let sector_bytes = filesystem.storage().geometry().sector_bytes as usize;
    let needs_tags = filesystem.storage().devices.nodes_need_tags();
    for (devid, device) in filesystem.storage().devices.iter() {
        if device.is_stale {
            return Err(refused(format!("device {devid} ({}) missed transactions", device.name)));
        }
        if let Some(why) = device.why_unproven().filter(|_| needs_tags) {
            return Err(refused(format!(
                "device {devid} ({}) cannot show which of its nodes are good, as there are no checksums: {why}; if it has its tags nowhere, copy the files to a new filesystem",
                device.name
            )));
        }
        let block_bytes = device.device.geometry().block_size.bytes();
        if block_bytes > sector_bytes {
            return Err(refused(format!(
                "device {devid} ({}) has blocks of {block_bytes} bytes, and a sector has {sector_bytes}",
                device.name
            )));
        }
    }
    Ok(())
}

/// Returns what identifies the last replacement of a device.
async fn check_trees(filesystem: &Filesystem) -> Result<u32, FsError> {
    if filesystem.tree(objectid::QUOTA_TREE).await?.is_some() {
        return Err(refused("it has quotas; `btrfs quota disable` removes them"));
    }
    let roots = filesystem.root_tree();
    let balance = Key::new(objectid::BALANCE, ItemType::TEMPORARY_ITEM, 0);
    if filesystem.cursor(roots, balance..=balance).next().await?.is_some() {
        return Err(refused("a balance was interrupted; let Linux end it, or cancel it"));
    }
    let reloc = |offset| Key::new(objectid::TREE_RELOC, ItemType::ROOT_ITEM, offset);
    if filesystem.cursor(roots, reloc(0)..=reloc(u64::MAX)).next().await?.is_some() {
        return Err(refused("a relocation was interrupted; mount it once with Linux, which ends it"));
    }
    let devices = tree(filesystem, objectid::DEV_TREE).await?;
    let replace = Key::new(0, ItemType::DEV_REPLACE, 0);
    let mut cursor = filesystem.cursor(devices, replace..=replace);
    let Some((key, data)) = cursor.next().await? else { return Ok(0) };
    if let Ok(Item::DevReplace(item)) = Item::decode(key, data)
        && matches!(item.replace_state.get(), REPLACE_STARTED | REPLACE_SUSPENDED)
    {
        return Err(refused("a replacement of a device was interrupted; let Linux end it, or cancel it"));
    }
    let sum = ChecksumType::Crc32c.compute(data);
    Ok(sum.as_bytes().try_into().map_or(0, u32::from_le_bytes))
}

/// States of a replacement that has not ended.
const REPLACE_STARTED: u64 = 1;
const REPLACE_SUSPENDED: u64 = 4;

async fn tree(filesystem: &Filesystem, id: u64) -> Result<TreeRoot, FsError> {
    filesystem.tree(id).await?.ok_or_else(|| FsError::Absent(format!("tree {id}")))
}

/// The block groups: each chunk has one.
async fn groups(filesystem: &Filesystem, tree: TreeRoot) -> Result<Vec<(u64, u64, BlockGroupItem)>, FsError> {
    let mut groups = Vec::new();
    for (start, bytes) in filesystem.storage().map.ranges() {
        let key = Key::new(start, ItemType::BLOCK_GROUP_ITEM, bytes);
        let mut cursor = Cursor::new(filesystem.nodes(), tree, key..=key);
        let Some((key, data)) = cursor.next().await? else {
            return Err(refused(format!("the chunk at {start} has no block group")));
        };
        let Ok(Item::BlockGroup(item)) = Item::decode(key, data) else {
            return Err(refused(format!("the block group at {start} is damaged")));
        };
        let group = BlockGroupFlags::from_bits_retain(item.flags.get());
        if group.intersects(BlockGroupFlags::RAID5 | BlockGroupFlags::RAID6) {
            return Err(refused("it has block groups with parity"));
        }
        if group.profile() != filesystem.storage().map.profile(start) {
            return Err(refused(format!("the block group at {start} and its chunk have different profiles")));
        }
        groups.push((start, bytes, *item));
    }
    Ok(groups)
}
