//! Bad blocks as runs, for log lines.

use sealblock_block::{BadBlock, BadBlockCause, DamageRun, has_block};
use sealblock_exports_nvme_tcp::DamageHandle;

/// Consecutive bad blocks with one cause and one state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadRun {
    /// The first block.
    pub first: u64,
    /// The last one.
    pub last: u64,
    /// The first bad block; the cause is that of all.
    pub fault: BadBlock,
    /// True if all of them were repaired.
    pub repaired: bool,
    /// True if hosts have made them unreadable on purpose, which is no damage.
    pub is_made: bool,
}

/// Joins bad blocks, in order, to runs. A block counts as repaired if all its entries are.
/// `known` tells which blocks hosts have made unreadable.
pub fn bad_runs(faults: &[BadBlock], known: Option<&DamageHandle>) -> Vec<BadRun> {
    let made = match (faults.first(), faults.last(), known) {
        (Some(first), Some(last), Some(known)) => known.made_unreadable(first.lba.get(), last.lba.get()),
        _ => Vec::new(),
    };
    joined(faults, &made)
}

fn joined(faults: &[BadBlock], made: &[DamageRun]) -> Vec<BadRun> {
    let mut runs: Vec<BadRun> = Vec::new();
    for device_error in faults.chunk_by(|a, b| a.lba == b.lba) {
        let (fault, at) = (device_error[0], device_error[0].lba.get());
        let repaired = device_error.iter().all(|fault| fault.repaired);
        let is_made = fault.cause == BadBlockCause::Media && has_block(made, at);
        let kind = (repaired, fault.cause, is_made);
        match runs.last_mut() {
            Some(run) if run.last + 1 == at && (run.repaired, run.fault.cause, run.is_made) == kind => run.last = at,
            _ => runs.push(BadRun { first: at, last: at, fault, repaired, is_made }),
        }
    }
    runs
}

/// The blocks of a run as text: `6`, or `3..5`.
pub fn blocks_text(first: u64, last: u64) -> String {
    if first == last { first.to_string() } else { format!("{first}..{last}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::BadBlockCause;
    use sealblock_integrity::Field;
    use sealblock_units::Lba;

    fn fault(lba: u64, repaired: bool) -> BadBlock {
        BadBlock { repaired, ..BadBlock::new(Lba::new(lba), BadBlockCause::Tag(Field::Guard), Some(1), Some(2)) }
    }

    #[test]
    fn blocks_of_one_state_are_one_run() {
        let faults = [
            fault(3, false),
            fault(4, false),
            fault(5, true),
            fault(7, true),
            fault(7, false),
            BadBlock::media(Lba::new(8)),
        ];
        let runs: Vec<_> = joined(&faults, &[]).iter().map(|run| (run.first, run.last, run.repaired)).collect();
        assert_eq!(runs, [(3, 4, false), (5, 5, true), (7, 7, false), (8, 8, false)]);
        assert_eq!(joined(&[], &[]), []);
    }

    #[test]
    fn blocks_of_another_field_are_another_run() {
        let media = |lba| BadBlock::media(Lba::new(lba));
        let conflict = BadBlock::new(Lba::new(6), BadBlockCause::Conflict, None, None);
        let faults = [media(3), media(4), media(4), media(5), conflict, media(9)];
        let runs: Vec<_> = joined(&faults, &[]).iter().map(|run| (run.first, run.last)).collect();
        assert_eq!(runs, [(3, 5), (6, 6), (9, 9)]);
        let made = [DamageRun { is_made: true, ..DamageRun::exact(4, 6, BadBlockCause::Media) }];
        let runs: Vec<_> = joined(&faults, &made).iter().map(|run| (run.first, run.last, run.is_made)).collect();
        assert_eq!(runs, [(3, 3, false), (4, 5, true), (6, 6, false), (9, 9, false)], "a conflict is damage");
    }
}
