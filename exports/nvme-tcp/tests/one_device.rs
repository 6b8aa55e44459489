//! One device for many: queues on several cores.

mod common;

use common::requests::{count, count_up};
use common::spread::*;
use common::*;
use sealblock_exports_nvme_tcp::Namespace;
use sealblock_runtime_reactor::spawn;

/// Counts with all queues at once, each in one of the namespaces; gives the sum that is to be there.
async fn count_at_once(queues: Vec<Queue>, nsids: &[u32]) -> u64 {
    const STEPS: usize = 15;
    let sum = (queues.len() * STEPS) as u64;
    let count = |(i, io)| spawn(count_up(io, nsids[i % nsids.len()], STEPS));
    let counting: Vec<_> = queues.into_iter().enumerate().map(count).collect();
    for queue in counting {
        queue.await.unwrap();
    }
    sum
}

#[test]
fn counting_from_several_cores_loses_nothing() {
    run(|| async {
        let spread = spread(short());
        for core in 0..3 {
            let nsid = 10 + core as u32;
            let fresh = device(&spread.cores.handle(core).unwrap(), &spread.latch);
            spread.target.add_namespace(&nqn(), nsid, Namespace::new(fresh, [nsid as u8; 16])).unwrap();
            let (_admin, io) = host(spread.address, 6).await;
            let sum = count_at_once(io, &[nsid]).await;
            let (_admin, mut io) = host(spread.address, 1).await;
            assert_eq!(count(&mut io[0], nsid).await, sum);
        }
    });
}
