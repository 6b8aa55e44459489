//! The memtable: the newest map entries, which are not durable yet.
//!
//! A finished write puts its map entries into the active part. A commit moves the active part to the immutable part,
//! where it stays until it is durable and in the block map's patches. A block is looked up in the active part, then in
//! the immutable part, then in the patches and the block map.

use std::cell::RefCell;

use sealblock_units::{Extent, Lba};

use crate::format::{MapEntry, MapEntryRun};
use crate::map::map_entries::MapEntries;

/// Map entries that neither the block map nor its patches have yet.
#[derive(Default)]
pub(crate) struct Memtable {
    active: RefCell<MapEntries>,
    immutable: RefCell<MapEntries>,
}

impl Memtable {
    /// Takes over what recovery found, for a volume that stays unchanged on the medium: it becomes the immutable part.
    pub fn recover(&self, entries: MapEntries) {
        *self.immutable.borrow_mut() = entries;
    }

    /// What recovery found, in order of the blocks.
    pub fn recovered(&self) -> Vec<MapEntryRun> {
        self.immutable.borrow().in_order()
    }

    /// The newest map entry of a block, if there is one here.
    pub fn get(&self, lba: Lba) -> Option<MapEntry> {
        let open = self.active.borrow().get(lba);
        open.or_else(|| self.immutable.borrow().get(lba))
    }

    /// Adds a map entry. Returns the one that it replaces, if no commit has taken that.
    pub fn put(&self, entry: MapEntry) -> Option<MapEntry> {
        self.active.borrow_mut().put(entry)
    }

    /// Adds the map entries of blocks without data. Returns those of single blocks that they replace, in order, if no
    /// commit has taken them.
    pub fn put_run(&self, run: MapEntryRun) -> Vec<MapEntry> {
        self.active.borrow_mut().put_run(run)
    }

    /// True if any block of an extent has a map entry here.
    pub fn meets(&self, extent: Extent) -> bool {
        let (start, end) = (extent.start().get(), extent.last().get() + 1);
        self.active.borrow().meets(start, end) || self.immutable.borrow().meets(start, end)
    }

    /// The number of blocks whose map entries no commit has taken.
    pub fn active_len(&self) -> usize {
        self.active.borrow().len()
    }

    /// The weight of the map entries that no commit has taken, in map entries of single blocks.
    pub fn active_weight(&self) -> usize {
        self.active.borrow().weight()
    }

    /// The maximum number of entries that these need in the log.
    pub fn active_log_entries(&self) -> usize {
        self.active.borrow().log_entries()
    }

    /// The number of blocks with map entries here. A block that changed during a commit counts twice.
    pub fn len(&self) -> usize {
        self.active.borrow().len() + self.immutable.borrow().len()
    }

    /// True if there are no map entries here.
    pub fn is_empty(&self) -> bool {
        self.active.borrow().is_empty() && self.immutable.borrow().is_empty()
    }

    /// Moves map entries that need at most `max` entries in the log to the immutable part. Returns them in order of
    /// their blocks. No other commit may be running.
    pub fn begin_commit(&self, max: usize) -> Vec<MapEntryRun> {
        let (mut open, mut committing) = (self.active.borrow_mut(), self.immutable.borrow_mut());
        debug_assert!(committing.is_empty(), "one commit at a time");
        if open.log_entries() <= max {
            std::mem::swap(&mut *open, &mut *committing);
        } else {
            *committing = open.take(max);
        }
        committing.in_order()
    }

    /// Drops the map entries of a commit, which are in the block map's patches now.
    pub fn end_commit(&self) {
        self.immutable.borrow_mut().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::MapEntryKind;

    fn entry(lba: u64, pbn: u32) -> MapEntry {
        MapEntry { pbn, kind: MapEntryKind::Stored, ..MapEntry::deallocated(Lba::new(lba)) }
    }

    #[test]
    fn the_newest_map_entry_of_a_block_is_found_and_the_replaced_one_given_back() {
        let memtable = Memtable::default();
        assert_eq!(memtable.put(entry(17, 1)), None);
        assert_eq!(memtable.put(entry(17, 2)).map(|old| old.pbn), Some(1));
        assert_eq!(memtable.begin_commit(100), [MapEntryRun::from(entry(17, 2))]);
        assert_eq!(memtable.put(entry(17, 3)), None, "the other is on its way to the log");
        assert_eq!(memtable.get(Lba::new(17)).map(|entry| entry.pbn), Some(3));
        assert_eq!(memtable.get(Lba::new(16)), None);
        memtable.end_commit();
        assert_eq!(memtable.active_len(), 1);
        assert!(!memtable.is_empty());
    }

    #[test]
    fn a_run_gives_back_what_was_never_on_its_way_to_the_log_and_is_newer_than_all_else() {
        let memtable = Memtable::default();
        (10..13).for_each(|lba| assert_eq!(memtable.put(entry(lba, lba as u32)), None));
        assert_eq!(memtable.begin_commit(100).len(), 3);
        assert_eq!(memtable.put(entry(12, 40)), None);
        let run = MapEntryRun { first: MapEntry::deallocated(Lba::new(11)), blocks: 50 };
        assert_eq!(memtable.put_run(run), [entry(12, 40)], "the others are on their way");
        let kind = |lba| memtable.get(Lba::new(lba)).map(|entry| entry.kind);
        let gone = Some(MapEntryKind::Deallocated);
        assert_eq!([10, 11, 60, 61].map(kind), [Some(MapEntryKind::Stored), gone, gone, None]);
        let meets = |start, blocks| memtable.meets(Extent::from_raw(start, blocks).unwrap());
        assert!(meets(0, 11) && meets(60, 5) && !meets(0, 10) && !meets(61, 100));
        assert_eq!((memtable.active_len(), memtable.len(), memtable.active_log_entries()), (50, 53, 1));
        memtable.end_commit();
        assert_eq!(memtable.begin_commit(100), [run]);
        memtable.end_commit();
        assert!(memtable.is_empty());
    }

    #[test]
    fn a_commit_takes_all_in_order_or_as_many_as_it_may() {
        let memtable = Memtable::default();
        let lbas = [900, 3, 40, 41, 2, 1 << 39];
        lbas.iter().for_each(|&lba| assert_eq!(memtable.put(entry(lba, 0)), None));
        let taken = memtable.begin_commit(32);
        assert!(taken.iter().map(MapEntryRun::start).eq([2, 3, 40, 41, 900, 1 << 39]));
        memtable.end_commit();
        (0..100).for_each(|lba| assert_eq!(memtable.put(entry(lba, 0)), None));
        let taken = memtable.begin_commit(40);
        assert!(taken.len() > 16 && taken.len() <= 40, "{}", taken.len());
        assert_eq!(memtable.active_len(), 100 - taken.len());
        assert!(taken.is_sorted_by_key(MapEntryRun::start));
    }
}
