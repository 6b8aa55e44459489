//! Coverage of a verify: a copy that was not checked must never pass for verified.

use futures_util::FutureExt;
use sealblock_block::{Coverage, Device, Error, Expectations, MemberPath, Request, Response, WhyUnchecked};
use sealblock_integrity::ChecksumKind;
use sealblock_units::Lba;

use super::*;
use crate::MirrorState;
use crate::label::ReplicaState;

/// Coverage of a check of all blocks, whatever it finds.
fn coverage_of(device: &impl Device, request: fn(sealblock_units::Extent, Expectations) -> Request) -> Coverage {
    let at = extent(0, device.geometry().capacity_blocks);
    match run(device, request(at, Expectations::NONE)).map_err(Error::into_damage) {
        Ok(Response::Verified(verified)) => verified.coverage,
        Ok(Response::Checksum(checksum)) => checksum.coverage,
        Ok(other) => panic!("no check but {other:?}"),
        Err(Ok((_, coverage))) => coverage,
        Err(Err(error)) => panic!("{error}"),
    }
}

fn verified(device: &impl Device) -> Coverage {
    let coverage = coverage_of(device, Request::verify);
    for checksum in [
        |at, expected| Request::checksum(at, ChecksumKind::Crc64Nvme, expected),
        |at, expected| Request::checksum(at, ChecksumKind::Crc32c, expected),
    ] {
        assert_eq!(coverage, coverage_of(device, checksum), "a checksum goes as far as a verify");
    }
    coverage
}

/// What was not checked: path, first and last block, and why.
fn unchecked_runs(coverage: &Coverage) -> Vec<(MemberPath, u64, u64, WhyUnchecked)> {
    coverage.unchecked().iter().map(|run| (run.member, run.first.get(), run.last.get(), run.why)).collect()
}

fn replica(number: usize) -> MemberPath {
    MemberPath::NONE.within(number)
}

#[test]
fn a_mirror_whose_members_are_all_in_sync_is_checked_to_the_last_block() {
    let (a, _, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 600), 1).unwrap();
    assert_eq!((verified(&mirror), mirror.state()), (Coverage::default(), MirrorState::Optimal));
    assert!(a.memory.device().damage(Lba::new(6), sealblock_media_memory::Corruption::Data { at: 0, mask: 1 }));
    assert!(verified(&mirror).is_complete(), "damage is no want of checking");
    assert_eq!(verify(&mirror).unwrap_err().bad_blocks().unwrap().as_slice().len(), 1);
}

#[test]
fn members_without_seals_are_read_and_have_nothing_to_be_checked_against() {
    let (_, b, mirror) = pair(None);
    write(&mirror, extent(0, 60), 1).unwrap();
    let coverage = verified(&mirror);
    assert!(coverage.is_complete() && !coverage.is_sealed());
    write(&*b.memory, extent(9, 1), 2).unwrap();
    assert_eq!(verify(&mirror).unwrap_err().bad_blocks().unwrap().as_slice()[0].lba, Lba::new(9));
}

#[test]
fn a_member_is_unchecked_while_it_is_away_out_of_sync_and_resynchronised() {
    let (_, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 600), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(3, 1), 2).unwrap();
    assert_eq!(mirror.state(), MirrorState::Degraded);
    assert_eq!(unchecked_runs(&verified(&mirror)), [(replica(1), 0, BLOCKS - 1, WhyUnchecked::Absent)]);

    // Online again and resyncing: all of it is unchecked.
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    assert_eq!(states(&mirror)[1], ReplicaState::Resyncing);
    assert_eq!(unchecked_runs(&verified(&mirror)), [(replica(1), 0, BLOCKS - 1, WhyUnchecked::Resyncing)]);
    assert_eq!(mirror.state(), MirrorState::Degraded);
    resync(&mirror);
    assert_eq!((verified(&mirror), mirror.state()), (Coverage::default(), MirrorState::Optimal));
}

#[test]
fn a_member_that_is_out_of_sync_stays_so_for_a_mirror_that_only_reads() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 600), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(3, 1), 2).unwrap();
    sweep(&mirror);
    mirror.close().now_or_never().unwrap().unwrap();
    b.is_offline.set(false);
    let reader = try_open(&[&a, &b], true).unwrap();
    assert_eq!(unchecked_runs(&verified(&reader)), [(replica(1), 0, BLOCKS - 1, WhyUnchecked::OutOfSync)]);
    assert_eq!(reader.state(), MirrorState::Degraded);
}

#[test]
fn what_a_crash_has_left_unsettled_is_incomplete_and_settled_it_is_clean() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(256, 4), 1).unwrap();
    // A crash: the mirror was not closed, and its labels mark a region dirty.
    drop(mirror);
    let reader = try_open(&[&a, &b], true).unwrap();
    assert_eq!(unchecked_runs(&verified(&reader)), [(MemberPath::NONE, 256, 511, WhyUnchecked::Unsettled)]);
    assert_eq!(reader.state(), MirrorState::Degraded);

    let mirror = opened(&[&a, &b]);
    assert!(matches!(repair(&mirror), Ok(Response::Verified(of)) if of.coverage.is_complete()), "settled first");
    resync(&mirror);
    assert_eq!((verified(&mirror), mirror.state()), (Coverage::default(), MirrorState::Optimal));
}

#[test]
fn a_mirror_that_only_reads_does_not_answer_now_from_the_one_and_now_from_the_other() {
    for is_read_before in [true, false] {
        let (a, b, mirror) = pair(Some(TYPE1));
        write(&mirror, extent(0, 600), 1).unwrap();
        // A write that was in flight to both replicas at the crash, and reached one of them.
        write(&*a.memory, extent(300, 4), 2).unwrap();
        std::mem::forget(mirror);
        assert!(a.memory.device().damage(Lba::new(9), sealblock_media_memory::Corruption::Data { at: 0, mask: 1 }));
        let reader = try_open(&[&b, &a], true).unwrap();
        assert!(reader.describe().dirty_bytes > 0);
        if is_read_before {
            assert_reads(&reader, extent(300, 4), 1);
            assert_reads(&reader, extent(0, 20), 1);
        }
        b.is_offline.set(true);
        match is_read_before {
            true => {
                let error = read(&reader, extent(300, 4)).unwrap_err().to_string();
                assert!(error.contains("open the mirror for writing"), "{error}");
            }
            false => assert_reads(&reader, extent(300, 4), 2),
        }
        read(&reader, extent(1024, 4)).unwrap();
    }
}

#[test]
fn a_member_that_fails_without_naming_blocks_is_not_taken_for_clean() {
    for is_lost in [false, true] {
        let (_, b, mirror) = pair(Some(TYPE1));
        write(&mirror, extent(0, 600), 1).unwrap();
        if is_lost {
            b.is_offline.set(true)
        } else {
            b.hides_bad_blocks.set(true)
        }
        let coverage = coverage_of(&mirror, Request::verify);
        assert_eq!(unchecked_runs(&coverage), [(replica(1), 0, BLOCKS - 1, WhyUnchecked::Failed)]);
        assert!(matches!(repair(&mirror), Ok(Response::Verified(of)) if of.coverage.blocks() == BLOCKS));
    }
}

#[test]
fn a_degraded_mirror_within_a_mirror_is_reported_with_the_path_of_its_replica() {
    let (a, b) = (TestReplica::new("a", Some(TYPE1)), TestReplica::new("b", Some(TYPE1)));
    let inner = opened(&[&a, &b]);
    let c = TestReplica::new("c", Some(TYPE1));
    let source = |name: &str, device| crate::ReplicaSource::new(name, Ok(device), None);
    let within = sealblock_block::DynDevice::new("inner", inner.clone());
    let options = crate::OpenOptions { is_read_only: false, accepts_lost_label: false, random: [9; 16] };
    let outer = crate::open(vec![source("inner", within), source("c", c.stack())], StoppedClock, options);
    let outer = outer.now_or_never().unwrap().unwrap().mirror;
    write(&outer, extent(0, 60), 1).unwrap();
    assert_eq!(verified(&outer), Coverage::default());
    b.is_offline.set(true);
    write(&outer, extent(0, 6), 2).unwrap();
    let at = replica(1).within(0);
    assert_eq!(unchecked_runs(&verified(&outer)), [(at, 0, BLOCKS - 1, WhyUnchecked::Absent)]);
}
