//! Opening, discovery, loss and closing of connections.

use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Duration;

use crate::common::*;
use sealblock_block::{Device, ErrorKind, Gate, Request};
use sealblock_exports_nvme_tcp::PiVisibility;
use sealblock_media_memory::MemoryDevice;
use sealblock_media_nvme_tcp::{ConnectError, HostPort, NvmeTcpDevice, Options, Reconnect, discover};
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{sleep, spawn};
use sealblock_units::BlockSize;

fn plain() -> Rc<MemoryDevice> {
    memory(BlockSize::B4096, None)
}

async fn connect(address: HostPort, nsid: Option<u32>, options: Options) -> Result<NvmeTcpDevice, ConnectError> {
    NvmeTcpDevice::connect(address, SUBNQN.parse().unwrap(), nsid, options).await
}

#[test]
fn the_only_namespace_needs_no_number_and_one_of_several_does() {
    run(|| async {
        let served = serve(&[(plain(), PiVisibility::Plain)]);
        let device = connect(served.address.into(), None, options()).await.unwrap();
        let info = device.info();
        assert_eq!((info.namespace, info.serial.as_str(), info.uuid), (1, "SN1", Some([1; 16])));
        assert_eq!((info.queues, info.max_transfer_bytes), (1, Some(1 << 20)));
        let none = connect(served.address.into(), Some(7), options()).await.err().unwrap();
        assert!(matches!(&none, ConnectError::NoNamespace { wanted: 7, active } if active == &[1]), "{none}");
        served.target.stop();
        let served = serve(&[(plain(), PiVisibility::Plain), (plain(), PiVisibility::Plain)]);
        let which = connect(served.address.into(), None, options()).await.err().unwrap();
        assert!(matches!(&which, ConnectError::WhichNamespace { active } if active == &[1, 2]), "{which}");
        served.target.stop();
    });
}

#[test]
fn names_are_looked_up_and_unknown_ones_said_to_be() {
    run(|| async {
        let served = serve(&[(plain(), PiVisibility::Plain)]);
        let named = HostPort::new("localhost", served.address.port());
        connect(named, None, options()).await.unwrap();
        let error = connect(HostPort::new("no such host", 1), None, options()).await.err().unwrap();
        assert!(matches!(error, ConnectError::Resolve { .. }), "{error}");
        served.target.stop();
    });
}

#[test]
fn discovery_names_the_subsystem() {
    run(|| async {
        let served = serve(&[(plain(), PiVisibility::Plain)]);
        let entries = discover(served.address.into(), options()).await.unwrap();
        let names: Vec<String> = entries.iter().map(|entry| entry.subnqn.text()).collect();
        assert!(names.iter().any(|name| name == SUBNQN), "{names:?}");
        served.target.stop();
    });
}

#[test]
fn refusals_and_silence_are_told_apart() {
    run(|| async {
        let served = serve(&[(plain(), PiVisibility::Plain)]);
        let other = NvmeTcpDevice::connect(
            served.address.into(),
            "nqn.2026-11.org.example:other".parse().unwrap(),
            None,
            options(),
        );
        let error = other.await.err().unwrap();
        assert!(matches!(error, ConnectError::Refused { what: "Connect", .. }), "{error}");
        served.target.stop();
        let silent = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 4).unwrap();
        let address = silent.local_addr().unwrap();
        let limit = Duration::from_millis(50);
        let error = connect(address.into(), None, Options { connect_timeout: limit, ..options() }).await.err().unwrap();
        assert!(matches!(error, ConnectError::Timeout { .. }), "{error}");
        drop(silent);
        let error = connect(address.into(), None, options()).await.err().unwrap();
        assert!(matches!(error, ConnectError::Connect { .. }), "{error}");
    });
}

#[test]
fn requests_beyond_the_queues_depth_wait_and_all_are_answered() {
    run(|| async {
        let served = serve(&[(plain(), PiVisibility::Plain)]);
        let device = open(&served, 1, Options { queues: 3, queue_depth: 2, ..options() }).await;
        let device = Rc::new(device);
        let tasks: Vec<_> = (0..200_u64)
            .map(|i| {
                let device = Rc::clone(&device);
                spawn(async move {
                    write(&*device, extent(i, 1), i as u8).await.unwrap();
                    let back = read(&*device, extent(i, 1)).await.unwrap();
                    assert_eq!(back.joined_data()[..], sealed(&*device, extent(i, 1), i as u8).joined_data()[..]);
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        let counters = device.device().counters();
        assert_eq!((counters.commands, counters.sent_bytes, counters.received_bytes), (400, 200 << 12, 200 << 12));
        served.target.stop();
    });
}

#[test]
fn a_target_that_comes_back_is_used_again_under_load() {
    run(|| async {
        let memory = plain();
        let served = serve(&[(Rc::clone(&memory), PiVisibility::Plain)]);
        let device = Rc::new(open(&served, 1, Options { queues: 2, max_connection_losses: 200, ..options() }).await);
        let load: Vec<_> = (0..16_u64)
            .map(|i| {
                let device = Rc::clone(&device);
                spawn(async move {
                    for round in 0..60 {
                        write(&*device, extent(i, 1), round).await.unwrap();
                        let back = read(&*device, extent(i, 1)).await.unwrap();
                        assert_eq!(back.joined_data()[..], sealed(&*device, extent(i, 1), round).joined_data()[..]);
                        sleep(Duration::from_millis(1)).await;
                    }
                })
            })
            .collect();
        sleep(Duration::from_millis(10)).await;
        served.target.stop();
        served.serving.await.unwrap().unwrap();
        let again = serve_at(served.address, &[(memory, PiVisibility::Plain)]);
        for task in load {
            task.await.unwrap();
        }
        assert!(device.device().counters().reconnects >= 1);
        again.target.stop();
    });
}

/// Stops the target and serves the same address again.
async fn restart(served: Served, devices: &[(Rc<MemoryDevice>, PiVisibility)]) -> Served {
    served.target.stop();
    served.serving.await.unwrap().unwrap();
    serve_at(served.address, devices)
}

#[test]
fn a_flush_does_not_vouch_for_writes_from_before_a_loss() {
    run(|| async {
        let devices = [(plain(), PiVisibility::Plain)];
        let served = serve(&devices);
        let device = open(&served, 1, options()).await;
        // Good: what was flushed before the loss is safe.
        write(&device, extent(0, 1), 1).await.unwrap();
        device.execute(Request::flush()).await.unwrap();
        let served = restart(served, &devices).await;
        read(&device, extent(0, 1)).await.unwrap();
        device.execute(Request::flush()).await.unwrap();
        // Bad: an acknowledged write was not flushed. The next Flush reports this, once.
        write(&device, extent(1, 1), 2).await.unwrap();
        let served = restart(served, &devices).await;
        read(&device, extent(0, 1)).await.unwrap();
        let error = device.execute(Request::flush()).await.unwrap_err();
        assert!(error.to_string().contains("may be lost"), "{error}");
        device.execute(Request::flush()).await.unwrap();
        served.target.stop();
    });
}

#[test]
fn another_namespace_at_the_same_place_is_not_used() {
    run(|| async {
        let served = serve(&[(plain(), PiVisibility::Plain)]);
        let device = open(&served, 1, options()).await;
        read(&device, extent(0, 1)).await.unwrap();
        let other = Rc::new(MemoryDevice::new(BlockSize::B512, BLOCKS, None));
        let served = restart(served, &[(other, PiVisibility::Plain)]).await;
        let error = read(&device, extent(0, 1)).await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unreachable { reason } if reason.contains("its format")), "{error}");
        served.target.stop();
    });
}

#[test]
fn a_namespace_with_the_same_identifier_in_another_subsystem_is_not_used() {
    run(|| async {
        let memory = plain();
        let served = serve(&[(Rc::clone(&memory), PiVisibility::Plain)]);
        let device = open(&served, 1, options()).await;
        write(&device, extent(0, 1), 1).await.unwrap();
        served.target.stop();
        served.serving.await.unwrap().unwrap();
        let copy = [(plain(), PiVisibility::Plain)];
        let other = serve_with_serial(served.address, &copy, "SN2");
        let error = write(&device, extent(0, 1), 2).await.unwrap_err();
        let says = |reason: &str| reason.contains(r#"has the serial number "SN2" and had "SN1""#);
        assert!(matches!(error.kind(), ErrorKind::Unreachable { reason } if says(reason)), "{error}");
        other.target.stop();
    });
}

#[test]
fn a_target_that_stays_away_is_given_up() {
    run(|| async {
        let served = serve(&[(plain(), PiVisibility::Plain)]);
        let reconnect = Reconnect { attempts: 3, ..options().reconnect };
        let device = open(&served, 1, Options { reconnect, ..options() }).await;
        served.target.stop();
        served.serving.await.unwrap().unwrap();
        let error = read(&device, extent(0, 1)).await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unreachable { reason } if reason.contains("3 attempts")), "{error}");
        assert_eq!(error.device_name(), Some("remote"));
    });
}

#[test]
fn an_idle_device_shows_that_its_target_is_gone_and_reconnects_until_it_is_back() {
    run(|| async {
        let devices = [(plain(), PiVisibility::Plain)];
        let served = serve(&devices);
        // Far less time than the target is away: the limits count for requests that wait.
        let total = Duration::from_millis(200);
        let reconnect = Reconnect { attempts: 2, total, ..options().reconnect };
        let device = open(&served, 1, Options { reconnect, ..options() }).await;
        let monitor = device.device().monitor();
        assert_eq!(monitor.lost(), None);
        let address = served.address;
        served.target.stop();
        served.serving.await.unwrap().unwrap();
        while monitor.lost().is_none() {
            sleep(Duration::from_millis(1)).await;
        }
        sleep(3 * total).await;
        assert!(monitor.lost().unwrap().is_reconnecting);
        let again = serve_at(address, &devices);
        while monitor.lost().is_some() {
            sleep(Duration::from_millis(1)).await;
        }
        read(&device, extent(0, 1)).await.unwrap();
        again.target.stop();
        again.serving.await.unwrap().unwrap();
        // A request waits no longer than the limits say; then requests fail until the target is back.
        read(&device, extent(0, 1)).await.unwrap_err();
        read(&device, extent(0, 1)).await.unwrap_err();
        assert!(monitor.lost().unwrap().is_reconnecting);
        let third = serve_at(address, &devices);
        while monitor.lost().is_some() {
            sleep(Duration::from_millis(1)).await;
        }
        read(&device, extent(0, 1)).await.unwrap();
        third.target.stop();
        device.device().close().await;
        assert_eq!(monitor.lost(), None, "it was closed");
    });
}

#[test]
fn a_closed_device_answers_that_it_is() {
    run(|| async {
        let served = serve(&[(plain(), PiVisibility::Plain)]);
        let device: Gate<NvmeTcpDevice> = open(&served, 1, options()).await;
        device.device().close().await;
        let error = read(&device, extent(0, 1)).await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unreachable { reason } if reason.contains("closed")), "{error}");
        served.target.stop();
    });
}
