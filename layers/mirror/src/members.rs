//! Giving a mirror a leg, and taking one from it, while it is in use.

use std::rc::Rc;

use sealblock_block::{Clock, Error};

use crate::judge::{Found, leg_id};
use crate::label::{MOST_LEGS, Member, Standing};
use crate::leg::{Leg, LegSource};
use crate::mirror::Mirror;
use crate::open::{MirrorError, Trouble, check_pages, fits, found_on};
use crate::regions::Regions;

/// Why a leg cannot be given or taken.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MemberError {
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
    /// The device is a leg already, of this mirror or another one.
    #[error("{leg} has the label of a mirror; `sealblock create --force` makes it new")]
    Labelled {
        /// The leg.
        leg: String,
    },
    /// The device does not fit.
    #[error(transparent)]
    Unfit(#[from] MirrorError),
    /// No leg has this name.
    #[error("the mirror has no leg {0}")]
    Unknown(String),
    /// Without this leg there would be none that has everything.
    #[error("no other leg than {0} has everything")]
    Last(String),
    /// What a member keeps could not be written to the others.
    #[error("the older copies could not be written: {0}")]
    Change(Error),
    /// It could not be noted.
    #[error("it could not be noted: {0}")]
    Note(Error),
}

impl<C: Clock> Mirror<C> {
    /// Adds a leg, which is brought up to date in the background. Whatever is on it is replaced.
    ///
    /// # Errors
    /// When the device cannot be a leg, or the change could not be noted; the leg is not used then.
    pub async fn add(&self, source: LegSource) -> Result<(), MemberError> {
        if self.read_only {
            return Err(MemberError::ReadOnly);
        }
        fits(&source, self.geometry.block_size, self.geometry.capacity_blocks)?;
        let device =
            source.device.as_ref().map_err(|why| MemberError::Absent { leg: source.name.clone(), why: why.clone() })?;
        let has_room = match found_on(device).await {
            Ok(Found::Labelled(_)) | Err(Trouble::Label(_)) => {
                return Err(MemberError::Labelled { leg: source.name });
            }
            Ok(found) => found.has_room(),
            Err(Trouble::Device(why)) => {
                return Err(MemberError::Absent { leg: source.name, why: why.to_string() });
            }
        };
        if has_room {
            check_pages(&source.name, device, &self.map)?;
        }
        let place = self.free_place().ok_or(MemberError::Full)?;
        let number = self.legs.borrow().iter().map(|leg| leg.number + 1).max().unwrap_or(0);
        let id = leg_id(&self.uuid, self.notes.generation.get() + 1, place);
        let (missed, generation) = (Regions::all(self.map.count()), self.notes.generation.get());
        let member = Member {
            id,
            standing: Standing::Missing,
            has_room,
            is_new: true,
            missed,
            stale: Vec::new(),
            seen: generation,
            sent: generation,
        };
        let leg = Rc::new(Leg::new(source, number, &member));
        {
            let mut legs = self.legs.borrow_mut();
            if place < legs.len() { legs[place] = leg.clone() } else { legs.push(leg.clone()) }
        }
        self.begin_rebuild(&leg);
        let noted = self.note().await;
        if noted.is_err() {
            leg.standing.set(Standing::Removed);
            leg.set_device(None);
        }
        noted.map_err(MemberError::Note)
    }

    /// Takes a leg out for good. Its content stays as it is.
    ///
    /// # Errors
    /// When there is no such leg, no other one that has everything, or it could not be noted; the leg stays then.
    pub async fn remove(&self, name: &str) -> Result<(), MemberError> {
        if self.read_only {
            return Err(MemberError::ReadOnly);
        }
        let named = |leg: &&Rc<Leg>| leg.name == name && leg.standing.get() != Standing::Removed;
        let leg = self.legs.borrow().iter().find(named).cloned();
        let leg = leg.ok_or_else(|| MemberError::Unknown(name.to_owned()))?;
        if !self.current().iter().any(|other| other.id != leg.id) {
            return Err(MemberError::Last(name.to_owned()));
        }
        leg.standing.set(Standing::Removed);
        leg.set_device(None);
        *leg.missed.borrow_mut() = Regions::none(self.map.count());
        let noted = self.note().await;
        if noted.is_err() {
            // It stays, and has missed what was changed meanwhile.
            leg.standing.set(Standing::Missing);
            *leg.missed.borrow_mut() = Regions::all(self.map.count());
        }
        noted.map_err(MemberError::Note)
    }

    /// Waits until no leg is being brought up to date; whether all that were are.
    pub async fn settled(&self) -> bool {
        let is_busy = || self.legs.borrow().iter().any(|leg| leg.standing.get() == Standing::Rebuilding);
        self.work.until(|| !is_busy() || self.closing.get()).await;
        !is_busy()
    }

    fn free_place(&self) -> Option<usize> {
        let legs = self.legs.borrow();
        // At the end while there is room: legs that are away are known by their order.
        let given_up = || legs.iter().position(|leg| leg.standing.get() == Standing::Removed);
        Some(legs.len()).filter(|count| *count < MOST_LEGS).or_else(given_up)
    }
}
