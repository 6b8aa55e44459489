//! Many requests at once, on devices that answer in any order, and requests that are given up.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::Poll;

use futures_executor::block_on;
use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, join_all};
use sealblock_block::yield_once;
use sealblock_btrfs_engine::engine::{Engine, EngineError, EngineOptions};
use sealblock_runtime_memory::Slice;

use crate::data_faults::open;
use crate::disks::Disks;
use crate::files::{Kind, ROOT, assert_content, assert_same, create};

/// Bytes of each writer's part of a file. Neighbours share a sector.
const PART: usize = 70_001;
const WRITERS: usize = 6;

/// Polls a request a few times at most. Returns `None` if it was given up.
async fn patiently<T>(mut request: LocalBoxFuture<'_, T>, polls: u32) -> Option<T> {
    let mut left = polls;
    poll_fn(|context| match request.poll_unpin(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending if left == 0 => Poll::Ready(None),
        Poll::Pending => {
            left -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// Writes and reads in one part of a file, and gives some requests up.
async fn work(engine: &Engine, ino: u64, index: usize, seed: u64, size: &Cell<usize>) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let base = index * PART;
    let mut content = vec![0; PART];
    for _ in 0..60 {
        let from = random.usize(..PART);
        let to = random.usize(from + 1..=PART.min(from + 20_000));
        let (offset, bytes) = ((base + from) as u64, to - from);
        let data = vec![random.u8(1..); bytes];
        match random.u8(..6) {
            0 => {
                let found = engine.read(ROOT, ino, offset, bytes as u64).await.unwrap();
                assert_same(&found, &content[from..from + found.len()]);
            }
            1 => {
                let request = engine.write(ROOT, ino, offset, Slice::copy_from(&data)).boxed_local();
                match patiently(request, random.u32(..40)).await {
                    Some(done) => {
                        assert_eq!(done.unwrap(), bytes as u64);
                        content[from..to].copy_from_slice(&data);
                    }
                    // It may be there or not, but not in part: all of it is in one change.
                    None => {
                        let found = engine.read(ROOT, ino, offset, bytes as u64).await.unwrap();
                        let mut padded = found.to_vec();
                        padded.resize(bytes, 0);
                        assert!(
                            padded == data || padded == content[from..to],
                            "a write that was given up is there in part"
                        );
                        content[from..to].copy_from_slice(&padded);
                    }
                }
            }
            2 if random.u8(..4) == 0 => {
                engine.punch(ROOT, ino, offset, bytes as u64).await.unwrap();
                content[from..to].fill(0);
            }
            _ => {
                let written = engine.write(ROOT, ino, offset, Slice::copy_from(&data)).await;
                assert_eq!(written.unwrap(), bytes as u64);
                content[from..to].copy_from_slice(&data);
                size.set(size.get().max(base + to));
            }
        }
        yield_once().await;
    }
    content
}

async fn commit_often(engine: &Engine, ino: u64, is_done: &Cell<bool>) -> Result<u32, EngineError> {
    let mut count = 0;
    while !is_done.get() {
        for _ in 0..30 {
            yield_once().await;
        }
        engine.fsync(ROOT, ino).await?;
        engine.sync_data(ROOT, ino).await?;
        count += 1;
    }
    Ok(count)
}

#[test]
fn writers_of_one_file_that_share_sectors_do_not_disturb_each_other() {
    for (seed, kind) in [Kind::Plain, Kind::NoSum, Kind::Compressed("lzo")].into_iter().enumerate() {
        let Some(disks) = Disks::make(2, 256, &["-m", "raid1", "-d", "raid1"]) else { return };
        let (engine, faults) = open(&disks, EngineOptions::default());
        faults.iter().for_each(|faults| faults.random_delays.set(12));
        fastrand::seed(seed as u64);
        let ino = create(&engine, "file", kind);
        let (size, is_done, parts) = (Cell::new(0), Cell::new(false), RefCell::new(Vec::new()));
        let writers = async {
            let all = (0..WRITERS).map(|index| work(&engine, ino, index, (10 * seed + index) as u64, &size));
            *parts.borrow_mut() = join_all(all).await;
            is_done.set(true);
        };
        let (commits, ()) = block_on(futures_util::future::join(commit_often(&engine, ino, &is_done), writers));
        assert!(commits.unwrap() > 1);
        block_on(engine.finish_writes());
        let mut expected = parts.into_inner().concat();
        // The largest write that was given up may be there as well.
        let found = crate::files::read_all(&engine, ino, expected.len() + 1);
        assert!((size.get()..=expected.len()).contains(&found.len()));
        expected.truncate(found.len());
        assert_same(&found, &expected);
        block_on(engine.commit()).unwrap();
        assert_content(&engine, ino, &expected);
        assert!(engine.data_counters().abandoned_writes > 0);
        drop(engine);
        disks.assert_consistent();
        disks.assert_checked_by_program();
    }
}

#[test]
fn requests_for_durability_share_commits() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let (engine, faults) = open(&disks, EngineOptions::default());
    let files: Vec<u64> = (0..32).map(|index| create(&engine, &format!("f{index}"), Kind::Plain)).collect();
    block_on(engine.commit()).unwrap();
    let before = engine.durable_generation();
    faults[0].random_delays.set(20);
    let work = files.iter().map(|ino| async {
        for round in 0..4 {
            engine.write(ROOT, *ino, round * 4096, Slice::copy_from(&[1; 4096])).await.unwrap();
            let durable = engine.fsync(ROOT, *ino).await.unwrap();
            assert!(engine.durable_generation() >= durable);
        }
    });
    block_on(join_all(work));
    let commits = engine.durable_generation() - before;
    assert!((4..30).contains(&commits), "{commits} commits for 128 requests");
    drop(engine);
    disks.assert_consistent();
}
