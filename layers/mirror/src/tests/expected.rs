//! Reads and checks that expect tags, where a replica has lost a write: it holds the older block, which is good by itself.

use futures_util::FutureExt;
use sealblock_block::{BadBlock, BadBlockCause, Device, Expectations, Request};
use sealblock_integrity::{Checks, Field, Masked, Tuple};
use sealblock_media_memory::Corruption;
use sealblock_units::{Extent, Lba};

use super::*;

const FORMAT: PiFormat = match PiFormat::new(GuardKind::Crc64, ProtectionType::Type1, 16) {
    Ok(format) => format,
    Err(_) => panic!("16 bits are a storage tag"),
};

/// What a reader expects that knows the number of the last write to these blocks.
fn tag(write: u16) -> Expectations {
    Expectations::new(Checks {
        app_tag: Some(Masked { expected: write, mask: u16::MAX }),
        storage_tag: Some(Masked { expected: u64::from(write) + 100, mask: u64::MAX }),
        checks_escapes: true,
        ..Checks::NONE
    })
}

/// The same, but blocks that were never written pass.
fn lenient(write: u16) -> Expectations {
    Expectations::new(Checks { checks_escapes: false, ..*tag(write).checks() })
}

/// A write with this number: as content and as tags.
fn numbered(at: Extent, write: u16) -> Request {
    let tags = Tags { app_tag: write, storage_tag: u64::from(write) + 100, initial_ref_tag: at.start().get() };
    let data = Sealed::seal(Slice::copy_from(&content(at, write as u8)), BlockSize::B4096, Some(FORMAT), &tags);
    Request::write(at, data, Durability::Volatile)
}

fn put(device: &impl Device, at: Extent, write: u16) {
    run(device, numbered(at, write)).unwrap();
}

fn expect(device: &impl Device, at: Extent, expected: Expectations) -> Result<Vec<u8>, Error> {
    match run(device, Request::read(at, expected))? {
        Response::Data(data) => Ok(data.joined_data().to_vec()),
        other => panic!("no data but {other:?}"),
    }
}

fn unexpected(lba: u64, expected: u16, actual: u16) -> ErrorKind {
    let (expected, actual) = (expected.into(), actual.into());
    ErrorKind::Expectation { lba: Lba::new(lba), field: Field::AppTag, expected, actual }
}

/// The numbers of the writes that blocks hold, by their application tags; the storage tags and the data go with them.
fn numbers(replica: &TestReplica, at: Extent) -> Vec<u16> {
    let Ok(Response::Data(data)) = run(&*replica.memory, Request::read(at, Expectations::NONE)) else {
        panic!("{} is damaged", replica.name)
    };
    let blocks = at.iter().zip(data.iter());
    let number = |(lba, (block, tuple)): (Lba, (&[u8], &[u8]))| {
        let Tuple { app_tag, storage_tag, .. } = Tuple::read(FORMAT, tuple);
        assert!(app_tag == 0xFFFF || storage_tag == u64::from(app_tag) + 100);
        assert!(app_tag == 0xFFFF || block == content(Extent::one(lba), app_tag as u8), "data of another write");
        app_tag
    };
    blocks.map(number).collect()
}

/// A mirror of so many replicas, of which blocks 0 to 15 were written twice, by write 5 and then by write 6.
fn mirror_of(count: usize) -> (Vec<TestReplica>, TestMirror) {
    let replicas: Vec<_> = ["a", "b", "c"][..count].iter().map(|name| TestReplica::new(name, Some(FORMAT))).collect();
    let mirror = opened(&replicas.iter().collect::<Vec<_>>());
    put(&mirror, extent(0, 16), 5);
    put(&mirror, extent(0, 16), 6);
    (replicas, mirror)
}

fn repaired(mirror: &TestMirror) -> u64 {
    mirror.describe().replicas.iter().map(|replica| replica.repaired_blocks).sum()
}

fn written(replicas: &[TestReplica]) -> u64 {
    replicas.iter().map(|replica| replica.written_blocks.get()).sum()
}

/// A block that a check lists: its replica, the field, and the expected and actual value.
type Listed = (u64, usize, BadBlockCause, Option<u64>, Option<u64>);

fn listed(outcome: Outcome) -> Vec<Listed> {
    let error = outcome.unwrap_err();
    let of = |bad: &BadBlock| {
        (
            bad.lba.get(),
            bad.member.outermost().map_or(usize::MAX, |(number, _)| number),
            bad.cause,
            bad.expected,
            bad.actual,
        )
    };
    error.bad_blocks().unwrap_or_else(|| panic!("{error}")).as_slice().iter().map(of).collect()
}

#[test]
fn a_lost_write_on_one_replica_is_answered_from_another_and_healed_with_data_and_tags() {
    for count in [2, 3] {
        for lost in 0..count {
            for expected in [tag(6), lenient(6)] {
                let (replicas, mirror) = mirror_of(count);
                put(&*replicas[lost].memory, extent(3, 1), 5);
                // Each replica is the first one in turn; but who demands that blocks were written has met the other copy.
                let turns = if expected == tag(6) { 1 } else { 4 };
                for _ in 0..turns {
                    assert!(expect(&mirror, extent(0, 16), expected).unwrap() == content(extent(0, 16), 6));
                }
                assert_eq!(repaired(&mirror), 1);
                for replica in &replicas {
                    assert_eq!(numbers(replica, extent(0, 16)), [6; 16], "{}", replica.name);
                }
                verify(&mirror).unwrap();
                assert_reads(&mirror, extent(0, 16), 6);
            }
        }
    }
}

#[test]
fn a_block_that_a_replica_never_got_is_healed_if_the_reader_demands_that_it_was_written() {
    for lost in 0..2 {
        let (replicas, mirror) = mirror_of(2);
        run(&*replicas[lost].memory, Request::discard([extent(3, 1)])).unwrap();
        assert_eq!(numbers(&replicas[lost], extent(3, 1)), [0xFFFF]);
        // The device checks nothing of such a block.
        for _ in 0..4 {
            expect(&mirror, extent(0, 16), lenient(6)).unwrap();
        }
        assert_eq!(repaired(&mirror), 0);
        for _ in 0..4 {
            assert!(expect(&mirror, extent(0, 16), tag(6)).unwrap() == content(extent(0, 16), 6));
        }
        assert_eq!((repaired(&mirror), numbers(&replicas[lost], extent(0, 16))), (1, vec![6; 16]));
    }
}

#[test]
fn a_block_that_no_replica_has_as_expected_is_named_and_nothing_is_written() {
    for (count, at) in [(2, 4), (3, 15)] {
        let (replicas, mirror) = mirror_of(count);
        replicas.iter().for_each(|replica| put(&*replica.memory, extent(at, 1), 5));
        // Elsewhere a replica could be healed, but the request fails.
        put(&*replicas[0].memory, extent(2, 1), 5);
        let before = written(&replicas);
        for _ in 0..4 {
            let error = expect(&mirror, extent(0, 16), tag(6)).unwrap_err();
            assert_eq!(*error.kind(), unexpected(at, 6, 5));
            assert!(error.device_name().is_some(), "{error}");
        }
        // As when all of them are other than the reader expects.
        assert_eq!(*expect(&mirror, extent(7, 4), tag(7)).unwrap_err().kind(), unexpected(7, 7, 6));
        assert_eq!((repaired(&mirror), written(&replicas)), (0, before));
        assert_eq!(numbers(&replicas[0], extent(0, 3)), [6, 6, 5]);
        (0..count).for_each(|_| drop(expect(&mirror, extent(0, 4), tag(6)).unwrap()));
        assert_eq!(numbers(&replicas[0], extent(0, 3)), [6, 6, 6]);
    }
}

#[test]
fn blocks_that_are_bad_on_different_replicas_are_pieced_together_and_each_is_healed() {
    let rots = |replica: &TestReplica, lba| {
        assert!(replica.memory.device().damage(Lba::new(lba), Corruption::Data { at: 9, mask: 4 }));
    };
    for _ in 0..2 {
        let (replicas, mirror) = mirror_of(2);
        put(&*replicas[0].memory, extent(3, 2), 5);
        put(&*replicas[1].memory, extent(5, 1), 5);
        put(&*replicas[0].memory, extent(15, 1), 5);
        rots(&replicas[0], 9);
        rots(&replicas[1], 1);
        rots(&replicas[1], 0);
        assert!(expect(&mirror, extent(0, 16), tag(6)).unwrap() == content(extent(0, 16), 6));
        assert_eq!(repaired(&mirror), 7);
        for replica in &replicas {
            assert_eq!(numbers(replica, extent(0, 16)), [6; 16], "{}", replica.name);
        }
    }
    // All of one replica.
    let (replicas, mirror) = mirror_of(3);
    put(&*replicas[1].memory, extent(0, 16), 5);
    (0..3).for_each(|_| drop(expect(&mirror, extent(0, 16), tag(6)).unwrap()));
    assert_eq!((repaired(&mirror), numbers(&replicas[1], extent(0, 16))), (16, vec![6; 16]));
}

#[test]
fn a_copy_whose_tag_cannot_be_compared_replaces_none_with_another_tag() {
    let (replicas, mirror) = mirror_of(2);
    let hole = extent(3, 1);
    run(&*replicas[1].memory, Request::discard([hole])).unwrap();
    // The reader is wrong about the number, and would pass the hole.
    let outcomes: Vec<_> = (0..4).map(|_| expect(&mirror, hole, lenient(5))).collect();
    assert!(outcomes.iter().any(|outcome| outcome.is_err()));
    assert_eq!((numbers(&replicas[0], hole), repaired(&mirror)), (vec![6], 0));
    assert_eq!(*expect(&mirror, hole, tag(5)).unwrap_err().kind(), unexpected(3, 5, 6));
    assert_eq!((numbers(&replicas[0], hole), numbers(&replicas[1], hole)), (vec![6], vec![0xFFFF]));
}

#[test]
fn damage_is_not_repaired_from_a_copy_that_is_not_as_expected() {
    let (replicas, mirror) = mirror_of(2);
    assert!(replicas[0].memory.device().damage(Lba::new(3), Corruption::Data { at: 9, mask: 4 }));
    put(&*replicas[1].memory, extent(3, 1), 5);
    let before = written(&replicas);
    for _ in 0..4 {
        assert_eq!(*expect(&mirror, extent(0, 16), tag(6)).unwrap_err().kind(), unexpected(3, 6, 5));
    }
    assert_eq!(written(&replicas), before);
    // What is damaged everywhere is lost, whatever was expected.
    assert!(replicas[1].memory.device().damage(Lba::new(3), Corruption::Data { at: 9, mask: 4 }));
    put(&*replicas[1].memory, extent(5, 1), 5);
    let lost = expect(&mirror, extent(0, 16), tag(6)).unwrap_err();
    assert_eq!(lost.bad_blocks().unwrap().as_slice().iter().map(|bad| bad.lba.get()).collect::<Vec<_>>(), [3]);
    assert_eq!(numbers(&replicas[1], extent(5, 1)), [6], "others are healed");
}

#[test]
fn a_write_that_begins_while_a_replica_is_healed_waits_and_is_the_last_one() {
    let (replicas, mirror) = mirror_of(2);
    let at = extent(3, 1);
    put(&*replicas[0].memory, at, 5);
    // The first replica answers, and the second one keeps the search waiting.
    replicas[1].holds_requests.set(true);
    let mut reader = Box::pin(mirror.execute(Request::read(extent(0, 16), tag(6))));
    while reader.as_mut().now_or_never().is_none() && !mirror.range_lock.is_locked(at.into()) {}
    assert!(mirror.range_lock.is_locked(at.into()), "the search has begun");
    let mut writer = Box::pin(mirror.execute(numbered(at, 7)));
    assert!(writer.as_mut().now_or_never().is_none());
    assert_eq!(numbers(&replicas[0], at), [5], "it waits");
    replicas[1].holds_requests.set(false);
    let found = reader.as_mut().now_or_never().expect("RAM never waits").unwrap();
    assert!(matches!(found, Response::Data(data) if data.joined_data()[..] == content(extent(0, 16), 6)));
    assert_eq!(numbers(&replicas[0], at), [6], "healed");
    writer.as_mut().now_or_never().expect("RAM never waits").unwrap();
    assert_eq!([&replicas[0], &replicas[1]].map(|replica| numbers(replica, at)), [[7], [7]]);
}

#[test]
fn a_write_that_comes_before_the_search_is_not_undone_by_it() {
    let (replicas, mirror) = mirror_of(2);
    let at = extent(3, 1);
    put(&*replicas[0].memory, at, 5);
    let hold = |holds| replicas.iter().for_each(|replica| replica.holds_requests.set(holds));
    hold(true);
    // The reader has asked a replica for the block when the write begins.
    let mut reader = Box::pin(mirror.execute(Request::read(at, lenient(6))));
    assert!(reader.as_mut().now_or_never().is_none());
    let mut writer = Box::pin(mirror.execute(numbered(at, 7)));
    assert!(writer.as_mut().now_or_never().is_none());
    hold(false);
    // It may find the block as it was, or meet the older tag; then it waits for the write.
    let early = reader.as_mut().now_or_never();
    writer.as_mut().now_or_never().expect("RAM never waits").unwrap();
    let before = written(&replicas);
    let found = early.unwrap_or_else(|| reader.as_mut().now_or_never().expect("RAM never waits"));
    match found {
        Ok(Response::Data(data)) => assert!(data.joined_data()[..] == content(at, 6)),
        found => assert_eq!(*found.unwrap_err().kind(), unexpected(3, 6, 7)),
    }
    assert_eq!((written(&replicas), repaired(&mirror)), (before, 0));
    assert_eq!([&replicas[0], &replicas[1]].map(|replica| numbers(replica, at)), [[7], [7]]);
}

#[test]
fn a_conflict_that_a_check_has_found_is_settled_by_the_tag_that_a_reader_expects() {
    let (replicas, mirror) = mirror_of(2);
    put(&*replicas[0].memory, extent(3, 1), 5);
    let conflict = |outcome| listed(outcome).iter().map(|bad| (bad.0, bad.2)).collect::<Vec<_>>();
    assert_eq!(conflict(verify(&mirror)), [(3, BadBlockCause::Conflict)]);
    assert!(read(&mirror, extent(0, 16)).is_err(), "nothing tells which one counts");
    // Hosts that compare nothing but what the device compares anyway, either.
    let guards = Expectations::new(Checks::full(FORMAT, Lba::ZERO));
    let refused = run(&mirror, Request::read(extent(0, 16), guards));
    assert_eq!(conflict(refused), [(3, BadBlockCause::Conflict)]);
    assert_eq!(*expect(&mirror, extent(0, 16), tag(7)).unwrap_err().kind(), unexpected(0, 7, 6));
    assert_eq!(*expect(&mirror, extent(3, 1), tag(7)).unwrap_err().kind(), unexpected(3, 7, 5));
    assert_eq!(repaired(&mirror), 0);
    assert!(expect(&mirror, extent(0, 16), tag(6)).unwrap() == content(extent(0, 16), 6));
    assert_eq!((repaired(&mirror), numbers(&replicas[0], extent(3, 1))), (1, vec![6]));
    assert_reads(&mirror, extent(0, 16), 6);
    verify(&mirror).unwrap();
}

#[test]
fn copies_that_differ_and_are_both_as_expected_stay_a_conflict() {
    let (replicas, mirror) = mirror_of(3);
    put(&*replicas[0].memory, extent(3, 1), 5);
    let tags = Tags { app_tag: 6, storage_tag: 106, initial_ref_tag: 3 };
    let other = Slice::copy_from(&content(extent(3, 1), 9));
    let other = Sealed::seal(other, BlockSize::B4096, Some(FORMAT), &tags);
    run(&*replicas[1].memory, Request::write(extent(3, 1), other, Durability::Volatile)).unwrap();
    verify(&mirror).unwrap_err();
    for _ in 0..3 {
        let refused = listed(run(&mirror, Request::read(extent(0, 16), tag(6))));
        assert_eq!(refused.iter().map(|bad| (bad.0, bad.2)).collect::<Vec<_>>(), [(3, BadBlockCause::Conflict)]);
    }
    assert_eq!(numbers(&replicas[0], extent(3, 1)), [5]);
}

#[test]
fn a_verify_with_expectations_checks_all_replicas_and_names_those_that_are_not_as_expected() {
    let cause = BadBlockCause::Tag(Field::AppTag);
    for count in [2, 3] {
        let (replicas, mirror) = mirror_of(count);
        let ask = |expected| run(&mirror, Request::verify(extent(0, 16), expected));
        let Ok(Response::Verified(found)) = ask(tag(6)) else { panic!("all are as expected") };
        assert!(found.coverage.is_complete() && found.coverage.is_sealed());
        put(&*replicas[0].memory, extent(3, 2), 5);
        put(&*replicas[count - 1].memory, extent(9, 1), 4);
        run(&*replicas[count - 1].memory, Request::discard([extent(15, 1)])).unwrap();
        let before = written(&replicas);
        let last = count - 1;
        let expected = [
            (3, 0, cause, Some(6), Some(5)),
            (4, 0, cause, Some(6), Some(5)),
            (9, last, cause, Some(6), Some(4)),
            (15, last, cause, Some(6), Some(0xFFFF)),
        ];
        assert_eq!(listed(ask(tag(6))), expected);
        // A checksum makes the same checks.
        let checksum = Request::checksum(extent(0, 16), Default::default(), tag(6));
        assert_eq!(listed(run(&mirror, checksum)), expected);
        assert_eq!(written(&replicas), before, "a check changes nothing");
        // Readers that expect nothing get none of the copies that differ.
        assert!(read(&mirror, extent(3, 1)).is_err() && read(&mirror, extent(9, 1)).is_err());
        assert!(expect(&mirror, extent(0, 16), tag(6)).is_ok());
        assert!(ask(tag(6)).is_ok());
        // What none has is the answer to the request, and no damage.
        assert_eq!(*ask(tag(8)).unwrap_err().kind(), unexpected(0, 8, 6));
        replicas.iter().for_each(|replica| put(&*replica.memory, extent(11, 1), 5));
        assert_eq!(*ask(tag(6)).unwrap_err().kind(), unexpected(11, 6, 5));
        assert_reads(&mirror, extent(12, 4), 6);
    }
}

#[test]
fn copies_with_the_same_data_and_other_tags_are_told_apart_too() {
    let (replicas, mirror) = mirror_of(2);
    let tags = Tags { app_tag: 5, storage_tag: 105, initial_ref_tag: 3 };
    let data = Slice::copy_from(&content(extent(3, 1), 6));
    let data = Sealed::seal(data, BlockSize::B4096, Some(FORMAT), &tags);
    run(&*replicas[1].memory, Request::write(extent(3, 1), data, Durability::Volatile)).unwrap();
    let found = listed(run(&mirror, Request::verify(extent(0, 16), tag(6))));
    assert_eq!(found, [(3, 1, BadBlockCause::Tag(Field::AppTag), Some(6), Some(5))]);
    assert_reads(&mirror, extent(0, 16), 6);
    (0..2).for_each(|_| drop(expect(&mirror, extent(0, 16), tag(6)).unwrap()));
    assert_eq!(numbers(&replicas[1], extent(0, 16)), [6; 16]);
}

#[test]
fn a_mirror_that_is_open_for_reading_answers_from_the_right_replica_and_changes_nothing() {
    let (replicas, mirror) = mirror_of(2);
    run(&mirror, Request::flush()).unwrap();
    close(&mirror);
    drop(mirror);
    put(&*replicas[0].memory, extent(3, 1), 5);
    let reader = try_open(&[&replicas[0], &replicas[1]], true).unwrap();
    let before = written(&replicas);
    for is_checked in [false, true] {
        for _ in 0..4 {
            assert!(expect(&reader, extent(0, 16), tag(6)).unwrap() == content(extent(0, 16), 6), "{is_checked}");
        }
        verify(&reader).unwrap_err();
    }
    assert_eq!((written(&replicas), numbers(&replicas[0], extent(3, 1))), (before, vec![5]));
}

#[test]
fn a_replica_that_goes_away_during_the_search_is_left_out() {
    let (replicas, mirror) = mirror_of(3);
    put(&*replicas[0].memory, extent(3, 1), 5);
    replicas[1].is_offline.set(true);
    for _ in 0..4 {
        assert!(expect(&mirror, extent(0, 16), tag(6)).unwrap() == content(extent(0, 16), 6));
    }
    assert_eq!(numbers(&replicas[0], extent(0, 16)), [6; 16]);
    replicas[0].is_offline.set(true);
    assert!(expect(&mirror, extent(0, 16), tag(6)).is_ok());
    assert_eq!(*expect(&mirror, extent(0, 16), tag(7)).unwrap_err().kind(), unexpected(0, 7, 6));
}
