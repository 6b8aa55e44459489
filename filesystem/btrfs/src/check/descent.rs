//! Goes through a tree in the order of its keys, with nodes that the caller may skip.
//!
//! Invariants:
//! - Keys ascend from one node to the next, so no tree makes a descent return a node twice, and the stack has at most
//!   one node for each level.
//! - A node is read only when the caller enters it, apart from its neighbours that are read together with it.

use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_btrfs_format::checker::Expected;
use sealblock_btrfs_format::key::{Key, objectid};

use super::session::Session;
use crate::cursor::TreeRoot;
use crate::error::FsError;
use crate::nodes::LoadedNode;

/// The number of leaves that are read together.
const READ_AHEAD: usize = 16;

/// A tree to go through.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tree {
    pub root: TreeRoot,
    /// The first key that still belongs to it: while a subvolume is being deleted, the nodes before are gone.
    pub from: Key,
    /// True for a subvolume with files, which is not being deleted.
    pub has_files: bool,
    /// The inode of the top directory.
    pub root_dirid: u64,
}

impl Tree {
    /// A tree without files.
    pub fn of_storage(root: TreeRoot) -> Tree {
        Tree { root, from: Key::MIN, has_files: false, root_dirid: 0 }
    }
}

/// A node that a pointer or a root leads to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub expected: Expected,
    /// The first key after it in its tree.
    pub before: Option<Key>,
}

/// A step of a descent.
pub(super) enum Event {
    /// A node, which the caller may enter.
    Found(Found),
    /// All children of the last inner node that was entered, and not left, were found.
    Left,
}

struct Step {
    node: Rc<LoadedNode>,
    slot: usize,
    before: Option<Key>,
}

/// A descent into a tree.
pub(super) struct Descent<'a> {
    session: &'a Session<'a>,
    tree: Tree,
    start: Option<Found>,
    stack: Vec<Step>,
}

impl<'a> Descent<'a> {
    pub fn new(session: &'a Session<'a>, tree: Tree) -> Descent<'a> {
        let start = Some(Found { expected: tree.root.expected(), before: None });
        Descent { session, tree, start, stack: Vec::new() }
    }

    /// The next step.
    pub fn next(&mut self) -> Option<Event> {
        if let Some(start) = self.start.take() {
            return Some(Event::Found(start));
        }
        loop {
            let step = self.stack.last_mut()?;
            let Some(found) = child(step, step.slot, self.tree.root.id) else {
                self.stack.pop();
                return Some(Event::Left);
            };
            step.slot += 1;
            // The child is gone if it ends at or before the first key that is left.
            if found.before.is_none_or(|before| before > self.tree.from) {
                return Some(Event::Found(found));
            }
        }
    }

    /// Reads a node that was just found; a leaf together with the leaves after it for which `is_wanted` holds.
    ///
    /// # Errors
    /// If it is lost, or has keys that belong behind it.
    pub async fn enter(&mut self, found: Found, is_wanted: &dyn Fn(u64) -> bool) -> Result<Rc<LoadedNode>, FsError> {
        if found.expected.level == 0 {
            self.read_ahead(found.expected.bytenr, is_wanted).await;
        }
        let node = self.load(&found.expected).await?;
        node.check_end(found.before)?;
        if found.expected.level > 0 {
            self.stack.push(Step { node: Rc::clone(&node), slot: 0, before: found.before });
        }
        Ok(node)
    }

    /// Compares a node that was entered before with another pointer to it.
    ///
    /// # Errors
    /// As [`Descent::enter`].
    pub async fn compare(&self, found: Found) -> Result<(), FsError> {
        self.load(&found.expected).await?.check_end(found.before)
    }

    /// Reads a node. A relocation has nodes of its own and nodes of the subvolume that it relocates.
    async fn load(&self, expected: &Expected) -> Result<Rc<LoadedNode>, FsError> {
        let nodes = self.session.fs.nodes();
        let loaded = nodes.load(expected).await;
        if loaded.is_ok() || expected.owner != objectid::TREE_RELOC {
            return loaded;
        }
        for owner in [objectid::FS_TREE, objectid::DATA_RELOC_TREE] {
            if let Ok(node) = nodes.load(&Expected { owner, ..*expected }).await {
                return Ok(node);
            }
        }
        loaded
    }

    async fn read_ahead(&self, bytenr: u64, is_wanted: &dyn Fn(u64) -> bool) {
        let nodes = self.session.fs.nodes();
        let Some(step) = self.stack.last().filter(|_| !nodes.has(bytenr)) else { return };
        let first = step.slot.saturating_sub(1);
        let children = (first..first + READ_AHEAD).map_while(|slot| child(step, slot, self.tree.root.id));
        let is_absent = |one: &Expected| !nodes.has(one.bytenr) && (one.bytenr == bytenr || is_wanted(one.bytenr));
        let absent: Vec<Expected> = children.map(|found| found.expected).filter(is_absent).collect();
        if absent.len() > 1 {
            // A lost leaf is reported when it is entered.
            join_all(absent.iter().map(|expected| self.load(expected))).await;
        }
    }
}

fn child(step: &Step, slot: usize, tree: u64) -> Option<Found> {
    let expected = step.node.child(slot, tree)?;
    let next = step.node.view().pointers().get(slot + 1).map(|next| next.key());
    Some(Found { expected, before: next.or(step.before) })
}
