//! Records that the tables do not have yet.
//!
//! A write that is done puts its records into the open part. A commit takes the open part over as the committing part,
//! where it stays until it is durable and in the tables. A block is looked up in the open part, the committing part, and
//! then the tables.
//!
//! Records are kept in groups of neighbours: a long write then costs one look-up in a map for many blocks, and a commit
//! finds them almost in order.

use std::cell::RefCell;

use rustc_hash::FxHashMap;
use sealblock_units::Lba;

use crate::format::Record;

/// Blocks of a group. A group of one record takes as much memory as a full one, so it is kept small.
const GROUP: u64 = 16;

/// The records of some neighbouring blocks.
#[derive(Clone)]
struct Group {
    present: u16,
    records: [Record; GROUP as usize],
}

/// Records by block.
#[derive(Clone, Default)]
pub(crate) struct Records {
    groups: FxHashMap<u64, Group>,
    len: usize,
}

impl Records {
    /// Number of records.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The record of a block.
    pub fn get(&self, lba: Lba) -> Option<&Record> {
        let group = self.groups.get(&(lba.get() / GROUP))?;
        let index = (lba.get() % GROUP) as usize;
        (group.present >> index & 1 == 1).then(|| &group.records[index])
    }

    /// Puts in a record; gives back the one it replaces.
    pub fn insert(&mut self, record: Record) -> Option<Record> {
        let index = (record.lba.get() % GROUP) as usize;
        let blank = Group { present: 0, records: [Record::deallocated(Lba::ZERO); GROUP as usize] };
        let group = self.groups.entry(record.lba.get() / GROUP).or_insert(blank);
        let replaced = std::mem::replace(&mut group.records[index], record);
        let bit = 1 << index;
        if group.present & bit != 0 {
            return Some(replaced);
        }
        group.present |= bit;
        self.len += 1;
        None
    }

    /// Every record, in order of the blocks.
    pub fn in_order(&self) -> Vec<Record> {
        let mut keys: Vec<u64> = self.groups.keys().copied().collect();
        keys.sort_unstable();
        let mut records = Vec::with_capacity(self.len);
        for key in keys {
            let group = &self.groups[&key];
            let present = (0..GROUP as usize).filter(|index| group.present >> index & 1 == 1);
            records.extend(present.map(|index| group.records[index]));
        }
        records
    }

    /// Takes out groups until there are at least `most` records, or none are left.
    fn take(&mut self, most: usize) -> Records {
        let mut taken = Records::default();
        let keys: Vec<u64> = self.groups.keys().copied().collect();
        for key in keys {
            if taken.len + GROUP as usize > most {
                break;
            }
            if let Some(group) = self.groups.remove(&key) {
                let len = group.present.count_ones() as usize;
                (self.len, taken.len) = (self.len - len, taken.len + len);
                taken.groups.insert(key, group);
            }
        }
        taken
    }

    fn clear(&mut self) {
        self.groups.clear();
        self.len = 0;
    }
}

/// Records that the tables do not have yet.
#[derive(Default)]
pub(crate) struct Overlay {
    open: RefCell<Records>,
    committing: RefCell<Records>,
}

impl Overlay {
    /// An overlay with these records in its committing part: what recovery found, for a volume opened read-only.
    pub fn recovered(records: Records) -> Overlay {
        Overlay { open: RefCell::default(), committing: RefCell::new(records) }
    }

    /// The newest record of a block, if it is here.
    pub fn get(&self, lba: Lba) -> Option<Record> {
        let open = self.open.borrow().get(lba).copied();
        open.or_else(|| self.committing.borrow().get(lba).copied())
    }

    /// Puts in a record; gives back the one it replaces, if that was never on its way to the log.
    pub fn put(&self, record: Record) -> Option<Record> {
        self.open.borrow_mut().insert(record)
    }

    /// Number of records that are not on their way to the log yet.
    pub fn open_len(&self) -> usize {
        self.open.borrow().len()
    }

    /// Whether everything is in the tables.
    pub fn is_empty(&self) -> bool {
        self.open.borrow().len() == 0 && self.committing.borrow().len() == 0
    }

    /// Moves at most `most` records to the committing part and lists them in order of their blocks, each with
    /// `generation`. Nothing may be under way to the log.
    pub fn begin_commit(&self, most: usize, generation: u16) -> Vec<Record> {
        let (mut open, mut committing) = (self.open.borrow_mut(), self.committing.borrow_mut());
        debug_assert!(committing.len() == 0, "one commit at a time");
        if open.len() <= most {
            std::mem::swap(&mut *open, &mut *committing);
        } else {
            *committing = open.take(most);
        }
        let mut records = committing.in_order();
        records.iter_mut().for_each(|record| record.generation = generation);
        records
    }

    /// Forgets the records of a commit that are in the tables now.
    pub fn end_commit(&self) {
        self.committing.borrow_mut().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(lba: u64, slot: u32) -> Record {
        Record { slot, ..Record::deallocated(Lba::new(lba)) }
    }

    #[test]
    fn the_newest_record_of_a_block_is_found_and_the_replaced_one_given_back() {
        let overlay = Overlay::default();
        assert_eq!(overlay.put(record(17, 1)), None);
        assert_eq!(overlay.put(record(17, 2)).map(|old| old.slot), Some(1));
        assert_eq!(overlay.begin_commit(100, 9), [Record { generation: 9, ..record(17, 2) }]);
        assert_eq!(overlay.put(record(17, 3)), None, "the other is on its way to the log");
        assert_eq!(overlay.get(Lba::new(17)).map(|record| record.slot), Some(3));
        assert_eq!(overlay.get(Lba::new(16)), None);
        overlay.end_commit();
        assert_eq!(overlay.open_len(), 1);
        assert!(!overlay.is_empty());
    }

    #[test]
    fn a_commit_takes_all_in_order_or_as_many_as_it_may() {
        let overlay = Overlay::default();
        let lbas = [900, 3, 40, 41, 2, 1 << 39];
        lbas.iter().for_each(|&lba| assert_eq!(overlay.put(record(lba, 0)), None));
        let taken = overlay.begin_commit(32, 1);
        assert!(taken.iter().map(|record| record.lba.get()).eq([2, 3, 40, 41, 900, 1 << 39]));
        overlay.end_commit();
        (0..100).for_each(|lba| assert_eq!(overlay.put(record(lba, 0)), None));
        let taken = overlay.begin_commit(40, 1);
        assert!(taken.len() > 16 && taken.len() <= 40, "{}", taken.len());
        assert_eq!(overlay.open_len(), 100 - taken.len());
        assert!(taken.is_sorted_by_key(|record| record.lba));
    }
}
