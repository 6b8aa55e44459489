//! Subsystems, namespaces and hosts that are added and removed while a target serves on several cores.

use std::sync::Arc;
use std::time::Duration;

use crate::common::spread::*;
use crate::common::*;
use sealblock_exports_nvme_tcp::{Hosts, Namespace, NamespaceState, SetupError, Subsystem};
use sealblock_protocols_nvme::admin::Cns;
use sealblock_protocols_nvme::identify::parse_namespace_list;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_reactor::sleep;

#[test]
fn namespaces_are_added_and_removed_while_commands_run() {
    run(|| async {
        let spread = spread(short());
        let (mut admin, mut io) = host(spread.address, 3).await;
        let slow = IoCommand::Write(blocks(SLOW, 1)).encode(1).unwrap();
        let cid = io[0].submit(slow, Data::Write(pattern(4096, 2))).await;
        spread.latch.holds(1).await;
        spread.target.remove_namespace(&nqn(), 1).unwrap();
        assert_eq!(spread.target.remove_namespace(&nqn(), 1), Err(SetupError::UnknownNsid(1)));
        for queue in &mut io[1..] {
            assert_eq!(queue.io(1, IoCommand::Flush, Data::None).await.status(), 0x002);
        }
        spread.latch.open();
        io[0].done(cid).await.ok();
        assert_eq!(io[0].io(1, IoCommand::Flush, Data::None).await.status(), 0x002);
        let fresh = device(&spread.cores.handle(1).unwrap(), &spread.latch);
        spread.target.add_namespace(&nqn(), 7, Namespace::new(fresh, [7; 16])).unwrap();
        assert_eq!(spread.target.namespaces(&nqn()), Ok(vec![2, 7]));
        for (i, queue) in io.iter_mut().enumerate() {
            write(queue, 7, i as u64, 3, 1).await;
        }
        let list = admin.identify(Cns::ActiveNamespaces, 0).await.ok().data;
        assert_eq!(parse_namespace_list(&list).collect::<Vec<_>>(), [2, 7]);
    });
}

#[test]
fn a_removed_namespace_is_held_by_commands_in_flight_and_by_no_idle_queue() {
    run(|| async {
        let spread = spread(short());
        let state = Arc::<NamespaceState>::default();
        let fresh = device(&spread.cores.handle(1).unwrap(), &spread.latch);
        let namespace = Namespace::new(fresh, [7; 16]).with_state(Arc::clone(&state));
        spread.target.add_namespace(&nqn(), 7, namespace).unwrap();
        let (_admin, mut io) = host(spread.address, 4).await;
        for queue in &mut io {
            write(queue, 7, 0, 1, 1).await;
        }
        let slow = IoCommand::Write(blocks(SLOW, 1)).encode(7).unwrap();
        let cid = io[0].submit(slow, Data::Write(pattern(4096, 2))).await;
        spread.latch.holds(1).await;
        spread.target.remove_namespace(&nqn(), 7).unwrap();
        for _ in 0..50 {
            assert!(Arc::strong_count(&state) > 1, "a command is being carried out");
            sleep(Duration::from_millis(1)).await;
        }
        spread.latch.open();
        io[0].done(cid).await.ok();
        // Idle queues release it without a command, on every core.
        while Arc::strong_count(&state) > 1 {
            sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn a_subsystem_that_is_removed_ends_its_controllers_and_no_others() {
    run(|| async {
        let spread = spread(short());
        let other: Nqn = "nqn.2026-11.org.example:other".parse().unwrap();
        let (core, latch) = (spread.cores.handle(1).unwrap(), Arc::clone(&spread.latch));
        let subsystem = || {
            let namespace = Namespace::new(device(&core, &latch), [9; 16]);
            Subsystem::new(other.clone(), "SN2").with_namespace(1, namespace).unwrap()
        };
        spread.target.add_subsystem(subsystem()).unwrap();
        assert_eq!(spread.target.add_subsystem(subsystem()), Err(SetupError::DuplicateNqn(other.clone())));
        let mut bystander = Queue::admin(spread.address, other.as_str(), false).await;
        let (_admin, mut io) = host(spread.address, 3).await;
        let mut cids = Vec::new();
        for queue in &mut io {
            let slow = IoCommand::Write(blocks(SLOW, 1)).encode(1).unwrap();
            cids.push(queue.submit(slow, Data::Write(pattern(4096, 2))).await);
        }
        spread.latch.holds(3).await;
        spread.target.remove_subsystem(&nqn()).unwrap();
        assert_eq!(spread.target.remove_subsystem(&nqn()), Err(SetupError::UnknownNqn(nqn())));
        spread.latch.open();
        for (queue, cid) in io.iter_mut().zip(cids) {
            queue.done(cid).await.ok();
            while queue.receive().await {}
        }
        connections(&spread.target, 1).await;
        assert_eq!((spread.target.controllers(&nqn()), spread.target.controllers(&other)), (0, 1));
        bystander.identify(Cns::Controller, 0).await.ok();
        let mut queue = Queue::open(spread.address, false).await;
        assert_eq!(queue.connect(SUBNQN, 0, 0xFFFF, 0).await.status(), 0x182, "no such subsystem");
    });
}

#[test]
fn hosts_that_are_no_longer_allowed_are_disconnected() {
    run(|| async {
        let spread = spread(short());
        let (_admin, mut io) = host(spread.address, 2).await;
        let this: Nqn = "nqn.2026-11.org.example:host".parse().unwrap();
        spread.target.set_hosts(&nqn(), Hosts::Only(vec![this])).unwrap();
        write(&mut io[0], 1, 0, 1, 1).await;
        spread.target.set_hosts(&nqn(), Hosts::Only(vec![])).unwrap();
        for queue in &mut io {
            while queue.receive().await {}
        }
        connections(&spread.target, 0).await;
        let mut queue = Queue::open(spread.address, false).await;
        assert_eq!(queue.connect(SUBNQN, 0, 0xFFFF, 0).await.status(), 0x184);
    });
}

#[test]
fn a_host_may_use_a_removed_number_until_it_has_read_a_list_without_it() {
    run(|| async {
        let spread = spread(short());
        let users = |nsid| spread.target.hosts_that_may_use(&nqn(), nsid).len();
        assert_eq!([1, 2, 9].map(users), [0, 0, 0], "nobody is connected");
        let (mut admin, _io) = host(spread.address, 1).await;
        assert_eq!([1, 2, 9].map(users), [1, 1, 0]);
        spread.target.remove_namespace(&nqn(), 1).unwrap();
        assert_eq!(users(1), 1, "a command may be on its way");
        admin.identify(Cns::ActiveNamespaces, 1).await.ok();
        assert_eq!(users(1), 1, "the list began behind it");
        admin.identify(Cns::ActiveNamespaces, 0).await.ok();
        assert_eq!([1, 2].map(users), [0, 1]);
        let fresh = device(&spread.cores.handle(1).unwrap(), &spread.latch);
        spread.target.add_namespace(&nqn(), 1, Namespace::new(fresh, [7; 16])).unwrap();
        assert_eq!(users(1), 1);
    });
}
