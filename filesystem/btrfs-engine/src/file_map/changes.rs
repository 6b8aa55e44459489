//! What a plan of changes of a file consists of.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use sealblock_btrfs_format::extent_refs::ExtentRef;
use sealblock_btrfs_format::item_changes::ItemChanges;

use crate::refs::{DelayedRefs, RefsError};

/// References to extents: for each extent and reference, how many are added less how many are dropped.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct DataRefs(BTreeMap<(u64, ExtentRef), i64>);

/// All changes of a plan. Whoever runs it applies all of them in one step.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct FileChanges {
    /// Changes of the subvolume's tree.
    pub items: ItemChanges,
    /// Changes of references to extents.
    pub refs: DataRefs,
    /// Bytes to add to the inode's `nbytes`.
    pub added_bytes: u64,
    /// Bytes to subtract from the inode's `nbytes`.
    pub removed_bytes: u64,
}

impl DataRefs {
    /// Adds references, or drops them if the number is below 0.
    pub(super) fn change(&mut self, bytenr: u64, what: ExtentRef, by: i64) {
        match self.0.entry((bytenr, what)) {
            Entry::Vacant(entry) if by != 0 => drop(entry.insert(by)),
            Entry::Vacant(_) => {}
            Entry::Occupied(mut entry) => {
                // A plan has fewer items than a tree can have.
                *entry.get_mut() += by;
                if *entry.get() == 0 {
                    entry.remove();
                }
            }
        }
    }

    /// The address of the extent, the reference, and the number that is added; below 0 if it is dropped, and never 0.
    pub fn iter(&self) -> impl Iterator<Item = (u64, ExtentRef, i64)> {
        self.0.iter().map(|((bytenr, what), net)| (*bytenr, *what, *net))
    }

    /// True if no reference changes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds them to those of the transaction. New extents must be there already.
    ///
    /// # Errors
    /// If more references of one kind change than an item can count.
    pub fn apply(&self, delayed: &mut DelayedRefs) -> Result<(), RefsError> {
        let (added, dropped): (Vec<_>, Vec<_>) = self.iter().partition(|(_, _, net)| *net > 0);
        for (bytenr, what, net) in added.into_iter().chain(dropped) {
            let count = u32::try_from(net.unsigned_abs()).map_err(|_| RefsError::Count { bytenr, what, net })?;
            if net > 0 { delayed.add(bytenr, what, count)? } else { delayed.drop(bytenr, what, count)? }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_that_cancel_are_no_change_and_the_others_are_delayed() {
        let what = |offset| ExtentRef::Data { root: 5, objectid: 257, offset };
        let (mut refs, mut delayed) = (DataRefs::default(), DelayedRefs::new());
        refs.change(1 << 20, what(0), 1);
        refs.change(1 << 20, what(0), -1);
        refs.change(1 << 20, what(0), 0);
        assert!(refs.is_empty());
        refs.change(1 << 20, what(0), 2);
        refs.change(2 << 20, what(4096), -1);
        assert_eq!(refs.iter().collect::<Vec<_>>(), [(1 << 20, what(0), 2), (2 << 20, what(4096), -1)]);
        refs.apply(&mut delayed).unwrap();
        assert_eq!((delayed.net(1 << 20), delayed.net(2 << 20)), (2, -1));
        refs.change(1 << 20, what(0), i64::from(u32::MAX));
        assert!(matches!(refs.apply(&mut delayed), Err(RefsError::Count { .. })));
    }
}
