//! Iterates over the items of a tree in key order, from any key on.
//!
//! Invariants:
//! - Keys only ascend, also from one node to the next, so no tree can make a cursor loop or return a node twice.
//! - A lost node does not end the iteration: [`Cursor::next`] reports it once and then continues after it.

use std::ops::RangeInclusive;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_btrfs_format::Key;
use sealblock_btrfs_format::checker::Expected;

use crate::error::FsError;
use crate::nodes::{LoadedNode, NodeCache};

/// The number of leaves that are read ahead together.
const READ_AHEAD: usize = 16;

/// The root of a tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TreeRoot {
    /// The tree's number.
    pub id: u64,
    /// The logical address of its root node.
    pub bytenr: u64,
    /// The level of the root node.
    pub level: u8,
    /// The transaction that wrote it.
    pub generation: u64,
}

impl TreeRoot {
    /// The expectation for its root node.
    pub fn expected(&self) -> Expected {
        let TreeRoot { id, bytenr, level, generation } = *self;
        Expected { bytenr, owner: id, level, generation, first_key: None }
    }
}

/// A node on the path to a leaf, and the position of the cursor in it.
struct Step {
    node: Rc<LoadedNode>,
    slot: usize,
    /// The first key that follows the node in its tree.
    before: Option<Key>,
}

/// A position in a tree.
pub struct Cursor<'a> {
    nodes: &'a NodeCache,
    root: TreeRoot,
    /// From the root node to the leaf; empty before the first step and after the last.
    path: Vec<Step>,
    range: RangeInclusive<Key>,
    /// True if the cursor begins at the last item that is not after the first key.
    from_floor: bool,
    /// True once the path to the first item was searched.
    is_placed: bool,
    /// True once an item has been returned.
    is_reading: bool,
    /// True once a second leaf was needed, so that more leaves are likely to be needed.
    is_sequential: bool,
}

impl<'a> Cursor<'a> {
    /// The items of a tree whose keys lie in a range.
    pub fn new(nodes: &'a NodeCache, root: TreeRoot, range: RangeInclusive<Key>) -> Cursor<'a> {
        Cursor {
            nodes,
            root,
            path: Vec::new(),
            range,
            from_floor: false,
            is_placed: false,
            is_reading: false,
            is_sequential: false,
        }
    }

    /// The items of a range. If the first key of the range is absent, the last item before the range comes first: it
    /// may reach into the range.
    pub fn from_floor(nodes: &'a NodeCache, root: TreeRoot, range: RangeInclusive<Key>) -> Cursor<'a> {
        Cursor { from_floor: true, ..Cursor::new(nodes, root, range) }
    }

    /// All items of a tree.
    pub fn all(nodes: &'a NodeCache, root: TreeRoot) -> Cursor<'a> {
        Cursor::new(nodes, root, Key::MIN..=Key::MAX)
    }

    /// The next item.
    ///
    /// # Errors
    /// If a node on the path is lost. The next call continues after it.
    pub async fn next(&mut self) -> Result<Option<(Key, &[u8])>, FsError> {
        if !self.is_placed {
            self.is_placed = true;
            self.descend_to_first().await?;
        }
        loop {
            let Some(step) = self.path.last() else { return Ok(None) };
            let view = step.node.view();
            let is_leaf = view.header().level == 0;
            let count = if is_leaf { view.items().len() } else { view.pointers().len() };
            if step.slot >= count {
                self.path.pop();
                if let Some(parent) = self.path.last_mut() {
                    parent.slot += 1;
                    self.is_sequential = self.is_reading;
                }
                continue;
            }
            let key = if is_leaf { view.items()[step.slot].key() } else { view.pointers()[step.slot].key() };
            if key > *self.range.end() {
                self.path.clear();
                continue;
            }
            if is_leaf {
                break;
            }
            if self.is_sequential && view.header().level == 1 {
                self.read_ahead().await;
            }
            self.descend().await?;
        }
        let step = self.path.last_mut().expect("the loop ends at a leaf");
        let slot = step.slot;
        step.slot += 1;
        self.is_reading = true;
        let view = self.path[self.path.len() - 1].node.view();
        let item = &view.items()[slot];
        let data = view.data(item).expect("the checker saw the data of every item");
        Ok(Some((item.key(), data)))
    }

    /// Goes down to the first item of the range.
    async fn descend_to_first(&mut self) -> Result<(), FsError> {
        let root = self.nodes.load(&self.root.expected()).await?;
        self.path.push(Step { node: root, slot: 0, before: None });
        loop {
            let step = self.path.last_mut().expect("the root is on the path");
            let (view, first) = (step.node.view(), self.range.start());
            if view.header().level == 0 {
                step.slot = match self.from_floor {
                    true => view.items().partition_point(|item| item.key() <= *first).saturating_sub(1),
                    false => view.items().partition_point(|item| item.key() < *first),
                };
                return Ok(());
            }
            // The last child that begins at or before the key, because that child may contain the key.
            step.slot = view.pointers().partition_point(|pointer| pointer.key() <= *first).saturating_sub(1);
            self.descend().await?;
        }
    }

    /// Adds the child of the last node to the path. A lost child is skipped.
    async fn descend(&mut self) -> Result<(), FsError> {
        let (expected, before) = self.child(0).expect("the slot is one of the node's");
        let step = self.path.last_mut().expect("a node with a child");
        let loaded = match self.nodes.load(&expected).await {
            Ok(node) => node.check_end(before).map(|()| node),
            Err(error) => Err(error),
        };
        match loaded {
            Ok(node) => {
                self.path.push(Step { node, slot: 0, before });
                Ok(())
            }
            Err(error) => {
                step.slot += 1;
                Err(error)
            }
        }
    }

    /// The child `ahead` slots after the current one in the last node, and the first key after that child.
    fn child(&self, ahead: usize) -> Option<(Expected, Option<Key>)> {
        let step = self.path.last()?;
        let slot = step.slot + ahead;
        let expected = step.node.child(slot, self.root.id)?;
        Some((expected, step.node.view().pointers().get(slot + 1).map(|next| next.key()).or(step.before)))
    }

    /// Reads the following leaves, several at once.
    async fn read_ahead(&self) {
        let in_range = |one: &(Expected, _)| one.0.first_key.is_none_or(|first| first <= *self.range.end());
        let children = (0..READ_AHEAD).map_while(|ahead| self.child(ahead)).take_while(in_range);
        let absent: Vec<Expected> =
            children.map(|(expected, _)| expected).take_while(|one| !self.nodes.has(one.bytenr)).collect();
        if absent.len() > 1 {
            // A lost leaf is reported when the cursor reaches it.
            join_all(absent.iter().map(|expected| self.nodes.load(expected))).await;
        }
    }
}
