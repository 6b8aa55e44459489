//! Operations on our own server.

use std::rc::Rc;

use crate::common::*;
use sealblock_block::{Ability, Device, Durability, ErrorKind, Expectations, Request, RequestKind, Response};
use sealblock_media_memory::Corruption;
use sealblock_media_nbd::{Address, ConnectError, NbdDevice, Options, discover};
use sealblock_runtime_reactor::spawn;
use sealblock_units::{BlockSize, Lba};

#[test]
fn what_is_written_is_read_in_requests_of_any_length() {
    run(|| async {
        for size in [BlockSize::B4096, BlockSize::B512] {
            let served = serve(&plain(size));
            let device = open(served.address, "disk", Options { transfer_bytes: 64 << 10, ..options() }).await;
            assert_eq!(device.geometry().capacity_bytes(), BLOCKS << size.shift());
            assert_eq!(device.geometry().block_size, BlockSize::B4096, "the size allows it");
            for (start, blocks) in [(0, 1), (5, 3), (100, 300), (device.geometry().capacity_blocks - 2, 2)] {
                write_with(&device, extent(start, blocks), start as u8, Durability::ForceUnitAccess).await.unwrap();
                assert!(holds(&device, extent(start, blocks), start as u8).await);
            }
            flush(&device).await.unwrap();
            served.server.stop();
        }
    });
}

#[test]
fn many_requests_share_few_places_on_several_connections() {
    run(|| async {
        let served = serve(&plain(BlockSize::B4096));
        let few = Options { connections: 3, queue_depth: 2, ..options() };
        let device = Rc::new(open(served.address, "disk", few).await);
        assert_eq!(device.device().info().connections, 3);
        assert_eq!(served.server.connections(), 3);
        let one = |i: u64| {
            let device = Rc::clone(&device);
            spawn(async move {
                write(&*device, extent(i, 1), i as u8).await.unwrap();
                assert!(holds(&*device, extent(i, 1), i as u8).await);
            })
        };
        let tasks: Vec<_> = (0..200).map(one).collect();
        for task in tasks {
            task.await.unwrap();
        }
        let counters = device.device().counters();
        assert_eq!((counters.requests, counters.sent_bytes, counters.received_bytes), (400, 200 << 12, 200 << 12));
        served.server.stop();
    });
}

#[test]
fn a_request_that_nobody_waits_for_harms_no_other() {
    run(|| async {
        let served = serve(&plain(BlockSize::B4096));
        let device = Rc::new(open(served.address, "disk", Options { queue_depth: 1, ..options() }).await);
        for i in 0..50_u64 {
            let theirs = Rc::clone(&device);
            let given_up = spawn(async move { write(&*theirs, extent(i, 1), 1).await.map(drop) });
            sealblock_runtime_reactor::yield_now().await;
            given_up.abort();
            write(&*device, extent(100 + i, 1), i as u8).await.unwrap();
            assert!(holds(&*device, extent(100 + i, 1), i as u8).await);
        }
        served.server.stop();
    });
}

#[test]
fn zeroes_and_discards_are_carried_out_by_the_server() {
    run(|| async {
        let served = serve(&plain(BlockSize::B4096));
        let device = open(served.address, "disk", options()).await;
        let abilities = device.abilities();
        assert_eq!(
            (abilities.get(RequestKind::WriteZeroes), abilities.get(RequestKind::Discard)),
            (Ability::Native, Ability::Native)
        );
        assert_eq!(
            (abilities.get(RequestKind::Verify), abilities.get(RequestKind::Compare)),
            (Ability::Emulated, Ability::Emulated)
        );
        assert!(abilities.offloads && !abilities.unmap_zeroes);
        write(&device, extent(0, 64), 7).await.unwrap();
        for (start, may_unmap) in [(0, true), (8, false)] {
            let durability = Durability::ForceUnitAccess;
            let zero = Request::write_zeroes(extent(start, 8), may_unmap, durability);
            device.execute(zero).await.unwrap();
        }
        assert!(read(&device, extent(0, 16)).await.unwrap().joined_data().iter().all(|byte| *byte == 0));
        device.execute(Request::discard([extent(16, 8), extent(40, 2)])).await.unwrap();
        assert_eq!(read(&device, extent(24, 16)).await.unwrap().joined_data().len(), 16 << 12);
        let expected = sealed(&device, extent(0, 64), 7).slice(24, 16);
        assert!(read(&device, extent(24, 16)).await.unwrap().joined_data()[..] == expected.joined_data()[..]);
        served.server.stop();
    });
}

#[test]
fn every_damaged_block_is_named_and_none_hides_another() {
    run(|| async {
        let memory = protected();
        let served = serve(&memory);
        let device = open(served.address, "disk", options()).await;
        write(&device, extent(0, 1024), 3).await.unwrap();
        for lba in [7, 8, 300, 1023] {
            assert!(memory.damage(Lba::new(lba), Corruption::Data { at: 9, mask: 1 }));
        }
        let error = read(&device, extent(0, 64)).await.unwrap_err();
        assert_eq!(bad(&error), [7, 8]);
        let verify = Request::verify(extent(0, 1024), Expectations::NONE);
        assert_eq!(bad(&device.execute(verify.clone()).await.unwrap_err()), [7, 8, 300, 1023]);
        read(&device, extent(301, 100)).await.unwrap();
        for lba in [7, 8, 300, 1023] {
            write(&device, extent(lba, 1), 4).await.unwrap();
        }
        assert!(matches!(device.execute(verify).await, Ok(Response::Verified(_))));
        served.server.stop();
    });
}

#[test]
fn a_read_only_export_cannot_be_written() {
    run(|| async {
        let served = serve(&plain(BlockSize::B4096));
        let device = open(served.address, "fixed", options()).await;
        assert!(!device.abilities().writable);
        read(&device, extent(0, 1)).await.unwrap();
        let error = write(&device, extent(0, 1), 1).await.unwrap_err();
        assert_eq!(error.into_kind(), ErrorKind::ReadOnly);
        flush(&device).await.unwrap();
        served.server.stop();
    });
}

#[test]
fn exports_are_listed_and_unknown_ones_refused() {
    run(|| async {
        let served = serve(&plain(BlockSize::B4096));
        let names = discover(served.address.into(), options()).await.unwrap();
        let reported: Vec<_> = names.iter().map(|listed| (&listed.name[..], &listed.description[..])).collect();
        assert_eq!(reported, [("disk", "blocks"), ("fixed", "")]);
        let named = Address::new("localhost", served.address.port());
        let device = NbdDevice::connect(named, "", options()).await.unwrap();
        let info = device.info().clone();
        assert_eq!((&info.export[..], &info.description[..], info.allocation), ("disk", "blocks", true));
        assert!(info.flush && info.fua && info.fast_zero && info.can_multi_conn);
        device.close().await;
        let unknown = NbdDevice::connect(served.address.into(), "nothing", options()).await.err().unwrap();
        assert!(matches!(&unknown, ConnectError::Refused(_)), "{unknown}");
        assert_eq!(unknown.to_string(), "the server has no such export");
        let long = "x".repeat(4097);
        let error = NbdDevice::connect(served.address.into(), &long, options()).await.err().unwrap();
        assert!(matches!(error, ConnectError::Name), "{error}");
        let error = NbdDevice::connect(Address::new("no such host", 1), "disk", options()).await.err().unwrap();
        assert!(matches!(error, ConnectError::Resolve { .. }), "{error}");
        served.server.stop();
    });
}

#[test]
fn a_device_that_was_closed_answers_nothing_more() {
    run(|| async {
        let served = serve(&plain(BlockSize::B4096));
        let device = open(served.address, "disk", options()).await;
        write(&device, extent(0, 1), 1).await.unwrap();
        device.device().close().await;
        let error = read(&device, extent(0, 1)).await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unreachable { reason } if reason.contains("closed")), "{error}");
        while served.server.connections() > 0 {
            sealblock_runtime_reactor::sleep(std::time::Duration::from_millis(1)).await;
        }
        served.server.stop();
    });
}
