//! Random 4 KiB reads and writes on a file, with direct I/O at a queue depth of 32, in operations per second.
//!
//! `readwrite FILE [SECONDS] [cached]`; `cached` uses the page cache, which shows the cost of the reactor alone. The
//! file must exist and should be larger than any cache of the device; its contents are overwritten. The same with fio:
//! `fio --name=x --filename=FILE --direct=1 --bs=4k --iodepth=32 --ioengine=io_uring --rw=randread --fixedbufs
//! --registerfiles --time_based --runtime=5`.

use std::cell::Cell;
use std::error::Error;
use std::rc::Rc;
use std::time::{Duration, Instant};

use sealblock_runtime_reactor::{Config, File, Options, Reactor, pool, spawn};

const BLOCK_BYTES: u64 = 4096;
const DEPTH: u64 = 32;

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

async fn one_worker(file: File, write: bool, seed: u64, end: Instant, done: Rc<Cell<u64>>) -> std::io::Result<()> {
    let blocks = file.len_bytes()? / BLOCK_BYTES;
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut buffer = pool().take(BLOCK_BYTES as usize);
    buffer.fill(seed as u8);
    let data = buffer.freeze();
    let mut buffer = pool().take(BLOCK_BYTES as usize);
    while Instant::now() < end {
        let offset_bytes = random(&mut state) % blocks * BLOCK_BYTES;
        if write {
            file.write_all_at(data.clone(), offset_bytes).await?;
        } else {
            let result;
            (result, buffer) = file.read_exact_at(buffer, offset_bytes).await;
            result?;
        }
        done.set(done.get() + 1);
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: readwrite FILE [SECONDS] [cached]")?;
    let seconds: u64 = arguments.next().map_or(Ok(5), |seconds| seconds.parse())?;
    let direct = arguments.next().is_none_or(|mode| mode != "cached");
    let reactor = Reactor::new(Config::default())?;
    println!("{}", reactor.backend());
    for write in [false, true] {
        let done = Rc::new(Cell::new(0));
        let start = Instant::now();
        reactor.block_on(async {
            let file = File::open(&path, Options { read: true, write: true, direct, ..Options::default() })?;
            let end = start + Duration::from_secs(seconds);
            let workers: Vec<_> =
                (0..DEPTH).map(|seed| spawn(one_worker(file.clone(), write, seed, end, Rc::clone(&done)))).collect();
            for worker in workers {
                worker.await??;
            }
            Ok::<(), Box<dyn Error>>(())
        })?;
        let rate = done.get() as f64 / start.elapsed().as_secs_f64();
        println!("random {} of 4 KiB at depth {DEPTH}: {rate:.0} IOPS", if write { "write" } else { "read " });
    }
    Ok(())
}
