//! Adding, replacing and removing replicas while the mirror is in use.

use std::rc::Rc;

use sealblock_block::Clock;

use crate::error::ReplicaError;
use crate::label::assemble::replica_id;
use crate::label::regions::Regions;
use crate::label::{Label, MAX_REPLICAS, ReplicaRecord, ReplicaState};
use crate::mirror::probe::{check_fit, check_pages, inspect};
use crate::mirror::replica::{Replica, ReplicaSource};
use crate::mirror::{Mirror, Mutation};

/// A device that is to become a replica.
struct NewReplica {
    has_room: bool,
    /// The offline replica of this mirror that it was until now.
    former: Option<Rc<Replica>>,
}

impl<C: Clock> Mirror<C> {
    /// Adds a replica, which the worker resyncs. With `force` its content is replaced; otherwise it must be blank and
    /// without a label.
    ///
    /// # Errors
    /// When the device does not fit, or the labels cannot be written; then it is not used.
    pub async fn add(&self, source: ReplicaSource, force: bool) -> Result<(), ReplicaError> {
        let candidate = self.check_candidate(&source, force).await?;
        let index = self.index_for(&candidate).ok_or(ReplicaError::Full)?;
        self.attach_at(source, &candidate, index).await
    }

    /// Replaces a replica that is not in sync by another device, at once: labels record both changes or neither.
    /// Beside an in-sync replica the device is added, and the caller removes that replica when the resync ends.
    ///
    /// # Errors
    /// When there is no such replica, nothing tells which one it is, or as [`Mirror::add`]; then nothing was changed.
    pub async fn replace(&self, old: &str, source: ReplicaSource, force: bool) -> Result<(), ReplicaError> {
        let candidate = self.check_candidate(&source, force).await?;
        let replica = self.find_replica(old)?;
        let index = match replica.is_readable() {
            true => self.index_for(&candidate).ok_or(ReplicaError::Full)?,
            false => self.position(replica.id).unwrap_or(0),
        };
        self.attach_at(source, &candidate, index).await
    }

    /// Checks a device and clears its label.
    async fn check_candidate(&self, source: &ReplicaSource, force: bool) -> Result<NewReplica, ReplicaError> {
        if self.is_read_only {
            return Err(ReplicaError::ReadOnly);
        }
        check_fit(source, self.geometry.block_size, self.geometry.capacity_blocks, self.geometry.protection)?;
        let candidate = inspect(source).await?;
        let former = candidate.probe.label().map(|label| label.replicas[label.own_index].id);
        let former = self.replicas.borrow().iter().find(|replica| Some(replica.id) == former).cloned();
        if former.as_ref().is_some_and(|former| former.is_online()) {
            return Err(ReplicaError::InUse { replica: source.name.clone() });
        }
        if let (Ok(device), true) = (&source.device, candidate.probe.has_room()) {
            check_pages(&source.name, device, &self.map)?;
        }
        // The content of this mirror, as its labels say it now.
        let own: Vec<Label> = self.in_sync().iter().map(|replica| self.label(replica)).collect();
        candidate.check(&source.name, force, true, &own)?;
        candidate.clear_label(source).await?;
        Ok(NewReplica { has_room: candidate.probe.has_room(), former })
    }

    /// Makes a device the replica at an index, in place of the replica that was there. The replica of this mirror that it was before is no
    /// more: its device never comes back.
    async fn attach_at(&self, source: ReplicaSource, new: &NewReplica, index: usize) -> Result<(), ReplicaError> {
        // With other replicas the next check finds which blocks are in conflict.
        self.conflicts.take();
        let replica = Rc::new(Replica::new(source, self.next_number(), &self.new_record(new.has_room, index)));
        let before = self.replicas.borrow().get(index).cloned();
        if let Some(former) = &new.former {
            self.set_removed(former);
        }
        self.set_replica(index, replica.clone());
        self.start_resync(&replica);
        self.write_intent.begin_change();
        let recorded = self.write_labels().await;
        let gone = match (&recorded, before) {
            (Ok(()), before) => before,
            (Err(_), before) => {
                if let Some(former) = &new.former {
                    // Its label is gone, so it lacks everything until it is replaced.
                    self.set_lacking_everything(former);
                }
                before.into_iter().for_each(|before| self.set_replica(index, before));
                Some(replica)
            }
        };
        if let Some(replica) = gone {
            self.revoke();
            replica.state.set(ReplicaState::Removed);
            replica.set_device(None);
        }
        self.recall().await;
        recorded.map_err(ReplicaError::WriteLabels)
    }

    fn set_replica(&self, index: usize, replica: Rc<Replica>) {
        self.revoke();
        let mut replicas = self.replicas.borrow_mut();
        if index < replicas.len() { replicas[index] = replica } else { replicas.push(replica) }
    }

    fn next_number(&self) -> usize {
        self.replicas.borrow().iter().map(|replica| replica.number.get() + 1).max().unwrap_or(0)
    }

    /// Record of a new replica: none of its content is the mirror's.
    fn new_record(&self, has_room: bool, index: usize) -> ReplicaRecord {
        let events = self.write_intent.events.get();
        ReplicaRecord {
            id: replica_id(&self.uuid, events + 1, index),
            state: ReplicaState::OutOfSync,
            has_room,
            is_new: true,
            out_of_sync: Regions::all(self.map.count()),
            stale: Vec::new(),
            acked_events: events,
            sent_events: events,
        }
    }

    /// Removes a replica for good. Its content stays. Its own label records it first, so that it makes no mirror by
    /// itself.
    ///
    /// # Errors
    /// When there is no such replica, nothing tells which one it is, it is the last in-sync one, or the labels cannot
    /// be written; then it stays. Whether blocks are known to be bad on those that stay is for the caller to see.
    pub async fn remove(&self, name: &str) -> Result<(), ReplicaError> {
        if self.is_read_only {
            return Err(ReplicaError::ReadOnly);
        }
        let replica = self.find_replica(name)?;
        let is_last = || !self.in_sync().iter().any(|other| other.id != replica.id);
        if is_last() {
            return Err(self.last_in_sync(&replica));
        }
        self.write_intent.begin_change();
        self.write_labels().await.map_err(ReplicaError::WriteLabels)?;
        if !self.mutation.is(Mutation::SkipRemovedLabel) && !is_last() {
            self.write_removed_label(&replica).await;
        }
        if is_last() {
            // The others failed meanwhile, and this is the last replica. Its label may say that it was removed.
            self.write_labels().await.map_err(ReplicaError::WriteLabels)?;
            return Err(self.last_in_sync(&replica));
        }
        self.set_removed(&replica);
        replica.set_device(None);
        self.conflicts.take();
        // Labels must record it before a change that it misses completes.
        self.write_intent.begin_change();
        self.write_intent.request_failure_write();
        self.work.notify();
        let recorded = self.write_labels().await;
        if recorded.is_err() {
            // It stays, and lacks what was changed meanwhile.
            self.set_lacking_everything(&replica);
        }
        self.recall().await;
        recorded.map_err(ReplicaError::WriteLabels)
    }

    /// Makes the record of a replica that of a removed one.
    fn set_removed(&self, replica: &Replica) {
        self.revoke();
        replica.state.set(ReplicaState::Removed);
        replica.is_listed_in_sync.set(false);
        *replica.out_of_sync.borrow_mut() = Regions::none(self.map.count());
        // Its stale copies are of no use any more, and the lists have little room.
        replica.stale.take();
    }

    fn set_lacking_everything(&self, replica: &Replica) {
        self.revoke();
        replica.state.set(ReplicaState::OutOfSync);
        *replica.out_of_sync.borrow_mut() = Regions::all(self.map.count());
    }

    /// Why the last in-sync replica stays.
    fn last_in_sync(&self, last: &Replica) -> ReplicaError {
        let replicas = self.describe().replicas;
        let others = replicas.iter().filter(|other| other.id != last.id && other.state != ReplicaState::Removed);
        let left = others.map(|other| match other.state {
            // It is unreachable; otherwise it would count.
            ReplicaState::InSync => format!("{} is offline", other.name),
            state => format!("{} is {}", other.name, state.as_str().replace('_', " ")),
        });
        ReplicaError::LastInSync { replica: last.name().to_string(), left: left.collect() }
    }

    /// The replica of this name; the newest, if one that is not in sync has it too.
    fn find_replica(&self, name: &str) -> Result<Rc<Replica>, ReplicaError> {
        let replicas = self.replicas.borrow();
        let named =
            replicas.iter().filter(|replica| *replica.name() == *name && replica.state.get() != ReplicaState::Removed);
        let replica = named
            .max_by_key(|replica| replica.number.get())
            .cloned()
            .ok_or_else(|| ReplicaError::Unknown(name.to_owned()))?;
        let is_guessed = |replica: &Rc<Replica>| {
            replica.is_name_assumed.get() && !replica.is_online() && replica.state.get() != ReplicaState::Removed
        };
        let others = || replicas.iter().filter(|other| other.id != replica.id && is_guessed(other));
        // If devices without labels have all these names, no offline replica returns under them.
        let may_return = !replica.is_unlabelled.get() || others().any(|other| !other.is_unlabelled.get());
        if is_guessed(&replica) && may_return && others().next().is_some() {
            let others: Vec<String> = others().map(|other| other.name().to_string()).collect();
            return Err(ReplicaError::Ambiguous { replica: name.to_owned(), others: others.join(", ") });
        }
        Ok(replica)
    }

    /// Trusts the names of offline replicas, which they got by their order on the command line. For callers that are
    /// sure of it.
    pub fn trust_names(&self) {
        self.replicas.borrow().iter().for_each(|replica| replica.is_name_assumed.set(false));
    }

    /// Waits until no resync runs; true if none stopped early.
    pub async fn resync_ended(&self) -> bool {
        let is_busy = || self.replicas.borrow().iter().any(|replica| replica.state.get() == ReplicaState::Resyncing);
        self.work.wait_until(|| !is_busy() || self.is_closing.get()).await;
        !is_busy()
    }

    fn position(&self, id: [u8; 16]) -> Option<usize> {
        self.replicas.borrow().iter().position(|replica| replica.id == id)
    }

    /// Where a new replica goes: to its former place, if it had one.
    fn index_for(&self, new: &NewReplica) -> Option<usize> {
        new.former.as_ref().and_then(|former| self.position(former.id)).or_else(|| self.free_index())
    }

    fn free_index(&self) -> Option<usize> {
        let replicas = self.replicas.borrow();
        // Appended while there is room: offline replicas are told apart by their order.
        let removed = || replicas.iter().position(|replica| replica.state.get() == ReplicaState::Removed);
        Some(replicas.len()).filter(|count| *count < MAX_REPLICAS).or_else(removed)
    }
}
