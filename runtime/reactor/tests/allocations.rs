//! The usual life of an operation allocates nothing. Allocations are counted for each thread.

mod common;

use sealblock_runtime_memory::counting::{Counting, allocations};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{File, Options, Reactor, pool, yield_now};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn operations_on_a_ring_allocate_nothing() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(allocations(), before + 1, "the premise: allocations are counted");
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
                settled = allocations();
            }
            let (result, buffer) = file.read_exact_at(pool().take(4096), 0).await;
            result.expect("reads");
            file.write_all_at(buffer.freeze(), 0).await.expect("writes");
            file.sync_data().await.expect("syncs");
            yield_now().await;
        }
        assert_eq!(allocations(), settled);
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
                settled = allocations();
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
        assert_eq!(allocations(), settled);
    });
}
