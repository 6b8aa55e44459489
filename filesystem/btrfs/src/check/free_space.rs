//! The free space tree against the extent tree: in each block group, what is free is what no extent has.
//!
//! Leaves come in the order of their keys, so the items of one block group follow each other. Only the runs of one
//! block group are in memory at a time.

use std::collections::BTreeSet;

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::chunk::FreeSpaceInfo;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::Node;

use super::extents::{Extent, Extents};
use super::groups::Groups;
use super::report::{Place, Rule, WhyNotChecked};
use super::session::Session;

/// A block group while its items come.
struct Current {
    key: Key,
    count: u32,
    is_bitmap: bool,
    /// Free runs, joined where they touch.
    runs: Vec<(u64, u64)>,
    /// Items of runs.
    items: u64,
    /// True if it has no block group, or if parts of it are lost or do not fit.
    is_ignored: bool,
}

/// The free space tree.
pub(super) struct FreeSpace {
    current: Option<Current>,
    /// Block groups that have an info.
    seen: BTreeSet<u64>,
    /// Where the last block group ends. Those that overlap are a finding, and are not compared, so that no extent is
    /// compared twice.
    last_end: u64,
    /// True if nodes of the tree are lost.
    has_lost: bool,
    most_runs: usize,
}

impl FreeSpace {
    pub fn new(most_runs: usize) -> FreeSpace {
        FreeSpace { current: None, seen: BTreeSet::new(), last_end: 0, has_lost: false, most_runs }
    }

    /// Records that a node of the tree is lost.
    pub fn lost(&mut self) {
        self.has_lost = true;
        // What follows may belong to a block group whose info is lost.
        self.current = None;
    }

    /// Takes a leaf.
    pub fn take(&mut self, session: &Session<'_>, groups: &Groups, extents: &Extents, leaf: &Node<'_>) {
        for (key, data) in leaf.entries() {
            match Item::decode(key, data) {
                Ok(Item::FreeSpaceInfo(info)) => {
                    self.finish_group(session, extents);
                    self.begin(session, groups, key, info);
                }
                Ok(Item::Empty) if key.item_type == ItemType::FREE_SPACE_EXTENT => {
                    self.add(session, key, false, [(key.objectid, key.offset)].into_iter());
                }
                Ok(Item::FreeSpaceBitmap(bitmap)) => {
                    let runs = runs_of(bitmap, key, session.sector_bytes());
                    self.add(session, key, true, runs);
                }
                _ => {}
            }
        }
    }

    fn begin(&mut self, session: &Session<'_>, groups: &Groups, key: Key, info: &FreeSpaceInfo) {
        let (start, bytes) = (key.objectid, key.offset);
        let place = Place::item(objectid::FREE_SPACE_TREE, key);
        let is_ignored = match groups.groups.get(&start) {
            _ if groups.has_lost_groups => false,
            Some(group) if group.bytes == bytes => false,
            Some(group) => {
                let why = format!("the free space is of {bytes} bytes, and the block group has {}", group.bytes);
                session.found(Rule::FreeSpace, place, why);
                true
            }
            None => {
                // Older versions of mkfs leave these behind.
                session.note(format!("the free space tree has the block group at {start}, which was removed"));
                true
            }
        };
        let is_ignored = is_ignored || start < self.last_end;
        self.last_end = self.last_end.max(start.saturating_add(bytes));
        self.seen.insert(start);
        let is_bitmap = info.flags.get() & FreeSpaceInfo::USING_BITMAPS != 0;
        let count = info.extent_count.get();
        self.current = Some(Current { key, count, is_bitmap, runs: Vec::new(), items: 0, is_ignored });
    }

    fn add(&mut self, session: &Session<'_>, key: Key, is_bitmap: bool, runs: impl Iterator<Item = (u64, u64)>) {
        let place = Place::item(objectid::FREE_SPACE_TREE, key);
        let Some(current) = &mut self.current else {
            if !self.has_lost {
                session.found(Rule::FreeSpace, place, "the free space is before the info of any block group");
            }
            return;
        };
        let end = key.objectid.saturating_add(key.offset);
        if key.objectid < current.key.objectid || end > current.key.objectid.saturating_add(current.key.offset) {
            if !self.has_lost {
                let why = format!("the free space is not in the block group of the info before it, {}", current.key);
                session.found(Rule::FreeSpace, place, why);
            }
            current.is_ignored = true;
            return;
        }
        if current.is_bitmap != is_bitmap {
            let why = "the info of the block group announces free space in the other form";
            session.found(Rule::FreeSpace, place, why);
            current.is_ignored = true;
        }
        current.items += 1;
        for (start, bytes) in runs {
            if current.runs.len() >= self.most_runs {
                session.not_checked(WhyNotChecked::TooManyRanges);
                current.is_ignored = true;
                return;
            }
            let end = start.saturating_add(bytes);
            match current.runs.last_mut() {
                Some(last) if last.1 == start => last.1 = end,
                Some(last) if last.1 > start => {
                    let why = format!("the free space overlaps that before it, which ends at {}", last.1);
                    session.found(Rule::FreeSpace, place, why);
                    last.1 = last.1.max(end);
                }
                _ => current.runs.push((start, end)),
            }
        }
    }

    /// Compares the block group whose items have all come.
    fn finish_group(&mut self, session: &Session<'_>, extents: &Extents) {
        let Some(current) = self.current.take().filter(|current| !current.is_ignored) else { return };
        let place =
            Place { logical: Some(current.key.objectid), ..Place::item(objectid::FREE_SPACE_TREE, current.key) };
        let runs = if current.is_bitmap { current.runs.len() as u64 } else { current.items };
        if runs != u64::from(current.count) {
            let why = format!("the info counts {} free runs, and there are {runs}", current.count);
            session.found(Rule::FreeSpaceCount, place, why);
        }
        if !extents.is_complete() {
            return;
        }
        let (start, end) = (current.key.objectid, current.key.objectid.saturating_add(current.key.offset));
        let mut recorded = current.runs.iter().copied();
        for expected in gaps(extents.all(), start, end) {
            let found = recorded.next();
            if found != Some(expected) {
                report(session, place, Some(expected), found);
                return;
            }
        }
        if let Some(found) = recorded.next() {
            report(session, place, None, Some(found));
        }
    }

    /// Finishes the last block group, and reports those that are absent.
    pub fn finish(mut self, session: &Session<'_>, groups: &Groups, extents: &Extents) {
        self.finish_group(session, extents);
        if self.has_lost || groups.has_lost_groups {
            return;
        }
        for start in groups.groups.keys().filter(|start| !self.seen.contains(start)) {
            session.found(Rule::FreeSpace, Place::at(*start), "the block group is not in the free space tree");
        }
    }
}

/// The first difference of a block group.
fn report(session: &Session<'_>, place: Place, expected: Option<(u64, u64)>, found: Option<(u64, u64)>) {
    let text = |run: Option<(u64, u64)>| match run {
        Some((start, end)) => format!("{} bytes from {start} on", end - start),
        None => "nothing more".to_owned(),
    };
    let (expected, found) = (text(expected), text(found));
    let why = format!(
        "by the extent tree {expected} are free, and by the free space tree {found}; differences behind are not listed"
    );
    session.found(Rule::FreeSpace, place, why);
}

/// The ranges from `start` to `end` that no extent has.
fn gaps(extents: &[Extent], start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    let first = extents.partition_point(|extent| extent.end() <= start);
    let within = extents[first..].iter().take_while(move |extent| extent.start < end);
    let ends = within.map(|extent| (extent.start, extent.end())).chain([(end, end)]);
    ends.scan(start, |at, (from, to)| {
        let gap = (*at, from);
        *at = (*at).max(to);
        Some(gap)
    })
    .filter(|(from, to)| from < to)
}

/// The free runs of a bitmap.
fn runs_of(bitmap: &[u8], key: Key, sector: u64) -> impl Iterator<Item = (u64, u64)> {
    let sectors = key.offset / sector;
    let is_free = move |at: u64| {
        let byte = bitmap.get((at / 8) as usize).copied().unwrap_or_default();
        byte >> (at % 8) & 1 == 1
    };
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < sectors && !is_free(at) {
            at += 1;
        }
        let first = at;
        while at < sectors && is_free(at) {
            at += 1;
        }
        (at > first).then(|| (key.objectid.saturating_add(first * sector), (at - first) * sector))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_sectors_from_the_lowest_on() {
        let key = Key::new(1 << 20, ItemType::FREE_SPACE_BITMAP, 12 * 4096);
        let runs: Vec<_> = runs_of(&[0b1000_0011, 0b1111_0001], key, 4096).collect();
        let at = |sector: u64| (1 << 20) + sector * 4096;
        assert_eq!(runs, [(at(0), 8192), (at(7), 8192)], "bits behind the last sector do not count");
    }
}
