//! The background work of a mirror.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{join3, select};
use sealblock_block::{Clock, Stack};

use crate::judge::{Found, Refusal, Verdict, add_lacking, judge, lacks_everything};
use crate::label::{Label, Standing};
use crate::leg::{Leg, LegSource};
use crate::mirror::Mirror;
use crate::open::{Trouble, fits, found_on};

/// A region in which nothing was changed for one to two of these leaves the labels.
const LOOK: Duration = Duration::from_secs(5);
/// How often a leg that is gone is tried again.
const CALL_BACK: Duration = Duration::from_secs(2);

/// Settles what a crash has left, brings legs up to date, and tidies the labels; must be run beside the mirror.
pub struct Worker<C> {
    mirror: Rc<Mirror<C>>,
}

impl<C: Clock> Worker<C> {
    pub(crate) fn new(mirror: Rc<Mirror<C>>) -> Worker<C> {
        Worker { mirror }
    }

    /// Runs until the mirror is closed. Spawn this.
    pub async fn run(self) {
        let mirror = &*self.mirror;
        if !mirror.read_only {
            join3(tidying(mirror), settling(mirror), calling_back(mirror)).await;
        }
    }
}

/// Waits for `time`, or until the mirror is closed.
async fn rest<C: Clock>(mirror: &Mirror<C>, time: Duration) {
    select(pin!(mirror.work.until(|| mirror.closing.get())), pin!(mirror.clock.sleep(time))).await;
}

async fn tidying<C: Clock>(mirror: &Mirror<C>) {
    loop {
        rest(mirror, LOOK).await;
        if mirror.closing.get() {
            return;
        }
        if let Err(error) = mirror.tidy().await {
            tracing::debug!(%error, "the mirror's labels keep what they say");
        }
    }
}

/// Makes current legs alike, and brings those that have come back up to date.
async fn settling<C: Clock>(mirror: &Mirror<C>) {
    loop {
        let returned = || -> Vec<Rc<Leg>> {
            mirror.legs.borrow().iter().filter(|leg| leg.standing.get() == Standing::Rebuilding).cloned().collect()
        };
        let is_suspect = || !mirror.notes.suspect.borrow().is_empty() && !mirror.has_unmissed();
        let is_due = || {
            let has_work = is_suspect() || mirror.notes.examine.get();
            mirror.closing.get() || has_work || !returned().is_empty()
        };
        mirror.work.until(is_due).await;
        if mirror.closing.get() {
            return;
        }
        let mut failed = mirror.settle().await;
        if failed.is_ok() && mirror.notes.examine.take() {
            mirror.reexamine().await;
        }
        if failed.is_ok() {
            for leg in returned() {
                // One that cannot be brought up to date keeps no other one waiting.
                failed = mirror.rebuild(&leg).await.and(failed);
            }
        }
        if let Err(error) = failed {
            tracing::debug!(%error, "the legs are not alike yet");
            rest(mirror, CALL_BACK).await;
        }
    }
}

/// Tries legs that are gone again, and lets those begin that were there and left behind.
async fn calling_back<C: Clock>(mirror: &Mirror<C>) {
    loop {
        let legs: Vec<Rc<Leg>> = mirror.legs.borrow().clone();
        for leg in legs.iter().filter(|leg| !mirror.closing.get() && leg.standing.get() != Standing::Removed) {
            if leg.is_here() && leg.standing.get() == Standing::Missing {
                mirror.begin_rebuild(leg);
            }
            let Some(reopen) = leg.reopen.as_ref().filter(|_| !leg.is_here()) else { continue };
            match reopen().await {
                Ok(device) => {
                    if let Err(why) = mirror.take_back(leg, device).await {
                        note_why(leg, why);
                    }
                }
                Err(why) => note_why(leg, why),
            }
        }
        rest(mirror, CALL_BACK).await;
        if mirror.closing.get() {
            return;
        }
    }
}

/// Keeps why a leg does not come back, and says so when it is news.
fn note_why(leg: &Leg, why: String) {
    let was = leg.why.replace(why.clone());
    if was != why {
        tracing::warn!(leg = %leg.name, %why, "a leg does not come back");
    }
}

impl<C: Clock> Mirror<C> {
    /// Takes a leg's device back after it was gone: as what it is now, if it is that leg and nobody went on with it elsewhere.
    ///
    /// # Errors
    /// Why it cannot be taken back.
    pub(crate) async fn take_back(&self, leg: &Rc<Leg>, device: Stack) -> Result<(), String> {
        let source = LegSource { name: leg.name.clone(), device: Ok(device.clone()), reopen: None };
        fits(&source, self.geometry.block_size, self.geometry.capacity_blocks, self.geometry.protection)
            .map_err(|error| error.to_string())?;
        let found = found_on(&device).await.map_err(|trouble| match trouble {
            Trouble::Label(why) => why.to_string(),
            Trouble::Device(why) => why.to_string(),
        })?;
        if let Found::Labelled(label) = &found {
            self.check_label(leg, label)?;
            let lacks_everything = lacks_everything(&self.label(leg), label);
            if lacks_everything && leg.standing.get() == Standing::Current {
                return Err("it is an old image of the last leg, or was written elsewhere meanwhile".to_owned());
            }
            leg.seen.set(leg.seen.get().max(label.generation));
            if leg.standing.get() == Standing::Missing {
                let was_current = label.members[label.own].standing == Standing::Current;
                leg.is_unmissed.set(leg.is_unmissed.get() && was_current && !lacks_everything);
                add_lacking(&mut leg.missed.borrow_mut(), label, lacks_everything);
            }
        } else if leg.has_room || found.has_room() {
            return Err(
                "it has no label any more; it is not the device that it was; `sealblock mirror replace` makes it a leg"
                    .to_owned(),
            );
        }
        leg.stale.borrow_mut().withhold_again();
        self.notes.examine.set(true);
        leg.set_device(Some(device));
        leg.why.borrow_mut().clear();
        match leg.standing.get() {
            Standing::Missing => self.begin_rebuild(leg),
            // What it has lost, others may have.
            Standing::Current => self.suspect_dirty(),
            _ => {}
        }
        Ok(())
    }

    /// Whether this label is that of the leg, and the leg was not changed without the others.
    fn check_label(&self, leg: &Leg, label: &Label) -> Result<(), String> {
        let at = leg.number;
        if label.uuid != self.uuid {
            return Err(Refusal::Foreign { leg: at }.to_string());
        }
        if label.members[label.own].id != leg.id {
            return Err(Refusal::Stranger { leg: at }.to_string());
        }
        // Also one that is away for the moment knows, in what its label would be, what the others lack.
        let legs = self.legs.borrow();
        let mut others = legs.iter().filter(|other| other.standing.get() == Standing::Current && other.id != leg.id);
        let Some(other) = others.next() else { return Ok(()) };
        let found = [self.label(other), label.clone()].map(|label| Found::Labelled(Box::new(label)));
        match judge(&found).map_err(|refusal| refusal.to_string())? {
            Verdict::Known(known) if known.label.members[known.places[0]].standing == Standing::Current => Ok(()),
            _ => Err("it was changed elsewhere, and has what this mirror lacks; open the mirror anew".to_owned()),
        }
    }

    /// Has a leg that is here brought up to date.
    pub(crate) fn begin_rebuild(&self, leg: &Leg) {
        *leg.left.borrow_mut() = leg.missed.borrow().clone();
        leg.is_told.set(false);
        leg.standing.set(Standing::Rebuilding);
        self.work.notify();
    }
}
