//! What must not be forgotten about legs: that they were left behind, what they lost, and since when.

use futures_util::FutureExt;
use sealblock_block::{Failure, Operation};

use super::rig::*;
use crate::judge::{Found, Refusal, Verdict, judge};
use crate::label::Standing;
use crate::label::tests::label;
use crate::mirror::Mirror;

fn leg_of(mirror: &Mirror<Still>, at: usize) -> std::rc::Rc<crate::leg::Leg> {
    mirror.legs.borrow()[at].clone()
}

#[test]
fn a_region_that_could_not_be_noted_is_not_taken_for_noted() {
    let (mut a, b) = (TestLeg::new("a", None), TestLeg::new("b", None));
    a.bare = true;
    let mirror = opened(&[&a, &b]);
    b.gone.set(true);
    for _ in 0..3 {
        let refused = write(&mirror, extent(0, 1), 2).unwrap_err();
        assert!(refused.to_string().contains("note"), "{refused}");
    }
}

#[test]
fn nothing_is_answered_before_it_is_noted_that_somebody_else_left_a_leg_behind() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 1), 1).unwrap();
    // Another request has met the failure, and its note is not written yet.
    mirror.leave(&leg_of(&mirror, 1), "it failed another request");
    write(&mirror, extent(0, 1), 2).unwrap();
    drop(mirror);
    let again = opened(&[&b, &a]);
    assert_eq!(again.describe().legs[1].standing, Standing::Missing);
    assert_reads(&again, extent(0, 1), 2);
}

#[test]
fn what_the_last_leg_lost_is_said_to_a_host_and_not_to_the_worker() {
    let (a, b, mirror) = pair(None);
    b.gone.set(true);
    write(&mirror, extent(0, 1), 1).unwrap();
    a.gone.set(true);
    write(&mirror, extent(0, 1), 2).unwrap_err();
    a.gone.set(false);
    mirror.take_back(&leg_of(&mirror, 0), a.stack()).now_or_never().unwrap().unwrap();
    assert!(mirror.is_suspect(extent(0, 1)), "what it lost others may have");
    mirror.settle().now_or_never().unwrap().unwrap();
    tidy(&mirror);
    assert!(run(&mirror, Operation::Flush).is_err());
    assert!(run(&mirror, Operation::Flush).is_ok());
}

#[test]
fn a_leg_that_cannot_be_asked_is_no_leg_that_has_lost_its_blocks() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 2), 1).unwrap();
    a.gone.set(true);
    b.gone.set(true);
    let legs = mirror.current();
    let at = extent(0, 2);
    let error = mirror.gather(&legs, at, checks(&mirror, at)).now_or_never().unwrap().err().unwrap();
    assert!(matches!(error.failure(), Failure::Unreachable { .. }), "{error}");
}

fn known(found: &[Found]) -> crate::judge::Known {
    match judge(found) {
        Ok(Verdict::Known(known)) => known,
        other => panic!("not a mirror with a past but {other:?}"),
    }
}

#[test]
fn an_older_image_of_a_leg_lacks_everything_and_is_no_split_brain() {
    let (mut a, b) = (label(2, 0, 30), label(2, 1, 20));
    (a.members[0].seen, a.members[1].seen) = (29, 29);
    let found = [a.clone(), b.clone()].map(|label| Found::Labelled(Box::new(label)));
    let merged = known(&found).label;
    assert_eq!((merged.members[1].standing, merged.members[1].missed.count()), (Standing::Missing, 64));
    // The last label may have reached only one of them.
    let young = label(2, 1, 29);
    let found = [a, young].map(|label| Found::Labelled(Box::new(label)));
    assert_eq!(known(&found).label.members[1].standing, Standing::Current);
}

#[test]
fn a_leg_that_left_while_another_was_missing_can_come_back() {
    // The first leg noted that the second was missing. Then it left, and the third brought the second up to date.
    let (mut first, mut second) = (label(3, 0, 40), label(3, 1, 90));
    first.members[1].standing = Standing::Missing;
    second.members[0].standing = Standing::Missing;
    (second.members[0].seen, second.members[0].sent) = (39, 40);
    (first.members[1].seen, first.members[1].sent) = (12, 12);
    let labelled = |label: &crate::label::Label| Found::Labelled(Box::new(label.clone()));
    assert_eq!(known(&[labelled(&first), labelled(&second)]).label.members[0].standing, Standing::Missing);
    // Had it gone on alone, its label would be later than what the others knew.
    first.generation = 41;
    let refused = judge(&[labelled(&first), labelled(&second)]);
    assert_eq!(refused, Err(Refusal::SplitBrain { first: 0, second: 1 }));
}
