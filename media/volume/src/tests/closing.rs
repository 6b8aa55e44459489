//! Closing concurrently with requests, and requests that are dropped half-way, in many orders of steps.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::future::join;
use sealblock_block::{Device, Durability, Error, ErrorKind, Request, ReservedArea};
use sealblock_integrity::{GuardKind, ProtectionType, Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use super::setup::{Harness, TestClock, TestMedium, created, pattern, protection};
use crate::{OpenOptions, OpenVolume, Volume, open};

const BLOCKS: u64 = 64;

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// True if a task must be polled.
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// Runs tasks to their end, one poll at a time, in a random order of those that were woken. Returns those that are
/// never woken.
fn run_all(tasks: Vec<(&'static str, Task)>, dice: &mut Dice) -> Vec<&'static str> {
    let awake = |task| (task, Arc::new(Flag(AtomicBool::new(true))));
    let mut tasks: Vec<_> = tasks.into_iter().map(awake).collect();
    loop {
        let woken = |(i, (_, flag)): (usize, &(_, Arc<Flag>))| flag.0.load(Ordering::Relaxed).then_some(i);
        let ready: Vec<usize> = tasks.iter().enumerate().filter_map(woken).collect();
        if ready.is_empty() {
            return tasks.into_iter().map(|((name, _), _)| name).collect();
        }
        let at = ready[dice.below(ready.len() as u64) as usize];
        let ((_, task), flag) = &mut tasks[at];
        flag.0.store(false, Ordering::Relaxed);
        let waker = Waker::from(Arc::clone(flag));
        if task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            drop(tasks.swap_remove(at));
        }
    }
}

async fn turns(count: u64) {
    let mut left = count;
    poll_fn(|cx| {
        left = left.saturating_sub(1);
        cx.waker().wake_by_ref();
        if left == 0 { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

type TestVolume = Rc<Volume<TestMedium, TestClock>>;

fn open_now(medium: &TestMedium, read_only: bool) -> OpenVolume<TestMedium, TestClock> {
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    futures_executor::block_on(open(medium.clone(), TestClock::default(), &options)).unwrap()
}

async fn write(volume: &TestVolume, lba: u64, seed: u64, durability: Durability) -> Result<(), Error> {
    let geometry = volume.geometry();
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: lba };
    let bytes = Slice::copy_from(&pattern(seed, geometry.block_size.bytes()));
    let data = Sealed::seal(bytes, geometry.block_size, geometry.protection, &tags);
    let extent = Extent::from_raw(lba, 1).unwrap();
    volume.execute(Request::write(extent, data, durability)).await.map(drop)
}

fn is_closed(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unreachable { reason } if reason.contains("closed"))
}

/// The results that writers got: the seed of each block's last acknowledged write, and that of a later refused one.
#[derive(Default)]
struct Answers {
    acknowledged: RefCell<BTreeMap<u64, u64>>,
    refused: RefCell<BTreeMap<u64, u64>>,
    is_closed: Cell<bool>,
}

async fn writer(volume: TestVolume, answers: Rc<Answers>, first: u64, start: u64) {
    turns(start).await;
    for seed in 1..4 {
        let lba = first + seed % 2;
        let durability = if seed == 2 { Durability::ForceUnitAccess } else { Durability::Volatile };
        match write(&volume, lba, seed, durability).await {
            Ok(()) => drop(answers.acknowledged.borrow_mut().insert(lba, seed)),
            Err(error) => {
                assert!(is_closed(&error), "{error}");
                answers.refused.borrow_mut().insert(lba, seed);
            }
        }
    }
}

async fn others(volume: TestVolume, start: u64) {
    turns(start).await;
    let bytes = Slice::copy_from(b"noted");
    let noted = volume.execute(Request::write_reserved(ReservedArea::ScrubState, bytes)).await;
    let discarded = volume.execute(Request::discard([Extent::from_raw(40, 8).unwrap()])).await;
    for outcome in [noted, discarded] {
        assert!(outcome.as_ref().err().is_none_or(is_closed), "{outcome:?}");
    }
}

async fn flusher(volume: TestVolume, start: u64) {
    turns(start).await;
    for _ in 0..4 {
        volume.execute(Request::flush()).await.expect("nothing failed");
        turns(2).await;
    }
}

async fn closer(volume: TestVolume, answers: Rc<Answers>, start: u64) {
    turns(start).await;
    volume.close().await.expect("nothing failed");
    answers.is_closed.set(true);
    let error = write(&volume, 60, 1, Durability::Volatile).await.unwrap_err();
    assert!(is_closed(&error), "{error}");
    volume.execute(Request::flush()).await.expect("all of it is durable");
}

fn close_beside_others(bytes: &[u8], seed: u64) {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut medium = TestMedium::new(0, 512);
    medium.bytes = Rc::new(RefCell::new(bytes.to_vec()));
    let OpenVolume { volume, worker, .. } = open_now(&medium, false);
    medium.turns.set(dice.below(4) as u32);
    let answers = Rc::new(Answers::default());
    let mut tasks: Vec<(&'static str, Task)> = vec![
        ("worker", Box::pin(worker.run())),
        ("closer", Box::pin(closer(Rc::clone(&volume), Rc::clone(&answers), 1 + dice.below(40)))),
        ("others", Box::pin(others(Rc::clone(&volume), dice.below(40)))),
    ];
    for first in [0, 2, 4] {
        tasks.push(("writer", Box::pin(writer(Rc::clone(&volume), Rc::clone(&answers), first, dice.below(40)))));
        tasks.push(("flusher", Box::pin(flusher(Rc::clone(&volume), dice.below(40)))));
    }
    assert_eq!(run_all(tasks, &mut dice), [""; 0], "seed {seed}: these are never woken");
    assert!(answers.is_closed.get());
    drop(volume);
    medium.turns.set(0);
    assert!(open_now(&medium, true).description.is_clean, "seed {seed}");
    let again = Harness::open(&medium, true).unwrap();
    for (lba, acknowledged) in answers.acknowledged.borrow().iter() {
        let found = again.read(*lba, 1).unwrap();
        let fits = |of: &u64| found == pattern(*of, found.len());
        assert!(
            fits(acknowledged) || answers.refused.borrow().get(lba).is_some_and(fits),
            "seed {seed}: {lba} is lost"
        );
    }
}

#[test]
fn a_close_keeps_what_was_acknowledged_answers_flushes_and_refuses_the_rest() {
    let medium = created(BlockSize::B512, 512, BLOCKS, protection(GuardKind::Crc16, ProtectionType::Type1));
    let bytes = medium.bytes.take();
    (0..4000).for_each(|seed| close_beside_others(&bytes, seed));
}

#[test]
fn a_volume_whose_last_commit_failed_is_not_called_clean() {
    let medium = created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc16, ProtectionType::Type1));
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(0, &pattern(1, 4096)).unwrap();
    medium.syncs_left.set(0);
    let flushed = harness.run(async {
        let (closed, flushed) = join(harness.gate.device().close(), harness.gate.execute(Request::flush())).await;
        assert!(closed.is_err());
        flushed
    });
    assert!(flushed.is_err());
    medium.syncs_left.set(u64::MAX);
    assert!(!open_now(&medium, true).description.is_clean);
}

/// Polls this often, and lets the worker run in between. True if the future ended.
fn poll_times<F: Future>(harness: &Harness, mut future: Pin<&mut F>, times: u64) -> bool {
    harness.run(async {
        for _ in 0..times {
            let ended = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await;
            if ended {
                return true;
            }
            turns(2).await;
        }
        false
    })
}

/// Drops a write of `blocks` after this many polls, then fills the volume. True if the write had ended before.
fn drop_a_write(full: &[u8], blocks: u64, polls: u64) -> bool {
    let mut medium = TestMedium::new(0, 512);
    medium.bytes = Rc::new(RefCell::new(full.to_vec()));
    let harness = Harness::open(&medium, false).unwrap();
    let size = harness.size();
    // The block group's map is loaded, and there was a write of each kind.
    harness.write(63, &pattern(9, size.bytes())).unwrap();
    harness.flush().unwrap();
    harness.idle();
    let free = harness.gate.device().allocator.free(0);
    medium.turns.set(3);
    let ended = {
        let extent = Extent::from_raw(0, blocks).unwrap();
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
        let bytes = Slice::copy_from(&pattern(5, extent.bytes(size) as usize));
        let data = Sealed::seal(bytes, size, harness.gate.geometry().protection, &tags);
        let durability = Durability::ForceUnitAccess;
        let mut write = pin!(harness.gate.execute(Request::write(extent, data, durability)));
        poll_times(&harness, write.as_mut(), polls)
    };
    harness.idle();
    harness.flush().unwrap();
    harness.idle();
    assert_eq!(harness.gate.device().allocator.free(0), free, "physical blocks are lost after {polls} polls");
    medium.turns.set(0);
    let all = pattern(7, (BLOCKS as usize) * size.bytes());
    for _ in 0..3 {
        harness.write(0, &all).unwrap();
    }
    medium.land();
    assert!(harness.read(0, BLOCKS).unwrap() == all, "a late write landed in a physical block that was used again");
    harness.verify().unwrap();
    harness.close();
    ended
}

#[test]
fn a_dropped_write_gives_its_physical_blocks_back_once_the_medium_is_done_with_them() {
    let medium = created(BlockSize::B4096, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let harness = Harness::open(&medium, false).unwrap();
    for lba in 0..BLOCKS {
        harness.write(lba, &pattern(lba, 4096)).unwrap();
    }
    let medium = harness.close();
    let full = medium.bytes.take();
    for blocks in [1, 9] {
        let polls = (0..).find(|polls| drop_a_write(&full, blocks, *polls)).unwrap();
        assert!(polls > 4, "the premise: it waits on its way, {polls}");
    }
}
