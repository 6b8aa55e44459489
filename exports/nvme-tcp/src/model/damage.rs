//! A handle to the known bad blocks of a device, for an operator's report, and for other exports that use the device.
//!
//! Invariant: while no bad block is known, reporting good blocks costs one relaxed load.

use std::sync::Arc;

use sealblock_block::{DamageRun, RequestKind};
use sealblock_units::Extent;

use crate::model::damage_list::DamageList;

/// The known bad blocks of a device. Clones are for the same device; none of them keeps the device open.
#[derive(Clone)]
pub struct DamageHandle(Arc<DamageList>);

impl DamageHandle {
    pub(crate) fn of(list: &Arc<DamageList>) -> DamageHandle {
        DamageHandle(Arc::clone(list))
    }

    /// Removes blocks that a successful request of another protocol has written, or has found good by reading.
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

    /// All known bad blocks, in order.
    pub fn runs(&self) -> Vec<DamageRun> {
        self.0.all(0, u64::MAX)
    }

    /// The runs among these blocks that hosts have made unreadable on purpose.
    pub fn made_unreadable(&self, first: u64, last: u64) -> Vec<DamageRun> {
        self.0.all(first, last).into_iter().filter(|run| run.is_made).collect()
    }

    /// True if no bad block was dropped.
    pub fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    /// The devices whose lists were lost and of which not every block has been checked since.
    pub fn lost_lists(&self) -> Vec<String> {
        self.0.lost_lists()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::{BadBlock, BadBlockCause, DamageRecord, DamageSource};
    use sealblock_integrity::Field;
    use sealblock_units::Lba;

    fn list(bad: &[(u64, BadBlockCause)]) -> DamageHandle {
        let list = Arc::new(DamageList::default());
        let bad_blocks: Vec<BadBlock> =
            bad.iter().map(|(lba, field)| BadBlock::new(Lba::new(*lba), *field, None, None)).collect();
        list.record(&bad_blocks);
        DamageHandle(list)
    }

    /// The list of one device below.
    struct Below(DamageRecord);

    impl DamageSource for Below {
        fn visit(&self, first: u64, last: u64, see: &mut dyn FnMut(&str, DamageRun)) {
            self.0.visit(first, last, |run| see("below", run));
        }

        fn generation(&self) -> u64 {
            self.0.generation()
        }

        fn additions(&self) -> u64 {
            self.0.additions()
        }

        fn lost_lists(&self) -> Vec<String> {
            self.0.forgotten_from().map(|_| "below".to_owned()).into_iter().collect()
        }
    }

    fn extent(first: u64, blocks: u64) -> Extent {
        Extent::from_raw(first, blocks).unwrap()
    }

    const GUARD: BadBlockCause = BadBlockCause::Tag(Field::Guard);

    #[test]
    fn what_the_devices_below_know_stays_known_whatever_is_read_above() {
        let record = Arc::new(Below(DamageRecord::new(1 << 20)));
        let damage = list(&[]);
        record.0.add(&[BadBlock::media(Lba::new(5))]);
        damage.0.set_source(Arc::clone(&record) as Arc<dyn DamageSource>);
        let bad = |lba, cause| BadBlock::new(Lba::new(lba), cause, None, None);
        assert!(!damage.0.record(&[bad(5, BadBlockCause::Media)]), "it is in the list of the device, and was before");
        assert!(damage.0.record(&[bad(9, BadBlockCause::Conflict)]), "no device can know of that alone");
        record.0.add(&[BadBlock::media(Lba::new(6))]);
        assert!(damage.0.record(&[]) && !damage.0.record(&[]), "news are told once");
        damage.succeeded(RequestKind::Read, extent(0, 100));
        damage.succeeded(RequestKind::Write, extent(0, 9));
        let runs: Vec<_> = damage.runs().iter().map(|run| (run.first, run.last)).collect();
        assert_eq!(runs, [(5, 5), (6, 6), (9, 9)]);
        assert_eq!(damage.0.runs(extent(0, 100), 8).0.len(), 2, "blocks 5 to 6, and 9");
        assert!(damage.0.has(Lba::new(5)) && !damage.0.has(Lba::new(7)));
        assert_eq!(damage.0.damage_log(1).entries.len(), 3);
        record.0.clear(extent(0, 100));
        assert_eq!(damage.runs().len(), 1);
    }

    #[test]
    fn a_run_with_good_blocks_in_it_is_where_hosts_look_and_no_list_of_bad_blocks() {
        let record = Arc::new(Below(DamageRecord::new(1 << 40)));
        record.0.restore(&[DamageRun { bad_blocks: 7, ..DamageRun::exact(10, (1 << 33) + 9, BadBlockCause::Media) }]);
        let damage = list(&[]);
        damage.0.set_source(Arc::clone(&record) as Arc<dyn DamageSource>);
        let (runs, complete) = damage.0.runs(extent(0, 1 << 20), 8);
        assert_eq!((runs[0].extent, complete), (extent(10, (1 << 20) - 10), true));
        let all = damage.0.summary();
        assert_eq!(
            (all.blocks, all.overflowed, all.runs.len()),
            (7, false, 3),
            "a descriptor has 32 bits for its length"
        );
        let log = damage.0.damage_log(1);
        assert!(log.entries.is_empty() && log.overflowed);
        let runs: Vec<_> = log.runs.unwrap().iter().map(|run| (run.first, run.last, run.bad_blocks)).collect();
        assert_eq!(runs, [(10, (1 << 33) + 9, 7)], "with the minimum that this server knows");
        record.0.clear(extent(10, 1 << 20));
        assert_eq!(damage.0.summary().blocks, 1, "0 would say that no block is bad");
    }

    #[test]
    fn what_has_no_entry_in_the_damage_log_is_in_its_runs() {
        let record = Arc::new(Below(DamageRecord::new(1 << 40)));
        let made = DamageRun { is_made: true, ..DamageRun::exact(0, 1, BadBlockCause::Media) };
        record.0.restore(&[
            made,
            DamageRun { bad_blocks: 0, ..DamageRun::exact(10, 19, GUARD) },
            DamageRun::exact(100, 100 + 16_383, GUARD),
            DamageRun::exact(50_000, 50_001, GUARD),
        ]);
        let damage = list(&[]);
        damage.0.set_source(record);
        let log = damage.0.damage_log(1);
        assert_eq!((log.entries.len(), log.overflowed), (16_384, true));
        let runs: Vec<_> = log.runs.unwrap().iter().map(|run| (run.first, run.last, run.bad_blocks)).collect();
        assert_eq!(runs, [(10, 19, 0), (100 + 16_382, 100 + 16_383, 2), (50_000, 50_001, 2)]);
    }

    #[test]
    fn a_host_is_told_that_the_list_was_lost_until_every_block_was_checked() {
        let record = Arc::new(Below(DamageRecord::new(100)));
        record.0.forget_from(0);
        let damage = list(&[]);
        assert!(!damage.0.damage_log(1).is_list_lost);
        damage.0.set_source(Arc::clone(&record) as Arc<dyn DamageSource>);
        let (log, runs) = (damage.0.damage_log(1), damage.runs());
        assert_eq!((log.is_list_lost, log.overflowed, damage.lost_lists()), (true, false, vec!["below".to_owned()]));
        assert!(runs.is_empty() && damage.is_complete(), "no block was dropped here");
        record.0.clear(extent(0, 100));
        assert!(!damage.0.damage_log(1).is_list_lost && damage.lost_lists().is_empty());
    }

    #[test]
    fn written_and_verified_blocks_leave_the_list() {
        let damage = list(&[(5, GUARD), (6, BadBlockCause::Conflict), (7, GUARD)]);
        damage.succeeded(RequestKind::Verify, extent(0, 100));
        damage.succeeded(RequestKind::Read, extent(0, 7));
        let left = |damage: &DamageHandle| damage.runs().iter().map(|run| run.first).collect::<Vec<_>>();
        assert_eq!(left(&damage), [6, 7], "a read asks one of the copies");
        damage.succeeded(RequestKind::Write, extent(6, 1));
        damage.succeeded(RequestKind::Discard, extent(7, 1));
        assert!(damage.runs().is_empty() && damage.is_complete());
    }
}
