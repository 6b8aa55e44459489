//! Records that the tables do not have yet.
//!
//! A write that is done puts its records into the open part. A commit moves them to the committing part, where they stay
//! until they are durable and in the tables. A block is looked up in the open part, the committing part, and then the
//! tables.

use std::cell::RefCell;

use rustc_hash::FxHashMap;
use sealblock_units::Lba;

use crate::format::Record;

/// Records by block.
pub(crate) type Records = FxHashMap<u64, Record>;

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
        let open = self.open.borrow().get(&lba.get()).copied();
        open.or_else(|| self.committing.borrow().get(&lba.get()).copied())
    }

    /// Puts in a record; gives back the one it replaces, if that was never on its way to the log.
    pub fn put(&self, record: Record) -> Option<Record> {
        self.open.borrow_mut().insert(record.lba.get(), record)
    }

    /// Number of records that are not on their way to the log yet.
    pub fn open_len(&self) -> usize {
        self.open.borrow().len()
    }

    /// Whether everything is in the tables.
    pub fn is_empty(&self) -> bool {
        self.open.borrow().is_empty() && self.committing.borrow().is_empty()
    }

    /// Moves at most `most` records to the committing part, giving each `generation`, and lists them. Nothing may be
    /// under way to the log.
    pub fn begin_commit(&self, most: usize, generation: u16) -> Vec<Record> {
        let (mut open, mut committing) = (self.open.borrow_mut(), self.committing.borrow_mut());
        debug_assert!(committing.is_empty(), "one commit at a time");
        if open.len() <= most {
            // The usual case. Moving record by record would cost two cache misses for each.
            std::mem::swap(&mut *open, &mut *committing);
            committing.values_mut().for_each(|record| record.generation = generation);
        } else {
            let moved: Vec<u64> = open.keys().take(most).copied().collect();
            for key in moved {
                if let Some(record) = open.remove(&key) {
                    committing.insert(key, Record { generation, ..record });
                }
            }
        }
        // In order of address, so that the log and the tables do not depend on the order of a hash map.
        let mut records: Vec<Record> = committing.values().copied().collect();
        records.sort_unstable_by_key(|record| record.lba);
        records
    }

    /// Forgets the records of a commit that are in the tables now.
    pub fn end_commit(&self) {
        self.committing.borrow_mut().clear();
    }
}
