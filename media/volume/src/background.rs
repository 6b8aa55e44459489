//! The background worker of a volume.

pub(crate) mod checkpoint;
pub(crate) mod commit;
pub(crate) mod relocate;
pub(crate) mod upkeep;

use std::pin::{Pin, pin};
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, join, pending, select};
use sealblock_block::{Clock, Error, Medium};

use crate::options::Mutation;
use crate::volume::{Volume, VolumeState};

/// A write without a flush is durable after this time at the latest, plus the time of the commit.
const COMMIT_AFTER: Duration = Duration::from_secs(1);
/// The last small commit gets its second copy after this time, unless another one begins.
const SECOND_COPY_AFTER: Duration = Duration::from_millis(200);
/// Units of unmapped physical blocks that are deallocated before the worker checks again for waiting flushes: 2 MiB.
const MAX_PUNCHES: usize = 32;
/// A volume without writes makes a checkpoint after this time.
const CHECKPOINT_AFTER: Duration = Duration::from_secs(5);

/// The worker of a volume, which makes its commits and checkpoints; must run while the volume is open.
pub struct Worker<M, C> {
    pub(crate) volume: Rc<Volume<M, C>>,
}

/// Why the worker woke up.
#[derive(PartialEq, Eq)]
enum WakeReason {
    CommitDue,
    SecondCopyDue,
    Idle,
}

impl<M: Medium, C: Clock> Worker<M, C> {
    /// Runs until the volume is closed or has failed. Spawn this.
    pub async fn run(self) {
        let volume = &*self.volume;
        if volume.is_read_only {
            return;
        }
        if !self.log_given_up().await {
            // A read-only volume leaves the medium unchanged.
            volume.state.set(VolumeState::Closed);
            return self.end();
        }
        let commits = async {
            let is_closing = self.commits().await;
            volume.checkpoints.stop();
            is_closing
        };
        // Idle work never ends by itself. While it works it counts as a change, so it is idle when commits end.
        let work = pin!(join(commits, volume.run_checkpoints()));
        let upkeep = pin!(join(volume.run_idle_work(), volume.run_mending()));
        let is_closing = match select(work, upkeep).await {
            Either::Left(((is_closing, ()), _)) => is_closing,
            Either::Right((((), ()), _)) => false,
        };
        // A read that ended during the last checkpoint may have left a physical block to deallocate on the medium;
        // nothing else has changed.
        if is_closing && volume.state.get() == VolumeState::Closing {
            self.close().await;
        }
        self.end();
    }

    /// Waits while the volume keeps a lost log. False if the volume was closed meanwhile.
    async fn log_given_up(&self) -> bool {
        let volume = &*self.volume;
        let keeps = || volume.keeps_lost_log.get();
        let is_closed = || volume.state.get() != VolumeState::Open && volume.changes.get() == 0;
        volume.commits.wanted.wait_until(|| !keeps() || is_closed()).await;
        !keeps()
    }

    /// Commits until the volume is closed and everything is committed, or until it has failed. True if it is to be
    /// closed.
    async fn commits(&self) -> bool {
        let volume = &*self.volume;
        // Counted from the last commit, whatever else is done meanwhile.
        let mut second_copy = pin!(self.second_copy_due());
        while volume.state.get() != VolumeState::Failed {
            let wake = self.wait(second_copy.as_mut()).await;
            if wake == WakeReason::SecondCopyDue {
                match volume.log.write_second_copy(&volume.medium).await {
                    // No later commit joins its last sector.
                    Ok(()) => volume.raise_log_end().await,
                    Err(error) => drop(volume.fail(&error)),
                }
                second_copy.set(self.second_copy_due());
                continue;
            }
            let commits = volume.log.commits.get();
            let committed = self.commit().await;
            if volume.log.commits.get() != commits {
                second_copy.set(self.second_copy_due());
            }
            if volume.state.get() == VolumeState::Failed {
                return false;
            }
            self.punch().await;
            self.reclaim().await;
            if let (Err(error), VolumeState::Closing) = (&committed, volume.state.get()) {
                // Uncommitted map entries would be lost, so the volume is not marked clean.
                self.fail_close(error);
                return false;
            }
            if volume.is_quiesced() {
                return true;
            }
            if volume.checkpoint_due() || wake == WakeReason::Idle && volume.log.next.get() != volume.log.tail.get() {
                volume.checkpoints.request();
            }
        }
        false
    }

    /// Commits, and completes the waiting flushes.
    async fn commit(&self) -> Result<(), Error> {
        let volume = &*self.volume;
        let answer = volume.commits.begin();
        let committed = if volume.mutation.is(Mutation::LateTags) {
            // An injected fault: the data are durable, the tags are not yet, and the flush completes.
            let synced = volume.medium.sync().await.map_err(Error::from);
            answer(synced);
            volume.clock.sleep(Duration::from_millis(20)).await;
            volume.commit(drop).await
        } else {
            volume.commit(answer).await
        };
        volume.allocator.freed.notify();
        committed
    }

    /// Frees the physical blocks of dropped writes, once the medium has finished them.
    async fn reclaim(&self) {
        let volume = &*self.volume;
        let dropped = volume.allocator.take_dropped();
        if !dropped.is_empty() {
            volume.medium.drain().await;
            dropped.iter().for_each(|(group, runs)| volume.allocator.release(*group, runs));
        }
    }

    /// Deallocates unmapped physical blocks, until a flush or a writer waits for a commit; the rest follows after that
    /// commit.
    async fn punch(&self) {
        let volume = &*self.volume;
        while let Some(found) = volume.allocator.take_punches(MAX_PUNCHES) {
            for (group, taken) in found {
                volume.punch(group, taken).await;
            }
            if volume.commits.is_due() {
                return;
            }
        }
    }

    /// Marks the volume clean. Requires that no change is in flight and nothing is left in memory.
    async fn close(&self) {
        let volume = &*self.volume;
        volume.medium.drain().await;
        volume.drop_notes();
        if !volume.keeps_free_space.get() {
            volume.punch_all(|| true).await;
        }
        // The second sync is for the high-water mark of the last superblock.
        let closed = async {
            volume.checkpoint_both(true).await?;
            volume.sync_or_fail().await
        };
        match closed.await {
            Ok(()) => volume.state.set(VolumeState::Closed),
            Err(error) => self.fail_close(&error),
        }
    }

    /// Fails the volume: it cannot be closed cleanly.
    fn fail_close(&self, error: &Error) {
        *self.volume.commits.failure.borrow_mut() = Some(error.to_string());
        self.volume.state.set(VolumeState::Failed);
    }

    /// Completes every waiting flush and wakes writers and the close.
    fn end(&self) {
        let volume = &*self.volume;
        let outcome = if volume.state.get() == VolumeState::Failed { Err(volume.failed()) } else { Ok(()) };
        volume.commits.begin()(outcome);
        volume.changed.notify();
        volume.allocator.freed.notify();
        volume.notes.wake();
    }

    /// Waits until there is something to do.
    async fn wait(&self, mut second_copy: Pin<&mut impl Future<Output = ()>>) -> WakeReason {
        let volume = &*self.volume;
        let due = || self.is_due();
        loop {
            let has_records = volume.memtable.active_len() > 0;
            let (delay, wake) = if has_records {
                (COMMIT_AFTER, WakeReason::CommitDue)
            } else if volume.log.next.get() != volume.log.tail.get() {
                (CHECKPOINT_AFTER, WakeReason::Idle)
            } else {
                volume.commits.idle.set(true);
                volume.commits.wanted.wait_until(|| due() || volume.memtable.active_len() > 0).await;
                volume.commits.idle.set(false);
                if due() {
                    return WakeReason::CommitDue;
                }
                continue;
            };
            volume.commits.idle.set(!has_records);
            let asked = volume.commits.wanted.wait_until(|| due() || (volume.memtable.active_len() > 0) != has_records);
            let timer = pin!(volume.clock.sleep(delay));
            match select(pin!(asked), select(timer, second_copy.as_mut())).await {
                Either::Left(_) if due() => return WakeReason::CommitDue,
                Either::Left(_) => {}
                Either::Right((Either::Left(_), _)) => return wake,
                Either::Right((Either::Right(_), _)) => return WakeReason::SecondCopyDue,
            }
        }
    }

    /// True if there is work now.
    fn is_due(&self) -> bool {
        let volume = &*self.volume;
        let ends = match volume.state.get() {
            VolumeState::Open => false,
            VolumeState::Closing => volume.changes.get() == 0,
            VolumeState::Closed | VolumeState::Failed => true,
        };
        ends || volume.commits.is_due() || volume.allocator.has_work()
    }

    /// Resolves when the last commit has waited long enough for its second copy.
    async fn second_copy_due(&self) {
        let volume = &*self.volume;
        if !volume.log.needs_second_copy() || volume.mutation.is(Mutation::SkipSecondCopy) {
            return pending().await;
        }
        volume.clock.sleep(SECOND_COPY_AFTER).await;
    }
}
