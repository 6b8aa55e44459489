//! Bad blocks on replicas: read from another one, repaired, and never invented.

use sealblock_block::{Ability, BadBlock, BadBlockCause, Device, Expectations, Request, RequestKind};
use sealblock_integrity::{Checks, Field, GuardKind, PiFormat, ProtectionType};
use sealblock_media_memory::Corruption;
use sealblock_units::{Extent, Lba};

use super::*;

/// Corrupts blocks of a replica, in turn in data, guard and reference tag.
fn damage(replica: &TestReplica, lbas: impl Iterator<Item = u64>) {
    for (at, lba) in lbas.enumerate() {
        let kind = match at % 3 {
            0 => Corruption::Data { at: at * 97, mask: 0x10 },
            1 => Corruption::Tag { at: 0, mask: 1 },
            _ => Corruption::Tag { at: 15, mask: 1 },
        };
        assert!(replica.memory.device().damage(Lba::new(lba), kind));
    }
}

fn found(outcome: sealblock_block::Outcome) -> Vec<BadBlock> {
    outcome.unwrap_err().bad_blocks().expect("an integrity error").as_slice().to_vec()
}

/// Block, replica, and whether it was repaired.
fn brief(bad_blocks: &[BadBlock]) -> Vec<(u64, usize, bool)> {
    bad_blocks.iter().map(|bad| (bad.lba.get(), bad.member.outermost().unwrap().0, bad.repaired)).collect()
}

#[test]
fn reads_that_expect_nothing_repair_bad_blocks_on_either_replica_from_the_other() {
    for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
        let format = PiFormat::with_default_storage_tag(guard, ProtectionType::Type1);
        let (a, b, mirror) = pair(Some(format));
        write(&mirror, extent(0, 300), 1).unwrap();
        let flip = |replica: &TestReplica, lba| {
            replica.memory.device().damage(Lba::new(lba), Corruption::Data { at: 9, mask: 4 })
        };
        assert!(flip(&a, 10) && flip(&a, 299) && flip(&b, 11) && flip(&b, 0));
        // Reads balance over the replicas, so that each is first in turn.
        for _ in 0..4 {
            assert_reads(&mirror, extent(0, 300), 1);
        }
        for replica in [&a, &b] {
            verify(&*replica.memory).unwrap();
        }
        let repaired: u64 = mirror.describe().replicas.iter().map(|replica| replica.repaired_blocks).sum();
        assert_eq!(repaired, 4);
    }
}

#[test]
fn tags_come_from_the_good_replica_as_they_were() {
    let (a, _, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(7, 1), 1).unwrap();
    let read = || match run(&*a.memory, Request::read(extent(7, 1), Expectations::NONE)) {
        Ok(sealblock_block::Response::Data(data)) => data.joined_tags().to_vec(),
        other => panic!("no data but {other:?}"),
    };
    let before = read();
    damage(&a, [7].into_iter());
    repair(&mirror).unwrap_err();
    assert_eq!(read(), before, "the application tag too");
}

/// A mirror that a crash has left to be compared, and on one replica a block of it is bad.
fn crashed_and_damaged(is_first: bool) -> (TestReplica, TestReplica) {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 8), 1).unwrap();
    drop(mirror);
    damage(if is_first { &a } else { &b }, [5].into_iter());
    (a, b)
}

#[test]
fn damage_that_a_comparison_after_a_crash_repairs_is_counted_and_named_once() {
    for is_first in [true, false] {
        let (a, b) = crashed_and_damaged(is_first);
        let mirror = opened(&[&a, &b]);
        assert!(mirror.is_nosync(extent(5, 1)));
        resync(&mirror);
        assert!(!mirror.is_nosync(extent(5, 1)));
        let of = usize::from(!is_first);
        let repaired: Vec<_> = mirror.describe().replicas.iter().map(|replica| replica.repaired_blocks).collect();
        assert_eq!(repaired[of], 1, "{repaired:?}");
        verify(&mirror).unwrap();
        assert_eq!(brief(&found(repair(&mirror))), [(5, of, true)]);
        repair(&mirror).unwrap();
        assert_reads(&mirror, extent(0, 8), 1);
    }
}

#[test]
fn a_read_only_mirror_after_a_crash_calls_no_block_lost_that_another_replica_has() {
    let (a, b) = crashed_and_damaged(true);
    let mirror = try_open(&[&a, &b], true).unwrap();
    let cause = |bad: Vec<BadBlock>| bad.iter().map(|bad| (bad.lba.get(), bad.cause)).collect::<Vec<_>>();
    let bad = found(read(&mirror, extent(0, 8)).map(|_| Response::Done));
    assert!(bad[0].to_string().contains("open the mirror for writing"), "{bad:?}");
    assert_eq!(cause(bad), [(5, BadBlockCause::Unsettled)]);
    assert_reads(&mirror, extent(6, 2), 1);
    // Twins: what is bad on the other one only, and what none has.
    damage(&b, [5].into_iter());
    assert_ne!(cause(found(read(&mirror, extent(0, 8)).map(|_| Response::Done))), [(5, BadBlockCause::Unsettled)]);
    let (a, b) = crashed_and_damaged(false);
    assert_reads(&try_open(&[&a, &b], true).unwrap(), extent(0, 8), 1);
}

#[test]
fn of_copies_that_are_known_to_differ_a_reader_gets_neither_until_the_block_is_written() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    write(&*b.memory, extent(5, 1), 2).unwrap();
    let cause = |bad: Vec<BadBlock>| bad.iter().map(|bad| (bad.lba.get(), bad.cause)).collect::<Vec<_>>();
    assert_eq!(cause(found(verify(&mirror))), [(5, BadBlockCause::Conflict)]);
    for _ in 0..4 {
        let refused = found(read(&mirror, extent(0, 8)).map(|_| Response::Done));
        assert_eq!(cause(refused), [(5, BadBlockCause::Conflict)]);
        assert_reads(&mirror, extent(6, 2), 1);
    }
    write(&mirror, extent(5, 1), 3).unwrap();
    assert_reads(&mirror, extent(5, 1), 3);
    // Or until the copies are found equal.
    write(&*a.memory, extent(6, 1), 4).unwrap();
    assert_eq!(cause(found(verify(&mirror))), [(6, BadBlockCause::Conflict)]);
    write(&*b.memory, extent(6, 1), 4).unwrap();
    verify(&mirror).unwrap();
    assert_reads(&mirror, extent(6, 1), 4);
    // With one replica there is one copy.
    write(&*b.memory, extent(7, 1), 5).unwrap();
    assert_eq!(cause(found(verify(&mirror))), [(7, BadBlockCause::Conflict)]);
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 1).unwrap();
    assert_reads(&mirror, extent(7, 1), 1);
}

#[test]
fn a_verify_names_replica_and_block_and_repairs_only_if_asked() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, BLOCKS), 1).unwrap();
    damage(&a, (0..1000).step_by(5));
    damage(&b, (1000..BLOCKS).step_by(7));
    let bad_blocks = found(verify(&mirror));
    assert_eq!(bad_blocks.len(), 200 + (1000..BLOCKS).step_by(7).count());
    assert!(bad_blocks.iter().all(|bad| !bad.repaired));
    assert!(brief(&bad_blocks).iter().all(|(lba, replica, _)| *replica == usize::from(*lba >= 1000)));
    let repaired = found(repair(&mirror));
    assert_eq!(repaired.len(), bad_blocks.len());
    assert!(repaired.iter().all(|bad| bad.repaired));
    for replica in [&a, &b] {
        verify(&*replica.memory).unwrap();
    }
    verify(&mirror).unwrap();
    assert_reads(&mirror, extent(0, BLOCKS), 1);
}

#[test]
fn what_is_bad_everywhere_is_lost_and_stays_so() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 64), 1).unwrap();
    damage(&a, [3, 9, 20].into_iter());
    damage(&b, [9, 40].into_iter());
    let bad_blocks = found(repair(&mirror));
    assert_eq!(brief(&bad_blocks), [(3, 0, true), (9, 0, false), (9, 1, false), (20, 0, true), (40, 1, true)]);
    for _ in 0..3 {
        let lost = read(&mirror, extent(0, 64)).unwrap_err();
        assert_eq!(lost.bad_blocks().unwrap().as_slice().iter().map(|bad| bad.lba.get()).collect::<Vec<_>>(), [9]);
        assert_reads(&mirror, extent(10, 54), 1);
    }
    assert_eq!(brief(&found(verify(&mirror))), [(9, 0, false), (9, 1, false)]);
    write(&mirror, extent(9, 1), 2).unwrap();
    verify(&mirror).unwrap();
}

#[test]
fn blocks_bad_in_different_places_are_pieced_together() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 64), 1).unwrap();
    damage(&a, [0, 13].into_iter());
    damage(&b, [14, 63].into_iter());
    assert_reads(&mirror, extent(0, 64), 1);
    verify(&mirror).unwrap();
}

#[test]
fn good_copies_that_differ_are_a_conflict_and_neither_is_chosen() {
    for format in [Some(TYPE1), None] {
        let (a, b, mirror) = pair(format);
        write(&mirror, extent(0, 64), 1).unwrap();
        // A lost write: the old block is there with its old tag, which is valid.
        write(&*b.memory, extent(33, 1), 9).unwrap();
        for outcome in [verify(&mirror), repair(&mirror)] {
            let bad_blocks = found(outcome);
            assert_eq!((brief(&bad_blocks), bad_blocks[0].cause), (vec![(33, 1, false)], BadBlockCause::Conflict));
        }
        assert_reads(&*a.memory, extent(33, 1), 1);
        assert_reads(&*b.memory, extent(33, 1), 9);
        write(&mirror, extent(33, 1), 3).unwrap();
        verify(&mirror).unwrap();
    }
}

#[test]
fn conflicts_are_found_beside_damage() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 64), 1).unwrap();
    damage(&a, [32, 34].into_iter());
    write(&*b.memory, extent(33, 1), 9).unwrap();
    let bad_blocks = found(verify(&mirror));
    assert_eq!(brief(&bad_blocks), [(32, 0, false), (33, 1, false), (34, 0, false)]);
    assert_eq!(bad_blocks[1].cause, BadBlockCause::Conflict);
}

#[test]
fn three_replicas_need_one_good_one() {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, Some(TYPE1)));
    let mirror = opened(&[&replicas[0], &replicas[1], &replicas[2]]);
    write(&mirror, extent(0, 64), 1).unwrap();
    damage(&replicas[0], [5].into_iter());
    damage(&replicas[2], [5, 6].into_iter());
    write(&*replicas[1].memory, extent(6, 1), 8).unwrap();
    let bad_blocks = found(verify(&mirror));
    let fields: Vec<_> = bad_blocks.iter().map(|bad| bad.cause).collect();
    assert_eq!(brief(&bad_blocks).iter().map(|at| (at.0, at.1)).collect::<Vec<_>>(), [(5, 0), (5, 2), (6, 1), (6, 2)]);
    assert_eq!(fields[2], BadBlockCause::Conflict, "the two good copies of block 6 differ: {fields:?}");
    assert_reads(&mirror, extent(5, 1), 1);
}

#[test]
fn a_tag_that_no_replica_has_is_no_bad_block_and_nothing_is_rewritten_for_it() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 8), 1).unwrap();
    let wrong = Some(sealblock_integrity::Masked { expected: 6, mask: 0xFFFF });
    let wrong = Expectations::new(Checks { app_tag: wrong, ..Checks::NONE });
    let repaired = || mirror.describe().replicas.iter().map(|replica| replica.repaired_blocks).sum::<u64>();
    let requests = || [Request::read(extent(0, 8), wrong), Request::verify(extent(0, 8), wrong)];
    for request in requests() {
        let error = run(&mirror, request).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Expectation { lba: Lba::ZERO, field: Field::AppTag, expected: 6, .. }),
            "{error}"
        );
        assert_eq!(repaired(), 0);
    }
    // Damage is not mended from copies that are not as expected, but by a reader that expects nothing.
    damage(&a, [3].into_iter());
    damage(&b, [5].into_iter());
    assert_eq!(
        brief(&found(run(&mirror, requests()[1].clone()))),
        [(3, 0, false), (5, 1, false)],
        "damage comes first"
    );
    let error = run(&mirror, requests()[0].clone()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Expectation { .. }), "{error}");
    assert_eq!(repaired(), 0);
    assert_reads(&mirror, extent(0, 8), 1);
    assert_eq!(repaired(), 2);
    for replica in [&a, &b] {
        assert_reads(&*replica.memory, extent(0, 8), 1);
    }
}

#[test]
fn a_reader_answers_from_the_good_replica_and_changes_nothing() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 64), 1).unwrap();
    run(&mirror, Request::flush()).unwrap();
    sweep(&mirror);
    damage(&a, [1].into_iter());
    let reader = try_open(&[&a, &b], true).unwrap();
    assert_eq!(reader.abilities().of(sealblock_block::RequestKind::Repair), Ability::Absent);
    let copies = reader.abilities().with([RequestKind::Copy], Ability::Native);
    assert_eq!(
        crate::mirror::abilities(&[copies; 2], false).get(RequestKind::Copy),
        Ability::Absent,
        "each replica would have its own source"
    );
    for _ in 0..4 {
        assert_reads(&reader, extent(0, 64), 1);
    }
    assert_eq!(brief(&found(verify(&*reader))), [(1, 0, false)]);
    assert!(write(&reader, extent(0, 1), 2).is_err());
    let one = Extent::one(Lba::new(1));
    assert!(read(&*a.memory, one).is_err(), "the damage is still there");
}
