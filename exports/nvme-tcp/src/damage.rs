//! The damage of a device that is known, for those who tell an operator of it, and for what other protocols learn of the device.
//!
//! Invariant: while no block is known to be bad, learning that blocks are good costs one relaxed load.

use std::sync::Arc;

use sealblock_block::{FaultField, OperationKind};
use sealblock_units::Extent;

use crate::known::KnownBlocks;

/// The blocks of a device that are known to be bad. Clones are for the same device, which none of them keeps open.
#[derive(Clone)]
pub struct KnownDamage(Arc<KnownBlocks>);

/// How much is known to be bad, and where.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DamageSummary {
    /// Blocks that are bad, those that hosts have made unreadable left out.
    pub blocks: u64,
    /// Blocks that hosts have made unreadable on purpose, by Write Uncorrectable.
    pub made_unreadable: u64,
    /// Whether these are all that were met: at most [`crate::KNOWN_BLOCKS`] are remembered.
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
    pub field: FaultField,
}

impl KnownDamage {
    pub(crate) fn of(known: &Arc<KnownBlocks>) -> KnownDamage {
        KnownDamage(Arc::clone(known))
    }

    /// Learns that a request of another protocol succeeded, which checked all there is to check of what it read: these blocks
    /// are bad no more.
    pub fn succeeded(&self, kind: OperationKind, extent: Extent) {
        match kind {
            OperationKind::Write | OperationKind::WriteZeroes | OperationKind::Discard => self.0.forget(extent),
            OperationKind::Read => self.0.read(extent),
            OperationKind::Verify
            | OperationKind::Digest
            | OperationKind::Repair
            | OperationKind::Compare
            | OperationKind::Flush
            | OperationKind::WriteUncorrectable
            | OperationKind::Allocation
            | OperationKind::ReadAnnex
            | OperationKind::WriteAnnex => {}
        }
    }

    /// What is known now, in at most so many runs.
    pub fn summary(&self, most_runs: usize) -> DamageSummary {
        let mut summary = DamageSummary::default();
        summary.is_complete = self.0.visit(|lba, field, is_made| {
            if is_made {
                summary.made_unreadable += 1;
                return;
            }
            summary.blocks += 1;
            let is_full = summary.runs.len() == most_runs;
            match summary.runs.last_mut() {
                // Behind a run that was left out nothing is joined to the last one that was not.
                Some(run) if run.last + 1 == lba && run.field == field && summary.unlisted == 0 => run.last = lba,
                _ if is_full => summary.unlisted += 1,
                _ => summary.runs.push(DamageRun { first: lba, last: lba, field }),
            }
        });
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::Fault;
    use sealblock_integrity::Field;
    use sealblock_units::Lba;

    fn known(bad: &[(u64, FaultField)]) -> KnownDamage {
        let known = Arc::new(KnownBlocks::default());
        let faults: Vec<Fault> =
            bad.iter().map(|(lba, field)| Fault::new(Lba::new(*lba), *field, None, None)).collect();
        known.record(&faults);
        KnownDamage(known)
    }

    fn extent(first: u64, blocks: u64) -> Extent {
        Extent::from_raw(first, blocks).unwrap()
    }

    const GUARD: FaultField = FaultField::Tag(Field::Guard);

    #[test]
    fn blocks_of_one_kind_are_runs_and_what_is_left_out_is_counted() {
        let damage = known(&[(5, GUARD), (6, GUARD), (7, FaultField::Media), (9, GUARD), (10, GUARD)]);
        let all = damage.summary(8);
        let runs: Vec<_> = all.runs.iter().map(|run| (run.first, run.last, run.field)).collect();
        assert_eq!(runs, [(5, 6, GUARD), (7, 7, FaultField::Media), (9, 10, GUARD)]);
        assert_eq!((all.blocks, all.unlisted, all.is_complete), (5, 0, true));
        let few = damage.summary(2);
        assert_eq!((few.runs.len(), few.blocks, few.unlisted), (2, 5, 2));
        assert_eq!(few.runs[1].last, 7);
    }

    #[test]
    fn what_is_written_or_read_well_is_bad_no_more() {
        let damage = known(&[(5, GUARD), (6, FaultField::Conflict), (7, GUARD)]);
        damage.succeeded(OperationKind::Verify, extent(0, 100));
        damage.succeeded(OperationKind::Read, extent(0, 7));
        let left = |damage: &KnownDamage| damage.summary(8).runs.iter().map(|run| run.first).collect::<Vec<_>>();
        assert_eq!(left(&damage), [6, 7], "a read asks one of the copies");
        damage.succeeded(OperationKind::Write, extent(6, 1));
        damage.succeeded(OperationKind::Discard, extent(7, 1));
        assert_eq!(damage.summary(8), DamageSummary { is_complete: true, ..DamageSummary::default() });
    }
}
