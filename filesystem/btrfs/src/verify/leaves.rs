//! What leaves show about data: which sectors have checksums, which files use sectors without, and which sectors lack
//! checksums that they should have.
//!
//! Leaves come in any order, but those of the checksum tree come before those of files: the data of a file are compared
//! with the checksums known when its leaf is read.

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::file_extent::FileExtent;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::Node;

use super::ranges::RangeList;
use super::report::WhyUnchecked;
use super::session::Session;
use super::trees::Tree;
use crate::tags::WrittenIn;

/// Ranges of data, by how they can be checked.
pub(super) struct Leaves {
    /// Sectors that have checksums.
    pub summed: RangeList,
    /// Sectors whose checksums are lost, if they had any.
    pub lost_sums: RangeList,
    /// The subset whose checksums are damaged, rather than on a missing device.
    pub damaged_sums: RangeList,
    /// Sectors of files with checksums that are unreadable because these checksums are damaged.
    pub unreadable: RangeList,
    /// Sectors of files without checksums, with what their tags must show.
    pub unsummed: RangeList<Option<WrittenIn>>,
    /// Sectors that should have checksums but have none.
    pub holes: RangeList,
    /// Sectors without checksums that belong to lost inodes.
    pub unknown: RangeList,
}

impl Leaves {
    /// Empty lists.
    pub fn new(most: usize) -> Leaves {
        let list = || RangeList::new(most);
        Leaves {
            summed: list(),
            lost_sums: list(),
            damaged_sums: list(),
            unreadable: list(),
            unsummed: RangeList::new(most),
            holes: list(),
            unknown: list(),
        }
    }

    /// All lists, sorted.
    pub fn sort_and_merge(&mut self) {
        let Leaves { summed, lost_sums, damaged_sums, unreadable, unsummed, holes, unknown } = self;
        unsummed.sort_and_merge();
        [summed, lost_sums, damaged_sums, unreadable, holes, unknown].into_iter().for_each(RangeList::sort_and_merge);
    }

    /// True if some ranges did not fit.
    pub fn is_cut(&self) -> bool {
        let Leaves { summed, lost_sums, damaged_sums, unreadable, unsummed, holes, unknown } = self;
        let mut others = [summed, lost_sums, damaged_sums, unreadable, holes, unknown].into_iter();
        unsummed.is_cut() || others.any(RangeList::is_cut)
    }

    /// Records that a part of a tree cannot be read, because it is damaged or because a device is missing.
    pub fn lost(&mut self, tree: &Tree, from: Option<Key>, before: Option<Key>, is_damaged: bool) {
        if tree.root.id == objectid::CSUM_TREE {
            let (start, end) = (from.map_or(0, |key| key.offset), before.map_or(u64::MAX, |key| key.offset));
            self.lost_sums.add(start, end);
            if is_damaged {
                self.damaged_sums.add(start, end);
            }
        }
    }

    /// Adds a leaf.
    pub async fn take(&mut self, session: &Session<'_>, tree: &Tree, view: &Node<'_>) {
        match tree.root.id {
            objectid::CSUM_TREE => self.take_sums(session, view),
            // The files of this tree are space caches of version 1.
            objectid::ROOT_TREE => self.take_files(session, tree, view).await,
            id if objectid::is_subvolume(id) => self.take_files(session, tree, view).await,
            _ => {}
        }
    }

    fn take_sums(&mut self, session: &Session<'_>, view: &Node<'_>) {
        let geometry = session.fs.storage().geometry();
        let (sector, sum) = (u64::from(geometry.sector_bytes), geometry.checksum.bytes());
        for (key, data) in view.entries().filter(|(key, _)| key.item_type == ItemType::EXTENT_CSUM) {
            // The checker has ensured that a run ends below the highest address.
            self.summed.add(key.offset, key.offset.saturating_add((data.len() / sum) as u64 * sector));
        }
    }

    async fn take_files(&mut self, session: &Session<'_>, tree: &Tree, view: &Node<'_>) {
        let mut inode: Option<(u64, Option<InodeFlags>)> = None;
        for (key, data) in view.entries() {
            let extent = match key.item_type {
                ItemType::INODE_ITEM => {
                    if let Ok(Item::Inode(item)) = Item::decode(key, data) {
                        inode = Some((key.objectid, Some(item.flags())));
                    }
                    continue;
                }
                ItemType::EXTENT_DATA => FileExtent::decode(data),
                _ => continue,
            };
            let Some(extent) = extent.ok() else { continue };
            let Some(range) = stored_range(&extent) else { continue };
            let flags = match inode {
                Some((ino, flags)) if ino == key.objectid => flags,
                _ => {
                    // The item of the inode is in an earlier leaf.
                    let found = session.fs.inode(tree.root, key.objectid).await.ok();
                    let flags = found.map(|inode| inode.item.flags());
                    inode = Some((key.objectid, flags));
                    flags
                }
            };
            self.take_extent(session, flags, extent.head().generation.get(), range);
        }
    }

    fn take_extent(
        &mut self,
        session: &Session<'_>,
        flags: Option<InodeFlags>,
        generation: u64,
        (start, end): (u64, u64),
    ) {
        if let Some(flags) = flags.filter(|flags| flags.contains(InodeFlags::NODATASUM)) {
            let written = WrittenIn { generation, is_in_place: flags.contains(InodeFlags::NODATACOW) };
            self.unsummed.add_with(session.provable(written), start, end);
            return;
        }
        for (from, to) in self.summed.gaps(start, end) {
            if flags.is_none() {
                self.unknown.add(from, to);
                continue;
            }
            self.damaged_sums.within(from, to).for_each(|(from, to)| self.unreadable.add(from, to));
            self.lost_sums.gaps(from, to).into_iter().for_each(|(from, to)| self.holes.add(from, to));
        }
    }

    /// Counts data that cannot be checked.
    pub fn count_unchecked(&self, session: &Session<'_>) {
        let bytes: u64 = self.unknown.iter().map(|(start, end)| end - start).sum();
        if bytes > 0 {
            session.unchecked(WhyUnchecked::InodeLost, bytes);
        }
        if self.lost_sums.iter().next().is_some() {
            session.unchecked(WhyUnchecked::ChecksumsLost, 0);
        }
        if self.is_cut() {
            session.unchecked(WhyUnchecked::TooManyRanges, 0);
        }
    }
}

/// The stored sectors that an extent of a file uses; for a compressed extent all of them. `None` for a hole, an inline
/// extent, and one that was never written.
pub(super) fn stored_range(extent: &FileExtent) -> Option<(u64, u64)> {
    let FileExtent::Regular(head, location) = extent else { return None };
    if location.is_hole() {
        return None;
    }
    let (start, bytes) = match head.compression {
        0 => (location.disk_bytenr.get().checked_add(location.offset.get())?, location.num_bytes.get()),
        _ => (location.disk_bytenr.get(), location.disk_num_bytes.get()),
    };
    Some((start, start.checked_add(bytes)?))
}
