//! The [high-water mark](HighWaterMark) on the medium: two copies, away from what they count.
//!
//! It is written after what it counts is durable, and becomes durable with the next sync, for which nothing waits. So
//! after a crash it may be behind, and then it misses only a rollback to the last moments.

use std::cell::Cell;

use futures_util::future::join_all;
use sealblock_block::{AsyncMutex, Medium};

use crate::format::{HighWaterMark, Layout, Seed, Superblock};
use crate::medium::padded;
use crate::medium::superblocks::{COPIES, SuperblockCopy};

/// The mark of an open volume.
pub(crate) struct HighWater {
    layout: Layout,
    seed: Seed,
    mark: Cell<HighWaterMark>,
    /// Held during a write, so that an earlier one does not overwrite a later one.
    turns: AsyncMutex,
}

impl HighWater {
    /// The mark of the volume with this superblock, as found on the medium.
    pub fn new(superblock: &Superblock, found: HighWaterMark) -> HighWater {
        let turns = AsyncMutex::default();
        HighWater { layout: superblock.layout, seed: superblock.seed(), mark: Cell::new(found), turns }
    }

    /// Its current value.
    pub fn mark(&self) -> HighWaterMark {
        self.mark.get()
    }

    /// Raises the mark to what is durable now. If the write fails, only this protection is lost.
    pub async fn raise<M: Medium>(&self, medium: &M, durable: HighWaterMark) {
        let _in_order = self.turns.lock().await;
        let mark = self.mark.get().and(&durable);
        if mark != self.mark.replace(mark) {
            write(medium, &self.layout, self.seed, &mark).await;
        }
    }
}

/// Reads the mark of the volume with this superblock: the higher value of each count in both copies. Lost copies are
/// ignored.
pub(crate) async fn read<M: Medium>(medium: &M, superblock: &Superblock) -> HighWaterMark {
    let sector = superblock.layout.sector_bytes() as usize;
    let mut mark = HighWaterMark::default();
    for offset in superblock.layout.high_water_offsets() {
        if offset + sector as u64 > medium.len_bytes() {
            continue;
        }
        let (read, bytes) = medium.read(offset, medium.buffer(sector)).await;
        let found = read.ok().and_then(|()| HighWaterMark::decode(&bytes, superblock.seed()));
        mark = found.map_or(mark, |found| mark.and(&found));
    }
    mark
}

/// Writes both copies of the mark. They are durable after the next sync.
pub(crate) async fn write<M: Medium>(medium: &M, layout: &Layout, seed: Seed, mark: &HighWaterMark) {
    let sector = padded(medium, &mark.encode(seed), layout.sector_bytes() as usize);
    let writes = layout.high_water_offsets().map(|offset| medium.write(offset, sector.clone()));
    for error in join_all(writes).await.into_iter().filter_map(Result::err) {
        tracing::warn!(%error, "cannot write the high-water mark");
    }
}

/// True if the newest superblock, or the log that ends at `log_end`, was restored from an earlier state than that of
/// the mark.
///
/// A superblock is in two places before the mark counts it. If both are damaged, the previous superblock counts: copies
/// are lost, but nothing is older. If one of the two places has a valid older superblock, that was restored.
pub(crate) fn is_behind(
    superblock: &Superblock,
    copies: &[SuperblockCopy; COPIES],
    log_end: u64,
    mark: &HighWaterMark,
) -> bool {
    let [.., third] = copies;
    let places = [&copies[(mark.superblocks % 2) as usize], third];
    let is_put_back = || places.iter().any(|copy| copy.write_seq.is_some_and(|found| found < mark.superblocks));
    let missed = mark.superblocks.saturating_sub(superblock.write_seq);
    missed > 1 || missed == 1 && is_put_back() || log_end < mark.log_end
}

/// True if a newer superblock may have existed of which no copy is left: both of its places are damaged. Then the log
/// may be in use although the newest superblock that is left says that it is empty.
pub(crate) fn may_lack_newest(superblock: &Superblock, copies: &[SuperblockCopy; COPIES]) -> bool {
    let [.., third] = copies;
    let places = [&copies[((superblock.write_seq + 1) % 2) as usize], third];
    places.iter().all(|copy| copy.write_seq.is_none())
}

#[cfg(test)]
mod tests {
    use sealblock_units::BlockSize;

    use super::*;

    #[test]
    fn one_superblock_back_is_a_lost_copy_where_both_of_the_newest_are_damaged_and_else_an_earlier_state() {
        let layout = Layout::new(BlockSize::B4096, 512, 1000).unwrap();
        let superblock = Superblock { write_seq: 10, ..Superblock::new([7; 16], layout, None) };
        let mark = |superblocks, log_end| HighWaterMark { superblocks, log_end, ..HighWaterMark::default() };
        let copies = |of: [Option<u64>; COPIES]| {
            of.map(|write_seq| SuperblockCopy { offset_bytes: 0, lost: None, write_seq, is_foreign: false })
        };
        let whole = [Some(10), Some(9), Some(10)];
        for (mark, of, expected) in [
            (mark(0, 0), whole, false),
            (mark(10, 40), whole, false),
            (mark(10, 41), whole, true),
            (mark(11, 40), whole, true),
            (mark(11, 40), [Some(10), None, None], false),
            (mark(11, 40), [Some(10), None, Some(10)], true),
            (mark(11, 40), [Some(10), Some(9), None], true),
            (mark(11, 40), [None, Some(9), Some(10)], true),
            (mark(12, 40), [Some(10), None, None], true),
        ] {
            assert_eq!(is_behind(&superblock, &copies(of), 40, &mark), expected, "{mark:?} {of:?}");
        }
    }
}
