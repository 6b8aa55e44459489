//! Asynchronous events, Abort, Disconnect and the mandatory features, over loopback sockets.

use crate::common::requests::*;
use crate::common::*;
use sealblock_block::DynDevice;
use sealblock_exports_nvme_tcp::{Limits, Namespace, NamespaceState, Subsystem};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nvme::admin::{Abort, Cns, SetFeatures};
use sealblock_protocols_nvme::features::AsynchronousEvent;
use sealblock_protocols_nvme::identify::{Controller, Oacs, Ofcs};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{AdminOpcode, Command, DataPointer, FabricsType};
use sealblock_runtime_reactor::sleep;
use sealblock_units::{BlockSize, Lba};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// One namespace in memory, and its state.
fn serve_with_state() -> (Served, Arc<NamespaceState>) {
    let mut states = Vec::new();
    let served = serve_with(short(), |_| {
        let device = Rc::new(MemoryDevice::new(BlockSize::B4096, BLOCKS, Some(format())));
        let namespace = Namespace::new(SharedDevice::publish(DynDevice::new("mem", device)), [1; 16]);
        states.push(namespace.state());
        Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(PLAIN, namespace).unwrap()
    });
    (served, states.remove(0))
}

/// The event with which a waiting request completes.
async fn told(admin: &mut Queue, waiting: u16) -> AsynchronousEvent {
    AsynchronousEvent::from_dword0(admin.done(waiting).await.ok().completion.dword0())
}

#[test]
fn damage_and_changes_are_reported_once_a_host_enables_the_events() {
    run(|| async {
        let (served, state) = serve_with_state();
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let ask = Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0);
        let waiting = admin.submit(ask, Data::None).await;
        state.report_damage(&[sealblock_block::BadBlock::media(Lba::new(9))]);
        let page = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert_eq!(page.oaes.bits(), 0x2100);

        let config = SetFeatures { fid: 0x0B, save: false, nsid: 0, cdw11: 0x2100 };
        admin.call(config.encode(), Data::None).await.ok();
        assert_eq!(told(&mut admin, waiting).await, AsynchronousEvent::LBA_STATUS);
        let waiting = admin.submit(ask, Data::None).await;
        state.report_changed();
        assert_eq!(told(&mut admin, waiting).await, AsynchronousEvent::NAMESPACE_CHANGED);
        assert_eq!(admin.log(4, 4096).await.ok().data[..8], [PLAIN as u8, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(admin.log(4, 4096).await.ok().data[..4], [0; 4], "read once");
        // Damage that a command finds is reported once the page has been read.
        let waiting = admin.submit(ask, Data::None).await;
        admin.log(0x0E, 64).await.ok();
        let device = MemoryDevice::new(BlockSize::B4096, BLOCKS, Some(format()));
        state.report_check(sealblock_block::Device::geometry(&device), extent(9, 1), &[], true);
        io.io(PLAIN, IoCommand::WriteUncorrectable(extent(20, 1)), Data::None).await.ok();
        state.report_damage(&[sealblock_block::BadBlock::media(Lba::new(30))]);
        assert_eq!(told(&mut admin, waiting).await, AsynchronousEvent::LBA_STATUS);
        let waiting = admin.submit(ask, Data::None).await;
        let abort = admin.call(Abort { queue: 0, cid: waiting }.encode(), Data::None).await.ok();
        assert_eq!((abort.completion.dword0(), admin.done(waiting).await.status()), (0, 0x007));
    });
}

#[test]
fn an_io_queue_can_be_disconnected_and_connected_again() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let page = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert_eq!((page.ofcs, page.oacs), (Ofcs::DISCONNECT, Oacs::GET_LBA_STATUS));
        let mut disconnect = Command::new(0x7F, u32::from(FabricsType::Disconnect.code()));
        io.call(disconnect, Data::None).await.ok();
        let mut again = Queue::open(served.address, false).await;
        while again.connect(SUBNQN, 1, admin.cntlid, 0).await.status() == 0x00C {
            sealblock_runtime_reactor::sleep(std::time::Duration::from_millis(1)).await;
        }
        write_and_read_as_ever(&mut again).await;
        disconnect.nsid = u32::from(FabricsType::PropertySet.code()).into();
        assert_eq!(again.call(disconnect, Data::None).await.status(), 0x001, "not on this queue");
        disconnect.nsid = u32::from(FabricsType::Disconnect.code()).into();
        assert_ne!(admin.call(disconnect, Data::None).await.status(), 0, "not on that one");
    });
}

#[test]
fn a_host_that_sends_no_data_delays_a_disconnect_by_the_drain_time_only() {
    run(|| async {
        let served = serve(Limits { drain: Duration::from_millis(100), ..Limits::default() });
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        let write = IoCommand::Write(blocks(0, 64)).encode(PLAIN).unwrap();
        io.submit_and_hold(write, pattern(64 << 12, 7)).await;
        let mut disconnect = Command::new(0x7F, u32::from(FabricsType::Disconnect.code()));
        // An SGL of no bytes; all commands over Fabrics have an SGL.
        (disconnect.flags, disconnect.cid) = (0x40, 99.into());
        disconnect.dptr = DataPointer::None.descriptor();
        io.send_raw(&capsule(&disconnect)).await;
        // The host does not close its end.
        while served.target.connections() > 1 {
            sleep(Duration::from_millis(1)).await;
        }
        drop(io);
    });
}

#[test]
fn a_removed_namespace_has_no_events_and_the_others_have() {
    run(|| async {
        let mut states = Vec::new();
        let served = serve_with(short(), |subsystem| {
            let of = |id: u8| {
                let device = Rc::new(MemoryDevice::new(BlockSize::B4096, BLOCKS, None));
                Namespace::new(SharedDevice::publish(DynDevice::new("mem", device)), [id; 16])
            };
            let (goes, stays) = (of(7), of(8));
            states.extend([goes.state(), stays.state()]);
            subsystem.with_namespace(7, goes).and_then(|all| all.with_namespace(8, stays)).unwrap()
        });
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        let config = SetFeatures { fid: 0x0B, save: false, nsid: 0, cdw11: 0x2100 };
        admin.call(config.encode(), Data::None).await.ok();
        let ask = Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0);
        let removed = admin.submit(ask, Data::None).await;
        served.target.remove_namespace(&SUBNQN.parse().unwrap(), 7).unwrap();
        let event = admin.done(removed).await.ok().completion.dword0();
        assert_eq!(AsynchronousEvent::from_dword0(event), AsynchronousEvent::NAMESPACE_CHANGED);
        let next = admin.submit(ask, Data::None).await;
        states[0].report_damage(&[sealblock_block::BadBlock::media(Lba::new(9))]);
        // An event would arrive before this completion.
        admin.identify(Cns::Controller, 0).await.ok();
        admin.identify(Cns::Controller, 0).await.ok();
        assert!(!admin.is_done(next), "no namespace of this controller has these blocks any more");
        states[1].report_damage(&[sealblock_block::BadBlock::media(Lba::new(9))]);
        let event = admin.done(next).await.ok().completion.dword0();
        assert_eq!(AsynchronousEvent::from_dword0(event), AsynchronousEvent::LBA_STATUS);
    });
}

#[test]
fn commands_of_io_queues_complete_and_are_not_aborted() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let write = IoCommand::Write(blocks(0, 2)).encode(PLAIN).unwrap();
        let cid = io.submit(write, Data::Write(pattern(8192, 1))).await;
        let abort = admin.call(Abort { queue: 1, cid }.encode(), Data::None).await.ok();
        assert_eq!((abort.completion.dword0(), io.done(cid).await.status()), (1, 0));
        assert_eq!(admin.call(Abort { queue: 0, cid: 77 }.encode(), Data::None).await.ok().completion.dword0(), 1);
    });
}

#[test]
fn features_without_effect_have_constant_values() {
    use sealblock_protocols_nvme::admin::{FeatureSelect, GetFeatures};
    run(|| async {
        let served = serve(short());
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        let select = |fid, select, cdw11| GetFeatures { fid, select, nsid: 0, cdw11 }.encode();
        let set = |fid, cdw11, save| SetFeatures { fid, save, nsid: 0, cdw11 }.encode();
        let current = FeatureSelect::Current;
        for (fid, cdw11, value) in
            [(1, 0, 7), (2, 0, 0), (4, 0, 0xFFFF), (4, 1 << 20, 0), (5, 0, 0), (10, 0, 0), (21, 0, 0)]
        {
            assert_eq!(
                admin.call(select(fid, current, cdw11), Data::None).await.ok().completion.dword0(),
                value,
                "{fid}"
            );
            assert_eq!(admin.call(set(fid, 0, true), Data::None).await.status(), 0x10D, "{fid} is not saved");
        }
        for (fid, good, bad, status) in
            [(1, 7, 0, 0x10E), (2, 0, 1, 0x002), (5, 0, 1 << 16, 0x002), (4, 300, 3 << 16, 0x002)]
        {
            admin.call(set(fid, good, false), Data::None).await.ok();
            assert_eq!(admin.call(set(fid, bad, false), Data::None).await.status(), status, "{fid}");
        }
        assert_eq!(admin.call(select(4, current, 0), Data::None).await.ok().completion.dword0(), 300);
        assert_eq!(admin.call(select(4, FeatureSelect::Default, 0), Data::None).await.ok().completion.dword0(), 0xFFFF);
        for (fid, value) in [(21, 0x0000_0005), (10, 1)] {
            admin.call(set(fid, 0x0007_0005, false), Data::None).await.ok();
            assert_eq!(admin.call(select(fid, current, 0), Data::None).await.ok().completion.dword0(), value);
        }
        for (fid, value) in [(1, 0), (5, 2), (6, 4), (21, 4)] {
            let done = admin.call(select(fid, FeatureSelect::Capabilities, 0), Data::None).await.ok();
            assert_eq!(done.completion.dword0(), value, "{fid}");
        }
        assert_eq!(admin.call(select(0x10, current, 0), Data::None).await.status(), 0x002, "no thermal management");
    });
}

#[test]
fn pages_list_the_supported_features_and_pages() {
    run(|| async {
        let served = serve(short());
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        let page = admin.log(0x12, 1024).await.ok().data;
        assert_eq!((page[4], page[0x15 * 4], page[0x10 * 4], page[5 * 4 + 2]), (1, 1, 0, 0x10));
        let pages = admin.log(0, 1024).await.ok().data;
        let listed: Vec<u8> = (0..=255_u8).filter(|lid| pages[usize::from(*lid) * 4] != 0).collect();
        assert_eq!(listed, [0, 1, 2, 3, 4, 5, 0x0E, 0x12, 0x13, 0xC0, 0xC1]);
    });
}

#[test]
fn offline_copies_are_a_critical_warning_and_an_event_if_enabled() {
    run(|| async {
        let (served, state) = serve_with_state();
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        let config = SetFeatures { fid: 0x0B, save: false, nsid: 0, cdw11: 1 << 2 };
        admin.call(config.encode(), Data::None).await.ok();
        let ask = Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0);
        let waiting = admin.submit(ask, Data::None).await;
        assert_eq!(admin.log(2, 512).await.ok().data[0], 0);
        state.report_degraded(true);
        let event = admin.done(waiting).await.ok().completion.dword0();
        assert_eq!(AsynchronousEvent::from_dword0(event), AsynchronousEvent::RELIABILITY);
        assert_eq!(admin.log(2, 512).await.ok().data[0], 1 << 2, "reliability is degraded");
        state.report_degraded(false);
        assert_eq!(admin.log(2, 512).await.ok().data[0], 0);
    });
}
