//! When groups leave the labels. Groups in the labels cost no label write when they are changed again, and are compared
//! after a crash.
//!
//! All groups leave when nothing was changed for some seconds, so an idle mirror has nothing to compare. Once a minute,
//! groups that were not changed for minutes leave together. The others stay, up to the number that `hot_groups` allows;
//! at that limit, the groups with the oldest changes leave together, concurrently with the changes that need their
//! room.
//!
//! At intervals the replicas are flushed, so that a replica that fails lacks only recent writes. While changes go on
//! that need no new label, the labels are written again, so that their event counts tell an older image of a replica
//! from the replica.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use sealblock_block::{Clock, Error};

use crate::mirror::Mirror;
use crate::requests::change::LeavingGroup;

/// Time between sweeps.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// After this number of sweeps without a change all groups leave: 10 to 15 s.
const IDLE_SWEEPS: u64 = 3;
/// A group leaves if it was not changed for this number of sweeps, 5 minutes; checked at every `SWEEPS_BETWEEN`th
/// sweep.
const UNTOUCHED_SWEEPS: u64 = 60;
const SWEEPS_BETWEEN: u64 = 12;
/// Labels are written again after this number of sweeps with changes: an image of a replica that is older than two
/// labels is known to be one.
const RENEWAL_SWEEPS: u64 = 2;

/// Sweeps the labels until the mirror is closed.
pub(crate) async fn sweep_loop<C: Clock>(mirror: &Mirror<C>) {
    while !mirror.is_closing.get() {
        let swept = {
            let mut tick = pin!(mirror.clock.sleep(SWEEP_INTERVAL));
            let closed = pin!(mirror.work.wait_until(|| mirror.is_closing.get()));
            let mut tick_or_closed = select(tick.as_mut(), closed);
            while !make_room_early(mirror, &mut tick_or_closed).await {}
            if mirror.is_closing.get() {
                return;
            }
            mirror.sweep().await
        };
        if let Err(error) = swept {
            tracing::debug!(%error, "cannot sweep the mirror labels; retrying");
        }
    }
}

/// Waits for `tick`, and makes room in the labels when that is due; true after the tick.
async fn make_room_early<C: Clock>(mirror: &Mirror<C>, tick: &mut (impl Future + Unpin)) -> bool {
    let intent = &mirror.write_intent;
    let is_due = || mirror.hot.borrow().is_due() && !intent.is_making_room.get();
    match select(&mut *tick, pin!(intent.room_changed.wait_until(is_due))).await {
        Either::Left(_) => return true,
        Either::Right(_) => {}
    }
    match mirror.evict().await {
        Ok(true) => false,
        // The obstacle may be gone later.
        Ok(false) | Err(_) => {
            tick.await;
            true
        }
    }
}

impl<C: Clock> Mirror<C> {
    /// Removes groups from the labels that are not expected to change soon.
    pub(crate) async fn sweep(&self) -> Result<(), Error> {
        let intent = &self.write_intent;
        let sweep = intent.sweeps.get() + 1;
        intent.sweeps.set(sweep);
        let changed_before = intent.swept_changes.replace(intent.changes.get());
        if intent.flushed_changes.get() < changed_before && intent.has_unflushed() {
            self.flush_internally().await?;
        }
        if sweep - intent.last_change_sweep.get() >= IDLE_SWEEPS {
            return self.clear_clean_regions().await;
        }
        // Groups that a crash left dirty leave when they are reconciled.
        let mut leaving = self.leftover_groups();
        if sweep.is_multiple_of(SWEEPS_BETWEEN) {
            leaving.extend(self.untouched_groups(sweep));
        }
        self.clear_groups(leaving, true).await?;
        match sweep - intent.labels_sweep.get() >= RENEWAL_SWEEPS && intent.has_changed_since_labels() {
            true => self.write_labels().await,
            false => Ok(()),
        }
    }

    fn untouched_groups(&self, sweep: u64) -> Vec<LeavingGroup> {
        let hot = self.hot.borrow();
        let untouched = hot.oldest_first().filter(|hot| sweep - hot.tick > UNTOUCHED_SWEEPS);
        untouched.map(|hot| (hot.group, Some(hot.change))).collect()
    }
}
