//! What is known of a machine with a mirror from outside: which legs are well, what hosts changed, what may fail.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_block::{Abilities, Device, Error, ErrorKind, Geometry, Outcome, Request, RequestKind};
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{Mirror, MirrorInfo, ReplicaInfo};
use sealblock_units::Extent;

use super::clock::Hurried;
use super::site::{ReplicaEnv, ReplicaLink};
use crate::client::Ledger;
use crate::trace::Trace;

/// The mirror of one machine.
pub(super) type Up = Rc<Mirror<Hurried>>;

/// What the parts of one machine share.
pub(super) struct Harness {
    pub ledger: Rc<Ledger>,
    pub sites: RefCell<Vec<Rc<ReplicaEnv>>>,
    pub mirror: RefCell<Option<Up>>,
    pub region_shift: u32,
    pub trace: Trace,
    pub story: RefCell<Vec<String>>,
    /// A disk was damaged on purpose.
    pub is_damaged: Cell<bool>,
    /// How often the only leg with everything was opened anew, which may lose what was not flushed.
    pub losses: Cell<u64>,
    /// Legs that were not in use from before a change was asked for until it was answered.
    pub went_without: RefCell<Vec<bool>>,
    /// Changes under way.
    pub changing: Cell<u64>,
    pub answered_changes: Cell<u64>,
    /// How often the legs were compared at rest.
    pub rests: Cell<u64>,
    /// The legs are named in any order, so that those that are away are told apart only once they are back.
    pub is_any_order: Cell<bool>,
    /// A leg may have to be refused for a label that was perhaps under way.
    pub is_in_doubt: Cell<bool>,
    /// Starts and ends of I/Os of all legs until the machine stops.
    pub fuse: RefCell<Option<Rc<Cell<u64>>>>,
}

impl Harness {
    /// A machine with so many legs, which are placed in it later.
    pub fn new(ledger: Rc<Ledger>, region_shift: u32, legs: usize, trace: Trace) -> Harness {
        Harness {
            ledger,
            region_shift,
            trace,
            sites: RefCell::default(),
            mirror: RefCell::default(),
            story: RefCell::default(),
            is_damaged: Cell::default(),
            losses: Cell::default(),
            went_without: vec![false; legs].into(),
            changing: Cell::default(),
            answered_changes: Cell::default(),
            rests: Cell::default(),
            is_any_order: Cell::default(),
            is_in_doubt: Cell::default(),
            fuse: RefCell::default(),
        }
    }

    pub fn find(&self, finding: String) {
        self.ledger.find(finding);
    }

    pub fn say(&self, line: String) {
        self.story.borrow_mut().push(line);
    }

    /// The legs that are meant to be in use.
    pub fn members(&self) -> Vec<Rc<ReplicaEnv>> {
        let is_member = |site: &&Rc<ReplicaEnv>| site.is_member.get() && !site.is_removed.get();
        self.sites.borrow().iter().filter(is_member).cloned().collect()
    }

    pub fn has_bare_leg(&self) -> bool {
        self.sites.borrow().iter().any(|site| site.bare)
    }

    pub fn regions(&self, extent: Extent) -> std::ops::RangeInclusive<u64> {
        extent.start().get() >> self.region_shift..=extent.last().get() >> self.region_shift
    }

    pub fn describe(&self) -> Option<MirrorInfo> {
        self.mirror.borrow().as_ref().map(|mirror| mirror.describe())
    }

    /// What the mirror says that this leg is.
    pub fn standing(&self, site: &ReplicaEnv) -> Option<(ReplicaState, bool)> {
        let description = self.describe()?;
        // One that could not be added has left its place and its name behind.
        let named = description.replicas.iter().filter(|leg| leg.name == site.name);
        named.min_by_key(|leg| leg.state == ReplicaState::Removed).map(|leg| (leg.state, leg.is_online))
    }

    /// A leg's disk loses what it may. Where no other leg is up to date that is the mirror's loss.
    pub fn restarted(&self, site: &ReplicaEnv) {
        let Some(description) = self.describe() else { return };
        let is_current =
            |name: &str| description.replicas.iter().any(|leg| leg.name == name && leg.state == ReplicaState::InSync);
        let others = description.replicas.iter().any(|leg| leg.state == ReplicaState::InSync && leg.name != site.name);
        if is_current(&site.name) && !others {
            self.losses.set(self.losses.get() + 1);
            self.ledger.checker.borrow_mut().lose();
        }
    }

    /// Legs that can answer everything now, and since when. Those without a label do not count: they cannot note anything.
    fn well(&self) -> Vec<(usize, u64)> {
        let Some(description) = self.describe() else { return Vec::new() };
        let is_well = |site: &&Rc<ReplicaEnv>| {
            let is_it = |leg: &ReplicaInfo| leg.name == site.name && leg.is_online && leg.state == ReplicaState::InSync;
            site.line.get() == ReplicaLink::Up && !site.bare && description.replicas.iter().any(is_it)
        };
        self.sites.borrow().iter().filter(is_well).map(|site| (site.number, site.breaks.get())).collect()
    }

    /// Hosts are about to change blocks.
    fn begin_change(&self, extents: &[Extent]) {
        for site in self.sites.borrow().iter() {
            site.allowed.borrow_mut().extend(extents.iter().flat_map(|extent| self.regions(*extent)));
        }
        self.changing.set(self.changing.get() + 1);
    }

    /// They have changed them, or failed to. `left` are the legs that were left behind before.
    fn end_change(&self, is_done: bool, left: &[usize]) {
        self.changing.set(self.changing.get() - 1);
        if !is_done {
            return;
        }
        self.answered_changes.set(self.answered_changes.get() + 1);
        let now = self.left_behind();
        // One that was left only meanwhile may have this change, and the others not have noted that it went.
        left.iter().filter(|leg| now.contains(leg)).for_each(|leg| self.went_without.borrow_mut()[*leg] = true);
        self.forgive_current();
    }

    /// A leg that is current lacks nothing of what the others did without it: it was brought up to date since.
    pub fn forgive_current(&self) {
        for site in self.sites.borrow().iter() {
            if matches!(self.standing(site), Some((ReplicaState::InSync, _))) {
                self.went_without.borrow_mut()[site.number] = false;
            }
        }
    }

    /// Legs that are left behind now, or not members.
    fn left_behind(&self) -> Vec<usize> {
        let is_left = |site: &&Rc<ReplicaEnv>| {
            !matches!(self.standing(site), Some((ReplicaState::InSync | ReplicaState::Resyncing, _)))
        };
        self.sites.borrow().iter().filter(is_left).map(|site| site.number).collect()
    }

    /// Whether a request may fail like this although these legs were well when it was asked.
    fn judge(&self, kind: RequestKind, error: &Error, before: &[(usize, u64)], losses: u64) {
        let is_planned = match error.kind() {
            // The client knows which blocks may be unreadable or different.
            ErrorKind::Integrity(_) | ErrorKind::Miscompare { .. } => return,
            ErrorKind::Media { .. } if kind == RequestKind::Flush => losses > 0,
            _ => false,
        };
        let now = self.well();
        if let Some((leg, _)) = before.iter().find(|leg| !is_planned && now.contains(leg)) {
            self.find(format!("{} failed although leg {leg} was well all the time: {error}", kind.name()));
        }
    }
}

/// What hosts see: the mirror, watched.
pub(super) struct Watch {
    pub world: Rc<Harness>,
    pub mirror: Up,
}

impl Device for Watch {
    fn geometry(&self) -> &Geometry {
        self.mirror.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.mirror.abilities()
    }

    async fn execute(&self, operation: Request) -> Outcome {
        let (kind, before) = (operation.kind(), self.world.well());
        let extents: Vec<Extent> = match &operation {
            Request::Write { extent, .. }
            | Request::WriteZeroes { extent, .. }
            | Request::WriteUncorrectable { extent, .. } => vec![*extent],
            Request::Discard { extents } => extents.to_vec(),
            _ => Vec::new(),
        };
        if extents.is_empty() {
            return self.watch(operation, kind, &before).await;
        }
        let left = self.world.left_behind();
        self.world.begin_change(&extents);
        let outcome = self.watch(operation, kind, &before).await;
        self.world.end_change(outcome.is_ok(), &left);
        outcome
    }
}

impl Watch {
    /// Has an operation carried out, and judges whether it may fail as it does.
    async fn watch(&self, operation: Request, kind: RequestKind, before: &[(usize, u64)]) -> Outcome {
        let outcome = self.mirror.execute(operation).await;
        if let Err(error) = &outcome {
            self.world.judge(kind, error, before, self.world.losses.get());
        }
        outcome
    }
}
