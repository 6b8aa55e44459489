//! The chunks: which logical addresses exist, and what of the devices they use.
//!
//! Invariants:
//! - A chunk is made where the devices have room according to the last durable transaction. What a removed chunk had can
//!   be used again only when its removal is durable ([`Chunks::settle_removed`]); until then the durable trees lead there.
//! - Logical addresses are not used again while the filesystem is open: a new chunk begins behind all others.
//! - The first MiB of a device is never used. A chunk may lie over a later copy of the superblock; its range there is not
//!   allocated.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use sealblock_btrfs::chunk_map::{ChunkMap, MapError, Place};
use sealblock_btrfs_format::error::TooLong;
use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::chunk::{BlockGroupFlags, ChunkBuf, Profile, STRIPE_BYTES, Stripe};
use sealblock_btrfs_format::items::device::{DevExtent, DevItem};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use zerocopy::IntoBytes;

use crate::space::Runs;

/// The first byte of a device that a chunk may have.
const FIRST_BYTE: u64 = 1 << 20;
/// The maximum bytes of a stripe.
const MAX_STRIPE: u64 = 1 << 30;
/// The minimum bytes of a stripe of a new chunk: less helps little, and there may be only so many chunks.
const MIN_STRIPE: u64 = 1 << 20;
/// A large stripe is a multiple of this.
const STRIPE_UNIT: u64 = 16 << 20;
/// From this size of all devices on, chunks of metadata are larger.
const LARGE_FILESYSTEM: u64 = 50 << 30;
/// The stripes of a chunk at most, so that a chunk of the system fits into the superblock several times.
const MAX_STRIPES: usize = 16;

/// What of a device is used.
#[derive(Clone, Debug)]
struct DeviceSpace {
    item: DevItem,
    free: Runs,
}

/// All chunks of the filesystem.
#[derive(Clone, Debug)]
pub struct Chunks {
    map: Rc<ChunkMap>,
    devices: BTreeMap<u64, DeviceSpace>,
    chunk_tree_uuid: [u8; 16],
    sector_bytes: u32,
    /// Behind all chunks that there ever were while the filesystem is open.
    next_logical: u64,
    /// Chunks whose removal is not durable yet.
    removed: Vec<u64>,
    /// The last result of [`Chunks::room`], which is the same while there are the same chunks.
    known_room: RefCell<Option<KnownRoom>>,
}

/// The room for chunks of a kind, beside the chunks of a map.
#[derive(Clone, Debug)]
struct KnownRoom {
    map: Rc<ChunkMap>,
    flags: BlockGroupFlags,
    bytes: u64,
}

/// A chunk that is to be made or removed, and the changes of items that do it.
pub struct ChunkChange {
    /// Its logical address.
    pub logical: u64,
    /// Its bytes.
    pub bytes: u64,
    /// What it is.
    pub chunk: ChunkBuf,
    /// Changes in the chunk tree.
    pub in_chunk_tree: ItemChanges,
    /// Changes in the device tree.
    pub in_device_tree: ItemChanges,
}

impl ChunkChange {
    /// The key of the chunk's item.
    pub fn key(&self) -> Key {
        Key::new(objectid::FIRST_CHUNK_TREE, ItemType::CHUNK_ITEM, self.logical)
    }
}

impl Chunks {
    /// The chunks of a map, on these devices.
    pub fn new(map: Rc<ChunkMap>, devices: &[DevItem], chunk_tree_uuid: [u8; 16], sector_bytes: u32) -> Chunks {
        let mut free: BTreeMap<u64, DeviceSpace> = BTreeMap::new();
        for item in devices {
            let mut runs = Runs::default();
            let end = item.total_bytes.get() / STRIPE_BYTES * STRIPE_BYTES;
            let _is_large_enough = runs.insert(FIRST_BYTE..end.max(FIRST_BYTE));
            free.insert(item.devid.get(), DeviceSpace { item: *item, free: runs });
        }
        for (logical, _) in map.ranges() {
            for (place, bytes) in map.stripes(logical) {
                if let Some(device) = free.get_mut(&place.devid) {
                    device.free.remove_free(place.offset..place.offset.saturating_add(bytes));
                }
            }
        }
        let next_logical = map.ranges().map(|(start, bytes)| start.saturating_add(bytes)).max().unwrap_or(0);
        Chunks {
            map,
            devices: free,
            chunk_tree_uuid,
            sector_bytes,
            next_logical,
            removed: Vec::new(),
            known_room: RefCell::default(),
        }
    }

    /// The places of logical addresses.
    pub fn map(&self) -> &Rc<ChunkMap> {
        &self.map
    }

    /// The items of the devices.
    pub fn devices(&self) -> impl Iterator<Item = &DevItem> {
        self.devices.values().map(|device| &device.item)
    }

    /// A new chunk for this use and profile; `None` if the devices have no room.
    pub fn plan(&self, flags: BlockGroupFlags) -> Option<ChunkChange> {
        let profile = flags.profile()?;
        let (stripes, stripe_bytes) = self.choose_stripes(flags, profile)?;
        let data = u64::from(profile.data_stripes(stripes.len() as u16));
        let bytes = stripe_bytes.checked_mul(data)?;
        self.next_logical.checked_add(bytes)?;
        let chunk = ChunkBuf::new(bytes, flags, self.sector_bytes, stripes);
        self.change(self.next_logical, chunk, stripe_bytes, true).ok()
    }

    /// The bytes of all chunks for this use and profile for which the devices have room.
    pub fn room(&self, flags: BlockGroupFlags) -> u64 {
        let Some(profile) = flags.profile() else { return 0 };
        let known = self.known_room.borrow().clone();
        if let Some(known) = known.filter(|known| Rc::ptr_eq(&known.map, &self.map) && known.flags == flags) {
            return known.bytes;
        }
        let (mut rest, mut bytes) = (self.clone(), 0_u64);
        while let Some((stripes, stripe_bytes)) = rest.choose_stripes(flags, profile) {
            let data = u64::from(profile.data_stripes(stripes.len() as u16));
            bytes = bytes.saturating_add(stripe_bytes.saturating_mul(data));
            for stripe in stripes {
                let (start, devid) = (stripe.offset.get(), stripe.devid.get());
                let device = rest.devices.get_mut(&devid);
                device.into_iter().for_each(|device| device.free.remove_free(start..start + stripe_bytes));
            }
        }
        *self.known_room.borrow_mut() = Some(KnownRoom { map: Rc::clone(&self.map), flags, bytes });
        bytes
    }

    /// The removal of a chunk that exists; nothing may use it any more.
    pub fn plan_removal(&self, logical: u64, bytes: u64, flags: BlockGroupFlags) -> Option<ChunkChange> {
        let places = self.map.stripes(logical);
        let (_, stripe_bytes) = *places.first()?;
        let stripe =
            |place: &Place| Stripe { devid: place.devid.into(), offset: place.offset.into(), dev_uuid: [0; 16] };
        let stripes = places.iter().map(|(place, _)| stripe(place)).collect();
        self.change(logical, ChunkBuf::new(bytes, flags, self.sector_bytes, stripes), stripe_bytes, false).ok()
    }

    /// The changes of items that make or remove a chunk.
    fn change(&self, logical: u64, chunk: ChunkBuf, stripe_bytes: u64, is_new: bool) -> Result<ChunkChange, TooLong> {
        let bytes = chunk.head.length.get();
        let (in_chunk_tree, in_device_tree) = (ItemChanges::new(), ItemChanges::new());
        let mut change = ChunkChange { logical, bytes, chunk, in_chunk_tree, in_device_tree };
        let key = change.key();
        match is_new {
            true => change.in_chunk_tree.insert(key, change.chunk.encode()?),
            false => change.in_chunk_tree.delete(key),
        }
        for (devid, item) in self.items_with(&change.chunk, stripe_bytes, is_new) {
            let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, devid);
            change.in_chunk_tree.replace(key, item.as_bytes().to_vec());
        }
        for stripe in &change.chunk.stripes {
            let key = Key::new(stripe.devid.get(), ItemType::DEV_EXTENT, stripe.offset.get());
            let extent = DevExtent {
                chunk_tree: objectid::CHUNK_TREE.into(),
                chunk_objectid: objectid::FIRST_CHUNK_TREE.into(),
                chunk_offset: logical.into(),
                length: stripe_bytes.into(),
                chunk_tree_uuid: self.chunk_tree_uuid,
            };
            match is_new {
                true => change.in_device_tree.insert(key, extent.as_bytes().to_vec()),
                false => change.in_device_tree.delete(key),
            }
        }
        Ok(change)
    }

    /// The items of the devices of a chunk, with the bytes in use that they get.
    fn items_with(&self, chunk: &ChunkBuf, stripe_bytes: u64, is_new: bool) -> BTreeMap<u64, DevItem> {
        let mut items = BTreeMap::new();
        for devid in chunk.stripes.iter().map(|stripe| stripe.devid.get()) {
            let Some(device) = self.devices.get(&devid) else { continue };
            let item = items.entry(devid).or_insert(device.item);
            let used = item.bytes_used.get();
            item.bytes_used = match is_new {
                true => used.saturating_add(stripe_bytes),
                false => used.saturating_sub(stripe_bytes),
            }
            .into();
        }
        items
    }

    /// The stripes of a new chunk, and their bytes.
    fn choose_stripes(&self, flags: BlockGroupFlags, profile: Profile) -> Option<(Vec<Stripe>, u64)> {
        let on_one = if profile == Profile::Dup { 2 } else { 1 };
        let mut devices: Vec<(u64, u64, &DeviceSpace)> = self
            .devices
            .values()
            .filter_map(|device| {
                let longest = device.free.iter().map(|run| run.end - run.start).max()?;
                (longest >= on_one * MIN_STRIPE).then_some((longest, device.free.free_bytes(), device))
            })
            .collect();
        // The longest run first, then the most free bytes; then the device's number, so that the choice is always the same.
        devices.sort_by_key(|(longest, free, device)| (std::cmp::Reverse((*longest, *free)), device.item.devid.get()));
        let count = device_count(profile, devices.len().min(MAX_STRIPES))?;
        devices.truncate(count);
        let smallest = devices.iter().map(|(longest, ..)| *longest).min()? / on_one;
        let data = u64::from(profile.data_stripes((count as u64 * on_one) as u16));
        let stripe_bytes = self.stripe_bytes(flags, smallest, data)?;
        let mut stripes = Vec::new();
        for (_, _, device) in devices {
            let run = device.free.iter().find(|run| run.end - run.start >= on_one * stripe_bytes)?;
            for index in 0..on_one {
                let offset = run.start + index * stripe_bytes;
                stripes.push(Stripe { devid: device.item.devid, offset: offset.into(), dev_uuid: device.item.uuid });
            }
        }
        Some((stripes, stripe_bytes))
    }

    /// The bytes of a stripe, of which a device has at most `room`.
    fn stripe_bytes(&self, flags: BlockGroupFlags, room: u64, data_stripes: u64) -> Option<u64> {
        let total: u64 = self.devices.values().map(|device| device.item.total_bytes.get()).fold(0, u64::saturating_add);
        let most = if flags.contains(BlockGroupFlags::DATA) {
            10 * MAX_STRIPE
        } else if flags.contains(BlockGroupFlags::SYSTEM) {
            32 << 20
        } else if total > LARGE_FILESYSTEM {
            1 << 30
        } else {
            256 << 20
        };
        let most = most.min(total / 10);
        let mut bytes = room.min(MAX_STRIPE);
        if bytes.saturating_mul(data_stripes) > most {
            bytes = (most / data_stripes).next_multiple_of(STRIPE_UNIT).min(bytes);
        }
        bytes = bytes / STRIPE_BYTES * STRIPE_BYTES;
        (bytes >= MIN_STRIPE).then_some(bytes)
    }

    /// A planned chunk is made: its addresses have places at once.
    ///
    /// # Errors
    /// If it overlaps another one.
    pub fn add(&mut self, change: &ChunkChange) -> Result<(), MapError> {
        let mut map = ChunkMap::clone(&self.map);
        map.add(change.logical, &change.chunk.as_item())?;
        self.map = Rc::new(map);
        self.next_logical = change.logical.saturating_add(change.bytes);
        let stripes = self.map.stripes(change.logical);
        let stripe_bytes = stripes.first().map_or(0, |(_, bytes)| *bytes);
        for (devid, item) in self.items_with(&change.chunk, stripe_bytes, true) {
            if let Some(device) = self.devices.get_mut(&devid) {
                device.item = item;
            }
        }
        for (place, bytes) in stripes {
            if let Some(device) = self.devices.get_mut(&place.devid) {
                device.free.remove_free(place.offset..place.offset + bytes);
            }
        }
        Ok(())
    }

    /// A chunk is removed. It keeps its places until that is durable.
    pub fn remove(&mut self, change: &ChunkChange) {
        let stripe_bytes = self.map.stripes(change.logical).first().map_or(0, |(_, bytes)| *bytes);
        for (devid, item) in self.items_with(&change.chunk, stripe_bytes, false) {
            if let Some(device) = self.devices.get_mut(&devid) {
                device.item = item;
            }
        }
        self.removed.push(change.logical);
    }

    /// Takes the chunks that were removed in the open transaction.
    pub fn take_removed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.removed)
    }

    /// The removal of these chunks is durable: their places are free.
    pub fn settle_removed(&mut self, removed: &[u64]) {
        if removed.is_empty() {
            return;
        }
        let mut map = ChunkMap::clone(&self.map);
        for logical in removed {
            for (place, bytes) in map.stripes(*logical) {
                if let Some(device) = self.devices.get_mut(&place.devid) {
                    let was_used = device.free.insert(place.offset..place.offset + bytes);
                    debug_assert!(was_used, "a chunk had these bytes");
                }
            }
            map.remove(*logical);
        }
        self.map = Rc::new(map);
    }
}

/// The number of devices of a new chunk, of those that have room.
fn device_count(profile: Profile, there: usize) -> Option<usize> {
    let count = match profile {
        Profile::Single | Profile::Dup => 1,
        Profile::Raid1 => 2,
        Profile::Raid1C3 => 3,
        Profile::Raid1C4 => 4,
        Profile::Raid0 => there,
        Profile::Raid10 => there / 2 * 2,
        Profile::Raid5 | Profile::Raid6 => return None,
    };
    (count > 0 && count <= there).then_some(count)
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    fn device(devid: u64, mebibytes: u64) -> DevItem {
        DevItem { devid: devid.into(), total_bytes: (mebibytes << 20).into(), ..DevItem::new_zeroed() }
    }

    fn chunks(sizes: &[u64]) -> Chunks {
        let devices: Vec<DevItem> = (1..).zip(sizes).map(|(devid, size)| device(devid, *size)).collect();
        Chunks::new(Rc::default(), &devices, [9; 16], 4096)
    }

    #[test]
    fn chunks_are_made_until_the_devices_are_full_and_never_overlap() {
        for (profile, sizes) in [
            (Profile::Single, &[700, 300][..]),
            (Profile::Dup, &[500]),
            (Profile::Raid0, &[900, 400, 400]),
            (Profile::Raid1, &[900, 400, 400]),
            (Profile::Raid1C3, &[300, 300, 300, 300]),
            (Profile::Raid10, &[300, 200, 300, 300, 250]),
        ] {
            let mut chunks = chunks(sizes);
            let (room, mut all) = (chunks.room(BlockGroupFlags::DATA | profile.flag()), Vec::new());
            while let Some(change) = chunks.plan(BlockGroupFlags::DATA | profile.flag()) {
                chunks.add(&change).unwrap();
                all.push(change);
            }
            assert_eq!(all.iter().map(|change| change.bytes).sum::<u64>(), room);
            assert_eq!(chunks.room(BlockGroupFlags::DATA | profile.flag()), 0);
            let used: u64 = chunks.devices().map(|item| item.bytes_used.get()).sum();
            let stripes: usize = all.iter().map(|change| change.chunk.stripes.len()).sum();
            println!("{profile:?}: {} chunks, {stripes} stripes, {} MiB", all.len(), used >> 20);
            let mut ranges: Vec<(u64, u64, u64)> = Vec::new();
            for change in &all {
                let stripes = chunks.map().stripes(change.logical);
                ranges.extend(stripes.iter().map(|(place, bytes)| (place.devid, place.offset, place.offset + bytes)));
            }
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1));
            assert!(
                ranges
                    .iter()
                    .all(|(devid, start, end)| { *start >= FIRST_BYTE && *end <= sizes[*devid as usize - 1] << 20 })
            );
            assert_eq!(ranges.iter().map(|(_, start, end)| end - start).sum::<u64>(), used);
            // What is removed is free only when that is durable.
            let first = &all[0];
            let removal = chunks.plan_removal(first.logical, first.bytes, first.chunk.as_item().flags()).unwrap();
            chunks.remove(&removal);
            assert!(chunks.plan(BlockGroupFlags::DATA | profile.flag()).is_none());
            assert!(chunks.map().locate(first.logical, 1).is_ok());
            let removed = chunks.take_removed();
            chunks.settle_removed(&removed);
            assert!(chunks.map().locate(first.logical, 1).is_err());
            let again = chunks.plan(BlockGroupFlags::DATA | profile.flag()).unwrap();
            assert_eq!(again.bytes, first.bytes);
            assert!(again.logical >= all.last().unwrap().logical + all.last().unwrap().bytes);
        }
    }

    #[test]
    fn profiles_that_lack_devices_and_devices_that_are_too_small_give_none() {
        assert!(chunks(&[500]).plan(BlockGroupFlags::DATA | BlockGroupFlags::RAID1).is_none());
        assert!(chunks(&[500, 1]).plan(BlockGroupFlags::METADATA | BlockGroupFlags::RAID1).is_none());
        assert!(chunks(&[1]).plan(BlockGroupFlags::DATA).is_none());
        assert!(chunks(&[]).plan(BlockGroupFlags::DATA).is_none());
        assert!(chunks(&[500, 500, 500]).plan(BlockGroupFlags::DATA | BlockGroupFlags::RAID5).is_none());
    }
}
