//! The background work of a mirror.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{join3, select};
use sealblock_block::Clock;

use crate::label::ReplicaState;
use crate::mirror::Mirror;
use crate::replica::Replica;

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
            join3(tidying(mirror), settling(mirror), reattach_loop(mirror)).await;
        }
    }
}

/// Waits for `time`, or until the mirror is closed.
async fn rest<C: Clock>(mirror: &Mirror<C>, time: Duration) {
    select(pin!(mirror.work.wait_until(|| mirror.closing.get())), pin!(mirror.clock.sleep(time))).await;
}

async fn tidying<C: Clock>(mirror: &Mirror<C>) {
    loop {
        rest(mirror, LOOK).await;
        if mirror.closing.get() {
            return;
        }
        if let Err(error) = mirror.clear_clean_regions().await {
            tracing::debug!(%error, "the mirror's labels keep what they say");
        }
    }
}

/// Makes current legs alike, and brings those that have come back up to date.
async fn settling<C: Clock>(mirror: &Mirror<C>) {
    loop {
        let returned = || -> Vec<Rc<Replica>> {
            mirror.legs.borrow().iter().filter(|leg| leg.standing.get() == ReplicaState::Resyncing).cloned().collect()
        };
        let is_suspect = || !mirror.write_intent.nosync.borrow().is_empty() && !mirror.has_unmissed();
        let is_due = || {
            let has_work = is_suspect() || mirror.write_intent.examine.get();
            mirror.closing.get() || has_work || !returned().is_empty()
        };
        mirror.work.wait_until(is_due).await;
        if mirror.closing.get() {
            return;
        }
        let mut failed = mirror.settle().await;
        if failed.is_ok() && mirror.write_intent.examine.take() {
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
async fn reattach_loop<C: Clock>(mirror: &Mirror<C>) {
    loop {
        let legs: Vec<Rc<Replica>> = mirror.legs.borrow().clone();
        for leg in legs.iter().filter(|leg| !mirror.closing.get() && leg.standing.get() != ReplicaState::Removed) {
            if leg.is_here() && leg.standing.get() == ReplicaState::OutOfSync {
                mirror.start_resync(leg);
            }
            let opening = leg.reopen.borrow().as_ref().filter(|_| !leg.is_here()).map(|reopen| reopen());
            let Some(opening) = opening else { continue };
            let number = leg.number.get();
            let taken = match opening.await {
                Ok(device) => mirror.reattach(leg, device).await,
                Err(why) => Err(why),
            };
            if let Err(why) = taken {
                mirror.note_why(number, why);
            }
        }
        rest(mirror, CALL_BACK).await;
        if mirror.closing.get() {
            return;
        }
    }
}
