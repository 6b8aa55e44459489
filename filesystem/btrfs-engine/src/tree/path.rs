//! The way to an item: a node of each level, without memory of its own on the heap, because each look-up makes one.

use std::ops::{Deref, DerefMut};

use sealblock_btrfs_format::superblock::MAX_LEVELS;

/// A node on the way to a key, and the index of the child, pointer or item in it.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Step {
    pub bytenr: u64,
    pub slot: usize,
}

/// Nodes from the root to a leaf.
#[derive(Default)]
pub(super) struct Path {
    steps: [Step; MAX_LEVELS as usize],
    len: usize,
}

impl Path {
    /// Without a node.
    pub fn new() -> Path {
        Path::default()
    }

    /// The next node below. `None` if no tree has so many levels.
    pub fn push(&mut self, step: Step) -> Option<()> {
        *self.steps.get_mut(self.len)? = step;
        self.len += 1;
        Some(())
    }

    /// A new root above all. `None` if no tree has so many levels.
    pub fn grow(&mut self, root: Step) -> Option<()> {
        self.push(root)?;
        self.rotate_right(1);
        Some(())
    }
}

impl Deref for Path {
    type Target = [Step];

    fn deref(&self) -> &[Step] {
        &self.steps[..self.len]
    }
}

impl DerefMut for Path {
    fn deref_mut(&mut self) -> &mut [Step] {
        &mut self.steps[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_as_many_nodes_as_a_tree_has_levels() {
        let (mut path, step) = (Path::new(), |bytenr| Step { bytenr, slot: 0 });
        (1..MAX_LEVELS).for_each(|level| path.push(step(u64::from(level))).unwrap());
        path.grow(step(0)).unwrap();
        assert!(path.iter().map(|step| step.bytenr).eq(0..u64::from(MAX_LEVELS)));
        assert_eq!((path.push(step(9)), path.grow(step(9)), path.len()), (None, None, usize::from(MAX_LEVELS)));
    }
}
