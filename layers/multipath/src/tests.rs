//! Paths to a device in RAM that fail in virtual time.

mod world;

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use sealblock_block::{Device, DeviceOpener, Durability, DynDevice, ErrorKind, Gate, Request, Response};
use sealblock_media_memory::MemoryDevice;
use sealblock_units::{BlockSize, Extent};

use super::*;
use world::{Mode, PATIENCE, World, byte, read, write};

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[test]
fn paths_take_turns() {
    let world = World::new(3, PATIENCE);
    for at in 0..9 {
        assert!(world.run(world.layer.execute(write(at, 1, 7))).0.is_ok());
    }
    assert_eq!(world.requests(), [3, 3, 3]);
}

#[test]
fn a_path_that_fails_is_left_out_and_comes_back() {
    let world = World::new(2, PATIENCE);
    world.wires[0].mode.set(Mode::Gone);
    for at in 0..4 {
        let (outcome, time) = world.run(world.layer.execute(write(at, 1, 7)));
        assert!(outcome.is_ok() && time == Duration::ZERO, "{outcome:?} after {time:?}");
    }
    assert_eq!((world.requests(), world.live()), (vec![1, 4], vec![false, true]));
    let status = &world.layer.observer().paths()[0];
    assert_eq!((status.failures, status.trouble.as_deref()), (1, Some("the device cannot be reached: cut")));
    world.pass(seconds(20));
    assert_eq!(world.live(), [false, true], "it cannot be opened");
    world.wires[0].mode.set(Mode::Works);
    world.pass(seconds(10));
    assert_eq!(world.live(), [true, true]);
    for at in 0..4 {
        assert_eq!(byte(world.run(world.layer.execute(read(at))).0), 7);
    }
    assert_eq!(world.requests(), [3, 6]);
}

#[test]
fn a_path_that_goes_while_nothing_is_requested_is_noticed() {
    let world = World::new(2, PATIENCE);
    world.wires[0].mode.set(Mode::Gone);
    world.wires[1].mode.set(Mode::Silent);
    world.pass(seconds(39));
    assert_eq!(world.live(), [true, true]);
    world.pass(seconds(2));
    assert_eq!(world.live(), [false, true], "one says that it is gone");
    world.pass(seconds(5));
    assert_eq!((world.live(), world.requests()), (vec![false, false], vec![0, 0]), "the other says nothing in time");
    world.wires.iter().for_each(|wire| wire.mode.set(Mode::Works));
    world.pass(seconds(100));
    assert_eq!((world.live(), world.requests()), (vec![true, true], vec![0, 0]));
}

#[test]
fn a_path_to_damage_is_not_lost_and_not_asked_for_the_same_damage_again() {
    let world = World::new(1, PATIENCE);
    let extent = Extent::from_raw(0, 1).unwrap();
    let spoil = Request::WriteUncorrectable { extent, durability: Durability::Volatile };
    assert!(world.run(world.layer.execute(spoil)).0.is_ok());
    world.pass(seconds(500));
    assert_eq!((world.live(), world.wires[0].failed.get()), (vec![true], 1));
}

#[test]
fn failures_of_the_data_are_final() {
    let world = World::new(2, PATIENCE);
    let extent = Extent::from_raw(3, 1).unwrap();
    let spoil = Request::WriteUncorrectable { extent, durability: Durability::Volatile };
    assert!(world.run(world.layer.execute(spoil)).0.is_ok());
    let failed = world.run(world.layer.execute(read(3))).0.unwrap_err();
    assert!(matches!(failed.kind(), ErrorKind::Integrity(_)));
    assert_eq!((world.requests(), world.live()), (vec![1, 1], vec![true, true]), "and no other path is asked");
}

#[test]
fn a_path_that_does_not_answer_fails_and_its_requests_go_elsewhere() {
    let world = World::new(2, PATIENCE);
    world.wires[0].mode.set(Mode::Silent);
    let all = join_all((0..10).map(|at| world.layer.execute(write(at, 1, 9))));
    let (outcomes, time) = world.run(all);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert!(time >= seconds(5) && time <= seconds(6), "{time:?}");
    assert_eq!((world.requests(), world.live()), (vec![5, 10], vec![false, true]));
}

/// A write gets stuck on a path, is repeated over the other one, and another write to the same block follows. Then what
/// was stuck arrives. What the block holds in the end, and how long the second write took.
fn overtake(patience: RetryPolicy) -> (u8, Duration) {
    let world = World::new(2, patience);
    world.wires[0].mode.set(Mode::Silent);
    assert!(world.run(world.layer.execute(write(5, 4, 1))).0.is_ok());
    let late = async {
        world.time.sleep(seconds(10)).await;
        assert_eq!(world.wires[0].deliver(), 1);
    };
    let second = async {
        let begin = world.time.now();
        assert!(world.layer.execute(write(8, 1, 2)).await.is_ok());
        world.time.now() - begin
    };
    let neighbour = async {
        let begin = world.time.now();
        assert!(world.layer.execute(write(9, 1, 2)).await.is_ok());
        assert_eq!(world.time.now(), begin, "blocks that nothing is left for do not wait");
    };
    let ((_, second), ()) = world.run(join(join(late, second), neighbour)).0;
    (byte(world.run(world.layer.execute(read(8))).0), second)
}

#[test]
fn a_late_write_does_not_undo_a_newer_one() {
    assert_eq!(overtake(PATIENCE), (2, seconds(11)));
    // The other twin shows that there is something to guard against.
    assert_eq!(overtake(RetryPolicy { quiesce_time: Duration::ZERO, ..PATIENCE }), (1, Duration::ZERO));
}

#[test]
fn blocks_are_given_free_only_when_the_target_has_settled() {
    thread_local!(static SETTLES: Cell<bool> = const { Cell::new(false) });
    let settle = |_: usize, wire: &world::Wire| {
        let wire = wire.clone();
        Some(DeviceOpener::new("settle", move || {
            let wire = wire.clone();
            async move {
                match SETTLES.get() {
                    true => Ok(DynDevice::new(wire)),
                    false => Err(ErrorKind::Unreachable { reason: "busy".to_owned() }.into()),
                }
            }
        }))
    };
    let world = World::with(2, RetryPolicy { no_path_timeout: seconds(100), ..PATIENCE }, settle);
    world.wires[0].mode.set(Mode::Silent);
    assert!(world.run(world.layer.execute(write(5, 1, 1))).0.is_ok());
    let settles = async {
        world.time.sleep(seconds(40)).await;
        SETTLES.set(true);
    };
    let (outcome, time) = world.run(join(world.layer.execute(write(5, 1, 2)), settles));
    assert!(outcome.0.is_ok() && time >= seconds(40) && time <= seconds(51), "{time:?}");
}

#[test]
fn without_a_path_requests_wait_for_a_bounded_time() {
    let world = World::new(2, PATIENCE);
    world.wires.iter().for_each(|wire| wire.mode.set(Mode::Gone));
    let (outcome, time) = world.run(world.layer.execute(read(0)));
    assert!(matches!(outcome.unwrap_err().kind(), ErrorKind::Unreachable { .. }));
    assert_eq!(time, seconds(30));
    let back = async {
        world.time.sleep(seconds(12)).await;
        world.wires[1].mode.set(Mode::Works);
    };
    let (outcome, time) = world.run(join(world.layer.execute(read(0)), back));
    assert!(outcome.0.is_ok() && time <= seconds(22), "{time:?}");
}

#[test]
fn a_request_that_kills_every_path_ends() {
    let world = World::new(2, PATIENCE);
    world.wires.iter().for_each(|wire| wire.mode.set(Mode::Flaps));
    let (outcome, _) = world.run(world.layer.execute(read(0)));
    let failure = outcome.unwrap_err().into_kind();
    assert_eq!(failure, ErrorKind::Unreachable { reason: "8 paths were lost with this request".to_owned() });
    assert_eq!(world.requests().iter().sum::<u64>(), 8);
}

fn is_done(outcome: Outcome) -> bool {
    matches!(outcome, Ok(Response::Done))
}

#[test]
fn a_flush_goes_over_every_path_that_has_written() {
    let world = World::new(3, PATIENCE);
    for at in 0..2 {
        assert!(world.run(world.layer.execute(write(at, 1, 7))).0.is_ok());
    }
    assert!(is_done(world.run(world.layer.execute(Request::Flush)).0));
    let flushes = || world.wires.iter().map(|wire| wire.flushes.get()).collect::<Vec<_>>();
    assert_eq!(flushes(), [1, 1, 0]);
    assert!(is_done(world.run(world.layer.execute(Request::Flush)).0));
    assert_eq!(flushes(), [1, 1, 1], "with nothing to flush, any path");
}

#[test]
fn a_flush_over_a_path_that_saw_it_all_vouches_for_a_lost_one() {
    let world = World::new(2, PATIENCE);
    assert!(world.run(world.layer.execute(write(0, 1, 7))).0.is_ok());
    world.wires[0].mode.set(Mode::Gone);
    assert!(is_done(world.run(world.layer.execute(Request::Flush)).0));
    assert_eq!(world.wires[1].flushes.get(), 1);
}

#[test]
fn writes_that_no_path_can_vouch_for_make_one_flush_fail() {
    let world = World::new(2, PATIENCE);
    assert!(world.run(world.layer.execute(write(0, 1, 7))).0.is_ok());
    world.wires.iter().for_each(|wire| wire.mode.set(Mode::Gone));
    let back = async {
        world.time.sleep(seconds(5)).await;
        world.wires.iter().for_each(|wire| wire.mode.set(Mode::Works));
    };
    let (outcome, ()) = world.run(join(world.layer.execute(Request::Flush), back)).0;
    let failure = outcome.unwrap_err().into_kind();
    assert!(matches!(&failure, ErrorKind::Media { reason } if reason.contains("may be lost")), "{failure}");
    assert!(is_done(world.run(world.layer.execute(Request::Flush)).0));
}

#[test]
fn paths_must_lead_to_devices_of_one_shape() {
    let way = |blocks: Option<u64>| {
        let stack = move |blocks| DynDevice::new(Gate::new("mem", MemoryDevice::new(BlockSize::B512, blocks, None)));
        let source = DeviceOpener::new("mem", move || async move { Ok(stack(1)) });
        PathConfig { source, settle: None, device: blocks.map(stack) }
    };
    let of = |blocks: [Option<u64>; 2]| {
        MultipathLayer::new(blocks.map(way).into(), world::Time::default(), PATIENCE).map(drop).err()
    };
    assert_eq!(of([Some(5), Some(5)]), None);
    assert_eq!(of([None, Some(5)]), None);
    assert_eq!(of([None, None]), Some(MultipathError::NonePresent));
    assert_eq!(of([Some(5), Some(6)]), Some(MultipathError::Different { path: 1, what: "number of blocks" }));
}

#[test]
fn a_path_that_is_missing_at_first_joins_later_unless_it_is_another_device() {
    // One that has grown since the others were opened has all the blocks that they have.
    for (blocks, joins) in [(1000, true), (1001, true), (999, false)] {
        let present = World::new(1, PATIENCE).wires.remove(0);
        let other = Rc::new(Gate::new("mem", MemoryDevice::new(BlockSize::B512, blocks, None)));
        let missing = world::Wire { memory: other, ..present.clone() };
        let device = Some(DynDevice::new(present.clone()));
        let ways = vec![
            PathConfig { source: missing.source(), settle: None, device: None },
            PathConfig { source: present.source(), settle: None, device },
        ];
        let world = World::over(ways, vec![missing, present], PATIENCE);
        assert!(world.run(world.layer.execute(read(0))).0.is_ok());
        assert_eq!(world.live(), [false, true]);
        world.pass(seconds(30));
        assert_eq!(world.live(), [joins, true]);
    }
}

#[test]
fn the_worker_ends_with_the_layer() {
    let way = World::new(1, PATIENCE).wires.remove(0);
    let ways = vec![PathConfig { source: way.source(), settle: None, device: Some(DynDevice::new(way)) }];
    let time = world::Time::default();
    let (layer, worker) = MultipathLayer::new(ways, time, PATIENCE).unwrap();
    let mut run = std::pin::pin!(worker.run());
    assert!(futures_util::FutureExt::now_or_never(run.as_mut()).is_none());
    drop(layer);
    assert!(futures_util::FutureExt::now_or_never(run).is_some());
}
