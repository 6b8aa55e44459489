//! The background worker of a volume.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use sealblock_block::{Clock, Error, Medium};

use crate::open::Mutation;
use crate::volume::{State, Volume};

/// A write that nobody flushes is durable after this time at the latest, give or take the commit.
const COMMIT_AFTER: Duration = Duration::from_secs(1);
/// A volume that is left alone brings its tables up to date after this time.
const CHECKPOINT_AFTER: Duration = Duration::from_secs(5);

/// Commits and checkpoints of a volume; must be run beside it.
pub struct Worker<M, C> {
    pub(crate) volume: Rc<Volume<M, C>>,
}

/// What woke the worker.
#[derive(PartialEq, Eq)]
enum Wake {
    Asked,
    Idle,
}

impl<M: Medium, C: Clock> Worker<M, C> {
    /// Runs until the volume is closed or has failed. Spawn this.
    pub async fn run(self) {
        let volume = &*self.volume;
        if volume.read_only {
            return;
        }
        while volume.state.get() != State::Failed {
            let wake = self.wait().await;
            let closing = volume.state.get() == State::Closing;
            self.commit().await;
            if volume.state.get() == State::Failed {
                break;
            }
            self.punch().await;
            if closing {
                self.close().await;
                return;
            }
            if (volume.checkpoint_due() || wake == Wake::Idle)
                && let Err(error) = volume.checkpoint(false).await
            {
                tracing::warn!(%error, "checkpoint failed; the log keeps what it was to write");
            }
        }
        volume.commits.begin()(Err(volume.failed()));
        volume.changed.notify();
        volume.slots.freed.notify();
    }

    /// Commits, and answers those who waited for it.
    async fn commit(&self) {
        let volume = &*self.volume;
        let answer = volume.commits.begin();
        if volume.mutation == Mutation::LateTags {
            // A fault put in on purpose: the data are durable, the tags are not yet, and the flush is answered.
            let synced = volume.medium.sync().await.map_err(Error::from);
            answer(synced);
            volume.clock.sleep(Duration::from_millis(20)).await;
            let _ = volume.commit().await;
        } else {
            answer(volume.commit().await);
        }
        volume.slots.freed.notify();
    }

    /// Gives the space of slots that were unmapped back to the medium.
    async fn punch(&self) {
        let volume = &*self.volume;
        for (zone, run) in volume.slots.take_punches() {
            let length = u64::from(run.1) << volume.geometry.block_size.shift();
            // Where no space would come back, zeroes would be written to no end: nobody reads a free slot.
            if volume.medium.punches()
                && let Err(error) = volume.medium.punch(volume.slot_offset(zone, run.0), length).await
            {
                tracing::debug!(%error, "the medium kept the space of unmapped blocks");
            }
            volume.slots.give_back(zone, &[run]);
        }
    }

    async fn close(&self) {
        let volume = &*self.volume;
        match volume.settle(true).await {
            Ok(()) => volume.state.set(State::Closed),
            Err(error) => {
                *volume.commits.failure.borrow_mut() = Some(error.to_string());
                volume.state.set(State::Failed);
            }
        }
        volume.changed.notify();
        volume.slots.freed.notify();
    }

    /// Waits until there is something to do.
    async fn wait(&self) -> Wake {
        let volume = &*self.volume;
        let due = || volume.commits.due() || volume.slots.punches_due() || volume.state.get() != State::Open;
        loop {
            let (delay, wake) = if volume.overlay.open_len() > 0 {
                (COMMIT_AFTER, Wake::Asked)
            } else if volume.log.next.get() != volume.log.tail.get() {
                (CHECKPOINT_AFTER, Wake::Idle)
            } else {
                volume.commits.dozing.set(true);
                volume.commits.wanted.until(|| due() || volume.overlay.open_len() > 0).await;
                volume.commits.dozing.set(false);
                if due() {
                    return Wake::Asked;
                }
                continue;
            };
            volume.commits.dozing.set(wake == Wake::Idle);
            let had = volume.overlay.open_len() > 0;
            let asked = volume.commits.wanted.until(|| due() || (volume.overlay.open_len() > 0) != had);
            match select(pin!(asked), pin!(volume.clock.sleep(delay))).await {
                Either::Left(_) if due() => return Wake::Asked,
                Either::Left(_) => {}
                Either::Right(_) => return wake,
            }
        }
    }
}
