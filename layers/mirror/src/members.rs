//! Giving a mirror a leg, and taking one from it, while it is in use.

use std::rc::Rc;

use sealblock_block::{Clock, Error};

use crate::assemble::{ReplicaProbe, leg_id};
use crate::create::look;
use crate::label::{MOST_LEGS, ReplicaRecord, ReplicaState};
use crate::mirror::Mirror;
use crate::open::{MirrorError, check_pages, fits};
use crate::regions::Regions;
use crate::replica::{Replica, ReplicaSource};
use crate::test_hooks::Mutation;

/// Why a leg cannot be given or taken.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReplicaError {
    /// The mirror has as many legs as there can be.
    #[error("the mirror has {MOST_LEGS} legs already")]
    Full,
    /// The mirror is open for reading only.
    #[error("the mirror is open for reading only")]
    ReadOnly,
    /// The device cannot be reached.
    #[error("{leg} cannot be reached: {why}")]
    Absent {
        /// The leg.
        leg: String,
        /// Why.
        why: String,
    },
    /// The device has the label of a mirror, or of another group.
    #[error("{leg} has the label {what}")]
    Labelled {
        /// The leg.
        leg: String,
        /// Of what.
        what: String,
    },
    /// The device is in use in this mirror.
    #[error("{leg} is a leg of this mirror")]
    InUse {
        /// The leg.
        leg: String,
    },
    /// The device is not blank.
    #[error("{leg} holds data, which would be replaced")]
    Holds {
        /// The leg.
        leg: String,
    },
    /// Several devices for a new mirror hold data.
    #[error("several hold data ({legs}), and nothing says whose counts")]
    Undecided {
        /// What they are called.
        legs: String,
    },
    /// The leg whose content counts cannot have a label.
    #[error("{0} has no room for a label")]
    NoRoom(String),
    /// The device does not fit.
    #[error(transparent)]
    Unfit(#[from] MirrorError),
    /// No leg has this name.
    #[error("the mirror has no leg {0}")]
    Unknown(String),
    /// The leg is away since the opening, and nothing tells it from others that are.
    #[error("{leg} is away, as is {others}, and without their labels nothing tells which is which")]
    Ambiguous {
        /// What it is called.
        leg: String,
        /// What the others are called.
        others: String,
    },
    /// Without this leg there would be none that has everything.
    #[error("{0} is the last in-sync replica")]
    Last(String),
    /// What a member keeps could not be written to the others.
    #[error("the older copies could not be written: {0}")]
    Change(Error),
    /// It could not be noted.
    #[error("cannot write mirror labels: {0}")]
    Note(Error),
}

impl<C: Clock> Mirror<C> {
    /// Adds a leg, which is brought up to date in the background. With `force` whatever is on it is replaced; else it must be
    /// blank and without a label.
    ///
    /// # Errors
    /// When the device cannot be a leg, or the change could not be noted; the leg is not used then.
    pub async fn add(&self, source: ReplicaSource, force: bool) -> Result<(), ReplicaError> {
        let has_room = self.vet(&source, force).await?;
        let place = self.free_place().ok_or(ReplicaError::Full)?;
        self.put_in(source, has_room, place).await
    }

    /// Puts another device in the place of a leg that is not up to date, at once: labels say both or neither. Beside one that
    /// is current it is added, and the caller removes that one when the new one has everything.
    ///
    /// # Errors
    /// When there is no such leg, or nothing tells which it is, or as [`Mirror::add`]; everything is as it was then.
    pub async fn replace(&self, old: &str, source: ReplicaSource, force: bool) -> Result<(), ReplicaError> {
        let has_room = self.vet(&source, force).await?;
        let leg = self.named(old)?;
        let place = match leg.is_current() {
            true => self.free_place().ok_or(ReplicaError::Full)?,
            false => self.legs.borrow().iter().position(|other| other.id == leg.id).unwrap_or(0),
        };
        self.put_in(source, has_room, place).await
    }

    /// Refuses what cannot be a leg, and takes an old label away; whether there is room for a label.
    async fn vet(&self, source: &ReplicaSource, force: bool) -> Result<bool, ReplicaError> {
        if self.read_only {
            return Err(ReplicaError::ReadOnly);
        }
        fits(source, self.geometry.block_size, self.geometry.capacity_blocks, self.geometry.protection)?;
        let candidate = look(source).await?;
        if let ReplicaProbe::Labelled(label) = &candidate.found {
            let id = label.members[label.own_index].id;
            if self.legs.borrow().iter().any(|leg| leg.id == id && leg.is_here()) {
                return Err(ReplicaError::InUse { leg: source.name.clone() });
            }
        }
        if let (Ok(device), true) = (&source.device, candidate.found.has_room()) {
            check_pages(&source.name, device, &self.map)?;
        }
        candidate.refuse(&source.name, force, true)?;
        candidate.forget(source).await?;
        Ok(candidate.found.has_room())
    }

    /// Makes a device the leg of a place; whoever had it before is none any more.
    async fn put_in(&self, source: ReplicaSource, has_room: bool, place: usize) -> Result<(), ReplicaError> {
        let leg = Rc::new(Replica::new(source, self.next_number(), &self.newcomer(has_room, place)));
        let before = self.legs.borrow().get(place).cloned();
        self.set_place(place, leg.clone());
        self.start_resync(&leg);
        self.write_intent.begin_change();
        let noted = self.write_labels().await;
        let gone = match (&noted, before) {
            (Ok(()), before) => before,
            (Err(_), before) => {
                before.into_iter().for_each(|before| self.set_place(place, before));
                Some(leg)
            }
        };
        if let Some(leg) = gone {
            leg.standing.set(ReplicaState::Removed);
            leg.set_device(None);
        }
        noted.map_err(ReplicaError::Note)
    }

    fn set_place(&self, place: usize, leg: Rc<Replica>) {
        let mut legs = self.legs.borrow_mut();
        if place < legs.len() { legs[place] = leg } else { legs.push(leg) }
    }

    fn next_number(&self) -> usize {
        self.legs.borrow().iter().map(|leg| leg.number.get() + 1).max().unwrap_or(0)
    }

    /// What a new leg of a place is: nothing on it is the mirror's.
    fn newcomer(&self, has_room: bool, place: usize) -> ReplicaRecord {
        let generation = self.write_intent.events.get();
        ReplicaRecord {
            id: leg_id(&self.uuid, generation + 1, place),
            standing: ReplicaState::OutOfSync,
            has_room,
            is_new: true,
            out_of_sync: Regions::all(self.map.count()),
            stale: Vec::new(),
            acked_events: generation,
            sent_events: generation,
        }
    }

    /// Takes a leg out for good. Its content stays as it is. Its own label says so first, so that it makes no mirror by itself.
    ///
    /// # Errors
    /// When there is no such leg, nothing tells which it is, there is no other one that has everything, or it could not be noted; the leg stays then.
    pub async fn remove(&self, name: &str) -> Result<(), ReplicaError> {
        if self.read_only {
            return Err(ReplicaError::ReadOnly);
        }
        let leg = self.named(name)?;
        let is_last = || !self.in_sync().iter().any(|other| other.id != leg.id);
        if is_last() {
            return Err(ReplicaError::Last(name.to_owned()));
        }
        self.write_intent.begin_change();
        self.write_labels().await.map_err(ReplicaError::Note)?;
        if self.mutation != Mutation::RemoveUntold && !is_last() {
            self.tell_removed(&leg).await;
        }
        if is_last() {
            // The others have gone meanwhile, and this one is all there is. Its label may say that it was taken out.
            self.write_labels().await.map_err(ReplicaError::Note)?;
            return Err(ReplicaError::Last(name.to_owned()));
        }
        leg.standing.set(ReplicaState::Removed);
        leg.is_unmissed.set(false);
        leg.set_device(None);
        *leg.out_of_sync.borrow_mut() = Regions::none(self.map.count());
        // Its older copies are no longer of use to anybody, and the lists have little room.
        leg.stale.take();
        // Nothing that it lacks is answered before the others say so.
        self.write_intent.begin_change();
        self.write_intent.want_left();
        self.work.notify();
        let noted = self.write_labels().await;
        if noted.is_err() {
            // It stays, and has missed what was changed meanwhile.
            leg.standing.set(ReplicaState::OutOfSync);
            *leg.out_of_sync.borrow_mut() = Regions::all(self.map.count());
        }
        noted.map_err(ReplicaError::Note)
    }

    /// The leg of this name: the newest, should one that is not up to date have it, too.
    fn named(&self, name: &str) -> Result<Rc<Replica>, ReplicaError> {
        let legs = self.legs.borrow();
        let named = legs.iter().filter(|leg| *leg.name() == *name && leg.standing.get() != ReplicaState::Removed);
        let leg =
            named.max_by_key(|leg| leg.number.get()).cloned().ok_or_else(|| ReplicaError::Unknown(name.to_owned()))?;
        let is_guessed =
            |leg: &Rc<Replica>| leg.is_guessed.get() && !leg.is_here() && leg.standing.get() != ReplicaState::Removed;
        let others = || legs.iter().filter(|other| other.id != leg.id && is_guessed(other));
        // Where devices without labels are in all these places, none of those that they belong to comes back.
        let may_return = !leg.is_unlabelled.get() || others().any(|other| !other.is_unlabelled.get());
        if is_guessed(&leg) && may_return && others().next().is_some() {
            let others: Vec<String> = others().map(|other| other.name().to_string()).collect();
            return Err(ReplicaError::Ambiguous { leg: name.to_owned(), others: others.join(", ") });
        }
        Ok(leg)
    }

    /// Has members that are away be those that they are called, by the order of the names, for whoever is sure of it.
    pub fn believe_names(&self) {
        self.legs.borrow().iter().for_each(|leg| leg.is_guessed.set(false));
    }

    /// Waits until no leg is being brought up to date; whether all that were are.
    pub async fn settled(&self) -> bool {
        let is_busy = || self.legs.borrow().iter().any(|leg| leg.standing.get() == ReplicaState::Resyncing);
        self.work.wait_until(|| !is_busy() || self.closing.get()).await;
        !is_busy()
    }

    fn free_place(&self) -> Option<usize> {
        let legs = self.legs.borrow();
        // At the end while there is room: legs that are away are known by their order.
        let given_up = || legs.iter().position(|leg| leg.standing.get() == ReplicaState::Removed);
        Some(legs.len()).filter(|count| *count < MOST_LEGS).or_else(given_up)
    }
}
