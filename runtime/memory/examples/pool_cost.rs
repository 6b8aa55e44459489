//! The cost of a take and a drop, from a pool and from the heap, in nanoseconds per pair on one thread.

use std::hint::black_box;
use std::time::Instant;

use sealblock_runtime_memory::{Buffer, Pool};

const PAIRS: u32 = 5_000_000;

fn measure(name: &str, mut pair: impl FnMut()) {
    for _ in 0..PAIRS / 10 {
        pair();
    }
    let start = Instant::now();
    for _ in 0..PAIRS {
        pair();
    }
    println!("{name:40} {:6.1} ns", start.elapsed().as_nanos() as f64 / f64::from(PAIRS));
}

fn main() {
    let pool = Pool::new(64 << 20, usize::MAX);
    let mutex = std::sync::Mutex::new(0u64);
    measure("pool, 4 KiB", || drop(black_box(pool.take(4096))));
    measure("pool, 128 KiB", || drop(black_box(pool.take(128 << 10))));
    let held: Vec<Buffer> = (0..32).map(|_| pool.take(4096)).collect();
    measure("pool, 4 KiB, 32 held", || drop(black_box(pool.take(4096))));
    drop(held);
    measure("slice clone", {
        let slice = pool.take(4096).freeze();
        move || drop(black_box(slice.clone()))
    });
    measure("heap, 4 KiB, zeroed", || drop(black_box(Buffer::zeroed(4096))));
    measure("bare uncontended lock", || *black_box(&mutex).lock().expect("nothing panics here") += 1);
}
