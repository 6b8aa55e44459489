//! The next numbers of inodes and directory entries, so that they need not be looked for in the trees, and no inode number
//! is used twice while the filesystem is open.
//!
//! They are remembered when a plan was applied. Those of a plan that failed are not in use.

use std::collections::{BTreeSet, HashMap};

use crate::nodes::Nodes;
use crate::plan::Plan;
use crate::view::TreeView;

/// The maximum number of directories whose next index is remembered.
const MAX_DIRECTORIES: usize = 1 << 16;

/// A plan on the items of an open subvolume.
pub(crate) type SubvolumePlan<'v> = Plan<'v, TreeView<'v, Nodes>>;

/// What is remembered of subvolumes, beside their trees.
#[derive(Default)]
pub(crate) struct Numbers {
    /// The next inode number of a subvolume.
    inodes: HashMap<u64, u64>,
    /// The next index of a directory of a subvolume.
    indices: HashMap<(u64, u64), u64>,
    /// Subvolumes whose orphans of earlier mounts are known.
    pub(crate) recovered: BTreeSet<u64>,
}

impl Numbers {
    /// Tells a plan the numbers that the items do not.
    pub(crate) fn give(&self, root: u64, directories: &[u64], plan: &mut SubvolumePlan<'_>) {
        self.inodes.get(&root).into_iter().for_each(|ino| plan.set_next_ino(*ino));
        for directory in directories {
            let next = self.indices.get(&(root, *directory));
            next.into_iter().for_each(|index| plan.set_next_index(*directory, *index));
        }
    }

    /// Remembers the numbers of a plan. It must have been applied: numbers of a plan that failed are not in use.
    pub(crate) fn take(&mut self, root: u64, taken: Taken) {
        if let Some(ino) = taken.ino {
            self.inodes.insert(root, ino);
        }
        if self.indices.len() > MAX_DIRECTORIES {
            self.indices.clear();
        }
        self.indices.extend(taken.indices.into_iter().map(|(directory, index)| ((root, directory), index)));
    }

    /// A subvolume is deleted.
    pub(crate) fn forget(&mut self, root: u64) {
        self.inodes.remove(&root);
        self.indices.retain(|(of, _), _| *of != root);
    }
}

/// The next numbers after a plan.
pub(crate) struct Taken {
    ino: Option<u64>,
    indices: Vec<(u64, u64)>,
}

impl Taken {
    pub(crate) fn of(plan: &SubvolumePlan<'_>) -> Taken {
        Taken { ino: plan.next_ino(), indices: plan.next_index.iter().map(|(at, index)| (*at, *index)).collect() }
    }
}
