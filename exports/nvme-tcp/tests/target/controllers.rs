//! Controllers, discovery, hostile peers and the end of a target, over loopback sockets.

use std::time::Duration;

use crate::common::*;
use sealblock_exports_nvme_tcp::{Hosts, Limits, MAX_NSID};
use sealblock_protocols_nvme::admin::{Abort, Cns, FeatureSelect, GetFeatures, GetLogPage, SetFeatures};
use sealblock_protocols_nvme::fabrics::CNTLID_DYNAMIC;
use sealblock_protocols_nvme::identify::{
    Controller, Lpa, Namespace, NamespaceFormat, NamespaceId, NvmNamespace, namespace_ids, parse_namespace_list,
};
use sealblock_protocols_nvme::logs::{DiscoveryLog, EffectsLog, Health};
use sealblock_protocols_nvme::nqn::DISCOVERY;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{AdminOpcode, Command, Fuse};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::sleep;

#[test]
fn a_controller_identifies_itself_and_its_namespaces() {
    run(|| async {
        let served = serve(short());
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        assert_eq!(admin.property(0x08, 4).await, 0x0002_0100);
        assert_eq!(admin.property(0x00, 8).await & 0xFFFF, 255);
        let page = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert_eq!((page.cntlid, page.mdts, page.nn, page.mnan), (admin.cntlid, 8, MAX_NSID, MAX_NSID));
        assert_eq!((page.sn.text(), page.subnqn.text()), ("SN1".to_owned(), SUBNQN.to_owned()));
        let list = admin.identify(Cns::ActiveNamespaces, 0).await.ok().data;
        assert_eq!(parse_namespace_list(&list).collect::<Vec<_>>(), [PLAIN, PROTECTED, BARE]);
        for (nsid, size, protected) in [(PLAIN, 4096, false), (PROTECTED, 4096, true), (BARE, 512, false)] {
            let page = Namespace::decode(&admin.identify(Cns::Namespace, nsid).await.ok().data).unwrap();
            let nvm = NvmNamespace::decode(&admin.identify(Cns::CommandSetNamespace, nsid).await.ok().data).unwrap();
            let found = NamespaceFormat::resolve(&page, Some(&nvm)).unwrap();
            assert_eq!((found.block_size.bytes(), found.protection.is_some()), (size, protected));
            assert_eq!((page.nsze, page.dlfeat.bits()), (BLOCKS, 9));
            let ids = namespace_ids(&admin.identify(Cns::NamespaceDescriptors, nsid).await.ok().data);
            assert_eq!(ids, [NamespaceId::Uuid([nsid as u8; 16]), NamespaceId::CommandSet(0)]);
            admin.identify(Cns::IndependentNamespace, nsid).await.ok();
        }
        assert!(admin.identify(Cns::Namespace, 3).await.ok().data.iter().all(|&byte| byte == 0), "inactive");
        for cns in [Cns::Namespace, Cns::CommandSetNamespace, Cns::IndependentNamespace] {
            assert!(admin.identify(cns, MAX_NSID).await.ok().data.iter().all(|&byte| byte == 0), "inactive: {cns:?}");
            assert_eq!(admin.identify(cns, MAX_NSID + 1).await.status(), 0x00B, "invalid: {cns:?}");
        }
        for (nsid, status) in [(3, 0x002), (MAX_NSID, 0x002), (0, 0x00B), (MAX_NSID + 1, 0x00B)] {
            assert_eq!(admin.identify(Cns::NamespaceDescriptors, nsid).await.status(), status, "namespace {nsid}");
        }
        for nsid in [0xFFFF_FFFE, 0xFFFF_FFFF] {
            assert_eq!(
                admin.identify(Cns::ActiveNamespaces, nsid).await.status(),
                0x00B,
                "no identifier to go on from"
            );
        }
        assert_eq!(admin.identify(Cns::Controllers, 0).await.status(), 0x002);
        admin.identify(Cns::CommandSetController, 0).await.ok();
        admin.identify(Cns::CommandSets, 0).await.ok();
    });
}

#[test]
fn features_logs_and_the_other_admin_commands() {
    run(|| async {
        let served = serve(short());
        let mut admin = Queue::admin(served.address, SUBNQN, true).await;
        let set = |fid, cdw11| SetFeatures { fid, save: false, nsid: 0, cdw11 }.encode();
        let get = |fid| GetFeatures { fid, select: FeatureSelect::Current, nsid: 0, cdw11: 0 }.encode();
        let queues = admin.call(set(7, 0x0003_0003), Data::None).await.ok();
        assert_eq!(queues.completion.dword0(), 0x0003_0003);
        let mut io = Queue::open(served.address, true).await;
        io.connect(SUBNQN, 1, admin.cntlid, 0).await.ok();
        assert_eq!(admin.call(set(7, 0x0001_0001), Data::None).await.status(), 0x00C, "there are queues");
        admin.call(set(0x0B, 0), Data::None).await.ok();
        assert_eq!(admin.call(set(0x0B, 0x200), Data::None).await.status(), 0x002, "no such event is offered");
        admin.call(set(0x0E, 0), Data::Write(77_u64.to_le_bytes().to_vec())).await.ok();
        assert!(admin.call(get(0x0E), Data::Read(8)).await.ok().data[0] >= 77);
        admin.call(set(0x16, 0), Data::Write(vec![1; 512])).await.ok();
        assert_eq!(admin.call(get(0x16), Data::Read(512)).await.ok().data, vec![1; 512]);
        admin.call(set(0x06, 0), Data::None).await.ok();
        assert_eq!(admin.call(get(0x06), Data::None).await.ok().completion.dword0(), 0);
        admin.call(Command::new(AdminOpcode::KeepAlive.code(), 0), Data::None).await.ok();
        assert_eq!(admin.call(Abort { queue: 1, cid: 9 }.encode(), Data::None).await.ok().completion.dword0(), 1);
        assert_eq!(admin.call(Command::new(0x80, 1), Data::None).await.status(), 0x001, "no Format");
        io.io(PLAIN, IoCommand::Write(blocks(0, 1)), Data::Write(vec![1; 4096])).await.ok();
        io.io(PLAIN, IoCommand::Read(blocks(0, 1)), Data::Read(4096)).await.ok();
        let health = Health::decode(&admin.log(2, 512).await.ok().data).unwrap();
        assert_eq!((health.host_reads, health.host_writes, health.data_units_read), (1, 1, 1));
        assert_eq!(health.error_log_entries, 3);
        let page = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert_eq!((page.wctemp, page.cctemp), (0, 0), "no threshold of a temperature that nobody measures");
        assert_eq!((health.composite_temperature_kelvins, health.sensor_kelvins), (0, [0; 8]), "none is invented");
        let effects = EffectsLog::decode(&admin.log(5, 4096).await.ok().data).unwrap();
        assert_eq!((effects.io(0x0C).bits(), effects.io(0x19).bits()), (1, 3), "Verify and Copy");
        admin.log(3, 512).await.ok();
        assert_eq!(admin.log(0x0D, 512).await.status(), 0x109);
    });
}

#[test]
fn the_listed_pages_exist_and_no_others() {
    run(|| async {
        let served = serve(short());
        let mut admin = Queue::admin(served.address, SUBNQN, true).await;
        let listed = admin.log(0, 1024).await.ok().data;
        for page in 0..255_u8 {
            let is_listed = listed[usize::from(page) * 4] & 1 != 0;
            let asked = GetLogPage { nsid: PLAIN, ..GetLogPage::new(page, 512) };
            let asked = if page == 2 { GetLogPage::new(page, 512) } else { asked };
            let status = admin.call(asked.encode(), Data::Read(512)).await.status();
            assert_eq!(status, if is_listed { 0 } else { 0x109 }, "page {page:#x}");
        }
        let lpa = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap().lpa;
        assert!(lpa.contains(Lpa::SUPPORTED_LOG_PAGES) && [0x12, 0x13].iter().all(|page| listed[page * 4] & 1 != 0));
    });
}

#[test]
fn event_requests_are_outstanding_up_to_their_limit() {
    run(|| async {
        let served = serve(short());
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        let ask = Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0);
        for _ in 0..4 {
            admin.submit(ask, Data::None).await;
        }
        assert_eq!(admin.call(ask, Data::None).await.status(), 0x105);
        // Shutdown flushes, and then is complete.
        admin.configure(0x0046_4001).await;
        while admin.property(0x1C, 4).await != 9 {
            sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn discovery_names_the_subsystem_and_its_address() {
    run(|| async {
        let served = serve(short());
        let mut admin = Queue::admin(served.address, DISCOVERY, false).await;
        let log = DiscoveryLog::decode(&admin.log(0x70, 4096).await.ok().data).unwrap();
        let found: Vec<_> = log.entries.iter().map(|entry| entry.subnqn.text()).collect();
        assert_eq!(found, [DISCOVERY, SUBNQN]);
        let here = (served.address.ip(), served.address.port());
        assert!(log.entries.iter().all(|entry| entry.tcp_address() == Some(here)));
        assert_eq!(admin.identify(Cns::ActiveNamespaces, 0).await.status(), 0x002);
        assert_eq!(admin.log(2, 512).await.status(), 0x109);
    });
}

#[test]
fn connect_names_the_invalid_parameter() {
    run(|| async {
        let served = serve_with(short(), |subsystem| subsystem.with_hosts(Hosts::Only(vec![])));
        let mut queue = Queue::open(served.address, false).await;
        let early = queue.call(Command::new(AdminOpcode::KeepAlive.code(), 0), Data::None).await;
        assert_eq!(early.status(), 0x00C, "before Connect");
        assert_eq!(queue.connect(SUBNQN, 0, CNTLID_DYNAMIC, 0).await.status(), 0x184, "host not allowed");
        let unknown = queue.connect("nqn.2026-11.org.example:none", 0, CNTLID_DYNAMIC, 0).await;
        assert_eq!((unknown.status(), unknown.completion.dword0()), (0x182, 1 << 16 | 256));
        assert_eq!(queue.connect(SUBNQN, 1, 77, 0).await.completion.dword0(), 1 << 16 | 16, "no such controller");
        queue.connect(DISCOVERY, 0, CNTLID_DYNAMIC, 0).await.ok();
        assert_eq!(queue.connect(DISCOVERY, 0, CNTLID_DYNAMIC, 0).await.status(), 0x00C, "twice");
    });
}

#[test]
fn a_host_without_a_name_may_connect_where_any_host_may() {
    run(|| async {
        for (hosts, status) in [(Hosts::Any, 0), (Hosts::Only(vec![HOSTNQN.parse().unwrap()]), 0x184)] {
            let served = serve_with(short(), |subsystem| subsystem.with_hosts(hosts));
            let mut queue = Queue::open(served.address, false).await;
            queue.hostnqn = "";
            assert_eq!(queue.connect(SUBNQN, 0, CNTLID_DYNAMIC, 0).await.status(), status);
        }
    });
}

#[test]
fn missing_subsystems_may_be_retried_and_invalid_parameters_not() {
    run(|| async {
        let served = serve(short());
        let mut queue = Queue::open(served.address, false).await;
        let again = |done: Done| (done.status(), !done.completion.status().do_not_retry());
        assert_eq!(again(queue.connect("nqn.2026-11.org.example:none", 0, CNTLID_DYNAMIC, 0).await), (0x182, true));
        assert_eq!(again(queue.connect(SUBNQN, 1, 77, 0).await), (0x182, true), "the controller has ended");
        assert_eq!(again(queue.connect(SUBNQN, 0, 5, 0).await), (0x182, false), "no static controllers");
    });
}

#[test]
fn keep_alive_timeouts_are_rounded_up() {
    run(|| async {
        let served = serve(short());
        for (asked, kept) in [(0, 0), (1, 100), (5000, 5000), (5001, 5100), (u32::MAX, u32::MAX / 100 * 100)] {
            let mut queue = Queue::open(served.address, false).await;
            queue.connect(SUBNQN, 0, CNTLID_DYNAMIC, asked).await.ok();
            queue.configure(0x0046_0001).await;
            let get = GetFeatures { fid: 0x0F, select: FeatureSelect::Current, nsid: 0, cdw11: 0 }.encode();
            assert_eq!(queue.call(get, Data::None).await.ok().completion.dword0(), kept);
            queue
                .call(SetFeatures { fid: 0x0F, save: false, nsid: 0, cdw11: 60_000 + asked % 100 }.encode(), Data::None)
                .await
                .ok();
            let set = queue.call(get, Data::None).await.ok().completion.dword0();
            assert_eq!(set, if asked % 100 == 0 { 60_000 } else { 60_100 });
        }
    });
}

#[test]
fn only_supported_configurations_enable_a_controller() {
    run(|| async {
        let served = serve(short());
        // Command sets by CC.CSS; a discovery controller offers no choice.
        for (name, set, csts) in
            [(SUBNQN, 0, 1), (SUBNQN, 6, 1), (SUBNQN, 7, 2), (SUBNQN, 1, 2), (DISCOVERY, 0, 1), (DISCOVERY, 6, 2)]
        {
            let mut queue = Queue::open(served.address, false).await;
            queue.connect(name, 0, CNTLID_DYNAMIC, 0).await.ok();
            assert_eq!(queue.property(0, 8).await >> 37 & 0xFF, if name == SUBNQN { 0x41 } else { 1 });
            queue.configure(0x0046_0001 | set << 4).await;
            assert_eq!(queue.property(0x1C, 4).await, csts, "{name} {set}");
        }
        // A host without I/O queues need not set their entry sizes.
        for (sizes, csts, io) in [(0x46, 1, 0), (0, 1, 0x182), (0x45, 2, 0x182), (0x06, 1, 0x182)] {
            let mut admin = Queue::open(served.address, false).await;
            admin.connect(SUBNQN, 0, CNTLID_DYNAMIC, 0).await.ok();
            admin.configure(sizes << 16 | 1).await;
            assert_eq!(admin.property(0x1C, 4).await, csts, "{sizes:#x}");
            let mut queue = Queue::open(served.address, false).await;
            assert_eq!(queue.connect(SUBNQN, 1, admin.cntlid, 0).await.status(), io, "{sizes:#x}");
        }
    });
}

#[test]
fn admin_commands_are_not_fused() {
    run(|| async {
        let served = serve(short());
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        let keep_alive = Command::new(AdminOpcode::KeepAlive.code(), 0);
        for fuse in [Fuse::First, Fuse::Second] {
            assert_eq!(admin.call(keep_alive.with_fuse(fuse), Data::None).await.status(), 0x002);
        }
        admin.call(keep_alive, Data::None).await.ok();
    });
}

#[test]
fn random_bytes_and_early_ends_leave_other_hosts_served() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, true).await;
        let mut noise = 1_u32;
        for len in [1, 8, 100, 5000] {
            let stream = Stream::connect(served.address).await.unwrap();
            let bytes: Vec<u8> = std::iter::repeat_with(|| {
                noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (noise >> 24) as u8
            })
            .take(len)
            .collect();
            // Fails only if the target has closed already.
            let _ = stream.send_all([sealblock_runtime_memory::Slice::copy_from(&bytes)]).await;
        }
        let (admin, mut broken) = Queue::pair(served.address, false).await;
        broken.send_raw(&[0xEE; 64]).await;
        while broken.receive().await {}
        drop(admin);
        let mut cut = Queue::pair(served.address, false).await;
        let write = IoCommand::Write(blocks(0, 256)).encode(PLAIN).unwrap();
        cut.1.submit(write, Data::Write(vec![1; 1 << 20])).await;
        drop(cut);
        while served.target.connections() > 2 {
            sleep(Duration::from_millis(1)).await;
        }
        io.io(PLAIN, IoCommand::Read(blocks(0, 1)), Data::Read(4096)).await.ok();
    });
}

#[test]
fn a_peer_that_does_not_connect_times_out() {
    run(|| async {
        let served = serve(Limits { connect: Duration::from_millis(20), ..short() });
        let silent = Stream::connect(served.address).await.unwrap();
        let (result, _) = silent.recv(sealblock_runtime_memory::Buffer::zeroed(16)).await;
        assert!(!matches!(result, Ok(1..)), "nothing but the end comes");
    });
}

#[test]
fn a_silent_host_times_out_with_its_queues() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let (_other, mut alive) = Queue::pair(served.address, false).await;
        let soon = SetFeatures { fid: 0x0F, save: false, nsid: 0, cdw11: 1 };
        admin.submit(soon.encode(), Data::None).await;
        while admin.receive().await {}
        while io.receive().await {}
        while served.target.connections() > 2 {
            sleep(Duration::from_millis(1)).await;
        }
        alive.io(PLAIN, IoCommand::Flush, Data::None).await.ok();
    });
}

#[test]
fn the_queue_head_wraps() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        // Connect was the first command of 32 entries.
        for command in 2..70_u16 {
            let done = io.io(PLAIN, IoCommand::Flush, Data::None).await.ok();
            assert_eq!(done.completion.sqhd.get(), command % 32);
        }
    });
}

#[test]
fn queues_of_other_controllers_and_second_queues_of_a_number_are_refused() {
    run(|| async {
        let served = serve(short());
        let (admin, _io) = Queue::pair(served.address, false).await;
        let mut queue = Queue::open(served.address, false).await;
        assert_eq!(queue.connect(SUBNQN, 1, admin.cntlid, 0).await.status(), 0x00C, "queue 1 is there");
        let beyond = queue.connect(SUBNQN, 2, admin.cntlid, 0).await;
        assert_eq!((beyond.status(), beyond.completion.dword0()), (0x182, 42), "one queue was granted");
        let other = queue.connect(DISCOVERY, 1, admin.cntlid, 0).await;
        assert_eq!((other.status(), other.completion.dword0()), (0x182, 1 << 16 | 256));
    });
}

#[test]
fn connections_above_the_limit_are_closed() {
    run(|| async {
        let served = serve(Limits { connections: 2, ..short() });
        let (mut admin, _io) = Queue::pair(served.address, false).await;
        let third = Stream::connect(served.address).await.unwrap();
        let (result, _) = third.recv(sealblock_runtime_memory::Buffer::zeroed(16)).await;
        assert!(!matches!(result, Ok(1..)));
        admin.identify(Cns::Controller, 0).await.ok();
    });
}

#[test]
fn a_stopping_target_completes_commands_in_flight() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        io.io(PLAIN, IoCommand::Write(blocks(0, 1)), Data::Write(vec![3; 4096])).await.ok();
        served.target.stop();
        served.serving.await.unwrap().unwrap();
        assert_eq!(served.target.connections(), 0);
        while io.receive().await {}
        assert!(Stream::connect(served.address).await.is_err(), "no listener is left");
    });
}
