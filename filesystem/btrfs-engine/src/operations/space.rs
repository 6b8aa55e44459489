//! How much space there is for data, and the return of free space to devices that allocate what is written.

use std::ops::Range;

use crate::engine::{Engine, EngineError};
use crate::space::Use;
use crate::transaction::{ChangeError, Transaction};

/// The bytes of free space that are kept from being allocated while devices discard them.
const DISCARDED_AT_ONCE: u64 = 1 << 30;

/// The space for data of files. Of several copies, one is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DataSpace {
    /// Bytes of the devices, divided by the copies that data have.
    pub total_bytes: u64,
    /// Bytes for which there is space, in block groups and where the devices have room for more. What was freed counts
    /// from the next commit on at the latest.
    pub free_bytes: u64,
    /// Bytes in use at the last commit, of data and metadata.
    pub used_bytes: u64,
}

impl Engine {
    /// How much space there is for data.
    pub fn data_space(&self) -> DataSpace {
        let transaction = self.transaction().borrow();
        let devices: u64 = transaction.chunks.devices().map(|item| item.total_bytes.get()).sum();
        let used_bytes = transaction.space.used_bytes();
        let Some(flags) = transaction.space.flags_for(Use::Data) else {
            return DataSpace { total_bytes: devices, free_bytes: 0, used_bytes };
        };
        let room = transaction.chunks.room(flags);
        let copies = flags.profile().map_or(1, |profile| profile.copies()).max(1);
        let free_bytes = transaction.space.unused_data_bytes().saturating_add(room);
        DataSpace { total_bytes: (devices / u64::from(copies)).max(free_bytes), free_bytes, used_bytes }
    }

    /// Tells the devices that the free space in block groups of data is not needed, in runs of at least `min_bytes`.
    /// Returns how many bytes. Nothing is allocated there meanwhile: a device runs requests in any order.
    ///
    /// Space of metadata is left as it is, because a commit must never lack any.
    ///
    /// # Errors
    /// If the free space tree cannot be read, or contradicts itself.
    pub async fn discard_free(&self, min_bytes: u64) -> Result<u64, EngineError> {
        let (mut all, mut from) = (0_u64, 0);
        let is_worth_it = |run: &Range<u64>| run.end - run.start >= min_bytes.max(1);
        loop {
            let (runs, next) = self.change(|transaction| transaction.take_free(from, &is_worth_it)).await?;
            if runs.is_empty() {
                return Ok(all);
            }
            // If this is given up here, nobody knows when the devices do it: then the space is not used any more.
            self.storage().discard(&runs).await;
            all = runs.iter().map(|run| run.end - run.start).fold(all, u64::saturating_add);
            let given = self.transaction().borrow_mut().space.unpin(runs);
            given.map_err(|error| self.stop(error.to_string()))?;
            from = next;
        }
    }
}

impl Transaction {
    /// Takes free space of data out, from an address on, until it is enough for a request. Returns also where to go on.
    fn take_free(
        &mut self,
        from: u64,
        is_worth_it: &impl Fn(&Range<u64>) -> bool,
    ) -> Result<(Vec<Range<u64>>, u64), ChangeError> {
        let groups = self.space.data_groups_from(from);
        for start in groups {
            self.load_group(start)?;
            let runs = self.space.take_free_data(start, from, DISCARDED_AT_ONCE, is_worth_it);
            if let Some(last) = runs.last() {
                let next = last.end;
                return Ok((runs, next));
            }
        }
        Ok((Vec::new(), from))
    }
}
