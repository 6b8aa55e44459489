//! What an export may ask of a target, and what it is refused.

use sealblock_protocols_nvme::{Completion, DataPointer, Status, StatusCode};
use sealblock_runtime_memory::{Buffer, Slice};
use zerocopy::{FromBytes, IntoBytes};

use super::{TO_CONTROLLER, Victim, command, pool};
use crate::pdu::{CapsuleCmd, TransferPdu};
use crate::target::{CallError, Event, Token};
use crate::{TargetConfig, TransmitLimit};

fn victim() -> Victim {
    let mut config = TargetConfig::new(pool());
    config.max_bytes_in_flight = 8192;
    config.max_c2h_data_bytes = 4096;
    Victim::connected(config, 0)
}

fn arrive(victim: &mut Victim, opcode: u8, cid: u16, length_bytes: u32) -> Token {
    let pointer = DataPointer::Transport { length_bytes };
    victim.feed(CapsuleCmd::new(&TO_CONTROLLER, command(opcode, cid, pointer), 0).as_bytes());
    match std::iter::from_fn(|| victim.0.next_event()).last() {
        Some(Event::Command { token, .. }) => token,
        other => panic!("{other:?}"),
    }
}

fn success() -> Completion {
    Completion::new(0, Status::SUCCESS, 0)
}

#[test]
fn data_is_accepted_once_whole_and_within_the_limit() {
    let mut victim = victim();
    let token = arrive(&mut victim, 1, 1, 8192);
    let refusal = |victim: &mut Victim, token, len| {
        victim.0.fetch_data(token, Buffer::zeroed(len), None).err().map(|(error, buffer)| (error, buffer.len()))
    };
    let wrong_length = |len_bytes| Some((CallError::Length { len_bytes, room_bytes: 8192 }, len_bytes));
    assert_eq!(refusal(&mut victim, token, 4096), wrong_length(4096));
    assert_eq!(refusal(&mut victim, token, 8196), wrong_length(8196));
    assert_eq!(refusal(&mut victim, token, 8192), None);
    assert_eq!(refusal(&mut victim, token, 8192), Some((CallError::WrongState, 8192)));
    let second = arrive(&mut victim, 1, 2, 4);
    assert_eq!(refusal(&mut victim, second, 4), Some((CallError::OverLimit, 4)));
    // Answered before its R2T has left, the first command gives its room back at once.
    victim.0.respond(token, success()).unwrap();
    assert!(victim.0.has_output());
    victim.drain();
    assert_eq!(victim.0.bytes_in_flight(), 0);
    assert_eq!(refusal(&mut victim, second, 4), None);
    assert_eq!(refusal(&mut victim, token, 8192), Some((CallError::UnknownToken, 8192)));
    let odd = arrive(&mut victim, 1, 3, 6);
    assert_eq!(refusal(&mut victim, odd, 6), Some((CallError::Length { len_bytes: 6, room_bytes: 6 }, 6)));
}

/// Flags, offset and length of each C2HData, and whether a response follows.
fn sent(victim: &mut Victim) -> (Vec<(u8, u32, u32)>, bool) {
    let bytes: Vec<u8> = victim.drain().iter().flat_map(|slice| slice.to_vec()).collect();
    let (mut rest, mut data) = (&bytes[..], Vec::new());
    while rest.first() == Some(&7) {
        let (header, _) = TransferPdu::read_from_prefix(rest).unwrap();
        data.push((header.common.flags, header.offset.get(), header.length.get()));
        rest = &rest[header.common.plen.get() as usize..];
    }
    (data, rest.first() == Some(&5))
}

#[test]
fn data_may_be_sent_in_parts_and_not_beyond_the_hosts_buffer() {
    let mut victim = victim();
    let token = arrive(&mut victim, 2, 1, 12288);
    let data = |len| Slice::from(Buffer::zeroed(len));
    assert_eq!(victim.0.send_data(token, data(6144), None), Ok(()));
    assert_eq!(sent(&mut victim), (vec![(0, 0, 4096), (0, 4096, 2048)], false));
    let error = |len_bytes, room_bytes| Err(CallError::Length { len_bytes, room_bytes });
    assert_eq!(victim.0.send_data(token, data(6148), None), error(6148, 6144));
    assert_eq!(victim.0.send_data(token, data(2), None), error(2, 6144));
    assert_eq!(victim.0.send_data(token, data(6144), Some(success())), Ok(()));
    assert_eq!(victim.0.send_data(token, data(4), None), Err(CallError::WrongState));
    assert_eq!(sent(&mut victim), (vec![(0, 6144, 4096), (4, 10240, 2048)], true));
    assert_eq!(victim.0.send_data(token, data(4), None), Err(CallError::UnknownToken));
}

#[test]
fn success_stands_for_a_response_only_where_nothing_is_lost() {
    let failure = Completion::new(0, StatusCode::LBA_OUT_OF_RANGE.status(), 0);
    for (flag, completion, flags, response) in [
        (true, success(), 0xC, false),
        (false, success(), 0x4, true),
        (true, failure, 0x4, true),
        (true, Completion::new(0, Status::SUCCESS, 1), 0x4, true),
    ] {
        let mut victim = victim();
        victim.0.set_success_flag(flag);
        let token = arrive(&mut victim, 2, 1, 4096);
        victim.0.send_data(token, Slice::from(Buffer::zeroed(4096)), Some(completion)).unwrap();
        assert_eq!(sent(&mut victim), (vec![(flags, 0, 4096)], response));
        assert_eq!(victim.0.commands_in_flight(), 0);
    }
}

#[test]
fn a_call_of_transmit_ends_with_the_pdu_that_reaches_its_bound() {
    let mut victim = victim();
    for cid in 0..100 {
        let token = arrive(&mut victim, 0, cid, 4096);
        victim.0.respond(token, success()).unwrap();
    }
    let mut out = Vec::new();
    assert_eq!(victim.0.transmit(&mut out, TransmitLimit { bytes: 100, slices: 64 }), 5 * 24);
    assert_eq!(out.len(), 1, "headers in a row are one slice");
    assert_eq!(victim.0.commands_in_flight(), 95);
}

#[test]
fn data_of_two_commands_alternates() {
    let mut victim = victim();
    for cid in [1, 2] {
        let token = arrive(&mut victim, 2, cid, 8192);
        victim.0.send_data(token, Slice::from(Buffer::zeroed(8192)), Some(success())).unwrap();
    }
    let bytes: Vec<u8> = victim.drain().iter().flat_map(|slice| slice.to_vec()).collect();
    let cids: Vec<u8> = bytes.chunks(24 + 4096).take(4).map(|pdu| pdu[8]).collect();
    assert_eq!(cids, [1, 2, 1, 2]);
}

#[test]
fn a_closed_connection_knows_no_command() {
    let mut victim = victim();
    let token = arrive(&mut victim, 1, 1, 4096);
    victim.0.close();
    assert_eq!(victim.0.respond(token, success()), Err(CallError::UnknownToken));
    assert!(matches!(victim.0.next_event(), Some(Event::Closed(crate::Closed::Local))));
    assert!(!victim.0.has_output() && victim.0.receive_buffer().is_none());
}
