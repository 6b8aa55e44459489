//! Assembly from labels alone: which replica counts, which is out of sync, which is refused.

use crate::label::assemble::*;
use crate::label::lineage::Lineage;
use crate::label::regions::Regions;
use crate::label::tests::label;
use crate::label::{Label, ReplicaState};

fn labelled(label: Label) -> ReplicaProbe {
    ReplicaProbe::Labelled(Box::new(label))
}

fn known(found: &[ReplicaProbe]) -> ExistingMirror {
    match assemble(found) {
        Ok(Assembly::Known(known)) => *known,
        other => panic!("not a mirror with a past but {other:?}"),
    }
}

/// A lineage of confirmed sessions, oldest first: identity, and event count up to which it is known.
pub(super) fn history(sessions: &[(u64, u64)]) -> Lineage {
    let mut lineage = Lineage::default();
    for (id, until) in sessions {
        lineage.begin(*id, 0);
        lineage.confirm(*until);
    }
    lineage
}

/// The label of replica `own` of two, which marked the other out of sync and continued in a session of its own.
fn alone(own: usize, events: u64) -> Label {
    let mut label = label(2, own, events);
    label.lineage = history(&[(100 + own as u64, events)]);
    let mut dirty = Regions::none(64);
    dirty.insert(3);
    mark_out_of_sync(&mut label.replicas[1 - own], &dirty);
    label
}

#[test]
fn replicas_without_labels_make_a_new_mirror_if_all_are_there() {
    let bare = |has_room| ReplicaProbe::Unlabelled { has_room };
    assert_eq!(assemble(&[bare(true), bare(false)]), Ok(Assembly::New));
    assert_eq!(assemble(&[bare(false), bare(false)]), Err(AssembleError::NoRoom));
    assert_eq!(assemble(&[bare(true), ReplicaProbe::Absent]), Err(AssembleError::NewWithoutReplica { replica: 1 }));
    assert_eq!(assemble(&[ReplicaProbe::Absent, ReplicaProbe::Absent]), Err(AssembleError::NoReplica));
}

#[test]
fn of_replicas_that_are_alike_one_that_lacks_nothing_that_was_answered_counts() {
    let of = |found: &[ReplicaProbe], answered: &[Answered]| match assemble_beside(found, &[], answered) {
        Ok(Assembly::Known(known)) => (known.label.own_index, known.label.unreported_loss),
        other => panic!("{other:?}"),
    };
    let alike = [labelled(label(2, 0, 5)), labelled(label(2, 1, 5))];
    let (there, unknown, lost) = (Answered::AllThere, Answered::Unknown, Answered::MayBeLost);
    for (answered, counts) in [
        ([there, there], (0, false)),
        ([lost, there], (1, false)),
        ([there, lost], (0, false)),
        ([lost, lost], (0, true)),
        // One that another server has is no proof that nothing is lost.
        ([unknown, there], (1, false)),
        ([unknown, unknown], (0, false)),
        ([lost, unknown], (1, true)),
        ([unknown, lost], (0, true)),
    ] {
        assert_eq!(of(&alike, &answered), counts, "{answered:?}");
    }
    // What an older label is of may be an older image, which lacks what was flushed.
    let newer = [labelled(label(2, 0, 6)), labelled(label(2, 1, 5))];
    assert_eq!(of(&newer, &[lost]), (0, true));
    let told = [5, 5].map(|events| labelled(Label { unreported_loss: true, ..label(2, 0, events) }));
    assert_eq!(of(&told[..1], &[]), (0, true), "by its label");
}

#[test]
fn replicas_are_known_by_their_labels_in_any_order() {
    let known = known(&[labelled(label(2, 1, 5)), labelled(label(2, 0, 5))]);
    assert_eq!(known.indices, [1, 0]);
    assert!(known.label.replicas.iter().all(|record| record.state == ReplicaState::InSync));
}

#[test]
fn a_replica_that_is_marked_out_of_sync_lacks_the_dirty_regions_of_both_labels() {
    let mut stale = label(2, 1, 5);
    stale.dirty.insert(60);
    for found in [[labelled(alone(0, 9)), labelled(stale.clone())], [labelled(stale.clone()), labelled(alone(0, 9))]] {
        let known = known(&found);
        let record = &known.label.replicas[1];
        assert_eq!(
            (record.state, record.out_of_sync.iter().collect::<Vec<_>>()),
            (ReplicaState::OutOfSync, vec![3, 60])
        );
        assert!(known.label.dirty.is_empty(), "dirty regions of the out-of-sync replica count for it alone");
    }
}

#[test]
fn a_replica_whose_own_label_says_that_it_lacks_something_is_not_current_because_an_older_label_says_so() {
    let ours = Label { lineage: history(&[(1, 5)]), ..label(3, 0, 9) };
    // An opening of the third with an image of the second changed nothing, and had marked this one out of sync.
    let mut theirs = Label { lineage: history(&[(1, 5)]), ..label(3, 1, 40) };
    (theirs.replicas[1].state, theirs.replicas[1].acked_events) =
        (ReplicaState::Resyncing, ours.replicas[1].acked_events);
    let judged = known(&[labelled(ours.clone()), labelled(theirs.clone())]);
    assert_eq!(judged.label.replicas[1].state, ReplicaState::OutOfSync);
    assert_eq!(judged.label.replicas[1].out_of_sync, Regions::all(64));
    // A writer that knows that label has resynced the replica since.
    let mut later = ours;
    later.replicas[1].sent_events = 40;
    let judged = known(&[labelled(later), labelled(theirs)]);
    assert_eq!(judged.label.replicas[1].state, ReplicaState::InSync);
}

#[test]
fn two_that_went_on_without_each_other_are_refused() {
    let split = [labelled(alone(0, 9)), labelled(alone(1, 7))];
    assert_eq!(assemble(&split), Err(AssembleError::SplitBrain { first: 0, second: 1 }));
    // One of three that continued alone, against two that continued together.
    let mut one = Label { lineage: history(&[(1, 5), (2, 20)]), ..label(3, 0, 20) };
    [1, 2].into_iter().for_each(|at| mark_out_of_sync(&mut one.replicas[at], &Regions::none(64)));
    let mut two = Label { lineage: history(&[(1, 5), (3, 9)]), ..label(3, 1, 9) };
    mark_out_of_sync(&mut two.replicas[0], &Regions::none(64));
    assert!(matches!(assemble(&[labelled(one), labelled(two)]), Err(AssembleError::SplitBrain { .. })));
}

#[test]
fn a_label_that_was_sent_and_not_heard_of_is_no_split_and_one_written_apart_since_is() {
    let mut one = alone(0, 90);
    (one.replicas[1].acked_events, one.replicas[1].sent_events) = (5, 70);
    // The other one continued alone from its label 5: it cannot have had label 70.
    let apart = alone(1, 22);
    assert!(matches!(assemble(&[labelled(one.clone()), labelled(apart)]), Err(AssembleError::SplitBrain { .. })));
    let mut unheard = Label { lineage: history(&[(100, 70)]), ..alone(1, 70) };
    (unheard.replicas[0].acked_events, unheard.replicas[0].sent_events) = (69, 70);
    assert_eq!(known(&[labelled(one), labelled(unheard)]).label.own_index, 0);
}

#[test]
fn an_old_image_that_went_on_alone_is_refused_beside_what_the_others_wrote_since() {
    // The first replica, restored to label 5, continued alone; the second has been written together with it up to
    // label 60.
    let mut image = alone(0, 90);
    image.lineage = history(&[(1, 5), (2, 90)]);
    (image.replicas[1].acked_events, image.replicas[1].sent_events) = (4, 5);
    let mut together = Label { lineage: history(&[(1, 60)]), ..label(2, 1, 60) };
    together.replicas.iter_mut().for_each(|record| (record.acked_events, record.sent_events) = (59, 60));
    let split = Err(AssembleError::SplitBrain { first: 0, second: 1 });
    assert_eq!(assemble(&[labelled(image.clone()), labelled(together.clone())]), split);
    // Nor if its label passes for an older one: its changes would be lost silently.
    let early = Label { events: 40, lineage: history(&[(1, 5), (2, 40)]), ..image.clone() };
    assert_eq!(assemble(&[labelled(early), labelled(together.clone())]), split);
    // One label more than the first replica knows was in flight at the crash of both: no request completed for it.
    together.replicas.iter_mut().for_each(|record| record.acked_events = 5);
    (together.changed, together.is_tentative) = (5, true);
    assert_eq!(known(&[labelled(image.clone()), labelled(together.clone())]).label.own_index, 0);
    // Not if the first replica had acknowledged a later label there: what was restored is from before that.
    together.replicas[0].acked_events = 6;
    assert_eq!(assemble(&[labelled(image.clone()), labelled(together.clone())]), split);
    together.replicas[0].acked_events = 5;
    // Nor is a resyncing replica overwritten that has changes which the authority lacks.
    together.is_tentative = false;
    together.replicas[1].state = ReplicaState::Resyncing;
    assert_eq!(assemble(&[labelled(image.clone()), labelled(together.clone())]), split);
    // A replica without a lineage gets a full resync.
    together.lineage = Lineage::default();
    together.replicas[1].acked_events = 59;
    let known = known(&[labelled(image), labelled(together)]);
    assert_eq!((known.label.own_index, known.label.replicas[1].out_of_sync.iter().count()), (0, 64));
}

#[test]
fn a_resync_that_ended_at_a_crash_is_no_split_brain() {
    // The replica that is back has the last label; the other one does not have it yet.
    let mut ended = label(2, 1, 10);
    ended.replicas.iter_mut().for_each(|record| (record.acked_events, record.sent_events) = (9, 10));
    let mut before = alone(0, 9);
    before.replicas[1].state = ReplicaState::Resyncing;
    ended.lineage = before.lineage.clone();
    let known = known(&[labelled(before), labelled(ended)]);
    assert_eq!(known.label.replicas[1].state, ReplicaState::InSync);
    assert_eq!(known.label.events, 10);
}

#[test]
fn an_old_image_tells_nothing_and_lacks_everything() {
    let (mut now, old) = (label(2, 0, 9), label(2, 1, 3));
    now.replicas[1].acked_events = 8;
    let known = known(&[labelled(now.clone()), labelled(old.clone())]);
    assert_eq!((known.label.events, known.label.replicas[1].state), (9, ReplicaState::OutOfSync));
    assert_eq!(known.label.replicas[1].out_of_sync.iter().count(), 64);
    // A replica that knows a later label but is not in sync cannot replace it.
    now.replicas[0].state = ReplicaState::Resyncing;
    assert_eq!(assemble(&[labelled(now.clone()), labelled(old.clone())]), Err(AssembleError::NoneInSync));
    now.replicas[1].acked_events = 3;
    assert!(assemble(&[labelled(now), labelled(old)]).is_ok());
}

#[test]
fn a_replica_that_others_mark_out_of_sync_does_not_replace_the_in_sync_one() {
    // The third replica continued without the first, and was resyncing the second when it failed.
    let first = label(3, 0, 5);
    let mut second = label(3, 1, 40);
    second.replicas[0].state = ReplicaState::OutOfSync;
    second.replicas[1].state = ReplicaState::Resyncing;
    assert_eq!(
        assemble(&[labelled(first.clone()), labelled(second.clone()), ReplicaProbe::Absent]),
        Err(AssembleError::NoneInSync)
    );
    let mut third = Label { own_index: 2, ..second.clone() };
    third.replicas[1].out_of_sync.insert(7);
    let known = known(&[labelled(first), labelled(second), labelled(third)]);
    assert_eq!(known.label.own_index, 2);
}

#[test]
fn an_out_of_sync_mark_becomes_obsolete() {
    // The first replica last learned that the third one continued without the second. That was so.
    let mut first = label(3, 0, 31);
    first.replicas[0].state = ReplicaState::Resyncing;
    first.replicas[1].state = ReplicaState::OutOfSync;
    (first.replicas[2].acked_events, first.replicas[2].sent_events) = (30, 30);
    // Since then, and without the first, the third one has resynced the second.
    let mut second = label(3, 1, 60);
    second.replicas[0].state = ReplicaState::OutOfSync;
    (second.replicas[2].acked_events, second.replicas[2].sent_events) = (59, 60);
    let found = [labelled(first.clone()), labelled(second.clone()), ReplicaProbe::Absent];
    assert_eq!(known(&found).label.own_index, 1);
    // But not if all that it knows of the third is older.
    (second.replicas[2].acked_events, second.replicas[2].sent_events) = (18, 18);
    assert_eq!(assemble(&[labelled(first), labelled(second), ReplicaProbe::Absent]), Err(AssembleError::NoneInSync));
}

#[test]
fn an_older_image_that_was_opened_alone_says_nothing_of_a_replica_that_has_all_of_it() {
    // Taken while the second replica was offline, restored, and opened alone without a write: its event count leapt.
    let mut first = label(2, 0, 90);
    first.replicas[1].state = ReplicaState::OutOfSync;
    first.lineage = history(&[(100, 9)]);
    // The second replica has been resynced since, and both continued.
    let mut second = label(2, 1, 40);
    (second.replicas[0].acked_events, second.replicas[0].sent_events) = (39, 40);
    second.lineage = history(&[(100, 9), (200, 40)]);
    let known = known(&[labelled(first.clone()), labelled(second.clone())]);
    assert_eq!(known.label.own_index, 1);
    assert_eq!(known.label.replicas[0].state, ReplicaState::OutOfSync);
    // But not of a replica that lacks some of it.
    second.lineage = history(&[(100, 8), (200, 40)]);
    assert_eq!(assemble(&[labelled(first), labelled(second)]), Err(AssembleError::SplitBrain { first: 0, second: 1 }));
}

#[test]
fn what_a_replica_knows_to_lack_counts() {
    let mut behind = label(2, 1, 12);
    behind.replicas[1].state = ReplicaState::Resyncing;
    behind.replicas[1].out_of_sync.insert(40);
    let known = known(&[labelled(alone(0, 9)), labelled(behind)]);
    assert_eq!(known.label.replicas[1].out_of_sync.iter().collect::<Vec<_>>(), [3, 40]);
}

#[test]
fn what_any_current_replica_has_as_dirty_is_dirty() {
    let (mut a, mut b) = (label(2, 0, 5), label(2, 1, 6));
    a.dirty.insert(1);
    b.dirty.insert(2);
    assert_eq!(known(&[labelled(a), labelled(b)]).label.dirty.iter().collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn absent_replicas_are_named_and_stale_ones_alone_refused() {
    let one = known(&[labelled(label(2, 0, 5)), ReplicaProbe::Absent]);
    assert_eq!(one.indices, [0, 1]);
    let fewer = known(&[labelled(label(3, 2, 5))]);
    assert_eq!(fewer.indices, [2]);
    let mut behind = label(2, 1, 5);
    behind.replicas[1].state = ReplicaState::Resyncing;
    assert_eq!(assemble(&[ReplicaProbe::Absent, labelled(behind)]), Err(AssembleError::NoneInSync));
}

#[test]
fn other_devices_duplicates_and_replicas_of_other_mirrors_are_refused() {
    let own = || labelled(label(2, 0, 5));
    for has_room in [true, false] {
        let blank = ReplicaProbe::Unlabelled { has_room };
        assert_eq!(known(&[own(), blank.clone()]).unused, [1], "another device in the place of a replica");
        assert_eq!(assemble(&[own(), labelled(label(2, 1, 5)), blank]), Err(AssembleError::NotAReplica { replica: 2 }));
    }
    let mut beside_bare = label(2, 0, 5);
    beside_bare.replicas[1].has_room = false;
    assert!(known(&[labelled(beside_bare), ReplicaProbe::Unlabelled { has_room: false }]).unused.is_empty());
    assert_eq!(assemble(&[own(), own()]), Err(AssembleError::Duplicate { first: 0, second: 1 }));
    let foreign = Label { uuid: [8; 16], ..label(2, 1, 5) };
    assert_eq!(assemble(&[own(), labelled(foreign)]), Err(AssembleError::OtherMirror { replica: 1 }));
    let third = ReplicaProbe::Absent;
    assert_eq!(assemble(&[own(), labelled(label(2, 1, 5)), third]), Err(AssembleError::NotAReplica { replica: 2 }));
    let mut without = label(2, 0, 9);
    without.replicas[1].state = ReplicaState::Removed;
    let removed = labelled(label(2, 1, 5));
    assert_eq!(assemble(&[labelled(without), removed]), Err(AssembleError::Removed { replica: 1 }));
}

#[test]
fn a_removed_replica_makes_no_mirror_and_its_marks_count() {
    // It continued with the first replica and without the second, and was then removed.
    let mut out = label(3, 2, 50);
    out.lineage = history(&[(1, 20), (2, 49)]);
    out.replicas[1].state = ReplicaState::OutOfSync;
    out.replicas[2].state = ReplicaState::Removed;
    assert_eq!(assemble(&[labelled(out.clone()), ReplicaProbe::Absent]), Err(AssembleError::NoneInSync));
    let outdated = Label { lineage: history(&[(1, 20)]), ..label(3, 1, 20) };
    assert!(assemble(&[labelled(outdated.clone()), ReplicaProbe::Absent]).is_ok(), "it cannot know");
    assert_eq!(assemble(&[labelled(outdated), labelled(out.clone())]), Err(AssembleError::NoneInSync));
    // The others did not get the label of the removal: assembly completes it.
    let mut first = Label { lineage: history(&[(1, 20), (2, 49)]), ..label(3, 0, 49) };
    first.replicas[1].state = ReplicaState::OutOfSync;
    let finished = known(&[labelled(first), labelled(out), ReplicaProbe::Absent]);
    assert_eq!((finished.label.replicas[2].state, finished.unused), (ReplicaState::Removed, vec![1]));
}

#[test]
fn labels_of_openings_that_changed_nothing_mark_no_replica() {
    // Both were in one session; then each was opened without the other, and only the second was changed.
    let mut first = Label { lineage: history(&[(1, 20)]), ..label(2, 0, 900) };
    (first.replicas[0].acked_events, first.replicas[0].sent_events) = (899, 900);
    (first.replicas[1].acked_events, first.replicas[1].sent_events) = (20, 20);
    let mut second = Label { lineage: history(&[(1, 20), (2, 600)]), ..label(2, 1, 600) };
    (second.replicas[0].acked_events, second.replicas[0].sent_events) = (20, 20);
    mark_out_of_sync(&mut second.replicas[0], &Regions::none(64));
    let found = known(&[labelled(first.clone()), labelled(second.clone())]);
    assert_eq!((found.label.own_index, found.label.replicas[0].state), (1, ReplicaState::OutOfSync));
    // Announced, with a crash before it was confirmed.
    first.lineage.begin(3, 900);
    assert_eq!(known(&[labelled(first.clone()), labelled(second.clone())]).label.own_index, 1);
    first.lineage.confirm(901);
    assert!(matches!(assemble(&[labelled(first), labelled(second)]), Err(AssembleError::SplitBrain { .. })));
}

#[test]
fn the_last_label_before_a_change_may_have_been_in_flight() {
    let mut ahead = Label { lineage: history(&[(1, 21)]), changed: 20, is_tentative: true, ..label(2, 0, 21) };
    let behind = Label { lineage: history(&[(1, 20)]), ..label(2, 1, 20) };
    let found = known(&[labelled(ahead.clone()), labelled(behind.clone())]);
    assert!(found.label.replicas.iter().all(|record| record.state == ReplicaState::InSync));
    // Without the other replica the change did not wait.
    ahead.replicas[1].state = ReplicaState::OutOfSync;
    let found = known(&[labelled(ahead.clone()), labelled(behind.clone())]);
    assert_eq!(found.label.replicas[1].state, ReplicaState::OutOfSync);
    // The replica that did not get it continued alone: a split brain only where a change may have been made before.
    let mut alone = Label { lineage: history(&[(1, 20), (2, 700)]), ..label(2, 1, 700) };
    alone.replicas[0].state = ReplicaState::OutOfSync;
    let refused = assemble(&[labelled(ahead.clone()), labelled(alone.clone())]);
    assert_eq!(refused, Err(AssembleError::SplitBrain { first: 0, second: 1 }));
    ahead.replicas[1].state = ReplicaState::InSync;
    assert_eq!(known(&[labelled(ahead), labelled(alone)]).label.own_index, 1);
}

#[test]
fn a_resyncing_replica_leaves_in_doubt_what_its_source_left_in_doubt() {
    // The last label before a change reached the first replica only; an opening without the second resynced the third
    // and changed nothing. The second continued alone.
    let session = history(&[(1, 21)]);
    let mut source = Label { lineage: session, changed: 20, is_tentative: true, ..label(3, 0, 40) };
    source.replicas[2].state = ReplicaState::Resyncing;
    [0, 2].into_iter().for_each(|at| (source.replicas[at].acked_events, source.replicas[at].sent_events) = (39, 40));
    source.replicas[1].sent_events = 21;
    let mut resyncing = Label { own_index: 2, ..source.clone() };
    let mut alone = Label { lineage: history(&[(1, 20), (2, 700)]), ..label(3, 1, 700) };
    [0, 2].into_iter().for_each(|at| mark_out_of_sync(&mut alone.replicas[at], &Regions::none(64)));
    let found = known(&[labelled(source.clone()), labelled(alone.clone()), labelled(resyncing.clone())]);
    assert_eq!(found.label.own_index, 1);
    assert!([0, 2].into_iter().all(|at| found.label.replicas[at].out_of_sync == Regions::all(64)));
    // A label that was sent to the second as well had reached it before: what lies there now is an older image.
    resyncing.replicas[1].sent_events = 40;
    let refused = assemble(&[labelled(source), labelled(alone), labelled(resyncing)]);
    assert_eq!(refused, Err(AssembleError::SplitBrain { first: 1, second: 2 }));
}

#[test]
fn a_writer_that_read_a_label_includes_its_changes() {
    // The last label of the third replica preceded a change and was in flight: the first never got it, and continued.
    // The second was resynced from that one, with the third online.
    let mut third = Label { lineage: history(&[(1, 21)]), changed: 20, is_tentative: true, ..label(3, 2, 21) };
    mark_out_of_sync(&mut third.replicas[1], &Regions::none(64));
    let mut second = Label { lineage: history(&[(1, 20), (2, 700)]), ..label(3, 1, 700) };
    mark_out_of_sync(&mut second.replicas[2], &Regions::none(64));
    (second.replicas[2].acked_events, second.replicas[2].sent_events) = (21, 650);
    let found = known(&[labelled(second.clone()), labelled(third.clone()), ReplicaProbe::Absent]);
    assert_eq!((found.label.own_index, found.label.replicas[2].state), (1, ReplicaState::OutOfSync));
    // A replica that knew only the label before may lack what was changed without it.
    second.replicas[2].acked_events = 20;
    let refused = assemble(&[labelled(second), labelled(third), ReplicaProbe::Absent]);
    assert_eq!(refused, Err(AssembleError::SplitBrain { first: 0, second: 1 }));
}

#[test]
fn an_image_older_than_what_the_lineage_remembers_is_refused_unless_it_is_the_very_one_last_seen() {
    let sessions: Vec<(u64, u64)> = (0..300).map(|id| (id, 10 * id + 5)).collect();
    let mut now = Label { lineage: history(&sessions), ..label(2, 0, 2995) };
    (now.replicas[1].acked_events, now.replicas[1].sent_events) = (15, 15);
    now.replicas[1].state = ReplicaState::OutOfSync;
    let old = |until| Label { lineage: history(&[(0, 5), (1, until)]), ..label(2, 1, until) };
    assert_eq!(known(&[labelled(now.clone()), labelled(old(15))]).label.replicas[1].state, ReplicaState::OutOfSync);
    let refused = assemble(&[labelled(now), labelled(old(14))]);
    assert_eq!(refused, Err(AssembleError::SplitBrain { first: 0, second: 1 }));
}

#[test]
fn identities_of_replicas_differ() {
    let ids = [
        replica_id(&[7; 16], 0, 0),
        replica_id(&[7; 16], 0, 1),
        replica_id(&[7; 16], 1, 0),
        replica_id(&[6; 16], 0, 0),
    ];
    assert!((0..4).all(|a| (0..a).all(|b| ids[a] != ids[b])));
}
