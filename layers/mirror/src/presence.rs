//! Legs that go and come back: how one is left behind, and what is taken back as which leg.

use std::rc::Rc;

use sealblock_block::{Clock, DynDevice};

use crate::assemble::{Assembly, ReplicaProbe, add_lacking, assemble, is_still_new, needs_full_resync};
use crate::label::{Label, ReplicaState};
use crate::mirror::Mirror;
use crate::open::{Trouble, fits, found_on, nameless};
use crate::replica::{Replica, ReplicaSource};
use crate::test_hooks::Mutation;

impl<C: Clock> Mirror<C> {
    /// Leaves a leg behind that has failed what a device of it was asked, unless another one is there by now.
    pub(crate) fn leave_asked(&self, leg: &Replica, epoch: u64, why: &str) {
        if leg.attach_count() == epoch {
            self.fail_replica(leg, why);
        }
    }

    /// Leaves a leg behind: it is asked nothing any more and lacks whatever may differ now. To be noted before anything
    /// that it lacks is answered.
    pub(crate) fn fail_replica(&self, leg: &Replica, why: &str) {
        if !leg.takes_labels() {
            return;
        }
        leg.failures.set(leg.failures.get() + 1);
        *leg.why.borrow_mut() = why.to_owned();
        leg.set_device(None);
        let was_current = leg.standing.get() == ReplicaState::InSync;
        let is_any_current = self.legs.borrow().iter().any(|leg| leg.is_current());
        if was_current && !is_any_current {
            tracing::error!(replica = %leg.name(), %why, "the mirror's last leg in sync is gone: nothing is answered until one is back");
            // Nobody is left to go on without it: nothing is answered until it is back, or another one has everything.
            self.work.notify();
            return;
        }
        match is_any_current {
            true => tracing::warn!(replica = %leg.name(), %why, "replica failed, mirror degraded"),
            false => {
                tracing::warn!(replica = %leg.name(), %why, "a leg is gone, too, of a mirror that has none in sync")
            }
        }
        self.go_on_without(leg);
    }

    /// Goes on without legs that were the last ones in sync when they went, now that another one is in sync.
    pub(crate) fn go_on_without_absent(&self) {
        for leg in self.legs.borrow().iter() {
            if leg.standing.get() == ReplicaState::InSync && !leg.is_here() {
                self.go_on_without(leg);
            }
        }
    }

    /// A leg that has gone lacks whatever may differ now.
    fn go_on_without(&self, leg: &Replica) {
        let was_current = leg.standing.get() == ReplicaState::InSync;
        leg.standing.set(ReplicaState::OutOfSync);
        leg.out_of_sync.borrow_mut().add(&self.write_intent.written.borrow());
        if was_current && self.is_even() {
            leg.is_unmissed.set(true);
        }
        if !leg.is_unmissed.get() {
            self.write_intent.is_changing.set(self.write_intent.is_changing.get() || was_current);
            self.write_intent.want_left();
        }
        self.work.notify();
    }

    /// Takes a leg's device back after it was gone: as what it is now, if it is that leg and nobody went on with it elsewhere.
    ///
    /// # Errors
    /// Why it cannot be taken back.
    pub(crate) async fn reattach(&self, leg: &Rc<Replica>, device: DynDevice) -> Result<(), String> {
        let source = ReplicaSource { name: leg.name().to_string(), device: Ok(device.clone()), reopen: None };
        fits(&source, self.geometry.block_size, self.geometry.capacity_blocks, self.geometry.protection)
            .map_err(|error| error.to_string())?;
        let found = found_on(&device, self.mutation).await.map_err(|trouble| match trouble {
            Trouble::Label(why) => why.to_string(),
            Trouble::Device(why) => why.to_string(),
        })?;
        let leg = &self.rightful(leg, &found);
        if let ReplicaProbe::Labelled(label) = &found {
            self.take_label(leg, label)?;
            leg.is_guessed.set(false);
        } else if leg.has_room || found.has_room() {
            leg.is_unlabelled.set(true);
            return Err(
                "it has no label any more; it is not the device that it was; `sealblock mirror replace` makes it a leg"
                    .to_owned(),
            );
        }
        leg.stale.borrow_mut().withhold_again();
        self.write_intent.examine.set(true);
        leg.set_device(Some(device));
        leg.why.borrow_mut().clear();
        match leg.standing.get() {
            ReplicaState::OutOfSync => self.start_resync(leg),
            // The last one in sync, and what it had not flushed may be lost: nobody has it for certain.
            ReplicaState::InSync => {
                self.cache_lost.set(self.cache_lost.get() || !self.write_intent.dirty.borrow().is_empty());
                self.suspect_dirty();
            }
            _ => {}
        }
        Ok(())
    }

    /// Which leg a device is that was found where `leg` should be. One that was away at the opening, without a label to tell, was
    /// given its place by the order of the names, and now that it is here its label tells.
    fn rightful(&self, leg: &Rc<Replica>, found: &ReplicaProbe) -> Rc<Replica> {
        let ReplicaProbe::Labelled(label) = found else { return leg.clone() };
        if self.mutation == Mutation::BelieveOrder {
            return leg.clone();
        }
        let id = label.members[label.own_index].id;
        let is_away = |leg: &Rc<Replica>| leg.standing.get() == ReplicaState::OutOfSync && !leg.is_here();
        let legs = self.legs.borrow();
        let place = |id: [u8; 16]| legs.iter().position(|leg| leg.id == id);
        let (Some(own), Some(other)) = (place(leg.id), place(id)) else { return leg.clone() };
        if label.uuid != self.uuid || own == other || !is_away(leg) || !is_away(&legs[other]) {
            return leg.clone();
        }
        leg.trade_names(&legs[other]);
        if *leg.name() == *nameless(other) {
            leg.call(nameless(own));
        }
        legs[other].clone()
    }

    /// Keeps why the leg of this number does not come back, and says so when it is news.
    pub(crate) fn note_why(&self, number: usize, why: String) {
        let leg = self.legs.borrow().iter().find(|leg| leg.number.get() == number).cloned();
        let Some(leg) = leg else { return };
        let was = leg.why.replace(why.clone());
        if was != why {
            tracing::warn!(replica = %leg.name(), %why, "cannot reattach replica");
        }
    }

    /// Takes in what the label of a leg that is back says.
    fn take_label(&self, leg: &Replica, label: &Label) -> Result<(), String> {
        self.check_label(leg, label)?;
        let lacks_everything = needs_full_resync(&self.label(leg), label);
        if lacks_everything && leg.standing.get() == ReplicaState::InSync {
            return Err("it is an old image of the last leg, or was written elsewhere meanwhile".to_owned());
        }
        leg.acked_events.set(leg.acked_events.get().max(label.events));
        if label.events > self.write_intent.events.get() {
            // It was in use elsewhere, without a change, and others may know its label: an earlier one would look like an older image.
            self.write_intent.go_beyond(label.events);
        }
        if leg.standing.get() == ReplicaState::OutOfSync {
            leg.is_new.set(is_still_new(leg.is_new.get(), label, lacks_everything));
            let was_current = label.members[label.own_index].standing == ReplicaState::InSync;
            leg.is_unmissed.set(leg.is_unmissed.get() && was_current && !lacks_everything);
            add_lacking(&mut leg.out_of_sync.borrow_mut(), label, lacks_everything);
        }
        Ok(())
    }

    /// Whether this label is that of the leg, and the leg was not changed without the others.
    fn check_label(&self, leg: &Replica, label: &Label) -> Result<(), String> {
        if label.uuid != self.uuid {
            return Err("it belongs to another mirror".to_owned());
        }
        if label.members[label.own_index].id != leg.id && self.mutation != Mutation::BelieveOrder {
            return Err(
                "it never was a leg of this mirror, or is none any more; `sealblock mirror replace` makes it a leg"
                    .to_owned(),
            );
        }
        if self.mutation == Mutation::TakeAnybody {
            return Ok(());
        }
        // Also one that is away for the moment knows, in what its label would be, what the others lack.
        let legs = self.legs.borrow();
        let mut others = legs.iter().filter(|other| other.standing.get() == ReplicaState::InSync && other.id != leg.id);
        let Some(other) = others.next() else { return Ok(()) };
        let found = [self.label(other), label.clone()].map(|label| ReplicaProbe::Labelled(Box::new(label)));
        match assemble(&found).map_err(|refusal| refusal.to_string())? {
            Assembly::Known(known) if known.label.members[known.places[0]].standing == ReplicaState::InSync => Ok(()),
            _ => Err("it was changed elsewhere, and has what this mirror lacks; open the mirror anew".to_owned()),
        }
    }

    /// Has a leg that is here brought up to date.
    pub(crate) fn start_resync(&self, leg: &Replica) {
        *leg.to_resync.borrow_mut() = leg.out_of_sync.borrow().clone();
        let is_late = self.mutation == Mutation::LateLabel && self.write_intent.is_writing();
        leg.is_told.set(self.mutation == Mutation::Untold || is_late);
        leg.standing.set(ReplicaState::Resyncing);
        self.work.notify();
    }
}
