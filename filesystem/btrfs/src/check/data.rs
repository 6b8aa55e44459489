//! Data of files: the references that file extents make, and where checksums must be and must not be.
//!
//! Leaves of the checksum tree come before those of files.

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::file_extent::FileExtent;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::Node;

use super::extents::Extents;
use super::references::{Maker, Reference};
use super::report::{Place, Rule, WhyNotChecked};
use super::session::Session;
use crate::verify::ranges::RangeList;

/// The inode that the last items were of, and its flags if its INODE_ITEM was among them.
pub(super) type LastInode = Option<(u64, Option<InodeFlags>)>;

/// Ranges of data with and without checksums.
pub(super) struct Sums {
    /// Those that have checksums.
    summed: RangeList,
    /// Those whose checksums are lost.
    lost: RangeList,
    /// Those that files with checksums wrote.
    written: RangeList,
    /// Those of files without checksums, and those that were never written.
    unsummed: RangeList,
    /// Where the last item with checksums ends.
    last_end: u64,
}

impl Sums {
    pub fn new(most: usize) -> Sums {
        let list = || RangeList::new(most);
        Sums { summed: list(), lost: list(), written: list(), unsummed: list(), last_end: 0 }
    }

    /// Records that the items between two keys of the checksum tree are lost.
    pub fn lost(&mut self, from: Option<Key>, before: Option<Key>) {
        self.lost.add(from.map_or(0, |key| key.offset), before.map_or(u64::MAX, |key| key.offset));
    }

    /// Takes a leaf of the checksum tree. Leaves come in the order of their keys.
    pub fn take(&mut self, session: &Session<'_>, leaf: &Node<'_>) {
        let sum_bytes = session.geometry().checksum.bytes() as u64;
        for (key, data) in leaf.entries().filter(|(key, _)| key.item_type == ItemType::EXTENT_CSUM) {
            let bytes = (data.len() as u64 / sum_bytes).saturating_mul(session.sector_bytes());
            let end = key.offset.saturating_add(bytes);
            if key.offset < self.last_end {
                let why = format!("the checksums begin before those before them end, at {}", self.last_end);
                session.found(Rule::ChecksumOverlap, Place::item(objectid::CSUM_TREE, key), why);
            }
            self.last_end = self.last_end.max(end);
            self.summed.add(key.offset, end);
        }
    }

    /// Prepares for leaves of files, after the last leaf of the checksum tree.
    pub fn sort(&mut self) {
        self.summed.sort_and_merge();
        self.lost.sort_and_merge();
    }

    /// Compares a file extent with the checksums.
    fn take_extent(&mut self, session: &Session<'_>, place: Place, flags: Option<InodeFlags>, extent: &FileExtent<'_>) {
        // Whether data of a lost inode should have checksums is unknown.
        let (Some(flags), Some(location)) = (flags, extent.location()) else { return };
        let start = location.disk_bytenr.get();
        let (from, bytes) = match extent.head().compression {
            0 => (start.saturating_add(location.offset.get()), location.num_bytes.get()),
            _ => (start, location.disk_num_bytes.get()),
        };
        let to = from.saturating_add(bytes);
        if flags.contains(InodeFlags::NODATASUM) && extent.head().compression != 0 {
            let why = "the extent is compressed, and the inode has NODATASUM";
            session.found(Rule::FileExtent, place, why);
        }
        if flags.contains(InodeFlags::NODATASUM) || matches!(extent, FileExtent::Prealloc(..)) {
            self.unsummed.add(from, to);
            return;
        }
        self.written.add(from, to);
        if self.summed.is_cut() || self.lost.is_cut() {
            return;
        }
        for (from, to) in self.summed.gaps(from, to) {
            for (from, to) in self.lost.gaps(from, to) {
                let why = format!("{} bytes of data at {from} have no checksums", to - from);
                session.found(Rule::NoChecksum, place, why);
            }
        }
    }

    /// Reports checksums where none should be.
    pub fn finish(mut self, session: &Session<'_>, extents: &Extents) {
        let Sums { summed, lost, written, unsummed, .. } = &mut self;
        for list in [&mut *summed, lost, &mut *written, &mut *unsummed] {
            list.sort_and_merge();
            if list.is_cut() {
                session.not_checked(WhyNotChecked::TooManyRanges);
            }
        }
        // The log may have the file extents of such data.
        if extents.is_complete() && !session.fs.has_log() {
            report_alone(session, summed, extents);
        }
        if written.is_cut() {
            return;
        }
        for (from, to) in unsummed.iter() {
            for (from, to) in summed.within(from, to) {
                for (from, to) in written.gaps(from, to) {
                    let bytes = to - from;
                    let why = format!("{bytes} bytes have checksums, and are of files without, or were never written");
                    session.found(Rule::ChecksumOdd, Place::at(from), why);
                }
            }
        }
    }
}

/// Reports checksums of what is in no data extent.
fn report_alone(session: &Session<'_>, summed: &RangeList, extents: &Extents) {
    let mut data = extents.all().iter().filter(|extent| extent.is_data()).peekable();
    for (start, end) in summed.iter() {
        let mut at = start;
        while at < end {
            while data.next_if(|extent| extent.end() <= at).is_some() {}
            let next = data.peek().map_or(end, |extent| extent.start.clamp(at, end));
            if next > at {
                let why = format!("{} bytes have checksums, and are in no data extent", next - at);
                session.found(Rule::ChecksumAlone, Place::at(at), why);
            }
            at = data.peek().filter(|extent| extent.start <= next).map_or(end, |extent| extent.end().min(end));
        }
    }
}

/// Takes the file extents of a leaf of any tree. With `is_full`, the leaf itself refers to the data, and not its tree.
pub(super) fn take_files(
    session: &Session<'_>,
    (extents, sums): (&mut Extents, &mut Sums),
    (tree, is_full): (u64, bool),
    leaf: &Node<'_>,
    last: &mut LastInode,
) {
    let (bytenr, owner) = (leaf.header().bytenr.get(), leaf.header().owner.get());
    let has_sums = objectid::is_subvolume(tree) || tree == objectid::ROOT_TREE;
    for (key, data) in leaf.entries() {
        let ino = key.objectid;
        if last.is_none_or(|(last, _)| last != ino) {
            *last = Some((ino, None));
        }
        let extent = match key.item_type {
            ItemType::INODE_ITEM => {
                if let Ok(Item::Inode(item)) = Item::decode(key, data) {
                    *last = Some((ino, Some(item.flags())));
                }
                continue;
            }
            ItemType::EXTENT_DATA => FileExtent::decode(data),
            _ => continue,
        };
        let Ok(extent) = extent else { continue };
        let Some(location) = extent.location().filter(|location| !location.is_hole()) else { continue };
        let place = Place { ino: Some(ino), ..Place::item(tree, key) };
        let offset = key.offset.wrapping_sub(location.offset.get());
        let maker = if is_full { Maker::Leaf(bytenr) } else { Maker::File { root: owner, ino, offset } };
        let reference = Reference { extent: location.disk_bytenr.get(), maker };
        extents.made_to_data(session, reference, location.disk_num_bytes.get(), place);
        if has_sums {
            sums.take_extent(session, place, last.and_then(|(_, flags)| flags), &extent);
        }
    }
}
