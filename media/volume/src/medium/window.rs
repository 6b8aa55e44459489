//! The medium of a volume: a whole medium, or a window of one that is the medium of a shard.
//!
//! One type for both, so that the code of volumes is not compiled once more for shards.

use std::sync::Arc;

use sealblock_block::{Medium, MediumError, MediumErrorKind, SyncGroup};
use sealblock_runtime_memory::{Buffer, Slice};

use crate::format::Window;

/// A whole medium, or the window of one shard on a medium that it shares with other shards.
///
/// In a window, offsets count from its start; those in errors are of the whole medium. After a failure of any shard,
/// nothing is written any more. `M` may be a handle of its own on each core, if all of them are of one medium.
#[derive(Clone)]
pub struct VolumeMedium<M> {
    medium: M,
    /// `None` for the whole medium, whose length may change.
    part: Option<Part>,
}

#[derive(Clone)]
struct Part {
    window: Window,
    shard: u32,
    group: Arc<SyncGroup>,
}

impl<M: Medium> VolumeMedium<M> {
    /// All of a medium.
    pub fn whole(medium: M) -> VolumeMedium<M> {
        VolumeMedium { medium, part: None }
    }

    /// The window of a shard. `group` is that of all shards of the volume.
    pub(crate) fn of_shard(medium: M, window: Window, shard: u32, group: Arc<SyncGroup>) -> VolumeMedium<M> {
        VolumeMedium { medium, part: Some(Part { window, shard, group }) }
    }

    /// The whole medium.
    pub fn below(&self) -> &M {
        &self.medium
    }

    /// The offset on the medium, if the range lies in the window. A whole medium checks that itself.
    #[inline]
    fn at(&self, doing: &'static str, offset_bytes: u64, length_bytes: u64) -> Result<u64, MediumError> {
        let Some(part) = &self.part else { return Ok(offset_bytes) };
        let end = offset_bytes.checked_add(length_bytes);
        if end.is_some_and(|end| end <= self.len_bytes()) {
            return Ok(part.window.offset + offset_bytes);
        }
        let offset_bytes = part.window.offset.saturating_add(offset_bytes);
        let reason = format!("past the end of shard {}", part.shard);
        Err(MediumError { kind: MediumErrorKind::PastEnd, doing, offset_bytes, reason })
    }

    /// The same for a change, which is refused after a failure of any shard.
    #[inline]
    fn change_at(&self, doing: &'static str, offset_bytes: u64, length_bytes: u64) -> Result<u64, MediumError> {
        let at = self.at(doing, offset_bytes, length_bytes)?;
        match self.part.as_ref().and_then(|part| part.group.failure()) {
            None => Ok(at),
            Some(why) => Err(failed(doing, at, why)),
        }
    }
}

/// The error of a change after a failure.
#[cold]
fn failed(doing: &'static str, offset_bytes: u64, why: &str) -> MediumError {
    MediumError { kind: MediumErrorKind::Failed, doing, offset_bytes, reason: why.to_owned() }
}

impl<M: Medium> Medium for VolumeMedium<M> {
    fn len_bytes(&self) -> u64 {
        let all = self.medium.len_bytes();
        self.part.as_ref().map_or(all, |Part { window, .. }| all.saturating_sub(window.offset).min(window.length))
    }

    sealblock_block::medium_properties!(self => &self.medium);

    async fn read(&self, offset_bytes: u64, into: Buffer) -> (Result<(), MediumError>, Buffer) {
        match self.at("read", offset_bytes, into.len() as u64) {
            Ok(at) => self.medium.read(at, into).await,
            Err(refused) => (Err(refused), into),
        }
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        let at = self.change_at("write", offset_bytes, from.len() as u64)?;
        self.medium.write(at, from).await
    }

    fn note(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediumError> {
        let at = self.change_at("note", offset_bytes, bytes.len() as u64)?;
        self.medium.note(at, bytes)
    }

    async fn sync(&self) -> Result<(), MediumError> {
        let Some(Part { window, group, .. }) = &self.part else { return self.medium.sync().await };
        let synced = group.sync(|| self.medium.sync()).await;
        synced.map_err(|why| failed("sync", window.offset, &why))
    }

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        let at = self.change_at("punch a hole", offset_bytes, length_bytes)?;
        self.medium.punch(at, length_bytes).await
    }

    async fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        let at = self.change_at("discard", offset_bytes, length_bytes)?;
        self.medium.discard(at, length_bytes).await
    }

    async fn reserve(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        let at = self.change_at("reserve space", offset_bytes, length_bytes)?;
        self.medium.reserve(at, length_bytes).await
    }

    fn is_hole(&self, offset_bytes: u64, length_bytes: u64) -> bool {
        let at = self.at("look for a hole", offset_bytes, length_bytes);
        at.is_ok_and(|at| self.medium.is_hole(at, length_bytes))
    }

    fn status_at(&self, offset_bytes: u64, length_bytes: u64) -> (u64, bool) {
        let at = self.at("look for a hole", offset_bytes, length_bytes);
        at.map_or((length_bytes, false), |at| self.medium.status_at(at, length_bytes))
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        let at = self.change_at("write zeroes", offset_bytes, length_bytes)?;
        self.medium.zero(at, length_bytes).await
    }

    async fn set_len(&self, length_bytes: u64) -> Result<(), MediumError> {
        if self.part.is_none() {
            return self.medium.set_len(length_bytes).await;
        }
        let (kind, reason) = (MediumErrorKind::Unsupported, "the window of a shard keeps its length".to_owned());
        Err(MediumError { kind, doing: "set the length", offset_bytes: length_bytes, reason })
    }

    fn give_up(&self, why: &str) {
        if let Some(Part { shard, group, .. }) = &self.part {
            group.fail(&format!("shard {shard} failed, writes of all shards are disabled: {why}"));
        }
    }
}
