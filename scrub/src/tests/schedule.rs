use std::time::Duration;

use super::{DAY, World, shape};
use crate::{Scrub, Settings, State, Step};

fn weekly() -> Settings {
    Settings { every: Some(Duration::from_secs(7 * DAY)), ..Settings::default() }
}

fn runs(world: &World) -> usize {
    world.scrub.view(world.now).record.runs.len()
}

#[test]
fn the_first_run_begins_at_once_and_the_next_a_week_after_its_end() {
    let mut world = World::new(1000, weekly());
    world.run_for(Duration::from_secs(60));
    assert_eq!(runs(&world), 1);
    let view = world.scrub.view(world.now);
    assert_eq!(view.state, State::Waiting);
    assert_eq!(view.next_unix_s, Some(view.record.completed_unix_s.unwrap() + 7 * DAY));
    world.run_for(Duration::from_secs(7 * DAY - 120));
    assert_eq!(runs(&world), 1);
    world.run_for(Duration::from_secs(120));
    assert_eq!(runs(&world), 2);
    world.run_for(Duration::from_secs(28 * DAY));
    assert_eq!(runs(&world), 6);
}

#[test]
fn the_time_of_the_last_run_outlives_the_process() {
    let mut world = World::new(1000, weekly());
    world.run_for(Duration::from_secs(60));
    let saved = world.scrub.last_to_save(world.now).unwrap();
    for (days, expected) in [(6, 1), (8, 2)] {
        let mut next = World::of(Scrub::new(shape(1000), weekly()));
        next.scrub.restore(&saved).unwrap();
        next.now.unix_s += days * DAY;
        next.run_for(Duration::from_secs(60));
        assert_eq!(runs(&next), expected, "after {days} days");
    }
}

#[test]
fn a_run_that_was_ended_by_hand_does_not_begin_again_at_once() {
    let mut world = World::new(1000, weekly());
    world.scrub.start(world.now, None, None).unwrap();
    world.scrub.stop(world.now).unwrap();
    world.run_for(Duration::from_secs(DAY));
    assert_eq!((runs(&world), world.pieces.len()), (1, 0));
    world.run_for(Duration::from_secs(7 * DAY));
    assert_eq!(runs(&world), 2);
}

#[test]
fn a_part_that_was_checked_by_hand_does_not_put_the_whole_off() {
    let mut world = World::new(1000, Settings::default());
    world.scrub.start(world.now, Some(500), None).unwrap();
    world.run_for(Duration::from_secs(60));
    world.scrub.configure(weekly());
    world.run_for(Duration::from_secs(60));
    assert_eq!(runs(&world), 2);
}

#[test]
fn settings_follow_and_a_schedule_that_is_taken_away_begins_nothing() {
    let mut world = World::new(1000, Settings::default());
    assert_eq!(world.step(), Step::Idle);
    world.scrub.configure(weekly());
    world.run_for(Duration::from_secs(60));
    assert_eq!(runs(&world), 1);
    world.scrub.configure(Settings::default());
    assert_eq!(world.scrub.view(world.now).state, State::Idle);
    world.run_for(Duration::from_secs(30 * DAY));
    assert_eq!(runs(&world), 1);
}

#[test]
fn a_clock_that_was_ahead_does_not_put_the_schedule_off_for_ever() {
    let mut world = World::new(1000, weekly());
    world.now.unix_s += 10_000 * DAY;
    world.run_for(Duration::from_secs(60));
    world.now.unix_s -= 10_000 * DAY;
    world.run_for(Duration::from_secs(8 * DAY));
    assert_eq!(runs(&world), 2);
}

#[test]
fn a_clock_that_jumps_ahead_is_noticed_soon() {
    let mut world = World::new(1000, weekly());
    world.run_for(Duration::from_secs(60));
    world.now.unix_s += 7 * DAY;
    world.run_for(Duration::from_secs(3600));
    assert_eq!(runs(&world), 2);
}
