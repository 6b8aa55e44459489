//! Flushes that fail when nobody above has asked for them.

use futures_util::FutureExt;
use sealblock_block::Operation;

use super::rig::*;
use crate::label::Standing;

fn flush(mirror: &Rig) -> bool {
    run(&**mirror, Operation::Flush).is_ok()
}

fn tidies(mirror: &Rig) -> bool {
    (0..2).all(|_| mirror.tidy().now_or_never().expect("RAM never waits").is_ok())
}

/// A mirror whose second leg was left behind, with a write that was not flushed.
fn alone() -> (TestLeg, TestLeg, Rig) {
    let (a, b, mirror) = pair(None);
    b.gone.set(true);
    write(&*mirror, extent(0, 1), 1).unwrap();
    (a, b, mirror)
}

#[test]
fn what_the_last_leg_says_to_the_mirror_is_told_to_who_flushes_next() {
    let (a, _b, mirror) = alone();
    a.fails_flush.set(true);
    assert!(!tidies(&mirror));
    assert!(!flush(&mirror), "the leg tells of it once, and it told the mirror");
    assert!(flush(&mirror), "once");
    assert!(tidies(&mirror));
}

#[test]
fn a_leg_that_fails_a_flush_beside_a_good_one_is_left_behind_and_nobody_is_told() {
    let (a, _b, mirror) = pair(None);
    write(&*mirror, extent(0, 1), 1).unwrap();
    a.fails_flush.set(true);
    assert!(tidies(&mirror));
    assert_eq!(standings(&mirror), [Standing::Missing, Standing::Current]);
    assert!(flush(&mirror), "the other leg has it all");
}

#[test]
fn legs_that_fail_a_flush_together_are_told_of() {
    let (a, b, mirror) = pair(None);
    write(&*mirror, extent(0, 1), 1).unwrap();
    a.fails_flush.set(true);
    b.fails_flush.set(true);
    assert!(!tidies(&mirror));
    assert!(!flush(&mirror) && flush(&mirror));
    assert!(!mirror.notes.suspect.borrow().is_empty(), "each may have lost something else");
    assert_eq!(standings(&mirror), [Standing::Current, Standing::Current]);
}

#[test]
fn a_close_says_what_nobody_was_told() {
    let (a, _b, mirror) = alone();
    a.fails_flush.set(true);
    assert!(!tidies(&mirror));
    assert!(mirror.close().now_or_never().expect("RAM never waits").is_err());
    let (a, _b, mirror) = alone();
    a.fails_flush.set(true);
    assert!(!tidies(&mirror) && !flush(&mirror), "it is told");
    assert!(mirror.close().now_or_never().expect("RAM never waits").is_ok());
}
