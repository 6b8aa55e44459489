//! Where the data of long writes is received, and what they hold until all of it is there.

use sealblock_runtime_memory::Buffer;

use super::*;
use crate::fuzz::preamble;
use crate::wire::{command as c, flag};
use crate::{Command, Event, Request, Server};

/// A write of 8192 bytes at the beginning.
fn header(style: u8) -> Vec<u8> {
    match style {
        2 => fields![0x21e4_1c71u32, flag::PAYLOAD_LEN, c::WRITE, 1u64, 0u64, 8192u64],
        _ => fields![0x2560_9513u32, 0u16, c::WRITE, 1u64, 0u64, 8192u32],
    }
}

fn data(seed: u8) -> Vec<u8> {
    (0..8192u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8 ^ seed).collect()
}

fn receive(server: &mut Server, bytes: &[u8]) {
    let mut buffer = server.receive_buffer().expect("there is room");
    buffer[..bytes.len()].copy_from_slice(bytes);
    server.received(buffer, bytes.len());
}

/// The data of the write that comes next.
fn written(server: &mut Server) -> Option<Buffer> {
    let Request { ticket, command } = match server.next_event()? {
        Event::Request(request) => request,
        other => panic!("{other:?}"),
    };
    server.done(ticket);
    server.transmit(&mut Vec::new());
    server.sent();
    let Command::Write { data, .. } = command else { panic!("{command:?}") };
    Some(data)
}

/// A server that negotiated, and receives data in its place down to the last byte.
fn ready(style: u8) -> Server {
    let mut server = server(1);
    receive(&mut server, &preamble(style));
    assert!(matches!(server.next_event(), Some(Event::Chosen(0))));
    assert!(server.next_event().is_none());
    server.transmit(&mut Vec::new());
    server.sent();
    server
}

fn room(server: &mut Server) -> usize {
    let buffer = server.receive_buffer().expect("there is room");
    let room = buffer.len();
    server.received(buffer, 0);
    room
}

#[test]
fn data_that_comes_in_pieces_is_received_in_its_place() {
    for style in [0, 1, 2] {
        let mut server = ready(style);
        let header = header(style);
        let (first, second) = header.split_at(5);
        receive(&mut server, first);
        assert!(server.next_event().is_none());
        receive(&mut server, second);
        assert!(server.next_event().is_none());
        let place = {
            let buffer = server.receive_buffer().unwrap();
            let place = buffer.as_ptr();
            server.received(buffer, 0);
            place
        };
        let whole = data(2);
        for (at, piece) in [(0, 1), (1, 8000), (8001, 190), (8191, 1)] {
            assert!(server.next_event().is_none(), "{at} bytes are not all");
            assert_eq!(room(&mut server), 8192 - at, "not one byte of the next request");
            receive(&mut server, &whole[at..at + piece]);
        }
        let received = written(&mut server).expect("all is there");
        assert_eq!((received.as_ptr(), &received[..]), (place, &whole[..]), "not one byte was moved");
    }
}

#[test]
fn data_that_begins_with_its_header_is_joined_with_what_comes_later() {
    for (style, with_header) in [(0, 1), (1, 2000), (2, 3800)] {
        let (mut server, whole) = (ready(style), data(3));
        receive(&mut server, &[&header(style)[..], &whole[..with_header]].concat());
        assert!(server.next_event().is_none());
        assert_eq!(room(&mut server), 8192 - with_header);
        receive(&mut server, &whole[with_header..]);
        assert_eq!(written(&mut server).as_deref(), Some(&whole[..]));
    }
}

#[test]
fn half_a_write_is_held_and_never_asked_for() {
    let mut server = ready(0);
    receive(&mut server, &header(0));
    assert!(server.next_event().is_none());
    let held = (1, 8192);
    assert_eq!((server.requests_in_flight(), server.bytes_in_flight()), held, "its memory is taken");
    receive(&mut server, &data(2)[..8191]);
    assert!(server.next_event().is_none());
    assert_eq!((server.requests_in_flight(), server.bytes_in_flight()), held);
    let out = server.receive_buffer().unwrap();
    server.close();
    assert!(matches!(server.next_event(), Some(Event::Closed(_))));
    assert_eq!((server.requests_in_flight(), server.bytes_in_flight()), (0, 0), "and given back");
    // The last byte, too late.
    server.received(out, 1);
    assert!(server.next_event().is_none() && server.receive_buffer().is_none());
}

#[test]
fn a_server_that_stops_refuses_the_next_write_and_not_the_one_it_began() {
    let mut server = ready(0);
    receive(&mut server, &header(0));
    assert!(server.next_event().is_none());
    server.stop();
    receive(&mut server, &data(2));
    assert_eq!(written(&mut server).as_deref(), Some(&data(2)[..]), "what was begun may end");
    receive(&mut server, &header(0));
    assert!(server.next_event().is_none());
    assert_eq!(server.bytes_in_flight(), 0, "no memory is taken for what is refused");
    for piece in data(3).chunks(4096) {
        receive(&mut server, piece);
        assert!(server.next_event().is_none());
    }
    let mut out = Vec::new();
    server.transmit(&mut out);
    let sent: Vec<u8> = out.iter().flat_map(|slice| slice.to_vec()).collect();
    assert_eq!(sent, fields![0x6744_6698u32, 108u32, 1u64]);
}

#[test]
fn a_long_write_waits_for_its_grant_before_its_data_is_received() {
    let mut server = ready(0);
    server.grant(8191);
    receive(&mut server, &header(0));
    assert!(server.next_event().is_none());
    assert_eq!((server.wanted_bytes(), server.bytes_in_flight()), (Some(8192), 0));
    assert!(server.receive_buffer().is_none(), "nothing is received meanwhile");
    server.grant(8192);
    assert!(server.next_event().is_none());
    assert_eq!((server.wanted_bytes(), server.bytes_in_flight(), room(&mut server)), (None, 8192, 8192));
}
