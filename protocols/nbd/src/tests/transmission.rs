//! Requests and their replies in each style.

use sealblock_runtime_memory::{Buffer, Slice};

use super::*;
use crate::fuzz::preamble;
use crate::wire::{command as c, flag};
use crate::{Closed, ErrorReply, Event, Violation};

const COOKIE: u64 = 0x1122_3344_5566_7788;

fn request(style: u8, flags: u16, kind: u16, offset: u64, length: u64) -> Vec<u8> {
    match style {
        2 => fields![0x21e4_1c71u32, flags, kind, COOKIE, offset, length],
        _ => fields![0x2560_9513u32, flags, kind, COOKIE, offset, length as u32],
    }
}

/// What the server says to a request, after the negotiation.
fn transcript(style: u8, bytes: &[u8]) -> Transcript {
    let negotiated = play(&mut server(8192), [&preamble(style)[..]]);
    let mut transcript = play(&mut server(8192), [&[&preamble(style)[..], bytes].concat()[..]]);
    transcript.sent.drain(..negotiated.sent.len());
    transcript.events.remove(0);
    transcript
}

fn simple(error: u32) -> Vec<u8> {
    fields![0x6744_6698u32, error, COOKIE]
}

fn chunk(style: u8, flags: u16, kind: u16, offset: u64, payload: &[u8]) -> Vec<u8> {
    let head = match style {
        2 => fields![0x6e8a_278cu32, flags, kind, COOKIE, offset, payload.len() as u64],
        _ => fields![0x668e_33efu32, flags, kind, COOKIE, payload.len() as u32],
    };
    [&head[..], payload].concat()
}

/// The errno of a request's reply, in any style; 0 when it succeeded.
fn errno(style: u8, flags: u16, kind: u16, offset: u64, length: u64) -> u32 {
    let mut bytes = request(style, flags, kind, offset, length);
    if kind == c::WRITE {
        bytes.extend(vec![7; length as usize]);
    }
    let sent = transcript(style, &bytes).sent;
    let word = |at: usize| u32::from_be_bytes(sent[at..at + 4].try_into().unwrap());
    let is_error = |at: usize| sent[at] & 0x80 != 0;
    match style {
        0 => word(4),
        1 => {
            if is_error(6) {
                word(20)
            } else {
                0
            }
        }
        _ => {
            if is_error(6) {
                word(32)
            } else {
                0
            }
        }
    }
}

#[test]
fn reads_are_answered_in_each_style() {
    let zeroes = [0; 512];
    assert_eq!(transcript(0, &request(0, 0, c::READ, 512, 512)).sent, [&simple(0)[..], &zeroes].concat());
    for style in [1, 2] {
        let payload = [&512u64.to_be_bytes()[..], &zeroes].concat();
        assert_eq!(transcript(style, &request(style, 0, c::READ, 512, 512)).sent, chunk(style, 1, 1, 512, &payload));
    }
}

#[test]
fn an_error_in_a_read_names_the_offset_after_the_data_before() {
    // The third block of four fails one block further on.
    let (offset, bad) = (1536u64, 2048u64);
    assert_eq!(
        transcript(0, &request(0, 0, c::READ, offset, 1024)).sent,
        simple(5),
        "no data goes with a simple error"
    );
    for style in [1, 2] {
        let data = [&offset.to_be_bytes()[..], &[0; 512]].concat();
        let error = [fields![5u32, 3u16], b"bad".to_vec(), fields![bad]].concat();
        let expected = [chunk(style, 0, 1, offset, &data), chunk(style, 1, 0x8002, offset, &error)].concat();
        assert_eq!(transcript(style, &request(style, 0, c::READ, offset, 1024)).sent, expected);
    }
}

#[test]
fn offsets_outside_of_the_request_are_not_reported() {
    let mut server = server(8192);
    let bytes = [preamble(1), request(1, 0, c::READ, 512, 512)].concat();
    let mut buffer = server.receive_buffer().unwrap();
    buffer[..bytes.len()].copy_from_slice(&bytes);
    server.received(buffer, bytes.len());
    assert!(matches!(server.next_event(), Some(Event::Chosen(0))));
    server.transmit(&mut Vec::new());
    server.sent();
    let Some(Event::Request(request)) = server.next_event() else { panic!("a request waits") };
    let failed = ErrorReply { code: crate::ErrorCode::Io, offset: Some(1024), message: "é".repeat(300) };
    server.fail(request.ticket, Vec::new(), &failed);
    let mut out = Vec::new();
    server.transmit(&mut out);
    let error = [fields![5u32, 512u16], "é".repeat(256).into_bytes()].concat();
    let sent: Vec<u8> = out.iter().flat_map(|slice| slice.to_vec()).collect();
    assert_eq!(sent, chunk(1, 1, 0x8001, 512, &error));
}

#[test]
fn other_requests_succeed_without_data() {
    for style in [0, 1, 2] {
        let done = if style == 0 { simple(0) } else { chunk(style, 1, 0, 0, &[]) };
        let write_flags = if style == 2 { flag::PAYLOAD_LEN } else { 0 };
        let write = [request(style, write_flags | flag::FUA, c::WRITE, 0, 512), vec![1; 512]].concat();
        let wrote = transcript(style, &write);
        assert_eq!(wrote.sent, done);
        assert!(wrote.events[0].starts_with("write 0 512 true"), "{:?}", wrote.events);
        assert_eq!(transcript(style, &request(style, 0, c::FLUSH, 0, 0)).sent, done);
        assert_eq!(transcript(style, &request(style, flag::FUA, c::TRIM, 0, 1 << 20)).sent, done);
        let zero = transcript(style, &request(style, flag::NO_HOLE | flag::FAST_ZERO, c::WRITE_ZEROES, 0, 1 << 31));
        assert_eq!(zero.sent, done, "longer than a payload");
        let says = "WriteZeroes { offset: 0, length: 2147483648, fua: false, no_hole: true, fast: true }";
        assert_eq!(zero.events, [says]);
    }
    assert_eq!(errno(2, 0, c::TRIM, 0, 1 << 40), 0, "extended lengths have 64 bits");
}

#[test]
fn block_status_is_told_in_32_or_64_bits() {
    let two = fields![1u32, 1024u32, 0u32, 512u32, 3u32];
    assert_eq!(transcript(1, &request(1, 0, c::BLOCK_STATUS, 512, 1024)).sent, chunk(1, 1, 5, 512, &two));
    let one = fields![1u32, 1024u32, 0u32];
    let request_one = request(1, flag::REQ_ONE, c::BLOCK_STATUS, 512, 1024);
    assert_eq!(transcript(1, &request_one).sent, chunk(1, 1, 5, 512, &one));
    let wide = fields![1u32, 2u32, 1u64 << 33, 0u64, 512u64, 3u64];
    assert_eq!(transcript(2, &request(2, 0, c::BLOCK_STATUS, 0, 1 << 33)).sent, chunk(2, 1, 6, 0, &wide));
    assert_eq!(errno(0, 0, c::BLOCK_STATUS, 0, 512), 22, "it was not negotiated");
}

#[test]
fn bad_requests_get_the_error_that_the_protocol_names() {
    const SIZE: u64 = 1 << 40;
    for style in [0, 1, 2] {
        let payload = if style == 2 { flag::PAYLOAD_LEN } else { 0 };
        let refused = [
            (22, 0, 9, 0, 512),
            (22, 0, 8, 0, 512),
            (22, 1 << 6, c::READ, 0, 512),
            (22, flag::NO_HOLE, c::READ, 0, 512),
            (22, flag::REQ_ONE, c::TRIM, 0, 512),
            (22, 0, c::READ, SIZE + 512, 0),
            (22, 0, c::FLUSH, 512, 0),
            (22, 0, c::READ, 1, 512),
            (22, 0, c::READ, 0, 511),
            (22, payload, c::WRITE, 256, 512),
            (22, 0, c::WRITE_ZEROES, 0, 100),
            (22, 0, c::READ, SIZE, 512),
            (22, 0, c::TRIM, u64::MAX - 511, 512),
            (28, payload, c::WRITE, SIZE - 512, 1024),
            (28, 0, c::WRITE_ZEROES, SIZE, 512),
            (75, 0, c::READ, 0, 8704),
            (75, 0, c::CACHE, 0, 8704),
        ];
        for (expected, flags, kind, offset, length) in refused {
            assert_eq!(errno(style, flags, kind, offset, length), expected, "{style} {kind} {offset} {length}");
        }
        assert_eq!(errno(style, payload, c::WRITE, SIZE - 512, 512), 0, "the last block");
        assert_eq!(errno(style, flag::FUA, c::READ, 0, 8192), 0, "FUA goes with anything");
    }
    assert_eq!(errno(0, flag::DF, c::READ, 0, 512), 22, "there are no chunks to be kept whole");
    assert_eq!(errno(1, flag::DF, c::READ, 0, 512), 0);
    assert_eq!(errno(1, flag::PAYLOAD_LEN, c::READ, 0, 512), 22);
}

#[test]
fn requests_about_no_byte_succeed_and_nobody_has_to_execute_them() {
    for style in [0, 1, 2] {
        let done = if style == 0 { simple(0) } else { chunk(style, 1, 0, 1024, &[]) };
        for kind in [c::READ, c::WRITE, c::TRIM, c::CACHE, c::WRITE_ZEROES] {
            for offset in [1024, 1 << 40] {
                let told = transcript(style, &request(style, flag::FUA, kind, offset, 0));
                assert_eq!((told.events.len(), told.closed), (0, None), "{style} {kind}");
                if offset == 1024 {
                    assert_eq!(told.sent, done, "{style} {kind}");
                }
            }
        }
        assert_eq!(errno(style, 0, c::BLOCK_STATUS, 0, 0), 22, "a status has one run at least");
        // Requests in flight are none of them.
        let many = request(style, 0, c::READ, 0, 0).repeat(100);
        assert_eq!(transcript(style, &many).closed, None);
    }
    let open = [&[0, 0, 0, 3][..], &option(wire::option::EXPORT_NAME, b"fixed")].concat();
    let sent = say(&[&open[..], &request(0, 0, c::WRITE, 0, 0)].concat()).sent.split_off(10);
    assert_eq!(sent[..16], simple(1), "nor is one that may not be a way around it");
}

#[test]
fn payloads_that_nobody_wants_are_skipped() {
    // A payload that a command has no use for, then a good request behind it.
    let odd = [request(2, flag::PAYLOAD_LEN, c::READ, 0, 512), vec![9; 512], request(2, 0, c::FLUSH, 0, 0)].concat();
    let told = transcript(2, &odd);
    assert_eq!((told.events, told.closed), (vec!["Flush".to_owned()], None));
}

#[test]
fn a_write_brings_its_data_whether_it_says_so_or_not() {
    for flags in [0, flag::PAYLOAD_LEN] {
        assert_eq!(errno(2, flags, c::WRITE, 0, 512), 0, "flags {flags:#x}");
        let bytes = [request(2, flags, c::WRITE, 0, 512), vec![7; 512], request(2, 0, c::FLUSH, 0, 0)].concat();
        let told = transcript(2, &bytes);
        assert_eq!((told.events.len(), told.closed), (2, None), "{:?}", told.events);
    }
}

#[test]
fn what_cannot_be_mended_ends_the_connection() {
    let too_long = Some(Violation::PayloadTooLong { bytes: 8704, max: 8192 }.into());
    assert_eq!(transcript(0, &request(0, 0, c::WRITE, 0, 8704)).closed, too_long);
    assert_eq!(transcript(2, &request(2, flag::PAYLOAD_LEN, c::READ, 0, 8704)).closed, too_long);
    assert_eq!(
        transcript(0, &request(2, 0, c::READ, 0, 512)).closed,
        Some(Violation::RequestMagic(0x21e4_1c71).into())
    );
    assert_eq!(transcript(2, &request(0, 0, c::READ, 0, 512)[..28]).closed, None, "an extended header is longer");
    assert_eq!(transcript(1, &request(1, 0, c::DISC, 0, 0)).closed, Some(Closed::Disconnected));
}

#[test]
fn a_read_only_export_takes_no_writes() {
    let open = [&[0, 0, 0, 3][..], &option(wire::option::EXPORT_NAME, b"fixed")].concat();
    for (kind, error) in [(c::WRITE, 1), (c::TRIM, 1), (c::WRITE_ZEROES, 1), (c::READ, 0)] {
        let mut bytes = [&open[..], &request(0, 0, kind, 0, 512)].concat();
        if kind == c::WRITE {
            bytes.extend([1; 512]);
        }
        let sent = say(&bytes).sent.split_off(10);
        assert_eq!(sent[..16], simple(error));
    }
}

#[test]
fn a_server_that_stops_refuses_requests() {
    let mut server = server(8192);
    let before = play(&mut server, [&preamble(0)[..]]);
    assert_eq!(before.closed, None);
    server.stop();
    let after = play(&mut server, [&request(0, 0, c::READ, 0, 512)[..]]);
    assert_eq!((after.sent, after.events.len()), (simple(108), 0));
}

#[test]
fn requests_beyond_what_was_granted_wait_until_more_is() {
    let mut server = server(8192);
    let read = request(1, 0, c::READ, 512, 512);
    let bytes = [&preamble(1)[..], &read, &read, &read].concat();
    let mut buffer = server.receive_buffer().unwrap();
    buffer[..bytes.len()].copy_from_slice(&bytes);
    server.received(buffer, bytes.len());
    server.grant(512);
    assert!(matches!(server.next_event(), Some(Event::Chosen(0))));
    server.transmit(&mut Vec::new());
    server.sent();
    let Some(Event::Request(first)) = server.next_event() else { panic!("the first is granted") };
    assert!(server.next_event().is_none());
    assert_eq!((server.wanted_bytes(), server.is_full()), (Some(1024), true));
    assert!(server.receive_buffer().is_none(), "nothing is read meanwhile");
    server.grant(1024);
    let Some(Event::Request(second)) = server.next_event() else { panic!("the second is granted") };
    server.data(first.ticket, [Slice::from(Buffer::zeroed(512))]);
    server.data(second.ticket, [Slice::from(Buffer::zeroed(512))]);
    server.transmit(&mut Vec::new());
    assert!(server.next_event().is_none(), "answers that are being sent count");
    assert_eq!((server.wanted_bytes(), server.bytes_in_flight()), (Some(1536), 1024));
    server.sent();
    assert!(matches!(server.next_event(), Some(Event::Request(_))));
    assert_eq!((server.wanted_bytes(), server.bytes_in_flight()), (None, 512));
}
