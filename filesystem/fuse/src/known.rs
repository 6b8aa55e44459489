//! The inodes that the kernel knows.
//!
//! Invariants: each reply that hands an inode to the kernel adds one, and the kernel forgets as many. The filesystem is
//! told that an inode is forgotten when nothing is left of it, once for each time, and never twice at once. All of this
//! happens on one core.

use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;

use crate::call::Forget;

/// Counts lookups.
#[derive(Default)]
pub struct Known(RefCell<State>);

#[derive(Default)]
struct State {
    lookups: HashMap<u64, u64>,
    /// Inodes that are forgotten, and not known again, while the filesystem has not yet been told.
    forgotten: BTreeSet<u64>,
    /// Inodes of which the filesystem is being told.
    telling: BTreeSet<u64>,
    /// The last one taken, so that all have their turn.
    last: u64,
}

/// An inode of which the filesystem is being told, until this is dropped.
pub struct Forgotten<'a> {
    known: &'a Known,
    /// The inode.
    pub ino: u64,
}

impl Known {
    /// The kernel gets to know an inode.
    pub fn add(&self, ino: u64) {
        let state = &mut *self.0.borrow_mut();
        let lookups = state.lookups.entry(ino).or_default();
        *lookups = lookups.saturating_add(1);
        state.forgotten.remove(&ino);
    }

    /// The kernel forgets so many lookups.
    pub fn forget(&self, Forget { ino, lookups }: Forget) {
        let state = &mut *self.0.borrow_mut();
        let Entry::Occupied(mut known) = state.lookups.entry(ino) else {
            return tracing::warn!(ino, lookups, "the kernel forgets an inode that it did not know");
        };
        *known.get_mut() = known.get().saturating_sub(lookups);
        if *known.get() == 0 {
            known.remove();
            state.forgotten.insert(ino);
        }
    }

    /// The kernel has forgotten everything.
    pub fn forget_all(&self) {
        let state = &mut *self.0.borrow_mut();
        state.forgotten.extend(state.lookups.drain().map(|(ino, _)| ino));
    }

    /// Takes an inode of which the filesystem must be told.
    pub fn next_forgotten(&self) -> Option<Forgotten<'_>> {
        let state = &mut *self.0.borrow_mut();
        let State { forgotten, telling, last, .. } = state;
        let mut candidates =
            forgotten.range((Bound::Excluded(*last), Bound::Unbounded)).chain(forgotten.range(..=*last));
        let ino = *candidates.find(|ino| !telling.contains(ino))?;
        forgotten.remove(&ino);
        telling.insert(ino);
        *last = ino;
        Some(Forgotten { known: self, ino })
    }
}

impl Drop for Forgotten<'_> {
    fn drop(&mut self) {
        self.known.0.borrow_mut().telling.remove(&self.ino);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(known: &Known) -> Vec<u64> {
        std::iter::from_fn(|| known.next_forgotten().map(|forgotten| forgotten.ino)).collect()
    }

    #[test]
    fn an_inode_is_forgotten_when_all_of_its_lookups_are() {
        let known = Known::default();
        (0..3).for_each(|_| known.add(300));
        known.add(301);
        known.forget(Forget { ino: 300, lookups: 2 });
        assert_eq!(taken(&known), [0; 0]);
        known.forget(Forget { ino: 300, lookups: 1 });
        assert_eq!(taken(&known), [300]);
        assert_eq!(taken(&known), [0; 0], "once");
        // What is not known, or less often, is not an error that would end anything.
        known.forget(Forget { ino: 300, lookups: 1 });
        assert_eq!(taken(&known), [0; 0]);
        known.forget(Forget { ino: 301, lookups: u64::MAX });
        assert_eq!(taken(&known), [301]);
    }

    #[test]
    fn an_inode_that_is_known_again_is_not_forgotten() {
        let known = Known::default();
        known.add(300);
        known.forget(Forget { ino: 300, lookups: 1 });
        known.add(300);
        assert_eq!(taken(&known), [0; 0]);
        known.forget_all();
        assert_eq!(taken(&known), [300]);
    }

    #[test]
    fn the_filesystem_is_never_told_twice_at_once_and_all_have_their_turn() {
        let known = Known::default();
        let forget = |ino| {
            known.add(ino);
            known.forget(Forget { ino, lookups: 1 });
        };
        forget(300);
        let first = known.next_forgotten().unwrap();
        forget(300);
        assert_eq!(taken(&known), [0; 0]);
        drop(first);
        forget(299);
        assert_eq!(taken(&known), [299, 300], "the one behind the last comes first");
        for ino in [5, 6, 7] {
            forget(ino);
        }
        let five = known.next_forgotten().map(|forgotten| forgotten.ino);
        assert_eq!(five, Some(5));
        forget(5);
        assert_eq!(taken(&known), [6, 7, 5]);
    }
}
