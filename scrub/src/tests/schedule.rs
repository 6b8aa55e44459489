use std::time::Duration;

use super::{DAY, Harness, profile};
use crate::{Scrub, ScrubState, ScrubStep, Settings};

fn weekly() -> Settings {
    Settings { every: Some(Duration::from_secs(7 * DAY)), ..Settings::default() }
}

fn runs(harness: &Harness) -> usize {
    harness.scrub.view(harness.now).record.runs.len()
}

#[test]
fn the_first_run_begins_at_once_and_the_next_a_week_after_its_end() {
    let mut harness = Harness::new(1000, weekly());
    harness.run_for(Duration::from_secs(60));
    assert_eq!(runs(&harness), 1);
    let view = harness.scrub.view(harness.now);
    assert_eq!(view.state, ScrubState::Waiting);
    assert_eq!(view.next_unix_s, Some(view.record.completed_unix_s.unwrap() + 7 * DAY));
    harness.run_for(Duration::from_secs(7 * DAY - 120));
    assert_eq!(runs(&harness), 1);
    harness.run_for(Duration::from_secs(120));
    assert_eq!(runs(&harness), 2);
    harness.run_for(Duration::from_secs(28 * DAY));
    assert_eq!(runs(&harness), 6);
}

#[test]
fn the_time_of_the_last_run_outlives_the_process() {
    let mut harness = Harness::new(1000, weekly());
    harness.run_for(Duration::from_secs(60));
    let saved = harness.scrub.last_to_save(harness.now).unwrap();
    for (days, expected) in [(6, 1), (8, 2)] {
        let mut next = Harness::of(Scrub::new(profile(1000), weekly()));
        next.scrub.restore(&saved).unwrap();
        next.now.unix_s += days * DAY;
        next.run_for(Duration::from_secs(60));
        assert_eq!(runs(&next), expected, "after {days} days");
    }
}

#[test]
fn a_run_that_was_ended_by_hand_does_not_begin_again_at_once() {
    let mut harness = Harness::new(1000, weekly());
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.scrub.stop(harness.now).unwrap();
    harness.run_for(Duration::from_secs(DAY));
    assert_eq!((runs(&harness), harness.pieces.len()), (1, 0));
    harness.run_for(Duration::from_secs(7 * DAY));
    assert_eq!(runs(&harness), 2);
}

#[test]
fn a_part_that_was_checked_by_hand_does_not_put_the_whole_off() {
    let mut harness = Harness::new(1000, Settings::default());
    harness.scrub.start(harness.now, Some(500), None).unwrap();
    harness.run_for(Duration::from_secs(60));
    harness.scrub.configure(weekly());
    harness.run_for(Duration::from_secs(60));
    assert_eq!(runs(&harness), 2);
}

#[test]
fn settings_follow_and_a_schedule_that_is_taken_away_begins_nothing() {
    let mut harness = Harness::new(1000, Settings::default());
    assert_eq!(harness.step(), ScrubStep::Idle);
    harness.scrub.configure(weekly());
    harness.run_for(Duration::from_secs(60));
    assert_eq!(runs(&harness), 1);
    harness.scrub.configure(Settings::default());
    assert_eq!(harness.scrub.view(harness.now).state, ScrubState::Idle);
    harness.run_for(Duration::from_secs(30 * DAY));
    assert_eq!(runs(&harness), 1);
}

#[test]
fn a_clock_that_was_ahead_does_not_put_the_schedule_off_for_ever() {
    let mut harness = Harness::new(1000, weekly());
    harness.now.unix_s += 10_000 * DAY;
    harness.run_for(Duration::from_secs(60));
    harness.now.unix_s -= 10_000 * DAY;
    harness.run_for(Duration::from_secs(8 * DAY));
    assert_eq!(runs(&harness), 2);
}

#[test]
fn a_clock_that_jumps_ahead_is_noticed_soon() {
    let mut harness = Harness::new(1000, weekly());
    harness.run_for(Duration::from_secs(60));
    harness.now.unix_s += 7 * DAY;
    harness.run_for(Duration::from_secs(3600));
    assert_eq!(runs(&harness), 2);
}
