//! Makes the data of files durable.

use sealblock_btrfs_format::items::inode::InodeFlags;

use super::{FileId, FileInfo};
use crate::engine::{Engine, EngineError};
use crate::transaction::Transaction;

impl Engine {
    /// Makes a file durable, with all that was written to it and all that changed anywhere (fsync).
    ///
    /// # Errors
    /// If it cannot be written. Nothing is written any more then.
    pub async fn fsync(&self, root: u64, ino: u64) -> Result<u64, EngineError> {
        let generation = self.complete_writes(root, ino).await?;
        self.commit_through(generation).await
    }

    /// Waits for the writes of a file that are in flight, and stores its size: before another file is replaced by it,
    /// too. Returns the transaction that has all of it.
    ///
    /// # Errors
    /// If the size cannot be stored.
    pub async fn complete_writes(&self, root: u64, ino: u64) -> Result<u64, EngineError> {
        let id = FileId { root, ino };
        self.check_stopped()?;
        if let Some(state) = self.data().files.get(id) {
            self.while_waiting(state.ordered_done()).await;
            if state.is_size_ahead() {
                let lock = self.data().files.request(id, Vec::new());
                self.store_size(&lock).await?;
            }
        }
        Ok(self.last_changed())
    }

    /// Waits for all writes that are in flight, and stores the sizes of all files.
    ///
    /// # Errors
    /// If a size cannot be stored.
    pub async fn complete_all_writes(&self) -> Result<(), EngineError> {
        for FileId { root, ino } in self.data().files.all_ahead() {
            self.complete_writes(root, ino).await?;
        }
        Ok(())
    }

    /// Makes the data of a file durable, and what is needed to read them (fdatasync). If all that was written since the
    /// last commit lies where data were before, nothing but that is made durable; the times of the file are not.
    ///
    /// # Errors
    /// As for [`Engine::fsync`].
    pub async fn sync_data(&self, root: u64, ino: u64) -> Result<(), EngineError> {
        let id = FileId { root, ino };
        let generation = self.complete_writes(root, ino).await?;
        let info = self.change(|transaction: &mut Transaction| transaction.file_info(id)).await?;
        if !self.is_durable_but_for_data(id, &info) {
            return self.commit_through(generation).await.map(drop);
        }
        let state = self.data().files.get(id);
        if let Some(state) = state.filter(|state| state.written_in() > self.durable_generation()) {
            let writes = state.writes_in_place();
            self.flush().await?;
            if !self.has_new_failure() {
                state.flushed(writes);
            }
        }
        // A device that missed some of the data is behind the others only when another transaction is durable.
        match self.has_new_failure() {
            true => self.commit().await.map(drop),
            false => Ok(()),
        }
    }

    /// True if the last durable commit has all of a file but its data: its inode, its size and its extents.
    fn is_durable_but_for_data(&self, id: FileId, info: &FileInfo) -> bool {
        let durable = self.durable_generation();
        let changed_in = self.data().files.get(id).map_or(0, |state| state.changed_in());
        let is_only_data = info.has(InodeFlags::NODATACOW) || info.inode.transid.get() <= durable;
        info.inode.generation.get() <= durable && changed_in <= durable && is_only_data
    }
}
