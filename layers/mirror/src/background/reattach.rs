//! Replicas that return: which device may be attached again as which replica.

use std::rc::Rc;

use sealblock_block::{Clock, DynDevice, ErrorKind, WhyOlder};
use sealblock_units::{Extent, Lba};

use crate::error::MirrorError;
use crate::label::assemble::{Assembly, ReplicaProbe, add_missed, assemble, is_still_new, needs_full_resync};
use crate::label::regions::Regions;
use crate::label::{Label, ReplicaState};
use crate::mirror::probe::{check_fit, default_name, probe_device, why_older, why_unfit};
use crate::mirror::replica::{Replica, ReplicaSource};
use crate::mirror::samples::{Known, are_of_another, differences, other_content, sample_blocks};
use crate::mirror::{Mirror, Mutation};

impl<C: Clock> Mirror<C> {
    /// Attaches a replica's device again, if it is that replica and was not changed without the others.
    ///
    /// # Errors
    /// Why it cannot be attached.
    pub(crate) async fn reattach(&self, replica: &Rc<Replica>, device: DynDevice) -> Result<(), String> {
        let source = ReplicaSource::new(&*replica.name(), Ok(device.clone()), None);
        let fit = check_fit(&source, self.geometry.block_size, self.geometry.capacity_blocks, self.geometry.protection);
        let found = probe_device(&device, self.mutation).await.map_err(|error| error.to_string())?;
        let replica = &self.identify(replica, &found);
        if let Err(misfit) = fit {
            return Err(self.refuse_misfit(replica, &source, &found, &misfit));
        }
        let mut is_current = false;
        if let ReplicaProbe::Labelled(label) = &found {
            is_current = self.adopt_label(replica, label, why_older(&device))?;
            replica.is_name_assumed.set(false);
        } else if replica.has_room || found.has_room() {
            replica.is_unlabelled.set(true);
            return Err("the device has no label, so it is not this replica; `sealblock mirror replace` makes it one"
                .to_owned());
        } else if let Some(why) = self.why_not_content(replica, &device).await {
            return Err(why);
        }
        self.revoke();
        replica.stale.borrow_mut().withhold_again();
        self.write_intent.is_stale_check_due.set(true);
        replica.set_device(Some(device));
        replica.has_lost_blocks.set(false);
        replica.last_error.borrow_mut().clear();
        match replica.state.get() {
            ReplicaState::OutOfSync if replica.is_failure_unrecorded.get() && is_current => self.readmit(replica),
            ReplicaState::OutOfSync => self.start_resync(replica),
            // It was the last in-sync replica, and its device may have lost unflushed writes that no other replica
            // certainly has.
            ReplicaState::InSync => {
                self.writes_lost.set(self.writes_lost.get() || self.write_intent.has_unflushed());
                self.mark_dirty_nosync();
            }
            _ => {}
        }
        Ok(())
    }

    /// Lists a replica in sync again whose failure no label records: so nothing was completed without it. What was in flight or not
    /// flushed is compared; the content of a replica that was there all the time counts.
    fn readmit(&self, replica: &Replica) {
        let has_stayed = self.in_sync().first().map(|other| other.id);
        self.set_authority(has_stayed.unwrap_or(replica.id));
        if has_stayed.is_none() {
            self.writes_lost.set(self.writes_lost.get() || self.write_intent.has_unflushed());
        }
        replica.is_failure_unrecorded.set(false);
        replica.is_listed_in_sync.set(false);
        *replica.out_of_sync.borrow_mut() = Regions::none(self.map.count());
        replica.state.set(ReplicaState::InSync);
        self.mark_dirty_nosync();
        self.demote_offline();
        tracing::info!(replica = %replica.name(), "replica is in sync: without it nothing could be recorded");
    }

    /// Why a device without a label is not used in the place of this replica: its content is another one where it lacks nothing of what
    /// the replica had, or there is nothing to compare it with.
    async fn why_not_content(&self, replica: &Replica, device: &DynDevice) -> Option<String> {
        let in_sync = self.in_sync().into_iter().find(|other| other.id != replica.id);
        let Some((in_sync, current)) = in_sync.and_then(|other| other.device().map(|device| (other, device))) else {
            let why = "it has no label, and no other replica is in sync and online to compare it with";
            return self.has_label().then(|| why.to_owned());
        };
        let blocks = sample_blocks(self.geometry.capacity_blocks, self.write_intent.events.get());
        let differs = differences(&current, device, &blocks).await;
        // Now, since changes may have run meanwhile: each marks its regions first.
        let marked = [&replica.out_of_sync, &replica.to_resync, &self.write_intent.dirty, &self.write_intent.nosync];
        let stale = [replica.stale.borrow().listed(), in_sync.stale.borrow().listed()].concat();
        let known = |lba: Lba| {
            let regions = self.map.of(Extent::one(lba));
            match marked.iter().any(|of| of.borrow().contains_any(regions.clone())) {
                _ if stale.contains(&lba.get()) => Known::Nothing,
                true if replica.is_new.get() => Known::Nothing,
                true => Known::Lacks,
                false => Known::Same,
            }
        };
        let differs: Vec<_> = blocks.into_iter().map(known).zip(differs).collect();
        are_of_another(&differs).then(|| other_content(&in_sync.name()))
    }

    /// Why a device that does not fit cannot be attached, and what its label says besides: it may have changes that the mirror lacks.
    fn refuse_misfit(
        &self,
        replica: &Replica,
        source: &ReplicaSource,
        found: &ReplicaProbe,
        misfit: &MirrorError,
    ) -> String {
        let Some(label) = found.label() else { return misfit.to_string() };
        let unfit = why_unfit(source, label).unwrap_or_else(|| misfit.to_string());
        match self.check_label(replica, label) {
            Ok(()) => unfit,
            Err(reason) => format!("{unfit}; {reason}"),
        }
    }

    /// The replica whose device was found under the name of `replica`. Replicas that were offline at the open were
    /// matched by the order of the names; now the label decides.
    fn identify(&self, replica: &Rc<Replica>, found: &ReplicaProbe) -> Rc<Replica> {
        let ReplicaProbe::Labelled(label) = found else { return replica.clone() };
        if self.mutation.is(Mutation::TrustOrder) {
            return replica.clone();
        }
        let id = label.replicas[label.own_index].id;
        let is_away = |replica: &Rc<Replica>| replica.state.get() == ReplicaState::OutOfSync && !replica.is_online();
        let replicas = self.replicas.borrow();
        let index = |id: [u8; 16]| replicas.iter().position(|replica| replica.id == id);
        let (Some(own), Some(other)) = (index(replica.id), index(id)) else { return replica.clone() };
        if label.uuid != self.uuid || own == other || !is_away(replica) || !is_away(&replicas[other]) {
            return replica.clone();
        }
        replica.swap_names(&replicas[other]);
        if *replica.name() == *default_name(other) {
            replica.set_name(default_name(own));
        }
        replicas[other].clone()
    }

    /// Records why the replica of this number cannot be reattached, and logs it if the reason is new.
    pub(crate) fn set_last_error(&self, number: usize, reason: String) {
        let replica = self.replicas.borrow().iter().find(|replica| replica.number.get() == number).cloned();
        let Some(replica) = replica else { return };
        let was = replica.last_error.replace(reason.clone());
        if was != reason {
            tracing::warn!(replica = %replica.name(), %reason, "cannot reattach replica");
        }
    }

    /// Checks the label of a replica that has returned, and updates its record from it. True if, by that, it has all that was
    /// written until it failed.
    fn adopt_label(&self, replica: &Replica, label: &Label, why_older: Option<WhyOlder>) -> Result<bool, String> {
        self.check_label(replica, label)?;
        if let (Some(why), ReplicaState::InSync) = (why_older, replica.state.get()) {
            return Err(format!("it was the last in-sync replica, and {}", ErrorKind::MayBeOlder(why)));
        }
        if replica.has_lost_blocks.get() && replica.state.get() == ReplicaState::InSync {
            return Err("it was the last in-sync replica, and lost blocks while it was in use".to_owned());
        }
        let is_older = why_older.is_some() || needs_full_resync(&self.label(replica), label);
        let lacks_everything = is_older || replica.has_lost_blocks.get();
        if lacks_everything && replica.state.get() == ReplicaState::InSync {
            return Err("the device is an older image of the last in-sync replica, or was changed elsewhere".to_owned());
        }
        // Since it wrote a label of this open, the regions that it lacks are known exactly; and that label has all the
        // groups in which changes wait for no label, of which most are durable.
        let is_followed = label.events > self.opened_events
            && [replica.acked_events.get(), replica.sent_events.get()].contains(&label.events);
        replica.acked_events.set(replica.acked_events.get().max(label.events));
        if label.events > self.write_intent.events.get() {
            // Another opening used it without a change, and other replicas may know that label: labels with lower
            // event counts would make it look like an older image.
            self.write_intent.skip_events_past(label.events);
        }
        if replica.state.get() == ReplicaState::OutOfSync {
            replica.is_new.set(is_still_new(replica.is_new.get(), label, lacks_everything));
            let was_current = label.replicas[label.own_index].state == ReplicaState::InSync;
            replica.is_listed_in_sync.set(replica.is_listed_in_sync.get() && was_current && !lacks_everything);
            add_missed(&mut replica.out_of_sync.borrow_mut(), label, lacks_everything, is_followed);
        }
        // One that was written alone since says so itself.
        Ok(!lacks_everything && label.replicas[label.own_index].state == ReplicaState::InSync)
    }

    /// Checks that this label is the replica's, and that the replica was not changed without the others.
    fn check_label(&self, replica: &Replica, label: &Label) -> Result<(), String> {
        if label.uuid != self.uuid {
            return Err("the device belongs to another mirror".to_owned());
        }
        if label.replicas[label.own_index].id != replica.id && !self.mutation.is(Mutation::TrustOrder) {
            return Err(
                "the device never was a replica of this mirror, or was removed; `sealblock mirror replace` makes it one"
                    .to_owned(),
            );
        }
        if self.mutation.is(Mutation::ReattachDiverged) {
            return Ok(());
        }
        // Also an in-sync replica that is offline now: the label that it would have lists the regions that the others
        // lack.
        let replicas = self.replicas.borrow();
        let mut others =
            replicas.iter().filter(|other| other.state.get() == ReplicaState::InSync && other.id != replica.id);
        let Some(other) = others.next() else { return Ok(()) };
        let found = [self.label(other), label.clone()].map(|label| ReplicaProbe::Labelled(Box::new(label)));
        match assemble(&found).map_err(|refusal| refusal.to_string())? {
            Assembly::Known(known) if known.label.replicas[known.indices[0]].state == ReplicaState::InSync => Ok(()),
            _ => {
                Err("the device was changed elsewhere and has changes that this mirror lacks; reopen the mirror"
                    .to_owned())
            }
        }
    }
}
