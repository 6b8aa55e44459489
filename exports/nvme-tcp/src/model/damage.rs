//! A handle to the known bad blocks of a device: for an operator's report, and for another export that learns about the
//! same device.
//!
//! Invariant: while no bad block is known, reporting good blocks costs one relaxed load.

use std::sync::Arc;

use sealblock_block::{BadBlockCause, RequestKind};
use sealblock_units::Extent;

use crate::model::damage_list::DamageList;

/// The known bad blocks of a device. Clones are for the same device, and none of them keeps it open.
#[derive(Clone)]
pub struct DamageHandle(Arc<DamageList>);

/// How many blocks are bad, and where.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DamageSummary {
    /// Bad blocks, without those that hosts made unreadable.
    pub blocks: u64,
    /// Blocks that hosts made unreadable by Write Uncorrectable.
    pub made_unreadable: u64,
    /// True if no more bad blocks were found: at most [`crate::MAX_BAD_BLOCKS`] are listed.
    pub is_complete: bool,
    /// The bad blocks as runs, in order, up to the requested number.
    pub runs: Vec<DamageRun>,
    /// Bad blocks that are in none of these runs.
    pub unlisted: u64,
}

/// Consecutive bad blocks with one cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DamageRun {
    /// The first block.
    pub first: u64,
    /// The last block.
    pub last: u64,
    /// What is wrong with all of them.
    pub cause: BadBlockCause,
}

impl DamageHandle {
    pub(crate) fn of(list: &Arc<DamageList>) -> DamageHandle {
        DamageHandle(Arc::clone(list))
    }

    /// Removes the blocks that a successful request of another protocol wrote, or found good by reading.
    pub fn succeeded(&self, kind: RequestKind, extent: Extent) {
        match kind {
            RequestKind::Write
            | RequestKind::WriteZeroes
            | RequestKind::Copy
            | RequestKind::CompareAndWrite
            | RequestKind::Discard => {
                self.0.clear(extent);
            }
            RequestKind::Read => self.0.remove_read(extent),
            RequestKind::Verify
            | RequestKind::Checksum
            | RequestKind::Repair
            | RequestKind::Compare
            | RequestKind::Salvage
            | RequestKind::Flush
            | RequestKind::WriteUncorrectable
            | RequestKind::BlockStatus
            | RequestKind::ReadReserved
            | RequestKind::WriteReserved => {}
        }
    }

    /// Returns a summary with at most `max_runs` runs.
    pub fn summary(&self, max_runs: usize) -> DamageSummary {
        let mut summary = DamageSummary::default();
        summary.is_complete = self.0.visit(|lba, field, is_made| {
            if is_made {
                summary.made_unreadable += 1;
                return;
            }
            summary.blocks += 1;
            let is_full = summary.runs.len() == max_runs;
            match summary.runs.last_mut() {
                // No block is joined to the last run once a run was left out.
                Some(run) if run.last + 1 == lba && run.cause == field && summary.unlisted == 0 => run.last = lba,
                _ if is_full => summary.unlisted += 1,
                _ => summary.runs.push(DamageRun { first: lba, last: lba, cause: field }),
            }
        });
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::BadBlock;
    use sealblock_integrity::Field;
    use sealblock_units::Lba;

    fn list(bad: &[(u64, BadBlockCause)]) -> DamageHandle {
        let list = Arc::new(DamageList::default());
        let bad_blocks: Vec<BadBlock> =
            bad.iter().map(|(lba, field)| BadBlock::new(Lba::new(*lba), *field, None, None)).collect();
        list.record(&bad_blocks);
        DamageHandle(list)
    }

    fn extent(first: u64, blocks: u64) -> Extent {
        Extent::from_raw(first, blocks).unwrap()
    }

    const GUARD: BadBlockCause = BadBlockCause::Tag(Field::Guard);

    #[test]
    fn blocks_with_one_cause_form_runs_and_unlisted_ones_are_counted() {
        let damage = list(&[(5, GUARD), (6, GUARD), (7, BadBlockCause::Media), (9, GUARD), (10, GUARD)]);
        let all = damage.summary(8);
        let runs: Vec<_> = all.runs.iter().map(|run| (run.first, run.last, run.cause)).collect();
        assert_eq!(runs, [(5, 6, GUARD), (7, 7, BadBlockCause::Media), (9, 10, GUARD)]);
        assert_eq!((all.blocks, all.unlisted, all.is_complete), (5, 0, true));
        let few = damage.summary(2);
        assert_eq!((few.runs.len(), few.blocks, few.unlisted), (2, 5, 2));
        assert_eq!(few.runs[1].last, 7);
    }

    #[test]
    fn written_and_verified_blocks_leave_the_list() {
        let damage = list(&[(5, GUARD), (6, BadBlockCause::Conflict), (7, GUARD)]);
        damage.succeeded(RequestKind::Verify, extent(0, 100));
        damage.succeeded(RequestKind::Read, extent(0, 7));
        let left = |damage: &DamageHandle| damage.summary(8).runs.iter().map(|run| run.first).collect::<Vec<_>>();
        assert_eq!(left(&damage), [6, 7], "a read asks one of the copies");
        damage.succeeded(RequestKind::Write, extent(6, 1));
        damage.succeeded(RequestKind::Discard, extent(7, 1));
        assert_eq!(damage.summary(8), DamageSummary { is_complete: true, ..DamageSummary::default() });
    }
}
