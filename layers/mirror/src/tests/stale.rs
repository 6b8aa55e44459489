//! Blocks that every in-sync replica has lost: the copy of a replica that was offline is neither read nor destroyed.

use futures_util::FutureExt;
use sealblock_block::{BadBlock, BadBlockCause, Expectations, Request};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_media_memory::Corruption;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Lba};

use super::*;
use crate::label::ReplicaState;

const CRC16: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);

fn rot(replica: &TestReplica, lba: u64) {
    assert!(replica.memory.device().damage(Lba::new(lba), Corruption::Data { at: 100, mask: 0x10 }));
}

fn bad_blocks(outcome: sealblock_block::Outcome) -> Vec<BadBlock> {
    outcome.unwrap_err().bad_blocks().expect("an integrity error").as_slice().to_vec()
}

/// Block, replica, cause.
fn brief(bad_blocks: &[BadBlock]) -> Vec<(u64, usize, BadBlockCause)> {
    bad_blocks.iter().map(|bad| (bad.lba.get(), bad.member.outermost().unwrap().0, bad.cause)).collect()
}

/// `b` was offline while block 1 was written; block 5, beside it, rotted on `a` since. `b` is back and in sync.
fn beside_damage(format: PiFormat) -> (TestReplica, TestReplica, TestMirror) {
    let (a, b, mirror) = pair(Some(format));
    write(&mirror, extent(0, 64), 1).unwrap();
    sweep(&mirror);
    b.is_offline.set(true);
    write(&mirror, extent(1, 1), 2).unwrap();
    sweep(&mirror);
    rot(&a, 5);
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync; 2]);
    (a, b, mirror)
}

fn stale_blocks(mirror: &TestMirror) -> Vec<u64> {
    mirror.describe().replicas.iter().map(|replica| replica.stale_blocks).collect()
}

fn accept(mirror: &TestMirror, name: &str) -> u64 {
    mirror.accept_stale(name).now_or_never().expect("RAM never waits").unwrap()
}

fn reexamine(mirror: &TestMirror) {
    mirror.recheck_stale().now_or_never().expect("RAM never waits");
}

#[test]
fn a_copy_that_the_stored_guard_proves_current_is_used_without_asking() {
    for guard in [GuardKind::Crc32c, GuardKind::Crc64] {
        let format = PiFormat::with_default_storage_tag(guard, ProtectionType::Type1);
        let (a, b, mirror) = beside_damage(format);
        assert_eq!(stale_blocks(&mirror), [0, 0]);
        verify(&mirror).unwrap();
        for device in [&*a.memory, &*b.memory] {
            assert_reads(device, extent(5, 1), 1);
            assert_reads(device, extent(1, 1), 2);
        }
        assert_eq!(mirror.describe().replicas[0].repaired_blocks, 1);
        // It was damage, which a repair names once.
        let named = bad_blocks(repair(&mirror));
        assert!(matches!(named[..], [BadBlock { repaired: true, .. }]) && named[0].lba == Lba::new(5), "{named:?}");
        repair(&mirror).unwrap();
    }
}

#[test]
fn an_older_copy_is_kept_withheld_and_reported_with_its_place() {
    let (a, b, mirror) = beside_damage(CRC16);
    assert_eq!(stale_blocks(&mirror), [0, 1]);
    assert_reads(&*b.memory, extent(5, 1), 1);
    for _ in 0..4 {
        let lost = bad_blocks(run(&mirror, Request::read(extent(0, 64), Expectations::NONE)));
        assert_eq!(lost.iter().map(|bad| bad.lba.get()).collect::<Vec<_>>(), [5]);
        assert_ne!(lost[0].cause, BadBlockCause::Stale, "a read says what became of the current copy");
        assert_reads(&mirror, extent(6, 58), 1);
    }
    for outcome in [verify(&mirror), repair(&mirror), verify(&mirror)] {
        let found = bad_blocks(outcome);
        let guard = BadBlockCause::Tag(sealblock_integrity::Field::Guard);
        assert_eq!(brief(&found), [(5, 0, guard), (5, 1, BadBlockCause::Stale)]);
        assert!(found.iter().all(|bad| !bad.repaired));
    }
    assert!(mirror.describe().lost_blocks > 0);
    // None of this wrote to either copy.
    assert!(read(&*a.memory, extent(5, 1)).is_err());
    assert_reads(&*b.memory, extent(5, 1), 1);
}

#[test]
fn an_older_copy_is_withheld_after_a_restart_too_and_when_its_member_is_alone() {
    let (a, b, mirror) = beside_damage(CRC16);
    drop(mirror);
    let again = opened(&[&b, &a]);
    assert_eq!(stale_blocks(&again), [0, 1]);
    assert!(read(&again, extent(5, 1)).is_err());
    close(&again);
    a.is_offline.set(true);
    let alone = opened(&[&a, &b]);
    assert_eq!(bad_blocks(run(&alone, Request::verify(extent(0, 64), Expectations::NONE))).len(), 1);
    assert!(read(&alone, extent(5, 1)).is_err());
    assert_reads(&alone, extent(6, 8), 1);
}

#[test]
fn accepting_an_older_copy_makes_it_the_block() {
    let (a, b, mirror) = beside_damage(CRC16);
    assert_eq!(accept(&mirror, "b"), 1);
    verify(&mirror).unwrap();
    for device in [&*a.memory, &*b.memory] {
        assert_reads(device, extent(5, 1), 1);
    }
    assert_eq!((stale_blocks(&mirror), accept(&mirror, "b")), (vec![0, 0], 0));
    assert!(mirror.accept_stale("c").now_or_never().unwrap().is_err());
    close(&mirror);
    assert_eq!(stale_blocks(&opened(&[&a, &b])), [0, 0]);
}

#[test]
fn an_older_copy_that_is_bad_itself_is_not_accepted() {
    let (_a, b, mirror) = beside_damage(CRC16);
    rot(&b, 5);
    assert_eq!(accept(&mirror, "b"), 0);
    let found = bad_blocks(verify(&mirror));
    assert_eq!(found.iter().filter(|bad| bad.cause == BadBlockCause::Stale).count(), 0, "no copy is kept there");
    assert_eq!(found.len(), 2);
}

#[test]
fn writing_the_block_ends_it_and_the_labels_forget_it_only_when_that_is_durable() {
    let (a, b, mirror) = beside_damage(CRC16);
    b.holds_flushes.set(true);
    let write = write_of(&*mirror, extent(5, 1), 3);
    assert!(mirror.execute(write).now_or_never().is_none(), "the labels list it until it is durable");
    b.holds_flushes.set(false);
    assert_eq!(stale_blocks(&mirror), [0, 0]);
    verify(&mirror).unwrap();
    let listed = |mirror: &TestMirror| mirror.label(&mirror.replicas.borrow()[1]).replicas[1].stale.clone();
    assert_eq!(listed(&mirror), [5]);
    // A crash loses that it was written: it is withheld, and the worker corrects that.
    drop(mirror);
    let again = opened(&[&a, &b]);
    assert_eq!(stale_blocks(&again), [0, 1]);
    assert_reads(&again, extent(5, 1), 3);
    again.reconcile_all().now_or_never().unwrap().unwrap();
    reexamine(&again);
    assert_eq!(stale_blocks(&again), [0, 0]);
    sweep(&again);
    assert_eq!(listed(&again), [0_u64; 0]);
    verify(&again).unwrap();
}

/// Both replicas have older copies of block 5, each of another time.
fn both_withhold() -> (TestReplica, TestReplica, TestMirror) {
    let (a, b, mirror) = pair(Some(CRC16));
    write(&mirror, extent(0, 64), 1).unwrap();
    mirror.replicas.borrow().iter().for_each(|replica| replica.stale.borrow_mut().withhold(Lba::new(5)));
    mirror.write_labels().now_or_never().unwrap().unwrap();
    sweep(&mirror);
    (a, b, mirror)
}

#[test]
fn a_change_of_a_block_that_all_withhold_outlives_the_process_although_nothing_was_flushed() {
    let all = extent(5, 1);
    for request in [None, Some(Request::write_zeroes(all, true, Default::default())), Some(Request::discard([all]))] {
        let (a, b, mirror) = both_withhold();
        let is_write = request.is_none();
        run(&mirror, request.unwrap_or_else(|| write_of(&*mirror, all, 3))).unwrap();
        drop(mirror);
        let again = opened(&[&a, &b]);
        let expected = if is_write { content(all, 3) } else { vec![0; 4096] };
        assert!(read(&again, all).unwrap() == expected);
        assert_eq!(stale_blocks(&again), [0, 0]);
    }
}

#[test]
fn a_change_beside_withheld_blocks_waits_for_no_flush() {
    let (_a, b, mirror) = both_withhold();
    b.holds_flushes.set(true);
    write(&mirror, extent(6, 1), 3).unwrap();
    assert_eq!(stale_blocks(&mirror), [1, 1]);
}

#[test]
fn what_a_resync_copies_of_it_is_not_withheld_again() {
    let (a, b, mirror) = beside_damage(CRC16);
    b.is_offline.set(true);
    write(&mirror, extent(5, 1), 3).unwrap();
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    resync(&mirror);
    // It fails and is back before a flush: what the resync copied is durable.
    b.is_offline.set(true);
    assert!(run(&*mirror, Request::flush()).is_ok());
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    resync(&mirror);
    assert_eq!(stale_blocks(&mirror), [0, 0]);
    a.is_offline.set(true);
    assert_reads(&mirror, extent(5, 1), 3);
    drop(mirror);
    assert_reads(&opened(&[&a, &b]), extent(5, 1), 3);
}

#[test]
fn zeroes_and_discards_end_it_too() {
    let all = extent(0, 64);
    for request in [Request::write_zeroes(all, true, Default::default()), Request::discard([all])] {
        let (_a, _b, mirror) = beside_damage(CRC16);
        run(&mirror, request).unwrap();
        assert_eq!(stale_blocks(&mirror), [0, 0]);
        assert!(read(&mirror, all).unwrap().iter().all(|byte| *byte == 0));
    }
}

#[test]
fn another_good_copy_ends_it_also_in_the_labels() {
    for is_read in [false, true] {
        let (replicas, mirror) = withheld_beside_a_good_copy();
        match is_read {
            // Each replica has its turn.
            true => (0..3).for_each(|_| assert_reads(&mirror, extent(5, 1), 2)),
            false => reexamine(&mirror),
        }
        assert_eq!(stale_blocks(&mirror), [0, 0, 0]);
        // Nobody flushes, the process dies, and the others do not come back.
        drop(mirror);
        let [a, b, c] = &replicas;
        [a, c].into_iter().for_each(|replica| replica.is_offline.set(true));
        assert_reads(&opened(&[a, b, c]), extent(5, 1), 2);
    }
}

#[test]
fn another_good_copy_repairs_all_replicas() {
    let (replicas, mirror) = withheld_beside_a_good_copy();
    reexamine(&mirror);
    repair(&mirror).unwrap_err();
    verify(&mirror).unwrap();
    for replica in &replicas {
        assert_reads(&*replica.memory, extent(5, 1), 2);
    }
}

/// Block 5 is lost on `a` and withheld on `b`; `c`, which has it, is back.
fn withheld_beside_a_good_copy() -> ([TestReplica; 3], TestMirror) {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, Some(CRC16)));
    let [a, b, c] = &replicas;
    let mirror = opened(&[a, b, c]);
    write(&mirror, extent(0, 64), 1).unwrap();
    sweep(&mirror);
    b.is_offline.set(true);
    write(&mirror, extent(1, 1), 2).unwrap();
    write(&mirror, extent(5, 1), 2).unwrap();
    sweep(&mirror);
    // The replica that has it is offline during the resync of b.
    c.is_offline.set(true);
    write(&mirror, extent(40, 1), 2).unwrap();
    rot(a, 5);
    b.is_offline.set(false);
    reattach(&mirror, b).unwrap();
    resync(&mirror);
    assert_eq!(stale_blocks(&mirror), [0, 1, 0]);
    assert!(read(&mirror, extent(5, 1)).is_err());
    assert_reads(&*b.memory, extent(5, 1), 1);
    c.is_offline.set(false);
    reattach(&mirror, c).unwrap();
    resync(&mirror);
    (replicas, mirror)
}

#[test]
fn a_member_that_is_new_gets_nothing_that_never_was_the_mirrors() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 64), 1).unwrap();
    let c = TestReplica::new("c", Some(TYPE1));
    write(&*c.memory, extent(0, 64), 9).unwrap();
    for replica in [&a, &b] {
        rot(replica, 5);
    }
    mirror.add(c.source(), true).now_or_never().unwrap().unwrap();
    resync(&mirror);
    assert_eq!(stale_blocks(&mirror), [0, 0, 0]);
    assert!(read(&*c.memory, extent(5, 1)).is_err());
    assert!(read(&mirror, extent(5, 1)).is_err());
    assert_reads(&*c.memory, extent(6, 8), 1);
}

#[test]
fn a_replica_that_got_everything_once_is_not_new_although_it_was_not_in_sync_yet() {
    let (a, _b, mirror) = pair(Some(CRC16));
    write(&mirror, extent(0, 64), 1).unwrap();
    let c = TestReplica::new("c", Some(CRC16));
    mirror.add(c.source(), true).now_or_never().unwrap().unwrap();
    let replica = mirror.replicas.borrow()[2].clone();
    mirror.write_labels().now_or_never().unwrap().unwrap();
    c.holds_flushes.set(true);
    let mut rebuilding = Box::pin(mirror.resync(&replica));
    assert!(rebuilding.as_mut().now_or_never().is_none(), "it flushes what was brought");
    // A change that only some replicas executed, so it must be resynced again, and the source loses a block there.
    mirror.mark_nosync(extent(0, 1));
    c.holds_flushes.set(false);
    rebuilding.as_mut().now_or_never();
    drop(rebuilding);
    assert_eq!((replica.state.get(), replica.is_new.get()), (ReplicaState::Resyncing, false));
    close(&mirror);
    drop(mirror);
    rot(&a, 5);
    let mirror = opened(&[&a, &c]);
    resync(&mirror);
    assert_reads(&*c.memory, extent(5, 1), 1);
    assert_eq!(stale_blocks(&mirror), [0, 0, 1]);
}

#[test]
fn the_same_data_with_other_tags_is_no_current_copy() {
    let (a, b, mirror) = pair(Some(TYPE1));
    let with_tag = |app_tag| {
        let tags = Tags { app_tag, storage_tag: 0, initial_ref_tag: 5 };
        let data = Sealed::seal(Slice::copy_from(&content(extent(5, 1), 1)), BlockSize::B4096, Some(TYPE1), &tags);
        Request::write(extent(5, 1), data, Default::default())
    };
    run(&mirror, with_tag(5)).unwrap();
    sweep(&mirror);
    b.is_offline.set(true);
    run(&mirror, with_tag(6)).unwrap();
    sweep(&mirror);
    rot(&a, 5);
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    resync(&mirror);
    assert_eq!(stale_blocks(&mirror), [0, 1]);
    assert!(read(&mirror, extent(5, 1)).is_err());
}

/// Makes a block unreadable on one replica.
fn lose(replica: &TestReplica, lba: u64) {
    let extent = extent(lba, 1);
    run(&*replica.memory, Request::write_uncorrectable(extent, Default::default())).unwrap();
}

#[test]
fn what_is_left_of_an_older_copy_proves_nothing() {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, Some(TYPE1)));
    let [a, b, c] = &replicas;
    let mirror = opened(&[a, b, c]);
    write(&mirror, extent(0, 64), 1).unwrap();
    sweep(&mirror);
    [b, c].into_iter().for_each(|replica| replica.is_offline.set(true));
    write(&mirror, extent(5, 1), 2).unwrap();
    sweep(&mirror);
    lose(a, 5);
    for replica in [b, c] {
        replica.is_offline.set(false);
        reattach(&mirror, replica).unwrap();
        resync(&mirror);
        // Its older copy rots before the next replica is back.
        rot(replica, 5);
    }
    assert_eq!(stale_blocks(&mirror), [0, 1, 1]);
    assert!(read(&mirror, extent(5, 1)).is_err());
}

#[test]
fn a_repair_takes_a_copy_that_is_proven_by_now_and_the_labels_forget_it() {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, Some(TYPE1)));
    let [a, b, c] = &replicas;
    let mirror = opened(&[a, b, c]);
    write(&mirror, extent(0, 64), 1).unwrap();
    sweep(&mirror);
    b.is_offline.set(true);
    write(&mirror, extent(1, 1), 2).unwrap();
    sweep(&mirror);
    // The proof is on a replica that is offline during the resync of b.
    c.is_offline.set(true);
    write(&mirror, extent(40, 1), 2).unwrap();
    sweep(&mirror);
    lose(a, 5);
    rot(c, 5);
    b.is_offline.set(false);
    reattach(&mirror, b).unwrap();
    resync(&mirror);
    assert_eq!(stale_blocks(&mirror), [0, 1, 0]);
    c.is_offline.set(false);
    reattach(&mirror, c).unwrap();
    resync(&mirror);
    let found = bad_blocks(repair(&mirror));
    assert_eq!(
        brief(&found).iter().map(|(lba, replica, _)| (*lba, *replica)).collect::<Vec<_>>(),
        [(5, 0), (5, 1), (5, 2)]
    );
    assert!(found.iter().all(|bad| bad.repaired), "{found:?}");
    assert_eq!(stale_blocks(&mirror), [0, 0, 0]);
    assert_eq!(mirror.label(&mirror.replicas.borrow()[1]).replicas[1].stale, [0_u64; 0]);
    verify(&mirror).unwrap();
    for replica in &replicas {
        assert_reads(&*replica.memory, extent(5, 1), 1);
    }
}

/// `a` holds data; `c` was added and is in sync by now. Returns an image of `a` from before that, whose label calls
/// `c` new, because it continued alone since; it has lost block 5.
fn older_than_a_member() -> (TestReplica, TestReplica, TestReplica) {
    let (a, b, mirror) = pair(Some(CRC16));
    write(&mirror, extent(0, 64), 1).unwrap();
    let c = TestReplica::new("c", Some(CRC16));
    mirror.add(c.source(), true).now_or_never().unwrap().unwrap();
    let older = a.image();
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync; 3]);
    close(&mirror);
    [&b, &c].into_iter().for_each(|replica| replica.is_offline.set(true));
    let alone = opened(&[&older, &b, &c]);
    write(&alone, extent(8, 1), 3).unwrap();
    close(&alone);
    c.is_offline.set(false);
    rot(&older, 5);
    (older, b, c)
}

#[test]
fn a_member_that_an_older_label_calls_new_keeps_the_last_copy_that_it_has() {
    let (older, b, c) = older_than_a_member();
    let mirror = opened(&[&older, &b, &c]);
    resync(&mirror);
    assert_eq!(stale_blocks(&mirror), [0, 0, 1]);
    assert!(read(&mirror, extent(5, 1)).is_err());
    assert_reads(&*c.memory, extent(5, 1), 1);
    // The same if it is reattached to a mirror in use.
    let (older, b, c) = older_than_a_member();
    c.is_offline.set(true);
    let mirror = opened(&[&older, &b, &c]);
    c.is_offline.set(false);
    reattach(&mirror, &c).unwrap();
    resync(&mirror);
    assert_reads(&*c.memory, extent(5, 1), 1);
}

#[test]
fn a_full_list_keeps_the_member_out_of_sync_and_says_so() {
    let (a, b, mirror) = pair(Some(CRC16));
    write(&mirror, extent(0, BLOCKS), 1).unwrap();
    sweep(&mirror);
    b.is_offline.set(true);
    write(&mirror, extent(0, BLOCKS), 2).unwrap();
    sweep(&mirror);
    (0..BLOCKS).for_each(|lba| rot(&a, lba));
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    let replica = mirror.replicas.borrow()[1].clone();
    // The list is full; one block of the device does not fit.
    mirror.replicas.borrow()[0].stale.replace(crate::mirror::replica::StaleBlocks::new(&[0]));
    mirror.resync(&replica).now_or_never().unwrap().unwrap_err();
    assert_eq!(replica.state.get(), ReplicaState::Resyncing);
    assert!(replica.last_error.borrow().contains("stale blocks"), "{}", replica.last_error.borrow());
    assert_eq!(mirror.describe().replicas[1].out_of_sync_bytes, 1 << 16);
    for lba in [0, 77, BLOCKS - 1] {
        assert_reads(&*b.memory, extent(lba, 1), 1);
    }
    // Accepting them makes room.
    assert_eq!(accept(&mirror, "b"), BLOCKS - 1);
    mirror.resync(&replica).now_or_never().unwrap().unwrap();
    assert_eq!((replica.state.get(), replica.last_error.borrow().as_str()), (ReplicaState::InSync, ""));
}

#[test]
fn what_becomes_suspect_while_progress_is_flushed_is_still_lacking() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    let replica = mirror.replicas.borrow()[1].clone();
    assert_eq!(replica.state.get(), ReplicaState::Resyncing);
    b.holds_flushes.set(true);
    let mut rebuild = Box::pin(mirror.resync(&replica));
    assert!(rebuild.as_mut().now_or_never().is_none(), "it flushes what was brought");
    // A change that only some replicas executed.
    mirror.mark_nosync(extent(600, 1));
    b.holds_flushes.set(false);
    rebuild.as_mut().now_or_never();
    drop(rebuild);
    assert_eq!(replica.state.get(), ReplicaState::Resyncing);
    assert!(
        replica.to_resync.borrow().contains(37) && replica.out_of_sync.borrow().contains(37),
        "still said to be missing"
    );
    mirror.resync(&replica).now_or_never().unwrap().unwrap();
    assert_eq!(states(&mirror), [ReplicaState::InSync; 2]);
    drop(a);
}

/// Two replicas of 512 regions, both with bad blocks, the second one offline since one block in each of 100 regions
/// was rewritten.
struct Damaged {
    a: TestReplica,
    b: TestReplica,
    mirror: TestMirror,
    /// Blocks that only the first replica got.
    rewritten: Vec<u64>,
    /// Blocks that are bad on both.
    both: Vec<u64>,
}

const LARGE: u64 = 8192;

/// 1,000 bad blocks on each, 50 of them on both; ten of those on `a` were rewritten, so that their copies on `b` are
/// stale.
fn damaged_on_both() -> Damaged {
    let [a, b] = ["a", "b"].map(|name| TestReplica::sized(name, Some(TYPE1), LARGE));
    let mirror = opened(&[&a, &b]);
    write(&mirror, extent(0, LARGE), 1).unwrap();
    sweep(&mirror);
    b.is_offline.set(true);
    let rewritten: Vec<u64> = (0..100).map(|at| at * 5 * 16 + 3).collect();
    rewritten.iter().for_each(|lba| write(&mirror, extent(*lba, 1), 2).unwrap());
    sweep(&mirror);
    assert_eq!(mirror.describe().replicas[1].out_of_sync_bytes, 100 << 16);
    let mut drawn: Vec<u64> = (0..LARGE).filter(|lba| !rewritten.contains(lba)).collect();
    drawn.sort_by_key(|lba| lba.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(20) & 0xFFFF_FFFF);
    let both = drawn[..50].to_vec();
    both.iter().chain(&drawn[50..1040]).chain(&rewritten[..10]).for_each(|lba| rot(&a, *lba));
    both.iter().chain(&drawn[1040..2040]).for_each(|lba| rot(&b, *lba));
    Damaged { a, b, mirror, rewritten, both }
}

#[test]
fn bad_blocks_on_both_replicas_beside_a_resync_lose_only_what_no_replica_has() {
    let Damaged { a: _a, b, mirror, rewritten, both } = damaged_on_both();
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    let expected = |lba: u64| if rewritten.contains(&lba) { 2 } else { 1 };
    let is_lost = |lba: u64| both.contains(&lba) || rewritten[..10].contains(&lba);
    let all_right_or_lost = |when: &str| {
        for lba in 0..LARGE {
            match read(&mirror, extent(lba, 1)) {
                Ok(data) => assert!(data == content(extent(lba, 1), expected(lba)), "{when}: block {lba}"),
                Err(_) if when == "before" => {}
                Err(error) => assert!(is_lost(lba), "{when}: {error}"),
            }
        }
    };
    all_right_or_lost("before");
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync; 2]);
    all_right_or_lost("after");
    let lasting = |outcome| -> std::collections::BTreeSet<u64> {
        let found: Vec<BadBlock> = bad_blocks(outcome);
        found.iter().filter(|bad| !bad.repaired).map(|bad| bad.lba.get()).collect()
    };
    let lost: std::collections::BTreeSet<u64> = (0..LARGE).filter(|lba| is_lost(*lba)).collect();
    assert_eq!(lost.len(), 60);
    assert_eq!(lasting(repair(&mirror)), lost, "all but what no replica has");
    assert_eq!(lasting(verify(&mirror)), lost);
    // Stale copies are still there, and no replica got other content.
    for lba in &rewritten[..10] {
        assert_reads(&*b.memory, extent(*lba, 1), 1);
    }
    assert_eq!(accept(&mirror, "b"), 10);
    assert_eq!(lasting(verify(&mirror)), both.iter().copied().collect());
}
