//! Places the first block groups on the devices.
//!
//! Block groups follow each other by address from 1 MiB on, and so do their stripes on each device. They have the sizes
//! that Linux gives new ones, with three differences: the system group has stripes of 8 MiB, as that of `mkfs.btrfs`;
//! the others are at least as large as Linux needs to work; and no stripe takes more than a quarter of what is left of
//! a device, so that all of them fit.

use std::cmp::Reverse;

use sealblock_btrfs::chunk_map::ChunkMap;
use sealblock_btrfs_format::items::chunk::{BlockGroupFlags, ChunkBuf, ChunkHead, Profile, STRIPE_BYTES, Stripe};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::{ITEM_HEAD_BYTES, leaf_capacity};
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, Superblock};

use super::options::{FormatError, FormatOptions, NewDevice};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Where the first block group begins, by address and on every device: boot loaders and the first superblock are
/// before it.
pub(super) const FIRST: u64 = MIB;
/// The largest stripe of a chunk on a device.
const MAX_STRIPE: u64 = GIB;
/// Sizes of stripes are multiples of this unless there is no room.
const STEP: u64 = 16 * MIB;
/// The stripe of the system group.
const SYSTEM_STRIPE: u64 = 8 * MIB;
/// The smallest stripe of a group for data.
const MIN_DATA_STRIPE: u64 = 16 * MIB;
/// The smallest stripe of a group with metadata, in nodes: Linux reserves space for nodes before it changes anything.
const MIN_METADATA_NODES: u64 = 1024;
/// The smallest stripe of such a group, in bytes.
const MIN_METADATA_STRIPE: u64 = 32 * MIB;
/// Stripes of a system chunk, so that the superblock has room for two of them.
const MAX_SYSTEM_STRIPES: usize = 58;

/// The use of a block group, from which its sizes follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    System,
    Metadata,
    Data,
    Mixed,
}

/// A block group of the new filesystem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockGroup {
    /// Its first address.
    pub logical: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Its use and profile.
    pub flags: BlockGroupFlags,
    /// Devices and offsets of its stripes.
    pub stripes: Vec<(u64, u64)>,
    /// Bytes of each stripe.
    pub stripe_bytes: u64,
}

/// A device while block groups are placed on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedDevice {
    pub devid: u64,
    pub uuid: [u8; 16],
    /// Bytes in whole sectors.
    pub bytes: u64,
    /// Bytes of its stripes.
    pub used: u64,
}

impl PlannedDevice {
    fn next(&self) -> u64 {
        FIRST + self.used
    }

    /// What is left, in whole units of stripes.
    fn hole(&self) -> u64 {
        self.bytes.saturating_sub(self.next()) / STRIPE_BYTES * STRIPE_BYTES
    }
}

/// All block groups, by address: the system group, then that for nodes, then that for data.
#[derive(Debug)]
pub(super) struct Layout {
    pub devices: Vec<PlannedDevice>,
    pub groups: Vec<BlockGroup>,
    pub map: ChunkMap,
    pub total_bytes: u64,
}

/// The smallest device with which a filesystem of these options can be made, in bytes. Each of several devices must be
/// as large.
pub fn minimum_bytes(options: &FormatOptions) -> u64 {
    let stripes = uses(options).into_iter().map(|(of, profile)| {
        let on_one = if profile == Profile::Dup { 2 } else { 1 };
        on_one * of.min_stripe(options)
    });
    FIRST + stripes.sum::<u64>()
}

fn uses(options: &FormatOptions) -> Vec<(Use, Profile)> {
    let mut uses = vec![(Use::System, options.metadata)];
    match options.is_mixed() {
        true => uses.push((Use::Mixed, options.metadata)),
        false => uses.extend([(Use::Metadata, options.metadata), (Use::Data, options.data)]),
    }
    uses
}

impl Use {
    fn flags(self) -> BlockGroupFlags {
        match self {
            Use::System => BlockGroupFlags::SYSTEM,
            Use::Metadata => BlockGroupFlags::METADATA,
            Use::Data => BlockGroupFlags::DATA,
            Use::Mixed => BlockGroupFlags::DATA | BlockGroupFlags::METADATA,
        }
    }

    fn min_stripe(self, options: &FormatOptions) -> u64 {
        match self {
            Use::System => SYSTEM_STRIPE,
            Use::Metadata | Use::Mixed => MIN_METADATA_STRIPE.max(MIN_METADATA_NODES * u64::from(options.node_bytes)),
            Use::Data => MIN_DATA_STRIPE,
        }
    }

    /// The bytes of a stripe, if so many bytes of each device are left for it.
    fn stripe(self, options: &FormatOptions, data_stripes: u64, hole: u64, total_bytes: u64) -> u64 {
        let max = match self {
            Use::System => return SYSTEM_STRIPE,
            Use::Metadata if total_bytes > 50 * GIB => GIB,
            Use::Metadata => 256 * MIB,
            Use::Data | Use::Mixed => 10 * GIB,
        };
        let share = (max.min(total_bytes / 10) / data_stripes.max(1)).next_multiple_of(STEP);
        let stripe = share.min(MAX_STRIPE).min(hole / 4).max(self.min_stripe(options));
        stripe / STRIPE_BYTES * STRIPE_BYTES
    }
}

/// The least number of devices for a profile.
fn needed(profile: Profile) -> usize {
    match profile {
        Profile::Single | Profile::Dup | Profile::Raid0 => 1,
        Profile::Raid1 | Profile::Raid10 | Profile::Raid5 => 2,
        Profile::Raid1C3 | Profile::Raid6 => 3,
        Profile::Raid1C4 => 4,
    }
}

/// The number of devices that a chunk is on.
fn devices_of(profile: Profile, given: usize, most: usize) -> usize {
    match profile {
        Profile::Raid0 | Profile::Raid5 | Profile::Raid6 => given.min(most),
        Profile::Raid10 => given.min(most) & !1,
        fixed => needed(fixed),
    }
}

impl Layout {
    /// Places all block groups.
    ///
    /// # Errors
    /// If there are not enough devices, or one is too small.
    pub fn plan(options: &FormatOptions, new: &[NewDevice]) -> Result<Layout, FormatError> {
        for profile in [options.data, options.metadata] {
            let (needed, given) = (needed(profile), new.len());
            if given < needed {
                return Err(FormatError::TooFewDevices { profile, needed, given });
            }
        }
        let (minimum, sector) = (minimum_bytes(options), u64::from(options.sector_bytes));
        let (mut devices, mut total_bytes) = (Vec::new(), 0_u64);
        for (devid, device) in (1..).zip(new) {
            let bytes = device.bytes / sector * sector;
            if bytes < minimum {
                return Err(FormatError::DeviceTooSmall { devid, bytes: device.bytes, minimum });
            }
            let sum = total_bytes.checked_add(bytes).filter(|sum| *sum <= i64::MAX as u64);
            total_bytes = sum.ok_or(FormatError::TooLarge)?;
            devices.push(PlannedDevice { devid, uuid: device.uuid, bytes, used: 0 });
        }
        let mut layout = Layout { devices, groups: Vec::new(), map: ChunkMap::default(), total_bytes };
        uses(options).into_iter().try_for_each(|(of, profile)| layout.add(options, of, profile))?;
        Ok(layout)
    }

    /// Places a block group behind the others, on the devices with the most space.
    fn add(&mut self, options: &FormatOptions, of: Use, profile: Profile) -> Result<(), FormatError> {
        let most = (leaf_capacity(options.node_bytes) - ITEM_HEAD_BYTES - size_of::<ChunkHead>()) / size_of::<Stripe>();
        let most = if of == Use::System { most.min(MAX_SYSTEM_STRIPES) } else { most };
        let mut by_space: Vec<usize> = (0..self.devices.len()).collect();
        by_space.sort_by_key(|index| Reverse(self.devices[*index].hole()));
        by_space.truncate(devices_of(profile, self.devices.len(), most));
        let on_one = if profile == Profile::Dup { 2 } else { 1 };
        let hole = by_space.iter().map(|index| self.devices[*index].hole()).min().unwrap_or(0) / on_one;
        // At most as many as an item has room for, which 16 bits can count.
        let data_stripes = u64::from(profile.data_stripes((by_space.len() as u64 * on_one) as u16));
        let stripe_bytes = of.stripe(options, data_stripes, hole, self.total_bytes);
        if stripe_bytes > hole || data_stripes == 0 {
            return Err(FormatError::NoRoom);
        }
        let mut stripes = Vec::new();
        for index in by_space {
            let device = &mut self.devices[index];
            for _ in 0..on_one {
                stripes.push((device.devid, device.next()));
                device.used += stripe_bytes;
            }
        }
        let logical = self.groups.last().map_or(FIRST, |last| last.logical + last.bytes);
        let flags = of.flags() | profile.flag();
        let group = BlockGroup { logical, bytes: stripe_bytes * data_stripes, flags, stripes, stripe_bytes };
        self.map.add(logical, &self.chunk(&group, options.sector_bytes).as_item())?;
        self.groups.push(group);
        Ok(())
    }

    /// The chunk of a block group.
    pub fn chunk(&self, group: &BlockGroup, sector_bytes: u32) -> ChunkBuf {
        let stripe = |(devid, offset): &(u64, u64)| Stripe {
            devid: (*devid).into(),
            offset: (*offset).into(),
            dev_uuid: self.devices[*devid as usize - 1].uuid,
        };
        ChunkBuf::new(group.bytes, group.flags, sector_bytes, group.stripes.iter().map(stripe).collect())
    }

    /// The group for the nodes of a tree.
    pub fn group_of_tree(&self, owner: u64) -> &BlockGroup {
        if owner == objectid::CHUNK_TREE { &self.groups[0] } else { &self.groups[1] }
    }

    /// The addresses of so many nodes in a group, rising. They are multiples of the size of a node from the start of
    /// the group, so none crosses a border of 64 KiB. The 64 KiB from the place of a superblock on are left free,
    /// whether the device is large enough to have that superblock or not.
    ///
    /// # Errors
    /// If there is no room.
    pub fn node_addresses(&self, group: &BlockGroup, node_bytes: u32, count: usize) -> Result<Vec<u64>, FormatError> {
        let (node, mut addresses) = (u64::from(node_bytes), Vec::with_capacity(count));
        let mut at = 0;
        while addresses.len() < count {
            if at + node > group.bytes {
                return Err(FormatError::NoRoom);
            }
            let located = self.map.locate(group.logical + at, node)?;
            let is_free =
                |offset: u64| COPY_OFFSETS.iter().all(|copy| offset + node <= *copy || offset >= copy + STRIPE_BYTES);
            if located.copies.iter().all(|place| is_free(place.offset)) {
                addresses.push(group.logical + at);
            }
            at += node;
        }
        Ok(addresses)
    }
}

impl BlockGroup {
    /// The key of its chunk.
    pub(super) fn chunk_key(&self) -> Key {
        Key::new(objectid::FIRST_CHUNK_TREE, ItemType::CHUNK_ITEM, self.logical)
    }
}

/// The places of all superblocks that a device of so many bytes may have had, also one of an older filesystem.
pub(super) fn superblock_places(device_bytes: u64) -> impl Iterator<Item = u64> {
    let end = |offset: u64| offset + size_of::<Superblock>() as u64;
    COPY_OFFSETS.into_iter().filter(move |offset| end(*offset) <= device_bytes)
}
