//! How connections and servers end, and what they release.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::common::*;
use sealblock_exports_nbd::{Limits, Server, SetupError};
use sealblock_protocols_nbd::wire::command as c;

/// True if the server has closed this connection.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(LATE)).unwrap();
    // A reset is an end too.
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
