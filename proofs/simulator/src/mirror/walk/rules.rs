//! The rules for opens, for copies, and for replicas in sync.

use std::collections::BTreeSet;
use std::rc::Rc;

use sealblock_layers_mirror::MirrorError;
use sealblock_layers_mirror::label::ReplicaState;

use super::harness::{Harness, MirrorHandle, Session};
use super::model::{HistoryState, Id, NodeId};
use super::replica::{BLOCKS, Replica};

/// The good copies that existed before an event.
pub struct GoodCopies {
    /// Blocks with the current content on some replica.
    current: Vec<bool>,
    /// Blocks with a good copy on some replica, old or not.
    readable: Vec<bool>,
}

/// The replicas whose copies count: named members that have been in sync at some time.
fn counting(harness: &Harness) -> Vec<Rc<Replica>> {
    let given = harness.session.borrow().as_ref().map_or_else(Vec::new, |session| session.given.clone());
    let counts = |replica: &&Rc<Replica>| {
        let known = &replica.image.borrow().known;
        given.contains(&replica.number) && known.holds.is_some() && !known.is_new
    };
    harness.replicas.iter().filter(counts).cloned().collect()
}

impl GoodCopies {
    /// The good copies that exist now.
    pub fn there(harness: &Harness) -> GoodCopies {
        let (replicas, state) = (counting(harness), harness.state());
        let has = |block: usize, what: &dyn Fn(u64) -> bool| {
            replicas.iter().any(|replica| harness.copy(replica, block).is_some_and(what))
        };
        let only = |block: usize| state.as_ref().and_then(|state| state.only(block));
        let is_current = |block| only(block).is_some_and(|only| has(block, &|stamp| stamp == only));
        GoodCopies {
            current: (0..BLOCKS as usize).map(is_current).collect(),
            readable: (0..BLOCKS as usize).map(|block| has(block, &|_| true)).collect(),
        }
    }

    /// Checks that the last good copy of an unchanged block is never lost.
    pub fn are_kept(&self, harness: &Harness, changed: &BTreeSet<usize>) {
        let now = GoodCopies::there(harness);
        let state = harness.state();
        for block in (0..BLOCKS as usize).filter(|block| !changed.contains(block)) {
            let only = state.as_ref().and_then(|state| state.only(block));
            if let Some(only) = only.filter(|_| self.current[block] && !now.current[block]) {
                harness.find(format!("the last good copy of block {block}, {only}, is destroyed"));
            }
            if self.readable[block] && !now.readable[block] {
                harness.find(format!("the last readable copy of block {block}, an old one, is destroyed"));
            }
        }
    }
}

/// Checks that replicas in sync without dirty regions are identical, and have a possible content.
pub fn check_in_sync(harness: &Harness) {
    let Some(state) = harness.state() else { return };
    let has_only_durable =
        harness.session.borrow().as_ref().is_some_and(|session| session.mirror.describe().dirty_bytes == 0);
    if !has_only_durable {
        return;
    }
    let replicas: Vec<_> = harness.in_sync().into_iter().map(|replica| (harness.copies(&replica), replica)).collect();
    for block in 0..BLOCKS as usize {
        let mut first = None;
        for (copies, replica) in &replicas {
            let Some(stamp) = copies[block] else { continue };
            harness.checked.set(harness.checked.get() + 1);
            if !state.may_hold(block).contains(&stamp) {
                let may = state.may_hold(block);
                harness.find(format!("{} is in sync with {stamp} in block {block}, not {may:?}", replica.name));
            }
            if *first.get_or_insert(stamp) != stamp {
                harness.find(format!("replicas in sync differ in block {block}"));
            }
        }
    }
}

/// Determines the history of a mirror that has opened.
pub fn adopt(harness: &Harness, mirror: MirrorHandle, named: &[usize], present: &[usize]) {
    let blank = harness.model.borrow().state(0).clone();
    *harness.session.borrow_mut() =
        Some(Session { mirror, node: 0, state: blank.clone(), opened: blank, given: named.to_vec() });
    let model = harness.model.borrow();
    let in_sync = harness.in_sync();
    check_members(harness, &in_sync);
    let known = |replica: &Replica| replica.image.borrow().known.clone();
    let nodes: BTreeSet<NodeId> = in_sync.iter().filter_map(|replica| known(replica).node).collect();
    let is_newest = |node: &&NodeId| !nodes.iter().any(|other| *other != **node && model.is_ancestor(**node, *other));
    let tips: Vec<NodeId> = nodes.iter().filter(is_newest).copied().collect();
    let has_more = |number: usize, tip: NodeId| {
        // A replica in the middle of a resync belongs to no single node, and its label shows that; other replicas
        // decided the history.
        let known = known(&harness.replicas[number]);
        known.holds.is_some_and(|holds| !known.is_mixed && model.has_flushed_more(holds, tip))
    };
    let loses = |tip: &&NodeId| present.iter().any(|number| has_more(*number, **tip));
    let node = tips.iter().find(|tip| !loses(tip)).or(tips.first()).copied();
    if let Some(tip) = tips.first().filter(|_| tips.iter().all(|tip| loses(&tip))) {
        let who = present.iter().filter(|number| has_more(**number, *tip));
        let names: Vec<&str> = who.map(|number| &*harness.replicas[*number].name).collect();
        harness.find(format!("it opens without the flushed writes that {} has", names.join(", ")));
    }
    let states = tips.iter().map(|tip| model.state(*tip).clone());
    let state = states.reduce(|a: HistoryState, b| a.or(&b));
    let (Some(mut node), Some(state)) = (node, state) else { return };
    drop(model);
    if tips.len() > 1 {
        // Where contents differ, the first read decides which one is right.
        node = harness.model.borrow_mut().join(node, state.clone());
    }
    if let Some(session) = harness.session.borrow_mut().as_mut() {
        (session.node, session.state, session.opened) = (node, state.clone(), state);
    }
}

/// A resync with nothing to copy may end with a label that only the other replicas got. The replica is nevertheless
/// complete if it equals one of them.
fn take_equal_for_whole(harness: &Harness, replica: &Replica, in_sync: &[Rc<Replica>]) {
    if !replica.image.borrow().known.is_mixed {
        return;
    }
    let is_equal =
        |other: &Replica| (0..BLOCKS as usize).all(|block| harness.copy(replica, block) == harness.copy(other, block));
    let others = in_sync.iter().filter(|other| other.number != replica.number);
    let whole = others.filter(|other| !other.image.borrow().known.is_mixed).find(|other| is_equal(other));
    if let Some(other) = whole {
        let (node, holds) = (other.image.borrow().known.node, other.image.borrow().known.holds);
        let known = &mut replica.image.borrow_mut().known;
        (known.node, known.holds, known.is_mixed) = (node, holds, false);
    }
}

/// Checks that each replica reported as in sync was in sync before, is complete, and is still a member.
fn check_members(harness: &Harness, in_sync: &[Rc<Replica>]) {
    for replica in in_sync {
        take_equal_for_whole(harness, replica, in_sync);
        let known = replica.image.borrow().known.clone();
        if known.node.is_none() || known.is_mixed {
            harness.find(format!("{} is called in sync and never was, or is being resynced", replica.name));
        }
        if known.is_removed {
            harness.find(format!("{} makes a mirror although it was taken out", replica.name));
        }
    }
}

/// Checks a refusal: a mirror whose replicas have one history must open.
pub fn check_refusal(harness: &Harness, named: &[usize], present: &[usize], why: &MirrorError) {
    harness.log(format!("    refused: {why}"));
    // The other devices are blank or wiped, and must not prevent it.
    let given: Vec<_> = present.iter().filter_map(|number| harness.labelled(*number)).collect();
    let ids: BTreeSet<Id> = given.iter().map(|(_, label)| label.replicas[label.own_index].id).collect();
    if ids.len() < given.len() {
        // With two images of one replica, nothing shows which one is meant.
        return;
    }
    for (at, (known, label)) in given.iter().enumerate() {
        let others = given.iter().enumerate().filter(|(other, _)| *other != at);
        let others: Vec<_> = others.map(|(_, (known, label))| (known, label)).collect();
        let members = label.replicas.iter().filter(|member| member.state != ReplicaState::Removed).count();
        if named.len() <= members && harness.model.borrow().must_open((known, label), &others) {
            harness.find(format!("it is refused although label {at} has the only history: {why}"));
        }
    }
}
