//! The load on a file: it is written as a whole, then block by block in random order, and then measured.
//!
//! After the second step each block is an extent of its own, as in a file that has been written at random for long, so
//! that nothing that is measured depends on how the file came to be.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use fastrand::Rng;
use rustix::fs::syncfs;
use sealblock_block::{Device, DynDevice};
use sealblock_btrfs_engine::engine::Engine;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{pool, spawn, yield_now};
use sealblock_units::Extent;

use super::modes::{BLOCK_BYTES, Batch, Options, Point};
use crate::engine_files::{self, ROOT};
use crate::load::{PAYLOAD_BYTES, write_of};

/// Blocks of the largest request.
const LARGE_BLOCKS: u64 = PAYLOAD_BYTES as u64 / BLOCK_BYTES;
/// While blocks are written in random order for the first time, a commit comes after this part of them.
const COMMITS_OF_AGING: u64 = 4;
/// Blocks that are read back at the end.
const BLOCKS_READ: usize = 64;

/// A file that is written.
#[derive(Clone)]
pub enum Target {
    /// Of a filesystem in this process.
    Engine(Rc<Engine>, u64),
    /// Of a mounted one, past the page cache.
    Direct(Rc<DynDevice>, Rc<File>),
    /// Of a mounted one, through the page cache.
    Buffered(Rc<File>),
}

impl Target {
    async fn write(&self, first: u64, blocks: u64, payload: &Slice) -> anyhow::Result<()> {
        let data = payload.slice(..(blocks * BLOCK_BYTES) as usize);
        match self {
            Target::Engine(engine, ino) => engine_files::write(engine, *ino, first * BLOCK_BYTES, data).await,
            Target::Direct(device, _) => {
                let write = write_of(device.geometry(), Extent::from_raw(first, blocks)?, payload);
                device.execute(write).await?;
                Ok(())
            }
            Target::Buffered(file) => Ok(file.write_all_at(&data, first * BLOCK_BYTES)?),
        }
    }

    /// Makes everything durable.
    async fn commit(&self) -> anyhow::Result<()> {
        match self {
            Target::Engine(engine, _) => engine.commit().await.map(drop).context("a commit"),
            Target::Direct(_, file) | Target::Buffered(file) => syncfs(file.as_ref()).context("syncfs"),
        }
    }

    /// True if the page cache collects requests.
    fn has_cache(&self) -> bool {
        matches!(self, Target::Buffered(_))
    }
}

/// Blocks of noise that are all the same, so that it does not matter which request wrote which block.
fn payload() -> Slice {
    let mut buffer = pool().take(PAYLOAD_BYTES);
    let mut block = [0; BLOCK_BYTES as usize];
    Rng::with_seed(0).fill(&mut block);
    buffer.chunks_mut(block.len()).for_each(|piece| piece.copy_from_slice(&block[..piece.len()]));
    buffer.freeze()
}

/// The load of one turn.
pub struct TurnLoad<'a> {
    /// The file.
    pub target: Target,
    /// Its size, and what is written between commits.
    pub point: &'a Point,
    /// How.
    pub options: &'a Options,
    /// Where random numbers begin.
    pub seed: u64,
    /// Fails if the measurement is to end.
    pub check: &'a dyn Fn() -> anyhow::Result<()>,
    payload: Slice,
}

impl<'a> TurnLoad<'a> {
    /// A load on a file.
    pub fn new(
        target: Target,
        point: &'a Point,
        options: &'a Options,
        seed: u64,
        check: &'a dyn Fn() -> anyhow::Result<()>,
    ) -> TurnLoad<'a> {
        TurnLoad { target, point, options, seed, check, payload: payload() }
    }

    /// Writes the file, and makes each block an extent.
    pub async fn prepare(&self) -> anyhow::Result<()> {
        let blocks = self.point.blocks();
        for first in (0..blocks).step_by(LARGE_BLOCKS as usize) {
            self.target.write(first, LARGE_BLOCKS.min(blocks - first), &self.payload).await?;
            (self.check)()?;
        }
        self.target.commit().await?;
        let mut order: Vec<u64> = (0..blocks).collect();
        Rng::with_seed(!self.seed).shuffle(&mut order);
        for batch in order.chunks(blocks.div_ceil(COMMITS_OF_AGING) as usize) {
            self.in_flight(batch.iter().map(|block| (*block, 1)).collect()).await?;
            self.target.commit().await?;
        }
        Ok(())
    }

    /// Writes at random, and commits after each batch. Returns the number of requests.
    pub async fn run(&self) -> anyhow::Result<u64> {
        let (mut random, mut requests) = (Rng::with_seed(self.seed), 0);
        for _ in 0..self.options.commits {
            requests += match (self.point.batch, self.point.writes()) {
                (Batch::Seconds(seconds), _) => self.for_time(seconds, &mut random).await?,
                (_, writes) => self.batch(writes.unwrap_or(0), &mut random).await?,
            };
            (self.check)()?;
            self.target.commit().await?;
        }
        Ok(requests)
    }

    /// So many requests. If they are collected here, what is written twice is written once, and neighbours together.
    async fn batch(&self, writes: u64, random: &mut Rng) -> anyhow::Result<u64> {
        let blocks = self.point.blocks();
        let places = (0..writes).map(|_| random.u64(..blocks));
        match self.options.is_buffered && !self.target.has_cache() {
            true => self.in_flight(runs(&places.collect())).await?,
            false => self.in_flight(places.map(|block| (block, 1)).collect()).await?,
        }
        Ok(writes)
    }

    /// As many requests as are possible in this time.
    async fn for_time(&self, seconds: f64, random: &mut Rng) -> anyhow::Result<u64> {
        let (end, mut requests) = (Instant::now() + Duration::from_secs_f64(seconds), 0);
        while Instant::now() < end {
            requests += self.batch(self.options.depth * 16, random).await?;
        }
        Ok(requests)
    }

    /// Sends these requests: the first block of each and their number. So many are in flight at once.
    async fn in_flight(&self, requests: Vec<(u64, u64)>) -> anyhow::Result<()> {
        let (requests, next) = (Rc::new(requests), Rc::new(Cell::new(0)));
        let failed = Rc::new(RefCell::new(None));
        let workers: Vec<_> = (0..self.options.depth)
            .map(|_| {
                let (requests, next, failed) = (Rc::clone(&requests), Rc::clone(&next), Rc::clone(&failed));
                let (target, payload) = (self.target.clone(), self.payload.clone());
                spawn(async move {
                    while let Some((first, blocks)) = requests.get(next.replace(next.get() + 1)) {
                        if let Err(error) = target.write(*first, *blocks, &payload).await {
                            next.set(requests.len());
                            failed.borrow_mut().get_or_insert(error);
                        }
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.await.context("a worker was aborted")?;
        }
        yield_now().await;
        failed.take().map_or(Ok(()), Err)
    }

    /// Reads some blocks back, of a filesystem in this process.
    pub async fn read_back(&self) -> anyhow::Result<()> {
        let Target::Engine(engine, ino) = &self.target else { return Ok(()) };
        let mut random = Rng::with_seed(self.seed);
        for _ in 0..BLOCKS_READ {
            let offset = random.u64(..self.point.blocks()) * BLOCK_BYTES;
            let data = engine.read(ROOT, *ino, offset, BLOCK_BYTES).await?;
            ensure!(data[..] == self.payload[..BLOCK_BYTES as usize], "byte {offset} is not what was written");
        }
        Ok(())
    }
}

/// Blocks in neighbouring runs, each no longer than a request.
fn runs(blocks: &BTreeSet<u64>) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for block in blocks {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == *block && *count < LARGE_BLOCKS => *count += 1,
            _ => runs.push((*block, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_blocks_are_written_together() {
        let of = |blocks: &[u64]| runs(&blocks.iter().copied().collect());
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[7, 3, 4, 4, 9]), [(3, 2), (7, 1), (9, 1)]);
        let many: Vec<u64> = (0..LARGE_BLOCKS + 2).collect();
        assert_eq!(of(&many), [(0, LARGE_BLOCKS), (LARGE_BLOCKS, 2)]);
    }
}
