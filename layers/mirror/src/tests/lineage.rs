//! Which replica was written without which: restored images, replicas written alone, and openings that changed
//! nothing.

use futures_util::FutureExt;
use sealblock_block::Request;

use super::*;
use crate::label::ReplicaState;
use crate::label::assemble::AssembleError;
use crate::{MirrorError, OpenOptions, mark_written_alone, open};

fn close(mirror: &TestMirror) {
    mirror.close().now_or_never().expect("RAM never waits").unwrap();
}

fn flush(mirror: &TestMirror) {
    run(mirror, Request::flush()).unwrap();
}

fn refusal(replicas: &[&TestReplica]) -> Option<AssembleError> {
    match try_open(replicas, true) {
        Err(MirrorError::Assemble { error: refusal, .. }) => Some(refusal),
        Err(other) => panic!("refused for another reason: {other}"),
        Ok(_) => None,
    }
}

/// Opens one of two replicas without the other.
fn alone(here: &TestReplica, other: &TestReplica) -> TestMirror {
    other.is_offline.set(true);
    let mirror = opened(&[here, other]);
    other.is_offline.set(false);
    mirror
}

#[test]
fn an_older_image_that_was_written_alone_is_a_split_brain_whatever_its_event_count() {
    for image_of_first in [true, false] {
        // However much was written together since the image was taken.
        for openings in 1..12 {
            let (a, b, mirror) = pair(Some(TYPE1));
            write(&mirror, extent(0, 8), 1).unwrap();
            close(&mirror);
            let (older, other) = if image_of_first { (a.image(), &b) } else { (b.image(), &a) };
            for round in 0..openings {
                let mirror = opened(&[&a, &b]);
                write(&mirror, extent(8, 8), 2 + round).unwrap();
                close(&mirror);
            }
            let mirror = alone(&older, other);
            write(&mirror, extent(0, 8), 50).unwrap();
            flush(&mirror);
            drop(mirror);
            for restart in [false, true] {
                let split = Some(AssembleError::SplitBrain { first: 0, second: 1 });
                assert_eq!(refusal(&[&older, other]), split, "{openings} openings");
                if !restart {
                    let mirror = alone(other, &older);
                    write(&mirror, extent(16, 8), 51).unwrap();
                    close(&mirror);
                }
            }
            assert_reads(&*older.memory, extent(0, 8), 50);
            assert_reads(&*other.memory, extent(16, 8), 51);
        }
    }
}

#[test]
fn both_put_back_and_written_alone_are_a_split_brain_too() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    let (older_a, older_b) = (a.image(), b.image());
    let mirror = opened(&[&a, &b]);
    write(&mirror, extent(0, 8), 2).unwrap();
    close(&mirror);
    let newer_b = b.image();
    for b in [older_b, newer_b] {
        let (a, b) = (older_a.image(), b.image());
        for (here, other, seed) in [(&a, &b, 3), (&b, &a, 4)] {
            let mirror = alone(here, other);
            write(&mirror, extent(0, 8), seed).unwrap();
            close(&mirror);
        }
        assert!(matches!(refusal(&[&a, &b]), Some(AssembleError::SplitBrain { .. })));
    }
}

#[test]
fn an_older_image_that_was_only_read_is_resynced() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    let older = a.image();
    let mirror = opened(&[&a, &b]);
    write(&mirror, extent(0, 8), 2).unwrap();
    close(&mirror);
    let looked_at = alone(&older, &b);
    assert_reads(&looked_at, extent(0, 8), 1);
    close(&looked_at);
    let mirror = opened(&[&older, &b]);
    assert_eq!(states(&mirror), [ReplicaState::OutOfSync, ReplicaState::InSync]);
    resync(&mirror);
    assert_reads(&*older.memory, extent(0, 8), 2);
}

#[test]
fn an_image_from_before_a_crash_was_reconciled_is_an_older_one() {
    for image_first in [true, false] {
        let (a, b, mirror) = pair(Some(TYPE1));
        write(&mirror, extent(0, 8), 1).unwrap();
        // A write that was in flight to both at the crash, and reached one of them.
        write(&*a.memory, extent(0, 1), 2).unwrap();
        drop(mirror);
        let older = b.image();
        let mirror = opened(&[&a, &b]);
        assert_reads(&mirror, extent(0, 1), 2);
        assert_reads(&*b.memory, extent(0, 1), 2);
        drop(mirror);
        let mirror = opened(&if image_first { [&older, &a] } else { [&a, &older] });
        assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
        assert_reads(&mirror, extent(0, 1), 2);
        resync(&mirror);
        assert_reads(&*older.memory, extent(0, 1), 2);
    }
}

#[test]
fn an_opening_that_changed_nothing_marks_no_replica() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    // Both were opened alone; only one of them was changed.
    let idle = alone(&a, &b);
    assert_reads(&idle, extent(0, 8), 1);
    sweep(&idle);
    close(&idle);
    drop(idle);
    let changed = alone(&b, &a);
    write(&changed, extent(0, 4), 2).unwrap();
    close(&changed);
    drop(changed);
    let mirror = opened(&[&a, &b]);
    assert_eq!(states(&mirror), [ReplicaState::OutOfSync, ReplicaState::InSync]);
    assert_reads(&mirror, extent(0, 4), 2);
    resync(&mirror);
    assert_reads(&*a.memory, extent(0, 4), 2);
}

#[test]
fn a_replica_that_left_having_everything_may_go_on_alone_if_the_others_do_not() {
    for is_changed in [false, true] {
        let (a, b, mirror) = pair(None);
        write(&mirror, extent(0, 8), 1).unwrap();
        flush(&mirror);
        b.is_offline.set(true);
        flush(&mirror);
        assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
        if is_changed {
            // Labels have the region already, but not that the other replica lacks it.
            write(&mirror, extent(0, 1), 2).unwrap();
        }
        close(&mirror);
        drop(mirror);
        b.is_offline.set(false);
        let other = alone(&b, &a);
        write(&other, extent(4, 4), 3).unwrap();
        close(&other);
        drop(other);
        match is_changed {
            true => assert!(matches!(refusal(&[&a, &b]), Some(AssembleError::SplitBrain { .. }))),
            false => {
                let mirror = opened(&[&a, &b]);
                assert_reads(&mirror, extent(4, 4), 3);
                assert_reads(&mirror, extent(0, 4), 1);
            }
        }
    }
}

#[test]
fn what_was_read_where_a_crash_left_it_open_counts_as_a_change() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    drop(mirror);
    // A crash left the region dirty: content that a reader saw on one replica must not be undone by the other one.
    let reader = alone(&a, &b);
    assert_eq!(reader.describe().dirty_bytes, 1 << 20);
    read(&reader, extent(600, 1)).unwrap();
    drop(reader);
    let writer = alone(&b, &a);
    write(&writer, extent(0, 8), 2).unwrap();
    drop(writer);
    assert_eq!(refusal(&[&a, &b]), None, "what was read lay beside");
    let reader = alone(&a, &b);
    read(&reader, extent(0, 1)).unwrap();
    drop(reader);
    assert!(matches!(refusal(&[&a, &b]), Some(AssembleError::SplitBrain { .. })));
}

#[test]
fn labels_cut_short_at_any_point_before_a_change_make_no_split() {
    for cut in 0..12 {
        let (a, mut b, mirror) = pair(Some(TYPE1));
        write(&mirror, extent(0, 8), 1).unwrap();
        close(&mirror);
        drop(mirror);
        b.labels_left = a.labels_left.clone();
        let mirror = opened(&[&a, &b]);
        a.labels_left.set(Some(cut));
        let written = sealblock_block::Device::execute(&*mirror, write_of(&mirror, extent(0, 8), 2)).now_or_never();
        std::mem::forget(mirror);
        a.labels_left.set(None);
        // Whichever replica continues alone then, the other one follows.
        for (here, other, seed) in [(&a, &b, 3), (&b, &a, 4)] {
            let (here, other) = (here.image(), other.image());
            let mirror = alone(&here, &other);
            write(&mirror, extent(0, 8), seed).unwrap();
            close(&mirror);
            drop(mirror);
            let mirror = opened(&[&here, &other]);
            assert_reads(&mirror, extent(0, 8), seed);
            let is_current = mirror.in_sync().iter().any(|replica| *replica.name() == *here.name);
            assert!(is_current, "cut after {cut}, written: {}", written.is_some());
        }
        if written.is_some() {
            assert!(cut >= 4, "two rounds of labels come before a change");
            return;
        }
    }
    panic!("the write was never carried out");
}

/// Two replicas of which labels were cut off before a change: the first one goes on alone, gets a third replica, and perhaps leaves.
fn added_to_one_of_two(cut: u32, is_swapped: bool, leaves: bool) -> (TestReplica, TestReplica, TestReplica) {
    let (a, mut b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    drop(mirror);
    b.labels_left = a.labels_left.clone();
    let mirror = opened(&[&a, &b]);
    a.labels_left.set(Some(cut));
    let written = sealblock_block::Device::execute(&*mirror, write_of(&mirror, extent(0, 8), 2)).now_or_never();
    assert!(written.is_none(), "two rounds of labels come before a change");
    std::mem::forget(mirror);
    a.labels_left.set(None);
    let (here, other) = if is_swapped { (b.image(), a.image()) } else { (a.image(), b.image()) };
    let third = TestReplica::new("c", Some(TYPE1));
    let mirror = alone(&here, &other);
    write(&mirror, extent(8, 8), 3).unwrap();
    mirror.add(third.source(), false).now_or_never().unwrap().unwrap();
    resync(&mirror);
    if leaves {
        mirror.remove(here.name).now_or_never().unwrap().unwrap();
    }
    close(&mirror);
    drop(mirror);
    (here, other, third)
}

#[test]
fn a_replica_that_was_added_while_another_was_away_makes_no_split_brain() {
    for (cut, is_swapped, leaves) in (0..4)
        .flat_map(|cut| [(cut, false), (cut, true)])
        .flat_map(|(cut, is_swapped)| [(cut, is_swapped, false), (cut, is_swapped, true)])
    {
        let (here, other, third) = added_to_one_of_two(cut, is_swapped, leaves);
        let orders: Vec<Vec<&TestReplica>> = match leaves {
            true => vec![vec![&third, &other], vec![&other, &third]],
            false => vec![vec![&here, &other, &third], vec![&third, &other, &here], vec![&other, &third]],
        };
        for order in orders {
            let images: Vec<TestReplica> = order.iter().map(|replica| replica.image()).collect();
            let mirror = opened(&images.iter().collect::<Vec<_>>());
            let in_sync: Vec<String> = mirror.in_sync().iter().map(|replica| replica.name().to_string()).collect();
            assert!(!in_sync.iter().any(|name| *name == other.name), "cut after {cut}: {in_sync:?}");
            resync(&mirror);
            images.iter().for_each(|image| assert_reads(&*image.memory, extent(8, 8), 3));
            images.iter().for_each(|image| assert_reads(&*image.memory, extent(0, 8), 1));
        }
    }
}

#[test]
fn a_replica_that_was_added_while_another_one_was_written_is_a_split_brain() {
    for (cut, leaves) in (0..4).flat_map(|cut| [(cut, false), (cut, true)]) {
        let (here, other, third) = added_to_one_of_two(cut, cut % 2 == 0, leaves);
        let mirror = alone(&other, &here);
        write(&mirror, extent(16, 8), 4).unwrap();
        close(&mirror);
        drop(mirror);
        for order in [[&third, &other], [&other, &third]] {
            assert!(matches!(refusal(&order), Some(AssembleError::SplitBrain { .. })), "cut after {cut}");
        }
    }
}

#[test]
fn a_replica_that_was_added_to_one_that_was_away_is_not_taken_for_the_others() {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, Some(TYPE1)));
    let [a, b, c] = &replicas;
    let mirror = opened(&[a, b, c]);
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    c.is_offline.set(true);
    write(&mirror, extent(0, 8), 2).unwrap();
    flush(&mirror);
    drop(mirror);
    // The third one does not know that it was left, and gets a replica that has only what it has itself.
    c.is_offline.set(false);
    [a, b].iter().for_each(|replica| replica.is_offline.set(true));
    let added = TestReplica::new("d", Some(TYPE1));
    let mirror = opened(&[a, b, c]);
    mirror.add(added.source(), false).now_or_never().unwrap().unwrap();
    resync(&mirror);
    close(&mirror);
    drop(mirror);
    [a, b].iter().for_each(|replica| replica.is_offline.set(false));
    for order in [[&added, b], [b, &added], [&added, a]] {
        assert!(matches!(refusal(&order), Some(AssembleError::SplitBrain { .. })));
    }
    [a, b].iter().for_each(|replica| assert_reads(&*replica.memory, extent(0, 8), 2));
}

#[test]
fn a_replica_that_was_written_alone_on_purpose_is_out_of_sync_in_everything() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 600), 1).unwrap();
    close(&mirror);
    drop(mirror);
    for others_went_on in [false, true] {
        mark_written_alone(&b.stack()).now_or_never().unwrap().unwrap();
        write(&*b.memory, extent(3, 1), 9).unwrap();
        let expected = (!others_went_on).then_some(AssembleError::NoneInSync);
        b.is_offline.set(others_went_on);
        if others_went_on {
            let mirror = opened(&[&a, &b]);
            write(&mirror, extent(0, 1), 5).unwrap();
            close(&mirror);
        } else {
            a.is_offline.set(true);
            assert_eq!(refusal(&[&a, &b]), expected, "it makes no mirror by itself");
            a.is_offline.set(false);
        }
        b.is_offline.set(false);
        let mirror = opened(&[&a, &b]);
        assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
        assert_eq!(mirror.describe().replicas[1].out_of_sync_bytes, 8 << 20);
        assert_reads(&mirror, extent(3, 1), 1);
        resync(&mirror);
        assert_reads(&*b.memory, extent(3, 1), 1);
        close(&mirror);
        drop(mirror);
        verify(&opened(&[&a, &b])).unwrap();
    }
}

#[test]
fn what_a_replica_that_was_written_alone_on_purpose_had_of_its_own_is_not_overwritten() {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, Some(TYPE1)));
    let [a, b, c] = &replicas;
    let mirror = opened(&[a, b, c]);
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    let older = c.image();
    a.is_offline.set(true);
    write(&mirror, extent(0, 8), 2).unwrap();
    flush(&mirror);
    drop(mirror);
    a.is_offline.set(false);
    mark_written_alone(&b.stack()).now_or_never().unwrap().unwrap();
    // A writer with an older image of the third replica writes a later label there than the second knows.
    b.is_offline.set(true);
    let mirror = opened(&[a, b, &older]);
    write(&mirror, extent(16, 8), 3).unwrap();
    resync(&mirror);
    close(&mirror);
    drop(mirror);
    b.is_offline.set(false);
    // The older image passes for one that has the changes of both.
    for order in [[a, b, &older], [&older, b, a], [b, &older, a]] {
        assert!(matches!(refusal(&order), Some(AssembleError::SplitBrain { .. })));
    }
    let mirror = alone(a, b);
    let why = reattach(&mirror, b).unwrap_err();
    assert!(why.contains("split brain"), "{why}");
    assert_reads(&*b.memory, extent(0, 8), 2);
}

#[test]
fn a_replica_that_was_written_alone_after_labels_were_cut_short_is_taken_back() {
    for cut in 0..6 {
        let (a, mut b, mirror) = pair(Some(TYPE1));
        write(&mirror, extent(0, 8), 1).unwrap();
        close(&mirror);
        drop(mirror);
        b.labels_left = a.labels_left.clone();
        let mirror = opened(&[&a, &b]);
        a.labels_left.set(Some(cut));
        let written = sealblock_block::Device::execute(&*mirror, write_of(&mirror, extent(0, 8), 2)).now_or_never();
        std::mem::forget(mirror);
        a.labels_left.set(None);
        if written.is_some() {
            assert!(cut >= 4, "two rounds of labels come before a change");
            return;
        }
        for (here, other) in [(&a, &b), (&b, &a)] {
            let (here, other) = (here.image(), other.image());
            // Also twice: the second mark knows no less than the first.
            for _ in 0..1 + cut % 2 {
                mark_written_alone(&other.stack()).now_or_never().unwrap().unwrap();
            }
            write(&*other.memory, extent(2, 1), 9).unwrap();
            let mirror = opened(&[&here, &other]);
            let in_sync: Vec<String> = mirror.in_sync().iter().map(|replica| replica.name().to_string()).collect();
            assert_eq!(in_sync, [here.name], "cut after {cut}");
            resync(&mirror);
            assert_reads(&*other.memory, extent(0, 8), 1);
        }
    }
    panic!("the write was never carried out");
}

#[test]
fn a_replica_that_was_written_alone_does_not_come_back_while_the_last_one_is_away() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    a.is_offline.set(true);
    read(&mirror, extent(0, 1)).unwrap_err();
    b.is_offline.set(false);
    let elsewhere = opened(&[&a, &b]);
    write(&elsewhere, extent(0, 1), 3).unwrap();
    flush(&elsewhere);
    drop(elsewhere);
    let why = reattach(&mirror, &b).unwrap_err();
    assert!(why.contains("split brain"), "{why}");
    assert_reads(&*b.memory, extent(0, 1), 3);
}

#[test]
fn what_was_changed_elsewhere_is_not_taken_back_for_older() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    drop(mirror);
    let idle = alone(&a, &b);
    let elsewhere = alone(&b, &a);
    write(&elsewhere, extent(0, 1), 3).unwrap();
    flush(&elsewhere);
    drop(elsewhere);
    let why = reattach(&idle, &b).unwrap_err();
    assert!(why.contains("changed elsewhere"), "{why}");
    close(&idle);
    drop(idle);
    assert_reads(&opened(&[&a, &b]), extent(0, 1), 3);
}

/// A mirror whose second replica is in sync and whose first one is resyncing, as its own label says.
fn resyncing_pair() -> (TestReplica, TestReplica, TestMirror) {
    let (copy, mut source, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    drop(mirror);
    let mirror = alone(&source, &copy);
    write(&mirror, extent(0, 8), 2).unwrap();
    close(&mirror);
    drop(mirror);
    source.labels_left = copy.labels_left.clone();
    let mirror = opened(&[&copy, &source]);
    let replica = mirror.replicas.borrow()[0].clone();
    mirror.start_resync(&replica);
    write(&mirror, extent(0, 1), 3).unwrap();
    flush(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::Resyncing, ReplicaState::InSync]);
    (source, copy, mirror)
}

#[test]
fn a_resyncing_replica_gets_no_label_of_a_change_that_the_in_sync_replica_did_not_get() {
    for tries in 1..5 {
        let (source, copy, mirror) = resyncing_pair();
        let before = copy.label_writes.get();
        source.is_offline.set(true);
        // Its requests to the last in-sync replica fail, and so do the labels that would record them.
        for group in 1..=tries {
            write(&mirror, extent(256 * group, 1), 4).unwrap_err();
            mirror.write_labels().now_or_never().unwrap().unwrap_err();
        }
        assert_eq!(copy.label_writes.get(), before);
        source.is_offline.set(false);
        let elsewhere = opened(&[&copy.image(), &source.image()]);
        assert_reads(&elsewhere, extent(0, 1), 3);
        assert_eq!(states(&elsewhere), [ReplicaState::OutOfSync, ReplicaState::InSync]);
        drop(elsewhere);
        // Nor does this mirror take the replica for an older image.
        reattach(&mirror, &source).unwrap();
        run(&mirror, Request::flush()).unwrap_err();
        write(&mirror, extent(256, 1), 5).unwrap();
        close(&mirror);
        drop(mirror);
        assert_reads(&opened(&[&copy, &source]), extent(256, 1), 5);
    }
}

#[test]
fn labels_cut_short_at_any_point_of_a_resync_make_no_split_brain() {
    for cut in 0..12 {
        let (source, copy, mirror) = resyncing_pair();
        source.labels_left.set(Some(cut));
        let replica = mirror.replicas.borrow()[0].clone();
        let written = sealblock_block::Device::execute(&*mirror, write_of(&mirror, extent(256, 8), 4)).now_or_never();
        let is_rebuilt = written.is_some() && mirror.resync(&replica).now_or_never().is_some();
        std::mem::forget(mirror);
        source.labels_left.set(None);
        let mirror = opened(&[&copy.image(), &source.image()]);
        assert_reads(&mirror, extent(0, 1), 3);
        if written.is_some() {
            assert_reads(&mirror, extent(256, 8), 4);
        }
        resync(&mirror);
        assert_eq!(states(&mirror), [ReplicaState::InSync; 2], "cut after {cut}");
        if is_rebuilt {
            assert!(cut >= 4, "labels came before the change and after the rebuild");
            return;
        }
    }
    panic!("the replica was never rebuilt");
}

#[test]
fn an_image_from_just_before_a_change_is_refused_beside_a_replica_that_was_resyncing_from_it() {
    let (source, copy, mirror) = resyncing_pair();
    let older = source.image();
    write(&mirror, extent(256, 8), 4).unwrap();
    flush(&mirror);
    drop(mirror);
    assert!(matches!(refusal(&[&copy, &older]), Some(AssembleError::SplitBrain { .. })));
    assert_eq!(refusal(&[&copy, &source]), None);
}

#[test]
fn labels_that_only_a_resyncing_replica_got_mark_no_replica() {
    for comes_back in [false, true] {
        let (a, b, mirror) = pair(None);
        b.is_offline.set(true);
        write(&mirror, extent(0, 8), 1).unwrap();
        b.is_offline.set(false);
        reattach(&mirror, &b).unwrap();
        mirror.write_labels().now_or_never().expect("RAM never waits").unwrap();
        assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::Resyncing]);
        a.is_offline.set(true);
        for at in [300, 600, 900] {
            write(&mirror, extent(at, 8), 2).unwrap_err();
            tidy_or_fail(&mirror);
        }
        a.is_offline.set(false);
        let mirror = if comes_back {
            reattach(&mirror, &a).unwrap();
            mirror
        } else {
            drop(mirror);
            opened(&[&a, &b])
        };
        resync(&mirror);
        assert_eq!(states(&mirror), [ReplicaState::InSync; 2]);
        assert_reads(&*b.memory, extent(0, 8), 1);
    }
}

fn tidy_or_fail(mirror: &TestMirror) {
    let _ = mirror.clear_clean_regions().now_or_never().expect("RAM never waits");
}

#[test]
fn an_older_image_of_a_replica_that_was_resynced_after_a_crash_lacks_earlier_changes() {
    // With a third replica that is in sync and offline meanwhile, or without.
    for has_third in [false, true] {
        let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, None));
        let given: Vec<&TestReplica> = replicas.iter().take(if has_third { 3 } else { 2 }).collect();
        let [a, b, c] = &replicas;
        let mirror = opened(&given);
        write(&mirror, extent(0, 8), 1).unwrap();
        flush(&mirror);
        b.is_offline.set(true);
        write(&mirror, extent(0, 1), 2).unwrap();
        flush(&mirror);
        drop(mirror);
        b.is_offline.set(false);
        let older = b.image();
        c.is_offline.set(true);
        let mirror = opened(&given);
        resync(&mirror);
        assert_eq!(states(&mirror)[..2], [ReplicaState::InSync; 2]);
        assert_reads(&*b.memory, extent(0, 1), 2);
        drop(mirror);
        // The image continues alone, and then the first replica is online.
        let mirror = opened(&[&older, a].map(|replica| {
            replica.is_offline.set(replica.name == "a");
            replica
        }));
        a.is_offline.set(false);
        let refused = reattach(&mirror, a).unwrap_err();
        assert!(refused.contains("elsewhere") || refused.contains("split brain"), "{refused}");
        assert_reads(&*a.memory, extent(0, 1), 2);
    }
}

#[test]
fn a_replica_that_comes_back_with_a_later_label_gets_none_that_is_earlier() {
    let mut replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, None));
    replicas[0].labels_fail = true;
    let [a, b, c] = &replicas;
    let mirror = opened(&[a, b, c]);
    c.is_offline.set(true);
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    drop(mirror);
    c.is_offline.set(false);
    let older = b.image();
    // The third replica is resynced while the first one, which has one label of this opening, is offline; nothing is
    // changed.
    a.labels_left.set(Some(1));
    let far = OpenOptions { is_read_only: false, accepts_lost_label: false, random: [0xFF; 16] };
    let mirror = open(replicas.iter().map(TestReplica::source).collect(), StoppedClock, far)
        .now_or_never()
        .unwrap()
        .unwrap()
        .mirror;
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::OutOfSync, ReplicaState::InSync, ReplicaState::InSync]);
    drop(mirror);
    a.labels_left.set(None);
    a.is_offline.set(true);
    // An older image of the second continues with the first, which has a later label than the image knows.
    c.is_offline.set(true);
    let mirror = opened(&[a, &older, c]);
    a.is_offline.set(false);
    reattach(&mirror, a).unwrap();
    resync(&mirror);
    write(&mirror, extent(0, 8), 2).unwrap();
    close(&mirror);
    drop(mirror);
    c.is_offline.set(false);
    let mirror = opened(&[a, &older, c]);
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::InSync, ReplicaState::OutOfSync]);
    resync(&mirror);
    assert_reads(&*c.memory, extent(0, 8), 2);
}
