//! Replies to what [`crate::fuzz::client`] asks, written out: at places 0 to 7 a read of 4096 bytes at 4096, one of 512 at
//! 0 in one chunk, a write, a flush, a trim, zeroes, and two block statuses of 4096 bytes at 4096, the second for one run.

use super::*;
use crate::client::{Client, ClientRequest, Event};
use crate::client::{Closed, Goal, SubmitError, Violation};
use crate::fuzz::client::{Transcript, client, play, preamble};
use crate::wire::chunk as c;

fn cookie(place: u64) -> u64 {
    (place + 1) << 32 | place
}

fn simple(place: u64, error: u32) -> Vec<u8> {
    fields![0x6744_6698u32, error, cookie(place)]
}

/// A structured chunk.
fn chunk(place: u64, flags: u16, kind: u16, payload: Vec<u8>) -> Vec<u8> {
    [fields![0x668e_33efu32, flags, kind, cookie(place), payload.len() as u32], payload].concat()
}

fn extended(place: u64, offset: u64, flags: u16, kind: u16, payload: Vec<u8>) -> Vec<u8> {
    [fields![0x6e8a_278cu32, flags, kind, cookie(place), offset, payload.len() as u64], payload].concat()
}

fn data(place: u64, flags: u16, offset: u64, len: usize) -> Vec<u8> {
    chunk(place, flags, c::OFFSET_DATA, [fields![offset], vec![0xab; len]].concat())
}

fn error(place: u64, flags: u16, number: u32, text: &str, offset: Option<u64>) -> Vec<u8> {
    let mut payload = [fields![number, text.len() as u16], text.into()].concat();
    payload.extend(offset.into_iter().flat_map(u64::to_be_bytes));
    chunk(place, flags, if offset.is_some() { c::ERROR_OFFSET } else { c::ERROR }, payload)
}

fn receive_all(style: u8, replies: &[Vec<u8>]) -> Transcript {
    let bytes = [preamble(style), replies.concat()].concat();
    let mut transcript = play(&mut client(Goal::Go("disk".into()), 1000), [&bytes[..]]);
    transcript.events.remove(0);
    transcript
}

/// The client's events after these structured chunks, as text.
fn answers(replies: &[Vec<u8>]) -> Vec<String> {
    let transcript = receive_all(1, replies);
    assert_eq!(transcript.closed, None);
    transcript.events
}

fn breaks(style: u8, replies: &[Vec<u8>]) -> Violation {
    match receive_all(style, replies).closed {
        Some(Closed::Violation(violation)) => violation,
        other => panic!("{other:?}"),
    }
}

#[test]
fn simple_replies_end_requests_in_any_order() {
    let read = [simple(0, 0), vec![7; 4096]].concat();
    let transcript = receive_all(0, &[simple(3, 0), read, simple(2, 28), simple(1, 5)]);
    assert_eq!(transcript.closed, None);
    assert_eq!(transcript.events[0], "Completed(CompletedRequest { place: 3, outcome: Ok(Done) })");
    assert!(transcript.events[1].starts_with("Completed(CompletedRequest { place: 0, outcome: Ok(Data("));
    assert!(transcript.events[2].contains("place: 2") && transcript.events[2].contains("code: NoSpace"));
    assert!(transcript.events[3].contains("place: 1") && transcript.events[3].contains("code: Io, offset: None"));
}

#[test]
fn a_read_comes_in_chunks_in_any_order_with_holes() {
    let hole = |flags, offset: u64, len: u32| chunk(0, flags, c::OFFSET_HOLE, fields![offset, len]);
    let told = answers(&[data(0, 0, 6144, 2048), hole(0, 4096, 1024), data(0, c::DONE, 5120, 1024)]);
    assert!(told[0].starts_with("Completed(CompletedRequest { place: 0, outcome: Ok(Data("), "{told:?}");
    let told = answers(&[data(0, 0, 4096, 4096), chunk(0, c::DONE, c::NONE, vec![])]);
    assert!(told[0].contains("Ok(Data("));
    assert_eq!(breaks(1, &[data(0, 0, 4096, 4000), chunk(0, c::DONE, c::NONE, vec![])]), Violation::Incomplete);
    assert_eq!(breaks(1, &[hole(c::DONE, 4096, 4095)]), Violation::Incomplete);
    assert_eq!(breaks(1, &[hole(0, 4096, 0)]), Violation::OutOfRange { offset: 4096, length: 0 });
}

#[test]
fn data_is_within_its_request_once_and_in_as_few_chunks_as_asked() {
    assert_eq!(breaks(1, &[data(0, 0, 4095, 1)]), Violation::OutOfRange { offset: 4095, length: 1 });
    assert_eq!(breaks(1, &[data(0, 0, 8191, 2)]), Violation::OutOfRange { offset: 8191, length: 2 });
    let twice = Violation::Overlap { offset: 5119, length: 2 };
    assert_eq!(breaks(1, &[data(0, 0, 4096, 1024), data(0, 0, 5119, 2)]), twice);
    let tail = data(0, 0, 4096, 4097);
    assert_eq!(breaks(1, &[tail]), Violation::ChunkLength { kind: c::OFFSET_DATA, length: 4105 });
    let none = chunk(0, 0, c::OFFSET_DATA, fields![4096u64]);
    assert_eq!(breaks(1, &[none]), Violation::ChunkLength { kind: c::OFFSET_DATA, length: 8 });
    assert!(answers(&[data(1, c::DONE, 0, 512)])[0].contains("place: 1, outcome: Ok(Data("));
    assert_eq!(breaks(1, &[data(1, 0, 0, 256), data(1, c::DONE, 256, 256)]), Violation::Fragmented);
    let spread = [0, 2, 4, 6, 8].map(|at| data(0, 0, 4096 + at * 10, 10));
    assert_eq!(breaks(1, &spread), Violation::Pieces(4));
}

#[test]
fn errors_tell_where_and_all_of_them() {
    let bad = |flags, at| error(0, flags, 5, "bad block", Some(at));
    let told = answers(&[data(0, 0, 4096, 512), bad(0, 4608), bad(c::DONE, 6000)]);
    let server_error = |at| format!("ServerError {{ code: Io, offset: Some({at}), message: \"bad block\" }}");
    assert_eq!(
        told,
        [format!(
            "Completed(CompletedRequest {{ place: 0, outcome: Err([{}, {}]) }})",
            server_error(4608),
            server_error(6000)
        )]
    );
    assert!(answers(&[error(2, c::DONE, 1, "", None)])[0].contains("code: NotPermitted, offset: None"));
    assert!(answers(&[error(2, c::DONE, 4711, "", None)])[0].contains("code: Invalid"), "unknown numbers are EINVAL");
    // An error of a type that is not known is an error, whatever is behind its text.
    let unknown = chunk(2, c::DONE, 1 << 15 | 77, [fields![5u32, 1u16], b"x??".to_vec()].concat());
    assert!(answers(&[unknown])[0].contains("code: Io"));
    for at in [4095, 8192] {
        assert_eq!(breaks(1, &[bad(c::DONE, at)]), Violation::OutOfRange { offset: at, length: 1 });
    }
    assert_eq!(breaks(1, &[error(2, c::DONE, 0, "", None)]), Violation::NoError);
}

#[test]
fn errors_of_wrong_lengths_end_it() {
    let wrong = |kind, payload: Vec<u8>| {
        let length = payload.len() as u64;
        assert_eq!(breaks(1, &[chunk(0, c::DONE, kind, payload)]), Violation::ChunkLength { kind, length });
    };
    wrong(c::ERROR, fields![5u32]);
    wrong(c::ERROR, fields![5u32, 2u16, b'x']);
    wrong(c::ERROR, fields![5u32, 0u16, b'x']);
    wrong(c::ERROR_OFFSET, fields![5u32, 0u16, 7u32]);
    wrong(c::ERROR_OFFSET, fields![5u32, 0u16, 4096u64, 0u8]);
    wrong(c::ERROR, vec![0; 5000]);
    wrong(c::ERROR, [fields![5u32, 4097u16], vec![b'x'; 4097]].concat());
}

#[test]
fn types_that_do_not_belong_to_a_request_end_it() {
    let wrong = |place, flags, kind, payload: Vec<u8>, command| {
        let violation = breaks(1, &[chunk(place, flags, kind, payload)]);
        assert_eq!(violation, Violation::Chunk { kind, command });
    };
    wrong(2, c::DONE, c::OFFSET_DATA, vec![0; 9], 1);
    wrong(3, c::DONE, c::OFFSET_HOLE, vec![0; 12], 3);
    wrong(0, c::DONE, c::BLOCK_STATUS, vec![0; 12], 0);
    wrong(6, c::DONE, c::BLOCK_STATUS_EXT, vec![0; 24], 7);
    wrong(0, c::DONE, 99, vec![], 0);
    wrong(2, 0, c::NONE, vec![], 1);
    let long = chunk(2, c::DONE, c::NONE, vec![0]);
    assert_eq!(breaks(1, &[long]), Violation::ChunkLength { kind: c::NONE, length: 1 });
}

#[test]
fn replies_to_nothing_and_of_another_style_end_it() {
    assert_eq!(breaks(0, &[simple(8, 0)]), Violation::Cookie(cookie(8)));
    assert_eq!(breaks(0, &[simple(2, 0), simple(2, 0)]), Violation::Cookie(cookie(2)), "answered before");
    assert_eq!(breaks(0, &[fields![0x6744_6698u32, 0u32, 9u64 << 32]]), Violation::Cookie(9 << 32));
    assert_eq!(breaks(0, &[chunk(2, c::DONE, c::NONE, vec![])]), Violation::ReplyMagic(0x668e_33ef));
    assert_eq!(breaks(2, &[simple(2, 0)]), Violation::ReplyMagic(0x6744_6698));
    assert_eq!(breaks(2, &[chunk(2, c::DONE, c::NONE, vec![])]), Violation::ReplyMagic(0x668e_33ef));
    assert_eq!(breaks(1, &[simple(0, 0)]), Violation::SimpleReply(0));
    assert_eq!(breaks(1, &[simple(6, 5)]), Violation::SimpleReply(7));
    assert!(answers(&[simple(2, 0)])[0].contains("place: 2, outcome: Ok(Done)"), "allowed for all else");
    assert!(receive_all(2, &[extended(2, 4096, c::DONE, c::NONE, vec![])]).events[0].contains("Ok(Done)"));
    let elsewhere = Violation::ReplyOffset { expected: 4096, actual: 0 };
    assert_eq!(breaks(2, &[extended(2, 0, c::DONE, c::NONE, vec![])]), elsewhere);
}

#[test]
fn status_comes_in_runs_that_fit() {
    let status = |place, runs: &[(u32, u32)]| {
        let runs: Vec<u8> = runs.iter().flat_map(|(length, flags)| fields![*length, *flags]).collect();
        chunk(place, c::DONE, c::BLOCK_STATUS, [fields![7u32], runs].concat())
    };
    let told = |place, runs: &[(u32, u32)]| answers(&[status(place, runs)]).remove(0);
    assert!(told(6, &[(512, 3)]).contains("Status([StatusDescriptor { length: 512, status: 3 }])"));
    assert!(
        told(6, &[(512, 3), (9000, 0)]).contains("StatusDescriptor { length: 3584, status: 0 }"),
        "cut at the request's end"
    );
    assert!(told(7, &[(4096, 2)]).contains("StatusDescriptor { length: 4096, status: 2 }"));
    for (place, runs) in [(6, &[(0, 3)][..]), (6, &[(4096, 3), (1, 0)]), (7, &[(4097, 0)]), (7, &[(512, 0), (512, 3)])]
    {
        assert_eq!(breaks(1, &[status(place, runs)]), Violation::Runs, "{runs:?}");
    }
    let other = chunk(6, c::DONE, c::BLOCK_STATUS, fields![8u32, 512u32, 0u32]);
    assert_eq!(breaks(1, &[other]), Violation::Context(8));
    let twice = [chunk(6, 0, c::BLOCK_STATUS, fields![7u32, 512u32, 0u32]), status(6, &[(512, 0)])];
    assert_eq!(breaks(1, &twice), Violation::Runs);
    assert_eq!(breaks(1, &[chunk(6, c::DONE, c::NONE, vec![])]), Violation::Incomplete);
    let many = breaks(1, &[status(6, &[(1, 0); 9])]);
    assert_eq!(many, Violation::ChunkLength { kind: c::BLOCK_STATUS, length: 76 });
    let wide = |count: u32| {
        let payload = [fields![7u32, count], fields![1024u64, 1u64], fields![1u64 << 40, 0u64]].concat();
        extended(6, 4096, c::DONE, c::BLOCK_STATUS_EXT, payload)
    };
    assert!(
        receive_all(2, &[wide(2)]).events[0]
            .contains("length: 1024, status: 1 }, StatusDescriptor { length: 3072, status: 0 }")
    );
    let miscounted = Violation::ChunkLength { kind: c::BLOCK_STATUS_EXT, length: 40 };
    assert_eq!(breaks(2, &[wide(3)]), miscounted);
}

#[test]
fn what_a_server_does_not_take_is_not_sent() {
    let mut client: Client = client(Goal::Go("disk".into()), 1000);
    let (offset, length) = (0, 512);
    assert_eq!(client.submit(ClientRequest::Flush), Err(SubmitError::NotReady));
    let bytes = preamble(0);
    let mut buffer = client.receive_buffer().unwrap();
    buffer[..bytes.len()].copy_from_slice(&bytes);
    client.received(buffer, bytes.len());
    assert!(matches!(client.next_event(), Some(Event::Ready(_))));
    let mut refused = |ask| client.submit(ask).unwrap_err();
    assert_eq!(
        refused(ClientRequest::BlockStatus { offset, length, one: false }),
        SubmitError::NotOffered("base:allocation")
    );
    assert_eq!(
        refused(ClientRequest::Read { offset, length: 512, whole: true }),
        SubmitError::NotOffered("reads in one chunk")
    );
    let size = 1 << 30;
    let past = SubmitError::Range { offset: size - 1, length: 512, size };
    assert_eq!(refused(ClientRequest::Read { offset: size - 1, length: 512, whole: false }), past);
    assert_eq!(
        refused(ClientRequest::Trim { offset, length: 0, fua: false }),
        SubmitError::Range { offset, length: 0, size }
    );
    let long = SubmitError::TooLong { length: 8193, max: 8192 };
    assert_eq!(refused(ClientRequest::Read { offset, length: 8193, whole: false }), long);
    for _ in 0..8 {
        assert!(client.submit(ClientRequest::Flush).is_ok());
    }
    assert_eq!(client.submit(ClientRequest::Flush), Err(SubmitError::Full));
    client.disconnect();
    assert_eq!((client.submit(ClientRequest::Flush), client.in_flight()), (Err(SubmitError::NotReady), 0));
}
