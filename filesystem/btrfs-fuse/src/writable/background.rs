//! What happens beside requests: changes are committed after some time, inodes without names are deleted, and the space
//! of deleted subvolumes is freed. A request that finds no space waits until what is deleted already is freed.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{join, select};
use sealblock_btrfs_engine::drop::Dropped;
use sealblock_btrfs_engine::engine::EngineError;

use super::Writable;
use super::turns::Begun;

/// Steps after which others have their turn.
const STEPS_AT_ONCE: usize = 16;

impl Writable<'_> {
    /// Makes a change. If there is no space for it, it is made again when what is deleted already has given back its own.
    pub(super) async fn with_space<T>(
        &self,
        change: impl AsyncFn() -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        match change().await {
            Err(error) if error.errno() == libc::ENOSPC && self.background.free_deleted().await => change().await,
            result => result,
        }
    }

    /// Commits changes at this interval, as long as there are any, and frees the space of what is deleted, which may take
    /// longer. Ends after [`Writable::end_background`], or if nothing can be written any more, which the engine has
    /// reported. A commit that has begun must be completed, so it is to be polled until then.
    pub async fn work_in_background(&self, interval: Duration, sleep: impl AsyncFn(Duration)) {
        let own = &self.background;
        let pause = async || sleep(interval).await;
        let commits = self.in_turns(
            &pause,
            || false,
            async || match self.engine.is_dirty() {
                true => self.engine.sync().await.map(drop),
                false => Ok(()),
            },
        );
        let frees = async {
            own.is_idle.set(false);
            let _working = Begun(own, |own| own.is_idle.set(true));
            self.in_turns(&pause, || own.is_wanted.get(), async || self.free_once().await).await;
        };
        join(commits, frees).await;
    }

    /// Works in turns, each of which begins after a pause, or when it is wanted.
    async fn in_turns(
        &self,
        pause: &impl AsyncFn(),
        is_wanted: impl Fn() -> bool,
        work: impl AsyncFn() -> Result<(), EngineError>,
    ) {
        let own = &self.background;
        loop {
            let wanted = own.changed.wait_until(|| own.is_ended.get() || is_wanted());
            select(pin!(pause()), pin!(wanted)).await;
            if own.is_ended.get() {
                return;
            }
            match work().await {
                Ok(()) => {}
                Err(error @ EngineError::Stopped(_)) => {
                    return tracing::debug!(%error, "nothing is committed or freed any more");
                }
                Err(error) => tracing::warn!(%error, "changes are not committed, or what is deleted is not freed"),
            }
        }
    }

    /// Ends the work in the background as soon as what it does is complete.
    pub fn end_background(&self) {
        self.background.is_ended.set(true);
        self.background.changed.notify();
    }

    async fn free_once(&self) -> Result<(), EngineError> {
        let own = &self.background;
        own.is_wanted.set(false);
        own.turns.update(|(begun, done)| (begun + 1, done));
        let _begun = Begun(own, |own| own.turns.update(|(begun, done)| (begun, done + 1)));
        if own.has_orphans.replace(false) {
            self.engine.recover_all_orphans(|| own.is_ended.get()).await?;
        }
        if own.has_dead.replace(false) { self.drop_dead().await } else { Ok(()) }
    }

    /// Drops the nodes of deleted subvolumes of which the kernel knows no inode.
    async fn drop_dead(&self) -> Result<(), EngineError> {
        let mut from = 0;
        while let Some(id) = self.engine.change(|transaction| transaction.next_dead(from)).await? {
            from = id + 1;
            if self.numbers.of_subvolume(id).is_some_and(|numbers| self.known.has_any(numbers)) {
                self.background.has_dead.set(true);
                continue;
            }
            self.engine.change(|transaction| transaction.open_tree(id)).await?;
            let mut steps = 0_usize;
            while self.engine.change(|transaction| transaction.drop_step(id)).await? == Dropped::Some {
                // The rest is for whoever opens the filesystem next.
                if self.background.is_ended.get() {
                    return Ok(());
                }
                steps += 1;
                if steps.is_multiple_of(STEPS_AT_ONCE) {
                    self.engine.between_steps().await?;
                }
            }
        }
        Ok(())
    }

    /// Deletes an inode that has no names and that the kernel does not know. If that fails, it is deleted when the
    /// filesystem is opened again.
    pub(super) async fn delete_orphan(&self, number: u64) {
        let Ok(Some(id)) = self.find(number) else { return };
        let own = &self.background;
        own.deletions.update(|count| count + 1);
        let _begun = Begun(own, |own| own.deletions.update(|count| count - 1));
        match self.engine.release(id.root, id.ino).await {
            Ok(_) => {}
            Err(error) if matches!(error, EngineError::Stopped(_)) || error.errno() == libc::ENOENT => {
                tracing::debug!(id.root, id.ino, %error, "an inode without names is not deleted");
            }
            Err(error) => tracing::warn!(id.root, id.ino, %error, "an inode without names is not deleted"),
        }
    }

    /// The last commit, when no request is served any more. Returns the last durable transaction.
    ///
    /// # Errors
    /// If changes cannot be made durable.
    pub async fn close(&self) -> Result<u64, EngineError> {
        self.engine.finish_writes().await;
        for number in self.known.orphans() {
            self.delete_orphan(number).await;
        }
        self.sync_all().await
    }

    /// Makes everything durable.
    pub(super) async fn sync_all(&self) -> Result<u64, EngineError> {
        self.engine.complete_all_writes().await?;
        self.engine.sync().await
    }
}
