//! The damage of a device that is known, for those who tell an operator of it, and for what other protocols learn of the device.
//!
//! Invariant: while no block is known to be bad, learning that blocks are good costs one relaxed load.

use std::sync::Arc;

use sealblock_block::{BadBlockCause, RequestKind};
use sealblock_units::Extent;

use crate::damage_list::DamageList;

/// The blocks of a device that are known to be bad. Clones are for the same device, which none of them keeps open.
#[derive(Clone)]
pub struct DamageHandle(Arc<DamageList>);

/// How much is known to be bad, and where.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DamageSummary {
    /// Blocks that are bad, those that hosts have made unreadable left out.
    pub blocks: u64,
    /// Blocks that hosts have made unreadable on purpose, by Write Uncorrectable.
    pub made_unreadable: u64,
    /// Whether these are all that were met: at most [`crate::MAX_BAD_BLOCKS`] are remembered.
    pub is_complete: bool,
    /// The bad ones as runs, in order; as many as were asked for.
    pub runs: Vec<DamageRun>,
    /// Blocks that are in none of these runs.
    pub unlisted: u64,
}

/// Bad blocks that follow each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DamageRun {
    /// The first block.
    pub first: u64,
    /// The last one.
    pub last: u64,
    /// What is wrong with all of them.
    pub cause: BadBlockCause,
}

impl DamageHandle {
    pub(crate) fn of(list: &Arc<DamageList>) -> DamageHandle {
        DamageHandle(Arc::clone(list))
    }

    /// Learns that a request of another protocol succeeded, which checked all there is to check of what it read: these blocks
    /// are bad no more.
    pub fn succeeded(&self, kind: RequestKind, extent: Extent) {
        match kind {
            RequestKind::Write | RequestKind::WriteZeroes | RequestKind::Discard => self.0.clear(extent),
            RequestKind::Read => self.0.remove_read(extent),
            RequestKind::Verify
            | RequestKind::Checksum
            | RequestKind::Repair
            | RequestKind::Compare
            | RequestKind::Flush
            | RequestKind::WriteUncorrectable
            | RequestKind::BlockStatus
            | RequestKind::ReadReserved
            | RequestKind::WriteReserved => {}
        }
    }

    /// What is known now, in at most so many runs.
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
                // Behind a run that was left out nothing is joined to the last one that was not.
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
    fn blocks_of_one_kind_are_runs_and_what_is_left_out_is_counted() {
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
    fn what_is_written_or_read_well_is_bad_no_more() {
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
