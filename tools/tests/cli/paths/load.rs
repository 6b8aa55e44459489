//! A host that writes, reads, checks and flushes until its standard input ends.

use std::cell::{Cell, RefCell};
use std::io::Read;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sealblock_block::{Device, Durability, Expectations, Request, Response};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{sleep, spawn};
use sealblock_stack::{Access, OpenTarget, on_reactor, open};
use sealblock_units::{Extent, Lba};
use serde_json::json;

/// The variable that names the target.
pub const TARGET: &str = "SEALBLOCK_TEST_TARGET";
/// Requests at a time.
pub const LANES: u64 = 16;
/// Blocks of a lane: few, so that the same ones are written again soon.
const BLOCKS: usize = 64;
/// Requests of a lane between two flushes.
const FLUSH_EVERY: u64 = 100;

/// What has happened.
pub struct Seen {
    /// Requests that have ended.
    pub done: Cell<u64>,
    /// Flushes among them.
    flushes: Cell<u64>,
    last: Cell<Instant>,
    longest_pause: Cell<Duration>,
    longest_request: Cell<Duration>,
    /// Those that failed.
    pub failed: RefCell<Vec<String>>,
}

impl Seen {
    /// Counts a request that has ended.
    fn note(&self, begin: Instant, outcome: Result<(), String>) {
        let now = Instant::now();
        self.longest_pause.set(self.longest_pause.get().max(now - self.last.replace(now)));
        self.longest_request.set(self.longest_request.get().max(now - begin));
        self.done.set(self.done.get() + 1);
        if let Err(failed) = outcome {
            self.failed.borrow_mut().push(failed);
        }
    }
}

/// One request after the other, to blocks that no other lane has.
struct Lane {
    number: u64,
    /// What each block was written with last.
    versions: [u64; BLOCKS],
    random: u64,
    requests: u64,
}

impl Lane {
    fn new(number: u64) -> Lane {
        Lane { number, versions: [0; BLOCKS], random: (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15), requests: 0 }
    }

    fn draw(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn extent(&self, block: usize) -> Extent {
        Extent::one(Lba::new(self.number + LANES * block as u64))
    }

    async fn step(&mut self, opened: &OpenTarget) -> Result<(), String> {
        self.requests += 1;
        if self.requests.is_multiple_of(FLUSH_EVERY) {
            return opened.device.execute(Request::flush()).await.map(drop).map_err(|error| format!("flush: {error}"));
        }
        let block = self.draw() as usize % BLOCKS;
        if self.draw().is_multiple_of(2) { self.write(opened, block).await } else { self.check(opened, block).await }
    }

    async fn write(&mut self, opened: &OpenTarget, block: usize) -> Result<(), String> {
        let (extent, geometry) = (self.extent(block), opened.device.geometry());
        let version = self.versions[block] + 1;
        let data = Slice::copy_from(&content(extent.start(), version, geometry.block_size.bytes()));
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
        let data = Sealed::seal(data, geometry.block_size, geometry.protection, &tags);
        let write = Request::write(extent, data, Durability::Volatile);
        opened.device.execute(write).await.map_err(|error| format!("write of {extent}: {error}"))?;
        self.versions[block] = version;
        Ok(())
    }

    async fn check(&self, opened: &OpenTarget, block: usize) -> Result<(), String> {
        let (extent, geometry) = (self.extent(block), opened.device.geometry());
        let answer = opened.device.execute(Request::read(extent, Expectations::NONE)).await;
        let Response::Data(data) = answer.map_err(|error| format!("read of {extent}: {error}"))? else {
            return Err(format!("a read of {extent} gave no data"));
        };
        let wanted = content(extent.start(), self.versions[block], geometry.block_size.bytes());
        let found = u64::from_le_bytes(data.joined_data()[8..16].try_into().expect("eight bytes"));
        let versions = (self.versions[block], found);
        if data.joined_data()[..] == wanted[..] {
            Ok(())
        } else {
            Err(format!("{extent}: wanted and found {versions:?}"))
        }
    }

    async fn run(mut self, opened: Rc<OpenTarget>, seen: Rc<Seen>, stop: Arc<AtomicBool>) {
        while !stop.load(Ordering::Relaxed) && seen.failed.borrow().is_empty() {
            let begin = Instant::now();
            let outcome = self.step(&opened).await;
            seen.flushes.set(seen.flushes.get() + u64::from(self.requests.is_multiple_of(FLUSH_EVERY)));
            seen.note(begin, outcome);
        }
        for block in 0..BLOCKS {
            let begin = Instant::now();
            let outcome = self.check(&opened, block).await;
            seen.note(begin, outcome);
        }
    }
}

/// Zeroes before anything was written, then the address and the version, again and again.
fn content(lba: Lba, version: u64, bytes: usize) -> Vec<u8> {
    if version == 0 {
        return vec![0; bytes];
    }
    let one = [lba.get().to_le_bytes(), version.to_le_bytes()].concat();
    one.into_iter().cycle().take(bytes).collect()
}

fn say(opened: &OpenTarget, seen: &Seen, last: bool) {
    let paths = opened.info.paths.iter().flat_map(|paths| paths.paths());
    let paths: Vec<_> = paths.map(|path| json!({ "live": path.is_live, "requests": path.requests })).collect();
    let report = json!({
        "paths": paths, "done": seen.done.get(), "flushes": seen.flushes.get(), "last": last,
        "failed": *seen.failed.borrow(),
        "longest_pause_s": seen.longest_pause.get().as_secs_f64(),
        "longest_request_s": seen.longest_request.get().as_secs_f64(),
    });
    println!("{report}");
}

/// Runs the load against a target, until standard input ends.
pub fn run(target: &str) {
    let stop = Arc::new(AtomicBool::new(false));
    let ordered = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ordered.store(true, Ordering::Relaxed);
    });
    work(target, &stop, say);
}

/// Runs the load against a target until it is to stop or a request fails; tells every 100 ms what it has done, and at its end.
pub fn work(target: &str, stop: &Arc<AtomicBool>, tell: impl Fn(&OpenTarget, &Seen, bool)) {
    let done = on_reactor(async {
        let opened = Rc::new(open(&target.parse().expect("a target"), Access::Write).await?);
        let seen = Rc::new(Seen {
            done: Cell::new(0),
            flushes: Cell::new(0),
            last: Cell::new(Instant::now()),
            longest_pause: Cell::default(),
            longest_request: Cell::default(),
            failed: RefCell::default(),
        });
        let lane = |number| spawn(Lane::new(number).run(Rc::clone(&opened), Rc::clone(&seen), Arc::clone(stop)));
        let mut lanes: Vec<_> = (0..LANES).map(lane).collect();
        while !lanes.iter().all(|lane| lane.is_finished()) {
            tell(&opened, &seen, false);
            sleep(Duration::from_millis(100)).await;
        }
        lanes.clear();
        tell(&opened, &seen, true);
        let opened = Rc::into_inner(opened).expect("the lanes are gone");
        opened.close(Ok(())).await
    });
    done.unwrap();
}
