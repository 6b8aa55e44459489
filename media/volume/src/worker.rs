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
            let committed = self.commit().await;
            if volume.state.get() == State::Failed {
                break;
            }
            self.punch().await;
            self.reclaim().await;
            if let (Err(error), State::Closing) = (&committed, volume.state.get()) {
                // What could not be committed would be lost, so the volume cannot be called clean.
                self.give_up(error);
                break;
            }
            if volume.is_at_rest() {
                self.close().await;
                break;
            }
            if (volume.checkpoint_due() || wake == Wake::Idle)
                && let Err(error) = volume.checkpoint(false).await
            {
                tracing::warn!(%error, "checkpoint failed; the log keeps what it was to write");
            }
        }
        self.end();
    }

    /// Commits, and answers those who waited for it.
    async fn commit(&self) -> Result<(), Error> {
        let volume = &*self.volume;
        let answer = volume.commits.begin();
        let committed = if volume.mutation == Mutation::LateTags {
            // A fault put in on purpose: the data are durable, the tags are not yet, and the flush is answered.
            let synced = volume.medium.sync().await.map_err(Error::from);
            answer(synced);
            volume.clock.sleep(Duration::from_millis(20)).await;
            volume.commit().await
        } else {
            let committed = volume.commit().await;
            answer(committed.clone());
            committed
        };
        volume.slots.freed.notify();
        committed
    }

    /// Gives slots of dropped writes back, once the medium is done with them.
    async fn reclaim(&self) {
        let volume = &*self.volume;
        let dropped = volume.slots.take_dropped();
        if !dropped.is_empty() {
            volume.medium.drain().await;
            dropped.iter().for_each(|(zone, runs)| volume.slots.give_back(*zone, runs));
        }
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

    /// Marks the volume clean. Nothing changes any more, and nothing is left in memory.
    async fn close(&self) {
        let volume = &*self.volume;
        volume.medium.drain().await;
        match volume.settle(true).await {
            Ok(()) => volume.state.set(State::Closed),
            Err(error) => self.give_up(&error),
        }
    }

    /// The volume cannot be closed in good order.
    fn give_up(&self, error: &Error) {
        *self.volume.commits.failure.borrow_mut() = Some(error.to_string());
        self.volume.state.set(State::Failed);
    }

    /// Answers whoever waits.
    fn end(&self) {
        let volume = &*self.volume;
        let outcome = if volume.state.get() == State::Failed { Err(volume.failed()) } else { Ok(()) };
        volume.commits.begin()(outcome);
        volume.changed.notify();
        volume.slots.freed.notify();
    }

    /// Waits until there is something to do.
    async fn wait(&self) -> Wake {
        let volume = &*self.volume;
        let ends = || match volume.state.get() {
            State::Open => false,
            State::Closing => volume.changes.get() == 0,
            State::Closed | State::Failed => true,
        };
        let due = || volume.commits.due() || volume.slots.work_due() || ends();
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
