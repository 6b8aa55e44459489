//! A correct host during an attack, which writes, reads back, compares, and counts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand};
use sealblock_units::Extent;

use crate::process::{BLOCK_BYTES, BYSTANDER};
use crate::wire::{Data, Peer, SUBNQN};

/// Blocks that it uses in rotation.
const BLOCKS: u64 = 256;
/// The minimum number of operations during an attack, or while the target cleans up afterwards.
const MIN_OPERATIONS: u64 = 5;
/// The maximum wait for one operation. Far above the delays of a busy machine, and far below those of a target that
/// serves only the attackers.
const MAX_WAIT: Duration = Duration::from_secs(15);

/// A running bystander.
pub struct Bystander {
    operations: Arc<AtomicU64>,
    /// The duration of the longest operation, in microseconds.
    longest_us: Arc<AtomicU64>,
    is_stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Bystander {
    /// Connects and starts.
    pub fn start(address: SocketAddr) -> Result<Bystander> {
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
                write_and_compare(&mut io, turn)?;
                most.fetch_max(start.elapsed().as_micros() as u64, Ordering::Relaxed);
                count.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        Ok(Bystander { operations, longest_us: longest, is_stopping: stops, thread: Some(thread::spawn(work)) })
    }

    /// Number of operations so far: each is a Write, a Read and a comparison.
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Measures operations per second for `time`.
    pub fn rate(&self, time: Duration) -> f64 {
        let (start, before) = (Instant::now(), self.operations());
        sleep(time);
        (self.operations() - before) as f64 / start.elapsed().as_secs_f64()
    }

    /// Stops it, and returns the duration of the longest operation. Fails if any operation failed or took too long, or
    /// if there were too few since `before`.
    pub fn finish(mut self, before: u64) -> Result<Duration> {
        let deadline = Instant::now() + crate::wire::HANG_TIMEOUT;
        while self.operations() < before + MIN_OPERATIONS && Instant::now() < deadline {
            if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                break;
            }
            sleep(Duration::from_millis(5));
        }
        self.is_stopping.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("only this takes the thread");
        thread.join().map_err(|_| anyhow!("the bystander panicked"))??;
        let completed = self.operations() - before;
        ensure!(completed >= MIN_OPERATIONS, "the bystander got only {completed} operations done");
        let longest = Duration::from_micros(self.longest_us.load(Ordering::Relaxed));
        ensure!(longest <= MAX_WAIT, "the bystander waited {longest:?} for one operation");
        Ok(longest)
    }
}

/// Writes blocks, reads them back, and compares.
fn write_and_compare(io: &mut Peer, turn: u64) -> Result<()> {
    let count = 1 + turn % 5;
    let blocks = BlockCommand::new(Extent::from_raw(turn * 7 % (BLOCKS - count), count)?);
    let data: Vec<u8> = (0..count as usize * BLOCK_BYTES).map(|i| (i as u64 / 8 * 31 + turn * 17) as u8).collect();
    let written = io.call(IoCommand::Write(blocks).encode(BYSTANDER)?, Data::Write(&data))?;
    ensure!(written.status == 0, "the bystander's Write: {:#x}", written.status);
    let read = io.call(IoCommand::Read(blocks).encode(BYSTANDER)?, Data::Read(data.len()))?;
    ensure!(read.status == 0, "the bystander's Read: {:#x}", read.status);
    ensure!(read.data == data, "the bystander reads what it did not write");
    Ok(())
}
