//! Tests the set of bad blocks against a model, and its limits.

use proptest::prelude::*;
use sealblock_block::{BadBlocks, Response, VerifyStats};
use sealblock_integrity::Field;

use super::*;

const FIELDS: [BadBlockCause; 5] = [
    BadBlockCause::Media,
    BadBlockCause::Tag(Field::Guard),
    BadBlockCause::Tag(Field::AppTag),
    BadBlockCause::Tag(Field::RefTag),
    BadBlockCause::Tag(Field::StorageTag),
];

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn summary(kind: RequestKind, at: Extent) -> RequestSummary {
    RequestSummary { kind, extent: Some(at), capacity_blocks: MAX_BAD_BLOCKS as u64 * 2 }
}

fn bad_block(lba: u64, field: BadBlockCause) -> BadBlock {
    let value = (field != BadBlockCause::Media).then_some(lba);
    BadBlock::new(Lba::new(lba), field, value, value.map(|value| value + 1))
}

fn failed(bad_blocks: Vec<BadBlock>) -> Outcome {
    Err(BadBlocks::new(bad_blocks).unwrap().into())
}

fn lbas(known: &DamageList) -> Vec<u64> {
    known.damage_log(1).entries.iter().map(|entry| entry.lba.get()).collect()
}

#[test]
fn all_bad_blocks_of_a_failed_verify_are_listed_with_their_causes() {
    let known = DamageList::default();
    let bad = vec![
        bad_block(3, BadBlockCause::Tag(Field::Guard)),
        bad_block(4, BadBlockCause::Tag(Field::RefTag)),
        bad_block(9, BadBlockCause::Media),
    ];
    assert!(known.update(&summary(RequestKind::Verify, extent(0, 16)), &failed(bad.clone())));
    assert!(!known.update(&summary(RequestKind::Verify, extent(0, 16)), &failed(bad)), "nothing new");
    let log = known.damage_log(7);
    assert_eq!((log.nsid, log.entries.len(), log.overflowed), (7, 3, false));
    assert_eq!((log.entries[0].field, log.entries[0].values), (Some(Field::Guard), Some((3, 4))));
    assert_eq!((log.entries[2].field, log.entries[2].values), (None, None));
    let (runs, complete) = known.runs(extent(0, 16), 8);
    let runs: Vec<_> = runs.iter().map(|run| (run.extent.start().get(), run.extent.len())).collect();
    assert_eq!((runs, complete), (vec![(3, 2), (9, 1)], true));
    let (runs, complete) = known.runs(extent(4, 12), 1);
    assert_eq!((runs[0].extent, complete), (extent(4, 1), false), "cut at the extent, and short of room");
}

/// A device whose list changes while it is read.
struct Changing(sealblock_block::DamageRecord);

impl DamageSource for Changing {
    fn visit(&self, first: u64, last: u64, see: &mut dyn FnMut(&str, DamageRun)) {
        self.0.visit(first, last, |run| see("below", run));
        let next = self.0.runs().last().map_or(0, |run| run.last + 2);
        if next < 10 {
            self.0.add(&[BadBlock::media(Lba::new(next))]);
        }
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

#[test]
fn a_log_is_never_called_later_than_what_is_in_it() {
    let known = DamageList::default();
    known.set_source(Arc::new(Changing(sealblock_block::DamageRecord::new(100))));
    let entries = |page: &DamagePage| DamageLog::decode(page.bytes()).unwrap().entries.len();
    let now = Instant::now();
    for blocks in 0..=5 {
        assert_eq!(entries(&known.begin_page(1, now)), blocks, "each read finds the one before out of date");
    }
    let last = known.begin_page(1, now);
    assert!(Arc::ptr_eq(&last, &known.begin_page(1, now)), "until nothing changes");
    known.set_source(Arc::new(Changing(sealblock_block::DamageRecord::new(100))));
    assert_eq!(entries(&known.begin_page(1, now)), 0, "another device may count the same");
    assert!(known.go_on_page(1, &Arc::downgrade(&last), now).is_none());
}

#[test]
fn a_check_removes_the_blocks_that_it_would_have_found_and_no_others() {
    let known = DamageList::default();
    known.record(&[
        bad_block(1, BadBlockCause::Tag(Field::Guard)),
        bad_block(2, BadBlockCause::Tag(Field::AppTag)),
        bad_block(3, BadBlockCause::Media),
    ]);
    known.update(&summary(RequestKind::Read, extent(0, 3)), &Ok(Response::Done));
    assert_eq!(lbas(&known), [3], "the store looks at all its tags, whatever is asked");
    known.record(&[bad_block(1, BadBlockCause::Tag(Field::Guard))]);
    known.update(&summary(RequestKind::Verify, extent(0, 8)), &failed(vec![bad_block(3, BadBlockCause::Media)]));
    assert_eq!(lbas(&known), [3]);
    for kind in [RequestKind::Compare, RequestKind::Flush] {
        known.update(&summary(kind, extent(0, 8)), &Ok(Response::Done));
    }
    assert_eq!(lbas(&known), [3]);
    known.update(&summary(RequestKind::Verify, extent(0, 8)), &Ok(Response::Verified(VerifyStats::default())));
    assert_eq!(lbas(&known), [0_u64; 0]);
}

#[test]
fn a_media_error_without_a_block_counts_for_one_block_requests_only() {
    let known = DamageList::default();
    let failed = || -> Outcome { Err(ErrorKind::Media { reason: "no".to_owned() }.into()) };
    assert!(!known.update(&summary(RequestKind::Read, extent(4, 2)), &failed()));
    assert!(!known.update(&summary(RequestKind::Write, extent(4, 1)), &failed()));
    assert!(known.update(&summary(RequestKind::Read, extent(4, 1)), &failed()));
    assert!(known.has(Lba::new(4)) && !known.has(Lba::new(5)));
    let away: Outcome = Err(ErrorKind::Unreachable { reason: "gone".to_owned() }.into());
    assert!(!known.update(&summary(RequestKind::Read, extent(5, 1)), &away));
}

#[test]
fn an_overflow_is_reported() {
    let known = DamageList::default();
    let max_runs = MAX_BAD_BLOCKS as u64;
    let write_uncorrectable = summary(RequestKind::WriteUncorrectable, extent(0, max_runs));
    assert!(!known.update(&write_uncorrectable, &Ok(Response::Done)), "no event for what a host did itself");
    assert!(!known.summary().overflowed);
    assert!(known.runs(extent(0, 8), 8).1);
    assert!(!known.record(&[bad_block(max_runs, BadBlockCause::Media)]), "there is no room");
    let summary = known.summary();
    assert_eq!((summary.blocks, summary.overflowed, summary.runs.len()), (MAX_BAD_BLOCKS, true, 1));
    assert!(!known.runs(extent(0, 8), 8).1, "the list may be incomplete");
    assert!(known.damage_log(1).overflowed && known.damage_log(1).entries[0].write_uncorrectable);
}

#[test]
fn an_overflow_ends_after_checks_of_all_blocks_that_find_no_more_than_fit() {
    let known = DamageList::default();
    let max_runs = MAX_BAD_BLOCKS as u64;
    let good = || Ok(Response::Verified(VerifyStats::default()));
    let verify = |known: &DamageList, at| known.update(&summary(RequestKind::Verify, at), &good());
    known.update(&summary(RequestKind::WriteUncorrectable, extent(0, max_runs + 1)), &Ok(Response::Done));
    assert!(known.summary().overflowed);
    // The overflow stays after a host writes them: the dropped block is unknown.
    known.clear(extent(0, max_runs + 1));
    assert!(known.summary().overflowed && known.summary().blocks == 0);
    verify(&known, extent(max_runs, max_runs));
    verify(&known, extent(0, max_runs - 1));
    assert!(known.summary().overflowed, "one block is left out");
    let read = RequestSummary { kind: RequestKind::Read, ..summary(RequestKind::Read, extent(max_runs - 1, 1)) };
    known.update(&read, &Ok(Response::Done));
    let mut coverage = sealblock_block::Coverage::default();
    let unseen = sealblock_block::Unchecked::new(extent(max_runs - 1, 1), sealblock_block::WhyUnchecked::Absent);
    coverage.add(unseen);
    let incomplete = Ok(Response::Verified(VerifyStats { coverage, ..VerifyStats::default() }));
    known.update(&summary(RequestKind::Verify, extent(max_runs - 1, 1)), &incomplete);
    assert!(known.summary().overflowed, "a read of one copy, and a check that did not see all are no scans");
    verify(&known, extent(max_runs - 1, 1));
    assert!(!known.summary().overflowed && known.is_empty());

    // A scan that finds more than fits does not end it.
    known.record(&(0..=max_runs).map(|lba| bad_block(lba, BadBlockCause::Media)).collect::<Vec<_>>());
    let bad = (max_runs - 4..max_runs).map(|lba| bad_block(lba, BadBlockCause::Media)).collect();
    known.update(&summary(RequestKind::Verify, extent(0, max_runs)), &failed(bad));
    assert!(known.summary().overflowed);
    known.update(
        &summary(RequestKind::Verify, extent(max_runs, max_runs)),
        &failed(vec![bad_block(max_runs, BadBlockCause::Media)]),
    );
    assert!(!known.summary().overflowed, "now all blocks were looked at, and five are bad");
    assert_eq!(known.summary().blocks, 5);
}

#[test]
fn what_a_host_did_not_expect_neither_enters_the_list_nor_leaves_it() {
    let known = DamageList::default();
    known.record(&[bad_block(1, BadBlockCause::Tag(Field::Guard))]);
    for field in [Field::Guard, Field::AppTag, Field::RefTag, Field::StorageTag] {
        for kind in RequestKind::ALL {
            let unexpected = ErrorKind::Expectation { lba: Lba::new(3), field, expected: 1, actual: 2 };
            assert!(!known.update(&summary(kind, extent(3, 1)), &Err(unexpected.into())), "{}", kind.name());
            let unexpected = ErrorKind::Expectation { lba: Lba::new(1), field, expected: 1, actual: 2 };
            assert!(!known.update(&summary(kind, extent(0, 8)), &Err(unexpected.into())), "{}", kind.name());
        }
    }
    assert_eq!(lbas(&known), [1]);
}

#[derive(Clone, Debug)]
enum Step {
    Bad(u64, u64, u64, usize),
    Good(u64, u64),
    Repaired(usize, u64, u64),
    Spoiled(u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..56_u64, 1..8_u64);
    prop_oneof![
        (range(), 0..8_u64, 0..5_usize).prop_map(|((start, len), at, field)| Step::Bad(start, len, at % len, field)),
        range().prop_map(|(start, len)| Step::Good(start, len)),
        (0..3_usize, range()).prop_map(|(kind, (start, len))| Step::Repaired(kind, start, len)),
        range().prop_map(|(start, len)| Step::Spoiled(start, len)),
    ]
}

/// One step, executed by the set and by a table that says for each block what is wrong with it.
fn take(known: &DamageList, table: &mut [Option<BadBlockCause>; 64], step: Step) {
    let covered = |info: &Option<BadBlockCause>| {
        // The device finds what is wrong with its own tags, whatever the request expects.
        info.is_some()
    };
    let part = |start: u64, len: u64| start as usize..(start + len) as usize;
    match step {
        Step::Bad(start, len, at, field) => {
            let bad = start + at;
            let outcome = failed(vec![bad_block(bad, FIELDS[field])]);
            let is_new = table[bad as usize].is_none();
            assert_eq!(known.update(&summary(RequestKind::Read, extent(start, len)), &outcome), is_new);
            table[part(start, len)].iter_mut().filter(|info| covered(info)).for_each(|info| *info = None);
            table[bad as usize] = Some(FIELDS[field]);
        }
        Step::Good(start, len) => {
            let good = Ok(Response::Verified(VerifyStats::default()));
            known.update(&summary(RequestKind::Verify, extent(start, len)), &good);
            table[part(start, len)].iter_mut().filter(|info| covered(info)).for_each(|info| *info = None);
        }
        Step::Repaired(kind, start, len) => {
            let kind = [RequestKind::Write, RequestKind::WriteZeroes, RequestKind::Discard][kind];
            known.update(&summary(kind, extent(start, len)), &Ok(Response::Done));
            table[part(start, len)].fill(None);
        }
        Step::Spoiled(start, len) => {
            known.update(&summary(RequestKind::WriteUncorrectable, extent(start, len)), &Ok(Response::Done));
            table[part(start, len)].fill(Some(BadBlockCause::Media));
        }
    }
}

proptest! {
    #[test]
    fn the_set_is_what_a_table_of_all_blocks_would_be(steps in proptest::collection::vec(step(), 1..60)) {
        let known = DamageList::default();
        let mut table = [None; 64];
        for step in steps {
            take(&known, &mut table, step);
            let expected: Vec<u64> = (0..64).filter(|lba| table[*lba as usize].is_some()).collect();
            prop_assert_eq!(lbas(&known), expected);
            prop_assert_eq!(known.is_empty(), table.iter().all(Option::is_none));
            let (runs, complete) = known.runs(extent(0, 64), usize::MAX);
            prop_assert!(complete);
            let in_runs: Vec<u64> = runs.iter().flat_map(|run| run.extent.iter()).map(Lba::get).collect();
            prop_assert_eq!(in_runs, lbas(&known));
        }
    }

    #[test]
    fn known_blocks_may_be_shared_between_threads(lbas in proptest::collection::vec(0..64_u64, 1..8)) {
        fn shareable<T: Send + Sync>(value: T) -> T { value }
        let known = shareable(DamageList::default());
        std::thread::scope(|scope| {
            for lba in &lbas {
                scope.spawn(|| known.record(&[bad_block(*lba, BadBlockCause::Media)]));
            }
        });
        let distinct: std::collections::BTreeSet<_> = lbas.iter().collect();
        prop_assert_eq!(known.summary().blocks, distinct.len());
    }
}
