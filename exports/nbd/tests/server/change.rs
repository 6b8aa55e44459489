//! Exports that are added and removed, and the budget for bytes in flight that connections share.

use std::io::Read;
use std::sync::Arc;

use crate::common::*;
use sealblock_exports_nbd::{Export, Limits, SetupError};
use sealblock_protocols_nbd::wire::{chunk, command as c};

#[test]
fn removing_an_export_ends_its_connections_and_no_others() {
    let served = serve(Limits::default());
    let token = Arc::new(());
    let late = Export::new("late", served.shared.clone()).with_owner(Arc::clone(&token) as _);
    served.server.add_export(late).unwrap();
    let (mut stays, mut goes) =
        (Client::open(served.address, "protected", false), Client::open(served.address, "late", true));
    goes.write(0, &pattern(BLOCK, 3));
    assert_eq!(stays.read(0, BLOCK), pattern(BLOCK, 3), "two exports of one device");
    assert_eq!(Arc::strong_count(&token), 2);
    served.server.remove_export("late").unwrap();
    let end = goes.stream.read_to_end(&mut Vec::new());
    assert!(end.is_ok(), "it is closed in good order: {end:?}");
    until("the device is let go", || Arc::strong_count(&token) == 1);
    assert_eq!(stays.read(0, BLOCK), pattern(BLOCK, 3), "others go on");
    assert_eq!(served.server.exports(), ["protected", "bare", "fixed"]);
    assert!(!Client::can_open(served.address, "late"));
    served.server.add_export(Export::new("late", served.shared.clone())).unwrap();
    assert!(Client::can_open(served.address, "late"), "the name is free again");
}

#[test]
fn invalid_changes_fail() {
    let served = serve(Limits::default());
    let export = |name: &str| Export::new(name, served.shared.clone());
    assert_eq!(served.server.remove_export("nothing"), Err(SetupError::Unknown("nothing".into())));
    assert_eq!(served.server.add_export(export("bare")), Err(SetupError::Duplicate("bare".into())));
    let long = "x".repeat(4097);
    assert!(matches!(served.server.add_export(export(&long)), Err(SetupError::TooLong(_))));
    assert_eq!(served.server.exports().len(), 3);
}

#[test]
fn requests_in_flight_complete_before_an_export_is_removed() {
    let served = serve(Limits::default());
    served.server.add_export(Export::new("late", served.shared.clone())).unwrap();
    let mut client = Client::open(served.address, "late", false);
    let sent: Vec<u64> =
        (0..32).map(|i| client.send(0, c::WRITE, i * 8 * BLOCK, 8 * BLOCK, &pattern(8 * BLOCK, i))).collect();
    let (first, chunks) = client.receive();
    assert_eq!(chunks, [(chunk::NONE, vec![])]);
    served.server.remove_export("late").unwrap();
    // Each of the other requests succeeds, fails because the server stops, or was never read.
    let mut rest = Vec::new();
    client.stream.read_to_end(&mut rest).expect("closed in good order, or after all was read");
    let mut other = Client::open(served.address, "protected", false);
    let first = sent.iter().position(|cookie| *cookie == first).unwrap() as u64;
    assert_eq!(other.read(first * 8 * BLOCK, 8 * BLOCK), pattern(8 * BLOCK, first));
}

#[test]
fn a_client_that_receives_nothing_does_not_delay_others() {
    let mut limits = Limits { connections: 2, total_bytes_in_flight: 1 << 20, ..Limits::default() };
    (limits.connection.bytes_in_flight, limits.connection.payload_bytes) = (1 << 20, 1 << 20);
    let served = serve(limits);
    let mut greedy = Client::open(served.address, "protected", false);
    // Far more than the sockets can buffer.
    let asked: Vec<u64> = (0..32).map(|_| greedy.send(0, c::READ, 0, 1 << 20, &[])).collect();
    let mut other = Client::open(served.address, "protected", true);
    for i in 0..8 {
        other.write(i << 18, &pattern(1 << 18, i));
    }
    let mut waiting: Vec<u64> = (0..16).map(|i| other.send(0, c::READ, (i % 8) << 18, 1 << 18, &[])).collect();
    for _ in 0..16 {
        let (cookie, chunks) = other.receive();
        waiting.retain(|sent| *sent != cookie);
        assert_eq!((chunks.len(), chunks[0].1.len()), (1, 8 + (1 << 18)));
    }
    assert!(waiting.is_empty());
    for _ in asked {
        assert_eq!(greedy.receive().1[0].1.len(), 8 + (1 << 20), "who comes late still gets everything");
    }
}

#[test]
fn a_resize_is_seen_by_clients_that_connect_later() {
    let served = serve(Limits::default());
    let large = served.shared.geometry().capacity_bytes();
    served.server.add_export(Export::new("late", served.shared.clone())).unwrap();
    let mut before = Client::open(served.address, "late", false);
    let (half, last) = (large / 2, large - BLOCK);
    before.write(0, &pattern(BLOCK, 1));
    before.write(last, &pattern(BLOCK, 2));
    served.resize("late", half);
    let mut after = Client::open(served.address, "late", true);
    assert_eq!((before.size, after.size), (large, half));
    assert_eq!(after.read(0, BLOCK), pattern(BLOCK, 1));
    // The server fails requests past the end that the client negotiated; the device fails those past its own end.
    for client in [&mut before, &mut after] {
        for (kind, data) in
            [(c::READ, vec![]), (c::WRITE, pattern(BLOCK, 3)), (c::TRIM, vec![]), (c::WRITE_ZEROES, vec![])]
        {
            let errno = client.errno(0, kind, half, BLOCK, &data);
            assert!([22, 28].contains(&errno), "EINVAL or ENOSPC, and not {errno}");
        }
    }
    served.resize("late", large);
    assert_eq!(before.read(last, BLOCK), pattern(BLOCK, 2), "no write has reached it since");
    assert_ne!(after.errno(0, c::READ, half, BLOCK, &[]), 0, "the size that it negotiated");
    assert_eq!(Client::open(served.address, "late", false).size, large);
    // Connections that chose it before a resize end too.
    served.server.remove_export("late").unwrap();
    for mut client in [before, after] {
        assert!(client.stream.read_to_end(&mut Vec::new()).is_ok());
    }
    assert_eq!(served.server.resize_export("late", served.shared.clone()), Err(SetupError::Unknown("late".into())));
}
