//! Giving a mirror a replica, and taking one from it, while it is in use.

use std::rc::Rc;

use sealblock_block::{Clock, Error};

use crate::assemble::{ReplicaProbe, replica_id};
use crate::create::inspect;
use crate::label::{MAX_REPLICAS, ReplicaRecord, ReplicaState};
use crate::mirror::Mirror;
use crate::open::{MirrorError, check_fit, check_pages};
use crate::regions::Regions;
use crate::replica::{Replica, ReplicaSource};
use crate::test_hooks::Mutation;

/// Why a replica cannot be given or taken.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReplicaError {
    /// The mirror has as many replicas as there can be.
    #[error("the mirror has {MAX_REPLICAS} replicas already")]
    Full,
    /// The mirror is open for reading only.
    #[error("the mirror is open for reading only")]
    ReadOnly,
    /// The device cannot be reached.
    #[error("{replica} cannot be reached: {reason}")]
    Offline {
        /// The replica.
        replica: String,
        /// Why.
        reason: String,
    },
    /// The device has the label of a mirror, or of another group.
    #[error("{replica} has the label {what}")]
    Labelled {
        /// The replica.
        replica: String,
        /// Of what.
        what: String,
    },
    /// The device is in use in this mirror.
    #[error("{replica} is a replica of this mirror")]
    InUse {
        /// The replica.
        replica: String,
    },
    /// The device is not blank.
    #[error("{replica} holds data, which would be replaced")]
    NotBlank {
        /// The replica.
        replica: String,
    },
    /// Several devices for a new mirror hold data.
    #[error("several hold data ({replicas}), and nothing says whose counts")]
    AmbiguousSource {
        /// What they are called.
        replicas: String,
    },
    /// The replica whose content counts cannot have a label.
    #[error("{0} has no room for a label")]
    NoRoom(String),
    /// The device does not fit.
    #[error(transparent)]
    Unfit(#[from] MirrorError),
    /// No replica has this name.
    #[error("the mirror has no replica {0}")]
    Unknown(String),
    /// The replica is away since the opening, and nothing tells it from others that are.
    #[error("{replica} is away, as is {others}, and without their labels nothing tells which is which")]
    Ambiguous {
        /// What it is called.
        replica: String,
        /// What the others are called.
        others: String,
    },
    /// Without this replica there would be none that has everything.
    #[error("{0} is the last in-sync replica")]
    LastInSync(String),
    /// What a member keeps could not be written to the others.
    #[error("the older copies could not be written: {0}")]
    WriteBlocks(Error),
    /// It could not be noted.
    #[error("cannot write mirror labels: {0}")]
    WriteLabels(Error),
}

impl<C: Clock> Mirror<C> {
    /// Adds a replica, which is brought up to date in the background. With `force` whatever is on it is replaced; else it must be
    /// blank and without a label.
    ///
    /// # Errors
    /// When the device cannot be a replica, or the change could not be noted; the replica is not used then.
    pub async fn add(&self, source: ReplicaSource, force: bool) -> Result<(), ReplicaError> {
        let has_room = self.check_candidate(&source, force).await?;
        let place = self.free_index().ok_or(ReplicaError::Full)?;
        self.attach_at(source, has_room, place).await
    }

    /// Puts another device in the place of a replica that is not up to date, at once: labels say both or neither. Beside one that
    /// is current it is added, and the caller removes that one when the new one has everything.
    ///
    /// # Errors
    /// When there is no such replica, or nothing tells which it is, or as [`Mirror::add`]; everything is as it was then.
    pub async fn replace(&self, old: &str, source: ReplicaSource, force: bool) -> Result<(), ReplicaError> {
        let has_room = self.check_candidate(&source, force).await?;
        let replica = self.find_replica(old)?;
        let place = match replica.is_readable() {
            true => self.free_index().ok_or(ReplicaError::Full)?,
            false => self.replicas.borrow().iter().position(|other| other.id == replica.id).unwrap_or(0),
        };
        self.attach_at(source, has_room, place).await
    }

    /// Refuses what cannot be a replica, and takes an old label away; whether there is room for a label.
    async fn check_candidate(&self, source: &ReplicaSource, force: bool) -> Result<bool, ReplicaError> {
        if self.is_read_only {
            return Err(ReplicaError::ReadOnly);
        }
        check_fit(source, self.geometry.block_size, self.geometry.capacity_blocks, self.geometry.protection)?;
        let candidate = inspect(source).await?;
        if let ReplicaProbe::Labelled(label) = &candidate.probe {
            let id = label.replicas[label.own_index].id;
            if self.replicas.borrow().iter().any(|replica| replica.id == id && replica.is_online()) {
                return Err(ReplicaError::InUse { replica: source.name.clone() });
            }
        }
        if let (Ok(device), true) = (&source.device, candidate.probe.has_room()) {
            check_pages(&source.name, device, &self.map)?;
        }
        candidate.check(&source.name, force, true)?;
        candidate.clear_label(source).await?;
        Ok(candidate.probe.has_room())
    }

    /// Makes a device the replica of a place; whoever had it before is none any more.
    async fn attach_at(&self, source: ReplicaSource, has_room: bool, place: usize) -> Result<(), ReplicaError> {
        let replica = Rc::new(Replica::new(source, self.next_number(), &self.new_record(has_room, place)));
        let before = self.replicas.borrow().get(place).cloned();
        self.set_replica(place, replica.clone());
        self.start_resync(&replica);
        self.write_intent.begin_change();
        let recorded = self.write_labels().await;
        let gone = match (&recorded, before) {
            (Ok(()), before) => before,
            (Err(_), before) => {
                before.into_iter().for_each(|before| self.set_replica(place, before));
                Some(replica)
            }
        };
        if let Some(replica) = gone {
            replica.state.set(ReplicaState::Removed);
            replica.set_device(None);
        }
        recorded.map_err(ReplicaError::WriteLabels)
    }

    fn set_replica(&self, place: usize, replica: Rc<Replica>) {
        let mut replicas = self.replicas.borrow_mut();
        if place < replicas.len() { replicas[place] = replica } else { replicas.push(replica) }
    }

    fn next_number(&self) -> usize {
        self.replicas.borrow().iter().map(|replica| replica.number.get() + 1).max().unwrap_or(0)
    }

    /// What a new replica of a place is: nothing on it is the mirror's.
    fn new_record(&self, has_room: bool, place: usize) -> ReplicaRecord {
        let events = self.write_intent.events.get();
        ReplicaRecord {
            id: replica_id(&self.uuid, events + 1, place),
            state: ReplicaState::OutOfSync,
            has_room,
            is_new: true,
            out_of_sync: Regions::all(self.map.count()),
            stale: Vec::new(),
            acked_events: events,
            sent_events: events,
        }
    }

    /// Takes a replica out for good. Its content stays as it is. Its own label says so first, so that it makes no mirror by itself.
    ///
    /// # Errors
    /// When there is no such replica, nothing tells which it is, there is no other one that has everything, or it could not be noted; the replica stays then.
    pub async fn remove(&self, name: &str) -> Result<(), ReplicaError> {
        if self.is_read_only {
            return Err(ReplicaError::ReadOnly);
        }
        let replica = self.find_replica(name)?;
        let is_last = || !self.in_sync().iter().any(|other| other.id != replica.id);
        if is_last() {
            return Err(ReplicaError::LastInSync(name.to_owned()));
        }
        self.write_intent.begin_change();
        self.write_labels().await.map_err(ReplicaError::WriteLabels)?;
        if self.mutation != Mutation::SkipRemovedLabel && !is_last() {
            self.write_removed_label(&replica).await;
        }
        if is_last() {
            // The others have gone meanwhile, and this one is all there is. Its label may say that it was taken out.
            self.write_labels().await.map_err(ReplicaError::WriteLabels)?;
            return Err(ReplicaError::LastInSync(name.to_owned()));
        }
        replica.state.set(ReplicaState::Removed);
        replica.is_listed_in_sync.set(false);
        replica.set_device(None);
        *replica.out_of_sync.borrow_mut() = Regions::none(self.map.count());
        // Its older copies are no longer of use to anybody, and the lists have little room.
        replica.stale.take();
        // Nothing that it lacks is answered before the others say so.
        self.write_intent.begin_change();
        self.write_intent.request_failure_write();
        self.work.notify();
        let recorded = self.write_labels().await;
        if recorded.is_err() {
            // It stays, and has missed what was changed meanwhile.
            replica.state.set(ReplicaState::OutOfSync);
            *replica.out_of_sync.borrow_mut() = Regions::all(self.map.count());
        }
        recorded.map_err(ReplicaError::WriteLabels)
    }

    /// The replica of this name: the newest, should one that is not up to date have it, too.
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
        // Where devices without labels are in all these places, none of those that they belong to comes back.
        let may_return = !replica.is_unlabelled.get() || others().any(|other| !other.is_unlabelled.get());
        if is_guessed(&replica) && may_return && others().next().is_some() {
            let others: Vec<String> = others().map(|other| other.name().to_string()).collect();
            return Err(ReplicaError::Ambiguous { replica: name.to_owned(), others: others.join(", ") });
        }
        Ok(replica)
    }

    /// Has members that are away be those that they are called, by the order of the names, for whoever is sure of it.
    pub fn trust_names(&self) {
        self.replicas.borrow().iter().for_each(|replica| replica.is_name_assumed.set(false));
    }

    /// Waits until no replica is being brought up to date; whether all that were are.
    pub async fn resync_ended(&self) -> bool {
        let is_busy = || self.replicas.borrow().iter().any(|replica| replica.state.get() == ReplicaState::Resyncing);
        self.work.wait_until(|| !is_busy() || self.is_closing.get()).await;
        !is_busy()
    }

    fn free_index(&self) -> Option<usize> {
        let replicas = self.replicas.borrow();
        // At the end while there is room: replicas that are away are known by their order.
        let given_up = || replicas.iter().position(|replica| replica.state.get() == ReplicaState::Removed);
        Some(replicas.len()).filter(|count| *count < MAX_REPLICAS).or_else(given_up)
    }
}
