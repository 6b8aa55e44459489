//! What is added to a list of bad blocks, what removes it, and what remains if there is no room.

use sealblock_integrity::{Field, Sealed, Tags};
use sealblock_runtime_memory::Buffer;
use sealblock_units::{BlockSize, Lba};

use super::*;
use crate::{BadBlocks, Coverage, Durability, Expectations, Salvaged, Unchecked, VerifyStats, WhyUnchecked};

const BLOCKS: u64 = 1 << 30;
const GUARD: BadBlockCause = BadBlockCause::Tag(Field::Guard);

fn extent(first: u64, blocks: u64) -> Extent {
    Extent::from_raw(first, blocks).unwrap()
}

fn bad(lbas: &[u64]) -> Vec<BadBlock> {
    lbas.iter().map(|lba| BadBlock::new(Lba::new(*lba), GUARD, Some(1), Some(2))).collect()
}

fn failed(lbas: &[u64]) -> Outcome {
    Err(BadBlocks::new(bad(lbas)).unwrap().into())
}

fn verified() -> Outcome {
    Ok(Response::Verified(VerifyStats::default()))
}

fn watched(request: &Request, copies: bool) -> WatchedRequest {
    WatchedRequest::of(request, copies)
}

fn observe(record: &DamageRecord, request: &Request, outcome: &Outcome) {
    record.observe(&watched(request, false), outcome);
}

fn verify(first: u64, blocks: u64) -> Request {
    Request::verify(extent(first, blocks), Expectations::NONE)
}

fn zero(first: u64, blocks: u64) -> Request {
    Request::write_zeroes(extent(first, blocks), true, Durability::Volatile)
}

fn listed(record: &DamageRecord) -> Vec<(u64, u64, u64)> {
    record.runs().iter().map(|run| (run.first, run.last, run.bad_blocks)).collect()
}

fn count(record: &DamageRecord) -> DamageCount {
    let mut count = DamageCount::default();
    record.runs().iter().for_each(|run| count.add(run));
    count
}

#[test]
fn only_what_happens_to_a_block_of_this_device_removes_it() {
    let record = DamageRecord::new(BLOCKS);
    observe(&record, &verify(0, 100), &failed(&[3, 5, 9]));
    assert_eq!(listed(&record), [(3, 3, 1), (5, 5, 1), (9, 9, 1)]);
    assert_eq!(record.runs()[0].values, Some((1, 2)));
    let read = Request::read(extent(0, 5), Expectations::NONE);
    record.observe(&watched(&read, true), &Ok(Response::Done));
    assert_eq!(record.runs().len(), 3, "a read of a device with copies sees one of them");
    let mut coverage = Coverage::default();
    coverage.add(Unchecked::new(extent(0, 1), WhyUnchecked::Absent));
    let partly = Ok(Response::Verified(VerifyStats { coverage, ..VerifyStats::default() }));
    observe(&record, &verify(0, 100), &partly);
    observe(&record, &zero(0, 100), &Err(ErrorKind::ReadOnly.into()));
    observe(&record, &Request::flush(), &Ok(Response::Done));
    assert_eq!(record.runs().len(), 3, "none of these says anything of the blocks");
    observe(&record, &read, &Ok(Response::Done));
    assert_eq!(listed(&record), [(5, 5, 1), (9, 9, 1)], "a read that checks is a check");
    observe(&record, &zero(5, 1), &Ok(Response::Done));
    observe(&record, &Request::discard([extent(9, 1), extent(20, 1)]), &Ok(Response::Done));
    assert!(record.is_empty());
}

#[test]
fn what_a_host_did_not_expect_neither_enters_nor_leaves_the_record() {
    let record = DamageRecord::new(BLOCKS);
    record.add(&bad(&[1]));
    for field in [Field::Guard, Field::AppTag, Field::RefTag, Field::StorageTag] {
        for lba in [1, 3] {
            let unexpected = ErrorKind::Expectation { lba: Lba::new(lba), field, expected: 1, actual: 2 };
            observe(&record, &verify(0, 8), &Err(unexpected.clone().into()));
            observe(&record, &Request::read(extent(lba, 1), Expectations::NONE), &Err(unexpected.into()));
        }
    }
    assert_eq!(listed(&record), [(1, 1, 1)]);
}

#[test]
fn bad_blocks_of_which_something_is_left_are_bad() {
    let record = DamageRecord::new(BLOCKS);
    let salvage = Request::salvage(extent(0, 8));
    let none = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
    let blocks = Sealed::seal(Buffer::zeroed(8 * 512).freeze(), BlockSize::B512, None, &none);
    let salvaged = |lbas| Ok(Response::Salvaged(Salvaged { blocks: blocks.clone(), bad_blocks: bad(lbas) }));
    observe(&record, &salvage, &salvaged(&[]));
    assert!(record.is_empty());
    observe(&record, &salvage, &salvaged(&[2, 4]));
    assert_eq!(listed(&record), [(2, 2, 1), (4, 4, 1)]);
}

#[test]
fn a_check_removes_what_it_finds_good_and_keeps_what_it_finds_bad() {
    let record = DamageRecord::new(BLOCKS);
    observe(&record, &verify(0, 100), &failed(&[3, 5, 50]));
    observe(&record, &verify(0, 20), &failed(&[5, 7]));
    assert_eq!(listed(&record), [(5, 5, 1), (7, 7, 1), (50, 50, 1)]);
    let additions = record.additions();
    observe(&record, &verify(0, 20), &failed(&[5, 7]));
    assert_eq!(record.additions(), additions, "the same again is no news");
    observe(&record, &verify(0, 100), &verified());
    assert!(record.is_empty());
    // A medium that names no block is conclusive only for a single one.
    let media = || Err(ErrorKind::Media { reason: "gone".to_owned() }.into());
    observe(&record, &verify(0, 2), &media());
    assert!(record.is_empty());
    observe(&record, &verify(1, 1), &media());
    assert_eq!(record.runs()[0].cause, BadBlockCause::Media);
    observe(&record, &verify(0, 4), &Err(ErrorKind::Unreachable { reason: "away".to_owned() }.into()));
    assert_eq!(listed(&record), [(1, 1, 1)]);
}

#[test]
fn what_a_host_made_unreadable_is_no_damage_until_it_fails_otherwise() {
    let record = DamageRecord::new(BLOCKS);
    observe(&record, &Request::write_uncorrectable(extent(10, 4), Durability::Volatile), &Ok(Response::Done));
    observe(&record, &verify(12, 1), &Err(BadBlocks::new(vec![BadBlock::media(Lba::new(12))]).unwrap().into()));
    assert_eq!(count(&record), DamageCount { least: 0, most: 0, made: 4 });
    observe(&record, &zero(11, 1), &Ok(Response::Done));
    assert_eq!(listed(&record), [(10, 10, 1), (12, 13, 2)]);
}

#[test]
fn twenty_thousand_bad_blocks_that_are_all_rewritten_are_none() {
    let record = DamageRecord::new(BLOCKS);
    let lbas: Vec<u64> = (0..20_000).map(|n| n * 3).collect();
    record.add(&bad(&lbas));
    assert_eq!(count(&record), DamageCount { least: 20_000, most: 20_000, made: 0 });
    lbas.iter().for_each(|lba| observe(&record, &zero(*lba, 1), &Ok(Response::Done)));
    assert!(record.is_empty() && record.runs().is_empty());
}

#[test]
fn without_room_runs_are_coarse_and_nothing_is_dropped() {
    let record = DamageRecord::new(BLOCKS);
    let lbas: Vec<u64> = (0..MAX_DAMAGE_RUNS as u64 + 10).map(|n| n * 2 + n / 1000 * 500).collect();
    record.add(&bad(&lbas));
    let all = count(&record);
    assert_eq!(all.least, lbas.len() as u64, "each is still counted");
    assert!(all.most > all.least && record.runs().len() <= MAX_DAMAGE_RUNS);
    let runs = record.runs();
    let has = |lba: &u64| runs[runs.partition_point(|run| run.last < *lba)].first <= *lba;
    assert!(lbas.iter().all(has));
    // A rewritten block of a coarse run may have been its bad one.
    let coarse = *record.runs().iter().find(|run| run.is_coarse()).unwrap();
    observe(&record, &zero(coarse.first, 1), &Ok(Response::Done));
    assert_eq!(count(&record).least, all.least - 1);
    observe(&record, &zero(0, 1 << 20), &Ok(Response::Done));
    assert!(record.is_empty());
}

#[test]
fn the_smallest_gaps_are_given_up_first() {
    let runs = |all: &[(u64, u64)]| -> Vec<DamageRun> {
        all.iter().map(|(first, last)| DamageRun::exact(*first, *last, GUARD)).collect()
    };
    let of = |all: &[(u64, u64)], max| -> Vec<(u64, u64, u64)> {
        coarsen(runs(all), max).iter().map(|run| (run.first, run.last, run.bad_blocks)).collect()
    };
    let all = [(0, 0), (1, 1), (10, 10), (12, 12), (40, 40), (45, 45), (50, 50)];
    assert_eq!(of(&all, 6), [(0, 1, 2), (10, 10, 1), (12, 12, 1), (40, 40, 1), (45, 45, 1), (50, 50, 1)]);
    assert_eq!(of(&all, 5), [(0, 1, 2), (10, 12, 2), (40, 40, 1), (45, 45, 1), (50, 50, 1)]);
    assert_eq!(of(&all, 4), [(0, 1, 2), (10, 12, 2), (40, 45, 2), (50, 50, 1)]);
    assert_eq!(of(&all, 1), [(0, 50, 7)]);
    let made = DamageRun { is_made: true, ..DamageRun::exact(2, 2, GUARD) };
    let kept = coarsen(vec![runs(&all)[0], made, runs(&all)[3]], 2);
    assert_eq!(
        kept.iter().filter(|run| run.is_made).count(),
        0,
        "counted as bad where there is no other way: {kept:?}"
    );
    let part = DamageRun { bad_blocks: 3, ..DamageRun::exact(0, 9, GUARD) };
    assert_eq!((part.part(0, 8).bad_blocks, part.part(0, 1).bad_blocks), (2, 0));
}

#[test]
fn a_full_check_makes_a_coarse_run_exact_and_a_read_counts_no_block_twice() {
    let record = DamageRecord::new(BLOCKS);
    record.restore(&[DamageRun { bad_blocks: 3, ..DamageRun::exact(10, 99, GUARD) }]);
    let read = Request::read(extent(12, 1), Expectations::NONE);
    record.observe(&watched(&read, true), &failed(&[12]));
    assert_eq!(listed(&record), [(10, 99, 3)], "it may be one of the three");
    let additions = record.additions();
    observe(&record, &verify(0, 64), &failed(&[10, 12, 40]));
    let rest = (64, 99, 0);
    assert_eq!(listed(&record), [(10, 10, 1), (12, 12, 1), (40, 40, 1), rest]);
    observe(&record, &verify(64, 64), &failed(&[70]));
    assert_eq!(listed(&record), [(10, 10, 1), (12, 12, 1), (40, 40, 1), (70, 70, 1)]);
    assert_eq!(count(&record), DamageCount { least: 4, most: 4, made: 0 });
    assert_eq!(record.additions(), additions, "all were in the run");
    // What a host made unreadable stays so, but for a block that is bad in another way.
    let record = DamageRecord::new(BLOCKS);
    let made = DamageRun { is_made: true, bad_blocks: 2, ..DamageRun::exact(0, 9, BadBlockCause::Media) };
    record.restore(&[made]);
    let media = BadBlock::media(Lba::new(3));
    observe(&record, &verify(0, 10), &Err(BadBlocks::new(vec![media, bad(&[5])[0]]).unwrap().into()));
    assert_eq!(count(&record), DamageCount { least: 1, most: 1, made: 1 });
}

#[test]
fn a_bad_block_in_a_run_that_may_be_good_is_at_least_one() {
    let record = DamageRecord::new(BLOCKS);
    record.restore(&[DamageRun { bad_blocks: 0, ..DamageRun::exact(10, 99, GUARD) }]);
    record.add(&bad(&[50, 60]));
    assert_eq!(listed(&record), [(10, 99, 1)]);
    let made = DamageRun { is_made: true, bad_blocks: 2, ..DamageRun::exact(200, 209, BadBlockCause::Media) };
    record.restore(&[made]);
    record.add(&bad(&[205]));
    assert_eq!(count(&record).least, 2, "a wrong guard is not what a host made");
}

#[test]
fn a_stored_list_adds_to_what_is_listed_and_replaces_none_of_it() {
    let record = DamageRecord::new(BLOCKS);
    record.add(&bad(&[12, 15]));
    record.restore(&[DamageRun::exact(10, 12, GUARD), DamageRun { bad_blocks: 4, ..DamageRun::exact(14, 19, GUARD) }]);
    assert_eq!(listed(&record), [(10, 11, 2), (12, 12, 1), (14, 14, 0), (15, 15, 1), (16, 19, 2)]);
}

#[test]
fn lists_of_copies_are_merged_to_bounds_of_all_of_them() {
    let coarse = |first, last, bad_blocks| DamageRun { bad_blocks, ..DamageRun::exact(first, last, GUARD) };
    let made = |first, last| DamageRun { is_made: true, ..DamageRun::exact(first, last, BadBlockCause::Media) };
    let of = |runs: &[DamageRun]| -> Vec<(u64, u64, u64, bool)> {
        merge_runs(runs.to_vec()).iter().map(|run| (run.first, run.last, run.bad_blocks, run.is_made)).collect()
    };
    let one = |lba| DamageRun::exact(lba, lba, GUARD);
    assert_eq!(of(&[coarse(0, 9, 1), one(3), one(5), one(7), one(20)]), [(0, 9, 3, false), (20, 20, 1, false)]);
    assert_eq!(of(&[coarse(0, 9, 2), coarse(5, 14, 8), one(14)]), [(0, 9, 3, false), (10, 14, 3, false)]);
    assert_eq!(of(&[one(4), one(4)]), [(4, 4, 1, false)], "two copies of one block");
    // A block that is bad on one replica is damage, also where a host made it unreadable on another one.
    assert_eq!(of(&[made(0, 9), one(5)]), [(0, 4, 5, true), (5, 5, 1, false), (6, 9, 4, true)]);
    assert_eq!(of(&[made(3, 6), coarse(0, 4, 1)]), [(0, 4, 1, false), (5, 6, 2, true)]);
}

#[test]
fn blocks_beyond_the_end_are_none() {
    let record = DamageRecord::new(100);
    record.add(&bad(&[5, 99, 100, 200]));
    assert_eq!(listed(&record), [(5, 5, 1), (99, 99, 1)]);
    record.resize(50);
    record.add(&bad(&[60]));
    assert_eq!(listed(&record), [(5, 5, 1)]);
    let generation = record.generation();
    record.restore(&[DamageRun::exact(40, 70, GUARD), DamageRun::exact(80, 90, GUARD)]);
    assert_eq!((listed(&record), record.generation()), (vec![(5, 5, 1), (40, 49, 10)], generation));
    record.clear(extent(0, 45));
    assert_eq!(listed(&record), [(45, 49, 5)]);
}

#[test]
fn a_block_is_found_in_runs_from_their_first_to_their_last_block() {
    let runs = [DamageRun::exact(3, 5, BadBlockCause::Media), DamageRun::exact(9, 9, BadBlockCause::Media)];
    let found: Vec<u64> = (0..12).filter(|lba| has_block(&runs, *lba)).collect();
    assert_eq!(found, [3, 4, 5, 9]);
    assert!(!has_block(&[], 0));
}

#[test]
fn a_lost_list_is_whole_again_once_every_block_was_checked_or_written() {
    let lost = || {
        let record = DamageRecord::new(1000);
        record.forget_from(0);
        record
    };
    let record = lost();
    assert_eq!((record.forgotten_from(), record.is_empty(), record.generation()), (Some(0), false, 0));
    observe(&record, &verify(0, 100), &verified());
    observe(&record, &verify(900, 100), &failed(&[950]));
    observe(&record, &zero(400, 100), &Ok(Response::Done));
    observe(&record, &verify(100, 300), &verified());
    let generation = record.generation();
    assert_eq!((record.forgotten_from(), listed(&record)), (Some(500), vec![(950, 950, 1)]));
    observe(&record, &verify(500, 400), &verified());
    assert_eq!((record.forgotten_from(), record.generation()), (None, generation + 1), "that it is whole is saved");
    assert_eq!(listed(&record), [(950, 950, 1)]);
    // What checks no block, or not every copy of it, does not make it known.
    let record = lost();
    let mut unchecked = Coverage::of(true);
    unchecked.add(Unchecked::new(extent(0, 1000), WhyUnchecked::LogLost));
    let incomplete = VerifyStats { coverage: unchecked, ..VerifyStats::default() };
    observe(&record, &verify(0, 1000), &Ok(Response::Verified(incomplete)));
    record.observe(&watched(&Request::read(extent(0, 1000), Expectations::NONE), true), &Ok(Response::Done));
    observe(&record, &verify(0, 1000), &Err(ErrorKind::Media { reason: "gone".to_owned() }.into()));
    assert_eq!(record.forgotten_from(), Some(0));
    // A block that cannot be read is known to be bad.
    observe(&record, &verify(0, 1), &Err(ErrorKind::Media { reason: "gone".to_owned() }.into()));
    assert_eq!((record.forgotten_from(), count(&record).least), (Some(1), 1));
    record.resize(1);
    assert_eq!(record.forgotten_from(), None, "the others do not exist any more");
    assert_eq!(DamageRecord::new(1000).forgotten_from(), None);
}

#[test]
fn checks_in_any_order_forget_nothing_for_good() {
    let record = DamageRecord::new(1000);
    record.forget_from(0);
    for lba in (1..1000).step_by(2) {
        observe(&record, &verify(lba, 1), &verified());
    }
    assert_eq!(record.forgotten_from(), Some(0));
    for first in (0..1000).step_by(10) {
        assert_eq!(record.forgotten_from(), Some(first));
        observe(&record, &verify(first, 10), &verified());
    }
    assert_eq!(record.forgotten_from(), None);
}
