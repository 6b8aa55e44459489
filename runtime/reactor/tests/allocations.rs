//! The usual life of an operation allocates nothing. Counts the allocations of each thread apart.
#![allow(unsafe_code)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{File, Options, Reactor, pool, yield_now};

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn operations_on_a_ring_allocate_nothing() {
    let before = COUNT.get();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(COUNT.get(), before + 1, "the premise: allocations are counted");
    if !common::has_uring() {
        return;
    }
    let reactor = Reactor::new(common::uring()).expect("starts");
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target folder can be written");
    reactor.block_on(async {
        let options = Options { read: true, write: true, create: true, ..Options::default() };
        let file = File::open(dir.path().join("f"), options).expect("opens");
        file.write_all_at(Slice::copy_from(&[1; 4096]), 0).await.expect("writes");
        // The first rounds let the tables and queues grow.
        let mut settled = 0;
        for round in 0..200 {
            if round == 100 {
                settled = COUNT.get();
            }
            let (result, buffer) = file.read_exact_at(pool().take(4096), 0).await;
            result.expect("reads");
            file.write_all_at(buffer.freeze(), 0).await.expect("writes");
            file.sync_data().await.expect("syncs");
            yield_now().await;
        }
        assert_eq!(COUNT.get(), settled);
    });
}

#[test]
fn sockets_on_a_ring_allocate_nothing() {
    if !common::has_uring() {
        return;
    }
    let reactor = Reactor::new(common::uring()).expect("starts");
    reactor.block_on(async {
        let (client, server) = common::pair().await;
        let payload = Slice::copy_from(&[1; 4096]);
        let (mut queued, mut buffer) = (Vec::with_capacity(128), Buffer::zeroed(1 << 20));
        let mut settled = 0;
        for round in 0..200 {
            if round == 100 {
                settled = COUNT.get();
            }
            client.send_all([payload.slice(..64), payload.clone()]).await.expect("sends");
            client.send(payload.slice(..1)).await.expect("sends");
            queued.extend((0..100).map(|i| payload.slice(i..)));
            client.send_all(queued.drain(..)).await.expect("sends");
            let mut left = 64 + 4096 + 1 + (0..100).map(|i| 4096 - i).sum::<usize>();
            while left > 0 {
                let result;
                (result, buffer) = server.recv(buffer).await;
                left -= result.expect("receives");
            }
        }
        assert_eq!(COUNT.get(), settled);
    });
}
