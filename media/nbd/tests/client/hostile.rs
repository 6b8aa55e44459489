//! Servers that fail, violate the protocol, do not reply, or disconnect.

use std::cell::{Cell, RefCell};
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Duration;

use crate::common::fake::{Reply, export, serve as serve_fake};
use crate::common::*;
use sealblock_block::{BlockState, Device, Durability, Error, ErrorKind, Gate, Request, Response};
use sealblock_media_nbd::{ConnectError, NbdDevice, Options, Reconnect};
use sealblock_protocols_nbd::{Command, ErrorCode, ErrorReply, Export, StatusDescriptor};
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{JoinHandle, sleep, spawn};
use sealblock_units::BlockSize;

fn fail(code: ErrorCode, offset: Option<u64>) -> Option<Reply> {
    Some(Reply::Fail(ErrorReply { code, offset, message: "no".into() }))
}

fn reads(command: &Command, lba: u64) -> bool {
    let at = lba << 12;
    matches!(command, Command::Read { offset, length } if (*offset..*offset + u64::from(*length)).contains(&at))
}

#[test]
fn damage_is_found_with_and_without_offsets() {
    run(|| async {
        for names in [true, false] {
            let fake = serve_fake(export(), move |command| {
                let first = [3, 4, 100, 255].into_iter().find(|lba| reads(command, *lba))?;
                fail(ErrorCode::Io, names.then_some((first << 12) + 512))
            });
            let device = open(fake.address, "disk", options()).await;
            let error = read(&device, extent(0, 256)).await.unwrap_err();
            assert_eq!(bad(&error), [3, 4, 100, 255]);
            assert!(fake.requests.get() < 80, "{} requests for four blocks", fake.requests.get());
            assert_eq!(bad(&read(&device, extent(4, 1)).await.unwrap_err()), [4]);
            read(&device, extent(5, 95)).await.unwrap();
        }
    });
}

#[test]
fn a_server_that_names_a_good_block_first_hides_no_bad_one() {
    run(|| async {
        // It names the last of the bad blocks.
        let fake = serve_fake(export(), |command| {
            let last = [3, 9, 12].into_iter().rfind(|lba| reads(command, *lba))?;
            fail(ErrorCode::Io, Some(last << 12))
        });
        let device = open(fake.address, "disk", options()).await;
        assert_eq!(bad(&read(&device, extent(0, 64)).await.unwrap_err()), [3, 9, 12]);
    });
}

#[test]
fn a_failure_that_passes_is_got_over_and_one_that_stays_is_told() {
    run(|| async {
        let left = Rc::new(Cell::new(1));
        let counts = Rc::clone(&left);
        let fake = serve_fake(export(), move |command| match command {
            Command::Read { .. } if counts.get() > 0 => {
                counts.set(counts.get() - 1);
                fail(ErrorCode::Io, None)
            }
            // Long reads always fail.
            Command::Read { length, .. } if *length > 256 << 10 => fail(ErrorCode::Io, None),
            _ => None,
        });
        let device = open(fake.address, "disk", options()).await;
        read(&device, extent(0, 8)).await.unwrap();
        let error = read(&device, extent(0, 256)).await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Media { reason } if reason.contains("EIO")), "{error}");
        assert_eq!(bad(&error), [], "no block is bad by itself");
    });
}

#[test]
fn errors_become_the_failures_of_their_kind() {
    run(|| async {
        for (code, is_it) in [
            (ErrorCode::NoSpace, (|failure| matches!(failure, ErrorKind::NoSpace { .. })) as fn(&ErrorKind) -> bool),
            (ErrorCode::NotPermitted, |failure| *failure == ErrorKind::ReadOnly),
            (ErrorCode::Io, |failure| matches!(failure, ErrorKind::Media { .. })),
            (ErrorCode::NoMemory, |failure| matches!(failure, ErrorKind::Media { .. })),
        ] {
            let fake = serve_fake(export(), move |command| match command {
                Command::Write { .. } => fail(code, None),
                _ => None,
            });
            let device = open(fake.address, "disk", options()).await;
            let error = write(&device, extent(0, 1), 1).await.unwrap_err();
            assert!(is_it(error.kind()), "{code}: {error}");
        }
    });
}

#[test]
fn a_flush_does_not_vouch_for_writes_of_a_connection_that_was_lost() {
    run(|| async {
        let memory = plain(BlockSize::B4096);
        let served = serve(&memory);
        let device = open(served.address, "disk", options()).await;
        write_with(&device, extent(0, 1), 1, Durability::ForceUnitAccess).await.unwrap();
        write(&device, extent(1, 1), 1).await.unwrap();
        flush(&device).await.unwrap();
        write(&device, extent(2, 1), 1).await.unwrap();
        served.server.stop();
        served.serving.await.unwrap().unwrap();
        let again = serve_at(served.address, &memory);
        assert!(holds(&device, extent(0, 1), 1).await, "over the new connection");
        let error = flush(&device).await.unwrap_err();
        assert!(error.to_string().contains("written again"), "{error}");
        flush(&device).await.unwrap();
        assert_eq!(device.device().counters().reconnects, 1);
        again.server.stop();
        again.serving.await.unwrap().unwrap();
        let third = serve_at(served.address, &memory);
        read(&device, extent(0, 1)).await.unwrap();
        flush(&device).await.expect("nothing was written since the last flush");
        third.server.stop();
    });
}

/// Begins eight writes of 1 MiB.
fn write_large(device: &Rc<Gate<NbdDevice>>, seed: u8) -> Vec<JoinHandle<Result<Response, Error>>> {
    let one = |i: u64| {
        let device = Rc::clone(device);
        spawn(async move { write(&*device, extent(i * 256, 256), seed).await })
    };
    (0..8).map(one).collect()
}

/// A server stops reading one of two connections, and later continues: it must not find there a write that was repeated
/// over the next connection, because newer writes to the same blocks may have come since.
#[test]
fn writes_of_a_lost_connection_do_not_come_after_newer_ones() {
    run(|| async {
        let (goes_on, holds, breaks) = (Rc::new(Cell::new(false)), Cell::new(true), Cell::new(true));
        // The first byte of every write, by its offset, in the order in which the server sees them.
        let seen = Rc::new(RefCell::new(Vec::new()));
        let (until, notes) = (Rc::clone(&goes_on), Rc::clone(&seen));
        let fake = serve_fake(export(), move |command| match command {
            Command::Write { offset, data, .. } => {
                notes.borrow_mut().push((*offset, data[0]));
                holds.take().then(|| Reply::Hold(Rc::clone(&until)))
            }
            Command::Read { .. } if breaks.take() => Some(Reply::Close),
            _ => None,
        });
        // Newer writes are not held back here: unsent data alone must not arrive.
        let options = Options { connections: 2, quiesce: Duration::ZERO, ..options() };
        let device = Rc::new(open(fake.address, "disk", options).await);
        let old = write_large(&device, 0x10);
        // One connection is held; the other one, which has less to do, receives this after it has replied to a write,
        // and fails.
        while !old.iter().any(JoinHandle::is_finished) {
            sleep(Duration::from_millis(1)).await;
        }
        read(&*device, extent(0, 1)).await.unwrap();
        for write in old {
            write.await.unwrap().unwrap();
        }
        for write in write_large(&device, 0x20) {
            write.await.unwrap().unwrap();
        }
        let before = seen.borrow().len();
        goes_on.set(true);
        while fake.ended.get() < 2 {
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(seen.borrow()[before..], [], "old writes came after newer ones of the same blocks");
        assert_eq!(device.device().counters().reconnects, 1);
    });
}

#[test]
fn a_server_that_shuts_down_or_hangs_up_is_left_and_found_again() {
    run(|| async {
        for shuts_down in [true, false] {
            let first = Rc::new(Cell::new(true));
            let fake = serve_fake(export(), move |command| match command {
                Command::Write { .. } if first.take() => match shuts_down {
                    true => fail(ErrorCode::Shutdown, None),
                    false => Some(Reply::Close),
                },
                _ => None,
            });
            let device = open(fake.address, "disk", options()).await;
            write(&device, extent(0, 1), 1).await.unwrap();
            assert_eq!((fake.connections.get(), device.device().counters().reconnects), (2, 1));
        }
    });
}

#[test]
fn a_request_that_ends_every_connection_is_given_up() {
    run(|| async {
        let fake = serve_fake(export(), |command| reads(command, 5).then_some(Reply::Close));
        let device = open(fake.address, "disk", Options { max_connection_losses: 3, ..options() }).await;
        let error = read(&device, extent(0, 8)).await.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Unreachable { reason } if reason.contains("3 connections")),
            "{error}"
        );
        read(&device, extent(6, 2)).await.expect("others go on");
    });
}

#[test]
fn patience_has_an_end() {
    run(|| async {
        let served = serve(&plain(BlockSize::B4096));
        let patience = Reconnect { attempts: 3, first_delay: Duration::from_millis(1), ..Reconnect::default() };
        let device = open(served.address, "disk", Options { reconnect: patience, ..options() }).await;
        served.server.stop();
        served.serving.await.unwrap().unwrap();
        let error = read(&device, extent(0, 1)).await.unwrap_err();
        let ErrorKind::Unreachable { reason } = error.kind() else { panic!("{error}") };
        assert!(reason.contains("3 attempts") && reason.contains("cannot connect"), "{reason}");
        assert!(read(&device, extent(0, 1)).await.is_err(), "it stays failed");
    });
}

#[test]
fn an_idle_device_shows_that_its_server_is_gone_and_reconnects_until_it_is_back() {
    run(|| async {
        let memory = plain(BlockSize::B4096);
        let served = serve(&memory);
        // Far less time than the server is away: the limits count for requests that wait.
        let total = Duration::from_millis(200);
        let reconnect = Reconnect { attempts: 2, total, ..options().reconnect };
        let device = open(served.address, "disk", Options { reconnect, ..options() }).await;
        let monitor = device.device().monitor();
        assert_eq!(monitor.lost(), None);
        served.server.stop();
        served.serving.await.unwrap().unwrap();
        while monitor.lost().is_none() {
            sleep(Duration::from_millis(1)).await;
        }
        sleep(3 * total).await;
        let lost = monitor.lost().unwrap();
        assert!(lost.is_reconnecting && lost.reason.contains("closed the connection"), "{lost:?}");
        let again = serve_at(served.address, &memory);
        while monitor.lost().is_some() {
            sleep(Duration::from_millis(1)).await;
        }
        read(&device, extent(0, 1)).await.unwrap();
        again.server.stop();
        again.serving.await.unwrap().unwrap();
        // A request waits no longer than the limits say; then requests fail until the server is back.
        read(&device, extent(0, 1)).await.unwrap_err();
        read(&device, extent(0, 1)).await.unwrap_err();
        assert!(monitor.lost().unwrap().is_reconnecting);
        let third = serve_at(served.address, &memory);
        while monitor.lost().is_some() {
            sleep(Duration::from_millis(1)).await;
        }
        read(&device, extent(0, 1)).await.unwrap();
        third.server.stop();
        device.device().close().await;
        assert_eq!(monitor.lost(), None, "it was closed");
    });
}

#[test]
fn silence_has_an_end() {
    run(|| async {
        let fake = serve_fake(export(), |command| reads(command, 5).then_some(Reply::Silence));
        let quick = Options { request_timeout: Duration::from_millis(80), max_connection_losses: 1, ..impatient() };
        let device = open(fake.address, "disk", quick).await;
        let error = read(&device, extent(5, 1)).await.unwrap_err();
        assert!(error.to_string().contains("not answered within 80ms"), "{error}");
        let silent = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 4).unwrap();
        let limit = Duration::from_millis(50);
        let address = silent.local_addr().unwrap().into();
        let quick = Options { connect_timeout: limit, ..options() };
        let error = NbdDevice::connect(address, "disk", quick).await.err().unwrap();
        assert!(matches!(error, ConnectError::Timeout { .. }), "{error}");
    });
}

#[test]
fn bytes_that_are_no_reply_end_the_connection() {
    run(|| async {
        let fake = serve_fake(export(), |command| reads(command, 5).then(|| Reply::Bytes(vec![0x55; 100])));
        let device = open(fake.address, "disk", impatient()).await;
        let error = read(&device, extent(5, 1)).await.unwrap_err();
        assert!(error.to_string().contains("broke the protocol"), "{error}");
    });
}

#[test]
fn another_export_under_the_same_name_is_not_used() {
    run(|| async {
        let served = serve(&plain(BlockSize::B4096));
        let device = open(served.address, "disk", options()).await;
        served.server.stop();
        served.serving.await.unwrap().unwrap();
        let other = serve_at(served.address, &plain(BlockSize::B512));
        let error = read(&device, extent(0, 1)).await.unwrap_err();
        assert!(error.to_string().contains("another export"), "{error}");
        other.server.stop();
    });
}

#[test]
fn what_is_no_server_or_no_shape_is_refused() {
    run(|| async {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 4).unwrap();
        let address = listener.local_addr().unwrap();
        spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let hello = sealblock_runtime_memory::Slice::copy_from(b"SSH-2.0-server 12345\r\n");
                let _ = stream.send_all([hello]).await;
                sleep(Duration::from_millis(50)).await;
            }
        });
        let error = NbdDevice::connect(address.into(), "disk", options()).await.err().unwrap();
        assert!(error.to_string().contains("which is not NBD"), "{error}");
        let large = serve_fake(Export { block_bytes: 8192, ..export() }, |_| None);
        let error = NbdDevice::connect(large.address.into(), "disk", options()).await.err().unwrap();
        assert!(error.to_string().contains("blocks of 8192 bytes and more"), "{error}");
    });
}

#[test]
fn holes_are_asked_for_until_all_is_known_and_a_server_that_dawdles_is_cut_short() {
    run(|| async {
        // Holes of 5 blocks and data of 3 in turn, one in each reply.
        let fake = serve_fake(export(), |command| match command {
            Command::BlockStatus { offset, .. } => {
                let block = offset >> 12;
                let (in_turn, blocks) = (block % 8, if block % 8 < 5 { 5 } else { 8 });
                let length = (blocks - in_turn) << 12;
                Some(Reply::Status(vec![StatusDescriptor { length, status: if in_turn < 5 { 3 } else { 0 } }]))
            }
            _ => None,
        });
        let device = open(fake.address, "disk", options()).await;
        let answer = device.execute(Request::block_status(extent(2, 16))).await.unwrap();
        let Response::BlockStatus(runs) = answer else { panic!("{answer:?}") };
        let reported: Vec<_> = runs.iter().map(|run| (run.blocks.get(), run.state)).collect();
        use BlockState::{Allocated, Hole};
        assert_eq!(reported, [(3, Hole), (3, Allocated), (5, Hole), (3, Allocated), (2, Hole)]);
        let slow = serve_fake(export(), |command| match command {
            Command::BlockStatus { .. } => Some(Reply::Status(vec![StatusDescriptor { length: 512, status: 3 }])),
            _ => None,
        });
        let device = open(slow.address, "disk", options()).await;
        let answer = device.execute(Request::block_status(extent(0, 4096))).await.unwrap();
        let Response::BlockStatus(runs) = answer else { panic!("{answer:?}") };
        assert_eq!(runs.iter().map(|run| u64::from(run.blocks.get())).sum::<u64>(), 4096);
        assert!(runs.iter().all(|run| run.state == Allocated), "{runs:?}");
        assert_eq!(slow.requests.get(), 1024);
    });
}
