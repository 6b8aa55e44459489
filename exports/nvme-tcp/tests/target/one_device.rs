//! One device with many users: queues on several cores, and namespaces that share it.

use std::sync::Arc;

use crate::common::requests::{count, count_up, damage_log, extent};
use crate::common::spread::*;
use crate::common::*;
use sealblock_exports_nvme_tcp::Namespace;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_reactor::spawn;

/// Increments with all queues at once, each in one of the namespaces; returns the expected sum.
async fn count_at_once(queues: Vec<Queue>, nsids: &[u32]) -> u64 {
    const STEPS: usize = 8;
    let total = (queues.len() * STEPS) as u64;
    let count = |(i, io)| spawn(count_up(io, nsids[i % nsids.len()], STEPS));
    let counting: Vec<_> = queues.into_iter().enumerate().map(count).collect();
    for queue in counting {
        queue.await.unwrap();
    }
    total
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
            let total = count_at_once(io, &[nsid]).await;
            let (_admin, mut io) = host(spread.address, 1).await;
            assert_eq!(count(&mut io[0], nsid).await, total);
        }
    });
}

#[test]
fn namespaces_of_one_device_share_range_locks_and_damage() {
    run(|| async {
        let spread = spread(short());
        let device = device(&spread.cores.handle(1).unwrap(), &spread.latch);
        let one = Namespace::new(device.clone(), [7; 16]);
        let state = one.state();
        let two = Namespace::new(device, [8; 16]).with_state(Arc::clone(&state));
        assert!(Arc::ptr_eq(&state, &two.state()));
        spread.target.add_namespace(&nqn(), 7, one).unwrap();
        spread.target.add_namespace(&nqn(), 8, two).unwrap();
        let (_admin, io) = host(spread.address, 6).await;
        let total = count_at_once(io, &[7, 8]).await;
        let (mut admin, mut io) = host(spread.address, 1).await;
        assert_eq!((count(&mut io[0], 7).await, count(&mut io[0], 8).await), (total, total));
        io[0].io(7, IoCommand::WriteUncorrectable(extent(9, 1)), Data::None).await.ok();
        let known = |log: sealblock_protocols_nvme::logs::DamageLog| log.entries.len();
        assert_eq!(known(damage_log(&mut admin, 8).await), 1, "damage is the device's");
        assert_eq!(known(damage_log(&mut admin, 1).await), 0, "and no other's");
    });
}
