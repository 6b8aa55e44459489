//! A log that was in use and is lost: the open reports it and writes nothing. A caller that accepts it sees that the
//! device is not current. The anchor makes this exact: no crash at any of its steps counts as a loss.

use std::ops::Range;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use sealblock_block::{Device, Expectations, Freshness, Request, ReservedArea, Response, WhyOlder, WhyUnchecked};
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use super::setup::{Harness, TestClock, TestMedium, created, freshness, opened, pattern, protection};
use crate::format::{LogHeader, LogSector, SUPERBLOCK_OFFSETS, Seed, Superblock};
use crate::options::Mutation;
use crate::{OpenOptions, VolumeError, open};

const BLOCKS: u64 = 64;
/// Longer than the idle time after which a checkpoint begins.
const CHECKPOINTED: Duration = Duration::from_secs(5);

/// A volume whose machine stopped after flushed writes, before its first checkpoint or after one.
struct InUse {
    medium: TestMedium,
    /// Its bytes at an earlier state of the log.
    yesterday: Vec<u8>,
    /// The log, both regions.
    log: Range<usize>,
    /// Where the second region begins.
    second: usize,
    /// The seed of each block's last flushed write.
    last: u64,
}

impl InUse {
    fn new(has_checkpoint: bool) -> InUse {
        InUse::on(
            created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1)),
            has_checkpoint,
        )
    }

    fn on(medium: TestMedium, has_checkpoint: bool) -> InUse {
        let harness = Harness::open(&medium, false).unwrap();
        let yesterday = medium.bytes.borrow().clone();
        let flush = |seed| {
            harness.write(0, &pattern(seed, BLOCKS as usize * 4096)).unwrap();
            harness.flush().unwrap();
        };
        let mut last = 1;
        flush(last);
        if has_checkpoint {
            harness.wait(CHECKPOINTED);
            last += 1;
            flush(last);
        }
        let layout = harness.gate.device().layout;
        let (from, bytes) = (layout.log_offset() as usize, layout.log_bytes() as usize);
        drop(harness);
        InUse { medium, yesterday, log: from..from + bytes, second: from + bytes / 2, last }
    }

    /// A copy of the medium whose log has this kind of damage in this part.
    fn damaged(&self, what: &str, part: Range<usize>) -> TestMedium {
        let medium = self.medium.copy();
        match what {
            "zeroed" => medium.bytes.borrow_mut()[part].fill(0),
            "foreign" => foreign_sectors(&mut medium.bytes.borrow_mut()[part]),
            "yesterday's" => medium.bytes.borrow_mut()[part.clone()].copy_from_slice(&self.yesterday[part]),
            _ => medium.unreadable.set((part.start as u64, part.end as u64)),
        }
        medium
    }
}

const KINDS: [&str; 4] = ["zeroed", "foreign", "yesterday's", "unreadable"];

/// Log sectors of another volume.
fn foreign_sectors(log: &mut [u8]) {
    for (sequence, sector) in (0..).zip(log.chunks_exact_mut(512)) {
        LogSector::encode(sector, Seed::of(b"another identity"), LogHeader::new(sequence, 0), [].into_iter(), &[]);
    }
}

const LOST: Freshness = Freshness::MayBeOlder(WhyOlder::LogLost);

fn all() -> Extent {
    Extent::from_raw(0, BLOCKS).unwrap()
}

#[test]
fn an_empty_log_is_not_taken_for_lost_where_one_copy_of_the_sector_before_it_is_damaged() {
    for commits in 1..6 {
        let medium = created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
        let harness = Harness::open(&medium, false).unwrap();
        for seed in 0..commits {
            // A small commit has one copy; the checkpoint after it comes before the second one is due.
            harness.write(seed, &pattern(seed, 4096)).unwrap();
            harness.flush().unwrap();
        }
        harness.gate.device().checkpoints.request();
        harness.idle();
        let (tail, layout) = (harness.gate.device().log.tail.get(), harness.gate.device().layout);
        assert_eq!(harness.gate.device().log.next.get(), tail, "the log is empty, and in use");
        drop(harness);
        let place = |region| {
            let from = layout.log_sector_offset(tail - 1, region) as usize;
            from..from + 512
        };
        for region in [0, 1] {
            let damaged = medium.copy();
            damaged.bytes.borrow_mut()[place(region)].fill(0);
            let harness = opened(&damaged, false, false)
                .unwrap_or_else(|error| panic!("{commits} commits, region {region}: {error}"));
            assert_eq!(freshness(&harness), Freshness::Current);
            (0..commits).for_each(|seed| assert_eq!(harness.read(seed, 1).unwrap(), pattern(seed, 4096)));
        }
        // Twin: without both copies nothing shows that the log is there.
        let damaged = medium.copy();
        [0, 1].iter().for_each(|region| damaged.bytes.borrow_mut()[place(*region)].fill(0));
        assert!(opened(&damaged, false, false).is_err());
    }
}

#[test]
fn a_log_in_use_that_is_gone_is_refused_and_where_that_is_accepted_it_is_told_and_nothing_is_written() {
    for (has_checkpoint, what) in [false, true].into_iter().flat_map(|at| KINDS.map(|what| (at, what))) {
        let crashed = InUse::new(has_checkpoint);
        let medium = crashed.damaged(what, crashed.log.clone());
        let before = medium.bytes.borrow().clone();
        for read_only in [true, false] {
            match opened(&medium, read_only, false).err() {
                Some(VolumeError::LogDamaged { sectors, .. }) => assert!(sectors > 0),
                other => panic!("{what}, checkpoint {has_checkpoint}: {other:?}"),
            }
        }
        let harness = opened(&medium, true, true).unwrap();
        assert_eq!(freshness(&harness), LOST, "{what}");
        let verify = Request::verify(all(), Expectations::NONE);
        // A block whose write is lost may be bad if its physical block has been reused since.
        let coverage = match harness.run(harness.gate.execute(verify)) {
            Ok(Response::Verified(verified)) => verified.coverage,
            Ok(other) => panic!("a verify was answered with {other:?}"),
            Err(error) => error.bad_blocks().expect("damage is named").coverage().clone(),
        };
        assert!(coverage.unchecked().iter().any(|run| run.why == WhyUnchecked::LogLost));
        assert!(*medium.bytes.borrow() == before, "{what}: nothing is written");
    }
}

#[test]
fn one_region_of_the_log_is_enough() {
    for (has_checkpoint, what) in [false, true].into_iter().flat_map(|at| KINDS.map(|what| (at, what))) {
        let crashed = InUse::new(has_checkpoint);
        for part in [crashed.log.start..crashed.second, crashed.second..crashed.log.end] {
            for read_only in [true, false] {
                let harness = opened(&crashed.damaged(what, part.clone()), read_only, false).unwrap();
                assert_eq!(freshness(&harness), Freshness::Current, "{what} {part:?}");
                assert!(
                    harness.read(0, BLOCKS).unwrap() == pattern(crashed.last, BLOCKS as usize * 4096),
                    "{what} {part:?}"
                );
            }
        }
    }
}

#[test]
fn a_closed_volume_needs_no_log_and_one_that_was_opened_since_does() {
    let medium = created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &pattern(1, 4096)).unwrap();
    let medium = harness.close();
    let layout = Superblock::decode(&medium.bytes.borrow()).unwrap().layout;
    let log = layout.log_offset() as usize..(layout.log_offset() + layout.log_bytes()) as usize;
    medium.bytes.borrow_mut()[log.clone()].fill(0);
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!((freshness(&harness), harness.read(0, 1).unwrap() == pattern(1, 4096)), (Freshness::Current, true));
    harness.write(0, &pattern(2, 4096)).unwrap();
    harness.flush().unwrap();
    drop(harness);
    medium.bytes.borrow_mut()[log].fill(0);
    assert!(matches!(opened(&medium, true, false), Err(VolumeError::LogDamaged { .. })));
}

/// Found as trial 2594 of `--region log` of `proofs/fragility`: the last sector of the earlier log is the one before
/// the tail.
#[test]
fn a_log_that_is_put_back_to_what_it_was_when_the_volume_was_closed_before_is_gone() {
    let medium = created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &pattern(1, 4096)).unwrap();
    let medium = harness.close();
    let layout = Superblock::decode(&medium.bytes.borrow()).unwrap().layout;
    let log = layout.log_offset() as usize..(layout.log_offset() + layout.log_bytes()) as usize;
    let yesterday = medium.bytes.borrow()[log.clone()].to_vec();
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &pattern(2, 4096)).unwrap();
    harness.flush().unwrap();
    drop(harness);
    let now = medium.copy();
    medium.bytes.borrow_mut()[log].copy_from_slice(&yesterday);
    assert!(matches!(opened(&medium, true, false), Err(VolumeError::LogDamaged { .. })));
    let harness = Harness::open(&now, false).unwrap();
    assert!(harness.read(0, 1).unwrap() == pattern(2, 4096), "the log itself is taken");
    harness.wait(CHECKPOINTED);
    let superblock = harness.gate.device().superblock();
    assert!(superblock.is_anchored && !superblock.is_begun, "a checkpoint moves the tail behind the anchor");
}

/// Writes the superblocks as a program that does not know anchors.
fn forget_anchor(medium: &TestMedium) {
    let third = Superblock::decode(&medium.bytes.borrow()).unwrap().layout.third_offset();
    for at in [SUPERBLOCK_OFFSETS[0], SUPERBLOCK_OFFSETS[1], third] {
        let at = at as usize;
        let superblock = Superblock::decode(&medium.bytes.borrow()[at..]).unwrap();
        let plain = Superblock { is_anchored: false, is_begun: false, ..superblock };
        medium.bytes.borrow_mut()[at..at + 512].copy_from_slice(&plain.encode());
    }
}

#[test]
fn the_log_of_an_older_program_is_gone_where_it_had_begun_and_no_sector_is_left_and_is_anchored_from_then_on() {
    let crashed = InUse::new(true);
    forget_anchor(&crashed.medium);
    for what in ["zeroed", "foreign"] {
        let medium = crashed.damaged(what, crashed.log.clone());
        assert!(matches!(opened(&medium, true, false), Err(VolumeError::LogDamaged { .. })), "{what}");
    }
    let harness = Harness::open(&crashed.medium, false).unwrap();
    assert!(harness.read(0, BLOCKS).unwrap() == pattern(2, BLOCKS as usize * 4096));
    assert!(harness.gate.device().superblock().is_anchored, "recovery leaves an anchor");
}

#[test]
fn no_crash_at_any_step_of_the_anchor_is_taken_for_a_loss() {
    let fresh = created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    // After a clean close and after crashes; an open after a crash writes its anchor at once.
    for start in [fresh, InUse::new(false).medium, InUse::new(true).medium] {
        let mut steps = 0;
        loop {
            let medium = start.copy();
            medium.changes_left.set(steps);
            let is_done = Harness::open(&medium, false)
                .is_ok_and(|harness| harness.write(0, &pattern(9, 4096)).is_ok() && harness.flush().is_ok());
            medium.changes_left.set(u64::MAX);
            for read_only in [true, false] {
                let harness =
                    Harness::open(&medium, read_only).unwrap_or_else(|why| panic!("after {steps} changes: {why}"));
                assert_eq!(freshness(&harness), Freshness::Current);
                assert!(!is_done || harness.read(0, 1).unwrap() == pattern(9, 4096), "after {steps} changes");
            }
            if is_done {
                break;
            }
            steps += 1;
        }
        assert!(steps > 4, "an anchor, superblocks, data and a sector of the log");
    }
}

/// Two tasks are the first to use the log at the same time: neither may mark it as anchored before the other's anchor
/// is durable.
#[test]
fn two_who_begin_the_log_at_once_promise_no_anchor_before_it_is_durable() {
    let medium = created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let harness = Harness::open(&medium, false).unwrap();
    let volume = harness.gate.device();
    let promises = |medium: &TestMedium| {
        let bytes = medium.bytes.borrow();
        let superblocks = SUPERBLOCK_OFFSETS.iter().map(|at| Superblock::decode(&bytes[*at as usize..][..512]));
        superblocks.filter(|found| found.as_ref().is_ok_and(|superblock| superblock.is_anchored)).count()
    };
    let anchor = volume.layout.log_sector_offset(volume.log.next.get(), 0) as usize;
    let is_written = || medium.bytes.borrow()[anchor..][..512].iter().any(|byte| *byte != 0);
    let mut first = pin!(volume.mark_log_in_use());
    let mut second = pin!(volume.mark_log_in_use());
    let context = &mut Context::from_waker(Waker::noop());
    // The anchor is written, and its sync is in flight when the second task comes. That sync fails, so it is unknown
    // what is left of it.
    medium.turns.set(50);
    medium.syncs_left.set(0);
    while !is_written() {
        assert!(first.as_mut().poll(context).is_pending());
    }
    assert!(first.as_mut().poll(context).is_pending() && second.as_mut().poll(context).is_pending());
    let ended = (0..1000).find_map(|_| match first.as_mut().poll(context) {
        Poll::Ready(ended) => Some(ended),
        Poll::Pending => {
            let _ = second.as_mut().poll(context);
            None
        }
    });
    assert!(matches!(ended, Some(Err(_))), "{ended:?}");
    let ended = (0..1000).find_map(|_| match second.as_mut().poll(context) {
        Poll::Ready(ended) => Some(ended),
        Poll::Pending => None,
    });
    assert!(matches!(ended, Some(Err(_))), "{ended:?}");
    assert_eq!(promises(&medium), 0, "the sync of the anchor failed");
}

#[test]
fn an_anchor_that_is_promised_and_not_written_is_missed() {
    let medium = created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let options = OpenOptions { mutation: Mutation::NoAnchor, ..OpenOptions::default() };
    let is_missed = (0..20).any(|steps| {
        let medium = medium.copy();
        medium.changes_left.set(steps);
        if let Ok(harness) = Harness::open_with(&medium, options) {
            let _ = harness.write(0, &pattern(9, 4096));
            let _ = harness.flush();
        }
        matches!(opened(&medium, true, false), Err(VolumeError::LogDamaged { .. }))
    });
    assert!(is_missed);
}

#[test]
fn a_replica_keeps_its_lost_log_until_a_block_changes_and_then_gives_it_up() {
    for (has_checkpoint, what) in [false, true].into_iter().flat_map(|at| KINDS.map(|what| (at, what))) {
        let crashed = InUse::new(has_checkpoint);
        let medium = crashed.damaged(what, crashed.log.clone());
        let log = medium.bytes.borrow()[crashed.log.clone()].to_vec();
        let harness = opened(&medium, false, true).unwrap();
        assert!(harness.gate.abilities().writable && freshness(&harness) == LOST);
        let label = Request::write_reserved(ReservedArea::GroupLabel, Slice::copy_from(b"out of sync"));
        harness.run(harness.gate.execute(label)).unwrap();
        harness.flush().unwrap();
        harness.wait(CHECKPOINTED);
        let medium = harness.close();
        assert!(medium.bytes.borrow()[crashed.log.clone()] == log, "{what}: the log is as it was found");
        assert!(matches!(opened(&medium, false, false), Err(VolumeError::LogDamaged { .. })), "{what}");
        medium.unreadable.set((0, 0));
        if what == "unreadable" {
            medium.bytes.borrow_mut()[crashed.log.clone()].fill(0);
        }
        let harness = opened(&medium, false, true).unwrap();
        let held = harness.run(harness.gate.execute(Request::read_reserved(ReservedArea::GroupLabel))).unwrap();
        assert!(matches!(held, Response::Reserved(bytes) if bytes[..] == b"out of sync"[..]));
        harness.write(0, &pattern(7, BLOCKS as usize * 4096)).unwrap();
        assert_eq!(freshness(&harness), Freshness::Current, "who opened it has recorded what is to be recorded");
        harness.flush().unwrap();
        drop(harness);
        let harness = opened(&medium, false, false).unwrap();
        assert!(harness.read(0, BLOCKS).unwrap() == pattern(7, BLOCKS as usize * 4096), "{what}");
        harness.verify().unwrap();
    }
}

#[test]
fn closing_waits_for_a_log_that_is_being_given_up() {
    let crashed = InUse::new(true);
    let medium = crashed.damaged("zeroed", crashed.log.clone());
    let options = OpenOptions { accept_older: true, ..OpenOptions::default() };
    let opened = futures_executor::block_on(open(medium.clone(), TestClock::default(), &options)).unwrap();
    medium.held.set((0, u64::MAX));
    let discard = opened.volume.execute(Request::discard([all()]));
    let close = async {
        medium.let_all_go();
        opened.volume.close().await
    };
    let ((changed, closed), ()) = futures_executor::block_on(futures_util::future::join(
        futures_util::future::join(discard, close),
        opened.worker.run(),
    ));
    closed.unwrap();
    let harness = Harness::open(&medium, true).unwrap();
    let is_empty = harness.read(0, BLOCKS).unwrap().iter().all(|byte| *byte == 0);
    assert!(changed.is_err() || is_empty);
}
