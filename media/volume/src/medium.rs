//! The medium as a volume uses it: syncs run one at a time, and reads return which sectors are unreadable.
//!
//! Commits, checkpoints and writes of the reserved area sync concurrently. A failed sync may have lost writes of any of
//! them, but the medium reports the failure only once, to one caller; a later sync may succeed although data are gone.
//! So after one failed sync every other sync fails, too.

pub(crate) mod container_probe;
pub(crate) mod containers;
pub(crate) mod high_water;
pub(crate) mod identity;
pub(crate) mod lost_copies;
pub(crate) mod recognise;
pub(crate) mod reserved;
pub(crate) mod superblocks;
pub(crate) mod window;

use std::cell::RefCell;

use sealblock_block::{AsyncMutex, Medium, MediumError, MediumErrorKind};
use sealblock_runtime_memory::{Buffer, Slice};

use crate::format::THIRD_FROM_END_BYTES;

/// A medium whose syncs run one at a time.
pub(crate) struct SerializedSync<M> {
    medium: M,
    /// Held during a sync.
    syncing: AsyncMutex,
    failed: RefCell<Option<String>>,
}

impl<M> SerializedSync<M> {
    /// Wraps a medium. No sync has failed yet.
    pub fn new(medium: M) -> SerializedSync<M> {
        SerializedSync { medium, syncing: AsyncMutex::default(), failed: RefCell::default() }
    }

    /// The medium itself.
    pub fn get(&self) -> &M {
        &self.medium
    }
}

impl<M: Medium> Medium for SerializedSync<M> {
    fn len_bytes(&self) -> u64 {
        self.medium.len_bytes()
    }

    sealblock_block::medium_properties!(self => &self.medium);

    fn read(&self, offset_bytes: u64, into: Buffer) -> impl Future<Output = (Result<(), MediumError>, Buffer)> {
        self.medium.read(offset_bytes, into)
    }

    fn write(&self, offset_bytes: u64, from: Slice) -> impl Future<Output = Result<(), MediumError>> {
        self.medium.write(offset_bytes, from)
    }

    fn note(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediumError> {
        self.medium.note(offset_bytes, bytes)
    }

    async fn sync(&self) -> Result<(), MediumError> {
        let _alone = self.syncing.lock().await;
        if let Some(why) = &*self.failed.borrow() {
            let reason = format!("an earlier one failed: {why}");
            return Err(MediumError { kind: MediumErrorKind::Failed, doing: "sync", offset_bytes: 0, reason });
        }
        let synced = self.medium.sync().await;
        *self.failed.borrow_mut() = synced.as_ref().err().map(ToString::to_string);
        synced
    }

    fn punch(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
        self.medium.punch(offset_bytes, length_bytes)
    }

    fn reserve(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
        self.medium.reserve(offset_bytes, length_bytes)
    }

    fn is_hole(&self, offset_bytes: u64, length_bytes: u64) -> bool {
        self.medium.is_hole(offset_bytes, length_bytes)
    }

    fn status_at(&self, offset_bytes: u64, length_bytes: u64) -> (u64, bool) {
        self.medium.status_at(offset_bytes, length_bytes)
    }

    fn zero(&self, offset_bytes: u64, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
        self.medium.zero(offset_bytes, length_bytes)
    }

    fn set_len(&self, length_bytes: u64) -> impl Future<Output = Result<(), MediumError>> {
        self.medium.set_len(length_bytes)
    }

    fn give_up(&self, why: &str) {
        self.medium.give_up(why);
    }
}

/// A buffer of the medium with these bytes, padded with zeroes up to `len_bytes`.
pub(crate) fn padded(medium: &impl Medium, bytes: &[u8], len_bytes: usize) -> Slice {
    let mut buffer = medium.buffer(len_bytes);
    let (head, rest) = buffer.split_at_mut(bytes.len());
    head.copy_from_slice(bytes);
    rest.fill(0);
    buffer.freeze()
}

/// The offset of the third copy of a superblock if a volume fills the medium.
pub(crate) fn tail_offset<M: Medium>(medium: &M) -> Option<u64> {
    (medium.len_bytes() / THIRD_FROM_END_BYTES).checked_sub(1).map(|tail| tail * THIRD_FROM_END_BYTES)
}

/// How often a sector is read before it counts as unreadable.
const READ_ATTEMPTS: u32 = 3;

/// Reads whole sectors; if the medium fails, one by one. Also returns the numbers of the unreadable ones, whose bytes
/// are zeroes.
///
/// # Errors
/// When the medium fails as a whole, rather than at single sectors.
pub(crate) async fn read_sectors<M: Medium>(
    medium: &M,
    offset: u64,
    length: usize,
    sector: usize,
) -> Result<(Buffer, Vec<usize>), MediumError> {
    let (read, mut whole) = medium.read(offset, medium.buffer(length)).await;
    match read {
        Ok(()) => return Ok((whole, Vec::new())),
        Err(error) if !error.is_local() => return Err(error),
        Err(_) => {}
    }
    // Each attempt reads all of them before the next one, so that a short disturbance of the medium has passed by then.
    let mut missing: Vec<usize> = (0..length / sector).collect();
    whole.fill(0);
    for _ in 0..READ_ATTEMPTS {
        let mut still = Vec::new();
        for at in missing {
            let (read, bytes) = medium.read(offset + (at * sector) as u64, medium.buffer(sector)).await;
            match read {
                Ok(()) => whole[at * sector..(at + 1) * sector].copy_from_slice(&bytes),
                Err(error) if error.is_local() => still.push(at),
                Err(error) => return Err(error),
            }
        }
        missing = still;
    }
    Ok((whole, missing))
}

/// Bytes that are read at one place to look for records.
pub(crate) const PROBE_BYTES: u64 = 64 << 10;

/// Up to [`PROBE_BYTES`] from `offset`. Sectors that cannot be read are zeroes.
pub(crate) async fn read_probe<M: Medium>(medium: &M, offset: u64) -> Vec<u8> {
    let sector = u64::from(medium.sector_bytes());
    let length = medium.len_bytes().saturating_sub(offset).min(PROBE_BYTES);
    if length == 0 {
        return Vec::new();
    }
    let (read, bytes) = medium.read(offset, medium.buffer(length as usize)).await;
    if read.is_ok() {
        return bytes.to_vec();
    }
    let mut found = Vec::with_capacity(length as usize);
    for at in (0..length).step_by(sector as usize) {
        let (read, bytes) = medium.read(offset + at, medium.buffer(sector as usize)).await;
        found.extend_from_slice(&if read.is_ok() { bytes.to_vec() } else { vec![0; sector as usize] });
    }
    found
}

#[cfg(test)]
mod tests {
    use futures_executor::block_on;
    use futures_util::future::join;

    use super::*;
    use crate::tests::setup::TestMedium;

    #[test]
    fn no_sync_beside_or_behind_one_that_failed_ends_well() {
        let medium = TestMedium::new(1 << 16, 512);
        medium.turns.set(3);
        let one_sync = SerializedSync::new(medium.clone());
        assert!(block_on(one_sync.sync()).is_ok());
        medium.syncs_left.set(0);
        let first = async {
            let synced = one_sync.sync().await;
            // The medium reports the failure only once.
            medium.syncs_left.set(u64::MAX);
            synced
        };
        let (first, second) = block_on(join(first, one_sync.sync()));
        assert!(first.is_err() && second.is_err(), "{first:?} {second:?}");
        assert!(block_on(medium.sync()).is_ok() && block_on(one_sync.sync()).is_err(), "what was lost stays lost");
    }
}
