//! A well-behaved host beside an attack: it writes, reads back and compares, and counts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand};
use sealblock_units::Extent;

use crate::process::{BLOCK_BYTES, NEIGHBOUR};
use crate::wire::{Data, Peer, SUBNQN};

/// Blocks that it goes round in.
const BLOCKS: u64 = 256;
/// Operations that it must get done while an attack goes on, or while what that has left is dealt with.
const LEAST: u64 = 5;
/// The longest that it may wait for one operation. Far above what a machine that is busy with other things makes of it, and
/// far below a target that serves the attackers first.
const LONGEST: Duration = Duration::from_secs(15);

/// A neighbour at work.
pub struct Neighbour {
    operations: Arc<AtomicU64>,
    /// The longest that an operation took, in microseconds.
    longest: Arc<AtomicU64>,
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Neighbour {
    /// Connects and begins.
    pub fn start(address: SocketAddr) -> Result<Neighbour> {
        let (admin, cntlid) = Peer::admin(address, SUBNQN, 0)?;
        let mut io = Peer::io(address, SUBNQN, 1, cntlid)?;
        let operations = Arc::new(AtomicU64::new(0));
        let stops = Arc::new(AtomicBool::new(false));
        let longest = Arc::new(AtomicU64::new(0));
        let (count, stop, most) = (Arc::clone(&operations), Arc::clone(&stops), Arc::clone(&longest));
        let work = move || {
            let _admin = admin;
            for turn in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let start = Instant::now();
                one(&mut io, turn)?;
                most.fetch_max(start.elapsed().as_micros() as u64, Ordering::Relaxed);
                count.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        Ok(Neighbour { operations, longest, stops, thread: Some(thread::spawn(work)) })
    }

    /// Operations so far: each a Write, a Read and a comparison.
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Operations a second for a while of doing nothing else.
    pub fn rate(&self, time: Duration) -> f64 {
        let (start, before) = (Instant::now(), self.operations());
        sleep(time);
        (self.operations() - before) as f64 / start.elapsed().as_secs_f64()
    }

    /// Ends it; fails if anything was not as it must be. Some operations are due since `before`, and none may have waited
    /// long. Tells how long the slowest took.
    pub fn finish(mut self, before: u64) -> Result<Duration> {
        let deadline = Instant::now() + crate::wire::HANG;
        while self.operations() < before + LEAST && Instant::now() < deadline {
            if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                break;
            }
            sleep(Duration::from_millis(5));
        }
        self.stops.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("only this takes the thread");
        thread.join().map_err(|_| anyhow!("the neighbour panicked"))??;
        let done = self.operations() - before;
        ensure!(done >= LEAST, "the neighbour got only {done} operations done");
        let longest = Duration::from_micros(self.longest.load(Ordering::Relaxed));
        ensure!(longest <= LONGEST, "the neighbour waited {longest:?} for one operation");
        Ok(longest)
    }
}

/// Writes blocks, reads them back, and compares.
fn one(io: &mut Peer, turn: u64) -> Result<()> {
    let count = 1 + turn % 5;
    let blocks = BlockCommand::new(Extent::from_raw(turn * 7 % (BLOCKS - count), count)?);
    let data: Vec<u8> = (0..count as usize * BLOCK_BYTES).map(|i| (i as u64 / 8 * 31 + turn * 17) as u8).collect();
    let written = io.call(IoCommand::Write(blocks).encode(NEIGHBOUR)?, Data::Write(&data))?;
    ensure!(written.status == 0, "the neighbour's Write: {:#x}", written.status);
    let read = io.call(IoCommand::Read(blocks).encode(NEIGHBOUR)?, Data::Read(data.len()))?;
    ensure!(read.status == 0, "the neighbour's Read: {:#x}", read.status);
    ensure!(read.data == data, "the neighbour reads what it did not write");
    Ok(())
}
