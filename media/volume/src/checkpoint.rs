//! Checkpoints: the tables catch up with the log, and the log's space is free again.

use futures_util::future::join_all;
use sealblock_block::{Clock, Error, Medium, MediumError};

use crate::format::Superblock;
use crate::superblocks;
use crate::volume::Volume;

/// Pages written at once.
const PAGES_IN_FLIGHT: usize = 32;

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Writes every page that differs from the medium, then a superblock that begins the log behind their records.
    ///
    /// # Errors
    /// When the medium fails. If it was a write, the log still has everything, and a later checkpoint can do what this one
    /// could not. After a failed sync nobody knows which writes were lost, so no later one may build on them: the volume takes
    /// no more writes.
    pub(crate) async fn checkpoint(&self, clean: bool) -> Result<(), Error> {
        let target = self.log.next.get();
        for numbers in self.table.dirty_pages().chunks(PAGES_IN_FLIGHT) {
            let writes = numbers.iter().map(|&number| self.table.write_back(&self.medium, number));
            join_all(writes).await.into_iter().collect::<Result<(), MediumError>>()?;
        }
        self.sync_or_fail().await?;
        let superblock =
            Superblock { serial: self.superblock.get().serial + 1, clean, log_tail: target, ..self.superblock.get() };
        superblocks::write(&self.medium, &superblock).await?;
        self.sync_or_fail().await?;
        self.superblock.set(superblock);
        self.log.tail.set(target);
        Ok(())
    }

    /// Says in the superblock that blocks may have been made unreadable, before the first record of such a block goes to the
    /// log: programs that do not know these records then refuse the volume. Called by the worker alone, as checkpoints are.
    pub(crate) async fn adopt_uncorrectable(&self) -> Result<(), Error> {
        let before = self.superblock.get();
        let superblock = Superblock { serial: before.serial + 1, clean: false, uncorrectable: true, ..before };
        superblocks::write(&self.medium, &superblock).await?;
        self.sync_or_fail().await?;
        self.superblock.set(superblock);
        Ok(())
    }

    /// Brings all superblocks up to date. Recovery leaves records behind that do not count, and a superblock from before it,
    /// should the newer copy be lost, would have them read again.
    pub(crate) async fn settle(&self, clean: bool) -> Result<(), Error> {
        self.checkpoint(clean).await?;
        self.checkpoint(clean).await
    }

    async fn sync_or_fail(&self) -> Result<(), Error> {
        self.medium.sync().await.map_err(|error| self.fail(&error))
    }

    /// Whether the log or the tables are so full that a checkpoint should not wait.
    pub(crate) fn checkpoint_due(&self) -> bool {
        (self.log.next.get() - self.log.tail.get()) * 2 > self.layout.log_sectors() || self.table.crowded()
    }
}
