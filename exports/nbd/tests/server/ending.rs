//! How connections and servers end, and what they release.

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::common::*;
use sealblock_block::{Abilities, Device, DynDevice, Geometry, Outcome, Request, RequestKind};
use sealblock_exports_nbd::{Limits, Server, SetupError};
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nbd::wire::command as c;
use sealblock_runtime_reactor::sleep;
use sealblock_units::BlockSize;

/// Memory that executes the first write long after the others.
struct FirstWriteLast {
    inner: MemoryDevice,
    had_first: Cell<bool>,
}

impl Device for FirstWriteLast {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        if request.kind() == RequestKind::Write && !self.had_first.replace(true) {
            sleep(Duration::from_millis(500)).await;
        }
        self.inner.execute(request).await
    }
}

/// True if the server has closed this connection.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(LATE)).unwrap();
    // A reset also counts as the end.
    stream.read_to_end(&mut Vec::new()).map_or_else(|error| error.kind() != std::io::ErrorKind::WouldBlock, |_| true)
}

#[test]
fn disconnected_clients_are_unregistered() {
    let served = serve(Limits::default());
    let mut polite = Client::open(served.address, "bare", false);
    let rude = Client::open(served.address, "bare", true);
    served.wait_for_connections(2);
    polite.send(0, c::DISC, 0, 0, &[]);
    assert!(is_closed(&mut polite.stream));
    drop(rude);
    served.wait_for_connections(0);
    assert_eq!(Client::open(served.address, "bare", false).size, 512 * BLOCKS);
}

#[test]
fn protocol_violations_end_their_connection_only() {
    let served = serve(Limits::default());
    let mut good = Client::open(served.address, "bare", false);
    let mut wrong = Client::open(served.address, "bare", false);
    wrong.stream.write_all(&[0x55; 28]).unwrap();
    assert!(is_closed(&mut wrong.stream));
    let mut half = Client::open(served.address, "bare", false);
    half.send(0, c::WRITE, 0, 1 << 20, &[1; 1000]);
    drop(half);
    served.wait_for_connections(1);
    assert_eq!(good.read(0, 512), [0; 512], "a write that did not come as a whole writes nothing");
}

#[test]
fn a_client_that_chooses_no_export_times_out() {
    let served = serve(Limits { negotiation: Duration::from_millis(100), ..Limits::default() });
    let mut chosen = Client::open(served.address, "bare", false);
    let mut silent = TcpStream::connect(served.address).unwrap();
    assert!(is_closed(&mut silent));
    assert_eq!(chosen.read(0, 512).len(), 512, "others may take their time");
}

#[test]
fn connections_above_the_limit_are_closed() {
    let served = serve(Limits { connections: 1, ..Limits::default() });
    let mut first = Client::open(served.address, "bare", false);
    assert!(is_closed(&mut TcpStream::connect(served.address).unwrap()));
    assert_eq!(first.read(0, 512).len(), 512);
}

#[test]
fn a_server_that_stops_closes_everything() {
    let served = serve(Limits::default());
    let mut clients = [false, true].map(|is_extended| Client::open(served.address, "protected", is_extended));
    clients[0].write(0, &pattern(BLOCK, 1));
    served.server.stop();
    served.served.recv_timeout(LATE).unwrap().unwrap();
    assert_eq!(served.server.connections(), 0);
    assert!(clients.iter_mut().all(|client| is_closed(&mut client.stream)));
    assert!(TcpStream::connect(served.address).is_err());
}

#[test]
fn a_write_in_flight_of_a_client_that_disconnected_undoes_nothing() {
    for says_so in [true, false] {
        let served = serve(Limits::default());
        served.add("slow", || {
            let inner = MemoryDevice::new(BlockSize::B4096, BLOCKS, None);
            DynDevice::new("slow", FirstWriteLast { inner, had_first: Cell::new(false) })
        });
        let mut gone = Client::open(served.address, "slow", false);
        gone.send(0, c::WRITE, 0, BLOCK, &pattern(BLOCK, 1));
        assert_eq!(gone.read(BLOCK, BLOCK).len(), BLOCK as usize, "the write before it has begun");
        if says_so {
            gone.send(0, c::DISC, 0, 0, &[]);
            gone.stream.shutdown(std::net::Shutdown::Write).unwrap();
            std::thread::sleep(Duration::from_millis(100));
        } else {
            drop(gone);
        }
        let mut next = Client::open(served.address, "slow", false);
        next.write(0, &pattern(BLOCK, 2));
        served.wait_for_connections(1);
        assert_eq!(next.read(0, BLOCK), pattern(BLOCK, 2), "said so: {says_so}");
    }
}

/// Two connections: the first on the core of the devices, the second on the other.
fn one_on_each_core(served: &Served, exports: [&str; 2]) -> [Client; 2] {
    let clients = exports.map(|export| Client::open(served.address, export, false));
    let stalled = served.stall(1);
    let [mut here, mut there] = clients;
    assert_eq!(here.read(0, BLOCK).len(), BLOCK as usize, "this core runs");
    let asked = there.send(0, c::READ, 0, BLOCK, &[]);
    there.stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(there.stream.peek(&mut [0]).is_err(), "this core stands still");
    drop(stalled);
    there.stream.set_read_timeout(Some(LATE)).unwrap();
    assert_eq!(there.receive().0, asked);
    [here, there]
}

/// Sends more writes of block 0 than a server receives at once, so that it executes the first of them before it reads
/// the end.
fn send_more_than_is_read_at_once(client: &mut Client) {
    for _ in 0..96 {
        client.send(0, c::WRITE, 0, BLOCK, &pattern(BLOCK, 1));
    }
}

/// Returns what the first client reads from a block that it wrote, after the second one had closed its connection with
/// an older write that its core had not yet read.
fn after_an_unread_write(served: &Served, mut here: Client, mut there: Client) -> Vec<u8> {
    let stalled = served.stall(1);
    send_more_than_is_read_at_once(&mut there);
    drop(there);
    let newer = here.send(0, c::WRITE, 0, BLOCK, &pattern(BLOCK, 2));
    // It is answered now or later; later if it waits for the other connection.
    here.stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let _ = here.stream.peek(&mut [0]);
    here.stream.set_read_timeout(Some(LATE)).unwrap();
    assert_eq!(served.server.clients().len(), 2, "what the other one sent may still be executed");
    drop(stalled);
    assert_eq!(here.receive().0, newer);
    served.wait_for_connections(1);
    assert_eq!(served.server.clients().len(), 1);
    here.read(0, BLOCK)
}

#[test]
fn what_lies_unread_on_a_closed_connection_undoes_nothing() {
    let served = serve_in_place(Limits::default());
    let [here, there] = one_on_each_core(&served, ["protected", "protected"]);
    assert_eq!(after_an_unread_write(&served, here, there), pattern(BLOCK, 2));
}

#[test]
fn a_connection_that_was_made_after_the_end_of_another_waits_for_what_lies_unread_there() {
    let served = serve_in_place(Limits::default());
    let [here, mut there] = one_on_each_core(&served, ["protected", "protected"]);
    let stalled = served.stall(1);
    send_more_than_is_read_at_once(&mut there);
    drop((here, there));
    served.wait_for_connections(1);
    let (address, (told, opened)) = (served.address, std::sync::mpsc::channel());
    let again = std::thread::spawn(move || {
        let mut client = Client::open(address, "protected", false);
        client.write(0, &pattern(BLOCK, 2));
        told.send(()).unwrap();
        client
    });
    let _ = opened.recv_timeout(Duration::from_millis(200));
    drop(stalled);
    let mut client = again.join().unwrap();
    served.wait_for_connections(1);
    assert_eq!(client.read(0, BLOCK), pattern(BLOCK, 2));
}

#[test]
fn a_connection_whose_core_stands_still_after_its_end_executes_nothing_any_more() {
    let served = serve_in_place(Limits::default());
    let [mut here, mut there] = one_on_each_core(&served, ["protected", "protected"]);
    let stalled = served.stall(1);
    send_more_than_is_read_at_once(&mut there);
    drop(there);
    let newer = here.send(0, c::WRITE, BLOCK, BLOCK, &pattern(BLOCK, 2));
    // Longer than the time that a closed connection has.
    std::thread::sleep(Duration::from_millis(1500));
    drop(stalled);
    assert_eq!(here.receive().0, newer);
    served.wait_for_connections(1);
    assert_eq!(here.read(0, BLOCK), vec![0; BLOCK as usize], "its client is gone, and may have written newer data");
}

#[test]
fn exports_that_the_protocol_cannot_describe_fail() {
    let reactor = sealblock_runtime_reactor::Reactor::new(Default::default()).unwrap();
    reactor.block_on(async {
        let size = sealblock_units::BlockSize::B4096;
        let device = std::rc::Rc::new(sealblock_media_memory::MemoryDevice::new(size, 8, None));
        let gate = sealblock_block::DynDevice::new("mem", device);
        let shared = sealblock_layers_cross_core::SharedDevice::publish(gate);
        let export = |name: &str| sealblock_exports_nbd::Export::new(name, shared.clone());
        let refused = |exports: Vec<_>| Server::new(exports, Limits::default()).err();
        assert_eq!(refused(vec![export("a"), export("b")]), None);
        assert_eq!(refused(vec![export("a"), export("a")]), Some(SetupError::Duplicate("a".into())));
        assert!(matches!(refused(vec![export(&"a".repeat(4097))]), Some(SetupError::TooLong(_))));
    });
}
