//! Shared state of a walk: replicas, histories, and the current session.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use sealblock_integrity::PiFormat;
use sealblock_layers_mirror::Mirror;
use sealblock_layers_mirror::label::{Label, ReplicaState};
use sealblock_units::Lba;

use super::model::{HistoryState, Id, ImageInfo, Model, NodeId, Stamp};
use super::replica::{BLOCKS, Image, Replica, ReplicaLink};
use crate::executor::Executor;
use crate::random::Random;

pub type MirrorHandle = Rc<Mirror<Executor>>;

/// The maximum number of members, which is the number of devices.
pub const REPLICAS: usize = 5;

/// One open of the mirror.
pub struct Session {
    pub mirror: MirrorHandle,
    /// Its current node in the model, and the possible contents of its blocks.
    pub node: NodeId,
    pub state: HistoryState,
    /// The possible contents when it opened.
    pub opened: HistoryState,
    /// The replicas that were named.
    pub given: Vec<usize>,
}

/// The state of one walk.
pub struct Harness {
    pub format: Option<PiFormat>,
    pub random: Random,
    /// The maximum duration of each half of a request to a replica; 0 for none.
    pub pace_ms: u64,
    pub replicas: Vec<Rc<Replica>>,
    pub model: RefCell<Model>,
    pub session: RefCell<Option<Session>>,
    /// The last label that was written to each member, as far as the current writers know.
    pub acked: RefCell<BTreeMap<Id, u64>>,
    /// The number of operations until the machine stops.
    stops_in: Cell<Option<u64>>,
    made: Cell<u64>,
    finding: RefCell<Option<String>>,
    pub log_lines: RefCell<Vec<String>>,
    pub operations: Cell<u64>,
    pub completed: Cell<u64>,
    pub failed: Cell<u64>,
    pub checked: Cell<u64>,
}

impl Harness {
    pub fn new(format: Option<PiFormat>, random: Random) -> Harness {
        Harness {
            format,
            pace_ms: *random.pick(&[0, 0, 0, 300, 5000]),
            random,
            replicas: (0..REPLICAS).map(|number| Rc::new(Replica::new(number))).collect(),
            model: RefCell::new(Model::new(BLOCKS as usize)),
            session: RefCell::default(),
            acked: RefCell::default(),
            stops_in: Cell::default(),
            made: Cell::new(1),
            finding: RefCell::default(),
            log_lines: RefCell::default(),
            operations: Cell::default(),
            completed: Cell::default(),
            failed: Cell::default(),
            checked: Cell::default(),
        }
    }

    /// A unique number.
    pub fn fresh(&self) -> Stamp {
        self.made.set(self.made.get() + 1);
        self.made.get()
    }

    /// Records a violation; the first one counts.
    pub fn find(&self, finding: String) {
        self.finding.borrow_mut().get_or_insert(finding);
    }

    pub fn found(&self) -> Option<String> {
        self.finding.borrow().clone()
    }

    pub fn log(&self, link: String) {
        self.log_lines.borrow_mut().push(link);
    }

    /// Makes the machine stop in the middle of its n-th operation on a replica from now on.
    pub fn stop_in(&self, operations: Option<u64>) {
        self.stops_in.set(operations);
    }

    /// Counts an operation on a replica; true if the machine stops in the middle of it.
    pub fn is_last_operation(&self) -> bool {
        self.operations.set(self.operations.get() + 1);
        let left = self.stops_in.get().map(|left| left.saturating_sub(1));
        self.stops_in.set(left);
        left == Some(0)
    }

    /// The machine stops.
    pub fn stop(&self, executor: &Executor) {
        self.stops_in.set(None);
        self.log("    the machine stops in the middle of something".to_owned());
        executor.halt();
    }

    /// The state of this replica, and whether it is online, as the mirror reports it.
    pub fn replica_state(&self, replica: &Replica) -> Option<(ReplicaState, bool)> {
        let session = self.session.borrow();
        let description = session.as_ref()?.mirror.describe();
        // A replica that could not be added leaves a removed entry with its name.
        let named = description.replicas.iter().filter(|info| info.name == replica.name);
        named
            .min_by_key(|replica| replica.state == ReplicaState::Removed)
            .map(|replica| (replica.state, replica.is_online))
    }

    /// The replicas that the mirror reports as in sync.
    pub fn in_sync(&self) -> Vec<Rc<Replica>> {
        let is_current = |replica: &&Rc<Replica>| {
            replica.is_reached() && matches!(self.replica_state(replica), Some((ReplicaState::InSync, true)))
        };
        self.replicas.iter().filter(is_current).cloned().collect()
    }

    /// The replicas that can complete all requests now, with the epoch of their links.
    pub fn well(&self) -> Vec<(usize, u64)> {
        let is_up = |replica: &&Rc<Replica>| replica.link.get() == ReplicaLink::Up;
        self.in_sync().iter().filter(is_up).map(|replica| (replica.number, replica.epoch.get())).collect()
    }

    /// The mirror is about to write to this replica.
    pub fn is_written(&self, replica: &Replica) {
        if !matches!(self.replica_state(replica), Some((ReplicaState::Resyncing, _))) {
            return;
        }
        self.check_overwriting(replica);
        let session = self.session.borrow();
        let Some(session) = session.as_ref() else { return };
        let mut image = replica.image.borrow_mut();
        let is_told = image.label().is_none_or(|label| label.replicas[label.own_index].state != ReplicaState::InSync);
        let known = &mut image.known;
        // A replica that has all acknowledged changes needs no label first, because it only gets changes that were in
        // doubt.
        let lacks = known.node.is_none_or(|node| self.model.borrow().has_more(session.node, node));
        if !is_told && lacks && !known.is_mixed {
            let name = &replica.name;
            self.find(format!("{name} is resynced while its own label calls it in sync"));
        }
        if !is_told && !lacks && !known.is_mixed {
            known.node = Some(session.node);
        } else {
            known.is_mixed = true;
        }
        known.holds = Some(session.node);
    }

    /// Checks that content that only this replica has is not overwritten, and that its label keeps the proof of it.
    fn check_overwriting(&self, replica: &Replica) {
        let session = self.session.borrow();
        let Some(session) = session.as_ref() else { return };
        let known = replica.image.borrow().known.clone();
        let holds = known.holds.filter(|_| !known.is_mixed);
        if holds.is_some_and(|holds| self.model.borrow().has_flushed_more(holds, session.node)) {
            self.find(format!("{} is taken in although it alone holds flushed writes", replica.name));
        }
    }

    /// A label was written to a replica.
    pub fn is_labelled(&self, replica: &Replica) {
        if matches!(self.replica_state(replica), Some((ReplicaState::Resyncing | ReplicaState::InSync, _))) {
            self.check_overwriting(replica);
        }
        // A replica that has had all data since the previous label gets the proof of that with this label.
        self.record_run();
        let (id, acked) = (self.fresh(), self.acked.borrow().clone());
        let mut image = replica.image.borrow_mut();
        let Some(label) = image.label() else { return };
        self.model.borrow_mut().label(id, image.known.own);
        (image.known.own, image.known.acked) = (id, acked);
        self.acked.borrow_mut().insert(label.replicas[label.own_index].id, id);
    }

    /// Records which replicas have all data by now.
    pub fn record_run(&self) {
        let is_in_sync = |replica: &Rc<Replica>| {
            let replica_state = self.replica_state(replica);
            if replica.is_reached() && replica_state.is_some_and(|(_, is_online)| is_online) {
                // The mirror has accepted the current image.
                replica.is_swapped.set(false);
            }
            !replica.is_swapped.get() && matches!(replica_state, Some((ReplicaState::InSync, _)))
        };
        let in_sync: Vec<bool> = self.replicas.iter().map(is_in_sync).collect();
        let session = self.session.borrow();
        let Some(session) = session.as_ref() else { return };
        for (replica, _) in self.replicas.iter().zip(in_sync).filter(|(_, in_sync)| *in_sync) {
            let known = &mut replica.image.borrow_mut().known;
            (known.node, known.holds) = (Some(session.node), Some(session.node));
            (known.is_mixed, known.is_new) = (false, false);
        }
    }

    /// Advances the model of the session's history.
    pub fn advance(&self, step: impl FnOnce(&mut Model, NodeId, HistoryState) -> NodeId) {
        // A replica that went offline meanwhile does not get the changes that follow.
        self.record_run();
        if let Some(session) = self.session.borrow_mut().as_mut() {
            let mut model = self.model.borrow_mut();
            session.node = step(&mut model, session.node, session.state.clone());
            session.state = model.state(session.node).clone();
        }
        self.record_run();
    }

    /// The possible contents of the session's blocks.
    pub fn state(&self) -> Option<HistoryState> {
        self.session.borrow().as_ref().map(|session| session.state.clone())
    }

    /// A replica's good copy of a block.
    pub fn copy(&self, replica: &Replica, block: usize) -> Option<Stamp> {
        replica.image.borrow().good(Lba::new(block as u64), self.format)
    }

    /// The blocks of which, according to a label, this replica has only an older copy; reads do not return it.
    pub fn withheld(&self, replica: &Replica) -> Vec<u64> {
        let Some((_, own)) = self.labelled(replica.number) else { return Vec::new() };
        let id = own.replicas[own.own_index].id;
        let labels = (0..REPLICAS).filter_map(|number| self.labelled(number));
        let members = labels.flat_map(|(_, label)| label.replicas).filter(|member| member.id == id);
        members.flat_map(|member| member.stale).collect()
    }

    /// A replica's good copies that reads may return, by block.
    pub fn copies(&self, replica: &Replica) -> Vec<Option<Stamp>> {
        let withheld = self.withheld(replica);
        let copy = |block: u64| {
            let is_read = !withheld.contains(&block);
            is_read.then(|| self.copy(replica, block as usize)).flatten()
        };
        (0..BLOCKS).map(copy).collect()
    }

    /// The label of a replica and the model's information about it.
    pub fn labelled(&self, number: usize) -> Option<(ImageInfo, Label)> {
        let image = self.replicas[number].image.borrow();
        image.label().map(|label| (image.known.clone(), label))
    }

    /// Logs the labels of these replicas.
    pub fn log_labels(&self, numbers: &[usize]) {
        for (number, (_, label)) in numbers.iter().filter_map(|number| Some((number, self.labelled(*number)?))) {
            let members = label.replicas.iter().enumerate().map(|(at, member)| {
                let own = if at == label.own_index { "itself " } else { "" };
                format!("{own}{} seen {} sent {}", member.state.as_str(), member.acked_events, member.sent_events)
            });
            let members: Vec<String> = members.collect();
            let sessions = label.lineage.sessions().iter().take(2).map(|session| {
                let doubt = if session.is_confirmed { "" } else { "?" };
                format!("{:04x}{doubt} until {}", session.id & 0xffff, session.until)
            });
            let sessions: Vec<String> = sessions.collect();
            let tentative =
                if label.is_tentative { format!("tentative, changed {}", label.changed) } else { "firm".to_owned() };
            let (name, events) = (&self.replicas[*number].name, label.events);
            self.log(format!("      label {events} of {name}: {}", members.join(", ")));
            self.log(format!("            {tentative}; sessions {}", sessions.join(", ")));
        }
    }

    /// Replaces the image of a replica.
    pub fn put(&self, number: usize, image: Image) {
        self.replicas[number].is_swapped.set(true);
        *self.replicas[number].image.borrow_mut() = image;
    }
}
