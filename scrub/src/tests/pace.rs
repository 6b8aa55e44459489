use std::time::Duration;

use super::{World, rate};
use crate::pace::{MOST_WAIT, PIECE_BYTES, QUIET};
use crate::{Settings, State};

/// Bytes that were checked.
fn bytes(world: &World) -> u64 {
    world.pieces.iter().map(|(_, extent)| extent.len() * 4096).sum()
}

#[test]
fn the_rate_holds_from_slow_to_fast() {
    for limit in [5000_u64, 100_000, 1 << 20, 50 << 20, 1 << 30] {
        let mut world = World::new(1 << 32, Settings { rate: rate(limit), ..Settings::default() });
        world.scrub.start(world.now, None, None).unwrap();
        world.run_for(Duration::from_secs(20));
        let (done, due) = (bytes(&world), limit * 20);
        assert!(done <= due + PIECE_BYTES.min(limit) + limit / 5 + 4096, "{limit}: {done} of {due}");
        assert!(done >= due - due / 5, "{limit}: {done} of {due}");
        let speed = world.scrub.view(world.now).speed.unwrap();
        assert!(speed < limit as f64 * 1.3 && speed > limit as f64 * 0.7, "{limit}: {speed}");
        assert!(world.pieces.iter().all(|(_, extent)| extent.len() * 4096 <= (limit / 10).clamp(4096, PIECE_BYTES)));
    }
}

#[test]
fn a_run_that_was_held_up_does_not_rush() {
    let mut world = World::new(1 << 32, Settings { rate: rate(10 << 20), ..Settings::default() });
    world.scrub.start(world.now, None, None).unwrap();
    world.run_for(Duration::from_secs(1));
    // The device, or this process, stood still.
    world.pass(Duration::from_secs(60));
    world.pieces.clear();
    world.run_for(Duration::from_secs(1));
    assert!(bytes(&world) <= 13 << 20, "{}", bytes(&world));
}

#[test]
fn a_run_has_its_own_rate_and_then_the_usual_one_counts_again() {
    let mut world = World::new(1 << 32, Settings { rate: rate(1 << 20), ..Settings::default() });
    world.scrub.start(world.now, None, rate(8 << 20)).unwrap();
    assert_eq!(world.scrub.view(world.now).rate, rate(8 << 20));
    world.scrub.start(world.now, None, rate(2 << 20)).unwrap();
    assert_eq!(world.scrub.view(world.now).rate, rate(2 << 20));
    world.scrub.stop(world.now).unwrap();
    assert_eq!(world.scrub.view(world.now).rate, rate(1 << 20));
}

/// Runs for ten seconds beside somebody whose requests are answered every so often.
fn beside_others(settings: Settings, every: Duration) -> World {
    let mut world = World::new(1 << 32, settings);
    world.scrub.start(world.now, None, None).unwrap();
    // What was answered before is told by the first step.
    world.step();
    for _ in 0..Duration::from_secs(10).as_millis() / every.as_millis() {
        world.activity.answered += 1;
        // A check takes a millisecond here.
        let end = world.now.steady + every;
        while world.now.steady < end {
            match world.step() {
                crate::Step::Wait(wait) => world.pass(wait.min(end - world.now.steady)),
                crate::Step::Check(_) | crate::Step::Idle => world.pass(Duration::from_millis(1)),
            }
        }
    }
    world
}

#[test]
fn a_busy_device_is_given_way_to_and_never_starved() {
    let busy = beside_others(Settings::default(), QUIET / 2);
    let least = Duration::from_secs(10).as_millis() / MOST_WAIT.as_millis();
    let pieces = busy.pieces.len() as u128;
    assert!(pieces >= least / 2 && pieces <= least + 2, "{pieces} pieces, {least} at least");
    assert!(busy.scrub.view(busy.now).is_yielding);
    assert_eq!(busy.scrub.view(busy.now).state, State::Running);

    let quiet = beside_others(Settings::default(), Duration::from_secs(2));
    assert!(quiet.pieces.len() > 5000, "{} pieces between requests", quiet.pieces.len());
    let rude = beside_others(Settings { pause_when_busy: false, ..Settings::default() }, QUIET / 2);
    assert!(rude.pieces.len() > 5000, "{} pieces", rude.pieces.len());
}

#[test]
fn a_request_that_takes_long_is_given_way_to_all_the_time() {
    let mut world = World::new(1 << 32, Settings::default());
    world.activity.in_flight = 1;
    world.scrub.start(world.now, None, None).unwrap();
    world.run_for(Duration::from_secs(10));
    let most = Duration::from_secs(10).as_millis() / MOST_WAIT.as_millis() + 2;
    assert!(world.pieces.len() as u128 <= most && world.pieces.len() > 10, "{}", world.pieces.len());
}

#[test]
fn what_was_answered_before_a_run_began_does_not_hold_it_up() {
    let mut world = World::new(1 << 20, Settings::default());
    world.activity.answered = 1_000_000;
    world.scrub.start(world.now, None, None).unwrap();
    world.step();
    assert_eq!(world.pieces.len(), 1);
}

#[test]
fn the_time_left_is_what_is_left_at_this_speed() {
    let mut world = World::new(1 << 20, Settings { rate: rate(4 << 20), ..Settings::default() });
    assert_eq!(world.scrub.view(world.now).left_s, None);
    world.scrub.start(world.now, None, None).unwrap();
    world.run_for(Duration::from_secs(24));
    let left = world.scrub.view(world.now).left_s.unwrap();
    assert!((900..1100).contains(&left), "{left} s for 4 GiB at 4 MiB/s, of which 24 s have passed");
}
