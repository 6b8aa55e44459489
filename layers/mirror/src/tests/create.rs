//! Mirrors created on purpose, and changes of their replicas that a crash cuts short at any label.

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;

use super::*;
use crate::label::ReplicaState;
use crate::label::assemble::AssembleError;
use crate::{CreateOptions, MirrorError, ReplicaError, create};

fn try_create(replicas: &[&TestReplica], from: Option<usize>, force: bool) -> Option<Result<TestMirror, ReplicaError>> {
    let sources = replicas.iter().map(|replica| replica.source()).collect();
    let options = CreateOptions { random: random(), name: None, from, force };
    create(sources, StoppedClock, options).now_or_never().map(|created| created.map(|opened| opened.mirror))
}

fn created(replicas: &[&TestReplica], from: Option<usize>, force: bool) -> Result<TestMirror, ReplicaError> {
    try_create(replicas, from, force).expect("RAM never waits")
}

/// A device that holds blocks of this seed.
fn holding(name: &'static str, seed: u8) -> TestReplica {
    let replica = TestReplica::new(name, Some(TYPE1));
    write(&*replica.memory, extent(0, 700), seed).unwrap();
    replica
}

fn is_refused(replicas: &[&TestReplica], why: fn(&AssembleError) -> bool) -> bool {
    matches!(try_open(replicas, false), Err(MirrorError::Assemble { error, .. }) if why(&error))
}

#[test]
fn unlabelled_devices_make_a_mirror_without_asking_only_if_all_are_blank() {
    let (a, b) = (holding("a", 1), TestReplica::new("b", Some(TYPE1)));
    for replicas in [[&a, &b], [&b, &a]] {
        assert!(is_refused(&replicas, |refusal| matches!(refusal, AssembleError::NotCreated { .. })));
    }
    let blank = [TestReplica::new("c", None), TestReplica::new("d", None)];
    assert_eq!(states(&opened(&[&blank[0], &blank[1]])), [ReplicaState::InSync; 2]);
    let mut bare = [TestReplica::new("e", None), TestReplica::new("f", None)];
    bare.iter_mut().for_each(|replica| replica.has_no_label_room = true);
    assert!(is_refused(&[&bare[0], &bare[1]], |refusal| *refusal == AssembleError::NoRoom));
}

#[test]
fn the_one_that_holds_data_is_the_source_and_nothing_else_is_read_before_it_is_done() {
    let (a, b, c) = (holding("a", 1), TestReplica::new("b", Some(TYPE1)), TestReplica::new("c", Some(TYPE1)));
    let mirror = created(&[&b, &a, &c], None, false).unwrap();
    assert_eq!(states(&mirror), [ReplicaState::Resyncing, ReplicaState::InSync, ReplicaState::Resyncing]);
    for _ in 0..4 {
        assert_reads(&mirror, extent(0, 700), 1);
    }
    drop(mirror);
    let again = opened(&[&a, &b, &c]);
    assert_eq!(again.in_sync().len(), 1);
    assert_reads(&again, extent(0, 700), 1);
    resync(&again);
    assert_eq!(states(&again), [ReplicaState::InSync; 3]);
    for replica in [&b, &c] {
        assert_reads(&*replica.memory, extent(0, 700), 1);
    }
    verify(&again).unwrap();
}

#[test]
fn what_a_device_holds_is_replaced_only_by_force() {
    let (a, b) = (holding("a", 1), holding("b", 2));
    assert!(matches!(created(&[&a, &b], None, true), Err(ReplicaError::AmbiguousSource { .. })));
    assert_eq!(created(&[&a, &b], Some(0), false).err(), Some(ReplicaError::NotBlank { replica: "b".to_owned() }));
    assert_reads(&*b.memory, extent(0, 700), 2);
    let mirror = created(&[&a, &b], Some(0), true).unwrap();
    resync(&mirror);
    assert_reads(&*b.memory, extent(0, 700), 1);
    drop(mirror);
    // A label counts like data, also on the source.
    let c = TestReplica::new("c", Some(TYPE1));
    assert!(matches!(created(&[&a, &c], None, false), Err(ReplicaError::Replicas { .. })));
    assert!(matches!(created(&[&c, &b], Some(1), false), Err(ReplicaError::Replicas { .. })));
    let other = created(&[&c, &b], Some(1), true).unwrap();
    assert_reads(&other, extent(0, 700), 1);
    assert!(is_refused(&[&a, &b], |refusal| matches!(refusal, AssembleError::OtherMirror { replica: 1 })));
}

#[test]
fn a_mirror_whose_making_was_cut_short_opens_with_what_the_source_has_or_not_at_all() {
    for cut in 0..20 {
        let (a, mut b) = (holding("a", 1), holding("b", 2));
        b.labels_left = a.labels_left.clone();
        a.labels_left.set(Some(cut));
        let is_done = try_create(&[&a, &b], Some(0), true).is_some();
        a.labels_left.set(None);
        if cut == 0 {
            assert!(is_refused(&[&a, &b], |refusal| matches!(refusal, AssembleError::NotCreated { .. })));
        } else {
            let mirror = opened(&[&b, &a]);
            assert_eq!(mirror.in_sync().len(), 1);
            assert_reads(&mirror, extent(0, 700), 1);
            if !mirror.describe().replicas.iter().all(|replica| replica.is_online) {
                mirror.replace("b", b.source(), true).now_or_never().unwrap().unwrap();
            }
            resync(&mirror);
            assert_reads(&*b.memory, extent(0, 700), 1);
        }
        if is_done {
            return;
        }
    }
    panic!("it was never done");
}

/// What `mirror create` says of replicas of mirrors.
fn refused(replicas: &[&TestReplica], from: Option<usize>, force: bool) -> String {
    match created(replicas, from, force) {
        Err(error @ (ReplicaError::Replicas { .. } | ReplicaError::OnlyCopy { .. })) => error.to_string(),
        other => panic!("{:?}", other.err()),
    }
}

#[test]
fn creating_again_finishes_what_a_crash_cut_short_and_names_a_mirror_that_is_one() {
    for cut in 0..20 {
        let (a, mut b) = (holding("a", 1), TestReplica::new("b", Some(TYPE1)));
        b.labels_left = a.labels_left.clone();
        a.labels_left.set(Some(cut));
        let is_done = try_create(&[&a, &b], None, false).is_some();
        a.labels_left.set(None);
        // The order does not matter: the label tells whose content counts.
        let mirror = created(&[&b, &a], None, false).unwrap_or_else(|error| panic!("cut after {cut}: {error}"));
        resync(&mirror);
        for replica in [&a, &b] {
            assert_reads(&*replica.memory, extent(0, 700), 1);
        }
        assert_eq!(states(&mirror), [ReplicaState::InSync; 2]);
        close(&mirror);
        drop(mirror);
        for replicas in [[&a, &b], [&b, &a]] {
            let why = refused(&replicas, None, false);
            assert!(why.contains("already") && why.contains("a: in sync") && why.contains("b: in sync"), "{why}");
            assert_eq!(refused(&replicas, None, true), why, "and nothing is destroyed by force");
        }
        if is_done {
            return;
        }
    }
    panic!("it was never done");
}

#[test]
fn a_cut_creation_is_not_finished_from_the_wrong_end_nor_over_data() {
    let (a, mut b) = (holding("a", 1), holding("b", 2));
    b.labels_left = a.labels_left.clone();
    // After the label of `a`, which calls it the source.
    a.labels_left.set(Some(1));
    assert!(try_create(&[&a, &b], Some(0), true).is_none());
    a.labels_left.set(None);
    assert_eq!(created(&[&a, &b], None, false).err(), Some(ReplicaError::NotBlank { replica: "b".to_owned() }));
    assert!(refused(&[&a, &b], Some(1), false).contains("a is replica 0 (in sync) of mirror"));
    assert!(refused(&[&a, &b], Some(1), true).contains("a may hold the only good copy"));
    assert_reads(&*b.memory, extent(0, 700), 2);
    let mirror = created(&[&a, &b], Some(0), true).unwrap();
    resync(&mirror);
    assert_reads(&*b.memory, extent(0, 700), 1);
}

#[test]
fn creating_a_mirror_of_replicas_of_others_says_what_they_are_and_keeps_the_only_good_copy() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 700), 1).unwrap();
    let third = TestReplica::new("c", Some(TYPE1));
    mirror.add(third.source(), false).now_or_never().unwrap().unwrap();
    resync(&mirror);
    close(&mirror);
    // Two of three.
    let why = refused(&[&a, &b], None, false);
    assert!(why.contains("already, which has 3 replicas (a: in sync, b: in sync)"), "{why}");
    // One of them, and one of another mirror, and a stranger.
    let other = [TestReplica::new("x", Some(TYPE1)), TestReplica::new("y", Some(TYPE1))];
    drop(opened(&[&other[0], &other[1]]));
    let why = refused(&[&a, &other[1]], None, false);
    assert!(why.contains("a is replica 0 (in sync) of mirror") && why.contains("y is replica 1 (in sync)"), "{why}");
    let stranger = holding("s", 9);
    assert!(refused(&[&a, &stranger], None, false).starts_with("a is replica 0 (in sync)"));
    // One that was removed is no replica, and one that is out of sync is named so.
    mirror.remove("c").now_or_never().unwrap().unwrap();
    assert!(
        matches!(created(&[&third, &stranger], Some(0), false), Err(ReplicaError::Labelled { what, .. }) if what.contains("removed"))
    );
    b.is_offline.set(true);
    write(&mirror, extent(0, 8), 2).unwrap();
    close(&mirror);
    drop(mirror);
    b.is_offline.set(false);
    let why = refused(&[&b, &a], None, false);
    assert!(why.contains("b: out of sync, a: in sync") || why.contains("already"), "{why}");
    // By force, too, the only good copy is not replaced; the other one is.
    let why = refused(&[&a, &b], Some(1), true);
    assert!(why.contains("a may hold the only good copy") && why.contains("is in sync and has its changes"), "{why}");
    assert_reads(&*a.memory, extent(0, 8), 2);
    let mirror = created(&[&a, &b], Some(0), true).unwrap();
    resync(&mirror);
    assert_reads(&*b.memory, extent(0, 8), 2);
    // What has the label of another kind of group is a part of it, and has no second copy.
    set_label(&stranger, b"SBSTRIPE and what follows");
    assert!(refused(&[&third, &stranger], Some(0), true).contains("another kind of group"));
    set_label(&stranger, b"of a later kind of group");
    assert!(refused(&[&third, &stranger], Some(0), true).contains("another kind of group"));
}

/// By an interrupted resync, for instance.
#[test]
fn a_device_that_was_a_replica_and_is_made_one_anew_leaves_nothing_behind() {
    for replaces in [true, false] {
        let (a, b, mirror) = pair(Some(TYPE1));
        write(&mirror, extent(0, 700), 1).unwrap();
        let third = TestReplica::new("c", Some(TYPE1));
        mirror.add(third.source(), false).now_or_never().unwrap().unwrap();
        close(&mirror);
        drop(mirror);
        let mirror = opened(&[&a, &b]);
        assert_eq!(states(&mirror).len(), 3);
        let made = match replaces {
            true => mirror.replace("b", third.source(), true),
            false => mirror.replace("replica 2", third.source(), true),
        };
        made.now_or_never().unwrap().unwrap();
        resync(&mirror);
        assert_eq!(states(&mirror), [ReplicaState::InSync; 3]);
        close(&mirror);
        drop(mirror);
        assert_eq!(states(&opened(&[&a, &b, &third])), [ReplicaState::InSync; 3]);
    }
}

#[test]
fn a_name_is_on_every_label_and_stays_through_openings_and_new_replicas() {
    let [a, b, c] = ["a", "b", "c"].map(|name| TestReplica::new(name, Some(TYPE1)));
    let name: crate::label::name::MirrorName = "photos".parse().unwrap();
    let options = CreateOptions { random: random(), name: Some(name), from: None, force: false };
    let sources = vec![a.source(), b.source()];
    let mirror = create(sources, StoppedClock, options).now_or_never().unwrap().unwrap().mirror;
    assert_eq!(mirror.describe().name, Some(name));
    close(&mirror);
    drop(mirror);
    let mirror = opened(&[&b, &a]);
    mirror.add(c.source(), false).now_or_never().unwrap().unwrap();
    resync(&mirror);
    close(&mirror);
    drop(mirror);
    a.is_offline.set(true);
    assert_eq!(opened(&[&c, &b]).describe().name, Some(name));
    assert_eq!(pair(None).2.describe().name, None);
}

#[test]
fn a_replica_whose_label_is_damaged_is_left_out_and_nothing_is_written_to_it() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 600), 1).unwrap();
    close(&mirror);
    drop(mirror);
    let bad = [&b"SBMIRROR\x02\0"[..], &[0; 200]].concat();
    set_label(&b, &bad);
    let mirror = opened_by_the_others(&[&b, &a]);
    let described = mirror.describe();
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    let left_out = described.replicas.iter().find(|replica| replica.name == "b").unwrap();
    assert!(!left_out.is_online && left_out.last_error.contains("label is damaged"), "{}", left_out.last_error);
    write(&mirror, extent(0, 600), 2).unwrap();
    assert_reads(&mirror, extent(0, 600), 2);
    assert_reads(&*b.memory, extent(0, 600), 1);
    close(&mirror);
    // Damaged on all of them it is no new mirror.
    set_label(&a, &bad);
    assert!(matches!(try_open(&[&a, &b], false), Err(MirrorError::Label { .. })));
    // A label of another kind is no damage: the device is something else.
    let (c, d, mirror) = pair(Some(TYPE1));
    drop(mirror);
    set_label(&d, b"OF A LATER KIND OF GROUP");
    let refused = try_open(&[&c, &d], false).err().unwrap();
    assert!(
        matches!(&refused, MirrorError::Label { error: crate::label::LabelError::Other(begins), .. } if begins == b"OF A LAT")
    );
    assert_eq!(refused.to_string(), "b: it has the label of another kind of group");
}

type Step = for<'a> fn(&'a TestMirror, &'a TestReplica) -> LocalBoxFuture<'a, Result<(), ReplicaError>>;

/// Changes the replicas of a mirror of three, cut short after every number of labels. Each of these sets of replicas
/// must then make a mirror with the content, or be refused.
fn cut_short(step: Step, sets: &[&[usize]]) {
    for cut in 0..40 {
        let mut replicas = ["a", "b", "c", "d"].map(|name| TestReplica::new(name, Some(TYPE1)));
        let labels_left = replicas[0].labels_left.clone();
        replicas.iter_mut().for_each(|replica| replica.labels_left = labels_left.clone());
        let mirror = opened(&[&replicas[0], &replicas[1], &replicas[2]]);
        write(&mirror, extent(0, 700), 1).unwrap();
        labels_left.set(Some(cut));
        let is_done = step(&mirror, &replicas[3]).now_or_never().is_some();
        std::mem::forget(mirror);
        labels_left.set(None);
        let mut opened = 0;
        for set in sets {
            let images: Vec<TestReplica> = set.iter().map(|at| replicas[*at].image()).collect();
            let Ok(mirror) = try_open(&images.iter().collect::<Vec<_>>(), false) else { continue };
            opened += 1;
            assert_reads(&mirror, extent(0, 700), 1);
            resync(&mirror);
            for replica in mirror
                .describe()
                .replicas
                .iter()
                .filter(|replica| replica.state == ReplicaState::InSync && replica.is_online)
            {
                let image = images.iter().find(|image| image.name == replica.name).unwrap();
                assert_reads(&*image.memory, extent(0, 700), 1);
            }
            verify(&mirror).unwrap();
        }
        assert!(opened > 0, "cut after {cut} labels, neither the old nor the new mirror opens");
        if is_done {
            return;
        }
    }
    panic!("it was never done");
}

#[test]
fn adding_replacing_and_removing_cut_short_leave_the_old_replicas_or_the_new_ones() {
    cut_short(
        |mirror, replica| Box::pin(mirror.add(replica.source(), false)),
        &[&[0, 1, 2], &[0, 1, 2, 3], &[3, 2, 1, 0]],
    );
    cut_short(|mirror, replica| Box::pin(mirror.replace("c", replica.source(), false)), &[&[0, 1, 2], &[0, 1, 2, 3]]);
    cut_short(|mirror, _| Box::pin(mirror.remove("c")), &[&[0, 1], &[0, 1, 2]]);
}

#[test]
fn a_replica_whose_removal_was_cut_short_makes_no_mirror_and_its_removal_is_finished() {
    let (mut seen, labels) = (0, 30);
    for cut in 0..labels {
        let mut replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, None));
        let labels_left = replicas[0].labels_left.clone();
        replicas.iter_mut().for_each(|replica| replica.labels_left = labels_left.clone());
        let mirror = opened(&[&replicas[0], &replicas[1], &replicas[2]]);
        write(&mirror, extent(0, 8), 1).unwrap();
        labels_left.set(Some(cut));
        let is_done = mirror.remove("c").now_or_never().is_some();
        std::mem::forget(mirror);
        labels_left.set(None);
        let own = crate::mirror::probe::probe_device(&replicas[2].stack(), crate::Mutation::None)
            .now_or_never()
            .unwrap()
            .ok()
            .unwrap();
        let crate::label::assemble::ReplicaProbe::Labelled(own) = own else { panic!("it has a label") };
        if own.replicas[own.own_index].state != ReplicaState::Removed {
            continue;
        }
        seen += 1;
        let alone = [&replicas[2]];
        let found: Vec<_> = alone.iter().map(|_| crate::label::assemble::ReplicaProbe::Labelled(own.clone())).collect();
        assert_eq!(crate::label::assemble::assemble(&found), Err(AssembleError::NoneInSync));
        match try_open(&[&replicas[0], &replicas[1], &replicas[2]], false) {
            Ok(mirror) => assert_eq!(states(&mirror)[2], ReplicaState::Removed, "cut after {cut}"),
            Err(error) => assert!(error.to_string().contains("removed"), "{error}"),
        }
        assert!(is_refused(&[&replicas[0], &replicas[1], &replicas[2]], |refusal| matches!(
            refusal,
            AssembleError::Removed { replica: 2 }
        )));
        if is_done {
            break;
        }
    }
    assert!(seen > 1, "its own label is written before those of the others");
}

#[test]
fn a_device_is_added_only_if_it_fits_and_is_blank_or_by_force() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 600), 1).unwrap();
    let add =
        |replica: &TestReplica, force| mirror.add(replica.source(), force).now_or_never().expect("RAM never waits");
    let used = holding("u", 7);
    assert_eq!(add(&used, false), Err(ReplicaError::NotBlank { replica: "u".to_owned() }));
    assert_reads(&*used.memory, extent(0, 700), 7);
    assert!(matches!(
        add(&TestReplica::new("n", None), true),
        Err(ReplicaError::Unfit(MirrorError::Protection { .. }))
    ));
    let foreign = [TestReplica::new("x", Some(TYPE1)), TestReplica::new("y", Some(TYPE1))];
    drop(opened(&[&foreign[0], &foreign[1]]));
    // Its label says that the other one is in sync: whether that still exists is not known.
    for force in [false, true] {
        assert!(matches!(add(&foreign[0], force), Err(ReplicaError::OnlyCopy { .. })));
    }
    let removed = TestReplica::new("r", Some(TYPE1));
    let other = opened(&[&TestReplica::new("w", Some(TYPE1)), &removed]);
    other.remove("r").now_or_never().unwrap().unwrap();
    drop(other);
    assert!(matches!(add(&removed, false), Err(ReplicaError::Labelled { .. })));
    assert_eq!(states(&mirror).len(), 2);
    add(&used, true).unwrap();
    add(&removed, true).unwrap();
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync; 4]);
    assert_reads(&*removed.memory, extent(0, 600), 1);
    assert_eq!(add(&a, true), Err(ReplicaError::InUse { replica: "a".to_owned() }));
    drop(b);
}

#[test]
fn a_blank_device_in_the_place_of_a_replica_is_not_used_until_it_replaces_it() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 600), 1).unwrap();
    drop(mirror);
    let blank = TestReplica { name: "b", ..TestReplica::new("b", Some(TYPE1)) };
    let mirror = opened(&[&a, &blank]);
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    assert!(
        !mirror.describe().replicas[1].is_online && mirror.describe().replicas[1].last_error.contains("mirror replace")
    );
    write(&mirror, extent(0, 1), 2).unwrap();
    assert!(read(&*blank.memory, extent(0, 1)).unwrap().iter().all(|byte| *byte == 0));
    mirror.replace("b", blank.source(), false).now_or_never().unwrap().unwrap();
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync; 2]);
    assert_reads(&*blank.memory, extent(1, 599), 1);
    drop(mirror);
    // The replaced device is no replica any more.
    assert!(is_refused(&[&a, &b], |refusal| matches!(
        refusal,
        AssembleError::NotAReplica { .. } | AssembleError::NoneInSync
    )));
    verify(&opened(&[&a, &blank])).unwrap();
}

#[test]
fn a_replica_that_missed_an_addition_is_not_in_sync() {
    for labels in 0..8 {
        let (a, mut b) = (TestReplica::new("a", None), TestReplica::new("b", None));
        let c = TestReplica::new("c", None);
        // It fails labels from some label on; the others do not.
        b.labels_fail = true;
        let mirror = opened(&[&a, &b]);
        write(&mirror, extent(0, 8), 1).unwrap();
        b.labels_left.set(Some(labels));
        mirror.add(c.source(), false).now_or_never().unwrap().unwrap();
        if states(&mirror)[1] == ReplicaState::InSync {
            assert!(labels > 0, "it got the label that says who was added");
            return;
        }
        drop(mirror);
        b.labels_left.set(None);
        a.is_offline.set(true);
        c.is_offline.set(true);
        // It continues with the replicas that it knows.
        if let Ok(mirror) = try_open(&[&a, &b], false) {
            write(&mirror, extent(0, 8), 2).unwrap();
        }
        a.is_offline.set(false);
        c.is_offline.set(false);
        match try_open(&[&a, &b, &c], false) {
            Err(MirrorError::Assemble { error: AssembleError::SplitBrain { .. }, .. }) => {}
            other => panic!("{:?}", other.map(|mirror| states(&mirror))),
        }
    }
    panic!("it never got all labels");
}

#[test]
fn an_image_of_yesterday_does_not_make_the_only_current_replica_one_of_several() {
    let (a, b, mirror) = pair(Some(TYPE1));
    let c = TestReplica::new("c", Some(TYPE1));
    mirror.add(c.source(), false).now_or_never().unwrap().unwrap();
    resync(&mirror);
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    drop(mirror);
    let old = [a.image(), b.image()];
    let mirror = opened(&[&a, &b, &c]);
    write(&mirror, extent(0, 8), 2).unwrap();
    close(&mirror);
    drop(mirror);
    // Created anew from an image, beside the one that is current: refused, and its state is named as an opening sees it.
    let why = refused(&[&old[0], &old[1], &c], Some(0), true);
    assert!(why.contains("c may hold the only good copy"), "{why}");
    let why = refused(&[&old[0], &old[1], &c], None, false);
    assert!(why.contains("(a: out of sync, b: out of sync, c: in sync)"), "{why}");
    // Opened without it, the images are a mirror; it does not become a replica of that.
    let mirror = opened(&[&old[0], &old[1]]);
    let kept = |error: ReplicaError| assert!(matches!(error, ReplicaError::OnlyCopy { .. }), "{error}");
    for force in [false, true] {
        kept(mirror.add(c.source(), force).now_or_never().unwrap().unwrap_err());
        kept(mirror.replace("b", c.source(), force).now_or_never().unwrap().unwrap_err());
    }
    // Also when both sides were written.
    write(&mirror, extent(0, 8), 3).unwrap();
    kept(mirror.add(c.source(), true).now_or_never().unwrap().unwrap_err());
    close(&mirror);
    drop(mirror);
    let split = created(&[&old[0], &old[1], &c], None, false).err();
    assert!(
        matches!(
            &split,
            Some(ReplicaError::Unfit(MirrorError::Assemble { error: AssembleError::SplitBrain { .. }, .. }))
        ),
        "{split:?}"
    );
    kept(created(&[&old[0], &old[1], &c], Some(0), true).err().unwrap());
    assert_reads(&*c.memory, extent(0, 8), 2);
    // The other way round the images are what is replaced: by force where nothing of them is left to lose.
    let (x, y, mirror) = pair(Some(TYPE1));
    let stale = y.image();
    write(&mirror, extent(0, 8), 4).unwrap();
    close(&mirror);
    drop(mirror);
    let mirror = created(&[&x, &stale], Some(0), true).unwrap();
    resync(&mirror);
    assert_reads(&*stale.memory, extent(0, 8), 4);
}
