//! Which devices get tags with data without checksums, and what the record of a commit says of it. In a filesystem without
//! checksums all devices get them, also with nodes.
//!
//! Invariant: what the engine writes of such data to a tagged device has the tag of its transaction, from the opening on.
//! The record's windows say so, so a window never goes on over anything that may have changed without the engine: another
//! program's transaction, a device that had no tags before, as after a copy of its bytes, or one that was replaced.

use std::cell::RefCell;
use std::collections::BTreeSet;

use sealblock_btrfs::devices::DeviceSet;
use sealblock_btrfs::tags::DataTags;
use sealblock_btrfs_format::commit_record::CommitRecord;
use sealblock_btrfs_format::items::device::DevItem;
use sealblock_btrfs_format::own_windows::OwnWindows;
use sealblock_btrfs_format::superblock::Superblock;

/// What is known of tags while a filesystem is written.
pub struct Tagging {
    tagged: RefCell<BTreeSet<u64>>,
    windows: RefCell<OwnWindows>,
    replacement: u32,
}

impl Tagging {
    /// For devices that are about to be written, from a transaction on. `replacement` identifies the last replacement of a
    /// device.
    pub fn begin(superblock: &Superblock, devices: &DeviceSet, replacement: u32, generation: u64) -> Tagging {
        let tagged: BTreeSet<u64> =
            devices.iter().filter(|(_, device)| device.has_tags()).map(|(devid, _)| devid).collect();
        let record = CommitRecord::read(superblock);
        let has_same = |record: &CommitRecord| {
            let is_same = |(devid, uuid): (u64, [u8; 16])| record.is_tagged(uuid) == tagged.contains(&devid);
            record.replacement == replacement
                && devices.iter().all(|(devid, one)| !one.has_lost_tags && is_same((devid, one.item.uuid)))
        };
        let is_same = record.as_ref().is_some_and(has_same);
        let before = record.map(|record| record.windows).unwrap_or_default();
        // Without tags there is nothing to be known of the past, either.
        let windows = match tagged.is_empty() {
            true => OwnWindows::default(),
            false => before.with(superblock.generation.get(), is_same, generation),
        };
        Tagging { tagged: RefCell::new(tagged), windows: RefCell::new(windows), replacement }
    }

    /// True if any device gets tags.
    pub fn is_any(&self) -> bool {
        !self.tagged.borrow().is_empty()
    }

    /// True if a device gets tags.
    pub fn has(&self, devid: u64) -> bool {
        self.tagged.borrow().contains(&devid)
    }

    /// After the first commit, before any data are read: demands tags of the devices that keep them. Returns one that does
    /// not.
    pub async fn confirm(&self, devices: &DeviceSet, generation: u64) -> Option<u64> {
        let all: Vec<u64> = self.tagged.borrow().iter().copied().collect();
        let mut forgetful = None;
        for devid in all {
            if !devices.keeps_tags(devid, generation).await {
                tracing::warn!(devid, "a device does not keep application tags, which so prove nothing");
                self.tagged.borrow_mut().remove(&devid);
                forgetful = Some(devid);
            }
        }
        devices.set_tags(DataTags::writing(&self.windows.borrow(), self.tagged.borrow().clone()));
        forgetful
    }

    /// All data without checksums have their tags: all transactions up to now count as the engine's.
    pub fn cover_all(&self, devices: &DeviceSet) {
        let last = self.windows.borrow().last();
        let all = last.map(|last| OwnWindows::default().with(0, false, 1).with(1, true, last));
        *self.windows.borrow_mut() = all.unwrap_or_default();
        devices.set_tags(DataTags::writing(&self.windows.borrow(), self.tagged.borrow().clone()));
    }

    /// Data that are there may have lost their tags: the engine's transactions begin with the open one.
    pub fn forget(&self, devices: &DeviceSet, generation: u64) {
        *self.windows.borrow_mut() = OwnWindows::default().with(0, false, generation);
        devices.set_tags(DataTags::writing(&self.windows.borrow(), self.tagged.borrow().clone()));
    }

    /// The record of a commit.
    pub fn record(&self, oldest: u64, items: &[DevItem], generation: u64, is_host_sealed: bool) -> CommitRecord {
        let mut windows = self.windows.borrow_mut();
        if let Some(last) = windows.last() {
            *windows = windows.with(last, true, generation);
        }
        let tagged = self.tagged.borrow();
        let devices = items.iter().map(|item| (item.uuid, tagged.contains(&item.devid.get())));
        let mut record = CommitRecord::new(generation, oldest, devices);
        (record.windows, record.replacement) = (windows.clone(), self.replacement);
        record.is_host_sealed = is_host_sealed;
        record
    }
}
