//! Stripes of chunks against device extents, and devices against both; the system chunks of the superblock against the
//! chunk tree.

use std::collections::BTreeMap;

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::chunk::{BlockGroupFlags, Stripe};
use sealblock_btrfs_format::items::device::DevItem;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::Node;

use super::groups::Groups;
use super::report::{Place, Rule, WhyNotChecked};
use super::session::Session;
use crate::filesystem::Filesystem;

/// A range of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Range {
    devid: u64,
    offset: u64,
    bytes: u64,
    chunk: u64,
}

impl Range {
    fn place(&self, tree: u64) -> Place {
        let key = Key::new(self.devid, ItemType::DEV_EXTENT, self.offset);
        Place { logical: Some(self.chunk), ..Place::item(tree, key) }
    }
}

/// Device extents and device items.
#[derive(Default)]
pub(super) struct Devices {
    extents: Vec<Range>,
    items: BTreeMap<u64, DevItem>,
    pub has_lost: bool,
}

impl Devices {
    /// Takes the device extents of a leaf of the device tree. Leaves come in the order of their keys.
    pub fn take_extents(&mut self, session: &Session<'_>, leaf: &Node<'_>) {
        for (key, data) in leaf.entries() {
            let Ok(Item::DevExtent(extent)) = Item::decode(key, data) else { continue };
            let (bytes, chunk) = (extent.length.get(), extent.chunk_offset.get());
            let range = Range { devid: key.objectid, offset: key.offset, bytes, chunk };
            if let Some(last) = self.extents.last()
                && last.devid == range.devid
                && last.offset.saturating_add(last.bytes) > range.offset
            {
                let why = format!("the device extent overlaps the one at {}", last.offset);
                session.found(Rule::DeviceOverlap, range.place(objectid::DEV_TREE), why);
            }
            self.extents.push(range);
        }
    }

    /// Takes the devices of a leaf of the chunk tree.
    pub fn take_items(&mut self, leaf: &Node<'_>) {
        for (key, data) in leaf.entries() {
            if let Ok(Item::Device(item)) = Item::decode(key, data) {
                self.items.insert(item.devid.get(), *item);
            }
        }
    }

    /// Compares everything.
    pub fn finish(mut self, session: &Session<'_>, groups: &Groups) {
        if groups.has_lost_chunks {
            return;
        }
        check_system_chunks(session, groups);
        self.check_superblocks(session);
        if self.has_lost {
            return;
        }
        self.extents.sort_unstable();
        compare_stripes(session, groups, &self.extents);
        // Images of metadata have their chunks from other devices.
        if !session.fs.storage().devices.is_metadata_image() {
            self.check_uuids(session, groups);
        }
        let mut used: BTreeMap<u64, u64> = BTreeMap::new();
        for extent in &self.extents {
            let sum = used.entry(extent.devid).or_default();
            *sum = sum.saturating_add(extent.bytes);
            let end = extent.offset.saturating_add(extent.bytes);
            match self.items.get(&extent.devid) {
                None => {
                    let why = format!("the device extent is on device {}, which does not exist", extent.devid);
                    session.found(Rule::DeviceExtent, extent.place(objectid::DEV_TREE), why);
                }
                Some(item) if end > item.total_bytes.get() => {
                    let why = format!("the device extent ends at {end}, and the device at {}", item.total_bytes);
                    session.found(Rule::DeviceOverlap, extent.place(objectid::DEV_TREE), why);
                }
                Some(_) => {}
            }
        }
        for (devid, item) in &self.items {
            let (counted, used) = (item.bytes_used.get(), used.get(devid).copied().unwrap_or_default());
            if counted != used {
                let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, *devid);
                let why = format!("device {devid} counts {counted} used bytes, and its device extents have {used}");
                session.found(Rule::DeviceUsed, Place::item(objectid::CHUNK_TREE, key), why);
            }
        }
    }

    /// Linux finds the device of a stripe by number and UUID.
    fn check_uuids(&self, session: &Session<'_>, groups: &Groups) {
        for (chunk, facts) in &groups.chunks {
            for (devid, uuid) in facts.stripes.iter().map(|stripe| (stripe.devid.get(), stripe.dev_uuid)) {
                if self.items.get(&devid).is_some_and(|item| item.uuid != uuid) {
                    let why = format!("a stripe of the chunk has another UUID for device {devid} than the device");
                    session.found(Rule::DeviceExtent, Place::at(*chunk), why);
                }
            }
        }
    }

    /// Compares the devices with their items in their superblocks.
    fn check_superblocks(&self, session: &Session<'_>) {
        let fs: &Filesystem = session.fs;
        let own = session.geometry().node_uuid;
        for (devid, _) in self.items.iter().filter(|(_, item)| item.fsid != own) {
            // A seed has a filesystem of its own.
            if fs.known_devices().get(devid).is_some_and(|device| device.is_missing) {
                session.not_checked(WhyNotChecked::SeedDevice);
                continue;
            }
            let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, *devid);
            let why = format!("the item of device {devid} in the chunk tree has another filesystem's UUID");
            session.found(Rule::Superblock, Place::item(objectid::CHUNK_TREE, key), why);
        }
        // One that missed a superblock in a power cut has what was used before.
        let newest = session.geometry().generation;
        for (devid, device) in fs.storage().devices.iter().filter(|(_, device)| device.generation == newest) {
            let Some(item) = self.items.get(&devid) else { continue };
            let (own, in_tree) = (device.item.bytes_used.get(), item.bytes_used.get());
            if own != in_tree {
                let why = format!(
                    "the superblock of device {devid} counts {own} used bytes of it, and the chunk tree {in_tree}"
                );
                session.found(Rule::Superblock, Place::default(), why);
            }
        }
    }
}

/// Compares stripes and device extents, both ways.
fn compare_stripes(session: &Session<'_>, groups: &Groups, extents: &[Range]) {
    let mut stripes: Vec<Range> = Vec::new();
    for (chunk, facts) in &groups.chunks {
        let bytes = facts.stripe_bytes;
        let range =
            |stripe: &Stripe| Range { devid: stripe.devid.get(), offset: stripe.offset.get(), bytes, chunk: *chunk };
        stripes.extend(facts.stripes.iter().map(range));
    }
    stripes.sort_unstable();
    for pair in stripes.windows(2) {
        if pair[0].devid == pair[1].devid && pair[0].offset.saturating_add(pair[0].bytes) > pair[1].offset {
            let why = format!(
                "its stripe at byte {} of device {} overlaps that of the chunk at {}",
                pair[1].offset, pair[1].devid, pair[0].chunk
            );
            session.found(Rule::DeviceOverlap, Place::at(pair[1].chunk), why);
        }
    }
    for stripe in stripes.iter().filter(|stripe| extents.binary_search(stripe).is_err()) {
        let Range { devid, offset, bytes, chunk } = *stripe;
        let why =
            format!("the chunk has {bytes} bytes at {offset} on device {devid}, and there is no such device extent");
        session.found(Rule::DeviceExtent, Place::at(chunk), why);
    }
    for extent in extents.iter().filter(|extent| stripes.binary_search(extent).is_err()) {
        let why = format!("the device extent of {} bytes is no stripe of the chunk at {}", extent.bytes, extent.chunk);
        session.found(Rule::DeviceExtent, extent.place(objectid::DEV_TREE), why);
    }
}

/// Every system chunk is in the superblock and in the chunk tree, and both have the same item.
fn check_system_chunks(session: &Session<'_>, groups: &Groups) {
    let mut in_array: Vec<u64> = Vec::new();
    // Opening refuses an array with an invalid chunk.
    for (key, chunk) in session.fs.superblock().sys_chunks().map_while(Result::ok) {
        in_array.push(key.offset);
        let item = Item::Chunk(chunk).encode().unwrap_or_default();
        let why = match groups.chunks.get(&key.offset) {
            None => "the chunk is in the superblock, and not in the chunk tree",
            Some(facts) if facts.item != item => "the superblock and the chunk tree have different items of the chunk",
            Some(_) => continue,
        };
        session.found(Rule::SystemChunks, Place::at(key.offset), why);
    }
    for (start, facts) in &groups.chunks {
        let is_system = BlockGroupFlags::from_bits_retain(facts.flags).contains(BlockGroupFlags::SYSTEM);
        if is_system && !in_array.contains(start) {
            let why = "the system chunk is not in the superblock, so the chunk tree in it cannot be read";
            session.found(Rule::SystemChunks, Place::at(*start), why);
        }
    }
}
