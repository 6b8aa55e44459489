//! The inodes that the kernel knows.
//!
//! The kernel knows an inode whose attributes it got, until it has forgotten it. What is counted here is a little more
//! than it does know, as the last entry of a directory that was read may not have fitted into the reply; such an inode is
//! met again when the reading goes on.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// The bit of a handle that says that the file is open for writing.
pub(super) const WRITES: u64 = 1;

/// What is known of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct InodeUse {
    is_orphan: bool,
    /// True if it has no capabilities, so that a write need not look for them.
    has_no_capabilities: bool,
    /// How often it is open for writing.
    opens: u64,
}

/// The inodes that the kernel knows, by their numbers.
#[derive(Default)]
pub(super) struct Known(RefCell<BTreeMap<u64, InodeUse>>);

impl Known {
    /// The kernel gets the attributes of an inode.
    pub fn see(&self, number: u64) {
        self.0.borrow_mut().entry(number).or_default();
    }

    /// An inode lost its last name. The kernel knows what it removes.
    pub fn lose_names(&self, number: u64) {
        self.0.borrow_mut().entry(number).or_default().is_orphan = true;
    }

    /// True if an inode is known to have no capabilities.
    pub fn has_no_capabilities(&self, number: u64) -> bool {
        self.0.borrow().get(&number).is_some_and(|inode| inode.has_no_capabilities)
    }

    /// An inode has no capabilities, or may have some again.
    pub fn set_has_no_capabilities(&self, number: u64, has_none: bool) {
        if let Some(inode) = self.0.borrow_mut().get_mut(&number) {
            inode.has_no_capabilities = has_none;
        }
    }

    /// The kernel does not know an inode any more. Returns true if it has no names.
    pub fn forget(&self, number: u64) -> bool {
        self.0.borrow_mut().remove(&number).is_some_and(|inode| inode.is_orphan)
    }

    /// An inode is opened for writing.
    pub fn open(&self, number: u64) {
        let mut all = self.0.borrow_mut();
        let inode = all.entry(number).or_default();
        inode.opens = inode.opens.saturating_add(1);
    }

    /// What was opened for writing is closed.
    pub fn close(&self, number: u64) {
        if let Some(inode) = self.0.borrow_mut().get_mut(&number) {
            inode.opens = inode.opens.saturating_sub(1);
        }
    }

    /// True if one of these inodes is open for writing.
    pub fn has_open(&self, numbers: RangeInclusive<u64>) -> bool {
        self.0.borrow().range(numbers).any(|(_, inode)| inode.opens > 0)
    }

    /// The inodes without names.
    pub fn orphans(&self) -> Vec<u64> {
        self.0.borrow().iter().filter(|(_, inode)| inode.is_orphan).map(|(number, _)| *number).collect()
    }

    /// True if the kernel knows one of these inodes.
    pub fn has_any(&self, numbers: RangeInclusive<u64>) -> bool {
        self.0.borrow().range(numbers).next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_open_until_each_opening_is_closed() {
        let known = Known::default();
        known.open(5);
        known.open(5);
        known.close(5);
        assert!(known.has_open(0..=5) && !known.has_open(6..=9));
        known.close(5);
        known.close(5);
        assert!(!known.has_open(0..=9));
    }

    #[test]
    fn an_inode_is_known_until_it_is_forgotten() {
        let known = Known::default();
        known.see(5);
        known.see(5);
        assert!(known.has_any(0..=5) && !known.has_any(6..=9));
        known.lose_names(5);
        known.see(5);
        assert_eq!((known.orphans(), known.forget(5), known.forget(5)), (vec![5], true, false));
        known.see(6);
        assert!(!known.has_no_capabilities(6));
        known.set_has_no_capabilities(6, true);
        known.set_has_no_capabilities(7, true);
        known.see(6);
        assert_eq!((known.has_no_capabilities(6), known.has_no_capabilities(7)), (true, false));
        assert_eq!((known.forget(6), known.has_any(0..=u64::MAX)), (false, false));
    }
}
