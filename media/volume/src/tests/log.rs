//! The two places of the log: what one fault may cost, and that commits wait neither for second copies nor for
//! checkpoints.

use std::time::Duration;

use futures_util::future::{Either, select};
use sealblock_block::{Device, Expectations, Request, Response, WhyUnchecked};
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_units::{BlockSize, Extent, Lba};

use super::setup::{Harness, TestClock, TestMedium, created, pattern, protection};
use crate::format::{Layout, LogSector, Seed};
use crate::options::Mutation;
use crate::{OpenOptions, OpenVolume, VolumeError, open};

const BLOCKS: u64 = 64;
/// The length of the longest fault.
const FAULT_BYTES: u64 = 64 << 10;
/// The time after which the worker writes a second copy.
const SETTLED: Duration = Duration::from_millis(200);

/// A volume whose machine has stopped with a live log.
struct Crashed {
    medium: TestMedium,
    layout: Layout,
    /// Its bytes at an earlier time, when the log had wrapped around and was empty.
    earlier: Vec<u8>,
    /// The seed of each block's last flushed write, and of the one before if that is in the last commit.
    last: Vec<u64>,
    before: Vec<u64>,
    /// The first and the next sequence number of the log.
    tail: u64,
    next: u64,
    /// The bytes of the log after each commit.
    logs: Vec<Vec<u8>>,
}

fn size_of(blocks: u64, of: &Layout) -> usize {
    blocks as usize * of.block_size().bytes()
}

impl Crashed {
    /// Flushes commits of these numbers of blocks, as many as the log takes without a checkpoint, and stops.
    fn after(size: BlockSize, sector: u32, commits: impl IntoIterator<Item = u64>, has_second_copy: bool) -> Crashed {
        let medium = created(size, sector, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
        let harness = Harness::open(&medium, false).unwrap();
        let layout = harness.gate.device().layout;
        let mut last = vec![0; BLOCKS as usize];
        let mut seed = 0;
        let mut flush = |start: u64, blocks: u64, last: &mut Vec<u64>| {
            for lba in start..start + blocks {
                seed += 1;
                last[lba as usize] = seed;
                harness.write(lba, &pattern(seed, size_of(1, &layout))).unwrap();
            }
            harness.flush().unwrap();
        };
        flush(0, BLOCKS, &mut last);
        (0..layout.log_sectors() + 3).for_each(|round| flush(round % BLOCKS, 1, &mut last));
        harness.wait(Duration::from_secs(5));
        let log = &harness.gate.device().log;
        let tail = log.tail.get();
        assert_eq!(tail, log.next.get(), "the log is empty");
        let earlier = medium.bytes.borrow().clone();
        let mut before = last.clone();
        let (mut logs, bytes) = (Vec::new(), layout.log_offset() as usize..layout.bitmap_offset() as usize);
        let has_room = || log.next.get() - tail < layout.log_sectors() / 2 - 2;
        for (round, blocks) in (0..).zip(commits).take_while(|_| has_room()) {
            before.clone_from(&last);
            flush(round * 5 % (BLOCKS - blocks + 1), blocks, &mut last);
            logs.push(medium.bytes.borrow()[bytes.clone()].to_vec());
        }
        if has_second_copy {
            harness.wait(SETTLED);
            before.clone_from(&last);
        }
        assert_eq!(harness.gate.device().log.tail.get(), tail, "the log is live");
        let next = harness.gate.device().log.next.get();
        drop(harness);
        Crashed { medium, layout, earlier, last, before, tail, next, logs }
    }

    /// Opens a copy of the medium with damage from byte `from` to byte `to`, read-only and for writing.
    fn check(&self, what: &str, from: u64, to: u64, last: &[u64]) {
        for read_only in [true, false] {
            let medium = self.medium.copy();
            let range = from as usize..to as usize;
            match what {
                "zeroed" => medium.bytes.borrow_mut()[range].fill(0),
                "random" => medium.bytes.borrow_mut()[range.clone()].copy_from_slice(&pattern(from | 77, range.len())),
                "stale" => medium.bytes.borrow_mut()[range.clone()].copy_from_slice(&self.earlier[range]),
                _ => medium.unreadable.set((from, to)),
            }
            let harness = Harness::open(&medium, read_only).unwrap_or_else(|why| panic!("{what} {from}..{to}: {why}"));
            for (lba, seed) in (0..).zip(last) {
                let is_right = harness.read(lba, 1).unwrap() == pattern(*seed, size_of(1, &self.layout));
                assert!(is_right, "{what} {from}..{to} of {:?}: block {lba}", (self.tail, self.next));
            }
            harness.verify().unwrap();
        }
    }

    /// Both places of a log sector.
    fn copies(&self, sequence: u64) -> [(u64, Vec<u8>); 2] {
        let sector = self.layout.sector_bytes() as usize;
        [0, 1].map(|region| {
            let at = self.layout.log_sector_offset(sequence, region);
            (at, self.medium.bytes.borrow()[at as usize..at as usize + sector].to_vec())
        })
    }

    /// The only place of the last commit: the other place of its sector has fewer entries, or an older sector.
    fn only_place(&self) -> u64 {
        let entries = |bytes: &[u8]| {
            let sector = LogSector::decode(bytes, Seed::of(&super::setup::UUID)).ok();
            sector.filter(|sector| sector.header.sequence == self.next - 1).map(|sector| sector.entries().len())
        };
        let [(a, first), (b, second)] = self.copies(self.next - 1);
        assert_ne!(entries(&first), entries(&second), "the premise: one of them has more");
        if entries(&first) > entries(&second) { a } else { b }
    }
}

const KINDS: [&str; 4] = ["zeroed", "random", "stale", "unreadable"];

/// Damages every sector of the live log in turn. Damage to the one with `only` must cost the last commit; no other may.
fn damage_each_sector(crashed: &Crashed, only: Option<u64>) {
    let sector = u64::from(crashed.layout.sector_bytes());
    for what in KINDS {
        for sequence in crashed.tail..crashed.next {
            for region in [0, 1] {
                let from = crashed.layout.log_sector_offset(sequence, region);
                let last = if only == Some(from) { &crashed.before } else { &crashed.last };
                crashed.check(what, from, from + sector, last);
            }
        }
    }
}

/// Damages every run of the log that has the length of the longest fault, in steps.
fn damage_each_run(crashed: &Crashed, step: u64, only: Option<u64>) {
    let (start, end) = (crashed.layout.log_offset(), crashed.layout.bitmap_offset());
    for (at, from) in (start..=end - FAULT_BYTES).step_by(step as usize).enumerate() {
        let is_in = only.is_some_and(|only| (from..from + FAULT_BYTES).contains(&only));
        let last = if is_in { &crashed.before } else { &crashed.last };
        crashed.check(KINDS[at % 4], from, from + FAULT_BYTES, last);
    }
}

#[test]
fn a_damaged_sector_of_a_live_log_costs_the_last_small_commit_at_most() {
    for (size, sector) in [(BlockSize::B4096, 512), (BlockSize::B512, 512), (BlockSize::B4096, 4096)] {
        // Consecutive small commits, larger ones in between, the smallest one that is written twice, and overwritten
        // blocks.
        let commits = [1, 1, 7, 7, 1, 8, 1, 40, 1, 7, 2, 30, 1, 5];
        let crashed = Crashed::after(size, sector, commits, false);
        damage_each_sector(&crashed, Some(crashed.only_place()));
        let crashed = Crashed::after(size, sector, commits, true);
        damage_each_sector(&crashed, None);
        let crashed = Crashed::after(size, sector, [1, 7, 8], false);
        damage_each_sector(&crashed, None);
    }
}

#[test]
fn a_damaged_run_of_a_live_log_costs_the_last_small_commit_at_most() {
    for (size, sector) in [(BlockSize::B4096, 512), (BlockSize::B4096, 4096)] {
        let crashed = Crashed::after(size, sector, (0..).map(|_| 1), false);
        damage_each_run(&crashed, 7 << 12, Some(crashed.only_place()));
        let crashed = Crashed::after(size, sector, (0..).map(|_| 1), true);
        damage_each_run(&crashed, 7 << 12, None);
        let crashed = Crashed::after(size, sector, (0..).map(|round| round % 9 * 3 % 23 + 1), true);
        damage_each_run(&crashed, 7 << 12, None);
    }
}

#[test]
fn a_sector_of_a_live_log_put_back_to_an_earlier_content_costs_the_last_small_commit_at_most() {
    for has_second_copy in [false, true] {
        // Sectors with up to fourteen commits, and sectors that end early.
        let commits = [1, 1, 2, 1, 1, 9, 1, 1, 7, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 1];
        let crashed = Crashed::after(BlockSize::B4096, 512, commits, has_second_copy);
        let only = if has_second_copy { None } else { Some(crashed.only_place()) };
        let start = crashed.layout.log_offset() as usize;
        let mut tried = 0;
        for (sequence, log) in (crashed.tail..crashed.next).flat_map(|at| crashed.logs.iter().map(move |log| (at, log)))
        {
            for (at, now) in crashed.copies(sequence) {
                let earlier = &log[at as usize - start..][..now.len()];
                if *earlier == now {
                    continue;
                }
                let last = if only == Some(at) { &crashed.before } else { &crashed.last };
                crashed.medium.bytes.borrow_mut()[at as usize..][..now.len()].copy_from_slice(earlier);
                crashed.check("as it was", at, at, last);
                crashed.medium.bytes.borrow_mut()[at as usize..][..now.len()].copy_from_slice(&now);
                tried += 1;
            }
        }
        assert!(tried > 50, "{tried}");
    }
}

#[test]
fn small_commits_join_the_sector_before_as_long_as_there_is_room_and_no_block_of_theirs_is_there() {
    let harness = Harness::new(BlockSize::B4096, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let log = &harness.gate.device().log;
    let flush = |lba: u64| {
        let (written, syncs) = (harness.medium.written_bytes.get(), harness.medium.syncs.get());
        harness.write(lba, &pattern(lba, 4096)).unwrap();
        harness.flush().unwrap();
        assert_eq!(harness.medium.written_bytes.get() - written, 4096 + 512);
        assert_eq!(harness.medium.syncs.get() - syncs, 1);
        log.next.get()
    };
    harness.write(63, &pattern(1, 4096)).unwrap();
    harness.flush().unwrap();
    harness.wait(Duration::from_secs(5));
    let first = log.next.get();
    assert_eq!((0..15).map(flush).max(), Some(first + 1), "fifteen in the first");
    assert_eq!((15..29).map(flush).max(), Some(first + 2), "fourteen and one repeated");
    assert_eq!(flush(29), first + 3);
    assert_eq!(flush(29), first + 4, "two of one block would have one generation");
    harness.wait(SETTLED);
    assert_eq!(flush(30), first + 5, "what has its second copy says that it is durable as a whole");
    harness.wait(Duration::from_secs(5));
    assert_eq!(flush(31), first + 6, "the block map has the sector before");
    let medium = harness.medium.clone();
    drop(harness);
    let again = Harness::open(&medium, false).unwrap();
    (0..32).for_each(|lba| assert!(again.read(lba, 1).unwrap() == pattern(lba, 4096)));
}

#[test]
fn a_commit_that_joins_a_sector_beside_a_checkpoint_is_not_taken_for_one_in_the_map_pages() {
    for mutation in [Mutation::None, Mutation::JoinTaken] {
        let medium = created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
        let harness = Harness::open_with(&medium, OpenOptions { mutation, ..OpenOptions::default() }).unwrap();
        harness.write(0, &pattern(1, 4096)).unwrap();
        harness.flush().unwrap();
        hold_tables(&harness);
        harness.gate.device().checkpoints.request();
        harness.idle();
        // A checkpoint is in flight and includes the sector.
        harness.write(1, &pattern(2, 4096)).unwrap();
        harness.flush().unwrap();
        harness.medium.let_all_go();
        harness.idle();
        drop(harness);
        let again = Harness::open(&medium, true).unwrap();
        assert_eq!(again.read(0, 1).unwrap(), pattern(1, 4096));
        assert_eq!(again.read(1, 1).unwrap() == pattern(2, 4096), mutation == Mutation::None, "{mutation:?}");
    }
}

fn open_described(medium: &TestMedium, read_only: bool) -> Result<OpenVolume<TestMedium, TestClock>, VolumeError> {
    let options = OpenOptions { read_only, accept_older: read_only, ..OpenOptions::default() };
    futures_executor::block_on(open(medium.clone(), TestClock::default(), &options))
}

#[test]
fn a_log_that_lost_a_sector_in_both_places_is_read_and_not_written_and_never_called_clean() {
    let crashed = Crashed::after(BlockSize::B4096, 512, [1, 8, 7, 7, 7, 7], true);
    let (layout, tail) = (crashed.layout, crashed.tail);
    // A sector that is written twice, and one that is written once and repeated.
    for (sequence, other) in [(tail + 1, tail + 1), (tail + 3, tail + 4)] {
        let medium = crashed.medium.copy();
        for at in [
            layout.log_sector_offset(sequence, sequence),
            layout.log_sector_offset(other, other + u64::from(sequence == other)),
        ] {
            medium.bytes.borrow_mut()[at as usize..at as usize + 512].fill(0);
        }
        match open_described(&medium, false).err() {
            Some(VolumeError::LogDamaged { sequence: first, sectors }) => {
                assert_eq!((first, sectors), (sequence, 1), "what the second fault took besides is repeated");
            }
            other => panic!("{other:?}"),
        }
        let before = medium.bytes.borrow().clone();
        let description = open_described(&medium, true).unwrap().description;
        assert!(description.log_lost > 0 && !description.is_clean);
        let options = OpenOptions { read_only: true, accept_older: true, ..OpenOptions::default() };
        let harness = Harness::open_with(&medium, options).unwrap();
        let extent = Extent::from_raw(0, BLOCKS).unwrap();
        let verify = Request::verify(extent, Expectations::NONE);
        // A block whose write is lost is as it was before, or bad if its physical block has been reused since.
        let coverage = match harness.run(harness.gate.execute(verify)) {
            Ok(Response::Verified(verified)) => verified.coverage,
            Ok(other) => panic!("a verify was answered with {other:?}"),
            Err(error) => {
                let bad_blocks = error.bad_blocks().expect("damage is named");
                assert!(bad_blocks.as_slice().len() <= 8, "no more than the lost sector was about");
                bad_blocks.coverage().clone()
            }
        };
        assert!(coverage.unchecked().iter().any(|run| run.why == WhyUnchecked::LogLost));
        assert_eq!(coverage.blocks(), BLOCKS);
        assert!(*medium.bytes.borrow() == before);
    }
}

#[test]
fn a_sector_that_is_repeated_in_part_is_lost_where_both_its_places_are() {
    let crashed = Crashed::after(BlockSize::B4096, 512, [1, 1, 1, 8], true);
    assert_eq!(crashed.next - crashed.tail, 2, "the premise: three have joined");
    for (at, bytes) in crashed.copies(crashed.tail) {
        crashed.medium.bytes.borrow_mut()[at as usize..][..bytes.len()].fill(0);
    }
    match open_described(&crashed.medium, false).err() {
        Some(VolumeError::LogDamaged { sequence, sectors }) => assert_eq!((sequence, sectors), (crashed.tail, 1)),
        other => panic!("{other:?}"),
    }
    assert_eq!(open_described(&crashed.medium, true).unwrap().description.log_lost, 1);
}

/// A volume with two small commits of one block, in the sectors after the anchor.
fn with_two_commits() -> Harness {
    let harness = Harness::new(BlockSize::B4096, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    for seed in [1, 2] {
        harness.write(5, &pattern(seed, 4096)).unwrap();
        harness.flush().unwrap();
    }
    harness
}

/// The durable_seq and the number of repeated map entries of a log sector, in the place where it was written first, and
/// in the other place.
fn found(harness: &Harness, sequence: u64) -> [Option<(u64, usize)>; 2] {
    [sequence, sequence + 1].map(|region| {
        let at = harness.gate.device().layout.log_sector_offset(sequence, region) as usize;
        let bytes = &harness.medium.bytes.borrow()[at..at + 512];
        let sector = LogSector::decode(bytes, Seed::of(&super::setup::UUID)).ok()?;
        Some((sector.header.durable_seq, sector.repeats().len()))
    })
}

#[test]
fn the_last_small_commit_gets_its_second_copy_when_no_other_follows() {
    let harness = with_two_commits();
    let done = || (harness.medium.written_bytes.get(), harness.medium.syncs.get());
    harness.wait(SETTLED - Duration::from_millis(1));
    assert_eq!(found(&harness, 2), [Some((2, 1)), None], "not before the time");
    let before = done();
    harness.wait(Duration::from_millis(1));
    assert_eq!(found(&harness, 2), [Some((2, 1)), Some((3, 1))]);
    // Including both copies of the high-water mark.
    assert_eq!(done(), (before.0 + 3 * 512, before.1 + 1));
    harness.wait(Duration::from_secs(1));
    assert_eq!(done(), (before.0 + 3 * 512, before.1 + 1), "once");
    harness.write(6, &pattern(3, 4096)).unwrap();
    harness.flush().unwrap();
    assert_eq!(found(&harness, 3), [Some((3, 0)), None], "the next one has nothing to repeat");
}

#[test]
fn damage_to_the_data_of_the_last_commit_is_no_lost_write_once_the_commit_has_two_copies() {
    for (wait, is_damage) in [(Duration::ZERO, false), (SETTLED, true)] {
        let harness = with_two_commits();
        harness.wait(wait);
        super::recovery::lose_data(&harness, 5);
        let medium = harness.medium.clone();
        drop(harness);
        let read = Harness::open(&medium, true).unwrap().read(5, 1);
        match is_damage {
            true => assert_eq!(read.unwrap_err().bad_blocks().unwrap().as_slice()[0].lba, Lba::new(5)),
            false => assert_eq!(read.unwrap(), pattern(1, 4096)),
        }
    }
}

#[test]
fn unflushed_writes_do_not_delay_the_second_copy() {
    let harness = Harness::new(BlockSize::B4096, BLOCKS, None);
    harness.write(5, &pattern(1, 4096)).unwrap();
    harness.flush().unwrap();
    harness.wait(Duration::from_millis(100));
    harness.write(6, &pattern(2, 4096)).unwrap();
    let syncs = harness.medium.syncs.get();
    harness.wait(Duration::from_millis(100));
    assert_eq!(harness.medium.syncs.get() - syncs, 1);
    assert_eq!(harness.gate.device().memtable.active_len(), 1, "and need not be committed for it");
}

#[test]
fn whatever_else_the_worker_has_to_do_does_not_keep_the_second_copy_waiting() {
    let harness = with_two_commits();
    for _ in 0..4 {
        harness.wait(SETTLED / 4);
        // A writer waits for space, but there is nothing to commit.
        harness.gate.device().commits.request_space();
        harness.idle();
    }
    assert_eq!(found(&harness, 2), [Some((2, 1)), Some((3, 1))]);
}

/// Holds writes to a volume's map pages, so that no checkpoint ends.
fn hold_tables(harness: &Harness) {
    let group = harness.gate.device().layout.block_group(0).unwrap();
    // Up to the high-water mark, which follows them.
    harness.medium.held.set((harness.gate.device().layout.groups_offset(), group.second_offset - 512));
}

#[test]
fn a_flush_beside_a_checkpoint_waits_for_its_own_log_write_only() {
    let harness = Harness::new(BlockSize::B4096, BLOCKS, protection(GuardKind::Crc16, ProtectionType::Type1));
    harness.write(0, &pattern(1, 4096)).unwrap();
    harness.flush().unwrap();
    let tail = harness.gate.device().log.tail.get();
    hold_tables(&harness);
    harness.wait(Duration::from_secs(5));
    for seed in 2..20 {
        let (written, syncs) = (harness.medium.written_bytes.get(), harness.medium.syncs.get());
        harness.write(seed, &pattern(seed, 4096)).unwrap();
        harness.flush().unwrap();
        assert_eq!((harness.medium.written_bytes.get() - written, harness.medium.syncs.get() - syncs), (4096 + 512, 1));
    }
    assert_eq!(harness.gate.device().log.tail.get(), tail, "the premise: the checkpoint has not ended");
    harness.medium.let_all_go();
    harness.idle();
    let log = &harness.gate.device().log;
    assert!(log.tail.get() > tail && log.tail.get() < log.next.get(), "it ends where it began");
    let medium = harness.medium.clone();
    drop(harness);
    let again = Harness::open(&medium, false).unwrap();
    (2..20).for_each(|seed| assert!(again.read(seed, 1).unwrap() == pattern(seed, 4096)));
}

#[test]
fn a_full_log_waits_for_the_checkpoint_and_goes_on_behind_it() {
    let harness = Harness::new(BlockSize::B4096, BLOCKS, protection(GuardKind::Crc16, ProtectionType::Type1));
    let sectors = harness.gate.device().layout.log_sectors();
    hold_tables(&harness);
    let write = |round: u64| {
        harness.write(round % BLOCKS, &pattern(round, 4096)).unwrap();
        harness.run(async {
            let mut polls = 0;
            let stalled = std::future::poll_fn(|cx| {
                polls += 1;
                cx.waker().wake_by_ref();
                if polls > 1000 { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
            });
            match select(Box::pin(harness.gate.execute(Request::flush())), stalled).await {
                Either::Left((flushed, _)) => flushed.map(|_| true).unwrap(),
                Either::Right(_) => false,
            }
        })
    };
    // Fourteen of them fit in a sector, and one sector is the anchor.
    let max = 14 * (sectors - 1);
    let flushed = (0..2 * max).find(|round| !write(*round)).unwrap();
    assert!((max - 28..=max + 1).contains(&flushed), "{flushed} of {max}");
    harness.medium.let_all_go();
    harness.flush().unwrap();
    let end = 2 * max / BLOCKS * BLOCKS;
    assert!((flushed + 1..end).all(write));
    let again = Harness::open(&harness.close(), true).unwrap();
    again.verify().unwrap();
    (0..BLOCKS).for_each(|lba| assert!(again.read(lba, 1).unwrap() == pattern(end - BLOCKS + lba, 4096)));
}

#[test]
fn what_is_written_while_a_commit_waits_for_room_is_committed_too() {
    let harness = Harness::new(BlockSize::B4096, BLOCKS, protection(GuardKind::Crc16, ProtectionType::Type1));
    hold_tables(&harness);
    let log = &harness.gate.device().log;
    let sectors = harness.gate.device().layout.log_sectors();
    // One sector is the anchor.
    for round in 1..sectors {
        // Commits of the same block do not share a sector.
        harness.write(63, &pattern(round, 4096)).unwrap();
        harness.flush().unwrap();
    }
    assert_eq!(log.next.get() - log.tail.get(), sectors, "the log is full");
    harness.write(0, &pattern(1, 4096)).unwrap();
    harness.wait(Duration::from_secs(1));
    // A commit of one block waits now, for the room of one block.
    harness.write(1, &pattern(2, 40 * 4096)).unwrap();
    harness.medium.let_all_go();
    harness.flush().unwrap();
    let medium = harness.medium.clone();
    drop(harness);
    let again = Harness::open(&medium, true).unwrap();
    assert!(again.read(0, 1).unwrap() == pattern(1, 4096) && again.read(1, 40).unwrap() == pattern(2, 40 * 4096));
}

#[test]
fn a_log_that_cannot_be_read_at_all_is_not_taken_for_an_empty_one_unless_the_superblock_says_so() {
    let harness = with_two_commits();
    let layout = harness.gate.device().layout;
    let log = (layout.log_offset(), layout.log_offset() + layout.log_bytes());
    let medium = harness.medium.clone();
    drop(harness);
    medium.unreadable.set(log);
    assert!(matches!(open_described(&medium, false).err(), Some(VolumeError::LogDamaged { sequence: 0, .. })));
    assert!(open_described(&medium, true).unwrap().description.log_lost > 0);
    medium.unreadable.set((0, 0));
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!(harness.read(5, 1).unwrap(), pattern(2, 4096));
    let medium = harness.close();
    medium.unreadable.set(log);
    let opened = open_described(&medium, true).unwrap();
    assert!(opened.description.is_clean && opened.description.log_lost == 0);
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(6, &pattern(3, 4096)).unwrap();
    harness.flush().unwrap();
    drop(harness);
    // Since then the superblock says that the log may have entries.
    assert!(matches!(open_described(&medium, false).err(), Some(VolumeError::LogDamaged { .. })));
    medium.unreadable.set((0, 0));
    let again = Harness::open(&medium, false).unwrap();
    assert_eq!([5, 6].map(|lba| again.read(lba, 1).unwrap()), [pattern(2, 4096), pattern(3, 4096)]);
}

#[test]
fn a_part_of_a_great_commit_says_nothing_of_what_only_its_first_sector_repeats() {
    let harness = with_two_commits();
    let (layout, first) = (harness.gate.device().layout, harness.gate.device().log.next.get());
    harness.write(10, &pattern(3, 40 * 4096)).unwrap();
    harness.flush().unwrap();
    let medium = harness.medium.clone();
    drop(harness);
    let wipe = |sequence: u64, region: u64| {
        let at = layout.log_sector_offset(sequence, region) as usize;
        medium.bytes.borrow_mut()[at..at + 512].fill(0);
    };
    // After the crash all but its first sector exist; then the only place of the previous commit is lost, too.
    wipe(first, 0);
    wipe(first, 1);
    let harness = Harness::open(&medium.copy(), false).unwrap();
    assert_eq!(harness.read(5, 1).unwrap(), pattern(2, 4096));
    wipe(first - 1, first - 1);
    let harness = Harness::open(&medium, false).unwrap();
    assert_eq!(harness.read(5, 1).unwrap(), pattern(1, 4096), "as if it had been the last");
}
