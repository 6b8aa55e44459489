use std::time::Duration;

use super::{World, rate, shape};
use crate::{Checked, Counts, MOST_RUNS, Phase, Refusal, RunResult, Scrub, ScrubEvent, Settings, State, Step};

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn nothing_happens_unless_it_is_told() {
    let mut world = World::new(1000, Settings::default());
    assert_eq!(world.step(), Step::Idle);
    world.run_for(LONG);
    assert_eq!((world.pieces.len(), world.scrub.view(world.now).state), (0, State::Idle));
    assert_eq!(world.scrub.to_save(world.now), None, "and nothing is written");
}

#[test]
fn a_run_checks_every_block_once_and_goes_on_behind_bad_ones() {
    let mut world = World::new(1000, Settings::default());
    world.bad = vec![(0, false), (255, true), (256, false), (999, true)];
    world.scrub.start(world.now, None, None).unwrap();
    world.run_for(LONG);
    assert_eq!(world.checked_blocks(), Some((0, 999)));
    let view = world.scrub.view(world.now);
    let run = view.record.runs[0];
    assert_eq!(run.counts, Counts { blocks: 1000, bad_blocks: 4, repaired: 2, unrepaired: 2, unchecked: 0 });
    assert_eq!((run.ended, view.state, view.record.position), (RunResult::Finished, State::Idle, 0));
    assert_eq!(world.scrub.take_news(), Some(ScrubEvent::Started { at: 0, resumed: false }));
    assert_eq!(world.scrub.take_news(), Some(ScrubEvent::Ended(run)));
    assert_eq!(world.scrub.take_news(), None);
}

#[test]
fn a_run_is_held_goes_on_and_is_ended() {
    let mut world = World::new(1 << 20, Settings::default());
    world.scrub.start(world.now, Some(100), rate(1 << 20)).unwrap();
    world.run_for(Duration::from_secs(2));
    world.scrub.pause().unwrap();
    let held = world.scrub.view(world.now).record;
    assert!(held.position > 100 && held.phase == Phase::Paused);
    world.run_for(LONG);
    assert_eq!(world.scrub.view(world.now).record, held);
    world.scrub.start(world.now, None, None).unwrap();
    world.run_for(Duration::from_secs(1));
    let view = world.scrub.view(world.now);
    assert!(view.record.position > held.position && view.rate == rate(1 << 20), "its rate stays");
    world.scrub.stop(world.now).unwrap();
    let record = world.scrub.view(world.now).record;
    assert_eq!((record.phase, record.runs.len(), record.runs[0].ended), (Phase::Idle, 1, RunResult::Stopped));
    assert_eq!((record.runs[0].from, record.completed_unix_s), (100, None));
    world.checked_blocks();
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let mut world = World::new(1000, Settings::default());
    assert_eq!(world.scrub.pause(), Err(Refusal::NotRunning));
    assert_eq!(world.scrub.stop(world.now), Err(Refusal::NotRunning));
    let past = Refusal::PastEnd { from: 1000, last: 999 };
    assert_eq!(world.scrub.start(world.now, Some(1000), None), Err(past));
    assert_eq!(world.step(), Step::Idle);
    assert_eq!(world.scrub.start(world.now, Some(999), None), Ok(()));
    world.run_for(LONG);
    assert_eq!(world.checked_blocks(), Some((999, 999)));
    assert_eq!(world.scrub.view(world.now).record.completed_unix_s, None, "a part is not the whole");
}

#[test]
fn beginning_elsewhere_ends_the_run_under_way() {
    let mut world = World::new(1 << 20, Settings::default());
    world.scrub.start(world.now, None, rate(1 << 20)).unwrap();
    let Step::Check(late) = world.scrub.step(world.now, world.activity) else { panic!("it checks") };
    world.scrub.start(world.now, Some(500), None).unwrap();
    // The answer to the former run's question comes only now.
    world.scrub.checked(world.now, late, Checked { bad_blocks: 1, ..Checked::default() });
    let record = world.scrub.view(world.now).record;
    assert_eq!((record.position, record.counts, record.rate), (500, Counts::default(), None));
    assert_eq!((record.runs.len(), record.runs[0].ended), (1, RunResult::Stopped));
}

#[test]
fn the_last_runs_are_remembered_and_no_more() {
    let mut world = World::new(10, Settings::default());
    for turn in 0..20 {
        world.bad = vec![(0, false); usize::from(turn == 19)];
        world.scrub.start(world.now, None, None).unwrap();
        world.run_for(Duration::from_secs(60));
    }
    let runs = world.scrub.view(world.now).record.runs;
    assert_eq!(runs.len(), MOST_RUNS);
    assert_eq!((runs[MOST_RUNS - 1].counts.bad_blocks, runs[0].counts.bad_blocks), (1, 0));
    assert!(runs.windows(2).all(|pair| pair[0].started_unix_s < pair[1].started_unix_s));
}

#[test]
fn a_device_that_cannot_be_asked_is_asked_again_later_for_the_same_blocks() {
    let mut world = World::new(1000, Settings::default());
    world.scrub.start(world.now, None, None).unwrap();
    let first = world.scrub.step(world.now, world.activity);
    world.scrub.failed(world.now);
    let Step::Wait(wait) = world.scrub.step(world.now, world.activity) else { panic!("it waits") };
    assert!(wait > Duration::from_secs(1) && wait < Duration::from_secs(120));
    world.pass(wait);
    assert_eq!(world.scrub.step(world.now, world.activity), first);
}

#[test]
fn a_run_goes_on_in_another_process_where_it_was_saved() {
    let mut world = World::new(1 << 16, Settings::default());
    world.bad = vec![(3, true)];
    world.scrub.start(world.now, None, rate(4 << 20)).unwrap();
    let begun = world.scrub.to_save(world.now).expect("a start is written at once");
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.scrub.to_save(world.now), None, "a position has time");
    world.run_for(Duration::from_secs(5));
    let saved = world.scrub.to_save(world.now).unwrap();
    assert_ne!(saved, begun);
    let before = world.scrub.view(world.now).record;

    let mut next = World::of(Scrub::new(shape(1 << 16), Settings::default()));
    next.scrub.restore(&saved).unwrap();
    assert_eq!(next.scrub.view(next.now).record, before);
    next.run_for(LONG);
    assert_eq!(next.checked_blocks(), Some((before.position, (1 << 16) - 1)));
    assert_eq!(next.scrub.take_news(), Some(ScrubEvent::Started { at: before.position, resumed: true }));
    let run = next.scrub.view(next.now).record.runs[0];
    assert_eq!((run.counts.blocks, run.counts.repaired, run.from), (1 << 16, 1, 0));
    assert!(next.scrub.last_to_save(next.now).is_some());
    assert_eq!(next.scrub.last_to_save(next.now), None);
    next.scrub.not_saved();
    assert!(next.scrub.last_to_save(next.now).is_some(), "what was not written comes again");
}

#[test]
fn a_held_run_stays_held_in_another_process() {
    let mut world = World::new(1000, Settings::default());
    world.scrub.start(world.now, Some(7), None).unwrap();
    world.scrub.pause().unwrap();
    let saved = world.scrub.to_save(world.now).unwrap();
    let mut next = World::of(Scrub::new(shape(1000), Settings::default()));
    next.scrub.restore(&saved).unwrap();
    assert_eq!((next.step(), next.scrub.view(next.now).state), (Step::Idle, State::Paused));
}

#[test]
fn a_device_without_blocks_is_done_at_once() {
    let mut world = World::new(0, Settings::default());
    world.scrub.start(world.now, None, None).unwrap();
    world.run_for(Duration::from_secs(1));
    assert_eq!((world.pieces.len(), world.scrub.view(world.now).record.runs.len()), (0, 1));
}

#[test]
fn a_run_goes_on_to_the_end_of_a_device_that_grew() {
    let mut world = World::new(10_000, Settings { rate: rate(4 << 20), ..Settings::default() });
    world.scrub.start(world.now, None, None).unwrap();
    world.run_for(Duration::from_secs(3));
    let position = world.scrub.view(world.now).record.position;
    assert!((1..10_000).contains(&position));
    world.scrub.resize(shape(20_000));
    assert!(world.scrub.to_save(world.now).is_some(), "what is kept is of the new size at once");
    world.run_for(Duration::from_secs(60));
    assert_eq!(world.checked_blocks(), Some((0, 19_999)));
    let record = world.scrub.view(world.now).record;
    assert_eq!((record.phase, record.runs[0].counts.blocks), (Phase::Idle, 20_000));
}

#[test]
fn a_run_past_the_end_of_a_device_that_shrank_begins_anew_and_one_before_it_ends_there() {
    for (capacity, from) in [(100, 0), (9_000, 0)] {
        let mut world = World::new(10_000, Settings { rate: rate(4 << 20), ..Settings::default() });
        world.scrub.start(world.now, None, None).unwrap();
        world.run_for(Duration::from_secs(2));
        let position = world.scrub.view(world.now).record.position;
        world.scrub.resize(shape(capacity));
        let goes_on_at = if position < capacity { position } else { from };
        world.pieces.clear();
        world.run_for(Duration::from_secs(60));
        assert_eq!(world.checked_blocks(), Some((goes_on_at, capacity - 1)));
        let record = world.scrub.view(world.now).record;
        assert_eq!((record.runs[0].counts.blocks, record.position), (capacity, 0));
    }
}
