//! Writes whose data arrives in pieces, complete or not.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use crate::common::*;
use sealblock_exports_nbd::Limits;
use sealblock_protocols_nbd::wire::command as c;

/// Long enough that its data is received into its final buffer.
const LONG: u64 = 256 << 10;

/// A client whose server has just received a long write, so that it expects another.
fn after_a_long_write(served: &Served, is_extended: bool) -> Client {
    let mut client = Client::open(served.address, "protected", is_extended);
    client.write(0, &pattern(LONG, 1));
    client.stream.set_nodelay(true).unwrap();
    client
}

/// Starts a long write at offset 0, and sends `half` of its data.
fn begin(client: &mut Client, half: &[u8]) {
    client.send(0, c::WRITE, 0, LONG, half);
    // Time for the server to receive it; the result must be the same if it has not.
    std::thread::sleep(Duration::from_millis(50));
}

/// Reads until the connection ends in any way.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    // A reset also counts as the end.
    let _ = stream.read_to_end(&mut rest);
    rest
}

#[test]
fn data_in_many_pieces_is_written_as_it_was_sent() {
    let served = serve(Limits::default());
    for is_extended in [false, true] {
        let mut client = after_a_long_write(&served, is_extended);
        for (seed, piece) in [(2, 1000), (3, 4096), (4, 65_537), (5, LONG as usize - 1)] {
            let data = pattern(LONG, seed);
            // Sends only the header first, so that the data arrive after it.
            let cookie = client.send(0, c::WRITE, LONG, LONG, &data[..1]);
            for part in data[1..].chunks(piece) {
                client.stream.write_all(part).unwrap();
            }
            assert_eq!(client.receive().0, cookie);
            assert!(client.read(LONG, LONG) == data, "pieces of {piece} bytes");
            assert!(client.read(0, LONG) == pattern(LONG, 1), "and nothing beside it");
        }
    }
}

#[test]
fn long_writes_and_short_requests_share_a_stream() {
    let served = serve(Limits::default());
    for is_extended in [false, true] {
        let mut client = after_a_long_write(&served, is_extended);
        let mut sent = Vec::new();
        for round in 0..8 {
            let at = round * 2 * LONG;
            sent.push(client.send(0, c::WRITE, at, LONG, &pattern(LONG, round)));
            sent.push(client.send(0, c::WRITE, at + LONG, BLOCK, &pattern(BLOCK, round + 100)));
            sent.push(client.send(0, c::FLUSH, 0, 0, &[]));
        }
        let mut replied: Vec<u64> = sent.iter().map(|_| client.receive().0).collect();
        replied.sort_unstable();
        assert_eq!(replied, sent);
        for round in 0..8 {
            let at = round * 2 * LONG;
            assert!(client.read(at, LONG) == pattern(LONG, round), "the long write of round {round}");
            assert_eq!(client.read(at + LONG, BLOCK), pattern(BLOCK, round + 100));
        }
    }
}

#[test]
fn a_write_that_is_cut_off_half_way_writes_nothing() {
    let served = serve(Limits::default());
    // Cuts after none of the data, a part of it, and all but a byte.
    for part in [0, 5, LONG / 2, LONG - 1] {
        for is_reset in [false, true] {
            let mut client = after_a_long_write(&served, false);
            let half = pattern(part, 9);
            begin(&mut client, &half);
            match is_reset {
                true => drop(client),
                false => {
                    client.stream.shutdown(Shutdown::Write).unwrap();
                    assert_eq!(rest(&mut client.stream), b"", "it gets no reply");
                }
            }
            served.wait_for_connections(0);
            let mut other = Client::open(served.address, "protected", false);
            assert!(other.read(0, LONG) == pattern(LONG, 1), "{part} bytes came");
        }
    }
}

#[test]
fn a_stopping_server_does_not_execute_half_a_write() {
    let served = serve(Limits { drain: Duration::from_millis(300), ..Limits::default() });
    let mut clients = [0, LONG / 2, LONG - 1].map(|part| (after_a_long_write(&served, false), part));
    for (client, part) in &mut clients {
        begin(client, &pattern(*part, 9));
    }
    served.server.stop();
    served.served.recv_timeout(LATE).unwrap().unwrap();
    assert_eq!(served.server.connections(), 0);
    for (client, _) in &mut clients {
        assert_eq!(rest(&mut client.stream), b"", "it gets no reply");
    }
    let mut again = Client::open(served.serve_again(), "again", false);
    assert!(again.read(0, LONG) == pattern(LONG, 1), "nothing of it was written");
}

#[test]
fn a_stopping_process_does_not_wait_for_half_a_write() {
    let served = serve(Limits { drain: Duration::from_millis(300), ..Limits::default() });
    let mut client = after_a_long_write(&served, false);
    begin(&mut client, &pattern(LONG / 2, 9));
    let stopped = served.shutdown(LATE);
    assert_eq!((stopped.aborted_tasks, stopped.panicked_cores), (0, 0), "every task ended by itself");
    assert_eq!(rest(&mut client.stream), b"", "it gets no reply");
}

/// Memory for one long write in addition to the reserves of connections.
fn narrow() -> Limits {
    let mut limits = Limits { connections: 4, total_bytes_in_flight: 0, receive: 10 * LATE, ..Limits::default() };
    limits.connection.payload_bytes = 4 << 20;
    limits
}

#[test]
fn a_client_that_does_not_go_on_with_a_long_write_gives_way_to_others() {
    let served = serve(narrow());
    let mut silent = Client::open(served.address, "protected", false);
    silent.send(0, c::WRITE, 0, 4 << 20, &[1; 4096]);
    std::thread::sleep(Duration::from_millis(50));
    let mut other = Client::open(served.address, "protected", false);
    assert_eq!(other.read(0, 4 << 20).len(), 4 << 20, "no memory ever comes back");
    assert_eq!(rest(&mut silent.stream), b"");
}

#[test]
fn a_client_that_receives_no_long_reply_gives_way_to_others() {
    let served = serve(narrow());
    let mut silent = Client::open(served.address, "protected", false);
    // More than its socket can buffer.
    (0..8).for_each(|_| _ = silent.send(0, c::READ, 0, 4 << 20, &[]));
    std::thread::sleep(Duration::from_millis(50));
    let mut other = Client::open(served.address, "protected", false);
    assert_eq!(other.read(0, 4 << 20).len(), 4 << 20, "no memory ever comes back");
}

#[test]
fn a_client_that_goes_on_with_a_long_write_keeps_others_waiting() {
    let served = serve(narrow());
    let data = pattern(4 << 20, 3);
    let mut slow = Client::open(served.address, "protected", false);
    let cookie = slow.send(0, c::WRITE, 0, 4 << 20, &data[..1]);
    std::thread::sleep(Duration::from_millis(50));
    let mut other = Client::open(served.address, "protected", false);
    let asked = other.send(0, c::READ, 4 << 20, 4 << 20, &[]);
    for part in data[1..].chunks(512 << 10) {
        std::thread::sleep(Duration::from_millis(500));
        slow.stream.write_all(part).unwrap();
    }
    assert_eq!(slow.receive().0, cookie, "it is not closed");
    assert_eq!(other.receive().0, asked);
    assert!(slow.read(0, 4 << 20) == data);
}
