use std::time::Duration;

use super::{Harness, profile, rate};
use crate::{
    CheckResult, CommandError, MAX_RUNS, RunCounts, RunPhase, RunResult, Scrub, ScrubEvent, ScrubState, ScrubStep,
    Settings,
};

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn nothing_happens_without_a_command() {
    let mut harness = Harness::new(1000, Settings::default());
    assert_eq!(harness.step(), ScrubStep::Idle);
    harness.run_for(LONG);
    assert_eq!((harness.pieces.len(), harness.scrub.view(harness.now).state), (0, ScrubState::Idle));
    assert_eq!(harness.scrub.to_save(harness.now), None, "and nothing is written");
}

#[test]
fn a_run_checks_every_block_once_and_goes_on_behind_bad_ones() {
    let mut harness = Harness::new(1000, Settings::default());
    harness.bad = vec![(0, false), (255, true), (256, false), (999, true)];
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.run_for(LONG);
    assert_eq!(harness.checked_blocks(), Some((0, 999)));
    let view = harness.scrub.view(harness.now);
    let run = view.record.runs[0];
    assert_eq!(run.counts, RunCounts { blocks: 1000, bad_blocks: 4, repaired: 2, unrepaired: 2, unchecked: 0 });
    assert_eq!((run.ended, view.state, view.record.position), (RunResult::Finished, ScrubState::Idle, 0));
    assert_eq!(harness.scrub.take_event(), Some(ScrubEvent::Started { at: 0, resumed: false }));
    assert_eq!(harness.scrub.take_event(), Some(ScrubEvent::Ended(run)));
    assert_eq!(harness.scrub.take_event(), None);
}

#[test]
fn a_run_is_paused_resumed_and_stopped() {
    let mut harness = Harness::new(1 << 20, Settings::default());
    harness.scrub.start(harness.now, Some(100), rate(1 << 20)).unwrap();
    harness.run_for(Duration::from_secs(2));
    harness.scrub.pause().unwrap();
    let paused = harness.scrub.view(harness.now).record;
    assert!(paused.position > 100 && paused.phase == RunPhase::Paused);
    harness.run_for(LONG);
    assert_eq!(harness.scrub.view(harness.now).record, paused);
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.run_for(Duration::from_secs(1));
    let view = harness.scrub.view(harness.now);
    assert!(view.record.position > paused.position && view.rate == rate(1 << 20), "its rate stays");
    harness.scrub.stop(harness.now).unwrap();
    let record = harness.scrub.view(harness.now).record;
    assert_eq!((record.phase, record.runs.len(), record.runs[0].ended), (RunPhase::Idle, 1, RunResult::Stopped));
    assert_eq!((record.runs[0].from, record.completed_unix_s), (100, None));
    harness.checked_blocks();
}

#[test]
fn invalid_commands_fail_and_change_nothing() {
    let mut harness = Harness::new(1000, Settings::default());
    assert_eq!(harness.scrub.pause(), Err(CommandError::NotRunning));
    assert_eq!(harness.scrub.stop(harness.now), Err(CommandError::NotRunning));
    let past = CommandError::PastEnd { from: 1000, last: 999 };
    assert_eq!(harness.scrub.start(harness.now, Some(1000), None), Err(past));
    assert_eq!(harness.step(), ScrubStep::Idle);
    assert_eq!(harness.scrub.start(harness.now, Some(999), None), Ok(()));
    harness.run_for(LONG);
    assert_eq!(harness.checked_blocks(), Some((999, 999)));
    assert_eq!(harness.scrub.view(harness.now).record.completed_unix_s, None, "a part is not the whole");
}

#[test]
fn starting_elsewhere_ends_the_active_run() {
    let mut harness = Harness::new(1 << 20, Settings::default());
    harness.scrub.start(harness.now, None, rate(1 << 20)).unwrap();
    let ScrubStep::Check(late) = harness.scrub.step(harness.now, harness.activity) else { panic!("it checks") };
    harness.scrub.start(harness.now, Some(500), None).unwrap();
    // The result of the former run's piece comes only now.
    harness.scrub.checked(harness.now, late, CheckResult { bad_blocks: 1, ..CheckResult::default() });
    let record = harness.scrub.view(harness.now).record;
    assert_eq!((record.position, record.counts, record.rate), (500, RunCounts::default(), None));
    assert_eq!((record.runs.len(), record.runs[0].ended), (1, RunResult::Stopped));
}

#[test]
fn the_last_runs_are_remembered_and_no_more() {
    let mut harness = Harness::new(10, Settings::default());
    for turn in 0..20 {
        harness.bad = vec![(0, false); usize::from(turn == 19)];
        harness.scrub.start(harness.now, None, None).unwrap();
        harness.run_for(Duration::from_secs(60));
    }
    let runs = harness.scrub.view(harness.now).record.runs;
    assert_eq!(runs.len(), MAX_RUNS);
    assert_eq!((runs[MAX_RUNS - 1].counts.bad_blocks, runs[0].counts.bad_blocks), (1, 0));
    assert!(runs.windows(2).all(|pair| pair[0].started_unix_s < pair[1].started_unix_s));
}

#[test]
fn a_piece_that_failed_is_retried_later() {
    let mut harness = Harness::new(1000, Settings::default());
    harness.scrub.start(harness.now, None, None).unwrap();
    let first = harness.scrub.step(harness.now, harness.activity);
    harness.scrub.failed(harness.now);
    let ScrubStep::Wait(wait) = harness.scrub.step(harness.now, harness.activity) else { panic!("it waits") };
    assert!(wait > Duration::from_secs(1) && wait < Duration::from_secs(120));
    harness.pass(wait);
    assert_eq!(harness.scrub.step(harness.now, harness.activity), first);
}

#[test]
fn a_run_goes_on_in_another_process_where_it_was_saved() {
    let mut harness = Harness::new(1 << 16, Settings::default());
    harness.bad = vec![(3, true)];
    harness.scrub.start(harness.now, None, rate(4 << 20)).unwrap();
    let begun = harness.scrub.to_save(harness.now).expect("a start is written at once");
    harness.run_for(Duration::from_secs(1));
    assert_eq!(harness.scrub.to_save(harness.now), None, "a position has time");
    harness.run_for(Duration::from_secs(5));
    let saved = harness.scrub.to_save(harness.now).unwrap();
    assert_ne!(saved, begun);
    let before = harness.scrub.view(harness.now).record;

    let mut next = Harness::of(Scrub::new(profile(1 << 16), Settings::default()));
    next.scrub.restore(&saved).unwrap();
    assert_eq!(next.scrub.view(next.now).record, before);
    next.run_for(LONG);
    assert_eq!(next.checked_blocks(), Some((before.position, (1 << 16) - 1)));
    assert_eq!(next.scrub.take_event(), Some(ScrubEvent::Started { at: before.position, resumed: true }));
    let run = next.scrub.view(next.now).record.runs[0];
    assert_eq!((run.counts.blocks, run.counts.repaired, run.from), (1 << 16, 1, 0));
    assert!(next.scrub.last_to_save(next.now).is_some());
    assert_eq!(next.scrub.last_to_save(next.now), None);
    next.scrub.save_failed();
    assert!(next.scrub.last_to_save(next.now).is_some(), "what was not written comes again");
}

#[test]
fn a_paused_run_stays_paused_in_another_process() {
    let mut harness = Harness::new(1000, Settings::default());
    harness.scrub.start(harness.now, Some(7), None).unwrap();
    harness.scrub.pause().unwrap();
    let saved = harness.scrub.to_save(harness.now).unwrap();
    let mut next = Harness::of(Scrub::new(profile(1000), Settings::default()));
    next.scrub.restore(&saved).unwrap();
    assert_eq!((next.step(), next.scrub.view(next.now).state), (ScrubStep::Idle, ScrubState::Paused));
}

#[test]
fn a_device_without_blocks_is_done_at_once() {
    let mut harness = Harness::new(0, Settings::default());
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.run_for(Duration::from_secs(1));
    assert_eq!((harness.pieces.len(), harness.scrub.view(harness.now).record.runs.len()), (0, 1));
}

#[test]
fn a_run_goes_on_to_the_end_of_a_device_that_grew() {
    let mut harness = Harness::new(10_000, Settings { rate: rate(4 << 20), ..Settings::default() });
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.run_for(Duration::from_secs(3));
    let position = harness.scrub.view(harness.now).record.position;
    assert!((1..10_000).contains(&position));
    harness.scrub.resize(profile(20_000));
    assert!(harness.scrub.to_save(harness.now).is_some(), "what is kept is of the new size at once");
    harness.run_for(Duration::from_secs(60));
    assert_eq!(harness.checked_blocks(), Some((0, 19_999)));
    let record = harness.scrub.view(harness.now).record;
    assert_eq!((record.phase, record.runs[0].counts.blocks), (RunPhase::Idle, 20_000));
}

#[test]
fn a_full_run_does_not_count_for_blocks_that_came_later() {
    let mut harness = Harness::new(10_000, Settings::default());
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.run_for(Duration::from_secs(60));
    let completed = |harness: &Harness| harness.scrub.view(harness.now).record.completed_unix_s;
    let before = completed(&harness);
    harness.scrub.resize(profile(9_000));
    assert!(before.is_some() && completed(&harness) == before, "all that is left was checked");
    harness.scrub.resize(profile(9_001));
    let record = harness.scrub.view(harness.now).record;
    assert_eq!((record.completed_unix_s, record.schedule_from_unix_s), (None, before));
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.run_for(Duration::from_secs(60));
    assert!(completed(&harness) > before);
}

#[test]
fn a_run_past_the_end_of_a_device_that_shrank_begins_anew_and_one_before_it_ends_there() {
    for (capacity, from) in [(100, 0), (9_000, 0)] {
        let mut harness = Harness::new(10_000, Settings { rate: rate(4 << 20), ..Settings::default() });
        harness.scrub.start(harness.now, None, None).unwrap();
        harness.run_for(Duration::from_secs(2));
        let position = harness.scrub.view(harness.now).record.position;
        harness.scrub.resize(profile(capacity));
        let goes_on_at = if position < capacity { position } else { from };
        harness.pieces.clear();
        harness.run_for(Duration::from_secs(60));
        assert_eq!(harness.checked_blocks(), Some((goes_on_at, capacity - 1)));
        let record = harness.scrub.view(harness.now).record;
        assert_eq!((record.runs[0].counts.blocks, record.position), (capacity, 0));
    }
}
