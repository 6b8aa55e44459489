//! Paths to a device in RAM that fail in virtual time.

mod harness;

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use sealblock_block::{Device, DeviceOpener, Durability, DynDevice, ErrorKind, Expectations, Gate, Request, Response};
use sealblock_integrity::{Checks, Field, GuardKind, Masked, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent, Lba};

use super::*;
use harness::{Harness, Mode, POLICY, byte, read, write};

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[test]
fn paths_take_turns() {
    let harness = Harness::new(3, POLICY);
    for at in 0..9 {
        assert!(harness.run(harness.layer.execute(write(at, 1, 7))).0.is_ok());
    }
    assert_eq!(harness.requests(), [3, 3, 3]);
}

#[test]
fn a_failed_path_gets_no_requests_until_it_is_restored() {
    let harness = Harness::new(2, POLICY);
    harness.links[0].mode.set(Mode::Gone);
    for at in 0..4 {
        let (outcome, time) = harness.run(harness.layer.execute(write(at, 1, 7)));
        assert!(outcome.is_ok() && time == Duration::ZERO, "{outcome:?} after {time:?}");
    }
    assert_eq!((harness.requests(), harness.live()), (vec![1, 4], vec![false, true]));
    let status = &harness.layer.monitor().paths()[0];
    assert_eq!((status.failures, status.last_error.as_deref()), (1, Some("the device cannot be reached: cut")));
    harness.pass(seconds(20));
    assert_eq!(harness.live(), [false, true], "it cannot be opened");
    harness.links[0].mode.set(Mode::Works);
    harness.pass(seconds(10));
    assert_eq!(harness.live(), [true, true]);
    for at in 0..4 {
        assert_eq!(byte(harness.run(harness.layer.execute(read(at))).0), 7);
    }
    assert_eq!(harness.requests(), [3, 6]);
}

#[test]
fn the_loss_of_an_idle_path_is_noticed() {
    let harness = Harness::new(2, POLICY);
    harness.links[0].mode.set(Mode::Gone);
    harness.links[1].mode.set(Mode::Silent);
    harness.pass(seconds(39));
    assert_eq!(harness.live(), [true, true]);
    harness.pass(seconds(2));
    assert_eq!(harness.live(), [false, true], "one says that it is gone");
    harness.pass(seconds(5));
    assert_eq!(
        (harness.live(), harness.requests()),
        (vec![false, false], vec![0, 0]),
        "the other says nothing in time"
    );
    harness.links.iter().for_each(|link| link.mode.set(Mode::Works));
    harness.pass(seconds(100));
    assert_eq!((harness.live(), harness.requests()), (vec![true, true], vec![0, 0]));
}

#[test]
fn a_probe_of_a_bad_block_neither_fails_the_path_nor_is_repeated() {
    let harness = Harness::new(1, POLICY);
    let extent = Extent::from_raw(0, 1).unwrap();
    let spoil = Request::write_uncorrectable(extent, Durability::Volatile);
    assert!(harness.run(harness.layer.execute(spoil)).0.is_ok());
    harness.pass(seconds(500));
    assert_eq!((harness.live(), harness.links[0].failed.get()), (vec![true], 1));
}

#[test]
fn failures_of_the_data_are_final() {
    let harness = Harness::new(2, POLICY);
    let extent = Extent::from_raw(3, 1).unwrap();
    let spoil = Request::write_uncorrectable(extent, Durability::Volatile);
    assert!(harness.run(harness.layer.execute(spoil)).0.is_ok());
    let failed = harness.run(harness.layer.execute(read(3))).0.unwrap_err();
    assert!(matches!(failed.kind(), ErrorKind::Integrity(_)));
    assert_eq!((harness.requests(), harness.live()), (vec![1, 1], vec![true, true]), "and no other path is asked");
}

#[test]
fn a_path_whose_requests_time_out_fails_and_another_path_executes_them() {
    let harness = Harness::new(2, POLICY);
    harness.links[0].mode.set(Mode::Silent);
    let all = join_all((0..10).map(|at| harness.layer.execute(write(at, 1, 9))));
    let (outcomes, time) = harness.run(all);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert!(time >= seconds(5) && time <= seconds(6), "{time:?}");
    assert_eq!((harness.requests(), harness.live()), (vec![5, 10], vec![false, true]));
}

/// A write gets stuck on a path and is retried on the other one; another write to the same block follows; then the
/// stuck write arrives. Returns the content of the block at the end, and how long the second write took.
fn overtake(policy: RetryPolicy) -> (u8, Duration) {
    let harness = Harness::new(2, policy);
    harness.links[0].mode.set(Mode::Silent);
    assert!(harness.run(harness.layer.execute(write(5, 4, 1))).0.is_ok());
    let late = async {
        harness.time.sleep(seconds(10)).await;
        assert_eq!(harness.links[0].deliver(), 1);
    };
    let second = async {
        let begin = harness.time.now();
        assert!(harness.layer.execute(write(8, 1, 2)).await.is_ok());
        harness.time.now() - begin
    };
    let neighbour = async {
        let begin = harness.time.now();
        assert!(harness.layer.execute(write(9, 1, 2)).await.is_ok());
        assert_eq!(harness.time.now(), begin, "blocks without a late write do not wait");
    };
    let ((_, second), ()) = harness.run(join(join(late, second), neighbour)).0;
    (byte(harness.run(harness.layer.execute(read(8))).0), second)
}

#[test]
fn a_late_write_does_not_undo_a_newer_one() {
    assert_eq!(overtake(POLICY), (2, seconds(11)));
    // Twin: without the quiesce time the late write wins.
    assert_eq!(overtake(RetryPolicy { quiesce_time: Duration::ZERO, ..POLICY }), (1, Duration::ZERO));
}

/// Whoever comes after the layer knows nothing of what a lost path may still deliver.
#[test]
fn a_close_waits_for_late_writes_as_long_as_there_is_a_path() {
    let harness = Harness::new(2, POLICY);
    let late = harness.layer.late_changes();
    assert_eq!(harness.run(late.settled()), (true, Duration::ZERO), "there is none");
    harness.links[0].mode.set(Mode::Silent);
    assert!(harness.run(harness.layer.execute(write(5, 4, 1))).0.is_ok());
    let (is_settled, waited) = harness.run(late.settled());
    assert!(is_settled && waited == seconds(11) && waited < late.longest, "{waited:?}");
    let harness = Harness::new(2, RetryPolicy { quiesce_time: seconds(1000), ..POLICY });
    let late = harness.layer.late_changes();
    harness.links[0].mode.set(Mode::Silent);
    assert!(harness.run(harness.layer.execute(write(5, 4, 1))).0.is_ok());
    harness.links.iter().for_each(|link| link.mode.set(Mode::Gone));
    assert!(harness.run(harness.layer.execute(read(0))).0.is_err());
    assert_eq!(harness.run(late.settled()), (false, Duration::ZERO), "and no path to find out");
}

/// If it were sent again, it would find its own write, and report a miscompare.
#[test]
fn a_compare_and_write_whose_path_is_lost_is_not_sent_again() {
    for mode in [Mode::Silent, Mode::Flaps] {
        let harness = Harness::new(2, POLICY);
        harness.links[0].mode.set(mode);
        let data = |byte| match write(5, 1, byte).operation {
            sealblock_block::Operation::Write(data) => data.into_sealed(),
            other => panic!("{other:?}"),
        };
        let extent = Extent::from_raw(5, 1).unwrap();
        let swap = || Request::compare_and_write(extent, data(0), data(1), Durability::Volatile);
        let error = harness.run(harness.layer.execute(swap())).0.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("may have been executed"), "{error}");
        assert_eq!(harness.requests(), [1, 0], "{mode:?}");
        // It may be executed late, so a write to its block waits, but one to another block does not.
        let waits = |at| harness.run(harness.layer.execute(write(at, 1, 2))).1 > Duration::ZERO;
        assert!(!waits(6) && waits(5), "{mode:?}");
        // A working path returns the answer of its device.
        harness.links[0].mode.set(Mode::Works);
        let refused = harness.run(harness.layer.execute(swap())).0.unwrap_err();
        assert_eq!(*refused.kind(), ErrorKind::Absent(RequestKind::CompareAndWrite));
    }
}

#[test]
fn blocks_are_released_only_when_the_target_is_quiesced() {
    thread_local!(static QUIESCES: Cell<bool> = const { Cell::new(false) });
    let quiesce = |_: usize, link: &harness::TestLink| {
        let link = link.clone();
        let opener = DeviceOpener::new("quiesce", move || {
            let link = link.clone();
            async move {
                match QUIESCES.get() {
                    true => Ok(DynDevice::new("path", link)),
                    false => Err(ErrorKind::Unreachable { reason: "busy".to_owned() }.into()),
                }
            }
        });
        Some(Quiesce { opener, target: Rc::new(|| None) })
    };
    let harness = Harness::with(2, RetryPolicy { no_path_timeout: seconds(100), ..POLICY }, quiesce);
    harness.links[0].mode.set(Mode::Silent);
    assert!(harness.run(harness.layer.execute(write(5, 1, 1))).0.is_ok());
    let quiesces = async {
        harness.time.sleep(seconds(40)).await;
        QUIESCES.set(true);
    };
    let (outcome, time) = harness.run(join(harness.layer.execute(write(5, 1, 2)), quiesces));
    assert!(outcome.0.is_ok() && time >= seconds(40) && time <= seconds(51), "{time:?}");
}

/// A path to another target, such as a second gateway, quiesces nothing of the lost one.
#[test]
fn blocks_are_released_when_the_target_of_the_lost_path_is_quiesced_or_gone() {
    thread_local!(static OPENED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) });
    thread_local!(static BACK: Cell<bool> = const { Cell::new(false) });
    let quiesce = |path: usize, link: &harness::TestLink| {
        let link = link.clone();
        let opener = DeviceOpener::new("quiesce", move || {
            OPENED.with_borrow_mut(|opened| opened.push(path));
            let opened = match path == 1 || BACK.get() {
                true => Ok(DynDevice::new("path", link.clone())),
                false => Err(ErrorKind::Unreachable { reason: "silent".to_owned() }.into()),
            };
            async move { opened }
        });
        Some(Quiesce { opener, target: Rc::new(move || Some([path as u8; 16])) })
    };
    for (back, took) in [(Some(20), 20..=30), (None, 41..=60)] {
        OPENED.take();
        BACK.set(false);
        let harness = Harness::with(2, RetryPolicy { no_path_timeout: seconds(100), ..POLICY }, quiesce);
        harness.links[0].mode.set(Mode::Silent);
        assert!(harness.run(harness.layer.execute(write(5, 1, 1))).0.is_ok());
        let returns = async {
            if let Some(after) = back {
                harness.time.sleep(seconds(after)).await;
                BACK.set(true);
            }
        };
        let (outcome, time) = harness.run(join(harness.layer.execute(write(5, 1, 2)), returns));
        assert!(outcome.0.is_ok() && took.contains(&time.as_secs()), "{time:?}");
        assert!(OPENED.with_borrow(|opened| opened.iter().all(|path| *path == 0)), "the other target is not asked");
    }
}

#[test]
fn without_a_path_requests_wait_for_a_bounded_time() {
    let harness = Harness::new(2, POLICY);
    harness.links.iter().for_each(|link| link.mode.set(Mode::Gone));
    let (outcome, time) = harness.run(harness.layer.execute(read(0)));
    assert!(matches!(outcome.unwrap_err().kind(), ErrorKind::Unreachable { .. }));
    assert_eq!(time, seconds(30));
    let back = async {
        harness.time.sleep(seconds(12)).await;
        harness.links[1].mode.set(Mode::Works);
    };
    let (outcome, time) = harness.run(join(harness.layer.execute(read(0)), back));
    assert!(outcome.0.is_ok() && time <= seconds(22), "{time:?}");
}

#[test]
fn a_request_that_fails_every_path_ends() {
    let harness = Harness::new(2, POLICY);
    harness.links.iter().for_each(|link| link.mode.set(Mode::Flaps));
    let (outcome, _) = harness.run(harness.layer.execute(read(0)));
    let failure = outcome.unwrap_err().into_kind();
    assert_eq!(failure, ErrorKind::Unreachable { reason: "8 paths failed with this request".to_owned() });
    assert_eq!(harness.requests().iter().sum::<u64>(), 8);
}

fn is_done(outcome: Outcome) -> bool {
    matches!(outcome, Ok(Response::Done))
}

#[test]
fn a_flush_is_sent_on_every_path_with_completed_writes() {
    let harness = Harness::new(3, POLICY);
    for at in 0..2 {
        assert!(harness.run(harness.layer.execute(write(at, 1, 7))).0.is_ok());
    }
    assert!(is_done(harness.run(harness.layer.execute(Request::flush())).0));
    let flushes = || harness.links.iter().map(|link| link.flushes.get()).collect::<Vec<_>>();
    assert_eq!(flushes(), [1, 1, 0]);
    assert!(is_done(harness.run(harness.layer.execute(Request::flush())).0));
    assert_eq!(flushes(), [1, 1, 1], "with nothing to flush, any path");
}

#[test]
fn a_flush_on_a_continuous_path_makes_writes_of_a_failed_one_durable() {
    let harness = Harness::new(2, POLICY);
    assert!(harness.run(harness.layer.execute(write(0, 1, 7))).0.is_ok());
    harness.links[0].mode.set(Mode::Gone);
    assert!(is_done(harness.run(harness.layer.execute(Request::flush())).0));
    assert_eq!(harness.links[1].flushes.get(), 1);
}

#[test]
fn unflushed_writes_without_a_continuous_path_fail_one_flush() {
    let harness = Harness::new(2, POLICY);
    assert!(harness.run(harness.layer.execute(write(0, 1, 7))).0.is_ok());
    harness.links.iter().for_each(|link| link.mode.set(Mode::Gone));
    let back = async {
        harness.time.sleep(seconds(5)).await;
        harness.links.iter().for_each(|link| link.mode.set(Mode::Works));
    };
    let (outcome, ()) = harness.run(join(harness.layer.execute(Request::flush()), back)).0;
    let failure = outcome.unwrap_err().into_kind();
    assert!(matches!(&failure, ErrorKind::Media { reason } if reason.contains("may be lost")), "{failure}");
    assert!(is_done(harness.run(harness.layer.execute(Request::flush())).0));
}

#[test]
fn paths_must_lead_to_devices_of_one_geometry() {
    let path_config = |blocks: Option<u64>| {
        let device_of = move |blocks| DynDevice::new("mem", MemoryDevice::new(BlockSize::B512, blocks, None));
        let source = DeviceOpener::new("mem", move || async move { Ok(device_of(1)) });
        PathConfig { source, quiesce: None, device: blocks.map(device_of) }
    };
    let of = |blocks: [Option<u64>; 2]| {
        MultipathLayer::new(blocks.map(path_config).into(), harness::Time::default(), POLICY).map(drop).err()
    };
    assert_eq!(of([Some(5), Some(5)]), None);
    assert_eq!(of([None, Some(5)]), None);
    assert_eq!(of([None, None]), Some(MultipathError::NonePresent));
    assert_eq!(of([Some(5), Some(6)]), Some(MultipathError::Different { path: 1, what: "number of blocks" }));
}

#[test]
fn a_path_that_is_missing_at_first_joins_later_unless_it_is_another_device() {
    // A path whose device has grown since the others were opened has all of their blocks.
    for (blocks, joins) in [(1000, true), (1001, true), (999, false)] {
        let present = Harness::new(1, POLICY).links.remove(0);
        let other = Rc::new(Gate::new("mem", MemoryDevice::new(BlockSize::B512, blocks, None)));
        let missing = harness::TestLink { memory: other, ..present.clone() };
        let device = Some(DynDevice::new("path", present.clone()));
        let paths = vec![
            PathConfig { source: missing.source(), quiesce: None, device: None },
            PathConfig { source: present.source(), quiesce: None, device },
        ];
        let harness = Harness::over(paths, vec![missing, present], POLICY);
        assert!(harness.run(harness.layer.execute(read(0))).0.is_ok());
        assert_eq!(harness.live(), [false, true]);
        harness.pass(seconds(30));
        assert_eq!(harness.live(), [joins, true]);
    }
}

#[test]
fn the_worker_ends_with_the_layer() {
    let path_config = Harness::new(1, POLICY).links.remove(0);
    let paths = vec![PathConfig {
        source: path_config.source(),
        quiesce: None,
        device: Some(DynDevice::new("path", path_config)),
    }];
    let time = harness::Time::default();
    let (layer, worker) = MultipathLayer::new(paths, time, POLICY).unwrap();
    let mut run = std::pin::pin!(worker.run());
    assert!(futures_util::FutureExt::now_or_never(run.as_mut()).is_none());
    drop(layer);
    assert!(futures_util::FutureExt::now_or_never(run).is_some());
}

/// The device compares the tags, and what it finds is final.
#[test]
fn expectations_of_tags_reach_the_device_on_every_path_and_fail_none() {
    let format = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1);
    let harness = Harness::to(MemoryDevice::new(BlockSize::B4096, 100, Some(format)), 2, POLICY, |_, _| None);
    let extent = |start, blocks| Extent::from_raw(start, blocks).unwrap();
    let tags = Tags { app_tag: 5, storage_tag: 0, initial_ref_tag: 0 };
    let data = Sealed::seal(Slice::copy_from(&[1; 8 * 4096]), BlockSize::B4096, Some(format), &tags);
    let written = harness.run(harness.layer.execute(Request::write(extent(0, 8), data, Durability::Volatile))).0;
    assert!(written.is_ok());
    let expect = |expected, checks_escapes| {
        let app_tag = Some(Masked { expected, mask: u16::MAX });
        Expectations::new(Checks { app_tag, checks_escapes, ..Checks::NONE })
    };
    let unexpected = |lba, expected, actual| {
        Some(ErrorKind::Expectation { lba: Lba::new(lba), field: Field::AppTag, expected, actual })
    };
    for (blocks, expectations, failure) in [
        (8, expect(5, true), None),
        (10, expect(5, false), None),
        (10, expect(5, true), unexpected(8, 5, 0xFFFF)),
        (8, expect(6, true), unexpected(0, 6, 5)),
    ] {
        // Each path in turn.
        for _ in 0..2 {
            for request in
                [Request::read(extent(0, blocks), expectations), Request::verify(extent(0, blocks), expectations)]
            {
                let found = harness.run(harness.layer.execute(request)).0;
                assert_eq!(found.err().map(|error| error.into_kind()), failure);
            }
        }
    }
    assert_eq!(harness.live(), [true, true]);
    assert!(
        harness.requests().iter().all(|requests| *requests >= 8),
        "no request is repeated: {:?}",
        harness.requests()
    );
    assert_eq!(harness.requests().iter().sum::<u64>(), 17);
}
