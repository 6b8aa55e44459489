use std::time::Duration;

use super::{Harness, rate};
use crate::{MAX_WAIT, PIECE_BYTES, QUIET};
use crate::{ScrubState, Settings};

/// Bytes that were checked.
fn bytes(harness: &Harness) -> u64 {
    harness.pieces.iter().map(|(_, extent)| extent.len() * 4096).sum()
}

#[test]
fn the_rate_holds_from_slow_to_fast() {
    for limit in [5000_u64, 100_000, 1 << 20, 50 << 20, 1 << 30] {
        let mut harness = Harness::new(1 << 32, Settings { rate: rate(limit), ..Settings::default() });
        harness.scrub.start(harness.now, None, None).unwrap();
        harness.run_for(Duration::from_secs(20));
        let (done, due) = (bytes(&harness), limit * 20);
        assert!(done <= due + PIECE_BYTES.min(limit) + limit / 5 + 4096, "{limit}: {done} of {due}");
        assert!(done >= due - due / 5, "{limit}: {done} of {due}");
        let speed = harness.scrub.view(harness.now).speed.unwrap();
        assert!(speed < limit as f64 * 1.3 && speed > limit as f64 * 0.7, "{limit}: {speed}");
        assert!(harness.pieces.iter().all(|(_, extent)| extent.len() * 4096 <= (limit / 10).clamp(4096, PIECE_BYTES)));
    }
}

#[test]
fn a_run_that_was_delayed_does_not_rush() {
    let mut harness = Harness::new(1 << 32, Settings { rate: rate(10 << 20), ..Settings::default() });
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.run_for(Duration::from_secs(1));
    // The device, or this process, stood still.
    harness.pass(Duration::from_secs(60));
    harness.pieces.clear();
    harness.run_for(Duration::from_secs(1));
    assert!(bytes(&harness) <= 13 << 20, "{}", bytes(&harness));
}

#[test]
fn a_run_has_its_own_rate_and_then_the_usual_one_counts_again() {
    let mut harness = Harness::new(1 << 32, Settings { rate: rate(1 << 20), ..Settings::default() });
    harness.scrub.start(harness.now, None, rate(8 << 20)).unwrap();
    assert_eq!(harness.scrub.view(harness.now).rate, rate(8 << 20));
    harness.scrub.start(harness.now, None, rate(2 << 20)).unwrap();
    assert_eq!(harness.scrub.view(harness.now).rate, rate(2 << 20));
    harness.scrub.stop(harness.now).unwrap();
    assert_eq!(harness.scrub.view(harness.now).rate, rate(1 << 20));
}

/// Runs for ten seconds beside a client whose requests complete every `every`.
fn beside_a_client(settings: Settings, every: Duration) -> Harness {
    let mut harness = Harness::new(1 << 32, settings);
    harness.scrub.start(harness.now, None, None).unwrap();
    // The first step takes the requests completed before as its base.
    harness.step();
    for _ in 0..Duration::from_secs(10).as_millis() / every.as_millis() {
        harness.activity.completed += 1;
        // A check takes a millisecond here.
        let end = harness.now.steady + every;
        while harness.now.steady < end {
            match harness.step() {
                crate::ScrubStep::Wait(wait) => harness.pass(wait.min(end - harness.now.steady)),
                crate::ScrubStep::Check(_) | crate::ScrubStep::Idle => harness.pass(Duration::from_millis(1)),
            }
        }
    }
    harness
}

#[test]
fn a_scrub_yields_to_a_busy_device_and_is_never_starved() {
    let busy = beside_a_client(Settings::default(), QUIET / 2);
    let min = Duration::from_secs(10).as_millis() / MAX_WAIT.as_millis();
    let pieces = busy.pieces.len() as u128;
    assert!(pieces >= min / 2 && pieces <= min + 2, "{pieces} pieces, at least {min}");
    assert!(busy.scrub.view(busy.now).is_yielding);
    assert_eq!(busy.scrub.view(busy.now).state, ScrubState::Running);

    let quiet = beside_a_client(Settings::default(), Duration::from_secs(2));
    assert!(quiet.pieces.len() > 5000, "{} pieces between requests", quiet.pieces.len());
    let rude = beside_a_client(Settings { pause_when_busy: false, ..Settings::default() }, QUIET / 2);
    assert!(rude.pieces.len() > 5000, "{} pieces", rude.pieces.len());
}

#[test]
fn a_scrub_yields_to_a_long_request_all_the_time() {
    let mut harness = Harness::new(1 << 32, Settings::default());
    harness.activity.in_flight = 1;
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.run_for(Duration::from_secs(10));
    let max = Duration::from_secs(10).as_millis() / MAX_WAIT.as_millis() + 2;
    assert!(harness.pieces.len() as u128 <= max && harness.pieces.len() > 10, "{}", harness.pieces.len());
}

#[test]
fn requests_completed_before_a_run_started_do_not_delay_it() {
    let mut harness = Harness::new(1 << 20, Settings::default());
    harness.activity.completed = 1_000_000;
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.step();
    assert_eq!(harness.pieces.len(), 1);
}

#[test]
fn the_time_left_is_what_is_left_at_this_speed() {
    let mut harness = Harness::new(1 << 20, Settings { rate: rate(4 << 20), ..Settings::default() });
    assert_eq!(harness.scrub.view(harness.now).left_s, None);
    harness.scrub.start(harness.now, None, None).unwrap();
    harness.run_for(Duration::from_secs(24));
    let left = harness.scrub.view(harness.now).left_s.unwrap();
    assert!((900..1100).contains(&left), "{left} s for 4 GiB at 4 MiB/s, of which 24 s have passed");
}
