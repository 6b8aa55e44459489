//! Connections on the core where the device of their export is: `bare` is on the first core, `there` on the second.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use crate::common::*;
use sealblock_block::DynDevice;
use sealblock_exports_nbd::{Export, Limits, Server};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nbd::wire::{self, chunk, command as c, option, rep};
use sealblock_units::BlockSize;

/// Adds the export on the second core, whose device stays there.
fn add_there(served: &Served, name: &str) -> SharedDevice {
    served.add_on(1, name, || DynDevice::new("mem", MemoryDevice::new(BlockSize::B4096, BLOCKS, None)))
}

/// Waits until this many connections are on each core. Those that have ended are then in no list.
#[track_caller]
fn wait_for(server: &Server, wanted: [usize; 2]) {
    until(&format!("{wanted:?} on the cores"), || server.connections_on_cores() == wanted);
}

#[test]
fn connections_go_to_the_core_of_their_device_and_no_request_crosses() {
    for moves in [true, false] {
        let served = if moves { serve(Limits::default()) } else { serve_in_place(Limits::default()) };
        let there = add_there(&served, "there");
        let names = ["there", "protected", "there", "there", "protected", "protected", "there"];
        let mut clients = names.map(|name| Client::open(served.address, name, false));
        for (seed, client) in (0..).zip(&mut clients) {
            let (offset, data) = (seed * 50 * BLOCK, pattern(40 * BLOCK, seed));
            client.write(offset, &data);
            assert_eq!(client.read(offset, data.len() as u64), data);
        }
        let crossings = there.crossings() + served.shared.crossings();
        assert_eq!(crossings == 0, moves, "the twin that keeps connections in place crosses");
        let listed: Vec<String> = served.server.clients().into_iter().map(|client| client.export).collect();
        assert_eq!((listed, served.server.connections()), (names.map(String::from).to_vec(), 7));
        if moves {
            assert_eq!(served.server.connections_on_cores(), [3, 4]);
        }
        drop(clients);
        wait_for(&served.server, [0, 0]);
        served.wait_for_connections(0);
    }
}

/// What a client sends that waits for nothing: it negotiates, chooses `there`, writes a block, and reads it.
fn early(client: &mut Client, is_extended: bool, by_name: bool, data: &[u8]) -> Vec<u8> {
    let name = name_bytes("there");
    let context = [&name[..], &1u32.to_be_bytes(), &15u32.to_be_bytes(), b"base:allocation"].concat();
    let mut bytes = vec![0, 0, 0, if by_name { 1 } else { 3 }];
    bytes.extend(option_bytes(if is_extended { option::EXTENDED_HEADERS } else { option::STRUCTURED_REPLY }, &[]));
    bytes.extend(option_bytes(option::LIST, &[]));
    bytes.extend(option_bytes(option::SET_META_CONTEXT, &context));
    bytes.extend(option_bytes(option::GO, &[&name_bytes("missing")[..], &[0, 0]].concat()));
    bytes.extend(match by_name {
        true => option_bytes(option::EXPORT_NAME, b"there"),
        false => option_bytes(option::GO, &[&name[..], &[0, 0]].concat()),
    });
    bytes.extend(client.request_bytes(0, c::WRITE, 7 * BLOCK, data.len() as u64, data));
    bytes.extend(client.request_bytes(0, c::READ, 7 * BLOCK, data.len() as u64, &[]));
    bytes
}

/// Receives the replies to all of that.
fn receive_replies(client: &mut Client, is_extended: bool, by_name: bool, data: &[u8]) {
    client.bytes(18);
    let style = if is_extended { option::EXTENDED_HEADERS } else { option::STRUCTURED_REPLY };
    for (option, last) in [
        (style, rep::ACK),
        (option::LIST, rep::ACK),
        (option::SET_META_CONTEXT, rep::ACK),
        (option::GO, rep::ERR_UNKNOWN),
    ] {
        assert_eq!(client.option_replies(option).last().unwrap().0, last);
    }
    match by_name {
        true => assert_eq!(client.bytes(8 + 2 + 124)[..8], (BLOCKS * BLOCK).to_be_bytes()),
        false => assert_eq!(client.option_replies(option::GO).last().unwrap().0, rep::ACK),
    }
    let mut replies = [client.receive(), client.receive()];
    replies.sort_by_key(|(cookie, _)| *cookie);
    let [(_, written), (_, read)] = replies;
    assert_eq!(written[0].0, chunk::NONE);
    assert_eq!(read[0].1[8..], *data);
}

#[test]
fn requests_that_come_with_the_choice_are_executed_once_on_the_other_core_however_they_are_split() {
    let served = serve(Limits::default());
    let there = add_there(&served, "there");
    // Without it, the core that accepts could be the right one.
    let _first = Client::open(served.address, "there", false);
    for (is_extended, by_name) in [(false, false), (true, false), (false, true)] {
        let whole = early(&mut Client::connect(served.address, is_extended), is_extended, by_name, &[0; 4096]).len();
        let requests = whole - BLOCK as usize - 2 * if is_extended { 32 } else { 28 };
        wait_for(&served.server, [0, 1]);
        let cuts = [whole, 1, 4, 30, requests - 1, requests, requests + 1, requests + 40, whole - 1];
        for (seed, cut) in (0..).zip(cuts) {
            let mut client = Client::connect(served.address, is_extended);
            let data = pattern(BLOCK, seed);
            let bytes = early(&mut client, is_extended, by_name, &data);
            client.stream.write_all(&bytes[..cut]).unwrap();
            std::thread::sleep(Duration::from_millis(3));
            client.stream.write_all(&bytes[cut..]).unwrap();
            receive_replies(&mut client, is_extended, by_name, &data);
            assert_eq!(served.server.connections_on_cores(), [0, 2], "{is_extended}, {by_name}, {cut}");
            assert_eq!(client.read(0, BLOCK).len(), BLOCK as usize);
            drop(client);
            wait_for(&served.server, [0, 1]);
        }
    }
    assert_eq!((there.counters().completed(), there.crossings()), (3 * 27, 0), "each request once");
}

#[test]
fn clients_that_end_or_violate_the_protocol_leave_nothing_behind() {
    let served = serve(Limits::default());
    add_there(&served, "there");
    let mut alive = Client::open(served.address, "there", true);
    let whole = early(&mut Client::connect(served.address, false), false, false, &[1; 4096]);
    for len in (0..whole.len()).step_by(37) {
        for more in [&[][..], &[0xA5; 300]] {
            let mut client = Client::connect(served.address, false);
            client.stream.write_all(&whole[..len]).unwrap();
            // Fails if the server has closed the connection already.
            let _ = client.stream.write_all(more);
            let _ = client.stream.read(&mut [0; 18]);
        }
    }
    served.wait_for_connections(1);
    wait_for(&served.server, [0, 1]);
    assert_eq!(served.server.clients().len(), 1);
    alive.write(0, &pattern(BLOCK, 1));
    // More than is kept for another core: the connection stays, and is served.
    let mut long = Client::connect(served.address, false);
    let mut bytes = early(&mut long, false, false, &pattern(BLOCK, 2));
    let write = long.request_bytes(0, c::WRITE, 64 * BLOCK, 128 * BLOCK, &pattern(128 * BLOCK, 3));
    bytes.extend(write);
    long.stream.write_all(&bytes).unwrap();
    receive_replies(&mut long, false, false, &pattern(BLOCK, 2));
    long.receive();
    assert_eq!(long.read(64 * BLOCK, 128 * BLOCK), pattern(128 * BLOCK, 3));
}

/// Connects to the exports in turn and sends a read with the choice, until the server ends the connection; returns how
/// often both were answered.
fn connect_in_turn(address: SocketAddr, rounds: usize) -> usize {
    let mut answered = 0;
    for round in 0..rounds {
        let name = ["bare", "there"][round % 2];
        let Ok(mut stream) = std::net::TcpStream::connect(address) else { break };
        stream.set_read_timeout(Some(LATE)).unwrap();
        let mut bytes = vec![0, 0, 0, 3];
        bytes.extend(option_bytes(option::EXPORT_NAME, name.as_bytes()));
        bytes.extend([0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0]);
        bytes.extend([0; 16]);
        bytes.extend(512u32.to_be_bytes());
        if stream.write_all(&bytes).is_err() {
            continue;
        }
        // The greeting, the size and flags of the export, and a simple reply.
        answered += usize::from(stream.read_exact(&mut [0; 18 + 10 + 16 + 512]).is_ok());
    }
    answered
}

#[test]
fn a_server_or_its_cores_that_stop_meanwhile_end_all_connections() {
    for round in 0..12 {
        let served = serve(Limits::default());
        add_there(&served, "there");
        let (address, server) = (served.address, served.server.clone());
        let clients = [0; 3].map(|_| std::thread::spawn(move || connect_in_turn(address, usize::MAX)));
        std::thread::sleep(Duration::from_millis(round / 2 * 4));
        if round % 2 == 0 {
            server.stop();
            served.served.recv_timeout(LATE).unwrap().unwrap();
        }
        let stopped = served.shutdown(LATE);
        assert_eq!((stopped.aborted_tasks, stopped.panicked_cores), (0, 0));
        assert_eq!((server.connections(), server.connections_on_cores()), (0, vec![0, 0]));
        let answered: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
        assert!(answered > 0 || round < 4, "clients were served");
    }
}

#[test]
fn an_export_that_is_exchanged_meanwhile_serves_on() {
    let served = serve(Limits::default());
    let there = add_there(&served, "there");
    let address = served.address;
    let clients = [0; 3].map(|_| std::thread::spawn(move || connect_in_turn(address, 100)));
    for round in 0..100 {
        served.server.remove_export("there").unwrap();
        // The device of the other core gets the name, and then this one again.
        let device = if round % 2 == 0 { &served.shared } else { &there };
        std::thread::sleep(Duration::from_millis(1));
        served.server.add_export(Export::new("there", device.clone())).unwrap();
    }
    let answered: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
    assert!(answered >= 150, "those of the other export, at least: {answered}");
    served.wait_for_connections(0);
    wait_for(&served.server, [0, 0]);
    assert_eq!(Client::open(address, "there", false).read(0, BLOCK).len(), BLOCK as usize);
}

/// A client that has chosen `there` and reads none of the long replies before that.
fn slow_reader(served: &Served) -> Client {
    let mut client = Client::connect(served.address, false);
    let mut bytes = vec![0, 0, 0, 3];
    bytes.extend(option_bytes(option::STRUCTURED_REPLY, &[]));
    (0..LISTS).for_each(|_| bytes.extend(option_bytes(option::LIST, &[])));
    bytes.extend(option_bytes(option::GO, &[&name_bytes("there")[..], &[0, 0]].concat()));
    bytes.extend(client.request_bytes(0, c::READ, 0, BLOCK, &[]));
    client.stream.write_all(&bytes).unwrap();
    until("it has chosen", || served.server.clients().len() == 2);
    client
}

/// Receives to the end; within the lists, which are all the same, nothing is missing and nothing comes between.
fn assert_lists_are_whole(client: &mut Client) {
    client.bytes(18 + 20);
    let mut bytes = Vec::new();
    // A reset also counts as the end.
    let _ = client.stream.read_to_end(&mut bytes);
    let ack =
        [&wire::OPTION_REPLY_MAGIC.to_be_bytes()[..], &option::LIST.to_be_bytes(), &rep::ACK.to_be_bytes()].concat();
    let len = bytes.windows(ack.len()).position(|window| window == ack).unwrap() + 20;
    bytes.truncate(LISTS * len);
    assert!(bytes.len() > 2 * len && bytes.iter().zip(&bytes[len..]).all(|(before, now)| before == now));
}

/// As many lists of exports as no socket has room for.
const LISTS: usize = 60;

#[test]
fn a_client_that_delays_its_move_can_go_on_or_end_and_delays_no_stop() {
    for end in ["reads", "closes", "server stops", "export removed"] {
        let served = serve(Limits { drain: Duration::from_millis(300), ..Limits::default() });
        add_there(&served, "there");
        for number in 0..100 {
            let export = Export::new(format!("long {number}"), served.shared.clone()).described("x".repeat(4000));
            served.server.add_export(export).unwrap();
        }
        // Without it, the core that accepts could be the right one.
        let _other = Client::open(served.address, "there", false);
        let mut client = slow_reader(&served);
        wait_for(&served.server, [0, 2]);
        match end {
            "reads" => {
                client.bytes(18);
                assert_eq!(client.option_replies(option::STRUCTURED_REPLY).len(), 1);
                for _ in 0..LISTS {
                    assert_eq!(client.option_replies(option::LIST).len(), 100 + 4 + 1);
                }
                assert_eq!(client.option_replies(option::GO).last().unwrap().0, rep::ACK);
                assert_eq!(client.receive().1[0].1.len(), 8 + BLOCK as usize);
                assert_eq!((served.server.connections_on_cores(), client.read(0, BLOCK).len()), (vec![0, 2], 4096));
            }
            "closes" => drop(client),
            "server stops" => {
                served.server.stop();
                assert_lists_are_whole(&mut client);
                served.served.recv_timeout(LATE).unwrap().unwrap();
                assert_eq!(served.server.connections(), 0);
            }
            _ => served.server.remove_export("there").unwrap(),
        }
        match end {
            "reads" => continue,
            "closes" => wait_for(&served.server, [0, 1]),
            _ => wait_for(&served.server, [0, 0]),
        }
        assert_eq!(served.server.clients().len(), served.server.connections());
    }
}
