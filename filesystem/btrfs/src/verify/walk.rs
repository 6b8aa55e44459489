//! Checks every copy of every node of a tree, several at once.
//!
//! Invariants:
//! - A node that several trees share is read once, if all of them expect the same of it. If another tree expects
//!   something else, the node is checked against that as well.
//! - The waiting nodes are children of nodes on a path, so for each node in flight their number is bounded by the
//!   height of a tree times the pointers in a node. A limit also bounds the number of visited nodes.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use sealblock_btrfs_format::checker::Expected;
use sealblock_btrfs_format::key::{Key, objectid};

use super::leaves::Leaves;
use super::report::{Finding, LostNode, WhyUnchecked};
use super::session::{Session, Stopped, why_unchecked};
use super::trees::Tree;
use crate::cursor::TreeRoot;
use crate::error::Lost;
use crate::nodes::{LoadedNode, NodeCopies};

/// The maximum number of nodes in flight.
pub(super) const NODES_IN_FLIGHT: usize = 32;

/// Checked nodes, each with the expectation that it met.
pub(super) struct Seen {
    nodes: HashMap<u64, u64>,
    most: usize,
    hasher: RandomState,
}

#[derive(PartialEq, Eq, Debug)]
enum Entered {
    New,
    Known,
    Full,
}

impl Seen {
    /// Remembers at most `most` nodes.
    pub fn new(most: usize) -> Seen {
        Seen { nodes: HashMap::new(), most, hasher: RandomState::new() }
    }

    fn enter(&mut self, expected: &Expected) -> Entered {
        let Expected { bytenr, owner, level, generation, first_key } = *expected;
        // A node that subvolumes share has the number of any one of them.
        let owner = if objectid::is_subvolume(owner) { objectid::FS_TREE } else { owner };
        let print = self.hasher.hash_one((owner, level, generation, first_key));
        let is_full = self.nodes.len() >= self.most;
        match self.nodes.get_mut(&bytenr) {
            Some(known) if *known == print => Entered::Known,
            Some(known) => {
                *known = print;
                Entered::New
            }
            None if is_full => Entered::Full,
            None => {
                self.nodes.insert(bytenr, print);
                Entered::New
            }
        }
    }

    /// Removes a node because not all of it was walked, so that another tree checks it again.
    fn forget(&mut self, bytenr: u64) {
        self.nodes.remove(&bytenr);
    }

    /// The logical addresses of all nodes.
    pub fn addresses(&self) -> impl Iterator<Item = u64> + use<'_> {
        self.nodes.keys().copied()
    }
}

/// A node to check.
struct Task {
    expected: Expected,
    /// The first key after it in its tree.
    before: Option<Key>,
    tree: Rc<Tree>,
}

/// Checks every copy of every node of these trees, and passes leaves to a callback.
pub(super) async fn walk(
    session: &Session<'_>,
    seen: &mut Seen,
    trees: Vec<Tree>,
    leaves: &mut Leaves,
) -> Result<(), Stopped> {
    let root_task = |tree: Tree| Task { expected: tree.root.expected(), before: None, tree: Rc::new(tree) };
    let mut pending: Vec<Task> = trees.into_iter().rev().map(root_task).collect();
    let read = |task: Task| async move {
        let copies = session.fs.nodes().read_copies(&task.expected).await;
        (task, copies)
    };
    let mut in_flight = FuturesUnordered::new();
    loop {
        while in_flight.len() < NODES_IN_FLIGHT
            && let Some(task) = pending.pop()
        {
            match seen.enter(&task.expected) {
                Entered::New => in_flight.push(read(task)),
                Entered::Known => {}
                Entered::Full => {
                    session
                        .unchecked(WhyUnchecked::TooManyNodes, u64::from(session.fs.storage().geometry().node_bytes));
                }
            }
        }
        let Some((task, copies)) = in_flight.next().await else { return Ok(()) };
        let node = match copies {
            Ok(copies) => take_copies(session, &task, copies, leaves),
            Err(error) => {
                session.found(Finding::Tree { tree: task.tree.root.id, error });
                leaves.lost(&task.tree, task.expected.first_key, task.before, true);
                None
            }
        };
        if let Some(node) = node {
            let view = node.view();
            if let Err(error) = node.check_end(task.before) {
                session.found(Finding::Tree { tree: task.tree.root.id, error });
                leaves.lost(&task.tree, task.expected.first_key, task.before, true);
            } else if view.header().level == 0 {
                leaves.take(session, &task.tree, &view).await;
            } else if !push_children(&mut pending, &task, &node) {
                seen.forget(task.expected.bytenr);
            }
        }
        session.step().await?;
    }
}

/// Reports the faults of a node's copies; returns the node if a copy is good.
fn take_copies(session: &Session<'_>, task: &Task, copies: NodeCopies, leaves: &mut Leaves) -> Option<Rc<LoadedNode>> {
    let bytes = u64::from(session.fs.storage().geometry().node_bytes);
    let (tree, level) = (task.tree.root.id, task.expected.level);
    let mut checked = copies.count as u64;
    for why in copies.bad.iter().filter_map(|copy| why_unchecked(&copy.fault)) {
        session.unchecked(why, bytes);
        checked -= 1;
    }
    if copies.unproven > 0 {
        session.unchecked(WhyUnchecked::NodeTags, bytes * copies.unproven as u64);
        checked = checked.saturating_sub(copies.unproven as u64);
    }
    session.verified(bytes * checked);
    let bad = copies.bad.into_iter().filter(|copy| why_unchecked(&copy.fault).is_none());
    match &copies.node {
        Some(_) => {
            session.verified_node();
            bad.for_each(|copy| {
                session.found(Finding::Node { tree, level: Some(level), copy, expected: Some(task.expected) })
            });
        }
        None => {
            let copies: Vec<_> = bad.collect();
            leaves.lost(&task.tree, task.expected.first_key, task.before, !copies.is_empty());
            // A node whose copies are all on missing devices is not damaged.
            if !copies.is_empty() {
                let lost = Lost { logical: task.expected.bytenr, bytes, copies };
                let (from, before) = (task.expected.first_key, task.before);
                session.found(Finding::LostNode(Box::new(LostNode { trees: vec![tree], level, from, before, lost })));
            }
        }
    }
    copies.node
}

/// Queues the children of a node; false if not all of them are wanted.
fn push_children(pending: &mut Vec<Task>, task: &Task, node: &LoadedNode) -> bool {
    let queued = pending.len();
    let children = task.tree.children(node, task.before);
    pending.extend(children.map(|(expected, before)| Task { expected, before, tree: Rc::clone(&task.tree) }));
    pending.len() - queued == node.view().pointers().len()
}

/// Adds to a lost node of a subvolume the other subvolumes that share it: those with keys that lead to it.
pub(super) async fn find_sharers(session: &Session<'_>, node: &mut LostNode, trees: &[TreeRoot]) {
    if !node.trees.iter().all(|id| objectid::is_subvolume(*id)) {
        return;
    }
    for root in trees.iter().filter(|root| !node.trees.contains(&root.id)).collect::<Vec<_>>() {
        if leads_to(session, root, node).await {
            node.trees.push(root.id);
        }
    }
}

async fn leads_to(session: &Session<'_>, root: &TreeRoot, node: &LostNode) -> bool {
    let mut expected = root.expected();
    while expected.level > node.level {
        let (Some(from), Ok(loaded)) = (node.from, session.fs.nodes().load(&expected).await) else { return false };
        let view = loaded.view();
        let slot = view.pointers().partition_point(|pointer| pointer.key() <= from);
        let Some(child) = slot.checked_sub(1).and_then(|slot| loaded.child(slot, root.id)) else { return false };
        expected = child;
    }
    expected.bytenr == node.lost.logical
}

#[cfg(test)]
mod tests {
    use sealblock_btrfs_format::key::ItemType;

    use super::*;

    fn key(offset: u64) -> Key {
        Key::new(256, ItemType::EXTENT_DATA, offset)
    }

    fn expected(bytenr: u64, owner: u64, generation: u64) -> Expected {
        Expected { bytenr, owner, level: 1, generation, first_key: Some(key(1)) }
    }

    #[test]
    fn a_shared_node_is_entered_once_and_another_expectation_of_it_again() {
        let mut seen = Seen::new(2);
        assert_eq!(seen.enter(&expected(4096, 5, 7)), Entered::New);
        assert_eq!(seen.enter(&expected(4096, 300, 7)), Entered::Known, "subvolumes share");
        assert_eq!(seen.enter(&expected(4096, 300, 8)), Entered::New, "of another transaction");
        assert_eq!(seen.enter(&expected(4096, 2, 8)), Entered::New, "no subvolume");
        assert_eq!(seen.enter(&expected(8192, 5, 7)), Entered::New);
        assert_eq!(seen.enter(&expected(12_288, 5, 7)), Entered::Full);
        seen.forget(8192);
        assert_eq!(seen.enter(&expected(12_288, 5, 7)), Entered::New);
    }
}
