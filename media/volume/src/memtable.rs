//! Records that the tables do not have yet.
//!
//! A write that is done puts its records into the open part. A commit takes the open part over as the committing part,
//! where it stays until it is durable and in the tables. A block is looked up in the open part, the committing part, and
//! then the tables.

use std::cell::RefCell;

use sealblock_units::Lba;

use crate::format::{MapEntry, MapEntryRun};
use crate::map_entries::MapEntries;

/// Records that the tables do not have yet.
#[derive(Default)]
pub(crate) struct Memtable {
    active: RefCell<MapEntries>,
    immutable: RefCell<MapEntries>,
}

impl Memtable {
    /// An overlay with these records in its committing part: what recovery found, for a volume opened read-only.
    pub fn recovered(records: MapEntries) -> Memtable {
        Memtable { active: RefCell::default(), immutable: RefCell::new(records) }
    }

    /// The newest record of a block, if it is here.
    pub fn get(&self, lba: Lba) -> Option<MapEntry> {
        let open = self.active.borrow().get(lba);
        open.or_else(|| self.immutable.borrow().get(lba))
    }

    /// Puts in a record; gives back the one it replaces, if that was never on its way to the log.
    pub fn put(&self, record: MapEntry) -> Option<MapEntry> {
        self.active.borrow_mut().insert(record)
    }

    /// Number of records that are not on their way to the log yet.
    pub fn active_len(&self) -> usize {
        self.active.borrow().len()
    }

    /// Records that these take in the log at most.
    pub fn active_log_entries(&self) -> usize {
        self.active.borrow().log_entries()
    }

    /// Number of records that the tables do not have yet; of a block that is changed during a commit, both.
    pub fn len(&self) -> usize {
        self.active.borrow().len() + self.immutable.borrow().len()
    }

    /// Whether everything is in the tables.
    pub fn is_empty(&self) -> bool {
        self.active.borrow().is_empty() && self.immutable.borrow().is_empty()
    }

    /// Moves what takes at most `most` records in the log to the committing part and lists these in order of their blocks.
    /// Nothing may be under way to the log.
    pub fn begin_commit(&self, most: usize) -> Vec<MapEntryRun> {
        let (mut open, mut committing) = (self.active.borrow_mut(), self.immutable.borrow_mut());
        debug_assert!(committing.is_empty(), "one commit at a time");
        if open.log_entries() <= most {
            std::mem::swap(&mut *open, &mut *committing);
        } else {
            *committing = open.take(most);
        }
        committing.in_order()
    }

    /// Forgets the records of a commit that are in the tables now.
    pub fn end_commit(&self) {
        self.immutable.borrow_mut().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::MapEntryKind;

    fn record(lba: u64, slot: u32) -> MapEntry {
        MapEntry { pbn: slot, kind: MapEntryKind::Stored, ..MapEntry::deallocated(Lba::new(lba)) }
    }

    #[test]
    fn the_newest_record_of_a_block_is_found_and_the_replaced_one_given_back() {
        let overlay = Memtable::default();
        assert_eq!(overlay.put(record(17, 1)), None);
        assert_eq!(overlay.put(record(17, 2)).map(|old| old.pbn), Some(1));
        assert_eq!(overlay.begin_commit(100), [MapEntryRun::from(record(17, 2))]);
        assert_eq!(overlay.put(record(17, 3)), None, "the other is on its way to the log");
        assert_eq!(overlay.get(Lba::new(17)).map(|record| record.pbn), Some(3));
        assert_eq!(overlay.get(Lba::new(16)), None);
        overlay.end_commit();
        assert_eq!(overlay.active_len(), 1);
        assert!(!overlay.is_empty());
    }

    #[test]
    fn a_commit_takes_all_in_order_or_as_many_as_it_may() {
        let overlay = Memtable::default();
        let lbas = [900, 3, 40, 41, 2, 1 << 39];
        lbas.iter().for_each(|&lba| assert_eq!(overlay.put(record(lba, 0)), None));
        let taken = overlay.begin_commit(32);
        assert!(taken.iter().map(MapEntryRun::start).eq([2, 3, 40, 41, 900, 1 << 39]));
        overlay.end_commit();
        (0..100).for_each(|lba| assert_eq!(overlay.put(record(lba, 0)), None));
        let taken = overlay.begin_commit(40);
        assert!(taken.len() > 16 && taken.len() <= 40, "{}", taken.len());
        assert_eq!(overlay.active_len(), 100 - taken.len());
        assert!(taken.is_sorted_by_key(MapEntryRun::start));
    }
}
