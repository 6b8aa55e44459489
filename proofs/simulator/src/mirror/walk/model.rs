//! The acknowledged changes in every history of the mirror, and the history of each image.
//!
//! A *node* is a moment of one history. Each change that begins, each change that is acknowledged, each flush and each
//! stop of a machine makes a child node. An image that has everything up to a node is *at* that node. If the nodes of
//! two images are on one path from the root, the images have one history, and the lower node is the newer. If the paths
//! diverge, each side has acknowledged something without the other.

use std::collections::BTreeMap;
use std::rc::Rc;

use sealblock_layers_mirror::label::lineage::Session;
use sealblock_layers_mirror::label::{Label, ReplicaState};

/// The content of a write; 0 stands for zeroes. No two writes have the same.
pub type Stamp = u64;
/// The identity of a member, as labels have it.
pub type Id = [u8; 16];
/// A moment of a history.
pub type NodeId = usize;

/// The possible contents of a block.
type StampSet = Rc<[Stamp]>;

/// The event of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeKind {
    /// The mirror was new.
    Root,
    /// A change began; from now on it may be there or not.
    Begun,
    /// The change was acknowledged.
    Written,
    /// A flush was acknowledged.
    Flushed,
    /// The machine stopped; after a power cut, unflushed changes may be lost.
    Stopped,
}

/// The possible contents of all blocks in a history.
#[derive(Clone, Debug)]
pub struct HistoryState {
    now: Vec<StampSet>,
    /// The same after a power cut.
    after_cut: Vec<StampSet>,
}

fn with(set: &StampSet, stamp: Stamp) -> StampSet {
    if set.contains(&stamp) { set.clone() } else { set.iter().copied().chain([stamp]).collect() }
}

fn union(a: &[StampSet], b: &[StampSet]) -> Vec<StampSet> {
    a.iter().zip(b).map(|(a, b)| b.iter().fold(a.clone(), |set, stamp| with(&set, *stamp))).collect()
}

impl HistoryState {
    /// All blocks are zeroes.
    fn blank(blocks: usize) -> HistoryState {
        let zero: StampSet = [0].into();
        HistoryState { now: vec![zero.clone(); blocks], after_cut: vec![zero; blocks] }
    }

    /// The possible contents of a block.
    pub fn may_hold(&self, block: usize) -> &[Stamp] {
        &self.now[block]
    }

    /// The only possible content of a block; `None` if there are several.
    pub fn only(&self, block: usize) -> Option<Stamp> {
        if let [stamp] = self.now[block][..] { Some(stamp) } else { None }
    }

    /// The content was read, and is decided.
    pub fn pin(&mut self, block: usize, stamp: Stamp) {
        self.now[block] = [stamp].into();
    }

    /// Everything that either of them permits.
    pub fn or(&self, other: &HistoryState) -> HistoryState {
        HistoryState { now: union(&self.now, &other.now), after_cut: union(&self.after_cut, &other.after_cut) }
    }

    fn begin(&mut self, block: usize, stamp: Stamp) {
        self.now[block] = with(&self.now[block], stamp);
        self.after_cut[block] = with(&self.after_cut[block], stamp);
    }

    fn flush(&mut self) {
        self.after_cut = self.now.clone();
    }

    fn cut(&mut self) {
        self.now = self.after_cut.clone();
    }
}

struct Node {
    parent: NodeId,
    depth: usize,
    kind: NodeKind,
    state: HistoryState,
}

/// The model's information about an image. A copy of the image comes with a copy of this.
#[derive(Clone, Debug, Default)]
pub struct ImageInfo {
    /// The node up to which it has everything. `None` if there never was one, or if it was given up.
    pub node: Option<NodeId>,
    /// The latest node of which at least a part reached it.
    pub holds: Option<NodeId>,
    /// True if it was being resynced, so that its content belongs to no single node.
    pub is_mixed: bool,
    /// True if it was never in sync since it was added, so that its content does not belong to the mirror.
    pub is_new: bool,
    /// True if it was removed from the mirror while it was online.
    pub is_removed: bool,
    /// The last label that was written to it.
    pub own: u64,
    /// The last labels of other members that the writers of this image knew.
    pub acked: BTreeMap<Id, u64>,
}

/// All histories of a walk.
pub struct Model {
    nodes: Vec<Node>,
    /// For each label, the label that it replaced in the same place.
    labels: BTreeMap<u64, u64>,
}

impl Model {
    pub fn new(blocks: usize) -> Model {
        let root = Node { parent: 0, depth: 0, kind: NodeKind::Root, state: HistoryState::blank(blocks) };
        Model { nodes: vec![root], labels: BTreeMap::new() }
    }

    /// A label replaces another one on a replica.
    pub fn label(&mut self, label: u64, before: u64) {
        self.labels.insert(label, before);
    }

    /// True if the label `old` was in this place before `new`, or is the same one.
    fn is_label_before(&self, old: u64, new: u64) -> bool {
        std::iter::successors(Some(new), |label| self.labels.get(label).copied()).any(|label| label == old)
    }

    /// The content before the mirror was made.
    pub fn begin_with(&mut self, blocks: &[usize], stamp: Stamp) {
        let state = &mut self.nodes[0].state;
        blocks.iter().for_each(|block| state.pin(*block, stamp));
        state.flush();
    }

    pub fn state(&self, node: NodeId) -> &HistoryState {
        &self.nodes[node].state
    }

    /// Adds a child of `node`, whose current state is `state`.
    fn child(&mut self, node: NodeId, kind: NodeKind, state: HistoryState) -> NodeId {
        let depth = self.nodes[node].depth + 1;
        self.nodes.push(Node { parent: node, depth, kind, state });
        self.nodes.len() - 1
    }

    /// A change of blocks begins.
    pub fn begin(&mut self, node: NodeId, mut state: HistoryState, change: &[(usize, Stamp)]) -> NodeId {
        change.iter().for_each(|(block, stamp)| state.begin(*block, *stamp));
        self.child(node, NodeKind::Begun, state)
    }

    /// The change is acknowledged.
    pub fn acknowledge(&mut self, node: NodeId, mut state: HistoryState, change: &[(usize, Stamp)]) -> NodeId {
        change.iter().for_each(|(block, stamp)| state.pin(*block, *stamp));
        self.child(node, NodeKind::Written, state)
    }

    /// A flush is acknowledged.
    pub fn flush(&mut self, node: NodeId, mut state: HistoryState) -> NodeId {
        state.flush();
        self.child(node, NodeKind::Flushed, state)
    }

    /// The machine stops.
    pub fn stop(&mut self, node: NodeId, mut state: HistoryState, is_power_cut: bool) -> NodeId {
        if is_power_cut {
            state.cut();
        }
        self.child(node, NodeKind::Stopped, state)
    }

    /// Combines an image at `node` with others that have no other acknowledged and flushed changes; where they differ,
    /// the content is in doubt.
    pub fn join(&mut self, node: NodeId, state: HistoryState) -> NodeId {
        self.child(node, NodeKind::Stopped, state)
    }

    /// The last common node of both histories.
    fn parting(&self, mut a: NodeId, mut b: NodeId) -> NodeId {
        while a != b {
            if self.nodes[a].depth >= self.nodes[b].depth { a = self.nodes[a].parent } else { b = self.nodes[b].parent }
        }
        a
    }

    pub fn is_ancestor(&self, old: NodeId, new: NodeId) -> bool {
        self.parting(old, new) == old
    }

    /// The events between the last common node and `node`, latest first.
    fn apart(&self, node: NodeId, other: NodeId) -> impl Iterator<Item = NodeKind> + '_ {
        let end = self.parting(node, other);
        std::iter::successors(Some(node), |at| Some(self.nodes[*at].parent))
            .take_while(move |at| *at != end)
            .map(|at| self.nodes[at].kind)
    }

    /// True if an acknowledged and flushed change up to `node` is not in the history of `other`.
    pub fn has_flushed_more(&self, node: NodeId, other: NodeId) -> bool {
        let mut is_flushed = false;
        self.apart(node, other).any(|kind| {
            is_flushed |= kind == NodeKind::Flushed;
            is_flushed && kind == NodeKind::Written
        })
    }

    /// True if an acknowledged change up to `node` is not in the history of `other`.
    pub fn has_more(&self, node: NodeId, other: NodeId) -> bool {
        self.apart(node, other).any(|kind| kind == NodeKind::Written)
    }

    /// True if labels can show that these images have one history, whose newest node is that of `tip`; then a mirror of
    /// them must open.
    pub fn must_open(&self, tip: (&ImageInfo, &Label), others: &[(&ImageInfo, &Label)]) -> bool {
        let (known, label) = tip;
        let Some(node) = known.node.filter(|_| !known.is_mixed && !known.is_new) else { return false };
        if label.replicas[label.own_index].state != ReplicaState::InSync {
            return false;
        }
        let id = label.replicas[label.own_index].id;
        let in_use: Vec<&Id> =
            label.replicas.iter().filter(|of| of.state != ReplicaState::Removed).map(|of| &of.id).collect();
        let has_standing = |label: &Label, id: &Id, replica_state: ReplicaState| {
            label.replicas.iter().any(|member| member.id == *id && member.state == replica_state)
        };
        // The other's label lists the same members as in sync, so none of these wrote without the others, and none was
        // replaced.
        let calls_current = |theirs: &Label| {
            let current = in_use.iter().filter(|id| has_standing(label, id, ReplicaState::InSync));
            let own = &theirs.replicas[theirs.own_index].id;
            let has_all = in_use.iter().all(|id| theirs.replicas.iter().any(|member| member.id == **id));
            has_all && current.copied().all(|id| id == own || has_standing(theirs, id, ReplicaState::InSync))
        };
        // The last label of one started a session and reached no other replica. The replicas that knew of that session
        // were then resynced by a writer that did not, so their label no longer proves that nothing changed in the
        // session.
        let is_unheard_by = |by: &Label, theirs: &Label| {
            let lists_it = has_standing(theirs, &by.replicas[by.own_index].id, ReplicaState::InSync);
            let is_heard = |session: Session| {
                by.lineage.find(session.id).is_some_and(|known| known.until >= session.until || lists_it)
            };
            theirs.is_tentative && theirs.lineage.newest().is_some_and(|session| !is_heard(session))
        };
        let is_own_in_sync = |of: &Label| of.replicas[of.own_index].state == ReplicaState::InSync;
        let is_unheard = |theirs: &Label| {
            let by_another = || others.iter().any(|(_, by)| is_own_in_sync(by) && is_unheard_by(by, theirs));
            is_unheard_by(label, theirs) || is_own_in_sync(theirs) && by_another()
        };
        others.iter().all(|(other, theirs)| {
            let own = theirs.replicas[theirs.own_index].id;
            let is_known = known.acked.get(&own).is_some_and(|acked| self.is_label_before(other.own, *acked));
            own != id
                && in_use.contains(&&own)
                && !in_use.iter().any(|id| has_standing(theirs, id, ReplicaState::Removed))
                && other.holds.is_none_or(|holds| !self.has_more(holds, node))
                // What the others know of it must not be later than its current state.
                && other.acked.get(&id).is_none_or(|acked| self.is_label_before(*acked, known.own))
                && !is_unheard(theirs)
                && (is_known || calls_current(theirs))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histories_part_and_what_was_flushed_on_one_side_is_more() {
        let mut model = Model::new(2);
        let blank = model.state(0).clone();
        let begun = model.begin(0, blank, &[(1, 7)]);
        assert_eq!(model.state(begun).may_hold(1), [0, 7]);
        let written = model.acknowledge(begun, model.state(begun).clone(), &[(1, 7)]);
        assert_eq!(model.state(written).only(1), Some(7));
        let cut = model.stop(written, model.state(written).clone(), true);
        assert_eq!((model.state(cut).may_hold(1), model.state(cut).only(0)), (&[0, 7][..], Some(0)));
        let flushed = model.flush(written, model.state(written).clone());
        let kept = model.stop(flushed, model.state(flushed).clone(), true);
        assert_eq!(model.state(kept).only(1), Some(7));
        assert!(model.is_ancestor(written, kept) && !model.is_ancestor(kept, cut));
        assert!(model.has_flushed_more(kept, 0) && !model.has_flushed_more(written, 0) && model.has_more(written, 0));
        assert!(!model.has_flushed_more(kept, cut), "both have the write");
    }
}
